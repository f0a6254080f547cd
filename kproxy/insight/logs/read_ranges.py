"""Offset ranges read from a coordinator's log, and the pending offsets of open transactions in them.

Duty: ranges of offsets without a gap. A gap hides records: a marker in it may have ended a transaction, so the next
marker of that producer decides nothing about offsets before the gap. When another read fills the gap, the ranges on
both sides merge, and the first marker after it ends the transaction that was open before it. Compaction leaves gaps
that are never filled: transactions before such a gap stay open.

Bounds: MAX_RANGES of a partition, beyond which the lowest gap counts as read; MAX_PENDING offsets of transactions and
MAX_ENDED first markers of producers, over all partitions, the oldest removed. `left_out` counts pending offsets that
are removed without an end. Refuses to know records and the contents of a row.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from kproxy.insight.rows import CommittedOffset

MAX_RANGES = 64
MAX_PENDING = 100_000
MAX_ENDED = 20_000


class Marker(NamedTuple):
    """A control record that ends a transaction. change: committed or aborted; None: another type of control record."""

    change: str | None
    time_ns: int
    offset: int
    connection: int | None
    number: int | None


class Range:
    """[begin, end): pending offsets by producer, and the first marker of each producer in it."""

    __slots__ = ("begin", "end", "ended", "knows_ends", "pending")

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.pending: dict[int, list[CommittedOffset]] = {}
        self.ended: dict[int, Marker] = {}
        self.knows_ends = True  # False: `ended` is incomplete, and takes no more markers


class ReadRanges:
    """The ranges read of one partition, in the order of offsets."""

    __slots__ = ("epoch", "ranges")

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.epoch = -1  # the newest leader epoch seen

    def take(self, base: int, last: int, epoch: int) -> tuple[Range, bool] | None:
        """Return the batch's range, and whether it is history (later offsets were read); None: it was read before."""
        ranges = self.ranges
        place = bisect_right(ranges, base, key=lambda each: each.begin)
        if place and base < ranges[place - 1].end:
            return None
        if place < len(ranges) and last >= ranges[place].begin:
            return None
        if place and ranges[place - 1].end == base:
            found = ranges[place - 1]
        else:
            found = Range(base)
            ranges.insert(place, found)
        found.end = last + 1
        is_history = found is not ranges[-1]
        if not is_history:
            self.epoch = max(epoch, self.epoch)
        return found, is_history

    def is_shorter(self, base: int, epoch: int) -> bool:
        """Return whether a new leader's log ended before known offsets: offsets from `base` on were truncated."""
        ranges = self.ranges
        return bool(ranges) and epoch > self.epoch >= 0 and ranges[0].begin <= base < ranges[-1].end


