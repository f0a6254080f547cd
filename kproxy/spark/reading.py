"""Captures as DataFrames, shared out over tasks: `kproxy.spark.reading.read`.

Duty: captures become pieces as in an ingest (see `pipeline`), which Spark persists on its disks. Tasks make a table
from its pieces when a query reads the table; no table is written. The data source (see `source`) cannot share a capture
out: its tasks cannot exchange data, and its planning has no session.

Memory: as for an ingest.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kproxy.capture.formats.splits import SPLIT_BYTES
from kproxy.convert.job import Settings
from kproxy.errors import CaptureError
from kproxy.spark import pipeline, store
from kproxy.spark.tasks.looking import look
from kproxy.tables import schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DEFAULT = Settings()


class Reading(Mapping[str, "DataFrame"]):
    """The tables of captures by their names; a context manager that releases Spark's persisted data at its end.

    failed: the errors of unreadable captures. unsplittable: the reason why one task read a large capture, by source.
    read_bytes: bytes read of captures that were shared out.
    """

    def __init__(self, spark: "SparkSession", run: pipeline.Run) -> None:
        self._spark = spark
        self._run = run
        self._pieces = run.finished()
        self.failed: list[CaptureError] = [run.failed[number] for number in sorted(run.failed)]
        self.unsplittable = run.unsplittable
        self.read_bytes = run.read_bytes

    def __getitem__(self, name: str) -> "DataFrame":
        from kproxy.spark.source import TABLES, spark_schema

        if name not in tuple(self):
            raise KeyError(name)
        table = schema.BY_NAME[name]
        if self._pieces is None or not self._run.has_rows(table):
            return self._spark.createDataFrame([], spark_schema(TABLES[name].schema))
        return self._run.rows(self._pieces, table).drop("date", "hour")

    def __iter__(self) -> Iterator[str]:
        yield from self._run.catalogue.like.all_tables

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release Spark's persisted data; do not use the tables afterwards."""
        self._run.release()


def read(
    spark: "SparkSession",
    captures: Path | str | Sequence[Path | str],
    settings: Settings = _DEFAULT,
    *,
    split_bytes: int = SPLIT_BYTES,
    tasks: int = 0,
) -> Reading:
    """Read captures once, now, and return their tables. Parameters and errors are those of `pipeline.ingest`."""
    paths = [captures] if isinstance(captures, str | Path) else captures
    catalogue = pipeline.catalogue_of(paths, settings)
    unseen = look(spark, catalogue)
    with store.settings(spark):
        run = pipeline.Run(spark, catalogue, split_bytes, tasks, unseen)
        try:
            run.decode()
            return Reading(spark, run)
        except BaseException:
            run.release()
            raise
