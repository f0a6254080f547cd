"""`kproxy spark ingest` gives the same rows as `kproxy convert`, from all captures at once."""

import gzip
import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

import kproxy.spark
from bench.offline import KINDS, generate
from kproxy.capture.connections import flows
from kproxy.capture.dissection.keys import hash_of, pair_of
from kproxy.capture.dissection.packets import ACK, FIN, SYN
from kproxy.capture.formats import splits
from kproxy.capture.formats.storage import Storage
from kproxy.convert.job import Settings
from kproxy.convert.parts import reader
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.protocol import codec
from kproxy.spark import pipeline
from kproxy.spark.target import LOG, STAGE, Target
from kproxy.spark.tasks import places
from kproxy.tables import schema
from kproxy.tables.records import chosen
from tests.capture import packet
from tests.captures import capture, expected, folder
from tests.project import ROOT
from tests.storages import Bucket, hdfs


def captures():
    return sorted(path for name in ("captures", "shapes") for path in folder(name).iterdir() if ".pcap" in path.name)


def rows(place, table):
    """All rows of a table in one order, without the folders' date and hour, which are not columns of kproxy."""
    files = sorted((place / table.name).rglob("*.parquet"))
    whole = pa.concat_tables([pq.ParquetFile(file).read() for file in files]) if files else table.schema.empty_table()
    flat = [field.name for field in whole.schema if not pa.types.is_nested(field.type)]
    return whole.sort_by([(name, "ascending") for name in ("source", *table.keys, *flat)])


def known(place):
    """The captures listed in the tables."""
    lines = [line for file in (place / "_captures").iterdir() for line in file.read_text().splitlines()]
    return {json.loads(line)["source"] for line in lines}


def assert_same_rows(ours, theirs, *more):
    for table in (*schema.TABLES.values(), *more):
        a, b = rows(ours, table), rows(theirs, table)
        if table is schema.RECORDS:  # the type of Spark's lists allows nulls
            b = b.cast(a.schema)
        else:
            assert a.schema == table.schema
        different = [name for name in table.schema.names if not a[name].equals(b[name])] if len(a) == len(b) else []
        assert (len(a), different) == (len(b), []), table.name


class Wire:
    """A capture made by hand, with connections by number."""

    def __init__(self):
        self.packets = []
        self._next = {}

    def segment(self, connection, side, payload=b"", flags=ACK):
        ends = (bytes((10, 0, connection >> 8, connection & 255)), 40000), packet.BROKER
        seq = self._next.setdefault(connection, [1, 1])
        head = {"source": ends[side], "target": ends[1 - side]}
        whole = packet.tcp(payload, **head, seq=seq[side], ack=seq[1 - side] if flags & ACK else 0, flags=flags)
        seq[side] += len(payload) + bool(flags & (SYN | FIN))
        time_ns = 1_700_000_000_000_000_000 + len(self.packets) * 10_000
        self.packets.append((time_ns, packet.ethernet(packet.ipv4(whole, **head, identity=len(self.packets)))))

    def open(self, connection):
        for side, flags in ((0, SYN), (1, SYN | ACK), (0, ACK)):
            self.segment(connection, side, flags=flags)

    def exchange(self, connection, number):
        head = {
            "requestApiKey": 12,
            "requestApiVersion": 4,
            "correlationId": number,
            "clientId": f"client-{connection}",
        }
        asked = codec.encode_request(head, {"groupId": "g", "generationId": number, "memberId": "m"})
        answered = codec.encode_response(12, 4, {"correlationId": number}, {"errorCode": 0})
        for side, frame in ((0, asked), (1, answered)):
            self.segment(connection, side, len(frame).to_bytes(4) + frame)

    def save(self, path):
        path.write_bytes(packet.pcap(self.packets))
        return path


@contextmanager
def shared_out():
    """Record which task decodes which connections, for each ingest that distributes them: {task: connections}."""
    found = []
    real = pipeline._shared_out

    def noted(*given):
        frame = real(*given)
        of_tasks = {}
        for row in (
            frame.where("file >= 0").select(F.spark_partition_id().alias("task"), "connection").distinct().collect()
        ):
            of_tasks.setdefault(row["task"], set()).add(row["connection"])
        found.append(of_tasks)
        return frame

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_shared_out", noted)
        yield found


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    place = tmp_path_factory.mktemp("converted")
    convert(captures(), place, processes=1)
    return place


