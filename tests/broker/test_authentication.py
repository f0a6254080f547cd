"""Clients log in at kproxy, before a real broker that requires no login, or a different one: kproxy's own."""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from kproxy.proxy.sasl import users
from tests.broker.cluster import wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import Kproxy
from tests.broker.secured import SecuredBroker
from tests.broker.security import AUDIENCE, ISSUER, MECHANISMS, OAUTHBEARER, USERS
from tests.broker.test_clients import consume
from tests.broker.test_login import kproxy_with, login, produced
from tests.broker.tools import CONSUMER, PRODUCER


def authentication(secured: SecuredBroker, folder: Path, more: str = "") -> str:
    file = folder / "users"
    for name, password in USERS.items():
        users.change(file, name, password)
    return (
        f"[cluster.authentication]\nmechanisms = {list(MECHANISMS)!r}\nusers_file = '{file}'\n"
        f"jwks_file = '{secured.security.tokens.jwks}'\nissuer = '{ISSUER}'\naudience = '{AUDIENCE}'\n{more}"
    )


def client(secured: SecuredBroker, mechanism: str, user: str = "alice") -> dict[str, object]:
    settings = secured.security.librdkafka("SASL", mechanism, user)
    if mechanism == OAUTHBEARER:
        tokens = secured.security.tokens
        settings["oauth_cb"] = lambda _: (tokens.token(user), time.time() + 3600)
    return settings


@pytest.fixture(scope="module")
def kproxy(secured: SecuredBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kproxy]:
    """Clients log in here; kproxy, with two workers, logs in at the broker as the user that each client is."""
    folder = tmp_path_factory.mktemp("authentication")
    of_bob = folder / "of-bob"
    of_bob.write_text(USERS["bob"])
    by_principal = (
        f"[[cluster.login.by_principal]]\nprincipal = 'User:bob'\nusername = 'bob'\npassword_file = '{of_bob}'\n"
    )
    settings = (
        f"[cluster.login]\n{login(secured, 'SCRAM-SHA-512', folder)}others = 'own'\n{by_principal}"
        f"{authentication(secured, folder, 'session_lifetime_s = 2')}"
    )
    with kproxy_with(secured, folder, settings, more=("--workers", "2")) as kproxy:
        yield kproxy


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_logs_in_and_renews_its_login(secured: SecuredBroker, kproxy: Kproxy, mechanism: str) -> None:
    topic = f"topic-{uuid.uuid4()}"
    settings = client(secured, mechanism)
    records = produced(kproxy.bootstrap, topic, 50, **settings)
    assert sorted(consume(kproxy.bootstrap, topic, len(records), **settings)) == sorted(records)
    faults: list[object] = []
    producer = Producer({"bootstrap.servers": kproxy.bootstrap, "linger.ms": 0} | settings)
    counted = {"side": "client", "mechanism": mechanism}
    before = kproxy.metric("kproxy_authentications_total", **counted, outcome="renewed")

    def renewed() -> bool:
        producer.produce(topic, b"x", on_delivery=lambda fault, _: fault and faults.append(fault))
        assert producer.flush(30) == 0 and not faults
        return kproxy.metric("kproxy_authentications_total", **counted, outcome="renewed") > before

    wait_for("a renewed login while it produces", renewed)
    assert kproxy.metric("kproxy_authentications_total", **counted, outcome="success") > 2
    assert kproxy.metric("kproxy_authentications_total", **counted, outcome="expired") == 0
    assert kproxy.metric("kproxy_protocol_faults_total") == 0
    assert kproxy.metric("kproxy_client_info", software_name="confluent-kafka-python") > 0
    assert "Traceback" not in kproxy.log.read_text()


def test_the_settings_decide_as_whom_the_broker_sees_each_client(secured: SecuredBroker, kproxy: Kproxy) -> None:
    before = secured.principals("SASL")
    produced(kproxy.bootstrap, f"topic-{uuid.uuid4()}", 5, **client(secured, "PLAIN", "bob"))
    wait_for("the request log", lambda: "User:bob" in secured.principals("SASL"))
    assert "User:alice" not in secured.principals("SASL") - before


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "SCRAM-SHA-1"])
def test_a_client_with_a_wrong_password_gets_that_error(secured: SecuredBroker, kproxy: Kproxy, mechanism: str) -> None:
    faults: list[KafkaError] = []
    settings = {**client(secured, mechanism if mechanism in MECHANISMS else "PLAIN"), "error_cb": faults.append}
    if mechanism == OAUTHBEARER:
        other = secured.security.tokens.token("alice", iss="https://another.example")
        settings["oauth_cb"] = lambda _: (other, time.time() + 3600)
    else:
        settings |= {"sasl.password": "guessed"}
    if mechanism not in MECHANISMS:
        settings["sasl.mechanism"] = "SCRAM-SHA-256"
        settings["sasl.username"] = "nobody"
    producer = Producer({"bootstrap.servers": kproxy.bootstrap, "log_level": 0} | settings)
    wait_for("the refusal", lambda: producer.poll(0.1) is not None and bool(faults))
    with pytest.raises(KafkaException):
        producer.list_topics(timeout=0.5)
    assert KafkaError._AUTHENTICATION in {fault.code() for fault in faults}
    assert kproxy.metric("kproxy_authentications_total", side="client", outcome="failed") > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_java_logs_in(secured: SecuredBroker, kproxy: Kproxy, mechanism: str, tmp_path: Path) -> None:
    topic = f"topic-{uuid.uuid4()}"
    settings = dict(secured.security.java("SASL", mechanism))
    options = secured.security.java_options()
    config = tmp_path / "client.properties"
    config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    where = ("--bootstrap-server", kproxy.bootstrap, "--topic", topic)
    tool(PRODUCER, *where, "--producer.config", str(config), stdin=b"one\ntwo\nthree\n", options=options)
    received = tool(
        *(CONSUMER, *where, "--consumer.config", str(config), "--from-beginning"),
        *("--max-messages", "3", "--timeout-ms", "120000"),
        options=options,
    )
    assert sorted(received.split()) == ["one", "three", "two"]
    assert kproxy.metric("kproxy_protocol_faults_total") == 0


def test_a_client_login_is_refused_with_the_reason_where_kproxy_logs_in_for_all(
    secured: SecuredBroker, tmp_path: Path
) -> None:
    with kproxy_with(secured, tmp_path, f"[cluster.login]\n{login(secured, 'PLAIN', tmp_path)}") as kproxy:
        producer = Producer(
            {"bootstrap.servers": kproxy.bootstrap, "log_level": 0} | secured.security.librdkafka("SASL", "PLAIN")
        )
        wait_for("the reason in kproxy's log", lambda: "let clients use no SASL" in kproxy.log.read_text())
        with pytest.raises(KafkaException):
            producer.list_topics(timeout=0.5)
        assert kproxy.metric("kproxy_own_answers_total", api="SaslHandshake") > 0
        assert kproxy.metric("kproxy_authentications_total", side="broker", outcome="login_failed") == 0
    wait_for("the request log", lambda: "User:kproxy" in secured.principals("SASL"))
