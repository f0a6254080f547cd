"""docs/tables.md has every table and every column, and no other."""

import re

import pytest

from kproxy.tables import schema
from tests.project import ROOT

TEXT = (ROOT / "docs" / "tables.md").read_text()
EVERYWHERE = {"source", "cluster", "time"}


def test_every_table_has_its_section():
    assert [found.partition(":")[0] for found in re.findall(r"^## (.*)", TEXT, re.MULTILINE)] == [
        "exchanges",
        "partitions",
        "batches",
        "records",
        *(name for name in schema.TABLES if name not in ("exchanges", "partitions", "batches")),
    ]


@pytest.mark.parametrize("name", schema.BY_NAME)
def test_every_column_is_explained(name):
    section = re.search(rf"^## {name}\b.*?(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)[0]
    columns = [column for row in re.findall(r"^\| ([a-z].*?) \|", section, re.MULTILINE) for column in row.split(", ")]
    assert set(columns) - {"column"} == set(schema.BY_NAME[name].schema.names) - EVERYWHERE
