"""Findings about consumers: fetches for nothing, commits for every record, members without fetches, growing lag.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, Probe, Tables, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.lags import TABLES as OF_LAG
from kproxy.analysis.lags import group_lag_while_active
from kproxy.analysis.lags.brought import ONCE, brought
from kproxy.analysis.lags.brought import TABLES as OF_FETCHES
from kproxy.analysis.questions.pieces import (
    GROUPS,
    STEP,
    STEP_TIMES,
    TOPIC,
    at_last,
    ns,
    of_clients,
    of_exchanges,
    stretches,
)


class Fetched(NamedTuple):
    """Fetches of a client whose answers were read; `active_s` as in Produced, of all its connections together."""

    cluster: str | None
    client: str | None
    fetches: int
    empty: int
    hasty: int  # empty ones that were answered before half of their max_wait_ms
    size: int | None  # bytes of responses with records
    records: int | None
    max_wait_ms: int | None
    active_s: float | None
    connections: int
    first_us: int
    last_us: int


def fetched(tables: Tables, limits: Limits) -> Frame:
    """Rows of Fetched, by client, those with the most fetches first."""
    return ask(
        {"exchanges": tables["exchanges"]},
        each_one=f"""
            select source, connection, cluster, {GROUPS["client"]} as client, count(*) as fetches,
                count_if(records = 0) as empty,
                count_if(records = 0 and latency_ns < {ns("max_wait_ms")} / 2) as hasty,
                sum(case when records > 0 then response_bytes end) as bytes, sum(records) as records,
                max(max_wait_ms) as max_wait_ms,
                min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us
            from exchanges
            where api in ('Fetch', 'ShareFetch') and outcome = 'answered' and coalesce(errors, 0) = 0
                and records is not null and {of_clients(False)}
            group by source, connection, cluster, {GROUPS["client"]}""",
        answer=f"""
            select cluster, client, sum(fetches) as fetches, sum(empty) as empty, sum(hasty) as hasty,
                sum(bytes) as bytes, sum(records) as records, max(max_wait_ms) as max_wait_ms,
                sum(last_us - first_us) / 1e6 as active_s, count(*) as connections,
                min(first_us) as first_us, max(last_us) as last_us
            from each_one group by cluster, client having sum(fetches) >= {limits.fetches_min}
            order by fetches desc, cluster nulls first, client nulls first""",
    )


def judge_fetched(row: Fetched, limits: Limits) -> Iterator[Finding]:
    where, place = f"client {clean(row.client)}", {"client": row.client}
    times = row.first_us, row.last_us
    active_s = row.active_s or 0.0
    empty_rate = row.empty / active_s if active_s else 0.0
    share = row.empty / row.fetches
    if share >= limits.empty_share and empty_rate >= limits.empty_rate:
        evidence = {
            "fetches": row.fetches,
            "empty": row.empty,
            "empty_share": share,
            "rate_per_s": empty_rate,
            "hasty": row.hasty,
            "max_wait_ms": row.max_wait_ms,
            "connections": row.connections,
        }
        yield found("empty_fetches", WARNING, empty_rate / 1000, row.cluster, where, place, times, evidence)
    full = row.fetches - row.empty
    rate = full / active_s if active_s else 0.0
    if (
        full >= limits.fetches_min
        and (row.size or 0) / full < limits.tiny_fetch_bytes
        and rate >= limits.tiny_fetch_rate
    ):
        evidence = {
            "fetches": full,
            "bytes_per_fetch": (row.size or 0) / full,
            "records_per_fetch": (row.records or 0) / full,
            "rate_per_s": rate,
            "connections": row.connections,
        }
        yield found("tiny_fetches", NOTE, rate / 1000, row.cluster, where, place, times, evidence)


class Committed(NamedTuple):
    """Commits of a group."""

    cluster: str | None
    group_id: str
    commits: int
    active_s: float | None
    connections: int
    client: str | None
    first_us: int
    last_us: int


def committed(tables: Tables, limits: Limits) -> Frame:
    """Rows of Committed, by group, those with the most commits first."""
    return ask(
        {"exchanges": tables["exchanges"]},
        each_one=f"""
            select source, connection, cluster, group_id, count(*) as commits, max({GROUPS["client"]}) as client,
                min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us
            from exchanges where api = 'OffsetCommit' and group_id is not null
            group by source, connection, cluster, group_id""",
        answer=f"""
            select cluster, group_id, sum(commits) as commits, sum(last_us - first_us) / 1e6 as active_s,
                count(*) as connections, max(client) as client, min(first_us) as first_us, max(last_us) as last_us
            from each_one group by cluster, group_id having sum(commits) >= {limits.commits_min}
            order by commits desc, cluster nulls first, group_id""",
    )


def judge_committed(row: Committed, limits: Limits) -> Iterator[Finding]:
    rate = row.commits / row.active_s if row.active_s else 0.0
    if rate < limits.commit_rate:
        return
    yield found(
        "commit_storm",
        WARNING,
        rate / 1000,
        row.cluster,
        f"group {row.group_id}",
        {"group_id": row.group_id, "client": row.client},
        (row.first_us, row.last_us),
        {"commits": row.commits, "rate_per_s": rate, "connections": row.connections, "client": row.client},
    )


class StoppedFetching(NamedTuple):
    """A member of a group that sends heartbeats, and neither fetches nor commits further offsets any more."""

    cluster: str | None
    client: str | None
    host: str
    group_id: str
    heartbeats: int  # since its last Fetch
    fetch_us: int  # the last one
    beat_us: int
    progress_us: int | None  # the last commit of an offset above all before it; None: it commits none


def stopped_fetching(tables: Tables, limits: Limits) -> Frame:
    """Rows of StoppedFetching, the longest silence first.

    Three kinds of members are left out. A SyncGroup after the last Fetch may have moved the partitions. A client id
    that several groups use on one host does not show whose fetches stopped. A member that commits further offsets
    processes records that it fetched before.
    """
    client = GROUPS["client"]
    return ask(
        {"exchanges": tables["exchanges"], "partitions": tables["partitions"]},
        fetched=f"""
            select cluster, {client} as client, client_address as host, max(unix_micros(`time`)) as fetch_us
            from exchanges where api = 'Fetch' and {of_clients(False)}
            group by cluster, {client}, client_address""",
        asked=f"""
            select cluster, {client} as client, client_address as host, api, group_id, unix_micros(`time`) as us,
                api = 'Heartbeat' and outcome = 'answered' and coalesce(errors, 0) = 0 as is_beat
            from exchanges where api in ('Heartbeat', 'SyncGroup')""",
        committed=f"""
            select e.cluster, {client} as client, client_address as host, {TOPIC} as topic, p.`partition`, p.`offset`,
                unix_micros(e.`time`) as us
            from partitions p join exchanges e
                on p.source = e.source and p.connection = e.connection and p.`number` = e.`number`
            where p.api = 'OffsetCommit' and p.direction = 'request' and p.`offset` >= 0""",
        furthest="""
            select cluster, client, host, topic, `partition`, max(`offset`) as `offset` from committed
            group by cluster, client, host, topic, `partition`""",
        reached="""
            select c.cluster, c.client, c.host, c.topic, c.`partition`, min(c.us) as us
            from committed c join furthest f on c.cluster is not distinct from f.cluster and c.client = f.client
                and c.host = f.host and c.topic = f.topic and c.`partition` = f.`partition` and c.`offset` = f.`offset`
            group by c.cluster, c.client, c.host, c.topic, c.`partition`""",
        progress="""
            select cluster as of_cluster, client as of_client, host as of_host, max(us) as progress_us
            from reached group by cluster, client, host""",
        members="""
            select a.cluster, a.client, a.host, min(group_id) as group_id, count(distinct group_id) as `groups`,
                max(case when api = 'SyncGroup' and group_id is not null then us end) as sync_us,
                count_if(is_beat and us > fetch_us) as heartbeats, fetch_us,
                max(case when is_beat and us > fetch_us then us end) as beat_us
            from asked a
                join fetched f on a.cluster is not distinct from f.cluster and a.client = f.client and a.host = f.host
            group by a.cluster, a.client, a.host, fetch_us""",
        answer=f"""
            select cluster, client, host, group_id, heartbeats, fetch_us, beat_us, progress_us
            from members left join progress
                on cluster is not distinct from of_cluster and client = of_client and host = of_host
            where `groups` = 1 and coalesce(sync_us < fetch_us, true)
                and beat_us - fetch_us >= {limits.stopped_fetching_s * 1e6:.0f}
                and coalesce(beat_us - progress_us >= {limits.stopped_fetching_s * 1e6:.0f}, true)
            order by beat_us - fetch_us desc, cluster nulls first, client, host""",
    )


def judge_stopped_fetching(row: StoppedFetching, limits: Limits) -> Iterator[Finding]:
    # A member that prefetches fetches on for a while after it processed its last record.
    stopped_us = row.fetch_us if row.progress_us is None else min(row.fetch_us, row.progress_us)
    yield found(
        "stopped_fetching",
        WARNING,
        (row.beat_us - row.fetch_us) / 300e6,
        row.cluster,
        f"client {clean(row.client)}, group {clean(row.group_id)}",
        {"client": row.client, "group_id": row.group_id, "host": row.host},
        (stopped_us, row.beat_us),
        {
            "last_fetch_ns": row.fetch_us * 1000,
            "last_progress_ns": None if row.progress_us is None else row.progress_us * 1000,
            "silent_ns": (row.beat_us - row.fetch_us) * 1000,
            "heartbeats": row.heartbeats,
        },
    )


# Twice auto.commit.interval.ms: between two commits a group that keeps up is behind by as much as is written meanwhile.
_COMMITTED_SOON_NS = 10_000_000_000
_TOGETHER_US = 5_000_000  # one assignment: fetches of its partitions begin within this


GROUP_LAGS = "group_lags"  # the name of the shared frame of `group_lag_while_active`


class Lagging(NamedTuple):
    """Lag of a client or a group in a topic, all of its partitions together.

    first_records is the lag of the compared_partitions at one moment, and compared_records is their last one, active_us
    later. The moment is `compared_us` of `group_lag_while_active` for a group, and the first fetch of those partitions
    for a client, without pauses between captures. last_lag_ns is the age of the newest fetched record for a client, and
    the maximum age of the first uncommitted record for a group. If the lag of some partitions is unknown,
    records are a lower bound for that reason. silent_us: a group's time without a request until the end, if nobody left
    it and it was longer than a restart; None: the lag is that at its last request. left_us: when its last member left,
    if it did, and end_records: the lag at the end of the tables.
    """

    cluster: str | None
    client: str | None
    topic: str | None
    partitions: int
    fetches: int
    first_records: int
    last_records: int
    max_records: int
    last_lag_ns: int | None
    first_us: int
    last_us: int
    active_us: int
    by: str = "client"  # or group: whose lag it is
    unknown_partitions: int = 0
    unknown: str | None = None
    silent_us: int | None = None
    compared_partitions: int | None = None
    compared_records: int | None = None
    left_us: int | None = None
    end_records: int | None = None
    names: Sequence[str] = ()  # of a group's clients


def lagging(tables: Tables, limits: Limits) -> Frame:
    """Rows of Lagging, the largest increase of lag first; without fetches of unknown lag.

    A client may begin to fetch partitions at different times. Only partitions that it began to fetch at the same time
    are compared: those with most of the lag. Partitions that it fetches no longer belong to another client.
    """
    whose = ("cluster", "client", "topic")
    own = ", ".join(whose)
    is_compared = f"h.first_us between c.from_us and c.from_us + {_TOGETHER_US}"
    same = " and ".join(f"p.{key} is not distinct from s.{key}" for key in whose)
    return ask(
        {name: tables[name] for name in OF_FETCHES},
        once=(*ONCE, "parts", "stretched", "stretches"),
        **brought(),
        known="select * from brought where lag_records is not null",
        ours=of_exchanges("known", ("Fetch",), False),
        parts=f"""
            select cluster, client, {TOPIC} as topic, `partition`, {STEP} as step, {STEP_TIMES}, count(*) as fetches,
                {at_last("lag_records", "min_by")} as first_lag, {at_last("lag_records")} as last_lag,
                max(lag_records) as max_lag, {at_last("lag_ns")} as last_lag_ns
            from ours group by cluster, client, {TOPIC}, `partition`, {STEP}""",
        **stretches("parts", whose),
        pieces=f"""
            select p.cluster, p.client, p.topic, p.`partition`, s.stretch, sum(p.fetches) as fetches,
                min_by(p.first_lag, p.step) as first_lag, max_by(p.last_lag, p.step) as last_lag,
                max(p.max_lag) as max_lag, max_by(p.last_lag_ns, p.step) as last_lag_ns,
                min(p.first_us) as first_us, max(p.last_us) as last_us
            from parts p join stretched s on {same} and p.step = s.step
            group by p.cluster, p.client, p.topic, p.`partition`, s.stretch""",
        grown="""
            select cluster, client, topic, `partition`, sum(fetches) as fetches, sum(last_lag - first_lag) as grown,
                max_by(last_lag, stretch) as last_lag, max(max_lag) as max_lag,
                max_by(last_lag_ns, stretch) as last_lag_ns, max_by(first_us, stretch) as first_us,
                max(last_us) as last_us
            from pieces group by cluster, client, topic, `partition`""",
        ended=f"select *, max(last_us) over (partition by {own}) as end_us from grown",
        held=f"""
            select *, sum(last_lag) over (partition by {own} order by first_us
                range between current row and {_TOGETHER_US} following) as lag_together
            from ended where last_lag = 0 or last_us >= end_us - {limits.stopped_fetching_s * 1e6:.0f}""",
        chosen=f"""
            select {own}, max_by(first_us, named_struct('l', lag_together, 't', -first_us)) as from_us
            from held group by {own}""",
        spans=f"""
            select {own}, min(first_us) as first_us, max(last_us) as last_us, max_by(first_us, stretch) as begun_us,
                sum(last_us - first_us) as active_us
            from stretches group by {own}""",
        summed=f"""
            select h.cluster, h.client, h.topic, count(*) as partitions, sum(fetches) as fetches,
                sum(case when {is_compared} then last_lag - grown end) as first_records, sum(last_lag) as last_records,
                sum(max_lag) as max_records, max(last_lag_ns) as last_lag_ns, max(c.from_us) as from_us,
                count(case when {is_compared} then last_lag end) as compared_partitions,
                sum(case when {is_compared} then last_lag end) as compared_records
            from held h join chosen c on {same.replace("p.", "h.").replace("s.", "c.")}
            group by h.cluster, h.client, h.topic
            having sum(case when {is_compared} then grown end) >= {limits.lag_records_min}""",
        answer=f"""
            select p.cluster, p.client, p.topic, partitions, fetches, first_records, last_records, max_records,
                last_lag_ns, first_us, last_us, active_us - greatest(from_us - begun_us, 0) as active_us,
                'client' as `by`, 0 as unknown_partitions, cast(null as string) as `unknown`,
                cast(null as bigint) as silent_us, compared_partitions, compared_records
            from summed p join spans s on {same}
            order by last_records desc, p.cluster nulls first, p.client nulls first, p.topic nulls first""",
    )


def lagging_groups(tables: Tables, limits: Limits) -> Frame:
    """Rows of Lagging by group: records between its committed offset and the end of the log, the largest lag first.

    The lag is that at the group's last request: later lag is not evidence about consumers that have stopped.
    """
    return ask(
        {"lags": tables[GROUP_LAGS], "exchanges": tables["exchanges"]},
        clients=f"""
            select distinct cluster, group_id, {GROUPS["client"]} as client from exchanges
            where group_id is not null""",
        named="""
            select cluster, group_id, array_sort(collect_list(client)) as names from clients
            group by cluster, group_id""",
        groups=f"""
            select cluster, group_id as client, topic, count(*) as partitions, sum(commits) as fetches,
                sum(compared_first_records) as first_records,
                sum(least_lag_records) as last_records,
                sum(max_lag_records) as max_records, max(behind_ns) as last_lag_ns,
                min(unix_micros(first_commit)) as first_us,
                max(least(unix_micros(end_seen), until_us)) as last_us,
                max(least(unix_micros(end_seen), until_us)) - min(compared_us) as active_us,
                'group' as `by`,
                count_if(lag_records is null) as unknown_partitions,
                max(case when lag_records is null then `unknown` end) as `unknown`, max(silent_us) as silent_us,
                count(compared_first_records) as compared_partitions,
                sum(case when compared_first_records is not null then least_lag_records end) as compared_records,
                max(left_us) as left_us, sum(end_lag_records) as end_records
            from lags where committed_offset is not null and first_commit is not null
            group by cluster, group_id, topic
            having sum(least_lag_records) >= {limits.lag_records_min} and sum(growth_per_s) > 0
                and count(compared_first_records) > 0""",
        answer="""
            select g.*, n.names from groups g left join named n
                on g.cluster is not distinct from n.cluster and g.client = n.group_id
            order by last_records desc, g.cluster nulls first, g.client, topic nulls first""",
    )


def judge_lagging(row: Lagging, limits: Limits) -> Iterator[Finding]:
    span_us = row.active_us
    if span_us < limits.lag_span_s * 1e6 or row.last_records < limits.lag_records_min:
        return
    if row.by == "group" and row.last_lag_ns is not None and row.last_lag_ns < _COMMITTED_SOON_NS:
        return
    compared = row.last_records if row.compared_records is None else row.compared_records
    growth = compared - row.first_records
    # A large lag grows by a small factor: then it counts by how fast it grows.
    is_fast = growth >= 0.1 * row.first_records and growth >= limits.lag_growth_per_s * span_us / 1e6
    has_grown = compared >= limits.lag_growth * row.first_records or is_fast
    if not has_grown or row.last_records < 0.9 * row.max_records:  # it was higher: it catches up
        return
    yield found(
        "growing_lag",
        WARNING,
        row.last_records / 1e6,
        row.cluster,
        f"{row.by} {clean(row.client)}, topic {clean(row.topic)}",
        {
            "group_id" if row.by == "group" else "client": row.client,
            "topic": row.topic,
            **({"clients": row.names} if row.names else {}),
        },
        (row.first_us, row.last_us),
        {
            "first_lag_records": row.first_records,
            "compared_lag_records": compared,
            "compared_partitions": row.compared_partitions if row.compared_partitions != row.partitions else None,
            "last_lag_records": row.last_records,
            "span_ns": span_us * 1000,
            "growth_per_s": growth / (span_us / 1e6),
            "last_lag_ns": row.last_lag_ns,
            "partitions": row.partitions or None,
            "unknown_partitions": row.unknown_partitions or None,
            "unknown": row.unknown,
            "no_request_ns": None if row.silent_us is None else row.silent_us * 1000,
            "left_ns": None if row.left_us is None else row.left_us * 1000,
            "end_lag_records": None if row.left_us is None else row.end_records,
        },
    )


PROBES = (
    Probe(("empty_fetches", "tiny_fetches"), ("exchanges",), fetched, Fetched, judge_fetched),
    Probe(("commit_storm",), ("exchanges",), committed, Committed, judge_committed),
    Probe(
        ("stopped_fetching",), ("exchanges", "partitions"), stopped_fetching, StoppedFetching, judge_stopped_fetching
    ),
    Probe(("growing_lag",), OF_FETCHES, lagging, Lagging, judge_lagging),
    Probe(
        ("growing_lag",),
        OF_LAG,
        lagging_groups,
        Lagging,
        judge_lagging,
        {GROUP_LAGS: lambda tables: group_lag_while_active(*(tables[name] for name in OF_LAG))},
    ),
)
