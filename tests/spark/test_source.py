"""The format `kafka-pcap`: its tables equal those of `kproxy convert`; its options; a folder with arriving files."""

import json
import os
import shutil
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from kproxy.capture.formats import splits
from kproxy.convert.processes import convert
from kproxy.errors import CaptureError, KproxyError
from kproxy.spark.source import CaptureReader, FolderReader, _Settings
from kproxy.tables import schema
from tests.captures import capture, expected

FILES = ["k41_BASE", "k41_ipfrag", "k41_mixedlinks", "k41_gz", "tls13_embedded_secrets"]


def load(spark, table, paths, **options):
    reader = spark.read.format("kafka-pcap").option("table", table).options(**options)
    return reader.load([str(path) for path in paths])


def in_order(table, like):
    keys = [(field.name, "ascending") for field in like.schema if not pa.types.is_list(field.type)]
    return table.select(like.schema.names).cast(like.schema).sort_by(keys)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("files", (FILES[:2], FILES), ids=("two", "all"))
def test_the_tables_equal_those_of_convert(spark, files, tmp_path):
    paths = [capture(name) for name in files]
    convert(paths, tmp_path, processes=1)
    for name in schema.TABLES:
        theirs = pa.concat_tables([pq.read_table(file) for file in sorted((tmp_path / name).iterdir())])
        ours = load(spark, name, paths).toArrow()
        if name == "quality":  # a task knows only its own capture
            theirs = theirs.filter(pc.not_equal(theirs["kind"], "in_two_captures"))
        assert in_order(ours, theirs).equals(in_order(theirs, theirs)), name


@pytest.mark.ring2
def test_segments_are_the_same_however_files_are_split(spark):
    paths = [capture(name) for name in FILES]
    whole = load(spark, "segments", paths, splitBytes=0).toArrow()
    parts = load(spark, "segments", paths, splitBytes=90_000)
    assert parts.rdd.getNumPartitions() > 20 and load(spark, "segments", paths).rdd.getNumPartitions() == len(paths)
    assert in_order(parts.toArrow(), whole).equals(in_order(whole, whole))
    rows = [row for row in whole.to_pylist() if row["source"] == "k41_BASE.pcap"]
    data = capture("k41_BASE").read_bytes()
    assert rows[0]["flags"] == "S" and rows[0]["length"] == 0
    for row in rows:  # the packet is at the position in its row
        packet = data[row["offset"] : row["offset"] + row["captured"]]
        assert int.from_bytes(packet[34:36]) == row["sender_port"] and int.from_bytes(packet[38:42]) == row["seq"]
    assert {row["offset"] is None for row in whole.to_pylist() if row["source"] == "k41_ipfrag.pcap"} == {True, False}


def test_a_file_that_cannot_be_split_is_reported(tmp_path):
    data = capture("k41_ng").read_bytes()
    place = splits._Blocks(data).boundary(300_000, len(data))
    path = tmp_path / "interfaces.pcapng"
    path.write_bytes(data[:place] + bytes.fromhex("0100000014000000 0100 0000 00000000 14000000") + data[place:])
    settings = {"path": str(path), "table": "segments"}
    reader = CaptureReader(_Settings({**settings, "splitBytes": "200000"}))
    parts = reader.partitions()
    assert len(parts) > 2
    with pytest.raises(CaptureError, match=r"its interfaces change later on: .* with splitBytes 0"):
        list(chain.from_iterable(map(reader.read, parts)))
    whole = CaptureReader(_Settings({**settings, "splitBytes": "0"}))
    assert sum(batch.num_rows for part in whole.partitions() for batch in whole.read(part)) > 1000


def converted(path, folder):
    """The exchanges of a capture, by `convert`."""
    convert([path], folder, processes=1)
    (file,) = (folder / "exchanges").iterdir()
    return pq.read_table(file).to_pylist()


