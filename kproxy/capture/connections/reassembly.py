"""Reassembles both half-streams of a TCP connection: segments in, bytes in order out.

Duty: sequence numbers (which wrap) become positions that only grow; early bytes are queued, repeated bytes are dropped,
and bytes that never arrive are a gap. The first captured bytes of a position win. A `Conversation` delivers to a
`Receiver`, whose three methods are those of a Session:

- a segment is delivered after the bytes that it acknowledges, since its sender had received them. A response therefore
  never precedes its request, even if the capture has them out of order;
- a gap is declared when the peer has acknowledged the missing bytes and PATIENCE further segments of the connection did
  not contain them, or when more than MAX_QUEUED bytes are queued behind it, or at the end; bytes that the snap length
  cut are a gap at once;
- a delivery has the latest time of the segments delivered so far, so that times never go back;
- a segment beyond any window is a stray. Consecutive strays that the peer acknowledges prove a gap of more than
  FURTHEST bytes, such as a missing file of a rotated capture: delivery continues at the strays. Sequence numbers wrap,
  so the size of such a gap is only known modulo 4 GiB. If it is just below a multiple of 4 GiB, up to BEHIND bytes
  after it count as retransmitted.

Memory: MAX_QUEUED bytes per half-stream, in at most MAX_PIECES pieces, and the last KEPT_STRAYS consecutive strays; no
more than the Budget that several conversations share. KEPT_TIMES times of retransmissions, and those since the last
`keep`. Refuses to know packets, flows and Kafka.
"""

from bisect import bisect_left
from typing import Protocol

from kproxy.capture.connections.stalls import LATE, REPEATED, Stalls
from kproxy.capture.dissection.packets import ACK, FIN

MASK = 0xFFFF_FFFF
HALF = 0x8000_0000

MAX_QUEUED = 4 << 20
MAX_PIECES = 4096
PATIENCE = 64
OVERTAKEN_NS = 3_000_000
FURTHEST = 1 << 30  # the largest window that TCP can have (RFC 7323)
BEHIND = 16 << 20  # no retransmission is so far behind, since hosts have smaller buffers
KEPT_TIMES = 256  # of retransmissions
KEPT_STRAYS = 16  # also the number that proves a gap if the peer was not captured

CAPTURED, MISSING, END = 0, 1, 2

# Bytes that were retransmitted until the peer acknowledged them, or the connection ended: nanoseconds from the last
# delivery before the first retransmission until then, the time of that delivery, number of retransmissions.
NOT_LATE = (0, -1, 0)

COUNTERS = (
    "retransmissions",
    "duplicates",
    "out_of_order",
    "truncated",
    "truncated_bytes",
    "gaps",
    "gap_bytes",
    "long_gaps",
    "zero_windows",
    "late",
)  # of a half-stream

# (start, stop, kind, bytes, time_ns, the position of the peer that its sender acknowledged)
Piece = tuple[int, int, int, memoryview, int, int]
_EMPTY = memoryview(b"")


class Receiver(Protocol):
    """Takes a conversation's bytes, gaps and ends, in order: a Session, or its adapter."""

    def receive(self, side: int, view: memoryview, now_ns: int) -> object: ...

    def gap(self, side: int, count: int, now_ns: int) -> object: ...

    def close(self, side: int, now_ns: int) -> object: ...


def ahead(number: int, position: int) -> int:
    """The distance of a 32-bit sequence number ahead of a position, within 2 GiB; negative: behind."""
    return ((number - position + HALF) & MASK) - HALF


