"""Counters of a cluster's upstream: connections to its brokers, refused loops, and whether it is ready.

Bound: the brokers of a cluster that have a port; `folding` adds up those that have it no longer. Runs on the event
loop's thread; a scrape reads from another thread and copies each container in one step. Refuses to know labels' text
and how a scrape arrives.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy.metrics.counters.bounds import DURATION_NS, cell
from kproxy.metrics.scrape.known import MAX_BORN


class ClusterState(NamedTuple):
    """The state of a cluster at a scrape."""

    ready: bool
    accepting: bool
    listeners: int  # open ports


class DialCells:
    """Connection attempts to one broker: durations of successful ones, and failures by cause."""

    __slots__ = ("duration", "duration_ns", "failures")

    def __init__(self, causes: Sequence[str]) -> None:
        self.duration = cell(DURATION_NS)
        self.duration_ns = 0
        self.failures = dict.fromkeys(causes, 0)


class UpstreamCells:
    """The cells of one cluster's upstream. causes: label values of failed dials, whose series begin at 0."""

    def __init__(self, causes: Sequence[str], state: Callable[[], ClusterState]) -> None:
        self.state = state
        self.dials: dict[str, DialCells] = {}  # by broker, as its label
        self.loops = 0
        self._causes = causes

    def broker_known(self, broker: str) -> None:
        """Begin the series of a broker; beyond MAX_BORN brokers they begin with the first dial."""
        if len(self.dials) < MAX_BORN:
            self._cells(broker)

    def _cells(self, broker: str) -> DialCells:
        cells = self.dials.get(broker)
        if cells is None:
            cells = self.dials[broker] = DialCells(self._causes)
        return cells

    def dialled(self, broker: str, duration_ns: int) -> None:
        """Count a connection to a broker. duration_ns includes the look-up of its name."""
        cells = self._cells(broker)
        cells.duration[bisect_left(DURATION_NS, duration_ns)] += 1
        cells.duration_ns += duration_ns

    def dial_failed(self, broker: str, cause: str) -> None:
        """Count a failed connection to a broker."""
        failures = self._cells(broker).failures
        failures[cause if cause in failures else "other"] += 1

    def loop_refused(self) -> None:
        """Count a connection that was refused or closed because it leads back to kproxy."""
        self.loops += 1
