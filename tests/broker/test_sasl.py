"""Clients log in at the brokers through kproxy, which has no login of its own and gets the brokers' ports declared."""

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from kproxy.protocol import codec
from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import Kproxy
from tests.broker.test_clients import consume, dotted, sample
from tests.broker.tools import CONSUMER, PRODUCER, create_topic

DECLARED = """
[[cluster]]
[[cluster.brokers]]
ids = "1-3"
port = {port}
"""
MODULES = {"PLAIN": "plain.PlainLoginModule", "SCRAM-SHA-256": "scram.ScramLoginModule"}


@pytest.fixture(scope="module")
def kproxy(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kproxy]:
    folder = tmp_path_factory.mktemp("kproxy-sasl")
    file = folder / "kproxy.toml"
    kproxy = Kproxy(cluster.sasl_bootstrap, folder, "--config", str(file))
    file.write_text(DECLARED.format(port=int(kproxy.bootstrap.split(":")[1]) + 1))
    with kproxy:
        yield kproxy


def login(mechanism: str, password: str = "secret") -> dict[str, str]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_username": "alice",
        "sasl_password": password,
    }


@pytest.mark.ring2
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mechanism", MODULES)
def test_librdkafka_logs_in_again_and_again(cluster: Cluster, kproxy: Kproxy, mechanism: str) -> None:
    """KIP-368: the brokers' sessions expire after two seconds, so handshakes occur in the middle of a connection."""
    topic = create_topic(cluster.bootstrap)
    producer = Producer({"bootstrap.servers": kproxy.bootstrap, "linger.ms": 0} | dotted(login(mechanism)))
    before = kproxy.metric("kproxy_requests_total", api="SaslAuthenticate")
    connections = kproxy.metric("kproxy_connections_total")
    records = sample(50, mechanism)
    rounds = {"PLAIN": 1, "SCRAM-SHA-256": 2}[mechanism]
    left = list(records)

    def again() -> bool:
        if left:
            key, value = left.pop()
            producer.produce(topic, value, key)
            assert producer.flush(30) == 0
        logins = kproxy.metric("kproxy_requests_total", api="SaslAuthenticate") - before
        return not left and logins > rounds * (kproxy.metric("kproxy_connections_total") - connections)

    wait_for("another login on one of the connections", again)
    assert sorted(consume(kproxy.bootstrap, topic, len(records), **login(mechanism))) == sorted(records)
    assert kproxy.metric("kproxy_protocol_faults_total") == 0
    assert kproxy.metric("kproxy_unbound_brokers_total") == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mechanism", MODULES)
def test_java_logs_in(cluster: Cluster, kproxy: Kproxy, mechanism: str, tmp_path: Path) -> None:
    topic = create_topic(cluster.bootstrap)
    config = tmp_path / "client.properties"
    config.write_text(
        f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism={mechanism}\n"
        f"sasl.jaas.config=org.apache.kafka.common.security.{MODULES[mechanism]} required "
        'username="alice" password="secret";\n'
    )
    where = ("--bootstrap-server", kproxy.bootstrap, "--topic", topic)
    tool(PRODUCER, *where, "--producer.config", str(config), stdin=b"one\ntwo\nthree\n")
    received = tool(
        *(CONSUMER, *where, "--consumer.config", str(config), "--from-beginning"),
        *("--max-messages", "3", "--timeout-ms", "120000"),
    )
    assert sorted(received.split()) == ["one", "three", "two"]
    assert kproxy.metric("kproxy_protocol_faults_total") == 0


def test_a_wrong_password_is_refused_by_the_broker(kproxy: Kproxy) -> None:
    faults: list[KafkaError] = []
    producer = Producer(
        {"bootstrap.servers": kproxy.bootstrap, "error_cb": faults.append, "log_level": 0}
        | dotted(login("PLAIN", password="guessed"))
    )
    wait_for("the broker's refusal", lambda: producer.poll(0.1) is not None and bool(faults))
    with pytest.raises(KafkaException):
        producer.list_topics(timeout=0.5)
    assert KafkaError._AUTHENTICATION in {fault.code() for fault in faults}
    assert kproxy.metric("kproxy_protocol_faults_total") == 0


