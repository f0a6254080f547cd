"""The command line: every job from its options to its answer, in every format; and what is told of mistakes."""

import csv
import io
import json
import shutil

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


def test_mistakes_are_told(run, tables, tmp_path):
    for arguments, said in (
        (("latency", tables, "--by", "colour"), "colour"),
        (("latency", tables, "--where", "api ="), "PARSE_SYNTAX_ERROR"),
        (("latency", tmp_path), "holds no table 'exchanges': is it a dataset?"),
        (("skew", capture("k41_BASE").parent), "holds no table 'partitions'"),
        (("clients", tables, "--kafka", "0.7"), "Kafka 0.7 is not known here; known are"),
        (("latency", tables, "--format", "parquet"), "go together"),
    ):
        with pytest.raises(KproxyError, match=said):
            run(*arguments)


def test_a_mistake_is_one_line_without_stacks_of_java(run, tables, monkeypatch):
    logged = []
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logger = PySparkLogger.getLogger(name)
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "handle", logged.append)
    for arguments in (("--by", "colour"), ("--every", "a while"), ("--where", "colour = 1")):
        with pytest.raises(KproxyError) as told:
            run("latency", tables, *arguments)
        assert "\n" not in str(told.value)
    assert not logged


def test_ingest(run, tmp_path):
    said = run("ingest", capture("k41_BASE"), "--out", tmp_path / "tables", "--port", 9092, "--cluster", "east")
    assert "rows" in said and "packet records read" in said
    files = list((tmp_path / "tables" / "exchanges").rglob("*.parquet"))
    assert {row["cluster"] for file in files for row in pq.ParquetFile(file).read().to_pylist()} == {"east"}
