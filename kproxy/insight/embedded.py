"""What members of a group send each other through JoinGroup and SyncGroup: subscriptions and assignments.

Duty: the consumer protocol in every version; a version that the schema lacks is read like the last one it has, as
Kafka's own clients do. Bytes of other kinds of clients, such as Kafka Connect's, are None here. Streams' members are
consumers whose tasks are in `user_data`, which is not read.

Bounds: MAX_TOPICS of a subscription and MAX_OWNED partitions are followed; who has more is as one that is not known.
Refuses to know groups.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from kproxy.errors import ProtocolError
from kproxy.insight.spoken import Body
from kproxy.protocol import codec
from kproxy.protocol.schema import schema

Partition = tuple[str, int]  # topic, index
Owned = frozenset[Partition]

NOTHING: Owned = frozenset()
MAX_TOPICS = 2048
MAX_OWNED = 20_000


class Subscription(NamedTuple):
    """Of one member."""

    topics: tuple[str, ...]
    owned: Owned | None = None  # from v1 on: what it owns while it joins
    rack: str | None = None


def subscription(metadata: bytes) -> Subscription | None:
    """A ConsumerProtocolSubscription; None: it is none."""
    body = _decoded("ConsumerProtocolSubscription", metadata)
    if body is None or len(body["topics"]) > MAX_TOPICS:
        return None
    owned = partitions(body["ownedPartitions"]) if "ownedPartitions" in body else None
    return Subscription(tuple(body["topics"]), owned, body.get("rackId"))


def assigned(assignment: bytes | None) -> Owned | None:
    """The partitions of a ConsumerProtocolAssignment, none of an empty one; None: it is none."""
    if not assignment:
        return NOTHING
    body = _decoded("ConsumerProtocolAssignment", assignment)
    return None if body is None else partitions(body["assignedPartitions"])


def partitions(told: Iterable[Body]) -> Owned | None:
    """(topic, index) of topics with lists of partitions; None: more than MAX_OWNED."""
    found: set[Partition] = set()
    for each in told:
        if len(found) + len(each["partitions"]) > MAX_OWNED:
            return None
        found.update((each["topic"], index) for index in each["partitions"])
    return frozenset(found)


def listed(owned: Iterable[Partition], most: int = 20) -> str:
    """Partitions in words: "orders-0, orders-1"."""
    ordered = sorted(owned)
    found = ", ".join(f"{topic}-{index}" for topic, index in ordered[:most])
    return found + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


def _decoded(name: str, data: bytes) -> Any:
    last = schema().data[name].versions[-1]
    if int.from_bytes(data[:2], "big", signed=True) > last:
        data = last.to_bytes(2, "big") + data[2:]
    try:
        return codec.decode_data(name, data)[1]
    except ProtocolError:
        return None
