"""The topics of one cluster: names by id, and partition counts, as messages show them.

Bounds: MAX_TOPICS names and as many counts, further ones counted in `left_out`; former counts of MAX_GROWN topics.
Refuses to know groups and leaders.
"""

from collections.abc import Iterator, Mapping
from uuid import UUID

from kproxy.insight.decoded import Body, DecodedExchange
from kproxy.protocol.apis import (
    CONSUMER_GROUP_DESCRIBE,
    CREATE_TOPICS,
    DESCRIBE_TOPIC_PARTITIONS,
    LEADER_AND_ISR,
    METADATA,
    SHARE_GROUP_DESCRIBE,
    UNKNOWN_TOPIC_OR_PARTITION,
    UPDATE_METADATA,
)

APIS = frozenset(
    (
        METADATA,
        LEADER_AND_ISR,
        UPDATE_METADATA,
        CREATE_TOPICS,
        CONSUMER_GROUP_DESCRIBE,
        DESCRIBE_TOPIC_PARTITIONS,
        SHARE_GROUP_DESCRIBE,
    )
)
MAX_TOPICS = 65_536
MAX_GROWN = 1000
GROWN_NS = 600 * 10**9  # twice the default of clients' metadata.max.age.ms


class Topics:
    """names: topic names by id. partitions: counts by topic name; 0: a broker returned that it does not exist."""

    def __init__(self, names: Mapping[UUID, str] | None = None) -> None:
        """names: topic names by id that are known before the first exchange."""
        self.names: dict[UUID, str] = dict(names or {})
        self.partitions: dict[str, int] = {}
        self.left_out = 0
        self.changes = 0  # number of changes of a name or a count
        self._grown: dict[str, tuple[int, int]] = {}  # by topic: (time, former count), the latest last

    def before(self, now_ns: int) -> dict[str, int]:
        """Return the former counts of topics that grew less than GROWN_NS ago: clients may still use them."""
        while self._grown:
            name, (at, _) = next(iter(self._grown.items()))
            if now_ns - at < GROWN_NS:
                break
            del self._grown[name]
        return {name: count for name, (_, count) in self._grown.items()}

    def feed(self, exchange: DecodedExchange) -> None:
        """Learn from an exchange of an API in `APIS`."""
        for name, identity, count in _named(exchange):
            if not name:
                continue
            if identity is not None and identity.int:
                if identity in self.names or len(self.names) < MAX_TOPICS:
                    self.changes += self.names.get(identity) != name
                    self.names[identity] = name
                else:
                    self.left_out += 1
            if count is not None:
                if name in self.partitions or len(self.partitions) < MAX_TOPICS:
                    former = self.partitions.get(name, 0)
                    if 0 < former < count:
                        self._grown.pop(name, None)
                        self._grown[name] = exchange.response_start, former
                        if len(self._grown) > MAX_GROWN:
                            del self._grown[next(iter(self._grown))]
                    self.changes += self.partitions.get(name) != count
                    self.partitions[name] = count
                else:
                    self.left_out += 1


def _named(exchange: DecodedExchange) -> Iterator[tuple[str | None, UUID | None, int | None]]:
    """Yield (name, id, partition count) of the topics in an exchange; None: it is not in the message."""
    api, answer = exchange.api_key, exchange.response
    if api in (LEADER_AND_ISR, UPDATE_METADATA):
        for topic in exchange.request.get("topicStates") or ():
            yield topic["topicName"], topic.get("topicId"), None
    elif answer is None:
        return
    elif api in (METADATA, DESCRIBE_TOPIC_PARTITIONS):
        for topic in answer["topics"]:
            yield topic["name"], topic.get("topicId"), _count(topic) if api == METADATA else None
    elif api == CREATE_TOPICS:
        for topic in answer["topics"]:
            count = topic.get("numPartitions", -1)
            yield topic["name"], topic.get("topicId"), count if count > 0 and not topic["errorCode"] else None
    else:
        for group in answer["groups"]:
            for member in group["members"]:
                for assigned in (member["assignment"], member.get("targetAssignment")):
                    for part in (assigned or {}).get("topicPartitions") or ():
                        yield part["topicName"], part["topicId"], None


def _count(topic: Body) -> int | None:
    """Return a topic's partition count in Metadata. (DescribeTopicPartitions pages partitions and has no count.)"""
    if topic["errorCode"] == UNKNOWN_TOPIC_OR_PARTITION:
        return 0
    return len(topic["partitions"]) or None
