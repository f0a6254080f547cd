"""A small coordinator of consumer groups: classic groups, like Kafka's GroupCoordinator.

Duty: JoinGroup, SyncGroup, Heartbeat, LeaveGroup, OffsetCommit and OffsetFetch of all groups of a cluster, in memory. A
rebalance waits for the existing members up to their rebalance timeout; a member without a heartbeat for its session
timeout is removed. Static members (KIP-345) are treated like others: their return causes a rebalance.

Bounded: MAX_GROUPS groups (one without members is deleted for a new one), MAX_MEMBERS members of each, MAX_MEMBER_BYTES
of a member's metadata, offsets of existing partitions. Refuses to know brokers and connections.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import uuid4

from kproxy.demo.log import Refused
from kproxy.protocol.apis import (
    GROUP_MAX_SIZE_REACHED,
    ILLEGAL_GENERATION,
    INCONSISTENT_GROUP_PROTOCOL,
    INVALID_GROUP_ID,
    INVALID_SESSION_TIMEOUT,
    MEMBER_ID_REQUIRED,
    OFFSET_METADATA_TOO_LARGE,
    REBALANCE_IN_PROGRESS,
    UNKNOWN_MEMBER_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)

MAX_GROUPS = 64
MAX_MEMBERS = 64
MAX_MEMBER_BYTES = 64 * 1024
MAX_METADATA = 4096  # characters of an offset's metadata, as offset.metadata.max.bytes
FIRST_DELAY_S = 0.3  # group.initial.rebalance.delay.ms, 3 s by default: a demo should not wait
LEAST_SESSION_MS, LONGEST_SESSION_MS = 500, 300_000
_REQUIRED_ID_FROM = 4  # JoinGroup version: a new member first gets its id (KIP-394)


Body = dict[str, Any]
Place = tuple[str, int]  # topic, partition


class State(Enum):
    """The states of a group, with Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"  # members join
    COMPLETING = "CompletingRebalance"  # all wait for the leader's assignment
    STABLE = "Stable"


# (state, event) -> next state. Nothing else changes the state of a group.
TRANSITIONS: Mapping[tuple[State, str], State] = {
    (State.EMPTY, "member joins"): State.PREPARING,
    (State.STABLE, "member joins"): State.PREPARING,
    (State.COMPLETING, "member joins"): State.PREPARING,
    (State.STABLE, "member is gone"): State.PREPARING,
    (State.COMPLETING, "member is gone"): State.PREPARING,
    (State.PREPARING, "all have joined"): State.COMPLETING,
    (State.PREPARING, "nobody is left"): State.EMPTY,
    (State.COMPLETING, "leader assigns"): State.STABLE,
}


@dataclass
class Member:
    """A member's JoinGroup, and its pending answers."""

    id: str
    instance_id: str | None
    session_s: float
    rebalance_s: float
    protocols: dict[str, bytes]  # name -> metadata, preferred first
    assignment: bytes = b""
    joins: "asyncio.Future[Body] | None" = None
    syncs: "asyncio.Future[Body] | None" = None
    session: asyncio.TimerHandle | None = None


@dataclass
class Group:
    """The members in the order of joining; the first one is the leader."""

    id: str
    state: State = State.EMPTY
    generation: int = 0
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    promised: dict[str, None] = field(default_factory=dict)  # ids given to clients that have not joined with them yet
    offsets: dict[Place, tuple[int, str]] = field(default_factory=dict)
    deadline: asyncio.TimerHandle | None = None

    def change(self, event: str) -> bool:
        """Apply an event; returns whether it changes the state."""
        follows = TRANSITIONS.get((self.state, event))
        if follows is not None:
            self.state = follows
        return follows is not None


