"""Which port of a range stands for which node id, where ids are not declared: given out as ids appear.

Invariants: a node id keeps its port while the cluster names it, and no two ids have one port. A port passes to another
id only when none is free: then that of the id that complete answers of the cluster have lacked the longest, for
ABSENT_S at least, and which has no open connection. Nothing is given out before the first complete answer, whose ids
get ports in their order: so a restart of a cluster that stays the same gives the same ports. Bounded by the range.
Refuses to know sockets, files and messages.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

ABSENT_S = 300.0  # clients ask for brokers anew after metadata.max.age.ms, 5 minutes by default
RETRY_S = 1.0  # between two searches for a port that may pass to another id, since connections are counted for each


class Held(NamedTuple):
    """The port of a node id."""

    port: int
    absent_s: float | None = None  # for how long the cluster has not named the id; None: it does


class Given(NamedTuple):
    """A port that was given out, and the node id that it stood for before."""

    port: int
    former: int | None = None
    absent_s: float = 0.0


class PortAssignment:
    """The ports of one range. is_declared(node_id): it has another port; clock: seconds that only go on."""

    def __init__(
        self,
        ports: range,
        is_declared: Callable[[int], bool] = lambda node_id: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.range = ports
        self._is_declared = is_declared
        self.ports: dict[int, int] = {}  # by node id; other objects read it
        self.absent: dict[int, float] = {}  # node id -> since when complete answers lack it, the longest first
        self.may_give = False
        self._owners: dict[int, int] = {}  # port -> node id
        self._clock = clock
        self._next_search = 0.0

    def restore(self, held: Mapping[int, Held]) -> None:
        """Replace all by what was given out before, as far as it is in the range and of ids that are not declared.

        Ids without a port get none.
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

    def held(self) -> dict[int, Held]:
        """All that is given out, as `restore` takes it."""
        now = self._clock()
        return {
            node_id: Held(port, now - self.absent[node_id] if node_id in self.absent else None)
            for node_id, port in self.ports.items()
        }

    def named(self, node_id: int) -> bool:
        """An answer names an id that has a port. Returns whether answers lacked it before."""
        return self.absent.pop(node_id, None) is not None

    def answered(self, node_ids: Collection[int]) -> bool:
        """A complete answer of the cluster names these ids. Returns whether some are absent that were not before."""
        self.may_give = True
        now = self._clock()
        absent = [node_id for node_id in self.ports if node_id not in node_ids and node_id not in self.absent]
        self.absent.update(dict.fromkeys(absent, now))
        return bool(absent)

    def give(self, node_id: int, busy: Callable[[], Collection[int]]) -> Given | None:
        """Give an id without a port the first one that is free, or one that may pass to it; None: there is none.

        busy(): the ids that have open connections.
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

    def _given(self, node_id: int, given: Given) -> Given:
        self.ports[node_id] = given.port
        self._owners[given.port] = node_id
        return given
