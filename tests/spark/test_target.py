"""An ingest publishes everything or nothing, whether its run ends, fails or dies at any step."""

import json
import re
import resource

import pyarrow.parquet as pq
import pytest

import kproxy.spark
from kproxy.capture.formats import splits
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.spark import pipeline, target
from kproxy.spark.target import STAGE, Target
from kproxy.tables import dataset, schema
from tests.capture import packet
from tests.captures import capture
from tests.convert.test_clusters import EAST, WEST, Talk, converted, rebuilt
from tests.spark.test_pipeline import assert_same_rows, known, rows

HOUR = "date=2026-01-31/hour=10"


def staged(folder, run):
    """A target with three staged tables, as Spark leaves them."""
    made = Target(None, str(folder))
    made.begin()
    for place in (f"table=exchanges/{HOUR}", f"table=partitions/{HOUR}", "table=quality/date=none/hour=none"):
        place = folder / STAGE / place
        place.mkdir(parents=True)
        (place / f"part-{run}.txt").write_text(f"of {run}")
        (place / f".part-{run}.txt.crc").write_text("a checksum")
    (folder / STAGE / "_SUCCESS").write_text("")
    late = folder / STAGE / "_temporary" / "0" / "_temporary" / "attempt_1" / "table=exchanges" / HOUR
    late.mkdir(parents=True)  # of a task that another attempt overtook, and that has not noticed yet
    (late / f"part-{run}-late.txt").write_text("half of it")
    return made


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def table_files(*runs):
    places = (f"exchanges/{HOUR}", f"partitions/{HOUR}", "quality")
    tables = [f"{place}/part-{run}.parquet" for place in places for run in runs]
    return ["_kproxy.json", *sorted(tables)]


@pytest.mark.parametrize("replace", (False, True))
def test_a_run_that_dies_at_any_step_is_completed_by_the_next(tmp_path, monkeypatch, replace):
    """Before the list of moves is written nothing is published; afterwards the next run completes all of it."""

    class Killed(BaseException):
        pass

    steps = mixed = 0
    while True:
        folder = tmp_path / str(steps)
        old = staged(folder, "old")
        old.publish({"run": "old"}, replace=False)
        old.abandon()
        dying = staged(folder, "new")
        left = [steps]

        def step(name, left=left):
            real = getattr(target._Local, name)

            def stepping(self, *given):
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return real(self, *given)

            return stepping

        with monkeypatch.context() as patch:
            for name in ("write", "move", "remove"):
                patch.setattr(target._Local, name, step(name))
            try:
                dying.publish({"run": "new"}, replace=replace)
                died = False
            except Killed:
                died = True
        seen = [path for path in files(folder) if not path.startswith(".")]
        for table in ("exchanges", "partitions"):
            assert any(path.startswith(f"{table}/") for path in seen), "the tables are gone"
        if replace and {path.rpartition("-")[2] for path in seen if path.endswith(".parquet")} == {
            "old.parquet",
            "new.parquet",
        }:
            mixed += 1
            with pytest.raises(KproxyError, match="start it again, which first finishes what was begun"):
                dataset.has_rows(str(folder), "exchanges")
            assert Target(None, str(folder)).is_unfinished
        if dying._claim >= 0:
            target.os.close(dying._claim)
        after = Target(None, str(folder))
        after.begin()
        after.abandon()
        run = json.loads((folder / "_kproxy.json").read_text())["run"]
        wanted = table_files("old") if run == "old" else table_files("new") if replace else table_files("new", "old")
        assert files(folder) == wanted
        assert run == ("old" if steps == 0 else "new")
        assert dataset.has_rows(str(folder), "exchanges") and not after.is_unfinished
        if not died:
            break
        steps += 1
    assert steps >= 5 and bool(mixed) == replace


