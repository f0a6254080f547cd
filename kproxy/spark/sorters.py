"""The rows of a task's tables, sorted on its disk, until they become pieces.

Memory: see `tables.writer.Sorter`. Refuses to know where rows come from.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from kproxy.convert.job import Job
from kproxy.convert.shares import FED
from kproxy.spark.pieces import SAID, rows
from kproxy.tables import schema, writer
from kproxy.tables.schema import Table


class Sorters:
    """The rows of a task's tables, sorted on the disk; apart from them what insight is fed."""

    def __init__(self, job: Job, folder: Path, prefix: str) -> None:
        self._tables = {name: writer.Sorter(schema.BY_NAME[name], folder, prefix) for name in job.tables}
        self._fed = {name: writer.Sorter(table, folder, f"{prefix}.said") for name, table in FED.items()}

    def add(self, table: Table, batch: pa.RecordBatch) -> None:
        (self._fed.get(table.name) or self._tables[table.name]).add(batch)

    def tables(self) -> Iterator[tuple[Table, Iterator[pa.Table]]]:
        """Each table that has rows, with them."""
        for name, sorter in self._tables.items():
            sorter.spill()
            if sorter.runs:
                yield schema.BY_NAME[name], writer.merged(schema.BY_NAME[name], sorter.runs)

    def feed(self, other: "Sorters") -> None:
        """Add what insight is fed of another one."""
        for name, sorter in other._fed.items():
            sorter.spill()
            for part in writer.merged(FED[name], sorter.runs):
                for batch in part.to_batches():
                    self._fed[name].add(batch)

    def pieces(self, keep: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None) -> Iterator[pa.RecordBatch]:
        """keep: what of rows is to be told."""
        for table, parts in self.tables():
            yield from rows(table, _kept(parts, keep))
        for name, sorter in self._fed.items():
            sorter.spill()
            if sorter.runs:
                said = SAID + name
                yield from rows(FED[name], _kept(writer.merged(FED[name], sorter.runs), keep), said)

    def remove(self) -> None:
        for sorter in (*self._tables.values(), *self._fed.values()):
            for run in sorter.runs:
                run.unlink()


def _kept(parts: Iterator[pa.Table], keep: Callable[[pa.RecordBatch], pa.RecordBatch] | None) -> Iterator[pa.Table]:
    for part in parts:
        kept = part if keep is None else pa.Table.from_batches(map(keep, part.to_batches()), part.schema)
        if kept.num_rows:
            yield kept