@pytest.mark.ring2
def test_options_affect_the_tables(spark, tmp_path):
    path = capture("k41_BASE")
    all_rows = converted(path, tmp_path)
    times = sorted(row["time"] for row in all_rows)
    since, until = times[100], times[200]
    some = load(
        spark, "exchanges", [path], **{"from": since.isoformat(), "to": until.isoformat(), "apis": "Fetch,Produce"}
    )
    wanted = [row for row in all_rows if since <= row["time"] < until and row["api"] in ("Fetch", "Produce")]
    assert wanted and some.count() == len(wanted)
    assert load(spark, "segments", [path], ports="1,2").count() == 0
    assert {row["cluster"] for row in load(spark, "connections", [path], cluster="east").collect()} == {"east"}
    records = load(spark, "records", [capture("k41_librdkafka")], records="rdk*", recordValues="3").collect()
    assert {row["topic"] for row in records} == {"rdk", "rdk2"} and max(len(row["value"]) for row in records) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"table": "exchange"},
            "there is no table 'exchange'; there are exchanges, .*segments",
        ),
        ({"table": "records"}, "no topic is named"),
        ({"from": "yesterday"}, "'yesterday' is no time: ISO 8601 is needed"),
    ],
)
def test_invalid_options_are_reported(spark, options, message):
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=message):
        load(spark, options.pop("table", "exchanges"), [capture("k41_BASE")], **options).count()


@pytest.mark.ring2
def test_a_stream_reads_each_file_of_a_folder_once(spark, tmp_path):
    """When it is complete, whatever its modification time: rsync and mv keep old ones."""
    folder, out, state = tmp_path / "in", tmp_path / "out", tmp_path / "state"
    folder.mkdir()
    stream = (
        spark.readStream.format("kafka-pcap")
        .option("table", "exchanges")
        .option("quietSeconds", "3600")
        .load(str(folder))
    )

    def run():
        query = stream.writeStream.format("parquet").option("checkpointLocation", str(state)).trigger(availableNow=True)
        query.start(str(out)).awaitTermination(120)
        rows = spark.read.parquet(str(out)).groupBy("source").count().collect() if out.is_dir() else []
        return {row["source"]: row["count"] for row in rows}

    def arrive(name, changed):
        shutil.copy(capture(name), folder)
        os.utime(folder / capture(name).name, (changed, changed))

    arrive("k41_BASE", 3000)
    (folder / ".hidden").write_text("no capture")
    arrive("k41_oneway", 4000)
    arrive("k41_midstream", time.time())  # still being written
    first = run()
    assert set(first) == {"k41_BASE.pcap"}  # the files of a batch are one capture
    arrive("k41_tinyseg", 2000)  # older than those that were read
    second = run()
    assert set(second) == {"k41_BASE.pcap", "k41_tinyseg.pcap"} and second["k41_BASE.pcap"] == first["k41_BASE.pcap"]
    assert run() == second
    arrive("k41_midstream", 5000)  # complete now
    arrive("k41_BASE", 6000)  # touched: still read only once
    third = run()
    assert set(third) == {*second, "k41_midstream.pcap"} and {name: third[name] for name in second} == second


def test_an_unchanged_file_counts_as_complete_and_is_read_once(tmp_path, caplog):
    """Two captures rotate into one folder: a newer file does not prove that an older one is complete."""
    reader = FolderReader(_Settings({"path": str(tmp_path), "quietSeconds": "60"}))

    def put(name, size, age_s):
        (tmp_path / name).write_bytes(bytes(size))
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)

    def batch(start, end):
        return [Path(path).name for part in reader.partitions(start, end) for path in part.job.paths]

    put("broker1.pcap", 200, 3)
    put("broker2.pcap", 300, 1)
    put("old.pcap", 100, 3600)
    begin = reader.initialOffset()
    first = json.loads(json.dumps(reader.latestOffset(begin)))  # as Spark stores it
    assert batch(begin, first) == ["old.pcap"]
    put("broker1.pcap", 400, 61)
    put("older.pcap", 100, 7200)
    second = reader.latestOffset(first)
    assert sorted(batch(first, second)) == ["broker1.pcap", "older.pcap"]
    assert batch(first, second) == batch(first, second) and batch(second, second) == []
    put("broker1.pcap", 500, 61)
    (tmp_path / "old.pcap").unlink()
    third = reader.latestOffset(second)
    assert batch(second, third) == [] and len(third["files"]) == 2  # removed files are forgotten
    assert reader.latestOffset(third) == third
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "400 bytes and has 500" in caplog.text
    with pytest.raises(KproxyError, match="new checkpoint folder"):
        reader.latestOffset({"changed_ns": 0, "name": ""})


