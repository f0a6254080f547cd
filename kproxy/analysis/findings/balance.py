"""Findings about how load is spread: hot partitions, hot brokers, brokers that are slower than the others.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import moments, timed
from kproxy.analysis.findings.finding import WARNING, Finding, Probe, Tables, broker_name, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions import topics
from kproxy.analysis.questions.pieces import ALL_BYTES, GROUPS, KNOWN_BROKERS, MS, TOPIC, keyed, of_clients, percentiles


class Hot(NamedTuple):
    """The hottest partition of a topic."""

    cluster: str | None
    topic: str | None
    api: str
    partition: int
    size: int
    all_size: int
    requests: int  # to the topic
    partitions: int
    busy: int
    share: float
    times_even: float
    first_us: int | None
    last_us: int | None


def hot(tables: Tables, limits: Limits) -> Frame:
    """Rows of Hot, by topic, those with the most excess first; Fetch counts where nobody wrote."""
    skew = topics.skew(tables["partitions"], tables["exchanges"], tables["topology"])
    return ask(
        {"skew": skew, "raw": tables["partitions"]},
        spans=f"""
            select cluster, {TOPIC} as topic, min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us
            from raw where api in ('Produce', 'Fetch') group by cluster, {TOPIC}""",
        placed="""
            select *, sum(bytes) over per_topic as all_bytes, sum(exchanges) over per_topic as requests,
                row_number() over (partition by cluster, topic, api order by bytes desc, `partition`) as place,
                min(case when api = 'Produce' then 0 else 1 end) over (partition by cluster, topic) as is_read_only
            from skew window per_topic as (partition by cluster, topic, api)""",
        answer=f"""
            select p.cluster, p.topic, api, `partition`, bytes, all_bytes, requests, partitions,
                partitions - idle as busy, share, times_even, s.first_us, s.last_us
            from placed p left join spans s
                on p.cluster is not distinct from s.cluster and p.topic is not distinct from s.topic
            where place = 1 and (api = 'Produce' or api = 'Fetch' and is_read_only = 1) and partitions > 1
                and coalesce(p.topic, '') not like '!_!_%' escape '!'
                and all_bytes >= {limits.hot_bytes_min} and requests >= {limits.hot_partition_batches}
                and times_even >= least({limits.hot_partition_times}, partitions)
            order by excess_bytes desc, p.cluster nulls first, p.topic nulls first, api""",
    )


def judge_hot(row: Hot, limits: Limits) -> Iterator[Finding]:
    # One of two or three partitions has at most three times an even share: require nearly all bytes.
    is_hot = row.times_even >= limits.hot_partition_times or (row.partitions <= 3 and row.share >= 0.9)
    if not is_hot:
        return
    yield found(
        "hot_partition",
        WARNING,
        row.share * row.all_size / 1e9,
        row.cluster,
        f"topic {clean(row.topic)}, partition {row.partition}",
        {"topic": row.topic, "partition": row.partition, "api": row.api},
        (row.first_us, row.last_us),
        {
            "share": row.share,
            "times_even": row.times_even,
            "partitions": row.partitions,
            "idle": row.partitions - row.busy,
            "bytes": row.size,
            "topic_bytes": row.all_size,
            "api": row.api,
        },
    )


class Broker(NamedTuple):
    """A broker's work for clients, compared with the other brokers of its cluster."""

    cluster: str | None
    broker: str
    broker_id: int | None
    requests: int
    size: int
    produces: int
    p99_ns: int | None
    brokers: int  # with enough requests
    all_size: int
    others_p99_ns: int | None  # the median of the other brokers' p99
    rank: int  # by p99: 1 is the slowest of the cluster
    first_us: int
    last_us: int
    slow: int  # Produce requests that took longer than the limit for a slow broker
    moments: str | None = None  # of the slow ones
    shared: int = 0  # slow ones in seconds in which requests at another broker were as slow


