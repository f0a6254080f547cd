"""Groups whose coordinator assigns: KIP-848's consumers, share groups (KIP-932), streams groups (KIP-1071).

Every member heartbeats with its epoch and receives the next epoch together with its new assignment. An epoch above all
previous ones is a rebalance of the group. Its cause is one of the heartbeats since the previous epoch: a member joined
(epoch 0), left (-1, -2), or changed its subscription. Without one, a silent member's session expired, or the topics
changed. An epoch that no member received is not on the wire. When several epochs pass at once, each takes one cause,
and expired sessions of silent members account for the epochs without one. Members of a streams group own tasks: a
task's subtopology stands where other groups have the topic.

A member that joins receives the epoch that its join caused, even if other members receive it earlier or later. If that
epoch is lower than the known one although the join is later, the group was deleted and re-created. Responses on
different connections may be out of order, so a rebalance becomes a row LATE_NS after the first member received its
epoch: responses that arrive until then count as if they had arrived in order.

`STATES` derives the coordinator's group state from the members' epochs. Bounds: those of `group` and `embedded`.
Refuses to know where exchanges come from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kproxy.insight.decoded import Body, DecodedExchange
from kproxy.insight.membership.embedded import MAX_OWNED, MAX_TOPICS, NOTHING, Owned, listed
from kproxy.insight.membership.group import HEAVY_BYTES, MAX_MEMBERS, Cause, Group, GroupRow
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.wording import counted

PROTOCOLS = {68: "consumer", 76: "share", 88: "streams"}  # ConsumerGroupHeartbeat, ShareGroupHeartbeat, Streams...
SILENT_INTERVALS = 3  # of heartbeats: a coordinator expires a session after nine by default
GONE_INTERVALS = 24  # twice the default maximum session: expired, even if the epoch has another cause
LATE_NS = 10**9  # longest delay of an overtaken response, or difference between clocks of captures
MAX_HELD = 16  # rebalances that are not rows yet, and epochs that no member has received yet
UNEXPLAINED = "metadata_changed"  # the cause of an epoch that no member's request explains
LEAVING, LEAVING_STATIC = -1, -2  # for good; and as a static member that comes back
GONE = (25, 110)  # UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH: the receiver is no longer a member
MS = 1_000_000
PARTITION_BYTES = 8  # size of an owned partition; its topic's name is shared

# (whether it has members, whether all of them are at the group's epoch) -> state
STATES = {
    (False, False): "Empty",
    (False, True): "Empty",
    (True, False): "Reconciling",
    (True, True): "Stable",
}


@dataclass(slots=True)
class _Member:
    id: str
    client_id: str | None
    client_address: str | None
    instance_id: str | None
    epoch: int
    heard_ns: int
    interval_ns: int = 0
    topics: tuple[str, ...] | None = None
    regex: str | None = None  # subscription by pattern, instead of topic names or in addition to them
    owned: Owned = NOTHING


class EpochGroup(Group):
    """One group. `feed` yields the rows of a heartbeat; `finish` yields the rebalances that are not complete."""

    def __init__(self, cluster: str, group_id: str, protocol: str) -> None:
        super().__init__(cluster, group_id, protocol)
        self.group_type = protocol
        self.epoch = 0  # the highest that a member has received
        self.strategy: str | None = None  # the assignor that a member asked for, or that a describe named
        self.members: dict[str, _Member] = {}
        self._static: dict[str, _Member] = {}  # by instance id: members that left and may come back
        self._before = 0  # members when the last epoch began
        self._first_received_ns = 0  # when the first member received the last epoch
        self._forming: Rebalance | None = None
        self._receivers: set[str] = set()  # members that have received the forming epoch
        self._held: list[Rebalance] = []  # complete, but younger than LATE_NS: their cause or counts may change
        self._skipped: set[int] = set()  # epochs below the last one that no member has received yet

    @property
    def state(self) -> str:
        """Return the group state in the coordinator's words, derived from the members' epochs."""
        return STATES[bool(self.members), all(each.epoch == self.epoch for each in self.members.values())]

    @property
    def generation(self) -> int:
        """Return the epoch, under the name that the classic protocol has for it."""
        return self.epoch

    @property
    def weight(self) -> int:
        """Return the memory in use, in members (about): subscriptions and assignments count by their size."""
        members = len(self.members) + len(self._receivers) + len(self._causes) + len(self._static)
        return 1 + members + self._held_bytes // HEAVY_BYTES

    def feed(self, exchange: DecodedExchange, names: Mapping[UUID, str]) -> Iterator[GroupRow]:
        """Yield the rows of a heartbeat. names: topic names by id; a topic that is not in it appears as its id."""
        request, answer = exchange.request, exchange.response
        if answer is None:
            return
        if answer["errorCode"]:
            yield self._event(exchange, "heartbeat_failed", error=answer["errorCode"])
            if answer["errorCode"] in GONE:
                yield from self._fenced(exchange)
            return
        yield from self.due(exchange.response_start)
        yield from self.coordinated_by(exchange.broker_id, exchange)
        if request["memberEpoch"] in (LEAVING, LEAVING_STATIC):
            yield from self._leave(exchange)
            return
        if request["memberEpoch"] == 0 and 0 < answer["memberEpoch"] < self.epoch:
            yield from self._recreated(exchange)
        member, is_new = self._member_of(exchange)
        if request["memberEpoch"] == 0 and (is_new or not member.epoch):
            yield from self._joined(member, exchange)
        self._subscribed(member, exchange)
        member.epoch = answer["memberEpoch"]
        if member.epoch > self.epoch:
            self._close()
            yield from self._begin(member, exchange)
        owned = _owned(answer, names)
        if owned is not None:
            yield from self._assigned(member, exchange, owned)
        forming = self._forming
        if forming is not None and member.epoch >= forming.generation:
            if len(self._receivers) < MAX_MEMBERS:
                self._receivers.add(member.id)
            if forming.ended_ns is None and self._receivers >= self.members.keys():
                forming = self._forming = forming._replace(ended_ns=exchange.response_start)
            # Without a cause it waits for the next heartbeat: the member that caused it may be answered last.
            if forming.ended_ns is not None and (
                forming.cause != UNEXPLAINED or exchange.request_end > forming.ended_ns
            ):
                self._close()

    @property
    def until_ns(self) -> int | None:
        """Return the time at which `due` yields the first pending rebalance at the latest; None: none is pending."""
        return self._held[0].joined_ns + LATE_NS if self._held else None

    def due(self, now_ns: int) -> Iterator[Rebalance]:
        """Yield the rebalances that are final: older than LATE_NS, or more than MAX_HELD are pending."""
        while self._held and (self._held[0].joined_ns + LATE_NS < now_ns or len(self._held) > MAX_HELD):
            yield self._held.pop(0)

    def finish(self) -> Iterator[Rebalance]:
        """Yield all pending rebalances, at the end of the traffic."""
        self._close()
        yield from self._held
        self._held.clear()

    def _close(self) -> None:
        """Move the forming rebalance to the held ones."""
        if self._forming is not None:
            self._held.append(self._forming)
            self._forming = None

    def _recent(self) -> list[Rebalance]:
        """Return the rebalances that are not rows yet, in the order of epochs."""
        return self._held if self._forming is None else [*self._held, self._forming]

    def _set_recent(self, recent: list[Rebalance]) -> None:
        """Replace the rebalances that are not rows yet: `recent` has the same epochs, and skipped ones among them."""
        self._forming = recent.pop() if self._forming is not None else None
        self._held = recent

    def note_alive(self, member_id: str, at: int) -> None:
        """Update the time of the last sign of life of a member."""
        member = self.members.get(member_id)
        if member is not None:
            member.heard_ns = max(member.heard_ns, at)

    # --- members -----------------------------------------------------------------------------------------------------

    def _member_of(self, exchange: DecodedExchange) -> tuple[_Member, bool]:
        """Return the member that heartbeats, and whether it is new here."""
        assert exchange.response is not None
        member_id = exchange.response.get("memberId") or exchange.request["memberId"]
        member = self.members.get(member_id)
        is_new = member is None
        if member is None:
            instance_id = exchange.request.get("instanceId")
            who = exchange.client_id, exchange.client_address
            member = _Member(member_id, *who, instance_id, 0, exchange.request_end)
            if len(self.members) < MAX_MEMBERS:
                self.members[member_id] = member
        member.heard_ns = max(member.heard_ns, exchange.request_end)
        member.interval_ns = exchange.response["heartbeatIntervalMs"] * MS
        return member, is_new

    def _joined(self, member: _Member, exchange: DecodedExchange) -> Iterator[GroupEvent]:
        """Yield the events of a join: the member is new, or was fenced and joins again."""
        former = self._static.pop(member.instance_id, None) if member.instance_id is not None else None
        at = exchange.request_end
        yield self._event(exchange, "join", at=at)
        yield self._event(exchange, "join_answered")
        if former is not None and former.id != member.id:
            member.owned = former.owned
            reason = f"instance {member.instance_id} was {former.id}"
            self._note_cause(exchange, "member_replaced", member.id, reason)
            yield self._event(exchange, "member_replaced", reason=reason)
        else:
            self._note_cause(exchange, "member_joined", member.id, "a new member")

    def _subscribed(self, member: _Member, exchange: DecodedExchange) -> None:
        """Learn the subscription. Null fields mean no change; a streams member's topics are in its topology."""
        request = exchange.request
        topics, regex = request.get("subscribedTopicNames"), request.get("subscribedTopicRegex")
        if request.get("topology") is not None:
            topics = [topic for each in request["topology"]["subtopologies"] for topic in each["sourceTopics"]]
        if request.get("serverAssignor"):
            self.strategy = request["serverAssignor"]
        if topics is None and regex is None:
            return
        topics = member.topics if topics is None else tuple(sorted(set(topics))[:MAX_TOPICS])
        regex = member.regex if regex is None else regex or None
        if (member.topics, member.regex) != (None, None) and (topics, regex) != (member.topics, member.regex):
            self._note_cause(exchange, "subscription_changed", member.id, "other topics than before")
        self._held_bytes += sum(map(len, topics or ())) - sum(map(len, member.topics or ()))  # a member may repeat it
        member.topics, member.regex = topics, regex

    def _leave(self, exchange: DecodedExchange) -> Iterator[GroupRow]:
        request = exchange.request
        member = self.members.pop(request["memberId"], None)
        reason = "it said that it leaves"
        if request["memberEpoch"] == LEAVING_STATIC:
            reason = "a static member that may come back"
            instance_id = request.get("instanceId")
            if member is not None and instance_id is not None and len(self._static) < MAX_MEMBERS:
                member.heard_ns, member.topics, member.regex = exchange.request_end, None, None
                self._static[instance_id] = member
        else:
            self._note_cause(exchange, "member_left", request["memberId"], reason)
        if request.get("shutdownApplication"):
            reason = "it asks all members to shut down"
        yield self._event(exchange, "leave", at=exchange.request_end, reason=reason)
        if not self.members:
            yield from self.finish()
            self._before = len(self._static)  # no member receives the epoch of this leave

    def _fenced(self, exchange: DecodedExchange) -> Iterator[GroupEvent]:
        """Remove a member that received a fencing error. Its session expired before, at a time not on the wire."""
        member = self.members.pop(exchange.request["memberId"], None)
        if member is not None and member.heard_ns < exchange.request_end:
            yield self._gone(member, exchange.response_start)
            reason = "gone without a word: the coordinator expired its session"
            self.caused(member.heard_ns, "session_expired", member.id, reason)

    def _gone(self, member: _Member, at: int) -> GroupEvent:
        """Return the event of an expired session: between the member's last request and `at`."""
        silent = (at - member.heard_ns) / 1e9
        words = f"its last request was {silent:.1f} s before; it heartbeats every {member.interval_ns / 1e9:g} s"
        return self.expired(member, at, member.epoch, words)

    def _note_cause(self, exchange: DecodedExchange, cause: str, member_id: str, reason: str) -> None:
        """Keep a cause for the next epoch, or assign it to an epoch that others received before this response."""
        assert exchange.response is not None
        at, epoch = exchange.request_end, exchange.response["memberEpoch"]
        recent = self._recent()
        if cause == "member_joined" and epoch <= self.epoch and at < self._first_received_ns:
            self._joined_late(exchange, member_id, reason)
            return
        if epoch in (self.epoch, LEAVING, LEAVING_STATIC):
            for place, row in enumerate(recent):
                if row.cause == UNEXPLAINED and at < row.joined_ns:
                    left = cause == "member_left"
                    added = Cause(at, cause, member_id, reason)
                    changed = [_counted(each, -left, -left, -left) for each in recent[place + 1 :]]
                    self._set_recent([*recent[:place], _because(_counted(row, 0, -left, -left), added), *changed])
                    self._before = len(self.members)
                    return
        self.caused(at, cause, member_id, reason)

    def _joined_late(self, exchange: DecodedExchange, member_id: str, reason: str) -> None:
        """Correct pending rebalances: others received the epoch of this member's join, or a later one, before it."""
        assert exchange.response is not None
        epoch, recent = exchange.response["memberEpoch"], self._recent()
        added = Cause(exchange.request_end, "member_joined", member_id, reason)
        place = sum(row.generation < epoch for row in recent)
        former = recent[:place]
        later = [_counted(row, row.generation > epoch, 1, row.generation > epoch) for row in recent[place:]]
        self._before = len(self.members)
        if later and later[0].generation == epoch:
            row = later[0]
            if (row.cause, row.cause_member) != ("member_joined", member_id):
                later[0] = _because(row, added)
                self._move_cause(row, later)
        elif epoch in self._skipped and (later or recent):
            self._skipped.discard(epoch)
            before = recent[place].members_before if later else recent[-1].members_after
            like = (later or former)[0]
            fields = {"generation": epoch, "members_before": before, "members_after": before + 1, "rejoined": before}
            row = like._replace(joined_ns=exchange.response_start, ended_ns=None, strategy=self.strategy, **fields)
            later.insert(0, _because(row, added))
        self._set_recent([*former, *later])

    def _move_cause(self, row: Rebalance, later: list[Rebalance]) -> None:
        """Move the cause that a row had before to the next epoch without one, or keep it for the epoch to come."""
        if row.cause == UNEXPLAINED:
            return
        cause = Cause(row.started_ns, row.cause, row.cause_member, row.reason or "")
        for place, each in enumerate(later):
            if each.cause == UNEXPLAINED:
                later[place] = _because(each, cause)
                return
        self._causes.insert(0, cause)

    # --- epochs ------------------------------------------------------------------------------------------------------

    def _recreated(self, exchange: DecodedExchange) -> Iterator[GroupRow]:
        """Forget the group: a later join received a lower epoch, so the group was deleted and re-created."""
        if (
            exchange.request_end <= self._first_received_ns + LATE_NS
            or exchange.request.get("instanceId") in self._static
        ):
            return
        yield from self.finish()
        for member in self.members.values():
            yield self._gone(member, exchange.request_end)
        self.members, self._static, self._receivers, self._causes, self._skipped = {}, {}, set(), [], set()
        self.epoch = self._before = self._held_bytes = 0

    def _begin(self, member: _Member, exchange: DecodedExchange) -> Iterator[GroupEvent]:
        """Begin a rebalance: this member is the first to receive its epoch."""
        topics = sum(sum(map(len, each.topics or ())) for each in self.members.values())
        self._held_bytes = topics + sum(PARTITION_BYTES * len(each.owned) for each in self.members.values())
        skipped = member.epoch - self.epoch - 1
        self._skipped = set(range(max(self.epoch + 1, member.epoch - MAX_HELD), member.epoch))
        self.epoch, self._first_received_ns = member.epoch, exchange.response_start
        # A member that joins caused the epoch that it receives; otherwise the earliest cause did.
        own = "member_joined", member.id
        self._causes.sort(key=lambda cause: (cause[1:3] == own, cause.at))
        joins = bool(self._causes) and self._causes[-1][1:3] == own
        left_over = min(skipped, max(0, len(self._causes) - 1))  # epochs that no member received had causes too
        causes = self._causes[left_over:]
        if joins:
            causes.insert(0, causes.pop())
        expired = self._silent(exchange.request_end, max(0, skipped + 1 - len(self._causes)))
        for each in expired:
            if self.members.pop(each.id, None) is None and each.instance_id is not None:
                self._static.pop(each.instance_id, None)
            yield self._gone(each, exchange.request_end)
        if not causes:
            causes = [self._unexplained(expired, exchange.request_end)]
        cause, self._causes = causes[0], causes[1:]
        after = len(self.members) + sum(each.cause == "member_left" for each in self._causes)  # still in this one
        before, self._before = self._before, after
        self._receivers = set()
        self._forming = Rebalance(
            self.cluster,
            self.group_id,
            self.protocol,
            self.strategy,
            member.epoch,
            cause.cause,
            cause.member_id,
            cause.reason,
            cause.at,
            exchange.response_start,
            None,
            before,
            after,
            after - (cause.cause == "member_joined"),
            _joiner(cause),
            self.coordinator_id,
            group_type=self.group_type,
        )

    def _silent(self, at: int, unexplained: int) -> list[_Member]:
        """Return the members whose sessions have expired by now: as many as there are epochs without a cause, the
        longest silent first, and all that were silent for more than GONE_INTERVALS heartbeats.
        """
        silent = [
            ((at - each.heard_ns) / each.interval_ns, each)
            for each in (*self.members.values(), *self._static.values())
            if each.interval_ns and at - each.heard_ns > SILENT_INTERVALS * each.interval_ns
        ]
        silent.sort(key=lambda pair: pair[0], reverse=True)
        return [
            each for place, (intervals, each) in enumerate(silent) if place < unexplained or intervals > GONE_INTERVALS
        ]

    def _unexplained(self, expired: list[_Member], at: int) -> Cause:
        """Return the cause of an epoch that no request explains."""
        if expired:
            words = "silent for long: the coordinator expired its session"
            return Cause(at, "session_expired", expired[0].id, words)
        if self._moved is not None:
            moved, self._moved = self._moved, None
            return moved._replace(at=at)
        words = "no member said anything new: a topic has other partitions than before"
        return Cause(at, UNEXPLAINED, None, words)

    def _assigned(self, member: _Member, exchange: DecodedExchange, owned: Owned) -> Iterator[GroupEvent | Assignment]:
        taken, given = member.owned - owned, owned - member.owned
        self._held_bytes += PARTITION_BYTES * (len(owned) - len(member.owned))
        member.owned = owned
        if taken:
            yield self._event(exchange, "revoked", reason=listed(taken))
        if given:
            yield self._event(exchange, "assigned", reason=listed(given))
        for topic, index in sorted(owned):
            yield Assignment(
                exchange.response_start,
                self.cluster,
                self.group_id,
                member.epoch,
                member.id,
                member.client_id,
                topic,
                index,
                self.strategy,
                None,
                self.group_type,
            )

    # --- records of the coordinator's log --------------------------------------------------------------------------

    def stored_epoch(self, epoch: int, at: int) -> None:
        """Take an epoch from the coordinator's log if no member has received it on the wire by now."""
        if epoch <= self.epoch:
            return
        self._close()
        is_first, self.epoch = self.epoch == 0, epoch
        causes, self._causes = sorted(self._causes, key=lambda cause: cause.at), []
        words = "by the coordinator's log, which does not say why"
        cause = causes[0] if causes else Cause(at, UNEXPLAINED, None, words)
        before, self._before, self._receivers = self._before, len(self.members), set()
        if not self.members or (is_first and epoch > 1):
            return  # it has no members, or the epochs before it are not known
        again = len(self.members) - (cause.cause == "member_joined")
        self._forming = Rebalance(
            self.cluster,
            self.group_id,
            self.protocol,
            self.strategy,
            epoch,
            cause.cause,
            cause.member_id,
            cause.reason,
            min(at, cause.at),
            at,
            None,
            before,
            len(self.members),
            max(0, again),
            _joiner(cause),
            self.coordinator_id,
            group_type=self.group_type,
        )

    def stored_member(
        self,
        member_id: str,
        client_id: str,
        client_address: str | None,
        instance_id: str | None,
        topics: list[str] | None,
        regex: str | None,
        at: int,
    ) -> None:
        """Take a member from the coordinator's log; it may be one that was not seen on the wire."""
        member = self.members.get(member_id)
        if member is None:
            if len(self.members) >= MAX_MEMBERS:
                return
            member = self.members[member_id] = _Member(member_id, client_id, client_address, instance_id, 0, at)
            self.caused(at, "member_joined", member_id, "a new member, by the coordinator's log")
        if member.topics is None:
            member.topics, member.regex = tuple(sorted(set(topics or ()))[:MAX_TOPICS]), regex or None
            self._held_bytes += sum(map(len, member.topics))

    def stored_gone(self, member_id: str, at: int) -> Iterator[GroupEvent]:
        """Remove a member that the log removed, unless it left on the wire or sent a later request."""
        member = self.members.get(member_id)
        if member is None or member.heard_ns > at:
            return
        del self.members[member_id]
        if member.interval_ns:  # its heartbeats were seen, its leave was not
            yield self._gone(member, at)
            self.caused(at, "session_expired", member_id, "gone without a word: the coordinator expired its session")
        else:
            self.caused(at, "member_left", member_id, "by the coordinator's log, which does not say whether it expired")

    def stored_owned(self, member_id: str, epoch: int, owned: Owned, at: int) -> Iterator[Assignment]:
        """Yield a member's assignment at an epoch, unless the member received it on the wire."""
        member = self.members.get(member_id)
        if member is None or member.epoch > epoch or (member.epoch == epoch and member.owned == owned):
            return
        self._held_bytes += PARTITION_BYTES * (len(owned) - len(member.owned))
        member.epoch, member.owned = epoch, owned
        for topic, index in sorted(owned):
            whose = at, self.cluster, self.group_id, epoch, member.id, member.client_id
            yield Assignment(*whose, topic, index, self.strategy, None, self.group_type)
        forming = self._forming
        if forming is not None and epoch >= forming.generation:
            self._receivers.add(member_id)
            if self._receivers >= self.members.keys():
                self._forming = forming._replace(ended_ns=at)
                self._close()

    # --- descriptions ------------------------------------------------------------------------------------------------

    def described(self, exchange: DecodedExchange, description: Body) -> Iterator[GroupEvent]:
        """Learn from a ConsumerGroupDescribe, ShareGroupDescribe or StreamsGroupDescribe response; yield its event."""
        yield from self.coordinated_by(exchange.broker_id, exchange)
        state, members = description["groupState"], description["members"]
        differs = self.members and (description["groupEpoch"], len(members)) != (self.epoch, len(self.members))
        reason = f"{state}, {counted(len(members), 'member')}, epoch {description['groupEpoch']}"
        here = counted(len(self.members), "member")
        reason += f"; seen here: {self.state}, {here}, epoch {self.epoch}" if differs else ""
        yield self.event(
            exchange, "described", error=description["errorCode"], reason=reason, generation=description["groupEpoch"]
        )
        if not description["errorCode"]:
            self.strategy = description.get("assignorName") or self.strategy

    def deleted(self) -> None:
        self.members.clear()

    def _event(
        self, exchange: DecodedExchange, event: str, *, error: int = 0, at: int | None = None, reason: str | None = None
    ) -> GroupEvent:
        """Return an event with the response's epoch, or the request's for an error or an event of the request."""
        answer: Any = exchange.response
        known = {"member_id": answer.get("memberId") or exchange.request["memberId"]}
        epoch = answer["memberEpoch"] if not error and at is None else exchange.request["memberEpoch"]
        return self.event(exchange, event, error=error, at=at, reason=reason, generation=epoch, **known)


