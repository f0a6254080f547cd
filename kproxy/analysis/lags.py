"""Questions about how far consumers are behind: clients by what they fetch, groups by what they commit.

A consumer that prefetches is at the end of the log by its fetches while its application is thousands of records
behind: what a group has committed decides, as in `kafka-consumer-groups --describe`. Both stand in one answer.
Refuses to know files, sessions and formats of output.
"""

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.pieces import EXCHANGE_NAMES, FETCHED, KEYS, TOPIC, at_last, bucket, name, of_exchanges

COMMITTING = ("OffsetCommit", "TxnOffsetCommit")
COMMITS = "api in ('OffsetCommit', 'TxnOffsetCommit')"
_MOMENTS = range(1, 9)  # eighths of the time that tables cover: a lag's trend is that of the later half
_OF = "cluster, topic, `partition`"


_ENDS = f"""
    select `time`, cluster, {TOPIC} as topic, `partition`,
        case when api = 'Produce' then `offset` + 1 when api = 'ListOffsets' then `offset`
            else high_watermark end as end_offset
    from partitions
    where direction = 'response' and coalesce(error_code, 0) = 0
        and ((api in ('Produce', 'ListOffsets') and `offset` >= 0) or high_watermark >= 0)"""


def lag(
    partitions: Frame,
    exchanges: Frame,
    every: str | None = None,
    replicas: bool = False,
    where: str | None = None,
) -> Frame:
    """How far consumers are behind, by client, topic and partition: first, last and most, as their fetches say.

    Clients that prefetch are at the end by their fetches: `committed_lag_records` is what the client has not committed,
    and `growing` is true where either of both lags grows. `last_lag_ns` is the age of the newest record that the client
    got. Over time there are fetches only. `group-lag` has more of groups.
    """
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
    steps = {"fetched": FETCHED, "ours": of_exchanges("fetched", ("Fetch",), replicas), "of_fetches": fetched}
    if every:
        by = "`time`, last_lag_records desc, max_lag_records desc, cluster nulls first, client nulls first"
        answer = f"select * from of_fetches order by {by}, topic nulls first, `partition`"
        return ask({"partitions": partitions, "exchanges": exchanges}, **steps, answer=answer)
    like = " and ".join(f"c.{key} is not distinct from e.{key}" for key in ("cluster", "topic", "`partition`"))
    same = " and ".join(
        f"f.{key} is not distinct from c.{key}" for key in ("cluster", "client", "topic", "`partition`")
    )
    lags = """case when e.last_end is not null then greatest(e.last_end - c.last_offset, 0) end as lag_records,
        e.last_end - c.last_offset > e.first_end - c.first_offset as growing"""
    return ask(
        {"partitions": partitions, "exchanges": exchanges},
        **steps,
        requests=f"select * from partitions where {COMMITS} and direction = 'request' and `offset` >= 0",
        commits=of_exchanges("requests", COMMITTING),
        committed=f"""
            select cluster, client, {TOPIC} as topic, `partition`, {at_last("`offset`", "min_by")} as first_offset,
                {at_last("`offset`")} as last_offset
            from commits group by all""",
        told_ends=_ENDS,
        ends=f"select {_OF}, min(end_offset) as first_end, max(end_offset) as last_end from told_ends group by {_OF}",
        of_commits=f"""
            select c.cluster, c.client, c.topic, c.`partition`, {lags} from committed c left join ends e on {like}""",
        answer=f"""
            select f.cluster, f.client, f.topic, f.`partition`, f.fetches, f.first_lag_records, f.last_lag_records,
                f.max_lag_records, f.last_lag_ns, c.lag_records as committed_lag_records, f.high_watermark, f.last,
                f.growing or coalesce(c.growing, false) as growing
            from of_fetches f left join of_commits c on {same}
            order by greatest(f.last_lag_records, coalesce(c.lag_records, 0)) desc, f.max_lag_records desc,
                f.cluster nulls first, f.client nulls first, f.topic nulls first, f.`partition`""",
    )


