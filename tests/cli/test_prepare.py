"""`kproxy spark prepare`, which ./dev runs before the tests: see tests/spark/test_classes.py for what it made."""

import signal

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.spark import classes


def test_a_folder_that_cannot_be_made_is_told_before_spark_starts(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = CliRunner().invoke(cli, ["spark", "prepare"])
    assert done.exit_code != 0 and "cannot be written to: Not a directory" in str(done.exception)


def test_sigterm_leaves_no_unfinished_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("kproxy.cli.spark.started", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    done = CliRunner().invoke(cli, ["spark", "prepare"])
    assert done.exit_code == 1 and "Aborted!" in done.output
    assert [*tmp_path.rglob("*")] == [tmp_path / "cache", tmp_path / "cache/kproxy"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.ring2
def test_what_it_keeps_is_of_that_size():
    kept = classes.archive()
    assert kept is not None and 100e6 < kept.stat().st_size < 300e6
