"""Captures as a Spark data source, `kafka-pcap`: a Python Data Source that yields Arrow batches of a fixed schema.

    spark.read.format("kafka-pcap").option("table", "exchanges").load("captures/*.pcap")

Options in addition to the paths (files, patterns or folders):

- `table`: exchanges (default) or any other; segments: a row per TCP segment with its place in the file and without its
  payload; files: the bytes of the files.
- `from`, `to`: ISO 8601; rows with `from` <= `time` < `to`. `apis`: names of exchanges' APIs.
- `records` (for the table `records`): topics whose records are rows, as in `kproxy convert --records`, and
  `recordValues`.
- `ports`: brokers' ports; the default detects Kafka by content.
  `zookeeperPorts`: ZooKeeper's ports; the default detects ZooKeeper by content. `cluster`: the value of the column
  `cluster`, also if captures show several clusters; only `reading` and an ingest separate clusters.
- `rotated`: true: the files are one capture, in the order of their packets.
- `storage.NAME`: the option NAME of the storage of paths like s3://bucket/*.pcap; Spark turns names into lower case.
- `splitBytes` (segments): a larger file is shared out among tasks; 128 MiB by default, 0 never.
- `quietSeconds` (streams): a file is complete when it has not changed for so long; 60.

A task of `segments` reads a part of a file. A task of another table decodes the connections of one capture. The tables
of a cluster's state (schema.KNOWLEDGE) need one task for all captures, since the state spans them. One task reads a
large capture too: the id of a connection and the number of an exchange depend on all earlier packets, tasks of a source
cannot exchange data, and its planning has no session whose tasks could read first. `reading` shares large captures out.

As a stream the source follows a folder into which captures rotate, and reads each file once, when it is complete, with
any name and time of change (in a storage's folder only *.pcap, *.pcapng and *.cap). It skips files called .part or
.tmp, and compressed copies of files that it has read. The offset of a stream lists all files in the folder that it has
read: move files elsewhere, or delete them, before they are too many. The files of a micro-batch are one capture, and an
exchange is one row. An exchange whose response is in a file of the next batch is cut, and the tables show it: it is
`unanswered`; its connection is `open` in one batch and without `start_seen` in the next, where the rest of it is
`request_not_seen` or skipped; `quality` has `open`, `midstream` and `resync`. Read the files again with `rotated` to
get such exchanges complete.

Does not use a Spark session: everything here runs in workers.
"""

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from glob import glob, has_magic
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_ntop
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from kproxy.capture.dissection.packets import ACK, FIN, RST, SYN
from kproxy.capture.formats.splits import SPLIT_BYTES, Split, plan
from kproxy.capture.formats.storage import Storage, is_remote, local_path, options_of
from kproxy.capture.quality import Quality
from kproxy.convert.job import Job, Settings, captures_of
from kproxy.convert.rows import BATCH_ROWS, Rows, quality_batch
from kproxy.errors import CaptureError, KproxyError
from kproxy.spark.tasks.knowledge import rows_of
from kproxy.spark.tasks.scan import segments
from kproxy.tables import arrays, schema, writer
from kproxy.tables.records import SHOWN_BYTES, chosen
from kproxy.tables.schema import I32, I64, TEXT, TIME, Table

SEGMENTS = Table(
    "segments",
    pa.schema(
        [
            ("source", TEXT),
            ("file", TEXT),
            ("offset", I64),  # packet's place in the uncompressed file; null for a segment reassembled from fragments
            ("captured", I32),
            ("time", TIME),
            ("time_ns", I64),
            ("sender_address", TEXT),
            ("sender_port", I32),
            ("receiver_address", TEXT),
            ("receiver_port", I32),
            ("seq", I64),
            ("ack", I64),
            ("flags", TEXT),
            ("window", I32),
            ("length", I32),  # bytes of the payload on the wire
        ]
    ),
    ("time",),
)
_ANY = pa.list_(schema.HEADERS.value_type)  # a Spark data source cannot declare elements non-null
_RECORDS = pa.schema(
    [field.with_type(_ANY) if field.type == schema.HEADERS else field for field in schema.RECORDS.schema]
)
RECORDS = replace(schema.RECORDS, schema=_RECORDS)
# Suffixes of incomplete files, which their writers rename when they are complete; `hdfs dfs -put` uses _COPYING_.
_UNDER_WAY = re.compile(r"\.(?:part|partial|filepart|crdownload|tmp|temp|_COPYING_)$", re.IGNORECASE)
_COMPRESSED = re.compile(r"\.(?:gz|zst|lz4)$", re.IGNORECASE)
LARGE_BYTES = 4 * SPLIT_BYTES  # kproxy logs a larger capture, since one task reads it
log = logging.getLogger("kproxy.spark")

