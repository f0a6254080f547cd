"""The ends of logs, and the moments at which a log was replaced by another one or truncated (turns).

The end comes from answers to Produce, Fetch, ListOffsets (`partitions.end_offset`). It only rises, as a follower
(KIP-392) answers with a lower high watermark than the leader. A lower end counts only after a turn: a topic was deleted
or created again, or the leader's log truncated. Steps of a question over `partitions`, `exchanges`, `changes` and
`topology`; times are microseconds. Other steps name each step once if possible: Spark computes it wherever it is named.
Refuses to know groups.
"""

from kproxy.analysis.questions.pieces import GROUPS, KEYS, TOPIC
from kproxy.metrics.consumers.log_end import FENCED_NS

LOG = ("cluster", "topic", "`partition`")
OF = ", ".join(LOG)
GONE = "(3, 100)"  # UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID
FAR = 2**62  # after every time
_CATCHES_UP_US = 30_000_000  # replica.lag.time.max.ms: the longest that a high watermark waits for a follower

# Ends in answers, followers' too: KEYS, time, us, cluster, topic, partition, end_offset. is_start: it may be a new log,
# empty or begun by a Produce; is_mark: a high watermark, or from ListOffsets; is_leaders: certainly the leader's.
TOLD_ENDS = f"""
    select {", ".join(KEYS)}, `time`, unix_micros(`time`) as us, cluster, {TOPIC} as topic, `partition`,
        coalesce(end_offset, high_watermark) as end_offset,
        coalesce(case when api = 'Produce' then `offset` = 0 else end_offset = 0 end, false) as is_start,
        api != 'Produce' as is_mark, end_offset is not null as is_leaders
    from partitions
    where direction = 'response' and coalesce(error_code, 0) = 0 and coalesce(end_offset, high_watermark) >= 0"""


def same(one: str, other: str) -> str:
    """A condition: two rows are of one log."""
    return " and ".join(f"{one}.{key} is not distinct from {other}.{key}" for key in LOG)


def turns() -> dict[str, str]:
    """Step `turns` (cluster, topic, partition, us, is_lost), after `told_ends`: ends of a log's life.

    is_lost: the log is gone, and with it the offsets that groups have committed; else it was truncated. Step
    `current_ends`: the rows of `told_ends` without answers of former leaders after the truncation.
    """
    return {
        **_of_topics(),
        **_of_unknown_partitions(),
        **_of_new_starts(),
        **_of_truncations(),
        "turns": f"""
            select {OF}, us, true as is_lost from topics_gone
            union all
            select {OF}, us, true as is_lost from partitions_gone
            union all
            select {OF}, us, true as is_lost from started_again
            union all
            select {OF}, us, false as is_lost from truncated""",
    }


def lives() -> dict[str, str]:
    """Steps after `told_ends` and `turns`: `lives` of logs, from turn to turn, and `lived_ends`, ends with their life.

    The life before the first turn has the number 0, and no row in `lives`.
    """
    return {
        "lives": f"""
            select {OF}, us as from_us, lead(us) over of_log as until_us, row_number() over of_log as life
            from (select distinct {OF}, us from turns) t window of_log as (partition by {OF} order by us)""",
        "lived_ends": f"""
            select t.*, coalesce(l.life, 0) as life
            from current_ends t left join lives l
                on {same("t", "l")} and t.us > l.from_us and t.us <= coalesce(l.until_us, {FAR})""",
    }


def _of_topics() -> dict[str, str]:
    """Step `topics_gone`: a topic was deleted, or its name has another id from then on; a row for each partition."""
    return {
        "topic_ids": """
            select cluster, topic, topic_id, min(unix_micros(`time`)) as us from topology
            where kind = 'topic' and topic is not null and topic_id is not null group by cluster, topic, topic_id""",
        "names_gone": """
            select cluster as of_cluster, topic as of_topic, us from (
                select *, min(us) over (partition by cluster, topic) as first_us from topic_ids) i
            where us > first_us
            union all
            select cluster, resource_name, unix_micros(`time`) as us from changes
            where api = 'DeleteTopics' and answered and error is null and resource_name is not null""",
        "topics_gone": f"""
            select l.cluster, l.topic, l.`partition`, g.us
            from (select distinct cluster, {TOPIC} as topic, `partition` from partitions) l join names_gone g
                on l.cluster is not distinct from g.of_cluster and l.topic = g.of_topic""",
    }