class Raw:
    """A client that logs in as those before Kafka 1.0: SaslHandshake v0, then tokens without a header."""

    def __init__(self, bootstrap: str) -> None:
        host, port = bootstrap.split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=10)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.sock.recv(count - len(data))
            assert part, "closed"
            data += part
        return data

    def receive(self) -> bytes:
        return self._read(struct.unpack(">i", self._read(4))[0])

    def answer(self, api_key: int, version: int) -> dict[str, Any]:
        header, body = codec.decode_response(self.receive(), api_key, version)
        assert header["correlationId"] == -7
        return body

    def ask(self, api_key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        self.sock.sendall(framed(api_key, version, body))
        return self.answer(api_key, version)


def framed(api_key: int, version: int, body: dict[str, Any]) -> bytes:
    header = {"requestApiKey": api_key, "requestApiVersion": version, "correlationId": -7, "clientId": "old"}
    return sized(codec.encode_request(header, body))


def sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


TOKEN = sized(b"alice\0alice\0secret")


def test_raw_tokens_of_old_clients_are_forwarded(kproxy: Kproxy) -> None:
    """The first bytes of the user's name would read as API key 97."""
    with Raw(kproxy.bootstrap) as client:
        assert client.ask(17, 0, {"mechanism": "PLAIN"})["errorCode"] == 0
        client.sock.sendall(TOKEN)
        assert client.receive() == b""
        brokers = client.ask(3, 12, {"topics": []})["brokers"]
    port = int(kproxy.bootstrap.split(":")[1])
    assert {(broker["nodeId"], broker["host"], broker["port"]) for broker in brokers} == {
        (node_id, "127.0.0.1", port + node_id) for node_id in (1, 2, 3)
    }
    assert kproxy.metric("kproxy_protocol_faults_total") == 0


def test_requests_behind_a_raw_token_are_subject_to_the_policy(cluster: Cluster, tmp_path: Path) -> None:
    """Through a listener that creates nothing and hides topics: complete requests in the same packet as the token."""
    secret = create_topic(cluster.bootstrap)
    file = tmp_path / "kproxy.toml"
    audit = tmp_path / "audit.jsonl"
    guarded = Kproxy(cluster.sasl_bootstrap, tmp_path, "--config", str(file))
    port = int(guarded.bootstrap.split(":")[1])
    rules = f'read_only = true\n[[cluster.policy]]\naction = "deny"\ntopic = "{secret}"\n'
    brokers = f'[[cluster.brokers]]\nids = "1-3"\nport = {port + 1}\n'
    file.write_text(f'audit = "{audit}"\n[[cluster]]\n{rules}{brokers}')
    create = {"topics": [{"name": "smuggled", "numPartitions": 1, "replicationFactor": 1}], "timeoutMs": 9000}
    with guarded:
        with Raw(guarded.bootstrap) as client:
            assert client.ask(17, 0, {"mechanism": "PLAIN"})["errorCode"] == 0
            client.sock.sendall(TOKEN + framed(19, 4, create) + framed(3, 12, {"topics": None}))
            assert client.receive() == b""
            assert [topic["errorCode"] for topic in client.answer(19, 4)["topics"]] == [29]
            listed = client.answer(3, 12)
        assert {broker["port"] for broker in listed["brokers"]} == {port + 1, port + 2, port + 3}
        assert secret not in {topic["name"] for topic in listed["topics"]}
        assert guarded.metric("kproxy_policy_refusals_total", api="CreateTopics") == 1
        assert guarded.metric("kproxy_protocol_faults_total") == 0
    names = set(Producer({"bootstrap.servers": cluster.bootstrap}).list_topics(timeout=10).topics)
    assert secret in names and "smuggled" not in names
    assert [json.loads(line)["api"] for line in audit.read_text().splitlines()] == ["CreateTopics"]
