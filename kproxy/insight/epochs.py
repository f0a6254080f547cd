"""Groups whose coordinator assigns: KIP-848's consumers, share groups (KIP-932), streams groups (KIP-1071).

Every member heartbeats with its epoch, and is told the next one together with what it owns then. An epoch above all
that were told before is a rebalance of the group; what set it off is found among what members said since the last: one
joined (epoch 0), one left (-1, -2), one changed its subscription. Otherwise a member was silent for long, and expired,
or the topics changed. An epoch that no member was told is not on the wire.

Bounds: MAX_MEMBERS members. Refuses to know where exchanges come from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.insight.spoken import Spoken
from kproxy.protocol.error_codes import error_name

PROTOCOLS = {68: "consumer", 76: "share", 88: "streams"}  # ConsumerGroupHeartbeat, ShareGroupHeartbeat, Streams...
MAX_MEMBERS = 4096
SILENT_INTERVALS = 3  # of heartbeats: a coordinator expires a session after nine by default
UNSAID = "metadata_changed"  # the cause of an epoch when no member said anything
_LEAVING = (-1, -2)  # for good; and as a static member that comes back

Owned = frozenset[tuple[str, int]]


@dataclass(slots=True)
class _Member:
    id: str
    client_id: str | None
    instance_id: str | None
    epoch: int
    heard_ns: int
    interval_ns: int = 0
    topics: tuple[str, ...] | None = None
    owned: Owned = frozenset()


class EpochGroup:
    """One group. `feed` returns the rows that a heartbeat gives; `finish` those of what is not complete."""

    def __init__(self, cluster: str, group_id: str, protocol: str) -> None:
        self.cluster = cluster
        self.group_id = group_id
        self.protocol = protocol
        self.epoch = 0  # the highest that a member was told
        self.members: dict[str, _Member] = {}
        self.coordinator_id: int | None = None
        self._causes: list[tuple[int, str, str | None, str]] = []  # (time, cause, member, reason)
        self._before = 0  # members when the last epoch began
        self._begun_ns = 0  # when its first member was told of the last epoch
        self._forming: Rebalance | None = None
        self._told: set[str] = set()  # members that know the epoch that forms

    @property
    def state(self) -> str:
        """As the coordinator calls it, as far as members' epochs show."""
        if not self.members:
            return "Empty"
        return "Stable" if all(each.epoch == self.epoch for each in self.members.values()) else "Reconciling"

    @property
    def weight(self) -> int:
        """About how many members it remembers, what they said included."""
        return 1 + len(self.members) + len(self._told) + len(self._causes)

    def feed(self, spoken: Spoken, names: Mapping[UUID, str]) -> Iterator[GroupEvent | Rebalance | Assignment]:
        """The rows of a heartbeat. names: topics by their ids; one that is not there is called by its id."""
        request, answer = spoken.request, spoken.response
        if answer is None:
            return
        if answer["errorCode"]:
            yield self._event(spoken, "heartbeat_failed", error=answer["errorCode"])
            return
        if spoken.broker_id is not None:
            self.coordinator_id = spoken.broker_id
        if request["memberEpoch"] in _LEAVING:
            yield from self._leave(spoken)
            return
        member, is_new = self._met(spoken)
        if is_new and request["memberEpoch"] == 0:
            self._note(spoken, "member_joined", member.id, "a new member")
            yield self._event(spoken, "join", at=spoken.request_end)
            yield self._event(spoken, "join_answered")
        topics = request.get("subscribedTopicNames")
        if topics is not None:
            if member.topics is not None and set(topics) != set(member.topics):
                self._note(spoken, "subscription_changed", member.id, "other topics than before")
            member.topics = tuple(topics)
        member.epoch = answer["memberEpoch"]
        if member.epoch > self.epoch:
            yield from self.finish()
            self._begin(member, spoken)
        if answer.get("assignment") is not None:
            yield from self._assigned(member, spoken, _owned(answer["assignment"], names))
        forming = self._forming
        if forming is not None and member.epoch >= forming.generation:
            self._told.add(member.id)
            if forming.ended_ns is None and self._told >= self.members.keys():
                forming = self._forming = forming._replace(ended_ns=spoken.response_start)
            # One that nobody said the cause of waits for the next heartbeat: who set it off may be told last.
            if forming.ended_ns is not None and (forming.cause != UNSAID or spoken.request_end > forming.ended_ns):
                yield from self.finish()

    def finish(self) -> Iterator[Rebalance]:
        """The epoch that was forming when nothing more came."""
        if self._forming is not None:
            yield self._forming
            self._forming = None

    def _met(self, spoken: Spoken) -> tuple[_Member, bool]:
        """The member that heartbeats, and whether it is new here."""
        assert spoken.response is not None
        member_id = spoken.response.get("memberId") or spoken.request["memberId"]
        member = self.members.get(member_id)
        is_new = member is None
        if member is None:
            instance_id = spoken.request.get("instanceId")
            member = _Member(member_id, spoken.client_id, instance_id, 0, spoken.request_end)
            if len(self.members) < MAX_MEMBERS:
                self.members[member_id] = member
        member.heard_ns = spoken.request_end
        member.interval_ns = spoken.response["heartbeatIntervalMs"] * 1_000_000
        return member, is_new

    def _leave(self, spoken: Spoken) -> Iterator[GroupEvent | Rebalance]:
        member_id = spoken.request["memberId"]
        self.members.pop(member_id, None)
        self._note(spoken, "member_left", member_id, "it said that it leaves")
        yield self._event(spoken, "leave", at=spoken.request_end)
        if not self.members:
            yield from self.finish()

    def _note(self, spoken: Spoken, cause: str, member_id: str, reason: str) -> None:
        """Keep a cause for the epoch to come, or give it to the one that others were told before this answer."""
        assert spoken.response is not None
        at, forming = spoken.request_end, self._forming
        is_late = at < self._begun_ns and spoken.response["memberEpoch"] in (self.epoch, *_LEAVING)
        if is_late and forming is not None and forming.cause == UNSAID:
            self._before = len(self.members)
            self._forming = forming._replace(
                cause=cause,
                cause_member=member_id,
                reason=reason,
                started_ns=at,
                ended_ns=None,
                members_after=self._before,
            )
        elif not is_late or cause != "member_joined":  # a new member is told the epoch that it set off
            self._causes.append((at, cause, member_id, reason))

    def _begin(self, member: _Member, spoken: Spoken) -> None:
        """A member was told an epoch that nobody was told before."""
        skipped = member.epoch - self.epoch - 1
        self.epoch, self._begun_ns = member.epoch, spoken.response_start
        self._causes.sort(key=lambda cause: cause[0])
        left_over = min(skipped, max(0, len(self._causes) - 1))  # epochs that no member was told had causes too
        causes, self._causes = self._causes[left_over:], []
        at, cause, cause_member, reason = causes[0] if causes else self._unsaid(member, spoken)
        self._causes = causes[1:]
        others = [each for each in self.members.values() if each.id != cause_member or cause != "member_joined"]
        before, self._before = self._before, len(self.members)
        self._told = set()
        self._forming = Rebalance(
            self.cluster,
            self.group_id,
            self.protocol,
            None,
            member.epoch,
            cause,
            cause_member,
            reason,
            at,
            spoken.response_start,
            None,
            before,
            len(self.members),
            len(others),
            member.id,
            self.coordinator_id,
        )

    def _unsaid(self, member: _Member, spoken: Spoken) -> tuple[int, str, str | None, str]:
        """Why there is a new epoch though no member said anything."""
        at = spoken.request_end
        for each in self.members.values():
            if each.interval_ns and at - each.heard_ns > SILENT_INTERVALS * each.interval_ns:
                del self.members[each.id]
                return at, "session_expired", each.id, "silent for long: the coordinator expired its session"
        return at, UNSAID, None, "no member said anything new: a topic has other partitions than before"

    def _assigned(self, member: _Member, spoken: Spoken, owned: Owned) -> Iterator[GroupEvent | Assignment]:
        taken, given = member.owned - owned, owned - member.owned
        member.owned = owned
        if taken:
            yield self._event(spoken, "revoked", reason=_listed(taken))
        if given:
            yield self._event(spoken, "assigned", reason=_listed(given))
        for topic, index in sorted(owned):
            yield Assignment(
                spoken.response_start,
                self.cluster,
                self.group_id,
                member.epoch,
                member.id,
                member.client_id,
                topic,
                index,
                spoken.request.get("serverAssignor"),
                None,
            )

    def _event(
        self, spoken: Spoken, event: str, *, error: int = 0, at: int | None = None, reason: str | None = None
    ) -> GroupEvent:
        request = spoken.request
        answer: Any = spoken.response or {}
        epoch = answer.get("memberEpoch") if not error and at is None else request["memberEpoch"]
        return GroupEvent(
            spoken.response_start if at is None else at,
            self.cluster,
            self.group_id,
            self.protocol,
            event,
            answer.get("memberId") or request["memberId"],
            request.get("instanceId"),
            spoken.client_id,
            spoken.client_address,
            epoch,
            spoken.broker_id,
            error_name(error) if error else None,
            reason,
            spoken.connection,
            spoken.number,
        )


def _owned(assignment: Any, names: Mapping[UUID, str]) -> Owned:
    """What an answer assigns. A streams member gets tasks instead, of which partitions are not read."""
    parts = assignment.get("topicPartitions") or ()
    return frozenset(
        (names.get(part["topicId"], str(part["topicId"])), index) for part in parts for index in part["partitions"]
    )


def _listed(owned: Owned, most: int = 20) -> str:
    """Partitions in words: "orders-0, orders-1"."""
    found = [f"{topic}-{index}" for topic, index in sorted(owned)]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
