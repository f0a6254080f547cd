"""Groups of the classic protocol: JoinGroup, SyncGroup, Heartbeat, LeaveGroup, OffsetCommit become generations.

A generation begins when the first member receives its number. Its cause is the earliest of the requests since the
previous generation: a new member joined, one left, one changed its subscription, the leader rejoined. The session of a
member that disappears without a LeaveGroup has expired; the wire shows only the limits of that time. If the joins were
not seen, because they precede the capture, the first SyncGroup of a generation begins it, and its members are those in
the leader's assignments. A response that the next generation overtook changes nothing. If a later join of a client that
is not a member receives an old generation, the group was deleted and re-created.

`STATES` is the coordinator's own state machine as the wire shows it. Bounds: those of `group` and `embedded`; at most
MAX_MEMBERS members may have received an id without joining. Refuses to know where exchanges come from.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kproxy.insight.decoded import Body, DecodedExchange
from kproxy.insight.membership.assignors import Member, Verdict, checked
from kproxy.insight.membership.embedded import CONNECT, NOTHING, Given, Owned, given, group_type, listed
from kproxy.insight.membership.group import HEAVY_BYTES, MAX_MEMBERS, Cause, Group, GroupRow
from kproxy.insight.membership.joined import MS, Expected, Forming, Joined, subscribe
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.protocol.apis import (
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    MEMBER_ID_REQUIRED,
    REBALANCE_IN_PROGRESS,
    SYNC_GROUP,
)
from kproxy.wording import counted

LATE_NS = 10**9  # difference between clocks of captures, at most

Counts = Mapping[str, int]  # partitions by topic
Known = tuple[Counts, Counts]  # now, and before topics grew
NONE: Counts = {}

# (state, observation) -> state. Pairs without an entry leave the state as it is.
STATES = {
    ("Empty", "join"): "PreparingRebalance",
    ("Stable", "join"): "PreparingRebalance",
    ("CompletingRebalance", "join"): "PreparingRebalance",
    ("Dead", "join"): "PreparingRebalance",
    ("Stable", "left"): "PreparingRebalance",
    ("CompletingRebalance", "left"): "PreparingRebalance",
    ("Empty", "generation"): "CompletingRebalance",
    ("PreparingRebalance", "generation"): "CompletingRebalance",
    ("Stable", "generation"): "CompletingRebalance",  # its joins were not seen
    ("CompletingRebalance", "assigned"): "Stable",
    ("PreparingRebalance", "settled"): "Stable",  # the new coordinator has no rebalance in progress
    ("PreparingRebalance", "emptied"): "Empty",
    ("CompletingRebalance", "emptied"): "Empty",
    ("Stable", "emptied"): "Empty",
    ("Empty", "deleted"): "Dead",
}


class ClassicGroup(Group):
    """One group. `feed` yields the rows of an exchange; `finish` yields those of a generation that is not complete."""

    def __init__(self, cluster: str, group_id: str) -> None:
        super().__init__(cluster, group_id, "classic")
        self.state = "Empty"
        self.generation = -1
        self.strategy: str | None = None
        self.members: dict[str, Joined] = {}
        self._before: dict[str, Joined] = {}
        self._left: dict[str, Joined] = {}  # members that are gone since the last generation
        self.expected = Expected()
        self._called: set[str] = set()  # members that received REBALANCE_IN_PROGRESS since the last generation
        self._forming: Forming | None = None
        self._began_before = False  # whether the group had members before its first message was seen
        self._answered_ns = 0  # when the first member received this generation
        self._is_complete = False  # whether `members` is the complete list in the leader's JoinGroup response

    @property
    def weight(self) -> int:
        """Return the memory in use, in members (about): former members count, metadata counts by its size."""
        forming = () if self._forming is None else (self._forming.joined, self._forming.called)
        known = (self.members, self._before, self._left, self._causes, self.expected, self._called, *forming)
        return 1 + sum(map(len, known)) + self._held_bytes // HEAVY_BYTES

    def feed(
        self, exchange: DecodedExchange, partitions: Mapping[str, int], before: Counts = NONE
    ) -> Iterator[GroupRow]:
        """Yield the rows of an exchange of an API in `_READERS`.

        partitions: the partition count of each known topic. before: the former count of topics that grew recently.
        """
        answer = exchange.response
        if answer is None:
            if exchange.api_key == JOIN_GROUP:
                reason = exchange.request.get("reason") or "it was never answered"
                yield self.event(exchange, "join", at=exchange.request_end, reason=reason)
            return
        if not answer.get("errorCode", 0):
            yield from self.coordinated_by(exchange.broker_id, exchange)
        yield from _READERS[exchange.api_key](self, exchange, answer, (partitions, before))

    def finish(self) -> Iterator[GroupRow]:
        """Yield the rows of the generation that is forming at the end of the traffic."""
        if self._forming is not None:
            yield from self._close(self._forming)
            self._forming = None

    def note_alive(self, member_id: str, at: int) -> None:
        """Update the time of the last sign of life of a member."""
        member = self.members.get(member_id)
        if member is not None:
            member.heard_ns = max(member.heard_ns, at)

    # --- joining -----------------------------------------------------------------------------------------------------

    def _join(self, exchange: DecodedExchange, answer: Body, _: Known) -> Iterator[GroupRow]:
        error = answer["errorCode"]
        reason = exchange.request.get("reason")
        member_id = answer["memberId"] or exchange.request["memberId"]
        yield self.event(exchange, "join", member_id=member_id, reason=reason, at=exchange.request_end, generation=None)
        if error:
            if error == MEMBER_ID_REQUIRED and len(self.expected) < MAX_MEMBERS:
                self._ask(exchange, member_id)
            yield self.event(exchange, "join_answered", member_id=member_id, error=error, generation=None)
            return
        number = answer["generationId"]
        if number < self.generation and exchange.request_end < self._answered_ns:  # overtaken by the next generation
            self.expected.came(member_id)
            yield self.event(exchange, "join_answered", member_id=member_id, generation=number)
            return
        member = self._member(exchange, member_id, answer.get("protocolName"))
        answered = self.event(exchange, "join_answered", member_id=member_id, generation=number, reason=member.words)
        is_same = number == self.generation and self._forming is None and self.state not in ("Empty", "Dead")
        if is_same and not self._is_another(member, exchange):
            # No rebalance: a follower rejoins a stable group with the same subscription and receives the current
            # generation, or a static member comes back under a new id (KIP-345).
            yield answered
            self._move("settled")
            yield from self._replaced(member, exchange)
            return
        if self._forming is None or number != self._forming.number:
            yield from self.finish()
            at, asked_ns = exchange.response_start, exchange.request_end
            self._begin(number, answer.get("protocolName"), answer["leader"], at, asked_ns, answer["memberId"])
        forming = self._forming
        assert forming is not None
        self._note_cause(member, min(exchange.request_end, forming.answered_ns), exchange.request["memberId"], reason)
        forming.started_ns = min(forming.started_ns, exchange.request_end)
        if exchange.request_end >= forming.last_request_ns:
            forming.last_but_one_ns = forming.last_request_ns
            forming.last_request_ns, forming.last_to_join = exchange.request_end, member_id
        else:
            forming.last_but_one_ns = max(forming.last_but_one_ns, exchange.request_end)
        if len(forming.joined) < MAX_MEMBERS:
            former = forming.joined.get(member_id) or self.members.get(member_id)
            self._held_bytes += member.size_bytes - (0 if former is None else former.size_bytes)
            forming.joined[member_id] = member
            if member_id in self.members:  # already learned from the leader's response
                self.members[member_id] = member
        forming.joined_ns = max(forming.joined_ns, exchange.response_start)
        if answer["members"]:
            forming.members = len(answer["members"])
            self._learn_members(answer["members"])
        yield answered

    def _is_another(self, member: Joined, exchange: DecodedExchange) -> bool:
        """Return whether a member that receives the current generation joins a re-created group of this name."""
        if not self._is_complete or member.id in self.members or exchange.request_end <= self._answered_ns + LATE_NS:
            return False
        instances = (each.instance_id for each in self.members.values())
        return member.instance_id is None or member.instance_id not in instances

    def _begin(
        self, number: int, strategy: str | None, leader: str, at: int, asked_ns: int, member_id: str | None
    ) -> None:
        if self.generation == -1 and number > 1:
            self._began_before = True
        elif self._before or self.members:
            self._began_before = False
        if self.state in ("Empty", "Dead") and self.generation != -1 and number != self.generation + 1:
            # The last leave made a generation without members: no response has its number, only a gap shows it.
            self._left, self._called = {}, set()
            self._causes.clear()
        self._before, self.members, self._left = self._left | self.members, {}, {}
        self._move("join")
        self._move("generation")
        self.generation, self.strategy = number, strategy
        self._answered_ns, self._is_complete = at, False
        called, self._called = self._called, set()
        self._forming = Forming(number, strategy, leader, at, called, at, asked_ns, member_id)

    def _replaced(self, member: Joined, exchange: DecodedExchange) -> Iterator[GroupEvent]:
        """Give a static member that came back under another id the assignment of its former id."""
        for old in list(self.members.values()):
            if member.instance_id is not None and old.instance_id == member.instance_id and old.id != member.id:
                del self.members[old.id]
                member.owned = old.owned
                self.members[member.id] = member
                self._held_bytes += member.size_bytes - old.size_bytes
                reason = f"instance {member.instance_id} was {old.id}"
                yield self.event(exchange, "member_replaced", member_id=member.id, reason=reason)

    def _member(self, exchange: DecodedExchange, member_id: str, strategy: str | None) -> Joined:
        request = exchange.request
        member = Joined(member_id, request.get("groupInstanceId"), exchange.client_id, exchange.client_address)
        member.asked_ns, member.heard_ns = exchange.request_end, exchange.response_start
        member.session_ns = request["sessionTimeoutMs"] * MS
        self.expected.may_take(request)
        protocols = {each["name"]: each["metadata"] for each in request["protocols"]}
        metadata = protocols.get(strategy) if strategy is not None else None
        self.group_type = group_type(request["protocolType"], strategy) or self.group_type
        if metadata is not None:
            subscribe(member, self.group_type, metadata)
        return member

    def _learn_members(self, members: list[Body]) -> None:
        """Learn the ids and subscriptions of all members, including joins not seen, from the leader's response."""
        forming = self._forming
        assert forming is not None
        self._is_complete = len(members) <= MAX_MEMBERS
        for each in members[:MAX_MEMBERS]:
            known = forming.joined.get(each["memberId"])
            if known is None:
                known = Joined(each["memberId"], each.get("groupInstanceId"))
                subscribe(known, self.group_type, each["metadata"])
                there = self.members.get(known.id)  # its leader may receive the list twice
                self._held_bytes += known.size_bytes - (0 if there is None else there.size_bytes)
            former = self._before.get(known.id)
            if former is not None:
                known.client_id = known.client_id or former.client_id
                if self.group_type != CONNECT:  # workers of Connect report what they own when they join
                    known.owned = former.owned
            self.members[known.id] = known

    def _note_cause(self, member: Joined, at: int, asked_id: str, reason: str | None) -> None:
        old = self._before.get(member.id)
        given = self.expected.came(member.id)
        if old is not None:
            if old.topics is not None and member.topics is not None and set(old.topics) != set(member.topics):
                self.caused(at, "subscription_changed", member.id, reason or "other topics than before")
        elif member.instance_id is not None and any(
            each.instance_id == member.instance_id for each in self._before.values()
        ):
            self.caused(at, "member_replaced", member.id, reason or "a static member under a new id")
        elif self._began_before and not given and asked_id:
            self._before[member.id] = member  # it had its id before the first message of the group was seen
        else:
            self.caused(at, "member_joined", member.id, reason or "a new member")

    # --- members that do not join ------------------------------------------------------------------------------------

    def _ask(self, exchange: DecodedExchange, member_id: str) -> None:
        timeout_ms = exchange.request["sessionTimeoutMs"]
        at = exchange.response_start + max(0, timeout_ms) * MS
        reason = f"it was given this id to join with, and did not within its session of {timeout_ms} ms"
        event = self.event(exchange, "never_joined", member_id=member_id, at=at, reason=reason, generation=None)
        self.expected.ask(member_id, event)
        self.expected.may_take(exchange.request)

    def _expired(self, forming: Forming, after: Mapping[str, Joined]) -> Iterator[GroupEvent]:
        """Yield events of former members whose sessions expired: after `heard_ns`, and before the event's time."""
        instances = {each.instance_id for each in after.values()} - {None}
        for member_id in sorted(self._before.keys() - after.keys()):
            member = self._before[member_id]
            # Else it left, or was replaced; a member whose requests are not captured may have left, too.
            if member.was_seen and not member.is_gone and member.instance_id not in instances:
                words = f"not in generation {forming.number}"
                yield self._expiry(member, forming.joined_ns, forming.number, words)

    def _expiry(self, member: Joined, at: int, generation: int, words: str) -> GroupEvent:
        if member.heard_ns:
            silent_s = max(0, at - member.heard_ns) / 1e9
            words += f"; its last join, sync, commit or failed heartbeat was {silent_s:.1f} s before"
        if member.session_ns:
            words += f", its session lasts {member.session_ns / 1e9:g} s"
        return self.expired(member, at, generation, words)

    # --- assignments -------------------------------------------------------------------------------------------------

    def _sync(self, exchange: DecodedExchange, answer: Body, known: Known) -> Iterator[GroupRow]:
        member_id, number = exchange.request["memberId"], exchange.request["generationId"]
        yield self.event(exchange, "sync", at=exchange.request_end)
        error = answer["errorCode"]
        yield self.event(exchange, "sync_answered", error=error)
        if error:
            self._call(member_id, error)
            if error == REBALANCE_IN_PROGRESS and number == self.generation:
                self._move("join")
            return
        self.note_alive(member_id, exchange.response_start)
        if number > self.generation:
            yield from self.finish()
            at = exchange.request_end
            self.group_type = group_type(exchange.request.get("protocolType"), None) or self.group_type
            self._begin(number, exchange.request.get("protocolName"), "", at, at, None)
        forming = self._forming
        if forming is not None and number == forming.number and not forming.members:
            self._learn_assigned(forming, exchange)
        if exchange.request["assignments"]:
            yield from self._assigned(exchange, *known)
        if number == self.generation:
            yield from self._given(exchange, answer)
        if forming is None or number != forming.number:
            return
        if len(forming.synced) < MAX_MEMBERS:
            forming.synced.add(member_id)
        forming.synced_ns = max(forming.synced_ns, exchange.response_start)
        self._move("assigned")
        if forming.members and forming.synced >= self.members.keys():
            yield from self.finish()

    def _learn_assigned(self, forming: Forming, exchange: DecodedExchange) -> None:
        """Learn members if the leader's join was not seen: the SyncGroup's sender, and those in its assignments."""
        member_id, assignments = exchange.request["memberId"], exchange.request["assignments"]
        if member_id not in forming.joined and len(forming.joined) < MAX_MEMBERS:
            instance_id = exchange.request.get("groupInstanceId")
            forming.joined[member_id] = Joined(member_id, instance_id, exchange.client_id, exchange.client_address)
        for each in assignments[:MAX_MEMBERS]:
            name = each["memberId"]
            self.members[name] = forming.joined.get(name) or self._before.get(name) or Joined(name)
        forming.members = len(assignments)

    def _given(self, exchange: DecodedExchange, answer: Body) -> Iterator[GroupEvent]:
        """Yield the events of a SyncGroup response: partitions assigned and revoked, and tasks of Connect."""
        member = self.members.get(exchange.request["memberId"])
        assigned = given(self.group_type, answer["assignment"])
        if assigned is None:
            yield self.event(exchange, "assigned", reason=f"{len(answer['assignment'])} bytes of {self.strategy}")
            return
        before = NOTHING
        if member is not None:
            before = member.owned if member.owned is not None else member.said_owned or NOTHING
            member.owned = assigned.after(before)
            more = len(answer["assignment"]) - member.given_bytes  # it may send SyncGroup again
            member.given_bytes += more
            member.size_bytes += more
            self._held_bytes += more
        owned = assigned.after(before)
        if before - owned:
            yield self.event(exchange, "revoked", reason=listed(before - owned))
        if owned - before:
            yield self.event(exchange, "assigned", reason=listed(owned - before))
        if assigned.words:
            yield self.event(exchange, "tasks_assigned", reason=assigned.words)

    def _assigned(self, exchange: DecodedExchange, partitions: Counts, before: Counts) -> Iterator[GroupRow]:
        """Yield the leader's assignments, if their format is known; for consumers with a comparison to the strategy.

        A leader may learn of a topic's new partitions up to `metadata.max.age.ms` after others, and rejoins then.
        """
        assignments: dict[str, Given] = {}
        for each in exchange.request["assignments"][:MAX_MEMBERS]:
            parts = given(self.group_type, each["assignment"])
            if parts is None:
                return
            assignments[each["memberId"]] = parts
        owned: dict[str, Owned] = {}
        for member_id, what in assignments.items():
            known = self.members.get(member_id)
            owned[member_id] = what.after(known.said_owned if known is not None else None)
        members = [
            Member(each.id, each.instance_id, each.topics or (), each.rack, each.said_owned)
            for each in self.members.values()
        ]
        is_known = all(each.topics is not None for each in self.members.values())
        verdict = checked(self.strategy or "", members, partitions, owned) if is_known else Verdict()
        if verdict.reason and any(topic in before for member in members for topic in member.topics):
            earlier = checked(self.strategy or "", members, ChainMap(before, partitions), owned)  # type: ignore[arg-type]
            verdict = verdict if earlier.reason else earlier
        if verdict.reason:
            yield self.event(exchange, "assignment_differs", reason=verdict.reason)
        for member_id, owns in owned.items():
            known = self.members.get(member_id)
            for topic, index in sorted(owns):
                yield Assignment(
                    exchange.response_start,
                    self.cluster,
                    self.group_id,
                    exchange.request["generationId"],
                    member_id,
                    known.client_id if known is not None else None,
                    topic,
                    index,
                    self.strategy,
                    verdict.agrees(member_id),
                    self.group_type,
                )

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _leave(self, exchange: DecodedExchange, answer: Body, _: Known) -> Iterator[GroupRow]:
        leaving = exchange.request.get("members")
        codes = [each["errorCode"] for each in answer.get("members") or ()]
        if leaving is None:
            leaving = [{"memberId": exchange.request.get("memberId")}]
        for place, each in enumerate(leaving):
            member_id, instance_id, reason = each["memberId"], each.get("groupInstanceId"), each.get("reason")
            error = answer["errorCode"] or (codes[place] if place < len(codes) else 0)
            if not member_id and instance_id:  # an administrator names static members by their instances
                member_id = next((one.id for one in self.members.values() if one.instance_id == instance_id), "")
            at = exchange.request_end
            known = {"member_id": member_id, "group_instance_id": instance_id, "generation": None}
            yield self.event(exchange, "leave", reason=reason, at=at, error=error, **known)
            if error:
                continue
            self.caused(at, "member_left", member_id, reason or "it said that it leaves")
            self.expected.came(member_id)
            self._gone(member_id)
            self._move("left")
        if self._left and not self.members:
            yield from self.finish()
            self._move("emptied")

    def _gone(self, member_id: str) -> None:
        """Remove a member; it remains part of the current generation."""
        member = self.members.pop(member_id, None)
        if member is not None:
            self._left[member_id] = member
            member.is_gone = True

    # --- errors and descriptions -------------------------------------------------------------------------------------

    def failed(self, exchange: DecodedExchange, event: str, codes: set[int]) -> Iterator[GroupEvent]:
        for code in codes:
            self._call(exchange.request.get("memberId") or "", code)
        return super().failed(exchange, event, codes)

    def _call(self, member_id: str, error: int) -> None:
        """Note that a member received REBALANCE_IN_PROGRESS: its rejoin does not cause a generation."""
        if error == REBALANCE_IN_PROGRESS and len(self._called) < MAX_MEMBERS:
            self._called.add(member_id)

    def _heartbeat(self, exchange: DecodedExchange, answer: Body, _: Known) -> Iterator[GroupEvent]:
        self.note_alive(exchange.request["memberId"], exchange.request_end)
        error, number = answer["errorCode"], exchange.request["generationId"]
        # JoinGroup responses wait for all members: until then only this error shows the rebalance. Brokers before 2.4
        # return the same error to members that wait for their assignment.
        if error == REBALANCE_IN_PROGRESS and number == self.generation and self.state == "Stable":
            self._move("join")
        return self.failed(exchange, "heartbeat_failed", {error})

    def described(self, exchange: DecodedExchange, description: Body) -> Iterator[GroupEvent]:
        """Learn state and members from a DescribeGroups response, where the wire did not show them; yield events."""
        yield from self.coordinated_by(exchange.broker_id, exchange)
        state, members = description["groupState"], description["members"]
        differs = (state, len(members)) != (self.state, len(self.members)) and self.generation != -1
        reason = f"{state}, {counted(len(members), 'member')}"
        reason += f"; seen here: {self.state}, {counted(len(self.members), 'member')}" if differs else ""
        yield self.event(exchange, "described", error=description["errorCode"], reason=reason, generation=None)
        if self._forming is not None or description["errorCode"] or state not in STATES.values():
            return
        self.state = state
        if self.generation == -1:
            self._adopt(description)
            return
        there = {each["memberId"] for each in members}
        for member_id in sorted(self.members.keys() - there):
            at, member = exchange.response_start, self.members[member_id]
            yield self._expiry(member, at, self.generation, "no member when the group was described")
            self.caused(at, "session_expired", member_id, "gone without a word: the coordinator expired its session")
            self._gone(member_id)

    def _adopt(self, description: Body) -> None:
        """Take over the described members of a group without any other message so far."""
        self.strategy = description["protocolData"] or None
        self.group_type = group_type(description["protocolType"], self.strategy)
        for each in description["members"][:MAX_MEMBERS]:
            member = Joined(each["memberId"], each.get("groupInstanceId"), each["clientId"], each["clientHost"])
            subscribe(member, self.group_type, each["memberMetadata"])
            self._held_bytes += len(each["memberMetadata"]) + len(each["memberAssignment"])
            has = given(self.group_type, each["memberAssignment"])
            member.owned = None if has is None else has.after(member.said_owned)
            self.members[member.id] = member

    def deleted(self) -> None:
        self.members.clear()
        self._move("emptied")
        self._move("deleted")

    def stored(self, generation: int, strategy: str | None, members: dict[str, Joined], at: int) -> Iterator[GroupRow]:
        """Take over, from the coordinator's log, the parts of a generation that were not seen on the wire."""
        if generation < self.generation:
            return
        if generation > self.generation:
            yield from self.finish()
            yield from self._stored_generation(generation, strategy or None, members, at)
        elif self.state not in ("Empty", "Dead"):
            for member in members.values():
                known = self.members.get(member.id)
                if known is None and len(self.members) < MAX_MEMBERS:
                    self.members[member.id] = member
                elif known is not None and known.owned is None:
                    known.owned, known.client_id = member.owned, known.client_id or member.client_id
                else:
                    continue
                yield from self._stored_assignment(member, at)

    def _stored_generation(
        self, generation: int, strategy: str | None, members: dict[str, Joined], at: int
    ) -> Iterator[GroupRow]:
        before = self._left | self.members
        was = self.generation
        self._before, self._left, self.members = before, {}, members
        self.generation, self.strategy = generation, strategy
        self.state = "Stable" if members else "Empty"
        cause = self._stored_cause(before, members, at)
        self._causes.clear()
        self._called.clear()
        self._held_bytes = sum(each.size_bytes for held in (members, before) for each in held.values())
        if members and (was != -1 or generation == 1):
            again = len(before.keys() & members.keys())
            counts = len(before), len(members), again
            causes = cause.cause, cause.member_id, cause.reason
            times = min(at, cause.at), at, at
            whose = self.cluster, self.group_id, self.protocol, strategy, generation
            yield Rebalance(*whose, *causes, *times, *counts, None, self.coordinator_id, None, self.group_type)
        for member in before.values():
            if not members and member.heard_ns and not member.is_gone:
                yield self._expiry(member, at, generation, "the coordinator wrote that the group has no members")
        for member in members.values():
            yield from self._stored_assignment(member, at)

    def _stored_cause(self, before: Mapping[str, Joined], after: Mapping[str, Joined], at: int) -> Cause:
        """Return the cause of a generation that only the coordinator's log shows."""
        if self._causes:
            return min(self._causes, key=lambda each: each.at)
        new, gone = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
        if new:
            return Cause(at, "member_joined", new[0], "a new member, by the coordinator's log")
        if gone:
            return Cause(at, "member_left", gone[0], "by the coordinator's log, which does not say whether it expired")
        other = [each.id for each in after.values() if set(each.topics or ()) != set(before[each.id].topics or ())]
        if other:
            return Cause(at, "subscription_changed", min(other), "other topics than before, by the coordinator's log")
        return Cause(at, "unknown", None, "the coordinator's log does not say what set it off")

    def _stored_assignment(self, member: Joined, at: int) -> Iterator[Assignment]:
        for topic, index in sorted(member.owned or ()):
            whose = at, self.cluster, self.group_id, self.generation, member.id, member.client_id
            yield Assignment(*whose, topic, index, self.strategy, None, self.group_type)

    # --- the end of a generation -------------------------------------------------------------------------------------

    def _close(self, forming: Forming) -> Iterator[GroupRow]:
        before, after = self._before, self._left | self.members or forming.joined  # members that left belong to it
        complete = bool(forming.members and forming.synced_ns) and forming.synced >= self.members.keys()
        cause = self._cause(forming, before, after)
        if forming.members:
            yield from self._expired(forming, after)
            yield from self.expected.gone(forming.joined_ns)
        else:
            self.members = dict(forming.joined)  # those whose joins were seen
        waited = forming.last_request_ns - forming.last_but_one_ns if forming.last_but_one_ns else None
        # A generation without all its SyncGroups ends when the next one begins: keep the causes of the next one.
        self._causes = [each for each in self._causes if each.at > forming.answered_ns]
        if self._moved is not None and self._moved.at <= forming.answered_ns:
            self._moved = None
        self._held_bytes = sum(each.size_bytes for held in (self.members, before) for each in held.values())
        yield Rebalance(
            self.cluster,
            self.group_id,
            self.protocol,
            forming.strategy,
            forming.number,
            cause.cause,
            cause.member_id,
            cause.reason,
            min(forming.started_ns, cause.at),
            forming.joined_ns,
            forming.synced_ns if complete else None,
            len(before),
            forming.members or len(forming.joined),
            len(before.keys() & after.keys()),
            forming.last_to_join,
            self.coordinator_id,
            waited,
            self.group_type,
        )

    def _cause(self, forming: Forming, before: Mapping[str, Joined], after: Mapping[str, Joined]) -> Cause:
        """Return the cause of a generation."""
        causes = [each for each in self._causes if each.at <= forming.answered_ns]
        # A member of this generation that left while its JoinGroup was pending ends it, and did not cause it.
        causes = [each for each in causes if each.cause != "member_left" or each.member_id not in self._left]
        if causes:
            return min(causes, key=lambda each: each.at)
        at = forming.started_ns
        gone = sorted(before.keys() - after.keys()) if forming.members else []
        new = sorted(after.keys() - before.keys()) if forming.members else []
        again = [each for each in after.values() if each.id in before and each.asked_ns]
        first = min(again, key=lambda each: each.asked_ns) if again else None
        is_called = first is None or first.id in forming.called
        # Members inside TLS, or on another host, are known from the leader's list alone.
        if new and before and is_called and not any(before[each].was_seen for each in gone):
            return Cause(at, "member_joined", new[0], "a new member, by the leader's list")
        if gone and is_called:
            if not any(before[each].was_seen for each in gone):
                return Cause(at, "unknown", gone[0], "gone; nothing that it sent was seen")
            if left := [each for each in gone if before[each].is_gone]:
                return Cause(at, "member_left", left[0], "it said that it leaves")
            return Cause(at, "session_expired", gone[0], "gone without a word: the coordinator expired its session")
        if self._moved is not None and self._moved.at <= forming.answered_ns:
            return self._moved._replace(at=at)
        if first is not None:
            if first.id == forming.leader:
                words = "as after a change of topics, or a step of a cooperative one"
                return Cause(at, "leader_rejoined", first.id, words)
            return Cause(at, "subscription_changed", first.id, "the same topics, and other partitions of its own")
        return Cause(at, "unknown", None, "what set it off was not seen")

    def _move(self, seen: str) -> None:
        self.state = STATES.get((self.state, seen), self.state)


_READERS: dict[int, Callable[[ClassicGroup, DecodedExchange, Body, Known], Iterator[Any]]] = {
    JOIN_GROUP: ClassicGroup._join,
    HEARTBEAT: ClassicGroup._heartbeat,
    LEAVE_GROUP: ClassicGroup._leave,
    SYNC_GROUP: ClassicGroup._sync,
}
APIS = frozenset(_READERS)
