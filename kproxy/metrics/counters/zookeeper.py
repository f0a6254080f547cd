"""Counters of a relayed ZooKeeper: cells by operation.

Label values are ZooKeeper's operations and `unknown`, and its errors and `other`. Series of everyday operations begin
at 0; series of other operations, and of errors, with their first occurrence. Bound: those lists. Cells change on the
event loop's thread; a scrape copies each container in one step. Refuses to know how a scrape arrives
(`zookeeper_families.py`).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from kproxy.metrics.counters.bounds import DURATION_NS, cell
from kproxy.zookeeper.records import names_of
from kproxy.zookeeper.session import ANSWERED, Event, Notification, Operation

DIRECTIONS = ("request", "response")  # bytes from clients, and from servers
UNREAD = ("command", "fault")  # causes of unread connections: a four-letter command, bytes that are not a frame


_EVENTS = frozenset(names_of("event_types").values())
_EVERYDAY = (
    *("connect", "ping", "closeSession", "create", "delete", "exists", "getData", "setData"),
    *("getChildren", "getChildren2", "multi"),
)


class OperationCells:
    """The counters of one operation of ZooKeeper."""

    __slots__ = ("errors", "latency", "latency_ns", "requests", "unanswered")

    def __init__(self) -> None:
        self.requests = 0
        self.unanswered = 0
        self.latency = cell(DURATION_NS)
        self.latency_ns = 0
        self.errors: dict[str, int] = {}


class ZooKeeperCells:
    """The counters of one `[[zookeeper]]` listener. servers: labels of the servers that it connects to."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.ops = {op: OperationCells() for op in _EVERYDAY}
        self.fired = dict.fromkeys(sorted(_EVENTS), 0)
        self.bytes = [0] * len(DIRECTIONS)
        self.unread = dict.fromkeys(UNREAD, 0)
        self.connections = 0
        self.accepted = 0
        self.sessions = 0  # of open connections
        self.values_left_out: Callable[[], int] = int
        self.dial_failures = dict.fromkeys(servers, 0)

    def count(self, event: Event) -> None:
        """Count an event of a session."""
        if isinstance(event, Operation):
            cells = self.ops.get(event.op)
            if cells is None:
                cells = self.ops[event.op] = OperationCells()
            cells.requests += 1
            if event.outcome != ANSWERED:
                cells.unanswered += 1
                return
            duration_ns = max(0, event.response_start - event.request_end)
            cells.latency[bisect_left(DURATION_NS, duration_ns)] += 1
            cells.latency_ns += duration_ns
            if event.error:
                name = names_of("errors").get(event.error, "other")
                cells.errors[name] = cells.errors.get(name, 0) + 1
        elif isinstance(event, Notification):
            kind = event.type if event.type in _EVENTS else "other"
            self.fired[kind] = self.fired.get(kind, 0) + 1
