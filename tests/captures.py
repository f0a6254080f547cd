"""The captures of tests/data, unpacked once per test run."""

import gzip
import json
import lzma
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kproxy.protocol.records import BatchHeader
from kproxy.wire import bodies
from kproxy.wire.events import ANSWERED, FULL, Exchange
from kproxy.wire.offline.bulk import NULL, Bodies, Bulk

DATA = Path(__file__).parent / "data" / "captures"

_unpacked = []  # the folder lives as long as the process


@cache
def folder(archive: str) -> Path:
    directory = TemporaryDirectory(prefix="kproxy-captures-")
    _unpacked.append(directory)
    with lzma.open(DATA / f"{archive}.tar.xz") as stream, tarfile.open(fileobj=stream) as bundle:
        bundle.extractall(directory.name)  # ours; a filter is not known before 3.11.4
    return Path(directory.name)


def capture(name: str) -> Path:
    """The file of a capture, by its name without or with its ending."""
    for archive in ("captures", "shapes"):
        for candidate in (name, f"{name}.pcap", f"{name}.pcapng", f"{name}.pcap.gz"):
            path = folder(archive) / candidate
            if path.is_file():
                return path
    raise FileNotFoundError(name)


@cache
def expected(name: str) -> list[dict]:
    """The exchanges that an independent walk of the capture found."""
    path = capture(f"{name}.exchanges.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def top_level(row: dict) -> tuple:
    """A row of `exchanges` as a line of NAME.exchanges.jsonl.gz says it, less throttle and error."""
    return (
        row["client_port"],
        row["broker_port"],
        row["correlation_id"],
        row["api_key"],
        row["api_version"],
        row["client_id"],
        row["outcome"] == "answered",
    )


def line(entry: dict) -> tuple:
    """The same of a line of NAME.exchanges.jsonl.gz."""
    return (
        entry["client_port"],
        entry["broker_port"],
        entry["id"],
        entry["key"],
        entry["version"],
        entry["client_id"],
        entry["answered"],
    )


def counted(tuples) -> Counter:
    return Counter(tuples)


def one_by_one(bulk: Bulk) -> Iterator[tuple[int, Exchange]]:
    """The exchanges of a bulk, each with its connection."""
    for row, connection in enumerate(bulk.connection.tolist()):
        said = {name: int(column[row]) for name, column in bulk.columns.items()}
        code = said["error_code"]
        first = (said.pop(name) for name in ("correlation_id", "number", "in_flight", "request_bytes", "request_start"))
        replica_id, has_rack = said.pop("replica_id"), said.pop("has_rack")
        exchange = Exchange(bulk.plan, *first)
        for name, value in said.items():
            setattr(exchange, name, value)
        exchange.error_code = None if code == NULL else code
        exchange.errors = (code,) if code not in (0, NULL) else ()
        exchange.outcome, exchange.decoded = ANSWERED, FULL
        (
            exchange.client_id,
            exchange.acks,
            exchange.max_wait_ms,
            exchange.group_id,
            exchange.transactional_id,
        ) = bulk.prefixes[bulk.prefix[row]]
        if bulk.request_body is not None:
            exchange.request_body = found(bulk.request_body, row)
            if replica_id >= 0:
                exchange.request_body.replica_id = replica_id
            if has_rack:
                exchange.request_body.has_rack = True
        if bulk.response_body is not None:
            exchange.response_body = found(bulk.response_body, row)
        yield connection, exchange


def found(columns: Bodies, number: int) -> bodies.Found:
    """What one of many bodies says."""
    one = bodies.Found()
    rows = np.flatnonzero(columns.of == number)
    one.partitions = []
    for row in rows.tolist():
        numbers: dict[str, Any] = {name: int(column[row]) for name, column in columns.numbers.items()}
        if numbers["error_code"] == NULL:
            numbers["error_code"] = None
        topic, topic_id = columns.topics[columns.topic[row]]
        texts = {name: columns.texts[name][row] if name in columns.texts else None for name in ("group_id", "metadata")}
        one.partitions.append(bodies.Partition(topic=topic, topic_id=topic_id, **texts, **numbers))
    mine = np.isin(columns.batch_of, rows)
    one.batches = []
    for place, header in zip(np.searchsorted(rows, columns.batch_of[mine]), columns.batches[mine], strict=True):
        of = one.partitions[place]
        header = BatchHeader(*header.tolist())
        one.batches.append(bodies.Batch(of.topic, of.topic_id, of.partition, header, False, None, None))
    return one
