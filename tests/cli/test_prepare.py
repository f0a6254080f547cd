"""`kproxy spark prepare`, which ./dev runs before the tests; tests/spark/test_classes.py tests its result."""

import signal
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.interrupts import ComesLater
from kproxy.spark import classes


def test_a_folder_that_cannot_be_made_is_reported_before_spark_starts(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = CliRunner().invoke(cli, ["spark", "prepare"])
    assert done.exit_code != 0 and "cannot be written to: Not a directory" in str(done.exception)


@pytest.mark.parametrize("starts", [True, False])
def test_sigterm_waits_for_a_jvm_that_starts_and_leaves_no_unfinished_files(tmp_path, monkeypatch, starts):
    """Like SIGINT, which a shell makes background processes ignore."""
    went_on = []

    def started(*_):
        with ComesLater() if starts else nullcontext():
            signal.raise_signal(signal.SIGTERM)
            went_on.append(True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("kproxy.cli.spark.started", started)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = CliRunner().invoke(cli, ["spark", "prepare"])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 1 and "Aborted!" in done.output and went_on == [True] * starts
    assert [*tmp_path.rglob("*")] == [tmp_path / "cache", tmp_path / "cache/kproxy"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.ring2
def test_the_archive_has_the_documented_size():
    kept = classes.archive()
    assert kept is not None and 100e6 < kept.stat().st_size < 300e6
