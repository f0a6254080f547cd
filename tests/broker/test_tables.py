"""What is known of a cluster is the same by all routes: recorded live, or captured at the same time and converted."""

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from kproxy.convert.processes import convert
from kproxy.tables import schema
from tests.broker.cluster import Cluster, wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.tools import as_root, create_topic

# What a capture of kproxy's clients sees otherwise: clocks, connections, kproxy's ports in place of the brokers'; and
# whom a client is taken for, which kproxy alone knows.
CLOCKS = {"source", "time", "connection", "reason", "host", "port", "principal"}
ROUTES = [table.name for table in schema.KNOWLEDGE if table is not schema.REGISTRY]


@contextmanager
def captured(path: Path, port: int) -> Iterator[None]:
    """A capture of what clients and kproxy, whose ports begin at `port`, say to each other."""
    tcpdump = shutil.which("tcpdump") or "/usr/sbin/tcpdump"
    command = [
        *as_root(),
        tcpdump,
        "-i",
        "lo",
        "-U",
        "-B",
        "65536",
        "-w",
        str(path),
        "tcp",
        "portrange",
        f"{port}-{port + 5}",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while b"listening on" not in process.stderr.readline():
            assert process.poll() is None
        yield
        time.sleep(1)  # of packets that are in its buffers
    finally:
        process.terminate()
        process.communicate(timeout=30)


def told(place: Path, table: str) -> Counter[Any]:
    files = (place / table).glob("*.parquet")
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return Counter(
        tuple((name, str(value)) for name, value in row.items() if name not in CLOCKS and not name.endswith("_ns"))
        for row in rows
    )


def consumer(bootstrap: str, topic: str, number: int, **settings: Any) -> Consumer:
    common = {"bootstrap.servers": bootstrap, "client.id": f"c{number}", "auto.offset.reset": "earliest"}
    made = Consumer(common | settings)
    made.subscribe([topic])
    return made


def test_recorded_and_captured_are_the_same(cluster: Cluster, tmp_path: Path) -> None:
    kproxy = Kproxy(cluster.bootstrap, tmp_path, "--detail", "topics", "--record", str(tmp_path / "live"))
    with captured(tmp_path / "same.pcap", int(kproxy.bootstrap.rpartition(":")[2])), kproxy:
        topic = create_topic(kproxy.bootstrap)
        producer = Producer({"bootstrap.servers": kproxy.bootstrap})
        for number in range(30):
            producer.produce(topic, b"x", partition=number % 3)
        producer.flush(60)
        for protocol in ("classic", "consumer"):
            settings: dict[str, Any] = {"group.id": f"{protocol}-{uuid4().hex[:6]}", "group.protocol": protocol}
            if protocol == "classic":
                settings |= {"partition.assignment.strategy": "range", "session.timeout.ms": 6000}
            members = [consumer(kproxy.bootstrap, topic, number, **settings) for number in range(2)]

            def settled(members: list[Consumer] = members) -> bool:
                for each in members:
                    each.poll(0.1)
                owned = [len(each.assignment()) for each in members]
                return sum(owned) == 3 and min(owned) > 0

            wait_for("both own something", settled, 90)
            members.pop().close()
            wait_for("one owns all", settled, 90)
            members.pop().close()
        admin = AdminClient({"bootstrap.servers": kproxy.bootstrap})
        admin.create_partitions([NewPartitions(topic, 5)])[topic].result(60)
    convert([tmp_path / "same.pcap"], tmp_path / "captured")
    for table in ROUTES:
        live, later = (told(tmp_path / place, table) for place in ("live", "captured"))
        assert live == later, table
    assert told(tmp_path / "live", "rebalances").total() >= 5
    assert told(tmp_path / "live", "assignments").total() >= 9
    assert told(tmp_path / "live", "changes").total() >= 1
