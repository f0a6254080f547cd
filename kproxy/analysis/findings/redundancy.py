"""Findings about topics that stand still whenever one broker stops, as they are set: no broker may be restarted.

An outage may be why they stood still this time; how they are set is a cause of its own, and outlives it. Refuses to
know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import REFUSED
from kproxy.analysis.findings.finding import WARNING, Finding, Probe, Tables, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import KEYS, literal

_ALONE = (
    "The only replica is the leader: give the topic a replication factor of 3 (kafka-reassign-partitions), and "
    "min.insync.replicas=2."
)


class NeedsAllReplicas(NamedTuple):
    """A topic whose writers need all of its replicas.

    Either it has one replica and was offline, or writes were refused while all replicas but one were in sync.
    """

    cluster: str | None
    topic: str
    replicas: int
    partitions: int
    failed: int  # writes that were refused with all replicas but one in sync
    offline_ns: int | None
    first_us: int
    last_us: int


def needing_all_replicas(tables: Tables, limits: Limits) -> Frame:
    """Rows of NeedsAllReplicas, those with the most writes refused first."""
    errors = ", ".join(map(literal, REFUSED["not_enough_replicas"]))
    same = " and ".join(f"e.{key} = p.{key}" for key in KEYS)
    return ask(
        {name: tables[name] for name in ("leadership", "exchanges", "partitions")},
        turns="""
            select *, lead(time_ns) over (partition by cluster, topic, `partition` order by time_ns) as next_ns
            from leadership where replicas is not null""",
        ends="select cluster as of_cluster, max(response_end_ns) as end_ns from exchanges group by cluster",
        lacking="""
            select cluster, topic, `partition`, size(replicas) as replicas, time_ns, next_ns from turns
            where isr is not null and size(replicas) > 1 and size(isr) = size(replicas) - 1""",
        refused=f"""
            select e.cluster, p.topic, p.`partition`, e.source, e.connection, e.`number`, e.response_end_ns as at_ns
            from (select * from partitions where api = 'Produce' and direction = 'response' and error in ({errors})) p
            join exchanges e on {same}""",
        # Earlier reports about replicas may be old: only partitions that certainly lack one count.
        few="""
            select r.cluster, r.topic, max(l.replicas) as replicas, count(distinct r.`partition`) as partitions,
                count(distinct concat_ws(' ', r.source, cast(r.connection as string), cast(r.`number` as string)))
                    as failed, min(r.at_ns) as first_ns, max(r.at_ns) as last_ns
            from refused r join lacking l on r.cluster is not distinct from l.cluster and r.topic = l.topic
                and r.`partition` = l.`partition` and r.at_ns >= l.time_ns
                and (l.next_ns is null or r.at_ns < l.next_ns)
            group by r.cluster, r.topic""",
        alone="""
            select t.cluster, t.topic, count(distinct t.`partition`) as partitions,
                max(coalesce(next_ns, greatest(end_ns, time_ns)) - time_ns) as offline_ns, min(time_ns) as first_ns,
                max(coalesce(next_ns, greatest(end_ns, time_ns))) as last_ns
            from turns t left join ends e on t.cluster is not distinct from e.of_cluster
            where change = 'offline' and size(replicas) = 1 group by t.cluster, t.topic""",
        every_one=f"""
            select cluster, topic, replicas, partitions, failed, cast(null as bigint) as offline_ns, first_ns, last_ns
            from few where failed >= {limits.refused_min}
            union all
            select cluster, topic, 1, partitions, 0, offline_ns, first_ns, last_ns from alone
            where offline_ns >= {limits.replicas_s * 1e9:.0f}""",
        answer="""
            select cluster, topic, replicas, partitions, failed, offline_ns,
                cast(floor(first_ns / 1e3) as bigint) as first_us, cast(floor(last_ns / 1e3) as bigint) as last_us
            from every_one order by failed desc, offline_ns desc, cluster nulls first, topic""",
    )


def judge_needs_all_replicas(row: NeedsAllReplicas, limits: Limits) -> Iterator[Finding]:
    yield found(
        "no_broker_may_stop",
        WARNING,
        0.9,  # `outages` counts the effect on users: this is the advice, before other warnings
        row.cluster,
        f"topic {clean(row.topic)}",
        {"topic": row.topic},
        (row.first_us, row.last_us),
        {
            "replicas": row.replicas,
            "partitions": row.partitions,
            "failed": row.failed or None,
            "offline_ns": row.offline_ns,
        },
        _ALONE if row.replicas == 1 else None,
    )


PROBES = (
    Probe(
        ("no_broker_may_stop",),
        ("leadership", "exchanges", "partitions"),
        needing_all_replicas,
        NeedsAllReplicas,
        judge_needs_all_replicas,
    ),
)
