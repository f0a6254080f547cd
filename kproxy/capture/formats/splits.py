"""Cuts captures into byte ranges at record boundaries, so that tasks can read parts of a large file.

Duty: `ranges` cuts by size alone; `survey`, in a task, finds the first record of a range, from the bytes around it;
`agree` makes splits of the results. Nothing else of the file is read. A boundary is correct if the reader of the split
before it ends exactly there. That reader checks it: otherwise it counts damage, and the file has to be read in one
piece, which is always correct. Compressed files, and files without a found boundary, are one piece, too.

The data that a reader needs from the file's beginning (a pcap header; the blocks of a pcapng file before its first
packet) is the split's `opening`: its bytes are read before the split's own. If later blocks of a pcapng file change the
meaning of packets, the reader of their split reports it (`windows`), and the file is read in one piece too.

Refuses to know Spark, flows and tables.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import Struct, error
from typing import BinaryIO

from kproxy.capture.dissection.packets import Dissector
from kproxy.capture.formats import captures, files, heads, pcap, pcapng
from kproxy.capture.formats.captures import Capture
from kproxy.capture.formats.records import MAX_RECORD, SECOND, Window
from kproxy.capture.formats.storage import LOCAL, Storage, is_remote
from kproxy.capture.quality import Quality
from kproxy.errors import CaptureError

SPLIT_BYTES = 128 << 20
CHAIN = 8  # plausible headers in a row that make a boundary
OVERLAP = 1 << 20  # bytes before a split that may have the first fragments of a datagram that ends in the split
DAY_S = 86_400
# Bytes of a range in a remote storage that are searched for its first record; the larger number if the smaller fails.
LOOKED_AT = (512 << 10, 4 << 20)
FRONT_BYTES = (64 << 10, 1 << 20)  # the same for the first packet of a pcapng file


@dataclass(frozen=True)
class Range:
    """One of `count` ranges of a file, cut by size alone. A single range is the whole file."""

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
    """The result of `survey` for a range; without `sound` the file cannot be split."""

    sound: bool
    first: int = 0  # offset of its first record
    overlap: int = 0  # offset of a record OVERLAP bytes before `first`
    opening: bytes = b""  # the file's opening, for all ranges; only the first range has it
    secrets: bool = False  # the file begins with keys of TLS connections


@dataclass(frozen=True)
class Split:
    """The records of a file from `start` to `end`; `end` 0: the whole file, compressed or not."""

    path: str
    start: int = 0
    end: int = 0
    opening: bytes = b""
    overlap: int = 0  # offset from which to read fragments of datagrams that end in this split
    handed_on: int = 0  # offset from which incomplete datagrams belong to the next split
    last: bool = True  # the last split of its file
    storage: Storage = LOCAL

    @property
    def whole(self) -> bool:
        return not self.end

    @property
    def is_classic(self) -> bool:
        """Whether its file is a plain pcap file."""
        with _there(self.path):
            return not self.whole and (self.opening or self.storage.read(self.path, 0, 4))[:4] in pcap.CLASSIC

    @property
    def before(self) -> "Split":
        """The records before this split whose fragments it needs."""
        return Split(self.path, self.overlap, self.start, self.opening, last=False, storage=self.storage)


def ranges(path: str, split_bytes: int = SPLIT_BYTES, storage: Storage = LOCAL) -> list[Range]:
    """Cut a file; a file that cannot be opened or is compressed is one range, and its survey raises the error."""
    try:
        size = storage.size(path)
        head = storage.read(path, 0, 4)
    except (OSError, CaptureError):
        return [Range(path, 0, 1, 0, storage)]
    count = max(1, size // split_bytes) if head in captures.MAGIC else 1
    return [Range(path, number, count, size, storage) for number in range(count)]


def is_plain(path: str, storage: Storage = LOCAL) -> bool:
    """Whether a file is an uncompressed capture."""
    with _there(path):
        return storage.read(path, 0, 4) in captures.MAGIC


def survey(piece: Range) -> Survey:
    """Find the first record of a range. Raises CaptureError if the file is no capture, or no longer readable."""
    with _there(piece.path):
        return _surveyed(piece)


@contextmanager
def _there(path: str) -> Iterator[None]:
    """Raise CaptureError if a local file disappears while it is read."""
    try:
        yield
    except OSError as fault:
        raise CaptureError(path, f"cannot be read: {fault.strerror or fault}") from fault


def _surveyed(piece: Range) -> Survey:
    if piece.count == 1:
        capture = Capture([piece.path], Quality(), storage=piece.storage)
        next(capture.windows(), None)  # raises if it is no capture; secrets precede packets
        return Survey(False, secrets=bool(capture.secrets))
    read = piece.storage.read
    header = read(piece.path, 0, _Records.begin)
    is_classic = header[:4] in pcap.CLASSIC
    front = pcapng.Front(header, "", [], False) if is_classic else _front(piece)
    if front is None or len(header) < _Records.begin:
        return Survey(False)
    if not piece.number:
        return Survey(True, opening=front.data, secrets=front.has_secrets)
    kind = _Records if is_classic else _Blocks
    if not is_remote(piece.path):
        with Path(piece.path).open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return _found(piece, kind(data, front), 0)
    start = max(len(front.data), piece.start - OVERLAP) & ~3
    seen = Survey(False)
    for size in LOOKED_AT:
        stop = min(piece.size, piece.start + size)
        some = front.data + read(piece.path, start, stop)
        seen = _found(piece, kind(some, front, stop == piece.size), start - len(front.data))
        if seen.sound or stop == piece.size:
            break
    return seen


def _front(piece: Range) -> "pcapng.Front | None":
    for size in FRONT_BYTES:
        if front := pcapng.front(piece.storage.read(piece.path, 0, size)):
            return front
    return None


def _found(piece: Range, walker: "_Records | _Blocks", shift: int) -> Survey:
    """The first records of a range; `shift` is the file offset minus the offset in the walker's bytes."""
    first = walker.boundary(piece.start - shift, piece.stop - shift)
    if first is None:
        return Survey(False)
    before = walker.boundary(max(walker.begin, piece.start - OVERLAP - shift), first + 1)
    return Survey(True, first + shift, (first if before is None else before) + shift)


