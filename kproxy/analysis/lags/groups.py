"""Lag of groups: the end of a log minus the committed offset, over time and at the end.

Refuses to know the sources of both offsets (`committed`, `ends`), files, sessions and formats of output.
"""

from collections.abc import Sequence

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.lags.committed import PLACE, places, since
from kproxy.analysis.lags.ends import FAR, LOG, OF, TOLD_ENDS, lives, same, turns
from kproxy.analysis.lags.followers import NO_LEADER, answered
from kproxy.analysis.lags.unseen import unseen
from kproxy.analysis.questions.pieces import (
    EXCHANGE_NAMES,
    FETCHED,
    GROUPS,
    TOPIC,
    at_last,
    bucket,
    grouped,
    literal,
    no_such,
    of_exchanges,
    order,
)
from kproxy.protocol.apis import UNKNOWN_TOPIC_OR_PARTITION

TABLES = ("partitions", "exchanges", "committed_offsets", "group_events", "changes", "topology")  # sources of lag
_BY_LEADER = "coalesce(not is_followers, true)"  # true for a response of the leader, false for a follower's
_BEHIND = "cast(`partition` as bigint) + 1"
_MOMENTS = range(1, 9)  # eighths of the tables' time: the later half determines the trend of a lag
GROUPED_BY = ("cluster", "group_id", "topic")
# Requests of members, and of consumers that commit without membership; other requests about a group may be of tools.
_OF_MEMBERS = (
    *("JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup", "ConsumerGroupHeartbeat", "ShareGroupHeartbeat"),
    *("OffsetCommit", "TxnOffsetCommit"),
)
_LEFT_US = 3_000_000  # longest time between the first LeaveGroup and requests in flight, or other members' LeaveGroups
_ABANDONED_US = 60_000_000  # longer than session.timeout.ms (45 s): a restart sends requests sooner
# Reasons for an unknown lag, or for a committed offset that does not count: the column `unknown`.
NO_END = "no answer showed the end of the log"
NO_OUTCOME = "the end of a transaction that committed offsets was not seen: they do not count"
NOT_CAPTURED = "a member whose requests the capture lacks took the partition over: its commits are not known"


def group_lag(
    partitions: Frame,
    exchanges: Frame,
    committed_offsets: Frame,
    group_events: Frame,
    changes: Frame,
    topology: Frame,
    *,
    by: Sequence[str] = (),
    every: str | None = None,
    where: str | None = None,
) -> Frame:
    """Lag of groups: the end of the log minus the offset that the group committed, or received by OffsetFetch.

    The end of a log is the highest offset that any response showed since the log was created or truncated. If only
    followers showed it, whose high watermark may be lower, the lag is null, and `least_lag_records` is a lower bound,
    by the highest end that any broker showed. A commit counts for each partition that the broker accepted, a commit in
    a transaction when the transaction is committed; offsets in a fetched `__consumer_offsets` count too. Deleted
    groups, offsets and topics have no row; after a topic was re-created only later commits count. `unknown` is the
    reason for a null lag, or for commits that do not count: a partition that a member without requests in the tables
    took over has no known offset, and is not in the steps of --every. `uncommitted_partitions` is the number of the
    topic's known partitions without a commit of the group: `kafka-consumer-groups --describe` shows "-" as their lag,
    and `lag_records` does not count them. Without --every, `fetched_partitions` is the number of these that a client
    of the group fetched, and `fetched_lag_records` the sum of their lags by the offsets fetched last.

    With --every, each step has all partitions of the group, with the last committed offset and the known end of the
    log at the end of the step. A step without a commit of the group and without a response that shows the end of one
    of its logs is left out.

    With --by group_id, or group_id,topic: sums over the `partitions` that count, all of them at the same time;
    `unknown_partitions` have a committed offset and no known lag: they count only in `least_lag_records`, if at all.

    Without --every the answer also has the offset that `client`, which commits for the group, has fetched
    (`fetched_offset`, `fetch_lag_records`), and the trend of the lag: first, largest, `growth_per_s` (records per
    second, over the later half of the time), `growing`, and `catch_up_ns`, the time to lag 0 at that rate if the lag
    shrinks. The trend uses the ends of eighths of the time: `first_lag_records` is the lag at `first_known`, the first
    of these ends with a known lag; in sums, the first at which the lags of all partitions of the group are known.
    `behind_ns` is the maximum age of the first uncommitted record, by the time when the log ended before it, or by the
    timestamps of records fetched before it; null if the tables begin later.
    """
    from kproxy.tables.schema import PARTITIONS  # heavy, and no help text needs it

    columns = (*PARTITIONS.schema.names, *EXCHANGE_NAMES)  # names that conditions may use
    frames = (partitions, exchanges, committed_offsets, group_events, changes, topology)
    steps = _stepwise(bucket(every), where) if every else _at_the_end(where, is_summed=bool(by))
    for each in by:
        if each not in GROUPED_BY:
            raise no_such("--by", each, GROUPED_BY)
    if by:
        steps["each_partition"] = steps.pop("answer")
        steps["answer"] = _summed(by, every)
    return _asked(frames, columns, steps)