@pytest.fixture(scope="module")
def ingested(spark, tmp_path_factory):
    """With splits so small that most captures have many, and connections span them."""
    place = tmp_path_factory.mktemp("ingested")
    with pytest.MonkeyPatch.context() as patch, watched() as runs:
        patch.setattr(reader, "OVERLAP_PART", 3)
        result = pipeline.ingest(spark, captures(), place, split_bytes=400_000, tasks=4)
    assert not result.failed
    ((run, _),) = runs
    assert len(run.unsplittable) < 10 and sum(map(len, run._corrections.values())) > 100, run.unsplittable
    return place


@pytest.mark.ring2
def test_the_rows_equal_those_of_convert(converted, ingested):
    assert_same_rows(ingested, converted)


@pytest.mark.ring2
def test_files_hold_an_hour_in_order_of_time(ingested):
    files = list((ingested / "exchanges").rglob("*.parquet"))
    assert files
    for file in files:
        times = pq.ParquetFile(file).read(["time"])["time"].to_pylist()
        assert times == sorted(times)
        assert {f"date={time:%Y-%m-%d}/hour={time:%H}" for time in times} == {"/".join(file.parts[-3:-1])}
    assert not list(ingested.glob(".unfinished*"))


@pytest.mark.ring2
def test_spark_reads_the_tables(spark, ingested):
    for table in schema.TABLES.values():
        assert spark.read.parquet(str(ingested / table.name)).count() == len(rows(ingested, table))


@pytest.mark.ring2
def test_a_catalogue_has_the_tables_before_there_are_data(spark, tmp_path, ingested):
    """The statements of docs/reference/tables.sql, with the tables' location."""
    statements = (ROOT / "docs/reference/tables.sql").read_text().partition("create table")
    database = "made_before"
    spark.sql(f"create database {database} location '{tmp_path}/warehouse'")
    try:
        for text in (statements[1] + statements[2]).split(";\n")[:-1]:
            name = text.split()[2]
            spark.sql(text.replace(f"table {name}", f"table {database}.{name}", 1))
            assert spark.table(f"{database}.{name}").count() == 0
            folder = ingested / name
            if name == schema.RECORDS.name:  # only with --records
                continue
            spark.sql(text.replace(f"table {name}", f"table {database}.there_{name}", 1) + f" location '{folder}'")
            if "partitioned by" in text:
                spark.sql(f"msck repair table {database}.there_{name}")
            rows = spark.table(f"{database}.there_{name}")
            assert rows.count() == spark.read.parquet(str(folder)).count()
            assert rows.drop("date", "hour").columns == schema.BY_NAME[name].schema.names
    finally:
        spark.sql(f"drop database {database} cascade")


@pytest.mark.ring2
def test_named_ports_and_rotated_files_give_the_rows_of_convert(spark, tmp_path):
    files = []
    data = capture("k41_BASE").read_bytes()
    walker = splits._Records(bytes(data))
    cuts = [24, *(walker.boundary(place, len(data)) for place in (150_000, 400_000)), len(data)]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        part = tmp_path / f"part{number}.pcap"
        part.write_bytes(data[:24] + data[start:stop])
        files.append(part)
    packed = tmp_path / "part1.pcap.gz"
    packed.write_bytes(gzip.compress(files[1].read_bytes()))
    files[1] = packed
    settings = Settings(ports=(9092,), cluster="east", rotated=True)
    convert(files, tmp_path / "converted", settings, processes=1)
    pipeline.ingest(spark, files, tmp_path / "ingested", settings, split_bytes=50_000, tasks=3)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    assert len(rows(tmp_path / "ingested", schema.EXCHANGES)) == len(expected("k41_BASE"))


@pytest.mark.ring2
def test_a_large_connection_delays_no_other(spark, tmp_path):
    """It is alone in the first task, which Spark starts before the others."""
    wire = Wire()
    large, small = 0, range(1, 40)
    for connection in (large, *small):
        wire.open(connection)
    for number in range(12_000):
        wire.exchange(large, number)
        if number < 200:
            wire.exchange(small[number % len(small)], number)
    path = wire.save(tmp_path / "elephant.pcap")
    with shared_out() as tasks:
        pipeline.ingest(spark, [path], tmp_path / "tables", split_bytes=200_000, tasks=4)
    (connections,) = tasks
    assert len(connections[0]) == 1 and len(connections) > 1
    assert sum(len(found) for found in connections.values()) == 1 + len(small)
    convert([path], tmp_path / "converted", processes=1)
    assert_same_rows(tmp_path / "tables", tmp_path / "converted")