def _of_unknown_partitions() -> dict[str, str]:
    """Step `partitions_gone`: the leader of a log responded with an error that the partition does not exist.

    Only the broker that last reported the log's end counts, since other brokers may not know a new topic yet.
    """
    asked = "direction = 'response' and api in ('Produce', 'Fetch', 'ListOffsets')"
    broker = f"select {', '.join(KEYS)}, {GROUPS['broker']} as broker from exchanges"
    keys = " and ".join(f"p.{key} = e.{key}" for key in KEYS)
    return {
        "denied_logs": f"""
            select distinct cluster as of_cluster, {TOPIC} as of_topic, `partition` as of_number
            from partitions where {asked} and error_code in {GONE}""",
        "statements": f"""
            select p.cluster, d.of_topic as topic, p.`partition`, unix_micros(p.`time`) as us, e.broker,
                coalesce(p.error_code, 0) in {GONE} as is_denied
            from partitions p join denied_logs d
                on p.cluster is not distinct from d.of_cluster and coalesce(p.topic, p.topic_id) = d.of_topic
                and p.`partition` = d.of_number
            join ({broker} where api in ('Produce', 'Fetch', 'ListOffsets')) e on {keys}
            where {asked} and (p.error_code in {GONE} or p.end_offset >= 0 and coalesce(p.error_code, 0) = 0)""",
        "led": f"""
            select *, max(case when not is_denied then concat(lpad(cast(us as string), 20, '0'), broker) end) over (
                partition by {OF} order by us, is_denied rows between unbounded preceding and current row) as leader
            from statements""",
        "partitions_gone": f"""
            select {OF}, min(us) as us from led where is_denied and substr(leader, 21) = broker
            group by {OF}, leader""",
    }


def _of_new_starts() -> dict[str, str]:
    """Step `started_again`: a log that had records begins at 0 again, for the last time; `us` is just before that.

    It serves captures without a deletion and without topic ids. These do not count: a Produce answered after a Fetch of
    its records, a high watermark below the offset just produced, and a repeated Produce.
    """
    before = "case when us < start_us and not is_start"
    return {
        "last_starts": f"""
            select {OF}, max(case when is_start then us end) as start_us from told_ends group by {OF}
            having max(case when is_start then us end) > min(case when not is_start then us end)""",
        "before_starts": f"""
            select *, max({before} then us end) over log as full_us,
                max({before} then end_offset end) over log as full_end,
                max({before} and is_mark then end_offset end) over log as full_mark
            from (select t.*, s.start_us from told_ends t join last_starts s on {same("t", "s")}) t
            window log as (partition by {OF})""",
        "first_starts": f"""
            select *, min(case when is_start and us > full_us then us end) over (partition by {OF}) as first_us
            from before_starts""",
        "started_again": f"""
            select {OF}, first_us - 1 as us from first_starts where us >= first_us group by {OF}, first_us
            having max(case when us = first_us and is_start
                    and end_offset < case when is_mark then full_mark else full_end end then 1 end) = 1
                and coalesce(min(case when is_mark then end_offset end), 0) < max(full_end)""",
    }


def _of_truncations() -> dict[str, str]:
    """Step `truncated`: a leader of the newest epoch reported a lower end than before; `us` is just before that.

    If its log soon ends there again, it is not truncated: a new leader learns the high watermark from its followers,
    and answers on different connections overtake each other.
    """
    asked = "direction = 'request' and api in ('Fetch', 'ListOffsets') and leader_epoch >= 0"
    keys = " and ".join(f"q.{key} = a.{key}" for key in KEYS)
    same_row = " and ".join(f"t.{key} = f.{key}" for key in (*KEYS, "topic", "`partition`"))
    return {
        "epochs": f"""
            select {", ".join(KEYS)}, cluster, {TOPIC} as topic, `partition`, leader_epoch,
                max(leader_epoch) over log as newest, min(leader_epoch) over log as oldest
            from partitions where {asked} window log as (partition by cluster, {TOPIC}, `partition`)""",
        "told_newest": f"""
            select q.cluster, q.topic, q.`partition`, min(unix_micros(a.`time`)) as new_us,
                min_by(a.end_offset, named_struct('t', unix_micros(a.`time`), 'n', a.`number`)) as new_end
            from epochs q join partitions a
                on {keys} and a.direction = 'response' and q.topic = coalesce(a.topic, a.topic_id)
                and q.`partition` = a.`partition` and a.end_offset >= 0 and coalesce(a.error_code, 0) = 0
            where q.leader_epoch = q.newest and q.newest > q.oldest
            group by q.cluster, q.topic, q.`partition`""",
        "lowered": f"""
            select n.cluster, n.topic, n.`partition`, n.new_us, max(t.end_offset) as old_end
            from told_newest n join told_ends t on {same("n", "t")} and t.us < n.new_us
            group by n.cluster, n.topic, n.`partition`, n.new_us having max(t.end_offset) > max(n.new_end)""",
        "truncated": f"""
            select l.cluster, l.topic, l.`partition`, l.new_us - 1 as us
            from lowered l left join told_ends t on {same("l", "t")} and t.end_offset >= l.old_end
                and t.us between l.new_us and l.new_us + {_CATCHES_UP_US}
            left join epochs f on {same_row}
            group by l.cluster, l.topic, l.`partition`, l.new_us
            having count(case when coalesce(f.leader_epoch = f.newest, true) then t.us end) = 0""",
        "fenced": f"""
            select {", ".join(f"e.{key}" for key in KEYS)}, e.topic, e.`partition`, t.us as from_us
            from epochs e join truncated t on {same("e", "t")} where e.leader_epoch < e.newest""",
        "current_ends": f"""
            select t.* from told_ends t left join fenced f on {same_row}
            where coalesce(t.us <= f.from_us or t.us > f.from_us + {FENCED_NS // 1000}, true)""",
    }
