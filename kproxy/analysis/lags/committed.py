"""Committed offsets of groups, by group, topic and partition, and their removals.

An OffsetCommit counts for each partition that the broker accepted. An OffsetFetch counts with the offset in the
response, unless the group committed after the request. A TxnOffsetCommit counts if its transaction was committed: an
EndTxn of the same transactional id followed, its response had no error, and no later accepted commit counted before.
Without a known EndTxn and outcome the offset does not count (`is_pending`). Records of a fetched `__consumer_offsets`
count too. An offset is removed by OffsetDelete, DeleteGroups, a commit of -1, an OffsetFetch response without an
offset, and the end of its log (`ends.turns`).

Steps of a question over `partitions`, `exchanges`, `committed_offsets`, `group_events` and `changes`. Refuses to know
the ends of logs.
"""

from collections.abc import Sequence

from kproxy.analysis.lags.ends import OF
from kproxy.analysis.questions.pieces import EXCHANGE_NAMES, KEYS, TOPIC, name, of_exchanges

COMMITTING = ("OffsetCommit", "TxnOffsetCommit")
COMMITS = "api in ('OffsetCommit', 'TxnOffsetCommit')"
PLACE = ("cluster", "of_group", "of_topic", "`partition`")  # key of an offset
_OWN = ("of_topic", "of_group", "is_removal", "is_pending", "written_us")  # besides the columns that conditions may use


def _chosen(columns: Sequence[str], row: str, **own: str) -> str:
    """Columns of a row for `select`; own: SQL for some of them."""
    return ", ".join(f"{own.get(each, f'{row}.{name(each)}')} as {name(each)}" for each in columns)


def places(columns: Sequence[str]) -> dict[str, str]:
    """Step `said_places`: each offset that a message reports for a group, in the order of `time`, when it held.

    It has the message's `columns`, as names for conditions; `of_group`, `of_topic`; `is_removal`, the offset is -1;
    `is_pending`, it does not count since the end of its transaction is unknown; `written_us`, when the coordinator
    wrote it, which is before `time` if a transaction had to end first.
    """
    all_columns = (*columns, *_OWN)
    blank = dict.fromkeys((*columns, *EXCHANGE_NAMES), "null")
    blank |= {each: name(each) for each in ("source", "cluster", "connection", "number", "time", "topic", "partition")}
    logged = blank | {
        "offset": "coalesce(`offset`, -1)",
        "direction": "'log'",
        "of_topic": "topic",
        "of_group": "group_id",
        "is_removal": "coalesce(`offset`, -1) < 0",
        "is_pending": "false",
        "written_us": "unix_micros(`time`)",
    }
    deleted = {each: name(each) for each in columns if each not in EXCHANGE_NAMES} | dict.fromkeys(
        EXCHANGE_NAMES, "cast(null as string)"
    )
    deleted |= {"offset": "cast(-1 as bigint)", "of_topic": TOPIC, "of_group": "group_id", "is_removal": "true"}
    deleted |= {"is_pending": "false", "written_us": "unix_micros(`time`)"}
    group = "coalesce(a.group_id, a.asked_group)"
    offset = "coalesce(a.`offset`, -1)"
    of_commits = {
        "time": "timestamp_micros(a.counts_us)",
        "offset": offset,
        "of_group": group,
        "is_removal": f"{offset} < 0 and a.is_committed is not null",
        "is_pending": "a.is_committed is null",
        "written_us": "unix_micros(a.answered_at)",
    }
    # Without its exchange, an answer has its own time.
    asked_us = "coalesce(cast(floor(a.request_start_ns / 1e3) as bigint), unix_micros(a.`time`))"
    of_reads = {
        "time": f"timestamp_micros({asked_us})",
        "offset": offset,
        "of_group": group,
        "is_removal": f"{offset} < 0",
        "is_pending": "false",
        "written_us": asked_us,
    }
    same_answer = " and ".join(f"q.{key} = a.{key}" for key in KEYS)
    same_exchange = " and ".join(f"x.{key} = a.{key}" for key in KEYS)
    return {
        "answers": f"""
            select {", ".join(KEYS)}, {TOPIC} as answered_topic, `partition`, max(`time`) as answered_at
            from partitions where {COMMITS} and direction = 'response'
            group by {", ".join(KEYS)}, {TOPIC}, `partition` having max(abs(coalesce(error_code, 0))) = 0""",
        "accepted_rows": f"""
            select q.*, coalesce(q.topic, q.topic_id) as of_topic, a.answered_at
            from partitions q join answers a on {same_answer} and q.`partition` = a.`partition`
                and coalesce(q.topic, q.topic_id) = a.answered_topic
            where q.api in ('OffsetCommit', 'TxnOffsetCommit') and q.direction = 'request'""",
        "accepted": of_exchanges("accepted_rows", COMMITTING, also=("transactional_id",)),
        # How transactions ended, by group: null where no event reports it.
        "ended": """
            select cluster, transactional_id, source, connection, `number`, unix_micros(`time`) as us from exchanges
            where api = 'EndTxn' and outcome = 'answered' and coalesce(error_code, 0) = 0""",
        "in_order": f"""
            select distinct {", ".join(KEYS)}, cluster, transactional_id, unix_micros(answered_at) as us,
                cast(null as bigint) as end_us
            from accepted where api = 'TxnOffsetCommit'
            union all
            select {", ".join(KEYS)}, cluster, transactional_id, us, us as end_us from ended""",
        "ends_behind": f"""
            select {", ".join(KEYS)}, min(next_us) as next_us from (
                select *, min(end_us) over (partition by cluster, transactional_id order by us, end_us nulls first
                    rows between current row and unbounded following) as next_us
                from in_order) o
            where end_us is null group by {", ".join(KEYS)}""",
        "outcomes": f"""
            select n.cluster, n.transactional_id, n.us, e.group_id, max(e.`time`) as ended_at,
                max(case when e.event = 'offsets_committed' then 1 else 0 end) as is_committed
            from ended n join group_events e on {" and ".join(f"n.{key} = e.{key}" for key in KEYS)}
            where e.event in ('offsets_committed', 'offsets_aborted')
            group by n.cluster, n.transactional_id, n.us, e.group_id""",
        # Without commits of aborted transactions; is_committed is null where the end of the transaction is unknown.
        "known_commits": f"""
            select a.*, {group} as of_group, unix_micros(coalesce(o.ended_at, a.answered_at)) as counts_us,
                case when a.api = 'OffsetCommit' then 1 else o.is_committed end as is_committed
            from accepted a left join ends_behind x on {same_exchange}
            left join outcomes o on a.cluster is not distinct from o.cluster
                and a.transactional_id = o.transactional_id and x.next_us = o.us and {group} = o.group_id
            where a.api = 'OffsetCommit' or coalesce(o.is_committed, 1) = 1""",
        # A coordinator keeps the offset that it wrote last, even if the transaction of an earlier one ends later.
        "counted": f"""
            select * from (
                select *, min(case when is_committed = 1 then counts_us end) over (
                    partition by {", ".join(PLACE)} order by unix_micros(answered_at), connection, `number`, source
                    rows between 1 following and unbounded following) as newer_us
                from known_commits) k
            where newer_us is null or is_committed is null or newer_us >= counts_us""",
        "read_rows": f"""
            select *, {TOPIC} as of_topic from partitions
            where api = 'OffsetFetch' and direction = 'response' and coalesce(error_code, 0) = 0""",
        "read_offsets": of_exchanges("read_rows", ("OffsetFetch",), also=("request_start_ns",)),
        "said_places": f"""
            select {_chosen(all_columns, "a", **of_commits)} from counted a
            union all
            select {_chosen(all_columns, "a", **of_reads)} from read_offsets a
            union all
            select {", ".join(f"{deleted[each]} as {name(each)}" for each in all_columns)}
            from partitions where api = 'OffsetDelete' and direction = 'response' and error_code = 0
            union all
            select {", ".join(f"{logged[each]} as {name(each)}" for each in all_columns)} from committed_offsets
            where `change` in ('committed', 'removed')""",
    }


