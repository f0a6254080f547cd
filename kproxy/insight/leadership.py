"""Who leads which partition, as controllers tell brokers and brokers tell clients, and how that changes.

Duty: the states of partitions in LeaderAndIsr (4), StopReplica (5), UpdateMetadata (6), Metadata (3), AlterPartition
(56) and DescribeTopicPartitions (75), in all their layouts, against what was known; a row for each change. The leader
of KRaft's own log, who is the active controller, is in Vote (52), BeginQuorumEpoch (53), EndQuorumEpoch (54), by which
it resigns, and DescribeQuorum (55), which has the voters as its replicas. DeleteTopics (20) ends a topic, by its id. A
message may be late, so one with an older leader epoch says nothing, nor one with an older partition epoch (zkVersion),
nor one without epochs about a partition whose epoch is known: brokers before 2.1 describe partitions so, and leave dead
replicas out.

Bounds: MAX_PARTITIONS partitions; those beyond are counted in `left_out`. MAX_GONE topics that were deleted. Refuses to
know groups and connections.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.insight.rows import Leadership
from kproxy.insight.spoken import Body, Spoken

METADATA, LEADER_AND_ISR, STOP_REPLICA, UPDATE_METADATA, DELETE_TOPICS, ALTER_PARTITION = 3, 4, 5, 6, 20, 56
VOTE, BEGIN_QUORUM_EPOCH, END_QUORUM_EPOCH, DESCRIBE_QUORUM, DESCRIBE_TOPIC_PARTITIONS = 52, 53, 54, 55, 75
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
NO_LEADER, DELETED = -1, -2  # of a partition that is offline; of one that goes (LeaderAndIsr.LEADER_DURING_DELETE)

Key = tuple[str, int]  # topic, partition


class _State(NamedTuple):
    leader: int
    epoch: int  # of the leader; -1: not known
    version: int  # of this state, at the controller: the partition epoch; -1: not known
    isr: frozenset[int] | None  # None: that message does not say
    replicas: frozenset[int] | None  # None: that message does not say


class Partitions:
    """The partitions of one cluster."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.left_out = 0
        self._known: dict[Key, _State] = {}
        self._gone: dict[UUID, None] = {}  # ids of topics that were deleted, of which a late Metadata may still speak

    def feed(self, spoken: Spoken, names: Mapping[UUID, str]) -> Iterator[Leadership]:
        """The rows of an exchange of `APIS`. names: topics by their ids."""
        api = spoken.api_key
        at = spoken.request_end
        controller: tuple[int | None, int | None] = None, None
        if api in (LEADER_AND_ISR, UPDATE_METADATA, STOP_REPLICA):
            controller = spoken.request["controllerId"], spoken.request["controllerEpoch"]
        if api == STOP_REPLICA:
            for key in _deleted(spoken.request):
                if self._known.pop(key, None) is not None:
                    yield self._row(at, api, controller, key, None, "deleted")
            return
        if api in (LEADER_AND_ISR, UPDATE_METADATA):
            found = _told(spoken.request)
        elif api in (BEGIN_QUORUM_EPOCH, END_QUORUM_EPOCH):
            found = _quorum(spoken.request, resigns=api == END_QUORUM_EPOCH)
        elif spoken.response is None:
            return
        elif api == DELETE_TOPICS:
            yield from self._delete(spoken, spoken.response, names)
            return
        else:
            at = spoken.response_start
            if api in (METADATA, DESCRIBE_TOPIC_PARTITIONS) and self._gone:
                told = [topic for topic in spoken.response["topics"] if topic.get("topicId") not in self._gone]
                found = _READERS[api](spoken.response | {"topics": told}, names)
            else:
                found = _READERS[api](spoken.response, names)
        for key, state in found:
            change = self._take(key, state)
            if change:
                yield self._row(at, api, controller, key, self._known.get(key, state), change)

    def leader_of(self, topic: str, partition: int) -> int | None:
        """The node id of the leader, if it is known and there is one."""
        state = self._known.get((topic, partition))
        return state.leader if state is not None and state.leader >= 0 else None

    def _delete(self, spoken: Spoken, answer: Body, names: Mapping[UUID, str]) -> Iterator[Leadership]:
        """Topics that were deleted. Without ids (before 2.8) a topic lives on until StopReplica ends it."""
        ended = set()
        for topic in answer["responses"]:
            identity = topic.get("topicId")
            if topic["errorCode"] or identity is None or not identity.int or identity in self._gone:
                continue
            self._gone[identity] = None
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
            ended.add(topic["name"] or names.get(identity))
        for key in sorted(key for key in self._known if key[0] in ended) if ended else ():
            del self._known[key]
            yield self._row(spoken.response_start, DELETE_TOPICS, (None, None), key, None, "deleted")

    def _take(self, key: Key, state: _State) -> str:
        """Take a state in; returns what changed, or nothing."""
        before = self._known.get(key)
        if before is None:
            if state.leader == DELETED:
                return ""
            if len(self._known) >= MAX_PARTITIONS:
                self.left_out += 1
                return ""
            self._known[key] = state
            return "created" if state.leader >= 0 else "offline"
        if state.epoch < before.epoch or (state.epoch == before.epoch and state.version < before.version):
            return ""
        if state.leader == DELETED:
            del self._known[key]
            return "deleted"
        replicas = before.replicas if state.replicas is None else state.replicas
        isr = before.isr if state.isr is None else state.isr
        self._known[key] = state = state._replace(replicas=replicas, isr=isr)
        if state.leader != before.leader:
            return "elected" if state.leader >= 0 else "offline"
        if before.replicas is not None and replicas != before.replicas:
            return "moved"
        if before.isr is not None and state.isr is not None and state.isr != before.isr:
            return "isr_shrunk" if state.isr < before.isr or len(state.isr) < len(before.isr) else "isr_grown"
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


