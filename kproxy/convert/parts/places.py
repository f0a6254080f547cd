"""The places of a capture's packets, by connection, for packets that another task may have to read.

Duty: `Packets` records the connection, the time and the offset of each packet; `grouped` groups packets by connection.
Memory: 32 bytes per packet, 40 if their bytes go to a spool.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kproxy.capture.columns.mapped import Columns
from kproxy.capture.dissection.keys import Pair, pair_of
from kproxy.capture.dissection.packets import Dissector
from kproxy.capture.dissection.uncut import Lengths
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import Quality

PLACE = np.dtype(
    [("offset", "<i8"), ("time_ns", "<i8"), ("link", "<i4"), ("captured", "<i4"), ("original", "<i4")]
)  # of a packet
WARM, MAIN = 0, 1  # phases: before a reader's claim, and after it
MEASURE = 128 * 1024  # packets that are grouped at a time
MEASURE_BYTES = 8 << 20  # bytes of packets that are grouped at a time, if they are in a spool


class Packets:
    """The places of a part's packets, by connection."""

    def __init__(self, spool: BinaryIO | None) -> None:
        self.pairs: list[Pair] = []
        self.has_fragments = False  # IP fragments, whose rest may be anywhere
        self.lengths = Lengths()
        self._numbers: dict[bytes, int] = {}
        self._dissector = _Dissector(Quality(), reads_icmp=True)
        self._spool = spool
        self._spooled = 0
        self._found: list[tuple[np.ndarray, np.ndarray, np.ndarray, int, int]] = []
        self.times_ns = np.zeros(0, np.int64)  # of the last added window
        self.size = 0  # its bytes

    def add(self, window: Window, file: int, phase: int) -> None:
        records = window.records
        columns = Columns.of(window) if len(records) else None
        owners = np.full(len(records), -1, np.int32)
        others: Sequence[int] = range(len(records))
        if columns is not None:
            heads = columns.heads
            if heads is not None:
                owners[heads.index] = np.array([self._number(key) for key in heads.keys], np.int32)[heads.lane]
                others = np.flatnonzero(owners < 0).tolist()
        for index in others:
            time_ns, link, start, end, _ = records[index]
            segment = self._dissector.segment(link, window.data, start, end, time_ns)
            if segment is not None:
                owners[index] = self._number(segment[1])
        self.has_fragments |= self._dissector.met
        places = np.empty(len(records), PLACE)
        if columns is not None:
            places["time_ns"], places["link"], places["original"] = columns.time_ns, columns.link, columns.original
            places["offset"], places["captured"] = columns.start + window.offset, columns.end - columns.start
        elif len(records):
            time_ns, link, start, end, original = np.array(list(records), np.int64).T
            places["time_ns"], places["link"], places["original"] = time_ns, link, original
            places["offset"], places["captured"] = start + window.offset, end - start
        spooled = places["offset"]
        if self._spool is not None and len(places):
            spooled = self._spooled + np.cumsum(places["captured"], dtype=np.int64) - places["captured"]
            starts = (places["offset"] - window.offset).tolist()
            for start, size in zip(starts, places["captured"].tolist(), strict=True):
                self._spool.write(window.data[start : start + size])
            self._spooled = int(spooled[-1] + places["captured"][-1])
        self._found.append((owners, places, spooled, file, phase))
        self.lengths = self.lengths.with_(Lengths.of(places["captured"], places["original"]))
        self.times_ns, self.size = places["time_ns"], int(places["captured"].sum(dtype=np.int64)) + 16 * len(places)

    def of(self, phases: dict[Pair, int]) -> Iterator[tuple[int, int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield packets of some connections, each from a phase on, by window.

        A window is (file, phase, indices in `pairs`, places, offsets in the spool or in the file).
        """
        least = np.array([phases.get(pair, MAIN + 1) for pair in self.pairs] + [MAIN + 1])
        for owners, places, spooled, file, phase in self._found:
            mine = np.flatnonzero(least[owners] <= phase)
            if len(mine):
                yield file, phase, owners[mine], places[mine], spooled[mine]

    def _number(self, key: bytes) -> int:
        number = self._numbers.get(key)
        if number is None:
            pair = pair_of(key)
            number = self._numbers[pair[0]] = self._numbers[pair[1]] = len(self.pairs)
            self.pairs.append(pair)
        return number


class _Dissector(Dissector):
    met = False

    def _fragment(self, name: bytes, *rest: Any) -> Any:
        self.met = True
        return super()._fragment(name, *rest)


class Group(NamedTuple):
    """Packets of one phase and file, grouped by connection."""

    phase: int
    file: int
    owners: np.ndarray  # index in `Packets.pairs` of each connection
    edges: np.ndarray  # index of each connection's first packet in the next two arrays, and their length
    places: np.ndarray
    spooled: np.ndarray


def grouped(packets: Packets, deferred: dict[Pair, int], most_bytes: int = 1 << 62) -> Iterator[Group]:
    """Yield groups of packets of connections, each from a phase on, MEASURE or `most_bytes` of them at a time."""
    waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    size = count = 0
    where = (-1, -1)
    for file, phase, *found in packets.of(deferred):
        if waiting and ((phase, file) != where or count >= MEASURE or size >= most_bytes):
            yield _together(*where, waiting)
            waiting, size, count = [], 0, 0
        where = phase, file
        waiting.append((found[0], found[1], found[2]))
        count += len(found[1])
        size += int(found[1]["captured"].sum(dtype=np.int64))
    if waiting:
        yield _together(*where, waiting)


def _together(phase: int, file: int, waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Group:
    owners, places, spooled = (np.concatenate([each[index] for each in waiting]) for index in range(3))
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    edges = np.concatenate(([0], np.flatnonzero(np.diff(owners)) + 1, [len(owners)]))
    return Group(phase, file, owners[edges[:-1]], edges, places[order], spooled[order])


def part_of(window: Window, begin: int, end: int | None = None) -> Window:
    return window if not begin and end is None else window._replace(records=window.records[begin:end])


def index_at(window: Window, place: int) -> int:
    """Return the index of the first record that begins at an offset of the file or after it."""
    start = place + 16 - window.offset
    if isinstance(window.records, Columns):
        return int(np.searchsorted(window.records.start, start))
    return bisect_left(window.records, start, key=lambda record: record[2])
