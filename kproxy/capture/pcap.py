"""Capture files as packet records, in the order of the file, in bounded memory.

Duty: classic pcap (both byte orders, micro- and nanoseconds) and pcapng, read in windows: a `Window` is a piece of the
file with the records that lie whole in it. A record is a plain tuple (time_ns, link type, start, end, original length);
start and end are offsets of its captured bytes in the window's data, and `window.offset + start` is where they lie in
the (decompressed) file. Memory: one window of 512 KiB and the records in it, or one record if that is larger; plain
files of classic pcap are read by column instead (mapped.py).

A file that ends inside a record, and a record's header that makes no sense, are flaws of the capture, not errors: they
are counted, and reading goes on at the next place where records follow each other. Only a file that is no capture at
all raises `CaptureError`.

Refuses to know what is in a packet.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from math import inf
from mmap import mmap
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from kproxy.capture import files
from kproxy.capture.quality import NONE, Quality
from kproxy.errors import CaptureError

Record = tuple[int, int, int, int, int]  # time_ns, link type, start, end, original length

WINDOW = 1 << 19  # larger ones cost page faults
MAX_RECORD = 1 << 24  # libpcap allows 256 KiB for all but USB; a broken length must not become an allocation
SECOND = 1_000_000_000

LINK_MASK = 0x03FF_FFFF  # above it: the length of a frame check sequence


class Window(NamedTuple):
    """A piece of a capture."""

    data: bytes | mmap
    offset: int  # of data[0] in the plain file
    records: Sequence[Record]
    is_lasting: bool = True  # views of `data` stay valid; else until the next window is asked for


class Capture:
    """One capture: a file, or rotated files one after the other. Iterate `windows()` once."""

    def __init__(
        self, paths: Sequence[Path | str], quality: Quality, *, follow: Callable[[], bool] | None = None
    ) -> None:
        self.quality = quality
        self.paths = list(paths)
        self.size = sum(_size(path) for path in paths if str(path) != files.STDIN)
        self._follow = follow
        self.secrets: list[bytes] = []  # TLS key logs that a pcapng file carries
        self._before = 0
        self._bytes: files.Bytes | None = None

    @property
    def consumed(self) -> int:
        """Bytes of the files read so far, for a progress bar; of compressed files the compressed ones."""
        return self._before + (self._bytes.consumed if self._bytes else 0)

    def windows(self) -> Generator[Window, None, None]:
        for index, path in enumerate(self.paths):
            last = index == len(self.paths) - 1
            self._bytes = files.Bytes(path, follow=self._follow if last else None)
            try:
                told = self.quality.count("cut_file")
                yield from windows_of(self._bytes, self.quality, self.secrets)
                if self._bytes.cut and self.quality.count("cut_file") == told:
                    self.quality.note("cut_file")  # between two records
            finally:
                self._bytes.close()
            self._before += self._bytes.consumed
            self._bytes = None


def in_time(paths: Sequence[str]) -> list[str]:
    """Files of one capture by their first packets: `tcpdump -C` numbers them without zeros before, so names mislead."""
    # what is no file, like a pipe, can be read but once
    return sorted(paths, key=_begin_ns) if all(map(os.path.isfile, paths)) else list(paths)


def _begin_ns(path: str) -> float:
    """When a file begins; one without packets, and one that its reader will complain of, comes last."""
    windows = Capture([path], Quality()).windows()
    try:
        return next((window.records[0][0] for window in windows), inf)
    except CaptureError:
        return inf
    finally:
        windows.close()


def _size(path: Path | str) -> int:
    """Of a file that can be looked at; who opens it tells why another cannot."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def windows_of(source: files.Source, quality: Quality, secrets: list[bytes]) -> Iterator[Window]:
    """The records of one file, told by its first bytes."""
    head = _exactly(source, 4)
    if head in CLASSIC:
        order, unit = CLASSIC[head]
        rest = _exactly(source, 20)
        if len(rest) < 20:
            raise CaptureError(source.name, "a pcap file that ends inside its header: there is nothing to read", 4)
        snap, link = Struct(order + "12xII").unpack(rest)
        if isinstance(source, files.Bytes) and (held := source.mapped()) is not None:
            from kproxy.capture.mapped import Mapped

            return Mapped(source, held, quality, order, unit, link & LINK_MASK, snap).windows()
        return Classic(source, quality, order, unit, link & LINK_MASK, snap).windows()
    if head == SECTION:
        from kproxy.capture.pcapng import Sections

        return Sections(source, quality, head, secrets).windows()
    if not head:
        raise CaptureError(source.name, "the file is empty" + (f" ({source.cut})" if source.cut else ""))
    raise CaptureError(source.name, _what_is(head), 0)


