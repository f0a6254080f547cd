"""Fetched records, and their lag behind the end of the log that the leader reported.

A follower that answers a Fetch (KIP-392) may have a lower high watermark than the leader, so its consumer seems to be
at the end. A response to a request with a rack may come from a follower: its `partitions.end_offset` is null. It counts
as the leader's if the responding broker led the partition, by Metadata. Otherwise the Fetch is compared with the
highest end reported before; its lag is null until the leader has reported one since the log was created or truncated.

Tables before schema version 7 have no `end_offset`: their lag counts, unless Metadata shows another broker as leader.
Steps of a question over TABLES. Refuses to know clients and groups.
"""

from kproxy.analysis.lags.ends import LOG, OF, TOLD_ENDS, lives, same, turns
from kproxy.analysis.lags.followers import answered, same_row
from kproxy.analysis.questions.pieces import FETCHED, KEYS, TOPIC, name

TABLES = ("partitions", "exchanges", "changes", "topology")  # tables that the steps read
ONCE = ("turns", "answered")  # for `engine.ask`


def brought() -> dict[str, str]:
    """Steps up to `brought`: the rows of `pieces.FETCHED`, `lag_records` is null where it is unknown."""
    from kproxy.tables.schema import PARTITIONS  # heavy, and no help text needs it

    position = "f.high_watermark - f.lag_records"
    by_end = f"case when l.is_known > 0 then greatest(l.known_end, f.high_watermark) - ({position}) end"
    own = {"lag_records": f"case when a.is_followers then {by_end} else f.lag_records end"}
    chosen = ", ".join(f"{own.get(each, f'f.{name(each)}')} as {name(each)}" for each in PARTITIONS.schema.names)
    return {
        "fetched": FETCHED,
        "told_ends": TOLD_ENDS,
        **turns(),
        **lives(),
        **answered(),
        "followed_logs": f"select distinct {OF} from answered where is_followers",
        "ends_by_then": f"""
            select {", ".join(f"t.{each}" for each in (*KEYS, *LOG))},
                max(t.end_offset) over by_then as known_end,
                max(case when t.is_leaders or not a.is_followers then 1 else 0 end) over by_then as is_known
            from lived_ends t join followed_logs w on {same("t", "w")}
            left join answered a on {same_row("t", "a")}
            window by_then as (partition by {", ".join(f"t.{key}" for key in LOG)}, t.life
                order by t.us, t.source, t.connection, t.`number`
                rows between unbounded preceding and current row)""",
        "brought": f"""
            select {chosen}
            from (select *, {TOPIC} as of_topic from fetched) f
            left join answered a on {same_row("f", "a", "of_topic")}
            left join ends_by_then l on {same_row("f", "l", "of_topic")}""",
    }
