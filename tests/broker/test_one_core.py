"""Live and captured traffic give the same rows: one decoder reads both.

Real clients send traffic through kproxy, which records it; its connections to the brokers are captured. The converted
capture has the same rows.
"""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest
from confluent_kafka import Producer

from kproxy.tables.schema import EXCHANGES
from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import KPROXY, Kproxy
from tests.broker.test_clients import consume, produce, sample
from tests.broker.tools import CONSUMER, PRODUCER, as_root, create_topic, user

# Columns that two observers of the same bytes fill differently: times and endpoints. Losses and windows are visible in
# packets alone.
TIMES = {"time", "latency_ns", "queue_ns", "muted_ns", "total_ns", "sending_ns", "broker_ns", "receiving_ns"} | {
    f"{message}_{end}_ns" for message in ("request", "response") for end in ("start", "end")
}
# The requests in flight are counted at different moments: a response that was captured may not have been read yet.
MOMENT = {"in_flight"}
WHERE = {"source", "connection", "client_address", "client_port", "broker_address", "broker_port", "broker_id"}
LAST = b"the last packet of this capture"
OF_TCP = {"retransmissions", "loss_ns", "closed_window_ns"}
COMPARED = [name for name in EXCHANGES.schema.names if name not in TIMES | MOMENT | WHERE | OF_TCP]
NAMES = ["connection", "number", "api", "api_version", "correlation_id", "client_id"]


@contextmanager
def captured(file: Path, cluster: Cluster) -> Iterator[None]:
    """Capture everything between kproxy and the brokers' CLIENT listeners with tcpdump."""
    ports = " or ".join(f"(host {broker.host} and port {broker.port})" for broker in cluster.brokers)
    command = [shutil.which("tcpdump", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "tcpdump"]
    command += ["-i", "lo", "-s", "0", "-U", "-B", "65536", "-w", str(file), "-Z", user(), ports]
    command = [*as_root(), *command]
    errors = file.with_suffix(".err")
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr)
    try:
        wait_for("tcpdump to listen", lambda: "listening on" in errors.read_text() or process.poll() is not None)
        assert process.poll() is None, f"tcpdump ended: {errors.read_text()}"
        yield
        # tcpdump writes packets late and in batches: once it has written this last packet, it has written all before
        # it.
        with socket.socket(type=socket.SOCK_DGRAM) as sock:
            sock.sendto(LAST, (cluster.brokers[0].host, cluster.brokers[0].port))
        wait_for("tcpdump to write what it has seen", lambda: LAST in file.read_bytes())
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)
    assert "\n0 packets dropped by kernel" in errors.read_text(), errors.read_text()


def ask_for_unknown_topic(bootstrap: str) -> None:
    """Ask for the metadata of an unknown topic and close after the response.

    librdkafka repeats the request by itself and closes while one is in flight, whose response may or may not reach
    kproxy.
    """
    name = b"no-such-topic"
    request = struct.pack(f">hhihih{len(name)}s?", 3, 4, 7, -1, 1, len(name), name, False)  # Metadata v4
    host, _, port = bootstrap.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock, sock.makefile("rb") as answers:
        sock.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", answers.read(4))
        assert name in answers.read(size)


Row = tuple[Any, ...]


def by_connection(table: pa.Table) -> dict[tuple[Row, ...], list[list[Row]]]:
    """The rows of each connection in order, keyed by what the connection asked; equal keys are grouped and sorted."""
    rows: defaultdict[int, list[Row]] = defaultdict(list)
    names: defaultdict[int, list[Row]] = defaultdict(list)
    table = table.sort_by([("connection", "ascending"), ("number", "ascending")])
    for row in table.select(NAMES).to_pylist():
        names[row["connection"]].append(tuple(row[name] for name in NAMES))
    for row in table.to_pylist():
        rows[row["connection"]].append(tuple(row[name] for name in COMPARED))
    connections: defaultdict[tuple[Row, ...], list[list[Row]]] = defaultdict(list)
    for connection, asked in names.items():
        connections[tuple(name[1:] for name in asked)].append(rows[connection])
    return {asked: sorted(like, key=repr) for asked, like in connections.items()}


def differences(offline: pa.Table, live: pa.Table) -> list[str]:
    """The differences as sentences, so that a failure shows where to look."""
    captured, seen = by_connection(offline), by_connection(live)
    found = [f"only captured, {len(captured[asked])} times: {asked}" for asked in captured.keys() - seen.keys()]
    found += [f"only live, {len(seen[asked])} times: {asked}" for asked in seen.keys() - captured.keys()]
    for asked in captured.keys() & seen.keys():
        if len(captured[asked]) != len(seen[asked]):
            found.append(f"captured {len(captured[asked])} times, live {len(seen[asked])}: {asked}")
        for theirs, ours in zip(captured[asked], seen[asked], strict=False):
            for what, one, other in zip(asked, theirs, ours, strict=True):
                found += [
                    f"{what}: {name} is {cell!r} in the capture, {live_cell!r} live"
                    for name, cell, live_cell in zip(COMPARED, one, other, strict=True)
                    if cell != live_cell
                ]
    return found


