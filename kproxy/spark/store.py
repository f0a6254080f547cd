"""Pieces -> tables, written by Spark: a file for each table and hour, or for each 128 MB of it.

Duty: a task takes the pieces of one file, merges their rows in the order of the table, and fills in names from any
connection of their capture. For Parquet the task also makes the file's bytes, as `kproxy convert` does. One Spark job
writes the files of all tables; its text writer only copies the bytes (`writer.packed`), with any file system and
committer of the session. Spark's own writers write other formats, in one job per table.

Memory of a task: writer.FAN_IN steps of rows, and a row group of a file.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from kproxy.capture.clusters import Labels
from kproxy.convert import clusters, machine
from kproxy.convert.parts.joining import Correction, corrected
from kproxy.spark.tasks.pieces import NO_HOUR, frame
from kproxy.tables import arrays, schema, writer
from kproxy.tables.names import FILLED, Names
from kproxy.tables.records import Chosen
from kproxy.tables.schema import TEXT, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET = "parquet"  # the files of all tables are published together; other formats commit each table
WITH_SCHEMA = (PARQUET, "delta")  # formats with the columns of a table without rows
FILE_BYTES = 128 << 20  # size of a file's pieces; the Parquet file has about the same size
TABLES_AT_ONCE = 4  # number of tables written at the same time
NONE = "none"  # the date and the hour of a table without times

# Times have the type that other tools read. Concurrent writers avoid a sort: all rows of a task are of one hour.
_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.maxConcurrentOutputFileWriters": "4",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
    "spark.sql.shuffle.partitions": "16",  # enough for sums by table and hour; large shuffles set their own number
}


_FILES = ["value", "table", "date", "hour"]


@dataclass(frozen=True)
class Learnt:
    """The values that rows get only after all captures were read, by source."""

    names: Mapping[str, Names]
    corrections: Mapping[str, Sequence[Correction]]
    clusters: Mapping[str, Labels]
    chosen: Chosen | None  # topics whose records are rows


@contextmanager
def settings(spark: "SparkSession") -> Iterator[None]:
    """Set a session's settings for an ingest; restore them at the end of the context."""
    before = {name: spark.conf.get(name, None) for name in _SETTINGS}
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, kept in before.items():
            if kept is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, kept)


def store(
    pieces: "DataFrame",
    sizes: Mapping[tuple[str, int], int],
    learnt: Learnt,
    folder: str,
    form: str,
    mode: str,
    empty: Collection[str],
) -> list[str]:
    """Write the tables of pieces into a folder (see `place_of`); return the names of the written tables.

    sizes: bytes by kind and hour; mode: Spark's save mode, append or overwrite. empty: tables to create if they have no
    rows: an empty table has one empty file, in the folders of the first hour.
    """
    first_hour = min((hour for _, hour in sizes if hour != NO_HOUR), default=0)
    without_rows = [name for name in empty if not hours_of(schema.BY_NAME[name], sizes)]
    sizes = {**sizes, **{(name, first_hour): 0 for name in without_rows}}
    tables = [(table, hours) for table in schema.BY_NAME.values() if (hours := hours_of(table, sizes))]
    if form == PARQUET:
        created = frame(
            pieces.sparkSession,
            [(name, first_hour, b"") for name in without_rows],
            "kind string, hour bigint, data binary",
        )
        every = pieces.select("kind", "hour", "data").unionByName(created)
        files = _files(every, sizes, learnt).write.mode(mode).format("text")
        for name, value in {"lineSep": writer.MAGIC.decode(), "compression": "none", "maxRecordsPerFile": "0"}.items():
            files = files.option(name, value)
        files.partitionBy("table", "date", "hour").save(folder)
        return [table.name for table, _ in tables]
    with ThreadPoolExecutor(TABLES_AT_ONCE) as pool:
        jobs = [
            pool.submit(_write, rows(pieces, table, hours, learnt), folder, table, form, mode, hours)
            for table, hours in tables
        ]
        for job in jobs:
            job.result()
    return [table.name for table, _ in tables]


def place_of(folder: str, table: Table, form: str) -> str:
    """Return the folder or URL with the written rows of a table."""
    return f"{folder}/table={table.name}" if form == PARQUET else f"{folder}/{table.name}"


def hours_of(table: Table, sizes: Mapping[tuple[str, int], int]) -> dict[int, int]:
    """Return the bytes of a table's pieces by hour."""
    return {hour: size for (name, hour), size in sizes.items() if name == table.name}


def _write(rows: "DataFrame", folder: str, table: Table, form: str, mode: str, hours: Mapping[int, int]) -> None:
    write = rows.write.mode(mode).format(form)
    if mode == "overwrite":
        write = write.option("partitionOverwriteMode", "static")  # replace the whole table
    if NO_HOUR not in hours:
        write = write.partitionBy("date", "hour")
    write.save(place_of(folder, table, form))


