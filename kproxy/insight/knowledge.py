"""Knowledge about one cluster: exchanges go to the parts that understand them, which return rows.

Duty: order. `Topics` learns first, since the other parts look up names and counts in it; then each part that lists the
exchange's API yields its rows. Another part is a class with `apis`, `feed`, `finish` and `left_out`, and an entry in
`Knowledge`. The caller feeds exchanges in the order of their responses, and calls `finish` at the end.

Bounds are those of the parts, which count what they leave out. Refuses to know where exchanges come from and where
rows go.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol
from uuid import UUID

from kproxy.insight import leadership, topics, topology
from kproxy.insight.changes import Changes
from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.leadership import Partitions
from kproxy.insight.logs.coordinator_logs import CoordinatorLogs, Logged
from kproxy.insight.membership import groups
from kproxy.insight.membership.groups import Groups
from kproxy.insight.rows import Leadership, Row, Topology
from kproxy.insight.topics import Topics
from kproxy.insight.topology import Cluster, of_partition
from kproxy.insight.transactions import Transactions


class Part(Protocol):
    """One kind of knowledge about a cluster."""

    @property
    def apis(self) -> Collection[int]:
        """Return the API keys of the exchanges that `feed` takes."""
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """Return how much was not followed, by kind."""
        ...

    def feed(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Row]:
        """Yield the rows of an exchange."""
        ...

    def finish(self) -> Iterator[Row]:
        """Yield the rows of incomplete events at the end of the traffic."""
        ...


class Leaders:
    """The leaders of partitions; a change yields a row of leadership and one of topology."""

    apis = leadership.APIS.keys()

    def __init__(self, cluster: str) -> None:
        self.partitions = Partitions(cluster)

    @property
    def left_out(self) -> Mapping[str, int]:
        return {"partitions": self.partitions.left_out}

    def feed(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Leadership | Topology]:
        for row in self.partitions.feed(exchange, topics.names):
            yield row
            yield of_partition(row)

    def finish(self) -> Iterator[Leadership]:
        return iter(())


class Knowledge:
    """The knowledge about one cluster."""

    def __init__(self, cluster: str, names: Mapping[UUID, str] | None = None) -> None:
        """names: topic names by id that are known before the first exchange."""
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
        """Return how much was not followed, by kind: forgotten groups, topics, partitions, log records, ..."""
        found = {"topics": self.topics.left_out, "log_records": self.logs.left_out}
        for part in self._parts:
            for kind, count in part.left_out.items():
                found[kind] = found.get(kind, 0) + count
        return found

    def feed(self, exchange: DecodedExchange) -> Iterator[Row]:
        """Yield the rows of an exchange; none for an API that no part understands."""
        yield from self.due(exchange.response_start or exchange.request_end)
        if exchange.api_key in topics.APIS:
            self.topics.feed(exchange)
        for part in self._of_api.get(exchange.api_key, ()):
            yield from part.feed(exchange, self.topics)

    def feed_log(self, logged: Logged) -> Iterator[Row]:
        """Yield the rows of a record batch of a coordinator's log that a client fetched."""
        yield from self.due(logged.at_ns)
        yield from self.logs.feed(logged)

    def due(self, now_ns: int | None) -> Iterator[Row]:
        """Yield rows of log records held long enough for the wire's own messages to arrive, and of overdue members."""
        for entry in self.logs.due(now_ns):
            yield from self.groups.stored(entry, self.topics)
        if now_ns is not None:
            yield from self.groups.due(now_ns)

    def finish(self) -> Iterator[Row]:
        """Yield the rows of incomplete events at the end of the traffic."""
        yield from self.due(None)
        for part in self._parts:
            yield from part.finish()


# The APIs whose exchanges `Knowledge.feed` takes.
APIS = frozenset(topics.APIS | groups.APIS | Leaders.apis | topology.APIS | Changes.apis | Transactions.apis)
ONLY_FAILED = groups.ONLY_FAILED  # responses of these matter only with an error
