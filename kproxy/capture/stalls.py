"""A connection's waits in TCP: bytes lost on the way, and receivers whose window was closed.

Duty: intervals, and how much of an exchange each kind explains. A retransmission explains a wait if it delayed bytes:
a hole that it filled (LATE), or a pause without any delivery before unacknowledged bytes were retransmitted
(REPEATED). A retransmission of acknowledged bytes is spurious and explains nothing. A closed window (CLOSED) is the
receiver's: it had no room for more.

In one exchange, after its queue and mutes, which come first: lost bytes of the client delay the sending,
those of the broker the answer; the broker's closed window delays the sending, the client's the answer.

Memory: KEPT intervals. Refuses to know segments.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

KEPT = 256
LATE, REPEATED, CLOSED = 0, 1, 2

Stall = tuple[int, int, int, int]  # start_ns, end_ns, side, kind
NOTHING: tuple[int, ...] = ()
_END = itemgetter(1)


class Stalls:
    """The intervals of one connection, in the order of their ends."""

    __slots__ = ("_closed_ns", "_last_ns", "found")

    def __init__(self) -> None:
        self.found: list[Stall] = []
        self._last_ns = -1  # the latest end
        self._closed_ns = [-1, -1]  # since when the window of each side is closed

    def add(self, start_ns: int, end_ns: int, side: int, kind: int) -> bool:
        """Note an interval; whether it is longer than nothing."""
        if start_ns < end_ns:
            self.found.append((start_ns, end_ns, side, kind))
            self._last_ns = max(self._last_ns, end_ns)
        return start_ns < end_ns

    def window(self, side: int, is_open: bool, time_ns: int) -> None:
        """A side advertised its window: open or closed."""
        since = self._closed_ns[side]
        if is_open and since >= 0:
            self._closed_ns[side] = -1
            self.add(since, time_ns, side, CLOSED)
        elif not is_open and since < 0:
            self._closed_ns[side] = time_ns

    def keep(self) -> None:
        """Only the last intervals are kept."""
        if len(self.found) > KEPT:
            del self.found[:-KEPT]

    @property
    def last_ns(self) -> int:
        """No interval ends later; -1: there was none."""
        return self._last_ns if self._closed_ns == [-1, -1] else 1 << 62

    def overlap(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Whether `between` finds anything, for each of many spans of time."""
        closed = [(1 << 62, since) for since in self._closed_ns if since >= 0]
        spans = [each[1::-1] for each in self.since(int(start_ns.min()))] + sorted(closed)
        ends, starts = np.array(spans, np.int64).reshape(-1, 2).T
        # Of the intervals that end after each span's start, the one that starts first.
        earliest = np.append(np.minimum.accumulate(starts[::-1])[::-1], 1 << 62)
        found: np.ndarray = earliest[np.searchsorted(ends, start_ns, "right")] < end_ns
        return found

    def since(self, time_ns: int) -> list[Stall]:
        """The intervals that ended after a moment, by value."""
        return self.found[bisect_right(self.found, time_ns, key=_END) :]

    def between(self, start_ns: int, end_ns: int) -> list[Stall]:
        """The parts that overlap a span of time, including windows that are still closed."""
        closed = [(since, end_ns, side, CLOSED) for side, since in enumerate(self._closed_ns) if 0 <= since < end_ns]
        first = bisect_right(self.found, start_ns, key=_END)
        return [each for each in self.found[first:] if each[0] < end_ns] + closed

    def of(self, client: int, times: Sequence[int], waited_ns: int) -> tuple[int, ...]:
        """Delays of the request, of the beginning of its answer and of the rest of that: by lost bytes, then by
        windows.

        client: the client's side. times: of the request's and the answer's first and last bytes. waited_ns: its queue
        and mutes, from the request's first byte on, which need no explanation.
        """
        begun, asked, start, end = times
        if self.last_ns <= begun:
            return NOTHING
        found = self.between(begun, end)
        if not found:
            return NOTHING
        begun = min(begun + waited_ns, start)
        sent = max(begun, min(asked, start))
        lost: tuple[list[Stall], list[Stall], list[Stall]] = ([], [], [])
        closed: tuple[list[Stall], list[Stall]] = ([], [])
        for each in found:
            side, kind = each[2], each[3]
            if kind == CLOSED:
                closed[side == client].append(each)  # the reader of a request is the broker
            elif side == client:
                lost[0].append(each)
                if kind == REPEATED and each[0] == asked:
                    lost[1].append(each)  # the last byte of the request was the last thing before it
            else:
                lost[2].append(each)
                if kind == LATE:
                    lost[1].append(each)
        spans = ((begun, sent), (sent, start), (start, end))
        losses = [_length(some, *span) for some, span in zip(lost, spans, strict=True)]
        both = [
            _length(some + more, *span)
            for some, more, span in zip(lost, (closed[0], closed[1], closed[1]), spans, strict=True)
        ]
        return (*losses, *(more - loss for more, loss in zip(both, losses, strict=True))) if any(both) else NOTHING


def _length(stalls: Sequence[Stall], low: int, high: int) -> int:
    """How much of a span some intervals cover together."""
    covered = 0
    for start, end, _, _ in sorted(stalls):
        start = max(start, low)
        end = min(end, high)
        if start < end:
            covered += end - start
            low = end
    return covered
