"""kproxy logs in at a real broker: its clients need no login, and discovery needs no declared ids."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.broker.cluster import wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.secured import SecuredBroker
from tests.broker.security import MECHANISMS, OAUTHBEARER, USERS
from tests.broker.test_clients import consume, sample


def login(secured: SecuredBroker, mechanism: str, folder: Path, user: str = "kproxy") -> str:
    """The settings of a login, its secrets in files of their own."""
    if mechanism == OAUTHBEARER:
        token = folder / "token"
        token.write_text(secured.security.tokens.token(user) + "\n")
        return f'mechanism = "{mechanism}"\ntoken_file = "{token}"\n'
    password = folder / "password"
    password.write_text(USERS[user] + "\n")
    return f'mechanism = "{mechanism}"\nusername = "{user}"\npassword_file = "{password}"\n'


@contextmanager
def kproxy_with(secured: SecuredBroker, folder: Path, settings: str, listener: str = "SASL") -> Iterator[Kproxy]:
    file = folder / "kproxy.toml"
    file.write_text(f"[[cluster]]\n{settings}")
    with Kproxy(secured.address_of(listener), folder, "--config", str(file)) as kproxy:
        yield kproxy


def produced(bootstrap: str, topic: str, count: int, **settings: object) -> list[tuple[bytes, bytes]]:
    records = sample(count, topic)
    faults: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap} | settings)
    for key, value in records:
        producer.produce(topic, value, key, on_delivery=lambda fault, _: fault and faults.append(fault))
    assert producer.flush(30) == 0 and not faults
    return records


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_clients_without_a_login_are_served_where_the_broker_wants_one(
    secured: SecuredBroker, tmp_path: Path, mechanism: str
) -> None:
    topic = f"topic-{uuid.uuid4()}"
    with kproxy_with(secured, tmp_path, f"[cluster.login]\n{login(secured, mechanism, tmp_path)}") as kproxy:
        records = produced(kproxy.bootstrap, topic, 50)
        assert sorted(consume(kproxy.bootstrap, topic, len(records))) == sorted(records)
        assert kproxy.metric("kproxy_authentications_total", side="broker", mechanism=mechanism, outcome="success") > 2
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
    wait_for("the request log", lambda: "User:kproxy" in secured.principals("SASL"), 10)