class Groups:
    """exists(topic, partition): whether there is such a partition."""

    def __init__(self, exists: Callable[[str, int], bool], first_delay_s: float = FIRST_DELAY_S) -> None:
        self.groups: dict[str, Group] = {}
        self._exists = exists
        self._first_delay_s = first_delay_s

    def stop(self) -> None:
        """Cancel all timers: none is left on the event loop."""
        for group in self.groups.values():
            for timer in (group.deadline, *(member.session for member in group.members.values())):
                if timer is not None:
                    timer.cancel()
        self.groups.clear()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def join(self, version: int, body: Body, client_id: str) -> Body:
        member_id = body["memberId"]
        try:
            group, member = self._let_in(version, body, client_id)
        except _IdRequired as required:
            return _not_joined(MEMBER_ID_REQUIRED, required.member_id)
        except Refused as refused:
            return _not_joined(refused.error_code, member_id)
        if member.joins is None:  # else its join changes nothing
            return self._joined(group, member)
        return await member.joins

    async def sync(self, body: Body) -> Body:
        try:
            group, member = self._member(body, body["generationId"])
            if group.state is State.PREPARING:
                raise Refused(REBALANCE_IN_PROGRESS)
        except Refused as refused:
            return {"errorCode": refused.error_code}
        if group.state is State.COMPLETING:
            member.syncs = asyncio.get_running_loop().create_future()
            if member.id == group.leader:
                for given in body["assignments"]:
                    if given["memberId"] in group.members:
                        group.members[given["memberId"]].assignment = bytes(given["assignment"])
                group.change("leader assigns")
                for each in group.members.values():
                    _answer(each.syncs, _assigned(group, each))
            return await member.syncs
        return _assigned(group, member)

    def heartbeat(self, body: Body) -> Body:
        try:
            group, _ = self._member(body, body["generationId"])
        except Refused as refused:
            return {"errorCode": refused.error_code}
        return {"errorCode": REBALANCE_IN_PROGRESS if group.state is State.PREPARING else 0}

    def leave(self, body: Body) -> Body:
        leaving = body.get("members", [body])
        answers = []
        for each in leaving:
            group = self.groups.get(body["groupId"])
            known = group is not None and each["memberId"] in group.members
            if group is not None and known:
                self._remove(group, each["memberId"])
            error = 0 if known else UNKNOWN_MEMBER_ID
            answers.append({"memberId": each["memberId"], "groupInstanceId": None, "errorCode": error})
        return {"errorCode": 0, "members": answers} if "members" in body else {"errorCode": answers[0]["errorCode"]}

    def commit(self, body: Body, error: int = 0) -> Body:
        """error: why this broker refuses all of it, or 0."""
        try:
            if error:
                raise Refused(error)
            generation = body.get("generationIdOrMemberEpoch", -1)
            group = self._group(body["groupId"])
            if generation >= 0 or body.get("memberId") or group.state is not State.EMPTY:
                self._member(body, generation)
                if group.state is State.COMPLETING:
                    raise Refused(REBALANCE_IN_PROGRESS)
        except Refused as refused:
            error = refused.error_code
        topics = []
        for topic in body["topics"]:
            parts: list[Body] = []
            for part in topic["partitions"]:
                index, metadata = part["partitionIndex"], part["committedMetadata"] or ""
                wrong = error or (0 if self._exists(topic["name"], index) else UNKNOWN_TOPIC_OR_PARTITION)
                wrong = wrong or (OFFSET_METADATA_TOO_LARGE if len(metadata) > MAX_METADATA else 0)
                if not wrong:
                    group.offsets[topic["name"], index] = part["committedOffset"], metadata
                parts.append({"partitionIndex": index, "errorCode": wrong})
            topics.append({"name": topic["name"], "partitions": parts})
        return {"topics": topics}

    def fetch(self, body: Body) -> Body:
        if "groups" in body:
            return {"groups": [{"groupId": each["groupId"], **self._committed(each)} for each in body["groups"]]}
        return self._committed(body)

    # --- members -----------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> Group:
        """Return the group, created on first use."""
        if not name:
            raise Refused(INVALID_GROUP_ID)
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= MAX_GROUPS:
                idle = next((each for each in self.groups.values() if each.state is State.EMPTY), None)
                if idle is None:
                    raise Refused(GROUP_MAX_SIZE_REACHED)
                del self.groups[idle.id]
            group = self.groups[name] = Group(name)
        return group

    def _member(self, body: Body, generation: int) -> tuple[Group, Member]:
        """Return the requesting member, and restart its session timeout."""
        group = self.groups.get(body["groupId"])
        member = group.members.get(body.get("memberId", "")) if group is not None else None
        if group is None or member is None:
            raise Refused(UNKNOWN_MEMBER_ID)
        if generation != group.generation:
            raise Refused(ILLEGAL_GENERATION)
        self._lives(group, member)
        return group, member

    def _let_in(self, version: int, body: Body, client_id: str) -> tuple[Group, Member]:
        """Return the joining member; `joins` is its pending answer, or None if it already has the generation."""
        session_ms = body["sessionTimeoutMs"]
        protocols = {each["name"]: bytes(each["metadata"]) for each in body["protocols"]}
        if not LEAST_SESSION_MS <= session_ms <= LONGEST_SESSION_MS:
            raise Refused(INVALID_SESSION_TIMEOUT)
        if not protocols or not body["protocolType"] or sum(map(len, protocols.values())) > MAX_MEMBER_BYTES:
            raise Refused(INCONSISTENT_GROUP_PROTOCOL)
        group = self._group(body["groupId"])
        others = [member for member in group.members.values() if member.id != body["memberId"]]
        if others and (body["protocolType"] != group.protocol_type or not _common([*others], protocols)):
            raise Refused(INCONSISTENT_GROUP_PROTOCOL)
        member = group.members.get(body["memberId"])
        if member is None:
            member_id = self._id_for(group, version, body["memberId"], client_id)
            member = group.members[member_id] = Member(member_id, None, 0.0, 0.0, {})
        unchanged = protocols == member.protocols
        member.instance_id = body.get("groupInstanceId")
        member.protocols = protocols
        member.session_s = session_ms / 1000
        waits_ms = body.get("rebalanceTimeoutMs", -1)  # missing in version 0: the session timeout
        member.rebalance_s = min(session_ms if waits_ms < 0 else waits_ms, LONGEST_SESSION_MS) / 1000
        group.protocol_type = body["protocolType"]
        _answer(member.joins, _not_joined(UNKNOWN_MEMBER_ID, member.id))  # it has joined on another connection before
        member.joins = None
        self._lives(group, member)
        knows = group.state is State.COMPLETING or (group.state is State.STABLE and member.id != group.leader)
        if unchanged and knows:
            return group, member
        member.joins = asyncio.get_running_loop().create_future()
        self._rebalance(group, "member joins")
        return group, member

    def _id_for(self, group: Group, version: int, asked: str, client_id: str) -> str:
        if asked:
            if asked not in group.promised:
                raise Refused(UNKNOWN_MEMBER_ID)
            del group.promised[asked]
        if len(group.members) >= MAX_MEMBERS:
            raise Refused(GROUP_MAX_SIZE_REACHED)
        if asked:
            return asked
        made = f"{client_id[:100]}-{uuid4()}"
        if version < _REQUIRED_ID_FROM:
            return made
        group.promised[made] = None
        if len(group.promised) > MAX_MEMBERS:
            del group.promised[next(iter(group.promised))]
        raise _IdRequired(made)

    def _lives(self, group: Group, member: Member) -> None:
        if member.session is not None:
            member.session.cancel()
        loop = asyncio.get_running_loop()
        member.session = loop.call_later(member.session_s, self._expire, group, member)

    def _expire(self, group: Group, member: Member) -> None:
        if member.joins is not None and not member.joins.done():  # it waits for the rebalance
            self._lives(group, member)
        else:
            self._remove(group, member.id)

    def _remove(self, group: Group, member_id: str) -> None:
        member = group.members.pop(member_id)
        if member.session is not None:
            member.session.cancel()
        _answer(member.joins, _not_joined(UNKNOWN_MEMBER_ID, member_id))
        _answer(member.syncs, {"errorCode": UNKNOWN_MEMBER_ID})
        self._rebalance(group, "member is gone")

    # --- rebalances --------------------------------------------------------------------------------------------------

    def _rebalance(self, group: Group, event: str) -> None:
        """Start a rebalance if the event causes one, and complete it if no member must be waited for."""
        was_empty = group.state is State.EMPTY
        if group.change(event):
            for member in group.members.values():
                _answer(member.syncs, {"errorCode": REBALANCE_IN_PROGRESS})
            longest = max((member.rebalance_s for member in group.members.values()), default=0.0)
            wait_s = min(self._first_delay_s, longest) if was_empty else longest
            loop = asyncio.get_running_loop()
            group.deadline = loop.call_later(wait_s, self._complete, group)
            if was_empty:
                return
        if group.state is State.PREPARING and _waiting(group) == len(group.members) and not _is_first(group):
            self._complete(group)

    def _complete(self, group: Group) -> None:
        """Form the generation of the members that have joined."""
        if group.deadline is not None:
            group.deadline.cancel()
            group.deadline = None
        for member in [each for each in group.members.values() if each.joins is None or each.joins.done()]:
            del group.members[member.id]
            if member.session is not None:
                member.session.cancel()
        group.generation += 1
        if not group.members:
            group.change("nobody is left")
            group.protocol = group.protocol_type = None
            return
        if group.leader not in group.members:
            group.leader = next(iter(group.members))
        names = _common(group.members.values())
        group.protocol = next(name for name in group.members[group.leader].protocols if name in names)
        group.change("all have joined")
        for member in group.members.values():
            member.assignment = b""
            self._lives(group, member)
            _answer(member.joins, self._joined(group, member))
            member.joins = None

    def _joined(self, group: Group, member: Member) -> Body:
        assert group.protocol is not None
        members = [
            {"memberId": each.id, "groupInstanceId": each.instance_id, "metadata": each.protocols[group.protocol]}
            for each in group.members.values()
        ]
        return {
            "errorCode": 0,
            "generationId": group.generation,
            "protocolType": group.protocol_type,
            "protocolName": group.protocol,
            "leader": group.leader,
            "memberId": member.id,
            "members": members if member.id == group.leader else [],
        }

    # --- offsets -----------------------------------------------------------------------------------------------------

    def _committed(self, asked: Body) -> Body:
        group = self.groups.get(asked["groupId"])
        offsets = group.offsets if group is not None else {}
        places: dict[str, list[int]] = {}
        if asked["topics"] is None:
            for topic, index in offsets:
                places.setdefault(topic, []).append(index)
        else:
            places = {topic["name"]: topic["partitionIndexes"] for topic in asked["topics"]}
        return {
            "errorCode": 0,
            "topics": [
                {"name": topic, "partitions": [_offset(index, offsets.get((topic, index))) for index in indexes]}
                for topic, indexes in places.items()
            ],
        }


