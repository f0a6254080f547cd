"""Captures as a Spark data source, `kafka-pcap`: a Python Data Source that yields Arrow batches of a fixed schema.

    spark.read.format("kafka-pcap").option("table", "exchanges").load("captures/*.pcap")

Options, beside the paths (files, patterns or folders):

- `table`: exchanges (default) or any other; segments: a row per TCP segment with its place in the file and without its
  payload; files: the files themselves, for whoever reads them.
- `from`, `to`: ISO 8601; rows whose `time` lies in between, `to` not included. `apis`: names of exchanges' APIs.
- `records` (of that table): topics whose records are told, as `kproxy convert --records` has them, and `recordValues`.
- `ports`: brokers' ports; by default Kafka is found by content.
  `zookeeperPorts`: ZooKeeper's, likewise. `cluster`: the column `cluster`, also where captures
  show several clusters, which only `reading` and an ingest tell apart.
- `rotated`: true: the files are one capture, in the order of their packets.
- `storage.NAME`: the option NAME of the storage that paths like s3://bucket/*.pcap are in; names lose their capitals.
- `splitBytes` (segments): a larger file is shared out among tasks; 128 MiB by default, 0 never.
- `quietSeconds` (streams): a file is complete when it has not changed for so long; 60.

A task reads segments of a part of a file, and of the other tables one capture, whose connections it decodes; of those
that say what is known of a cluster all captures, since they are one knowledge. A large capture is one task's too: the
id of a connection and the number of an exchange depend on all that came before, and tasks of a source hear nothing of
each other; nor has its planning a session, whose tasks could read first. `reading` shares large captures out.

As a stream the source follows a folder into which captures rotate, and reads each file once, when it is complete, by
whatever name (of a folder in a storage: *.pcap, *.pcapng and *.cap) and time of change it arrives; but not one that is
called .part or .tmp, nor one that was read before it was compressed. A stream's offset
names the files that the folder holds and that were read:
move them elsewhere, or delete them, before they are too many. The files of a micro-batch are one capture, and an
exchange is a row once; but one whose answer lies in a file of the next batch is cut, and that is said: it is
`unanswered`, its connection is `open` in one batch and without `start_seen` in the next, where the rest of it is
`request_not_seen` or skipped, and `quality` has `open`, `midstream` and `resync`. Who needs it whole reads the files
again, `rotated`.

Refuses to know sessions of Spark: everything here runs in workers.
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

from kproxy.capture.packets import ACK, FIN, RST, SYN
from kproxy.capture.quality import Quality
from kproxy.capture.splits import SPLIT_BYTES, Split, plan
from kproxy.capture.storage import Storage, is_remote, local_path, options_of
from kproxy.convert.job import Job, Settings, captures_of
from kproxy.convert.rows import BATCH_ROWS, Rows, quality_batch
from kproxy.errors import CaptureError, KproxyError
from kproxy.spark.knowledge import rows_of
from kproxy.spark.scan import segments
from kproxy.tables import arrays, schema, writer
from kproxy.tables.records import SHOWN_BYTES, chosen
from kproxy.tables.schema import I32, I64, TEXT, TIME, Table

SEGMENTS = Table(
    "segments",
    pa.schema(
        [
            ("source", TEXT),
            ("file", TEXT),
            ("offset", I64),  # of the packet in the plain file; null for one put together from fragments
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
            ("length", I32),  # of the payload, on the wire
        ]
    ),
    ("time",),
)
_ANY = pa.list_(schema.HEADERS.value_type)  # a source of Spark's cannot say that elements are never null
_RECORDS = pa.schema(
    [field.with_type(_ANY) if field.type == schema.HEADERS else field for field in schema.RECORDS.schema]
)
RECORDS = replace(schema.RECORDS, schema=_RECORDS)
# How names end of files that somebody still writes, and renames when they are complete; _COPYING_: `hdfs dfs -put`.
_UNDER_WAY = re.compile(r"\.(?:part|partial|filepart|crdownload|tmp|temp|_COPYING_)$", re.IGNORECASE)
_COMPRESSED = re.compile(r"\.(?:gz|zst|lz4)$", re.IGNORECASE)
LARGE_BYTES = 4 * SPLIT_BYTES  # of a capture: that one task reads it is said
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
    """An Arrow schema in Spark's words."""
    return ", ".join(f"`{field.name}` {spark_type(field)}" for field in table)


def spark_type(field: pa.Field) -> str:
    return _SPARK_TYPES[field.type]


@dataclass(frozen=True)
class Part(InputPartition):
    """What one task reads: a capture, and of it a split if it is split."""

    job: Job
    split: Split | None = None
    files: tuple[tuple[str, int], ...] = ()  # path and size, where they are all that is asked for
    others: tuple[Job, ...] = ()  # captures that are read together with it: what is known of a cluster is one


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
    """The options, every one checked."""

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
        """The files that the paths stand for: folders' and patterns' without those that are hidden, or under way."""
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
        """The rows of a batch that the time range and the APIs leave."""
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
    """Reads the captures that are there."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        settings = self._settings
        if settings.table == FILES:
            return [_files_part(settings, {path: settings.storage.size(path) for path in settings.files()})]
        jobs = settings.jobs(settings.files(), settings.rotated)
        if settings.table != SEGMENTS:
            _say_large(jobs)
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
    """Follows folders. An offset holds the files that were read, with their sizes, as far as they are still there."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        # Of files of storages that change, and are not read yet: bytes, and since when there were as many. Of a file
        # under way HDFS tells when it was begun, and the bytes of its blocks that are whole.
        self._waiting: dict[str, tuple[int, int]] = {}

    def initialOffset(self) -> dict[str, Any]:
        return {"files": {}}

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """`start` and all files that are complete, without those that are gone.

        Where a folder cannot be looked into, what was read is kept: else it would be read again, when that is fixed.
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
                        "%s was read with %d bytes and has %d now: what came since is in no table: if it grew, raise "
                        "quietSeconds and convert it again; if it was written anew, give each file a name of its own",
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
        # of one that is compressed when it is complete, as by `tcpdump -z gzip`, that is no other capture
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
        """Path, size and time of the last change of each file. Raises KproxyError where a folder cannot be looked into.

        read: those that were read, with their sizes.
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
                    if path in folders:  # what stands for a folder that did not answer
                        raise
                    if path in read:  # it is listed: it is not gone
                        yield path, read[path], 0
                continue
            try:
                yield path, *self._settings.storage.seen(path)
            except FileNotFoundError:
                if path in folders and not has_magic(path):
                    raise CaptureError(path, "there is no such folder") from None
                # else it is gone since the folder was listed


def _say_large(jobs: Sequence[Job]) -> None:
    for job in jobs:
        with suppress(OSError, CaptureError):  # its task says why
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
    """The sizes of files by path."""
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
        if batch.num_rows:  # Spark takes columns of a source only as nullable
            yield pa.RecordBatch.from_arrays(batch.columns, batch.schema.names)


def _rows(job: Job, table: Table) -> Iterator[pa.RecordBatch]:
    """The rows of one table of one capture: as they are known, or sorted if names are to be filled in."""
    quality = Quality()
    if table.has_names:
        with TemporaryDirectory(prefix="kproxy-") as folder:
            sorter = writer.Sorter(schema.BY_NAME[table.name], Path(folder))
            rows = Rows(lambda of, batch: sorter.add(batch) if of.name == table.name else None, job.records)
            for _ in rows.read(job, quality):
                pass
            for part in sorter.in_order():
                told = rows.names.fill(part).cast(table.schema)
                if job.records is not None:
                    told = job.records.of(told)
                yield from told.to_batches()
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
