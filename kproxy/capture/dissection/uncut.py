"""Completes packets that the snap length cut, if the file has a longer copy.

Duty: a file with several snap lengths, such as the merged captures of two interfaces or two machines, may have a packet
twice, cut and complete. The cut packet then gets the bytes of its longest copy within NEAR_BYTES of the file and
SAME_PACKET_NS, and keeps its place and time; the copy stays and counts as a copy. TCP options are not compared if they
were cut. Without such a copy, the packet gets its bytes from complete segments of other sizes, into which a network
card or the kernel cut it or joined it (TSO, GSO, GRO), if they have all of its bytes. Windows in which no packet is
longer than a cut one, as in all captures with one snap length, stay unchanged.

From the first cut packet on, a window is delayed until the next NEAR_BYTES are read. Memory: the windows of these bytes
and of the NEAR_BYTES before; the identities of their packets, if some are cut and some longer. Refuses to know whether
a packet was captured twice or retransmitted.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from mmap import mmap
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kproxy.capture.columns.inorder import HEAD, OPTIONS
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.connections.reassembly import MASK
from kproxy.capture.dissection.copies import row_of
from kproxy.capture.dissection.packets import SAME_PACKET_NS, Dissector
from kproxy.capture.formats.records import Record, Window
from kproxy.capture.quality import Quality

NEAR_BYTES = 1 << 22  # most captured bytes between a cut packet and its copy
_NONE = (1 << 31) - 1  # more bytes than any packet has
FEW = 8  # segments before a byte that are searched for it
_HEADER_BYTES = 60  # longest TCP header


class Lengths(NamedTuple):
    """Captured bytes of packets."""

    shortest_cut: int = _NONE  # the minimum of the cut packets
    longest: int = 0

    @classmethod
    def of(cls, captured: np.ndarray, original: np.ndarray) -> "Lengths":
        is_cut = captured < original
        return cls(int(captured.min(where=is_cut, initial=_NONE)), int(captured.max(initial=0)))

    @property
    def has_cut(self) -> bool:
        return self.shortest_cut < _NONE

    @property
    def has_longer(self) -> bool:
        """Whether a packet is longer than a cut one."""
        return self.shortest_cut < self.longest

    def with_(self, other: "Lengths") -> "Lengths":
        """The lengths of both sets of packets together."""
        return Lengths(min(self.shortest_cut, other.shortest_cut), max(self.longest, other.longest))


def uncut(windows: Iterable[Window]) -> Iterator[Window]:
    """The windows, with cut packets replaced by longer copies of them."""
    held: deque[_Held] = deque()  # windows that are delayed
    passed: deque[_Held] = deque()  # windows that were passed on, within NEAR_BYTES before them
    place = 0
    is_cut = False
    for window in windows:
        is_cut = is_cut or _lengths(window).has_cut
        if not is_cut or not window.records:
            if not held:
                yield window
            continue
        held.append(_Held(_kept(window), place))
        place = held[-1].end
        while held and held[0].end + NEAR_BYTES <= place:
            yield _next(held, passed)
    while held:
        yield _next(held, passed)


def _lengths(window: Window) -> Lengths:
    records = window.records
    if isinstance(records, Columns):
        return Lengths.of(records.end - records.start, records.original)
    _, _, start, end, original = np.array(records, np.int64).reshape(-1, 5).T
    return Lengths.of(end - start, original)


@dataclass(frozen=True, eq=False)
class _Packet:
    """A TCP packet."""

    index: int
    data: bytes | mmap
    place: int
    record: Record
    captured: int  # bytes of payload; negative: cut within TCP's header
    is_cut: bool
    whole: bytes  # its identity
    without_options: bytes
    key: bytes
    seq: int
    length: int  # of its payload
    payload_at: int  # in the packet

    @property
    def payload(self) -> bytes:
        begin, end = self.record[2] + self.payload_at, self.record[3]
        return bytes(self.data[begin : min(end, begin + self.length)])

    @property
    def identity(self) -> bytes:
        return self.without_options if self.captured < 0 else self.whole

    def is_near(self, other: "_Packet") -> bool:
        is_there = abs(self.place - other.place) <= NEAR_BYTES
        return is_there and abs(self.record[0] - other.record[0]) <= SAME_PACKET_NS


_seq = attrgetter("seq")


class _Held:
    """A window that is delayed until its neighbours are read, or was passed on."""

    def __init__(self, window: Window, begin: int) -> None:
        self.window = window
        self.begin = begin
        self._shift = begin - window.records[0][2]
        self.end = self._shift + window.records[-1][3]
        self.lengths = _lengths(window)

    @cached_property
    def packets(self) -> list[_Packet]:
        dissect = Dissector(Quality()).segment
        data, found = self.window.data, []
        for index, record in enumerate(self.window.records):
            time_ns, link, start, end, wire_bytes = record
            packet = bytes(data[start:end])
            padded = packet + bytes(_HEADER_BYTES) if len(packet) < wire_bytes else packet
            segment = dissect(link, padded, 0, len(padded), time_ns, wire_bytes)
            if segment is None or segment[0] is not padded:  # no TCP, or a datagram of several fragments
                continue
            captured, row = len(packet) - segment[6], row_of(segment)
            without_options = segment[1] + row[: OPTIONS.start] + row[OPTIONS.stop :]
            found.append(
                _Packet(
                    index,
                    data,
                    self._shift + start,
                    record,
                    captured,
                    captured < segment[8],
                    segment[1] + row,
                    without_options,
                    segment[1],
                    segment[2],
                    segment[8],
                    segment[6],
                )
            )
        return found

    @cached_property
    def longest_of(self) -> dict[bytes, _Packet]:
        """The packet with most captured bytes, by identity with and without options."""
        found: dict[bytes, _Packet] = {}
        for packet in self.packets:
            for identity in (packet.without_options, packet.whole):
                if identity not in found or packet.captured > found[identity].captured:
                    found[identity] = packet
        return found

    @cached_property
    def complete(self) -> dict[bytes, list[_Packet]]:
        """The complete segments of each direction, by sequence number."""
        found: dict[bytes, list[_Packet]] = {}
        for packet in self.packets:
            if packet.length and not packet.is_cut:
                found.setdefault(packet.key, []).append(packet)
        for packets in found.values():
            packets.sort(key=_seq)
        return found

    def holding(self, packet: _Packet, seq: int) -> Iterator[_Packet]:
        """Complete segments of a packet's direction that contain the byte of a sequence number, FEW at most."""
        packets = self.complete.get(packet.key, [])
        last = bisect_right(packets, seq, key=_seq)
        for place in range(last - 1, max(last - FEW, -len(packets)) - 1, -1):  # below 0: before numbers begin at 0
            if seq - packets[place].seq & MASK < packets[place].length:
                yield packets[place]


