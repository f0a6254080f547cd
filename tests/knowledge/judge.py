"""What insight says of a run beside what its brokers and tools said. Each difference has a kind, and the kinds that are
as they should be stand in EXPLAINED or SOMETIMES with the reason. Any other is a fault: of insight, or of this file.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from kproxy.insight.knowledge import Knowledge
from kproxy.insight.membership.classic import ClassicGroup
from kproxy.insight.membership.embedded import CONNECT
from kproxy.insight.membership.epochs import EpochGroup
from kproxy.insight.rows import Assignment, GroupEvent, Leadership, Rebalance, Row
from tests.knowledge.exchanges import Told
from tests.knowledge.truth import METADATA_LOG, Described, Generation, Run

# Between the wire and a log, or a table and a look at it, on a machine that is busy with five JVMs.
NEAR_NS = 3 * 10**9

# Between two requests of which a broker may take either first.
AT_ONCE_NS = 5 * 10**6

# What the wire cannot say, or says otherwise than a log.
EXPLAINED = {
    "an expiry is seen when the others rejoin": (
        "A coordinator expires a session without a word. The next thing on the wire is the JoinGroup of a member that "
        "a heartbeat told of the rebalance: up to a heartbeat interval later."
    ),
    "a leader with other topics": (
        "The coordinator logs `Leader ... re-joining`. What the leader subscribes to is other than before, so the row "
        "says subscription_changed."
    ),
    "an epoch nobody was told": (
        "An epoch that ended before a member's next heartbeat, as when several changes come at once or the last "
        "members leave, is on no wire."
    ),
    "a rebalance that ended otherwise than by all members": (
        "The coordinator logs when the leader's assignment came. A member that left, died or was gone never asked for "
        "its own, so the row has no end."
    ),
    "a controller that did not become active": (
        "Raft elected it, and the others were told; its epoch ended before it had anything to log as a controller."
    ),
}

# The same, of what depends on the moment: not every run has them.
SOMETIMES = {
    "not asked since": (
        "Brokers changed a partition, and no client asked for Metadata of its topic before the tools looked; in KRaft "
        "the controller tells brokers by records of the metadata log, which are not read."
    ),
    "an epoch of a leader that no client was told": (
        "A partition was elected and elected again before any client asked for Metadata."
    ),
    "what a newer member owns follows its next heartbeat": (
        "The tools show what the coordinator has decided; a member of the newer protocols is told with its next "
        "heartbeat, and until then the wire shows what it had."
    ),
    "a rebalance that nobody was told of yet": (
        "A coordinator answers JoinGroup when all have joined. Until a heartbeat says REBALANCE_IN_PROGRESS, up to a "
        "heartbeat interval later, the wire shows questions only."
    ),
    "another one of two that joined at once": (
        "Two members sent JoinGroup within AT_ONCE_NS, each on its connection. The wire has the order in which they "
        "came; the broker's threads handed them to the coordinator in the other."
    ),
}

# How a coordinator's reasons begin, and what they are called.
REASONS = (
    (r"Adding new member (\S+) ", "member_joined"),
    (r"explicit `LeaveGroup` request for \((\S+)\)", "member_left"),
    (r"removing member (\S+) on heartbeat expiration", "session_expired"),
    (r"Leader (\S+) re-joining group", "leader_rejoined"),
    (r"Updating metadata for (?:static )?member (\S+) ", "subscription_changed"),
    (r"Group's selected protocol will change because static member (\S+) ", "member_replaced"),
    (r"Removing (\S+) ", "member_left"),
)

# The groups in which a leader's assignor is made to be wrong: see java/Members.java.
WRONG = {"moved-g", "twice-g"}


class Difference(NamedTuple):
    """kind: one of EXPLAINED, or a fault in words. where: the group and generation, or what else."""

    kind: str
    where: Any
    logged: Any = None
    known: Any = None


def differences(run: Run) -> list[Difference]:
    """All of them."""
    told = Told(run)
    found: list[Difference] = []
    for described in run.described:
        before = _view(told.until(described.from_ns), told.rows)
        after = _view(told.until(described.to_ns), told.rows)
        found += _described(run, described, before, after)
        found += _live(run, described)
    rows = told.finish()
    found += _generations(run, rows)
    found += _epochs(run, rows)
    found += _membership(run, rows)
    found += _assignments(run, rows)
    found += _leaders(run, rows)
    return found


def faults(run: Run) -> list[Difference]:
    """The differences that are not explained."""
    return [each for each in differences(run) if each.kind not in EXPLAINED | SOMETIMES]


# --- rebalances ------------------------------------------------------------------------------------------------------


def _generations(run: Run, rows: list[Row]) -> Iterator[Difference]:
    found: dict[tuple[str, int], Rebalance] = {}
    for row in rows:
        if isinstance(row, Rebalance) and row.protocol == "classic":
            key = row.group_id, row.generation
            if key in found:
                yield Difference("two rows of one generation", key, found[key], row)
            found[key] = row
    for key in run.generations.keys() - found.keys():
        yield Difference("a generation without a row", key, run.generations[key])
    for key in found.keys() - run.generations.keys():
        yield Difference("a row without a generation", key, None, found[key])
    joins = [row for row in rows if isinstance(row, GroupEvent) and row.event == "join"]
    for key in run.generations.keys() & found.keys():
        of_group = [row for row in joins if row.group_id == key[0]]
        yield from _generation(key, run.generations[key], found[key], of_group)


def _at_once(joins: list[GroupEvent], row: Rebalance, member: str | None) -> bool:
    """Whether a member joined in the same moment as the one that is said to have set a rebalance off."""
    members = {each.member_id for each in joins if abs(each.time_ns - row.started_ns) <= AT_ONCE_NS}
    return members >= {member, row.cause_member}


def _generation(
    key: tuple[str, int], logged: Generation, row: Rebalance, joins: list[GroupEvent]
) -> Iterator[Difference]:
    reason, member = next(
        ((cause, match[1]) for pattern, cause in REASONS if (match := re.match(pattern, logged.reason))),
        ("unknown", None),
    )
    if (row.cause, row.cause_member) != (reason, member):
        if (reason, row.cause, row.cause_member) == ("leader_rejoined", "subscription_changed", member):
            yield Difference("a leader with other topics", key)
        elif member != row.cause_member and _at_once(joins, row, member):
            yield Difference("another one of two that joined at once", key)
        else:
            yield Difference("another cause", key, logged.reason, (row.cause, row.cause_member, row.reason))
    if row.members_after != logged.members:
        yield Difference("another number of members", key, logged.members, row.members_after)
    if row.coordinator_id != logged.coordinator:
        yield Difference("another coordinator", key, logged.coordinator, row.coordinator_id)
    for name, ours, theirs in (
        ("began", row.started_ns, logged.prepared_ns),
        ("joined", row.joined_ns, logged.stabilised_ns),
        ("ended", row.ended_ns, logged.assigned_ns),
    ):
        if ours is None and theirs is not None:
            yield Difference("a rebalance that ended otherwise than by all members", key)
        elif ours is not None and theirs is not None and abs(ours - theirs) > NEAR_NS:
            yield Difference(f"{name} at another time", key, theirs, ours)
    if reason == "session_expired" and logged.prepared_ns is not None and row.started_ns > logged.prepared_ns:
        yield Difference("an expiry is seen when the others rejoin", key)


def _epochs(run: Run, rows: list[Row]) -> Iterator[Difference]:
    found = {
        (row.group_id, row.generation): row for row in rows if isinstance(row, Rebalance) and row.protocol != "classic"
    }
    for key in run.epochs.keys() - found.keys():
        yield Difference("an epoch nobody was told", key)
    for key in found.keys() - run.epochs.keys():
        yield Difference("a row without an epoch", key, None, found[key])
    for key in run.epochs.keys() & found.keys():
        if abs(found[key].joined_ns - run.epochs[key]) > NEAR_NS:
            yield Difference("told at another time", key, run.epochs[key], found[key].joined_ns)
        logged = run.epoch_causes.get(key)
        row = found[key]
        if logged is not None and (row.cause, row.cause_member) not in logged:
            yield Difference("another cause", key, logged, (row.cause, row.cause_member, row.reason))


def _membership(run: Run, rows: list[Row]) -> Iterator[Difference]:
    """Who joined and who left, in every protocol."""
    events = [row for row in rows if isinstance(row, GroupEvent)]
    left = {(row.group_id, row.member_id) for row in events if row.event == "leave"}
    logged = {
        (match[1], match[2]) for _, match in run.matched(r"\[Group(?:Id)? (\S+)\] .*?Member (\S+) has left group")
    }
    logged |= {(match[1], match[2]) for _, match in run.matched(r"\[GroupId (\S+)\] Member (\S+) left the")}
    logged |= {
        (match[1], match[2]) for _, match in run.matched(r"\[GroupId (\S+)\] Static member (\S+) .*temporarily left")
    }
    logged |= {
        (match[1], match[2]) for _, match in run.matched(r"\[GroupId (\S+?)\]\[MemberId (\S+)\] Member \S+ left the")
    }
    for each in logged ^ left:
        yield Difference("a leave of one side only", each, each in logged, each in left)
    joined = {(row.group_id, row.member_id) for row in events if row.event == "join" and row.protocol != "classic"}
    logged = {(match[1], match[2]) for _, match in run.matched(r"\[GroupId (\S+)\] Member (\S+) joins the")}
    logged |= {
        (match[1], match[2]) for _, match in run.matched(r"\[GroupId (\S+)\] Static member (\S+) with .* joins the")
    }
    logged |= {
        (match[1], match[2]) for _, match in run.matched(r"\[GroupId (\S+?)\]\[MemberId (\S+)\] Member joins the")
    }
    for each in logged ^ joined:
        yield Difference("a join of one side only", each, each in logged, each in joined)
    fenced = {row.group_id for row in events if row.error == "FENCED_INSTANCE_ID"}
    wanted = {"static-g"} if any(line["member"] == "static-2b" for line in run.events if "member" in line) else set()
    if fenced != wanted:
        yield Difference("fenced members of other groups", wanted, fenced)


def _assignments(run: Run, rows: list[Row]) -> Iterator[Difference]:
    """Whether a leader was right; and what members own, as they said themselves."""
    wrong = set()
    for row in rows:
        if isinstance(row, Assignment):
            if row.strategy in ("range", "roundrobin") and row.agrees is None:
                yield Difference("an assignment that was not computed", (row.group_id, row.generation), None, row)
            if row.agrees is False:
                wrong.add(row.group_id)
                if row.group_id not in WRONG:
                    yield Difference("a right assignment found wrong", (row.group_id, row.generation), None, row)
    there = {line["group"] for line in run.events if line["what"] == "start"} & WRONG
    if there != wrong:
        yield Difference("wrong assignments of other groups", there, wrong)


# --- what the tools said ---------------------------------------------------------------------------------------------

View = dict[str, Any]


def _view(knowledge: Knowledge, rows: list[Row]) -> View:
    """What is known now, as the tools say it."""
    partitions: dict[tuple[str, int], tuple[int | None, frozenset[int], frozenset[int]]] = {}
    controller: tuple[int | None, int | None] = (None, None)
    for row in rows:
        if isinstance(row, Leadership):
            key = row.topic, row.partition
            if row.topic == METADATA_LOG:
                controller = row.leader, row.leader_epoch
            if row.change == "deleted":
                partitions.pop(key, None)
                continue
            kept = partitions.get(key, (None, frozenset(), frozenset()))[2]
            replicas = kept if row.replicas is None else frozenset(row.replicas)
            partitions[key] = row.leader, frozenset(row.isr or ()), replicas
    states: dict[str, Any] = {}
    owned: dict[str, Any] = {}
    epochs: dict[str, Any] = {}
    workers: list[dict[str, Any]] = []
    for group in knowledge.groups:
        states[group.group_id] = group.state, len(group.members), group.coordinator_id
        if isinstance(group, ClassicGroup):
            owned[group.group_id] = {member.id: member.owned or frozenset() for member in group.members.values()}
            if group.group_type == CONNECT and group.members:
                workers.append({_address(each.words): each.owned or frozenset() for each in group.members.values()})
        elif isinstance(group, EpochGroup):
            owned[group.group_id] = {member.id: member.owned for member in group.members.values()}
            epochs[group.group_id] = {member.id: member.epoch for member in group.members.values()}
    return {
        "states": states,
        "owned": owned,
        "epochs": epochs,
        "partitions": partitions,
        "controller": controller,
        "workers": workers,
    }


def _address(words: str | None) -> str:
    """HOST:PORT of "worker http://HOST:PORT/, ..."."""
    found = re.match(r"worker http://([^/]+)/", words or "")
    return found[1] if found else ""


def _described(run: Run, told: Described, before: View, after: View) -> Iterator[Difference]:
    for group, (state, members, coordinator, _) in told.states.items():
        views = [view["states"].get(group) for view in (before, after)]
        if (state, members, coordinator) not in views:
            begun = state == "PreparingRebalance" and _was_prepared(run, group, told)
            kind = "a rebalance that nobody was told of yet" if begun else "another state"
            yield Difference(kind, group, (state, members, coordinator), views)
    for group, owned in told.owned.items():
        views = [view["owned"].get(group) for view in (before, after)]
        if owned not in views:
            newer = group in told.epochs and told.epochs[group].keys() == (views[1] or {}).keys()
            if newer:
                yield Difference("what a newer member owns follows its next heartbeat", group)
            else:
                yield Difference("other owners", group, owned, views)
    if told.workers is not None and not any(told.workers in view["workers"] for view in (before, after)):
        yield Difference("other tasks of Connect", told.from_ns, told.workers, after["workers"])
    controllers = [view["controller"] for view in (before, after)]
    if told.controller not in controllers:
        yield Difference("another controller", told.from_ns, told.controller, controllers)
    for key, (leader, isr, replicas) in told.partitions.items():
        if key[0].startswith("__"):
            continue
        views = [view["partitions"].get(key) for view in (before, after)]
        if (leader, isr, frozenset(replicas)) not in views:
            yield Difference("not asked since", key, (leader, sorted(isr), replicas), views)


def _was_prepared(run: Run, group: str, told: Described) -> bool:
    """Whether the coordinator logged that it prepared a rebalance when the tools looked."""
    return any(
        name == group
        and one.prepared_ns is not None
        and one.prepared_ns <= told.to_ns
        and one.stabilised_ns >= told.from_ns
        for (name, _), one in run.generations.items()
    )


def _live(run: Run, told: Described) -> Iterator[Difference]:
    """What `/api/groups` said of the same groups."""
    for group, (state, members, coordinator, strategy) in told.states.items() if told.live else ():
        said = told.live.get(group)
        if said is None:
            yield Difference("a group that is not live", group, told.states[group])
            continue
        ours: tuple[Any, ...] = said["state"], said["member_count"], said["coordinator"]
        if ours != (state, members, coordinator):
            yield Difference("another state, live", group, (state, members, coordinator), ours)
        if group in told.owned and {each["member_id"] for each in said["members"]} != told.owned[group].keys():
            yield Difference("other members, live", group, sorted(told.owned[group]), said["members"])
        if said["protocol"] == "classic" and state == "Stable" and said["strategy"] != strategy:
            yield Difference("another strategy, live", group, strategy, said["strategy"])
        before = told.from_ns
        logged = [
            number for (name, number), one in run.generations.items() if name == group and one.stabilised_ns < before
        ]
        logged += [number for (name, number), at in run.epochs.items() if name == group and at < before]
        if logged and state == "Stable" and said["generation"] != max(logged):
            yield Difference("another generation, live", group, max(logged), said["generation"])
    quiet = [line["time_ns"] for line in run.events if line["what"] == "quiet"]
    if (
        told.live and quiet and quiet[0] < told.from_ns
    ):  # nothing is produced any more, and all that will be is committed
        lags: Counter[tuple[str, str]] = Counter()
        for (group, topic, _), (committed, end) in told.offsets.items():
            lags[group, topic] += end - committed if committed is not None else 0
        for key in lags.keys() | told.lags.keys():
            if lags[key] != told.lags.get(key, 0):
                yield Difference("another lag, live", key, lags[key], told.lags.get(key))
    for group in told.live.keys() - told.states.keys():
        if told.live[group]["protocol"] in ("classic", "consumer"):
            yield Difference("a group that is only live", group, None, told.live[group])


# --- leaders ---------------------------------------------------------------------------------------------------------


def _leaders(run: Run, rows: list[Row]) -> Iterator[Difference]:
    told = {
        (row.topic, row.partition, row.leader_epoch): row.leader
        for row in rows
        if isinstance(row, Leadership) and row.leader is not None
    }
    for key, leader in told.items():
        if key in run.leaders and run.leaders[key] != leader:
            yield Difference("another leader", key, run.leaders[key], leader)
        elif key not in run.leaders and key[0] == METADATA_LOG:
            yield Difference("a controller that did not become active", key, None, leader)
        elif key not in run.leaders:
            yield Difference("a leader that no broker logged", key, None, leader)
    for key in run.leaders.keys() - told.keys():
        if not key[0].startswith("__"):
            yield Difference("an epoch of a leader that no client was told", key, run.leaders[key])
    deleted = {row.topic for row in rows if isinstance(row, Leadership) and row.change == "deleted"}
    logged = {match[1] for _, match in run.matched(r"Replayed RemoveTopicRecord for topic (\S+) with")}
    if deleted != logged:
        yield Difference("other topics deleted", logged, deleted)