def group_lag(
    partitions: Frame,
    exchanges: Frame,
    committed_offsets: Frame,
    every: str | None = None,
    where: str | None = None,
) -> Frame:
    """How far groups are behind: what they committed, or were told that they had, against the end of the log.

    Where somebody fetched `__consumer_offsets`, what coordinators wrote there counts too, and offsets that are removed
    do not. The end of a log is the highest that any answer told: the high watermark of a Fetch, what ListOffsets found,
    or one more than the first offset that a Produce wrote. Null where none did. Refused commits do not count. Over time
    a step has what was committed last in it, against the end as it was known by then.

    Without steps of time the answer also has what `client`, who commits for the group, has fetched (`fetched_offset`,
    `fetch_lag_records`); how the lag went: first, most, `growth_per_s` (records, over the later half of the time),
    `growing`, and `catch_up_ns`, which it takes at that rate where it shrinks. `behind_ns` is how old the first record
    that is not committed is at most, by when the log ended before it, or by the timestamps of records fetched before
    it; null where the tables begin later.
    """
    step, of_step = ("`time`, ", f"{bucket(every)} as `time`, ") if every else ("", "")
    keys = " and ".join(f"o.{key} = r.{key}" for key in KEYS)
    moments = () if every else _MOMENTS
    ended = "".join(f", max(case when eighth <= {n} then end_offset end) as end_{n}" for n in moments)
    held = "".join(f", {_at_last_by(n)} as held_{n}" for n in moments)
    names = "".join(f", held_{n}" for n in moments), "".join(f", end_{n}" for n in moments)
    nulls = "".join(", cast(null as bigint)" for _ in moments)
    nulls_as = "".join(f", cast(null as bigint) as end_{n}" for n in moments)
    over = "".join(f", max(end_{n}) over so_far as end_by_{n}" for n in moments)
    lags = "".join(f", {_lag_of(f'end_by_{n}', f'held_{n}')} as lag_{n}" for n in moments)
    from kproxy.tables.schema import PARTITIONS  # heavy, and no help text needs it

    # What a condition may name, of a commit in a log.
    written = dict.fromkeys((*PARTITIONS.schema.names, *EXCHANGE_NAMES, "of_topic", "of_group"), "null")
    written |= {
        each: name(each) for each in ("source", "cluster", "connection", "number", "time", "topic", "partition")
    }
    written |= {"offset": "coalesce(`offset`, -1)", "of_topic": "topic", "of_group": "group_id", "direction": "'log'"}
    return ask(
        {"partitions": partitions, "exchanges": exchanges, "committed_offsets": committed_offsets},
        fetched=FETCHED,
        told=f"""
            select *, {TOPIC} as of_topic from partitions
            where ({COMMITS} and direction = 'request') or (api = 'OffsetFetch' and direction = 'response')""",
        ours=of_exchanges("told", (*COMMITTING, "OffsetFetch")),
        refusals=f"""
            select distinct source, connection, `number`, {TOPIC} as of_topic, `partition`, 1 as is_refused
            from partitions where {COMMITS} and direction = 'response' and error_code != 0""",
        places=f"""
            select {", ".join(f"o.{name(each)}" for each in written if each != "of_group")},
                coalesce(o.group_id, o.asked_group) as of_group
            from ours o left join refusals r
                on {keys} and o.of_topic = r.of_topic and o.`partition` = r.`partition`
            where r.is_refused is null and o.`offset` >= 0
            union all
            select {", ".join(f"{text} as {name(each)}" for each, text in written.items())} from committed_offsets
            where `change` in ('committed', 'removed')""",
        told_ends=_ENDS,
        spans="""
            select cluster as of_cluster, min(unix_micros(`time`)) as first_us,
                max(unix_micros(`time`)) - min(unix_micros(`time`)) as span_us
            from partitions group by cluster""",
        ends=f"""
            select {of_step}{_OF}, max(end_offset) as end_offset, max(`time`) as end_seen{ended}
            from {_timed("told_ends")} group by all""",
        committed=f"""
            select {of_step}cluster, of_group as group_id, of_topic as topic, `partition`,
                {at_last("`offset`")} as committed_offset,
                greatest(count_if(direction = 'request'), count_if(direction = 'log' and `offset` >= 0)) as commits,
                min(case when direction = 'request' or direction = 'log' and `offset` >= 0 then `time` end)
                    as first_commit,
                max(case when direction = 'request' or direction = 'log' and `offset` >= 0 then `time` end)
                    as last_commit{held}
            from {_timed("places")} where of_group is not null and {where or "true"} group by all""",
        placed=f"""
            select {step}cluster, topic, `partition`, group_id, committed_offset, commits, first_commit, last_commit,
                cast(null as bigint) as seen_offset, cast(null as timestamp) as seen{names[0]}{nulls_as}
            from committed
            union all
            select {step}cluster, topic, `partition`, null, null, null, null, null, end_offset, end_seen{nulls}
                {names[1]} from ends""",
        known=f"""
            select *, max(seen_offset) over so_far as end_offset, max(seen) over so_far as end_seen{over} from placed
            window so_far as (partition by cluster, topic, `partition` {"order by `time`" if every else ""})""",
        lags=f"""
            select {step}cluster, group_id, topic, `partition`, committed_offset, end_offset,
                {_lag_of("end_offset", "committed_offset")} as lag_records,
                commits, first_commit, last_commit, end_seen{lags}
            from known where committed_offset >= 0""",
        **(_plain(step) if every else _followed()),
    )


def _plain(step: str) -> dict[str, str]:
    return {
        "answer": f"""
            select {step}cluster, group_id, topic, `partition`, committed_offset, end_offset, lag_records, commits,
                last_commit, end_seen
            from lags
            order by {step}end_offset is null, lag_records desc, cluster, group_id, topic, `partition`"""
    }


