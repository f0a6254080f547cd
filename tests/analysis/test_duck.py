"""DuckDB over a folder of tables: temporary files, and files that disappear meanwhile."""

import os
import shutil
import tempfile

import duckdb
import pytest

from kproxy.analysis import duck
from kproxy.analysis.duck import Tables
from kproxy.analysis.engine import ask, kept
from kproxy.errors import KproxyError
from tests.analysis.findings import made

MANY = 3_000_000


def test_rows_beyond_the_memory_limit_are_spilled_to_the_temporary_folder_and_deleted(tmp_path, monkeypatch):
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


def test_kept_rows_are_dropped_at_the_end_of_their_block(tmp_path):
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


@pytest.fixture
def recording(tmp_path):
    """A recording of 20 files of `exchanges`, ten seconds apart, the oldest first."""
    place = made.dataset(tmp_path / "tables")
    (whole,) = (place / "exchanges").glob("*.parquet")
    files = [whole.with_name(f"20261130T120000.000000000Z-{number:06d}.parquet") for number in range(20)]
    for number, file in enumerate(files):
        shutil.copy(whole, file)
        os.utime(file, (10 * number, 10 * number))
    whole.unlink()
    return place, files


def test_a_foreign_parquet_file_in_the_folder_of_a_table_is_refused(tmp_path):
    """Its rows would count as rows without a value."""
    (tmp_path / "exchanges").mkdir()
    made_by_another = tmp_path / "exchanges" / "other [1].parquet"
    duckdb.sql("select 1 as a").write_parquet(str(made_by_another))
    with (
        Tables(tmp_path) as tables,
        pytest.raises(KproxyError, match=r"other \[1\]\.parquet is no file of the table exch"),
    ):
        tables["exchanges"]


def test_a_file_that_retention_removes_meanwhile_is_omitted(recording):
    place, files = recording
    with Tables(place) as tables:
        counted = tables["exchanges"].asked("select count(*) as n from exchanges")
        ((all_rows,),) = counted.fetched()
        files[0].unlink()
        ((rows,),) = counted.fetched()
        assert rows == all_rows * 18 // 20  # without the oldest remaining file, which is removed next
        files[10].unlink()
        assert counted.arrow()["n"].to_pylist() == [all_rows * 17 // 20]
        (place / "exchanges" / "capture.parquet").write_bytes(files[11].read_bytes())
    with Tables(place) as tables:
        counted = tables["exchanges"].asked("select count(*) as n from exchanges")
        (place / "exchanges" / "capture.parquet").unlink()
        with pytest.raises(duckdb.IOException):  # not a file of a recorder, so not removed by retention
            counted.arrow()


def test_a_recording_whose_files_disappear_too_fast_is_refused_with_a_remedy(recording, monkeypatch):
    place, files = recording
    define = duck._reading

    def reading(name, listed):
        if name == "exchanges" and listed:
            listed[-1].unlink()
        return define(name, listed)

    with Tables(place) as tables:
        counted = tables["exchanges"].asked("select count(*) as n from exchanges")
        files[0].unlink()
        monkeypatch.setattr(duck, "_reading", reading)
        with pytest.raises(KproxyError, match="cp -al TABLES COPY"):
            counted.arrow()
