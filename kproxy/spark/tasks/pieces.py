"""Pieces, the output of an ingest's tasks: sorted rows of one table and hour as bytes, and JSON about captures.

Duty: a piece is a row of PIECES. If its `kind` is a table, `data` holds sorted rows as a Parquet file, which takes a
fifth of the space of compressed Arrow, and half of the CPU. `data` of the other kinds is JSON about a capture. All
tables are therefore in one compressed DataFrame, which Spark persists, shuffles and recomputes; `store` makes tables of
it. `each` runs a function over units of work, one task for each.

Memory: PIECE_ROWS rows.
"""

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, pairwise
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kproxy.convert.parts.joining import Correction, corrected
from kproxy.errors import CaptureError, StorageError
from kproxy.tables import arrays, writer
from kproxy.tables.schema import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PIECES = "capture int, kind string, hour bigint, count bigint, size bigint, data binary"
PIECE_ROWS = 64 * 1024
PIECE_BYTES = 16 << 20
MAX_PICKLED = 1000  # up to so many units of work are pickled with the function; more, or more bytes, become rows
MAX_PICKLED_BYTES = 256 << 10

# Kinds other than tables: the report of a split's scan; names of topics from responses; counts of `quality`; the error
# of an unreadable capture. Input of insight has the kind INSIGHT plus the name of its table.
REPORT, NAMES, COUNTS, FAILED, INSIGHT = "report", "names", "counts", "failed", "content "
# Kinds of captures that are read in parts: why a capture is unsplittable, or which of its connections conflict;
# corrections of rows of a connection; topics that are coordinators' logs; bytes that were read a second time.
UNSPLITTABLE, CONFLICTING, CORRECTIONS, LOGS, READ = "unsplittable", "conflicting", "corrections", "logs", "read"
NO_HOUR = -1
_SCHEMA = pa.schema(
    [
        ("capture", pa.int32()),
        ("kind", pa.string()),
        ("hour", pa.int64()),
        ("count", pa.int64()),
        ("size", pa.int64()),
        ("data", pa.binary()),
    ]
)
_HOUR_US = 3_600_000_000