class HalfStream:
    """One direction: its bytes are delivered up to `position`, and `pieces` are queued."""

    __slots__ = (
        "ack",
        "acked",
        "astray",
        "duplicates",
        "ended",
        "fin",
        "first",
        "gap_bytes",
        "gaps",
        "late",
        "latest",
        "long_gaps",
        "out_of_order",
        "pieces",
        "position",
        "queued_bytes",
        "retransmissions",
        "seen",
        "truncated",
        "truncated_bytes",
        "unacked",
        "zero_window",
        "zero_windows",
    )

    def __init__(self) -> None:
        self.seen = False  # a segment of this side was captured
        self.position = -1  # next byte to deliver, unwrapped; -1 until a segment of either side shows it
        self.first = -1  # the position where the capture, or the connection, began
        self.acked = -1  # the furthest acknowledged position; the fast path of `segment` does not update it
        self.ack = -1  # the last sequence number that this side acknowledged
        self.pieces: list[Piece] = []
        self.queued_bytes = 0
        self.fin = False  # a FIN of this side was captured
        self.ended = False
        self.retransmissions = 0
        self.duplicates = 0  # packets captured twice
        self.out_of_order = 0
        self.truncated = 0  # segments cut by the snap length
        self.truncated_bytes = 0
        self.gaps = 0
        self.gap_bytes = 0
        self.long_gaps = 0  # gaps with a size known only modulo 4 GiB; `gaps` includes them
        self.astray: Astray | None = None
        self.unacked: list[int] | None = None  # retransmitted bytes without an acknowledgement: end, since_ns, times
        self.late = 0  # how often bytes were retransmitted before the peer acknowledged them
        self.latest = NOT_LATE
        self.zero_window = False  # the window is closed now
        self.zero_windows = 0

    def queue(self, start: int, stop: int, kind: int, data: memoryview, time_ns: int, after: int) -> bool:
        """Queue the bytes of [start, stop) that no earlier segment had; return whether there were any.

        The pieces are views of the caller's buffer until `keep` copies them.
        """
        pieces = self.pieces
        start = max(start, self.position)
        base = stop - len(data)  # the position of data[0]
        index = bisect_left(pieces, (start,))
        if index and pieces[index - 1][1] > start:
            index -= 1
        fresh = False
        while start < stop:
            upto = stop if index == len(pieces) else min(stop, pieces[index][0])
            if start < upto:
                part = data[start - base : upto - base] if kind == CAPTURED else _EMPTY
                pieces.insert(index, (start, upto, kind, part, time_ns, after))
                self.queued_bytes += len(part)
                fresh = True
                index += 1
            if upto == stop:
                break
            start = pieces[index][1]
            index += 1
        return fresh

    def keep(self) -> None:
        """Copy the queued pieces, which outlive the buffers of their segments."""
        self.pieces = [
            (start, stop, kind, _lasting(data), time_ns, after)
            for start, stop, kind, data, time_ns, after in self.pieces
        ]


def _lasting(data: memoryview) -> memoryview:
    whole = data.obj
    return data if isinstance(whole, bytes) and len(whole) == len(data) else memoryview(bytes(data))


def _arrived(half: HalfStream, time_ns: int) -> None:
    """Count the retransmitted bytes as late: they were acknowledged, or never will be."""
    assert half.unacked is not None
    _, since_ns, times = half.unacked
    half.unacked = None
    half.late += 1
    half.latest = max(half.latest, (time_ns - since_ns, since_ns, times))


class Astray:
    """Consecutive strays of one direction: its stream behind a gap, if the peer acknowledges them."""

    __slots__ = ("count", "is_acked", "kept", "left", "start", "stop")

    def __init__(self, seq: int) -> None:
        self.start = seq  # sequence number of the first byte
        self.stop = seq  # sequence number behind the last byte
        self.count = 0
        self.is_acked = False
        self.left = 0  # further segments of the connection until it is dropped
        self.kept: list[tuple[int, bytes, int, int]] = []  # the last KEPT_STRAYS: seq, bytes, length, time_ns

    def holds(self, seq: int) -> bool:
        """Whether the strays contain the byte with a sequence number."""
        return (seq - self.start) & MASK < (self.stop - self.start) & MASK

    @property
    def kept_bytes(self) -> int:
        return sum(len(data) for _, data, _, _ in self.kept)


