"""Answers to Fetch that may be a follower's (KIP-392), whose high watermark is lower than the end of the log.

Brokers choose a follower for requests that name a rack: `partitions.end_offset` is null in the answers to these. An
answer is the leader's if, by Metadata, its broker led the partition. Tables from before schema version 7 have no
`end_offset` at all: there an answer is the leader's unless another broker is known to lead.

Steps of a question over `partitions`, `exchanges` and `topology`. Refuses to know where logs end.
"""

from kproxy.analysis.lags.ends import OF, same
from kproxy.analysis.questions.pieces import KEYS, TOPIC

# Reason for an unknown lag of a fetch or a group.
NO_LEADER = "a follower answered, and no answer of the leader showed the end of the log"

_FETCH = "api = 'Fetch' and direction = 'response' and high_watermark >= 0"


def answered() -> dict[str, str]:
    """Step `answered` (KEYS, cluster, topic, partition, us, is_followers): the answers that may be a follower's.

    is_followers is null if neither tables nor a Metadata show whose the answer is.
    """
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
            select {", ".join(KEYS)}, {OF}, us,
                case when s.of_source is not null or leader is not null and broker is not null
                    then case when {led_by} = broker then false else true end end as is_followers
            from led_until u left join telling_sources s on u.source = s.of_source
            where u.source is not null""",
    }


def same_row(one: str, other: str, topic: str = "topic") -> str:
    """A condition: two rows of one answer are of one partition."""
    keys = " and ".join(f"{one}.{key} = {other}.{key}" for key in KEYS)
    return f"{keys} and {one}.{topic} = {other}.topic and {one}.`partition` = {other}.`partition`"
