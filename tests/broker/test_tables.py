"""All routes give the same tables of a cluster: recorded live, watched passively, or captured at the same time and
converted, by one process or by Spark."""

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.sql import SparkSession

from kproxy.convert.processes import convert
from kproxy.spark import pipeline
from kproxy.tables import schema
from tests.broker.cluster import Cluster, wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.tools import create_topic, tcpdump
from tests.watch.live import why_not

pytestmark = pytest.mark.timeout(900)  # for the fixture of this module, on a busy machine

# Columns that necessarily differ between a capture of kproxy's clients and kproxy's own record.
CLOCKS = {
    "source": "the name of the file, or of the cluster that was recorded",
    "time": "kproxy's clock is read when bytes come to it, a capture's when a packet passes; so is each column in ns",
    "connection": "numbered by each",
    "reason": "in words, which have durations and addresses in them",
    "host": "clients are told kproxy's addresses, kproxy the brokers'",
    "port": "as `host`",
    "principal": "whom a client is taken for, which kproxy alone knows",
}
# Columns that differ between two packet sockets, kproxy's and tcpdump's: each takes its own timestamps.
OF_FILES = {name: CLOCKS[name] for name in ("source", "connection", "time")} | {
    "in_flight": "two processors write into a ring: each socket has its own order of packets of one moment",
    "out_of_order": "as `in_flight`",
}
KNOWN = [table.name for table in schema.KNOWLEDGE if table is not schema.REGISTRY]
# The API that first reported what two brokers report at one moment: kproxy's two ends order two connections
# differently.
FIRST = {"topology": ("api",)}
# Whether a member had found the coordinator when the response to another member's join named the type of the group.
FOUND = dict.fromkeys(("protocol", "group_type"), "coordinator_found")
# Metrics that depend on traffic alone, by labels. Times come from two clocks; so does whether the end of a rebalance
# was seen after its beginning on another connection: no kproxy_group_rebalance_seconds. Ports of brokers are kproxy's
# own.
SHOWN: dict[str, tuple[str, ...]] = {
    "kproxy_requests_total": ("api", "version"),
    "kproxy_errors_total": ("api", "error"),
    "kproxy_topic_bytes_total": ("topic", "direction"),
    "kproxy_topic_records_total": ("topic", "direction"),
    "kproxy_topic_batches_total": ("topic", "direction", "codec"),
    "kproxy_client_info": ("client_id", "software_name", "software_version"),
    "kproxy_group_rebalances_total": ("group",),
    "kproxy_group_generation": ("group",),
    "kproxy_rebalance_causes_total": ("cause",),
    "kproxy_leadership_changes_total": ("change",),
}


@contextmanager
def captured(path: Path, port: int) -> Iterator[None]:
    """Capture the traffic between clients and kproxy, whose ports begin at `port`."""
    with tcpdump(path, "tcp", "portrange", f"{port}-{port + 5}"):
        yield
        size = -1
        while size != (size := path.stat().st_size):  # until packets in its buffers are written
            time.sleep(2)


class Figures:
    """The values of a running kproxy: metrics that depend on traffic alone, and everything about groups but times."""

    def __init__(self, kproxy: Kproxy) -> None:
        self.metrics = {name: kproxy.totals(name, *by) for name, by in SHOWN.items()}
        # A client looks up its coordinator until it exits, and kproxy may not forward the last request.
        of_apis = self.metrics["kproxy_requests_total"]
        self.metrics["kproxy_requests_total"] = {key: of_apis[key] for key in of_apis if key[0] != "FindCoordinator"}
        self.groups = json.loads(kproxy.get("/api/groups"))
        for group in self.groups:
            for name in ("started_ns", "ended_ns"):
                del group["last_rebalance"][name]


class Routes(NamedTuple):
    folder: Path
    figures: dict[str, Figures]


def table_rows(
    place: Path, table: str, apart: Collection[str] = tuple(CLOCKS), of_events: Mapping[str, str] | None = None
) -> Counter[Any]:
    """The rows of a table as text, without the columns in `apart` and, if there are any, without times.

    of_events: column -> the event in whose rows it is left out too.
    """
    files = (place / table).rglob("*.parquet")
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return Counter(
        tuple(
            (name, str(value))
            for name, value in row.items()
            if name not in apart
            and not (apart and (name == "time" or name.endswith("_ns")))
            and not (of_events and name in of_events and row.get("event") == of_events[name])
        )
        for row in rows
    )


def consumer(bootstrap: str, topic: str, number: int, **settings: Any) -> Consumer:
    common = {"bootstrap.servers": bootstrap, "client.id": f"c{number}", "auto.offset.reset": "earliest"}
    made = Consumer(common | settings)
    made.subscribe([topic])
    return made


def read_through(bootstrap: str, log: str) -> None:
    """Fetch a coordinator's log, as a tool would, up to its current end offsets."""
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.partition.eof": True})
    reader.assign([TopicPartition(log, number, OFFSET_BEGINNING) for number in range(3)])
    ended: set[int] = set()

    def at_end() -> bool:
        for message in reader.consume(1000, 0.2):  # includes records of all earlier tests
            error = message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
        return len(ended) == 3

    wait_for(f"the end of {log}", at_end, 120)
    reader.close()


