"""Real clients, librdkafka and Kafka's own Java clients, produce and consume through kproxy as they would without
it."""

import base64
import itertools
import random
import socket
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import Kproxy
from tests.broker.tools import (
    CONSUMER,
    PRODUCER,
    SHARE_CONSUMER,
    Running,
    create_share_group,
    create_topic,
    endpoints,
    members,
)

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
MODES = (
    ("0", False),
    ("1", False),
    ("all", False),
    ("all", True),
)

Records = list[tuple[bytes, bytes]]


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """librdkafka's settings from keyword arguments."""
    return {name if name == "oauth_cb" else name.replace("_", "."): value for name, value in settings.items()}


def produce(bootstrap: str, topic: str, records: Records, **settings: str | bool | int) -> None:
    """Produce all records with librdkafka; each must be acknowledged."""
    faults: list[KafkaError] = []
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 5, "message.max.bytes": 2_000_000} | dotted(settings)
    )
    for key, value in records:
        while True:
            try:
                producer.produce(topic, value, key, on_delivery=lambda fault, _: fault and faults.append(fault))
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0
    assert not faults


def consume(bootstrap: str, topic: str, count: int, partitions: int = 3, **settings: Any) -> Records:
    """The first `count` records of a topic, read with librdkafka from partitions assigned by hand."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "fetch.message.max.bytes": 2_000_000} | dotted(settings)
    )
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)])
    records: Records = []
    try:
        while len(records) < count:
            messages = consumer.consume(count - len(records), timeout=30)
            assert messages, f"only {len(records)} of {count} records within 30 s"
            for message in messages:
                assert message.error() is None, message.error()
                records.append((message.key(), message.value()))
    finally:
        consumer.close()
    return records


def commit(bootstrap: str, group: str, offsets: list[TopicPartition]) -> None:
    """Commit for a group without members, with librdkafka."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        consumer.commit(offsets=offsets, asynchronous=False)
    finally:
        consumer.close()


def sample(count: int, seed: str) -> Records:
    """Small records, all different, that compress a little."""
    noise = random.Random(seed)
    return [(b"%s-%d" % (seed.encode(), i), noise.randbytes(20) + b"." * noise.randrange(400)) for i in range(count)]


def test_a_client_that_bypasses_kproxy_is_noticed(cluster: Cluster, kproxy: Kproxy) -> None:
    """The `bootstrap` fixture makes this check after each of these tests."""
    before = cluster.client_peers()
    broker = cluster.brokers[0]
    with socket.create_connection((broker.host, broker.port)) as client:
        stranger = Counter([(broker.address, client.getsockname())])
        wait_for("the stranger in the log", lambda: cluster.client_peers() - before - kproxy.sources() == stranger)


def test_clients_learn_only_addresses_of_kproxy(bootstrap: str) -> None:
    port = int(bootstrap.split(":")[1])
    assert endpoints(bootstrap) == {node_id: f"127.0.0.1:{port + 1 + node_id}" for node_id in (1, 2, 3)}


@pytest.mark.ring2
def test_java_consumes_in_a_share_group(bootstrap: str) -> None:
    """KIP-932: ShareFetch and ShareAcknowledge."""
    topic = create_topic(bootstrap)
    sent = [f"line {number}" for number in range(100)]
    produce(bootstrap, topic, [(line.encode(), line.encode()) for line in sent])
    received = tool(
        *(SHARE_CONSUMER, "--bootstrap-server", bootstrap, "--topic", topic, "--group", create_share_group(bootstrap)),
        *("--max-messages", str(len(sent)), "--timeout-ms", "120000"),
    )
    assert sorted(received.splitlines()) == sorted(sent)