def _next(held: deque[_Held], passed: deque[_Held]) -> Window:
    """Return the first delayed window, with completed packets, and move it to the passed ones."""
    first = held.popleft()
    passed.append(first)
    while passed[0].end + NEAR_BYTES < first.begin:
        passed.popleft()
    return _uncut(first, [*passed, *held])


def _uncut(held: _Held, around: list[_Held]) -> Window:
    """A window whose cut packets are replaced by their longest copies in the windows around it."""
    longer = [each for each in around if each.lengths.longest > held.lengths.shortest_cut]
    found = {
        packet: copy
        for packet in (held.packets if longer else ())
        if packet.is_cut and (copy := _longest_copy(packet, longer) or _joined(packet, longer)) is not None
    }
    if not found:
        return held.window
    window = held.window
    if any(copy.data is not window.data for copy in found.values()):
        window = _with_room(window)
    records = list(window.records)
    more: list[bytes] = []
    following = len(window.data)
    for packet, copy in found.items():
        _, link, start, end, wire_bytes = copy.record
        if copy.data is not window.data:
            more.append(bytes(copy.data[start:end]))
            start, end = following, following + end - start
            following = end
        records[packet.index] = packet.record[0], link, start, end, wire_bytes
    if more:
        window = window._replace(data=b"".join((window.data, *more)))
    return window._replace(records=records)


def _longest_copy(packet: _Packet, windows: list[_Held]) -> _Packet | None:
    copies = (each.longest_of.get(packet.identity) for each in windows)
    near = [copy for copy in copies if copy is not None and copy.captured > packet.captured and packet.is_near(copy)]
    return max(near, key=lambda copy: copy.captured, default=None)


def _joined(packet: _Packet, windows: list[_Held]) -> _Packet | None:
    """The packet completed by other segments, which contain all of its payload; None: some bytes are missing."""
    if packet.captured < 0:
        return None
    parts = [packet.data[packet.record[2] : packet.record[2] + packet.payload_at]]
    done = 0
    while done < packet.length:
        seq = packet.seq + done & MASK
        near = [part for each in windows for part in each.holding(packet, seq) if packet.is_near(part)]
        others = [part for part in near if (part.seq, part.length) != (packet.seq, packet.length)]
        part = max(others, key=lambda part: part.length - (seq - part.seq & MASK), default=None)
        if part is None:
            return None
        offset = seq - part.seq & MASK
        parts.append(part.payload[offset : offset + packet.length - done])
        done += len(parts[-1])
    data = b"".join(parts)
    time_ns, link, _, _, wire_bytes = packet.record
    return replace(packet, data=data, record=(time_ns, link, 0, len(data), wire_bytes), captured=packet.length)


def _with_room(window: Window) -> Window:
    """A window with a copy of its data, to which more can be appended."""
    records = window.records
    begin, end = records[0][2], records[-1][3]
    return window._replace(
        data=bytes(window.data[begin:end]),
        offset=window.offset + begin,
        records=[(time_ns, link, start - begin, end - begin, size) for time_ns, link, start, end, size in records],
    )


def _kept(window: Window) -> Window:
    """A window that stays valid: its data are copied if they will be overwritten."""
    data, offset, records, is_lasting = window
    if is_lasting or not isinstance(records, Columns):
        return window
    begin, end = int(records.start[0]), int(records.end[-1])
    columns = Columns(
        records.time_ns, records.link, records.start - begin, records.end - begin, records.original, records.head
    )
    return Window(bytes(data[begin : end + HEAD]), offset + begin, columns)
