"""Questions about topics and their consumers: hot partitions, batches, fetches, commits.

Brokers that replicate fetch and list offsets too: they are left out unless `replicas` asks for them. Topics of
different clusters are never counted together. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Sequence

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.lags import COMMITS, COMMITTING
from kproxy.analysis.questions.pieces import (
    RATE,
    TOPIC,
    at_last,
    bucket,
    groups,
    ns,
    of_clients,
    of_exchanges,
    order,
    percentiles,
    without_brokers,
)

_UNKNOWN = 3  # UNKNOWN_TOPIC_OR_PARTITION
_NUMBER = f"case when `partition` = {2**31 - 1} then {2**31 - 2} else `partition` end"  # one more is an int
MAX_LISTED = 200_000  # partitions, of all topics and steps of time: requests can name any number up to 2**31 - 1
_MOVING = ("Produce", "Fetch", "ShareFetch")


def skew(
    partitions: Frame,
    exchanges: Frame,
    topology: Frame,
    every: str | None = None,
    replicas: bool = False,
    where: str | None = None,
    traffic: str | None = None,
) -> Frame:
    """Hot partitions: the bytes written to and read from each, against an even share of its topic's bytes.

    `partitions` is the topic's number of partitions as brokers report it, or else a lower bound: the highest number in
    any request or response, plus one, without numbers that brokers refused as unknown. `times_even` is 1 where a
    partition has an even share of the bytes; `excess_bytes` are its bytes above that share, the largest first; `idle`
    is the number of the topic's partitions without bytes: these come last. With --every, each step has its own shares.
    A condition on partitions filters rows of the answer; one on clients, hosts or brokers filters the traffic before it
    is divided. Beyond 200,000 partitions in all, idle ones are not listed.
    """
    step, also = ("`time`, ", "a.`time` = s.`time` and ") if every else ("", "")
    # Only a condition on traffic needs the client, host and broker of each row.
    clients_own = "select * from moved" if replicas else without_brokers("moved")
    return ask(
        {"partitions": partitions, "exchanges": exchanges, "topology": topology},
        once=("summed",),
        met_numbers=f"""
            select cluster, {TOPIC} as topic, `partition` from partitions
            group by all having coalesce(min(error_code), 0) != {_UNKNOWN}""",
        seen=f"""
            select cluster, topic, cast(max({_NUMBER}) + 1 as int) as partitions
            from met_numbers group by all
            union all
            select cluster, topic, cast(greatest(max(partitions), max({_NUMBER}) + 1) as int) as partitions
            from topology where kind in ('topic', 'partition') group by all""",
        counts="select cluster, topic, max(partitions) as partitions from seen group by all",
        moved="""
            select * from partitions
            where direction = case when api = 'Produce' then 'request'
                when api in ('Fetch', 'ShareFetch') then 'response' end""",
        ours=of_exchanges("moved", _MOVING, replicas) if traffic else clients_own,
        summed=f"""
            select {f"{bucket(every)} as `time`," if every else ""} cluster, {TOPIC} as topic, api, `partition`,
                sum(bytes) as bytes, sum(records) as records, count(*) as exchanges
            from ours where {traffic or "true"} group by all""",
        met=f"select distinct {step}cluster, topic, api from summed",
        counted=f"""
            select m.*, coalesce(c.partitions, 1) as partitions,
                sum(cast(coalesce(c.partitions, 1) as bigint)) over (
                    order by c.partitions, {step}m.cluster, m.topic, m.api
                    rows between unbounded preceding and current row) <= {MAX_LISTED} as is_listed
            from met m left join counts c
                on m.cluster is not distinct from c.cluster and m.topic is not distinct from c.topic""",
        all_of=f"""
            select {step}cluster, topic, api, partitions, explode(sequence(0, partitions - 1)) as `partition`
            from counted where is_listed and partitions > 0
            union all
            select {"c.`time`," if every else ""} c.cluster, c.topic, c.api, c.partitions, s.`partition`
            from counted c join summed s
                on {"c.`time` = s.`time` and " if every else ""}c.cluster is not distinct from s.cluster
                and c.topic is not distinct from s.topic and c.api = s.api
            where not (c.is_listed and s.`partition` between 0 and c.partitions - 1)""",
        shared=f"""
            select {"a.`time`," if every else ""} a.cluster, a.topic, a.api, a.`partition`, a.partitions,
                coalesce(s.bytes, 0) as bytes, s.records, coalesce(s.exchanges, 0) as exchanges,
                sum(s.bytes) over per_topic as all_bytes,
                sum(case when s.bytes > 0 and s.`partition` < a.partitions then 1 else 0 end) over per_topic as busy
            from all_of a left join summed s
                on {also}a.cluster is not distinct from s.cluster and a.topic is not distinct from s.topic
                and a.api = s.api and a.`partition` = s.`partition`
            window per_topic as (partition by {"a.`time`," if every else ""} a.cluster, a.topic, a.api)""",
        answer=f"""
            select {step}cluster, topic, api, `partition`, bytes, records, exchanges,
                try_divide(bytes, all_bytes) as share,
                try_divide(bytes, all_bytes / partitions) as times_even,
                cast(round(bytes - all_bytes / partitions) as bigint) as excess_bytes,
                partitions, partitions - busy as idle
            from shared where {where or "true"}
            order by {step}excess_bytes desc nulls last, cluster nulls first, topic nulls first, api, `partition`""",
    )


def batching(batches: Frame, exchanges: Frame, every: str | None = None, where: str | None = None) -> Frame:
    """Batching by producers: batches, their records and bytes, and codec, by client and topic.

    `bytes_per_record` is the size as sent, compressed. `ratio` is how many times larger a record is in uncompressed
    batches of the same topic; null where the topic has none, since the size before compression is then unknown.
    `single_share` is the share of batches with one record, which cost as much as full ones: raise linger.ms and
    batch.size. Compressed batches of magic 0 and 1 hide their number of records, and count neither for these figures
    nor for `records`.
    """
    counted_bytes = "sum(case when records is not null then bytes end)"
    return ask(
        {"batches": batches, "exchanges": exchanges},
        sent="select * from batches where api = 'Produce' and direction = 'request' and not control",
        ours=of_exchanges("sent", ("Produce",)),
        plain=f"""
            select cluster, {TOPIC} as topic, try_divide({counted_bytes}, sum(records)) as plain
            from sent where codec = 'none' group by all""",
        counted=f"""
            select {f"{bucket(every)} as `time`," if every else ""} cluster, client, {TOPIC} as topic, codec,
                count(*) as batches, sum(records) as records, sum(bytes) as bytes,
                try_divide({counted_bytes}, sum(records)) as bytes_per_record,
                avg(case when records <= 1 then 1e0 when records > 1 then 0e0 end) as single_share,
                {percentiles("records", "records_", 0.5, 0.99, unit="")},
                {percentiles("bytes", "bytes_", 0.5, 0.99, unit="")}
            from ours where {where or "true"} group by all""",
        answer=f"""
            select {"`time`," if every else ""} c.cluster, client, c.topic, codec, batches, records, bytes,
                bytes_per_record,
                case when codec != 'none' then try_divide(plain, bytes_per_record) end as ratio,
                single_share, records_p50, records_p99, bytes_p50, bytes_p99
            from counted c left join plain p
                on c.cluster is not distinct from p.cluster and c.topic is not distinct from p.topic
            order by {"`time`," if every else ""} batches desc, c.cluster nulls first, client nulls first,
                c.topic nulls first, codec""",
    )


def fetching(
    exchanges: Frame, by: Sequence[str] = ("client", "broker"), every: str | None = None, replicas: bool = False
) -> Frame:
    """Fetches of consumers: the share of empty ones, fetches per second, and how long the broker let them wait.

    `empty_early` counts empty fetches that were answered before half of their max_wait_ms (fetch.max.wait.ms) had
    passed: over-polling. A Fetch whose body was not read (`records` is null) counts neither as empty nor as early.
    """
    return ask(
        {"exchanges": exchanges},
        answer=f"""
            select {groups(by, every)} count(*) as fetches, {RATE} as fetches_per_second,
                count_if(records = 0) as empty,
                count_if(records = 0 and latency_ns < {ns("max_wait_ms")} / 2) as empty_early,
                try_divide(count_if(records = 0), count_if(records is not null)) as empty_share,
                count_if(records is not null) as `read`,
                sum(records) as records, sum(response_bytes) as bytes, max(max_wait_ms) as max_wait_ms,
                {percentiles("latency_ns", "", 0.5, 0.99)}
            from exchanges
            where api in ('Fetch', 'ShareFetch') and outcome = 'answered' and {of_clients(replicas)}
            group by all
            {order("fetches desc", by=by, every=every)}""",
    )


def offsets(partitions: Frame, exchanges: Frame, every: str | None = None, where: str | None = None) -> Frame:
    """Offset commits of groups: rate, the longest gap between two commits, offsets that went back, refusals.

    Commits of transactions (TxnOffsetCommit) are included. The gaps are those between all commits: a condition is
    applied after they are computed.
    """
    keys = " and ".join(f"a.{key} = r.{key}" for key in ("source", "connection", "number"))
    return ask(
        {"partitions": partitions, "exchanges": exchanges},
        requests=f"select * from partitions where {COMMITS} and direction = 'request'",
        ours=of_exchanges("requests", COMMITTING),
        asked=f"select *, {TOPIC} as of_topic from ours where asked_group is not null",
        refusals=f"""
            select distinct source, connection, `number`, {TOPIC} as of_topic, `partition`, 1 as is_refused
            from partitions where {COMMITS} and direction = 'response' and error_code != 0""",
        ordered_commits=f"""
            select a.*, r.is_refused, unix_micros(a.`time`) - lag(unix_micros(a.`time`)) over before as gap_us,
                a.`offset` < lag(a.`offset`) over before as is_back
            from asked a left join refusals r
                on {keys} and a.of_topic = r.of_topic and a.`partition` = r.`partition`
            window before as (partition by a.cluster, a.asked_group, a.of_topic, a.`partition`
                order by a.`time`, a.connection, a.`number`, a.source)""",
        answer=f"""
            select {f"{bucket(every)} as `time`," if every else ""} cluster, asked_group as group_id,
                of_topic as topic, `partition`, count(*) as commits, {RATE} as commits_per_second,
                max(gap_us) * 1000 as longest_gap_ns,
                {at_last("`offset`", "min_by")} as first_offset,
                {at_last("`offset`")} as last_offset,
                count_if(is_back) as went_back, count_if(is_refused = 1) as refused, max(`time`) as last
            from ordered_commits where {where or "true"} group by all
            order by {"`time`," if every else ""} cluster nulls first, group_id, topic nulls first, `partition`""",
    )