def group_lag_while_active(*frames: Frame) -> Frame:
    """`group_lag` of each group at its last request instead of at the tables' end, with its trend until then.

    After the consumers of a group stop, its lag only grows with the writes of others, so it is not judged. But if they
    stopped sending requests without leaving, longer ago than a restart takes, the lag is that at the tables' end, and
    `silent_us` is the time since the last request. `until_us` is the time of the lag, `left_us` the same if the last
    member left. `end_lag_records` is the lag at the tables' end, `end_known_records` the lag in `group_lag`: null if
    only followers showed the end of the log.

    `compared_first_records` is the lag at `compared_us`, the same time for all partitions of a group and topic: the
    first at which partitions with at least half of the topic's lag had a known lag. Null: it was not yet known.
    """
    from kproxy.tables.schema import PARTITIONS

    return _asked(frames, (*PARTITIONS.schema.names, *EXCHANGE_NAMES), _at_the_end(None, is_while_active=True))


def _asked(frames: Sequence[Frame], columns: Sequence[str], steps: dict[str, str]) -> Frame:
    return ask(
        dict(zip(TABLES, frames, strict=True)),
        once=("turns", "answered", "committed"),
        fetched=FETCHED,
        told_ends=TOLD_ENDS,
        **turns(),
        **answered(),
        leaders_answers=f"select {OF}, us, timestamp_micros(us) as `time` from answered where {_BY_LEADER}",
        **places(columns),
        **unseen(),
        **_PARTITION_COUNTS,
        **steps,
    )


def _summed(by: Sequence[str], every: str | None) -> str:
    """The answer by group, or by group and topic: `each_partition` in sums, over time too."""
    names = [each for each in by if each != "cluster"]
    known, trend = "count(lag_records)", ""
    once = ["uncommitted_partitions", *([] if every else ["fetched_partitions", "fetched_lag_records"])]
    if not every:
        trend = f"""
                case when count(group_first_records) = {known} then sum(group_first_records) end as first_lag_records,
                min(group_first_known) as first_known,
                case when count(growth_per_s) = {known} then round(sum(growth_per_s), 3) end as growth_per_s,
                max(behind_ns) as behind_ns,"""
    return f"""
        select {"`time`, " if every else ""}cluster, {grouped(names)} sum(lag_records) as lag_records,
            count(committed_offset) as partitions, {", ".join(f"sum(once_{each}) as {each}" for each in once)},
            count_if(lag_records is null) as unknown_partitions, sum(least_lag_records) as least_lag_records,{trend}
            sum(commits) as commits, max(last_commit) as last_commit, max(end_seen) as end_seen
        from (
            select *, {", ".join(f"case when nth = 1 then {each} end as once_{each}" for each in once)} from (
                select *, row_number() over (partition by {"`time`, " if every else ""}cluster, group_id, topic
                    order by `partition`) as nth
                from each_partition) n) e
        group by all
        {order("lag_records desc nulls last", "cluster nulls first", by=names, every=every)}"""