def test_each_client_reads_every_codec_and_acks_setting_of_each_other(bootstrap: str) -> None:
    topics = {client: create_topic(bootstrap) for client in ("librdkafka", "java")}
    sent: dict[str, list[str]] = {client: [] for client in topics}
    for codec, (acks, idempotent) in itertools.product(CODECS, MODES):
        records = [(key, base64.b64encode(value)) for key, value in sample(50, f"{codec}-{acks}-{idempotent}")]
        modes = {"compression_type": codec, "acks": acks, "enable_idempotence": idempotent}
        produce(bootstrap, topics["librdkafka"], records, **modes)
        sent["librdkafka"] += [value.decode() for _, value in records]
        lines = [f"{codec} {acks} {idempotent} {number} " + "x" * number for number in range(200)]
        command = [PRODUCER, "--bootstrap-server", bootstrap, "--topic", topics["java"], "--compression-codec", codec]
        for setting in (f"acks={acks}", f"enable.idempotence={idempotent}".lower()):
            command += ["--producer-property", setting]
        tool(*command, stdin="".join(f"{line}\n" for line in lines).encode())
        sent["java"] += lines
    for client, topic in topics.items():
        by_java = tool(
            *(CONSUMER, "--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
            *("--max-messages", str(len(sent[client])), "--timeout-ms", "120000"),
        )
        assert sorted(by_java.splitlines()) == sorted(sent[client])
        by_librdkafka = [value.decode() for _, value in consume(bootstrap, topic, len(sent[client]))]
        assert sorted(by_librdkafka) == sorted(sent[client])


def lag_by_partition(bootstrap: str, group: str, topic: str) -> list[int]:
    """The lag by the brokers' own offsets, for the partitions that the group has committed."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        places = consumer.committed([TopicPartition(topic, number) for number in range(3)], timeout=30)
        known = [place for place in places if place.offset >= 0]
        return [consumer.get_watermark_offsets(place, timeout=30)[1] - place.offset for place in known]
    finally:
        consumer.close()


def test_metrics_of_topics_match_what_clients_wrote(cluster: Cluster, tmp_path: Path) -> None:
    """librdkafka names topics, Java uses their ids (KIP-516); lag and client software (KIP-511) are counted too."""
    with Kproxy(cluster.bootstrap, tmp_path, "--detail", "topics") as kproxy:
        topic = create_topic(kproxy.bootstrap)
        for codec in CODECS:
            produce(kproxy.bootstrap, topic, sample(100, codec), compression_type=codec, acks="all")
        sent = "".join(f"line {number}\n" for number in range(100))
        tool(PRODUCER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, stdin=sent.encode())
        consume(kproxy.bootstrap, topic, 600)
        tool(
            *(CONSUMER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, "--from-beginning"),
            *("--max-messages", "600", "--timeout-ms", "120000"),
        )
        assert kproxy.metric("kproxy_topic_records_total", topic=topic, direction="request") == 600
        assert kproxy.metric("kproxy_topic_records_total", topic=topic, direction="response") == 1200
        for codec in CODECS:
            assert kproxy.metric("kproxy_topic_batches_total", topic=topic, direction="request", codec=codec)
        group = f"group-{uuid.uuid4()}"
        committed = [TopicPartition(topic, number, 10 * number) for number in range(3)]
        commit(kproxy.bootstrap, group, committed)
        # The Java consumer exits after that many records and commits them; its fetch sessions use the topic's id. It
        # commits nothing for partitions that it had not fetched by then, so their lag is unknown.
        small_group = f"group-{uuid.uuid4()}"
        tool(
            *(
                CONSUMER,
                "--bootstrap-server",
                kproxy.bootstrap,
                "--topic",
                topic,
                "--from-beginning",
                "--group",
                small_group,
            ),
            *("--max-messages", "100", "--timeout-ms", "120000"),
        )
        assert kproxy.metric("kproxy_consumer_lag_records", group=group, topic=topic) == 600 - 30
        behind = sum(lag_by_partition(cluster.bootstrap, small_group, topic))
        assert 0 < behind == kproxy.metric("kproxy_consumer_lag_records", group=small_group, topic=topic)
        assert 0 < kproxy.metric("kproxy_consumer_lag_seconds", group=small_group, topic=topic) < 120
        for software in ("confluent-kafka-python", "apache-kafka-java"):
            assert kproxy.metric("kproxy_client_info", software_name=software)
        assert kproxy.metric("kproxy_protocol_faults_total") == 0


@pytest.mark.ring2
def test_a_consumer_that_has_nothing_to_fetch_still_lags(cluster: Cluster, tmp_path: Path) -> None:
    """An open transaction holds the Java consumer back; meanwhile neither its fetch requests nor the responses name the
    partition."""
    with Kproxy(cluster.bootstrap, tmp_path, "--detail", "topics") as kproxy:
        topic = create_topic(kproxy.bootstrap, partitions=1)

        def lag() -> float:
            return kproxy.metric("kproxy_consumer_lag_records", client_id="held-back", topic=topic)

        producer = Producer({"bootstrap.servers": kproxy.bootstrap, "transactional.id": topic})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic, b"in a transaction")
        producer.flush(30)
        with Running(
            tmp_path / "consumed",
            *(CONSUMER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, "--from-beginning"),
            *("--isolation-level", "read_committed", "--consumer-property", "client.id=held-back"),
        ) as consumer:
            wait_for("its lag", lambda: lag() == 1)
            before = kproxy.metric("kproxy_requests_total", api="Fetch")
            wait_for("more fetches", lambda: kproxy.metric("kproxy_requests_total", api="Fetch") > before + 4)
            assert lag() == 1
            producer.commit_transaction(30)
            wait_for("what was held back", lambda: consumer.lines() == ["in a transaction"])
            wait_for("no lag, behind the transaction's end", lambda: lag() == 0)
        assert kproxy.metric("kproxy_protocol_faults_total") == 0


def test_librdkafka_reads_back_ten_megabytes_unchanged(bootstrap: str) -> None:
    topic = create_topic(bootstrap, partitions=1)
    noise = random.Random(10)
    sent = [(b"%d" % number, noise.randbytes(size)) for number, size in enumerate((1_000_000, 1, 99_999) * 10)]
    assert sum(len(value) for _, value in sent) > 10_000_000
    produce(bootstrap, topic, sent, enable_idempotence=True)
    assert consume(bootstrap, topic, len(sent), partitions=1) == sent


@pytest.mark.ring2
def test_java_reads_back_ten_megabytes_unchanged(bootstrap: str, tmp_path: Path) -> None:
    topic = create_topic(bootstrap, partitions=1)
    noise = random.Random(11)
    text = b"".join(base64.b85encode(noise.randbytes(size)) + b"\n" for size in (600_000, 8, 200_000) * 10)
    assert len(text) > 10_000_000
    size = "--max-partition-memory-bytes", "1000000"
    tool(PRODUCER, "--bootstrap-server", bootstrap, "--topic", topic, *size, stdin=text)
    with Running(
        tmp_path / "consumed",
        *(CONSUMER, "--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
        *("--max-messages", "30", "--timeout-ms", "120000"),
    ) as consumer:
        consumer.wait()
        assert consumer.output.read_bytes() == text


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_group_of_two_rebalances_with_librdkafka(bootstrap: str, protocol: str) -> None:
    """KIP-848's protocol is "consumer"; JoinGroup and SyncGroup are "classic"."""
    topic = create_topic(bootstrap, partitions=4)
    group = f"group-{uuid.uuid4()}"
    received: Counter[bytes] = Counter()

    def member() -> Consumer:
        consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": group, "group.protocol": protocol}
            | {"auto.offset.reset": "earliest", "enable.auto.commit": False}
            | ({"heartbeat.interval.ms": 500} if protocol == "classic" else {})  # heartbeats announce a rebalance
        )
        consumer.subscribe([topic])
        return consumer

    def poll(*consumers: Consumer) -> None:
        for consumer in consumers:
            for message in consumer.consume(100, timeout=0.1):
                assert message.error() is None, message.error()
                received[message.value()] += 1
            if received:
                consumer.commit(asynchronous=True)

    def poll_until(what: str, *shares: tuple[Consumer, int], count: int) -> None:
        def there() -> bool:
            poll(*(consumer for consumer, _ in shares))
            return len(received) >= count and all(len(each.assignment()) == size for each, size in shares)

        wait_for(what, there, pause_s=0)

    sent = sample(300, "group")
    first = member()
    try:
        produce(bootstrap, topic, sent[:100])
        poll_until("all partitions at the first member", (first, 4), count=100)
        second = member()
        try:
            poll_until("a share for the second member", (first, 2), (second, 2), count=100)
            produce(bootstrap, topic, sent[100:200])
            poll_until("both shares consumed", (first, 2), (second, 2), count=200)
        finally:
            second.close()
        poll_until("all partitions back at the first member", (first, 4), count=200)
        produce(bootstrap, topic, sent[200:])
        poll_until("everything consumed", (first, 4), count=300)
    finally:
        first.close()
    assert set(received) == {value for _, value in sent}


