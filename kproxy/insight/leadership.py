"""Leaders and replicas of partitions, from controllers' requests to brokers and brokers' responses to clients.

Duty: compare the partition states in LeaderAndIsr (4), StopReplica (5), UpdateMetadata (6), Metadata (3),
AlterPartition (56) and DescribeTopicPartitions (75), in all their layouts, with the known ones; a row for each change.
The leader of KRaft's own log, which is the active controller, is in Vote (52), BeginQuorumEpoch (53), EndQuorumEpoch
(54), by which it resigns, and DescribeQuorum (55), whose voters are its replicas. DeleteTopics (20) ends a topic by
id. A message may be late, so these are ignored: an older leader epoch, an older partition epoch (zkVersion), and a
state without epochs for a partition with a known epoch (brokers before 2.1 send it, without dead replicas).

Epochs restart when a topic is re-created under its name. A topic therefore also ends when a message has another id for
it, and when a broker returns UNKNOWN_TOPIC_OR_PARTITION. A StopReplica that deletes a replica ends nothing while
another broker leads the partition: the replica was moved. Requests that a broker refuses with STALE_CONTROLLER_EPOCH
are ignored.

Bounds: MAX_PARTITIONS partitions, further ones counted in `left_out`; MAX_GONE ids of deleted topics. Refuses to know
groups and connections.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.insight.decoded import Body, DecodedExchange
from kproxy.insight.rows import Leadership
from kproxy.protocol.apis import (
    ALTER_PARTITION,
    BEGIN_QUORUM_EPOCH,
    DELETE_TOPICS,
    DESCRIBE_QUORUM,
    DESCRIBE_TOPIC_PARTITIONS,
    END_QUORUM_EPOCH,
    LEADER_AND_ISR,
    METADATA,
    STALE_CONTROLLER_EPOCH,
    STOP_REPLICA,
    UNKNOWN_TOPIC_OR_PARTITION,
    UPDATE_METADATA,
    VOTE,
)

APIS = {
    METADATA: "Metadata",
    LEADER_AND_ISR: "LeaderAndIsr",
    STOP_REPLICA: "StopReplica",
    UPDATE_METADATA: "UpdateMetadata",
    DELETE_TOPICS: "DeleteTopics",
    ALTER_PARTITION: "AlterPartition",
    VOTE: "Vote",
    BEGIN_QUORUM_EPOCH: "BeginQuorumEpoch",
    END_QUORUM_EPOCH: "EndQuorumEpoch",
    DESCRIBE_QUORUM: "DescribeQuorum",
    DESCRIBE_TOPIC_PARTITIONS: "DescribeTopicPartitions",
}
MAX_PARTITIONS = 200_000
MAX_GONE = 1000
NO_LEADER, DELETED = -1, -2  # no leader: offline; the partition is being deleted (LEADER_DURING_DELETE)
EPOCH_OF_DELETED = -2  # StopReplica's leader epoch, since 2.6, of a topic that is deleted
NO_ID = UUID(int=0)

Key = tuple[str, int]  # topic, partition


class _State(NamedTuple):
    leader: int
    epoch: int  # leader epoch; -1: not known
    version: int  # partition epoch (zkVersion); -1: not known
    isr: frozenset[int] | None  # None: not in that message
    replicas: frozenset[int] | None  # None: not in that message


@dataclass(slots=True)
class _Topic:
    id: UUID = NO_ID  # NO_ID: not known yet
    partitions: dict[int, _State] = field(default_factory=dict)


class Partitions:
    """The partitions of one cluster, with their leaders."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.left_out = 0
        self._topics: dict[str, _Topic] = {}  # topics with a known partition
        self._count = 0  # of partitions
        self._gone: dict[UUID, None] = {}  # ids of deleted topics: a late Metadata response may contain them

    def feed(self, exchange: DecodedExchange, names: Mapping[UUID, str]) -> Iterator[Leadership]:
        """Yield the rows of an exchange of an API in `APIS`. names: topic names by id."""
        api = exchange.api_key
        at = exchange.request_end
        controller: tuple[int | None, int | None] = None, None
        topics: list[tuple[str, Body]] = []  # in the message, by name; a topic without a name is not known
        if api in (LEADER_AND_ISR, UPDATE_METADATA, STOP_REPLICA):
            controller = exchange.request["controllerId"], exchange.request["controllerEpoch"]
            if (exchange.response or {}).get("errorCode") == STALE_CONTROLLER_EPOCH:
                return
        if api == STOP_REPLICA:
            for key, epoch in _deleted(exchange.request):
                if not self._is_moved(key, epoch, exchange.broker_id) and self._forget(key):
                    yield self._row(at, api, controller, key, None, "deleted")
            return
        if api in (LEADER_AND_ISR, UPDATE_METADATA):
            topics = [(each["topicName"], each) for each in exchange.request.get("topicStates") or ()]
            found = _controller_states(exchange.request)
        elif api in (BEGIN_QUORUM_EPOCH, END_QUORUM_EPOCH):
            found = _quorum(exchange.request, resigns=api == END_QUORUM_EPOCH)
        elif exchange.response is None:
            return
        elif api == DELETE_TOPICS:
            yield from self._delete(exchange, exchange.response, names)
            return
        else:
            at, answer = exchange.response_start, exchange.response
            if api in (METADATA, DESCRIBE_TOPIC_PARTITIONS):
                if self._gone:
                    kept = [topic for topic in answer["topics"] if topic.get("topicId") not in self._gone]
                    answer = answer | {"topics": kept}
                topics = [(each["name"], each) for each in answer["topics"]]
            found = _READERS[api](answer, names)
        yield from self._recreated(at, api, controller, topics)
        for key, state in found:
            change = self._take(key, state)
            if change:
                yield self._row(at, api, controller, key, self._state(key) or state, change)
        for name, each in topics:
            known = self._topics.get(name)
            if known is not None and known.id == NO_ID:
                known.id = each.get("topicId") or NO_ID

    def leader_of(self, topic: str, partition: int) -> int | None:
        """Return the node id of the leader; None: it has none, or none is known."""
        state = self._state((topic, partition))
        return state.leader if state is not None and state.leader >= 0 else None

    # --- state -------------------------------------------------------------------------------------------------------

    def _state(self, key: Key) -> _State | None:
        topic = self._topics.get(key[0])
        return None if topic is None else topic.partitions.get(key[1])

    def _forget(self, key: Key) -> bool:
        """Remove a deleted partition; return whether it was known."""
        topic = self._topics.get(key[0])
        if topic is None or topic.partitions.pop(key[1], None) is None:
            return False
        self._count -= 1
        if not topic.partitions:
            del self._topics[key[0]]
        return True

    def _ended(
        self, names: Iterable[str], at: int, api: int, controller: tuple[int | None, int | None]
    ) -> Iterator[Leadership]:
        """Remove deleted topics with all of their partitions; yield a row for each partition."""
        for name in names:
            topic = self._topics.pop(name, None)
            if topic is not None:
                self._count -= len(topic.partitions)
                for index in sorted(topic.partitions):
                    yield self._row(at, api, controller, (name, index), None, "deleted")

    def _recreated(
        self, at: int, api: int, controller: tuple[int | None, int | None], topics: Iterable[tuple[str, Body]]
    ) -> Iterator[Leadership]:
        """Remove topics that no longer exist or have another id; yield their rows. topics: names and bodies."""
        for name, each in topics:
            if name not in self._topics:
                continue
            known, identity = self._topics[name], each.get("topicId") or NO_ID
            if each.get("errorCode") == UNKNOWN_TOPIC_OR_PARTITION:
                yield from self._ended((name,), at, api, controller)
            elif identity != NO_ID != known.id and identity != known.id:
                self._retire(known.id)
                yield from self._ended((name,), at, api, controller)

    def _retire(self, identity: UUID) -> None:
        """Remember a deleted topic's id: later messages with it are late."""
        self._gone[identity] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def _is_moved(self, key: Key, epoch: int, broker_id: int | None) -> bool:
        """Return whether a broker deletes its replica because the partition was moved, not deleted."""
        state = self._state(key)
        if epoch == EPOCH_OF_DELETED or state is None or state.leader < 0:
            return False
        return state.leader != broker_id if broker_id is not None else epoch >= 0

    def _delete(self, exchange: DecodedExchange, answer: Body, names: Mapping[UUID, str]) -> Iterator[Leadership]:
        """Yield the rows of deleted topics. Without ids (before 2.8) a topic stays until StopReplica ends it."""
        ended = set()
        for topic in answer["responses"]:
            identity = topic.get("topicId")
            if topic["errorCode"] or identity is None or not identity.int or identity in self._gone:
                continue
            self._retire(identity)
            name = topic["name"] or names.get(identity)
            if name is not None:
                ended.add(name)
        yield from self._ended(sorted(ended), exchange.response_start, DELETE_TOPICS, (None, None))

    def _take(self, key: Key, state: _State) -> str:
        """Apply a state; return the kind of change, or "" for none."""
        before = self._state(key)
        if before is None:
            if state.leader == DELETED:
                return ""
            if self._count >= MAX_PARTITIONS:
                self.left_out += 1
                return ""
            self._topics.setdefault(key[0], _Topic()).partitions[key[1]] = state
            self._count += 1
            return "created" if state.leader >= 0 else "offline"
        if state.epoch < before.epoch or (state.epoch == before.epoch and state.version < before.version):
            return ""
        if state.leader == DELETED:
            self._forget(key)
            return "deleted"
        replicas = before.replicas if state.replicas is None else state.replicas
        isr = before.isr if state.isr is None else state.isr
        state = self._topics[key[0]].partitions[key[1]] = state._replace(replicas=replicas, isr=isr)
        if state.leader != before.leader:
            return "elected" if state.leader >= 0 else "offline"
        if before.replicas is not None and replicas != before.replicas:
            return "moved"
        if before.isr is not None and state.isr is not None and state.isr != before.isr:
            return "isr_shrunk" if before.isr - state.isr else "isr_grown"  # even if another replica joined
        if state.epoch > before.epoch > -1:
            return "elected"  # the same one again
        return ""

    def _row(
        self, at: int, api: int, controller: tuple[int | None, int | None], key: Key, state: _State | None, change: str
    ) -> Leadership:
        return Leadership(
            at,
            self.cluster,
            APIS[api],
            *controller,
            *key,
            state.leader if state is not None and state.leader >= 0 else None,
            state.epoch if state is not None and state.epoch >= 0 else None,
            tuple(sorted(state.isr)) if state is not None and state.isr is not None else None,
            tuple(sorted(state.replicas)) if state is not None and state.replicas is not None else None,
            change,
        )


