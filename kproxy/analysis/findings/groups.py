"""Findings about consumer groups: rebalances that do not end, and members, present or gone, that all others wait for.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import CRITICAL, NOTE, WARNING, Finding, Probe, Tables, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import ACCURACY, QUIET_S, STEP, STEP_TIMES, stretches

_CHANGES = {  # advice by the cause of most rebalances
    "session_expired": "Members are taken for dead: raise session.timeout.ms (45 s since Kafka 3.0), and look for "
    "pauses (garbage collection, CPU limits) longer than that.",
    "member_left": "Members leave and come: those whose poll() comes later than max.poll.interval.ms leave by "
    "themselves; lower max.poll.records. For restarts set group.instance.id (static membership).",
    "member_joined": "Members come one by one: raise group.initial.rebalance.delay.ms at the brokers, and set "
    "group.instance.id so that a restart is no new member.",
    "member_replaced": "Two processes use one group.instance.id: each puts the other out. Give each its own.",
    "subscription_changed": "Members subscribe to other topics over and over: look at subscribe() with a pattern.",
    "metadata_changed": "Topics or partitions come and go: look at patterns in subscribe(), and metadata.max.age.ms.",
    "leader_rejoined": "The leader asks for a rebalance: its assignor sees other partitions than before.",
    "coordinator_moved": "The group's coordinator moved: look at the brokers, and at __consumer_offsets' leaders.",
}


_SHORT_LIVED = (
    "Members of one client join, leave within seconds and come again: too soon for max.poll.interval.ms. "
    "Keep the consumer open instead of one for each task (a short job, a health check, a loop around subscribe() and "
    "close()), or give it a group of its own or assign() without a group."
)
_LATE_POLLS = (
    "Members leave and join again over the connection that they have: a consumer does so whose poll() comes later than "
    "max.poll.interval.ms. Lower max.poll.records, move slow work out of the loop of poll(), or raise "
    "max.poll.interval.ms above the longest time between two polls; if that is not it, look for unsubscribe() and "
    "subscribe() in a loop."
)
_APART_NS = 60_000_000_000  # twice the time within which a consequence of an outage begins
_SHORT_LIFE_NS = 30_000_000_000  # a tenth of the default max.poll.interval.ms, after which a client leaves its group


class Restless(NamedTuple):
    """Rebalances of a group; `expected`: one for each member, or two with a cooperative assignor.

    Only rebalances during traffic of the group, or of its cluster if it has none of its own: its coordinator's log may
    cover all its life.
    """

    cluster: str | None
    group_id: str
    protocol: str | None
    rebalances: int
    expected: int
    rebalancing_ns: int | None
    cause: str | None  # of most of them
    of_cause: int
    members: int | None  # at most
    client: str | None  # the client whose members caused most of them
    of_client: int
    life_ns: int | None  # maximum lifetime of half of its members that left
    first_us: int
    last_us: int
    seen_us: int  # duration of its traffic, without pauses between captures
    returned: int = 0  # members that joined over a connection over which another member had left


def restless(tables: Tables, limits: Limits) -> Frame:
    """Rows of Restless, by group, those with the most rebalances first."""
    return ask(
        {
            "all_rebalances": tables["rebalances"],
            "exchanges": tables["exchanges"],
            "group_events": tables["group_events"],
        },
        once=("group_steps", "stretches", "moved", "rebalances"),
        group_steps=f"""
            select cluster, group_id, {STEP} as step, {STEP_TIMES} from exchanges group by cluster, group_id, {STEP}""",
        steps="""
            select cluster, group_id, step, first_us, last_us from group_steps where group_id is not null
            union all
            select cluster, cast(null as string) as group_id, step, first_us, last_us from group_steps""",
        **stretches("steps", ("cluster", "group_id")),
        seen="""
            select cluster, group_id, sum(last_us - first_us) as seen_us from stretches group by cluster, group_id""",
        judged="""
            select t.*, s.group_id as heard_as from all_rebalances t left join seen s
                on t.cluster is not distinct from s.cluster and t.group_id = s.group_id
            where coalesce(t.protocol, '') != 'zookeeper' and t.started_ns is not null""",
        in_traffic=f"""
            select j.* from judged j join stretches s
                on j.cluster is not distinct from s.cluster and j.heard_as is not distinct from s.group_id
                and j.started_ns / 1e3 between s.first_us - {QUIET_S * 500_000} and s.last_us + {QUIET_S * 500_000}""",
        members="""
            select cluster, group_id, member_id, max(client_id) as client,
                min(case when event = 'join' then time_ns end) as joined_ns,
                max(case when event = 'leave' then time_ns end) as left_ns, max(connection) as connection,
                case when count(case when event = 'leave' and error is null then 1 end) > 0
                    then max(case when event = 'leave' and error is null then time_ns end) - min(time_ns) end as life_ns
            from group_events where member_id is not null group by cluster, group_id, member_id""",
        returns="""
            select m.cluster, m.group_id, count(distinct m.member_id) as returned
            from members m join members o on m.cluster is not distinct from o.cluster and m.group_id = o.group_id
                and m.connection = o.connection and m.member_id != o.member_id and o.left_ns < m.joined_ns
            group by m.cluster, m.group_id""",
        moved="""
            select r.*, m.client as mover from in_traffic r left join members m
                on r.cluster is not distinct from m.cluster and r.group_id = m.group_id
                and r.cause_member = m.member_id""",
        by_mover="""
            select cluster, group_id, mover, count(*) as moves, min(started_ns) as begun_ns from moved
            where mover is not null group by cluster, group_id, mover""",
        every="select cluster, group_id, count(*) as rebalances from moved group by cluster, group_id",
        # Where one client caused most of them, they begin with its first: the group may have been calm for long before.
        begun="""
            select b.* from by_mover b join every e on b.cluster is not distinct from e.cluster
                and b.group_id = e.group_id and b.moves * 2 > e.rebalances""",
        rebalances="""
            select r.* from moved r left join begun b on r.cluster is not distinct from b.cluster
                and r.group_id = b.group_id
            where b.begun_ns is null or r.started_ns >= b.begun_ns""",
        causes="""
            select cluster, group_id, cause, count(*) as of_cause,
                row_number() over (partition by cluster, group_id order by count(*) desc, cause) as place
            from rebalances group by cluster, group_id, cause""",
        lives=f"""
            select cluster, group_id, client, percentile_approx(life_ns, 0.5, {ACCURACY}) as life_ns from members
            group by cluster, group_id, client""",
        movers="""
            select cluster, group_id, mover as client, count(*) as of_client,
                row_number() over (partition by cluster, group_id order by count(*) desc, mover) as place
            from rebalances where mover is not null group by cluster, group_id, mover""",
        summed="""
            select cluster, group_id, max(heard_as) as heard_as, max(protocol) as protocol, count(*) as rebalances,
                max(members_after) * max(case when strategy like '%cooperative%' then 2 else 1 end) as expected,
                sum(coalesce(ended_ns, joined_ns) - started_ns) as rebalancing_ns, max(members_after) as members,
                cast(floor(min(started_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(started_ns) / 1e3) as bigint) as last_us
            from rebalances group by cluster, group_id""",
        answer=f"""
            select s.cluster, s.group_id, protocol, rebalances,
                coalesce(expected, 0) as expected, rebalancing_ns, c.cause, c.of_cause, members, m.client,
                coalesce(m.of_client, 0) as of_client, l.life_ns, s.first_us, s.last_us, t.seen_us,
                coalesce(b.returned, 0) as returned
            from summed s left join causes c
                on s.cluster is not distinct from c.cluster and s.group_id = c.group_id and c.place = 1
            left join movers m
                on s.cluster is not distinct from m.cluster and s.group_id = m.group_id and m.place = 1
            left join lives l on s.cluster is not distinct from l.cluster and s.group_id = l.group_id
                and m.client = l.client
            left join returns b on s.cluster is not distinct from b.cluster and s.group_id = b.group_id
            join seen t on s.cluster is not distinct from t.cluster and s.heard_as is not distinct from t.group_id
            where rebalances - coalesce(expected, 0) >= {limits.rebalances_min}
            order by rebalances desc, s.cluster nulls first, s.group_id""",
    )


def judge_restless(row: Restless, limits: Limits) -> Iterator[Finding]:
    span_us = max(row.last_us - row.first_us, 1)
    beyond = row.rebalances - row.expected
    per_hour = beyond * 3.6e9 / max(row.seen_us, 1)
    if beyond < limits.rebalances_min or per_hour < limits.rebalances_per_hour:
        return
    share = (row.rebalancing_ns or 0) / 1000 / max(row.seen_us, 1)
    is_one_client = row.client is not None and row.of_client * 2 > row.rebalances
    is_short = is_one_client and row.cause in ("member_left", "member_joined") and (row.life_ns or 0) > 0
    is_short = is_short and (row.life_ns or 0) < _SHORT_LIFE_NS
    is_late = row.returned > 0 and 2 * row.returned >= row.rebalances  # each is a rebalance
    yield found(
        "rebalance_storm",
        # Members of the classic protocol stand still meanwhile, those of the newer ones do not.
        CRITICAL if share >= limits.rebalancing_share and row.protocol == "classic" else WARNING,
        share,
        row.cluster,
        f"group {row.group_id}",
        {"group_id": row.group_id},
        (row.first_us, row.last_us),
        {
            "rebalances": row.rebalances,
            "span_ns": span_us * 1000,
            "rebalancing_ns": row.rebalancing_ns,
            "rebalancing_share": share,
            "cause": row.cause,
            "of_cause": row.of_cause,
            "client": row.client if is_one_client else None,
            "of_client": row.of_client if is_one_client else None,
            "life_ns": row.life_ns if is_one_client else None,
            "returned": row.returned or None,
            "most_members": row.members,
            "protocol": row.protocol,
        },
        _LATE_POLLS if is_late else _SHORT_LIVED if is_short else _CHANGES.get(row.cause or ""),
    )


class Straggling(NamedTuple):
    """How long the members of a group waited for one of them, or for its successors on the same client."""

    cluster: str | None
    group_id: str
    client: str | None
    member_id: str | None  # the one that others waited for longest
    rebalances: int
    waited_ns: int
    longest_ns: int
    members: int | None
    first_us: int
    last_us: int


def straggling(tables: Tables, limits: Limits) -> Frame:
    """Rows of Straggling, the longest waits first."""
    return ask(
        {"rebalances": tables["rebalances"], "group_events": tables["group_events"]},
        names="""
            select cluster, group_id, member_id, max(client_id) as client from group_events
            where member_id is not null group by cluster, group_id, member_id""",
        waits=f"""
            select r.*, n.client from rebalances r left join names n
                on r.cluster is not distinct from n.cluster and r.group_id = n.group_id and r.last_to_join = n.member_id
            where r.waited_ns >= {limits.straggler_wait_s * 1e9:.0f} and coalesce(r.protocol, '') != 'zookeeper'""",
        answer="""
            select cluster, group_id, coalesce(client, last_to_join) as client,
                max_by(last_to_join, waited_ns) as member_id, count(*) as rebalances, sum(waited_ns) as waited_ns,
                max(waited_ns) as longest_ns, max(members_after) as members,
                cast(floor(min(coalesce(joined_ns, started_ns + waited_ns) - waited_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(coalesce(ended_ns, started_ns)) / 1e3) as bigint) as last_us
            from waits group by cluster, group_id, coalesce(client, last_to_join)
            order by waited_ns desc, cluster nulls first, group_id, client nulls first""",
    )


def judge_straggling(row: Straggling, limits: Limits) -> Iterator[Finding]:
    if row.longest_ns < limits.straggler_wait_s * 1e9:
        return
    yield found(
        "straggler",
        # A group that forms, or a busy host, waits for seconds once.
        WARNING if row.rebalances > 1 or row.longest_ns >= limits.felt_stood_still_s * 1e9 else NOTE,
        row.waited_ns / 600e9,
        row.cluster,
        f"group {row.group_id}, client {clean(row.client)}",
        {"group_id": row.group_id, "client": row.client, "member_id": row.member_id},
        (row.first_us, row.last_us),
        {
            "waited_ns": row.waited_ns,
            "longest_ns": row.longest_ns,
            "rebalances": row.rebalances,
            "members": row.members,
            "member_id": row.member_id,
        },
    )


class Awaited(NamedTuple):
    """Rebalances of a group that waited for members which never came back, until the coordinator dropped these.

    Less than _APART_NS lies between one and the next.
    """

    cluster: str | None
    group_id: str
    rebalances: int
    gone: int  # members
    waited_ns: int  # time between the last join and the end of the rebalance
    longest_ns: int
    clients: str | None
    first_us: int
    last_us: int


def awaited(tables: Tables, limits: Limits) -> Frame:
    """Rows of Awaited, by group and time, the longest waits first."""
    same = "r.cluster is not distinct from {0}.cluster and r.group_id = {0}.group_id"
    return ask(
        {"rebalances": tables["rebalances"], "group_events": tables["group_events"]},
        by_client="""
            select cluster, group_id, generation, time_ns, client_id, count(distinct member_id) as members
            from group_events where event = 'expired' group by cluster, group_id, generation, time_ns, client_id""",
        expired="""
            select cluster, group_id, generation, time_ns, sum(members) as gone,
                array_join(array_sort(collect_list(client_id)), ', ') as clients
            from by_client group by cluster, group_id, generation, time_ns""",
        joins="select cluster, group_id, time_ns from group_events where event = 'join'",
        waits=f"""
            select r.cluster, r.group_id, r.generation, r.joined_ns, e.gone, e.clients, max(j.time_ns) as last_join_ns
            from rebalances r
            join expired e on {same.format("e")} and r.generation = e.generation and r.joined_ns = e.time_ns
            join joins j on {same.format("j")} and j.time_ns between r.started_ns and r.joined_ns
            where r.protocol = 'classic'
            group by r.cluster, r.group_id, r.generation, r.joined_ns, e.gone, e.clients""",
        long=f"""
            select *, lag(joined_ns) over (partition by cluster, group_id order by joined_ns) as before_ns from waits
            where joined_ns - last_join_ns >= {limits.straggler_wait_s * 1e9:.0f}""",
        # Waits that are far apart have different causes.
        times=f"""
            select *, sum(case when last_join_ns <= before_ns + {_APART_NS} then 0 else 1 end)
                over (partition by cluster, group_id order by joined_ns) as time_of from long""",
        answer="""
            select cluster, group_id, count(*) as rebalances, sum(gone) as gone,
                sum(joined_ns - last_join_ns) as waited_ns, max(joined_ns - last_join_ns) as longest_ns,
                max_by(clients, named_struct('w', joined_ns - last_join_ns, 'g', generation)) as clients,
                cast(floor(min(last_join_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(joined_ns) / 1e3) as bigint) as last_us
            from times group by cluster, group_id, time_of
            order by waited_ns desc, cluster nulls first, group_id, first_us""",
    )


def judge_awaited(row: Awaited, limits: Limits) -> Iterator[Finding]:
    yield found(
        "members_gone",
        severity(limits, stood_still_ns=row.longest_ns),
        row.waited_ns / 600e9,
        row.cluster,
        f"group {row.group_id}",
        {"group_id": row.group_id},
        (row.first_us, row.last_us),
        {
            "waited_ns": row.waited_ns,
            "longest_ns": row.longest_ns,
            "rebalances": row.rebalances,
            "members": row.gone,
            "clients": row.clients,
        },
    )


PROBES = (
    Probe(("rebalance_storm",), ("rebalances", "exchanges", "group_events"), restless, Restless, judge_restless),
    Probe(("straggler",), ("rebalances", "group_events"), straggling, Straggling, judge_straggling),
    Probe(("members_gone",), ("rebalances", "group_events"), awaited, Awaited, judge_awaited),
)
