"""Captures and packets of whole connections -> rows of the tables, as pieces: what a task of the decoding does.

Duty: `whole` reads some captures from front to end, each once; nothing of them crosses a border, so that their rows are
finished. `decode` takes rows of `places`, sorted by capture and connection and in the capture's order, reads the
packets' bytes where they lie, and gives them to the same Flows and Session as everywhere.

Memory: one capture's open connections, or one connection; RUN_ROWS rows per table, and MAPPED_BYTES of the captures'
own pages. Refuses to know how captures and connections are shared out among tasks.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from mmap import ACCESS_READ, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from kproxy.capture.columns import mapped
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.flows import Flows
from kproxy.capture.quality import Quality
from kproxy.capture.records import Record, Window
from kproxy.convert import machine
from kproxy.convert.job import Job
from kproxy.convert.joining import Joiner, Mend
from kproxy.convert.rows import BATCH_ROWS, Rows
from kproxy.convert.stints import PLACE, Stint, Torn
from kproxy.errors import CaptureError
from kproxy.spark import pieces
from kproxy.spark.places import STINTS, listed
from kproxy.spark.sorters import Sorters
from kproxy.tables import arrays, schema

OPEN_FILES = 64
MAPPED_BYTES = 256 << 20  # pages of files that a task has in its address space
TOGETHER = 32 * 1024  # packets of a connection
FIRST_PACKETS = 64  # of a connection, taken one by one until it is under way
SHORT = 320  # packets: a connection that has no more costs less one by one
HEAD = mapped.HEAD - 16  # bytes of a packet, without the record's own header, that flows look at by column


def whole(unit: Sequence[tuple[int, Job]]) -> Iterator[pa.RecordBatch]:
    """The pieces of some captures. One that cannot be read leaves no rows, but what it failed of."""
    machine.retain()
    with TemporaryDirectory(prefix="kproxy-") as place, machine.seldom_collected():
        folder = Path(place)
        together = Sorters(unit[0][1], folder, ".all")
        for number, job in unit:
            mine = Sorters(job, folder, f".{number}")
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
        self._sorters = Sorters(next(iter(jobs.values())), folder, "")
        self._rows: dict[int, Rows] = {}  # by capture
        self._files = _Files()
        self._capture = -1
        self._connection: int | None = None
        self._met = False  # that connection, in an earlier window
        self._file = -1
        self._waiting: list[np.ndarray] = []  # packets of that connection in that file, TOGETHER about
        self._flows: Flows | None = None
        self._qualities: dict[int, Quality] = {}
        self._gate = [True]  # whether rows are told
        self._joiner: Joiner | None = None  # of that connection
        self._stints: list[Stint] = []  # of that connection
        self._read_bytes = 0
        self._part = -1
        self._torn: dict[int, str] = {}  # captures that one reader is to read, and why
        self._mends: dict[int, list[Mend]] = {}

    def take(self, batch: pa.RecordBatch) -> None:
        numbers = [batch.column(name).to_pylist() for name in ("capture", "connection", "part", "file")]
        for index, (capture, connection, part, file) in enumerate(zip(*numbers, strict=True)):
            if capture in self._torn:
                continue
            try:
                self._take(
                    capture, connection, part, file, batch.column("packets")[index], batch.column("bytes")[index]
                )
            except Torn as fault:
                self._tear(fault)

    def _take(self, capture: int, connection: int, part: int, file: int, packets: Any, inline: Any) -> None:
        if (capture, connection) != (self._capture, self._connection):
            self._begin(capture, connection)
        if file == STINTS:
            self._stints += pickle.loads(packets.as_py())
            return
        if self._joiner is None and self._stints:
            assert self._flows is not None
            self._joiner = Joiner(self._stints, self._flows, self._rows[capture], self._gate)
        if (part, file) != (self._part, self._file) or sum(map(len, self._waiting)) >= TOGETHER:
            self._hand_on()
            self._part, self._file = part, file
        if self._joiner is not None and not self._joiner.at(part // 2, part % 2):
            return
        places = np.frombuffer(packets.as_buffer(), PLACE)
        if inline.is_valid:
            ends = np.cumsum(places["captured"], dtype=np.int64)
            self._packets(places, inline.as_py(), ends - places["captured"])
        else:
            self._waiting.append(places.copy())
            self._read_bytes += int(places["captured"].sum(dtype=np.int64))

    def _tear(self, fault: Torn) -> None:
        self._torn[self._capture] = str(fault)
        self._stints, self._joiner = [], None
        self._waiting.clear()
        self._gate[0] = True
        self._flows = None

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The last connection has ended: the rows, and the counts of the connections."""
        self._end()
        yield pieces.words(self._capture, pieces.READ, self._read_bytes)
        for capture, reason in self._torn.items():
            yield pieces.words(capture, pieces.TORN, reason)
        for capture, mends in self._mends.items():
            yield pieces.words(capture, pieces.MENDS, [astuple(mend) for mend in mends])
        for capture, rows in self._rows.items():
            rows.flush(1)
            rows.note(self._qualities[capture])
            if rows.names:
                yield pieces.words(capture, pieces.NAMES, rows.names.told())
            if rows.logs is not None and (rows.logs.decided or rows.logs.doubted):
                logs = [list(rows.logs.decided.items()), sorted(rows.logs.doubted)]
                yield pieces.words(capture, pieces.LOGS, logs)
        for capture, quality in self._qualities.items():
            yield pieces.words(capture, pieces.COUNTS, listed(quality))
        yield from self._sorters.pieces()

    def _end(self) -> None:
        """The connection is over."""
        if self._flows is None:
            return
        try:
            if self._joiner is None and self._stints:
                self._joiner = Joiner(self._stints, self._flows, self._rows[self._capture], self._gate)
            self._hand_on()
            if self._joiner is None:
                self._flows.finish()
                return
            self._joiner.finish()
            if self._joiner.mends:
                self._mends.setdefault(self._capture, []).extend(self._joiner.mends)
            if self._joiner.rows:
                self._sorters.add(schema.CONNECTIONS, arrays.batch(schema.CONNECTIONS.schema, self._joiner.rows))
        except Torn as fault:
            self._tear(fault)

    def _begin(self, capture: int, connection: int) -> None:
        self._end()
        self._joiner, self._stints, self._part = None, [], -1
        if capture != self._capture:
            job = self._jobs[capture]
            quality = self._qualities[capture] = Quality()
            if self._capture in self._rows:
                self._rows[self._capture].flush(1)
            rows = self._rows_of(capture)
            self._flows = rows.flows(job, quality, first=False, apart=True)
        self._capture, self._connection, self._met = capture, connection, False

    def _rows_of(self, capture: int) -> Rows:
        if capture not in self._rows:
            self._rows[capture] = Rows(
                lambda table, batch: self._sorters.add(table, batch) if self._gate[0] else None,
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
            if self._joiner is not None:
                self._joiner.seen()
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
