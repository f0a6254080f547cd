"""Captures -> tables at any size: `kproxy spark ingest`.

Duty: the same rows as `kproxy convert`, by as many tasks as there is work for:

1. survey: a task per 128 MiB of a file finds its first record and walks the headers to the next; the driver checks
   that the ends meet (splits.agree).
2. scan: a task per split tells of each TCP packet its time and place, 28 bytes, never the payload; Spark sees one row
   per connection and some MEASURE of packets. Only packets of compressed files, which have no place to go back to, are
   carried along.
3. decode: packets are brought together by connection, in the order of the capture; a task reads their bytes where they
   lie and gives them to the same Flows and Session as everywhere. It sorts its rows by time on its own disk and writes
   them by date and hour. What the scan told is kept on the disks, so that the size of every connection is known before:
   one larger than a task's share has a task of its own, begun first, and the rest go on while it is at work.
4. name: rows that call topics by their ids get the names that any connection of their capture told, and those of a
   broker whose address is known its id.
5. publish: the driver renames the files of the tasks that succeeded and writes the counts of `quality`.

Nothing but plans and counts comes to the driver: of connections only those that are larger than a share. An attempt
writes into a folder of its own, so that what failed or ran twice is never seen.

Captures and tables must lie where every executor can read and write them by the same path. Different from `convert`: no
connection is put away because too many are open, since one is decoded after the other. A capture whose TLS is to be
decrypted is decoded by one task, with tshark.
Memory of a task: MEASURE packets' places, or of a compressed file some MEASURE_BYTES of packets; one connection,
RUN_ROWS rows per table, and MAPPED_BYTES of the captures' own pages.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby, pairwise
from mmap import ACCESS_READ, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kproxy.capture import mapped
from kproxy.capture.flows import Flows
from kproxy.capture.mapped import Columns
from kproxy.capture.pcap import Record, Window
from kproxy.capture.quality import NONE, Quality
from kproxy.convert.rows import BATCH_ROWS, Job, Rows, Summary, captures_of, manifest, quality_batch
from kproxy.errors import CaptureError, KproxyError
from kproxy.spark.scan import segments
from kproxy.spark.splits import SPLIT_BYTES, Range, Split, Survey, agree, is_plain, ranges, survey, windows
from kproxy.tables import schema, writer
from kproxy.tables.names import FILLED, Names
from kproxy.tables.records import Chosen
from kproxy.tables.schema import Table
from kproxy.wire.bodies import BATCHES, DETAILS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASK_BYTES = 64 << 20  # of captures, to be decoded by one task
OPEN_FILES = 64
MAPPED_BYTES = 256 << 20  # pages of files that a task has in its address space
TOGETHER = 32 * 1024  # packets of a connection
FIRST_PACKETS = 64  # of a connection, taken one by one until it is under way
SHORT = 320  # packets: a connection that has no more costs less one by one
MEASURE = 128 * 1024  # packets of which the scan tells at once
MEASURE_BYTES = 8 << 20  # and of compressed files
ROUNDS = 8  # of tasks for each core: so that late ones are short

# What the scan tells: rows of packets of one connection, in their order. In place of a file's number: a report of the
# scan itself, its text in `packets`; or a capture that one task must decode as a whole.
_REPORT, _WHOLE = -1, -2
_PACKETS = (
    ("capture", "int"),
    ("connection", "int"),  # a hash of its ends; what shares a hash is told apart by Flows
    ("file", "int"),
    ("offset", "bigint"),  # of the last packet
    ("size", "bigint"),  # of the packets, as captured
    ("packets", "binary"),  # _PLACE of each
    ("bytes", "binary"),  # the packets, of a file in which nobody can go to a place
)
_PACKET_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in _PACKETS)
_ROW = pa.schema(list(zip(
    (name for name, _ in _PACKETS),
    (pa.int32(), pa.int32(), pa.int32(), pa.int64(), pa.int64(), pa.binary(), pa.binary()),
    strict=True,
)))  # fmt: skip
_PLACE = np.dtype(
    [("offset", "<i8"), ("time_ns", "<i8"), ("link", "<i4"), ("captured", "<i4"), ("original", "<i4")]
)  # of a packet
_PLACED = Struct("<qqiii")
_RESULT_SCHEMA = "capture int, kind string, text string"
HEAD = mapped.HEAD - 16  # bytes of a packet, without the record's own header, that flows look at by column
_OTHER_PORTS = 1 << 40  # no hash of a connection


def ingest(
    spark: "SparkSession",
    captures: Sequence[Path | str],
    out: Path | str,
    *,
    ports: Sequence[int] = (),
    cluster: str = "default",
    rotated: bool = False,
    key_log: Path | str | None = None,
    detail: str = "batches",
    records: Chosen | None = None,
    overwrite: bool = False,
    split_bytes: int = SPLIT_BYTES,
    tasks: int = 0,
) -> Summary:
    """Write the tables of captures into the folder `out`. A capture that cannot be read does not stop the others.

    `tasks`: of the decoding; by default one per 64 MiB, so that the files do not depend on the number of cores.
    """
    from pyspark import StorageLevel

    jobs = captures_of([str(Path(path).resolve()) for path in captures], cluster, tuple(sorted(set(ports))), rotated)
    keys = str(Path(key_log).resolve()) if key_log else None
    jobs = [replace(job, key_log=keys, detail=DETAILS[detail], records=records) for job in jobs]
    if records is not None and DETAILS[detail] < BATCHES:
        raise KproxyError(f"records are in batches, and detail {detail} does not look at them: leave it out")
    dataset = writer.Dataset(Path(out).resolve())
    if (dataset.folder / writer.MANIFEST).exists() and not overwrite:
        raise KproxyError(f"{out} holds tables already: name another folder, or say --overwrite")
    splits, failed = _plan(spark, jobs, split_bytes)
    size = sum(Path(path).stat().st_size for number in splits for path in jobs[number].paths)
    work = dataset.begin("spark", by_hour=True)
    try:
        while True:
            parts = [(number, file, split) for number, of_job in splits.items() for file, split in of_job]
            packets = _over(spark, parts).mapInArrow(_scan(jobs, parts), _PACKET_SCHEMA).persist(StorageLevel.DISK_ONLY)
            decoded = (
                _shared_out(packets, size, tasks or max(1, size // TASK_BYTES))
                .sortWithinPartitions("capture", "connection", "file", "offset")
                .mapInArrow(_decode(jobs, work), _RESULT_SCHEMA)
                .collect()
            ) if parts else []  # fmt: skip
            packets.unpersist()
            results = [(row["capture"], row["kind"], json.loads(row["text"])) for row in decoded]
            reports = [(capture, text) for capture, kind, text in results if kind == "report"]
            torn = {(capture, text["file"]) for capture, text in reports if text["torn"]}
            late = {capture for capture, text in reports if text["secrets"]}
            if not torn and not late:
                break
            for number, file in torn:  # damaged in a way that only its packets tell: read it in one piece
                kept = [entry for entry in splits[number] if entry[0] != file]
                splits[number] = sorted([*kept, (file, Split(jobs[number].paths[file]))], key=lambda entry: entry[0])
            splits.update({number: _as_a_whole(jobs[number]) for number in late})
        quality = _quality(spark, jobs, parts, results)
        summary = Summary(Path(out), {}, quality, failed)
        files = _files(spark, jobs, work, results, summary.rows)
        sorter = writer.Sorter(schema.QUALITY, work)
        for source, of_source in quality.items():
            sorter.add(quality_batch(source, of_source))
        sorter.spill()
        finished = work / "quality.parquet"
        summary.rows["quality"] = writer.write(schema.QUALITY, sorter.runs, finished)
        if quality:
            dataset.clear()
            dataset.publish({**files, "quality/quality.parquet": finished}, manifest(jobs, summary))
    finally:
        dataset.abandon()
    return summary


def _plan(
    spark: "SparkSession", jobs: Sequence[Job], split_bytes: int
) -> tuple[dict[int, list[tuple[int, Split]]], list[CaptureError]]:
    """The splits of each capture, by the number of the file; and what is no capture."""
    files = [(number, file, path) for number, job in enumerate(jobs) for file, path in enumerate(job.paths)]
    pieces = [(number, file, piece) for number, file, path in files for piece in ranges(path, split_bytes)]
    surveyed = _over(spark, pieces).mapInArrow(_survey(pieces), "number bigint, text string")
    surveys: dict[tuple[int, int], list[tuple[Range, Survey]]] = {}
    failed: dict[int, CaptureError] = {}
    for index, text in sorted(tuple(row) for row in surveyed.collect()):
        number, file, piece = pieces[index]
        found = json.loads(text)
        if "fault" in found:
            failed.setdefault(number, CaptureError(*found["fault"]))
            continue
        found["opening"] = bytes.fromhex(found["opening"])
        surveys.setdefault((number, file), []).append((piece, Survey(**found)))
    secret = {number for (number, _), found in surveys.items() if any(seen.secrets for _, seen in found)}
    secret |= {number for number, job in enumerate(jobs) if job.key_log is not None}
    splits: dict[int, list[tuple[int, Split]]] = {}
    for (number, file), found in surveys.items():
        if number in secret and number not in failed:
            splits[number] = _as_a_whole(jobs[number])
        elif number not in failed:
            agreed = agree([piece for piece, _ in found], [seen for _, seen in found])
            splits.setdefault(number, []).extend((file, split) for split in agreed)
    return splits, list(failed.values())


def _as_a_whole(job: Job) -> list[tuple[int, Split]]:
    return [(_WHOLE, Split(job.paths[0]))]


def _survey(pieces: Sequence[tuple[int, int, Range]]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in _numbers(batches):
            try:
                seen = survey(pieces[number][2])
                text = json.dumps({**vars(seen), "opening": seen.opening.hex()})
            except CaptureError as fault:
                said = str(fault).removeprefix(f"{fault.name}: ")
                text = json.dumps({"fault": (fault.name, said)})
            yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), "text": [text]})

    return run


def _over(spark: "SparkSession", work: Sequence[Any]) -> "DataFrame":
    """The numbers of pieces of work: a task each, or where they are many, a few to a task."""
    return spark.range(0, len(work), 1, min(len(work), ROUNDS * spark.sparkContext.defaultParallelism))


def _numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


# --- scan: what packets there are, and where -------------------------------------------------------------------------


def _scan(
    jobs: Sequence[Job], parts: Sequence[tuple[int, int, Split]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in _numbers(batches):
            capture, file, split = parts[number]
            yield from _packets(number, capture, file, split, jobs[capture])

    return run


def _packets(number: int, capture: int, file: int, split: Split, job: Job) -> Iterator[pa.RecordBatch]:
    if file == _WHOLE:
        size = sum(Path(path).stat().st_size for path in job.paths)
        yield _row(capture, number, _WHOLE, 0, size, None, None)
        return
    quality = Quality()
    clock = _Clock()
    wanted = frozenset(port.to_bytes(2) for port in job.ports)
    known: dict[bytes, int] = {}
    inline = split.whole and not is_plain(split.path)
    connections: list[int] = []  # of the packets not told of yet
    places = bytearray()
    bodies: list[bytes] = []
    held = 0  # bytes of bodies
    pack = _PLACED.pack
    secrets: list[bytes] = []
    for window, found in segments(split, quality, secrets):
        clock.window(window, quality)
        data, base = window.data, window.offset
        for (time_ns, link, start, end, original), segment, earlier in found:
            key = segment[1]
            connection = known.get(key)
            if connection is None:
                if len(known) >= 1 << 16:
                    known.clear()
                connection = known[key] = _connection(key, wanted)
            if connection == _OTHER_PORTS:
                quality.note("other_ports", time_ns, size=segment[8])
                continue
            for before_ns, before_link, offset, packet, length in earlier:
                places += pack(offset, before_ns, before_link, len(packet), length)
                connections.append(connection)
                if inline:
                    bodies.append(packet)
            places += pack(base + start, time_ns, link, end - start, original)
            connections.append(connection)
            if inline:
                bodies.append(data[start:end])
                held += end - start
        if len(connections) >= MEASURE or held >= MEASURE_BYTES:
            yield _told(capture, file, connections, places, bodies)
            connections, places, bodies, held = [], bytearray(), [], 0
    yield _told(capture, file, connections, places, bodies)
    torn = bool(quality.count("damaged")) and not split.whole
    report = {"split": number, "file": file, "torn": torn, "secrets": bool(secrets)}
    report |= {"quality": _listed(quality), "clock": vars(clock)}
    yield _row(capture, number, _REPORT, 0, 0, json.dumps(report).encode(), None)


def _row(*values: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([value], of.type) for value, of in zip(values, _ROW, strict=True)], schema=_ROW
    )


def _told(capture: int, file: int, connections: list[int], places: bytearray, bodies: list[bytes]) -> pa.RecordBatch:
    """Packets brought together by connection, a row each."""
    owners = np.array(connections, np.int32)
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    table = np.frombuffer(places, _PLACE)[order]
    edges = np.flatnonzero(np.diff(owners, prepend=_OTHER_PORTS, append=_OTHER_PORTS))
    starts, stops = edges[:-1], edges[1:]
    packets = (edges * _PLACE.itemsize).astype(np.int32)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.full(len(starts), capture, np.int32)),
            pa.array(owners[starts]),
            pa.array(np.full(len(starts), file, np.int32)),
            pa.array(table["offset"][stops - 1]),
            pa.array(np.add.reduceat(table["captured"], starts, dtype=np.int64) if len(starts) else [], pa.int64()),
            pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(packets), pa.py_buffer(table)]),
            pa.array(
                [b"".join([bodies[at] for at in order[start:stop]]) for start, stop in zip(starts, stops, strict=True)]
                if bodies
                else [None] * len(starts),
                pa.binary(),
            ),
        ],
        schema=_ROW,
    )


class _Clock:
    """What a split knows of the capture's clock: the rest depends on the splits before it."""

    def __init__(self, last_ns: int = NONE) -> None:
        self.first_ns = NONE  # the earliest time
        self.last_ns = last_ns  # the latest
        self.back = [0, NONE, NONE]  # packets stamped earlier than one before them: how many, first, last

    def window(self, window: Window, quality: Quality | None) -> None:
        records = window.records
        if not records:
            return
        times = np.fromiter((record[0] for record in records), np.int64, len(records))
        reached = np.maximum.accumulate(np.concatenate(([self.last_ns], times)))
        late = times[times < reached[:-1]]
        if len(late):
            count, first, last = self.back
            first = int(late.min()) if first == NONE else min(first, int(late.min()))
            self.back = [count + len(late), first, max(last, int(late.max()))]
        earliest = int(times.min())
        self.first_ns = earliest if self.first_ns == NONE else min(self.first_ns, earliest)
        self.last_ns = int(reached[-1])
        if quality is not None:
            quality.note("packets", earliest, count=len(records), last_ns=self.last_ns)


