"""Classic captures in plain files: records as columns of numbers.

Duty: the sound records of a file, many at a time. Small ones are read into one reused buffer, since mapping a page of
the file costs more than copying it; large ones stay in the file and are mapped, and only their heads are read. From the
first unsound place on (damage, or the end inside a record) the ordinary reader takes over, so that one place counts
flaws. A file in a storage cannot be mapped: there large records are copied too.

Memory: the buffer, BUFFER_BYTES, and columns of RECORDS records. The mapped pages of a window, LARGE_WINDOW_BYTES at
most, are the file's own in the page cache, and are unmapped before the next one. A file with large records must not
shrink meanwhile, as a ring file that tcpdump overwrites does: the kernel would end the process. Each window checks for
that first.

Refuses to know contents of packets.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import MADV_DONTNEED, PAGESIZE, mmap
from struct import Struct
from typing import overload

import numpy as np

from kproxy.capture.columns import inorder
from kproxy.capture.formats.files import Bytes
from kproxy.capture.formats.pcap import DAY_S, HEADER_BYTES, Classic
from kproxy.capture.formats.records import SECOND, Record, Window, most_captured
from kproxy.capture.quality import NONE, Quality

HEAD = 16 + inorder.HEAD  # bytes of a record that identify it
PEEK = 3 * HEAD  # bytes read at once: an acknowledgement, and the head of the next record
HUGE = 14  # MADV_HUGEPAGE of Linux
LARGE = 1 << 13  # mean bytes of a record from which on reading its head and mapping it is cheaper than a copy
RECORDS = 1 << 15
FIRST_RECORDS = 1 << 10  # of the first window: connections that are new in it are taken segment by segment
PIECE_BYTES = 1 << 18  # are read at a time, and walked over while they are near
BUFFER_BYTES = 1 << 25
KEPT_BYTES = 1 << 21
LARGE_WINDOW_BYTES = 1 << 29  # of a window whose records are read by their heads; it costs 0.1 ms per connection
FEW = 32  # records that may be larger before they are taken to be large


class Columns(Sequence[Record]):
    """The records of a window by column; as a sequence they are records like all others."""

    __slots__ = ("_heads", "end", "head", "link", "original", "start", "time_ns")

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
        self.head = head  # the first bytes of each packet; if it has fewer, the bytes after it
        self._heads: tuple[inorder.Heads | None] | None = None

    @property
    def heads(self) -> "inorder.Heads | None":
        """The fields of the packets' headers; None if columns cannot have them."""
        if self._heads is None:  # looked at once, however many ask
            self._heads = (inorder.heads(self.link, self.start, self.end, self.head),)
        return self._heads[0]

    @classmethod
    def of(cls, window: Window) -> "Columns | None":
        """A window's records by column; None where they are not of one link type."""
        data, records = window.data, window.records
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
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> "Columns": ...
    def __getitem__(self, index: int | slice) -> "Columns | Record":
        time_ns, start, end, original = self.time_ns[index], self.start[index], self.end[index], self.original[index]
        if isinstance(index, slice):
            return Columns(time_ns, self.link, start, end, original, self.head[index])
        return int(time_ns), self.link, int(start), int(end), int(original)

    def __iter__(self) -> Iterator[Record]:
        link = self.link
        for time_ns, start, end, original in zip(
            self.time_ns.tolist(), self.start.tolist(), self.end.tolist(), self.original.tolist(), strict=True
        ):
            yield time_ns, link, start, end, original


def kept(window: Window, first: int) -> Window:
    """The part of a window that outlives it: all of it, or a copy of its last packets, KEPT_BYTES at most."""
    data, offset, records, is_lasting = window
    if is_lasting or not isinstance(records, Columns):
        return window
    last = records[max(first, int(np.searchsorted(records.start, records.end[-1] - KEPT_BYTES))) :]
    if not len(last):
        return Window(b"", offset, ())
    begin, end = int(last.start[0]), int(last.end[-1])
    columns = Columns(
        last.time_ns.copy(), last.link, last.start - begin, last.end - begin, last.original.copy(), last.head.copy()
    )
    return Window(data[begin:end], offset + begin, columns)


