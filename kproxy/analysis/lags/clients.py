"""The lag of clients, by their fetches and by the offsets that they commit for their groups.

A consumer that prefetches has fetched up to the end of the log while its application is thousands of records behind.
The committed offset shows this, as in `kafka-consumer-groups --describe`. The answer has both lags. Refuses to know
files, sessions and formats of output.
"""

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.lags.brought import ONCE, brought
from kproxy.analysis.lags.ends import same
from kproxy.analysis.lags.followers import NO_LEADER
from kproxy.analysis.lags.groups import group_lag
from kproxy.analysis.questions.pieces import TOPIC, at_last, bucket, of_exchanges


def lag(
    partitions: Frame,
    exchanges: Frame,
    committed_offsets: Frame,
    group_events: Frame,
    changes: Frame,
    topology: Frame,
    every: str | None = None,
    replicas: bool = False,
    where: str | None = None,
) -> Frame:
    """Consumer lag by client, topic and partition: first, last and largest, by their fetches.

    A client that prefetches is at the end of the log by its fetches, although its application may be behind. Therefore
    `committed_lag_records` is the lag by the offset that the client last committed for its group, and `growing` is true
    if either lag grows. `last_lag_ns` is the age of the newest record that the client received. A Fetch that a follower
    answered is compared with the end that earlier responses of the leader showed; `unknown` is the reason for a null
    lag. With --every there are only the lags by fetches. `group-lag` has more about groups.
    """
    tables = {"partitions": partitions, "exchanges": exchanges, "changes": changes, "topology": topology}
    fetched = f"""
        select {f"{bucket(every)} as `time`," if every else ""} cluster, client, {TOPIC} as topic, `partition`,
            count(*) as fetches,
            {at_last("lag_records", "min_by")} as first_lag_records,
            {at_last("lag_records")} as last_lag_records,
            max(lag_records) as max_lag_records,
            {at_last("lag_ns")} as last_lag_ns,
            {at_last("high_watermark")} as high_watermark,
            max(`time`) as last,
            {at_last("lag_records")} > {at_last("lag_records", "min_by")} as growing
        from ours where {where or "true"} group by all"""
    steps = {
        **brought(),
        "ours": of_exchanges("brought", ("Fetch",), replicas),
        "of_fetches": fetched,
    }
    if every:
        by = "`time`, last_lag_records desc, max_lag_records desc, cluster nulls first, client nulls first"
        answer = f"select * from of_fetches order by {by}, topic nulls first, `partition`"
        return ask(tables, once=ONCE, **steps, answer=answer)
    groups = group_lag(partitions, exchanges, committed_offsets, group_events, changes, topology)
    return ask(
        {**tables, "groups_behind": groups},
        once=ONCE,
        **steps,
        of_commits="""
            select cluster, client, topic, `partition`, max(lag_records) as lag_records,
                count_if(growing) > 0 as growing
            from groups_behind where client is not null group by cluster, client, topic, `partition`""",
        answer=f"""
            select f.cluster, f.client, f.topic, f.`partition`, f.fetches, f.first_lag_records, f.last_lag_records,
                f.max_lag_records, f.last_lag_ns, c.lag_records as committed_lag_records, f.high_watermark, f.last,
                coalesce(f.growing, false) or coalesce(c.growing, false) as growing,
                case when f.last_lag_records is null then '{NO_LEADER}' end as `unknown`
            from of_fetches f left join of_commits c on {same("f", "c")} and f.client is not distinct from c.client
            order by greatest(coalesce(f.last_lag_records, 0), coalesce(c.lag_records, 0)) desc, f.max_lag_records desc,
                f.cluster nulls first, f.client nulls first, f.topic nulls first, f.`partition`""",
    )
