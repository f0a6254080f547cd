"""Distinguishes packets captured twice, as at both ends of a link or on a bridge and its member, from retransmissions.

Duty: keeps the headers of the packets of the last SAME_PACKET_NS, and searches them for a packet. A packet's identity
is its addresses, IP identification, payload length, TCP header up to the window and the first OPTION_BYTES of its
options, which contain its timestamp. A retransmission differs in its IP identification or its timestamp. Checksums are
not compared: if the network card computes them, they are different in the sender's own capture.

If a network card or the kernel joins and cuts segments (TSO, GSO, GRO), the captures at both ends have the same bytes
in different segments. Such a segment is a copy if other segments of its run contain all of its bytes. The segments of a
run have the same acknowledgement, window and timestamp (cards copy them, and only such segments are joined), and IP
identifications that count the segments. A retransmission has a later timestamp, or in the same millisecond a later IP
identification. If the segments have timestamps, their IP identifications may be equal (Linux's SKB_GSO_TCP_FIXEDID).
Without timestamps, the default of Windows, the IP identifications must fit segments of one size.

A packet without a timestamp and without an IP identification that changes from packet to packet is a copy only within
AT_ONCE_NS, since a retransmission takes a round trip at least.

Durations are the sums of the times between consecutive packets. If a capture goes back in time by SAME_PACKET_NS or
more, as concatenated captures do, the packets after that count as far from the packets before it.

Memory: the headers of the last MAX_PACKETS packets, and of the current window. Windows are indexed when they are first
searched, so a clean capture costs nothing. Refuses to know connections.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from kproxy.capture.columns import inorder
from kproxy.capture.columns.inorder import AT_ONCE_NS, has_timestamp
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.connections.reassembly import HALF, MASK, ahead
from kproxy.capture.dissection.packets import SAME_PACKET_NS, SYN, Segment
from kproxy.capture.formats.records import Record, Window

MAX_PACKETS = 1 << 16  # packets whose headers are kept
MIN_PRUNED = 1 << 12  # headers read one by one, below which old ones are not pruned
MAX_OF_RUN = 1 << 9  # the last headers of one direction, read one by one, that are searched for a run
SEGMENT_BYTES = range(244, 9217)  # payload of offloaded segments: Linux's min_adv_mss less timestamps, to jumbo frames
ETHERNET_BYTES = range(1200, 1461)  # the same, with an MTU of at most 1500

_NO_PACKETS = np.zeros(0, np.int64)


class Occurrence(NamedTuple):
    """A packet's place in the capture; packets from `since_ns` and `since` on are kept at it."""

    passed_ns: int  # time since the first packet
    number: int

    @property
    def since_ns(self) -> int:
        return self.passed_ns - SAME_PACKET_NS

    @property
    def since(self) -> int:
        return self.number - MAX_PACKETS


def times_of(records: Sequence[Record]) -> np.ndarray:
    """The times of some records."""
    return records.time_ns if isinstance(records, Columns) else np.array([record[0] for record in records], np.int64)


@dataclass(slots=True)
class Headers:
    """The headers of a window's packets that were read by column."""

    first: int  # the number of the window's first packet
    passed: np.ndarray  # time since the capture's first packet, in ns, for each packet of the window
    heads: inorder.Heads | None
    head: np.ndarray | None
    indexed: "tuple[dict[bytes, int], np.ndarray, np.ndarray] | None" = None

    def places(self, key: bytes, ack: int | None) -> np.ndarray:
        """The places in `heads` of one direction's packets; ack: only packets with this acknowledgement."""
        assert self.heads is not None
        if self.indexed is None:
            numbers, number = inorder.key_numbers(self.heads)
            whole = np.flatnonzero(self.heads.whole)
            mixed = number[whole] << 32 | self.heads.ack[whole]
            order = np.argsort(mixed)
            self.indexed = numbers, mixed[order], whole[order]
        numbers, mixed, places = self.indexed
        if key not in numbers:
            return _NO_PACKETS
        first = numbers[key] << 32
        span = (first, first + (1 << 32)) if ack is None else (first + ack, first + ack + 1)
        return places[slice(*np.searchsorted(mixed, span))]

    def near(self, places: np.ndarray, at: Occurrence) -> np.ndarray:
        """Select the places whose packets come before a packet and are still kept at it."""
        assert self.heads is not None
        index = self.heads.index[places]
        is_near = (index >= at.since - self.first) & (index < at.number - self.first)
        found: np.ndarray = places[is_near & (self.passed[index] >= at.since_ns)]
        return found

    def rows(self, places: np.ndarray) -> np.ndarray:
        """The identities of packets at places in `heads`, as words of 64 bits."""
        assert self.heads is not None and self.head is not None
        return inorder.rows_of(self.heads, self.head, places)


