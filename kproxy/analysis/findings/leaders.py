"""Findings about partitions that an outage moved to another leader, and that did not move back.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.finding import NOTE, Finding, Probe, Tables, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.lags.ends import OF, same


class Away(NamedTuple):
    """Partitions of which a broker lost the leadership when it left their ISR, and did not get it back in their ISR."""

    cluster: str | None
    broker_id: int
    partitions: int
    led: int  # all that it led at any time
    leads: str  # how many partitions each broker leads by the last report of each
    first_us: int
    last_us: int


def away(tables: Tables, limits: Limits) -> Frame:
    """Rows of Away, those of most partitions first."""
    return ask(
        {"leadership": tables["leadership"]},
        turns=f"""
            select {OF}, time_ns, change, leader, isr, lag(leader) over (partition by {OF} order by time_ns) as former,
                row_number() over (partition by {OF} order by time_ns desc) as place
            from leadership where isr is not null""",
        last="select * from turns where place = 1 and change != 'deleted' and leader >= 0",
        lost=f"""
            select {OF}, former, min(time_ns) as lost_ns from turns
            where former >= 0 and leader >= 0 and leader != former and not array_contains(isr, former)
            group by {OF}, former""",
        moved=f"""
            select l.cluster, l.former as broker_id, count(*) as partitions, min(l.lost_ns) as first_ns,
                max(n.time_ns) as last_ns
            from lost l join last n on {same("l", "n")}
                and n.leader != l.former and array_contains(n.isr, l.former)
            group by l.cluster, l.former""",
        ever=f"select distinct {OF}, leader from turns where leader >= 0",
        led="select cluster, leader, count(*) as led from ever group by cluster, leader",
        leads="select cluster, leader, count(*) as partitions from last group by cluster, leader",
        spread="""
            select cluster, array_join(array_sort(collect_list(concat(cast(partitions as string), ' by broker ',
                cast(leader as string)))), ', ') as leads
            from leads group by cluster""",
        answer=f"""
            select m.cluster, m.broker_id, m.partitions, e.led, s.leads,
                cast(floor(first_ns / 1e3) as bigint) as first_us, cast(floor(last_ns / 1e3) as bigint) as last_us
            from moved m join led e on m.cluster is not distinct from e.cluster and m.broker_id = e.leader
            join spread s on m.cluster is not distinct from s.cluster
            where m.partitions > {limits.leaders_away_share} * e.led
            order by m.partitions desc, m.cluster nulls first, m.broker_id""",
    )


def judge_away(row: Away, limits: Limits) -> Iterator[Finding]:
    yield found(
        "leaders_away",
        NOTE,
        row.partitions / 1e3,
        row.cluster,
        f"broker {row.broker_id}",
        {"broker_id": row.broker_id},
        (row.first_us, row.last_us),
        {
            "partitions": row.partitions,
            "led": row.led,
            "leads": row.leads,
            "last_told_ns": row.last_us * 1000,
        },
    )


PROBES = (Probe(("leaders_away",), ("leadership",), away, Away, judge_away),)