def since(step: str = "") -> dict[str, str]:
    """Step `since`: the rows of `told_places` of `unseen` that nothing removed, after `turns` of `ends`.

    step: of time: offsets removed in a later step are still there.
    """
    named, by, by_then = (f", {step} as step", ", step", " order by step") if step else ("", "", "")
    until_then = " and {}.step <= s.step" if step else ""
    return {
        "groups_gone": f"""
            select of_cluster, gone_group, max(us) as us{by} from (
                select cluster as of_cluster, resource_name as gone_group, unix_micros(`time`) as us{named}
                from changes where api = 'DeleteGroups' and answered and error is null) g
            group by of_cluster, gone_group{by}""",
        "logs_gone": f"""
            select {OF}, max(us) as us{by} from (
                select *{named} from (select *, timestamp_micros(us) as `time` from turns where is_lost) t) t
            group by {OF}{by}""",
        "stated": f"""
            select *, max(case when is_removal then unix_micros(`time`) end) over place as removed_us,
                max(case when is_removal and coalesce(api, '') <> 'OffsetFetch' then written_us end) over place
                    as deleted_us
            from (select *{named} from told_places where of_group is not null) p
            window place as (partition by {", ".join(PLACE)}{by_then})""",
        "since": f"""
            select s.* from stated s
            where not s.is_removal and unix_micros(s.`time`) > coalesce(s.removed_us, -1)
                and s.written_us > coalesce(s.deleted_us, -1)
                and not exists (select 1 from groups_gone g
                    where s.cluster is not distinct from g.of_cluster and s.of_group = g.gone_group
                        and g.us >= s.written_us{until_then.format("g")})
                and not exists (select 1 from logs_gone l
                    where s.cluster is not distinct from l.cluster and s.of_topic = l.topic
                        and s.`partition` = l.`partition` and l.us >= s.written_us{until_then.format("l")})""",
    }
