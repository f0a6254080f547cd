"""Captures in storages: a real S3 server (moto's, over HTTP), read by s3fs, gives the same rows as local files."""

import bz2
import gzip
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from threading import Event, Thread
from urllib.parse import urlsplit

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from kproxy.capture.formats import storage
from kproxy.capture.formats.captures import Capture
from kproxy.capture.formats.storage import Storage, is_remote, local_path, name_of, options_of, shown
from kproxy.capture.quality import Quality
from kproxy.cli import cli
from kproxy.convert.job import Settings, captures_of
from kproxy.convert.processes import convert
from kproxy.errors import CaptureError, KproxyError
from kproxy.tables import schema
from tests.captures import capture
from tests.storages import Bucket


@pytest.fixture(scope="module")
def bucket():
    with pytest.MonkeyPatch.context() as patch:
        made = Bucket(patch)
        yield made
        made.server.stop()


def rows(place):
    """The rows of every table, with the names of their sources, including `quality`."""
    return {
        table: [row for file in sorted((place / table).glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
        for table in schema.TABLES
    }


@pytest.mark.parametrize("name", ("k41_BASE", "k41_midstream"))
def test_a_capture_in_s3_gives_the_rows_of_the_file(bucket, tmp_path, monkeypatch, name):
    path = capture(name)
    urls = [bucket.put(f"day/{path.name}", path.read_bytes())]
    packed = tmp_path / f"packed-{path.name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    urls.append(bucket.put(f"day/{packed.name}", packed.read_bytes()))
    monkeypatch.setattr(storage, "RANGE_BYTES", 100_000)  # so that records and gzip members span ranges
    convert(urls, tmp_path / "remote", Settings(storage=bucket.storage))
    convert([path, packed], tmp_path / "local", processes=1)
    assert rows(tmp_path / "remote") == rows(tmp_path / "local")
    assert (tmp_path / "remote/_kproxy.json").read_text() == (tmp_path / "local/_kproxy.json").read_text()
    bucket.client.delete_objects(
        Bucket="captures", Delete={"Objects": [{"Key": url.removeprefix("s3://captures/")} for url in urls]}
    )


def test_each_byte_is_requested_once(bucket, monkeypatch):
    path = capture("k41_BASE")
    url = bucket.put("once.pcap", path.read_bytes())
    monkeypatch.setattr(storage, "RANGE_BYTES", 300_000)
    asked = []
    read = Storage.read
    monkeypatch.setattr(Storage, "read", lambda *given: asked.append(given[-2:]) or read(*given))
    for window in Capture([url], Quality(), storage=bucket.storage).windows():
        assert len(window.records)
    size = path.stat().st_size
    assert asked == [(start, min(start + 300_000, size)) for start in range(0, size, 300_000)]


def test_a_range_of_an_object_fills_its_buffer_to_the_end(bucket, monkeypatch):
    data = bytes(range(250))
    opened = bucket.storage.open(bucket.put("parts.pcap", data))
    monkeypatch.setattr(storage, "RANGE_BYTES", 64)
    for position, size in ((0, 10), (60, 10), (3, 200), (240, 10), (240, 11), (250, 5)):
        room = bytearray(b"." * size)
        filled = opened.peek_into(memoryview(room), position)
        expected = data[position : position + size]
        assert (filled, bytes(room)) == (len(expected), expected.ljust(size, b"."))
    assert opened.tell() == 0


def test_captures_are_found_by_folder_pattern_and_name(bucket, tmp_path):
    small = capture("k41_midstream").read_bytes()[:24]
    for key in ("f/b.pcap", "f/a.pcapng.gz", "f/notes.txt", "f/in/c.pcap"):
        bucket.put(key, small)
    of = bucket.storage.captures
    assert of("s3://captures/f") == ["s3://captures/f/a.pcapng.gz", "s3://captures/f/b.pcap"]
    assert of("s3a://captures/f/*.pcap") == ["s3a://captures/f/b.pcap"]
    assert of("s3://captures/f/**/*.pcap") == ["s3://captures/f/b.pcap", "s3://captures/f/in/c.pcap"]
    assert [job.source for job in captures_of(["s3://captures/f"], Settings(storage=bucket.storage))] == [
        "a.pcapng.gz",
        "b.pcap",
    ]
    with pytest.raises(KproxyError, match="no file matches"):
        of("s3://captures/nothing/*.pcap")
    mistyped = Storage((*bucket.storage.options, ("endpint_url", "http://minio:9000")))
    with pytest.raises(CaptureError, match=r"its storage knows no option endpint_url \(--storage-option\)$"):
        mistyped.captures("s3://captures/f")
    with pytest.raises(KproxyError, match="no file matches"):
        Storage().captures(str(tmp_path / "*.pcap"))
    (tmp_path / "folder.pcap").mkdir()
    (tmp_path / "notes.txt").touch()
    for name in ("a[1].pcap", "a1.pcap"):
        shutil.copy(capture("k41_midstream"), tmp_path / name)
    assert Storage().captures(str(tmp_path / "a[1].pcap")) == [str(tmp_path / "a[1].pcap")]  # that is its literal name
    assert Storage().captures(str(tmp_path / "?1.pcap")) == [str(tmp_path / "a1.pcap")]
    assert Storage().captures(tmp_path.as_uri()) == [str(tmp_path / "a1.pcap"), str(tmp_path / "a[1].pcap")]
    shutil.copytree(tmp_path, tmp_path / "in" / "deeper")
    deep = Storage().captures(str(tmp_path / "**" / "a1.pcap"))  # as in storages
    assert deep == [str(tmp_path / "a1.pcap"), str(tmp_path / "in" / "deeper" / "a1.pcap")]


def test_captures_with_unsupported_compression_are_reported(tmp_path):
    (tmp_path / "packed.pcap.bz2").write_bytes(bz2.compress(capture("k41_midstream").read_bytes()))
    shutil.copy(capture("k41_midstream"), tmp_path)
    done = CliRunner().invoke(cli, ["convert", str(tmp_path), "--out", str(tmp_path / "tables")])
    assert done.exit_code == 1 and "packed.pcap.bz2: at byte 0: a bzip2 file, not read" in done.stderr
    assert rows(tmp_path / "tables")["exchanges"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["convert", "closed", "--out", "tables"], 2, "closed: cannot be opened: Permission denied"),
        (
            ["convert", "closed/*.pcap", "--out", "tables"],
            2,
            "closed/*.pcap: no file matches this pattern: the folder closed cannot be opened: Permission denied",
        ),
        (
            ["convert", "clos*/in/*.pcap", "--out", "tables"],
            2,
            "clos*/in/*.pcap: no file matches this pattern: the folder closed cannot be opened: Permission denied",
        ),
        (["convert", "open.pcap", "--out", "closed/tables"], 1, "closed/tables/exchanges: Permission denied"),
        (["analyze", "overview", "closed"], 1, "closed/_kproxy.json: Permission denied"),
    ],
)
def test_an_unreadable_folder_is_reported(tmp_path, arguments, status, message):
    """Root may read all folders unless it gives up that capability."""
    (tmp_path / "closed").mkdir(mode=0)
    shutil.copy(capture("k41_midstream"), tmp_path / "open.pcap")
    powers = ("capsh", "--drop=cap_dac_override,cap_dac_read_search", "--", "-c", 'exec "$@"', "-")
    command = [*powers, sys.executable, "-c", "from kproxy.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, f"kproxy: {message}\n")


class Accounts(MemoryFileSystem):
    """Names as in Azure's package (adlfs): URLs have container and account, listings only the container."""

    protocol = ("abfs",)
    store, pseudo_dirs = {}, [""]

    def __init__(self, account_name, **options):
        super().__init__(**options)

    @staticmethod
    def _get_kwargs_from_urls(url):
        account = urlsplit(url).hostname.removesuffix(".dfs.core.windows.net")
        return {"account_name": account} if urlsplit(url).username else {}

    @classmethod
    def _strip_protocol(cls, path):
        if "@" in path:
            path = f"{urlsplit(path).username}{urlsplit(path).path}"
        return f"/{path.removeprefix('abfs://').strip('/')}"


def test_listed_captures_keep_their_account(monkeypatch):
    """As observed with Azurite, Azure's emulator, which only npm has."""
    monkeypatch.setitem(_registry, "abfs", Accounts)
    url = "abfs://caps@acme.dfs.core.windows.net/day"
    for name in ("a.pcap", "b.pcap.gz"):
        Accounts("acme").pipe_file(f"caps/day/{name}", b"1234")
    assert Storage().captures(url) == [f"{url}/a.pcap", f"{url}/b.pcap.gz"]
    assert Storage().captures(f"{url}/*.pcap") == [f"{url}/a.pcap"]
    assert [Storage().size(each) for each in Storage().captures(url)] == [4, 4]


@pytest.mark.ring2
def test_missing_or_refused_objects_are_reported(bucket, tmp_path, monkeypatch):
    url = bucket.put("good.pcap", capture("k41_midstream").read_bytes())
    summary = convert(["s3://captures/gone.pcap", url], tmp_path / "out", Settings(storage=bucket.storage))
    assert list(summary.quality) == ["good.pcap"]
    assert [fault.text for fault in summary.failed] == ["cannot be opened: there is no such file in the storage"]
    with pytest.raises(CaptureError, match="storage cannot be read"):
        Storage(options_of(["endpoint_url=http://127.0.0.1:9", "config_kwargs.connect_timeout=1"])).size(url)
    with pytest.raises(KproxyError, match="there is no storage nowhere://"):
        convert(["nowhere://a/b.pcap"], tmp_path / "out2")
    with pytest.raises(KproxyError, match="KEY=VALUE"):
        options_of(["endpoint_url"])
    assert not (tmp_path / "out2").exists()


def test_an_object_that_shrinks_meanwhile_is_an_error(bucket, tmp_path, monkeypatch):
    data = capture("k41_BASE").read_bytes()
    url = bucket.put("shrinks.pcap", data)
    monkeypatch.setattr(storage, "RANGE_BYTES", 100_000)
    opened = bucket.storage.open(url)
    assert opened.read(10) == data[:10]
    bucket.put("shrinks.pcap", data[:150_000])
    opened.seek(100_000)
    with pytest.raises(CaptureError, match="fewer bytes"):
        opened.read(10)


class DataNode(BaseHTTPRequestHandler):
    """WebHDFS with one file of 5000 bytes, whose content can never be read completely."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        status = json.dumps({"FileStatus": {"pathSuffix": "", "type": "FILE", "length": 5000}}).encode()
        if "OPEN" in self.path:
            if "stalls" in self.path:
                self.server.over.wait(30)
            if "refuses" in self.path:
                return self.send_error(503, "try again")
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
            self.wfile.write(bytes(2000))
            return self.connection.shutdown(SHUT_RDWR)
        self.send_response(200)
        self.send_header("Content-Length", str(len(status)))
        self.end_headers()
        return self.wfile.write(status)

    def log_message(self, *_):
        """Silent: otherwise requests would appear in the output that the test checks."""


@pytest.mark.parametrize(
    ("name", "message"), [("stalls", "Read timed out"), ("refuses", "503 .*try again"), ("cuts", "2000 bytes read")]
)
def test_a_server_that_stalls_refuses_or_truncates_is_reported(monkeypatch, name, message):
    monkeypatch.setattr(storage, "SILENCE_S", 0.5)
    server = ThreadingHTTPServer(("127.0.0.1", 0), DataNode)
    server.over = Event()
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(CaptureError, match=f"{name}.pcap: the storage cannot be read: .*{message}"):
            next(Capture([f"webhdfs://127.0.0.1:{server.server_port}/{name}.pcap"], Quality()).windows())
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()


def test_local_paths_are_found(tmp_path):
    file = tmp_path / "x.pcap"
    file.write_bytes(b"0123456789")
    for spelled in (str(file), file.as_uri(), f"file:{file}"):
        assert not is_remote(spelled)
        assert local_path(spelled) == str(file)
        assert Storage().is_file(spelled)
        assert (Storage().size(spelled), Storage().read(spelled, 2, 5)) == (10, b"234")
    assert is_remote("s3://b/k") and not Storage().is_file("-") and not Storage().is_file(os.devnull)
    with Storage().here(["-", file.as_uri()]) as places:
        assert places == ["-", str(file)]


def test_keys_of_digits_are_strings(bucket):
    url = bucket.put("numbered.pcap", b"1234")
    words = [f"endpoint_url={bucket.url}", "key=12345678", "secret=87654321", "config_kwargs.connect_timeout=5"]
    assert Storage(options_of(words)).size(url) == 4
    bucket.client.delete_object(Bucket="captures", Key="numbered.pcap")


def test_programs_without_support_for_storages_get_a_copy(bucket):
    url = bucket.put("tls.pcap", b"x" * 1000)
    with bucket.storage.here([url]) as (copy,):
        assert Path(copy).read_bytes() == b"x" * 1000
    assert not Path(copy).exists()


def test_no_secret_of_a_url_is_in_a_name_or_a_message():
    url = "https://reader:hunter2@127.0.0.1:1/dumps/x.pcap?X-Amz-Signature=51677/a3"
    assert name_of(url) == "x.pcap" and name_of("s3://b/what?.pcap") == "what?.pcap"
    assert shown(url) == "https://reader:...@127.0.0.1:1/dumps/x.pcap?..." and shown("/a:b@c?d") == "/a:b@c?d"
    with pytest.raises(CaptureError, match="cannot be opened") as fault:
        Storage().size(url)
    assert "hunter2" not in str(fault.value) and "51677" not in str(fault.value)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Silent: otherwise requests would appear in the output that the test checks."""


def test_passwords_and_signatures_of_urls_are_in_no_table_and_no_message(tmp_path):
    shutil.copy(capture("k41_snap400"), tmp_path / "x.pcap")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    tables = tmp_path / "tables"
    try:
        url = f"http://reader:hunter2@127.0.0.1:{server.server_port}/x.pcap?X-Amz-Signature=51677a3"
        done = CliRunner().invoke(cli, ["convert", url, "--out", str(tables)])
    finally:
        server.shutdown()
        server.server_close()
    assert done.exit_code == 0 and "kproxy show" in done.output and "reader:...@" in done.output, done.output
    written = done.output + (tables / "_kproxy.json").read_text() + str(list(tables.rglob("*")))
    assert "hunter2" not in written and "51677a3" not in written
    assert {row["source"] for row in pq.read_table(tables / "exchanges").to_pylist()} == {"x.pcap"}
