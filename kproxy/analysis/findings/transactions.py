"""Findings about transactions: left open, or blocking read_committed consumers.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import CRITICAL, WARNING, Finding, Probe, Tables, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, TOPIC, aborted

_BEGINS = "('AddPartitionsToTxn', 'AddOffsetsToTxn', 'TxnOffsetCommit', 'Produce')"


class Open(NamedTuple):
    """A transaction that its client did not end: open up to the capture's end, or until its coordinator aborted it."""

    cluster: str | None
    transactional_id: str
    client: str | None
    requests: int  # since it began
    began_us: int
    last_us: int  # its last request
    end_us: int  # of the capture, or when a reader last saw it open
    is_aborted: bool
    topics: str | None  # that it wrote to, one in a line
    timeout_ms: int | None  # transaction.timeout.ms of its producer, by the coordinator's last answer


def left_open(tables: Tables, limits: Limits) -> Frame:
    """Rows of Open, the longest first. One that was aborted was open as long as readers saw records wait for it."""
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "transactions")},
        seen="select cluster as of_cluster, max(unix_micros(`time`)) as end_us from exchanges group by cluster",
        transactions_named=f"""
            select source, connection, `number`, cluster, transactional_id, api, {GROUPS["client"]} as client,
                unix_micros(`time`) as us,
                api in ('EndTxn', 'InitProducerId') and coalesce(errors, 0) = 0 as is_end
            from exchanges
            where transactional_id is not null and (api in {_BEGINS} or api in ('EndTxn', 'InitProducerId'))""",
        ended="""
            select cluster, transactional_id, max(case when is_end then us end) as ended_us
            from transactions_named group by cluster, transactional_id""",
        behind=f"""
            select s.* from transactions_named s join ended e
                on s.cluster is not distinct from e.cluster and s.transactional_id = e.transactional_id
            where s.api in {_BEGINS} and (e.ended_us is null or s.us > e.ended_us)""",
        first_offsets=f"""
            select b.cluster, b.transactional_id, {TOPIC} as topic, p.`partition`, min(p.`offset`) as `offset`,
                min(b.us) as us
            from behind b join partitions p
                on b.source = p.source and b.connection = p.connection and b.`number` = p.`number`
            where b.api = 'Produce' and p.direction = 'response' and coalesce(p.error_code, 0) = 0 and p.`offset` >= 0
            group by b.cluster, b.transactional_id, {TOPIC}, p.`partition`""",
        **aborted("first_offsets", ("cluster", "transactional_id")),
        held="""
            select w.cluster, w.transactional_id, max(s.us) as held_us from first_offsets w join stable s
                on w.cluster is not distinct from s.of_cluster and w.topic = s.of_topic
                and w.`partition` = s.of_partition and s.last_stable_offset <= w.`offset` and s.us > w.us
            group by w.cluster, w.transactional_id""",
        open_for=f"""
            select cluster, transactional_id, max(client) as client, count(*) as requests, min(us) as began_us,
                max(us) as last_us, max(end_us) as end_us
            from behind join seen on cluster is not distinct from of_cluster
            group by cluster, transactional_id
            having max(end_us) - min(us) >= {limits.open_transaction_s * 1e6:.0f}""",
        written=f"""
            select distinct b.cluster, b.transactional_id, {TOPIC} as topic from behind b join partitions p
                on b.source = p.source and b.connection = p.connection and b.`number` = p.`number`
            where p.direction = 'request' and {TOPIC} is not null""",
        named="""
            select cluster, transactional_id, array_join(array_sort(collect_list(topic)), chr(10)) as topics
            from written group by cluster, transactional_id""",
        limited="""
            select cluster, transactional_id,
                max_by(timeout_ms, named_struct('t', time_ns, 'n', timeout_ms)) as timeout_ms
            from transactions where timeout_ms is not null group by cluster, transactional_id""",
        answer=f"""
            select o.cluster, o.transactional_id, o.client, o.requests, o.began_us, o.last_us,
                case when a.transactional_id is null then o.end_us else h.held_us end as end_us,
                a.transactional_id is not null as is_aborted, n.topics, l.timeout_ms
            from open_for o left join aborted a
                on o.cluster is not distinct from a.cluster and o.transactional_id = a.transactional_id
            left join named n
                on o.cluster is not distinct from n.cluster and o.transactional_id = n.transactional_id
            left join limited l
                on o.cluster is not distinct from l.cluster and o.transactional_id = l.transactional_id
            left join held h
                on o.cluster is not distinct from h.cluster and o.transactional_id = h.transactional_id
            where a.transactional_id is null or h.held_us - o.began_us >= {limits.open_transaction_s * 1e6:.0f}
            order by began_us, o.cluster nulls first, o.transactional_id""",
    )


