"""Assignment of a range of ports to node ids that are not declared, as the ids appear.

Invariants: a node id keeps its port while the cluster names it, and no two ids share a port. If no port is free,
another id gets the port of the id that complete answers have lacked the longest, for ABSENT_S at least, and that has no
open connection. Where a smaller range leaves ids that the cluster names without ports, absent ids lose theirs at once.
Assignment begins with the first complete answer, whose ids get ports in ascending order, so that a restart of an
unchanged cluster assigns the same ports. Bounded by the range. Refuses to know sockets, files and messages.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

ABSENT_S = 300.0  # clients refresh metadata after metadata.max.age.ms, 5 minutes by default
RETRY_S = 1.0  # between two searches for a port to reassign, since each one counts connections


class Held(NamedTuple):
    """The port of a node id."""

    port: int
    absent_s: float | None = None  # how long complete answers have lacked the id; None: they name it


class Given(NamedTuple):
    """An assigned port, and the node id that had it before."""

    port: int
    former: int | None = None
    absent_s: float = 0.0


class PortAssignment:
    """The ports of one range. is_declared(node_id): whether it has another port; clock(): monotonic seconds."""

    def __init__(
        self,
        ports: range,
        is_declared: Callable[[int], bool] = lambda node_id: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.range = ports
        self._is_declared = is_declared
        self.ports: dict[int, int] = {}  # by node id; other objects read it
        self.absent: dict[int, float] = {}  # node id -> time since when complete answers lack it, oldest first
        self.may_give = False
        self._owners: dict[int, int] = {}  # port -> node id
        self._clock = clock
        self._next_search = 0.0

    def restore(self, held: Mapping[int, Held]) -> None:
        """Replace all assignments by former ones, except ports outside the range and declared ids.

        Ids without a port get none, but where brokers that the cluster names lost theirs to a smaller range, absent ids
        give theirs up.
        """
        now = self._clock()
        self.ports.clear()
        self._owners.clear()
        self.absent.clear()
        for node_id, (port, _) in held.items():
            if port in self.range and port not in self._owners and not self._is_declared(node_id):
                self.ports[node_id] = port
                self._owners[port] = node_id
        absent = [(now - each.absent_s, node_id) for node_id, each in held.items() if each.absent_s is not None]
        self.absent.update({node_id: since for since, node_id in sorted(absent) if node_id in self.ports})
        self._make_room(
            sum(
                each.absent_s is None and node_id not in self.ports and not self._is_declared(node_id)
                for node_id, each in held.items()
            )
        )

    def _make_room(self, wanted: int) -> None:
        """Free ports of absent ids, longest absent first, until so many are free."""
        lacking = wanted - (len(self.range) - len(self._owners))
        for node_id in list(self.absent)[: max(0, lacking)]:
            del self.absent[node_id]
            del self._owners[self.ports.pop(node_id)]

    def held(self) -> dict[int, Held]:
        """Return all assignments, as accepted by `restore`."""
        now = self._clock()
        return {
            node_id: Held(port, now - self.absent[node_id] if node_id in self.absent else None)
            for node_id, port in self.ports.items()
        }

    def named(self, node_id: int) -> bool:
        """Record that an answer names an id that has a port. Returns whether it was absent."""
        return self.absent.pop(node_id, None) is not None

    def answered(self, node_ids: Collection[int]) -> bool:
        """Apply the ids of a complete answer. Returns whether further ids are absent now."""
        self.may_give = True
        now = self._clock()
        absent = [node_id for node_id in self.ports if node_id not in node_ids and node_id not in self.absent]
        self.absent.update(dict.fromkeys(absent, now))
        return bool(absent)

    def give(self, node_id: int, busy: Callable[[], Collection[int]]) -> Given | None:
        """Assign an id without a port the first free one, or one that may be reassigned; returns None if there is none.

        busy(): returns the ids that have open connections.
        """
        if not self.may_give:
            return None
        if len(self._owners) < len(self.range):
            port = next(port for port in self.range if port not in self._owners)
            return self._given(node_id, Given(port))
        now = self._clock()
        if now < self._next_search or not self.absent or now - next(iter(self.absent.values())) < ABSENT_S:
            return None
        self._next_search = now + RETRY_S
        connected = busy()
        for former, since in self.absent.items():
            if now - since < ABSENT_S:
                return None
            if former not in connected:
                del self.absent[former]
                self._next_search = 0.0
                return self._given(node_id, Given(self.ports.pop(former), former, now - since))
        return None

    def move(self, node_id: int, unusable: Collection[int]) -> bool:
        """Assign an id with a port the first free one that is not unusable. Returns whether there is one."""
        port = next((port for port in self.range if port not in self._owners and port not in unusable), None)
        if port is None:
            return False
        del self._owners[self.ports[node_id]]
        self._given(node_id, Given(port))
        return True

    def _given(self, node_id: int, given: Given) -> Given:
        self.ports[node_id] = given.port
        self._owners[given.port] = node_id
        return given
