"""Captures cut into byte ranges at record boundaries, so that tasks read the parts of one large file.

Duty: `ranges` cuts by size alone; `survey`, in a task, finds where the first record of a range begins and walks the
record headers up to the next range's first; `agree` takes ranges as splits only if each walk ends exactly where the
next begins. A file where that fails, damaged or not, is read in one piece, which is always right. So is one that is
compressed, or a pcapng file with several sections or packets without a time, whose reading depends on what came before.

What a reader must know from the file's beginning (a pcap header; a pcapng section, its interfaces and statistics) is
the split's `opening`: its bytes are read before the split's own. Refuses to know Spark, flows and tables.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from kproxy.capture import captures, files, pcap, pcapng
from kproxy.capture.captures import Capture
from kproxy.capture.packets import Dissector
from kproxy.capture.quality import Quality
from kproxy.capture.records import MAX_RECORD, SECOND, Window
from kproxy.capture.storage import LOCAL, Storage, is_remote
from kproxy.errors import CaptureError

SPLIT_BYTES = 128 << 20
CHAIN = 8  # plausible headers in a row that make a boundary
OVERLAP = 1 << 20  # before a split, where the first fragments of a datagram that it ends may lie
DAY_S = 86_400
LOOKED_AT = 4 << 20  # of a range in a storage, for its first record
NOT_WALKED = -2


@dataclass(frozen=True)
class Range:
    """Bytes of a file, cut without looking at them; `count` of one file. A single range is the whole file."""

    path: str
    number: int
    count: int
    size: int  # of the file
    storage: Storage = LOCAL

    @property
    def start(self) -> int:
        return self.number * self.size // self.count

    @property
    def stop(self) -> int:
        return (self.number + 1) * self.size // self.count


@dataclass(frozen=True)
class Survey:
    """What a walk over a range's record headers found; without `sound` the file cannot be split."""

    sound: bool
    first: int = 0  # of its records
    arrival: int = 0  # where the walk ended: at the next range's first record, or at the file's end; NOT_WALKED
    overlap: int = 0  # a record's place, OVERLAP before the end; of a range that was not walked, before its beginning
    opening: bytes = b""  # what it adds to that of later ranges
    secrets: bool = False  # it holds keys of TLS connections


@dataclass(frozen=True)
class Split:
    """Records of a file from `start` to `end`, or with `end` 0 the whole file, whatever is around it."""

    path: str
    start: int = 0
    end: int = 0
    opening: bytes = b""
    overlap: int = 0  # where to look for fragments of datagrams that end in this split
    handed_on: int = 0  # from here on, fragments that are left over are the next split's
    last: bool = True  # of its file
    storage: Storage = LOCAL

    @property
    def whole(self) -> bool:
        return not self.end

    @property
    def is_classic(self) -> bool:
        """Whether it is of a plain pcap file."""
        return not self.whole and (self.opening or self.storage.read(self.path, 0, 4))[:4] in pcap.CLASSIC

    @property
    def before(self) -> "Split":
        """The records before this split that it must look at for fragments."""
        return Split(self.path, self.overlap, self.start, self.opening, last=False, storage=self.storage)