class Budget:
    """The bytes that several conversations together may queue."""

    __slots__ = ("least", "left")

    def __init__(self, size: int) -> None:
        self.left = size
        self.least = size  # the minimum of `left` so far


class Conversation:
    """Both half-streams of one connection; bytes are delivered in an order that both ends can have seen."""

    __slots__ = (
        "_budget",
        "_has_stalled",
        "_patience",
        "_was_unacked",
        "clock_ns",
        "first_fin",
        "halves",
        "has_unseen_fin",
        "open_sides",
        "receiver",
        "retransmitted_ns",
        "stalls",
        "strays",
    )

    def __init__(self, receiver: Receiver, budget: Budget | None = None) -> None:
        self.receiver = receiver
        self._budget = budget or Budget(MAX_QUEUED)
        self.open_sides = 2
        self.halves = (HalfStream(), HalfStream())
        self.clock_ns = 0
        self.first_fin: tuple[int, int] | None = None  # the side whose FIN was captured first, and when
        self.has_unseen_fin = False  # a FIN was acknowledged, but not captured
        self.strays = 0  # segments whose sequence number belongs to no window
        self._patience = -1  # further segments before a gap is declared; -1: nothing is queued
        # Times of retransmissions, in order, each later than every delivery before it. The number of retransmissions
        # within an exchange therefore does not depend on when it is computed.
        self.retransmitted_ns: list[int] = []
        self.stalls = Stalls()
        self._has_stalled = False  # the last segment added an interval to `stalls`
        self._was_unacked = False  # the last segment retransmitted bytes without an acknowledgement

    def open(self, side: int, seq: int, *, seen: bool = True) -> None:
        """Begin the stream of `side` after its SYN. seen: the SYN was captured; else the peer acknowledged it."""
        half = self.halves[side]
        half.first = seq
        half.position = seq + 1
        half.seen = seen

    @property
    def is_calm(self) -> bool:
        """Whether both sides were captured and nothing is queued, so that the next segment may take the fast path."""
        return self._patience < 0 and all(
            half.seen and half.position >= 0 and not half.zero_window for half in self.halves
        )

    @property
    def is_still(self) -> bool:
        """Whether it is calm and no side has ended, so that further packets depend on the positions only."""
        return self.is_calm and not any(half.ended or half.fin or half.astray for half in self.halves)

    def count_anew(self) -> None:
        """Reset the counters: the previous reader reports the counts up to here."""
        self.strays = 0
        for half in self.halves:
            for name in COUNTERS:
                setattr(half, name, 0)
            half.latest = NOT_LATE

    def join(self, before: "Conversation", turned: int) -> None:
        """Add the counts of an earlier part of the connection; turned: 1 if its sides are swapped."""
        self.strays += before.strays
        for side, half in enumerate(self.halves):
            earlier = before.halves[side ^ turned]
            half.first = earlier.first
            half.seen |= earlier.seen
            for name in COUNTERS:
                setattr(half, name, getattr(half, name) + getattr(earlier, name))
            half.latest = max(half.latest, earlier.latest)

    def segment(
        self, side: int, seq: int, ack: int, flags: int, window: int, view: memoryview, length: int, time_ns: int
    ) -> bool:
        """Take a segment that is not a SYN; `view` has the captured part of its `length` bytes.

        Return whether it contains known bytes only, so that the caller can check whether the packet is a copy.
        """
        half = self.halves[side]
        peer = self.halves[1 - side]
        half.seen = True
        position = half.position
        if (
            self._patience < 0
            and not (seq - position) & MASK
            and not 0 < (ack - peer.position) & MASK < HALF
            and len(view) == length
            and window
            and not half.zero_window
            and not flags & FIN
            and position >= 0
            and peer.position >= 0
        ):  # the fast path: in order, whole, and nothing is queued
            half.ack = ack
            if length:
                half.position = position + length
                if time_ns > self.clock_ns:
                    self.clock_ns = time_ns
                self.receiver.receive(side, view, self.clock_ns)
            return False
        if position < 0:
            half.position = half.first = seq
        after = -1
        if flags & ACK:
            if peer.astray is not None and peer.astray.holds(ack - 1):
                peer.astray.is_acked = True
                self._anchor(1 - side)
            if peer.position < 0:
                peer.position = peer.first = ack
            after = peer.position + ahead(ack, peer.position)
            if after - peer.position > FURTHEST:
                after = -1  # no window is that large: a stray
            elif after > peer.acked:
                peer.acked = after
                half.ack = ack
                if peer.unacked is not None and after >= peer.unacked[0]:
                    _arrived(peer, time_ns)
                if peer.seen and peer.position == peer.first and not peer.pieces:
                    peer.position = peer.first = after  # before the capture's start, or a keep-alive probe's number
        if half.astray or peer.astray:
            self._age()
        if not -BEHIND <= ahead(seq, half.position) <= FURTHEST:
            self.strays += 1
            if length and time_ns >= self.clock_ns and not half.ended:
                self._stray(side, seq, view, length, time_ns)
            return False
        self.stalls.window(side, window > 0, max(time_ns, self.clock_ns))
        if window and not length:
            half.zero_window = False
        elif not window and not half.zero_window:
            half.zero_window = True
            half.zero_windows += 1
        again = half.retransmissions
        self._has_stalled = self._was_unacked = False
        self._disorder(side, half, peer, seq, flags, view, length, time_ns, after)
        return half.retransmissions > again

    def keep(self) -> None:
        """Copy the queued pieces, which outlive their buffers; keep only the last times of retransmissions."""
        for half in self.halves:
            if half.pieces:
                half.keep()
        if len(self.retransmitted_ns) > KEPT_TIMES:
            del self.retransmitted_ns[:-KEPT_TIMES]
        self.stalls.keep()

    def same_packet(self, side: int) -> None:
        """Count the last segment as captured twice, not as a retransmission."""
        self.halves[side].retransmissions -= 1
        self.halves[side].duplicates += 1
        self.retransmitted_ns.pop()
        if self._has_stalled:
            self.stalls.found.pop()
        unacked = self.halves[side].unacked
        if unacked is not None and self._was_unacked:
            unacked[2] -= 1
            if not unacked[2]:
                self.halves[side].unacked = None

    def finish(self, time_ns: int) -> None:
        """Declare the remaining gaps and end both sides: no segment will follow."""
        self._budget.left += self.halves[0].queued_bytes + self.halves[1].queued_bytes
        for half in self.halves:
            self._forget(half)
        while self._deliver() or self._give_up():  # queued pieces keep their times of arrival
            pass
        self.clock_ns = max(self.clock_ns, time_ns)
        for half in self.halves:
            if half.unacked is not None:
                _arrived(half, self.clock_ns)
        for side in (0, 1):
            self._end(side)

    def _stray(self, side: int, seq: int, view: memoryview, length: int, time_ns: int) -> None:
        """Keep a segment beyond any window: it may follow a long gap."""
        half = self.halves[side]
        astray = half.astray
        if astray is not None and astray.holds(seq):
            return  # a retransmission
        if astray is None or seq != astray.stop:
            self._forget(half)
            astray = half.astray = Astray(seq)
        astray.stop = (seq + length) & MASK
        astray.count += 1
        astray.left = PATIENCE
        astray.kept.append((seq, bytes(view), length, time_ns))
        self._budget.left -= len(view)
        while len(astray.kept) > KEPT_STRAYS or (self._budget.left < 0 and len(astray.kept) > 1):
            self._budget.left += len(astray.kept.pop(0)[1])
        if astray.is_acked or not self.halves[1 - side].seen:
            self._anchor(side)
        elif self._patience < 0:
            self._patience = PATIENCE  # leave the fast path, to examine every acknowledgement

    def _anchor(self, side: int) -> None:
        """Continue behind a long gap, if enough strays prove it."""
        half = self.halves[side]
        astray = half.astray
        if astray is None or astray.count < (2 if astray.is_acked else KEPT_STRAYS):
            return
        kept = astray.kept
        self._forget(half)
        queued = half.queued_bytes
        while half.pieces:
            piece = half.pieces.pop(0)
            if piece[0] > half.position:
                self._declare(side, piece[0])
            self._take(side, half, piece)
        if half.ended:
            return
        if count := (kept[0][0] - half.position) & MASK:  # else the queued pieces reach up to the strays
            half.long_gaps += 1
            self._declare(side, half.position + count)
        for _, data, length, time_ns in kept:
            self.strays -= 1
            stop = half.position + length
            if data:
                self._take(
                    side, half, (half.position, half.position + len(data), CAPTURED, memoryview(data), time_ns, -1)
                )
            if half.position < stop:
                half.truncated += 1
                self._take(side, half, (half.position, stop, MISSING, _EMPTY, time_ns, -1))
        half.queued_bytes = 0
        self._budget.left += queued

    def _age(self) -> None:
        """Count a segment of the connection; drop strays that no stray followed within PATIENCE segments."""
        for half in self.halves:
            if half.astray is not None:
                half.astray.left -= 1
                if half.astray.left < 0:
                    self._forget(half)

    def _forget(self, half: HalfStream) -> None:
        """Drop the kept strays."""
        if half.astray is not None:
            self._budget.left += half.astray.kept_bytes
            half.astray = None

    def _disorder(
        self,
        side: int,
        half: HalfStream,
        peer: HalfStream,
        seq: int,
        flags: int,
        view: memoryview,
        length: int,
        time_ns: int,
        after: int,
    ) -> None:
        start = half.position + ahead(seq, half.position)
        stop = start + length
        queued = half.queued_bytes + peer.queued_bytes
        if length:
            if stop <= half.position:
                if length > 1 or stop < half.position:  # one byte before the next is a keep-alive probe
                    self._again(half, time_ns)
                    if peer.ack >= 0 and ahead(peer.ack, half.position) < stop - half.position:
                        self._has_stalled = self.stalls.add(self.clock_ns, time_ns, side, REPEATED)
                        if half.unacked is None:
                            half.unacked = [stop, self.clock_ns, 0]
                        half.unacked[2] += 1
                        self._was_unacked = True
            else:
                captured = start + len(view)
                in_order = start <= half.position and not half.pieces
                since_ns = half.pieces[0][4] if half.pieces else time_ns  # arrival of the bytes queued behind it
                fresh = half.queue(start, captured, CAPTURED, view, time_ns, after) if len(view) else False
                if captured < stop:
                    half.truncated += 1
                    fresh |= half.queue(captured, stop, MISSING, _EMPTY, time_ns, after)
                if not fresh:
                    self._again(half, time_ns)
                elif not in_order and half.pieces[-1][0] > start:
                    # Wireshark's rule: up to 3 ms late is out of order, later is a retransmission.
                    if time_ns - half.pieces[-1][4] <= OVERTAKEN_NS:
                        half.out_of_order += 1
                    else:
                        self._again(half, time_ns)
                        self._has_stalled = self.stalls.add(since_ns, max(time_ns, self.clock_ns), side, LATE)
        if not peer.seen and peer.position < peer.acked:
            self._declare(1 - side, peer.acked)  # one direction was captured: the bytes cannot arrive
        if flags & FIN and not half.ended and stop >= half.position:
            half.fin = True
            if self.first_fin is None:
                self.first_fin = side, time_ns
            half.queue(stop, stop + 1, END, _EMPTY, time_ns, after)
        while self._deliver():
            pass
        self._budget.left += queued - half.queued_bytes - peer.queued_bytes
        self._wait(half, peer)

    def _again(self, half: HalfStream, time_ns: int) -> None:
        half.retransmissions += 1
        times = self.retransmitted_ns
        times.append(max(time_ns, self.clock_ns + 1, times[-1] if times else 0))

    def _wait(self, half: HalfStream, peer: HalfStream) -> None:
        """While bytes are queued or missing, count segments; declare a gap after PATIENCE, or beyond a limit."""
        self._budget.least = min(self._budget.least, self._budget.left)
        while half.pieces or peer.pieces or half.position < half.acked or peer.position < peer.acked:
            over_limit = (
                max(half.queued_bytes, peer.queued_bytes) > MAX_QUEUED
                or max(len(half.pieces), len(peer.pieces)) > MAX_PIECES
                or self._budget.left < 0
            )
            acked = half.position < half.acked or peer.position < peer.acked
            if not over_limit and (self._patience < 0 or not acked):
                self._patience = PATIENCE  # bytes without an acknowledgement may still be retransmitted
                return
            if not over_limit and self._patience > 0:
                self._patience -= 1
                return
            self._patience = -1
            queued = half.queued_bytes + peer.queued_bytes
            moved = self._give_up()
            while self._deliver():
                pass
            self._budget.left += queued - half.queued_bytes - peer.queued_bytes
            if not moved:
                break
        self._patience = PATIENCE if half.astray or peer.astray or half.unacked or peer.unacked else -1

    def _deliver(self) -> bool:
        """Deliver contiguous pieces whose acknowledged bytes are delivered; return whether there were any."""
        done = False
        for side in (0, 1):
            half, peer = self.halves[side], self.halves[1 - side]
            pieces = half.pieces
            count = 0
            for piece in pieces:
                if piece[0] != half.position or piece[5] > peer.position:
                    break
                self._take(side, half, piece)
                count += 1
            if count:
                del pieces[:count]
                done = True
        return done

    def _take(self, side: int, half: HalfStream, piece: Piece) -> None:
        start, stop, kind, data, time_ns, _ = piece
        if time_ns > self.clock_ns:
            self.clock_ns = time_ns
        half.position = stop
        half.queued_bytes -= len(data)
        if kind == CAPTURED:
            self.receiver.receive(side, data, self.clock_ns)
        elif kind == MISSING:
            half.truncated_bytes += stop - start
            self.receiver.gap(side, stop - start, self.clock_ns)
        else:
            self._end(side)

    def _give_up(self) -> bool:
        """Stop waiting: deliver out of turn, or declare a gap; return whether there was anything to do."""
        ready = [side for side in (0, 1) if (h := self.halves[side]).pieces and h.pieces[0][0] == h.position]
        if len(ready) == 2:  # each waits for the other: one is a retransmission whose original was not captured
            side = min(ready, key=lambda side: self.halves[side].pieces[0][4])
            half = self.halves[side]
            self._take(side, half, half.pieces.pop(0))
            return True
        gaps = []
        for side in (0, 1):
            half = self.halves[side]
            acked = half.acked > half.position
            if half.pieces and side not in ready:
                stop = min(half.pieces[0][0], half.acked) if acked else half.pieces[0][0]
                gaps.append((not acked, half.pieces[0][4], side, stop))
            elif acked and not half.pieces:
                gaps.append((False, 0, side, half.acked))
        if not gaps:
            return False
        _, _, side, stop = min(gaps)
        self._declare(side, stop)
        return True

    def _declare(self, side: int, stop: int) -> None:
        """Declare the missing bytes up to `stop` a gap."""
        half = self.halves[side]
        count = stop - half.position
        half.position = stop
        if count == 1 and not half.pieces:
            self.has_unseen_fin = True
            self._end(side)  # the sequence number of a FIN
        else:
            half.gaps += 1
            half.gap_bytes += count
            self.receiver.gap(side, count, self.clock_ns)

    def _end(self, side: int) -> None:
        half = self.halves[side]
        if not half.ended:
            half.ended = True
            self.open_sides -= 1
            self.receiver.close(side, self.clock_ns)
