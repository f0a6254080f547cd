"""DuckDB over a folder of tables: what it leaves behind."""

import tempfile

import duckdb

from kproxy.analysis.duck import Tables

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