def _controller_states(request: Body) -> Iterator[tuple[Key, _State]]:
    """Yield the states in a LeaderAndIsr or UpdateMetadata request, of partitions listed alone or grouped by topic."""
    for part in request.get("ungroupedPartitionStates") or ():
        yield (part["topicName"], part["partitionIndex"]), _state(part)
    for topic in request.get("topicStates") or ():
        for part in topic["partitionStates"]:
            yield (topic["topicName"], part["partitionIndex"]), _state(part)


def _state(part: Body) -> _State:
    version = part["partitionEpoch"] if "partitionEpoch" in part else part["zkVersion"]
    return _State(part["leader"], part["leaderEpoch"], version, frozenset(part["isr"]), frozenset(part["replicas"]))


def _described(answer: Body, names: Mapping[UUID, str]) -> Iterator[tuple[Key, _State]]:
    """Yield the states in a Metadata or DescribeTopicPartitions response."""
    for topic in answer["topics"]:
        if topic["errorCode"] or topic["name"] is None:
            continue
        for part in topic["partitions"]:
            epoch = part.get("leaderEpoch", -1)
            replicas = frozenset(part["replicaNodes"]) if epoch >= 0 else None
            state = _State(part["leaderId"], epoch, -1, frozenset(part["isrNodes"]), replicas)
            yield (topic["name"], part["partitionIndex"]), state


