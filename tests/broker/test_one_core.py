"""What was live and what was captured agree: one decoder, two feeds.

Traffic of real clients goes through kproxy; its live events are kept, and its leg to the brokers is captured. The
capture, converted, tells the same exchanges.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from kproxy.tables.columns import ExchangeColumns
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Event, Exchange, Unanswered
from tests.broker.cluster import Cluster, tool, wait_for
from tests.broker.kproxy import KPROXY, InProcess
from tests.broker.test_clients import consume, produce, sample
from tests.broker.tools import CONSUMER, PRODUCER, create_topic

# What two observers of the same bytes see differently: when, and between whom.
TIMES = {"time", "latency_ns", "queue_ns", "total_ns"} | {
    f"{message}_{end}_ns" for message in ("request", "response") for end in ("start", "end")
}
WHERE = {"source", "connection", "client_address", "client_port", "broker_address", "broker_port", "broker_id"}
OF_TCP = {"retransmissions"}


class Recording:
    """A sink that keeps the exchanges as rows of the table."""

    def __init__(self) -> None:
        self._columns = ExchangeColumns()

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        def take(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, Exchange):
                    self._columns.append(info, event)
                elif isinstance(event, Unanswered):
                    self._columns.append(info, event.exchange)

        return take

    def table(self) -> pa.Table:
        return pa.Table.from_batches([self._columns.batch()])


@contextmanager
def captured(file: Path, cluster: Cluster) -> Iterator[None]:
    """Everything between kproxy and the brokers' CLIENT listeners, by tcpdump."""
    ports = " or ".join(f"(host {broker.host} and port {broker.port})" for broker in cluster.brokers)
    command = [shutil.which("tcpdump", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "tcpdump"]
    command += ["-i", "lo", "-s", "0", "-U", "-B", "65536", "-w", str(file), "-Z"]
    command = [*command, "root", ports] if os.geteuid() == 0 else ["sudo", "-n", *command, os.environ["USER"], ports]
    errors = file.with_suffix(".err")
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr)
    try:
        wait_for("tcpdump to listen", lambda: "listening on" in errors.read_text() or process.poll() is not None, 10)
        assert process.poll() is None, f"tcpdump ended: {errors.read_text()}"
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)
    assert "\n0 packets dropped by kernel" in errors.read_text(), errors.read_text()


def by_connection(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """The rows of each connection in their order, without what the observers see differently."""
    names = [name for name in table.column_names if name not in TIMES | WHERE | OF_TCP]
    rows: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
    order = table.sort_by([("connection", "ascending"), ("number", "ascending")])
    for connection, *row in zip(*(order[name].to_pylist() for name in ("connection", *names)), strict=True):
        rows[connection].append(tuple(row))
    return Counter(tuple(connection) for connection in rows.values())


def test_live_events_and_capture_agree(cluster: Cluster, tmp_path: Path) -> None:
    recording = Recording()
    capture = tmp_path / "leg.pcap"
    with captured(capture, cluster), InProcess(cluster.bootstrap, recording) as kproxy:
        topic = create_topic(kproxy.bootstrap)
        records = sample(2000, "librdkafka")
        produce(kproxy.bootstrap, topic, records[:1000], enable_idempotence=True, compression_type="lz4")
        produce(kproxy.bootstrap, topic, records[1000:], acks="0")
        tool(PRODUCER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, stdin=b"x\n" * 3000)
        consume(kproxy.bootstrap, topic, 5000)
        tool(
            *(CONSUMER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, "--from-beginning"),
            *("--group", "one-core", "--max-messages", "5000", "--timeout-ms", "30000"),
        )
    tables = tmp_path / "tables"
    subprocess.run([KPROXY, "convert", str(capture), "--out", str(tables)], check=True, stdout=sys.stderr)
    offline = pa.parquet.read_table(tables / "exchanges")
    live = recording.table()
    # kproxy asks the cluster on connections of its own, which are nobody's exchange.
    own = pa.compute.starts_with(offline["client_id"].fill_null(""), "kproxy-")
    assert 0 < pa.compute.sum(own).as_py() < 10
    offline = offline.filter(pa.compute.invert(own))

    assert live.num_rows > 100
    assert {"Produce", "Fetch", "JoinGroup", "Metadata", "ApiVersions"} <= set(live["api"].to_pylist())
    assert {"answered", "no_answer_expected"} <= set(live["outcome"].to_pylist())
    assert by_connection(offline) == by_connection(live)