FILES = Table("files", pa.schema([("path", TEXT), ("size", I64)]), ("path",))

TABLES = {**schema.TABLES, RECORDS.name: RECORDS, SEGMENTS.name: SEGMENTS, FILES.name: FILES}
_FLAGS = ((SYN, "S"), (FIN, "F"), (RST, "R"), (8, "P"), (ACK, "."))  # as tcpdump writes them

_SPARK_TYPES = {
    schema.HEADERS: "array<struct<key: string, value: binary>>",
    TEXT: "string",
    I64: "bigint",
    I32: "int",
    schema.I16: "smallint",
    TIME: "timestamp",
    schema.FLAG: "boolean",
    schema.BYTES: "binary",
    schema.INTEGERS: "array<int>",
    _ANY: "array<struct<key: string, value: binary>>",
}


def spark_schema(table: pa.Schema) -> str:
    """Return an Arrow schema as a Spark DDL string."""
    return ", ".join(f"`{field.name}` {spark_type(field)}" for field in table)


def spark_type(field: pa.Field) -> str:
    return _SPARK_TYPES[field.type]


@dataclass(frozen=True)
class Part(InputPartition):
    """The input of one task: a capture, or a split of it."""

    job: Job
    split: Split | None = None
    files: tuple[tuple[str, int], ...] = ()  # path and size, for `files`
    others: tuple[Job, ...] = ()  # captures of the same task, for tables of a cluster's state


class CaptureSource(DataSource):
    """The format `kafka-pcap`."""

    @classmethod
    def name(cls) -> str:
        return "kafka-pcap"

    def schema(self) -> str:
        return spark_schema(_Settings(self.options).table.schema)

    def reader(self, schema: Any) -> "CaptureReader":
        return CaptureReader(_Settings(self.options))

    def streamReader(self, schema: Any) -> "FolderReader":
        return FolderReader(_Settings(self.options))


