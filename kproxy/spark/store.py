"""Pieces -> tables, written by Spark: a file for each table and hour, or for each 128 MB of it.

Duty: a task takes the pieces of one file, merges their rows in the order of the table, fills in names that any
connection of their capture told, and Spark's own writer makes a file of them, in any format that the session knows.
Memory of a task: writer.FAN_IN steps of rows. Refuses to know folders, and what was read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from kproxy.convert.joining import Mend
from kproxy.spark.pieces import NO_HOUR, adopt, frame, unpacked
from kproxy.tables import arrays, schema, writer
from kproxy.tables.names import FILLED, Names
from kproxy.tables.records import Chosen
from kproxy.tables.schema import TEXT, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_BYTES = 128 << 20  # of pieces; a file of Parquet has about as many
AT_ONCE = 4  # tables

# Times as other tools read them; and a task, whose rows are all of one hour, need not sort them by it.
_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.maxConcurrentOutputFileWriters": "4",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
}


@contextmanager
def settings(spark: "SparkSession") -> Iterator[None]:
    """A session's settings as an ingest needs them, for so long."""
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
    names: Mapping[str, Names],
    mends: Mapping[str, Sequence[Mend]],
    chosen: Chosen | None,
    place: Callable[[str], str],
    form: str,
    mode: str,
) -> list[str]:
    """Write the tables of pieces; returns the names of those that have rows.

    sizes: bytes by kind and hour; names, mends: by source; place: where a table goes; mode: Spark's, append or
    overwrite.
    """
    tables = [(table, hours) for table in schema.BY_NAME.values() if (hours := hours_of(table, sizes))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [
            pool.submit(_write, rows(pieces, table, hours, names, mends, chosen), place(table.name), form, mode, hours)
            for table, hours in tables
        ]
        for job in jobs:
            job.result()
    return [table.name for table, _ in tables]


def hours_of(table: Table, sizes: Mapping[tuple[str, int], int]) -> dict[int, int]:
    """The bytes of a table's pieces by hour."""
    return {hour: size for (name, hour), size in sizes.items() if name == table.name}


def _write(rows: "DataFrame", place: str, form: str, mode: str, hours: Mapping[int, int]) -> None:
    write = rows.write.mode(mode).format(form)
    if form == "parquet":
        write = write.option("compression", "zstd")
    if mode == "overwrite":
        write = write.option("partitionOverwriteMode", "static")  # all of it, whatever the session has
    if NO_HOUR not in hours:
        write = write.partitionBy("date", "hour")
    write.save(place)


def rows(
    pieces: "DataFrame",
    table: Table,
    hours: Mapping[int, int],
    names: Mapping[str, Names],
    mends: Mapping[str, Sequence[Mend]],
    chosen: Chosen | None,
) -> "DataFrame":
    """The rows of a table, each file's in a partition; with its date and hour, if it has times."""
    from pyspark.sql import functions as F

    from kproxy.spark.source import spark_schema

    first, plan = 0, []
    for hour, size in sorted(hours.items()):
        files = max(1, -(-size // FILE_BYTES))
        plan.append((hour, first, files))
        first += files
    spread = frame(pieces.sparkSession, plan, "hour bigint, first int, files int")
    mine = pieces.where(F.col("kind") == table.name).join(F.broadcast(spread), "hour")
    number = (F.col("first") + F.pmod(F.xxhash64("data"), F.col("files"))).cast("int")
    columns = spark_schema(table.schema) + ("" if NO_HOUR in hours else ", `date` string, `hour` string")
    return (
        mine.select("hour", "data", number.alias("number"))
        .repartitionById(first, "number")
        .select("hour", "data")
        .mapInArrow(_merged(table, names, mends, chosen), columns)
    )


def _merged(
    table: Table, names: Mapping[str, Names], mends: Mapping[str, Sequence[Mend]], chosen: Chosen | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from kproxy.spark.source import RECORDS

        hour = NO_HOUR
        with TemporaryDirectory(prefix="kproxy-") as place:
            folder = Path(place)
            sorter = writer.Sorter(table, folder, ".all")
            every = [mend for of_source in mends.values() for mend in of_source]
            count = 0
            for batch in batches:
                data = batch.column(1)
                for index in range(batch.num_rows):
                    hour = batch.column(0)[index].as_py()  # the same of all
                    adopt(sorter, unpacked(data[index].as_py(), folder / f"{count}.piece"), every)
                    count += 1
            if not count:
                return
            sorter.spill()
            for part in writer.merged(table, sorter.runs):
                told = named(part, names)
                if chosen is not None and table.name == schema.RECORDS.name:
                    told = chosen.of(told)
                if table.name == schema.RECORDS.name:
                    told = told.cast(RECORDS.schema)
                for batch in told.to_batches():
                    yield _with_hour(batch, hour)

    return run


def _with_hour(batch: pa.RecordBatch, hour: int) -> pa.RecordBatch:
    if hour == NO_HOUR:
        return batch
    moment = datetime.fromtimestamp(hour * 3600, UTC)
    more = [arrays.listed(TEXT, [text] * batch.num_rows) for text in (f"{moment:%Y-%m-%d}", f"{moment:%H}")]
    return pa.RecordBatch.from_arrays([*batch.columns, *more], [*batch.schema.names, "date", "hour"])


def named(rows: pa.Table, names: Mapping[str, Names]) -> pa.Table:
    """Rows with the names that are known of their sources."""
    if not names or "source" not in rows.schema.names:
        return rows
    kept = rows.schema
    for source in rows["source"].unique().to_pylist():
        if source in names:
            filled = names[source].fill(rows)
            of_source = pc.equal(rows["source"], source)
            for place, column in enumerate(rows.schema.names):
                if column in FILLED:
                    told = pc.if_else(of_source, filled[column], rows[column])
                    rows = rows.set_column(place, column, told)
    return rows.cast(kept)
