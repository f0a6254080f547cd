"""A connection's delays in TCP: lost bytes, and receivers with a closed window.

Duty: the intervals of these delays, and their share in the duration of an exchange. A retransmission explains a delay
if it filled a gap (LATE), or if unacknowledged bytes were retransmitted after a pause without any delivery (REPEATED).
A retransmission of acknowledged bytes is spurious and explains nothing. A receiver with a full buffer closes its window
(CLOSED).

Within an exchange, after its queue and mutes, which precede: lost bytes of the client delay the request, lost bytes of
the broker the response; a closed window of the broker delays the request, one of the client the response.

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
        """Add an interval; return whether it is longer than 0.

        It ends no earlier than the one before it, even if the capture's clock goes back.
        """
        if start_ns < end_ns:
            end_ns = self._last_ns = max(self._last_ns, end_ns)
            self.found.append((start_ns, end_ns, side, kind))
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
        """The latest end of an interval; far in the future while a window is closed; -1: there was none."""
        return self._last_ns if self._closed_ns == [-1, -1] else 1 << 62

    def overlap(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Whether `between` finds an interval, for each of many spans of time."""
        closed = [(1 << 62, since) for since in self._closed_ns if since >= 0]
        spans = [each[1::-1] for each in self.since(int(start_ns.min()))] + sorted(closed)
        ends, starts = np.array(spans, np.int64).reshape(-1, 2).T
        # The earliest start of the intervals that end after the start of each span.
        earliest = np.append(np.minimum.accumulate(starts[::-1])[::-1], 1 << 62)
        found: np.ndarray = earliest[np.searchsorted(ends, start_ns, "right")] < end_ns
        return found

    def since(self, time_ns: int) -> list[Stall]:
        """The intervals that ended after a time."""
        return self.found[bisect_right(self.found, time_ns, key=_END) :]

    def between(self, start_ns: int, end_ns: int) -> list[Stall]:
        """The intervals that overlap a span of time, including windows that are still closed."""
        closed = [(since, end_ns, side, CLOSED) for side, since in enumerate(self._closed_ns) if 0 <= since < end_ns]
        first = bisect_right(self.found, start_ns, key=_END)
        return [each for each in self.found[first:] if each[0] < end_ns] + closed

    def of(self, client: int, times: Sequence[int], waited_ns: int) -> tuple[int, ...]:
        """The delays of request, start of response and rest of response in ns: three by lost bytes, three by windows.

        client: the client's side. times: of the first and last byte of the request, then of the response. waited_ns:
        queue and mutes, from the first byte of the request on, which need no explanation.
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
                    lost[1].append(each)  # the last byte of the request was the last delivery before it
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
    """The part of a span that some intervals cover together, in nanoseconds."""
    covered = 0
    for start, end, _, _ in sorted(stalls):
        start = max(start, low)
        end = min(end, high)
        if start < end:
            covered += end - start
            low = end
    return covered
