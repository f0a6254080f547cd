"""Packets of connections that no reader of a part claimed -> rows: one connection after the other, with its excerpts.

Duty: `Deferred` takes the excerpts of each connection, and its packets by their places, in the capture's order. It
reads their bytes from the files, and passes them to the same Flows and Session as everywhere. A conflicting connection
is recorded (`Deferred.conflicting`), and the next one is read; an unsplittable capture (`Deferred.unsplittable`) ends
the work.

Memory: one connection; MAPPED_BYTES of the captures' own pages.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from mmap import ACCESS_READ, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np

from kproxy.capture.columns import mapped
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.dissection.keys import Pair
from kproxy.capture.formats.records import Record, Window
from kproxy.capture.quality import Quality
from kproxy.convert.job import Job
from kproxy.convert.parts.joining import Correction, Joiner
from kproxy.convert.parts.reader import Add, Conflicting, Excerpt, Unsplittable
from kproxy.convert.rows import BATCH_ROWS, Rows
from kproxy.errors import CaptureError

OPEN_FILES = 64
MAPPED_BYTES = 256 << 20  # pages of files in the address space
TOGETHER = 32 * 1024  # packets of a connection
FIRST_PACKETS = 64  # packets per step at the beginning of a connection, before it is seen in a window
SHORT = 320  # a connection of up to so many packets is cheaper one by one
HEAD = mapped.HEAD - 16  # bytes of a packet, without the record header, that flows read by column


class Deferred:
    """The connections of one capture. `begin` each, `take` its packets; `finish` after the last one."""

    def __init__(self, job: Job, add: Add) -> None:
        self.quality = Quality()
        self.corrections: list[Correction] = []
        self.connections: list[dict[str, Any]] = []  # rows of connections that were joined
        self.read_bytes = 0
        self.unsplittable = ""  # why one reader must read the capture
        self.conflicting: dict[Pair, str] = {}  # connections that one reader must read, with the reason
        self._is_conflicting = False  # the current connection
        self._job = job
        self._gate = [True]  # whether rows are emitted
        self.rows = Rows(
            lambda table, batch: add(table, batch) if self._gate[0] else None, job.records, keeps=job.is_known
        )
        self._flows = self.rows.flows(job, self.quality, first=False, apart=True)
        self._files = _Files()
        self._is_open = False
        self._excerpts: list[Excerpt] = []  # of the current connection
        self._joiner: Joiner | None = None
        self._met = False  # whether an earlier window had packets of the connection
        self._where = (-1, -1, -1)  # part, phase and file of the queued packets
        self._waiting: list[np.ndarray] = []  # queued packets, about TOGETHER

    def begin(self, excerpts: Sequence[Excerpt]) -> None:
        """Begin a connection with its excerpts."""
        self._end()
        self._joiner, self._excerpts, self._where = None, list(excerpts), (-1, -1, -1)
        self._met, self._is_open, self._is_conflicting = False, True, False

    def say(self, excerpts: Sequence[Excerpt]) -> None:
        """Add excerpts of other readers, before the connection's packets."""
        self._excerpts += excerpts

    def take(self, part: int, phase: int, file: int, places: np.ndarray, inline: bytes | None = None) -> None:
        """Take the connection's next packets: their places in a file of the capture, and their bytes, if available."""
        if self.unsplittable or self._is_conflicting:
            return
        try:
            self._take((part, phase, file), places, inline)
        except (Unsplittable, CaptureError) as fault:  # a reader of the whole capture reports the error
            self._tear(fault)

    def finish(self) -> None:
        """End the last connection, and emit its rows."""
        self._end()
        if not self.unsplittable:
            self.rows.flush(1)
            self.rows.note(self.quality)

    def _take(self, where: tuple[int, int, int], places: np.ndarray, inline: bytes | None) -> None:
        self._join()
        if where != self._where or sum(map(len, self._waiting)) >= TOGETHER:
            self._hand_on()
            self._where = where
        if self._joiner is not None and not self._joiner.at(*where[:2]):
            return
        if inline is not None:
            ends = np.cumsum(places["captured"], dtype=np.int64)
            self._packets(places, inline, ends - places["captured"])
        else:
            self._waiting.append(places)
            self.read_bytes += int(places["captured"].sum(dtype=np.int64))

    def _join(self) -> None:
        if self._joiner is None and self._excerpts:
            self._joiner = Joiner(self._excerpts, self._flows, self.rows, self._gate)

    def _end(self) -> None:
        """End the connection."""
        if not self._is_open or self.unsplittable or self._is_conflicting:
            return
        try:
            self._join()
            self._hand_on()
            if self._joiner is None:
                self._flows.finish()
            else:
                self._joiner.finish()
                self.corrections += self._joiner.corrections
                self.connections += self._joiner.rows
        except (Unsplittable, CaptureError) as fault:  # a reader of the whole capture reports the error
            self._tear(fault)

    def _tear(self, fault: Unsplittable | CaptureError) -> None:
        if isinstance(fault, Conflicting):
            self.conflicting.update(dict.fromkeys((excerpt.pair for excerpt in self._excerpts), str(fault)))
            self._is_conflicting = True
            self._flows.finish()
            self.rows.continued.clear()
        else:
            self.unsplittable = str(fault)
        self._excerpts, self._joiner = [], None
        self._waiting.clear()
        self._gate[0] = True

    def _hand_on(self) -> None:
        """Pass on the queued packets, many at once: the fixed cost of a window dominates small windows."""
        if self._waiting:
            packets = np.concatenate(self._waiting)
            self._waiting.clear()
            path = self._job.paths[self._where[2]]
            end = int((packets["offset"] + packets["captured"]).max())
            try:
                data = self._files.open(path)
                size = os.stat(path).st_size  # noqa: PTH116 - a path costs more
            except (OSError, ValueError) as fault:  # an empty file cannot be mapped
                raise CaptureError(path, f"it has changed while it was read: {fault}") from fault
            if size < max(end, len(data)):  # reading beyond the end of a mapped file raises SIGBUS
                raise CaptureError(path, "it has become shorter while it was read")
            self._packets(packets, data, packets["offset"])

    def _packets(self, packets: np.ndarray, data: mmap | bytes, starts: np.ndarray) -> None:
        """Pass packets of the connection, at offsets `starts` of `data`, to the flows."""
        done = 0
        while done < len(packets):
            here = packets[done : done + (TOGETHER if self._met or len(packets) <= SHORT else FIRST_PACKETS)]
            records = _records(here, data, starts[done : done + len(here)])
            self._flows.window(Window(data, 0, records))
            self._met = True
            if self._joiner is not None:
                self._joiner.seen()
            done += len(here)
            self.rows.flush(BATCH_ROWS)
        if isinstance(data, mmap):
            self._files.looked_at(min(int(starts.max() - starts.min()), len(packets) * PAGESIZE))


def _records(packets: np.ndarray, data: mmap | bytes, start: np.ndarray) -> Sequence[Record]:
    """Return packets as columns; packets of several link types, or at the end of the data, as single records."""
    links, end = packets["link"], start + packets["captured"]
    if (links == links[0]).all() and start.max() + HEAD <= len(data):
        heads = np.ndarray((len(data) - HEAD + 1,), f"V{HEAD}", data, strides=(1,))[start].view(np.uint8)
        return Columns(packets["time_ns"], int(links[0]), start, end, packets["original"], heads.reshape(-1, HEAD))
    columns = packets["time_ns"], links, start, end, packets["original"]
    return list(zip(*(column.tolist() for column in columns), strict=True))


class _Files:
    """The most recently read files, mapped; a mapping is freed when no connection refers to it any more."""

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
        """Count mapped bytes that were read, and release the pages at MAPPED_BYTES: they count as the process's memory.

        They are not released at once, since the same pages hold packets of other connections.
        """
        self._mapped_bytes += size
        if self._mapped_bytes >= MAPPED_BYTES:
            for data in self._open.values():
                data.madvise(MADV_DONTNEED)
            self._mapped_bytes = 0
