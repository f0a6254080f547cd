"""Findings about producers: batches of one record, no compression, acks, retries that may double records.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, Probe, Tables, at, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.pieces import GROUPS, TOPIC, literal, missed_answers

_SAME_CONNECTION = "{0}.source = {1}.source and {0}.connection = {1}.connection"
# What a producer tries again: the batch may be in the log, or may come behind a later one.
_RETRIED = (
    *("REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NOT_ENOUGH_REPLICAS", "NETWORK_EXCEPTION"),
    *("NOT_LEADER_OR_FOLLOWER", "LEADER_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR", "UNKNOWN_TOPIC_OR_PARTITION"),
)
# Of these the broker may have the records: what came again may be there twice.
_APPENDED = ("unanswered", "REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NETWORK_EXCEPTION")
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
    resent: int  # failed ones of which records came again
    recut: int  # of these: in batches cut otherwise
    doubtful: int  # failed ones of which the broker may have the records
    doubtful_records: int
    error: str | None
    first_us: int
    last_us: int


def resent(tables: Tables, limits: Limits) -> Frame:
    """Rows of Resent, by client and topic.

    A batch came again where a later one of the client, after the failure, has the record with which it began: clients
    that keep batches send the same, others cut their records anew.
    """
    errors = ", ".join(map(literal, _RETRIED))
    unsure = ", ".join(map(literal, _APPENDED))
    batch = "source, connection, `number`, cluster, topic, topic_id, `partition`, records, bytes, base_timestamp"
    same = " and ".join(
        f"b.{column} = f.{column}" for column in ("records", "bytes", "base_timestamp", "max_timestamp")
    )
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "batches", "connections")},
        **missed_answers(),
        refused=f"""
            select p.source, p.connection, p.`number`, {TOPIC} as topic, `partition`, p.error,
                cast(floor(e.response_end_ns / 1e3) as bigint) as failed_us
            from partitions p join exchanges e on {_SAME_CONNECTION.format("p", "e")} and p.`number` = e.`number`
            where p.api = 'Produce' and p.direction = 'response' and p.error in ({errors})""",
        lost="""
            select source, connection, `number`, 'unanswered' as error, cast(floor(end_ns / 1e3) as bigint) as failed_us
            from missed where api = 'Produce'""",
        failed=f"""
            select {batch}, max_timestamp, unix_micros(`time`) as us, r.error, coalesce(failed_us, unix_micros(`time`))
                as failed_us
            from batches b join (
                select source as r_source, connection as r_connection, `number` as r_number, topic as r_topic,
                    `partition` as r_partition, error, failed_us from refused
                union all
                select source, connection, `number`, null, null, error, failed_us from lost) r
            on b.source = r.r_source and b.connection = r.r_connection and b.`number` = r.r_number
                and (r.r_topic is null or r.r_topic = {TOPIC} and r.r_partition = b.`partition`)
            where b.api = 'Produce' and b.direction = 'request' and coalesce(b.producer_id, -1) < 0
                and b.base_timestamp > 0""",
        clients=f"""
            select source, connection, max({GROUPS["client"]}) as client from exchanges where api = 'Produce'
            group by source, connection""",
        theirs=f"""
            select f.*, c.client, {TOPIC} as of_topic from failed f
            left join clients c on {_SAME_CONNECTION.format("f", "c")}""",
        later=f"""
            select b.source, c.client, {TOPIC} as of_topic, `partition`, records, bytes, base_timestamp, max_timestamp,
                unix_micros(`time`) as us
            from batches b join clients c on {_SAME_CONNECTION.format("b", "c")}
            where b.api = 'Produce' and b.direction = 'request' and coalesce(b.producer_id, -1) < 0""",
        again=f"""
            select f.source, f.connection, f.`number`, f.cluster, f.client, f.of_topic, f.`partition`, f.base_timestamp,
                max(f.error) as error, max(f.records) as records, min(f.us) as us,
                max(case when {same} then 1 else 0 end) as is_same,
                max(case when b.us is null then 0 else 1 end) as came
            from theirs f left join later b
                on b.source = f.source and b.client is not distinct from f.client and b.of_topic = f.of_topic
                and b.`partition` = f.`partition` and b.us >= f.failed_us and b.us > f.us
                and b.base_timestamp <= f.base_timestamp and b.max_timestamp >= f.base_timestamp
            group by f.source, f.connection, f.`number`, f.cluster, f.client, f.of_topic, f.`partition`,
                f.base_timestamp""",
        answer=f"""
            select cluster, client, of_topic as topic, count(*) as failed, sum(came) as resent,
                count_if(came = 1 and is_same = 0) as recut, count_if(error in ({unsure})) as doubtful,
                sum(case when error in ({unsure}) then records else 0 end) as doubtful_records, max(error) as error,
                min(us) as first_us, max(us) as last_us
            from again group by cluster, client, of_topic
            having sum(came) >= {limits.resent_batches}
                or sum(case when error in ({unsure}) then records else 0 end) >= {limits.doubtful_records_min}
            order by resent desc, cluster nulls first, client nulls first, topic nulls first""",
    )


def judge_resent(row: Resent, limits: Limits) -> Iterator[Finding]:
    where, place = f"client {clean(row.client)}, topic {clean(row.topic)}", {"client": row.client, "topic": row.topic}
    times = row.first_us, row.last_us
    evidence = {
        "resent": row.resent,
        "recut": row.recut or None,
        "failed": row.failed,
        "doubtful_records": row.doubtful_records,
        "error": row.error,
    }
    if row.resent >= limits.resent_batches:
        yield found("resent_not_idempotent", WARNING, row.resent / 100, row.cluster, where, place, times, evidence)
    elif row.doubtful_records >= limits.doubtful_records_min:
        evidence |= {"records": row.doubtful_records, "failed": row.doubtful, "doubtful_records": None}
        weight = row.doubtful_records / 1e4
        yield found("doubtful_records", WARNING, weight, row.cluster, where, place, times, evidence)


PROBES = (
    Probe(("single_record_batches", "no_compression"), ("batches", "exchanges"), produced, Produced, judge_produced),
    Probe(("weak_acks",), ("exchanges", "partitions", "topology", "leadership"), acked, Acked, judge_acked),
    Probe(
        ("resent_not_idempotent", "doubtful_records"),
        ("exchanges", "partitions", "batches", "connections"),
        resent,
        Resent,
        judge_resent,
    ),
)
