"""Committed partitions whose owner is a member without requests in the capture: its commits are not in the tables.

The requests of a member are missing if it uses TLS, or if the traffic of its host was not captured. Such a member takes
a partition over if a captured member loses it in a rebalance, and no other captured member gets it. After that the last
committed offset in the tables may be outdated. Steps of a question over `group_events`, after `said_places` of
`committed`. Refuses to know lag.
"""

from kproxy.analysis.lags.committed import COMMITS, PLACE

_SOON_US = 1_000_000  # a leaving member commits once more, and the response may arrive after its LeaveGroup
_LONG_US = 5_000_000  # auto.commit.interval.ms: its successor commits nothing before that


def unseen() -> dict[str, str]:
    """Step `told_places`: `said_places` with `is_hidden`, whether members without requests may have replaced an offset.

    `said_places` is read once, since Spark computes a step for each reference to it.
    """
    same_group = "{0}.cluster is not distinct from {1}.cluster and {0}.of_group = {1}.of_group"
    latest = "named_struct('g', generation, 'a', is_given, 't', us)"
    is_commit = f"({COMMITS} and direction = 'request' or direction = 'log')"
    return {
        "moves": """
            select cluster, group_id as of_group, member_id, coalesce(generation, -1) as generation,
                time_ns / 1e3 as us, case when event = 'assigned' then 1 else 0 end as is_given,
                reason like '% more' as is_cut, explode(split(reason, ', ')) as place
            from group_events where event in ('assigned', 'revoked') and reason is not null""",
        "owned": f"""
            select cluster, of_group, place, max_by(is_given, {latest}) as is_given,
                max_by(member_id, {latest}) as owner_id, max_by(us, {latest}) as moved_us,
                max_by(is_cut, {latest}) as is_cut
            from moves group by cluster, of_group, place""",
        "last_told": "select cluster, max(unix_micros(`time`)) as end_us from partitions group by cluster",
        "departures": f"""
            select g.cluster, g.group_id as of_group, g.member_id, max(g.time_ns / 1e3) as us
            from group_events g join last_told l on g.cluster is not distinct from l.cluster
                and g.time_ns / 1e3 < l.end_us - {_LONG_US}
            where g.event = 'leave' and g.error is null group by g.cluster, g.group_id, g.member_id""",
        "owned_places": f"""
            select s.*, o.is_given, o.owner_id, o.moved_us, o.is_cut,
                max(unix_micros(s.`time`)) over place as reported_us,
                max(case when {is_commit} then unix_micros(s.`time`) end) over place as committed_us
            from said_places s left join owned o on {same_group.format("s", "o")}
                and o.place = concat(s.of_topic, '-', cast(s.`partition` as string))
            window place as (partition by {", ".join(f"s.{each}" for each in PLACE)})""",
        "taken_places": """
            select *, min(case when is_taken then moved_us end) over of_one as taken_us,
                max(case when is_taken and is_cut then moved_us end) over of_one as cut_us
            from (
                select *, committed_us is not null and is_given = 0 and moved_us > reported_us as is_taken
                from owned_places) p
            window of_one as (partition by cluster, of_group)""",
        "told_places": f"""
            select p.*, committed_us is not null and of_topic is not null and (
                    coalesce(is_taken, false)
                    or coalesce(is_given = 1 and d.us > taken_us and reported_us <= d.us + {_SOON_US}, false)
                    or coalesce(reported_us < cut_us, false)) as is_hidden
            from taken_places p left join departures d on {same_group.format("p", "d")}
                and p.owner_id = d.member_id""",
    }
