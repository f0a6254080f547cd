"""ZooKeeper connections in captured traffic: counted by operation, recorded as registry and consumer groups.

Duty: pass events of the flows' sessions to cells and rows. Flows are read one after the other, so rows of a window of
packets are kept until `hand_on`, which sorts them by time: groups that coordinate through ZooKeeper need that. Bounded
by a window, and by `insight.membership.registry_groups`. Refuses to know packets, and where rows go.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from kproxy.insight import registry
from kproxy.insight.membership.registry_groups import ConsumerGroups
from kproxy.insight.rows import TABLES, RegistryRow, Row
from kproxy.metrics.counters.zookeeper import ZooKeeperCells
from kproxy.wire.connection import ConnectionInfo
from kproxy.zookeeper.session import Event

Take = Callable[[str, Sequence[Any]], None]  # (table name, rows)

_AT = attrgetter("time_ns")


class ZooKeeperConnections:
    """The ZooKeeper connections of one cluster."""

    def __init__(self, cluster: str, take: Take | None) -> None:
        """take: None disables recording."""
        self.cells = ZooKeeperCells([])
        self._cluster = cluster
        self._take = take
        self._groups = ConsumerGroups(cluster)
        self._window_rows: list[RegistryRow] = []  # of the current window

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        """Return the function that takes a connection's events."""
        ends = registry.Ends(info.client_address, info.client_port, info.broker_address, info.broker_port, info.id)

        def listen(events: list[Event]) -> None:
            for event in events:
                self.cells.count(event)
                if self._take is not None:
                    self._window_rows += registry.rows(event, self._cluster, ends)

        return listen

    def hand_on(self) -> None:
        """Record the rows of a window in the order of time."""
        if self._take is None or not self._window_rows:
            return
        self._window_rows.sort(key=_AT)
        self._take("registry", self._window_rows)
        for row in self._window_rows:
            self._record(self._groups.feed(row))
        self._window_rows = []

    def finish(self) -> None:
        """Record the last rows, after the last packet."""
        self.hand_on()
        self._record(self._groups.finish())

    def _record(self, rows: Iterable[Row]) -> None:
        if self._take is not None:
            for row in rows:
                self._take(TABLES[type(row)], [row])
