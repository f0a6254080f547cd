"""Packets whose time goes back, if several readers read the parts of a capture.

Duty: each reader counts such packets of its part. If a part has a time before the latest time of earlier parts, its
packets are counted again with that latest time. Memory: one window.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kproxy.capture.dissection.copies import times_of
from kproxy.capture.formats import splits
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import NONE, Quality
from kproxy.convert.parts.places import index_at, part_of
from kproxy.convert.parts.reader import Part


class Times(NamedTuple):
    """The times of a part, as in `reader.Found`."""

    begin: int
    until: int
    first_ns: int
    last_ns: int


def late(times: Sequence[Times]) -> list[tuple[int, int]]:
    """Return (index, latest earlier time) of parts with a time before the latest time of earlier parts."""
    found = []
    reached = NONE
    for number, part in enumerate(times):
        if part.first_ns != NONE and part.first_ns < reached:
            found.append((number, reached))
        reached = max(reached, part.last_ns)
    return found


def back(part: Part, times: Times, before_ns: int) -> tuple[int, int, int]:
    """Return (packets of a part whose time goes back, first time, last time), given the latest time before the part."""
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
    """Yield the packets of a part without its warm-up, and without the packets of the next part."""
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
