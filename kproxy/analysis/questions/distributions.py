"""Questions whose answers are drawn: distributions of latencies and batch sizes, retransmissions, leader changes.

Their steps are fixed, so that the answers of two captures can be laid side by side. Refuses to know files, sessions and
how anything is drawn.
"""

from collections.abc import Sequence
from itertools import pairwise

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.lags.brought import ONCE, brought
from kproxy.analysis.lags.brought import TABLES as OF_FETCHES
from kproxy.analysis.questions.pieces import (
    EXCHANGE_NAMES,
    TOPIC,
    at_last,
    bucket,
    grouped,
    groups,
    of_clients,
    of_exchanges,
    order,
)

# Latencies by 1, 2, 5 of each power of ten, from 10 µs to 100 s; below and above: one class each.
LATENCIES_NS = (*(step * 10**power for power in range(4, 11) for step in (1, 2, 5)), 10**11)
# Records of a batch: 1, 2 to 4, 5 to 9, ... Those of one record stand alone.
RECORDS = (1, *(step * 10**power for power in range(6) for step in (2, 5, 10)))


def _class(column: str, bounds: Sequence[int], first: str) -> str:
    """The largest bound that a value reaches; `first` where it is below all bounds."""
    cases = " ".join(f"when {column} >= {bound} then cast({bound} as bigint)" for bound in reversed(bounds))
    return f"case {cases} when {column} is not null then {first} end"


def _next(column: str, bounds: Sequence[int]) -> str:
    """The bound after this one, null after the last."""
    pairs = pairwise(bounds)
    return f"case {' '.join(f'when {column} = {one} then cast({other} as bigint)' for one, other in pairs)} end"


def spread(exchanges: Frame, by: Sequence[str] = ("api",), every: str | None = None, replicas: bool = False) -> Frame:
    """Distribution of latencies, for a heat map: exchanges by classes of latency, over time too.

    A class holds latencies from `from_ns` up to, but not including, `to_ns`. The bounds are 1, 2 and 5 times each power
    of ten, from 10 µs to 100 s. Shorter latencies are in the class from 0; the class of longer ones has no `to_ns`.
    """
    return ask(
        {"exchanges": exchanges},
        counted=f"""
            select {groups(by, every)} {_class("latency_ns", LATENCIES_NS, "cast(0 as bigint)")} as from_ns,
                count(*) as exchanges
            from exchanges where latency_ns is not null and {of_clients(replicas)} group by all""",
        answer=f"""
            select {grouped(by, every)} from_ns, {_next("from_ns", (0, *LATENCIES_NS))} as to_ns, exchanges
            from counted {order(by=(*by, "from_ns"), every=every)}""",
    )


def batch_sizes(batches: Frame, exchanges: Frame, every: str | None = None, where: str | None = None) -> Frame:
    """Records per batch of producers: batches by classes of records, and codec.

    A class holds batches of at least `from_records` and fewer than `to_records` records; batches of one record have a
    class of their own. Null: batches of magic 0 and 1 that hide their number of records.
    """
    return ask(
        {"batches": batches, "exchanges": exchanges},
        sent="select * from batches where api = 'Produce' and direction = 'request' and not control",
        ours=of_exchanges("sent", ("Produce",)) if where else "select * from sent",
        counted=f"""
            select {f"{bucket(every)} as `time`," if every else ""}
                {_class("records", RECORDS, "cast(0 as bigint)")} as from_records, codec, count(*) as batches,
                sum(records) as records, sum(bytes) as bytes
            from ours where {where or "true"} group by all""",
        answer=f"""
            select {"`time`," if every else ""} from_records, {_next("from_records", (0, *RECORDS))} as to_records,
                codec, batches, records, bytes
            from counted {order(by=("from_records", "codec"), every=every)}""",
    )


def behind(
    partitions: Frame,
    exchanges: Frame,
    changes: Frame,
    topology: Frame,
    by: Sequence[str] = ("client", "topic"),
    every: str | None = None,
    replicas: bool = False,
    where: str | None = None,
) -> Frame:
    """Lag of clients in a topic, by their fetches: the largest lag of a partition, over time.

    The last Fetch of each partition in a step counts. `lag_records` and `lag_ns` are the largest lags among the
    `partitions`, `sum_lag_records` is the sum of their lags. `unknown_partitions` are not in the sum: a follower
    answered there, and no earlier response of the leader showed the end of the log. A partition that several clients
    fetch counts for each of them. With --by broker, a partition counts for each broker that answered its fetches, with
    that broker's last response.
    """
    names = [each for each in by if each != "cluster"]  # each row has its cluster anyhow
    own = {each: f"`{each}`" for each in EXCHANGE_NAMES} | {"topic": TOPIC}
    return ask(
        dict(zip(OF_FETCHES, (partitions, exchanges, changes, topology), strict=True)),
        once=ONCE,
        **brought(),
        ours=of_exchanges("brought", ("Fetch",), replicas),
        latest=f"""
            select {groups(names, every, own)} cluster, client as of_client, {TOPIC} as of_topic,
                `partition` as of_partition, {at_last("lag_records")} as last_records, {at_last("lag_ns")} as last_ns,
                count(*) as answers
            from ours where {where or "true"} group by all""",
        answer=f"""
            select {"`time`, " if every else ""}cluster, {grouped(names)} max(last_records) as lag_records,
                max(last_ns) as lag_ns, sum(last_records) as sum_lag_records, count(*) as partitions,
                sum(answers) as fetches, count_if(last_records is null) as unknown_partitions
            from latest group by all
            {order("lag_records desc", "cluster nulls first", by=names, every=every)}""",
    )


def retransmissions(
    exchanges: Frame, by: Sequence[str] = ("broker",), every: str | None = None, replicas: bool = False
) -> Frame:
    """TCP retransmissions: segments, and the exchanges that lost segments delayed, by broker, client or API, over time.

    `with_retransmissions` counts all exchanges with a retransmitted segment: most of these delay nothing, since the
    original had arrived. Only captures show retransmissions: tables that a proxy recorded have null for them.
    """
    return ask(
        {"exchanges": exchanges},
        answer=f"""
            select {groups(by, every)} count(*) as exchanges,
                sum(case when loss_ns > 0 then 1 when retransmissions is not null then 0 end) as delayed,
                sum(retransmissions) as retransmissions,
                avg(case when loss_ns > 0 then 1e0 when retransmissions is not null then 0e0 end) as delayed_share,
                sum(case when retransmissions > 0 then 1 when retransmissions is not null then 0 end)
                    as with_retransmissions
            from exchanges where {of_clients(replicas)}
            group by all
            {order("retransmissions desc nulls last", by=by, every=every)}""",
    )


def leader_changes(leadership: Frame, every: str | None = None) -> Frame:
    """How often leaders and in-sync replicas changed, by kind of change, over time."""
    times = f"{bucket(every)} as `time`, " if every else ""
    return ask(
        {"leadership": leadership},
        with_place="select *, concat_ws(' ', topic, cast(`partition` as string)) as place from leadership",
        answer=f"""
            select {times} cluster, change, count(*) as changes, count(distinct place) as partitions,
                max(time_ns) as last_ns
            from with_place group by all
            {order("changes desc", "cluster nulls first", "change", every=every)}""",
    )
