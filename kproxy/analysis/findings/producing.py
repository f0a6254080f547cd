"""Findings about producers: batches of one record, no compression, acks, retries that may double records.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, Probe, Tables, at, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.pieces import GROUPS, TOPIC, literal

_SAME_CONNECTION = "{0}.source = {1}.source and {0}.connection = {1}.connection"
# What a producer tries again: the batch may be in the log, or may come behind a later one.
_RETRIED = (
    *("REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NOT_ENOUGH_REPLICAS", "NETWORK_EXCEPTION"),
    *("NOT_LEADER_OR_FOLLOWER", "LEADER_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR", "UNKNOWN_TOPIC_OR_PARTITION"),
)
FULL_BATCH_BYTES = 16384  # batch.size


class Produced(NamedTuple):
    """Batches of a client to a topic; `active_s`: seconds from first to last, of all connections together.

    In message sets (magic 0 and 1) that are not compressed each message stands for itself: they are not `counted`.
    """

    cluster: str | None
    client: str | None
    topic: str | None
    batches: int
    counted: int  # batches whose number of records is known
    singles: int
    records: int | None
    size: int  # bytes
    plain_batches: int
    plain_size: int
    active_s: float | None
    connections: int
    first_us: int
    last_us: int


def produced(tables: Tables, limits: Limits) -> Frame:
    """Rows of Produced, the largest first; those that neither kind could be found in are left out."""
    counted = "(magic >= 2 or codec != 'none')"
    return ask(
        {"batches": tables["batches"], "exchanges": tables["exchanges"]},
        sent=f"""
            select source, connection, cluster, {TOPIC} as topic, count(*) as batches,
                count_if({counted} and records is not null) as counted,
                count_if({counted} and records <= 1) as singles, sum(records) as records, sum(bytes) as bytes,
                count_if(codec = 'none') as plain_batches,
                sum(case when codec = 'none' then bytes else 0 end) as plain_bytes,
                min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us
            from batches where api = 'Produce' and direction = 'request' and not coalesce(control, false)
            group by source, connection, cluster, {TOPIC}""",
        clients=f"""
            select source, connection, max({GROUPS["client"]}) as client from exchanges where api = 'Produce'
            group by source, connection""",
        summed=f"""
            select cluster, client, topic, sum(batches) as batches, sum(counted) as counted, sum(singles) as singles,
                sum(records) as records, sum(bytes) as bytes, sum(plain_batches) as plain_batches,
                sum(plain_bytes) as plain_bytes, sum(last_us - first_us) / 1e6 as active_s,
                count(*) as connections, min(first_us) as first_us, max(last_us) as last_us
            from sent s left join clients c on {_SAME_CONNECTION.format("s", "c")}
            group by cluster, client, topic""",
        answer=f"""
            select * from summed
            where batches >= {limits.batches_min} or plain_bytes >= {limits.uncompressed_bytes_min}
            order by bytes desc, cluster nulls first, client nulls first, topic nulls first""",
    )


def judge_produced(row: Produced, limits: Limits) -> Iterator[Finding]:
    place = {"client": row.client, "topic": row.topic}
    where = at(row.client, f"topic {clean(row.topic)}")
    times = row.first_us, row.last_us
    active_s = row.active_s or 0.0
    rate = row.batches / active_s if active_s else 0.0
    share = row.singles / row.counted if row.counted else 0.0
    if row.counted >= limits.batches_min and share >= limits.single_record_share and rate >= limits.single_record_rate:
        evidence = {
            "batches": row.counted,
            "single_share": share,
            "rate_per_s": rate,
            "records_per_batch": None if row.records is None else row.records / row.counted,
            "bytes_per_batch": row.size / row.batches,
            "connections": row.connections,
        }
        yield found("single_record_batches", WARNING, rate / 1000, row.cluster, where, place, times, evidence)
    span_s = (row.last_us - row.first_us) / 1e6
    if (
        row.plain_batches
        and row.plain_size >= limits.uncompressed_bytes_min
        and row.plain_size / row.plain_batches >= limits.uncompressed_batch_bytes
        and row.plain_size >= limits.uncompressed_rate * span_s
    ):
        evidence = {
            "plain_bytes": row.plain_size,
            "batches": row.plain_batches,
            "bytes_per_batch": row.plain_size / row.plain_batches,
            "bytes_per_s": row.plain_size / span_s if span_s else None,
        }
        weight = row.plain_size / max(span_s, 1.0) / 1e8
        yield found("no_compression", NOTE, weight, row.cluster, where, place, times, evidence)


class Acked(NamedTuple):
    """Produce requests of a client to topics with several replicas, by what they want acknowledged."""

    cluster: str | None
    client: str | None
    acks: int
    requests: int
    topics: int
    topic: str
    replicas: int
    size: int
    first_us: int
    last_us: int


def acked(tables: Tables, limits: Limits) -> Frame:
    """Rows of Acked, by client and acks."""
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "topology", "leadership")},
        weak=f"""
            select source, connection, `number`, cluster, {GROUPS["client"]} as client, acks, unix_micros(`time`) as us
            from exchanges where api = 'Produce' and acks in (0, 1)""",
        told="""
            select cluster, topic, max(size(replicas)) as replicas from topology
            where kind = 'partition' and replicas is not null group by cluster, topic
            union all
            select cluster, topic, max(size(replicas)) as replicas from leadership
            where replicas is not null group by cluster, topic""",
        replicated="""
            select cluster, topic, max(replicas) as replicas from told
            group by cluster, topic having max(replicas) > 1""",
        # First what is replicated: a capture that tells of none costs nothing.
        sent="""
            select source, connection, `number`, r.topic as topic, max(replicas) as replicas, sum(bytes) as bytes
            from partitions p join replicated r
                on p.cluster is not distinct from r.cluster and coalesce(p.topic, p.topic_id) = r.topic
            where api = 'Produce' and direction = 'request'
            group by source, connection, `number`, r.topic""",
        answer=f"""
            select w.cluster, w.client, w.acks, count(*) as requests, count(distinct s.topic) as topics,
                min(s.topic) as topic, max(s.replicas) as replicas, sum(s.bytes) as bytes, min(w.us) as first_us,
                max(w.us) as last_us
            from weak w join sent s on {_SAME_CONNECTION.format("w", "s")} and w.`number` = s.`number`
            group by w.cluster, w.client, w.acks having count(*) >= {limits.acks_requests_min}
            order by requests desc, w.cluster nulls first, w.client nulls first, w.acks""",
    )


def judge_acked(row: Acked, limits: Limits) -> Iterator[Finding]:
    topics = f"topic {row.topic}" if row.topics == 1 else f"{row.topics} topics, {row.topic} among them"
    yield found(
        "weak_acks",
        WARNING if row.acks == 0 else NOTE,
        row.requests / 1e5,
        row.cluster,
        f"client {clean(row.client)}, {topics}",
        {"client": row.client, "acks": row.acks, "topic": row.topic},
        (row.first_us, row.last_us),
        {
            "acks": row.acks,
            "requests": row.requests,
            "topics": row.topics,
            "replicas": row.replicas,
            "bytes": row.size,
        },
    )


class Resent(NamedTuple):
    """Batches without a producer id that failed, and how many of them came again."""

    cluster: str | None
    client: str | None
    topic: str | None
    failed: int
    resent: int
    error: str | None
    first_us: int
    last_us: int


def resent(tables: Tables, limits: Limits) -> Frame:
    """Rows of Resent, by client and topic."""
    errors = ", ".join(map(literal, _RETRIED))
    batch = "source, connection, `number`, cluster, topic, topic_id, `partition`, records, bytes, base_timestamp"
    same = " and ".join(
        f"b.{column} = f.{column}" for column in ("`partition`", "records", "bytes", "base_timestamp", "max_timestamp")
    )
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "batches")},
        refused=f"""
            select source, connection, `number`, {TOPIC} as topic, `partition`, error from partitions
            where api = 'Produce' and direction = 'response' and error in ({errors})""",
        lost="""
            select source, connection, `number`, outcome from exchanges
            where api = 'Produce' and outcome in ('unanswered', 'lost')""",
        failed=f"""
            select {batch}, max_timestamp, unix_micros(`time`) as us, r.error
            from batches b join (
                select source as r_source, connection as r_connection, `number` as r_number, topic as r_topic,
                    `partition` as r_partition, error from refused
                union all
                select source, connection, `number`, null, null, outcome from lost) r
            on b.source = r.r_source and b.connection = r.r_connection and b.`number` = r.r_number
                and (r.r_topic is null or r.r_topic = {TOPIC} and r.r_partition = b.`partition`)
            where b.api = 'Produce' and b.direction = 'request' and coalesce(b.producer_id, -1) < 0
                and b.base_timestamp > 0""",
        clients=f"""
            select source, connection, max({GROUPS["client"]}) as client from exchanges where api = 'Produce'
            group by source, connection""",
        again=f"""
            select f.source, f.connection, f.`number`, f.cluster, coalesce(f.topic, f.topic_id) as topic, f.`partition`,
                f.base_timestamp, max(f.error) as error, min(f.us) as us,
                max(case when unix_micros(b.`time`) > f.us then 1 else 0 end) as resent
            from batches b right join failed f
                on b.source = f.source and coalesce(b.topic, b.topic_id) = coalesce(f.topic, f.topic_id) and {same}
                and b.api = 'Produce' and b.direction = 'request' and coalesce(b.producer_id, -1) < 0
            group by f.source, f.connection, f.`number`, f.cluster, coalesce(f.topic, f.topic_id), f.`partition`,
                f.base_timestamp""",
        answer=f"""
            select a.cluster, c.client, a.topic, count(*) as failed, sum(a.resent) as resent, max(a.error) as error,
                min(a.us) as first_us, max(a.us) as last_us
            from again a left join clients c on {_SAME_CONNECTION.format("a", "c")}
            group by a.cluster, c.client, a.topic having sum(a.resent) >= {limits.resent_batches}
            order by resent desc, a.cluster nulls first, c.client nulls first, a.topic nulls first""",
    )


def judge_resent(row: Resent, limits: Limits) -> Iterator[Finding]:
    yield found(
        "resent_not_idempotent",
        WARNING,
        row.resent / 100,
        row.cluster,
        f"client {clean(row.client)}, topic {clean(row.topic)}",
        {"client": row.client, "topic": row.topic},
        (row.first_us, row.last_us),
        {"resent": row.resent, "failed": row.failed, "error": row.error},
    )


PROBES = (
    Probe(("single_record_batches", "no_compression"), ("batches", "exchanges"), produced, Produced, judge_produced),
    Probe(("weak_acks",), ("exchanges", "partitions", "topology", "leadership"), acked, Acked, judge_acked),
    Probe(("resent_not_idempotent",), ("exchanges", "partitions", "batches"), resent, Resent, judge_resent),
)
