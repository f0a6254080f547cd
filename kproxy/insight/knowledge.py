"""What is known of one cluster: every exchange goes to the parts that understand it, and rows come back.

Duty: order. `Topics` learns first, since the other parts ask it for names and counts; then each part whose APIs the
exchange is of gives its rows. Another part is a class with `apis`, `feed`, `finish` and `left_out`, and an entry in
`Knowledge`. The caller feeds exchanges in the order of their answers, and `finish` at the end.

Bounds are those of the parts. What was left out is counted. Refuses to know where exchanges come from and where rows
go.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol
from uuid import UUID

from kproxy.insight import groups, leadership, topics, topology
from kproxy.insight.changes import Changes
from kproxy.insight.coordinator_logs import CoordinatorLogs, Logged
from kproxy.insight.groups import Groups
from kproxy.insight.leadership import Partitions
from kproxy.insight.rows import Leadership, Row, Topology
from kproxy.insight.spoken import Spoken
from kproxy.insight.topics import Topics
from kproxy.insight.topology import Cluster, of_partition
from kproxy.insight.transactions import Transactions


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
        self.transactions = Transactions(cluster)
        self.logs = CoordinatorLogs(cluster)
        self._of_api: dict[int, list[Part]] = {}
        for part in self._parts:
            for api in part.apis:
                self._of_api.setdefault(api, []).append(part)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self.groups, self.topology, self.leaders, self.changes, self.transactions

    @property
    def left_out(self) -> Mapping[str, int]:
        """How much was not followed, by kind: groups that were forgotten, topics, partitions."""
        found = {"topics": self.topics.left_out, "log_records": self.logs.left_out}
        for part in self._parts:
            for kind, count in part.left_out.items():
                found[kind] = found.get(kind, 0) + count
        return found

    def feed(self, spoken: Spoken) -> Iterator[Row]:
        """The rows that an exchange gives; none for an API that no part understands."""
        yield from self.due(spoken.response_start or spoken.request_end)
        if spoken.api_key in topics.APIS:
            self.topics.feed(spoken)
        for part in self._of_api.get(spoken.api_key, ()):
            yield from part.feed(spoken, self.topics)

    def feed_log(self, logged: Logged) -> Iterator[Row]:
        """The rows of a batch of a coordinator's log that somebody fetched."""
        yield from self.due(logged.at_ns)
        yield from self.logs.feed(logged)

    def due(self, now_ns: int | None) -> Iterator[Row]:
        """What logs say of groups, once what is said on the wire of that time is known; who has not come until now."""
        for entry in self.logs.due(now_ns):
            yield from self.groups.stored(entry, self.topics)
        if now_ns is not None:
            yield from self.groups.due(now_ns)

    def finish(self) -> Iterator[Row]:
        """The rows of what is not complete when nothing more comes."""
        yield from self.due(None)
        for part in self._parts:
            yield from part.finish()


# What `Knowledge` wants to be fed.
APIS = frozenset(topics.APIS | groups.APIS | Leaders.apis | topology.APIS | Changes.apis | Transactions.apis)
ONLY_FAILED = groups.ONLY_FAILED  # of these, answers without an error say nothing