def each(
    spark: "SparkSession", work: Iterable[Any], run: Callable[[Any], Iterator[pa.RecordBatch]], schema: str
) -> "DataFrame":
    """Return the rows that `run` makes of each unit of work, one task per unit; `work` is consumed one by one."""
    packed = map(pickle.dumps, work)
    few, size = list[bytes](), 0
    while len(few) <= MAX_PICKLED and size <= MAX_PICKLED_BYTES:
        piece = next(packed, None)
        if piece is None:
            return _near(spark, few, run, schema)
        few.append(piece)
        size += len(piece)

    def far(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for piece in batch.column(1).to_pylist():
                yield from run(pickle.loads(piece))

    with spooled(chain(few, packed)) as rows:
        count = rows.num_rows
        return spark.createDataFrame(rows).repartitionById(count, "number").mapInArrow(far, schema)


def _near(
    spark: "SparkSession", work: Sequence[bytes], run: Callable[[Any], Iterator[pa.RecordBatch]], schema: str
) -> "DataFrame":
    def near(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from run(pickle.loads(work[number]))

    return spark.range(0, len(work), 1, max(1, len(work))).mapInArrow(near, schema)


@contextmanager
def spooled(pieces: Iterable[bytes]) -> Iterator[pa.Table]:
    """Yield pieces with their numbers, as a table in a memory-mapped file; it is deleted at the end of the context."""
    schema = pa.schema([("number", pa.int32()), ("piece", pa.binary())])
    with NamedTemporaryFile(prefix="kproxy-") as file:
        with pa.OSFile(file.name, "w") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for some in _batches(enumerate(pieces)):
                columns = [pa.array(of, field.type) for of, field in zip(zip(*some, strict=True), schema, strict=True)]
                stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        with pa.memory_map(file.name) as mapped:
            yield pa.ipc.open_stream(mapped).read_all()


def _batches(numbered: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    waiting, size = list[tuple[int, bytes]](), 0
    for number, piece in numbered:
        waiting.append((number, piece))
        size += len(piece)
        if size >= MAX_PICKLED_BYTES or len(waiting) >= MAX_PICKLED:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def frame(spark: "SparkSession", rows: Sequence[Sequence[Any]], columns: str) -> "DataFrame":
    """Return rows of the driver as a DataFrame, through Arrow: Spark would pass a list through Python workers first."""
    names, kinds = zip(*(column.split() for column in columns.split(", ")), strict=True)
    types = {"int": pa.int32(), "bigint": pa.int64(), "binary": pa.binary(), "string": pa.string()}
    values = zip(*rows, strict=True) if rows else [()] * len(names)
    arrays = [pa.array(column, types[kind]) for column, kind in zip(values, kinds, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, names=list(names)))


def words(capture: int, kind: str, content: Any) -> pa.RecordBatch:
    """Return a piece whose data is JSON."""
    return _piece(capture, kind, NO_HOUR, 0, json.dumps(content).encode())


def failed(capture: int, fault: CaptureError) -> pa.RecordBatch:
    """Return a piece with the error of an unreadable capture."""
    content = str(fault).removeprefix(f"{fault.name}: ")
    return words(capture, FAILED, (fault.name, content, isinstance(fault, StorageError)))


def fault_of(data: bytes) -> CaptureError:
    """Return the error in the data of a piece that `failed` made."""
    name, content, may_pass = json.loads(data)
    return (StorageError if may_pass else CaptureError)(name, content)


def rows(table: Table, parts: Iterable[pa.Table], kind: str | None = None) -> Iterator[pa.RecordBatch]:
    """Yield pieces of sorted rows, each of one hour if the table has the column `time`."""
    for hour, of_hour in hours(parts) if "time" in table.schema.names else [(NO_HOUR, parts)]:
        waiting: list[pa.Table] = []
        count = size = 0
        for part in of_hour:
            for start in range(0, part.num_rows, writer.STEP_ROWS):
                waiting.append(part.slice(start, writer.STEP_ROWS))
                count += waiting[-1].num_rows
                size += waiting[-1].nbytes
                if count >= PIECE_ROWS or size >= PIECE_BYTES:
                    yield _packed(table, kind, hour, waiting)
                    waiting, count, size = [], 0, 0
        if waiting:
            yield _packed(table, kind, hour, waiting)


def hours(parts: Iterable[pa.Table]) -> Iterator[tuple[int, Iterator[pa.Table]]]:
    """Group rows in the order of time by the hour since the epoch. Read the rows of an hour before the next hour."""
    for hour, group in groupby(_by_hour(parts), key=lambda entry: entry[0]):
        yield hour, (part for _, part in group)


def _by_hour(parts: Iterable[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    for part in parts:
        times = arrays.numbers(part["time"].cast(pa.int64()), 0) // _HOUR_US
        edges = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
        for start, stop in pairwise(edges):
            if stop > start:
                yield int(times[start]), part.slice(start, stop - start)


def adopt(sorter: writer.Sorter, data: bytes | None, corrections: Sequence[Correction]) -> None:
    """Add the rows of a piece to a sorter, with the final ids and numbers of their connections."""
    if data:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            for batch in file.iter_batches(PIECE_ROWS):
                sorter.add(corrected(corrections, batch))


def _packed(table: Table, kind: str | None, hour: int, parts: Sequence[pa.Table]) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    count = writer.store(table, (part.cast(table.schema) for part in parts), sink, lasts=False)
    return _piece(-1, kind or table.name, hour, count, sink.getvalue().to_pybytes())


def _piece(capture: int, kind: str, hour: int, count: int, data: bytes) -> pa.RecordBatch:
    values = (capture, kind, hour, count, len(data), data)
    columns = [arrays.listed(field.type, [value]) for value, field in zip(values, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