Candidates = tuple[Headers, np.ndarray, np.ndarray]  # a window, places in its heads, their identities in words


class Recent:
    """The packets of the last SAME_PACKET_NS, and the current window."""

    def __init__(self) -> None:
        self.columns: Columns | None = None  # the current window by column, if it has enough packets
        self.plain = b""  # a byte for each packet of the window: 1 if its header was read by column
        self.goes_back = False  # whether any packet so far is far earlier than the one before it
        self._stamp_ns = -1  # time of the last packet
        self._passed_ns = 0  # time from the first packet to the last
        self._count = 0  # packets before the current window
        self._windows: deque[Headers] = deque()
        self._noted: dict[bytes, dict[bytes, Occurrence]] = {}  # last occurrence of other packets, by key and row
        self._noted_count = self._noted_limit = 0
        self._current: tuple[int, Occurrence | None] = -1, None  # the packet noted last, and its previous occurrence

    def add(self, window: Window) -> None:
        """Begin the next window."""
        records = window.records
        self._current = -1, None
        self.columns = Columns.of(window) if len(records) >= inorder.FEWEST else None
        passed = _NO_PACKETS
        if records:
            times = times_of(records if self.columns is None else self.columns)
            steps = np.diff(times, prepend=times[0] if self._stamp_ns < 0 else self._stamp_ns)
            backwards = steps < -SAME_PACKET_NS
            self.goes_back = self.goes_back or bool(backwards.any())
            steps[backwards] = 2 * SAME_PACKET_NS
            steps[0] += self._passed_ns
            passed = np.maximum.accumulate(np.cumsum(steps))
            self._stamp_ns, self._passed_ns = int(times[-1]), int(passed[-1])
        heads = None if self.columns is None else self.columns.heads
        plain = np.zeros(len(records), bool)
        if heads is not None:
            plain[heads.index] = heads.whole
        self.plain = plain.tobytes()
        self._windows.append(Headers(self._count, passed, heads, self.columns.head if self.columns else None))
        self._count += len(records)

    def let_go(self) -> None:
        """End the current window, and drop headers that are too old."""
        self.columns = None
        since_ns, since = self._passed_ns - SAME_PACKET_NS, self._count - MAX_PACKETS
        windows = self._windows
        while windows:
            oldest = windows[0]
            if oldest.heads is not None and oldest.passed[-1] >= since_ns and oldest.first + len(oldest.passed) > since:
                break
            windows.popleft()
        if self._noted_count > max(MIN_PRUNED, self._noted_limit):
            kept = {
                key: left
                for key, rows in self._noted.items()
                if (left := {row: at for row, at in rows.items() if at[0] >= since_ns and at[1] >= since})
            }
            self._noted = kept
            self._noted_count = sum(map(len, kept.values()))
            self._noted_limit = 2 * self._noted_count

    def clear(self) -> None:
        """Drop all headers: another capture begins."""
        self._windows.clear()
        self._noted.clear()
        self._noted_count = self._noted_limit = 0
        self._stamp_ns = -1

    def note(self, index: int, segment: Segment) -> None:
        """Keep the header of the window's packet `index`, which was not read by column."""
        rows = self._noted.setdefault(segment[1], {})
        row = row_of(segment)
        before = rows.get(row)
        self._current = index, before
        self._noted_count += before is None
        rows[row] = self._at(index)

    def has(self, index: int, segment: Segment) -> bool:
        """Whether the window's packet `index` is a copy of one shortly before."""
        key, row, at = segment[1], row_of(segment), self._at(index)
        return self._has(index, key, row, at, self._candidates(key, row, at))

    def has_bytes(self, index: int, segment: Segment) -> bool:
        """Whether packets shortly before contain the bytes of the window's packet `index`: the same packet, or
        segments of its run, as offload cuts them."""
        key, row, at = segment[1], row_of(segment), self._at(index)
        candidates = self._candidates(key, row, at)
        return self._has(index, key, row, at, candidates) or self._has_run(key, row, at, candidates)

    def _at(self, index: int) -> Occurrence:
        """The place in the capture of the window's packet `index`."""
        window = self._windows[-1]
        return Occurrence(int(window.passed[index]), window.first + index)

    def _has(self, index: int, key: bytes, row: bytes, at: Occurrence, candidates: Sequence[Candidates]) -> bool:
        latest = -1
        before = self._current[1] if self._current[0] == index else self._noted.get(key, {}).get(row)
        if before is not None and before.number >= at.since:
            latest = before.passed_ns
        if candidates:
            same = np.frombuffer(row, np.uint64)
            for each, places, rows in candidates:
                found = np.flatnonzero((rows == same).all(axis=1))
                if len(found):
                    assert each.heads is not None
                    latest = max(latest, int(each.passed[each.heads.index[places[found].max()]]))
                    break
        if latest < 0 or latest < at.since_ns:
            return False
        return latest >= at.passed_ns - AT_ONCE_NS or has_timestamp(row) or self._has_own_identity(key, row, at)

    def _has_run(self, key: bytes, row: bytes, at: Occurrence, candidates: Sequence[Candidates]) -> bool:
        first, length = inorder.seq_and_length(row)
        if not length:
            return False
        others = []
        for other, before in islice(reversed(self._noted.get(key, {}).items()), MAX_OF_RUN):
            if before.passed_ns < at.since_ns:
                break
            shift = ahead(inorder.seq_and_length(other)[0], first)
            if shift >= length or shift + inorder.seq_and_length(other)[1] <= 0:
                continue  # they have no bytes in common
            if other[8:12] == row[8:12] and other[14:28] == row[14:28] and at.since <= before.number < at.number:
                others.append(other)
        if candidates:
            run = inorder.run_of(np.frombuffer(row, np.uint64)[None])
            for _, _, rows in candidates:
                others += [other.tobytes() for other in rows[(inorder.run_of(rows) == run).all(axis=1)]]
        if not others:
            return False
        has_one_identity = cache(lambda: self._has_one_identity(key, row, at))
        spans = [_span(row, other, has_one_identity) for other in others]
        reached = 0
        for begin, following in sorted(span for span in spans if span != (0, length)):  # else `_has` compared it
            if begin > reached:
                break
            reached = max(reached, following)
        return reached >= length

    def _candidates(self, key: bytes, row: bytes, at: Occurrence) -> list[Candidates]:
        """The packets by column shortly before a packet, with the same acknowledgement, that may be the same packet or
        contain some of its bytes; the last window first."""
        first, length = inorder.seq_and_length(row)
        identity = inorder.identity_of(row)
        found = []
        for each, heads, places in self._windows_since(at.since_ns, key, inorder.ack_of(row)):
            shifts = (heads.seq[places] - first + HALF & MASK) - HALF
            lengths = heads.length[places]
            has_common = (shifts < length) & (shifts + lengths > 0)
            has_all = (shifts == 0) & (lengths == length)  # the same packet, or another one with the same bytes
            places = places[np.where(has_all, heads.identity[places] == identity, has_common)]
            if len(places):
                places = each.near(places, at)  # without the packet itself
            if len(places):
                found.append((each, places, each.rows(places)))
        return found

    def is_sure(self, index: int) -> bool:
        """Whether the headers of all packets are kept that the window's packet `index` may be a copy of."""
        at = self._at(index)
        return at.since_ns > 0 or at.since > 0

    def _has_own_identity(self, key: bytes, row: bytes, at: Occurrence) -> bool:
        """Whether there are recent packets with other sequence numbers, all with other IP identifications.

        A SYN, which is often the first packet, needs none: it is retransmitted after a second or more (RFC 6298).
        """
        identity = inorder.identity_of(row)
        found = bool(identity) and bool(row[13] & SYN)
        for other, before in self._noted.get(key, {}).items():
            if other[4:8] != row[4:8] and before.passed_ns >= at.since_ns and before.number >= at.since:
                if inorder.identity_of(other) == identity:
                    return False
                found = True
        seq, _ = inorder.seq_and_length(row)
        for each, heads, places in self._windows_since(at.since_ns, key):
            places = each.near(places, at)
            others = places[heads.seq[places] != seq]
            if (heads.identity[others] == identity).any():
                return False
            found |= bool(len(others))
        return found

    def _has_one_identity(self, key: bytes, row: bytes, at: Occurrence) -> bool:
        """Whether all kept segments of that direction have the IP identification of this one."""
        identity = inorder.identity_of(row)
        for other, before in self._noted.get(key, {}).items():
            is_near = before.passed_ns >= at.since_ns and before.number >= at.since
            if is_near and inorder.seq_and_length(other)[1] and inorder.identity_of(other) != identity:
                return False
        for each, heads, places in self._windows_since(at.since_ns, key):
            places = each.near(places, at)
            segments = places[heads.length[places] > 0]
            if (heads.identity[segments] != identity).any():
                return False
        return True

    def _windows_since(
        self, since_ns: int, key: bytes, ack: int | None = None
    ) -> Iterator[tuple[Headers, inorder.Heads, np.ndarray]]:
        """Yield the windows with packets from `since_ns` on, the last first, with their heads and the `places` of one
        direction's packets."""
        for each in reversed(self._windows):
            if each.passed[-1] < since_ns:
                return
            if each.heads is not None:
                yield each, each.heads, each.places(key, ack)


