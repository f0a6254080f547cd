"""kproxy restarts, brokers stop and join: clients continue, and no acknowledged record is lost."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer

from tests.broker.cluster import Cluster, wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.test_clients import consume, produce, sample
from tests.broker.tools import (
    CONSUMER,
    SHARE_CONSUMER,
    VERIFIABLE_PRODUCER,
    Running,
    create_share_group,
    create_topic,
    delete_topic,
    elect_preferred_leaders,
    endpoints,
    leaders,
    unregister,
)

# Without the log: it reports connection failures on standard error, which these tests provoke.
LIBRDKAFKA = {"reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 500, "log_level": 0}


class Load:
    """librdkafka: an idempotent producer that never pauses, and a group member that reads everything it writes."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.acknowledged: list[bytes] = []
        self.faults: list[KafkaError] = []
        self.received: set[bytes] = set()
        self._topic = topic
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5} | LIBRDKAFKA
        )
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": f"group-{uuid.uuid4()}", "auto.offset.reset": "earliest"}
            | LIBRDKAFKA
        )
        self._stopping = threading.Event()
        self._deadline = 0.0
        self._producing = threading.Thread(target=self._produce)
        self._consuming = threading.Thread(target=self._consume)

    def _delivered(self, fault: KafkaError | None, message: Message) -> None:
        if fault is not None:
            self.faults.append(fault)
        else:
            self.acknowledged.append(message.value())

    def _produce(self) -> None:
        number = 0
        while not self._stopping.is_set():
            self._producer.produce(self._topic, b"%d" % number, b"%d" % (number % 100), on_delivery=self._delivered)
            self._producer.poll(0.005)
            number += 1
        self._producer.flush(60)

    def _consume(self) -> None:
        self._consumer.subscribe([self._topic])
        while self._producing.is_alive() or (
            not self.received.issuperset(self.acknowledged) and time.monotonic() < self._deadline
        ):
            for message in self._consumer.consume(1000, timeout=0.1):
                if message.error() is None:
                    self.received.add(message.value())
        self._consumer.close()

    def flows(self, count: int = 100) -> None:
        """Wait until that many more records have been acknowledged, and as many received."""
        acknowledged, received = len(self.acknowledged) + count, len(self.received) + count
        wait_for("records to be acknowledged", lambda: len(self.acknowledged) >= acknowledged)
        wait_for("records to be received", lambda: len(self.received) >= received)

    def __enter__(self) -> "Load":
        self._producing.start()
        self._consuming.start()
        self.flows()
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline = time.monotonic() + 60
        self._stopping.set()
        self._producing.join()
        self._consuming.join()


@contextmanager
def java_load(bootstrap: str, topic: str, folder: Path) -> Iterator[Running]:
    """Kafka's VerifiableProducer, which prints what was acknowledged; at the end a consumer must receive all of it."""
    settings = folder / "producer.properties"
    settings.write_text("retries=2147483647\nenable.idempotence=true\n")  # by default this tool never retries
    with Running(
        folder / "produced",
        *(VERIFIABLE_PRODUCER, "--bootstrap-server", bootstrap, "--topic", topic, "--acks", "-1"),
        *("--throughput", "200", "--producer.config", str(settings)),
    ) as producer:
        wait_for("the first acknowledged records", lambda: len(acknowledged_by_java(producer)) > 50)
        yield producer
        producer.stop()
    faults = [line for line in producer.lines() if '"producer_send_error"' in line]
    assert not faults
    sent = acknowledged_by_java(producer)
    with Running(
        folder / "consumed",
        *(CONSUMER, "--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
        *("--max-messages", str(len(set(sent))), "--timeout-ms", "120000"),
    ) as consumer:
        assert set(consumer.wait()) >= set(sent)


def acknowledged_by_java(producer: Running) -> list[str]:
    lines = (json.loads(line) for line in producer.lines())
    return [line["value"] for line in lines if line["name"] == "producer_send_success"]


@pytest.mark.parametrize("kill", [False, True], ids=["drained", "killed"])
def test_clients_continue_when_kproxy_restarts(kproxy: Kproxy, bootstrap: str, kill: bool, tmp_path: Path) -> None:
    topics = [create_topic(bootstrap), create_topic(bootstrap)]
    with java_load(bootstrap, topics[1], tmp_path) as java, Load(bootstrap, topics[0]) as load:
        for _ in range(2):
            kproxy.stop(kill=kill)
            kproxy.start()
            before = len(acknowledged_by_java(java))
            load.flows()
            wait_for("the Java producer to go on", lambda: len(acknowledged_by_java(java)) > before + 100)  # noqa: B023
    assert not load.faults
    assert load.received.issuperset(load.acknowledged)


@pytest.mark.timeout(900)  # brokers start in a minute when the machine is busy
def test_clients_continue_when_brokers_stop_and_start(
    cluster: Cluster, kproxy: Kproxy, bootstrap: str, tmp_path: Path
) -> None:
    """Leaders move away and back; the hints about new leaders (NodeEndpoints, KIP-951) name kproxy."""
    topics = [create_topic(bootstrap), create_topic(bootstrap)]
    carriers = ("Produce", "Fetch", "ShareFetch")  # it is chance which of them first learns of a new leader

    def hints() -> float:
        return sum(kproxy.metric("kproxy_rewritten_addresses_total", api=api) for api in carriers)

    before = hints()
    group = ("--group", create_share_group(bootstrap))
    with (
        java_load(bootstrap, topics[1], tmp_path) as java,
        Running(
            tmp_path / "shared", SHARE_CONSUMER, "--bootstrap-server", bootstrap, "--topic", topics[1], *group
        ) as shared,
        Load(bootstrap, topics[0]) as load,
    ):
        for broker, kill in zip(cluster.brokers, (False, True, False), strict=True):
            broker.stop(kill=kill)
            wait_for("new leaders", lambda: broker.node_id not in leaders(bootstrap, topics[0]))  # noqa: B023
            count = len(acknowledged_by_java(java))
            load.flows()
            wait_for("the Java producer to go on", lambda: len(acknowledged_by_java(java)) > count + 100)  # noqa: B023
            broker.start()
            broker.wait_until_started()
        wait_for("leaders as before", lambda: leaders_spread(bootstrap, topics[0]))
        load.flows()
        count = len(shared.lines())
        wait_for("the share group to go on", lambda: len(shared.lines()) > count + 100)
    assert not load.faults
    assert load.received.issuperset(load.acknowledged)
    assert hints() > before


def test_clients_reach_a_broker_that_joins_later(cluster: Cluster, bootstrap: str) -> None:
    port = int(bootstrap.split(":")[1])
    with cluster.one_more() as broker:
        wait_for("the cluster to tell of it", lambda: broker.node_id in endpoints(bootstrap))
        assert endpoints(bootstrap)[broker.node_id] == f"127.0.0.1:{port + 1 + broker.node_id}"
        topic = create_topic(bootstrap, on=broker.node_id)
        records = sample(100, "one more")
        produce(bootstrap, topic, records)
        assert consume(bootstrap, topic, len(records), partitions=1) == records
        assert broker.client_peers()
        delete_topic(bootstrap, topic)
    unregister(bootstrap, broker.node_id)
    wait_for("the cluster to forget it", lambda: broker.node_id not in endpoints(bootstrap))


def leaders_spread(bootstrap: str, topic: str) -> bool:
    """Elect the preferred leaders; True once every broker leads again, False while replicas are not in sync."""
    try:
        elect_preferred_leaders(bootstrap)
    except AssertionError:
        return False
    return set(leaders(bootstrap, topic)) == {1, 2, 3}