class OpenTransactions:
    """Pending offsets of open transactions, over all partitions."""

    def __init__(self) -> None:
        self.left_out = 0
        self._pending: dict[tuple[Range, int], None] = {}  # the oldest first
        self._pending_count = 0
        self._ended: dict[tuple[Range, int], None] = {}

    def pend(self, where: Range, producer: int, row: CommittedOffset) -> None:
        """Keep a row until its transaction ends. Its marker may never be read: MAX_PENDING drops the oldest."""
        if self._pending_count >= MAX_PENDING:
            oldest = next(iter(self._pending))
            if oldest == (where, producer):
                self.left_out += 1
                return
            self.left_out += len(self._taken(*oldest))
        self._pending[where, producer] = None
        where.pending.setdefault(producer, []).append(row)
        self._pending_count += 1

    def end(self, where: Range, producer: int, marker: Marker) -> Iterator[CommittedOffset]:
        """End a producer's transaction at its marker; yield its pending offsets as committed or aborted."""
        if producer not in where.ended and where.knows_ends:
            self._remember(where, producer, marker)
        yield from _ended(self._taken(where, producer), marker)

    def forget(self, where: Range) -> None:
        """Drop the pending offsets and the markers of a range."""
        for producer in list(where.pending):
            self.left_out += len(self._taken(where, producer))
        self._forget_ends(where)

    def doubt(self, where: Range, producer: int) -> None:
        """Drop a producer's pending offsets: a batch of it was unreadable and may have been a marker."""
        self.left_out += len(self._taken(where, producer))
        where.knows_ends &= producer in where.ended

    def shorten(self, read: ReadRanges, base: int) -> None:
        """Truncate the ranges at `base`; drop the pending offsets and markers of every range that this changes."""
        ranges = read.ranges
        while ranges and ranges[-1].end > base:
            self.forget(ranges[-1])
            if ranges[-1].begin >= base:
                ranges.pop()
            else:
                ranges[-1].end = base

    def settle(self, read: ReadRanges, grown: Range) -> Iterator[CommittedOffset]:
        """Merge a grown range with the next one if it reaches it; yield the offsets whose transactions end by that."""
        ranges = read.ranges
        place = bisect_right(ranges, grown.begin, key=lambda each: each.begin) - 1
        if place + 1 < len(ranges) and ranges[place + 1].begin == grown.end:
            lower, upper = ranges[place : place + 2]
            if _weight(upper) < _weight(lower):
                del ranges[place + 1]
                yield from self._into_lower(lower, upper)
            else:
                del ranges[place]
                yield from self._into_upper(lower, upper)
        if len(ranges) > MAX_RANGES:
            lower, upper = ranges[:2]
            begin = lower.begin
            self.forget(lower)
            self._forget_ends(upper)
            upper.begin = begin
            del ranges[0]

    # --- two ranges become one: the smaller one is moved -------------------------------------------------------------

    def _into_lower(self, lower: Range, upper: Range) -> Iterator[CommittedOffset]:
        for producer, marker in list(upper.ended.items()):
            yield from _ended(self._taken(lower, producer), marker)
            if producer not in lower.ended and lower.knows_ends:
                self._remember(lower, producer, marker)
        if not upper.knows_ends:  # a forgotten marker may have ended the transactions still open
            for producer in list(lower.pending):
                self.left_out += len(self._taken(lower, producer))
        for producer in list(upper.pending):
            for row in self._taken(upper, producer):
                self.pend(lower, producer, row)
        lower.end = upper.end
        lower.knows_ends &= upper.knows_ends
        self._forget_ends(upper)

    def _into_upper(self, lower: Range, upper: Range) -> Iterator[CommittedOffset]:
        for producer in list(lower.pending):
            rows = self._taken(lower, producer)
            marker = upper.ended.get(producer)
            if marker is not None:
                yield from _ended(rows, marker)
            elif upper.knows_ends:
                rows += self._taken(upper, producer)
                for row in rows:
                    self.pend(upper, producer, row)
            else:
                self.left_out += len(rows)
        ended, knows_ends = dict(lower.ended), lower.knows_ends and upper.knows_ends
        if not lower.knows_ends:  # the upper range's markers may not be the first ones either
            self._forget_ends(upper)
        self._forget_ends(lower)
        upper.begin, upper.knows_ends = lower.begin, knows_ends
        for producer, marker in ended.items():
            self._remember(upper, producer, marker)

    def _taken(self, where: Range, producer: int) -> list[CommittedOffset]:
        """Remove and return a producer's pending offsets in a range."""
        rows = where.pending.pop(producer, [])
        if rows:
            del self._pending[where, producer]
            self._pending_count -= len(rows)
        return rows

    def _forget_ends(self, where: Range) -> None:
        for producer in where.ended:
            del self._ended[where, producer]
        where.ended.clear()
        where.knows_ends = False

    def _remember(self, where: Range, producer: int, marker: Marker) -> None:
        where.ended[producer] = marker
        self._ended[where, producer] = None
        if len(self._ended) > MAX_ENDED:
            oldest, of_producer = next(iter(self._ended))
            del self._ended[oldest, of_producer], oldest.ended[of_producer]
            oldest.knows_ends = False


def _ended(rows: list[CommittedOffset], marker: Marker) -> Iterator[CommittedOffset]:
    if marker.change is None:
        return
    for row in rows:
        yield row._replace(
            time_ns=marker.time_ns,
            change=marker.change,
            log_offset=marker.offset,
            connection=marker.connection,
            number=marker.number,
        )


def _weight(where: Range) -> int:
    return len(where.pending) + len(where.ended)
