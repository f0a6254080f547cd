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


@pytest.mark.parametrize(("growth", "passed"), [(0.0, True), (0.5, False)])
def test_the_verdict(monkeypatch, growth, passed):
    """5 s to start, then 100 microseconds an exchange; with growth, the more the more there are."""

    def ingest(path, exchanges, master, out):
        size = path.stat().st_size
        return spark.Cost(master, size, exchanges, 5 + exchanges * 1e-4 * (1 + growth * size / 1e6), 6.0, 10**8)

    monkeypatch.setattr(spark, "ingest", ingest)
    monkeypatch.setattr(spark, "START_EXCHANGES", 1)
    done = CliRunner().invoke(spark.main, ["--gb", "0.004,0.001", "--masters", "a b", "--json"])
    assert done.exit_code == (0 if passed else 1), done.output


def test_what_is_shown(capsys):
    start = spark.Cost("local[1]", 70_000, 100, 13, 15, 10**8)
    large = spark.Cost("local[1]", 10**9, 300_000, 43, 55, 10**8, 100.0, 133.3, 1.3)
    spark.show([large, start], Console(width=120))
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["local[1]", "start", "100", "13.0 s", "15.0 s", "100 MB", "", "", "", ""],
        ["local[1]", "1.0 GB", "300,000", "43.0 s", "55.0 s", "100 MB", "100.0 µs", "133.3 µs", "1.30", "above 1.25"],
    ]
