"""Findings about lost records: acknowledged records whose offsets were given to other records.

A Produce response has the base offset of its batch. If a capture has all producers of a log, these offsets follow each
other without a gap: an offset that falls back means lost records, one that skips means records that were appended
without an acknowledgement (`producing` uses that). Offsets that a topic assigns anew (deleted and created again, a log
that begins at 0 again, acknowledgements more than NEW_LOG_S apart) belong to other logs. Refuses to know engines,
and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.finding import CRITICAL, Finding, Probe, Tables, at, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, KEYS, TOPIC

NEW_LOG_S = 3600  # longer than any election; a topic that was deleted unseen is created again, most often, later
MOST_RANGES = 5  # of offsets that are named
_OF_LOG = "partition by cluster, topic, `partition`, log"


def uneven(tables: Tables) -> Frame:
    """Acknowledged requests of each partition whose offsets skip some or were given twice, and the last one sent.

    Mostly few: where every producer is captured and no leader fails, offsets follow each other. A request has `offset`
    to `end` (behind its last record), `sent_us` to `us`, its client and its broker; `log` numbers the logs that a
    partition had one after another. `reached` is the highest `end` of requests at lower offsets: above it there is a
    gap, below it an overlap. `next_offset` and `next_broker`: where the next request in the log begins, and which
    broker acknowledged that; `before_us`: when the one before it was sent. `end_us`: when the last of the partition was
    sent.
    """
    keys = ", ".join(KEYS)
    same = " and ".join(f"w.{key} = e.{key}" for key in KEYS)
    by_offset = f"`offset`, us, {keys}"  # captures of both ends have a request twice
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions")},
        wrote=f"""
            select {keys}, cluster, {TOPIC} as topic, `partition`,
                max(case when direction = 'response' and coalesce(error_code, 0) = 0 then `offset` end) as `offset`,
                max(case when direction = 'request' then records end) as records,
                max(case when direction = 'request' then bytes end) as bytes
            from partitions where api = 'Produce' group by {keys}, cluster, {TOPIC}, `partition`""",
        numbered=f"""
            select w.*, w.`offset` + greatest(coalesce(w.records, 1), 1) as `end`, {GROUPS["client"]} as client, acks,
                {GROUPS["broker"]} as broker, broker_id,
                unix_micros(e.`time`) as sent_us,
                cast(floor(coalesce(response_end_ns / 1e3, unix_micros(e.`time`))) as bigint) as us
            from wrote w join exchanges e on {same} where w.`offset` >= 0""",
        begun="""
            select *, lag(us) over (partition by cluster, topic, `partition` order by us, `offset`) as us_before
            from numbered""",
        logs=f"""
            select *, sum(case when `offset` = 0 or us - us_before > {NEW_LOG_S * 1_000_000} then 1 else 0 end)
                over (partition by cluster, topic, `partition` order by us, `offset`) as log
            from begun""",
        placed=f"""
            select *, max(`end`) over ({_OF_LOG} order by {by_offset} rows between unbounded preceding and 1 preceding)
                    as reached,
                lead(`offset`) over ({_OF_LOG} order by {by_offset}) as next_offset,
                lead(broker) over ({_OF_LOG} order by {by_offset}) as next_broker,
                lag(sent_us) over ({_OF_LOG} order by {by_offset}) as before_us,
                max(sent_us) over (partition by cluster, topic, `partition`) as end_us
            from logs""",
        answer="select * from placed where `offset` != reached or `end` > next_offset or sent_us = end_us",
    )


SHARED = {"uneven": uneven}


class Lost(NamedTuple):
    """Records of a client in a topic whose offsets were acknowledged for other records afterwards."""

    cluster: str | None
    client: str | None
    topic: str | None
    records: int
    batches: int
    partitions: int
    ranges: list[str]
    acks: int | None
    broker: str | None  # that acknowledged them
    broker_id: int | None
    keeper: str | None  # that gave the offsets to others
    keeper_id: int | None
    first_us: int
    last_us: int


def lost(tables: Tables, limits: Limits) -> Frame:
    """Rows of Lost, by client, topic and the broker that acknowledged, the most records first.

    The same batch acknowledged twice at one offset (a retry with the same sequence, a capture at both ends) counts
    once; of two different batches at one offset, the one acknowledged first is lost. But a deposed leader may still
    acknowledge (acks=1) after its successor: if one of two brokers has the offsets that follow, and never gave one of
    these twice, the log is its own, and the other's records are lost.
    """
    keys = ", ".join(KEYS)
    same = " and ".join(f"s.{key} = b.{key}" for key in KEYS)
    contest = "cluster, topic, `partition`, log, contest"
    batch = "cluster, topic, `partition`, log, `offset`, `end`, bytes, base_timestamp, producer_id, base_sequence"
    return ask(
        {name: tables[name] for name in ("batches", "uneven")},
        ("distinct_ones", "decided"),
        suspect="select * from uneven where `offset` < reached or `end` > next_offset",
        # First who is suspected, mostly nobody: then no batch is looked at.
        cut=f"""
            select {keys}, {TOPIC} as of_topic, `partition` as of_partition, min(base_timestamp) as base_timestamp,
                max(producer_id) as producer_id, min(base_sequence) as base_sequence
            from batches where api = 'Produce' and direction = 'request' group by {keys}, {TOPIC}, `partition`""",
        known=f"""
            select s.*, base_timestamp, producer_id, base_sequence from suspect s
            left join cut b on {same} and s.topic = b.of_topic and s.`partition` = b.of_partition""",
        distinct_ones=f"""
            select {batch}, min(us) as us, min_by(client, us) as client, min_by(acks, us) as acks,
                min_by(broker, us) as broker, min_by(broker_id, us) as broker_id,
                max_by(next_broker, named_struct('u', us, 's', source, 'c', connection, 'n', `number`)) as next_broker
            from known group by {batch}""",
        numbered=f"""
            select *, row_number() over ({_OF_LOG} order by `offset`, us, `end`, bytes, base_timestamp, producer_id,
                base_sequence) as place
            from distinct_ones""",
        reaching=f"""
            select *, max(`end`) over ({_OF_LOG} order by place rows between unbounded preceding and 1 preceding)
                as reached
            from numbered""",
        contested=f"""
            select *, sum(case when `offset` < reached then 0 else 1 end) over ({_OF_LOG} order by place
                rows between unbounded preceding and current row) as contest
            from reaching""",
        # The broker that acknowledged the offsets after those given twice, if it has not lost records there itself.
        ends=f"""
            select {contest}, max_by(next_broker, place) as winner from contested
            group by {contest}""",
        losers=f"""
            select {contest}, broker from contested group by {contest}, broker
            having sum(`end` - `offset`) > max(`end`) - min(`offset`)""",
        decided="""
            select c.*, case when l.broker is null then e.winner end as winner from contested c
            join ends e on c.cluster is not distinct from e.cluster and c.topic = e.topic
                and c.`partition` = e.`partition` and c.log = e.log and c.contest = e.contest
            left join losers l on c.cluster is not distinct from l.cluster and c.topic = l.topic
                and c.`partition` = l.`partition` and c.log = l.log and c.contest = l.contest
                and l.broker = e.winner""",
        overwritten="""
            select a.cluster, a.client, a.topic, a.`partition`, a.`offset`, a.acks, a.broker, a.broker_id,
                least(a.us, min(b.us)) as us,
                greatest(a.`offset`, min(b.`offset`)) as first_offset, least(a.`end`, max(b.`end`)) - 1 as last_offset,
                min_by(b.broker, b.us) as keeper, min_by(b.broker_id, b.us) as keeper_id,
                greatest(a.us, min(b.us)) as again_us
            from decided a join decided b
                on a.cluster is not distinct from b.cluster and a.topic = b.topic and a.`partition` = b.`partition`
                and a.log = b.log and a.`offset` < b.`end` and b.`offset` < a.`end`
                and case when a.broker = b.broker or a.broker_id = b.broker_id then a.us < b.us
                    when b.winner = b.broker then true when a.winner = a.broker then false else a.us < b.us end
            group by a.cluster, a.client, a.topic, a.`partition`, a.`offset`, a.`end`, a.acks, a.broker, a.broker_id,
                a.us""",
        by_partition="""
            select cluster, client, topic, `partition`, sum(last_offset - first_offset + 1) as records,
                count(*) as batches, concat(cast(`partition` as string), ': ', cast(min(first_offset) as string),
                    ' to ', cast(max(last_offset) as string)) as offset_range,
                min(acks) as acks, min(broker) as broker, max(broker_id) as broker_id, min(keeper) as keeper,
                max(keeper) as keeper_too, max(keeper_id) as keeper_id, min(us) as first_us, max(again_us) as last_us
            from overwritten
            group by cluster, client, topic, `partition`, coalesce(cast(broker_id as string), broker)""",
        answer="""
            select cluster, client, topic, sum(records) as records, sum(batches) as batches, count(*) as partitions,
                array_sort(collect_list(offset_range)) as ranges, min(acks) as acks, min(broker) as broker,
                max(broker_id) as broker_id,
                case when min(keeper) = max(keeper_too) then min(keeper) end as keeper,
                case when min(keeper) = max(keeper_too) then max(keeper_id) end as keeper_id,
                min(first_us) as first_us, max(last_us) as last_us
            from by_partition group by cluster, client, topic, coalesce(cast(broker_id as string), broker)
            order by records desc, cluster nulls first, client nulls first, topic nulls first, broker nulls first""",
    )


def judge_lost(row: Lost, limits: Limits) -> Iterator[Finding]:
    place = {"client": row.client, "topic": row.topic, "broker": row.broker, "broker_id": row.broker_id}
    more = ", ..." if len(row.ranges) > MOST_RANGES else ""
    yield found(
        "records_lost",
        CRITICAL,
        0.5 + row.records / 1e4,
        row.cluster,
        at(row.client, f"topic {clean(row.topic)}"),
        {name: value for name, value in place.items() if value is not None},
        (row.first_us, row.last_us),
        {
            "records": row.records,
            "acks": "unknown" if row.acks is None else "all" if row.acks == -1 else str(row.acks),
            "by": _broker(row.broker, row.broker_id),
            "offsets": ", ".join(row.ranges[:MOST_RANGES]) + more,
            "partitions": row.partitions,
            "batches": row.batches,
            "offsets_given_by": _broker(row.keeper, row.keeper_id),
        },
    )


def _broker(address: str | None, broker_id: int | None) -> str:
    return "several brokers" if address is None else f"broker {address if broker_id is None else broker_id}"


PROBES = (Probe(("records_lost",), ("exchanges", "partitions", "batches"), lost, Lost, judge_lost, SHARED),)
