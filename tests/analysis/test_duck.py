"""DuckDB over a folder of tables: what it leaves behind."""

import tempfile

import duckdb
import pytest

from kproxy.analysis import duck
from kproxy.analysis.duck import Tables
from kproxy.analysis.engine import ask, kept
from tests.analysis.findings import made

MANY = 3_000_000


def test_what_does_not_fit_in_memory_goes_to_the_folder_for_temporary_files_and_away(tmp_path, monkeypatch):
    here, spilled = tmp_path / "here", tmp_path / "tmp"
    here.mkdir()
    spilled.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(spilled))
    connect = duckdb.connect
    small = {"memory_limit": "30MB", "threads": "1"}
    monkeypatch.setattr(duckdb, "connect", lambda place, config: connect(place, config=config | small))
    with Tables(tmp_path) as tables:
        rows = tables.sql(f"select i from range({MANY}) t(i) order by hash(i)").fetched()
        next(rows)
        assert any(spilled.rglob("*.tmp")) and not any(here.iterdir())
        assert sum(1 for _ in rows) == MANY - 1
    assert not any(spilled.iterdir()) and not any(here.iterdir())


def test_rows_that_are_kept_for_several_questions_end_with_them(tmp_path):
    with Tables(tmp_path) as tables:
        with kept(tables.query("select unnest(range(3)) as i")) as rows:
            assert list(rows.fetched()) == list(ask({"rows": rows}, answer="select i from rows").fetched())
        with pytest.raises(duckdb.CatalogException):
            list(rows.fetched())


def test_the_files_of_a_table_are_listed_once(tmp_path, monkeypatch):
    place = made.Made().write(tmp_path / "tables")
    listed = []
    files = duck._files
    monkeypatch.setattr(duck, "_files", lambda folder, name: listed.append(name) or files(folder, name))
    with Tables(place) as tables:
        assert tables["exchanges"].columns == tables["exchanges"].columns and listed == ["exchanges"]
