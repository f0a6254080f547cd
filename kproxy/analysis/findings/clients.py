"""Findings about clients: quotas, protocol versions that a newer Kafka drops, connections that come and go.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, Probe, Tables, at, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.parties import served_by
from kproxy.analysis.questions.pieces import CONNECTED, GROUPS, SOFTWARE, SPOKE, of_clients
from kproxy.protocol.schema import schema, served_versions
from kproxy.wording import few

_QUOTAS = {  # the quota that throttles an API; all others: request_percentage
    "Produce": "producer_byte_rate (or request_percentage)",
    "Fetch": "consumer_byte_rate (or request_percentage)",
    **dict.fromkeys(("CreateTopics", "CreatePartitions", "DeleteTopics"), "controller_mutation_rate"),
}


class Throttled(NamedTuple):
    """Answers of an API to a client that is over a quota."""

    cluster: str | None
    client: str | None
    api: str
    answers: int
    throttled: int
    throttle_ms: int
    max_throttle_ms: int | None
    first_us: int  # of throttled answers
    last_us: int
    span_us: int  # from the first to the last answer of that client and API, over all its connections


def throttled(tables: Tables, limits: Limits) -> Frame:
    """Rows of Throttled, the most throttled first, up to the end of the last throttle.

    Brokers that answer at once do not read the connection until the throttle ends; older ones delay the answer.
    """
    over_us = """greatest(unix_micros(`time`) + cast(throttle_ms as bigint) * 1000,
        coalesce(cast(floor(response_end_ns / 1e3) as bigint), 0))"""
    return ask(
        {"exchanges": tables["exchanges"]},
        each_one=f"""
            select source, connection, cluster, {GROUPS["client"]} as client, api, count(*) as answers,
                count_if(throttle_ms > 0) as throttled, sum(throttle_ms) as throttle_ms,
                max(throttle_ms) as max_throttle_ms,
                min(case when throttle_ms > 0 then unix_micros(`time`) end) as first_us,
                max(case when throttle_ms > 0 then {over_us} end) as last_us,
                max(unix_micros(`time`) + coalesce(total_ns, 0) / 1e3) - min(unix_micros(`time`)) as span_us
            from exchanges where outcome = 'answered' and {of_clients(False)}
            group by source, connection, cluster, {GROUPS["client"]}, api""",
        answer=f"""
            select cluster, client, api, sum(answers) as answers, sum(throttled) as throttled,
                sum(throttle_ms) as throttle_ms, max(max_throttle_ms) as max_throttle_ms, min(first_us) as first_us,
                max(last_us) as last_us, cast(sum(span_us) as bigint) as span_us
            from each_one group by cluster, client, api having sum(throttled) >= {limits.throttled_min}
            order by throttle_ms desc, cluster nulls first, client nulls first, api""",
    )


def judge_throttled(row: Throttled, limits: Limits) -> Iterator[Finding]:
    share = row.throttled / row.answers
    if row.throttled < limits.throttled_min or share < limits.throttled_share:
        return
    of_time = row.throttle_ms * 1000 / row.span_us if row.span_us else 0.0
    quota = _QUOTAS.get(row.api, "request_percentage")
    yield found(
        "throttled",
        WARNING if of_time >= limits.throttled_time_share else NOTE,
        min(of_time, 1.0) / 4,  # of one client: less than an outage of a broker that has consequences as grave
        row.cluster,
        at(row.client, row.api),
        {"client": row.client, "api": row.api},
        (row.first_us, row.last_us),
        {
            "throttled": row.throttled,
            "answers": row.answers,
            "throttled_share": share,
            "throttle_ms": row.throttle_ms,
            "max_throttle_ms": row.max_throttle_ms,
            "of_connections_time_share": of_time if of_time <= 1 else None,
        },
        f"Raise {quota} of this client or its user with kafka-configs --alter --add-config, or have it send and ask "
        "less (compression.type, batch.size, fetch.min.bytes).",
    )


class OldVersions(NamedTuple):
    """API versions of a client that the newest release does not serve.

    If no client in the cluster used a version that the release serves, old brokers may be the reason: all such clients
    are one row.
    """

    cluster: str | None
    client: str | None  # None: several
    clients: int
    apis: str  # "Produce v3, Fetch v4"
    requests: int
    software: str | None
    offered: int  # those of these APIs with another client that used a version which the release serves
    hosts: int  # 0: not known
    first_us: int
    last_us: int


def newest() -> str:
    """The newest release of Kafka that kproxy knows."""
    return list(served_versions())[-1]


def old_versions(tables: Tables, limits: Limits) -> Frame:
    """Rows of OldVersions by client, the most requests first. APIs that kproxy does not know are left out."""
    known = ", ".join(map(str, sorted(schema().apis)))
    bounds = ", ".join(f"({key}, {first}, {last})" for key, first, last in served_by(newest())[1])
    return ask(
        {"exchanges": tables["exchanges"], "connections": tables["connections"]},
        software=SOFTWARE,
        # By connection first: so few rows are joined.
        each_one=f"""
            select source, connection, cluster, {GROUPS["client"]} as client, client_address, api_key, api,
                max(api_version) as highest, count(*) as requests,
                min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us
            from exchanges
            where api_version is not null and api_key in ({known}) and api != 'WriteTxnMarkers' and {of_clients(False)}
            group by source, connection, cluster, {GROUPS["client"]}, client_address, api_key, api""",
        used="""
            select e.cluster, client, nullif(s.software, '') as software, api_key, api,
                max(highest) as highest, sum(requests) as requests, count(distinct client_address) as hosts,
                min(first_us) as first_us, max(last_us) as last_us
            from each_one e left join software s on e.source = s.source and e.connection = s.connection
            group by e.cluster, client, nullif(s.software, ''), api_key, api""",
        judged=f"""
            select u.*, b.served_from, max(u.highest) over (partition by u.cluster, u.api_key) as met
            from used u left join (values {bounds}) as b(served_key, served_from, served_to)
                on u.api_key = b.served_key""",
        dropped="""
            select *, max(case when coalesce(met >= served_from, false) then 1 else 0 end)
                over (partition by cluster, client) as is_offered
            from judged where served_from is null or highest < served_from""",
        whose="""
            select *, case when is_offered = 1 then client end as named from dropped""",
        each_api="""
            select cluster, named, api, max(highest) as highest, sum(requests) as requests, max(software) as software,
                max(case when coalesce(met >= served_from, false) then 1 else 0 end) as offered, max(hosts) as hosts,
                min(first_us) as first_us, max(last_us) as last_us
            from whose group by cluster, named, api""",
        counted="""
            select cluster, named, count(distinct client) as clients, min(client) as one from whose
            group by cluster, named""",
        answer="""
            select a.cluster, coalesce(a.named, case when max(n.clients) = 1 then max(n.one) end) as client,
                max(n.clients) as clients,
                array_join(array_sort(collect_list(concat(api, ' v', cast(highest as string)))), ', ') as apis,
                sum(requests) as requests, max(software) as software, sum(offered) as offered, max(hosts) as hosts,
                min(first_us) as first_us, max(last_us) as last_us
            from each_api a join counted n
                on a.cluster is not distinct from n.cluster and a.named is not distinct from n.named
            group by a.cluster, a.named
            order by requests desc, a.cluster nulls first, a.named nulls first""",
    )


def judge_old_versions(row: OldVersions, limits: Limits) -> Iterator[Finding]:
    shown = few(row.apis.split(", "), 4)
    yield found(
        "old_versions",
        WARNING if row.offered else NOTE,  # else old brokers may be the reason
        row.requests / 1e5,
        row.cluster,
        at(row.client) if row.client or not row.clients else f"{row.clients} clients",
        {"client": row.client},
        (row.first_us, row.last_us),
        {
            "apis": shown,
            "requests": row.requests,
            "kafka": newest(),
            "software": row.software,
            "newer_seen": row.offered,
            "hosts": row.hosts or None,
        },
        None
        if row.offered
        else "First upgrade the brokers to the newest release that still serves these versions: no client of this "
        "cluster was seen to speak newer ones, so the brokers may be too old for them. Then upgrade the client, if it "
        "still speaks them.",
    )


class Churning(NamedTuple):
    """Connections of a client that began while it was watched."""

    cluster: str | None
    client: str | None
    connections: int
    requests: int | None
    life_p50_ns: int | None
    resets: int | None
    hosts: int
    first_us: int
    last_us: int
    life_mean_ns: int | None = None  # if the lifetimes of single connections are unknown


def churning(tables: Tables, limits: Limits) -> Frame:
    """Rows of Churning, by client, those with the most connections first."""
    return ask(
        {"exchanges": tables["exchanges"], "connections": tables["connections"]},
        clients=f"""
            select source, connection, max({GROUPS["client"]}) as client from exchanges group by source, connection""",
        answer=f"""
            select n.cluster, coalesce(c.client, n.client_address) as client, count(*) as connections,
                sum(requests) as requests,
                percentile_approx(end_ns - start_ns, 0.5, 10000) as life_p50_ns, count_if(close = 'reset') as resets,
                count(distinct n.client_address) as hosts,
                min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us
            from connections n left join clients c on n.source = c.source and n.connection = c.connection
            where coalesce(start_seen, true) and {CONNECTED} and {SPOKE}
            group by n.cluster, coalesce(c.client, n.client_address)
            having count(*) >= {limits.connections_min}
            order by connections desc, n.cluster nulls first, client nulls first""",
    )


def judge_churning(row: Churning, limits: Limits) -> Iterator[Finding]:
    span_us = row.last_us - row.first_us
    per_minute = (row.connections - 1) * 6e7 / max(span_us, 1_000_000)
    life_ns = row.life_mean_ns if row.life_p50_ns is None else row.life_p50_ns
    is_short = life_ns is not None and life_ns < limits.short_connection_s * 1e9
    if per_minute < limits.connections_per_minute or not is_short:
        return
    yield found(
        "connection_churn",
        WARNING,
        per_minute / 10_000,
        row.cluster,
        at(row.client),
        {"client": row.client},
        (row.first_us, row.last_us),
        {
            "connections": row.connections,
            "per_minute": per_minute,
            "life_p50_ns": row.life_p50_ns,
            "life_mean_ns": row.life_mean_ns,
            "requests_per_connection": None if row.requests is None else row.requests / row.connections,
            "resets": row.resets,
            "hosts": row.hosts or None,
        },
    )


PROBES = (
    Probe(("throttled",), ("exchanges",), throttled, Throttled, judge_throttled),
    Probe(("old_versions",), ("exchanges", "connections"), old_versions, OldVersions, judge_old_versions),
    Probe(("connection_churn",), ("exchanges", "connections"), churning, Churning, judge_churning),
)