# A topic's number of partitions, or a lower bound: step `partition_counts`.
_PARTITION_COUNTS = {
    "seen_partitions": f"""
        select cluster, {TOPIC} as topic, `partition` from partitions
        where api in ('Produce', 'Fetch', 'ShareFetch', 'ListOffsets', 'OffsetCommit', 'TxnOffsetCommit', 'OffsetFetch')
        group by all having coalesce(min(error_code), 0) != {UNKNOWN_TOPIC_OR_PARTITION}
            and coalesce(max(error_code), 0) != {UNKNOWN_TOPIC_OR_PARTITION}""",
    "partition_counts": f"""
        select cluster as of_cluster, topic as of_topic, max(partitions) as of_partitions from (
            select cluster, topic, {_BEHIND} as partitions from seen_partitions
            union all
            select cluster, topic, greatest(coalesce(partitions, 0), coalesce({_BEHIND}, 0))
            from topology where kind in ('topic', 'partition')) counts
        group by cluster, topic""",
}


def _stepwise(step: str, where: str | None) -> dict[str, str]:
    """Steps after `said_places` and `turns`: each step of time, with the end of the log known at its end."""
    leaders = ", ".join(f"a.{key}" for key in LOG)
    return {
        **since(step),
        "committed": f"""
            select step, {_COMMITTED} from since where not is_hidden and {where or "true"}
            group by step, {", ".join(PLACE)}""",
        **lives(),
        **_carried(step),
        "begun": f"select timestamp_micros(from_us) as `time`, life, {OF} from lives",
        "met": f"""
            select step, cast(null as bigint) as life, {OF}, group_id, committed_offset, commits, last_commit, is_open,
                cast(null as bigint) as told_end, cast(null as timestamp) as told_at, false as by_leader
            from carried
            union all
            select {step}, life, {OF}, null, null, null, null, null, max(end_offset), max(`time`), max(is_leaders)
            from lived_ends group by {step}, life, {OF}
            union all
            select {step}, coalesce(l.life, 0), {leaders}, null, null, null, null, null, null, null, true
            from leaders_answers a left join lives l
                on {same("a", "l")} and a.us > l.from_us and a.us <= coalesce(l.until_us, {FAR})
            union all
            select {step}, life, {OF}, null, null, null, null, null, null, null, false from begun""",
        "in_lives": f"""
            select *, coalesce(life, max(life) over (partition by {OF} order by step), 0) as in_life from met""",
        "known": f"""
            select *, case when max(by_leader) over so_far then max(told_end) over so_far end as end_offset,
                max(told_end) over so_far as least_end, max(told_at) over so_far as end_seen
            from in_lives window so_far as (partition by {OF}, in_life order by step)""",
        "first_steps": f"""
            select {_OWNER}, `partition`, min(step) as step from {_committed_places(where, True)}
            group by {_OWNER}, `partition`""",
        # Number of partitions with a commit; it changes in the steps with a partition's first commit.
        "committed_counts": f"""
            select *, lead(step) over (partition by {_OWNER} order by step) as next_step from (
                select {_OWNER}, step, sum(count(*)) over (partition by {_OWNER} order by step)
                    as committed_partitions
                from first_steps group by {_OWNER}, step) c""",
        "answer": f"""
            select a.step as `time`, a.cluster, a.group_id, a.topic, a.`partition`, committed_offset, end_offset,
                {_lag_of("end_offset", "committed_offset")} as lag_records,
                {_lag_of("least_end", "committed_offset")} as least_lag_records, {_UNCOMMITTED}, commits, last_commit,
                end_seen, {_UNKNOWN} as `unknown`
            from known a {_WITH_COUNTS} and a.step >= h.step and (h.next_step is null or a.step < h.next_step)
            where a.group_id is not null and (committed_offset is not null or is_open)
            order by `time`, end_offset is null, lag_records desc, a.cluster, a.group_id, a.topic, a.`partition`""",
    }


