"""Findings about brokers and their dependents: gone or standing still, coordinators and controllers lost, partitions
offline or without all replicas, clients that connect over and over.

A broker is identified by its id if answers name it, else by its address: its listeners are one broker. Refuses to know
engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, Probe, Tables, at, broker_name, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions import knowledge
from kproxy.analysis.questions.pieces import (
    CONNECTED,
    CONNECTION,
    FAILED_CONNECT,
    GROUPS,
    KNOWN_BROKERS,
    LONG_POLLS,
    SPOKE,
    keyed,
    literal,
    of_clients,
)

_STEP_NS = 100_000_000  # answers are counted in steps of this: a silence is between two steps
_BEFORE_STEPS = 50
_SOON_NS = 2_000_000_000  # a broker that dies takes its connections with it; clients that give up do so later
_NEAR_NS = 1_000_000_000
_SERVED_NOT = ("ApiVersions", "SaslHandshake", "SaslAuthenticate")  # asked by a client that only connects
_STORM_NS = 10_000_000_000
DOUBT_NS = 2_000_000_000  # an outage may have ended this long before anybody noticed it: less is no doubt
_SHUTDOWN_NS = 30_000_000_000  # a controlled shutdown hands leaders over, then ends
_CONTROLLED_SHUTDOWN = (
    "This was a controlled shutdown: the broker moved its leaders to others before it went silent, and closed its "
    "connections. A rolling restart is no fault in itself: look at what stood still or failed meanwhile, which follows "
    "from it."
)


class Silent(NamedTuple):
    """A time without an answer of a broker, although it got requests."""

    cluster: str | None
    broker: str  # its address
    broker_id: int | None
    silent_ns: int
    is_back: bool
    closed_soon: int  # connections that ended as it began
    closed: int  # until it was over
    kept: int  # connections that outlived it
    held: int  # requests that were answered only when it was over
    held_connections: int
    failed: int  # requests that were never answered
    failed_connections: int
    went_on: int  # clients that asked other brokers meanwhile
    is_told: bool  # whether an answer of another broker lacked it
    reset: int  # connections that ended as it began
    handed_over: int  # partitions that others led before it began
    taken: int  # until it was over
    cut_polls: int  # Fetch and the like that were never answered
    away_ns: int | None  # up to the last connect or request in vain, or Metadata without it
    first_us: int
    last_us: int


def silent(tables: Tables, limits: Limits) -> Frame:
    """Rows of Silent, the longest first."""
    least_ns = f"{limits.silent_s * 1e9:.0f}"
    polls = ", ".join(map(literal, LONG_POLLS))
    same = "a.cluster is not distinct from g.cluster and a.broker = g.broker"
    gap = "g.cluster, g.broker, g.last_ns"
    held = "not is_poll and outcome = 'answered' and response_start_ns >= g.until_ns"
    failed = "not is_poll and outcome = 'unanswered'"
    return ask(
        {name: tables[name] for name in ("exchanges", "connections", "topology", "leadership")},
        once=("gaps",),
        known=KNOWN_BROKERS,
        exchanged=keyed("exchanges"),
        connected=keyed("connections"),
        served=f"""
            select cluster, broker_key as broker, min({GROUPS["broker"]}) as address, max(broker_id) as broker_id,
                cast(floor(response_start_ns / {_STEP_NS}) as bigint) as step, min(response_start_ns) as first_ns,
                max(response_start_ns) as last_ns, count(*) as answers
            from exchanged where response_start_ns is not null and {of_clients(False)}
            group by cluster, broker_key, cast(floor(response_start_ns / {_STEP_NS}) as bigint)""",
        ends="select cluster, max(last_ns) as end_ns from served group by cluster",
        turns=f"""
            select *, lead(first_ns) over (partition by cluster, broker order by step) as next_ns,
                sum(answers) over (partition by cluster, broker order by step
                    range between {_BEFORE_STEPS} preceding and current row) as before
            from served""",
        asked=f"""
            select cluster, broker_key as broker, {GROUPS["client"]} as client, client_address as host, api, outcome,
                source, connection, request_end_ns, response_start_ns, coalesce(muted_ns, 0) as mute_ns,
                api in ({polls}) as is_poll
            from exchanged where {of_clients(False)} and request_end_ns is not null""",
        # A broker may be silent when the tables begin: its silence starts with the first request that waits for it.
        first_asked="""
            select cluster, broker, min(request_end_ns) as asked_ns from asked where not is_poll
            group by cluster, broker""",
        first_answered="""
            select cluster, broker, min(address) as address, max(broker_id) as broker_id, min(first_ns) as answered_ns
            from served group by cluster, broker""",
        pauses=f"""
            select t.cluster, t.broker, t.address, t.broker_id, t.last_ns, next_ns, end_ns
            from turns t join ends e on t.cluster is not distinct from e.cluster
            where coalesce(next_ns, end_ns) - t.last_ns >= {least_ns} and before >= {limits.silent_answers_min}
            union all
            select f.cluster, f.broker, address, broker_id, asked_ns, answered_ns, null
            from first_asked f join first_answered a
                on f.cluster is not distinct from a.cluster and f.broker = a.broker
            where answered_ns - asked_ns >= {least_ns}""",
        # Nobody may have a request for a broker that is back and leads nothing yet: then other brokers name it again.
        unnamed=f"""
            select p.cluster, p.broker, p.broker_id, p.last_ns, max(coalesce(p.next_ns, p.end_ns)) as over_ns,
                max(t.time_ns) as gone_ns
            from pauses p join topology t on t.cluster is not distinct from p.cluster and t.broker_id = p.broker_id
                and t.kind = 'broker' and t.change = 'gone'
                and t.time_ns between p.last_ns - {_NEAR_NS} and coalesce(p.next_ns, p.end_ns)
            group by p.cluster, p.broker, p.broker_id, p.last_ns""",
        named=f"""
            select u.cluster, u.broker, u.last_ns, min(t.time_ns) as named_ns
            from unnamed u join topology t on t.cluster is not distinct from u.cluster and t.broker_id = u.broker_id
                and t.kind = 'broker' and t.change = 'appeared' and t.time_ns > u.gone_ns
                and t.time_ns between u.last_ns + {least_ns} and u.over_ns
            group by u.cluster, u.broker, u.last_ns""",
        gaps="""
            select p.cluster, p.broker, p.address, p.broker_id, p.last_ns,
                coalesce(named_ns, next_ns, end_ns) as until_ns,
                coalesce(named_ns, next_ns) is not null as is_back
            from pauses p left join named n on p.cluster is not distinct from n.cluster and p.broker = n.broker
                and p.last_ns = n.last_ns""",
        waited=f"""
            select {gap},
                count_if({held}) as held, count(distinct case when {held} then {CONNECTION} end) as held_connections,
                count_if({failed}) as failed,
                count(distinct case when {failed} then {CONNECTION} end) as failed_connections,
                count_if(is_poll and outcome = 'unanswered') as cut_polls,
                max(case when outcome = 'unanswered' then request_end_ns end) as vain_ns
            from gaps g join asked a on {same}
                and a.request_end_ns between g.last_ns - {_NEAR_NS} and g.until_ns
                and (outcome = 'unanswered' or request_end_ns + mute_ns <= g.until_ns - {least_ns})
            group by {gap}""",
        theirs=f"""
            select cluster, broker_key as broker, start_ns, end_ns, close from connected
            where start_ns is not null and {CONNECTED}""",
        links=f"""
            select {gap},
                count_if(a.close != 'open' and a.end_ns <= g.last_ns + {_SOON_NS}) as closed_soon,
                count_if(a.close = 'reset' and a.end_ns <= g.last_ns + {_SOON_NS}) as reset,
                count_if(a.close != 'open' and a.end_ns <= g.until_ns) as closed,
                count_if(a.close is null or a.close = 'open' or a.end_ns > g.until_ns) as kept
            from gaps g join theirs a on {same} and a.start_ns <= g.last_ns
                and (a.end_ns >= g.last_ns - {_NEAR_NS} or a.close is null or a.close = 'open')
            group by {gap}""",
        left_behind=f"""
            select distinct {gap}, g.until_ns, a.client, a.host from gaps g join asked a on {same}
                and a.request_end_ns between g.last_ns - {10 * _NEAR_NS} and g.last_ns""",
        elsewhere="""
            select g.cluster, g.broker, g.last_ns, count(distinct g.client) as went_on
            from left_behind g join asked a on a.cluster is not distinct from g.cluster and a.client = g.client
                and a.host = g.host and a.broker != g.broker and a.request_end_ns > g.last_ns
                and a.request_end_ns < g.until_ns
            group by g.cluster, g.broker, g.last_ns""",
        reported_gone=f"""
            select {gap}, count(*) as times from gaps g join topology t
                on t.cluster is not distinct from g.cluster and t.kind = 'broker' and t.change = 'gone'
                and t.broker_id = g.broker_id and t.time_ns between g.last_ns - {_NEAR_NS} and g.until_ns
            group by {gap}""",
        refused=f"""
            select {gap}, max(c.start_ns) as vain_ns from gaps g join connected c
                on c.cluster is not distinct from g.cluster and c.broker_key = g.broker and {FAILED_CONNECT}
                and c.start_ns between g.last_ns and g.until_ns
            group by {gap}""",
        unlisted="""
            select u.cluster, u.broker, u.last_ns, max(e.response_start_ns) as vain_ns
            from unnamed u left join named n
                on u.cluster is not distinct from n.cluster and u.broker = n.broker and u.last_ns = n.last_ns
            join exchanges e on e.cluster is not distinct from u.cluster and e.api = 'Metadata'
                and e.outcome = 'answered' and e.response_start_ns >= u.gone_ns
                and e.response_start_ns < coalesce(n.named_ns, u.over_ns)
            group by u.cluster, u.broker, u.last_ns""",
        turned="""
            select cluster, topic, `partition`, leader, time_ns, lag(leader) over (
                partition by cluster, topic, `partition` order by time_ns) as former
            from leadership""",
        # Elections during an earlier outage are that one's.
        elections=f"""
            select t.cluster, t.former, t.time_ns, max(h.until_ns) as over_ns from turned t
            left join gaps h on t.cluster is not distinct from h.cluster and t.former = h.broker_id
                and t.time_ns > h.last_ns and t.time_ns <= h.until_ns + {_NEAR_NS}
            where t.former is not null and coalesce(t.leader, -1) != t.former
            group by t.cluster, t.topic, t.`partition`, t.former, t.time_ns""",
        elected=f"""
            select {gap}, count_if(t.time_ns <= g.last_ns) as handed_over, count_if(t.time_ns > g.last_ns) as taken
            from gaps g join elections t on t.cluster is not distinct from g.cluster and t.former = g.broker_id
                and t.time_ns between g.last_ns - {_SHUTDOWN_NS} and g.until_ns
                and (t.over_ns is null or t.over_ns >= g.until_ns)
            group by {gap}""",
        answer=f"""
            select g.cluster, g.address as broker, g.broker_id, g.until_ns - g.last_ns as silent_ns, g.is_back,
                coalesce(closed_soon, 0) as closed_soon, coalesce(closed, 0) as closed, coalesce(kept, 0) as kept,
                coalesce(held, 0) as held, coalesce(held_connections, 0) as held_connections,
                coalesce(failed, 0) as failed, coalesce(failed_connections, 0) as failed_connections,
                coalesce(went_on, 0) as went_on, t.times is not null as is_told,
                coalesce(reset, 0) as reset, coalesce(handed_over, 0) as handed_over, coalesce(taken, 0) as taken,
                coalesce(cut_polls, 0) as cut_polls,
                greatest(waited.vain_ns, refused.vain_ns, unlisted.vain_ns) - g.last_ns as away_ns,
                cast(floor(g.last_ns / 1e3) as bigint) as first_us, cast(floor(g.until_ns / 1e3) as bigint) as last_us
            from gaps g {" ".join(_joined(name) for name in _OF_A_GAP)}
            {_joined("reported_gone", "t")}
            order by silent_ns desc, g.cluster nulls first, g.address, g.last_ns""",
    )


_OF_A_GAP = ("waited", "links", "elsewhere", "elected", "refused", "unlisted")


def _joined(step: str, alias: str | None = None) -> str:
    as_ = alias or step
    return (
        f"left join {step} {as_} on g.cluster is not distinct from {as_}.cluster and g.broker = {as_}.broker "
        f"and g.last_ns = {as_}.last_ns"
    )


def judge_silent(row: Silent, limits: Limits) -> Iterator[Finding]:
    ended_with_it = row.closed_soon > 0 and row.closed_soon >= row.kept + row.closed - row.closed_soon
    # Clients that all end at once close their connections, too: require other evidence, or clients that miss answers.
    is_missed = row.went_on > 0 and row.failed >= limits.silent_requests_min
    is_gone = ended_with_it and (is_missed or (row.is_told and (row.is_back or row.went_on > 0)))
    is_standing = (
        not is_gone
        and row.held + row.failed >= limits.silent_requests_min
        and (
            row.held_connections > 1
            or row.closed > 1
            or row.is_told
            or (not row.is_back and row.failed_connections > 1)  # when the capture ends
        )
    )
    if not is_gone and not is_standing:
        return
    # A process that is killed leaves connections with unread requests, which its host resets, and all of its leaders.
    is_controlled = (
        is_gone and row.handed_over > 0 and row.handed_over >= row.taken and 5 * row.reset <= row.closed_soon
    )
    # Its end is when clients notice it: nobody may have asked for it before.
    is_doubtful = is_gone and row.away_ns is not None and row.silent_ns - row.away_ns > DOUBT_NS
    away_ns = max(0, row.away_ns or 0) if is_doubtful else row.silent_ns
    evidence = {
        "silent_ns": row.silent_ns,
        "away_ns": away_ns if is_doubtful else None,
        "end": _end(row, is_controlled) if is_gone else None,
        "failed": row.failed,
        "held": row.held,
        "connections": row.closed if is_gone else row.closed + row.kept,
        "clients": row.went_on or None,
        "is_back": row.is_back,
        "handed_over": row.handed_over if is_controlled else None,
    }
    yield found(
        "broker_gone" if is_gone else "broker_standing_still",
        # Its partitions stood still with it, unless others had led them before.
        severity(limits, failed=row.failed, stood_still_ns=None if is_controlled else away_ns),
        away_ns / 60e9 + row.failed / 1e4,
        row.cluster,
        broker_name(row.broker, row.broker_id),
        {"broker": row.broker, "broker_id": row.broker_id},
        (row.first_us, row.last_us),
        evidence,
        _CONTROLLED_SHUTDOWN if is_controlled else None,
    )


def _end(row: Silent, is_controlled: bool) -> str:
    """How the broker ended, by its connections and its leaders."""
    closed = row.closed_soon - row.reset
    ends = [f"{count:,} by {flag}" for count, flag in ((closed, "FIN"), (row.reset, "RST")) if count]
    how = "after a controlled shutdown" if is_controlled else "at once"
    how += ", before others led its partitions" if row.taken and not is_controlled else ""
    # A killed broker cuts its pending Fetch requests. Leaders are unknown without an earlier Metadata response.
    is_orderly = not (is_controlled or row.taken or row.failed or row.cut_polls or row.kept)
    how += " with every request answered, as by a controlled shutdown" if is_orderly else ""
    silent = f"; {row.kept:,} stayed open in silence" if row.kept else ""
    return f"connections closed {how}, {' and '.join(ends)}{silent}"


class Orphaned(NamedTuple):
    """A group that its coordinator did not serve for a while."""

    cluster: str | None
    group_id: str
    outage_ns: int
    joining_ns: int | None
    refusals: int
    broker: str | None  # that answered before
    broker_id: int | None
    coordinator_id: int | None
    moved: bool | None
    is_back: bool  # else the outage lasts until the group's last request
    happened: str
    first_us: int
    last_us: int


def orphaned(tables: Tables, limits: Limits) -> Frame:
    """Rows of Orphaned, the longest outage first; groups that had no coordinator before are left out.

    Without a refusal, the time between two heartbeats is no standstill of a group. An outage without a successful
    answer at its end lasts until the group's last request: after it nobody waits for a coordinator.
    """
    least_ns = f"{limits.coordinator_outage_s * 1e9:.0f}"
    lost = knowledge.coordinators(
        *(tables[name] for name in ("group_events", "rebalances", "exchanges", "connections"))
    )
    return ask(
        {"lost": lost, "exchanges": tables["exchanges"]},
        asked="""
            select cluster, group_id, max(unix_micros(`time`)) as asked_us,
                max(case when outcome = 'answered' and coalesce(errors, 0) = 0 and api != 'FindCoordinator'
                    then cast(floor(response_end_ns / 1e3) as bigint) end) as served_us
            from exchanges where group_id is not null group by cluster, group_id""",
        lasted="""
            select l.*, case when outage_ns is null and silent_ns is not null and refusals > 0
                    and served_us <= unix_micros(`time`) then (asked_us - unix_micros(`time`)) * 1000 end as open_ns
            from lost l left join asked a on l.cluster is not distinct from a.cluster and l.group_id = a.group_id""",
        outages="select *, coalesce(outage_ns, open_ns) as lasted_ns from lasted",
        answer=f"""
            select cluster, group_id, lasted_ns as outage_ns, joining_ns, refusals, former_broker as broker,
                former_id as broker_id, coordinator_id, moved, open_ns is null as is_back, happened,
                unix_micros(`time`) as first_us, cast(unix_micros(`time`) + lasted_ns / 1e3 as bigint) as last_us
            from outages
            where lasted_ns - case when refusals = 0 then {knowledge.HEARTBEAT_NS} else 0 end >= {least_ns}
            order by outage_ns desc, cluster nulls first, group_id, first_us""",
    )


def judge_orphaned(row: Orphaned, limits: Limits) -> Iterator[Finding]:
    yield found(
        "coordinator_lost",
        severity(limits, stood_still_ns=row.outage_ns),
        row.outage_ns / 60e9,
        row.cluster,
        f"group {row.group_id}",
        {"group_id": row.group_id, "broker": row.broker, "broker_id": row.broker_id},
        (row.first_us, row.last_us),
        {
            "outage_ns": row.outage_ns,
            "joining_ns": row.joining_ns,
            "refusals": row.refusals,
            "moved": row.moved,
            "happened": row.happened,
            "is_back": None if row.is_back else False,
            "former_coordinator": None if row.broker is None else broker_name(row.broker, row.broker_id),
            "coordinator_id": row.coordinator_id,
        },
    )


class Elected(NamedTuple):
    """Controllers of a cluster, as they named themselves to its brokers."""

    cluster: str | None
    elections: int
    controllers: int
    first_us: int
    last_us: int


def elected(tables: Tables, limits: Limits) -> Frame:
    """Rows of Elected: clusters that changed their controller."""
    return ask(
        {"topology": tables["topology"]},
        turns="""
            select cluster, broker_id, time_ns, lag(broker_id) over (partition by cluster order by time_ns) as before
            from topology where kind = 'controller' and change = 'active'""",
        answer=f"""
            select cluster, count(*) as elections, count(distinct broker_id) as controllers,
                cast(floor(min(time_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(time_ns) / 1e3) as bigint) as last_us
            from turns where before is not null group by cluster
            having count(*) >= {limits.controller_changes_min} order by elections desc, cluster nulls first""",
    )


def judge_elected(row: Elected, limits: Limits) -> Iterator[Finding]:
    evidence = {"elections": row.elections, "controllers": row.controllers}
    times = row.first_us, row.last_us
    yield found("controller_changes", WARNING, row.elections / 100, row.cluster, "the controller", {}, times, evidence)


class Lacking(NamedTuple):
    """Partitions of a topic without a leader for a while."""

    cluster: str | None
    topic: str
    partitions: int
    longest_ns: int
    at_end: int  # that have none at the end
    replicas: str | None  # "[1, 2]", where all of them have the same
    first_us: int
    last_us: int


def offline(tables: Tables, limits: Limits) -> Frame:
    """Rows of Lacking, by topic, the longest first."""
    return ask(
        {"leadership": tables["leadership"], "exchanges": tables["exchanges"]},
        ends="select cluster as of_cluster, max(response_end_ns) as end_ns from exchanges group by cluster",
        turns="""
            select *, lead(time_ns) over (partition by cluster, topic, `partition` order by time_ns) as next_ns
            from leadership""",
        spells="""
            select t.*, coalesce(next_ns, greatest(end_ns, time_ns)) as until_ns from turns t
            left join ends e on t.cluster is not distinct from e.of_cluster where change = 'offline'""",
        answer=f"""
            select cluster, topic, count(distinct `partition`) as partitions, max(until_ns - time_ns) as longest_ns,
                count(distinct case when next_ns is null then `partition` end) as at_end,
                case when min(cast(replicas as string)) = max(cast(replicas as string))
                    then max(cast(replicas as string)) end as replicas,
                cast(floor(min(time_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(until_ns) / 1e3) as bigint) as last_us
            from spells group by cluster, topic
            having max(until_ns - time_ns) >= {limits.replicas_s * 1e9:.0f}
                or count(distinct case when next_ns is null then `partition` end) > 0
            order by longest_ns desc, cluster nulls first, topic""",
    )


def judge_offline(row: Lacking, limits: Limits) -> Iterator[Finding]:
    only = (row.replicas or "").strip("[] ")
    yield found(
        "offline_partitions",
        severity(limits, stood_still_ns=row.longest_ns),
        row.longest_ns / 60e9,
        row.cluster,
        f"topic {clean(row.topic)}",
        {"topic": row.topic, "broker_id": int(only) if only.isdecimal() else None},
        (row.first_us, row.last_us),
        {
            "partitions": row.partitions,
            "longest_ns": row.longest_ns,
            "at_end": row.at_end,
            "replicas": row.replicas,
        },
    )


class Thin(NamedTuple):
    """Partitions whose in-sync replicas lacked one broker for a while."""

    cluster: str | None
    broker_id: int
    partitions: int
    topics: int
    longest_ns: int  # at most
    at_end: int  # that lacked it by the last message about them
    told_us: int | None  # time of the last of these messages that reported a change
    first_us: int
    last_us: int


def thin(tables: Tables, limits: Limits) -> Frame:
    """Rows of Thin, by the broker that lacks, those of most partitions first."""
    lacks = "array_contains(t.replicas, b.broker_id) and not array_contains(t.isr, b.broker_id)"
    return ask(
        {name: tables[name] for name in ("leadership", "topology", "exchanges")},
        ends="select cluster as of_cluster, max(response_end_ns) as end_ns from exchanges group by cluster",
        turns="""
            select *, lead(time_ns) over (partition by cluster, topic, `partition` order by time_ns) as next_ns
            from leadership where isr is not null and replicas is not null""",
        brokers="""
            select distinct cluster, broker_id from topology where broker_id is not null""",
        spells=f"""
            select t.cluster, b.broker_id, t.topic, t.`partition`, t.time_ns, t.next_ns,
                coalesce(t.next_ns, greatest(e.end_ns, t.time_ns)) as until_ns
            from turns t join brokers b on t.cluster is not distinct from b.cluster
            left join ends e on t.cluster is not distinct from e.of_cluster
            where size(t.isr) < size(t.replicas) and {lacks}""",
        each_one="""
            select cluster, broker_id, topic, `partition`, sum(until_ns - time_ns) as lacked_ns,
                max(case when next_ns is null then 1 else 0 end) as at_end, min(time_ns) as first_ns,
                max(case when next_ns is null then time_ns end) as told_ns, max(until_ns) as last_ns
            from spells group by cluster, broker_id, topic, `partition`""",
        answer=f"""
            select cluster, broker_id, count(*) as partitions, count(distinct topic) as topics,
                max(lacked_ns) as longest_ns, sum(at_end) as at_end,
                cast(floor(max(told_ns) / 1e3) as bigint) as told_us,
                cast(floor(min(first_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(last_ns) / 1e3) as bigint) as last_us
            from each_one where lacked_ns >= {limits.out_of_sync_s * 1e9:.0f}
            group by cluster, broker_id order by partitions desc, cluster nulls first, broker_id""",
    )


def judge_thin(row: Thin, limits: Limits) -> Iterator[Finding]:
    yield found(
        "under_replicated",
        WARNING if row.at_end else NOTE,  # clients do not notice a replica that came back
        row.partitions / 1e3,
        row.cluster,
        f"broker {row.broker_id}",
        {"broker_id": row.broker_id},
        (row.first_us, row.last_us),
        {
            "partitions": row.partitions,
            "topics": row.topics,
            "longest_ns": row.longest_ns,
            "at_end": row.at_end,
            "last_told_ns": None if row.told_us is None else row.told_us * 1000,
        },
    )


class Storming(NamedTuple):
    """Connections of a client to a broker that ended before they served anything, in the worst ten seconds."""

    cluster: str | None
    client: str | None
    broker: str
    broker_id: int | None
    connections: int
    worst: int
    first_us: int
    last_us: int


def storming(tables: Tables, limits: Limits) -> Frame:
    """Rows of Storming, those with the most connections first."""
    handshakes = ", ".join(map(literal, _SERVED_NOT))
    return ask(
        {"connections": tables["connections"], "exchanges": tables["exchanges"]},
        known=KNOWN_BROKERS,
        connected=keyed("connections"),
        whose=f"""
            select source, connection, max({GROUPS["client"]}) as client,
                count_if(api not in ({handshakes}) and outcome != 'unanswered') as served
            from exchanges group by source, connection""",
        useless=f"""
            select c.cluster, coalesce(w.client, c.client_address) as client, broker_key as broker,
                {GROUPS["broker"]} as address, c.known_id as broker_id, c.start_ns
            from connected c left join whose w on c.source = w.source and c.connection = w.connection
            where coalesce(c.start_seen, true) and c.close != 'open' and {CONNECTED} and {SPOKE}
                and coalesce(w.served, c.answers, c.requests, 0) = 0 and c.start_ns is not null""",
        counted=f"""
            select *, count(*) over (partition by cluster, client, broker order by start_ns
                range between {_STORM_NS} preceding and current row) as near
            from useless""",
        answer=f"""
            select cluster, client, min(address) as broker, max(broker_id) as broker_id, count(*) as connections,
                max(near) as worst, cast(floor(min(start_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(start_ns) / 1e3) as bigint) as last_us
            from counted group by cluster, client, broker having max(near) >= {limits.storm_connections}
            order by connections desc, cluster nulls first, client nulls first, broker""",
    )


def judge_storming(row: Storming, limits: Limits) -> Iterator[Finding]:
    yield found(
        "reconnect_storm",
        WARNING,
        row.connections / 1e4,
        row.cluster,
        at(row.client, broker_name(row.broker, row.broker_id)),
        {"client": row.client, "broker": row.broker, "broker_id": row.broker_id},
        (row.first_us, row.last_us),
        {"connections": row.connections, "worst": row.worst},
    )


PROBES = (
    Probe(
        ("broker_gone", "broker_standing_still"),
        ("exchanges", "connections", "topology", "leadership"),
        silent,
        Silent,
        judge_silent,
    ),
    Probe(
        ("coordinator_lost",),
        ("group_events", "rebalances", "exchanges", "connections"),
        orphaned,
        Orphaned,
        judge_orphaned,
    ),
    Probe(("controller_changes",), ("topology",), elected, Elected, judge_elected),
    Probe(("offline_partitions",), ("leadership", "exchanges"), offline, Lacking, judge_offline),
    Probe(("under_replicated",), ("leadership", "topology", "exchanges"), thin, Thin, judge_thin),
    Probe(("reconnect_storm",), ("connections", "exchanges"), storming, Storming, judge_storming),
)