def agree(pieces: Sequence[Range], surveys: Sequence[Survey]) -> list[Split]:
    """The splits of one file."""
    path, storage, opening = pieces[0].path, pieces[0].storage, surveys[0].opening
    if not all(seen.sound for seen in surveys) or surveys[0].secrets:
        return [Split(path, storage=storage)]
    splits = []
    for number, seen in enumerate(surveys):
        last = number == len(surveys) - 1
        end = handed_on = pieces[-1].size
        if not last:
            end, handed_on = surveys[number + 1].first, surveys[number + 1].overlap
        overlap = seen.overlap if number else 0
        splits.append(Split(path, seen.first, end, opening if number else b"", overlap, handed_on, last, storage))
    return splits


def plan(path: str, split_bytes: int = SPLIT_BYTES, storage: Storage = LOCAL) -> list[Split]:
    """The splits of a file, with all surveys in this process."""
    pieces = ranges(path, split_bytes, storage)
    return agree(pieces, [survey(piece) for piece in pieces])


def windows(
    split: Split,
    quality: Quality,
    secrets: list[bytes] | None = None,
    changes: set[str] | None = None,
    *,
    stop: int = 0,
) -> Iterator[Window]:
    """The records of a split, and the TLS secrets in it; offsets are those of the uncompressed file.

    changes: receives the changes after a pcapng file's first packet, which readers of later splits do not get. stop:
    the end of the split, if its `end` was moved to an earlier offset inside a record, which is read completely.
    """
    secrets = [] if secrets is None else secrets
    if split.whole:
        capture = Capture([split.path], quality, storage=split.storage)
        capture.secrets = secrets
        yield from capture.windows()
        return
    ours = Quality()
    if split.is_classic:
        source = files.Bytes(split.path, storage=split.storage, stop=stop or split.end)
        try:
            yield from captures.windows_of(source, ours, secrets, max(split.start, pcap.HEADER_BYTES), split.end)
        finally:
            source.close()
    else:
        with _there(split.path):
            file = split.storage.open(split.path, split.end)
        with file:
            shift = split.start - len(split.opening)
            piece = _Piece(split, file)
            sections = pcapng.Sections(piece, ours, piece.read(4), secrets)
            for window in sections.windows():
                yield window._replace(offset=window.offset + shift)
            if changes is not None:
                changes |= sections.changes
    for row in ours:
        if split.last or row.kind != "kernel_drops":  # a cumulative count: the last split has the total
            quality.note(row.kind, row.first_ns, count=row.count, size=row.bytes, last_ns=row.last_ns)