@pytest.mark.ring2
def test_reused_ports_defer_only_their_own_connections(spark, tmp_path, monkeypatch):
    """Two connections stop without FIN and begin again in a later part; the busy one is handed over at each border."""
    wire = Wire()
    for connection in range(4):
        wire.open(connection)
    for number in range(3000):
        wire.exchange(0, number)
        if number % 20 == 0:
            wire.exchange(1 + number % 3, number)
        if number % 700 == 699:
            for connection in (1, 2):
                wire._next[connection] = [number * 1_000_003 % 4_000_000_007, number * 7_003]
                wire.open(connection)
    path = wire.save(tmp_path / "again.pcap")
    monkeypatch.setattr(reader, "OVERLAP_PART", 4)
    convert([path], tmp_path / "converted", processes=1)
    with watched() as runs:
        pipeline.ingest(spark, [path], tmp_path / "ingested", split_bytes=path.stat().st_size // 3, tasks=2)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    ((run, _),) = runs
    assert not run.unsplittable and len(run.conflicting[path.name]) in (1, 2)
    assert sum(map(len, run._corrections.values())) >= 2 and run.read_bytes < 3 * path.stat().st_size


@pytest.mark.ring2
def test_connections_with_equal_32_bit_hashes_are_distinguished():
    """Otherwise they would look like one connection, and one task would read the whole capture."""
    keys = (b"\n\x00\xb0I\n\x01\x00\x1b\xb2\xb5#\x84", b"\n\x00\xe1!\n\x01\x00\x13\xd8\x96#\x84")
    assert hash_of(keys[0]) == hash_of(keys[1])
    assert len(places._by_hash([reader.Excerpt(0, pair_of(key)) for key in keys])) == 2


def shuffled(spark):
    """The bytes that all stages so far wrote for other tasks."""
    jvm = spark.sparkContext._jvm
    none = spark.sparkContext._gateway.new_array(jvm.double, 0)
    store = spark.sparkContext._jsc.sc().statusStore()
    stages = store.stageList(None, False, False, none, jvm.java.util.ArrayList())
    return sum(stages.apply(number).shuffleWriteBytes() for number in range(stages.size()))


@contextmanager
def watched():
    """Record each ingest's run once everything is read, and the bytes shuffled until then."""
    found = []
    real = pipeline.Run.store

    def noted(run, *given):
        found.append((run, shuffled(run.spark)))
        return real(run, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.Run, "store", noted)
        yield found


@pytest.mark.ring2
def test_each_byte_is_read_once_and_few_are_shuffled(spark, tmp_path, monkeypatch):
    """The capture is read in parts, with open connections at each border."""
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(replace(KINDS[0], connections=2), file, 13_000)  # each warm-up is two milliseconds
    size = path.stat().st_size
    monkeypatch.setattr(reader, "OVERLAP_PART", 20)
    convert([path], tmp_path / "converted", processes=1)
    with watched() as runs:
        before = shuffled(spark)
        pipeline.ingest(spark, [path], tmp_path / "ingested", split_bytes=size // 2)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    ((run, after),) = runs
    assert not run.unsplittable
    assert size <= run.read_bytes <= 1.1 * size
    assert after - before < 0.01 * size


@pytest.mark.ring2
def test_captures_are_listed_once(spark, tmp_path):
    """Captures that appear later are ignored, since they have not been checked, for example for equal names."""
    folder, out = tmp_path / "captures", tmp_path / "tables"
    folder.mkdir()
    shutil.copy(capture("k41_midstream"), folder)
    _, catalogue = pipeline.check([folder], out, Settings())
    shutil.copy(capture("k41_quota"), folder)
    pipeline.ingest(spark, catalogue, out)
    assert known(out) == {"k41_midstream.pcap"}


@pytest.mark.ring2
def test_a_link_is_a_source_under_its_own_name(spark, tmp_path):
    link = tmp_path / "incident.pcap"
    link.symlink_to(capture("k41_midstream"))
    pipeline.ingest(spark, [link], tmp_path / "ingested")
    convert([link], tmp_path / "converted", processes=1)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    assert set(rows(tmp_path / "ingested", schema.EXCHANGES)["source"].to_pylist()) == {"incident.pcap"}


@pytest.mark.ring2
def test_thousands_of_open_connections_are_decoded_completely(spark, tmp_path, monkeypatch):
    wire = Wire()
    for connection in range(3000):
        wire.open(connection)
    for number in range(2):
        for connection in range(3000):
            wire.exchange(connection, number)
    path = wire.save(tmp_path / "many.pcap")
    pipeline.ingest(spark, [path], tmp_path / "ingested", split_bytes=300_000, tasks=3)
    convert([path], tmp_path / "converted", processes=1)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    assert len(rows(tmp_path / "ingested", schema.EXCHANGES)) == 6000

    # Only a process that holds all of them evicts some, and it reports that.
    monkeypatch.setattr(flows, "MAX_FLOWS", 64)
    convert([path], tmp_path / "evicted", processes=1)
    kinds = {row["kind"]: row["count"] for row in rows(tmp_path / "evicted", schema.QUALITY).to_pylist()}
    assert kinds["idle"] > 1000 and "idle" not in rows(tmp_path / "ingested", schema.QUALITY)["kind"].to_pylist()


@pytest.mark.ring2
def test_packets_captured_twice_are_recognised(spark, tmp_path):
    """Copies and retransmissions are distinguished even if a split, or a connection, ends between the two packets."""
    wire = Wire()
    for connection in range(4):
        wire.open(connection)
    for number in range(200):
        wire.exchange(number % 4, number)
    again = [(time_ns + 5_000, data) for time_ns, data in wire.packets]
    wire.packets = sorted([*wire.packets, *again], key=lambda entry: entry[0])
    path = wire.save(tmp_path / "twice.pcap")
    convert([path], tmp_path / "converted", processes=1)
    pipeline.ingest(spark, [path], tmp_path / "ingested", split_bytes=1500, tasks=2)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    assert sum(rows(tmp_path / "ingested", schema.CONNECTIONS)["retransmissions"].to_pylist()) == 0


@pytest.mark.parametrize("split_bytes", (1 << 20, 1500))
@pytest.mark.ring2
def test_connections_that_several_captures_hold_are_counted_in_the_later_ones(spark, tmp_path, split_bytes):
    """As for captures of both ends, which differ in times and in the other connections that they have."""
    paths = []
    for name, connections, late_ns in (("b", (0, 1, 2), 0), ("a", (1, 2, 3), 2_000_000), ("c", (2, 4), 9_000_000)):
        wire = Wire()
        for connection in range(5):
            wire.open(connection)
        for number in range(60):
            wire.exchange(number % 5, number)
        wire.packets = [
            (time_ns + late_ns, data)
            for time_ns, data in wire.packets
            if data[29 if data[34:36] == (40000).to_bytes(2) else 33] in connections  # the client's address
        ]
        paths.append(wire.save(tmp_path / f"{name}.pcap"))
    convert(paths, tmp_path / "converted", processes=1)
    pipeline.ingest(spark, paths, tmp_path / "ingested", split_bytes=split_bytes, tasks=2)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    quality = rows(tmp_path / "ingested", schema.QUALITY).to_pylist()
    assert sum(row["count"] for row in quality if row["kind"] == "in_two_captures") == 3


@pytest.mark.ring2
def test_records_of_chosen_topics_are_written(spark, tmp_path):
    files = [capture("k41_librdkafka"), capture("k41_kip848_share"), capture("tls13_embedded_secrets")]
    settings = Settings(records=chosen("rdk2,__trans*,gamma", "hash"))
    convert(files, tmp_path / "converted", settings, processes=1)
    pipeline.ingest(spark, files, tmp_path / "ingested", settings, split_bytes=250_000, tasks=3)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted", schema.RECORDS)
    record_rows = rows(tmp_path / "ingested", schema.RECORDS)
    assert {"rdk2", "gamma", "__transaction_state"} == set(record_rows["topic"].to_pylist())
    manifest = json.loads((tmp_path / "ingested" / "_kproxy.json").read_text())
    assert manifest["rows"]["records"] == len(record_rows) > 100
    pipeline.ingest(spark, files[2:], tmp_path / "ingested", Settings(overwrite=True))
    assert not list((tmp_path / "ingested/records").rglob("*.parquet"))


@pytest.mark.ring2
def test_a_clock_set_back_and_damage_give_the_rows_of_convert(spark, tmp_path):
    data = bytearray(capture("k41_BASE").read_bytes())
    walker = splits._Records(bytes(data))
    early = walker.boundary(300_000, len(data))
    data[early : early + 4] = (int.from_bytes(data[early : early + 4], "little") - 3).to_bytes(4, "little")
    late = walker.boundary(100_000, len(data))
    data[late : late + 4] = (int.from_bytes(data[late : late + 4], "little") + 2).to_bytes(4, "little")
    (tmp_path / "clock.pcap").write_bytes(data)
    data[early + 8 : early + 12] = b"\xff" * 4
    (tmp_path / "damaged.pcap").write_bytes(data)
    ng = bytearray(capture("k41_ng").read_bytes())
    blocks = splits._Blocks(bytes(ng))
    place = blocks.boundary(300_000, len(ng))
    # an interface that does not exist: a valid block with an unreadable packet
    ng[place + 8 : place + 12] = b"\x07\0\0\0"
    (tmp_path / "interface.pcapng").write_bytes(ng)
    files = sorted(tmp_path.glob("*.pcap*"))
    convert(files, tmp_path / "converted", processes=1)
    pipeline.ingest(spark, files, tmp_path / "ingested", split_bytes=50_000, tasks=2)
    assert_same_rows(tmp_path / "ingested", tmp_path / "converted")
    kinds = rows(tmp_path / "ingested", schema.QUALITY).to_pylist()
    assert {row["source"] for row in kinds if row["kind"] in ("clock_back", "clock_step")} >= {"clock.pcap"}
    assert {row["source"] for row in kinds if row["kind"] == "damaged"} == {"damaged.pcap", "interface.pcapng"}


@pytest.mark.ring2
def test_files_that_are_no_captures_are_reported_and_others_ingested(spark, tmp_path):
    (tmp_path / "notes.txt").write_text("no capture")
    files = [capture("k41_midstream"), tmp_path / "notes.txt", tmp_path / "missing.pcap"]
    result = pipeline.ingest(spark, files, tmp_path / "tables")
    assert sorted(str(fault) for fault in result.failed)[0].startswith(f"{tmp_path}/missing.pcap: cannot be opened")
    assert len(result.failed) == 2 and result.rows["exchanges"] > 0
    manifest = json.loads((tmp_path / "tables" / "_kproxy.json").read_text())
    assert manifest["rows"]["exchanges"] == result.rows["exchanges"]
    assert known(tmp_path / "tables") == {"k41_midstream.pcap"}

    with pytest.raises(KproxyError, match="holds tables already"):
        pipeline.ingest(spark, files[:1], tmp_path / "tables")
    before = rows(tmp_path / "tables", schema.EXCHANGES)
    pipeline.ingest(spark, files[:1], tmp_path / "tables", Settings(overwrite=True), tasks=3)
    assert rows(tmp_path / "tables", schema.EXCHANGES).equals(before)


@pytest.mark.ring2
def test_captures_may_be_in_s3(spark, tmp_path):
    """Read whole and in parts: split at record boundaries that tasks search for, with deferred packets."""
    files = [capture("k41_quota"), capture("k41_BASE")]
    packed = tmp_path / "packed.pcap.gz"
    packed.write_bytes(gzip.compress(capture("k41_sasl_plain").read_bytes()))
    convert([*files, packed], tmp_path / "converted", processes=1)
    with pytest.MonkeyPatch.context() as patch:
        bucket = Bucket(patch)
        for path in (*files, packed):
            bucket.put(f"day/{path.name}", path.read_bytes())
        settings = Settings(storage=bucket.storage)
        planned = splits.plan(f"s3://captures/day/{files[1].name}", 150_000, bucket.storage)
        assert len(planned) == 4 and [one.end for one in planned[:-1]] == [one.start for one in planned[1:]]
        result = pipeline.ingest(
            spark, ["s3a://captures/day"], tmp_path / "tables", settings, split_bytes=150_000, tasks=3
        )
        bucket.server.stop()
    assert not result.failed
    assert_same_rows(tmp_path / "tables", tmp_path / "converted")


@pytest.mark.ring2
def test_captures_and_tables_may_be_in_hdfs(spark, tmp_path):
    """Captures through WebHDFS, tables through Spark's own file system; added, replaced and queried."""
    path, later = capture("k41_BASE"), capture("k41_quota")
    convert([path, later], tmp_path / "converted", processes=1)
    with hdfs(tmp_path) as (address, http):
        system = Storage()._system(f"{http}/")[0]
        for each in (path, later):
            system.put_file(str(each), f"/captures/{each.name}")
        out = f"{address}/tables"
        pipeline.ingest(spark, [f"{http}/captures/{path.name}"], out)
        with pytest.raises(KproxyError, match="holds tables already"):
            pipeline.ingest(spark, [f"{http}/captures/{path.name}"], out)
        pipeline.ingest(spark, [f"{http}/captures/*"], out, append=True)
        pipeline.ingest(spark, [f"{http}/captures/*"], out, append=True)
        found = kproxy.spark.table(spark, out, "exchanges")
        assert found.count() == len(rows(tmp_path / "converted", schema.EXCHANGES))
        pipeline.ingest(spark, [f"{http}/captures"], out, Settings(overwrite=True))
        finish_what_was_copied(spark, out)
        system.get("/tables/", str(tmp_path / "fetched"), recursive=True)
    assert_same_rows(tmp_path / "fetched", tmp_path / "converted")
    assert not list((tmp_path / "fetched").glob(".unfinished*"))


def finish_what_was_copied(spark, out):
    """Where a file system copies and a run dies before it removes the original, the file is in both places."""
    target = Target(spark, out)
    files = target._files
    place = files.found("exchanges")[0]
    util, path = (
        spark.sparkContext._jvm.org.apache.hadoop.fs.FileUtil,
        f"{STAGE}/table={place.removesuffix('.parquet')}.txt",
    )
    files.write(f"{STAGE}/{LOG}", [json.dumps({"move": [path], "remove": [], "manifest": target.manifest()})])
    files._system.mkdirs(files._path(path).getParent())
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    util.copy(files._system, files._path(place), files._system, files._path(path), False, configuration)
    target.begin()
    assert files.found("exchanges") == [place] and not files.found(STAGE)


@pytest.mark.parametrize(
    ("last", "harm", "message"),
    [
        ("ranges", "unlink", "cannot be read: No such file"),
        ("agree", "unlink", "cannot be opened: No such file"),
        ("agree", "empty", "the file is empty"),
        ("_shared_out", "unlink", "cannot be opened: No such file"),
        ("_shared_out", "empty", "the file is empty"),
    ],
)
@pytest.mark.ring2
def test_a_capture_that_disappears_during_an_ingest_stops_no_other(spark, tmp_path, monkeypatch, last, harm, message):
    """last: the driver's last step before the file is harmed."""
    path = tmp_path / "gone.pcap"
    path.write_bytes(capture("k41_BASE").read_bytes())
    real = getattr(pipeline, last)

    def harming(*given):
        done = real(*given)
        if path.exists():
            path.unlink() if harm == "unlink" else path.write_bytes(b"")
        return done

    monkeypatch.setattr(pipeline, last, harming)
    done = pipeline.ingest(spark, [path, capture("k41_midstream")], tmp_path / "tables", split_bytes=100_000)
    assert [fault.name for fault in done.failed] == [str(path)] and message in str(done.failed[0])
    assert known(tmp_path / "tables") == {"k41_midstream.pcap"} and done.rows["exchanges"]


@pytest.mark.ring2
def test_a_run_that_fails_leaves_nothing(spark, tmp_path, monkeypatch):
    def fails(frames, *_):
        raise PySparkException("a disk is full")

    monkeypatch.setattr(pipeline.store, "store", fails)
    with pytest.raises(PySparkException, match="a disk is full"):
        pipeline.ingest(spark, [capture("k41_BASE")], tmp_path / "tables", split_bytes=100_000)
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize(
    ("size", "parts"), [(1 << 30, 8), (4 << 30, 32), (10 << 30, 32), (16 << 30, 32), (64 << 30, 128)]
)
def test_parts_grow_with_the_capture_up_to_a_bound(size, parts):
    """Each part costs its reader some extra packets, but the work that a task may lose is bounded."""
    catalogue = pipeline.catalogue_of([capture("k41_quota")], Settings())
    catalogue.note([(0, size, size, "")])
    run = pipeline.Run(None, catalogue, splits.SPLIT_BYTES, 0)
    assert size // run._part_bytes(0) == parts


class Frame:
    """A DataFrame that only supports repartitioning."""

    def coalesce(self, partitions):
        return self

    def repartition(self, partitions):
        return partitions


def test_the_number_of_decoding_tasks_depends_on_the_work_not_on_the_cores():
    """With dynamic allocation a session starts with few cores, and Spark Connect does not report any."""
    assert pipeline._shared_out(Frame(), pipeline.TASK_BYTES, 0) == 1
