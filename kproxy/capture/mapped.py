"""Classic captures in plain files, mapped into memory: records as columns of numbers.

Duty: the sound records of a file, many at a time, none of their bytes copied and nothing but their headers touched.
From the first place on that is not sound (damage, or the end inside a record) the ordinary reader takes over, so that
what is counted there is counted in one place.

Memory: columns of RECORDS records. The pages of a window, LARGE_WINDOW_BYTES at most, are the file's own in the page
cache, and are let go before the next one. The file must not shrink meanwhile, as one of a ring that tcpdump overwrites
does: the kernel would end the process. That is looked for before each window.

Refuses to know what is in a packet.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import MADV_DONTNEED, PAGESIZE, mmap
from struct import Struct
from typing import TYPE_CHECKING, overload

import numpy as np

from kproxy.capture import inorder
from kproxy.capture.quality import NONE, Quality

if TYPE_CHECKING:
    from kproxy.capture.files import Bytes
    from kproxy.capture.pcap import Record, Window

HEAD = 16 + inorder.HEAD  # bytes of a record that say what it is
PEEK = 3 * HEAD  # read at a time: an acknowledgement, and the head of what comes behind it
POPULATE = 22  # MADV_POPULATE_READ of Linux 5.14: all pages in one go cost half of what their faults do
LARGE = 1 << 14  # records on average: to read their heads is cheaper than to map pages for them
RECORDS = 1 << 14
FIRST_RECORDS = 1 << 10  # of the first window: connections that are new in it are taken segment by segment
WINDOW_BYTES = 1 << 26
LARGE_WINDOW_BYTES = 1 << 27  # of records of which only the heads are read


class Columns(Sequence["Record"]):
    """The records of a window by column; as a sequence they are records like all others."""

    __slots__ = ("end", "head", "link", "original", "start", "time_ns")

    def __init__(
        self,
        time_ns: np.ndarray,
        link: int,
        start: np.ndarray,
        end: np.ndarray,
        original: np.ndarray,
        head: np.ndarray,
    ) -> None:
        self.time_ns = time_ns
        self.link = link
        self.start = start
        self.end = end
        self.original = original
        self.head = head  # the first bytes of each packet, and what is behind it where it has fewer

    @classmethod
    def of(cls, window: "Window") -> "Columns | None":
        """A window's records by column; None where they are not of one link type."""
        data, _, records = window
        if isinstance(records, Columns):
            return records
        if len({record[1] for record in records}) != 1 or len(data) < inorder.HEAD:
            return None
        time_ns, link, start, end, original = np.array(records, np.int64).T
        room = len(data) - inorder.HEAD
        head = np.ndarray((room + 1,), f"V{inorder.HEAD}", data, strides=(1,))[np.minimum(start, room)]
        head = head.view(np.uint8).reshape(-1, inorder.HEAD)
        head[start > room] = 0  # of no kind of packet that is looked for
        return cls(time_ns, int(link[0]), start, end, original, head)

    def __len__(self) -> int:
        return len(self.start)

    @overload
    def __getitem__(self, index: int) -> "Record": ...
    @overload
    def __getitem__(self, index: slice) -> "Columns": ...
    def __getitem__(self, index: int | slice) -> "Record | Columns":
        time_ns, start, end, original = self.time_ns[index], self.start[index], self.end[index], self.original[index]
        if isinstance(index, slice):
            return Columns(time_ns, self.link, start, end, original, self.head[index])
        return int(time_ns), self.link, int(start), int(end), int(original)

    def __iter__(self) -> "Iterator[Record]":
        link = self.link
        for time_ns, start, end, original in zip(
            self.time_ns.tolist(), self.start.tolist(), self.end.tolist(), self.original.tolist(), strict=True
        ):
            yield time_ns, link, start, end, original


