"""Packets of whole connections -> rows of the tables: what a task of the decoding does.

Duty: take rows of `places`, sorted by capture and connection and in the capture's order, read the packets' bytes where
they lie, give them to the same Flows and Session as everywhere, and write the rows sorted by time, a file for each
hour, into a folder of this attempt's own.

Memory: one connection, RUN_ROWS rows per table, and MAPPED_BYTES of the captures' own pages. Refuses to know how
connections are shared out among tasks.
"""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby, pairwise
from mmap import ACCESS_READ, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import numpy as np
import pyarrow as pa

from kproxy.capture.columns import mapped
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.flows import Flows
from kproxy.capture.quality import Quality
from kproxy.capture.records import Record, Window
from kproxy.convert.job import Job
from kproxy.convert.rows import BATCH_ROWS, Rows
from kproxy.convert.spoken import SPOKEN
from kproxy.spark.places import PLACE, REPORT, WHOLE, listed
from kproxy.tables import schema, writer
from kproxy.tables.schema import Table

OPEN_FILES = 64
MAPPED_BYTES = 256 << 20  # pages of files that a task has in its address space
TOGETHER = 32 * 1024  # packets of a connection
FIRST_PACKETS = 64  # of a connection, taken one by one until it is under way
SHORT = 320  # packets: a connection that has no more costs less one by one
HEAD = mapped.HEAD - 16  # bytes of a packet, without the record's own header, that flows look at by column
RESULT_SCHEMA = "capture int, kind string, text string"


def decode(jobs: Sequence[Job], work: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
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
        self._fed = {table.name: writer.Sorter(table, folder) for table in (SPOKEN, schema.REGISTRY)}
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
            if file == REPORT:
                self._reports.append((capture, "report", packets.as_py().decode()))
            elif file == WHOLE:
                quality = self._qualities[capture] = Quality()
                for _ in self._rows_of(capture).read(self._jobs[capture], quality):
                    pass
            else:
                if (capture, connection) != (self._capture, self._connection):
                    self._begin(capture, connection)
                if file != self._file or sum(map(len, self._waiting)) >= TOGETHER:
                    self._hand_on()
                    self._file = file
                places = np.frombuffer(packets.as_buffer(), PLACE)
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
            yield capture, "quality", json.dumps(listed(quality))

    def write(self, folder: Path, task: int) -> Iterator[tuple[int, str, str]]:
        """Sorted by time, a file for each hour."""
        for name, sorter in self._sorters.items():
            sorter.spill()
            table = schema.BY_NAME[name]
            for hour, parts in hours(writer.merged(table, sorter.runs)):
                place = f"{name}/{hour}/part-{task:05d}.parquet"
                path = folder / place
                path.parent.mkdir(parents=True)
                file = {"table": name, "place": place, "path": str(path.relative_to(folder.parent))}
                rows = _keep(table, parts, path) if table.has_names else writer.store(table, parts, path)
                yield -1, "file", json.dumps({**file, "rows": rows})
        for name, sorter in self._fed.items():
            sorter.spill()
            for number, run in enumerate(sorter.runs):
                path = folder / f"{name}.{number}.run"
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(run, path)
                yield -1, "said", json.dumps({"table": name, "path": str(path.relative_to(folder.parent))})

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
                lambda table, batch: (self._fed.get(table.name) or self._sorters[table.name]).add(batch),
                self._jobs[capture].records,
                keeps=self._jobs[capture].is_known,
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


def hours(parts: Iterator[pa.Table]) -> Iterator[tuple[str, Iterator[pa.Table]]]:
    """Rows in the order of time, by the folder of their date and hour. One's rows are to be read before the next's."""
    for hour, group in groupby(_by_hour(parts), key=lambda entry: entry[0]):
        moment = datetime.fromtimestamp(hour * 3600, UTC)
        yield f"date={moment:%Y-%m-%d}/hour={moment:%H}", (part for _, part in group)


def _by_hour(parts: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    for part in parts:
        hours = part["time"].cast(pa.int64()).to_numpy() // 3_600_000_000
        edges = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(hours)]
        for start, stop in pairwise(edges):
            yield int(hours[start]), part.slice(start, stop - start)