CLASSIC = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
SECTION = b"\x0a\x0d\x0d\x0a"
MAGIC = frozenset((*CLASSIC, SECTION))  # how plain captures begin


def _what_is(head: bytes) -> str:
    known = {
        b"\x34\xcd\xb2\xa1": "a pcap file in Kuznetzov's modified format",
        b"\xa1\xb2\xcd\x34": "a pcap file in Kuznetzov's modified format",
        b"snoo": "a snoop file",
        b"PK\x03\x04": "a zip archive",
        b"BZh9": "a bzip2 file",
        b"\xfd7zX": "an xz file",
    }
    if head in known:
        return f"{known[head]}, not read yet: unpack it, or convert it with `editcap -F pcapng`"
    return f"no capture file (it begins with {head.hex(' ')}): pcap or pcapng is needed, plain, gzip, zstd or lz4"


def _exactly(source: files.Source, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := source.read(count - len(data))):
        data += more
    return data


def most_captured(snap: int) -> int:
    """The largest record that is believed of a file with this snap length."""
    return min(max(snap, 1 << 18), MAX_RECORD)


class Classic:
    """The records of one classic pcap file from `start` on, where one of `last_ns` ended, or the file's header."""

    def __init__(
        self,
        source: files.Source,
        quality: Quality,
        order: str,
        unit: int,
        link: int,
        snap: int,
        start: int = 24,
        last_ns: int = NONE,
    ) -> None:
        self._source = source
        self._quality = quality
        self._head = Struct(order + "IIII")
        self._unit = unit  # nanoseconds per unit of the fraction
        self._link = link
        self._snap = snap
        self._most = most_captured(snap)
        self._start = start
        self._last_ns = last_ns

    def windows(self) -> Iterator[Window]:
        data = b""
        offset = self._start  # of data[0]
        last_ns = self._last_ns
        damaged_from = NONE  # where in the file the records stopped making sense
        while True:
            more = self._source.read(WINDOW)
            data += more
            position = 0
            records: list[Record] = []
            while True:
                if damaged_from != NONE:
                    position, found = self._next_sound(data, position, last_ns, not more)
                    if not found:
                        break
                    self._quality.note("damaged", last_ns, size=offset + position - damaged_from)
                    damaged_from = NONE
                position, sound = self._walk(data, position, records)
                if records:
                    last_ns = records[-1][0]
                if sound:
                    break
                damaged_from = offset + position
                position += 1
            if records:
                yield Window(data, offset, records)
            if not more:
                break
            data = data[position:]
            offset += position
        if damaged_from != NONE:
            self._quality.note("damaged", last_ns, size=offset + len(data) - damaged_from)
        elif position < len(data):
            self._quality.note("cut_file", last_ns, size=len(data) - position)

    def _walk(self, data: bytes, position: int, records: list[Record]) -> tuple[int, bool]:
        """Append the whole records from `position` on; returns where it stopped, and whether that place is sound."""
        unpack = self._head.unpack_from
        append = records.append
        link, unit, most = self._link, self._unit, self._most
        second = SECOND // unit
        size = len(data)
        last = size - 16
        while position <= last:
            seconds, fraction, captured, original = unpack(data, position)
            if captured > most or fraction >= second:
                return position, False
            start = position + 16
            end = start + captured
            if end > size:
                break
            append((seconds * SECOND + fraction * unit, link, start, end, original))
            position = end
        return position, True

    def _next_sound(self, data: bytes, position: int, last_ns: int, final: bool) -> tuple[int, bool]:
        """The next place from which plausible records follow each other; else (how far it looked, False)."""
        for start in range(position, len(data) - 16):
            chained = self.plausible(data, start, last_ns)
            if chained is None:
                if not final:
                    return start, False  # more of the file decides
                chained = True
            if chained:
                return start, True
        return max(position, len(data) - 16), False

    def plausible(self, data: bytes, position: int, last_ns: int) -> bool | None:
        """Whether records begin at `position`: four that chain, each near in time and whole or cut at the snap length.

        None: the data ends before that is clear.
        """
        seconds = last_ns // SECOND
        for _ in range(4):
            if position + 16 > len(data):
                return None
            second, fraction, captured, original = self._head.unpack_from(data, position)
            if fraction >= SECOND // self._unit or not 14 <= captured <= self._most:
                return False
            if captured != original and captured != self._snap:
                return False
            if last_ns != NONE and abs(second - seconds) > 86400:
                return False
            seconds = second
            last_ns = 0
            position += 16 + captured
        return True