def _carried(step: str) -> dict[str, str]:
    """SQL after `committed`: repeats each offset in later steps with a reported log end, until it is removed."""
    of_group = f"{OF}, group_id"
    nothing = "cast(null as bigint), cast(null as bigint), cast(null as timestamp), cast(null as boolean)"
    return {
        "holders": f"select {of_group}, min(step) as first_step from committed group by {of_group}",
        "gone": f"""
            select step, cluster, of_topic as topic, `partition`, of_group as group_id from stated where is_removal
            union all
            select g.step, h.cluster, h.topic, h.`partition`, h.group_id from holders h
            join groups_gone g on h.cluster is not distinct from g.of_cluster and h.group_id = g.gone_group
            union all
            select l.step, h.cluster, h.topic, h.`partition`, h.group_id from holders h
            join logs_gone l on {same("h", "l")}""",
        "moments": f"""
            select {step} as step, {OF} from lived_ends union select {step} as step, {OF} from leaders_answers""",
        # A report about one partition makes a step for all partitions of its group, to complete the sums of the step.
        "group_moments": f"""
            select m.step, h.cluster, h.group_id from holders h join moments m on {same("h", "m")}
            union select step, cluster, group_id from committed""",
        # For each step: whether a message reported the offset, whether it was removed, and whether its value is new.
        "states": f"""
            select step, {of_group}, max(committed_offset) as committed_offset, max(commits) as commits,
                max(last_commit) as last_commit, max(is_open) as is_open, max(is_reported) as is_reported,
                max(is_gone) as is_gone, max(case when is_gone = 1 or committed_offset is not null then 1 else 0 end)
                    as is_new
            from (
                select step, {of_group}, committed_offset, commits, last_commit, is_open, 1 as is_reported, 0 as is_gone
                from committed
                union all
                select step, {of_group}, {nothing}, 1, 1 from gone
                union all
                select m.step, h.cluster, h.topic, h.`partition`, h.group_id, {nothing}, 0, 0
                from holders h join group_moments m on h.cluster is not distinct from m.cluster
                    and h.group_id = m.group_id and m.step > h.first_step) s
            group by step, {of_group}""",
        "stays": f"""
            select *, sum(is_reported) over so_far as commits_so_far, sum(is_new) over so_far as stay,
                sum(is_gone) over so_far as life
            from states window so_far as (partition by {of_group} order by step)""",
        "carried": f"""
            select step, {of_group}, max(committed_offset) over (partition by {of_group}, stay) as committed_offset,
                coalesce(commits, 0) as commits,
                max(last_commit) over (partition by {of_group}, life order by step) as last_commit,
                coalesce(max(is_open) over (partition by {of_group}, commits_so_far), false) as is_open
            from stays""",
    }


