"""What members of a group send each other through JoinGroup and SyncGroup: subscriptions and assignments.

Duty: the consumer protocol in every version, also where it ends early; a version that the schema lacks is read like the
last one it has, as Kafka's own clients do. Kafka Connect's workers own connectors and their tasks, as (connector,
CONNECTOR) and (connector, task). Members of Kafka Streams are consumers whose tasks are in `user_data`. Bytes of other
kinds of clients are None here.

Bounds: MAX_TOPICS of a subscription and MAX_OWNED partitions are followed; who has more is as one that is not known.
Of tasks in words MAX_SHOWN are named. Refuses to know groups.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from kproxy.errors import ProtocolError
from kproxy.insight.spoken import Body
from kproxy.protocol import codec
from kproxy.protocol.plans import TRAILING
from kproxy.protocol.schema import schema

Partition = tuple[str, int]  # topic, index; of Connect the connector and its task
Owned = frozenset[Partition]

NOTHING: Owned = frozenset()
MAX_TOPICS = 2048
MAX_OWNED = 20_000
MAX_SHOWN = 20

# Types of groups, by what members say: the type of their protocol, and of Streams the name of the only strategy.
CONSUMER, CONNECT, STREAMS = "consumer", "connect", "streams"
STREAM = "stream"  # that strategy: StreamsPartitionAssignor.name()
MAX_TYPE = 64
CONNECTOR = -1  # in place of a task: the connector itself (ConnectProtocol.CONNECTOR_TASK)
_NULL_BYTES = b"\xff\xff\xff\xff"  # as user data
INCREMENTAL = 1  # from this version of Connect's protocol on an assignment is what is new, beside what is revoked


class Subscription(NamedTuple):
    """Of one member."""

    topics: tuple[str, ...]
    owned: Owned | None = None  # from v1 on: what it owns while it joins
    rack: str | None = None
    user_data: bytes | None = None
    words: str | None = None  # what a worker of Connect, or a member of Streams, says of itself


class Given(NamedTuple):
    """What a member is assigned."""

    owned: Owned  # all of it; of an incremental assignment what is new
    revoked: Owned | None = None  # of an incremental one
    words: str | None = None  # tasks of Streams; errors

    def after(self, before: Owned | None) -> Owned:
        """What the member owns then; no more than MAX_OWNED of what it had."""
        if self.revoked is None:
            return self.owned
        whole = (before or NOTHING) - self.revoked | self.owned
        return whole if len(whole) <= MAX_OWNED else self.owned


def group_type(protocol_type: str | None, strategy: str | None) -> str | None:
    """What kind of members a group has: consumer, connect, streams, or what else they call themselves."""
    if protocol_type == CONSUMER and strategy == STREAM:
        return STREAMS
    return protocol_type[:MAX_TYPE] if protocol_type else None


def said(kind: str | None, metadata: bytes) -> Subscription | None:
    """What a member of this type of group says as it joins; None: it cannot be read."""
    if kind == CONNECT:
        return _worker(metadata)
    found = subscription(metadata) if kind in (CONSUMER, STREAMS) else None
    if found is not None and kind == STREAMS and found.user_data:
        return found._replace(words=_streams_words(found.user_data))
    return found


def given(kind: str | None, assignment: bytes | None) -> Given | None:
    """What a member of this type of group is assigned; None: it cannot be read."""
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
    """A ConsumerProtocolSubscription; None: it is none."""
    body = _decoded_part("ConsumerProtocolSubscription", metadata)
    if body is None or len(body["topics"]) > MAX_TOPICS:
        return None
    owned = partitions(body["ownedPartitions"]) if "ownedPartitions" in body else None
    return Subscription(tuple(body["topics"]), owned, body.get("rackId"), body["userData"])


def assigned(assignment: bytes | None) -> Owned | None:
    """The partitions of a ConsumerProtocolAssignment, none of an empty one; None: it is none."""
    if not assignment:
        return NOTHING
    body = _decoded_part("ConsumerProtocolAssignment", assignment)
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
    """Partitions in words: "orders-0, orders-1"; a connector itself by its name."""
    ordered = sorted(owned)
    found = ", ".join(topic if index == CONNECTOR else f"{topic}-{index}" for topic, index in ordered[:most])
    return found + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


# --- Kafka Connect ----------------------------------------------------------------------------------------------------


def _worker(metadata: bytes) -> Subscription | None:
    """Of a worker: where it is reached, and what it runs."""
    body = _decoded("ConnectWorkerState", metadata)
    if body is None:
        return None
    allocation = body.get("allocation")
    has = _work(allocation) if allocation else None
    words = f"worker {body['url']}, config offset {body['configOffset']}"
    return Subscription((), None if has is None else has.owned, words=words)


def _work(assignment: bytes | None) -> Given | None:
    """Connectors and tasks of a worker."""
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


def _tasks(told: Iterable[Body] | None) -> Owned | None:
    """(connector, task) of connectors with lists of tasks; None: more than MAX_OWNED."""
    return partitions({"topic": each["connector"], "partitions": each["tasks"]} for each in told or ())


# --- Kafka Streams ----------------------------------------------------------------------------------------------------


def _streams_words(user_data: bytes) -> str | None:
    """What a member of Streams says of itself; None: it is none."""
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
    """The tasks of a member of Streams; None: it cannot be read."""
    body = _decoded("StreamsAssignmentInfo", user_data)
    if body is None:
        return None
    active = _named((each["topicGroupId"], each["partition"]) for each in body["activeTasks"])
    standby = _named((each["topicGroupId"], each["partition"]) for each in body["standbyTasks"])
    words = f"active {active or 'none'}" + (f"; standby {standby}" if standby else "")
    return words + (f"; error {body['errorCode']} of Streams" if body.get("errorCode") else "")


def _named(tasks: Iterable[tuple[int, int]]) -> str:
    """Tasks as Streams calls them: "0_1, 0_2"."""
    ordered = sorted(set(tasks))
    more = f" and {len(ordered) - MAX_SHOWN} more" if len(ordered) > MAX_SHOWN else ""
    return ", ".join(f"{group}_{partition}" for group, partition in ordered[:MAX_SHOWN]) + more


def _decoded_part(name: str, data: bytes) -> Any:
    """A message of the consumer protocol that may end behind any field but its first, as that of some clients does.

    kafka-go and sarama have written version 1 without ownedPartitions. Each version appends fields to those of the one
    before, so a message that ends early is a whole one of an earlier version, or version 0 without user data.
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
