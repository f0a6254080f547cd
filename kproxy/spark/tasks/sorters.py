"""The rows of a task's tables, sorted, until they become pieces.

Memory: RUN_BYTES per table; the task's disk has further rows.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from kproxy.convert.job import Job
from kproxy.convert.shares import FED
from kproxy.spark.tasks.pieces import INSIGHT, rows
from kproxy.tables import schema, writer
from kproxy.tables.schema import Table

RUN_ROWS, RUN_BYTES = 256 * 1024, 32 << 20  # enough for most tasks to use no disk


class Sorters:
    """The sorted rows of a task's tables, and separately the input of insight."""

    def __init__(self, job: Job, folder: Path, prefix: str) -> None:
        def sorter(table: Table, kind: str) -> writer.Sorter:
            return writer.Sorter(table, folder, kind, run_rows=RUN_ROWS, run_bytes=RUN_BYTES)

        self._tables = {name: sorter(schema.BY_NAME[name], prefix) for name in job.tables}
        self._fed = {name: sorter(table, f"{prefix}.insight") for name, table in FED.items()}

    def add(self, table: Table, batch: pa.RecordBatch) -> None:
        (self._fed.get(table.name) or self._tables[table.name]).add(batch)

    def tables(self) -> Iterator[tuple[Table, Iterator[pa.Table]]]:
        """Yield each table with its sorted rows."""
        for name, sorter in self._tables.items():
            yield schema.BY_NAME[name], sorter.in_order()

    def feed(self, other: "Sorters") -> None:
        """Add the input of insight from another `Sorters`."""
        for name, sorter in other._fed.items():
            for part in sorter.in_order():
                for batch in part.to_batches():
                    self._fed[name].add(batch)

    def pieces(self, keep: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows as pieces. keep: returns the rows of a batch to be emitted."""
        for table, parts in self.tables():
            yield from rows(table, _kept(parts, keep))
        for name, sorter in self._fed.items():
            yield from rows(FED[name], _kept(sorter.in_order(), keep), INSIGHT + name)

    def remove(self) -> None:
        for sorter in (*self._tables.values(), *self._fed.values()):
            for run in sorter.runs:
                run.unlink()


def _kept(parts: Iterator[pa.Table], keep: Callable[[pa.RecordBatch], pa.RecordBatch] | None) -> Iterator[pa.Table]:
    for part in parts:
        kept = part if keep is None else pa.Table.from_batches(map(keep, part.to_batches()), part.schema)
        if kept.num_rows:
            yield kept