def test_a_full_disk_is_reported(tmp_path):
    folder = tmp_path / "tables"
    made = staged(folder, "one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # the kernel refuses as for a full disk
    try:
        with pytest.raises(KproxyError, match=re.escape(f"{folder}: cannot be written to: File too large")):
            made.publish({"run": "one"}, replace=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    made.abandon()
    assert not files(folder)


def test_only_files_of_tables_are_published_and_a_folder_has_one_writer(tmp_path):
    folder = tmp_path / "a b[1]"
    first = staged(folder, "one")
    with pytest.raises(KproxyError, match="another kproxy writes to it"):
        Target(None, str(folder)).begin()
    first.publish({"schema_version": schema.VERSION}, replace=False)
    first.abandon()
    assert files(folder) == table_files("one")
    failing = staged(folder, "two")
    failing.abandon()
    assert files(folder) == table_files("one")
    made_for_nothing = Target(None, str(tmp_path / "x" / "y"))
    made_for_nothing.begin()
    made_for_nothing.abandon()
    assert not (tmp_path / "x").exists()
    (folder / "_kproxy.json").write_text(json.dumps({"schema_version": schema.VERSION + 1, "kproxy": "9"}))
    with pytest.raises(KproxyError, match="newer kproxy"):
        Target(None, str(folder)).manifest()


@pytest.mark.parametrize("manifest", (None, "cut short {"))
def test_unknown_tables_are_not_replaced(tmp_path, manifest):
    """Their manifest is missing or damaged, or another program wrote them."""
    place = tmp_path / "exchanges" / HOUR / "of-another.parquet"
    place.parent.mkdir(parents=True)
    place.write_text("rows")
    if manifest is not None:
        (tmp_path / "_kproxy.json").write_text(manifest)
    with pytest.raises(KproxyError, match=r"holds exchanges and no _kproxy\.json that says whose they are"):
        pipeline.check([capture("k41_midstream")], tmp_path, Settings())
    pipeline.check([capture("k41_midstream")], tmp_path, Settings(overwrite=True))


def killed(files, path, to):
    raise KeyError("killed after it was written down what is to be done, before anything was")


@pytest.mark.ring2
def test_append_adds_each_capture_once(spark, tmp_path):
    """Also from a folder with a damaged file, an empty one and a file that is no capture: all readable rows, once."""
    folder = tmp_path / "captures"
    folder.mkdir()
    damaged = bytearray(capture("k41_BASE").read_bytes())
    at = splits._Records(bytes(damaged)).boundary(200_000, len(damaged))
    damaged[at + 8 : at + 12] = b"\xff" * 4
    contents = {
        "a.pcap": capture("k41_midstream").read_bytes(),
        "damaged.pcap": bytes(damaged),
        "empty.pcap": b"",
        "none.pcap": b"this is no capture",
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    out = tmp_path / "tables"
    first = pipeline.ingest(spark, [folder], out, append=True, split_bytes=100_000)
    assert sorted(fault.name for fault in first.failed) == [str(folder / name) for name in ("empty.pcap", "none.pcap")]
    assert set(first.quality) == {"a.pcap", "damaged.pcap"} and first.quality["damaged.pcap"].count("damaged")
    later = capture("k41_quota")
    (folder / later.name).write_bytes(later.read_bytes())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError, match="killed"):
        patch.setattr(target._Local, "move", killed)
        pipeline.ingest(spark, [folder], out, append=True)
    # completes the first run, and finds nothing left to add
    second = pipeline.ingest(spark, [folder], out, append=True)
    assert (second.quality, len(second.failed)) == ({}, 2)
    before = files(out)
    assert {path.split("/")[0] for path in before if path.endswith(".parquet")} == schema.BY_NAME.keys() - {"records"}
    assert sum(path.startswith("registry/") for path in before) == 1  # an empty table gets its file once
    third = pipeline.ingest(spark, [folder / "a.pcap", folder / later.name], out, append=True)
    assert (third.quality, third.failed, files(out)) == ({}, [], before)
    for name in ("empty.pcap", "none.pcap"):
        (folder / name).unlink()
    # each by itself, since captures converted together may know more names
    for number, path in enumerate(sorted(folder.iterdir())):
        convert([path], tmp_path / f"converted{number}", processes=1)
    for table in (schema.EXCHANGES, schema.PARTITIONS, schema.BATCHES, schema.CONNECTIONS):
        ours = rows(out, table).to_pylist()
        theirs = [row for number in range(3) for row in rows(tmp_path / f"converted{number}", table).to_pylist()]
        assert len(ours) == len(theirs) and {str(row) for row in ours} == {str(row) for row in theirs}, table.name
    manifest = json.loads((out / "_kproxy.json").read_text())
    assert known(out) == {"a.pcap", "damaged.pcap", later.name}
    assert manifest["rows"]["exchanges"] == len(rows(out, schema.EXCHANGES))
    (folder / "a.pcap").write_bytes(capture("k41_sasl_plain").read_bytes())
    with pytest.raises(KproxyError, match="another capture that is called a"):
        pipeline.ingest(spark, [folder], out, append=True)
    assert files(out) == before
    with pytest.raises(KproxyError, match="say one of them"):
        pipeline.ingest(spark, [folder], out, Settings(overwrite=True), append=True)


@pytest.mark.ring2
def test_each_table_and_hour_has_one_file(spark, tmp_path):
    """However many tasks there are: twelve captures of one hour, each larger than a task's share."""
    folder = tmp_path / "captures"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.pcap").write_bytes(capture("k41_quota").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "UNIT_BYTES", 1)
        pipeline.ingest(spark, [folder], tmp_path / "tables")
    found = [path for path in files(tmp_path / "tables") if path.endswith(".parquet")]
    assert len({path.rsplit("/", 1)[0] for path in found}) == len(found)
    convert([folder], tmp_path / "converted", processes=1)
    assert_same_rows(tmp_path / "tables", tmp_path / "converted")


@pytest.mark.ring2
def test_another_format_is_written_extended_and_replaced(spark, tmp_path):
    """By the commits of Spark's own writer, whose files kproxy does not remove."""
    first, second, small = (capture(name) for name in ("k41_BASE", "k41_quota", "k41_midstream"))
    out = tmp_path / "tables"

    def written(*paths):
        convert(paths, tmp_path / paths[-1].name, processes=1)
        for name in schema.TABLES:
            expected = sum(
                pq.read_metadata(file).num_rows for file in (tmp_path / paths[-1].name / name).glob("*.parquet")
            )
            found = list((out / name).rglob("*.orc"))
            assert (spark.read.orc(str(out / name)).count() if found else 0) == expected, name

    pipeline.ingest(spark, [first], out, form="orc")
    written(first)
    pipeline.ingest(spark, [second], out, form="orc", append=True)
    rows_of = json.loads((out / "_kproxy.json").read_text())["rows"]
    assert spark.read.orc(str(out / "exchanges")).count() == rows_of["exchanges"] > 373
    assert known(out) == {first.name, second.name}
    pipeline.ingest(spark, [small], out, Settings(overwrite=True), form="orc")  # it has rows in fewer tables
    written(small)
    assert known(out) == {small.name}
    with pytest.raises(KproxyError, match="of the format orc: say --format"):
        pipeline.ingest(spark, [first], out, append=True)
    with pytest.raises(KproxyError, match=r"spark.read.format\('orc'\)"):
        kproxy.spark.table(spark, str(out), "exchanges")
    with pytest.raises(KproxyError, match="no such format"):
        pipeline.ingest(spark, [first], tmp_path / "none", form="nosuch")
    assert not (tmp_path / "none").exists()


@pytest.mark.ring2
def test_a_missing_file_system_of_spark_is_reported_with_its_package(spark):
    version = spark.sparkContext._jvm.org.apache.hadoop.util.VersionInfo.getVersion()
    with pytest.raises(KproxyError, match=f"--conf spark.jars.packages=org.apache.hadoop:hadoop-aws:{version}$"):
        Target(spark, "s3a://bucket/tables")
    with pytest.raises(KproxyError, match="Spark's name of it is s3a://"):
        Target(spark, "s3://bucket/tables")


@pytest.mark.ring2
def test_added_captures_are_assigned_to_existing_or_new_clusters(spark, tmp_path):
    """As by `kproxy convert --append`: a cluster keeps its name, a new one is named by its id."""
    out, folder = tmp_path / "tables", tmp_path / "captures"
    folder.mkdir()
    for name, brokers, cluster_id in (("a", EAST, "east"), ("b", WEST, "west"), ("c", EAST, "east")):
        packets = Talk(1, min(brokers)).metadata(1, brokers, cluster_id).packets
        data = packet.pcap([(number * 1_000_000, each) for number, each in enumerate(packets)])
        (folder / f"{name}.pcap").write_bytes(data)
        pipeline.ingest(spark, [folder / f"{name}.pcap"], out, append=True)
    found = {row["source"]: row["cluster"] for row in rows(out, schema.CONNECTIONS).to_pylist()}
    assert found == {"a.pcap": "default", "b.pcap": "west", "c.pcap": "default"}


@pytest.mark.ring2
def test_clusters_at_the_same_addresses_are_those_of_convert(spark, tmp_path):
    clusters, _, _ = converted(tmp_path, {"one": rebuilt()})
    out = tmp_path / "ingested"
    pipeline.ingest(spark, [tmp_path / "one.pcap"], out)
    assert {row["client_port"]: row["cluster"] for row in rows(out, schema.CONNECTIONS).to_pylist()} == clusters["one"]
