"""Two half-streams of TCP, put back in order: segments in, deliveries out.

Duty: sequence numbers (which wrap) become positions that only grow; early bytes are queued, repeated bytes are dropped,
and bytes that never arrive are a hole. The first bytes captured of a position win. A `Conversation` delivers to a
`Receiver`, whose three methods are those of a Session:

- a segment is delivered after the bytes that it acknowledges: its sender had them. So an answer never overtakes its
  request, whatever the order in the capture;
- a hole is declared when the peer has acknowledged it and still PATIENCE segments of the connection went by without it,
  or when more than MAX_QUEUED bytes wait after it, or at the end; bytes cut by the snap length are a hole at once;
- the time of a delivery is the latest of the segments delivered so far: the clock never goes back;
- a segment beyond any window is a stray. Strays that follow one another and that the peer acknowledges show a hole of
  more than FURTHEST bytes, as a missing file of a rotated capture leaves: delivery goes on at them. Sequence numbers
  wrap, so the size of such a hole is only known modulo 4 GiB. If it is just short of a multiple of that, up to BEHIND
  bytes after it count as retransmitted.

Memory: MAX_QUEUED bytes per half-stream, in at most MAX_PIECES pieces, and the last KEPT_STRAYS strays that follow one
another; no more than the Budget that several share. KEPT_TIMES numbers, and one for each segment sent again since
`keep`. Refuses to know packets, flows and Kafka.
"""

from bisect import bisect_left
from typing import Protocol

from kproxy.capture.packets import ACK, FIN
from kproxy.capture.stalls import LATE, REPEATED, Stalls

MASK = 0xFFFF_FFFF
HALF = 0x8000_0000

MAX_QUEUED = 4 << 20
MAX_PIECES = 4096
PATIENCE = 64
OVERTAKEN_NS = 3_000_000
FURTHEST = 1 << 30  # the largest window that TCP can have (RFC 7323)
BEHIND = 16 << 20  # nothing that is so far behind is sent again; hosts have smaller buffers
KEPT_TIMES = 256  # of retransmitted segments
KEPT_STRAYS = 16  # also how many show a hole if the peer was not captured

CAPTURED, MISSING, END = 0, 1, 2

# Bytes that were retransmitted until the peer acknowledged them, or the connection ended: for how long, since when, how
# often they were sent again.
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

# (start, stop, kind, bytes, time_ns, the peer's position that its sender had reached)
Piece = tuple[int, int, int, memoryview, int, int]
_EMPTY = memoryview(b"")


class Receiver(Protocol):
    """Takes a conversation's bytes, holes and ends, in order: a Session, or what stands before it."""

    def receive(self, side: int, view: memoryview, now_ns: int) -> object: ...

    def gap(self, side: int, count: int, now_ns: int) -> object: ...

    def close(self, side: int, now_ns: int) -> object: ...


def ahead(number: int, position: int) -> int:
    """How far a 32-bit sequence number lies ahead of a position; negative: behind. Right within 2 GiB either way."""
    return ((number - position + HALF) & MASK) - HALF


class HalfStream:
    """One direction: bytes delivered up to `position`, and the pieces that wait."""

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
        self.first = -1  # where it stood when the capture, or the connection, began
        self.acked = -1  # the furthest position that the peer acknowledged, where that was looked at
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
        self.long_gaps = 0  # of them, those with a size known only modulo 4 GiB
        self.astray: Astray | None = None
        self.unacked: list[int] | None = None  # what is sent again now: behind it, since_ns, how often
        self.late = 0  # times that bytes were sent again before the peer acknowledged them
        self.latest = NOT_LATE
        self.zero_window = False  # now
        self.zero_windows = 0

    def queue(self, start: int, stop: int, kind: int, data: memoryview, time_ns: int, after: int) -> bool:
        """Queue what no earlier segment brought of [start, stop); whether there was anything.

        The bytes stay where they are, until `keep`.
        """
        pieces = self.pieces
        start = max(start, self.position)
        base = stop - len(data)  # of data[0]
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
        """Copy the queued pieces: they outlive the buffers that they came in."""
        self.pieces = [
            (start, stop, kind, _lasting(data), time_ns, after)
            for start, stop, kind, data, time_ns, after in self.pieces
        ]


