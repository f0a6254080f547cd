"""What is counted of a cluster beside its connections: dials of its brokers, loops, and whether it is ready.

Bounded by the brokers of a cluster that have a port. Runs on the thread of the event loop; a scrape reads from another
one and copies each container in one step. Refuses to know labels' text and how a scrape comes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy.metrics.bounds import DURATION_NS, cell
from kproxy.metrics.known import MAX_BORN


class ClusterState(NamedTuple):
    """How a cluster stands at the moment of a scrape."""

    ready: bool
    accepting: bool
    listeners: int  # open ports


class DialCells:
    """Dials of one broker: how long those took that succeeded, and why others failed."""

    __slots__ = ("duration", "duration_ns", "failures")

    def __init__(self, causes: Sequence[str]) -> None:
        self.duration = cell(DURATION_NS)
        self.duration_ns = 0
        self.failures = dict.fromkeys(causes, 0)


class UpstreamCells:
    """The cells of one cluster's upstream. `causes`: why a dial may fail, the values of a label, born at 0."""

    def __init__(self, causes: Sequence[str], state: Callable[[], ClusterState]) -> None:
        self.state = state
        self.dials: dict[str, DialCells] = {}  # by broker, as its label
        self.loops = 0
        self._causes = causes

    def broker_known(self, broker: str) -> None:
        """A broker that may be dialled: its series begin now, or, beyond MAX_BORN of them, with its first dial."""
        if len(self.dials) < MAX_BORN:
            self._cells(broker)

    def _cells(self, broker: str) -> DialCells:
        cells = self.dials.get(broker)
        if cells is None:
            cells = self.dials[broker] = DialCells(self._causes)
        return cells

    def dialled(self, broker: str, duration_ns: int) -> None:
        """A connection to a broker was made, its name looked up included."""
        cells = self._cells(broker)
        cells.duration[bisect_left(DURATION_NS, duration_ns)] += 1
        cells.duration_ns += duration_ns

    def dial_failed(self, broker: str, cause: str) -> None:
        """A connection to a broker could not be made."""
        failures = self._cells(broker).failures
        failures[cause if cause in failures else "other"] += 1

    def loop_refused(self) -> None:
        """A connection was refused, or closed, since it leads back to kproxy."""
        self.loops += 1