class _Settings:
    """The options of a source, checked. Raises KproxyError for a wrong value."""

    def __init__(self, options: Mapping[str, str]) -> None:
        name = options.get("table", "exchanges")
        if name not in TABLES:
            raise KproxyError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        self.table = TABLES[name]
        self.places = json.loads(options["paths"]) if "paths" in options else [options.get("path", "")]
        if not all(self.places):
            raise KproxyError("no capture is named: give paths to load()")
        self.ports = _ports(options.get("ports", ""))
        self.zookeeper_ports = _ports(options.get("zookeeperPorts", ""))
        self.cluster = options.get("cluster", "default")
        self.rotated = options.get("rotated", "false").lower() == "true"
        self.split_bytes = int(options.get("splitBytes", SPLIT_BYTES))
        self.quiet_s = float(options.get("quietSeconds", 60))
        self.apis = tuple(options["apis"].replace(",", " ").split()) if "apis" in options else None
        self.records = None
        if self.table is RECORDS:
            self.records = chosen(options.get("records", ""), options.get("recordValues", str(SHOWN_BYTES)))
        prefix = "storage."
        words = [f"{key.removeprefix(prefix)}={value}" for key, value in options.items() if key.startswith(prefix)]
        self.storage = Storage(options_of(words))
        self.since = _time(options.get("from"))
        self.until = _time(options.get("to"))

    def files(self) -> list[str]:
        """Return the files that the paths match; folders and patterns leave out hidden and unfinished files."""
        found: list[str] = []
        for place in self.places:
            if is_remote(place):
                found += self.storage.captures(place)
                continue
            place = local_path(place)
            paths = sorted(map(str, Path(place).iterdir())) if Path(place).is_dir() else sorted(glob(place)) or [place]  # noqa: PTH207
            is_named = paths == [place]
            found += [
                path
                for path in paths
                if Path(path).name[:1] not in "._"
                and not Path(path).is_dir()
                and (is_named or not _UNDER_WAY.search(path))
            ]
        return found

    def jobs(self, files: Sequence[str], rotated: bool) -> list[Job]:
        settings = Settings(
            ports=self.ports,
            cluster=self.cluster,
            rotated=rotated,
            records=self.records,
            zookeeper_ports=self.zookeeper_ports,
            storage=self.storage,
        )
        return captures_of(files, settings) if files else []

    def wanted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch within the time range and of the chosen APIs."""
        if "time" in batch.schema.names:
            if self.since is not None:
                batch = batch.filter(pc.greater_equal(batch["time"], self.since))
            if self.until is not None:
                batch = batch.filter(pc.less(batch["time"], self.until))
        if self.apis is not None and "api" in batch.schema.names:
            batch = batch.filter(pc.is_in(batch["api"], pa.array(self.apis, TEXT)))
        return batch


def _ports(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(port) for port in text.replace(",", " ").split()}))


def _time(text: str | None) -> pa.Scalar | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as fault:
        raise KproxyError(f"{text!r} is no time: ISO 8601 is needed, like 2026-01-31T12:00:00Z") from fault
    return pa.scalar(moment if moment.tzinfo else moment.replace(tzinfo=UTC), TIME)


class CaptureReader(DataSourceReader):
    """Reads the captures that exist when the query is planned."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        settings = self._settings
        if settings.table == FILES:
            return [_files_part(settings, {path: settings.storage.size(path) for path in settings.files()})]
        jobs = settings.jobs(settings.files(), settings.rotated)
        if settings.table != SEGMENTS:
            _log_large(jobs)
        if settings.table in schema.KNOWLEDGE:
            return [Part(jobs[0], others=tuple(jobs[1:]))] if jobs else []
        if settings.table != SEGMENTS:
            return [Part(job) for job in jobs]
        return [
            Part(job, split)
            for job in jobs
            for path in job.paths
            for split in (
                plan(path, settings.split_bytes, settings.storage)
                if settings.split_bytes
                else [Split(path, storage=settings.storage)]
            )
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        return _batches(self._settings, partition)


class FolderReader(DataSourceStreamReader):
    """Follows folders. An offset holds the files that were read and still exist, with their sizes."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        # Unread files of storages: size, and the time since which the size is unchanged. HDFS reports the creation time
        # of an incomplete file, and the bytes of its complete blocks.
        self._waiting: dict[str, tuple[int, int]] = {}

    def initialOffset(self) -> dict[str, Any]:
        return {"files": {}}

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """Return the offset: files of `start` that still exist, and all complete files.

        If a folder cannot be listed, its read files stay in the offset: otherwise the stream would read them again.
        """
        read = _files_of(start or self.initialOffset())
        found = {}
        try:
            present = list(self._present(read))
        except KproxyError as fault:
            log.warning("%s: it is looked into again", fault)
            return {"files": read}
        for path, size, changed_ns in present:
            if path in read:
                found[path] = read[path]
                if size != read[path]:
                    log.warning(
                        "%s was read with %d bytes and has %d now: its later bytes are in no table: if it grew, raise "
                        "quietSeconds and convert it again; if it was rewritten, give each file a name of its own",
                        path, read[path], size,
                    )  # fmt: skip
                    found[path] = size  # reported once
            elif time.time_ns() - changed_ns >= self._settings.quiet_s * 1e9:
                found[path] = size
        here = {path for path, *_ in present} - found.keys()
        self._waiting = {path: seen for path, seen in self._waiting.items() if path in here}
        return {"files": found}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        settings = self._settings
        read = _files_of(start)
        every = read.keys() | _files_of(end).keys()
        # A file that was compressed when it was complete, as by `tcpdump -z gzip`, is the same capture.
        files = sorted(
            path
            for path in _files_of(end)
            if path not in read and (_COMPRESSED.sub("", path) == path or _COMPRESSED.sub("", path) not in every)
        )
        if settings.table == FILES:
            return [_files_part(settings, {path: _files_of(end)[path] for path in files})]
        jobs = settings.jobs(files, True)
        if settings.table != SEGMENTS:
            return [Part(job) for job in jobs]
        return [Part(job, Split(path)) for job in jobs for path in job.paths]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        return _batches(self._settings, partition)

    def _present(self, read: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
        """Yield path, size and time of the last change of each file. Raises KproxyError if a folder cannot be listed.

        read: sizes of the files that were read.
        """
        folders = [local_path(place) for place in self._settings.places]
        for path in self._settings.files():
            if is_remote(path):
                try:
                    size, changed_ns = self._settings.storage.seen(path)
                    if path not in read and changed_ns:
                        before, since_ns = self._waiting.get(path, (size, changed_ns))
                        changed_ns = since_ns if size == before and size else time.time_ns()
                        self._waiting[path] = size, changed_ns
                    yield path, size, changed_ns
                except CaptureError:
                    if path in folders:  # the folder itself, whose listing failed
                        raise
                    if path in read:  # it is listed, so it still exists
                        yield path, read[path], 0
                continue
            try:
                yield path, *self._settings.storage.seen(path)
            except FileNotFoundError:
                if path in folders and not has_magic(path):
                    raise CaptureError(path, "there is no such folder") from None
                # otherwise it was removed after the folder was listed


def _log_large(jobs: Sequence[Job]) -> None:
    for job in jobs:
        with suppress(OSError, CaptureError):  # its task reports the error
            size = sum(map(job.storage.size, job.paths))
            if size > LARGE_BYTES:
                log.warning(
                    "%s: one task reads all of its %d MB: kproxy.spark.reading.read(spark, ...) shares it out",
                    job.source, size >> 20,
                )  # fmt: skip


def _files_part(settings: _Settings, files: Mapping[str, int]) -> Part:
    job = Job("", (), settings.cluster, settings.ports)
    return Part(job, files=tuple(sorted(files.items())))


def _files_of(offset: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of files by path; KproxyError for an offset of an older kproxy."""
    if "files" not in offset:
        raise KproxyError("the stream's checkpoint is of an older kproxy: start with a new checkpoint folder")
    files: dict[str, int] = offset["files"]
    return files


def _batches(settings: _Settings, part: Part) -> Iterator[pa.RecordBatch]:
    if settings.table == FILES:
        found = iter([arrays.batch(FILES.schema, [{"path": path, "size": size} for path, size in part.files])])
    elif part.split:
        found = _segments(part)
    elif settings.table in schema.KNOWLEDGE:
        found = rows_of((part.job, *part.others), settings.table)
    else:
        found = _rows(part.job, settings.table)
    for batch in found:
        batch = settings.wanted(batch)
        if batch.num_rows:  # no schema: Spark accepts only nullable columns from a source
            yield pa.RecordBatch.from_arrays(batch.columns, batch.schema.names)


def _rows(job: Job, table: Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one table of one capture: at once, or sorted at the end if names must be filled in."""
    quality = Quality()
    if table.has_names:
        with TemporaryDirectory(prefix="kproxy-") as folder:
            sorter = writer.Sorter(schema.BY_NAME[table.name], Path(folder))
            rows = Rows(lambda of, batch: sorter.add(batch) if of.name == table.name else None, job.records)
            for _ in rows.read(job, quality):
                pass
            for part in sorter.in_order():
                filled = rows.names.fill(part).cast(table.schema)
                if job.records is not None:
                    filled = job.records.of(filled)
                yield from filled.to_batches()
        return
    ready: list[pa.RecordBatch] = []
    for _ in Rows(lambda of, batch: ready.append(batch) if of == table else None).read(job, quality):
        yield from ready
        ready.clear()
    yield from ready
    if table == schema.QUALITY:
        yield quality_batch(job.source, quality)


def _segments(part: Part) -> Iterator[pa.RecordBatch]:
    job, split = part.job, part.split
    assert split is not None
    ports = {port.to_bytes(2) for port in (*job.ports, *job.zookeeper_ports) if job.ports}
    file = Path(split.path).name
    sender: dict[bytes, tuple[str, int, str, int]] = {}
    columns: list[list[Any]] = [[] for _ in SEGMENTS.schema]
    for window, found in segments(split, Quality()):
        for (time_ns, _, start, end, _), segment, earlier in found:
            _, key, seq, ack, flags, size, _, _, length = segment
            if ports and key[-4:-2] not in ports and key[-2:] not in ports:
                continue
            ends = sender.get(key)
            if ends is None:
                if len(sender) >= 65536:
                    sender.clear()
                ends = sender[key] = _ends(key)
            offset = None if earlier else window.offset + start
            place = (job.source, file, offset, end - start, time_ns // 1000, time_ns)
            row = (*place, *ends, seq, ack, "".join(sign for bit, sign in _FLAGS if flags & bit), size, length)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        if len(columns[0]) >= BATCH_ROWS:
            yield _segment_batch(columns)
    if columns[0]:
        yield _segment_batch(columns)


def _segment_batch(columns: list[list[Any]]) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SEGMENTS.schema, strict=True)]
    for column in columns:
        column.clear()
    return pa.RecordBatch.from_arrays(arrays, schema=SEGMENTS.schema)


def _ends(key: bytes) -> tuple[str, int, str, int]:
    half = len(key) // 2 - 2
    family = AF_INET if half == 4 else AF_INET6
    return (
        inet_ntop(family, key[:half]),
        int.from_bytes(key[-4:-2]),
        inet_ntop(family, key[half : 2 * half]),
        int.from_bytes(key[-2:]),
    )
