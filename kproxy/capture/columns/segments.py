"""Segments of TCP by column, and the connections that they belong to.

A position in a connection's bytes is a segment and an offset in it. Memory: four numbers for each segment of a window.
Refuses to know frames.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.state import Usual

Place = tuple[int, int]  # a segment, and the offset in it


class Talk(Protocol):
    """A Kafka connection of a capture."""

    session: CapturedSession
    openings: dict[int, Usual]  # how requests began that its session has read, by key and version
    flip: int  # 1 where side 0 of the segments is the broker's

    def receive(self, side: int, view: memoryview, now_ns: int) -> None: ...


@dataclass(slots=True)
class Part:
    """A connection's segments: those from `low` to `high`."""

    talk: Talk
    low: int
    high: int
    clock_ns: int  # the time before them, and then after them


@dataclass(slots=True)
class Segments:
    """Segments by column, those of a connection together and in order."""

    side: np.ndarray
    start: np.ndarray
    end: np.ndarray
    time_ns: np.ndarray

    def rows(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """(side, start, end, time_ns) of some."""
        columns = (self.side, self.start, self.end, self.time_ns)
        return zip(*(column[low:high].tolist() for column in columns), strict=True)