@pytest.fixture(scope="module")
def routes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Routes:
    """The tables of one run of real clients, by three routes: `kproxy run` records, `kproxy watch` records, tcpdump
    captures."""
    folder = tmp_path_factory.mktemp("same")
    recording = ("--detail", "batches", "--record")
    run = Kproxy(cluster.bootstrap, folder, *recording, str(folder / "live"))
    port = int(run.bootstrap.rpartition(":")[2])
    watch = Kproxy.watching(range(port, port + 6), folder, *recording, str(folder / "watched"))
    if why_not() is None:
        watch.start()
        wait_for("the process that follows groups", lambda: "are followed by" in watch.log.read_text(), 60)
    with captured(folder / "same.pcap", port), run:
        topic = create_topic(run.bootstrap)
        producer = Producer({"bootstrap.servers": run.bootstrap, "client.id": "shop"})
        for number in range(300):
            producer.produce(topic, b"x" * number, partition=number % 3)
        producer.flush(60)
        for protocol in ("classic", "consumer"):
            settings: dict[str, Any] = {"group.id": f"{protocol}-{uuid4().hex[:6]}", "group.protocol": protocol}
            if protocol == "classic":
                settings |= {"partition.assignment.strategy": "range", "session.timeout.ms": 6000}
                settings |= {"heartbeat.interval.ms": 500}
            members = [consumer(run.bootstrap, topic, number, **settings) for number in range(2)]

            def settled(members: list[Consumer] = members) -> bool:
                for each in members:
                    each.poll(0.1)
                owned = [len(each.assignment()) for each in members]
                return sum(owned) == 3 and min(owned) > 0

            wait_for("both own something", settled, 90)
            members.pop().close()
            wait_for("one owns all", settled, 90)
            members.pop().close()
        admin = AdminClient({"bootstrap.servers": run.bootstrap})
        admin.create_partitions([NewPartitions(topic, 5)])[topic].result(60)
        paid = Producer({"bootstrap.servers": run.bootstrap, "transactional.id": f"pay-{uuid4().hex[:6]}"})
        paid.init_transactions(60)
        of_group = Consumer({"bootstrap.servers": run.bootstrap, "group.id": f"paid-{uuid4().hex[:6]}"})
        for end in (paid.commit_transaction, paid.abort_transaction, paid.commit_transaction):
            paid.begin_transaction()
            paid.produce(topic, b"paid", partition=0)
            read = [TopicPartition(topic, 0, 5)]
            paid.send_offsets_to_transaction(read, of_group.consumer_group_metadata(), 60)
            end(60)
        of_group.close()
        for log in ("__consumer_offsets", "__transaction_state"):
            read_through(run.bootstrap, log)
        del admin, producer, paid, of_group, end
        gc.collect()
        wait_for("the end of all clients", lambda: run.metric("kproxy_open_connections") == 0, 60)
        figures = {"run": Figures(run)}
        if why_not() is None:
            figures["watch"] = Figures(watch)
            until = time.monotonic() + 60  # tables that are written once a second, or when there is time
            while vars(figures["run"]) != vars(figures["watch"]) and time.monotonic() < until:
                time.sleep(1)
                figures = {"run": Figures(run), "watch": Figures(watch)}
            watch.stop()
    convert([folder / "same.pcap"], folder / "captured")
    return Routes(folder, figures)


def test_recorded_and_captured_tables_are_equal(routes: Routes) -> None:
    for table in KNOWN:
        apart = (*CLOCKS, *FIRST.get(table, ()))
        live, later = (table_rows(routes.folder / place, table, apart, FOUND) for place in ("live", "captured"))
        assert live == later, table
    assert table_rows(routes.folder / "live", "rebalances").total() >= 5
    assert table_rows(routes.folder / "live", "assignments").total() >= 9
    assert table_rows(routes.folder / "live", "changes").total() >= 1
    rows = map(
        dict, table_rows(routes.folder / "live", "committed_offsets").elements()
    )  # of all groups that the cluster had
    ends = Counter(row["change"] for row in rows if row["group_id"].startswith("paid-"))
    assert ends["pending"] == 3 and ends["aborted"] == 1 and ends["committed"] >= 2
    states = {dict(row)["state"] for row in table_rows(routes.folder / "live", "transactions")}
    assert states >= {"Empty", "Ongoing", "PrepareCommit", "CompleteCommit", "CompleteAbort"}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_watched_and_captured_tables_are_equal(routes: Routes) -> None:
    """Every table is the same, also connections with TCP's counts; only quality may order packets otherwise."""
    for table in (*KNOWN, "exchanges", "partitions", "batches", "connections"):
        watched, later = (table_rows(routes.folder / place, table, OF_FILES) for place in ("watched", "captured"))
        assert later.total() > 0 and watched == later, table
    findings = {
        dict(row)["kind"]: dict(row)["count"]
        for row in table_rows(routes.folder / "watched", "quality")
        if dict(row)["kind"] not in ("clock_back", "out_of_order", "same_packet")
    }
    assert "kernel_drops" not in findings and "gap" not in findings


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_watching_kproxy_reports_the_metrics_of_the_proxying_one(routes: Routes) -> None:
    proxying, watching = routes.figures["run"], routes.figures["watch"]
    for name, values in proxying.metrics.items():
        assert values and watching.metrics[name] == values, name
    # Metrics leave out groups without events for five minutes, which this test may take on a busy machine.
    assert proxying.metrics["kproxy_group_rebalances_total"].keys() <= {(group["group"],) for group in proxying.groups}
    assert watching.groups == proxying.groups
    assert len(proxying.groups) >= 2  # groups found in the coordinator's log are among them


@pytest.mark.skipif("KNOWLEDGE_LONG" not in os.environ, reason="takes a minute: ./dev knowledge routes")
def test_spark_converts_the_capture_to_the_same_tables(routes: Routes, spark: SparkSession) -> None:
    result = pipeline.ingest(
        spark, [routes.folder / "same.pcap"], routes.folder / "spark", split_bytes=100_000, tasks=4
    )
    assert not result.failed
    for table in (*KNOWN, "exchanges", "partitions", "batches", "connections"):
        ours, theirs = (table_rows(routes.folder / place, table, ()) for place in ("spark", "captured"))
        assert theirs.total() > 0 and ours == theirs, table
