"""Rows of insight -> Arrow batches of its tables.

Duty: rows are NamedTuples with the names of columns; each gets its source. A row's `time` is the first of its times.
Bounded by the owner, which calls `batches()` before there are too many `rows`. Does not compute rows.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from kproxy.tables import schema
from kproxy.tables.arrays import batch
from kproxy.tables.schema import Table


class KnowledgeColumns:
    """Rows of the tables of insight, until `batches` returns them."""

    def __init__(self) -> None:
        self.rows = 0
        self._waiting: dict[str, list[dict[str, Any]]] = {}

    def append(self, table: str, source: str | None, row: Any) -> None:
        """Add a row, a NamedTuple with the table's columns."""
        values = row._asdict()
        time_ns = values["started_ns"] if table == schema.REBALANCES.name else values["time_ns"]
        self._waiting.setdefault(table, []).append(values | {"source": source, "time": time_ns // 1000})
        self.rows += 1

    def batches(self) -> Iterator[tuple[Table, pa.RecordBatch]]:
        """Return and remove the rows, by table."""
        waiting, self._waiting, self.rows = self._waiting, {}, 0
        for name, rows in waiting.items():
            table = schema.TABLES[name]
            yield table, batch(table.schema, rows)