class Mapped:
    """The records of one classic pcap file, its header already read."""

    def __init__(
        self, source: "Bytes", held: mmap, quality: Quality, order: str, unit: int, link: int, snap: int
    ) -> None:
        self._source = source
        self._held = held
        self._quality = quality
        self._order = order
        self._unit = unit
        self._link = link
        self._snap = snap

    def windows(self) -> "Iterator[Window]":
        from kproxy.capture.pcap import Classic, Window

        held = self._held
        position = 24
        last_ns = NONE
        count, mean = FIRST_RECORDS, 0
        sound = True
        while sound and position + HEAD <= len(held) <= self._source.length():
            records, stop, sound = self._walk(position, count, mean)
            if len(records):
                last_ns = int(records.time_ns[-1])
                mean = (stop - position) // len(records)
                self._source.go_to(stop)
                yield Window(held, 0, records)
                held.madvise(MADV_DONTNEED, first := position // PAGESIZE * PAGESIZE, stop - first)
            position = stop
            count = min(2 * count, RECORDS)
        self._source.go_to(position)
        yield from Classic(
            self._source, self._quality, self._order, self._unit, self._link, self._snap, position, last_ns
        ).windows()

    def _walk(self, position: int, count: int, mean: int) -> tuple[Columns, int, bool]:
        """At most `count` whole records from `position` on, where they stop, and whether sound ones may follow.

        They are expected to have `mean` bytes.
        """
        from kproxy.capture.pcap import SECOND, most_captured

        places, position, heads = (self._read_heads if mean > LARGE else self._map_heads)(position, count, mean)
        fields = np.ascontiguousarray(heads[:, :16]).view(self._order + "u4").astype(np.int64)
        seconds, fraction, captured, original = fields.T
        start = places + 16
        end = start + captured
        wrong = (captured > most_captured(self._snap)) | (fraction >= SECOND // self._unit) | (end > len(self._held))
        good = int(wrong.argmax()) if wrong.any() else len(places)
        time_ns = seconds * SECOND + fraction * self._unit
        columns = Columns(time_ns, self._link, start, end, original, heads[:, 16:])
        if good < len(places):
            return columns[:good], int(places[good]), False
        return columns, position, True

    def _map_heads(self, position: int, count: int, mean: int) -> tuple[np.ndarray, int, np.ndarray]:
        """Where records seem to begin, where the next one would, and their heads."""
        held = self._held
        length = Struct(self._order + "8xI").unpack_from
        found: list[int] = []
        append = found.append
        last = min(len(held) - HEAD, position + WINDOW_BYTES)
        page = position // PAGESIZE * PAGESIZE
        with suppress(OSError):  # an older kernel
            held.madvise(POPULATE, page, min(position + count * mean, len(held)) - page)
        for _ in range(count):
            if position > last:
                break
            append(position)
            position += 16 + length(held, position)[0]
        places = np.array(found, np.int64)
        heads = np.ndarray((len(held) - HEAD + 1,), f"V{HEAD}", held, strides=(1,))[places]
        return places, position, heads.view(np.uint8).reshape(-1, HEAD)

    def _read_heads(self, position: int, count: int, mean: int) -> tuple[np.ndarray, int, np.ndarray]:
        """The same, without a page of the file being mapped."""
        peek = self._source.peek
        length = Struct(self._order + "8xI").unpack_from
        places: list[int] = []
        heads: list[bytes] = []
        last = min(len(self._held) - HEAD, position + LARGE_WINDOW_BYTES)
        piece, at, room = (
            b"",
            0,
            -1,
        )  # bytes of the file, where the next record is in them, and where it would be the last
        for _ in range(count):
            if position > last:
                break
            if at > room:
                piece, at = peek(PEEK, position), 0
                if len(piece) < HEAD:  # the file has shrunk: no record can be as long as this one now seems
                    piece = piece.ljust(HEAD, b"\xff")
                room = len(piece) - HEAD
            places.append(position)
            heads.append(piece[at : at + HEAD])
            size = 16 + length(piece, at)[0]
            position += size
            at += size
        joined = np.frombuffer(b"".join(heads), np.uint8)
        return np.array(places, np.int64), position, joined.reshape(-1, HEAD)
