"""What is known of one cluster: every exchange goes to the parts that understand it, and rows come back.

Duty: order. `Topics` learns first, since the other parts ask it for names and counts; then each part whose APIs the
exchange is of gives its rows. Another part is a class with `apis`, `feed`, `finish` and `left_out`, and an entry in
`Knowledge`. The caller feeds exchanges in the order of their answers, and `finish` at the end.

Bounds: MAX_GROUPS groups, MAX_MEMBERS members of all groups together; the group that was heard of least recently is
forgotten, with a row for the generation that it was forming. Those of topics and partitions are in their modules. What
was left out is counted. Refuses to know where exchanges come from and where rows go.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol
from uuid import UUID

from kproxy.insight import classic, epochs, leadership, topics, topology
from kproxy.insight.changes import Changes
from kproxy.insight.classic import ClassicGroup
from kproxy.insight.epochs import EpochGroup
from kproxy.insight.leadership import Partitions
from kproxy.insight.rows import Assignment, GroupEvent, Leadership, Rebalance, Row, Topology
from kproxy.insight.spoken import Spoken
from kproxy.insight.topics import Topics
from kproxy.insight.topology import Cluster, of_partition

MAX_GROUPS = 10_000
MAX_MEMBERS = 100_000  # of all groups; what a group remembers of members that left counts too


class Part(Protocol):
    """One kind of knowledge about a cluster."""

    @property
    def apis(self) -> Collection[int]:
        """Exchanges of these are fed."""
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """How much was not followed, by kind."""
        ...

    def feed(self, spoken: Spoken, topics: Topics) -> Iterator[Row]:
        """The rows that an exchange gives."""
        ...

    def finish(self) -> Iterator[Row]:
        """The rows of what is not complete when nothing more comes."""
        ...


class Groups:
    """The groups of one cluster, of all protocols. A group that changes its protocol is two: both are true."""

    apis = classic.APIS | epochs.PROTOCOLS.keys()

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.forgotten = 0
        self._groups: dict[tuple[str, str], ClassicGroup | EpochGroup] = {}  # least recently heard of first
        self._weights: dict[tuple[str, str], int] = {}
        self._weight = 0  # of all

    @property
    def left_out(self) -> Mapping[str, int]:
        return {"groups": self.forgotten}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[ClassicGroup | EpochGroup]:
        return iter(self._groups.values())

    def get(self, group_id: str, protocol: str = "classic") -> ClassicGroup | EpochGroup | None:
        return self._groups.get((group_id, protocol))

    def feed(self, spoken: Spoken, topics: Topics) -> Iterator[GroupEvent | Rebalance | Assignment]:
        protocol = epochs.PROTOCOLS.get(spoken.api_key, "classic")
        key = spoken.request["groupId"], protocol
        group = self._groups.pop(key, None)
        if group is None:
            group = ClassicGroup(self.cluster, key[0]) if protocol == "classic" else EpochGroup(self.cluster, *key)
        self._groups[key] = group
        if isinstance(group, ClassicGroup):
            yield from group.feed(spoken, topics.partitions)
        else:
            yield from group.feed(spoken, topics.names)
        self._weight += group.weight - self._weights.get(key, 0)
        self._weights[key] = group.weight
        while len(self._groups) > MAX_GROUPS or self._weight > MAX_MEMBERS:
            yield from self._forget()

    def finish(self) -> Iterator[GroupEvent | Rebalance | Assignment]:
        for group in self._groups.values():
            yield from group.finish()

    def _forget(self) -> Iterator[GroupEvent | Rebalance | Assignment]:
        key, group = next(iter(self._groups.items()))
        yield from group.finish()
        del self._groups[key]
        self._weight -= self._weights.pop(key)
        self.forgotten += 1


class Leaders:
    """Who leads which partition; a change is a row of topology too."""

    apis = leadership.APIS.keys()

    def __init__(self, cluster: str) -> None:
        self.partitions = Partitions(cluster)

    @property
    def left_out(self) -> Mapping[str, int]:
        return {"partitions": self.partitions.left_out}

    def feed(self, spoken: Spoken, topics: Topics) -> Iterator[Leadership | Topology]:
        for row in self.partitions.feed(spoken, topics.names):
            yield row
            yield of_partition(row)

    def finish(self) -> Iterator[Leadership]:
        return iter(())


class Knowledge:
    """Of one cluster."""

    def __init__(self, cluster: str, names: Mapping[UUID, str] | None = None) -> None:
        """names: topics by id, as far as they are known before."""
        self.cluster = cluster
        self.topics = Topics(names)
        self.groups = Groups(cluster)
        self.leaders = Leaders(cluster)
        self.topology = Cluster(cluster)
        self.changes = Changes(cluster)
        self._of_api: dict[int, list[Part]] = {}
        for part in self._parts:
            for api in part.apis:
                self._of_api.setdefault(api, []).append(part)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self.groups, self.topology, self.leaders, self.changes

    @property
    def left_out(self) -> Mapping[str, int]:
        """How much was not followed, by kind: groups that were forgotten, topics, partitions."""
        found = {"topics": self.topics.left_out}
        for part in self._parts:
            for kind, count in part.left_out.items():
                found[kind] = found.get(kind, 0) + count
        return found

    def feed(self, spoken: Spoken) -> Iterator[Row]:
        """The rows that an exchange gives; none for an API that no part understands."""
        if spoken.api_key in topics.APIS:
            self.topics.feed(spoken)
        for part in self._of_api.get(spoken.api_key, ()):
            yield from part.feed(spoken, self.topics)

    def finish(self) -> Iterator[Row]:
        """The rows of what is not complete when nothing more comes."""
        for part in self._parts:
            yield from part.finish()


APIS = frozenset(
    topics.APIS | Groups.apis | Leaders.apis | topology.APIS | Changes.apis
)  # what `Knowledge` wants to be fed
# Of these, which are by far the most, answers without an error say nothing.
ONLY_FAILED = frozenset((classic.HEARTBEAT, classic.OFFSET_COMMIT))
