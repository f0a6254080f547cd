"""The times at which a log reached its offsets: a few points that reach back hours, denser for recent times.

A point (offset, time) means that every record from that offset on was written at that time or later. The time of an
offset is that of the last point at or before it: never too late, and too early by at most a quarter of its age, and
2 s. Neighbours are MIN_SPACING_NS apart, and after thinning an eighth of their age, so MAX_POINTS reach back a day.
Bound: MAX_POINTS of 16 bytes.

Points are replaced as a whole, so that a scrape can read them while the loop's thread adds some.
"""

from array import array
from bisect import bisect_right

MAX_POINTS = 96
MIN_SPACING_NS = 10**9
_SPACING_OF_AGE = 8

Points = tuple["array[int]", "array[int]"]  # offsets, ascending; their times in ns, ascending


class Marks:
    """Points of one log, by one clock."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: Points = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._points[0])

    def points(self) -> list[tuple[int, int]]:
        """Return the (offset, time in ns) of each point, ascending."""
        return [*zip(*self._points, strict=True)]

    def add(self, offset: int, time_ns: int, now_ns: int) -> None:
        """Learn a point, unless it is too close to the one before it."""
        offsets, times = self._points
        at = bisect_right(offsets, offset)
        if at and time_ns - times[at - 1] < _spacing_ns(time_ns, now_ns):
            return
        # Later offsets with an earlier time are redundant.
        end = at
        while end < len(times) and times[end] <= time_ns:
            end += 1
        offsets = offsets[:at] + array("q", (offset,)) + offsets[end:]
        times = times[:at] + array("q", (time_ns,)) + times[end:]
        self._points = (offsets, times) if len(times) <= MAX_POINTS else _thinned(offsets, times, now_ns)

    def latest_ns(self, offset: int) -> int | None:
        """Return a lower bound, in ns, of the time when the record at `offset` was written; None: unknown."""
        offsets, times = self._points
        at = bisect_right(offsets, offset)
        return times[at - 1] if at else None

    def clear(self) -> None:
        """Forget all points, for example when a log was truncated."""
        self._points = array("q"), array("q")


def _spacing_ns(time_ns: int, now_ns: int) -> int:
    return max(MIN_SPACING_NS, (now_ns - time_ns) // _SPACING_OF_AGE)


def _thinned(offsets: "array[int]", times: "array[int]", now_ns: int) -> Points:
    """Return the points thinned to the spacing of their present age, the newest MAX_POINTS of them."""
    kept = [0]
    for at in range(1, len(times)):
        if times[at] - times[kept[-1]] >= _spacing_ns(times[at], now_ns):
            kept.append(at)
    kept = kept[-MAX_POINTS:]
    return array("q", (offsets[at] for at in kept)), array("q", (times[at] for at in kept))
