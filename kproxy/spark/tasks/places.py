"""The scan task of a part of a capture: emits rows of tables, and the places of packets of deferred connections.

Duty: the task reads a part (see `convert.parts.reader`) from front to end, and emits four kinds of rows: pieces of
tables; a report; excerpts of the connections that the part claimed, that ended, or that were handed over; and for each
deferred connection the time and the place of each packet, 28 bytes, some MEASURE packets per row. It emits packets of
compressed files with their bytes, and also packets of files in a storage, where reading each place would cost a
request. A part alone cannot decide whether a packet has an earlier time than packets of earlier parts; `results` does.

Memory: places of a part's packets.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kproxy.capture.dissection.keys import Pair
from kproxy.capture.formats.splits import is_plain
from kproxy.capture.formats.storage import is_remote
from kproxy.capture.quality import NONE, Quality
from kproxy.convert import machine
from kproxy.convert.job import Job
from kproxy.convert.parts import reader
from kproxy.convert.parts.joining import without
from kproxy.convert.parts.places import MEASURE_BYTES, PLACE, Group, grouped
from kproxy.convert.parts.reader import Part
from kproxy.errors import CaptureError
from kproxy.spark.tasks.pieces import NAMES, words
from kproxy.spark.tasks.sorters import Sorters
from kproxy.tables import arrays
from kproxy.tables.names import Names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The scan emits rows with packets of one connection, in their order. The column `file` holds a file's number, or one of
# these values; then `packets` is a report as JSON, a piece's data (`pieces_of`), or a pickled list of `Excerpt`.
REPORT, PIECE, EXCERPTS = -1, -2, -3
_PACKETS = (
    ("capture", "int"),
    ("connection", "bigint"),  # a hash of its addresses and ports; connections of one hash are not read in parts
    ("part", "int"),  # twice the part's number, plus 1 after its warm-up
    ("file", "int"),
    ("offset", "bigint"),  # offset of the last packet; of a piece: its hour
    ("size", "bigint"),  # captured bytes of the packets
    ("packets", "binary"),  # PLACE of each packet
    ("bytes", "binary"),  # the packets themselves, if the file has no random access
    ("kind", "string"),  # kind of a piece
    ("count", "bigint"),  # count of a piece
)
CONNECTIONS_PER_BATCH = 1000  # connections per batch: a batch of one row costs 0.4 ms
PACKET_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in _PACKETS)
_TYPES = {"int": pa.int32(), "bigint": pa.int64(), "binary": pa.binary(), "string": pa.string()}
_ROW = pa.schema([(name, _TYPES[kind]) for name, kind in _PACKETS])


def packets(number: int, capture: int, part: Part, job: Job) -> Iterator[pa.RecordBatch]:
    """Yield the rows (PACKET_SCHEMA) of a part. number: the task's number, for its report."""
    try:
        yield from _packets(number, capture, part, job)
    except CaptureError as fault:  # do not stop other captures; the task that reads this one whole reports the error
        yield _report(number, capture, {"unsplittable": str(fault)})


def _packets(number: int, capture: int, part: Part, job: Job) -> Iterator[pa.RecordBatch]:
    machine.retain()
    carries = [split for split in (part.split, part.following) if split is not None]
    inline = any(is_remote(split.path) or not is_plain(split.path, split.storage) for split in carries)
    with TemporaryDirectory(prefix="kproxy-") as place, machine.seldom_collected():
        folder = Path(place)
        sorters = Sorters(job, folder, "")
        if inline:
            with (folder / "spool").open("w+b") as spool:
                found = reader.read(job, part, sorters.add, spool)
                yield from _reports(number, capture, found)
                spool.flush()
                yield from _deferred(capture, part.number, found, np.memmap(spool, mode="r") if spool.tell() else None)
        else:
            found = reader.read(job, part, sorters.add)
            yield from _reports(number, capture, found)
            yield from _deferred(capture, part.number, found, None)
        if found.names:
            yield from _pieces(capture, words(capture, NAMES, [job.source, found.names.as_json()]))
        for piece in sorters.pieces(lambda rows: without(found.left, rows)):
            yield from _pieces(capture, piece)


