"""Real clients push their metrics (KIP-714) to kproxy, before brokers that have no receiver for them."""

import json
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from prometheus_client.parser import text_string_to_metric_families

from tests.broker.cluster import Cluster, wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.tools import CONSUMER, VERIFIABLE_PRODUCER, Running, create_topic
from tests.otlp import collector, exposed

PREFIX = "kproxy_client_telemetry_"
# The metrics that producers and consumers push at least, by KIP-714, as both kinds of clients name them.
OF_A_PRODUCER = {"producer_connection_creation_total", "producer_node_request_latency_avg"}
OF_A_CONSUMER = {"consumer_connection_creation_total", "consumer_coordinator_assigned_partitions"}


def pushed(kproxy: Kproxy) -> dict[tuple[str, str], set[str]]:
    """The names of the metrics that each client has pushed, by its software and client id; counters only if above 0."""
    found: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(kproxy.get("/metrics")):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                assert sample.labels["cluster"] == "default" and sample.labels["client_instance_id"]
                assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
                names = found.setdefault((sample.labels["software_name"], sample.labels["client_id"]), set())
                if family.type == "gauge" or sample.value > 0:
                    names.add(sample.name.removeprefix(PREFIX))
    return found


def connections(kproxy: Kproxy) -> set[int]:
    return {row["number"] for row in json.loads(kproxy.get("/api/connections"))}


def push(kproxy: Kproxy, topic: str, folder: Path, wanted: dict[tuple[str, str], set[str]], settings: Path) -> None:
    """A producer and a consumer of each kind work until they have pushed the wanted metrics.

    Then a reload requests the metrics of consumers alone; the clients follow on the connections that they have.
    """
    config = folder / "client.properties"
    config.write_text("client.id=shop\ncompression.type=zstd\n")
    to = ("--bootstrap-server", kproxy.bootstrap, "--topic", topic)
    as_shop = ("--throughput", "20", "--producer.config", str(config))
    as_billing = ("--group", uuid.uuid4().hex, "--consumer-property", "client.id=billing")
    shared = {"bootstrap.servers": kproxy.bootstrap, "enable.metrics.push": True}
    producer = Producer({**shared, "client.id": "shop"})
    consumer = Consumer({**shared, "client.id": "billing", "group.id": uuid.uuid4().hex})
    consumer.subscribe([topic])

    def all_arrived() -> bool:
        producer.produce(topic, b"x")
        producer.poll(0)
        consumer.poll(0.05)
        found = pushed(kproxy)
        return all(names <= found.get(client, set()) for client, names in wanted.items())

    with (
        Running(folder / "produced", VERIFIABLE_PRODUCER, *to, *as_shop),
        Running(folder / "consumed", CONSUMER, *to, *as_billing),
    ):
        try:
            wait_for("their metrics", all_arrived, 60)
        except AssertionError:
            raise AssertionError(f"{pushed(kproxy)}\n{kproxy.log_tail()}") from None
        assert len(pushed(kproxy)["apache-kafka-java", "shop"]) > 50
        assert kproxy.metric("kproxy_telemetry_clients") == 4
        before = connections(kproxy)
        settings.write_text(settings.read_text() + 'metrics = ["org.apache.kafka.consumer."]\n')
        kproxy.reload()

        def only_consumers() -> bool:
            all_arrived()
            names = {name for of_client in pushed(kproxy).values() for name in of_client}
            return bool(names) and all(name.startswith("consumer_") for name in names)

        wait_for("metrics of consumers alone", only_consumers, 60)
        assert before <= connections(kproxy)
    producer.flush(10)
    consumer.close()


@pytest.mark.ring2
def test_librdkafka_and_java_push_to_kproxy(cluster: Cluster, tmp_path: Path) -> None:
    settings = tmp_path / "kproxy.toml"
    settings.write_text("[[cluster]]\n[cluster.telemetry]\npush_interval_s = 0.5\n")
    wanted = {
        (software, client_id): names
        for software in ("apache-kafka-java", "confluent-kafka-python")
        for client_id, names in (("shop", OF_A_PRODUCER), ("billing", OF_A_CONSUMER))
    }
    with (
        collector() as pushed_to,
        Kproxy(
            *(cluster.bootstrap, tmp_path, "--config", str(settings), "--workers", "2"),
            *("--otlp", f"http://127.0.0.1:{pushed_to.port}"),
        ) as kproxy,
    ):
        push(kproxy, create_topic(cluster.bootstrap), tmp_path, wanted, settings)
        for error in ("INVALID_RECORD", "INVALID_REQUEST", "TELEMETRY_TOO_LARGE", "UNSUPPORTED_COMPRESSION_TYPE"):
            assert kproxy.metric("kproxy_telemetry_answers_total", error=error) == 0, error
        wait_for("the end of their series", lambda: not pushed(kproxy))
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        scraped = exposed(kproxy.get("/metrics"))
        kproxy.stop()
        assert "Traceback" not in kproxy.log.read_text()
        last = pushed_to.series()  # what both workers have counted
    counted = {key for key, (kind, _) in scraped.items() if kind != "gauge"}  # counters stay when clients have left
    assert counted <= last.keys() <= scraped.keys() and len(counted) > 300
    assert all(last[key][0] == scraped[key][0] for key in last)
    assert all(last[key][1] >= scraped[key][1] for key in counted if scraped[key][0] == "counter")


def test_without_the_option_clients_are_asked_for_no_metrics(cluster: Cluster, kproxy: Kproxy) -> None:
    asked = kproxy.metric("kproxy_requests_total", api="ApiVersions")
    producer = Producer({"bootstrap.servers": kproxy.bootstrap})
    producer.list_topics(timeout=10)
    assert kproxy.metric("kproxy_requests_total", api="ApiVersions") > asked
    assert kproxy.metric("kproxy_requests_total", api="GetTelemetrySubscriptions") == 0
    assert "telemetry" not in kproxy.get("/metrics")
