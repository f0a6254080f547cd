"""docs/tables.md lists every table and no other; the docs and the files describe every column."""

import re

import pyarrow.parquet as pq
import pytest

from kproxy.tables import meanings, schema, writer
from tests.project import ROOT

TEXT = (ROOT / "docs" / "tables.md").read_text()


def test_every_table_has_its_line():
    ours = [*schema.TABLES]
    ours.insert(ours.index("batches") + 1, "records")
    assert re.findall(r"^\| (\w+) \| [a-z]", TEXT, re.MULTILINE)[1:] == ours


@pytest.mark.parametrize("name", schema.BY_NAME)
def test_a_file_describes_its_columns_and_their_units(name, tmp_path):
    table = schema.BY_NAME[name]
    writer.store(table, [table.schema.empty_table()], tmp_path / "rows.parquet")
    fields = {field.name: field for field in pq.read_schema(tmp_path / "rows.parquet")}
    assert [*fields] == table.schema.names
    for field in fields.values():
        assert field.metadata[b"description"].decode() == meanings.meaning(name, field.name)
        assert field.metadata.get(b"unit", b"").decode() == (meanings.unit(field.name) or "")
        assert not field.name.endswith(("_ns", "_ms", "_bytes")) or field.metadata[b"unit"]
    assert not fields["source"].nullable
    assert set(meanings.OF_TABLES[name]) <= set(fields)