def ranges(path: str, split_bytes: int = SPLIT_BYTES, storage: Storage = LOCAL) -> list[Range]:
    """Cut a file; what cannot be opened or is not plain is one range, and its survey says why.

    So is a pcapng file in a storage: what its packets mean may stand anywhere before them, and to look is to read it.
    """
    try:
        size = storage.size(path)
        head = storage.read(path, 0, 4)
    except (OSError, CaptureError):
        return [Range(path, 0, 1, 0, storage)]
    can_be_cut = head in (pcap.CLASSIC if is_remote(path) else captures.MAGIC)
    count = max(1, size // split_bytes) if can_be_cut else 1
    return [Range(path, number, count, size, storage) for number in range(count)]


def first_record(path: str, place: int) -> int | None:
    """Where a record of a plain pcap file begins, at a place or soon after it; None: none is found."""
    with Path(path).open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return _Records(data).boundary(max(place, _Records.begin), min(len(data) - 16, place + LOOKED_AT))


def is_plain(path: str, storage: Storage = LOCAL) -> bool:
    """Whether a file is a capture as it is, without compression around it."""
    return storage.read(path, 0, 4) in captures.MAGIC


def survey(piece: Range) -> Survey:
    """Walk the record headers of a range. Raises CaptureError for what is no capture."""
    if piece.count == 1:
        capture = Capture([piece.path], Quality(), storage=piece.storage)
        next(capture.windows(), None)  # it opens, and secrets come first
        return Survey(False, secrets=bool(capture.secrets))
    if is_remote(piece.path):
        return _look(piece)
    with Path(piece.path).open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        if data[:4] in pcap.CLASSIC:
            return _found(piece, _Records(data), 0, piece.size)
        walker = _Blocks(data)
        first = walker.begin if not piece.number else walker.boundary(piece.start, piece.stop)
        following = Range(piece.path, piece.number + 1, piece.count, piece.size)
        last = following.number == piece.count
        until = len(data) if last else walker.boundary(following.start, following.stop)
        if first is None or until is None:
            return Survey(False)
        arrival, overlap = walker.walk(first, until, last)
        return Survey(arrival >= 0, first if piece.number else 0, arrival, overlap, walker.opening, walker.secrets)


def _look(piece: Range) -> Survey:
    """The same without a walk, of LOOKED_AT bytes: whoever reads a range sees whether it ends where the next begins."""
    header = piece.storage.read(piece.path, 0, _Records.begin)
    if not piece.number:
        return Survey(True, 0, NOT_WALKED, 0, header)
    start = max(_Records.begin, piece.start - OVERLAP)
    stop = min(piece.size, piece.start + LOOKED_AT)
    data = header + piece.storage.read(piece.path, start, stop)
    return _found(piece, _Records(data), start - len(header), stop)


def _found(piece: Range, walker: "_Records", shift: int, stop: int) -> Survey:
    """Where records begin in bytes of a file up to `stop`, which stand by `shift` earlier here."""
    header = walker.header
    if not piece.number:
        return Survey(True, 0, NOT_WALKED, 0, header)
    chain = CHAIN * (16 + walker.most)  # what may be looked at behind a place
    until = stop - shift if stop == piece.size else max(0, stop - shift - chain)
    first = walker.boundary(piece.start - shift, min(piece.stop - shift, until))
    if first is None:
        return Survey(False)
    before = walker.boundary(max(len(header), piece.start - OVERLAP - shift), first + 1)
    return Survey(True, first + shift, NOT_WALKED, (first if before is None else before) + shift)


def agree(pieces: Sequence[Range], surveys: Sequence[Survey]) -> list[Split]:
    """The splits of one file."""
    storage = pieces[0].storage
    ends = [survey.first for survey in surveys[1:]] + [pieces[-1].size]
    if not all(survey.sound and survey.arrival in (end, NOT_WALKED) for survey, end in zip(surveys, ends, strict=True)):
        return [Split(pieces[0].path, storage=storage)]
    if all(survey.arrival == NOT_WALKED for survey in surveys):  # what comes before a range, its own survey saw
        places = [survey.overlap for survey in surveys[1:]] + [pieces[-1].size]
        surveys = [replace(survey, overlap=place) for survey, place in zip(surveys, places, strict=True)]
    splits = []
    opening = b""
    overlap = 0
    for number, (seen, end) in enumerate(zip(surveys, ends, strict=True)):
        last = number == len(surveys) - 1
        splits.append(
            Split(pieces[0].path, seen.first, end, opening, overlap, end if last else seen.overlap, last, storage)
        )
        opening += seen.opening
        overlap = seen.overlap
    return splits


def plan(path: str, split_bytes: int = SPLIT_BYTES, storage: Storage = LOCAL) -> list[Split]:
    """The splits of a file, all of whose surveys are made here."""
    pieces = ranges(path, split_bytes, storage)
    return agree(pieces, [survey(piece) for piece in pieces])


def windows(split: Split, quality: Quality, secrets: list[bytes] | None = None) -> Iterator[Window]:
    """The records of a split, and the TLS secrets in it; offsets are those of the plain file."""
    secrets = [] if secrets is None else secrets
    if split.whole:
        capture = Capture([split.path], quality, storage=split.storage)
        capture.secrets = secrets
        yield from capture.windows()
        return
    ours = Quality()
    if split.is_classic:
        source = files.Bytes(split.path, storage=split.storage)
        try:
            yield from captures.windows_of(source, ours, secrets, max(split.start, pcap.HEADER_BYTES), split.end)
        finally:
            source.close()
    else:
        with split.storage.open(split.path) as file:
            shift = split.start - len(split.opening)
            for window in captures.windows_of(_Piece(split, file), ours, secrets):
                yield window._replace(offset=window.offset + shift)
    for row in ours:
        if split.last or row.kind != "kernel_drops":  # whose counts only grow: the last split has them all
            quality.note(row.kind, row.first_ns, count=row.count, size=row.bytes, last_ns=row.last_ns)


class _Piece:
    """The opening and the records of a split, as `capture.files.Bytes` gives a whole file."""

    def __init__(self, split: Split, file: BinaryIO) -> None:
        self.name = split.path
        self.cut = ""
        self._opening = split.opening
        self._file = file
        self._left = split.end - split.start
        file.seek(split.start)

    def read(self, count: int) -> bytes:
        if self._opening:
            data, self._opening = self._opening[:count], self._opening[count:]
            return data
        data = self._file.read(min(count, self._left))
        self._left -= len(data)
        return data


class _Records:
    """The record headers of a classic pcap file."""

    begin = 24

    def __init__(self, data: mmap | bytes) -> None:
        self._data = data
        self.header = bytes(data[: self.begin])
        order, unit = pcap.CLASSIC[data[:4]]
        self._head = Struct(order + "IIII")
        self._fractions = SECOND // unit
        self._snap, link = Struct(order + "II").unpack_from(data, 16)
        self._link = link & pcap.LINK_MASK
        self.most = min(max(self._snap, 1 << 18), MAX_RECORD)
        self._dissect = Dissector(Quality()).segment

    def boundary(self, start: int, stop: int) -> int | None:
        """The first place from `start` on with a TCP segment behind it and a chain of records after that.

        Plausible headers alone, even in a chain, were wrong 2 times in 1000; with lengths that must be whole or cut at
        the snap length, and a first record that is a packet, never in 12,000.
        """
        for position in range(start, stop):
            if self._chained(position) and self._packet(position):
                return position
        return None

    def _chained(self, position: int) -> bool:
        data, size = self._data, len(self._data)
        second = -1
        for _ in range(CHAIN):
            if position + 16 > size:
                return True
            seconds, fraction, captured, original = self._head.unpack_from(data, position)
            if (
                fraction >= self._fractions
                or not 0 < captured <= self.most
                or (captured != original and (captured != self._snap or original < captured))
                or (second >= 0 and abs(seconds - second) > DAY_S)
            ):
                return False
            second = seconds
            position += 16 + captured
        return True

    def _packet(self, position: int) -> bool:
        _, _, captured, original = self._head.unpack_from(self._data, position)
        packet = self._data[position + 16 : position + 16 + captured]
        segment = self._dissect(self._link, packet, 0, len(packet), 0)
        return segment is not None and segment[8] < original


class _Blocks:
    """The blocks of a pcapng file; `opening` gathers, on a walk, what readers of later blocks must know."""

    begin = 0

    def __init__(self, data: mmap) -> None:
        self._data = data
        self.opening = b""
        self.secrets = False
        order = pcapng.ORDERS.get(data[8:12], "<")
        self._two = Struct(order + "II").unpack_from
        self._one = Struct(order + "I").unpack_from

    def boundary(self, start: int, stop: int) -> int | None:
        return next((place for place in range(start + 3 & ~3, stop, 4) if self._chained(place)), None)

    def walk(self, position: int, until: int, last: bool) -> tuple[int, int]:
        size = len(self._data)
        overlap = begin = position
        near = until - OVERLAP
        opening = []
        while position < until:
            if position + 12 > size:
                return (until, overlap) if last else (-1, 0)
            kind, length = self._two(self._data, position)
            if position + length > size and length <= MAX_RECORD:
                return (until, overlap) if last else (-1, 0)
            alone = kind == pcapng.SIMPLE or (kind == pcapng.SECTION and position)
            sane = 12 <= length <= MAX_RECORD and not length & 3
            if alone or not sane or self._one(self._data, position + length - 4)[0] != length:
                return -1, 0
            if kind in (pcapng.INTERFACE, pcapng.STATISTICS) or (kind == pcapng.SECTION and not begin):
                opening.append(self._data[position : position + length])
            self.secrets |= kind == pcapng.SECRETS
            if position < near:
                overlap = position
            position += length
        self.opening = b"".join(opening)
        return position, overlap

    def _chained(self, position: int) -> bool:
        size = len(self._data)
        for _ in range(CHAIN):
            if position + 12 > size:
                return True
            kind, length = self._two(self._data, position)
            if kind not in pcapng.KNOWN or not 12 <= length <= MAX_RECORD or length & 3:
                return False
            if position + length > size:
                return True
            if self._one(self._data, position + length - 4)[0] != length:
                return False
            position += length
        return True
