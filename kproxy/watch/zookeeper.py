"""ZooKeeper's connections that are watched: counted by operation, and recorded as the registry and its groups.

Duty: take what the sessions of flows say to cells and rows. Flows are read one after the other, so what a window of
packets said is kept until `hand_on`, which has the order of time: groups that coordinate through ZooKeeper need it.
Bounded by a window, and by `insight.registry_groups`. Refuses to know packets, and where rows go.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from kproxy.insight import registry
from kproxy.insight.registry_groups import ConsumerGroups
from kproxy.insight.rows import TABLES, RegistryRow, Row
from kproxy.metrics.zookeeper import ZooKeeperCells
from kproxy.wire.connection import ConnectionInfo
from kproxy.zookeeper.session import Event

Take = Callable[[str, Sequence[Any]], None]  # rows, by the name of their table

_AT = attrgetter("time_ns")


class ZooKeeperConnections:
    """Those of one cluster."""

    def __init__(self, cluster: str, take: Take | None) -> None:
        """take: None: nothing is recorded."""
        self.cells = ZooKeeperCells([])
        self._cluster = cluster
        self._take = take
        self._groups = ConsumerGroups(cluster)
        self._heard: list[RegistryRow] = []  # of the window in hand

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        """What takes the events of a connection."""
        ends = registry.Ends(info.client_address, info.client_port, info.broker_address, info.broker_port, info.id)

        def listen(events: list[Event]) -> None:
            for event in events:
                self.cells.count(event)
                if self._take is not None:
                    self._heard += registry.rows(event, self._cluster, ends)

        return listen

    def hand_on(self) -> None:
        """A window of packets has been read."""
        if self._take is None or not self._heard:
            return
        self._heard.sort(key=_AT)
        self._take("registry", self._heard)
        for row in self._heard:
            self._record(self._groups.feed(row))
        self._heard = []

    def finish(self) -> None:
        """No packet comes any more."""
        self.hand_on()
        self._record(self._groups.finish())

    def _record(self, rows: Iterable[Row]) -> None:
        if self._take is not None:
            for row in rows:
                self._take(TABLES[type(row)], [row])
