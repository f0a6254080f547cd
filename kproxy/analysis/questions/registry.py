"""Questions about ZooKeeper: changes of its tree, and rebalances of consumers of its era.

Durations are columns `_ns`, as in the tables. Refuses to know files, sessions and formats of output.
"""

from kproxy.analysis.engine import Frame, ask

_CREATES = "('create', 'create2', 'createTTL', 'createContainer')"
_KINDS = (
    "'broker', 'controller', 'controller_epoch', 'partition_state', 'isr_change', 'topic', 'consumer_id', "
    "'consumer_owner', 'config', 'admin', 'acl'"
)
# Columns of both the answer and the table. A condition on these alone filters rows of the answer, since the row of a
# node that was removed with its session comes from two rows of the table.
REGISTRY_WHERE = ("cluster", "kind", "path", "session", "client_address", "zxid")
_FOR_EVER = "9223372036854775807"


def registry(registry: Frame, where: str | None = None, traffic: str | None = None) -> Frame:
    """ZooKeeper's tree over time: sessions, brokers, the controller, partitions' states, consumers, configurations.

    `change` of a session: began, came_back, expired or closed; of a node: created, changed or deleted;
    gone_with_session: an ephemeral node whose session was closed; lost: an owner node that another consumer holds.
    `detail` is the node's value, or the session's timeout.
    """
    return ask(
        {"registry": registry},
        ours=f"select * from registry where {traffic or 'true'}",
        sessions="""
            select `time`, time_ns, cluster, 'session' as kind,
                case when op = 'closeSession' then 'closed'
                    when error = 'SESSIONEXPIRED' then 'expired'
                    when `value` like '%session_: null%' then 'began' else 'came_back' end as `change`,
                cast(null as string) as path, session, client_address, zxid, `value` as detail
            from ours
            where op = 'connect' and latency_ns is not null or op = 'closeSession' and zxid is not null""",
        changes=f"""
            select `time`, time_ns, cluster, kind,
                case when error = 'NODEEXISTS' then 'lost' when op = 'setData' then 'changed'
                    when op = 'delete' then 'deleted' else 'created' end as `change`,
                path, session, client_address, zxid, `value` as detail, ephemeral
            from ours
            where kind in ({_KINDS}) and (op in {_CREATES} or op in ('setData', 'delete')) and zxid is not null
                and (error is null or error = 'NODEEXISTS' and kind = 'consumer_owner')""",
        held="""
            select c.*, s.`time` as closed_at, s.time_ns as closed_ns, s.zxid as closed_zxid,
                row_number() over (partition by c.cluster, c.path, c.session order by c.time_ns desc) as newest
            from changes c join sessions s on c.cluster = s.cluster and c.session = s.session
            where s.`change` = 'closed' and c.`change` = 'created' and c.ephemeral and c.time_ns <= s.time_ns""",
        gone="""
            select h.closed_at as `time`, h.closed_ns as time_ns, h.cluster, h.kind, 'gone_with_session' as `change`,
                h.path, h.session, h.client_address, h.closed_zxid as zxid, h.detail
            from held h where h.newest = 1 and not exists (
                select 1 from changes d where d.cluster = h.cluster and d.path = h.path and d.`change` = 'deleted'
                    and d.time_ns between h.time_ns and h.closed_ns)""",
        timeline="""
            select * from sessions union all select * from gone union all
            select `time`, time_ns, cluster, kind, `change`, path, session, client_address, zxid, detail
            from changes""",
        answer=f"""
            select `time`, cluster, kind, `change`, path, session, client_address, zxid, detail from timeline
            where {where or "true"}
            order by time_ns, cluster, zxid nulls first, kind, path, `change`""",
    )


