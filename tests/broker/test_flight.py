"""The flight recorder before a real cluster: a dump holds the recent traffic, and Wireshark and kproxy read it
alike."""

import json
import shutil
import subprocess
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, Producer

from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from tests.broker.cluster import Cluster
from tests.broker.kproxy import KPROXY, Kproxy
from tests.broker.tools import create_topic

VALUE = b"what-nobody-may-read-in-a-dump"
SAME = ("api", "api_version", "correlation_id", "client_id", "number", "outcome", "error", "throttle_ms", "latency_ns")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def rows(folder: Path, table: str, columns: tuple[str, ...]) -> list[dict[str, object]]:
    files = sorted((folder / table).glob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(file).read(list(columns)) for file in files]).to_pylist() if files else []


def traffic(bootstrap: str) -> str:
    """Write and read back every codec, with one group."""
    topic = create_topic(bootstrap)
    for codec in CODECS:
        producer = Producer({"bootstrap.servers": bootstrap, "client.id": f"p-{codec}", "compression.type": codec})
        for number in range(40):
            producer.produce(topic, VALUE * 3, key=VALUE, headers={"h": VALUE}, partition=number % 2)
        assert producer.flush(20) == 0
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": f"g-{topic}", "auto.offset.reset": "earliest", "client.id": "c"}
    )
    consumer.subscribe([topic])
    read = 0
    while read < 40 * len(CODECS):
        read += len(consumer.consume(100, 10))
    consumer.close()
    return topic


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_dump_holds_the_traffic_so_far(cluster: Cluster, tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "dumps"
    with Kproxy(cluster.bootstrap, tmp_path, "--flight", str(folder), "--workers", str(workers)) as kproxy:
        traffic(kproxy.bootstrap)
        told = json.loads(subprocess.check_output([KPROXY, "ctl", "-a", kproxy.admin, "dump", "--json"]))
        counted = kproxy.metric("kproxy_flight_dumps_total", cause="asked", outcome="written")
        scraped = kproxy.get("/metrics")
    dump = Path(told["folder"])
    files = [dump / name for name in told["files"]]
    assert dump.parent == folder and told["left_out"] == 0 and counted == workers
    begins = [datetime.fromisoformat(told[name]) for name in ("tables_from", "frames_from")]
    assert abs(begins[0] - begins[1]) < timedelta(seconds=6) and "shorter" not in told
    assert "kproxy_flight_bytes{" in scraped
    live = Counter(tuple(row[name] for name in SAME) for row in rows(dump, "exchanges", SAME))
    assert sum(live.values()) == told["exchanges"] > 50

    read = tmp_path / "read"
    convert([str(file) for file in files], read, Settings(checksums=True))
    again = Counter(tuple(row[name] for name in SAME) for row in rows(read, "exchanges", SAME))
    answered = Counter({key: count for key, count in live.items() if key[SAME.index("outcome")] == "answered"})
    assert not answered - again, "each answered exchange of the tables is in the packets, with its times"
    batches = rows(read, "batches", ("codec", "crc_valid", "records", "direction"))
    assert {batch["codec"] for batch in batches} >= set(CODECS) and all(batch["crc_valid"] for batch in batches)
    assert sum(int(str(batch["records"])) for batch in batches if batch["direction"] == "request") == 40 * len(CODECS)

    ports = {row["broker_port"] for row in rows(dump, "exchanges", ("broker_port",))}
    decode = [part for port in sorted(ports) for part in ("-d", f"tcp.port=={port},kafka")]
    tshark = shutil.which("tshark") or "/usr/bin/tshark"
    fields = ["-T", "fields", "-e", "kafka.api_key", "-e", "pkt_comment", "-e", "frame.comment"]
    every = ""
    for file in files:  # one per worker, whichever clients it had
        assert VALUE not in file.read_bytes()
        every += subprocess.check_output([tshark, "-r", file, *decode, "-Y", "kafka", *fields], text=True, stderr=-3)
    assert "Produce v" in every and "answered after" in every