def _pieces(capture: int, some: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    kinds, hours, counts = (some.column(name).to_pylist() for name in ("kind", "hour", "count"))
    for kind, hour, count, data in zip(kinds, hours, counts, some.column("data"), strict=True):
        packed = data.as_py()
        yield _row(capture, 0, 0, PIECE, hour, len(packed), packed, None, kind, count)


def pieces_of(rows: "DataFrame") -> "DataFrame":
    """Return the pieces (PIECES) that the scan emitted."""
    from pyspark.sql import functions as F

    hour, data = F.col("offset").alias("hour"), F.col("packets").alias("data")
    return rows.where(F.col("file") == PIECE).select("capture", "kind", hour, "count", "size", data)


def _reports(number: int, capture: int, found: reader.Found) -> Iterator[pa.RecordBatch]:
    counts = listed(found.quality)
    back = next((row for row in counts if row[0] == "clock_back"), None)
    report: dict[str, Any] = {
        "unsplittable": found.unsplittable,
        "conflicting": named_conflicting(found.conflicting),
        "quality": [row for row in counts if row is not back],
        "clock": {
            "times": [found.begin, found.until, found.first_ns, found.last_ns],
            "back": [0, NONE, NONE] if back is None else [back[1], back[3], back[4]],
        },
        "names": found.names.as_json(),
        "logs": [list(found.logs.items()), sorted(found.doubted)],
        "read_bytes": found.read_bytes,
        "carried_bytes": sum(int(some["captured"].sum()) for *_, some, _ in found.packets.of(found.deferred)),
    }
    yield _report(number, capture, report)
    all_excerpts = iter(_by_hash(found.excerpts).items())
    while some := list(islice(all_excerpts, CONNECTIONS_PER_BATCH)):
        yield _listed([(capture, of, NONE, EXCERPTS, 0, 0, pickle.dumps(each), None, None, None) for of, each in some])


def _report(split: int, capture: int, values: Mapping[str, Any]) -> pa.RecordBatch:
    """Return the report of a split; a report of an unreadable split holds only the reason."""
    nothing = {
        "conflicting": [],
        "quality": [],
        "clock": {"times": [NONE] * 4, "back": [0, NONE, NONE]},
        "names": Names().as_json(),
        "logs": [[], []],
        "read_bytes": 0,
        "carried_bytes": 0,
    }
    report = {"split": split, **nothing, **values}
    return _row(capture, 0, 0, REPORT, 0, 0, json.dumps(report).encode(), None, None, None)


def named_conflicting(conflicting: Mapping[Pair, str]) -> list[list[str]]:
    """Return conflicting connections as JSON values; at most MAX_CONFLICTING + 1 of them."""
    return [[pair[0].hex(), why] for pair, why in islice(sorted(conflicting.items()), reader.MAX_CONFLICTING + 1)]


def _named(pair: Pair) -> int:
    """Return a hash of 64 bits: with 32 bits, some two of 100,000 connections would probably share a hash."""
    return int.from_bytes(blake2b(pair[0], digest_size=8).digest(), signed=True)


def _by_hash(all_excerpts: list[reader.Excerpt]) -> dict[int, list[reader.Excerpt]]:
    found: dict[int, list[reader.Excerpt]] = {}
    for excerpt in all_excerpts:
        found.setdefault(_named(excerpt.pair), []).append(excerpt)
    return found


def _deferred(
    capture: int, number: int, found: reader.Found, spool: "np.memmap[Any, Any] | None"
) -> Iterator[pa.RecordBatch]:
    """Yield the packets of deferred connections, grouped by connection."""
    hashes = np.array(list(map(_named, found.packets.pairs)), np.int64)
    for group in grouped(found.packets, found.deferred, MEASURE_BYTES if spool is not None else 1 << 62):
        yield _rows(capture, 2 * number + group.phase, group, hashes, spool)


def _row(*values: Any) -> pa.RecordBatch:
    return _listed([values])


def _listed(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [arrays.listed(of.type, values) for values, of in zip(columns, _ROW, strict=True)], schema=_ROW
    )


def _rows(
    capture: int, part: int, group: Group, hashes: np.ndarray, spool: "np.memmap[Any, Any] | None"
) -> pa.RecordBatch:
    """Return packets of connections, one row per connection."""
    starts, stops, table = group.edges[:-1], group.edges[1:], group.places
    packets = (group.edges * PLACE.itemsize).astype(np.int32)
    bodies: list[bytes | None] = [None] * len(starts)
    if spool is not None:
        ends = group.spooled + table["captured"]
        bodies = [
            b"".join(spool[at:end].tobytes() for at, end in zip(group.spooled[a:b], ends[a:b], strict=True))
            for a, b in zip(starts, stops, strict=True)
        ]
    numbers = (
        np.full(len(starts), capture),
        hashes[group.owners],
        np.full(len(starts), part),
        np.full(len(starts), group.file),
        table["offset"][stops - 1],
        np.add.reduceat(table["captured"], starts, dtype=np.int64),
    )
    return pa.RecordBatch.from_arrays(
        [
            *map(arrays.array, _ROW.types, numbers),
            pa.Array.from_buffers(
                pa.binary(), len(starts), [None, pa.py_buffer(packets), pa.py_buffer(np.ascontiguousarray(table))]
            ),
            arrays.listed(pa.binary(), bodies),
            pa.nulls(len(starts), pa.string()),
            pa.nulls(len(starts), pa.int64()),
        ],
        schema=_ROW,
    )


def listed(quality: Quality) -> list[tuple[str, int, int, int, int]]:
    """Return the counts of a quality as JSON values."""
    return list(quality.counts())
