"""What fetches brought, and how far they were behind the end that the leader of their log told.

A follower that answers a Fetch (KIP-392) has a lower high watermark than the leader, so a consumer that reads from it
looks as if it were at the end. Answers to requests that name a rack may be a follower's: `partitions.end_offset` is
null there. They count as the leader's where the broker that answered led the partition, as Metadata says. All others
are compared with the highest end that was told by then; their lag is null until an answer of the leader told one, since
the log was created or truncated.

Tables from before schema version 7 have no `end_offset`: fetches are as far behind as they say there, unless another
broker is known to lead. Steps of a question over TABLES. Refuses to know clients and groups.
"""

from kproxy.analysis.lags.ends import LOG, OF, TOLD_ENDS, lives, same, turns
from kproxy.analysis.pieces import FETCHED, KEYS, TOPIC, name

TABLES = ("partitions", "exchanges", "changes", "topology")  # that the steps are over
ONCE = ("turns", "answered")  # for `engine.ask`
# Why it is not known how far a fetch was behind.
NO_LEADER = "a follower answered, and no answer of the leader told where the log ends"

_FETCH = "api = 'Fetch' and direction = 'response' and high_watermark >= 0"


def brought() -> dict[str, str]:
    """Steps up to `brought`: the rows of `pieces.FETCHED`, `lag_records` null where it is not known."""
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
        **_answered(),
        "ends_by_then": f"""
            select {", ".join(f"t.{each}" for each in (*KEYS, *LOG))},
                max(t.end_offset) over by_then as known_end,
                max(case when t.is_leaders or not a.is_followers then 1 else 0 end) over by_then as is_known
            from lived_ends t join followed_logs w on {same("t", "w")}
            left join answered a on {_same_row("t", "a")}
            window by_then as (partition by {", ".join(f"t.{key}" for key in LOG)}, t.life
                order by t.us, t.source, t.connection, t.`number`
                rows between unbounded preceding and current row)""",
        "brought": f"""
            select {chosen}
            from (select *, {TOPIC} as of_topic from fetched) f
            left join answered a on {_same_row("f", "a", "of_topic")}
            left join ends_by_then l on {_same_row("f", "l", "of_topic")}""",
    }


def _answered() -> dict[str, str]:
    """Step `answered`: the answers that may be a follower's, with `is_followers`; and `followed_logs`, their logs."""
    led_by = "substr(leader, 21)"
    return {
        "racked": f"""
            select p.*, cast(e.broker_id as string) as broker
            from (select {", ".join(KEYS)}, cluster, {TOPIC} as topic, `partition`, unix_micros(`time`) as us
                from partitions where {_FETCH} and end_offset is null) p
            left join (select {", ".join(KEYS)}, broker_id from exchanges where api = 'Fetch') e
                on {" and ".join(f"p.{key} = e.{key}" for key in KEYS)}""",
        "telling_sources": "select source as of_source from partitions where end_offset is not null group by source",
        "elections": f"""
            select distinct t.cluster, t.topic, t.`partition`, unix_micros(t.`time`) as us, t.leader
            from topology t join (select distinct {OF} from racked) w on {same("t", "w")}
            where t.kind = 'partition' and t.leader is not null""",
        "led_until": f"""
            select *, max(case when leader_id is not null
                    then concat(lpad(cast(us as string), 20, '0'), leader_id) end) over (
                partition by {OF} order by us, leader_id is null
                rows between unbounded preceding and current row) as leader
            from (
                select {", ".join(KEYS)}, {OF}, us, broker, cast(null as string) as leader_id from racked
                union all
                select null, null, null, {OF}, us, null, cast(leader as string) from elections) m""",
        "answered": f"""
            select {", ".join(KEYS)}, {OF}, case when {led_by} = broker then false else true end as is_followers
            from led_until u left join telling_sources s on u.source = s.of_source
            where u.source is not null
                and (s.of_source is not null or leader is not null and broker is not null)""",
        "followed_logs": f"select distinct {OF} from answered where is_followers",
    }


def _same_row(one: str, other: str, topic: str = "topic") -> str:
    """A condition: two rows of one answer are of one partition."""
    keys = " and ".join(f"{one}.{key} = {other}.{key}" for key in KEYS)
    return f"{keys} and {one}.{topic} = {other}.topic and {one}.`partition` = {other}.`partition`"