def _altered(answer: Body, names: Mapping[UUID, str]) -> Iterator[tuple[Key, _State]]:
    """Yield the states in an AlterPartition response: the controller's decisions."""
    for topic in answer.get("topics") or ():
        name: Any = topic.get("topicName") or names.get(topic.get("topicId"), str(topic.get("topicId")))
        for part in topic["partitions"]:
            if not part["errorCode"]:
                epochs = part["leaderEpoch"], part["partitionEpoch"]
                state = _State(part["leaderId"], *epochs, frozenset(part["isr"]), None)
                yield (name, part["partitionIndex"]), state


def _quorum(
    body: Body, names: Mapping[UUID, str] | None = None, *, resigns: bool = False
) -> Iterator[tuple[Key, _State]]:
    """Yield the leader of KRaft's own log in a quorum message: a controller's request, or a response."""
    for topic in body["topics"]:
        for part in topic["partitions"]:
            if part.get("errorCode", 0) or part["leaderEpoch"] < 0 or (part["leaderId"] < 0 and not resigns):
                continue  # no leader is known
            voters = part.get("currentVoters")
            replicas = None if voters is None else frozenset(each["replicaId"] for each in voters)
            leader, version = (NO_LEADER, 0) if resigns else (part["leaderId"], -1)  # last of its epoch
            key = topic["topicName"], part["partitionIndex"]
            yield key, _State(leader, part["leaderEpoch"], version, None, replicas)


_READERS: dict[int, Callable[[Body, Mapping[UUID, str]], Iterator[tuple[Key, _State]]]] = {
    METADATA: _described,
    DESCRIBE_TOPIC_PARTITIONS: _described,
    ALTER_PARTITION: _altered,
    VOTE: _quorum,
    DESCRIBE_QUORUM: _quorum,
}


def _deleted(request: Body) -> Iterator[tuple[Key, int]]:
    """Yield the partitions that a StopReplica request deletes, each with its leader epoch, -1: not in the request.

    Replicas that it only stops have a leader elsewhere.
    """
    everywhere = request.get("deletePartitions")
    if everywhere:
        for part in request.get("ungroupedPartitions") or ():
            yield (part["topicName"], part["partitionIndex"]), -1
        for topic in request.get("topics") or ():
            for index in topic["partitionIndexes"]:
                yield (topic["name"], index), -1
    for topic in request.get("topicStates") or ():
        for part in topic["partitionStates"]:
            if part["deletePartition"]:
                yield (topic["topicName"], part["partitionIndex"]), part["leaderEpoch"]