class NameNode(BaseHTTPRequestHandler):
    """Serves WebHDFS's answers about a folder with two files; refuses the path in `refused`."""

    refused = ""
    files = (("a.pcap", 5, 1_700_000_000), ("b.pcap", 5, 1_700_000_000))  # name, bytes, time of change in seconds

    def do_GET(self):
        place, _, asked = self.path.removeprefix("/webhdfs/v1").partition("?")
        if place == self.refused:
            self.send_error(503)
            return
        files = {
            name: {"pathSuffix": name, "type": "FILE", "length": size, "modificationTime": 1000 * changed_s}
            for name, size, changed_s in self.files
        }
        status = {
            "FileStatus": files.get(place.rpartition("/")[2], {"pathSuffix": "", "type": "DIRECTORY", "length": 0})
        }
        if "LISTSTATUS" in asked:
            status = {"FileStatuses": {"FileStatus": list(files.values())}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(status).encode())

    def log_message(self, *_):
        """Silent: otherwise requests would appear in the output that the test checks."""


def test_a_renamed_or_compressed_file_is_read_once(tmp_path):
    """Browsers and `hdfs dfs -put` rename finished files, and `tcpdump -z gzip` compresses each file."""
    reader = FolderReader(_Settings({"path": str(tmp_path), "quietSeconds": "0"}))
    (tmp_path / "a.pcap").write_bytes(b"whole")
    for name in ("b.pcap.part", "c.pcap._COPYING_", "d.pcap.TMP"):
        (tmp_path / name).write_bytes(b"half")
    looks = [reader.initialOffset()]

    def taken():
        looks.append(reader.latestOffset(looks[-1]))
        return [Path(path).name for part in reader.partitions(*looks[-2:]) for path in part.job.paths]

    assert taken() == ["a.pcap"]
    (tmp_path / "a.pcap.gz").write_bytes(b"under way, or kept")
    (tmp_path / "b.pcap.part").rename(tmp_path / "b.pcap")
    assert taken() == ["b.pcap"]
    (tmp_path / "a.pcap").unlink()
    (tmp_path / "b.pcap").rename(tmp_path / "b.pcap.zst")
    (tmp_path / "new.pcap.gz").write_bytes(b"of nothing that was read")
    assert taken() == ["new.pcap.gz"]
    assert taken() == []
    named = _Settings({"path": str(tmp_path / "d.pcap.TMP")})
    assert named.files() == [str(tmp_path / "d.pcap.TMP")]


def test_files_of_an_unreachable_folder_are_not_read_again(tmp_path, monkeypatch, caplog):
    server = ThreadingHTTPServer(("127.0.0.1", 0), NameNode)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        reader = FolderReader(_Settings({"path": f"webhdfs://127.0.0.1:{server.server_port}/in"}))
        whole = reader.latestOffset(reader.initialOffset())
        assert len(whole["files"]) == 2
        for refused in ("/in", "/in/b.pcap"):
            monkeypatch.setattr(NameNode, "refused", refused)
            assert reader.latestOffset(whole) == whole
            assert len(reader.latestOffset(reader.initialOffset())["files"]) == (refused != "/in")
    finally:
        server.shutdown()
        server.server_close()
    assert "is looked into again" in caplog.text
    caplog.clear()
    folder, away = tmp_path / "in", tmp_path / "not mounted"
    folder.mkdir()
    (folder / "a.pcap").write_bytes(b"12345")
    reader = FolderReader(_Settings({"path": str(folder), "quietSeconds": "0"}))
    whole = reader.latestOffset(reader.initialOffset())
    folder.rename(away)
    assert reader.latestOffset(whole) == whole and f"{folder}: there is no such folder" in caplog.text
    away.rename(folder)
    assert reader.latestOffset(whole) == whole