def _files(
    pieces: "DataFrame",
    sizes: Mapping[tuple[str, int], int],
    learnt: Learnt,
) -> "DataFrame":
    """Return the files of all tables, one per partition; the largest first, since they take longest."""
    of_tables = ((key, size) for key, size in sizes.items() if key[0] in schema.BY_NAME)
    order = sorted(of_tables, key=lambda entry: (-min(entry[1], FILE_BYTES), entry[0]))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        machine.retain()
        every = _listed(batches)
        first = next(every, None)
        if first is None:
            return
        kind, hour, _ = first
        table = schema.BY_NAME[kind]
        where = (kind, *_date_and_hour(hour))
        with TemporaryDirectory(prefix="kproxy-") as folder, machine.seldom_collected():
            data = (data for _, _, data in chain((first,), every))
            for part in writer.packed(table, _merged(table, data, Path(folder), learnt)):
                bytes_ = arrays.listed(pa.binary(), [part]).view(pa.string())
                yield pa.RecordBatch.from_arrays([bytes_, *(arrays.listed(TEXT, [text]) for text in where)], _FILES)

    return _by_file(pieces, order).mapInArrow(run, "value string, table string, date string, hour string")


def rows(
    pieces: "DataFrame",
    table: Table,
    hours: Mapping[int, int],
    learnt: Learnt,
) -> "DataFrame":
    """Return the rows of a table, one partition per file, and their date and hour if the table has times."""
    from kproxy.spark.source import spark_schema

    columns = spark_schema(table.schema) + ("" if NO_HOUR in hours else ", `date` string, `hour` string")

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from kproxy.spark.source import RECORDS

        every = _listed(batches)
        first = next(every, None)
        if first is None:
            return
        with TemporaryDirectory(prefix="kproxy-") as folder:
            data = (data for _, _, data in chain((first,), every))
            for part in _merged(table, data, Path(folder), learnt):
                records = part.cast(RECORDS.schema) if table.name == RECORDS.name else part
                for batch in records.to_batches():
                    yield _with_hour(batch, first[1])

    return _by_file(pieces, [((table.name, hour), size) for hour, size in sorted(hours.items())]).mapInArrow(
        run, columns
    )


def _by_file(pieces: "DataFrame", sizes: Sequence[tuple[tuple[str, int], int]]) -> "DataFrame":
    """Partition pieces by file, in the order of `sizes`. sizes: ((kind, hour), bytes)."""
    from pyspark.sql import functions as F

    first, plan = 0, []
    for (kind, hour), size in sizes:
        files = max(1, -(-size // FILE_BYTES))
        plan.append((kind, hour, first, files))
        first += files
    spread = frame(pieces.sparkSession, plan, "kind string, hour bigint, first int, files int")
    number = (F.col("first") + F.pmod(F.xxhash64("data"), F.col("files"))).cast("int")
    return (
        pieces.join(F.broadcast(spread), ["kind", "hour"])
        .select("kind", "hour", "data", number.alias("number"))
        .repartitionById(max(1, first), "number")
        .select("kind", "hour", "data")
    )


def _listed(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, int, bytes]]:
    for batch in batches:
        for index in range(batch.num_rows):
            kind, hour, data = (column[index].as_py() for column in batch.columns)
            yield kind, hour, data


def _merged(
    table: Table,
    pieces: Iterator[bytes],
    folder: Path,
    learnt: Learnt,
) -> Iterator[pa.Table]:
    """Yield the final rows of a table's pieces, in the order of the table."""
    sorter = writer.Sorter(table, folder, ".all")
    every = [correction for of_source in learnt.corrections.values() for correction in of_source]
    for piece in pieces:
        if piece:
            sorter.adopt_packed(piece)
    changes = dict.fromkeys(sorter.runs, partial(corrected, every)) if every else None
    for part in writer.merged(table, sorter.runs, changes):
        labelled = clusters.with_clusters(named(part, learnt.names), learnt.clusters)
        yield (
            learnt.chosen.of(labelled) if learnt.chosen is not None and table.name == schema.RECORDS.name else labelled
        )


def _with_hour(batch: pa.RecordBatch, hour: int) -> pa.RecordBatch:
    if hour == NO_HOUR:
        return batch
    more = [arrays.listed(TEXT, [text] * batch.num_rows) for text in _date_and_hour(hour)]
    return pa.RecordBatch.from_arrays([*batch.columns, *more], [*batch.schema.names, "date", "hour"])


def _date_and_hour(hour: int) -> tuple[str, str]:
    if hour == NO_HOUR:
        return NONE, NONE
    moment = datetime.fromtimestamp(hour * 3600, UTC)
    return f"{moment:%Y-%m-%d}", f"{moment:%H}"


def named(rows: pa.Table, names: Mapping[str, Names]) -> pa.Table:
    """Return rows with names of topics and ids of brokers filled in, by source."""
    if not names or "source" not in rows.schema.names:
        return rows
    kept = rows.schema
    for source in rows["source"].unique().to_pylist():
        if source in names:
            filled = names[source].fill(rows)
            of_source = pc.equal(rows["source"], source)
            for place, column in enumerate(rows.schema.names):
                if column in FILLED:
                    values = pc.if_else(of_source, filled[column], rows[column])
                    rows = rows.set_column(place, column, values)
    return rows.cast(kept)
