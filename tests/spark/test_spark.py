"""Spark sessions of the caller, and tables of other versions of kproxy."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import kproxy.spark
from kproxy.analysis import jobs
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.tables import schema
from kproxy.views import answers
from tests.captures import capture

ADDED = {"exchanges": ("muted_ns", "replica_id"), "partitions": ("cluster",), "batches": ("cluster",)}


def test_a_running_session_keeps_its_settings_and_times_are_utc(spark, capsys):
    settings = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.execution.arrow.maxBytesPerBatch": "1234567",
    }
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        ours = kproxy.spark.session()
        assert ours is spark and {name: spark.conf.get(name) for name in settings} == settings
        moment = "timestamp'2026-11-01T05:30:00.123456Z'"  # an hour that occurs twice in New York
        answer = spark.sql(f"select {moment} as time, 5L as total_ns")
        answers.show(answer, "json", None, None)
        assert json.loads(capsys.readouterr().out) == {"time": "2026-11-01T05:30:00.123456Z", "total_ns": 5}
        answers.show(answer, "table", None, None)
        assert "2026-11-01 05:30:00.123" in capsys.readouterr().out
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def test_a_session_started_by_kproxy_logs_only_errors(spark):
    """Neither progress of stages nor warnings, which would precede each answer."""
    levels = spark.sparkContext._jvm.org.apache.logging.log4j.LogManager
    assert str(levels.getRootLogger().getLevel()) == "ERROR"
    assert spark.conf.get("spark.ui.showConsoleProgress") == "false"


@pytest.mark.ring2
def test_old_tables_are_read_together_with_new_ones(spark, tmp_path):
    """Columns that were added later are null in old files, and every job runs on them."""
    rows = {
        "exchanges": {"api": "Fetch", "outcome": "answered", "latency_ns": 7, "total_ns": 10**9, "client_id": "me"},
        "partitions": {"api": "Fetch", "direction": "response", "topic": "t", "partition": 0, "lag_records": 3},
        "batches": {"api": "Produce", "direction": "request", "topic": "t", "control": False, "codec": "none"},
    }
    common = {"source": "a", "connection": 1, "number": 0, "time": datetime(2026, 1, 1, tzinfo=UTC)}
    new = {"muted_ns": 5, "replica_id": None, "cluster": "east"}
    for table in schema.TABLES.values():
        (tmp_path / table.name).mkdir()
        added = ADDED.get(table.name, ())
        new_one = pa.schema([field.with_nullable(True) for field in table.schema])
        old = pa.schema([field for field in new_one if field.name not in added])
        for kind, of in (("old", old), ("new", new_one)):
            row = {**common, **rows.get(table.name, {}), **new}
            row = {name: value for name, value in row.items() if name in of.names}
            pq.write_table(pa.Table.from_pylist([row], of), tmp_path / table.name / f"{kind}.parquet")
    (tmp_path / "_kproxy.json").write_text('{"schema_version": 1}')
    for name, added in ADDED.items():
        frame = kproxy.spark.table(spark, str(tmp_path), name)
        assert frame.columns == schema.BY_NAME[name].schema.names
        values = [row[0] for row in frame.select(added[0]).collect()]
        assert len(values) == 2 and None in values and set(values) != {None}
    for name, job in jobs.JOBS.items():
        if name != "compare":
            frames = [kproxy.spark.table(spark, str(tmp_path), table) for table in job.tables]
            job.run(*frames).collect()
    (tmp_path / "_kproxy.json").write_text(json.dumps({"schema_version": schema.VERSION + 1}))
    with pytest.raises(KproxyError, match="written by a newer kproxy"):
        kproxy.spark.table(spark, str(tmp_path), "exchanges")


@pytest.mark.ring2
def test_columns_of_the_paths_are_kept(spark, tmp_path):
    place = tmp_path / "quality" / "date=2026-01-01" / "hour=05"
    place.mkdir(parents=True)
    pq.write_table(schema.QUALITY.schema.empty_table(), place / "part.parquet")
    assert kproxy.spark.table(spark, str(tmp_path), "quality").columns[-2:] == ["date", "hour"]


@pytest.mark.ring2
@pytest.mark.parametrize("folder", ("t[1]", "t{a,b}", "t*", "a:b"))
def test_folders_are_taken_literally(spark, tmp_path, folder):
    """Not as a glob, which would read a sibling."""
    for place, captured in (("t1", "k41_kafkajs"), (folder, "k41_quota")):
        source = tmp_path / "2026-11-22T10:00:00.pcap"
        source.write_bytes(capture(captured).read_bytes())
        convert([source], tmp_path / place, Settings(detail="headers"))
    rows = pq.read_table(tmp_path / folder / "exchanges").num_rows
    assert kproxy.spark.table(spark, str(tmp_path / folder), "exchanges").count() == rows


def test_a_user_id_without_a_name_is_reported(monkeypatch):
    """Before a JVM starts, which would end with Hadoop's stack trace."""
    monkeypatch.setattr(SparkSession, "getActiveSession", staticmethod(lambda: None))
    monkeypatch.setattr("os.getuid", lambda: 1_234_567_890)
    with pytest.raises(KproxyError, match="user 1234567890, who has no name in /etc/passwd"):
        kproxy.spark.session("local[1]")
