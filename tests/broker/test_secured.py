"""The broker with every listener: only clients with the right certificate or login are admitted."""

import uuid
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from tests.broker.cluster import wait_for
from tests.broker.jvm import tool
from tests.broker.secured import SecuredBroker
from tests.broker.security import MECHANISMS, OAUTHBEARER, Tokens
from tests.broker.test_clients import consume, sample
from tests.broker.tools import TOPICS

WAYS = [
    ("CLIENT", ""),
    ("SSL", ""),
    ("MTLS", ""),
    *((listener, mechanism) for listener in ("SASL", "SASL_SSL") for mechanism in MECHANISMS),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("listener", "mechanism"), WAYS)
def test_librdkafka_gets_in(secured: SecuredBroker, listener: str, mechanism: str) -> None:
    settings = secured.security.librdkafka(listener, mechanism)
    before = secured.logged_bytes()  # other tests use other users
    topic = f"topic-{uuid.uuid4()}"
    records = sample(20, topic)
    faults = []
    producer = Producer({"bootstrap.servers": secured.address_of(listener)} | settings)
    for key, value in records:
        producer.produce(topic, value, key, on_delivery=lambda fault, _: fault and faults.append(fault))
    assert producer.flush(30) == 0 and not faults
    received = consume(secured.address_of(listener), topic, len(records), **settings)
    assert sorted(received) == sorted(records)
    user = {"CLIENT": "User:ANONYMOUS", "SSL": "User:ANONYMOUS", "MTLS": "User:CN=alice,OU=kafka clients,O=Example"}
    wait_for("the request log", lambda: user.get(listener, "User:alice") in secured.principals(listener, before))
    assert secured.principals(listener, before) == {user.get(listener, "User:alice")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("listener", "mechanism"), [("MTLS", ""), ("SASL_SSL", "SCRAM-SHA-512"), ("SASL_SSL", OAUTHBEARER)]
)
def test_java_gets_in(secured: SecuredBroker, listener: str, mechanism: str, tmp_path: Path) -> None:
    config = tmp_path / "client.properties"
    settings = secured.security.java(listener, mechanism)
    config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    where = ("--bootstrap-server", secured.address_of(listener), "--command-config", str(config))
    topic = f"topic-{uuid.uuid4()}"
    tool(TOPICS, *where, "--create", "--if-not-exists", "--topic", topic, options=secured.security.java_options())
    assert topic in tool(TOPICS, *where, "--list", options=secured.security.java_options())


@pytest.mark.parametrize(("listener", "mechanism"), [("MTLS", ""), *(("SASL_SSL", name) for name in MECHANISMS)])
def test_clients_without_or_with_wrong_credentials_are_refused(
    secured: SecuredBroker, listener: str, mechanism: str, tmp_path: Path
) -> None:
    faults: list[KafkaError] = []
    settings = secured.security.librdkafka(listener, mechanism)
    if mechanism == OAUTHBEARER:
        settings["oauth_cb"] = lambda _: (Tokens(tmp_path).token("alice"), 2**31)  # signed by another key
    elif mechanism:
        settings["sasl.password"] = "guessed"
    else:
        settings = secured.security.librdkafka("SSL")
    settings |= {"error_cb": faults.append, "log_level": 0}
    producer = Producer({"bootstrap.servers": secured.address_of(listener)} | settings)
    wait_for("the refusal", lambda: producer.poll(0.1) is not None and bool(faults))
    assert not mechanism or KafkaError._AUTHENTICATION in {fault.code() for fault in faults}
    with pytest.raises(KafkaException):
        producer.list_topics(timeout=0.5)
