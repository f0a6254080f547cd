"""Policies before a real cluster: clients understand refusals, and their connections stay open."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.cluster import Cluster
from tests.broker.jvm import JARS, java
from tests.broker.kproxy import Kproxy
from tests.broker.tools import PRODUCER, TOPICS, create_topic

DENIED = KafkaError.TOPIC_AUTHORIZATION_FAILED


@contextmanager
def policy(cluster: Cluster, folder: Path, *lines: str) -> Iterator[Kproxy]:
    """A kproxy with these lines in its [[cluster]], and with an audit log."""
    file = folder / "kproxy.toml"
    file.write_text("\n".join((f'audit = "{folder / "audit.jsonl"}"', "[[cluster]]", *lines)))
    with Kproxy(cluster.bootstrap, folder, "--config", str(file)) as kproxy:
        yield kproxy


def audited(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def sent(producer: Producer, topic: str, value: bytes = b"v") -> KafkaError | None:
    """The delivery error of one record, if any."""
    outcome: list[KafkaError | None] = []
    producer.produce(topic, value, on_delivery=lambda error, _: outcome.append(error))
    producer.flush(30)
    assert len(outcome) == 1
    return outcome[0]


def consumed(bootstrap: str, topic: str, group: str, count: int) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    values: list[bytes] = []
    end = time.monotonic() + 60
    try:
        while len(values) < count and time.monotonic() < end:
            message = consumer.poll(1)
            if message is not None:
                if message.error():
                    raise KafkaException(message.error())
                values.append(message.value())
        if values:
            consumer.commit(asynchronous=False)
            ends = consumer.committed(consumer.assignment(), timeout=30)
            assert sum(max(place.offset, 0) for place in ends) == count
    finally:
        consumer.close()
    return values


def described(bootstrap: str, asked: str, topics: list[str]) -> set[str]:
    """The topics of a classic group's only member, as the broker or kproxy at `asked` describes it."""
    group = f"group-of-{'-'.join(topics)}"
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    consumer.subscribe(topics)
    end = time.monotonic() + 60
    try:
        while len({place.topic for place in consumer.assignment()}) < len(topics) and time.monotonic() < end:
            consumer.poll(0.1)
        admin = AdminClient({"bootstrap.servers": asked})
        (member,) = admin.describe_consumer_groups([group])[group].result(30).members
        return {place.topic for place in member.assignment.topic_partitions}
    finally:
        consumer.close()


def run(main: str, *arguments: str, stdin: bytes = b"") -> str:
    """The complete output of one of Kafka's tools, whether it succeeds or not."""
    import subprocess

    done = subprocess.run(
        java(main, *arguments, options=("-Xmx256m",)),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def test_a_denied_topic_is_an_error_in_the_client_and_connections_stay_open(cluster, tmp_path):
    orders, secret = create_topic(cluster.bootstrap), create_topic(cluster.bootstrap)
    rule = ("[[cluster.policy]]", 'action = "deny"', f'topic = "{secret}"')
    with policy(cluster, tmp_path, *rule) as kproxy:
        producer = Producer({"bootstrap.servers": kproxy.bootstrap, "linger.ms": 0})
        assert sent(producer, orders) is None
        error = sent(producer, secret)
        assert error is not None and error.code() == DENIED
        assert sent(producer, orders, b"again") is None
        # No connection ended but the bootstrap connection: those to the brokers are still the same.
        assert all(kproxy.metric("kproxy_disconnects_total", listener=f"broker-{id_}") == 0 for id_ in (1, 2, 3))
        assert sorted(consumed(kproxy.bootstrap, orders, "group-of-orders", 2)) == [b"again", b"v"]
        with pytest.raises(KafkaException) as caught:
            consumed(kproxy.bootstrap, secret, "group-of-secrets", 1)
        assert caught.value.args[0].code() == DENIED
        listed = AdminClient({"bootstrap.servers": kproxy.bootstrap}).list_topics(timeout=30).topics
        assert orders in listed and secret not in listed
        output = run(PRODUCER, "--bootstrap-server", kproxy.bootstrap, "--topic", secret, stdin=b"v\n")
        assert "TopicAuthorizationException" in output, output
        assert kproxy.metric("kproxy_policy_refusals_total", reason="rule") > 0
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        assert secret not in run(TOPICS, "--bootstrap-server", kproxy.bootstrap, "--list").split()
        assert described(cluster.bootstrap, cluster.bootstrap, [orders, secret]) == {orders, secret}
        assert described(cluster.bootstrap, kproxy.bootstrap, [orders, secret]) == {orders}
        refused = run(TOPICS, "--bootstrap-server", kproxy.bootstrap, "--delete", "--topic", secret)
        assert "does not exist" in refused or "AuthorizationException" in refused, refused
    lines = audited(tmp_path)
    assert {"Metadata"} <= {line["api"] for line in lines if line["decision"] == "deny"}
    assert all(line["rule"] == 1 for line in lines if line["decision"] == "deny")


def test_a_read_only_listener_serves_consumer_groups_and_refuses_producers(cluster, tmp_path):
    topic = create_topic(cluster.bootstrap)
    direct = Producer({"bootstrap.servers": cluster.bootstrap})
    for value in (b"1", b"2", b"3"):
        assert sent(direct, topic, value) is None
    with policy(cluster, tmp_path, "read_only = true") as kproxy:
        assert sorted(consumed(kproxy.bootstrap, topic, "readers", 3)) == [b"1", b"2", b"3"]
        producer = Producer({"bootstrap.servers": kproxy.bootstrap})
        error = sent(producer, topic)
        assert error is not None and error.code() == DENIED
        output = run(PRODUCER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, stdin=b"v\n")
        assert "ClusterAuthorizationException" in output, output  # it is idempotent, and gets no producer id
        admin = AdminClient({"bootstrap.servers": kproxy.bootstrap})
        with pytest.raises(KafkaException) as caught:
            admin.create_topics([NewTopic("not-here", 1, 1)])["not-here"].result(30)
        assert caught.value.args[0].code() == DENIED
        (end,) = {Consumer({"bootstrap.servers": kproxy.bootstrap, "group.id": "x"}).get_watermark_offsets(
            TopicPartition(topic, partition), timeout=30
        )[0] for partition in range(3)}  # fmt: skip
        assert end == 0
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
    lines = audited(tmp_path)
    assert {"Produce", "InitProducerId", "CreateTopics"} <= {line["api"] for line in lines}
    assert {line["reason"] for line in lines} == {"read_only"}
    assert JARS.exists()
