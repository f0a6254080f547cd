"""Pieces: the rows of every table come back unchanged, whatever their number."""

import subprocess
import sys

import pyarrow as pa
import pytest

from kproxy.convert.shares import FED
from kproxy.spark.tasks import pieces
from kproxy.spark.tasks.pieces import NO_HOUR, adopt
from kproxy.tables import schema, writer

HOUR_US = 3_600_000_000
VALUES = {
    schema.HEADERS: [{"key": "a", "value": b"\x00"}, {"key": None, "value": None}],
    schema.INTEGERS: [1, 2],
    schema.BYTES: b"\xff\x00",
    schema.TEXT: "ä",
    schema.FLAG: True,
}


def made(table, count):
    """Rows of three hours, every second one without values."""
    rows = []
    for number in range(count):
        row = {
            field.name: VALUES.get(field.type, number % 100) if number % 2 or not field.nullable else None
            for field in table.schema
        }
        always = {"time": 3 * HOUR_US * number // count, table.weight: number}
        rows.append(row | {name: value for name, value in always.items() if name in row})
    return pa.Table.from_pylist(rows, table.schema)


@pytest.mark.parametrize("table", (*schema.BY_NAME.values(), *FED.values()), ids=lambda table: table.name)
def test_rows_are_the_same_in_pieces(table, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_ROWS", 1000)
    monkeypatch.setattr(writer, "STEP_ROWS", 300)
    rows = made(table, 5000)
    piece_rows = [piece.to_pylist()[0] for piece in pieces.rows(table, [rows])]
    assert {piece["hour"] for piece in piece_rows} == ({0, 1, 2} if "time" in table.schema.names else {NO_HOUR})
    assert sum(piece["count"] for piece in piece_rows) == 5000 and all(piece["count"] <= 1200 for piece in piece_rows)
    sorter = writer.Sorter(table, tmp_path)
    for piece in piece_rows:
        adopt(sorter, piece["data"], [])
    sorter.spill()
    assert sum(part.num_rows for part in writer.merged(table, sorter.runs)) == 5000
    back = pa.concat_tables(pa.ipc.open_file(str(run)).read_all() for run in sorter.runs)
    assert back.schema.equals(table.schema)
    assert sorted(map(str, back.to_pylist())) == sorted(map(str, rows.to_pylist()))


def test_a_task_needs_no_pandas(tmp_path):
    """`pa.array` imports pandas if it is installed: 0.3 s of CPU time in every worker."""
    code = f"""
import pathlib, sys
from kproxy.convert.job import Job
from kproxy.spark import sample
from kproxy.spark.tasks import decode
path = pathlib.Path({str(tmp_path / "a.pcapng")!r})
sample.write(path)
assert len(list(decode.whole([(0, Job("a", (str(path),), "default", (9092,)))]))) > 2
assert "pandas" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