def _lag_of(end: str, offset: str) -> str:
    return f"case when {end} - {offset} is not null then greatest({end} - {offset}, 0) end"


def _timed(rows: str) -> str:
    """Rows with the eighth of their cluster's time that they are in, from 1 on."""
    eighth = f"cast(floor((unix_micros(`time`) - first_us) / (span_us + 1e0) * {_MOMENTS[-1]}) as int) + 1"
    return (
        f"(select r.*, {eighth} as eighth from {rows} r join spans s on r.cluster is not distinct from s.of_cluster) t"
    )


def _at_last_by(moment: int) -> str:
    """The offset that was committed last until a moment."""
    at = "named_struct('t', unix_micros(`time`), 'n', `number`, 'o', `offset`)"
    return f"max_by(`offset`, case when eighth <= {moment} then {at} end)"


def _followed() -> dict[str, str]:
    """Steps behind `lags`: how each went, what was fetched beside it, and how old its first record is."""
    like = " and ".join(f"a.{key} is not distinct from b.{key}" for key in ("cluster", "topic", "`partition`"))
    latest = "named_struct('t', unix_micros(a.last), 'c', a.client, 'h', a.host)"
    middle, last = _MOMENTS[len(_MOMENTS) // 2 - 1], _MOMENTS[-1]
    of_moments = ", ".join(f"lag_{n}" for n in _MOMENTS)
    whose = (
        "cluster, group_id, topic, `partition`, committed_offset, end_offset, lag_records, commits, first_commit, "
        f"last_commit, end_seen, {of_moments}"
    )
    return {
        # The record at an offset was written after the log ended there or before, and after the record before it.
        "marks": f"""
            select cluster as of_cluster, topic as of_topic, `partition` as of_number, mark_offset, max(us) as us from (
                select {_OF}, end_offset as mark_offset, unix_micros(`time`) as us from told_ends
                union all
                select cluster, {TOPIC} as topic, `partition`, high_watermark - lag_records as mark_offset,
                    unix_micros(`time`) - cast(floor(lag_ns / 1e3) as bigint) as us
                from fetched where lag_ns is not null) m
            group by {_OF}, mark_offset""",
        "aged": f"""
            select {whose}, max(us) as marked_us
            from lags l left join marks m
                on l.cluster is not distinct from m.of_cluster and l.topic = m.of_topic
                and l.`partition` = m.of_number and m.mark_offset <= l.committed_offset and l.lag_records > 0
            group by {whose}""",
        "committers": """
            select cluster, of_group as group_id, client, host, of_topic as topic, `partition`, max(`time`) as last
            from places where of_group is not null and client is not null and direction = 'request' group by all""",
        "fetches": of_exchanges("fetched", ("Fetch",), False),
        "fetched_to": f"""
            select cluster, client, host, {TOPIC} as topic, `partition`,
                {at_last("high_watermark - lag_records")} as fetched_offset
            from fetches group by all""",
        "members": f"""
            select a.cluster as of_cluster, a.group_id as of_group, a.topic as of_topic, a.`partition` as of_number,
                max_by(a.client, {latest}) as client, max_by(b.fetched_offset, {latest}) as fetched_offset
            from committers a left join fetched_to b on {like} and a.client = b.client and a.host = b.host
            group by a.cluster, a.group_id, a.topic, a.`partition`""",
        "trended": f"""
            select a.*, s.span_us, coalesce({of_moments}) as first_lag_records,
                greatest({of_moments}, lag_records) as max_lag_records,
                round(try_divide(lag_{last} - lag_{middle}, s.span_us / 2e6), 3) as growth_per_s
            from aged a join spans s on a.cluster is not distinct from s.of_cluster""",
        "answer": f"""
            select a.cluster, a.group_id, a.topic, a.`partition`, a.committed_offset, a.end_offset, a.lag_records,
                m.client, m.fetched_offset, {_lag_of("a.end_offset", "m.fetched_offset")} as fetch_lag_records,
                a.first_lag_records, a.max_lag_records, a.growth_per_s,
                coalesce(a.growth_per_s > 0 and a.lag_records > a.first_lag_records, false) as growing,
                cast(case when a.lag_records > 0 and a.growth_per_s < 0
                    then floor(a.lag_records / -a.growth_per_s * 1e9) end as bigint) as catch_up_ns,
                case when a.lag_records > 0
                    then greatest(unix_micros(a.end_seen) - a.marked_us, 0) * 1000 end as behind_ns,
                a.commits, a.first_commit, a.last_commit, a.end_seen
            from trended a left join members m
                on a.cluster is not distinct from m.of_cluster and a.group_id = m.of_group
                and a.topic is not distinct from m.of_topic and a.`partition` is not distinct from m.of_number
            order by a.end_offset is null, a.lag_records desc, a.cluster, a.group_id, a.topic, a.`partition`""",
    }
