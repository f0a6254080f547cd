"""Findings about topics that were deleted while clients used them. Refuses to know engines, and how findings look."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import REFUSED
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import Finding, Probe, Tables, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, KEYS, literal, of_clients

_NEAR_NS = 5_000_000_000  # metadata.max.age.ms aside, clients that are refused learn of a deletion at once


class Deleted(NamedTuple):
    """A topic that a client had written or read when it was deleted, and that clients asked for afterwards."""

    cluster: str | None
    topic: str
    refused: int  # requests
    names: Sequence[str]  # of their clients
    deleted_by: str | None  # where its DeleteTopics was seen
    first_us: int
    last_us: int


def deleted(tables: Tables, limits: Limits) -> Frame:
    """Rows of Deleted, those with the most requests refused first."""
    unknown = ", ".join(map(literal, REFUSED["unknown_topic"]))
    same = " and ".join(f"e.{key} = p.{key}" for key in KEYS)
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "topology", "changes")},
        gone="""
            select cluster, topic, max(time_ns) as gone_ns from topology
            where kind = 'topic' and change = 'gone' group by cluster, topic""",
        asked="""
            select cluster, resource_name as topic, min(unix_micros(`time`)) as us,
                min(concat_ws(', host ', client_id, client_address)) as deleted_by
            from changes where api = 'DeleteTopics' and answered and coalesce(error, 'NONE') = 'NONE'
            group by cluster, resource_name""",
        responses=f"""
            select distinct {", ".join(f"p.{key}" for key in KEYS)}, g.cluster, g.topic, g.gone_ns,
                coalesce(p.error_code, 0) = 0 as is_served
            from gone g join partitions p
                on p.cluster is not distinct from g.cluster and coalesce(p.topic, p.topic_id) = g.topic
                and p.direction = 'response' and p.api in ('Produce', 'Fetch', 'OffsetCommit')
                and (coalesce(p.error_code, 0) = 0 or p.error in ({unknown}))""",
        used=f"""
            select p.cluster, p.topic, p.gone_ns, p.is_served, {GROUPS["client"]} as client,
                e.response_end_ns as at_ns
            from responses p join exchanges e on {same} where {of_clients(False)}""",
        by_client=f"""
            select cluster, topic, client, count(*) as refused, min(at_ns) as first_ns, max(at_ns) as last_ns
            from used where not is_served and at_ns >= gone_ns - {_NEAR_NS} group by cluster, topic, client""",
        refused="""
            select cluster, topic, sum(refused) as refused, array_sort(collect_list(client)) as names,
                min(first_ns) as first_ns, max(last_ns) as last_ns
            from by_client group by cluster, topic""",
        served="select distinct cluster, topic, true as was_used from used where is_served and at_ns <= gone_ns",
        answer=f"""
            select r.cluster, r.topic, r.refused, r.names, a.deleted_by,
                least(coalesce(a.us, 9e18), cast(floor(r.first_ns / 1e3) as bigint)) as first_us,
                cast(floor(r.last_ns / 1e3) as bigint) as last_us
            from refused r join served s on r.cluster is not distinct from s.cluster and r.topic = s.topic
            left join asked a on r.cluster is not distinct from a.cluster and r.topic = a.topic
            where r.refused >= {limits.refused_min}
            order by r.refused desc, r.cluster nulls first, r.topic""",
    )


def judge_deleted(row: Deleted, limits: Limits) -> Iterator[Finding]:
    yield found(
        "topic_deleted",
        severity(limits, failed=row.refused),
        row.refused / 1e4,
        row.cluster,
        f"topic {clean(row.topic)}",
        {"topic": row.topic, "clients": row.names},
        (int(row.first_us), row.last_us),
        {"refused": row.refused, "clients": len(row.names), "deleted_by": row.deleted_by},
    )


PROBES = (
    Probe(("topic_deleted",), ("exchanges", "partitions", "topology", "changes"), deleted, Deleted, judge_deleted),
)
