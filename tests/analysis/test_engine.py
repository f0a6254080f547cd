"""Every job gives the same answer on both engines, on every capture of the repository."""

import math
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kproxy.spark
from kproxy.analysis import engine
from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import KINDS, PROBES, findings
from kproxy.analysis.findings import TABLES as OF_FINDINGS
from kproxy.analysis.jobs import JOBS
from kproxy.analysis.questions import sections
from kproxy.analysis.questions.pieces import ACCURACY
from kproxy.convert.processes import convert
from kproxy.tables import schema
from tests.analysis.findings import made
from tests.captures import folder
from tests.insight.truth import CAPTURE

THREADS = 2  # threads for Spark: its driver plans one question while another runs

MORE = {  # options in addition to the defaults
    "latency": {"by": ["client", "version", "cluster"], "every": "2 seconds", "replicas": True},
    "slow": {"slower_than_ms": 1, "replicas": True, "every": "5 seconds"},
    "throttle": {"by": ["broker"], "every": "1 minute"},
    "errors": {"by": ["api", "error", "client"], "every": "10s", "replicas": True},
    "talkers": {"by": ["source", "broker"], "every": "1 minute"},
    "skew": {"replicas": True, "where": "(`partition` = 0)", "traffic": "(client is not null)", "every": "5 seconds"},
    "batching": {"every": "1 minute", "where": "(client is not null)"},
    "fetching": {"by": ["host", "version"], "every": "5 seconds", "replicas": True},
    "spread": {"by": ["api", "broker"], "every": "5 seconds", "replicas": True},
    "batch-sizes": {"every": "5 seconds", "where": "(client is not null)"},
    "behind": {
        "by": ["client", "broker", "topic"],
        "every": "5 seconds",
        "replicas": True,
        "where": "(`partition` = 0)",
    },
    "retransmissions": {"by": ["client", "api"], "every": "5 seconds", "replicas": True},
    "leader-changes": {"every": "5 seconds"},
    "lag": {"every": "5 seconds", "replicas": True},
    "group-lag": {"where": "(`partition` = 0 and client is not null)", "every": "5 seconds"},
    "offsets": {"every": "10 seconds", "where": "(`offset` > 3)"},
    "clients": {"kafka": "3.9", "replicas": True, "every": "1 minute"},
    "connections": {"by": ["source"], "every": "1 minute", "replicas": True},
    "compare": {"by": ["api", "version"], "replicas": True, "every": "5 seconds", "where": "(api != 'Fetch')"},
    "quality": {"every": "1 minute"},
}
GROUPED = {"group-lag": {"by": ["group_id", "topic"]}, "behind": {"by": ["host"]}}  # further options


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The tables of every capture that needs no other file."""
    place = tmp_path_factory.mktemp("all")
    files = [
        path
        for archive in ("captures", "shapes")
        for path in sorted(folder(archive).iterdir())
        if path.name.partition(".")[2] in ("pcap", "pcapng", "pcap.gz")
    ]
    moved = tmp_path_factory.mktemp("moved") / "moved.pcap"  # 18 s during which groups lose their coordinator
    span = "-A", "2026-11-22 01:45:15", "-B", "2026-11-22 01:45:33"
    subprocess.run(["editcap", *span, CAPTURE, moved], env={**os.environ, "TZ": "UTC"}, check=True)
    summary = convert([*files, moved], place)
    assert len(summary.quality) > 30
    one = tmp_path_factory.mktemp("one")  # one file per table: Spark takes longer to open 60 files than to answer
    for table in schema.TABLES:
        (one / table).mkdir()
        found = pa.concat_tables(pq.ParquetFile(path).read() for path in sorted((place / table).iterdir()))
        pq.write_table(found, one / table / "all.parquet")
    return one


@pytest.fixture(scope="module")
def one_partition(spark):
    """Spark with one partition, so that an answer is one job, and without broadcasts: for each of the hundreds of joins
    they would take 1 MB or more of the driver's memory.
    """
    settings = {"spark.sql.shuffle.partitions": "1", "spark.sql.autoBroadcastJoinThreshold": "-1"}
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture(scope="module")
def sparks(request, one_partition, dataset):
    """Spark's answers for the selected tests: all jobs are started at once, in threads, before DuckDB's."""
    chosen = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    jobs = [JOBS[item.callspec.params["name"]] for item in chosen]
    needed = {table for job in jobs for table in job.tables}
    tables = {table: kproxy.spark.table(one_partition, str(dataset), table) for table in needed}
    with ThreadPoolExecutor(THREADS) as pool:
        asked = {
            (job.name, number): pool.submit(answers, job, tables, options)
            for job in jobs
            for number, options in enumerate(options_of(job.name))
        }
        yield asked


def options_of(name):
    return ({}, *(options[name] for options in (MORE, GROUPED) if name in options))


def answers(job, tables, options):
    if job.name == "compare":
        part = "select * from exchanges where source in ('k41_quota.pcap', 'k41_librdkafka.pcap')"
        options = {"other": engine.ask({"exchanges": tables["exchanges"]}, part=part), **options}
    frame = job.run(*(tables[name] for name in job.tables), **options)
    return engine.columns(frame), list(engine.rows(frame))


def alike(one, other):
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other and isinstance(one, type(other))


@pytest.mark.parametrize("name", JOBS)
def test_both_engines_give_the_same_answer(sparks, dataset, name):
    job = JOBS[name]
    with Tables(dataset) as tables:
        for number, options in enumerate(options_of(name)):
            mine, theirs = answers(job, tables, options), sparks[name, number].result()
            assert mine[0] == theirs[0]
            assert len(mine[1]) == len(theirs[1]) and mine[1]
            for one, other in zip(mine[1], theirs[1], strict=True):
                assert all(map(alike, one, other)), (one, other)


def test_an_overview_is_the_same_on_both(one_partition, dataset):
    with Tables(dataset) as tables, ThreadPoolExecutor(THREADS) as pool:
        frames = sections.overview(
            {name: kproxy.spark.table(one_partition, str(dataset), name) for name in sections.TABLES}, 50
        )
        theirs = {name: pool.submit(lambda of: list(engine.rows(of)), frame) for name, (frame, _) in frames.items()}
        for name, (frame, _) in sections.overview(tables, 50).items():
            assert engine.columns(frame) == engine.columns(frames[name][0])
            names = frame.columns
            pairs = list(zip(engine.rows(frame), theirs[name].result(), strict=True))
            assert pairs, name
            for one, other in pairs:
                many = (
                    name in ("brokers", "apis") and one[names.index("exchanges")] > ACCURACY // 2
                )  # percentiles may be off by half a row
                for column, mine, there in zip(names, one, other, strict=True):  # above ACCURACY rows: approximate
                    near = many and re.fullmatch(r"p\d+_ns", column) and math.isclose(mine, there, rel_tol=0.1)
                    assert near or alike(mine, there), (name, one, other)


@pytest.mark.timeout(1200)  # Spark plans sixty questions: minutes of one core
def test_findings_are_the_same_on_both(one_partition, dataset, tmp_path):
    """Findings of all captures, and of synthetic traffic for the remaining kinds."""
    place = made.dataset(tmp_path / "tables")
    for table in OF_FINDINGS:
        (place / table).mkdir(exist_ok=True)
        shutil.copy(dataset / table / "all.parquet", place / table / "captured.parquet")
    frames = {name: kproxy.spark.table(one_partition, str(place), name) for name in OF_FINDINGS}
    with Tables(place) as tables, ThreadPoolExecutor(THREADS) as pool:
        theirs = [pool.submit(findings, frames, kinds=probe.kinds) for probe in PROBES]
        met = set()
        for probe, future in zip(PROBES, theirs, strict=True):
            mine = findings(tables, kinds=probe.kinds)
            assert mine == future.result(), probe.kinds
            met |= {one.kind for one in mine}
    assert len(met) > len(KINDS) // 2


def test_pauses_and_absences_of_brokers_are_the_same_on_both(one_partition, tmp_path):
    for name, scene, kind in (
        ("pause", partial(made.pause, paused_s=1.5), "broker_paused"),
        ("follower", made.pause_of_follower, "writes_waiting_together"),
        ("absence", partial(made.absence, named=(), tried_s=None, served_s=None, is_in_sync=False), "broker_absent"),
    ):
        table = made.Made()
        scene(table)
        place = table.write(tmp_path / name)
        frames = {each: kproxy.spark.table(one_partition, str(place), each) for each in OF_FINDINGS}
        with Tables(place) as tables:
            mine = findings(tables, kinds=[kind])
        assert kind in {one.kind for one in mine}
        assert mine == findings(frames, kinds=[kind])


def test_percentiles_of_many_rows_are_within_their_error(spark, tmp_path):
    """Above 10,000 rows, Spark's percentiles are approximate: off by at most a ten thousandth of the rows."""
    text = (
        "select percentile_approx(x, 0.5, 10000) as p50, percentile_approx(x, 0.99, 10000) as p99, "
        "percentile_approx(x, 0.999, 10000) as p999 from (select cast(i * 7919 % 200003 as bigint) as x from numbers)"
    )
    with Tables(tmp_path) as tables:
        numbers = tables.query("select unnest(range(200003)) as i")
        (exact,) = engine.rows(engine.ask({"numbers": numbers}, answer=text))
    (near,) = engine.rows(engine.ask({"numbers": spark.range(200003).withColumnRenamed("id", "i")}, answer=text))
    assert exact == (100001, 198002, 199802)
    assert all(abs(one - other) <= 200003 / 10_000 + 1 for one, other in zip(exact, near, strict=True))
