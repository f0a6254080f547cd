"""Captures of the same packets in other forms have the rows of their base in all tables, except for listed differences.

`shapes.csv` lists the columns that a form changes and why; `losses.csv` lists what a form with loss lacks and which
kind in `quality` reports that. An unlisted difference fails, and so does a line that no longer holds. The source and
the hash in the column connection always differ.
"""

import csv
from collections import Counter
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kproxy.convert.processes import convert
from kproxy.tables.schema import TABLES
from tests import captures
from tests.capture.connections.test_flows import SAME

HERE = Path(__file__).parent
BASE = "k41_BASE"
LOSSY = ("k41_cut", "k41_gaps", "k41_midstream", "k41_oneway", "k41_snap400", "k41_snap96")
ALWAYS = {"source", "connection"}
KEYS = {
    "exchanges": ("correlation_id",),
    "partitions": ("correlation_id", "direction", "topic", "topic_id", "partition"),
    "batches": ("correlation_id", "direction", "topic", "topic_id", "partition", "base_offset"),
    "connections": (),
    "quality": ("kind",),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """tables(shape, table) -> its rows by a key that does not depend on the form."""
    folder = tmp_path_factory.mktemp("tables")
    files = {name: captures.capture(name) for name in (BASE, *SAME, *LOSSY)}
    convert(list(files.values()), folder, processes=1)

    @cache
    def rows(shape, table):
        read = pq.read_table(folder / table / f"{files[shape].name}.parquet").to_pylist()
        return [row for row in read if row.get("kind") != "in_two_captures"]  # all forms contain one traffic

    @cache
    def keyed(shape, table):
        by_port = {row["connection"]: row["client_port"] for row in rows(shape, "connections")}
        if shape == "k41_portreuse":  # its ports differ, and nothing else
            order = sorted(rows(shape, "connections"), key=lambda row: row["start_ns"])
            base = sorted(rows(BASE, "connections"), key=lambda row: row["start_ns"])
            by_port = {a["connection"]: b["client_port"] for a, b in zip(order, base, strict=True)}
        asked = {(row["connection"], row["number"]): row["correlation_id"] for row in rows(shape, "exchanges")}
        found = {}
        counts = Counter()
        for row in rows(shape, table):
            about = row | {"correlation_id": asked.get((row.get("connection"), row.get("number")))}
            if table == "exchanges":
                about = row
            key = (by_port.get(row.get("connection")), *(about[name] for name in KEYS[table]))
            counts[key] += 1
            found[*key, counts[key]] = row
        return found

    return keyed


def listed(name):
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("shape", (*SAME, *LOSSY))
def test_the_rows_equal_the_bases_except_in_listed_columns(tables, shape):
    found = {}
    for table in KEYS:
        base, shaped = tables(BASE, table), tables(shape, table)
        if shape not in LOSSY and table != "quality":
            assert shaped.keys() == base.keys()
        names = TABLES[table].schema.names
        columns = {n for key in base.keys() & shaped.keys() for n in names if base[key][n] != shaped[key][n]} - ALWAYS
        if table == "quality" and shaped.keys() != base.keys():
            columns.add("kind")
        if columns:
            found[table] = " ".join(name for name in names if name in columns)
    expected = {line["table"]: line["columns"] for line in listed("shapes.csv") if line["shape"] == shape}
    assert sorted(found.items()) == sorted(expected.items()), f"shapes.csv, {shape}"


def losses(tables, shape):
    """(outcome of an exchange of the base, kind in `quality` that explains it) -> count."""
    shaped, connections = tables(shape, "exchanges"), tables(shape, "connections")
    kinds = {key[1]: row for key, row in tables(shape, "quality").items()}
    found = Counter()
    for key, row in tables(BASE, "exchanges").items():
        shaped_row, connection = shaped.get(key), connections.get((key[0], 1))
        if shaped_row is None:
            what = "missing"
        elif shaped_row["outcome"] != row["outcome"]:
            what = shaped_row["outcome"]
        elif shaped_row["decoded"] != row["decoded"]:
            what = f"decoded {shaped_row['decoded']}"
        else:
            continue
        if row["request_start_ns"] < kinds["packets"]["first_ns"]:
            why = "midstream"
        elif max(row["request_end_ns"], row["response_end_ns"] or 0) > kinds["packets"]["last_ns"]:
            why = "cut_file"
        elif connection["gaps"]:
            why = "gap"
        else:
            why = "truncated"
        assert why in kinds
        found[what, why] += 1
    return found


@pytest.mark.parametrize("shape", LOSSY)
def test_missing_rows_of_a_form_with_loss_are_explained(tables, shape):
    """Every missing or incomplete exchange is explained: by its connection, by time, and in `quality`."""
    assert not tables(shape, "exchanges").keys() - tables(BASE, "exchanges").keys()
    lines = [line for line in listed("losses.csv") if line["shape"] == shape]
    assert losses(tables, shape) == {(line["what"], line["explained by"]): int(line["exchanges"]) for line in lines}
