"""Captures and packets of whole connections -> rows of the tables, as pieces: what a task of the decoding does.

Duty: `whole` reads some captures from front to end, each once; nothing of them crosses a border, so that their rows are
finished. `decode` takes rows of `places`, sorted by capture and connection and in the capture's order, reads the
packets' bytes where they lie, and gives them to the same Flows and Session as everywhere.

Memory: one capture's open connections, or one connection; RUN_ROWS rows per table, and MAPPED_BYTES of the captures'
own pages. Refuses to know how captures and connections are shared out among tasks.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from mmap import ACCESS_READ, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from kproxy.capture.columns import mapped
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.flows import Flows
from kproxy.capture.quality import Quality
from kproxy.capture.records import Record, Window
from kproxy.convert import machine
from kproxy.convert.job import Job
from kproxy.convert.rows import BATCH_ROWS, Rows
from kproxy.convert.spoken import SPOKEN
from kproxy.errors import CaptureError
from kproxy.spark import pieces
from kproxy.spark.places import PLACE, REPORT, listed
from kproxy.tables import schema, writer
from kproxy.tables.schema import Table

OPEN_FILES = 64
MAPPED_BYTES = 256 << 20  # pages of files that a task has in its address space
TOGETHER = 32 * 1024  # packets of a connection
FIRST_PACKETS = 64  # of a connection, taken one by one until it is under way
SHORT = 320  # packets: a connection that has no more costs less one by one
HEAD = mapped.HEAD - 16  # bytes of a packet, without the record's own header, that flows look at by column
FED = {table.name: table for table in (SPOKEN, schema.REGISTRY)}  # what insight is fed


def whole(unit: Sequence[tuple[int, Job]]) -> Iterator[pa.RecordBatch]:
    """The pieces of some captures. One that cannot be read leaves no rows, but what it failed of."""
    machine.retain()
    with TemporaryDirectory(prefix="kproxy-") as place, machine.seldom_collected():
        folder = Path(place)
        together = _Sorters(unit[0][1], folder, ".all")
        for number, job in unit:
            mine = _Sorters(job, folder, f".{number}")
            quality = Quality()
            rows = Rows(mine.add, job.records, keeps=job.is_known)
            try:
                for _ in rows.read(job, quality):
                    pass
            except CaptureError as fault:
                said = str(fault).removeprefix(f"{fault.name}: ")
                yield pieces.words(number, pieces.FAILED, (fault.name, said))
                mine.remove()
                continue
            for table, parts in mine.tables():
                for part in parts:
                    told = rows.names.fill(part)
                    if table is schema.RECORDS and job.records is not None:
                        told = job.records.of(told)
                    for batch in told.to_batches():
                        together.add(table, batch)
            together.feed(mine)
            mine.remove()
            yield pieces.words(number, pieces.COUNTS, listed(quality))
            if rows.names:
                yield pieces.words(number, pieces.NAMES, rows.names.told())
        yield from together.pieces()


class _Sorters:
    """The rows of a task's tables, sorted on the disk; apart from them what insight is fed."""

    def __init__(self, job: Job, folder: Path, prefix: str) -> None:
        self._tables = {name: writer.Sorter(schema.BY_NAME[name], folder, prefix) for name in job.tables}
        self._fed = {name: writer.Sorter(table, folder, f"{prefix}.said") for name, table in FED.items()}

    def add(self, table: Table, batch: pa.RecordBatch) -> None:
        (self._fed.get(table.name) or self._tables[table.name]).add(batch)

    def tables(self) -> Iterator[tuple[Table, Iterator[pa.Table]]]:
        """Each table that has rows, with them."""
        for name, sorter in self._tables.items():
            sorter.spill()
            if sorter.runs:
                yield schema.BY_NAME[name], writer.merged(schema.BY_NAME[name], sorter.runs)

    def feed(self, other: "_Sorters") -> None:
        """Add what insight is fed of another one."""
        for name, sorter in other._fed.items():
            sorter.spill()
            for part in writer.merged(FED[name], sorter.runs):
                for batch in part.to_batches():
                    self._fed[name].add(batch)

    def pieces(self) -> Iterator[pa.RecordBatch]:
        for table, parts in self.tables():
            yield from pieces.rows(table, parts)
        for name, sorter in self._fed.items():
            sorter.spill()
            if sorter.runs:
                said = pieces.SAID + name
                yield from pieces.rows(FED[name], writer.merged(FED[name], sorter.runs), said)

    def remove(self) -> None:
        for sorter in (*self._tables.values(), *self._fed.values()):
            for run in sorter.runs:
                run.unlink()


def decode(jobs: Mapping[int, Job]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Takes the rows of `places`; `jobs`: the captures that are shared out, by their numbers."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        machine.retain()
        with TemporaryDirectory(prefix="kproxy-") as folder, machine.seldom_collected():
            decoder = _Decoder(jobs, Path(folder))
            for batch in batches:
                decoder.take(batch)
            yield from decoder.finish()

    return run


class _Decoder:
    """Takes packets sorted by capture and connection, in the capture's order; one connection is decoded at a time."""

    def __init__(self, jobs: Mapping[int, Job], folder: Path) -> None:
        self._jobs = jobs
        self._sorters = _Sorters(next(iter(jobs.values())), folder, "")
        self._rows: dict[int, Rows] = {}  # by capture
        self._files = _Files()
        self._capture = -1
        self._connection: int | None = None
        self._met = False  # that connection, in an earlier window
        self._file = -1
        self._waiting: list[np.ndarray] = []  # packets of that connection in that file, TOGETHER about
        self._flows: Flows | None = None
        self._qualities: dict[int, Quality] = {}
        self._reports: list[tuple[int, object]] = []

    def take(self, batch: pa.RecordBatch) -> None:
        numbers = [batch.column(name).to_pylist() for name in ("capture", "connection", "file")]
        for index, (capture, connection, file) in enumerate(zip(*numbers, strict=True)):
            packets, inline = batch.column("packets")[index], batch.column("bytes")[index]
            if file == REPORT:
                self._reports.append((capture, json.loads(packets.as_py())))
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

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The last connection has ended: the rows, what the scan reported, and the counts of the connections."""
        self._hand_on()
        if self._flows is not None:
            self._flows.finish()
        for capture, report in self._reports:
            yield pieces.words(capture, pieces.REPORT, report)
        for capture, rows in self._rows.items():
            rows.flush(1)
            rows.note(self._qualities[capture])
            if rows.names:
                yield pieces.words(capture, pieces.NAMES, rows.names.told())
        for capture, quality in self._qualities.items():
            yield pieces.words(capture, pieces.COUNTS, listed(quality))
        yield from self._sorters.pieces()

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
        self._capture, self._connection, self._met = capture, connection, False

    def _rows_of(self, capture: int) -> Rows:
        if capture not in self._rows:
            self._rows[capture] = Rows(
                self._sorters.add,
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
