"""kproxy's counts equal those of its clients: bytes, throttling in milliseconds, and every error by name."""

import gzip
import json
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from kproxy.protocol import codec
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import Kproxy
from tests.broker.tools import create_topic

VECTORS = Path(__file__).parents[1] / "data" / "vectors-dev.jsonl.gz"
# Requests that only read, or that would change something that does not exist: other tests cannot notice them.
HARMLESS = (
    *("Produce", "Fetch", "ListOffsets", "Metadata", "OffsetFetch", "FindCoordinator", "Heartbeat", "LeaveGroup"),
    *("DescribeGroups", "ListGroups", "ApiVersions", "OffsetForLeaderEpoch", "EndTxn", "TxnOffsetCommit"),
    *("DescribeConfigs", "DescribeLogDirs", "DeleteGroups", "OffsetDelete", "DescribeProducers", "DescribeCluster"),
    *("DescribeTransactions", "ListTransactions", "ConsumerGroupHeartbeat", "ConsumerGroupDescribe"),
    *("DescribeTopicPartitions", "DescribeQuorum", "ShareGroupDescribe", "ShareFetch"),
)


def counted(kproxy: Kproxy, name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """The samples of that name, summed by these labels."""
    sums: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(kproxy.get("/metrics")):
        for sample in family.samples:
            if sample.name == name:
                sums[tuple(sample.labels[label] for label in labels)] += sample.value  # type: ignore[assignment]
    return sums


def test_bytes_and_throttling_equal_librdkafkas_statistics(cluster: Cluster, tmp_path: Path) -> None:
    with Kproxy(cluster.bootstrap, tmp_path) as kproxy:
        topic = create_topic(kproxy.bootstrap)
        quota = ("--add-config", "producer_byte_rate=20000", "--entity-type", "clients", "--entity-name", "counted")
        tool("kafka.admin.ConfigCommand", "--bootstrap-server", kproxy.bootstrap, "--alter", *quota)
        throttled: list[float] = []
        statistics: list[dict[str, Any]] = []
        before = {side: counted(kproxy, f"kproxy_{side}_bytes_total", "broker") for side in ("request", "response")}
        producer = Producer(
            {
                "bootstrap.servers": kproxy.bootstrap,
                "client.id": "counted",
                "throttle_cb": lambda event: throttled.append(event.throttle_time),
                "statistics.interval.ms": 100,
                "stats_cb": lambda text: statistics.append(json.loads(text)),
            }
        )
        for _ in range(6):  # the quota allows a burst of about 200 kB per broker
            for partition in range(3):
                producer.produce(topic, b"x" * 40_000, partition=partition)
            assert producer.flush(60) == 0
        statistics.clear()
        wait_for("statistics", lambda: producer.poll(0.1) > 0 and bool(statistics))
        assert sum(throttled) > 0
        requests = counted(kproxy, "kproxy_requests_total", "api", "broker")
        for broker in statistics[-1]["brokers"].values():
            if broker["nodeid"] > 0:
                of_broker = (str(broker["nodeid"]),)
                assert requests["Produce", *of_broker] == broker["req"]["Produce"] > 0
                for side, field in (("request", "txbytes"), ("response", "rxbytes")):
                    after = counted(kproxy, f"kproxy_{side}_bytes_total", "broker")
                    assert after[of_broker] - before[side][of_broker] == broker[field]
        for count, name in ((sum(throttled), "seconds_sum"), (sum(time > 0 for time in throttled), "seconds_count")):
            (seen,) = counted(kproxy, f"kproxy_throttle_{name}").values()
            assert round(seen, 6) == round(count, 6)


def test_every_error_of_every_response_is_counted(cluster: Cluster, tmp_path: Path) -> None:
    """Sends requests with all kinds of nonsense; the test decodes the complete responses with the codec."""
    errors: Counter[tuple[str, ...]] = Counter()
    requests: Counter[tuple[str, ...]] = Counter()
    received: Counter[tuple[str, ...]] = Counter()
    with Kproxy(cluster.bootstrap, tmp_path) as kproxy:
        doors = [("127.0.0.1", int(kproxy.bootstrap.rpartition(":")[2]) + 1 + node_id) for node_id in (1, 2, 3)]
        for number, frame in enumerate(nonsense(offered(cluster.brokers[0].address))):
            key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
            api = (schema().apis[key].name,)
            requests[api] += 1
            answer = ask(doors[number % 3], frame)
            if answer is not None:
                received[api] += 4 + len(answer)
                for code in codes(codec.decode_response(answer, key, version)[1]):
                    errors[*api, error_name(code)] += 1
        wait_for("all connections to be counted", lambda: kproxy.metric("kproxy_open_connections") == 0)
        assert len({error for _, error in errors}) > 10
        assert counted(kproxy, "kproxy_errors_total", "api", "error") == errors
        assert counted(kproxy, "kproxy_requests_total", "api") == requests
        assert counted(kproxy, "kproxy_response_bytes_total", "api") == received
        assert kproxy.metric("kproxy_protocol_faults_total") == 0


def nonsense(offers: dict[int, range]) -> Iterator[bytes]:
    with gzip.open(VECTORS) as lines:
        for line in lines:
            vector = json.loads(line)
            if vector["dir"] == "request" and vector["version"] in offers.get(vector["api_key"], ()):
                yield bytes.fromhex(vector["hex"])


def offered(broker: str) -> dict[int, range]:
    """The versions of the harmless APIs that a broker supports."""
    host, _, port = broker.rpartition(":")
    header = {"requestApiKey": 18, "requestApiVersion": 0, "correlationId": 1, "clientId": "x"}
    answer = ask((host, int(port)), codec.encode_request(header, {}))
    assert answer is not None
    _, body = codec.decode_response(answer, 18, 0)
    return {
        offer["apiKey"]: range(offer["minVersion"], offer["maxVersion"] + 1)
        for offer in body["apiKeys"]
        if schema().apis[offer["apiKey"]].name in HARMLESS
    }


def ask(address: tuple[str, int], frame: bytes) -> bytes | None:
    """The response, if any: a broker closes the connection on an unreadable request, and acks=0 gets none."""
    with socket.create_connection(address, timeout=60) as sock, sock.makefile("rb") as file:
        sock.sendall(len(frame).to_bytes(4, "big") + frame)
        if frame[:2] == b"\0\0" and codec.decode_request(frame)[1]["acks"] == 0:
            return None
        size = file.read(4)
        return file.read(int.from_bytes(size, "big")) if size else None


def codes(value: Any, name: str = "") -> Iterator[int]:
    """Every error code in a decoded body, at any depth."""
    if isinstance(value, dict):
        for field, inner in value.items():
            yield from codes(inner, field)
    elif isinstance(value, list):
        for inner in value:
            yield from codes(inner, name)
    elif name.lower().endswith("errorcode") and value:
        yield value
