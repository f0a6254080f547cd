"""Rows of insight become rows of their tables."""

import pyarrow as pa
import pytest

from kproxy.insight import rows
from kproxy.insight.rows import Leadership, Rebalance
from kproxy.tables import schema
from kproxy.tables.knowledge import KnowledgeColumns


@pytest.mark.parametrize("kind", rows.TABLES, ids=lambda kind: kind.__name__)
def test_a_table_has_the_columns_of_its_rows(kind):
    table = schema.TABLES[rows.TABLES[kind]]
    assert table in schema.KNOWLEDGE
    assert {"source", "time", *kind._fields} == set(table.schema.names)


def test_rows_become_batches_by_table():
    columns = KnowledgeColumns()
    led = Leadership(7_000_123, "c", "LeaderAndIsr", 1, None, "t", 0, 2, 5, (1, 2), None, "elected")
    began = 1_700_000_000_000_001_999
    moved = Rebalance("c", "g", "classic", None, 3, "unknown", None, "x", began, began + 5, None, 1, 2, 0, None, None)
    for row in (led, led._replace(isr=None, replicas=(), leader=None), moved):
        columns.append(rows.TABLES[type(row)], "a.pcap", row)
    assert columns.rows == 3
    found = {table.name: pa.Table.from_batches([batch]).to_pylist() for table, batch in columns.batches()}
    assert [(row["isr"], row["replicas"], row["leader"]) for row in found["leadership"]] == [
        ([1, 2], None, 2),
        (None, [], None),
    ]
    (row,) = found["rebalances"]
    assert (row["source"], row["started_ns"], row["ended_ns"]) == ("a.pcap", began, None)
    assert row["time"].microsecond == 1
    assert columns.rows == 0 and not list(columns.batches())
