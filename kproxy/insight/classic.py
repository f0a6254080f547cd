"""Groups of the classic protocol: JoinGroup, SyncGroup, Heartbeat, LeaveGroup, OffsetCommit become generations.

A generation begins when the first member is told its number, and what set it off is found among what was said since
the one before: a member joined that was not there, one left, one changed its subscription, the leader joined again. A
member that is gone without a word was expired by the coordinator; when, is not on the wire.

`STATES` is the coordinator's own state machine as the wire shows it. Bounds: the caller forgets groups it has too many
of; a group has MAX_MEMBERS members, the others are not followed. Refuses to know where exchanges come from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.insight.assignors import Member, Owned, computed
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.insight.spoken import Body, Spoken
from kproxy.protocol import codec
from kproxy.protocol.error_codes import error_name

OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = 8, 11, 12, 13, 14
APIS = frozenset((OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP))
REBALANCE_IN_PROGRESS, MEMBER_ID_REQUIRED = 27, 79
MAX_MEMBERS = 4096
CONSUMER = "consumer"  # the type of protocol whose members carry subscriptions; Connect's, for example, do not

# (state, what is seen) -> state. What is seen of no entry changes nothing.
STATES = {
    ("Empty", "join"): "PreparingRebalance",
    ("Stable", "join"): "PreparingRebalance",
    ("CompletingRebalance", "join"): "PreparingRebalance",
    ("Stable", "left"): "PreparingRebalance",
    ("CompletingRebalance", "left"): "PreparingRebalance",
    ("Empty", "generation"): "CompletingRebalance",
    ("PreparingRebalance", "generation"): "CompletingRebalance",
    ("Stable", "generation"): "CompletingRebalance",  # its joins were not seen
    ("CompletingRebalance", "assigned"): "Stable",
    ("PreparingRebalance", "emptied"): "Empty",
    ("CompletingRebalance", "emptied"): "Empty",
    ("Stable", "emptied"): "Empty",
}


@dataclass(slots=True)
class _Joined:
    """A member, as its last JoinGroup said."""

    id: str
    instance_id: str | None = None
    client_id: str | None = None
    topics: tuple[str, ...] | None = None  # None: not known, or no consumer
    asked_ns: int = 0  # when its last JoinGroup came


@dataclass(slots=True)
class _Generation:
    """A generation that forms: told to some members, and perhaps not yet assigned to all."""

    number: int
    strategy: str | None
    leader: str
    joined_ns: int
    started_ns: int
    last_to_join: str
    joined: dict[str, _Joined] = field(default_factory=dict)
    members: int = 0  # as the leader was told; 0: not seen
    synced: set[str] = field(default_factory=set)
    synced_ns: int = 0
    last_request_ns: int = 0


class ClassicGroup:
    """One group. `feed` returns the rows that an exchange gives; `finish` those of what is not complete."""

    def __init__(self, cluster: str, group_id: str) -> None:
        self.cluster = cluster
        self.group_id = group_id
        self.state = "Empty"
        self.generation = -1
        self.strategy: str | None = None
        self.members: dict[str, _Joined] = {}
        self.coordinator_id: int | None = None
        self._before: dict[str, _Joined] = {}
        self._left: set[str] = set()
        self._causes: list[tuple[int, str, str | None, str]] = []  # (time, cause, member, reason) since the last one
        self._moved_from: int | None = None
        self._forming: _Generation | None = None

    @property
    def weight(self) -> int:
        """About how many members it remembers, those that left and what they said included."""
        forming = self._forming
        now = len(self.members) + len(self._before) + (0 if forming is None else len(forming.joined))
        return 1 + now + len(self._left) + len(self._causes)

    def feed(self, spoken: Spoken, partitions: Mapping[str, int]) -> Iterator[GroupEvent | Rebalance | Assignment]:
        """The rows of an exchange of `APIS`. partitions: how many each known topic has."""
        if spoken.response is None:
            return
        error = spoken.response.get("errorCode", 0)
        if not error and spoken.broker_id is not None and spoken.broker_id != self.coordinator_id:
            self._moved_from = self.coordinator_id
            self.coordinator_id = spoken.broker_id
        if spoken.api_key == JOIN_GROUP:
            yield from self._join(spoken, spoken.response)
        elif spoken.api_key == SYNC_GROUP:
            yield from self._sync(spoken, spoken.response, partitions)
        elif spoken.api_key == LEAVE_GROUP:
            yield from self._leave(spoken, spoken.response)
        elif spoken.api_key == HEARTBEAT and error:
            yield self._event(spoken, "heartbeat_failed", error=error)
        elif spoken.api_key == OFFSET_COMMIT:
            codes = {part["errorCode"] for topic in spoken.response["topics"] for part in topic["partitions"]}
            for code in sorted(codes - {0}):
                yield self._event(spoken, "commit_failed", error=code)

    def finish(self) -> Iterator[Rebalance]:
        """The generation that was forming when nothing more came."""
        if self._forming is not None:
            yield self._rebalance(self._forming)
            self._forming = None

    # --- joining -----------------------------------------------------------------------------------------------------

    def _join(self, spoken: Spoken, answer: Body) -> Iterator[GroupEvent | Rebalance]:
        error = answer["errorCode"]
        reason = spoken.request.get("reason")
        member_id = answer["memberId"] or spoken.request["memberId"]
        yield self._event(spoken, "join", member_id=member_id, reason=reason, at=spoken.request_end, generation=None)
        if error:
            yield self._event(spoken, "join_answered", member_id=member_id, error=error, generation=None)
            return
        member = self._member(spoken, member_id, answer.get("protocolName"))
        number = answer["generationId"]
        if number == self.generation and self._forming is None:
            # No rebalance: a follower rejoins a stable group with the same subscription and is told the generation
            # that there is, or a static member comes back under a new id (KIP-345).
            self._replace(member)
            yield self._event(spoken, "join_answered", member_id=member_id, generation=number)
            return
        if self._forming is None or number != self._forming.number:
            yield from self.finish()
            self._begin(number, answer, spoken)
        forming = self._forming
        assert forming is not None
        self._note_cause(member, spoken, reason)
        forming.started_ns = min(forming.started_ns, spoken.request_end)
        if spoken.request_end >= forming.last_request_ns:
            forming.last_request_ns, forming.last_to_join = spoken.request_end, member_id
        if len(forming.joined) < MAX_MEMBERS:
            forming.joined[member_id] = member
        forming.joined_ns = max(forming.joined_ns, spoken.response_start)
        if answer["members"]:
            forming.members = len(answer["members"])
            self._learn_members(answer["members"])
        yield self._event(spoken, "join_answered", member_id=member_id, generation=number)

    def _begin(self, number: int, answer: Body, spoken: Spoken) -> None:
        self._before, self.members = self.members, {}
        self._left.clear()
        self._move("join")
        self._move("generation")
        self.generation = number
        self.strategy = answer.get("protocolName")
        member_id = answer["memberId"]
        at = spoken.response_start
        self._forming = _Generation(number, self.strategy, answer["leader"], at, spoken.request_end, member_id)

    def _replace(self, member: _Joined) -> None:
        """The static member of an instance has another id than before."""
        for old in list(self.members.values()):
            if member.instance_id is not None and old.instance_id == member.instance_id:
                del self.members[old.id]
                self.members[member.id] = member

    def _member(self, spoken: Spoken, member_id: str, strategy: str | None) -> _Joined:
        member = _Joined(member_id, spoken.request.get("groupInstanceId"), spoken.client_id)
        member.asked_ns = spoken.request_end
        protocols = {each["name"]: each["metadata"] for each in spoken.request["protocols"]}
        metadata = protocols.get(strategy) if strategy is not None else None
        if metadata is not None and spoken.request["protocolType"] == CONSUMER:
            member.topics = _subscription(metadata)
        return member

    def _learn_members(self, members: list[Body]) -> None:
        """The leader is told of all: of those that were not seen joining, their id and subscription are known too."""
        forming = self._forming
        assert forming is not None
        for each in members[:MAX_MEMBERS]:
            known = forming.joined.get(each["memberId"])
            if known is None:
                topics = _subscription(each["metadata"])
                known = _Joined(each["memberId"], each.get("groupInstanceId"), None, topics)
            self.members[known.id] = known

    def _note_cause(self, member: _Joined, spoken: Spoken, reason: str | None) -> None:
        old = self._before.get(member.id)
        at = spoken.request_end
        if old is None:
            if member.instance_id is not None and any(
                each.instance_id == member.instance_id for each in self._before.values()
            ):
                self._causes.append((at, "member_replaced", member.id, reason or "a static member under a new id"))
            else:
                self._causes.append((at, "member_joined", member.id, reason or "a new member"))
        elif old.topics is not None and member.topics is not None and set(old.topics) != set(member.topics):
            self._causes.append((at, "subscription_changed", member.id, reason or "other topics than before"))

    # --- assignments -------------------------------------------------------------------------------------------------

    def _sync(
        self, spoken: Spoken, answer: Body, partitions: Mapping[str, int]
    ) -> Iterator[GroupEvent | Rebalance | Assignment]:
        member_id, number = spoken.request["memberId"], spoken.request["generationId"]
        yield self._event(spoken, "sync", member_id=member_id, generation=number, at=spoken.request_end)
        error = answer["errorCode"]
        yield self._event(spoken, "sync_answered", member_id=member_id, generation=number, error=error)
        if error:
            return
        forming = self._forming
        if spoken.request["assignments"]:
            yield from self._assigned(spoken, partitions)
        if forming is None or number != forming.number:
            return
        forming.synced.add(member_id)
        forming.synced_ns = max(forming.synced_ns, spoken.response_start)
        self._move("assigned")
        if forming.members and forming.synced >= self.members.keys():
            yield from self.finish()

    def _assigned(self, spoken: Spoken, partitions: Mapping[str, int]) -> Iterator[Assignment]:
        owned = _owned(spoken.request["assignments"])
        if owned is None:
            return
        members = [Member(each.id, each.instance_id, each.topics or ()) for each in self.members.values()]
        expected = computed(self.strategy or "", members, partitions) if members else None
        for member_id, parts in owned.items():
            agrees = None if expected is None else parts == expected.get(member_id)
            known = self.members.get(member_id)
            for topic, index in sorted(parts):
                yield Assignment(
                    spoken.response_start,
                    self.cluster,
                    self.group_id,
                    spoken.request["generationId"],
                    member_id,
                    known.client_id if known is not None else None,
                    topic,
                    index,
                    self.strategy,
                    agrees,
                )

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _leave(self, spoken: Spoken, answer: Body) -> Iterator[GroupEvent | Rebalance]:
        if answer["errorCode"]:
            return
        leaving = spoken.request.get("members") or [{"memberId": spoken.request.get("memberId")}]
        for each in leaving:
            member_id, reason = each["memberId"], each.get("reason")
            at = spoken.request_end
            yield self._event(spoken, "leave", member_id=member_id, reason=reason, at=at)
            self._causes.append((at, "member_left", member_id, reason or "it said that it leaves"))
            self._left.add(member_id)
        self._move("left")
        if self.members.keys() <= self._left:
            yield from self.finish()
            self._move("emptied")

    # --- what a generation was ---------------------------------------------------------------------------------------

    def _rebalance(self, forming: _Generation) -> Rebalance:
        before, after = self._before, self.members or forming.joined
        count = forming.members or len(forming.joined)
        cause, member_id, reason, at = self._cause(forming, before, after)
        complete = bool(forming.members) and forming.synced >= self.members.keys()
        self._causes.clear()
        self._moved_from = None
        return Rebalance(
            self.cluster,
            self.group_id,
            "classic",
            forming.strategy,
            forming.number,
            cause,
            member_id,
            reason,
            min(forming.started_ns, at),
            forming.joined_ns,
            forming.synced_ns if complete else None,
            len(before),
            count,
            len(before.keys() & after.keys()),
            forming.last_to_join,
            self.coordinator_id,
        )

    def _cause(
        self, forming: _Generation, before: Mapping[str, _Joined], after: Mapping[str, _Joined]
    ) -> tuple[str, str | None, str, int]:
        """What set a generation off: (cause, member, reason in words, when)."""
        if self._causes:
            at, cause, member_id, reason = min(self._causes, key=lambda each: each[0])
            return cause, member_id, reason, at
        at = forming.started_ns
        gone = sorted(before.keys() - after.keys())
        if gone:
            return "session_expired", gone[0], "gone without a word: the coordinator expired its session", at
        if self._moved_from is not None:
            return "coordinator_moved", None, f"another coordinator: {self.coordinator_id}", at
        again = [each for each in after.values() if each.id in before and each.asked_ns]
        if again:
            first = min(again, key=lambda each: each.asked_ns)
            if first.id == forming.leader:
                return "leader_rejoined", first.id, "as after a change of topics, or a step of a cooperative one", at
            return "subscription_changed", first.id, "the same topics, and other partitions of its own", at
        return "unknown", None, "what set it off was not seen", at

    def _move(self, seen: str) -> None:
        self.state = STATES.get((self.state, seen), self.state)

    def _event(
        self,
        spoken: Spoken,
        event: str,
        *,
        error: int = 0,
        at: int | None = None,
        generation: int | None = -1,
        member_id: str | None = None,
        reason: str | None = None,
    ) -> GroupEvent:
        request: Any = spoken.request
        if generation == -1:
            generation = request.get("generationId", request.get("generationIdOrMemberEpoch"))
        return GroupEvent(
            spoken.response_start if at is None else at,
            self.cluster,
            self.group_id,
            "classic",
            event,
            member_id if member_id is not None else request.get("memberId"),
            request.get("groupInstanceId"),
            spoken.client_id,
            spoken.client_address,
            generation,
            spoken.broker_id,
            error_name(error) if error else None,
            reason,
            spoken.connection,
            spoken.number,
        )


def _subscription(metadata: bytes) -> tuple[str, ...] | None:
    """The topics of a ConsumerProtocolSubscription; None: it is none, as another kind of client may send."""
    try:
        _, subscription = codec.decode_data("ConsumerProtocolSubscription", metadata)
    except ProtocolError:
        return None
    return tuple(subscription["topics"])


def _owned(assignments: list[Body]) -> Owned | None:
    """What a leader assigned; None if it is no consumer's."""
    owned = {}
    for each in assignments:
        parts: Any = ()
        if each["assignment"]:
            try:
                parts = codec.decode_data("ConsumerProtocolAssignment", each["assignment"])[1]["assignedPartitions"]
            except ProtocolError:
                return None
        owned[each["memberId"]] = frozenset((part["topic"], index) for part in parts for index in part["partitions"])
    return owned