def _connection(key: bytes, ports: frozenset[bytes]) -> int:
    if ports and key[-4:-2] not in ports and key[-2:] not in ports:
        return _OTHER_PORTS
    half = len(key) // 2 - 2
    ends = sorted((key[:half] + key[-4:-2], key[half : 2 * half] + key[-2:]))
    return crc32(b"".join(ends)) - (1 << 31)


def _shared_out(packets: "DataFrame", size: int, tasks: int) -> "DataFrame":
    """What the scan told, by task: a connection larger than an even share is alone, in a task that starts early."""
    from pyspark.sql import functions as F

    if tasks == 1:
        return packets.repartition(1)
    share = max(1, size // tasks)
    sizes = packets.groupBy("capture", "connection").agg(F.sum("size").alias("size")).where(F.col("size") > share)
    large = sorted(map(tuple, sizes.collect()), key=lambda row: (-row[2], row))
    alone = [(capture, connection, task) for task, (capture, connection, _) in enumerate(large)]
    rest = max(1, (size - sum(row[2] for row in large)) // share)
    numbers = packets.sparkSession.createDataFrame(alone, "capture int, connection int, alone int")
    together = len(alone) + F.pmod(F.hash("capture", "connection"), F.lit(rest))
    return (
        packets.join(F.broadcast(numbers), ["capture", "connection"], "left")
        .repartitionById(len(alone) + rest, F.coalesce("alone", together))
        .drop("alone")
    )


# --- decode: packets of whole connections into rows ------------------------------------------------------------------


def _decode(jobs: Sequence[Job], work: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        task = context.partitionId() if context else 0
        attempt = work / f"task-{task:05d}-{uuid4().hex}"
        with TemporaryDirectory(prefix="kproxy-") as folder:
            decoder = _Decoder(jobs, Path(folder))
            for batch in batches:
                decoder.take(batch)
            results = [*decoder.finish(), *decoder.write(attempt, task)]
        captures, kinds, texts = zip(*results, strict=True) if results else ((), (), ())
        yield pa.RecordBatch.from_arrays(
            [pa.array(captures, pa.int32()), pa.array(kinds, pa.string()), pa.array(texts, pa.string())],
            ["capture", "kind", "text"],
        )

    return run


class _Decoder:
    """Takes packets sorted by capture and connection, in the capture's order; one connection is decoded at a time."""

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self._jobs = jobs
        self._sorters = {name: writer.Sorter(schema.BY_NAME[name], folder) for name in jobs[0].tables}
        self._rows: dict[int, Rows] = {}  # by capture
        self._files = _Files()
        self._decoded: set[int] = set()  # captures, but for those read as a whole
        self._capture = -1
        self._connection: int | None = None
        self._met = False  # that connection, in an earlier window
        self._file = -1
        self._waiting: list[np.ndarray] = []  # packets of that connection in that file, TOGETHER about
        self._flows: Flows | None = None
        self._qualities: dict[int, Quality] = {}
        self._reports: list[tuple[int, str, str]] = []

    def take(self, batch: pa.RecordBatch) -> None:
        numbers = [batch.column(name).to_pylist() for name in ("capture", "connection", "file")]
        for index, (capture, connection, file) in enumerate(zip(*numbers, strict=True)):
            packets, inline = batch.column("packets")[index], batch.column("bytes")[index]
            if file == _REPORT:
                self._reports.append((capture, "report", packets.as_py().decode()))
            elif file == _WHOLE:
                quality = self._qualities[capture] = Quality()
                for _ in self._rows_of(capture).read(self._jobs[capture], quality):
                    pass
            else:
                if (capture, connection) != (self._capture, self._connection):
                    self._begin(capture, connection)
                if file != self._file or sum(map(len, self._waiting)) >= TOGETHER:
                    self._hand_on()
                    self._file = file
                places = np.frombuffer(packets.as_buffer(), _PLACE)
                if inline.is_valid:
                    ends = np.cumsum(places["captured"], dtype=np.int64)
                    self._packets(places, inline.as_py(), ends - places["captured"])
                else:
                    self._waiting.append(places.copy())

    def finish(self) -> Iterator[tuple[int, str, str]]:
        """The last connection has ended: what the scan reported, and the counts of the connections."""
        self._hand_on()
        if self._flows is not None:
            self._flows.finish()
        yield from self._reports
        for capture, rows in self._rows.items():
            rows.flush(1)
            if capture in self._decoded:
                rows.note(self._qualities[capture])
            if rows.names:
                yield capture, "names", json.dumps(rows.names.told())
        for capture, quality in self._qualities.items():
            yield capture, "quality", json.dumps(_listed(quality))

    def write(self, folder: Path, task: int) -> Iterator[tuple[int, str, str]]:
        """Sorted by time, a file for each hour."""
        for name, sorter in self._sorters.items():
            sorter.spill()
            table = schema.BY_NAME[name]
            for hour, parts in groupby(_by_hour(writer.merged(table, sorter.runs)), key=lambda entry: entry[0]):
                moment = datetime.fromtimestamp(hour * 3600, UTC)
                place = f"{name}/date={moment:%Y-%m-%d}/hour={moment:%H}/part-{task:05d}.parquet"
                path = folder / place
                path.parent.mkdir(parents=True)
                file = {"table": name, "place": place, "path": str(path.relative_to(folder.parent))}
                if table.has_names:
                    rows = _keep(table, (part for _, part in parts), path)
                else:
                    rows = writer.store(table, (part for _, part in parts), path)
                yield -1, "file", json.dumps({**file, "rows": rows})

    def _begin(self, capture: int, connection: int) -> None:
        self._hand_on()
        if self._flows is not None:
            self._flows.finish()
        if capture != self._capture:
            job = self._jobs[capture]
            quality = self._qualities[capture] = Quality()
            if self._capture in self._rows:
                self._rows[self._capture].flush(1)
            rows = self._rows_of(capture)
            self._flows = rows.flows(job, quality, first=False)
            self._decoded.add(capture)
        self._capture, self._connection, self._met = capture, connection, False

    def _rows_of(self, capture: int) -> Rows:
        if capture not in self._rows:
            self._rows[capture] = Rows(
                lambda table, batch: self._sorters[table.name].add(batch), self._jobs[capture].records
            )
        return self._rows[capture]

    def _hand_on(self) -> None:
        """The packets that wait, many at once: what is done once a window is most of what a small one costs."""
        if self._waiting:
            packets = np.concatenate(self._waiting)
            self._waiting.clear()
            data = self._files.open(self._jobs[self._capture].paths[self._file])
            self._packets(packets, data, packets["offset"])

    def _packets(self, packets: np.ndarray, data: mmap | bytes, starts: np.ndarray) -> None:
        """Give packets of one connection, which begin at `starts` of `data`, to the flows."""
        assert self._flows is not None
        done = 0
        while done < len(packets):
            here = packets[done : done + (TOGETHER if self._met or len(packets) <= SHORT else FIRST_PACKETS)]
            records = _records(here, data, starts[done : done + len(here)])
            self._flows.window(Window(data, 0, records))
            self._met = True
            done += len(here)
            self._rows[self._capture].flush(BATCH_ROWS)
        if isinstance(data, mmap):
            self._files.looked_at(min(int(starts.max() - starts.min()), len(packets) * PAGESIZE))


def _records(packets: np.ndarray, data: mmap | bytes, start: np.ndarray) -> Sequence[Record]:
    """Packets as columns; those of several link types, or at the end of the data, one by one."""
    links, end = packets["link"], start + packets["captured"]
    if (links == links[0]).all() and start.max() + HEAD <= len(data):
        heads = np.ndarray((len(data) - HEAD + 1,), f"V{HEAD}", data, strides=(1,))[start].view(np.uint8)
        return Columns(packets["time_ns"], int(links[0]), start, end, packets["original"], heads.reshape(-1, HEAD))
    columns = packets["time_ns"], links, start, end, packets["original"]
    return list(zip(*(column.tolist() for column in columns), strict=True))


class _Files:
    """The files that were read last, mapped; one is let go when nothing in a connection's hands lies in it any more."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, mmap] = OrderedDict()
        self._mapped_bytes = 0  # at most

    def open(self, path: str) -> mmap:
        data = self._open.get(path)
        if data is None:
            if len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)
            with Path(path).open("rb") as file:
                data = self._open[path] = mmap(file.fileno(), 0, access=ACCESS_READ)
        else:
            self._open.move_to_end(path)
        return data

    def looked_at(self, size: int) -> None:
        """Pages are the files' own, but count as the process's: let them go before they are many.

        Not at once, since packets of other connections lie in the same ones.
        """
        self._mapped_bytes += size
        if self._mapped_bytes >= MAPPED_BYTES:
            for data in self._open.values():
                data.madvise(MADV_DONTNEED)
            self._mapped_bytes = 0


def _keep(table: Table, parts: Iterator[pa.Table], path: Path) -> int:
    """Rows as they are, until they can be written with names."""
    count = 0
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as sink:
        for part in parts:
            sink.write_table(part)
            count += part.num_rows
    return count


def _by_hour(parts: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    for part in parts:
        hours = part["time"].cast(pa.int64()).to_numpy() // 3_600_000_000
        edges = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(hours)]
        for start, stop in pairwise(edges):
            yield int(hours[start]), part.slice(start, stop - start)


# --- what comes back to the driver -----------------------------------------------------------------------------------

_Result = tuple[int, str, Any]


def _files(
    spark: "SparkSession", jobs: Sequence[Job], work: Path, results: Sequence[_Result], rows: dict[str, int]
) -> dict[str, Path]:
    """Where the tasks' files belong -> where they are; and the rows in them."""
    rows.update(dict.fromkeys(jobs[0].tables, 0))
    names: dict[str, Names] = {}
    files = {}
    unnamed = []
    for capture, kind, text in results:
        if kind == "file":
            files[text["place"]] = work / text["path"]
            if schema.BY_NAME[text["table"]].has_names:
                unnamed.append((text["table"], text["place"]))
            else:
                rows[text["table"]] += text["rows"]
        elif kind == "names":
            names.setdefault(jobs[capture].source, Names()).add(text)
    if unnamed:
        kept = [(table, files[place]) for table, place in unnamed]
        named = _over(spark, kept).mapInArrow(_name(jobs, kept, names), "number bigint, text string")
        for index, text in named.collect():
            (table, place), (path, count) = unnamed[index], json.loads(text)
            rows[table] += count
            files[place] = Path(path)
            if not count:  # there were records, but of other topics
                del files[place]
    return files


def _name(
    jobs: Sequence[Job], files: Sequence[tuple[str, Path]], names: dict[str, Names]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Write what was kept as Parquet, each attempt to a file of its own; tells where, and how many rows it has."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in _numbers(batches):
            name, kept = files[number]
            path = kept.with_name(f"{kept.stem}-{uuid4().hex}.parquet")
            told = _named(kept, names)
            if name == schema.RECORDS.name and jobs[0].records is not None:
                told = map(jobs[0].records.of, told)
            rows = writer.store(schema.BY_NAME[name], told, path)
            os.utime(path, ns=(kept.stat().st_atime_ns, kept.stat().st_mtime_ns))  # when its connections were decoded
            text = json.dumps((str(path), rows))
            yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), "text": [text]})

    return run


def _named(kept: Path, names: dict[str, Names]) -> Iterator[pa.Table]:
    with pa.memory_map(str(kept)) as file:
        reader = pa.ipc.open_file(file)
        for index in range(reader.num_record_batches):
            rows = pa.Table.from_batches([reader.get_batch(index)])
            for source in rows["source"].unique().to_pylist():
                if source in names:
                    filled = names[source].fill(rows)
                    of_source = pc.equal(rows["source"], source)
                    for place, column in enumerate(rows.schema.names):
                        if column in FILLED:
                            told = pc.if_else(of_source, filled[column], rows[column])
                            rows = rows.set_column(place, column, told)
            yield rows.cast(reader.schema)


def _quality(
    spark: "SparkSession", jobs: Sequence[Job], parts: Sequence[tuple[int, int, Split]], results: Sequence[_Result]
) -> dict[str, Quality]:
    """The counts of all tasks, by source."""
    qualities: dict[int, Quality] = {}
    reports = sorted((text for _, kind, text in results if kind == "report"), key=lambda text: text["split"])
    late: list[tuple[int, int]] = []  # splits that begin earlier than one before them ended
    reached: dict[int, int] = {}
    for report in reports:
        capture = parts[report["split"]][0]
        clock = report["clock"]
        quality = qualities.setdefault(capture, Quality())
        _add(quality, report["quality"])
        before = reached.get(capture, NONE)
        if clock["first_ns"] != NONE and clock["first_ns"] < before:
            late.append((report["split"], before))
        else:
            _add_back(quality, clock["back"])
        reached[capture] = max(before, clock["last_ns"])
    if late:
        again = _over(spark, late).mapInArrow(_clocks(parts, late), "number bigint, text string")
        for index, text in again.collect():
            _add_back(qualities[parts[late[index][0]][0]], json.loads(text))
    for capture, kind, text in results:
        if kind == "quality":
            _add(qualities.setdefault(capture, Quality()), text)
    return {jobs[capture].source: quality for capture, quality in sorted(qualities.items())}


def _clocks(
    parts: Sequence[tuple[int, int, Split]], late: Sequence[tuple[int, int]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Count packets stamped too early in splits, knowing the latest time before each."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in _numbers(batches):
            split, before = late[number]
            clock = _Clock(before)
            for window in windows(parts[split][2], Quality()):
                clock.window(window, None)
            back = json.dumps(clock.back)
            yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), "text": [back]})

    return run


def _listed(quality: Quality) -> list[tuple[str, int, int, int, int]]:
    return [(row.kind, row.count, row.bytes, row.first_ns, row.last_ns) for row in quality]


def _add(quality: Quality, rows: Sequence[Sequence[Any]]) -> None:
    for kind, count, size, first_ns, last_ns in rows:
        quality.note(kind, first_ns, count=count, size=size, last_ns=last_ns)


def _add_back(quality: Quality, back: Sequence[int]) -> None:
    count, first_ns, last_ns = back
    if count:
        quality.note("clock_back", first_ns, count=count, last_ns=last_ns)
