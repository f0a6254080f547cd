"""Counters of insight's groups and partitions: MAX_GROUPS groups by name, the others together.

Duty: cells of consumer groups (rebalances, members, failures), of causes of rebalances, and of changes of leaders and
replicas. The insight process fills them and sends them whole; the process that is scraped shows the last ones.

Bounds: MAX_GROUPS cells (see `top`), and MAX_PARTITIONS partitions remembered as offline or with replicas out of sync.
Refuses to know messages and the derivation of a group's state.
"""

from bisect import bisect_left

from kproxy.metrics.counters.bounds import REBALANCE_NS, cell
from kproxy.metrics.counters.named import MAX_LABEL
from kproxy.metrics.counters.top import Top

MAX_GROUPS = 250
MAX_PARTITIONS = 65536
EMPTY_EXPIRY_NS = 3600 * 10**9  # expiry of a group without members
EXPIRY_NS = 7 * 24 * 3600 * 10**9  # a stable group has no events for days
_EVENT = 1  # weight of one event in a group's rank

# Operations whose failures are counted.
OPERATIONS = ("join", "sync", "heartbeat", "commit")
CAUSES = (
    *("member_joined", "member_left", "session_expired", "subscription_changed", "metadata_changed"),
    *("leader_rejoined", "coordinator_moved", "member_replaced", "unknown"),
)
CHANGES = ("created", "elected", "isr_shrunk", "isr_grown", "offline", "moved", "deleted")
# Reasons why insight skipped an exchange that it got, or a group or partition in it.
LEFT_OUT = ("undecodable", "not_followed")
STEADY = frozenset(("Empty", "Stable", "Dead"))


class GroupCells:
    """The counters of one group; the rank is its number of events, halved regularly."""

    __slots__ = (
        "coordinator_moves",
        "duration",
        "duration_ns",
        "failures",
        "generation",
        "group_type",
        "members",
        "protocol",
        "rank",
        "rebalances",
        "seen_ns",
        "split",
        "state",
    )

    def __init__(self) -> None:
        self.rank = 0
        self.seen_ns = 0
        self.rebalances = 0
        self.duration = cell(REBALANCE_NS)  # of complete rebalances
        self.duration_ns = 0
        self.failures = dict.fromkeys(OPERATIONS, 0)
        self.coordinator_moves = 0
        self.split = 0
        self.members = 0
        self.generation = -1
        self.state = "Empty"
        self.protocol: str | None = None  # classic, consumer (KIP-848), share, streams
        self.group_type: str | None = None  # consumer, connect, streams, share, or another protocol type

    @property
    def is_rebalancing(self) -> bool:
        return self.state not in STEADY

    def is_gone(self, now_ns: int) -> bool:
        return self.seen_ns + (EXPIRY_NS if self.members else EMPTY_EXPIRY_NS) < now_ns

    def admitted(self, rank: int) -> None:
        self.rank = rank

    def halve(self) -> None:
        self.rank //= 2


class InsightCells:
    """The counters of one cluster."""

    def __init__(self) -> None:
        self.groups: Top[str, GroupCells] = Top(MAX_GROUPS, GroupCells)
        self.causes = dict.fromkeys(CAUSES, 0)
        self.changes = dict.fromkeys(CHANGES, 0)
        self.left_out = dict.fromkeys(LEFT_OUT, 0)
        self._offline: dict[tuple[str, int], None] = {}
        self._shrunk: dict[tuple[str, int], None] = {}

    @property
    def offline(self) -> int:
        """Return the number of partitions without a leader, by the latest messages."""
        return len(self._offline)

    @property
    def shrunk(self) -> int:
        """Return the number of partitions with fewer in-sync replicas than replicas."""
        return len(self._shrunk)

    def group(self, group_id: str, at_ns: int) -> GroupCells:
        """Return the cells of a group with a new event at `at_ns`."""
        name = group_id[:MAX_LABEL]
        cells = self.groups.cells.get(name)
        if cells is None:
            cells = self.groups.cell_for(name, _EVENT, at_ns)
        cells.rank += _EVENT
        cells.seen_ns = max(cells.seen_ns, at_ns)
        return cells

    def rebalanced(self, cells: GroupCells, cause: str, duration_ns: int | None) -> None:
        """Count a rebalance that ended. duration_ns None: some members did not receive an assignment."""
        cells.rebalances += 1
        self.causes[cause if cause in self.causes else "unknown"] += 1
        if cause == "coordinator_moved":
            cells.coordinator_moves += 1
        if duration_ns is not None:
            cells.duration[bisect_left(REBALANCE_NS, duration_ns)] += 1
            cells.duration_ns += duration_ns

    def stands(
        self, cells: GroupCells, state: str, members: int, generation: int, protocol: str, group_type: str | None
    ) -> None:
        """Set a group's current state; `other` has none, because it is many groups."""
        if cells is not self.groups.other:
            cells.state, cells.members, cells.generation = state, members, generation
            cells.protocol = protocol
            cells.group_type = None if group_type is None else group_type[:MAX_LABEL]

    def leadership(self, topic: str, partition: int, change: str, leader: int | None, missing: int) -> None:
        """Count a change of a partition. leader None: it has none. missing: number of replicas not in sync."""
        if change in self.changes:
            self.changes[change] += 1
        key = topic, partition
        _remember(self._offline, key, leader is None and change != "deleted")
        _remember(self._shrunk, key, missing > 0 and change != "deleted")


def _remember(partitions: dict[tuple[str, int], None], key: tuple[str, int], is_so: bool) -> None:
    if not is_so:
        partitions.pop(key, None)
    elif len(partitions) < MAX_PARTITIONS:
        partitions[key] = None
