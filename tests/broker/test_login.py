"""kproxy logs in at a real broker: its clients need no login, and discovery needs no declared ids."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer

from tests.broker.cluster import wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.secured import SecuredBroker
from tests.broker.security import MECHANISMS, OAUTHBEARER, USERS, Tokens
from tests.broker.test_clients import consume, sample


def login(secured: SecuredBroker, mechanism: str, folder: Path, user: str = "kproxy") -> str:
    """The settings of a login, with its secrets in files of their own."""
    if mechanism == OAUTHBEARER:
        token = folder / "token"
        token.write_text(secured.security.tokens.token(user) + "\n")
        return f'mechanism = "{mechanism}"\ntoken_file = "{token}"\n'
    password = folder / "password"
    password.write_text(USERS[user] + "\n")
    return f'mechanism = "{mechanism}"\nusername = "{user}"\npassword_file = "{password}"\n'


@contextmanager
def kproxy_with(
    secured: SecuredBroker, folder: Path, settings: str, listener: str = "SASL", more: Sequence[str] = ()
) -> Iterator[Kproxy]:
    file = folder / "kproxy.toml"
    file.write_text(f"[[cluster]]\n{settings}")
    with Kproxy(secured.address_of(listener), folder, "--config", str(file), *more) as kproxy:
        yield kproxy


def produced(bootstrap: str, topic: str, count: int, **settings: object) -> list[tuple[bytes, bytes]]:
    records = sample(count, topic)
    faults: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap} | settings)
    for key, value in records:
        producer.produce(topic, value, key, on_delivery=lambda fault, _: fault and faults.append(fault))
    assert producer.flush(30) == 0 and not faults
    return records


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_clients_without_a_login_are_served_by_a_broker_that_requires_one(
    secured: SecuredBroker, tmp_path: Path, mechanism: str
) -> None:
    topic = f"topic-{uuid.uuid4()}"
    with kproxy_with(secured, tmp_path, f"[cluster.login]\n{login(secured, mechanism, tmp_path)}") as kproxy:
        records = produced(kproxy.bootstrap, topic, 50)
        assert sorted(consume(kproxy.bootstrap, topic, len(records))) == sorted(records)
        assert kproxy.metric("kproxy_authentications_total", side="broker", mechanism=mechanism, outcome="success") > 2
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
    wait_for("the request log", lambda: "User:kproxy" in secured.principals("SASL"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mechanism", "workers"), [("PLAIN", 1), ("SCRAM-SHA-512", 2), (OAUTHBEARER, 1)])
def test_renewed_logins_lose_no_records(secured: SecuredBroker, tmp_path: Path, mechanism: str, workers: int) -> None:
    """KIP-368: this listener's sessions expire after two seconds, and a broker closes those that are not renewed in
    time."""
    topic = f"topic-{uuid.uuid4()}"
    settings = f"[cluster.login]\n{login(secured, mechanism, tmp_path)}"
    with kproxy_with(secured, tmp_path, settings, more=("--workers", str(workers))) as kproxy:
        sent: list[tuple[bytes, bytes]] = []
        faults: list[object] = []
        producer = Producer({"bootstrap.servers": kproxy.bootstrap, "linger.ms": 1, "enable.idempotence": True})
        producer.produce(topic, b"first", b"first")
        assert producer.flush(30) == 0
        sent.append((b"first", b"first"))
        consumer = Consumer({"bootstrap.servers": kproxy.bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
        consumer.subscribe([topic])
        received: list[tuple[bytes | None, bytes | None]] = []

        def poll() -> None:
            for message in consumer.consume(1000, timeout=0.02):
                assert message.error() is None, message.error()
                received.append((message.key(), message.value()))

        wait_for("the group", lambda: poll() or bool(received))
        value = b"x" * 20_000  # large enough for requests to arrive in parts

        def renewed() -> bool:
            for _ in range(20):
                key = str(len(sent)).encode()
                producer.produce(topic, value, key, on_delivery=lambda fault, _: fault and faults.append(fault))
                sent.append((key, value))
            producer.poll(0)
            poll()
            assert not faults
            return kproxy.metric("kproxy_authentications_total", mechanism=mechanism, outcome="renewed") >= 3 * 2

        wait_for("renewed logins while it produces", renewed, 120, pause_s=0)
        assert producer.flush(30) == 0 and not faults
        wait_for("the last records", lambda: poll() or len(received) >= len(sent), 60)
        consumer.close()
        assert sorted(received) == sorted(sent)
        assert kproxy.metric("kproxy_disconnects_total", cause="broker_closed") == 0
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        assert "Traceback" not in kproxy.log.read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("listener", "mechanism", "password", "cause", "log_line"),
    [
        ("SASL", "PLAIN", "guessed", "login_failed", "Invalid username or password"),
        ("SASL", "SCRAM-SHA-512", "guessed", "login_failed", "invalid credentials with SASL mechanism SCRAM-SHA-512"),
        ("SASL", OAUTHBEARER, "", "login_failed", "refuses kproxy's login by OAUTHBEARER"),
        ("CLIENT", "PLAIN", USERS["kproxy"], "login_unsupported", "requires no login at this port"),
    ],
)
def test_a_failed_login_is_reported_with_its_cause(
    secured: SecuredBroker, tmp_path: Path, listener: str, mechanism: str, password: str, cause: str, log_line: str
) -> None:
    settings = login(secured, mechanism, tmp_path)
    if password:
        (tmp_path / "password").write_text(password)
    else:
        (tmp_path / "token").write_text(Tokens(tmp_path).token("kproxy"))  # signed by another key
    file = tmp_path / "kproxy.toml"
    file.write_text(f"[[cluster]]\n[cluster.login]\n{settings}")
    kproxy = Kproxy(secured.address_of(listener), tmp_path, "--config", str(file))
    kproxy.start(waits_until_ready=False)
    try:
        wait_for("the broker's refusal", lambda: log_line in kproxy.log.read_text())
        wait_for("the admin port", kproxy.is_alive)
        counted = {"side": "broker", "mechanism": mechanism, "outcome": cause}
        assert kproxy.metric("kproxy_authentications_total", **counted) > 0
        assert kproxy.metric("kproxy_ready") == 0
        assert not password or password not in kproxy.log.read_text()
    finally:
        kproxy.stop()
