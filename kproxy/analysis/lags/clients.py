"""How far clients are behind: by what they fetch, and by what they commit for their groups.

A consumer that prefetches is at the end of the log by its fetches while its application is thousands of records
behind: what a group has committed decides, as in `kafka-consumer-groups --describe`. Both stand in one answer.
Refuses to know files, sessions and formats of output.
"""

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.lags.ends import LOG, OF, TOLD_ENDS, same, turns
from kproxy.analysis.lags.groups import group_lag
from kproxy.analysis.pieces import FETCHED, KEYS, TOPIC, at_last, bucket, name, of_exchanges


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
    """How far consumers are behind, by client, topic and partition: first, last and most, as their fetches say.

    Clients that prefetch are at the end by their fetches: `committed_lag_records` is what the group has not committed
    for which the client committed last, and `growing` is true where either of both lags grows. `last_lag_ns` is the age
    of the newest record that the client got. A fetch from a follower is behind the end that answers of the leader told
    before. Over time there are fetches only. `group-lag` has more of groups.
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
        "told_ends": TOLD_ENDS,
        **turns(),
        **_fetched(),
        "ours": of_exchanges("brought", ("Fetch",), replicas),
        "of_fetches": fetched,
    }
    if every:
        by = "`time`, last_lag_records desc, max_lag_records desc, cluster nulls first, client nulls first"
        answer = f"select * from of_fetches order by {by}, topic nulls first, `partition`"
        return ask(tables, once=("turns",), **steps, answer=answer)
    groups = group_lag(partitions, exchanges, committed_offsets, group_events, changes, topology)
    return ask(
        {**tables, "groups_behind": groups},
        once=("turns",),
        **steps,
        of_commits="""
            select cluster, client, topic, `partition`, max(lag_records) as lag_records,
                count_if(growing) > 0 as growing
            from groups_behind where client is not null group by cluster, client, topic, `partition`""",
        answer=f"""
            select f.cluster, f.client, f.topic, f.`partition`, f.fetches, f.first_lag_records, f.last_lag_records,
                f.max_lag_records, f.last_lag_ns, c.lag_records as committed_lag_records, f.high_watermark, f.last,
                f.growing or coalesce(c.growing, false) as growing
            from of_fetches f left join of_commits c on {same("f", "c")} and f.client is not distinct from c.client
            order by greatest(f.last_lag_records, coalesce(c.lag_records, 0)) desc, f.max_lag_records desc,
                f.cluster nulls first, f.client nulls first, f.topic nulls first, f.`partition`""",
    )


def _fetched() -> dict[str, str]:
    """Step `brought`, behind `told_ends` and `turns`: what fetches brought, and how far they were behind.

    Those that followers answered (KIP-392) know an earlier end. In the life that a log has at the end; before, and
    where no answer of a leader was seen, they are as far behind as they say.
    """
    from kproxy.tables.schema import PARTITIONS  # heavy, and no help text needs it

    position = "f.high_watermark - f.lag_records"
    lag_records = f"case when l.known_end > f.high_watermark then l.known_end - ({position}) else f.lag_records end"
    own = {"lag_records": lag_records}
    chosen = ", ".join(f"{own.get(each, f'f.{name(each)}')} as {name(each)}" for each in PARTITIONS.schema.names)
    keys = " and ".join(f"f.{key} = l.{key}" for key in KEYS)
    return {
        "fetches": FETCHED,
        "follower_logs": f"""
            select {OF} from (
                select cluster, {TOPIC} as topic, `partition`, end_offset,
                    api = 'Fetch' and high_watermark >= 0 and end_offset is null as is_by_follower
                from partitions where direction = 'response') p
            group by {OF} having count_if(is_by_follower) > 0 and count(end_offset) > 0""",
        "last_turns": f"select {OF}, max(us) as from_us from turns group by {OF}",
        "ends_by_then": f"""
            select {", ".join(f"t.{each}" for each in (*KEYS, *LOG))}, max(t.end_offset) over (
                partition by {", ".join(f"t.{key}" for key in LOG)}
                order by t.us, t.source, t.connection, t.`number`
                rows between unbounded preceding and current row) as known_end
            from told_ends t join follower_logs w on {same("t", "w")} left join last_turns b on {same("t", "b")}
            where t.us > coalesce(b.from_us, -1)""",
        "brought": f"""
            select {chosen} from fetches f left join ends_by_then l
                on {keys} and coalesce(f.topic, f.topic_id) = l.topic and f.`partition` = l.`partition`""",
    }
