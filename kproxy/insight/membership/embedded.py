"""Subscriptions and assignments, which members of a group exchange inside JoinGroup and SyncGroup.

Duty: the consumer protocol in every version, also if a message ends early; a version that the schema lacks is decoded
like the latest one, as Kafka's own clients do. Kafka Connect's workers own connectors and their tasks, as (connector,
CONNECTOR) and (connector, task). Members of Kafka Streams are consumers whose tasks are in `user_data`. Metadata of
other kinds of clients decodes to None.

Bounds: a subscription of more than MAX_TOPICS topics, or an assignment of more than MAX_OWNED partitions, counts as
unknown; texts name at most MAX_SHOWN tasks. Refuses to know groups.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from kproxy.errors import ProtocolError
from kproxy.insight.decoded import Body
from kproxy.protocol import codec
from kproxy.protocol.plans import TRAILING
from kproxy.protocol.schema import schema

Partition = tuple[str, int]  # topic, index; for Connect: connector, task
Owned = frozenset[Partition]

NOTHING: Owned = frozenset()
MAX_TOPICS = 2048
MAX_OWNED = 20_000
MAX_SHOWN = 20

# Types of groups, by the members' protocol type; members of Streams are consumers with Streams' only strategy.
CONSUMER, CONNECT, STREAMS = "consumer", "connect", "streams"
STREAM = "stream"  # that strategy: StreamsPartitionAssignor.name()
MAX_TYPE = 64
CONNECTOR = -1  # in place of a task: the connector itself (ConnectProtocol.CONNECTOR_TASK)
_NULL_BYTES = b"\xff\xff\xff\xff"  # as user data
INCREMENTAL = 1  # since this version of Connect's protocol an assignment lists only new and revoked tasks


class Subscription(NamedTuple):
    """The subscription of one member."""

    topics: tuple[str, ...]
    owned: Owned | None = None  # since v1: the partitions that it owns while it joins
    rack: str | None = None
    user_data: bytes | None = None
    words: str | None = None  # description of a Connect worker or Streams member


class Given(NamedTuple):
    """The assignment of one member."""

    owned: Owned  # the whole assignment; an incremental one has new partitions only
    revoked: Owned | None = None  # None: the assignment is not incremental
    words: str | None = None  # tasks of Streams; errors

    def after(self, before: Owned | None) -> Owned:
        """Return what the member owns after this assignment; over MAX_OWNED, only the new part."""
        if self.revoked is None:
            return self.owned
        whole = (before or NOTHING) - self.revoked | self.owned
        return whole if len(whole) <= MAX_OWNED else self.owned


def group_type(protocol_type: str | None, strategy: str | None) -> str | None:
    """Return the type of a group: consumer, connect, streams, or another protocol type of its members."""
    if protocol_type == CONSUMER and strategy == STREAM:
        return STREAMS
    return protocol_type[:MAX_TYPE] if protocol_type else None


def subscription_of(kind: str | None, metadata: bytes) -> Subscription | None:
    """Return the subscription that a member of this type of group joins with; None: it cannot be decoded."""
    if kind == CONNECT:
        return _worker(metadata)
    found = subscription(metadata) if kind in (CONSUMER, STREAMS) else None
    if found is not None and kind == STREAMS and found.user_data:
        return found._replace(words=_streams_words(found.user_data))
    return found


def given(kind: str | None, assignment: bytes | None) -> Given | None:
    """Return the assignment of a member of this type of group; None: it cannot be decoded."""
    if kind == CONNECT:
        return _work(assignment)
    if kind not in (None, CONSUMER, STREAMS):
        return None if assignment else Given(NOTHING)
    owned = assigned(assignment)
    if owned is None:
        return None
    words = None
    if kind == STREAMS and assignment:
        user_data = _decoded_part("ConsumerProtocolAssignment", assignment)["userData"]
        words = _tasks_given(user_data) if user_data else None
    return Given(owned, None, words)


def subscription(metadata: bytes) -> Subscription | None:
    """Decode a ConsumerProtocolSubscription; None: it is not one, or has over MAX_TOPICS topics."""
    body = _decoded_part("ConsumerProtocolSubscription", metadata)
    if body is None or len(body["topics"]) > MAX_TOPICS:
        return None
    owned = partitions(body["ownedPartitions"]) if "ownedPartitions" in body else None
    return Subscription(tuple(body["topics"]), owned, body.get("rackId"), body["userData"])


def assigned(assignment: bytes | None) -> Owned | None:
    """Return the partitions of a ConsumerProtocolAssignment, empty if it has no bytes; None: it is not one."""
    if not assignment:
        return NOTHING
    body = _decoded_part("ConsumerProtocolAssignment", assignment)
    return None if body is None else partitions(body["assignedPartitions"])


def partitions(topics: Iterable[Body]) -> Owned | None:
    """Return the (topic, index) pairs of topics with lists of partitions; None: more than MAX_OWNED."""
    found: set[Partition] = set()
    for each in topics:
        if len(found) + len(each["partitions"]) > MAX_OWNED:
            return None
        found.update((each["topic"], index) for index in each["partitions"])
    return frozenset(found)


def listed(owned: Iterable[Partition], most: int = 20) -> str:
    """Return partitions as text: "orders-0, orders-1"; a connector itself by its name."""
    ordered = sorted(owned)
    found = ", ".join(topic if index == CONNECTOR else f"{topic}-{index}" for topic, index in ordered[:most])
    return found + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


# --- Kafka Connect ----------------------------------------------------------------------------------------------------


def _worker(metadata: bytes) -> Subscription | None:
    """Return a worker's state: its URL, config offset, connectors and tasks; None: it cannot be decoded."""
    body = _decoded("ConnectWorkerState", metadata)
    if body is None:
        return None
    allocation = body.get("allocation")
    has = _work(allocation) if allocation else None
    words = f"worker {body['url']}, config offset {body['configOffset']}"
    return Subscription((), None if has is None else has.owned, words=words)