class _Piece:
    """The opening and the records of a split, with the methods of `capture.formats.files.Bytes`."""

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
    """The record headers of a classic pcap file, in bytes that begin with its header."""

    begin = pcap.HEADER_BYTES

    def __init__(self, data: mmap | bytes, front: pcapng.Front | None = None, is_end: bool = True) -> None:
        """is_end: the bytes end where the file does."""
        self._data = data
        self._is_end = is_end
        order, unit = pcap.CLASSIC[data[:4]]
        self._order = order
        self._head = Struct(order + "IIII")
        self._fractions = SECOND // unit
        self._snap, link = Struct(order + "II").unpack_from(data, 16)
        self._link = link & pcap.LINK_MASK
        self._most = min(max(self._snap, 1 << 18), MAX_RECORD)
        self._dissect = Dissector(Quality()).segment

    def boundary(self, start: int, stop: int) -> int | None:
        """The first place from `start` on with a record of a TCP segment and a chain of records after it.

        A chain of plausible headers alone was wrong in 2 of 1,000 cases. With the two further conditions, lengths that
        are complete or cut at the snap length, and a TCP segment in the first record, it was wrong in none of 12,000.
        """
        stop = min(stop, len(self._data) - 15)
        for position in heads.places(
            self._data, start, stop, step=1, order=self._order, length_at=8, least=1, most=self._most
        ):
            if self._chained(position) and self._packet(position):
                return position
        return None

    def _chained(self, position: int) -> bool:
        data, size = self._data, len(self._data)
        second = -1
        for _ in range(CHAIN):
            if position + 16 > size:
                return self._is_end
            seconds, fraction, captured, original = self._head.unpack_from(data, position)
            if (
                fraction >= self._fractions
                or not 0 < captured <= self._most
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
    """The blocks of a pcapng file, in bytes that begin with its blocks before the first packet."""

    def __init__(self, data: mmap | bytes, front: pcapng.Front | None = None, is_end: bool = True) -> None:
        """front: those blocks, if they were parsed already; is_end: the bytes end where the file does."""
        self._data = data
        self._is_end = is_end
        front = front or pcapng.front(data)
        assert front is not None
        self.begin = len(front.data)
        self._order = front.order
        self._links = front.links
        self._two = Struct(front.order + "II").unpack_from
        self._one = Struct(front.order + "I").unpack_from
        self._of_packet = {kind: Struct(front.order + text).unpack_from for kind, text in pcapng.PACKETS.items()}
        self._dissect = Dissector(Quality()).segment

    def boundary(self, start: int, stop: int) -> int | None:
        """The first place from `start` on with a packet block of a TCP segment and a chain of known blocks after it.

        A block is aligned to 4 bytes, and has its length at both ends.
        """
        start, stop = start + 3 & ~3, min(stop, len(self._data) - 11)
        for position in heads.places(
            self._data, start, stop, step=4, order=self._order, length_at=4, least=pcapng.LEAST_BLOCK, most=MAX_RECORD
        ):
            is_packet = self._two(self._data, position)[0] in self._of_packet
            if is_packet and self._chained(position) and self._packet(position):
                return position
        return None

    def _chained(self, position: int) -> bool:
        size = len(self._data)
        for _ in range(CHAIN):
            if position + 12 > size:
                return self._is_end
            kind, length = self._two(self._data, position)
            if kind not in pcapng.KNOWN or not 12 <= length <= MAX_RECORD or length & 3:
                return False
            if position + length > size:
                return self._is_end
            if self._one(self._data, position + length - 4)[0] != length:
                return False
            position += length
        return True

    def _packet(self, position: int) -> bool:
        kind, length = self._two(self._data, position)
        try:
            interface, captured, original = self._of_packet[kind](self._data, position + 8)
            link = self._links[interface]
        except (error, IndexError):
            return False
        start = position + pcapng.PACKET_BYTES
        if captured > min(original, length - pcapng.PACKET_BYTES - 4):
            return False
        packet = self._data[start : start + captured]
        segment = self._dissect(link, packet, 0, len(packet), 0)
        return segment is not None and segment[8] < original