def transact(bootstrap: str, topic: str) -> None:
    """One transaction that commits and one that aborts."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"one-core-{topic}"})
    producer.init_transactions(30)
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce(topic, b"in a transaction")
        end(30)


def of_bodies(folder: Path, table: str) -> Counter[Row]:
    """The rows of a table about bodies, without the columns that differ between observers."""
    rows = pa.parquet.read_table(folder / table)
    names = [name for name in rows.column_names if name not in TIMES | WHERE | {"lag_ns"}]
    return Counter(tuple(row[name] for name in names) for row in rows.select(names).to_pylist())


def of_connections(folder: Path) -> Counter[Row]:
    """The rows of connections with requests, except kproxy's own, without times, endpoints and TCP counts."""
    exchanges = pa.parquet.read_table(folder / "exchanges", columns=["connection", "client_id"]).to_pylist()
    asked = {row["connection"] for row in exchanges if not (row["client_id"] or "").startswith("kproxy-")}
    # Bytes are left out: in a capture they include retransmissions.
    names = ["requests", "answers", "software_name", "software_version", "sasl_mechanism", "sasl_tokens"]
    names += ["tls", "faults"]
    rows = pa.parquet.read_table(folder / "connections").to_pylist()
    return Counter(tuple(row[name] for name in names) for row in rows if row["connection"] in asked)


@pytest.mark.ring2
@pytest.mark.sampled(1)
@pytest.mark.parametrize("detail", ["batches", "headers"])
def test_live_and_captured_agree(cluster: Cluster, detail: str, tmp_path: Path) -> None:
    capture, recorded, converted = tmp_path / "leg.pcap", tmp_path / "recorded", tmp_path / "converted"
    kproxy = Kproxy(cluster.bootstrap, tmp_path, "--record", str(recorded), "--detail", detail)
    with captured(capture, cluster), kproxy:
        topic = create_topic(kproxy.bootstrap)
        records = sample(2000, "one core")
        small = {"batch_num_messages": 10, "compression_type": "lz4"}
        produce(kproxy.bootstrap, topic, records[:1000], enable_idempotence=True, **small)
        produce(kproxy.bootstrap, topic, records[1000:], acks="0", **small)
        produce(kproxy.bootstrap, topic, [(b"large", bytes(1_000_000))] * 3)
        transact(kproxy.bootstrap, topic)
        tool(PRODUCER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, stdin=b"x\n" * 3000)
        ask_for_unknown_topic(kproxy.bootstrap)
        consume(kproxy.bootstrap, topic, 5004)
        tool(
            *(CONSUMER, "--bootstrap-server", kproxy.bootstrap, "--topic", topic, "--from-beginning"),
            *("--group", f"one-core-{detail}", "--max-messages", "5000", "--timeout-ms", "120000"),
        )
    convert = [KPROXY, "convert", str(capture), "--out", str(converted), "--detail", detail]
    subprocess.run(convert, check=True, stdout=sys.stderr)
    offline = pa.parquet.read_table(converted / "exchanges")
    live = pa.parquet.read_table(recorded / "exchanges")
    # kproxy's own requests, on connections of its own, depend on how long it runs.
    own = pa.compute.starts_with(offline["client_id"].fill_null(""), "kproxy-")
    assert pa.compute.any(own).as_py()
    offline = offline.filter(pa.compute.invert(own))

    assert not differences(offline, live)
    assert pa.compute.sum(offline["in_flight"]).as_py() <= pa.compute.sum(live["in_flight"]).as_py()
    assert of_connections(converted) == of_connections(recorded)
    assert of_connections(recorded).total() > 20
    if detail == "batches":
        for table in ("partitions", "batches"):
            rows = of_bodies(recorded, table)
            assert not of_bodies(converted, table) - rows
            assert not rows - of_bodies(converted, table)
            assert rows.total() > 200
    # There was enough to compare.
    assert live.num_rows > 200
    assert {"Produce", "Fetch", "JoinGroup", "Metadata", "ApiVersions", "EndTxn"} <= set(live["api"].to_pylist())
    assert {"answered", "no_answer_expected"} <= set(live["outcome"].to_pylist())
    assert pa.compute.max(live["errors"]).as_py() > 0
    assert pa.compute.max(live["request_bytes"]).as_py() > 1_000_000
    assert pa.compute.max(live["response_bytes"]).as_py() > 1_000_000
