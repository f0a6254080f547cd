"""Findings about times in which no broker of a cluster answered, though requests waited at several of them, and about
short pauses of one broker.

If all brokers are silent, something that they share stood still: their host, the network, or the capture. Some requests
wait for other brokers, so they prove nothing about their own broker: writes with acks=all and writes of coordinators
wait for a replica, and so do later requests on the same connection. Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import REPLICATED
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import Finding, Probe, Tables, broker_name, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, KNOWN_BROKERS, keyed, literal, ns, of_clients

_STEP_NS = 100_000_000  # answers are counted in steps of this: a silence is between two steps
_ACTIVE_NS = 10_000_000_000  # brokers that answered this long before the silence count as silent ones
_LATE_NS = 500_000_000  # a request has waited this long, a Fetch beyond its max_wait_ms
FETCHES = ("Fetch", "ShareFetch")
# Requests that a broker answers at once and alone, from memory or after a short read. ApiVersions is not one of them:
# a broker that starts delays it.
_AT_ONCE = ("Metadata", "FindCoordinator", "ListOffsets", "OffsetForLeaderEpoch", "DescribeCluster")
TOGETHER_NS = 500_000_000  # a broker that resumes answers all waiting requests within this time
# Nothing but the broker delays the answer: no earlier request, quota, lost segment or closed window.
UNDELAYED = """coalesce(in_flight, 0) = 0 and coalesce(throttle_ms, 0) = 0 and coalesce(muted_ns, 0) = 0
    and coalesce(loss_ns, 0) = 0 and coalesce(closed_window_ns, 0) = 0"""


class Silence(NamedTuple):
    """A time in which no broker of a cluster answered."""

    cluster: str | None
    silent_ns: int
    brokers: int
    at_brokers: int  # brokers with waiting requests that depend on no other broker
    waiting: int  # these requests
    asked: int  # requests that clients sent meanwhile
    first_us: int
    last_us: int


def silences(tables: Tables, limits: Limits) -> Frame:
    """Rows of Silence, the longest first: at least two brokers were silent, and requests waited at each."""
    least_ns = f"{limits.all_silent_s * 1e9:.0f}"
    elsewhere = ", ".join(map(literal, REPLICATED))
    fetches = ", ".join(map(literal, FETCHES))
    gap = "g.cluster, g.last_ns, g.until_ns"
    same = "{0}.cluster is not distinct from {1}.cluster and {0}.last_ns = {1}.last_ns"
    return ask(
        {"exchanges": tables["exchanges"]},
        ("gaps",),
        known=KNOWN_BROKERS,
        exchanged=keyed("exchanges"),
        served=f"""
            select cluster, cast(floor(response_start_ns / {_STEP_NS}) as bigint) as step,
                min(response_start_ns) as first_ns, max(response_start_ns) as last_ns
            from exchanges where response_start_ns is not null
            group by cluster, cast(floor(response_start_ns / {_STEP_NS}) as bigint)""",
        turns="select *, lead(first_ns) over (partition by cluster order by step) as until_ns from served",
        gaps=f"select cluster, last_ns, until_ns from turns where until_ns - last_ns >= {least_ns}",
        asking=f"""
            select cluster, broker_key, request_end_ns as asked_ns, coalesce(response_start_ns, request_end_ns
                    + {_ACTIVE_NS}) as answered_ns,
                case when (api in ({elsewhere}) and coalesce(acks, -1) = -1) or coalesce(in_flight, 0) > 0 then null
                    when api in ({fetches}) then request_end_ns + {ns("coalesce(max_wait_ms, 500)")}
                    else request_end_ns + coalesce(muted_ns, 0) end as due_ns
            from exchanged where outcome in ('answered', 'unanswered') and {of_clients(False)}""",
        active=f"""
            select {gap}, count(distinct a.broker_key) as brokers
            from gaps g join asking a on g.cluster is not distinct from a.cluster
                and a.answered_ns between g.last_ns - {_ACTIVE_NS} and g.last_ns
            group by {gap}""",
        waits=f"""
            select {gap}, count(distinct a.broker_key) as at_any, count(a.due_ns) as waiting,
                count(distinct case when a.due_ns is not null then a.broker_key end) as at_brokers
            from gaps g join asking a on g.cluster is not distinct from a.cluster and a.answered_ns >= g.until_ns
                and coalesce(a.due_ns, a.asked_ns) between g.last_ns - {_ACTIVE_NS} and g.until_ns - {_LATE_NS}
            group by {gap}""",
        sent=f"""
            select {gap}, count(a.asked_ns) as asked
            from gaps g left join asking a on g.cluster is not distinct from a.cluster
                and a.asked_ns > g.last_ns and a.asked_ns < g.until_ns - {_STEP_NS}
            group by {gap}""",
        answer=f"""
            select g.cluster, g.until_ns - g.last_ns as silent_ns, a.brokers, w.at_brokers, w.waiting, s.asked,
                cast(floor(g.last_ns / 1e3) as bigint) as first_us, cast(floor(g.until_ns / 1e3) as bigint) as last_us
            from gaps g join active a on {same.format("g", "a")} join waits w on {same.format("g", "w")}
            join sent s on {same.format("g", "s")}
            where a.brokers >= 2 and w.at_any >= a.brokers and w.at_brokers >= 2
                and w.waiting >= {limits.silent_requests_min}
            order by silent_ns desc, g.cluster nulls first, g.last_ns""",
    )


def judge_silence(row: Silence, limits: Limits) -> Iterator[Finding]:
    yield found(
        "all_brokers_silent",
        severity(limits, stood_still_ns=row.silent_ns),
        row.silent_ns / 60e9,
        row.cluster,
        f"all {row.brokers} brokers",
        {},
        (row.first_us, row.last_us),
        {
            "silent_ns": row.silent_ns,
            "brokers": row.brokers,
            "at_brokers": row.at_brokers,
            "waiting": row.waiting,
            "sent_meanwhile": row.asked,
        },
    )


def kept_waiting(least_ns: str) -> str:
    """A SELECT of requests that waited so long, over `exchanged` (`pieces.keyed`), with `due_ns`: when an answer was
    due that waits for nothing but its broker, after the max_wait_ms of a Fetch; null for other requests.
    """
    at_once, fetches = (", ".join(map(literal, apis)) for apis in (_AT_ONCE, FETCHES))
    return f"""
        select cluster, broker_key, {GROUPS["broker"]} as broker, known_id, {GROUPS["client"]} as client,
            client_address as host, response_start_ns,
            case when api in ({fetches}) then request_end_ns + {ns("coalesce(max_wait_ms, 500)")}
                when api in ({at_once}) or (api = 'Produce' and acks = 1) then request_end_ns end as due_ns
        from exchanged
        where outcome = 'answered' and response_start_ns - request_end_ns >= {least_ns} and {UNDELAYED}
            and {of_clients(False)}"""


class Pause(NamedTuple):
    """A time in which a broker answered nothing, though several clients waited for immediate answers."""

    cluster: str | None
    broker: str  # its address
    broker_id: int | None
    paused_ns: int  # since the first of their waiting requests
    clients: int
    waiting: int  # their requests
    first_us: int
    last_us: int


def pauses(tables: Tables, limits: Limits) -> Frame:
    """Rows of Pause, the longest first.

    A request counts that nothing else delays: no earlier request, quota, lost segment or closed window; a Fetch counts
    beyond its max_wait_ms. It waited for `paused_s` while the broker answered nobody, and was answered when the broker
    went on. Where such requests wait at another broker for half as long meanwhile, the cause is none of one broker.
    """
    least_ns, half_ns = f"{limits.paused_s * 1e9:.0f}", f"{limits.paused_s * 5e8:.0f}"
    return ask(
        {"exchanges": tables["exchanges"]},
        ("gaps", "asking", "paused"),
        known=KNOWN_BROKERS,
        exchanged=keyed("exchanges"),
        served=f"""
            select cluster, broker_key, cast(floor(response_start_ns / {_STEP_NS}) as bigint) as step,
                min(response_start_ns) as first_ns, max(response_start_ns) as last_ns
            from exchanged where response_start_ns is not null
            group by cluster, broker_key, cast(floor(response_start_ns / {_STEP_NS}) as bigint)""",
        turns="select *, lead(first_ns) over (partition by cluster, broker_key order by step) as until_ns from served",
        gaps=f"select cluster, broker_key, last_ns, until_ns from turns where until_ns - last_ns >= {least_ns}",
        asking=kept_waiting(half_ns),
        waits="""
            select a.*, g.last_ns, g.until_ns, greatest(a.due_ns, g.last_ns) as since_ns
            from asking a join gaps g on a.cluster is not distinct from g.cluster and a.broker_key = g.broker_key
                and a.due_ns < g.until_ns and a.response_start_ns >= g.until_ns""",
        paused=f"""
            select cluster, broker_key, min(broker) as broker, max(known_id) as broker_id, min(since_ns) as since_ns,
                until_ns, max(until_ns - since_ns) as paused_ns,
                count(distinct concat_ws(' ', client, host)) as clients, count(*) as waiting
            from waits
            where until_ns - since_ns >= {least_ns} and response_start_ns <= until_ns + {TOGETHER_NS}
            group by cluster, broker_key, last_ns, until_ns
            having count(distinct concat_ws(' ', client, host)) >= {limits.paused_clients_min}
                and max(until_ns - since_ns) < {limits.silent_s * 1e9:.0f}""",
        elsewhere=f"""
            select distinct p.cluster, p.broker_key, p.until_ns, true as is_shared
            from paused p join asking a on p.cluster is not distinct from a.cluster and p.broker_key != a.broker_key
                and a.due_ns < p.until_ns
                and least(a.response_start_ns, p.until_ns) - greatest(a.due_ns, p.since_ns) >= {half_ns}""",
        answer="""
            select p.cluster, p.broker, p.broker_id, p.paused_ns, p.clients, p.waiting,
                cast(floor(p.since_ns / 1e3) as bigint) as first_us, cast(floor(p.until_ns / 1e3) as bigint) as last_us
            from paused p left join elsewhere e on p.cluster is not distinct from e.cluster
                and p.broker_key = e.broker_key and p.until_ns = e.until_ns
            where e.is_shared is null
            order by p.paused_ns desc, p.cluster nulls first, p.broker, first_us""",
    )


def judge_pause(row: Pause, limits: Limits) -> Iterator[Finding]:
    yield found(
        "broker_paused",
        severity(limits, stood_still_ns=row.paused_ns),
        row.paused_ns / 60e9,
        row.cluster,
        broker_name(row.broker, row.broker_id),
        {"broker": row.broker, "broker_id": row.broker_id},
        (row.first_us, row.last_us),
        {"paused_ns": row.paused_ns, "clients": row.clients, "waiting": row.waiting},
    )


PROBES = (
    Probe(("all_brokers_silent",), ("exchanges",), silences, Silence, judge_silence),
    Probe(("broker_paused",), ("exchanges",), pauses, Pause, judge_pause),
)