def _lasting(data: memoryview) -> memoryview:
    whole = data.obj
    return data if isinstance(whole, bytes) and len(whole) == len(data) else memoryview(bytes(data))


def _arrived(half: HalfStream, time_ns: int) -> None:
    """The retransmitted bytes were acknowledged, or never will be."""
    assert half.unacked is not None
    _, since_ns, times = half.unacked
    half.unacked = None
    half.late += 1
    half.latest = max(half.latest, (time_ns - since_ns, since_ns, times))


class Astray:
    """Strays of one direction that follow one another: its stream beyond a hole, if the peer acknowledges them."""

    __slots__ = ("count", "is_acked", "kept", "left", "start", "stop")

    def __init__(self, seq: int) -> None:
        self.start = seq  # sequence numbers, of the first byte
        self.stop = seq  # and behind the last
        self.count = 0
        self.is_acked = False
        self.left = 0  # segments of the connection that may go by until it is forgotten
        self.kept: list[tuple[int, bytes, int, int]] = []  # the last KEPT_STRAYS: seq, bytes, length, time_ns

    def holds(self, seq: int) -> bool:
        """Whether the byte with a sequence number is among them."""
        return (seq - self.start) & MASK < (self.stop - self.start) & MASK

    @property
    def kept_bytes(self) -> int:
        return sum(len(data) for _, data, _, _ in self.kept)


class Budget:
    """The bytes that several conversations together may hold back."""

    __slots__ = ("least", "left")

    def __init__(self, size: int) -> None:
        self.left = size
        self.least = size  # that was left so far