@pytest.mark.ring2
def test_group_of_two_rebalances_with_java(bootstrap: str, tmp_path: Path) -> None:
    topic = create_topic(bootstrap, partitions=4)
    group = f"group-{uuid.uuid4()}"
    arguments = (
        *(CONSUMER, "--bootstrap-server", bootstrap, "--topic", topic, "--group", group, "--from-beginning"),
        *("--consumer-property", "heartbeat.interval.ms=500"),  # heartbeats announce a rebalance
    )
    sent = [f"line {number}" for number in range(400)]

    def shares() -> list[int]:
        return sorted(members(bootstrap, group).values())

    def send(lines: list[str]) -> None:
        produce(bootstrap, topic, [(line.encode(), line.encode()) for line in lines])

    with Running(tmp_path / "first", *arguments) as first:
        send(sent[:200])
        wait_for("the first member to consume", lambda: len(first.lines()) == 200)
        with Running(tmp_path / "second", *arguments) as second:
            wait_for("two members with two partitions each", lambda: shares() == [2, 2])
            send(sent[200:300])
            wait_for("both to consume", lambda: len(first.lines()) + len(second.lines()) == 300)
            taken = second.stop()
        assert taken
        wait_for("one member with all partitions", lambda: shares() == [4])
        send(sent[300:])
        wait_for("the first member to consume the rest", lambda: len(first.lines()) + len(taken) == 400)
        received = [*first.stop(), *taken]
    assert sorted(received) == sorted(sent)