def judge_open(row: Open, limits: Limits) -> Iterator[Finding]:
    open_us = row.end_us - row.began_us
    if open_us < limits.open_transaction_s * 1e6:
        return
    yield found(
        "open_transaction",
        CRITICAL if open_us >= limits.hung_transaction_s * 1e6 else WARNING,
        open_us / 900e6,
        row.cluster,
        f"transactional id {row.transactional_id}, client {clean(row.client)}",
        {
            "transactional_id": row.transactional_id,
            "client": row.client,
            "topics": [] if row.topics is None else row.topics.split("\n"),
        },
        (row.began_us, row.end_us),
        {
            "open_ns": open_us * 1000,
            "lasted": "until its coordinator aborted it" if row.is_aborted else "until the capture ended",
            "requests": row.requests,
            "silent_ns": (row.end_us - row.last_us) * 1000,
            "timeout_ms": row.timeout_ms,
        },
    )


class StuckOffset(NamedTuple):
    """A partition whose last stable offset stood at one value while the log went on: of several times the longest."""

    cluster: str | None
    topic: str | None
    partition: int
    last_stable_offset: int
    high_watermark: int
    began_mark: int  # the high watermark when it came there
    began_us: int
    last_us: int


def stuck(tables: Tables, limits: Limits) -> Frame:
    """Rows of StuckOffset, the longest first."""
    return ask(
        {"partitions": tables["partitions"]},
        fetched_offsets=f"""
            select cluster, {TOPIC} as topic, `partition`, last_stable_offset as stable, high_watermark as mark,
                unix_micros(`time`) as us
            from partitions
            where api = 'Fetch' and direction = 'response' and last_stable_offset >= 0 and high_watermark >= 0""",
        spells="""
            select cluster, topic, `partition`, stable, max(mark) as mark, min(mark) as began_mark, min(us) as began_us,
                max(us) as last_us
            from fetched_offsets where mark > stable group by cluster, topic, `partition`, stable""",
        ordered="""
            select *, row_number() over (partition by cluster, topic, `partition` order by last_us - began_us desc)
                as place from spells""",
        answer=f"""
            select cluster, topic, `partition`, stable as last_stable_offset, mark as high_watermark, began_mark,
                began_us, last_us
            from ordered where place = 1 and last_us - began_us >= {limits.open_transaction_s * 1e6:.0f}
            order by began_us, cluster nulls first, topic nulls first, `partition`""",
    )


def judge_stuck(row: StuckOffset, limits: Limits) -> Iterator[Finding]:
    stuck_us, behind = row.last_us - row.began_us, row.high_watermark - row.last_stable_offset
    if stuck_us < limits.open_transaction_s * 1e6:
        return
    yield found(
        "stuck_stable_offset",
        CRITICAL if stuck_us >= limits.hung_transaction_s * 1e6 else severity(limits, behind_records=behind),
        stuck_us / 900e6,
        row.cluster,
        f"topic {clean(row.topic)}, partition {row.partition}",
        {"topic": row.topic, "partition": row.partition},
        (row.began_us, row.last_us),
        {
            "last_stable_offset": row.last_stable_offset,
            "stuck_ns": stuck_us * 1000,
            "records": row.high_watermark - row.began_mark,
            "behind_records": behind,
        },
    )


PROBES = (
    Probe(("open_transaction",), ("exchanges", "partitions", "transactions"), left_open, Open, judge_open),
    Probe(("stuck_stable_offset",), ("partitions",), stuck, StuckOffset, judge_stuck),
)