def _told(request: Body) -> Iterator[tuple[Key, _State]]:
    """What a controller tells a broker, in LeaderAndIsr and UpdateMetadata: the topic in each partition, or around."""
    for part in request.get("ungroupedPartitionStates") or ():
        yield (part["topicName"], part["partitionIndex"]), _state(part)
    for topic in request.get("topicStates") or ():
        for part in topic["partitionStates"]:
            yield (topic["topicName"], part["partitionIndex"]), _state(part)


def _state(part: Body) -> _State:
    version = part["partitionEpoch"] if "partitionEpoch" in part else part["zkVersion"]
    return _State(part["leader"], part["leaderEpoch"], version, frozenset(part["isr"]), frozenset(part["replicas"]))


def _described(answer: Body, names: Mapping[UUID, str]) -> Iterator[tuple[Key, _State]]:
    """What a broker tells a client in Metadata, or DescribeTopicPartitions."""
    for topic in answer["topics"]:
        if topic["errorCode"] or topic["name"] is None:
            continue
        for part in topic["partitions"]:
            epoch = part.get("leaderEpoch", -1)
            replicas = frozenset(part["replicaNodes"]) if epoch >= 0 else None
            state = _State(part["leaderId"], epoch, -1, frozenset(part["isrNodes"]), replicas)
            yield (topic["name"], part["partitionIndex"]), state


def _altered(answer: Body, names: Mapping[UUID, str]) -> Iterator[tuple[Key, _State]]:
    """What the controller made of a leader's AlterPartition."""
    for topic in answer.get("topics") or ():
        name: Any = topic.get("topicName") or names.get(topic.get("topicId"), str(topic.get("topicId")))
        for part in topic["partitions"]:
            if not part["errorCode"]:
                epochs = part["leaderEpoch"], part["partitionEpoch"]
                state = _State(part["leaderId"], *epochs, frozenset(part["isr"]), None)
                yield (name, part["partitionIndex"]), state


def _quorum(
    said: Body, names: Mapping[UUID, str] | None = None, *, resigns: bool = False
) -> Iterator[tuple[Key, _State]]:
    """Who leads KRaft's own log, as controllers tell each other, or a describe tells a client."""
    for topic in said["topics"]:
        for part in topic["partitions"]:
            if part.get("errorCode", 0) or part["leaderEpoch"] < 0 or (part["leaderId"] < 0 and not resigns):
                continue  # nobody is known to lead
            voters = part.get("currentVoters")
            replicas = None if voters is None else frozenset(each["replicaId"] for each in voters)
            leader, version = (NO_LEADER, 0) if resigns else (part["leaderId"], -1)  # the last word of its epoch
            key = topic["topicName"], part["partitionIndex"]
            yield key, _State(leader, part["leaderEpoch"], version, None, replicas)


_READERS: dict[int, Callable[[Body, Mapping[UUID, str]], Iterator[tuple[Key, _State]]]] = {
    METADATA: _described,
    DESCRIBE_TOPIC_PARTITIONS: _described,
    ALTER_PARTITION: _altered,
    VOTE: _quorum,
    DESCRIBE_QUORUM: _quorum,
}


def _deleted(request: Body) -> Iterator[Key]:
    """The partitions that a broker is told to delete; those that it is told to stop only are led elsewhere."""
    everywhere = request.get("deletePartitions")
    if everywhere:
        for part in request.get("ungroupedPartitions") or ():
            yield part["topicName"], part["partitionIndex"]
        for topic in request.get("topics") or ():
            for index in topic["partitionIndexes"]:
                yield topic["name"], index
    for topic in request.get("topicStates") or ():
        for part in topic["partitionStates"]:
            if part["deletePartition"]:
                yield topic["topicName"], part["partitionIndex"]