class _IdRequired(Exception):
    def __init__(self, member_id: str) -> None:
        self.member_id = member_id


def _answer(waits: "asyncio.Future[Body] | None", answer: Body) -> None:
    if waits is not None and not waits.done():
        waits.set_result(answer)


def _waiting(group: Group) -> int:
    return sum(member.joins is not None and not member.joins.done() for member in group.members.values())


def _is_first(group: Group) -> bool:
    """Whether a group that was empty waits for further members."""
    return group.protocol is None and bool(group.members)


def _common(members: Iterable[Member], protocols: Iterable[str] | None = None) -> set[str]:
    """Return the names of the protocols that all members support."""
    every = [set(member.protocols) for member in members]
    return set.intersection(*every, *([set(protocols)] if protocols is not None else []))


def _not_joined(error_code: int, member_id: str) -> Body:
    return {"errorCode": error_code, "memberId": member_id, "protocolName": "", "members": []}


def _assigned(group: Group, member: Member) -> Body:
    named = {"protocolType": group.protocol_type, "protocolName": group.protocol}
    return {"errorCode": 0, "assignment": member.assignment, **named}


def _offset(index: int, committed: tuple[int, str] | None) -> Body:
    offset, metadata = committed or (-1, "")
    return {"partitionIndex": index, "committedOffset": offset, "metadata": metadata, "errorCode": 0}
