"""What the tasks of an ingest hand on: sorted rows of one table and hour as bytes, and words about captures.

Duty: a piece is a row of PIECES. Its `kind` is a table, and then `data` holds rows in their order, as a Parquet file,
which is a fifth of what compressed Arrow takes, and costs half; or it is one of the other kinds, and `data` is JSON
about a capture. So all tables travel in one DataFrame, compressed,
which Spark keeps, moves and makes again by its own means; `store` makes tables of it. `each` runs a function over
pieces of work, one task for each.

Memory: PIECE_ROWS rows. Refuses to know how captures are read, and where tables go.
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
FEW = 1000  # pieces of work that travel with the function, and their bytes; more travel as rows
FEW_BYTES = 256 << 10

# Kinds that are no tables: what the scan of a split found; names that answers told; counts of flaws; a capture that
# cannot be read. What insight is to be fed is of the kind SAID and the name of its table.
REPORT, NAMES, COUNTS, FAILED, SAID = "report", "names", "counts", "failed", "said "
# And of captures that are read in parts: why one cannot be, or some of its connections, what rows of a connection lack,
# topics that are logs, and bytes that were read once more.
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
    """The rows that `run` makes of each piece of work, in a task of its own; pieces are taken one by one."""
    packed = map(pickle.dumps, work)
    few, size = list[bytes](), 0
    while len(few) <= FEW and size <= FEW_BYTES:
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
    """Pieces with their numbers, as a table whose bytes are in a file."""
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
        if size >= FEW_BYTES or len(waiting) >= FEW:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def frame(spark: "SparkSession", rows: Sequence[Sequence[Any]], columns: str) -> "DataFrame":
    """Rows of the driver. By Arrow: a list would go through processes of Python first."""
    names, kinds = zip(*(column.split() for column in columns.split(", ")), strict=True)
    types = {"int": pa.int32(), "bigint": pa.int64(), "binary": pa.binary(), "string": pa.string()}
    values = zip(*rows, strict=True) if rows else [()] * len(names)
    arrays = [pa.array(column, types[kind]) for column, kind in zip(values, kinds, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, names=list(names)))


def words(capture: int, kind: str, said: Any) -> pa.RecordBatch:
    """A piece that is JSON."""
    return _piece(capture, kind, NO_HOUR, 0, json.dumps(said).encode())


def failed(capture: int, fault: CaptureError) -> pa.RecordBatch:
    """A piece that says why a capture cannot be read."""
    said = str(fault).removeprefix(f"{fault.name}: ")
    return words(capture, FAILED, (fault.name, said, isinstance(fault, StorageError)))


def fault_of(data: bytes) -> CaptureError:
    """What `failed` said."""
    name, said, may_pass = json.loads(data)
    return (StorageError if may_pass else CaptureError)(name, said)


def rows(table: Table, parts: Iterable[pa.Table], kind: str | None = None) -> Iterator[pa.RecordBatch]:
    """Pieces of sorted rows, each of one hour where the table has times."""
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
    """Rows in the order of time, by the hour since the epoch. One's rows are to be read before the next's."""
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
    """Take over the rows of a piece, whose connections have their ids and numbers by then."""
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
