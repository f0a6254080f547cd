"""Where a capture's packets are: what a task of the scan emits for the tasks that decode.

Duty: walk the segments of a split and emit, per connection and some MEASURE packets, one row with the time and the
place of each packet, 28 bytes, never its payload. Only packets of compressed files, which have no place to go back to,
and of files in a storage, where to go to places would be a request for each, are carried along. What a split alone
cannot know, whether a packet is stamped earlier than those of the splits before it, is left open in its `Clock`.

Memory: MEASURE packets' places, or of a compressed file some MEASURE_BYTES of packets. Refuses to know sessions and
tables.
"""

import json
from collections.abc import Iterator
from struct import Struct
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from kproxy.capture.quality import NONE, Quality
from kproxy.capture.records import Window
from kproxy.capture.splits import Split, is_plain
from kproxy.capture.storage import is_remote
from kproxy.convert.job import Job
from kproxy.spark.scan import segments

MEASURE = 128 * 1024  # packets in one batch of rows
MEASURE_BYTES = 8 << 20  # and of compressed files

# What the scan emits: rows of packets of one connection, in their order. In place of a file's number: a report of the
# scan itself, its text in `packets`.
REPORT = -1
_PACKETS = (
    ("capture", "int"),
    ("connection", "int"),  # a hash of its ends; Flows distinguishes connections that share a hash
    ("file", "int"),
    ("offset", "bigint"),  # of the last packet
    ("size", "bigint"),  # of the packets, as captured
    ("packets", "binary"),  # PLACE of each
    ("bytes", "binary"),  # the packets, of a file in which nobody can go to a place
)
PACKET_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in _PACKETS)
_ROW = pa.schema(list(zip(
    (name for name, _ in _PACKETS),
    (pa.int32(), pa.int32(), pa.int32(), pa.int64(), pa.int64(), pa.binary(), pa.binary()),
    strict=True,
)))  # fmt: skip
PLACE = np.dtype(
    [("offset", "<i8"), ("time_ns", "<i8"), ("link", "<i4"), ("captured", "<i4"), ("original", "<i4")]
)  # of a packet
_PLACED = Struct("<qqiii")
_OTHER_PORTS = 1 << 40  # no hash of a connection


def packets(number: int, capture: int, file: int, split: Split, job: Job) -> Iterator[pa.RecordBatch]:
    quality = Quality()
    clock = Clock()
    wanted = frozenset(port.to_bytes(2) for port in (*job.ports, *job.zookeeper_ports) if job.ports)
    known: dict[bytes, int] = {}
    inline = is_remote(split.path) or (split.whole and not is_plain(split.path, split.storage))
    connections: list[int] = []  # of the packets that are in no row yet
    places = bytearray()
    bodies: list[bytes] = []
    held = 0  # bytes of bodies
    pack = _PLACED.pack
    secrets: list[bytes] = []
    for window, found in segments(split, quality, secrets):
        clock.window(window, quality)
        data, base = window.data, window.offset
        for (time_ns, link, start, end, original), segment, earlier in found:
            key = segment[1]
            connection = known.get(key)
            if connection is None:
                if len(known) >= 1 << 16:
                    known.clear()
                connection = known[key] = _connection(key, wanted)
            if connection == _OTHER_PORTS:
                quality.note("other_ports", time_ns, size=segment[8])
                continue
            for before_ns, before_link, offset, packet, length in earlier:
                places += pack(offset, before_ns, before_link, len(packet), length)
                connections.append(connection)
                if inline:
                    bodies.append(packet)
            places += pack(base + start, time_ns, link, end - start, original)
            connections.append(connection)
            if inline:
                bodies.append(data[start:end])
                held += end - start
        if len(connections) >= MEASURE or held >= MEASURE_BYTES:
            yield _rows(capture, file, connections, places, bodies)
            connections, places, bodies, held = [], bytearray(), [], 0
    yield _rows(capture, file, connections, places, bodies)
    # what ends inside a record before the file does, began at a place that is no record's
    torn = not split.whole and bool(quality.count("damaged") or (quality.count("cut_file") and not split.last))
    report: dict[str, Any] = {"split": number, "file": file, "torn": torn, "secrets": bool(secrets)}
    report |= {"quality": listed(quality), "clock": vars(clock)}
    yield _row(capture, number, REPORT, 0, 0, json.dumps(report).encode(), None)


def _row(*values: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([value], of.type) for value, of in zip(values, _ROW, strict=True)], schema=_ROW
    )


def _rows(capture: int, file: int, connections: list[int], places: bytearray, bodies: list[bytes]) -> pa.RecordBatch:
    """Packets brought together by connection, a row each."""
    owners = np.array(connections, np.int32)
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    table = np.frombuffer(places, PLACE)[order]
    edges = np.flatnonzero(np.diff(owners, prepend=_OTHER_PORTS, append=_OTHER_PORTS))
    starts, stops = edges[:-1], edges[1:]
    packets = (edges * PLACE.itemsize).astype(np.int32)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.full(len(starts), capture, np.int32)),
            pa.array(owners[starts]),
            pa.array(np.full(len(starts), file, np.int32)),
            pa.array(table["offset"][stops - 1]),
            pa.array(np.add.reduceat(table["captured"], starts, dtype=np.int64) if len(starts) else [], pa.int64()),
            pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(packets), pa.py_buffer(table)]),
            pa.array(
                [b"".join([bodies[at] for at in order[start:stop]]) for start, stop in zip(starts, stops, strict=True)]
                if bodies
                else [None] * len(starts),
                pa.binary(),
            ),
        ],
        schema=_ROW,
    )


class Clock:
    """What a split knows of the capture's clock: the rest depends on the splits before it."""

    def __init__(self, last_ns: int = NONE) -> None:
        self.first_ns = NONE  # the earliest time
        self.last_ns = last_ns  # the latest
        self.back = [0, NONE, NONE]  # packets stamped earlier than one before them: how many, first, last

    def window(self, window: Window, quality: Quality | None) -> None:
        records = window.records
        if not records:
            return
        times = np.fromiter((record[0] for record in records), np.int64, len(records))
        reached = np.maximum.accumulate(np.concatenate(([self.last_ns], times)))
        late = times[times < reached[:-1]]
        if len(late):
            count, first, last = self.back
            first = int(late.min()) if first == NONE else min(first, int(late.min()))
            self.back = [count + len(late), first, max(last, int(late.max()))]
        earliest = int(times.min())
        self.first_ns = earliest if self.first_ns == NONE else min(self.first_ns, earliest)
        self.last_ns = int(reached[-1])
        if quality is not None:
            quality.note("packets", earliest, count=len(records), last_ns=self.last_ns)


def _connection(key: bytes, ports: frozenset[bytes]) -> int:
    if ports and key[-4:-2] not in ports and key[-2:] not in ports:
        return _OTHER_PORTS
    half = len(key) // 2 - 2
    ends = sorted((key[:half] + key[-4:-2], key[half : 2 * half] + key[-2:]))
    return crc32(b"".join(ends)) - (1 << 31)


def listed(quality: Quality) -> list[tuple[str, int, int, int, int]]:
    """The counts of a quality, in terms of JSON."""
    return list(quality.counts())