def _at_the_end(where: str | None, *, is_while_active: bool = False, is_summed: bool = False) -> dict[str, str]:
    """Steps after `said_places` and `turns`: the state at the end, its trend, and the offsets fetched by then.

    is_while_active: at the end of the group's activity instead; see `group_lag_while_active`. is_summed: also with the
    lag at the first moment at which those of all partitions of the group are known.
    """
    held = "".join(f", {_committed_by(f'eighth <= {n}')} as held_{n}" for n in _MOMENTS)
    elapsed = f"(m.told_us - c.first_us) * {_MOMENTS[-1]}e0"
    ended = "".join(
        f", max(case when {elapsed} < {n} * (c.span_us + 1e0) then m.end_offset end) as end_{n}" for n in _MOMENTS
    )
    lags = "".join(f", {_lag_of(f'end_{n}', f'held_{n}')} as lag_{n}" for n in _MOMENTS)
    of_moments = ", ".join(f"lag_{n}" for n in _MOMENTS)
    first_known = f"case {' '.join(f'when lag_{n} is not null then {n}' for n in _MOMENTS)} end"
    lag_at = " ".join(f"when {n} then a.lag_{n}" for n in _MOMENTS)
    own = ["cluster", "group_id", "topic", "`partition`", "committed_offset", "commits", "first_commit", "last_commit"]
    own += ["is_open", "is_hidden", "client", "host", "first_us", "until_us", "span_us", "silent_us", "left_us"]
    own += [f"held_{n}" for n in _MOMENTS]
    middle, last = _MOMENTS[len(_MOMENTS) // 2 - 1], _MOMENTS[-1]
    further = ""
    if is_while_active:
        further = f""", a.until_us, a.silent_us, a.left_us,
                {_lag_of("a.last_end", "a.committed_offset")} as end_lag_records,
                {_lag_of("case when a.is_last_known then a.last_end end", "a.committed_offset")} as end_known_records,
                case a.compared_from {lag_at} end as compared_first_records,
                {_moment("a.compared_from")} as compared_us"""
    if is_summed:
        further = f""", case a.known_from {lag_at} end as group_first_records,
                timestamp_micros({_moment("a.known_from")}) as group_first_known"""
    by_then = "m.told_us <= c.until_us" if is_while_active else "true"
    committer = (
        "case when direction = 'request' then named_struct('t', unix_micros(`time`), 'c', client, 'h', host) end"
    )
    return {
        **since(),
        **_spans(is_while_active),
        "eighths": f"""
            select *, until_us - first_us as span_us, least({last}, 1 + cast(floor(
                (unix_micros(`time`) - first_us) / (until_us - first_us + 1e0) * {last}) as int)) as eighth
            from timed""",
        "committed": f"""
            select {_COMMITTED}, max_by(client, {committer}) as client, max_by(host, {committer}) as host,
                max(first_us) as first_us, max(until_us) as until_us, max(span_us) as span_us,
                max(silent_us) as silent_us, max(left_us) as left_us{held}
            from eighths where {where or "true"} group by {", ".join(PLACE)}""",
        # The record at an offset was written after the log ended there or before, and after the record before it.
        "told_marks": f"""
            select `time`, {OF}, us as told_us, us, end_offset, end_offset as mark_offset, is_leaders
            from current_ends
            union all
            select `time`, {OF}, us, null, null, null, true from leaders_answers
            union all
            select `time`, cluster, {TOPIC} as topic, `partition`, unix_micros(`time`) as told_us,
                unix_micros(`time`) - cast(floor(lag_ns / 1e3) as bigint) as us, null,
                high_watermark - lag_records as mark_offset, false
            from fetched where lag_ns is not null""",
        "begins": f"select {OF}, max(us) as from_us from turns group by {OF}",
        "told_since": f"""
            select t.* from told_marks t left join begins b on {same("t", "b")}
            where t.told_us > coalesce(b.from_us, -1)""",
        "marks": f"""
            select {OF}, end_offset, mark_offset, max(us) as us, min(told_us) as told_us, max(is_leaders) as is_leaders,
                max(case when end_offset is not null then `time` end) as end_seen
            from told_since group by {OF}, end_offset, mark_offset""",
        "lags": f"""
            select {", ".join(f"c.{each}" for each in own)},
                max(case when {by_then} then m.end_offset end) as least_end,
                case when max({by_then} and m.is_leaders) then max(case when {by_then} then m.end_offset end) end
                    as end_offset,
                max(case when {by_then} then m.end_seen end) as end_seen, max(m.end_offset) as last_end,
                max(m.is_leaders) as is_last_known,
                max(case when {by_then} and m.mark_offset <= c.committed_offset then m.us end) as marked_us{ended}
            from committed c left join marks m on {same("c", "m")}
            group by {", ".join(f"c.{each}" for each in own)}""",
        "followed": f"""
            select *, {_lag_of("end_offset", "committed_offset")} as lag_records,
                {_lag_of("least_end", "committed_offset")} as least_lag_records, {_UNKNOWN_AT_END} as `unknown`{lags}
            from lags where committed_offset is not null or is_open""",
        "trended": f"""
            select *, {first_known} as known_at, coalesce({of_moments}) as own_first_records,
                greatest({of_moments}, least_lag_records) as max_lag_records,
                round(try_divide(lag_{last} - lag_{middle}, span_us / 2e6), 3) as growth_per_s
            from followed""",
        # The first moment at which the lags of all partitions of a group are known.
        "in_groups": f"""
            select *, max(known_at) over (partition by cluster, group_id) as known_from,
                sum(least_lag_records) over (partition by {_OWNER} order by coalesce(known_at, {last + 1})) * 2
                    >= sum(least_lag_records) over (partition by {_OWNER}) as is_half
            from trended""",
        "compared": f"""
            select *, min(case when is_half then known_at end) over (partition by {_OWNER}) as compared_from
            from in_groups""",
        "fetches": of_exchanges("fetched", ("Fetch",), False),
        "fetched_to": f"""
            select cluster, client, host, {TOPIC} as topic, `partition`,
                {at_last("high_watermark - lag_records")} as fetched_offset
            from fetches group by all""",
        "committed_counts": f"""
            select {_OWNER}, count(distinct `partition`) as committed_partitions
            from {_committed_places(where, False)}
            group by {_OWNER}""",
        # Partitions without a commit of the group, by the last Fetch of clients that commit for it in the topic.
        "committers": f"select distinct {_OWNER}, client, host from committed where client is not null",
        "fetched_only": f"""
            select o.cluster, o.group_id, o.topic, f.`partition`, max(f.fetched_offset) as fetched_offset
            from committers o join fetched_to f on o.cluster is not distinct from f.cluster and o.topic = f.topic
                and o.client = f.client and o.host = f.host
            left join (select distinct {_OWNER}, `partition` as with_commit from {_committed_places(where, False)}) p
                on {_SAME_OWNER.format("o", "p")} and f.`partition` = p.with_commit
            where p.with_commit is null and f.fetched_offset is not null
            group by o.cluster, o.group_id, o.topic, f.`partition`""",
        "log_ends": f"select {OF}, max(end_offset) as end_offset from marks group by {OF}",
        "fetched_lags": f"""
            select f.cluster as in_cluster, f.group_id as in_group, f.topic as in_topic,
                count(*) as fetched_partitions,
                sum({_lag_of("e.end_offset", "f.fetched_offset")}) as fetched_lag_records
            from fetched_only f join log_ends e on {same("f", "e")}
            group by f.cluster, f.group_id, f.topic""",
        "answer": f"""
            select a.cluster, a.group_id, a.topic, a.`partition`, a.committed_offset, a.end_offset, a.lag_records,
                a.least_lag_records, {_UNCOMMITTED}, coalesce(d.fetched_partitions, 0) as fetched_partitions,
                cast(d.fetched_lag_records as bigint) as fetched_lag_records, a.client, b.fetched_offset,
                {_lag_of("a.end_offset", "b.fetched_offset")} as fetch_lag_records,
                a.own_first_records as first_lag_records, timestamp_micros({_moment("a.known_at")}) as first_known,
                a.max_lag_records, a.growth_per_s,
                coalesce(a.growth_per_s > 0 and a.least_lag_records > a.own_first_records, false) as growing,
                cast(case when a.lag_records > 0 and a.growth_per_s < 0
                    then floor(a.lag_records / -a.growth_per_s * 1e9) end as bigint) as catch_up_ns,
                case when a.lag_records > 0 and a.marked_us is not null
                    then greatest(least(unix_micros(a.end_seen), a.until_us) - a.marked_us, 0) * 1000 end as behind_ns,
                a.commits, a.first_commit, a.last_commit, a.end_seen, a.`unknown`{further}
            from compared a {_WITH_COUNTS}
            left join fetched_lags d on a.cluster is not distinct from d.in_cluster and a.group_id = d.in_group
                and a.topic = d.in_topic
            left join fetched_to b on {same("a", "b")} and a.client = b.client and a.host = b.host
            order by a.end_offset is null, a.lag_records desc, a.cluster, a.group_id, a.topic, a.`partition`""",
    }


def _spans(is_while_active: bool) -> dict[str, str]:
    """Step `timed`: the rows of `since` with the time over which their group is judged, `first_us` to `until_us`.

    That is the tables' time, or ends with the group's activity.
    """
    tables = """
        select cluster as of_cluster, min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as end_us
        from partitions group by cluster"""
    same_cluster = "s.cluster is not distinct from t.of_cluster"
    if not is_while_active:
        return {
            "table_spans": tables,
            "timed": f"""
                select s.*, t.first_us, t.end_us as until_us, cast(null as bigint) as silent_us,
                    cast(null as bigint) as left_us
                from since s join table_spans t on {same_cluster}""",
        }
    apis = ", ".join(map(literal, _OF_MEMBERS))
    at_last_us = "max(greatest(unix_micros(`time`), coalesce(cast(floor(response_end_ns / 1e3) as bigint), 0)))"
    client = f"cluster, {GROUPS['client']} as client, client_address"
    of_client = f"cluster, {GROUPS['client']}, client_address"
    is_abandoned = f"not a.has_left and t.end_us - a.active_us >= {_ABANDONED_US}"
    return {
        "table_spans": tables,
        "asking": f"""
            select group_id, {client}, {at_last_us} as asked_us from exchanges
            where group_id is not null and api in ({apis}) group by group_id, {of_client}""",
        # A consumer that commits without membership still fetches; a client id that others share only delays the end.
        "fetching": f"""
            select {client}, {at_last_us} as fetched_us from exchanges
            where api in ('Fetch', 'ShareFetch') group by {of_client}""",
        "leaving": """
            select cluster, group_id, max(time_ns) / 1e3 as left_us from group_events
            where event = 'leave' and error is null group by cluster, group_id""",
        "active": f"""
            select q.cluster as active_cluster, q.group_id as active_group,
                greatest(max(asked_us), coalesce(max(fetched_us), 0)) as active_us,
                coalesce(max(left_us) >= max(asked_us) - {_LEFT_US}, false) as has_left
            from asking q left join fetching f on q.cluster is not distinct from f.cluster and q.client = f.client
                and q.client_address = f.client_address
            left join leaving l on q.cluster is not distinct from l.cluster and q.group_id = l.group_id
            group by q.cluster, q.group_id""",
        "timed": f"""
            select s.*, t.first_us,
                case when a.active_us < t.end_us and not ({is_abandoned}) then a.active_us else t.end_us end
                    as until_us,
                case when {is_abandoned} then t.end_us - a.active_us end as silent_us,
                case when a.has_left and a.active_us < t.end_us then a.active_us end as left_us
            from since s join table_spans t on {same_cluster}
            left join active a on s.cluster is not distinct from a.active_cluster and s.of_group = a.active_group""",
    }


def _moment(eighth: str) -> str:
    """The end of an eighth of a group's time, in microseconds."""
    return f"cast(floor(a.first_us + a.span_us * {eighth} / {_MOMENTS[-1]}e0) as bigint)"


def _committed_places(where: str | None, has_steps: bool) -> str:
    """All rows of committed offsets, regardless of the condition; for each step of time if there are steps."""
    if where is None:
        return "(select * from committed where committed_offset is not null or is_hidden) p"
    columns = "cluster, of_group as group_id, of_topic as topic, `partition`"
    return f"(select {columns}{', step' if has_steps else ''} from since where not is_pending) p"


def _committed_by(moment: str = "true") -> str:
    """The offset that was committed last, or last before a moment."""
    at = "named_struct('t', unix_micros(`time`), 'c', connection, 'n', `number`, 's', source)"
    return f"max_by(`offset`, case when {moment} and not is_pending and not is_hidden then {at} end)"


_OWNER = "cluster, group_id, topic"
_SAME_OWNER = "{0}.cluster is not distinct from {1}.cluster and {0}.group_id = {1}.group_id and {0}.topic = {1}.topic"
_UNCOMMITTED = """cast(greatest(c.of_partitions - coalesce(h.committed_partitions, 0), 0) as bigint)
                    as uncommitted_partitions"""
_WITH_COUNTS = f"""left join partition_counts c on a.cluster is not distinct from c.of_cluster and a.topic = c.of_topic
            left join committed_counts h on {_SAME_OWNER.format("a", "h")}"""
_IS_COMMIT = "not is_pending and direction in ('request', 'log')"
# The committed offset of a group, topic and partition, from its rows. is_open: its last commit may not count.
_COMMITTED = f"""cluster, of_group as group_id, of_topic as topic, `partition`,
                {_committed_by()} as committed_offset,
                greatest(count_if({_IS_COMMIT} and direction = 'request'),
                    count_if({_IS_COMMIT} and direction = 'log')) as commits,
                min(case when {_IS_COMMIT} then `time` end) as first_commit,
                max(case when {_IS_COMMIT} then `time` end) as last_commit,
                coalesce(max(case when is_pending then `time` end)
                    >= max(case when not is_pending then `time` end), max(is_pending)) or max(is_hidden) as is_open,
                max(is_hidden) as is_hidden"""


_UNKNOWN = f"""case when committed_offset is not null and least_end is null then '{NO_END}'
                when committed_offset is not null and end_offset is null then '{NO_LEADER}'
                when is_open then '{NO_OUTCOME}' end"""
_UNKNOWN_AT_END = f"case when is_hidden then '{NOT_CAPTURED}' else {_UNKNOWN} end"


def _lag_of(end: str, offset: str) -> str:
    return f"case when {end} - {offset} is not null then greatest({end} - {offset}, 0) end"