class Conversation:
    """Both half-streams of one connection, in the order in which its ends saw them."""

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
        self._patience = -1  # segments that may still go by before a hole is declared; -1: nothing waits
        # When segments were sent again, in order, each later than anything that was delivered before it: so which ones
        # lie between the ends of an exchange does not depend on when that is asked.
        self.retransmitted_ns: list[int] = []
        self.stalls = Stalls()
        self._has_stalled = False  # by the segment that was taken last
        self._was_unacked = False  # what it sent again

    def open(self, side: int, seq: int, *, seen: bool = True) -> None:
        """A SYN of `side`: its stream begins after it. seen: it was captured; else the other side's answer shows it."""
        half = self.halves[side]
        half.first = seq
        half.position = seq + 1
        half.seen = seen

    @property
    def is_calm(self) -> bool:
        """Whether both sides were seen, and the next segment may be the common case."""
        return self._patience < 0 and all(
            half.seen and half.position >= 0 and not half.zero_window for half in self.halves
        )

    @property
    def is_still(self) -> bool:
        """Whether it is calm and no side has ended: only positions matter for the next packets."""
        return self.is_calm and not any(half.ended or half.fin or half.astray for half in self.halves)

    def count_anew(self) -> None:
        """Reset the counters: the previous reader reports the counts up to here."""
        self.strays = 0
        for half in self.halves:
            for name in COUNTERS:
                setattr(half, name, 0)
            half.latest = NOT_LATE

    def join(self, before: "Conversation", turned: int) -> None:
        """Add what was counted of the same connection before; turned: 1 where its sides are the other way round."""
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
        """A segment that is not a SYN. `view` holds what was captured of its `length` bytes.

        Whether it only brought what was there already, so that the owner can look whether it is the same packet again.
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
        ):  # the common case: in order, whole, and nothing waits
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
        self.stalls.window(side, window > 0, time_ns)
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
        """Copy the waiting pieces, which outlive their buffers; keep only the last times of retransmissions."""
        for half in self.halves:
            if half.pieces:
                half.keep()
        if len(self.retransmitted_ns) > KEPT_TIMES:
            del self.retransmitted_ns[:-KEPT_TIMES]
        self.stalls.keep()

    def same_packet(self, side: int) -> None:
        """The segment just taken was not sent again, but captured twice."""
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
        """Nothing more will come: holes are declared, and both sides end."""
        self._budget.left += self.halves[0].queued_bytes + self.halves[1].queued_bytes
        for half in self.halves:
            self._forget(half)
        while self._deliver() or self._give_up():  # waiting pieces keep their times of arrival
            pass
        self.clock_ns = max(self.clock_ns, time_ns)
        for half in self.halves:
            if half.unacked is not None:
                _arrived(half, self.clock_ns)
        for side in (0, 1):
            self._end(side)

    def _stray(self, side: int, seq: int, view: memoryview, length: int, time_ns: int) -> None:
        """A segment beyond any window: it may be the next of those behind a long hole."""
        half = self.halves[side]
        astray = half.astray
        if astray is not None and astray.holds(seq):
            return  # sent again
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
            self._patience = PATIENCE  # so that every acknowledgement is examined

    def _anchor(self, side: int) -> None:
        """Go on behind a long hole, if enough shows that there is one."""
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
        if count := (kept[0][0] - half.position) & MASK:  # else what had waited reaches up to them
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
        """A segment went by: strays that nothing has followed for long show no hole."""
        for half in self.halves:
            if half.astray is not None:
                half.astray.left -= 1
                if half.astray.left < 0:
                    self._forget(half)

    def _forget(self, half: HalfStream) -> None:
        """Drop the strays that are kept."""
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
                since_ns = half.pieces[0][4] if half.pieces else time_ns  # when what waits for it came
                fresh = half.queue(start, captured, CAPTURED, view, time_ns, after) if len(view) else False
                if captured < stop:
                    half.truncated += 1
                    fresh |= half.queue(captured, stop, MISSING, _EMPTY, time_ns, after)
                if not fresh:
                    self._again(half, time_ns)
                elif not in_order and half.pieces[-1][0] > start:
                    # Wireshark's rule: a segment late by up to 3 ms was overtaken, a later one is a retransmission.
                    if time_ns - half.pieces[-1][4] <= OVERTAKEN_NS:
                        half.out_of_order += 1
                    else:
                        self._again(half, time_ns)
                        self._has_stalled = self.stalls.add(since_ns, time_ns, side, LATE)
        if not peer.seen and peer.position < peer.acked:
            self._declare(1 - side, peer.acked)  # a capture of one direction: nothing to wait for
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
        """While something waits, count the segments that go by; give up in time."""
        self._budget.least = min(self._budget.least, self._budget.left)
        while half.pieces or peer.pieces or half.position < half.acked or peer.position < peer.acked:
            crowded = (
                max(half.queued_bytes, peer.queued_bytes) > MAX_QUEUED
                or max(len(half.pieces), len(peer.pieces)) > MAX_PIECES
                or self._budget.left < 0
            )
            acked = half.position < half.acked or peer.position < peer.acked
            if not crowded and (self._patience < 0 or not acked):
                self._patience = PATIENCE  # bytes without an acknowledgement may still be retransmitted
                return
            if not crowded and self._patience > 0:
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
        """Deliver what is contiguous and whose sender's view is delivered; whether there was any."""
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
        """Take a step that patience forbade: deliver out of turn, or declare a hole; whether there was one to take."""
        ready = [side for side in (0, 1) if (h := self.halves[side]).pieces and h.pieces[0][0] == h.position]
        if len(ready) == 2:  # each waits for the other: one of them was sent again, and its first copy not captured
            side = min(ready, key=lambda side: self.halves[side].pieces[0][4])
            half = self.halves[side]
            self._take(side, half, half.pieces.pop(0))
            return True
        holes = []
        for side in (0, 1):
            half = self.halves[side]
            acked = half.acked > half.position
            if half.pieces and side not in ready:
                stop = min(half.pieces[0][0], half.acked) if acked else half.pieces[0][0]
                holes.append((not acked, half.pieces[0][4], side, stop))
            elif acked and not half.pieces:
                holes.append((False, 0, side, half.acked))
        if not holes:
            return False
        _, _, side, stop = min(holes)
        self._declare(side, stop)
        return True

    def _declare(self, side: int, stop: int) -> None:
        """The bytes missing up to `stop` will not arrive."""
        half = self.halves[side]
        count = stop - half.position
        half.position = stop
        if count == 1 and not half.pieces:
            self.has_unseen_fin = True
            self._end(side)  # the one number that a FIN takes
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