def _work(assignment: bytes | None) -> Given | None:
    """Return the connectors and tasks of a worker; None: they cannot be decoded."""
    if not assignment:
        return Given(NOTHING)
    body = _decoded("ConnectAssignment", assignment)
    if body is None:
        return None
    is_incremental = int.from_bytes(assignment[:2], "big") >= INCREMENTAL
    owned, revoked = _tasks(body["assignment"]), _tasks(body.get("revoked"))
    if owned is None or revoked is None:
        return None
    words = [f"error {body['error']} of Connect"] if body["error"] else []
    if body.get("delay"):
        words.append(f"what is left waits for {body['delay'] / 1000:g} s")
    return Given(owned, revoked if is_incremental else None, "; ".join(words) or None)


def _tasks(connectors: Iterable[Body] | None) -> Owned | None:
    """Return the (connector, task) pairs of connectors with lists of tasks; None: more than MAX_OWNED."""
    return partitions({"topic": each["connector"], "partitions": each["tasks"]} for each in connectors or ())


# --- Kafka Streams ----------------------------------------------------------------------------------------------------


def _streams_words(user_data: bytes) -> str | None:
    """Return a Streams member's process, endpoint and tasks as text; None: it is not a Streams subscription."""
    body = _decoded("StreamsSubscriptionInfo", user_data)
    if body is None:
        return None
    words = [f"process {body['processId']}"]
    if body.get("userEndPoint"):
        words.append(f"endpoint {bytes(body['userEndPoint']).decode(errors='replace')}")
    sums = body.get("taskOffsetSums")
    if sums is not None:
        had = [
            (each["topicGroupId"], part["partition"])
            for each in sums
            for part in each.get("partitionToOffsetSum", (each,))
        ]
        words.append(f"state of {_named(had) or 'no task'}")
    else:
        had = [(each["topicGroupId"], each["partition"]) for each in (*body["prevTasks"], *body["standbyTasks"])]
        words.append(f"had {_named(had) or 'no task'}")
    if body.get("errorCode"):
        words.append(f"error {body['errorCode']} of Streams")
    return ", ".join(words)


def _tasks_given(user_data: bytes) -> str | None:
    """Return the tasks of a Streams member as text; None: they cannot be decoded."""
    body = _decoded("StreamsAssignmentInfo", user_data)
    if body is None:
        return None
    active = _named((each["topicGroupId"], each["partition"]) for each in body["activeTasks"])
    standby = _named((each["topicGroupId"], each["partition"]) for each in body["standbyTasks"])
    words = f"active {active or 'none'}" + (f"; standby {standby}" if standby else "")
    return words + (f"; error {body['errorCode']} of Streams" if body.get("errorCode") else "")


def _named(tasks: Iterable[tuple[int, int]]) -> str:
    """Return tasks in Streams' notation: "0_1, 0_2"."""
    ordered = sorted(set(tasks))
    more = f" and {len(ordered) - MAX_SHOWN} more" if len(ordered) > MAX_SHOWN else ""
    return ", ".join(f"{group}_{partition}" for group, partition in ordered[:MAX_SHOWN]) + more


def _decoded_part(name: str, data: bytes) -> Any:
    """Decode a message of the consumer protocol, which may end after any field but the first; None: it is not one.

    kafka-go and sarama have written version 1 without ownedPartitions. Each version appends fields to those of the
    previous one, so a message that ends early is complete in an earlier version, or is version 0 without user data.
    """
    body = _decoded(name, data)
    if body is not None or len(data) < 2:
        return body
    version = min(int.from_bytes(data[:2], "big", signed=True), schema().data[name].versions[-1])
    for earlier in range(version - 1, -1, -1):
        body = _decoded(name, earlier.to_bytes(2, "big") + data[2:])
        if body is not None and TRAILING not in body:
            return body
    body = _decoded(name, bytes(2) + data[2:] + _NULL_BYTES)
    return body if body is not None and body["userData"] is None and TRAILING not in body else None


def _decoded(name: str, data: bytes) -> Any:
    message = schema().data[name]
    last, size = message.versions[-1], message.version_bytes
    if size == 2 and int.from_bytes(data[:2], "big", signed=True) > last:
        data = last.to_bytes(2, "big") + data[2:]
    try:
        return codec.decode_data(name, data)[1]
    except ProtocolError:
        return None
