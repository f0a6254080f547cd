"""The command line: every job from its options to its answer, in every format; and what is told of mistakes."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.logger import PySparkLogger

from kproxy.analysis.jobs import JOBS
from kproxy.cli import cli
from kproxy.errors import KproxyError
from tests.captures import capture


@pytest.fixture
def run(spark):
    def invoke(*arguments):
        done = CliRunner().invoke(cli, ["spark", *map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return invoke


def test_help_teaches_by_example():
    """Of each job: what it tells, its options with their defaults, and a command that its own options allow."""
    whole = CliRunner().invoke(cli, ["spark", "--help"]).output
    assert all(f"  {name} " in whole for name in ("ingest", *JOBS))
    for name in JOBS:
        told = CliRunner().invoke(cli, ["spark", name, "--help"], terminal_width=200).output
        example = next(line for line in told.splitlines() if line.startswith(f"    kproxy spark {name} tables"))
        options = [word for word in example.split() if word.startswith("--")]
        assert all(f"  {option} " in told for option in options), name
    assert "Default: api." in CliRunner().invoke(cli, ["spark", "latency", "--help"], terminal_width=200).output


def test_formats(run, tables, tmp_path):
    lines = [json.loads(line) for line in run("latency", tables, "--by", "api,client", "--format", "json").splitlines()]
    told = list(csv.DictReader(io.StringIO(run("latency", tables, "--by", "api,client", "--format", "csv"))))
    assert [{name: str(value) for name, value in line.items()} for line in lines] == told and lines
    run("latency", tables, "--by", "api,client", "--format", "parquet", "--out", tmp_path / "latency")
    assert pq.read_table(tmp_path / "latency").num_rows == len(lines)
    shown = run("latency", tables, "--by", "api,client", "--limit", "3").splitlines()
    assert len(shown) == 4 and shown[0].split()[:4] == ["api", "client", "exchanges", "p50"]
    assert any(unit in shown[1] for unit in (" ms", " s", " µs"))


def test_what_a_table_does_not_show_is_said(spark, run, tables, tmp_path):
    done = CliRunner().invoke(cli, ["spark", "clients", str(tables)])
    assert len(done.stdout.splitlines()) == 51 and done.stderr.endswith("Only the first 50 rows: --limit shows more.\n")
    assert run("throttle", tables, "--where", "false") == "No rows.\n"
    shutil.copy(tables / "_kproxy.json", tmp_path)
    (tmp_path / "exchanges").mkdir()
    assert run("latency", tmp_path) == "No rows.\n"  # the captures had nothing for that table


def test_options_reach_the_job(run, tables):
    slow = [
        json.loads(line)
        for line in run(
            "slow", tables, "--slower-than-ms", 1000, "--top", 2, "--where", "api = 'Produce'", "--format", "json"
        ).splitlines()
    ]
    assert len(slow) == 2 and all(row["api"] == "Produce" and row["total_ns"] > 1_000_000_000 for row in slow)
    both = [
        json.loads(line)
        for line in run("compare", tables, "--with", tables, "--by", "api", "--format", "json").splitlines()
    ]
    assert both and all(row["exchanges"] == row["b_exchanges"] and row["p99_change"] in (1.0, None) for row in both)


def no_jvm(*arguments, **environment):
    """The command in a process in which pyspark is there and Spark cannot start."""
    code = "import sys; sys.modules['pyspark.sql'] = None; from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_mistakes_are_reported_before_spark_starts(tables, tmp_path):
    (tmp_path / "there").mkdir()
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "_kproxy.json").write_text('{"schema_version": 99, "kproxy": "9.9"}')
    for arguments, said in (
        (("latency", tables, "--by", "colour"), "exchanges has no column 'colour': there are version, broker, client"),
        (("latency", tables, "--by", "clint"), "has no column 'clint': did you mean client"),
        (("connections", tables, "--by", "version"), "connections has no column 'version': did you mean"),
        (("latency", tables, "--every", "a while"), "--every 'a while' is no span of time: give a number and a unit"),
        (("latency", tables, "--where", "clientid = 'x'"), "no column 'clientid': did you mean client_id"),
        (("latency", tmp_path), "holds no tables: name the folder that `kproxy convert`"),
        (("latency", tmp_path / "gone"), "there is no such folder"),
        (("latency", newer), "written by a newer kproxy (9.9"),
        (
            ("latency", capture("k41_BASE")),
            "is a capture, and questions are put to tables: make them with `kproxy convert",
        ),
        (("latency", tables / "exchanges"), f"name the folder that holds all of them, {tables}"),
        (("compare", tables, "--with", tmp_path / "gone"), "there is no such folder"),
        (("clients", tables, "--kafka", "0.7"), "Kafka 0.7 is not known here; known are 0.8.0, 0.8.1, 0.8.2"),
        (("latency", tables, "--format", "parquet"), "go together"),
        (("latency", tables, "--format", "parquet", "--out", tmp_path / "there"), "is there already"),
        (
            ("ingest", capture("k41_BASE"), "--out", tables),
            "holds tables already: name another folder, or say --overwrite",
        ),
    ):
        done = no_jvm(*arguments)
        assert said in done.stderr and done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and not done.stdout
    assert "pip install" in no_jvm("latency", tables, "--where", "lower(client_id) like 'x%' and errors > 0").stderr
    said = no_jvm("clients", tables, "--kafka", "3.7.1").stderr
    assert "Kafka 3.7.1 is judged as 3.7.2, the newest of its line" in said


def test_without_java_it_is_said_what_to_install(tables, tmp_path):
    code = "from kproxy.cli import main; main()"
    environment = {**os.environ, "PATH": str(tmp_path), "JAVA_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, "spark", "latency", str(tables)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "Spark needs Java 17 or newer" in done.stderr and done.stderr.count("\n") == 1


def test_a_mistake_that_only_spark_sees_is_one_line_in_plain_words(run, tables, monkeypatch):
    logged = []
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logger = PySparkLogger.getLogger(name)
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "handle", logged.append)
    for where, said in (
        ("api =", "--where cannot be read near end of input: give a condition in SQL"),
        ("exists(array(api), x -> x = colour)", "there is no column colour"),
        ("api", "not a boolean|boolean"),
        ("bigint(api) > 5", "Produce|bigint|BIGINT"),
    ):
        with pytest.raises(KproxyError, match=said) as told:
            run("latency", tables, "--where", where)
        assert "\n" not in str(told.value) and not re.search(r"[A-Z]+_[A-Z_]+|SQLSTATE", str(told.value)), told.value
    assert not logged


def test_conditions_do_not_change_what_is_computed_over_all_rows(run, tables):
    """Gaps between commits, and a partition's part of its topic."""

    def answer(*arguments):
        return [json.loads(line) for line in run(*arguments, "--format", "json").splitlines()]

    for job, where in (("offsets", "partition = 0"), ("skew", "partition = 0"), ("slow", "api = 'Fetch'")):
        everything = answer(job, tables, *(["--top", 100_000] if job == "slow" else []))
        some = answer(job, tables, "--where", where, *(["--top", 100_000] if job == "slow" else []))
        chosen = [row for row in everything if (row["api"] == "Fetch" if job == "slow" else row["partition"] == 0)]
        assert some == chosen and 0 < len(some) <= len(everything)


def test_spark_itself_is_silent(tables):
    """In a process of its own: what its JVM logs at the start is no part of the answer."""
    code = "from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", "quality", str(tables), "--master", "local[1]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("\x1b[1m" + "source") or done.stdout.startswith("source")


def test_ingest(run, tmp_path):
    said = run("ingest", capture("k41_BASE"), "--out", tmp_path / "tables", "--port", 9092, "--cluster", "east")
    assert "rows" in said and "packet records read" in said
    done = CliRunner().invoke(
        cli, ["spark", "ingest", str(capture("k41_BASE")), "--out", str(tmp_path / "none"), "--port", "1", "--strict"]
    )
    assert done.exit_code == 1 and "No Kafka in it" in done.output
    files = list((tmp_path / "tables" / "exchanges").rglob("*.parquet"))
    assert {row["cluster"] for file in files for row in pq.ParquetFile(file).read().to_pylist()} == {"east"}
