"""Groups whose coordinator assigns: KIP-848's consumers, share groups (KIP-932), streams groups (KIP-1071).

Every member heartbeats with its epoch, and is told the next one together with what it owns then. An epoch above all
that were told before is a rebalance of the group; what set it off is found among what members said since the last: one
joined (epoch 0), one left (-1, -2), one changed its subscription. Otherwise a member was silent for long, and expired,
or the topics changed. An epoch that no member was told is not on the wire: of several at once each has a cause, and who
was silent for long is gone with those that nobody said the cause of. Members of a streams group own tasks, which
are called by their subtopology as partitions are by their topic.

A member that joins is told the group's epoch: the one that it set off, whatever the order in which members are told.
Where that is lower than before, and it asked later, the group was removed and made again. Answers of several
connections overtake each other: a rebalance becomes a row LATE_NS after the first member was told of it, so that what
comes late counts as if it had come in time.

`STATES` is what members' epochs show of the coordinator's own states. Bounds: those of `group` and `embedded`. Refuses
to know where exchanges come from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kproxy.insight.embedded import MAX_OWNED, MAX_TOPICS, NOTHING, Owned, listed
from kproxy.insight.group import HEAVY_BYTES, MAX_MEMBERS, Cause, Group, GroupRow
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.insight.spoken import Body, Spoken

PROTOCOLS = {68: "consumer", 76: "share", 88: "streams"}  # ConsumerGroupHeartbeat, ShareGroupHeartbeat, Streams...
SILENT_INTERVALS = 3  # of heartbeats: a coordinator expires a session after nine by default
GONE_INTERVALS = 24  # twice as many as a session lasts at most by default: whatever else may explain an epoch
LATE_NS = 10**9  # by which an answer may be overtaken, or clocks of captures differ
MAX_HELD = 16  # rebalances that are no rows yet, and epochs that nobody was told yet
UNSAID = "metadata_changed"  # the cause of an epoch when no member said anything
LEAVING, LEAVING_STATIC = -1, -2  # for good; and as a static member that comes back
GONE = (25, 110)  # UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH: whoever hears this is no member any more
MS = 1_000_000
PARTITION_BYTES = 8  # of a partition that is owned, as its topic's name is shared

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
    regex: str | None = None  # of topics that it subscribes to, instead of names or beside them
    owned: Owned = NOTHING


class EpochGroup(Group):
    """One group. `feed` returns the rows that a heartbeat gives; `finish` those of what is not complete."""

    def __init__(self, cluster: str, group_id: str, protocol: str) -> None:
        super().__init__(cluster, group_id, protocol)
        self.group_type = protocol
        self.epoch = 0  # the highest that a member was told
        self.strategy: str | None = None  # the assignor that a member asked for, or that a describe named
        self.members: dict[str, _Member] = {}
        self._static: dict[str, _Member] = {}  # by instance: those that left, to come back
        self._before = 0  # members when the last epoch began
        self._begun_ns = 0  # when its first member was told of the last epoch
        self._forming: Rebalance | None = None
        self._told: set[str] = set()  # members that know the epoch that forms
        self._held: list[Rebalance] = []  # formed, and not so long ago that nothing more may be said of them
        self._skipped: set[int] = set()  # epochs below the last one that nobody was told yet

    @property
    def state(self) -> str:
        """As the coordinator calls it, as far as members' epochs show."""
        return STATES[bool(self.members), all(each.epoch == self.epoch for each in self.members.values())]

    @property
    def generation(self) -> int:
        """The epoch, as groups of the classic protocol call it."""
        return self.epoch

    @property
    def weight(self) -> int:
        """About how many members it remembers, what they said included."""
        members = len(self.members) + len(self._told) + len(self._causes) + len(self._static)
        return 1 + members + self._held_bytes // HEAVY_BYTES

    def feed(self, spoken: Spoken, names: Mapping[UUID, str]) -> Iterator[GroupRow]:
        """The rows of a heartbeat. names: topics by their ids; one that is not there is called by its id."""
        request, answer = spoken.request, spoken.response
        if answer is None:
            return
        if answer["errorCode"]:
            yield self._event(spoken, "heartbeat_failed", error=answer["errorCode"])
            if answer["errorCode"] in GONE:
                yield from self._fenced(spoken)
            return
        yield from self.due(spoken.response_start)
        yield from self.coordinated_by(spoken.broker_id, spoken)
        if request["memberEpoch"] in (LEAVING, LEAVING_STATIC):
            yield from self._leave(spoken)
            return
        if request["memberEpoch"] == 0 and 0 < answer["memberEpoch"] < self.epoch:
            yield from self._begun_anew(spoken)
        member, is_new = self._met(spoken)
        if request["memberEpoch"] == 0 and (is_new or not member.epoch):
            yield from self._joined(member, spoken)
        self._subscribed(member, spoken)
        member.epoch = answer["memberEpoch"]
        if member.epoch > self.epoch:
            self._close()
            yield from self._begin(member, spoken)
        owned = _owned(answer, names)
        if owned is not None:
            yield from self._assigned(member, spoken, owned)
        forming = self._forming
        if forming is not None and member.epoch >= forming.generation:
            if len(self._told) < MAX_MEMBERS:
                self._told.add(member.id)
            if forming.ended_ns is None and self._told >= self.members.keys():
                forming = self._forming = forming._replace(ended_ns=spoken.response_start)
            # One that nobody said the cause of waits for the next heartbeat: who set it off may be told last.
            if forming.ended_ns is not None and (forming.cause != UNSAID or spoken.request_end > forming.ended_ns):
                self._close()

    @property
    def until_ns(self) -> int | None:
        """When the first of its rebalances is a row for certain; None: there is none."""
        return self._held[0].joined_ns + LATE_NS if self._held else None

    def due(self, now_ns: int) -> Iterator[Rebalance]:
        """Rebalances that nothing more can be said of."""
        while self._held and (self._held[0].joined_ns + LATE_NS < now_ns or len(self._held) > MAX_HELD):
            yield self._held.pop(0)

    def finish(self) -> Iterator[Rebalance]:
        """All rebalances when nothing more comes."""
        self._close()
        yield from self._held
        self._held.clear()

    def _close(self) -> None:
        """What was forming forms no more."""
        if self._forming is not None:
            self._held.append(self._forming)
            self._forming = None

    def _recent(self) -> list[Rebalance]:
        """What is no row yet, in the order of epochs."""
        return self._held if self._forming is None else [*self._held, self._forming]

    def _amend(self, recent: list[Rebalance]) -> None:
        """Other words of the same epochs, and of those between that nobody had been told."""
        self._forming = recent.pop() if self._forming is not None else None
        self._held = recent

    def heard(self, member_id: str, at: int) -> None:
        """A member gave a sign of life."""
        member = self.members.get(member_id)
        if member is not None:
            member.heard_ns = max(member.heard_ns, at)

    # --- members -----------------------------------------------------------------------------------------------------

    def _met(self, spoken: Spoken) -> tuple[_Member, bool]:
        """The member that heartbeats, and whether it is new here."""
        assert spoken.response is not None
        member_id = spoken.response.get("memberId") or spoken.request["memberId"]
        member = self.members.get(member_id)
        is_new = member is None
        if member is None:
            instance_id = spoken.request.get("instanceId")
            who = spoken.client_id, spoken.client_address
            member = _Member(member_id, *who, instance_id, 0, spoken.request_end)
            if len(self.members) < MAX_MEMBERS:
                self.members[member_id] = member
        member.heard_ns = max(member.heard_ns, spoken.request_end)
        member.interval_ns = spoken.response["heartbeatIntervalMs"] * MS
        return member, is_new

    def _joined(self, member: _Member, spoken: Spoken) -> Iterator[GroupEvent]:
        """It is new, or it was fenced and begins again."""
        former = self._static.pop(member.instance_id, None) if member.instance_id is not None else None
        at = spoken.request_end
        yield self._event(spoken, "join", at=at)
        yield self._event(spoken, "join_answered")
        if former is not None and former.id != member.id:
            member.owned = former.owned
            reason = f"instance {member.instance_id} was {former.id}"
            self._note(spoken, "member_replaced", member.id, reason)
            yield self._event(spoken, "member_replaced", reason=reason)
        else:
            self._note(spoken, "member_joined", member.id, "a new member")

    def _subscribed(self, member: _Member, spoken: Spoken) -> None:
        """Null says that nothing is new; of a streams member the topology has the topics."""
        request = spoken.request
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
            self._note(spoken, "subscription_changed", member.id, "other topics than before")
        self._held_bytes += sum(map(len, topics or ())) - sum(map(len, member.topics or ()))  # it may say it again
        member.topics, member.regex = topics, regex

    def _leave(self, spoken: Spoken) -> Iterator[GroupRow]:
        request = spoken.request
        member = self.members.pop(request["memberId"], None)
        reason = "it said that it leaves"
        if request["memberEpoch"] == LEAVING_STATIC:
            reason = "a static member that may come back"
            instance_id = request.get("instanceId")
            if member is not None and instance_id is not None and len(self._static) < MAX_MEMBERS:
                member.heard_ns, member.topics, member.regex = spoken.request_end, None, None
                self._static[instance_id] = member
        else:
            self._note(spoken, "member_left", request["memberId"], reason)
        if request.get("shutdownApplication"):
            reason = "it asks all members to shut down"
        yield self._event(spoken, "leave", at=spoken.request_end, reason=reason)
        if not self.members:
            yield from self.finish()
            self._before = len(self._static)  # the epoch of this leave was told to nobody

    def _fenced(self, spoken: Spoken) -> Iterator[GroupEvent]:
        """A member learns that it is none any more: it was expired before, at a time that nobody was told."""
        member = self.members.pop(spoken.request["memberId"], None)
        if member is not None and member.heard_ns < spoken.request_end:
            yield self._gone(member, spoken.response_start)
            reason = "gone without a word: the coordinator expired its session"
            self.caused(member.heard_ns, "session_expired", member.id, reason)

    def _gone(self, member: _Member, at: int) -> GroupEvent:
        """A member was expired: no sooner than its last word, no later than `at`."""
        silent = (at - member.heard_ns) / 1e9
        words = f"its last word seen was {silent:.1f} s before; it heartbeats every {member.interval_ns / 1e9:g} s"
        return self.expired(member, at, member.epoch, words)

    def _note(self, spoken: Spoken, cause: str, member_id: str, reason: str) -> None:
        """Keep a cause for the epoch to come, or give it to the one that others were told before this answer."""
        assert spoken.response is not None
        at, told = spoken.request_end, spoken.response["memberEpoch"]
        recent = self._recent()
        if cause == "member_joined" and told <= self.epoch and at < self._begun_ns:
            self._joined_late(spoken, member_id, reason)
            return
        if told in (self.epoch, LEAVING, LEAVING_STATIC):
            for place, row in enumerate(recent):
                if row.cause == UNSAID and at < row.joined_ns:
                    left = cause == "member_left"
                    said = Cause(at, cause, member_id, reason)
                    changed = [_counted(each, -left, -left, -left) for each in recent[place + 1 :]]
                    self._amend([*recent[:place], _because(_counted(row, 0, -left, -left), said), *changed])
                    self._before = len(self.members)
                    return
        self.caused(at, cause, member_id, reason)

    def _joined_late(self, spoken: Spoken, member_id: str, reason: str) -> None:
        """A member joined, and others were told its epoch, or later ones, before it was."""
        assert spoken.response is not None
        told, recent = spoken.response["memberEpoch"], self._recent()
        said = Cause(spoken.request_end, "member_joined", member_id, reason)
        place = sum(row.generation < told for row in recent)
        former = recent[:place]
        later = [_counted(row, row.generation > told, 1, row.generation > told) for row in recent[place:]]
        self._before = len(self.members)
        if later and later[0].generation == told:
            row = later[0]
            if (row.cause, row.cause_member) != ("member_joined", member_id):
                later[0] = _because(row, said)
                self._displaced(row, later)
        elif told in self._skipped and (later or recent):
            self._skipped.discard(told)
            before = recent[place].members_before if later else recent[-1].members_after
            like = (later or former)[0]
            fields = {"generation": told, "members_before": before, "members_after": before + 1, "rejoined": before}
            row = like._replace(joined_ns=spoken.response_start, ended_ns=None, strategy=self.strategy, **fields)
            later.insert(0, _because(row, said))
        self._amend([*former, *later])

    def _displaced(self, row: Rebalance, later: list[Rebalance]) -> None:
        """What was thought to have set an epoch off set off a later one."""
        if row.cause == UNSAID:
            return
        cause = Cause(row.started_ns, row.cause, row.cause_member, row.reason or "")
        for place, each in enumerate(later):
            if each.cause == UNSAID:
                later[place] = _because(each, cause)
                return
        self._causes.insert(0, cause)

    # --- epochs ------------------------------------------------------------------------------------------------------

    def _begun_anew(self, spoken: Spoken) -> Iterator[GroupRow]:
        """One joined later than the epoch that is known was told, and was told a lower one: it is another group."""
        if spoken.request_end <= self._begun_ns + LATE_NS or spoken.request.get("instanceId") in self._static:
            return
        yield from self.finish()
        for member in self.members.values():
            yield self._gone(member, spoken.request_end)
        self.members, self._static, self._told, self._causes, self._skipped = {}, {}, set(), [], set()
        self.epoch = self._before = self._held_bytes = 0

    def _begin(self, member: _Member, spoken: Spoken) -> Iterator[GroupEvent]:
        """A member was told an epoch that nobody was told before."""
        topics = sum(sum(map(len, each.topics or ())) for each in self.members.values())
        self._held_bytes = topics + sum(PARTITION_BYTES * len(each.owned) for each in self.members.values())
        skipped = member.epoch - self.epoch - 1
        self._skipped = set(range(max(self.epoch + 1, member.epoch - MAX_HELD), member.epoch))
        self.epoch, self._begun_ns = member.epoch, spoken.response_start
        # A member that joins set off the epoch that it is told; else the first of what was said did.
        own = "member_joined", member.id
        self._causes.sort(key=lambda cause: (cause[1:3] == own, cause.at))
        joins = bool(self._causes) and self._causes[-1][1:3] == own
        left_over = min(skipped, max(0, len(self._causes) - 1))  # epochs that no member was told had causes too
        causes = self._causes[left_over:]
        if joins:
            causes.insert(0, causes.pop())
        expired = self._silent(spoken.request_end, max(0, skipped + 1 - len(self._causes)))
        for each in expired:
            if self.members.pop(each.id, None) is None and each.instance_id is not None:
                self._static.pop(each.instance_id, None)
            yield self._gone(each, spoken.request_end)
        if not causes:
            causes = [self._unsaid(expired, spoken.request_end)]
        cause, self._causes = causes[0], causes[1:]
        after = len(self.members) + sum(each.cause == "member_left" for each in self._causes)  # who leaves is in it yet
        before, self._before = self._before, after
        self._told = set()
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
            spoken.response_start,
            None,
            before,
            after,
            after - (cause.cause == "member_joined"),
            _joiner(cause),
            self.coordinator_id,
            group_type=self.group_type,
        )

    def _silent(self, at: int, unexplained: int) -> list[_Member]:
        """Members that have not been heard of for long are gone by now: as many as explain epochs, and others."""
        silent = [
            ((at - each.heard_ns) / each.interval_ns, each)
            for each in (*self.members.values(), *self._static.values())
            if each.interval_ns and at - each.heard_ns > SILENT_INTERVALS * each.interval_ns
        ]
        silent.sort(key=lambda pair: pair[0], reverse=True)
        return [
            each for place, (intervals, each) in enumerate(silent) if place < unexplained or intervals > GONE_INTERVALS
        ]

    def _unsaid(self, expired: list[_Member], at: int) -> Cause:
        """Why there is a new epoch though no member said anything."""
        if expired:
            words = "silent for long: the coordinator expired its session"
            return Cause(at, "session_expired", expired[0].id, words)
        if self._moved is not None:
            moved, self._moved = self._moved, None
            return moved._replace(at=at)
        words = "no member said anything new: a topic has other partitions than before"
        return Cause(at, UNSAID, None, words)

    def _assigned(self, member: _Member, spoken: Spoken, owned: Owned) -> Iterator[GroupEvent | Assignment]:
        taken, given = member.owned - owned, owned - member.owned
        self._held_bytes += PARTITION_BYTES * (len(owned) - len(member.owned))
        member.owned = owned
        if taken:
            yield self._event(spoken, "revoked", reason=listed(taken))
        if given:
            yield self._event(spoken, "assigned", reason=listed(given))
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
                self.strategy,
                None,
                self.group_type,
            )

    # --- what the coordinator's log says ---------------------------------------------------------------------------

    def stored_epoch(self, epoch: int, at: int) -> None:
        """An epoch that no member was seen to be told by now."""
        if epoch <= self.epoch:
            return
        self._close()
        is_first, self.epoch = self.epoch == 0, epoch
        causes, self._causes = sorted(self._causes, key=lambda cause: cause.at), []
        words = "by the coordinator's log, which does not say why"
        cause = causes[0] if causes else Cause(at, UNSAID, None, words)
        before, self._before, self._told = self._before, len(self.members), set()
        if not self.members or (is_first and epoch > 1):
            return  # nobody is in it, or what was before it is not known
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
        """A member, which may be one that was not seen."""
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
        """A member that is none any more, if that was not seen, and it was not heard of since."""
        member = self.members.get(member_id)
        if member is None or member.heard_ns > at:
            return
        del self.members[member_id]
        if member.interval_ns:  # whose heartbeats were seen, and that it leaves was not
            yield self._gone(member, at)
            self.caused(at, "session_expired", member_id, "gone without a word: the coordinator expired its session")
        else:
            self.caused(at, "member_left", member_id, "by the coordinator's log, which does not say whether it expired")

    def stored_owned(self, member_id: str, epoch: int, owned: Owned, at: int) -> Iterator[Assignment]:
        """What a member owns from an epoch on, if it was not seen to be told."""
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
            self._told.add(member_id)
            if self._told >= self.members.keys():
                self._forming = forming._replace(ended_ns=at)
                self._close()

    # --- what is told of it ------------------------------------------------------------------------------------------

    def described(self, spoken: Spoken, told: Body) -> Iterator[GroupEvent]:
        """What a coordinator says of the group in ConsumerGroupDescribe, ShareGroupDescribe, StreamsGroupDescribe."""
        yield from self.coordinated_by(spoken.broker_id, spoken)
        state, members = told["groupState"], told["members"]
        differs = self.members and (told["groupEpoch"], len(members)) != (self.epoch, len(self.members))
        reason = f"{state}, {len(members)} members, epoch {told['groupEpoch']}"
        reason += f"; seen here: {self.state}, {len(self.members)} members, epoch {self.epoch}" if differs else ""
        yield self.event(spoken, "described", error=told["errorCode"], reason=reason, generation=told["groupEpoch"])
        if not told["errorCode"]:
            self.strategy = told.get("assignorName") or self.strategy

    def deleted(self) -> None:
        self.members.clear()

    def _event(
        self, spoken: Spoken, event: str, *, error: int = 0, at: int | None = None, reason: str | None = None
    ) -> GroupEvent:
        """An event with the epoch that a member is told, or has if it says something itself."""
        answer: Any = spoken.response
        known = {"member_id": answer.get("memberId") or spoken.request["memberId"]}
        epoch = answer["memberEpoch"] if not error and at is None else spoken.request["memberEpoch"]
        return self.event(spoken, event, error=error, at=at, reason=reason, generation=epoch, **known)


