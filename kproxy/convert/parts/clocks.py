"""Packets stamped earlier than one before them, where the parts of a capture are read by several readers.

Duty: each part's reader counts those of its part; where a part begins earlier than one before it ended, they are
counted again with the latest time before it. Memory: one window. Refuses to know who reads parts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kproxy.capture import splits
from kproxy.capture.copies import times_of
from kproxy.capture.quality import NONE, Quality
from kproxy.capture.records import Window
from kproxy.convert.parts.places import index_at, part_of
from kproxy.convert.parts.reader import Part


class Times(NamedTuple):
    """What a part's reader says of times: as `reader.Found` has them."""

    begin: int
    until: int
    first_ns: int
    last_ns: int


def late(times: Sequence[Times]) -> list[tuple[int, int]]:
    """Parts that begin earlier than one before them ended, with the latest time before."""
    found = []
    reached = NONE
    for number, part in enumerate(times):
        if part.first_ns != NONE and part.first_ns < reached:
            found.append((number, reached))
        reached = max(reached, part.last_ns)
    return found


def back(part: Part, times: Times, before_ns: int) -> tuple[int, int, int]:
    """How many packets of a part are stamped too early, the first and the last time, if the latest before is known."""
    count, first, last = 0, NONE, NONE
    for window in _windows(part, times):
        stamps = times_of(window.records)
        reached = np.maximum.accumulate(np.concatenate(([before_ns], stamps)))
        early = stamps[stamps < reached[:-1]]
        if len(early):
            count += len(early)
            first = int(early.min()) if first == NONE else min(first, int(early.min()))
            last = max(last, int(early.max()))
        before_ns = int(reached[-1])
    return count, first, last


def _windows(part: Part, times: Times) -> Iterator[Window]:
    """The packets of a part but those of its warm-up, and those of the next one's."""
    for window in splits.windows(part.split, Quality()):
        at = index_at(window, times.begin)
        if at < len(window.records):
            yield part_of(window, at)
    if part.following is not None:
        for window in splits.windows(part.following, Quality()):
            at = index_at(window, times.until)
            if at:
                yield part_of(window, 0, at)
            if at < len(window.records):
                return
