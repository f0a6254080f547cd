"""Committed partitions whose owner is a member that the capture lacks: its later commits are not in the tables.

A member that speaks inside TLS, or from a host whose traffic is not captured, takes partitions over: a member of the
capture loses them in a rebalance, and no other member of the capture gets them. From then on the offset that was
committed last proves nothing. Steps of a question over `group_events`, after `said_places` of `committed`. Refuses to
know lag.
"""

from kproxy.analysis.lags.committed import COMMITS, PLACE

_SOON_US = 1_000_000  # a member commits once more when it leaves, and the answer may come after its LeaveGroup
_LONG_US = 5_000_000  # auto.commit.interval.ms: sooner its successor has nothing to commit


def unseen() -> dict[str, str]:
    """Step `hidden`: the keys (PLACE) of offsets that members without requests in the tables may have replaced."""
    keys = ", ".join(f"p.{each}" for each in PLACE)
    same_place = " and ".join(f"{{0}}.{each} is not distinct from {{1}}.{each}" for each in PLACE)
    latest = "named_struct('g', coalesce(m.generation, -1), 'a', m.is_given, 't', m.us)"
    same_group = "{0}.cluster is not distinct from {1}.cluster and {0}.of_group = {1}.of_group"
    is_commit = f"({COMMITS} and direction = 'request' or direction = 'log')"
    return {
        "held_places": f"""
            select {", ".join(PLACE)}, max(unix_micros(`time`)) as told_us,
                max(case when {is_commit} then unix_micros(`time`) end) as committed_us
            from said_places where of_group is not null and of_topic is not null group by {", ".join(PLACE)}""",
        "moves": """
            select cluster, group_id as of_group, member_id, generation, time_ns / 1e3 as us,
                case when event = 'assigned' then 1 else 0 end as is_given, concat(', ', reason, ',') as listed,
                reason like '% more' as is_cut
            from group_events where event in ('assigned', 'revoked') and reason is not null""",
        "owned": f"""
            select {keys}, max(p.told_us) as told_us, max_by(m.is_given, {latest}) as is_given,
                max_by(m.member_id, {latest}) as member_id, max_by(m.us, {latest}) as us,
                max_by(m.is_cut, {latest}) as is_cut
            from held_places p join moves m on {same_group.format("p", "m")}
                and instr(m.listed, concat(', ', p.of_topic, '-', cast(p.`partition` as string), ',')) > 0
            where p.committed_us is not null
            group by {keys}""",
        "taken": "select * from owned where is_given = 0 and us > told_us",
        "taken_in": """
            select cluster, of_group, min(us) as us, max(case when is_cut then us end) as cut_us from taken
            group by cluster, of_group""",
        "last_told": "select cluster, max(unix_micros(`time`)) as end_us from partitions group by cluster",
        "departures": f"""
            select g.cluster, g.group_id as of_group, g.member_id, max(g.time_ns / 1e3) as us
            from group_events g join last_told l on g.cluster is not distinct from l.cluster
                and g.time_ns / 1e3 < l.end_us - {_LONG_US}
            where g.event = 'leave' and g.error is null group by g.cluster, g.group_id, g.member_id""",
        "hidden": f"""
            select {", ".join(PLACE)}, true as is_hidden from taken
            union
            select {keys}, true from owned p join taken_in t on {same_group.format("p", "t")}
            join departures d on {same_group.format("p", "d")} and p.member_id = d.member_id
            where p.is_given = 1 and d.us > t.us and p.told_us <= d.us + {_SOON_US}
            union
            select {keys}, true from held_places p join taken_in t on {same_group.format("p", "t")}
            where p.told_us < t.cut_us and p.committed_us is not null""",
        "told_places": f"""
            select p.*, coalesce(h.is_hidden, false) as is_hidden from said_places p
            left join hidden h on {same_place.format("p", "h")}""",
    }
