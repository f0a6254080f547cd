"""The Spark bench's arithmetic and its verdict; a process's descendants are counted, also those that are gone."""

import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import spark

BUSY = "import time; end = time.process_time() + {0}\nwhile time.process_time() < end: pass"
TREE = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {BUSY.format(0.5)!r}]); time.sleep(60)"


def test_cpu_time_is_that_of_all_processes():
    with subprocess.Popen([sys.executable, "-c", TREE]) as process:
        used = spark._Processes(psutil.Process(process.pid))
        deadline = time.monotonic() + 60
        while (len(used.cpu_s) < 2 or used.root.children()) and time.monotonic() < deadline:
            used.look()
        process.kill()
    assert len(used.cpu_s) == 2 and sum(used.cpu_s.values()) >= 0.4 and used.worker_bytes > 1_000_000


@pytest.fixture(autouse=True)
def unprepared(monkeypatch):
    """What Spark keeps has a test of its own: tests/spark/test_classes.py."""
    monkeypatch.setattr(spark, "prepare", lambda folder: None)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({}, None),
        ({"growth": 0.5}, "times"),
        ({"convert_s": 1.0}, "of convert"),
        ({"second": 0.9}, "speedup"),
        ({"read": 2}, "read"),
        ({"shuffled": 0.5}, "shuffled"),
    ],
)
def test_the_verdict(monkeypatch, wrong, fault):
    """5 s to start, then 100 microseconds an exchange; with growth, the more the more there are."""

    def ingest(path, exchanges, master, out):
        size = path.stat().st_size
        cpu_s = 5 + exchanges * 1e-4 * (1 + wrong.get("growth", 0.0) * size / 1e6)
        wall_s = 6.0 + cpu_s * (wrong.get("second", 0.5) if master == "b" else 1)
        read, shuffled = int(wrong.get("read", 1) * size), int(wrong.get("shuffled", 0.001) * size)
        return spark.Cost(master, size, exchanges, cpu_s, wall_s, 10**8, read_bytes=1000 + read, shuffle_bytes=shuffled)

    monkeypatch.setattr(spark, "ingest", ingest)
    monkeypatch.setattr(spark, "converted", lambda path, out: wrong.get("convert_s", 3.0))
    monkeypatch.setattr(spark, "START_EXCHANGES", 1)
    monkeypatch.setattr(spark, "LARGE_BYTES", 0)
    done = CliRunner().invoke(spark.main, ["--gb", "0.004,0.001", "--masters", "a b"])
    assert done.exit_code == (1 if fault else 0), done.output
    assert ("not kept" in done.output) == bool(fault) and (fault or "") in done.output


def test_many_small_captures(monkeypatch):
    seen = []

    def ingest(path, exchanges, master, out):
        seen.append(sum(1 for _ in path.iterdir()))
        return spark.Cost(master, 10**6, exchanges, 5.0, 6.0, 10**8, driver_bytes=10**8 * (3 if exchanges > 9 else 1))

    monkeypatch.setattr(spark, "ingest", ingest)
    assert CliRunner().invoke(spark.main, ["--captures", "7,2"]).exit_code == 0
    assert CliRunner().invoke(spark.main, ["--captures", "7,20"]).exit_code == 1  # memory grows with their number
    assert seen == [2, 7, 7, 20]


def test_shuffled_bytes_come_from_the_event_log(tmp_path):
    line = '{"Event":"SparkListenerTaskEnd","Task Metrics":{"Shuffle Write Metrics":{"Shuffle Bytes Written":%d}}}'
    log = tmp_path / "log"
    log.write_text(
        "\n".join(['{"Event":"SparkListenerJobStart"}', line % 40, line % 2, '{"Event":"SparkListenerTaskEnd"}'])
    )
    assert spark._shuffled(log) == 42


def test_what_is_shown(capsys):
    start = spark.Cost("local[1]", 70_000, 100, 13, 15, 10**8)
    large = spark.Cost("local[1]", 10**9, 300_000, 43, 55, 10**8, 100.0, 133.3, 1.3, 10**9, 10**7, 0.7)
    spark.show([large, start], Console(width=200))
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    first, second = ([cell.strip() for cell in line] for line in lines)
    assert first == ["local[1]", "start", "100", "13.0 s", "15.0 s", "100 MB", *[""] * 8]
    assert second[:9] == ["local[1]", "1.0 GB", "300,000", "43.0 s", "55.0 s", "100 MB", "100.0 µs", "133.3 µs", "1.30"]
    assert second[9:] == ["0.70", "", "1.00", "1.0%", "not kept: times"]