class Mapped:
    """The records of one classic pcap file, its header already read."""

    def __init__(
        self,
        source: Bytes,
        held: mmap | None,
        quality: Quality,
        order: str,
        unit: int,
        link: int,
        snap: int,
        end: int = 0,
    ) -> None:
        """end: where a record begins that is not to be read any more; 0: there is none."""
        self._source = source
        self._held = held  # None: in a storage
        self._length = source.length() if held is None else len(held)
        self._end = end or self._length
        self._quality = quality
        self._order = order
        self._captured = Struct(order + "8xI").unpack_from
        self._unit = unit
        self._link = link
        self._snap = snap
        self._buffer = mmap(-1, BUFFER_BYTES)
        with suppress(OSError):  # a kernel without them
            self._buffer.madvise(HUGE)

    def windows(self, position: int = HEADER_BYTES) -> Iterator[Window]:
        """Records from an offset on at which a record begins."""
        last_ns = NONE
        count, mean = FIRST_RECORDS, 0
        sound = True
        while sound and position < self._end and position + HEAD <= self._length <= self._source.length():
            read = self._mapped if mean > LARGE and self._held is not None else self._copied
            window, sound = read(position, count + 1, last_ns)
            window = self._until_end(window)
            if len(window.records) > sound and not self._is_at_end(window):
                # the header behind it tells whether its length is right
                window = window._replace(records=window.records[:-1])
            if not window.records:
                break
            last_ns, _, _, end, _ = window.records[-1]
            stop = window.offset + end
            mean = (stop - position) // len(window.records)
            self._source.go_to(stop)
            yield window
            if self._held is not None and window.data is self._held:
                self._held.madvise(MADV_DONTNEED, first := position // PAGESIZE * PAGESIZE, stop - first)
            position = stop
            if len(window.records) == count:
                count = min(2 * count, RECORDS)
        if position >= self._end and self._end < self._length:
            if position > self._end:  # the next reader begins inside what was a record here
                self._quality.note("damaged", last_ns)
            return
        self._source.go_to(position)
        for window in Classic(
            self._source, self._quality, self._order, self._unit, self._link, self._snap, position, last_ns
        ).windows():
            mine = self._until_end(window)
            yield mine
            if mine.records:
                last_ns, _, _, end, _ = mine.records[-1]
                position = mine.offset + end
            if len(mine.records) < len(window.records):
                break
        if position > self._end:  # inside a record: the next reader begins there, or the file ended there and has grown
            self._quality.note("damaged" if self._end < self._length else "cut_file", last_ns)

    def _is_at_end(self, window: Window) -> bool:
        """Whether no record is to be read behind a window, or only one that ends with the file."""
        stop = window.offset + window.records[-1][3]
        left = self._length - stop
        if stop >= self._end or not 16 <= left < HEAD:
            return stop >= self._end
        head = bytearray(16)  # read anew: it may be behind the bytes of the window
        is_read = self._source.peek_into(memoryview(head), stop) == len(head)
        return is_read and bool(16 + self._captured(head)[0] == left)

    def _until_end(self, window: Window) -> Window:
        """Without records that begin at the end or behind it."""
        count = len(window.records)
        while count and window.offset + window.records[count - 1][2] - 16 >= self._end:
            count -= 1
        return window if count == len(window.records) else window._replace(records=window.records[:count])

    def _copied(self, position: int, count: int, last_ns: int) -> tuple[Window, bool]:
        """At most `count` whole records from `position` on, in the buffer, and whether sound ones may follow.

        There are fewer where they turn out to be large.
        """
        buffer, peek_into, captured = self._buffer, self._source.peek_into, self._captured
        every = np.ndarray((len(buffer) - HEAD + 1,), f"V{HEAD}", buffer, strides=(1,))
        pieces: list[np.ndarray] = []
        places: list[np.ndarray] = []
        filled = at = found = 0
        with memoryview(buffer) as room:
            while found <= count and (self._held is None or found < 2 or filled <= LARGE * (found + FEW)):
                left = min(PIECE_BYTES, self._end + HEAD - position - filled)
                more = peek_into(room[filled : filled + left], position + filled) if left > 0 else 0
                if not more:
                    break
                filled += more
                last = filled - HEAD
                walked: list[int] = []
                append = walked.append
                while at <= last:
                    append(at)
                    at += 16 + captured(buffer, at)[0]
                if walked:
                    places.append(np.array(walked, np.int64))
                    pieces.append(every[places[-1]])
                    found += len(walked)
        if not found:
            return Window(buffer, position, ()), True
        columns, sound = self._columns(
            np.concatenate(places)[:count], np.concatenate(pieces)[:count], position, last_ns
        )
        if len(columns) and columns.end[-1] > filled:  # behind it there was no room; it is whole in the next window
            columns = columns[:-1]
        return Window(buffer, position, columns, is_lasting=False), sound

    def _mapped(self, position: int, count: int, last_ns: int) -> tuple[Window, bool]:
        """The same, of records that stay where they are."""
        assert self._held is not None
        places, heads = self._read_heads(position, count)
        columns, sound = self._columns(places, heads, 0, last_ns)
        return Window(self._held, 0, columns), sound

    def _columns(self, places: np.ndarray, heads: np.ndarray, offset: int, last_ns: int) -> tuple[Columns, bool]:
        """Records that begin, in data from `offset` on, at places; those before one that is not sound, if there is.

        One with an unlikely time or length is not sound here: the ordinary reader decides.
        """
        heads = heads.view(np.uint8).reshape(-1, HEAD)
        fields = np.ascontiguousarray(heads[:, :16])
        seconds, fraction, captured, original = fields.view(self._order + "u4").astype(np.int64).T
        start = places + 16
        end = start + captured
        wrong = (captured > most_captured(self._snap)) | (fraction >= SECOND // self._unit)
        wrong |= (original == 0) | (captured > original) | (end + offset > self._length)
        before = last_ns // SECOND if last_ns != NONE else seconds[0]
        wrong |= np.abs(np.diff(seconds, prepend=before)) > DAY_S
        time_ns = seconds * SECOND + fraction * self._unit
        columns = Columns(time_ns, self._link, start, end, original, heads[:, 16:])
        return (columns[: int(wrong.argmax())], False) if wrong.any() else (columns, True)

    def _read_heads(self, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Where records seem to begin, and their heads, without a page of the file being mapped."""
        peek, captured = self._source.peek, self._captured
        places: list[int] = []
        heads: list[bytes] = []
        last = min(self._length - HEAD, position + LARGE_WINDOW_BYTES)
        piece = b""
        at, room = 0, -1  # where the next record is in the piece, and where it would be the last
        while position <= last and len(places) < count:
            if at > room:
                piece, at = peek(PEEK, position), 0
                if len(piece) < HEAD:  # the file has shrunk: no record can be as long as this one now seems
                    piece = piece.ljust(HEAD, b"\xff")
                room = len(piece) - HEAD
            places.append(position)
            heads.append(piece[at : at + HEAD])
            size = 16 + captured(piece, at)[0]
            position += size
            at += size
        return np.array(places, np.int64), np.frombuffer(b"".join(heads), np.uint8)