def consumers(rebalances: Frame, group_events: Frame, assignments: Frame, partitions: Frame, exchanges: Frame) -> Frame:
    """Rebalances of consumers that coordinate through ZooKeeper (Kafka 0.8): causes, herd, lost races, two owners.

    `woken` counts the watches that fired, `rejoined` the members that rebalanced after it: the herd effect;
    `races_lost` counts claims that failed because another member had the owner node. `stood_still_ns` runs from the
    first partition released to the last one claimed. `stale_fetches` counts fetches of a partition's former owner after
    another member had claimed it, such as a consumer that was paused beyond its session timeout: two owners at once, up
    to `stale_ns` after the claim. A member's fetches are those of the client that fetched most of its partitions, from
    the member's host. `host` is that of `cause_member`.
    """
    return ask(
        {
            "rebalances": rebalances,
            "group_events": group_events,
            "assignments": assignments,
            "partitions": partitions,
            "exchanges": exchanges,
        },
        # Each `convert` counts generations from 1: if several have the same number, each ends when the next begins.
        rounds=f"""
            select *, case when lag(started_ns) over alike is null then 0 else started_ns end as since_ns,
                coalesce(lead(started_ns) over alike, {_FOR_EVER}) as next_ns
            from rebalances where protocol = 'zookeeper'
            window alike as (partition by cluster, group_id, generation order by started_ns)""",
        counted="""
            select r.cluster, r.group_id, r.generation, r.started_ns, count_if(e.event = 'woken') as woken,
                count_if(e.event = 'assigned') as claimed, count_if(e.event = 'claim_lost') as races_lost,
                min(case when e.event = 'revoked' then e.time_ns end) as revoked_ns,
                max(case when e.event = 'assigned' then e.time_ns end) as assigned_ns
            from group_events e join rounds r
                on e.cluster = r.cluster and e.group_id = r.group_id and e.generation = r.generation
                and e.time_ns >= r.since_ns and e.time_ns < r.next_ns
            where e.protocol = 'zookeeper' group by r.cluster, r.group_id, r.generation, r.started_ns""",
        claims=f"""
            select a.cluster, a.group_id, r.generation, r.started_ns, a.member_id, a.topic, a.`partition`, a.time_ns,
                lag(a.member_id) over w as former, lag(a.time_ns) over w as former_ns,
                coalesce(lead(a.time_ns) over w, {_FOR_EVER}) as until_ns
            from assignments a join rounds r
                on a.cluster = r.cluster and a.group_id = r.group_id and a.generation = r.generation
                and a.time_ns >= r.since_ns and a.time_ns < r.next_ns
            window w as (partition by a.cluster, a.group_id, a.topic, a.`partition` order by a.time_ns)""",
        hosts="""
            select cluster, group_id, member_id, max_by(client_address, time_ns) as host from group_events
            where protocol = 'zookeeper' and event in ('join', 'assigned') and client_address is not null
            group by cluster, group_id, member_id""",
        fetched="""
            select c.cluster, c.group_id, c.generation, c.started_ns, c.member_id, c.former, c.time_ns,
                e.request_start_ns as at_ns, concat(coalesce(e.client_id, ''), ' ', e.client_address) as client
            from partitions p join exchanges e
                on p.source = e.source and p.connection = e.connection and p.`number` = e.`number`
            join claims c on c.cluster = p.cluster and c.topic = p.topic and c.`partition` = p.`partition`
                and e.request_start_ns > c.time_ns and e.request_start_ns < c.until_ns
            left join hosts h on h.cluster = c.cluster and h.group_id = c.group_id and h.member_id = c.member_id
            left join hosts f on f.cluster = c.cluster and f.group_id = c.group_id and f.member_id = c.former
            where p.api = 'Fetch' and p.direction = 'request' and coalesce(e.replica_id, -1) < 0
                and coalesce(e.client_address in (h.host, f.host), true)""",
        clients="""
            select cluster, group_id, member_id, client,
                row_number() over (partition by cluster, group_id, member_id order by count(*) desc, client) as place
            from fetched group by cluster, group_id, member_id, client""",
        stale="""
            select f.cluster, f.group_id, f.generation, f.started_ns, count(*) as stale_fetches,
                max(f.at_ns) - min(f.time_ns) as stale_ns
            from fetched f join clients k
                on f.cluster = k.cluster and f.group_id = k.group_id and f.former = k.member_id and f.client = k.client
            where k.place = 1 and f.former != f.member_id
            group by f.cluster, f.group_id, f.generation, f.started_ns""",
        answer="""
            select r.`time`, r.cluster, r.group_id, r.generation, r.cause, r.cause_member, r.members_before,
                r.members_after, coalesce(c.woken, 0) as woken, r.rejoined, coalesce(c.claimed, 0) as claimed,
                coalesce(c.races_lost, 0) as races_lost, r.ended_ns - r.started_ns as rebalance_ns,
                case when c.assigned_ns > c.revoked_ns then c.assigned_ns - c.revoked_ns end as stood_still_ns,
                coalesce(s.stale_fetches, 0) as stale_fetches, s.stale_ns, h.host
            from rounds r
            left join hosts h on r.cluster = h.cluster and r.group_id = h.group_id and r.cause_member = h.member_id
            left join counted c on r.cluster = c.cluster and r.group_id = c.group_id and r.generation = c.generation
                and r.started_ns = c.started_ns
            left join stale s on r.cluster = s.cluster and r.group_id = s.group_id and r.generation = s.generation
                and r.started_ns = s.started_ns
            order by r.started_ns, r.cluster, r.group_id""",
    )