def test_a_file_being_written_to_hdfs_waits(monkeypatch):
    """HDFS reports when the file was begun and how long its complete blocks are; for the first block, nothing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), NameNode)
    Thread(target=server.serve_forever, daemon=True).start()
    now_s = 1_700_000_000
    try:
        reader = FolderReader(_Settings({"path": f"webhdfs://127.0.0.1:{server.server_port}/in"}))
        read = reader.initialOffset()

        def taken(at_s, *files):
            nonlocal read
            monkeypatch.setattr(time, "time_ns", lambda: (now_s + at_s) * 10**9)
            monkeypatch.setattr(NameNode, "files", [(name, size, now_s + begun_s) for name, size, begun_s in files])
            before, read = read["files"], reader.latestOffset(read)
            return [path.rpartition("/")[2] for path in read["files"] if path not in before]

        assert taken(0, ("old.pcap", 5, -100), ("empty.pcap", 0, -100), ("new.pcap", 128, 0)) == ["old.pcap"]
        assert taken(59, ("old.pcap", 5, -100), ("new.pcap", 256, 0)) == []
        assert taken(118, ("old.pcap", 5, -100), ("new.pcap", 256, 0)) == []
        assert taken(119, ("old.pcap", 5, -100), ("new.pcap", 256, 0)) == ["new.pcap"]
        assert taken(120, ("late.pcap", 128, 0)) == ["late.pcap"]  # no change of it was seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.ring2
def test_a_stream_reports_exchanges_split_between_batches(spark, tmp_path):
    """An exchange between two batches is unanswered; `connections` and `quality` give the reason."""
    uncut = converted(capture("k41_BASE"), tmp_path / "uncut")
    folder = tmp_path / "in"
    folder.mkdir()
    data = capture("k41_BASE").read_bytes()
    cut = splits._Records(data).boundary(len(data) // 2, len(data))

    def rows(table):
        query = (
            spark.readStream.format("kafka-pcap")
            .option("table", table)
            .option("quietSeconds", "0")
            .load(str(folder))
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / f"{table}-state"))
            .trigger(availableNow=True)
            .start(str(tmp_path / table))
        )
        query.awaitTermination(120)
        return spark.read.parquet(str(tmp_path / table)).collect()

    tables = ("exchanges", "connections", "quality")
    (folder / "a.pcap").write_bytes(data[:cut])
    for table in tables:
        rows(table)
    (folder / "b.pcap").write_bytes(data[:24] + data[cut:])
    exchanges, connections, quality = map(rows, tables)

    def ends(row):
        return row["client_port"], row["broker_port"]

    def identity(row):
        return *ends(row), row["correlation_id"]

    whole = Counter((entry["client_port"], entry["broker_port"], entry["id"]) for entry in expected("k41_BASE"))
    assert Counter(map(identity, exchanges)) == whole  # none is lost, none is there twice
    unanswered = {identity(row) for row in exchanges if row["outcome"] == "unanswered"}
    cut_in_two = unanswered - {identity(row) for row in uncut if row["outcome"] == "unanswered"}
    severed = {ends(row) for row in connections if row["source"] == "a.pcap" and row["close"] == "open"}
    late = {ends(row) for row in connections if row["source"] == "b.pcap" and not row["start_seen"]}
    assert cut_in_two and {key[:2] for key in cut_in_two} <= severed & late
    counts = {(row["source"], row["kind"]): row["count"] for row in quality}
    assert counts["a.pcap", "open"] == len(severed) and counts["b.pcap", "midstream"] == len(late)
    # the responses, whose requests are missing on their connections
    assert counts["b.pcap", "resync"] >= len(cut_in_two)