def _joiner(cause: Cause) -> str | None:
    """The last member to join of an epoch: whose join set it off, if one did."""
    return cause.member_id if cause.cause in ("member_joined", "member_replaced") else None


def _because(row: Rebalance, cause: Cause) -> Rebalance:
    """The same epoch, and what set it off as it is known later."""
    return row._replace(
        cause=cause.cause,
        cause_member=cause.member_id,
        reason=cause.reason,
        started_ns=cause.at,
        last_to_join=_joiner(cause),
    )


def _counted(row: Rebalance, before: int, after: int, rejoined: int) -> Rebalance:
    """The same epoch with so many members more, or less, before it, after it, and of those that were told."""
    return row._replace(
        members_before=max(0, row.members_before + before),
        members_after=max(0, row.members_after + after),
        rejoined=max(0, row.rejoined + rejoined),
    )


def _owned(answer: Body, names: Mapping[UUID, str]) -> Owned | None:
    """What an answer assigns; None: nothing new. A streams member gets tasks; its standby tasks own nothing."""
    assignment: Any = answer.get("assignment")
    if assignment is not None:
        told = [
            (names.get(part["topicId"], str(part["topicId"])), part["partitions"])
            for part in assignment.get("topicPartitions") or ()
        ]
    elif answer.get("activeTasks") is not None:
        told = [(part["subtopologyId"], part["partitions"]) for part in answer["activeTasks"]]
    else:
        return None
    if sum(len(indexes) for _, indexes in told) > MAX_OWNED:
        return None
    return frozenset((topic, index) for topic, indexes in told for index in indexes)
