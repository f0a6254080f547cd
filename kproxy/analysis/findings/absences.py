"""Findings about brokers that stopped before the capture began, so that the capture has no moment of their failure.

The capture shows only the address or the id of such a broker. Clients fail to connect to it from the beginning, and
Metadata names it no longer a while later; or Metadata never names it, though partitions have replicas on it. Failed
connects alone do not prove an absence: clients may be unable to reach a broker that runs. Refuses to know
engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import Finding, Probe, Tables, broker_name, found
from kproxy.analysis.findings.outages import DOUBT_NS
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import CONNECTED, FAILED_CONNECT, GROUPS

_AT_FIRST_NS = 2_000_000_000  # clients that miss a broker connect again after reconnect.backoff.max.ms (1 s)
_FIRST_METADATA_NS = 10_000_000_000  # until then a broker without an answer may have been there before


class Absent(NamedTuple):
    """A broker that was not there from the beginning on."""

    cluster: str | None
    broker_id: int
    broker: str | None  # its address
    absent_ns: int
    away_ns: int  # until the last failed connect, or the last Metadata without it
    is_back: bool  # else up to the end
    connects: int  # that failed meanwhile
    partitions: int  # whose ISR lacked it
    first_us: int
    last_us: int


def absent(tables: Tables, limits: Limits) -> Frame:
    """Rows of Absent, those of most partitions first."""
    same = "{0}.cluster is not distinct from {1}.cluster and {0}.broker_id = {1}.broker_id"
    return ask(
        {name: tables[name] for name in ("exchanges", "connections", "topology", "leadership")},
        span="""
            select cluster, min(unix_micros(`time`)) * 1000 as begin_ns, max(response_start_ns) as end_ns
            from exchanges group by cluster""",
        served="""
            select cluster, broker_id, min(response_start_ns) as served_ns from exchanges
            where broker_id is not null group by cluster, broker_id""",
        tried=f"""
            select cluster, broker_id, min({GROUPS["broker"]}) as broker,
                min(case when {FAILED_CONNECT} then start_ns end) as tried_ns,
                min(case when {CONNECTED} then start_ns end) as connected_ns
            from connections where broker_id is not null group by cluster, broker_id""",
        named="""
            select cluster, broker_id, min(case when change = 'appeared' then time_ns end) as named_ns,
                min(case when change = 'gone' then time_ns end) as gone_ns
            from topology where kind = 'broker' and broker_id is not null group by cluster, broker_id""",
        # The first report of each partition: a later one may be about a broker that fell behind.
        firsts="""
            select cluster, topic, `partition`, replicas, isr, time_ns from (
                select *, row_number() over (partition by cluster, topic, `partition` order by time_ns) as nth
                from leadership where isr is not null and replicas is not null) of_each
            where nth = 1""",
        placed="select cluster, explode(replicas) as broker_id, isr, time_ns from firsts",
        lacked="""
            select cluster, broker_id, min(time_ns) as told_ns from placed
            where not array_contains(isr, broker_id) group by cluster, broker_id""",
        known="""
            select cluster, broker_id from tried union select cluster, broker_id from lacked""",
        judged=f"""
            select k.cluster, k.broker_id, t.broker, s.begin_ns, s.end_ns,
                case when tried_ns <= begin_ns + {_AT_FIRST_NS} and (connected_ns is null or connected_ns > gone_ns)
                        and (served_ns is null or served_ns > gone_ns) then gone_ns
                    when told_ns <= begin_ns + {_FIRST_METADATA_NS} and (named_ns is null or named_ns > told_ns)
                        and (served_ns is null or served_ns > told_ns)
                        and (connected_ns is null or connected_ns > told_ns) then told_ns end as proven_ns,
                served_ns
            from known k join span s on k.cluster is not distinct from s.cluster
            left join served v on {same.format("k", "v")}
            left join tried t on {same.format("k", "t")}
            left join named n on {same.format("k", "n")}
            left join lacked l on {same.format("k", "l")}""",
        back=f"""
            select j.cluster, j.broker_id, min(t.time_ns) as named_ns from judged j join topology t
                on {same.format("j", "t")} and t.kind = 'broker' and t.change = 'appeared' and t.time_ns > j.proven_ns
            group by j.cluster, j.broker_id""",
        spans=f"""
            select j.*, coalesce(served_ns, b.named_ns) is not null as is_back,
                least(coalesce(served_ns, end_ns), coalesce(b.named_ns, end_ns)) as until_ns
            from judged j left join back b on {same.format("j", "b")} where proven_ns is not null""",
        refused=f"""
            select s.cluster, s.broker_id, count(*) as connects, max(c.start_ns) as vain_ns
            from spans s join connections c on {same.format("s", "c")} and c.start_ns <= s.until_ns and {FAILED_CONNECT}
            group by s.cluster, s.broker_id""",
        # Each Metadata lacks the broker between the first one without it and the first one that names it again.
        unlisted=f"""
            select s.cluster, s.broker_id, max(e.response_start_ns) as vain_ns from spans s join exchanges e
                on s.cluster is not distinct from e.cluster and e.api = 'Metadata' and e.outcome = 'answered'
                and e.response_start_ns >= s.proven_ns and e.response_start_ns < s.until_ns
            left join back b on {same.format("s", "b")}
            where b.named_ns is null or e.response_start_ns < b.named_ns
            group by s.cluster, s.broker_id""",
        thin="""
            select s.cluster, s.broker_id,
                count(distinct concat_ws(' ', topic, cast(`partition` as string))) as partitions
            from spans s join leadership l on s.cluster is not distinct from l.cluster and l.time_ns <= s.until_ns
                and array_contains(l.replicas, s.broker_id) and not array_contains(l.isr, s.broker_id)
            group by s.cluster, s.broker_id""",
        answer=f"""
            select s.cluster, s.broker_id, s.broker, until_ns - begin_ns as absent_ns,
                greatest(proven_ns, coalesce(r.vain_ns, proven_ns), coalesce(u.vain_ns, proven_ns)) - begin_ns
                    as away_ns, is_back,
                coalesce(connects, 0) as connects, coalesce(partitions, 0) as partitions,
                cast(floor(begin_ns / 1e3) as bigint) as first_us, cast(floor(until_ns / 1e3) as bigint) as last_us
            from spans s left join refused r on {same.format("s", "r")} left join thin i on {same.format("s", "i")}
            left join unlisted u on {same.format("s", "u")}
            where until_ns - begin_ns >= {limits.silent_s * 1e9:.0f}
            order by partitions desc, s.cluster nulls first, s.broker_id""",
    )


def judge_absent(row: Absent, limits: Limits) -> Iterator[Finding]:
    is_doubtful = row.absent_ns - row.away_ns > DOUBT_NS
    yield found(
        "broker_absent",
        severity(limits),  # the consequences of the absence are separate findings
        (row.away_ns if is_doubtful else row.absent_ns) / 60e9,
        row.cluster,
        f"broker {row.broker_id}" if row.broker is None else broker_name(row.broker, row.broker_id),
        {"broker": row.broker, "broker_id": row.broker_id},
        (row.first_us, row.last_us),
        {
            "absent_ns": row.absent_ns,
            "away_ns": row.away_ns if is_doubtful else None,
            "connects": row.connects,
            "partitions": row.partitions,
            "is_back": row.is_back,
        },
    )


PROBES = (
    Probe(("broker_absent",), ("exchanges", "connections", "topology", "leadership"), absent, Absent, judge_absent),
)
