"""Findings about records that a producer gave up on: batches that failed and were never sent again.

A batch of a partition failed if its last request was refused or not answered. It was given up if no later request of
its client has any of its records, and either its error is one after which no producer retries, or the same producer
had later batches of that partition acknowledged. A producer that ends with its batch gave up on nothing. Records that
expired in a client's queue were never sent: an idempotent producer begins a new epoch then, and the timestamps of its
batches skip a time. Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import REFUSED, RETRIED
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import Finding, Probe, Tables, at, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, KEYS, TOPIC, literal

FAILED_MOST = 5000  # failed attempts in a partition: each is compared with the partition's other batches
RETRIED_US = 120_000_000  # delivery.timeout.ms: a client may send a batch again for so long
_WRITTEN = (0, 46)  # no error, and DUPLICATE_SEQUENCE_NUMBER: an earlier attempt is in the log
_AGAIN = (*RETRIED, "OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID", "CORRUPT_MESSAGE")
_FINAL = ("refused_too_large", "refused_authorization", "refused_records")
_PAUSE_US = 30_000_000  # failures farther apart have separate causes
_SKIPPED_MS = 1000  # a shorter time without a timestamp is no sign
_PROMPT_US = 1_000_000  # a batch sent this soon after its last record did not wait in a queue
_SAME_CLOCK_US = 600_000_000  # timestamps farther from the time of sending are the application's own
_RATE_US = 10_000_000


def attempts() -> dict[str, str]:
    """Steps of a question over `exchanges`, `partitions`, `batches` and `connections`: `ended`, batches that failed.

    `ended` has one row for a batch and its retries: when it was `tried_us` last and first_us, its last `error`, and
    `written_us`, when a later acknowledged batch of the client had its first record; `touched_us`: any of its records.
    Also `refused`, `unanswered` and `failed`, failed attempts by their keys; `attempts`, all batches of partitions with
    failed attempts; `written`, those of them that were acknowledged.
    """
    keys = ", ".join(KEYS)
    same = " and ".join(f"o.{key} = {{0}}.{key}" for key in KEYS)
    retried = ", ".join(map(literal, _AGAIN))
    is_write = "api = 'Produce' and direction = 'request'"
    of = "cluster, client, topic, `partition`"
    of_log = "{0}.cluster is not distinct from {1}.cluster and {0}.client is not distinct from {1}.client"
    of_log += " and {0}.topic = {1}.topic and {0}.`partition` = {1}.`partition`"
    return {
        "refused": f"""
            select {keys}, {TOPIC} as of_topic, `partition` as of_partition, true as is_refused,
                min(case when error in ({retried}) then 1 else 0 end) as is_retried, max(error) as error
            from partitions where api = 'Produce' and direction = 'response' and error_code not in {_WRITTEN}
            group by {keys}, {TOPIC}, `partition`""",
        "unanswered": f"""
            select distinct {", ".join(f"e.{key}" for key in KEYS)}, outcome,
                outcome = 'unanswered' and c.close is not null as waits
            from exchanges e
            left join connections c on e.source = c.source and e.connection = c.connection and c.close = 'open'
            where api = 'Produce' and outcome in ('unanswered', 'lost')""",
        "failed": f"""
            select {keys}, of_topic as topic, of_partition as `partition`, is_retried, error from refused
            union
            select {", ".join(f"o.{key}" for key in KEYS)}, {TOPIC}, `partition`, 1, outcome from partitions o
            join unanswered u on {same.format("u")} where {is_write} and not u.waits""",
        "whose": f"""
            select source, connection, max({GROUPS["client"]}) as client, max(client_address) as host,
                max({GROUPS["broker"]}) as broker, max(broker_id) as broker_id
            from exchanges where api = 'Produce' group by source, connection""",
        # Batches of partitions with a failed attempt; mostly there are none.
        "attempts": f"""
            select b.*, w.client, w.broker, w.broker_id, coalesce(cast(known_id as string), w.host) as producer,
                f.topic is not null as has_failed, f.is_retried, f.error, coalesce(u.waits, false) as waits
            from (select {keys}, cluster, {TOPIC} as topic, `partition`, unix_micros(`time`) as us, base_timestamp,
                    max_timestamp, records, case when producer_id >= 0 then producer_id end as known_id,
                    producer_epoch, base_sequence, coalesce(transactional, false) as is_transactional
                from batches where {is_write}) b
            join (select topic as of_topic, `partition` as of_partition from failed
                group by topic, `partition` having count(*) <= {FAILED_MOST}) p
                on b.topic = p.of_topic and b.`partition` = p.of_partition
            join whose w on b.source = w.source and b.connection = w.connection
            left join failed f on {same.replace("o.", "b.").format("f")} and b.topic = f.topic
                and b.`partition` = f.`partition`
            left join unanswered u on {same.replace("o.", "b.").format("u")}""",
        "written": "select * from attempts where not has_failed and not waits",
        # A producer without a new epoch sends a batch again by its sequence alone.
        "tries": f"""
            select a.*, w.us as again_us, w.base_timestamp <= a.base_timestamp as has_first
            from attempts a left join written w on {of_log.format("a", "w")} and w.us > a.us
                and w.base_timestamp <= a.max_timestamp and w.max_timestamp >= a.base_timestamp
                and not coalesce(w.known_id = a.known_id and w.producer_epoch = a.producer_epoch
                    and w.base_sequence != a.base_sequence, false)
            where a.has_failed""",
        # Some batches begin in the same millisecond: sequences tell them apart, until a new epoch counts anew.
        "numbered": f"""
            select *, dense_rank() over (partition by {of}, base_timestamp, known_id, producer_epoch
                order by case when known_id is not null then base_sequence end) as place
            from tries""",
        "ended": f"""
            select {of}, base_timestamp, place, max(max_timestamp) as max_timestamp, max(records) as records,
                max(case when has_first then again_us end) as written_us, max(again_us) as touched_us,
                min(us) as first_us, max(us) as tried_us, min(is_retried) as is_retried, max_by(error, us) as error,
                max_by(producer, us) as producer, max_by(broker, us) as broker, max_by(broker_id, us) as broker_id,
                max(case when is_transactional then 1 else 0 end) as in_transaction
            from numbered group by {of}, base_timestamp, place""",
    }


class GivenUp(NamedTuple):
    """Batches of a client to a topic that failed and were not sent again, at one time."""

    cluster: str | None
    client: str | None
    topic: str | None
    records: int
    batches: int
    unanswered: int  # batches that may be in the log
    partitions: int
    errors: str
    broker: str | None  # where there was one alone
    broker_id: int | None
    epochs: int  # that the producer began around that time
    skipped_ms: int  # times without records before new epochs, by the timestamps of records, in the worst partition
    unsent: float | None  # records of these times in all partitions, at the rates before, as far as these are known
    is_rated: bool  # they are known before all of these times: batches did not wait in the client
    first_us: int
    last_us: int


def given_up(tables: Tables, limits: Limits) -> Frame:
    """Rows of GivenUp, those of the most records first."""
    final = ", ".join(literal(error) for kind in _FINAL for error in REFUSED[kind])
    of = "cluster, client, topic"
    of_log = "{0}.cluster is not distinct from {1}.cluster and {0}.client is not distinct from {1}.client"
    of_log += " and {0}.topic = {1}.topic"
    # Records may expire in the queue before the first failure: failures so near have one cause.
    in_episode = f"""begun b join episodes e on {of_log.format("b", "e")} and us >= e.first_us - {_PAUSE_US}
                and us < least(coalesce(next_us - {_PAUSE_US}, us + 1), e.last_us + {RETRIED_US})"""
    by_producer = f"partition by {of}, `partition`, known_id order by us, connection, `number`, source"
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "batches", "connections")},
        ("attempts", "episodes"),
        **attempts(),
        good="""
            select cluster, client, topic, `partition`, producer, max(us) as good_us from written
            group by cluster, client, topic, `partition`, producer""",
        lost=f"""
            select e.* from ended e left join good g on {of_log.format("e", "g")} and e.`partition` = g.`partition`
                and e.producer = g.producer
            where touched_us is null and in_transaction = 0 and error != 'lost' and base_timestamp > 0
                and (error in ({final}) or tried_us < good_us)""",
        paused=f"select *, first_us - lag(tried_us) over (partition by {of} order by tried_us) as pause_us from lost",
        judged=f"""
            select *, sum(case when pause_us > {_PAUSE_US} then 1 else 0 end)
                over (partition by {of} order by tried_us, first_us, `partition`, base_timestamp, place) as episode
            from paused""",
        by_error=f"""
            select {of}, episode, error, sum(records) as records, count(*) as batches,
                count_if(error = 'unanswered') as unanswered, max(`partition`) as most, min(`partition`) as least,
                min(broker) as broker, max(broker) as broker_too, max(broker_id) as broker_id,
                min(first_us) as first_us, max(tried_us) as last_us
            from judged group by {of}, episode, error""",
        in_partitions=f"""
            select {of}, episode, count(distinct `partition`) as partitions from judged group by {of}, episode""",
        summed=f"""
            select {of}, episode, sum(records) as records, sum(batches) as batches, sum(unanswered) as unanswered,
                array_join(array_sort(collect_list(error)), ', ') as errors,
                case when min(broker) = max(broker_too) then min(broker) end as broker,
                case when min(broker) = max(broker_too) then max(broker_id) end as broker_id,
                min(first_us) as first_us, max(last_us) as last_us
            from by_error group by {of}, episode""",
        episodes=f"""
            select *, lead(first_us) over (partition by {of} order by first_us) as next_us from summed""",
        # New epochs of the producers concerned, each with the time that timestamps skip before it.
        concerned="select distinct cluster as of_cluster, client as of_client, topic as of_topic from lost",
        ordered=f"""
            select a.*, max(max_timestamp) over ({by_producer} rows between unbounded preceding and 1 preceding)
                    as newest,
                sum(records) over (partition by {of}, `partition`, known_id order by us
                    range between {_RATE_US} preceding and current row) as recent
            from attempts a join concerned c on a.cluster is not distinct from c.of_cluster
                and a.client is not distinct from c.of_client and a.topic = c.of_topic
            where known_id is not null and not is_transactional""",
        begun=f"""
            select *, producer_epoch - lag(producer_epoch) over ({by_producer}) as epochs,
                lag(recent) over ({by_producer}) as before, lag(us) over ({by_producer}) as before_us,
                min(us) over (partition by {of}, `partition`, known_id) as since_us
            from ordered""",
        skipped=f"""
            select b.cluster, b.client, b.topic, e.episode, `partition`, base_timestamp - newest as skipped_ms,
                case when before_us - newest * 1000 between -{_PROMPT_US} and {_PROMPT_US}
                    then before * 1e6 / least(before_us - since_us, {_RATE_US}) end as rate
            from {in_episode}
            where epochs > 0 and base_timestamp - newest > {_SKIPPED_MS}
                and abs(base_timestamp * 1000 - us) < {_SAME_CLOCK_US}
                and abs(newest * 1000 - before_us) < {_SAME_CLOCK_US}
                and before_us > since_us""",
        in_each=f"""
            select {of}, episode, `partition`, sum(skipped_ms) as skipped_ms, count(rate) = count(*) as is_rated,
                sum(rate * skipped_ms) / sum(case when rate is not null then skipped_ms end) as rate
            from skipped group by {of}, episode, `partition`""",
        skips=f"""
            select {of}, episode, max(skipped_ms) as skipped_ms, min(is_rated) as is_rated,
                sum(rate * skipped_ms) / 1000 as unsent
            from in_each group by {of}, episode""",
        # All partitions of a producer have the same epoch.
        numbered_epochs=f"""
            select b.cluster, b.client, b.topic, e.episode, known_id,
                max(producer_epoch) - min(producer_epoch - epochs) as epochs
            from {in_episode} where epochs > 0 group by b.cluster, b.client, b.topic, e.episode, known_id""",
        new_epochs=f"select {of}, episode, sum(epochs) as epochs from numbered_epochs group by {of}, episode",
        answer=f"""
            select e.cluster, e.client, e.topic, e.records, e.batches, e.unanswered, p.partitions, e.errors, e.broker,
                e.broker_id, case when s.episode is null then 0 else n.epochs end as epochs,
                coalesce(s.skipped_ms, 0) as skipped_ms, s.unsent, coalesce(s.is_rated, false) as is_rated,
                e.first_us, e.last_us
            from episodes e
            join in_partitions p on {of_log.format("e", "p")} and e.episode = p.episode
            left join skips s on {of_log.format("e", "s")} and e.episode = s.episode
            left join new_epochs n on {of_log.format("e", "n")} and e.episode = n.episode
            order by e.records desc, e.cluster nulls first, e.client nulls first, e.topic nulls first, e.first_us""",
    )


def judge_given_up(row: GivenUp, limits: Limits) -> Iterator[Finding]:
    place = {"client": row.client, "topic": row.topic, "broker": row.broker, "broker_id": row.broker_id}
    unsent = int(float(f"{row.unsent:.2g}")) if row.unsent is not None and row.is_rated else None
    likely = row.records + (row.unsent or 0)
    is_open = bool(row.skipped_ms) and not unsent  # nobody knows how many more: the time tells
    yield found(
        "records_given_up",
        severity(limits, failed=round(likely), stood_still_ns=row.skipped_ms * 1_000_000 if is_open else None),
        max(likely / 1e5, row.skipped_ms / 60e3 if is_open and row.unsent is None else 0),
        row.cluster,
        at(row.client, f"topic {clean(row.topic)}"),
        {name: value for name, value in place.items() if value is not None},
        (row.first_us, row.last_us),
        {
            "given_up_records": row.records,
            "given_up_batches": row.batches,
            "errors": row.errors,
            "partitions": row.partitions,
            "unanswered": row.unanswered or None,
            "new_epochs": row.epochs or None,
            "unsent_ns": row.skipped_ms * 1_000_000 or None,
            "about_records": unsent or None,
            "at_least_records": row.records if is_open else None,
        },
    )


PROBES = (
    Probe(
        ("records_given_up",),
        ("exchanges", "partitions", "batches", "connections"),
        given_up,
        GivenUp,
        judge_given_up,
    ),
)