def _joiner(cause: Cause) -> str | None:
    """Return the member whose join caused the epoch: the last one to join; None: it had another cause."""
    return cause.member_id if cause.cause in ("member_joined", "member_replaced") else None


def _because(row: Rebalance, cause: Cause) -> Rebalance:
    """Return the row with the cause that was learned later."""
    return row._replace(
        cause=cause.cause,
        cause_member=cause.member_id,
        reason=cause.reason,
        started_ns=cause.at,
        last_to_join=_joiner(cause),
    )


def _counted(row: Rebalance, before: int, after: int, rejoined: int) -> Rebalance:
    """Return the row with its counts of members changed by so many: before it, after it, and rejoined."""
    return row._replace(
        members_before=max(0, row.members_before + before),
        members_after=max(0, row.members_after + after),
        rejoined=max(0, row.rejoined + rejoined),
    )


def _owned(answer: Body, names: Mapping[UUID, str]) -> Owned | None:
    """Return the assignment in a response; None: no change. A streams member gets tasks; standby tasks own nothing."""
    assignment: Any = answer.get("assignment")
    if assignment is not None:
        assigned = [
            (names.get(part["topicId"], str(part["topicId"])), part["partitions"])
            for part in assignment.get("topicPartitions") or ()
        ]
    elif answer.get("activeTasks") is not None:
        assigned = [(part["subtopologyId"], part["partitions"]) for part in answer["activeTasks"]]
    else:
        return None
    if sum(len(indexes) for _, indexes in assigned) > MAX_OWNED:
        return None
    return frozenset((topic, index) for topic, indexes in assigned for index in indexes)