def _span(row: bytes, other: bytes, has_one_identity: Callable[[], bool]) -> tuple[int, int]:
    """(begin, end) of the bytes of `other`, relative to the first of `row`, if both may be of one run; else (0, 0).

    The IP identifications of a run's segments are consecutive: their difference is the number of segments between. The
    segments have the same timestamp, if any; with one, IP identifications may always be 0.
    """
    number, length = inorder.seq_and_length(row)
    other_number, other_length = inorder.seq_and_length(other)
    shift = ahead(other_number, number)
    span = shift, shift + other_length
    identity, other_identity = inorder.identity_of(row), inorder.identity_of(other)
    has_stamp = has_timestamp(row)
    if not (identity and other_identity) and (has_stamp or not (identity or other_identity)):  # 0 may be in turn too
        return span if has_stamp else (0, 0)
    segments = (other_identity - identity if shift > 0 else identity - other_identity) & 0xFFFF
    if not segments:
        return span if not shift or (has_stamp and has_one_identity()) else (0, 0)
    size, rest = divmod(abs(shift), segments)
    is_one_run = not rest and size in SEGMENT_BYTES and (has_stamp or _fits(min(length, other_length), size))
    return span if is_one_run else (0, 0)


def _fits(length: int, size: int) -> bool:
    """Whether the smaller of two segments, of `length` bytes, may consist of one or more segments of `size` bytes.

    A retransmission between the two uses further IP identifications: then `size`, the bytes for each identification, is
    less than the size of segments.
    """
    return length <= size or (size in ETHERNET_BYTES and length >= ETHERNET_BYTES.stop)


def row_of(segment: Segment) -> bytes:
    """A packet's identity without its addresses, as in `inorder.rows_of`."""
    held, key, _, _, bits, _, start, _, length = segment
    size = bits >> 12 << 2
    header = max(0, start - size)
    identity = 0
    if len(key) == 12 and header >= 20 and held[header - 20] == 0x45:
        identity = held[header - 16] << 8 | held[header - 15]  # else something stands between that header and TCP's
    options = bytes(held[header + 20 : start][: inorder.OPTION_BYTES])
    return inorder.ROW.pack(bytes(held[header : header + 16]), options, length, size, identity)