def brokers(tables: Tables, limits: Limits) -> Frame:
    """Rows of Broker, those with the most bytes first; brokers with hardly any requests are left out."""
    own = """case when api = 'Produce'
        then coalesce(broker_ns, latency_ns - coalesce(queue_ns, 0) - coalesce(muted_ns, 0)) end"""
    return ask(
        {"exchanges": tables["exchanges"]},
        known=KNOWN_BROKERS,
        exchanged=keyed("exchanges"),
        each_one=f"""
            select cluster, broker_key as broker, min({GROUPS["broker"]}) as address, max(broker_id) as broker_id,
                count(*) as requests, sum({ALL_BYTES}) as bytes, count({own}) as produces, {percentiles(own, "", 0.99)},
                min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us
            from exchanged where outcome = 'answered' and {of_clients(False)}
            group by cluster, broker_key having count(*) >= {limits.broker_requests_min}
                or count({own}) >= {limits.produces_min}""",
        fast=f"""
            select cluster, broker, p99_ns from each_one where produces >= {limits.produces_min}""",
        others="""
            select a.cluster, a.broker, percentile_approx(b.p99_ns, 0.5, 10000) as others_p99_ns
            from fast a join fast b on a.cluster is not distinct from b.cluster and a.broker != b.broker
            group by a.cluster, a.broker""",
        bounds=f"""
            select a.cluster, a.broker, least({limits.very_slow_produce_ms * MS:.0f}, greatest(
                {limits.slow_produce_ms * MS:.0f}, {limits.slow_broker_times} * coalesce(o.others_p99_ns, 1e18)))
                as bound_ns
            from each_one a left join others o on a.cluster is not distinct from o.cluster and a.broker = o.broker""",
        produced=f"""
            select cluster, broker_key as broker, {own} as own_ns, api, unix_micros(`time`) as us from exchanged
            where api = 'Produce' and outcome = 'answered' and {own} >= {limits.slow_produce_ms * MS:.0f}""",
        slow_ones="""
            select b.cluster, b.broker, p.api, p.us from bounds b join produced p
                on b.cluster is not distinct from p.cluster and b.broker = p.broker and p.own_ns >= b.bound_ns""",
        slow_elsewhere="""
            select distinct b.cluster, b.broker, cast(floor(p.us / 1e6) as bigint) as second
            from bounds b join produced p
                on b.cluster is not distinct from p.cluster and b.broker != p.broker and p.own_ns >= b.bound_ns""",
        slow="""
            select s.cluster, s.broker, count(*) as slow, count(e.second) as shared
            from slow_ones s left join slow_elsewhere e on s.cluster is not distinct from e.cluster
                and s.broker = e.broker and cast(floor(s.us / 1e6) as bigint) = e.second
            group by s.cluster, s.broker""",
        **timed("slow_ones", "cluster, broker", "api"),
        answer="""
            select a.cluster, a.address as broker, a.broker_id, requests, bytes, produces, p99_ns,
                count(*) over (partition by a.cluster) as brokers,
                sum(bytes) over (partition by a.cluster) as all_bytes, others_p99_ns,
                cast(row_number() over (partition by a.cluster order by p99_ns desc nulls last, a.broker) as int)
                    as `rank`, first_us, last_us, coalesce(s.slow, 0) as slow, t.moments,
                coalesce(s.shared, 0) as shared
            from each_one a left join others o on a.cluster is not distinct from o.cluster and a.broker = o.broker
            left join slow s on a.cluster is not distinct from s.cluster and a.broker = s.broker
            left join times t on a.cluster is not distinct from t.cluster and a.broker = t.broker
            order by bytes desc, a.cluster nulls first, a.address""",
    )


def judge_broker(row: Broker, limits: Limits) -> Iterator[Finding]:
    name = broker_name(row.broker, row.broker_id)
    place = {"broker": row.broker, "broker_id": row.broker_id}
    times = row.first_us, row.last_us
    share = row.size / row.all_size if row.all_size else 0.0
    times_even = share * row.brokers
    is_hot = times_even >= limits.hot_broker_times or (row.brokers == 2 and share >= 0.9)
    if row.brokers > 1 and is_hot and row.requests >= limits.broker_requests_min and row.size >= limits.hot_bytes_min:
        evidence = {
            "share": share,
            "times_even": times_even,
            "brokers": row.brokers,
            "bytes": row.size,
            "requests": row.requests,
        }
        yield found("hot_broker", WARNING, share * row.size / 1e10, row.cluster, name, place, times, evidence)
    if row.produces < limits.produces_min or row.p99_ns is None:
        return
    floor = limits.slow_produce_ms * MS
    others = row.others_p99_ns
    if row.slow < limits.slow_produces_min:
        return  # a p99 of a hundred requests is the second slowest of them
    is_slower = others is not None and row.p99_ns >= max(floor, limits.slow_broker_times * others)
    is_very_slow = row.p99_ns >= limits.very_slow_produce_ms * MS
    if is_slower or (is_very_slow and row.rank == 1):
        # If writes at another broker wait as long at the same time, the cause is not one broker: a pause, for example.
        is_of_all = (not is_slower or 2 * row.shared > row.slow) and others is not None
        slow = {
            "p99_ns": row.p99_ns,
            "others_p99_ns": None if is_of_all else others,
            "produces": row.produces,
            "slow": row.slow,
            "numbers_of": name if is_of_all else None,
        }
        if is_of_all:
            name, place = "all brokers", {}
        yield found("slow_broker", WARNING, row.p99_ns / 10e9, row.cluster, name, place, times, slow)


PROBES = (
    Probe(("hot_partition",), ("partitions", "exchanges", "topology"), hot, Hot, judge_hot),
    Probe(
        ("hot_broker", "slow_broker"),
        ("exchanges",),
        brokers,
        Broker,
        judge_broker,
        moments=lambda row: moments(row.moments),
    ),
)
