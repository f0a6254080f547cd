"""Findings about producers: batches of one record, no compression, acks, retries that may double records.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import RETRIED
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, Probe, Tables, at, clean, found
from kproxy.analysis.findings.kinds import outcome
from kproxy.analysis.findings.losses import SHARED
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, TOPIC, literal, missed_answers

_SAME_CONNECTION = "{0}.source = {1}.source and {0}.connection = {1}.connection"
# Failures after which the broker may have appended the batch, so that a retry appends it again.
_APPENDED = ("unanswered", "REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NETWORK_EXCEPTION")
_DISORDERED, _DISORDERED_SHARE = 20, 0.1  # batches with older timestamps than batches sent before them
_PAUSE_US = 10_000_000
_LATE_US = 1_000_000  # a broker may read a request after its connection's end
FULL_BATCH_BYTES = 16384  # batch.size


class Produced(NamedTuple):
    """Batches of a client to a topic; `active_s`: seconds from first to last, of all connections together.

    `counted` excludes uncompressed message sets (magic 0 and 1), whose messages are separate.
    """

    cluster: str | None
    client: str | None
    topic: str | None
    batches: int
    counted: int  # batches with a known number of records
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
    """Rows of Produced, the largest first; rows that can be of neither kind are left out."""
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
    """Produce requests of a client to topics with several replicas, by their acks."""

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
        replica_counts="""
            select cluster, topic, max(size(replicas)) as replicas from topology
            where kind = 'partition' and replicas is not null group by cluster, topic
            union all
            select cluster, topic, max(size(replicas)) as replicas from leadership
            where replicas is not null group by cluster, topic""",
        replicated="""
            select cluster, topic, max(replicas) as replicas from replica_counts
            group by cluster, topic having max(replicas) > 1""",
        # First the replicated topics: a capture without any costs nothing.
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
    """Batches without a producer id that failed, so that the broker may or may not have appended them.

    Acknowledged offsets show what was appended, where the capture has all producers of the partition.
    """

    cluster: str | None
    client: str | None
    topic: str | None
    failed: int
    resent: int  # failed batches whose records were sent again
    recut: int  # resent batches with different boundaries
    doubled_records: int  # in the log twice
    absent_records: int  # missing in the log when they were sent again
    doubtful: int  # batches that may or may not have been appended
    doubtful_records: int
    reordered: int  # batches, refused ones included, appended behind later batches of their connection
    reordered_records: int
    error: str | None
    first_us: int
    last_us: int


def resent(tables: Tables, limits: Limits) -> Frame:
    """Rows of Resent, by client, topic and episode: failures more than _PAUSE_US apart have separate causes.

    A batch was sent again if a later batch of the client, after the failure, contains its first record: some clients
    resend the same batch, others put its records into new batches. The log of a partition is complete if its
    acknowledged offsets have gaps only where batches failed, so that the capture has all of its producers, and continue
    after the failure. Then the offsets of a gap were appended without an acknowledgement, and a failed batch that fits
    into no gap was not appended.
    """
    errors = ", ".join(map(literal, RETRIED))
    unsure = ", ".join(map(literal, _APPENDED))
    batch = "source, connection, `number`, cluster, topic, topic_id, `partition`, records, bytes, base_timestamp"
    same = " and ".join(
        f"b.{column} = f.{column}" for column in ("records", "bytes", "base_timestamp", "max_timestamp")
    )
    of_log = "{0}.cluster is not distinct from {1}.cluster and {0}.topic = {1}.of_topic"
    of_log += " and {0}.`partition` = {1}.`partition`"
    # A batch is appended between its request and its failure.
    in_gap = f"{of_log.format('g', 'f')} and f.us <= g.until_us and g.before_us <= f.failed_us + {_LATE_US}"
    key = "source, connection, `number`, of_topic, `partition`, base_timestamp"
    by_key = " and ".join(f"f.{each.strip()} = g.{each.strip()}" for each in key.split(","))
    came_again = """{b}.source = f.source and {b}.client is not distinct from f.client and {b}.of_topic = f.of_topic
                and {b}.`partition` = f.`partition` and {b}.us >= f.failed_us and {b}.us > f.us
                and {b}.base_timestamp <= f.base_timestamp and {b}.max_timestamp >= f.base_timestamp"""
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "batches", "connections", "uneven")},
        ("gaps", "logs_end", "theirs", "filled", "again", "judged"),
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
                as failed_us, coalesce(b.producer_id, -1) < 0 and b.base_timestamp > 0 as is_plain
            from batches b join (
                select source as r_source, connection as r_connection, `number` as r_number, topic as r_topic,
                    `partition` as r_partition, error, failed_us from refused
                union all
                select source, connection, `number`, null, null, error, failed_us from lost) r
            on b.source = r.r_source and b.connection = r.r_connection and b.`number` = r.r_number
                and (r.r_topic is null or r.r_topic = {TOPIC} and r.r_partition = b.`partition`)
            where b.api = 'Produce' and b.direction = 'request'""",
        clients=f"""
            select source, connection, max({GROUPS["client"]}) as client from exchanges where api = 'Produce'
            group by source, connection""",
        theirs=f"""
            select f.*, c.client, {TOPIC} as of_topic from failed f
            left join clients c on {_SAME_CONNECTION.format("f", "c")}""",
        gaps="""
            select cluster, topic, `partition`, `offset`, log, `offset` - reached as missing, before_us, us as until_us
            from uneven where `offset` > reached""",
        logs_end="""
            select cluster, topic, `partition`, max(end_us) as end_us from uneven group by cluster, topic,
                `partition`""",
        # Failed batches by the gap that they may have filled; other gaps are of producers outside the capture.
        matched=f"""
            select g.cluster as of_cluster, g.topic as of_log, g.`partition` as of_partition, g.`offset`, g.log,
                g.missing, f.*
            from gaps g left join theirs f on {in_gap} and f.error in ({unsure}, 'NOT_LEADER_OR_FOLLOWER')""",
        # A gap holds the earliest batches, as many as fit: a deposed leader refuses the later ones.
        filled="""
            select *, coalesce(sum(records) over (partition by of_cluster, of_log, of_partition, log, `offset`
                order by us, source, connection, `number` rows between unbounded preceding and 1 preceding), 0)
                < missing as has_room
            from matched""",
        strangers="""
            select distinct of_cluster, of_log, of_partition, true as is_strange from filled where source is null""",
        in_log=f"""
            select {key}, max(missing) as missing from filled
            where source is not null and has_room group by {key}""",
        later=f"""
            select b.source, c.client, b.cluster, {TOPIC} as of_topic, b.`partition`, b.connection, b.`number`,
                b.records, b.bytes, base_timestamp, max_timestamp, unix_micros(`time`) as us
            from batches b join clients c on {_SAME_CONNECTION.format("b", "c")}
            where b.api = 'Produce' and b.direction = 'request' and coalesce(b.producer_id, -1) < 0""",
        # Acknowledged batches, each with the newest timestamp of those before it on its connection.
        acknowledged=f"""
            select distinct source, connection, `number`, {TOPIC} as topic, `partition` from partitions
            where api = 'Produce' and direction = 'response' and coalesce(error_code, 0) = 0 and `offset` >= 0""",
        kept="""
            select l.*, max(base_timestamp) over (partition by l.source, l.connection, of_topic,
                l.`partition` order by l.`number` rows between unbounded preceding and 1 preceding) as newest
            from later l join acknowledged p on p.source = l.source and p.connection = l.connection
                and p.`number` = l.`number` and p.topic = l.of_topic and p.`partition` = l.`partition`""",
        again=f"""
            select f.source, f.connection, f.`number`, f.cluster, f.client, f.of_topic, f.`partition`, f.base_timestamp,
                max(f.max_timestamp) as max_timestamp, max(f.error) as error, max(f.records) as records,
                max(f.bytes) as bytes, min(f.us) as us, max(f.failed_us) as failed_us,
                max(case when {same} then 1 else 0 end) as is_same,
                max(case when b.us is null then 0 else 1 end) as came
            from theirs f left join later b on {came_again.format(b="b")}
            where f.is_plain
            group by f.source, f.connection, f.`number`, f.cluster, f.client, f.of_topic, f.`partition`,
                f.base_timestamp""",
        weighed=f"""
            select f.*, g.missing, case when g.missing is null then 0 else 1 end as is_in,
                case when n.end_us > f.failed_us and s.is_strange is null then 1 else 0 end as is_known,
                case when f.error in ({unsure}) then 1
                    when f.error = 'NOT_LEADER_OR_FOLLOWER' and g.missing is not null and s.is_strange is null then 1
                    else 0 end as in_doubt
            from again f left join in_log g on {by_key}
            left join logs_end n on {of_log.format("n", "f")}
            left join strangers s on s.of_cluster is not distinct from f.cluster and s.of_log = f.of_topic
                and s.of_partition = f.`partition`""",
        paused="""
            select *, us - lag(us) over (partition by cluster, client, of_topic order by us, source, connection,
                `number`, `partition`, base_timestamp) as pause_us from weighed""",
        judged=f"""
            select *, sum(case when pause_us > {_PAUSE_US} then 1 else 0 end) over (partition by cluster, client,
                of_topic order by us, source, connection, `number`, `partition`, base_timestamp) as episode
            from paused""",
        # A gap has no more records than it skips, however many batches may be in it.
        twice_each=f"""
            select j.cluster, j.client, j.of_topic, j.episode, g.`partition`, g.log, g.`offset`, g.missing,
                sum(j.records) as records
            from filled g join judged j on {by_key.replace("f.", "j.")}
            where g.has_room and j.is_known = 1 and j.in_doubt = 1 and j.came = 1
            group by j.cluster, j.client, j.of_topic, j.episode, g.`partition`, g.log, g.`offset`, g.missing""",
        twice="""
            select cluster, client, of_topic, episode, sum(least(missing, records)) as doubled_records
            from twice_each group by cluster, client, of_topic, episode""",
        # Clients that set timestamps themselves: the order of timestamps is not the order of sending.
        own_times=f"""
            select source, client, of_topic, true as has_own from kept group by source, client, of_topic
            having count_if(newest > max_timestamp) > {_DISORDERED} + count(*) * {_DISORDERED_SHARE}""",
        behind=f"""
            select distinct f.cluster, f.client, f.of_topic, f.episode, k.source, k.connection, k.`number`,
                k.`partition`, k.records
            from judged f join kept k on {came_again.format(b="k")}
            where f.came = 1 and f.is_in = 0 and k.newest > k.max_timestamp""",
        disordered="""
            select cluster, b.client, b.of_topic, episode, count(*) as reordered, sum(records) as reordered_records
            from behind b left join own_times o on b.source = o.source and b.client is not distinct from o.client
                and b.of_topic = o.of_topic
            where o.has_own is null group by cluster, b.client, b.of_topic, episode""",
        summed="""
            select cluster, client, of_topic, episode, sum(in_doubt) as failed, sum(in_doubt * came) as resent,
                sum(case when in_doubt = 1 and is_same = 0 then came else 0 end) as recut,
                sum(case when in_doubt = 1 and is_known = 1 and is_in = 0 then records else 0 end) as absent_records,
                sum(in_doubt * (1 - is_known)) as doubtful,
                sum(case when in_doubt = 1 and is_known = 0 then records else 0 end) as doubtful_records,
                max(case when in_doubt = 1 then error end) as error, max(error) as any_error,
                coalesce(min(case when in_doubt = 1 then us end), min(us)) as first_us,
                coalesce(max(case when in_doubt = 1 then us end), max(us)) as last_us
            from judged group by cluster, client, of_topic, episode""",
        answer=f"""
            select s.cluster, s.client, s.of_topic as topic, failed, resent, recut,
                coalesce(doubled_records, 0) as doubled_records, absent_records, doubtful, doubtful_records,
                coalesce(reordered, 0) as reordered, coalesce(reordered_records, 0) as reordered_records,
                coalesce(error, any_error) as error, first_us, last_us
            from summed s left join twice t on s.cluster is not distinct from t.cluster
                and s.client is not distinct from t.client and s.of_topic = t.of_topic
                and s.episode = t.episode
            left join disordered d on s.cluster is not distinct from d.cluster
                and s.client is not distinct from d.client and s.of_topic = d.of_topic
                and s.episode = d.episode
            where doubled_records > 0 or reordered >= {limits.resent_batches}
                or resent >= {limits.resent_batches} and doubtful > 0
                or doubtful_records >= {limits.doubtful_records_min}
            order by doubled_records desc, resent desc, s.cluster nulls first, s.client nulls first,
                topic nulls first, first_us""",
    )


def judge_resent(row: Resent, limits: Limits) -> Iterator[Finding]:
    where, place = f"client {clean(row.client)}, topic {clean(row.topic)}", {"client": row.client, "topic": row.topic}
    times = row.first_us, row.last_us
    is_in_doubt = row.resent >= limits.resent_batches and row.doubtful_records > 0
    if row.doubled_records or row.reordered >= limits.resent_batches or is_in_doubt:
        records = {
            "doubled_records": row.doubled_records or None,
            "doubtful_records": row.doubtful_records or None,
            "reordered_records": row.reordered_records or None,
        }
        evidence = {
            "outcome": outcome(records),
            "resent": row.resent,
            "recut": row.recut or None,
            "failed": row.failed,
            **records,
            "not_in_log_records": row.absent_records or None,
            "error": row.error,
        }
        weight = max(row.resent, row.reordered) / 100
        yield found("resent_not_idempotent", WARNING, weight, row.cluster, where, place, times, evidence)
    elif row.doubtful_records >= limits.doubtful_records_min:
        evidence = {
            "resent": row.resent,
            "recut": row.recut or None,
            "error": row.error,
            "doubtful_records": row.doubtful_records,
            "failed": row.doubtful,
        }
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
        SHARED,
    ),
)
