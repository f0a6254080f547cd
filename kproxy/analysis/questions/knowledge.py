"""Questions about the state of a cluster: groups and their rebalances, coordinators, leaders, topology, changes.

They read the tables that `kproxy.insight` fills. Refuses to know files, sessions and formats of output.
"""

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.questions.pieces import GROUPS, KEYS, TOPIC, aborted, literal

AWAY_NS = 60_000_000_000  # a group without a request for this long has no member: request.timeout.ms is shorter
HEARTBEAT_NS = 3_000_000_000  # heartbeat.interval.ms
SOON_NS = 10_000_000_000  # a rebalance that begins this soon after a coordinator's refusal follows from it
CLOSES_NS = 3_000_000_000  # a member that left closes its connections this soon
FOR_EVER = "9223372036854775807"
LOADING = "COORDINATOR_LOAD_IN_PROGRESS"
TROUBLES = ("NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", LOADING)  # the first two have older names too
_TROUBLES = ", ".join(map(literal, (*TROUBLES, "NOT_COORDINATOR_FOR_GROUP", "GROUP_COORDINATOR_NOT_AVAILABLE")))
_SAME_GROUP = "a.cluster is not distinct from b.cluster and a.group_id = b.group_id"
_OF_TRANSACTIONS = ("AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "Produce")
_ENDS = ("EndTxn", "InitProducerId")
_ADDS = f"api in ({', '.join(map(literal, _OF_TRANSACTIONS))})"
_SAME_TRANSACTION = (
    "s.cluster is not distinct from {0}.cluster and s.transactional_id = {0}.transactional_id and s.nth = {0}.nth"
)
_MAX_LISTED = 20  # partitions of a transaction
_AT = "timestamp_micros(cast(floor({} / 1e3) as bigint))"


def groups(group_events: Frame, rebalances: Frame) -> Frame:
    """Consumer groups: rebalances and their duration, members that joined, left and expired, refused requests.

    `rebalancing_ns` is the sum over all generations of the time from the cause to the assignment of the last member;
    `worst_cause` is the cause of most of them. A group that changes its protocol has a row for each. kproxy infers from
    silence which members `expired`, and which ones `never_joined`: these got a member id and did not join.
    """
    return ask(
        {"group_events": group_events, "rebalances": rebalances},
        event_counts="""
            select cluster, group_id, protocol, min(time_ns) as first_ns, max(time_ns) as last_ns,
                count(distinct case when event = 'join_answered' and error is null then member_id end) as members_seen,
                count_if(event = 'leave' and error is null) as `left`, count_if(event = 'expired') as expired,
                count_if(event = 'never_joined') as never_joined,
                count_if(event = 'member_replaced') as replaced,
                count_if(event = 'heartbeat_failed' and error != 'REBALANCE_IN_PROGRESS') as heartbeats_failed,
                count_if(event = 'commit_failed') as commits_failed,
                count_if(event = 'assignment_differs') as wrong_assignments,
                max_by(coordinator_id, named_struct('t', case when coordinator_id is null then 0 else time_ns end,
                    'n', coordinator_id)) as coordinator_id
            from group_events group by all""",
        moved="""
            select cluster, group_id, protocol, cause, count(*) as times from rebalances group by all""",
        causes="""
            select cluster, group_id, protocol, max_by(cause, named_struct('n', times, 'c', cause)) as worst_cause
            from moved group by all""",
        generations="""
            select cluster, group_id, protocol, count(*) as rebalances,
                max_by(generation, named_struct('t', joined_ns, 'g', generation)) as generation,
                max_by(strategy, named_struct('t', joined_ns, 'g', generation)) as strategy,
                max_by(members_after, named_struct('t', joined_ns, 'g', generation)) as members,
                sum(coalesce(ended_ns, joined_ns) - started_ns) as rebalancing_ns,
                max(coalesce(ended_ns, joined_ns) - started_ns) as longest_ns
            from rebalances group by all""",
        known=f"""
            select a.* from event_counts a where a.protocol != 'unknown' or not exists (
                select 1 from event_counts b where {_SAME_GROUP} and b.protocol != 'unknown')""",
        answer=f"""
            select a.cluster, a.group_id, b.members, coalesce(b.rebalances, 0) as rebalances, c.worst_cause,
                b.rebalancing_ns, b.longest_ns, a.expired, a.heartbeats_failed, a.commits_failed, a.`left`,
                a.never_joined, a.replaced, a.wrong_assignments, a.members_seen, b.generation, a.coordinator_id,
                a.protocol, b.strategy, {_AT.format("a.first_ns")} as first, {_AT.format("a.last_ns")} as last
            from known a
            left join generations b on {_SAME_GROUP} and a.protocol = b.protocol
            left join causes c on a.cluster is not distinct from c.cluster and a.group_id = c.group_id
                and a.protocol = c.protocol
            order by rebalances desc, b.rebalancing_ns desc nulls last, a.cluster nulls first, a.group_id,
                a.protocol""",
    )


def rebalances(rebalances: Frame, group_events: Frame, exchanges: Frame) -> Frame:
    """Each rebalance: its cause, its duration, the member that joined last, and how long consumers stopped fetching.

    `forming_ns` runs from the cause until all had joined, `assigning_ns` from then until the last member had its
    partitions. `waited_ns`: how long all others waited for `last_to_join`. `rejoined`: members that had to join again.
    `longest_pause_ns`: the longest time that one of the consumers did not fetch, from the last Fetch response before it
    got its partitions to the first Fetch after; consumers that share a client id and a host count as one.
    `coordinator_lost`: since the previous generation the coordinator had refused members, or had moved to another
    broker: see `coordinators`.
    """
    return ask(
        {"rebalances": rebalances, "group_events": group_events, "exchanges": exchanges},
        members="select distinct client_id from group_events where client_id is not null",
        moments="""
            select source, cluster, client_id, client_address, response_end_ns as at_ns, response_end_ns as fetched_ns,
                cast(null as bigint) as asked_ns, cast(null as string) as group_id, cast(null as int) as generation
            from exchanges where api = 'Fetch' and response_end_ns is not null and client_id in (select * from members)
            union all
            select source, cluster, client_id, client_address, request_start_ns, null, request_start_ns, null, null
            from exchanges where api = 'Fetch' and request_start_ns is not null and client_id in (select * from members)
            union all
            select source, cluster, client_id, client_address, time_ns, null, null, group_id, generation
            from group_events
            where event in ('sync_answered', 'assigned') and error is null and client_id is not null""",
        around="""
            select *, max(fetched_ns) over (partition by source, cluster, client_id, client_address order by at_ns
                    rows between unbounded preceding and current row) as before_ns,
                min(asked_ns) over (partition by source, cluster, client_id, client_address order by at_ns
                    rows between current row and unbounded following) as behind_ns
            from moments""",
        troubles=f"""
            select distinct cluster, group_id, time_ns from group_events
            where error in ({_TROUBLES}) or event = 'coordinator_moved'""",
        in_turn="""
            select *, lag(joined_ns) over (partition by cluster, group_id, protocol order by joined_ns) as before_ns
            from rebalances""",
        after_loss=f"""
            select distinct a.cluster, a.group_id, a.generation, a.joined_ns from in_turn a join troubles b
                on {_SAME_GROUP} and b.time_ns <= coalesce(a.ended_ns, a.joined_ns)
                and b.time_ns >= a.started_ns - {SOON_NS}
                and (b.time_ns >= a.before_ns or (a.before_ns is null and a.generation > 1))""",
        pauses="""
            select source, cluster, group_id, generation, max(behind_ns - before_ns) as longest_pause_ns
            from around where group_id is not null and behind_ns >= before_ns group by all""",
        answer=f"""
            select {_AT.format("a.started_ns")} as `time`, a.cluster, a.group_id, a.generation, a.cause,
                coalesce(a.ended_ns, a.joined_ns) - a.started_ns as took_ns, b.longest_pause_ns, a.members_before,
                a.members_after, a.rejoined, a.reason, a.cause_member, a.joined_ns - a.started_ns as forming_ns,
                a.ended_ns - a.joined_ns as assigning_ns, a.waited_ns, a.last_to_join, a.protocol, a.strategy,
                a.coordinator_id, l.joined_ns is not null as coordinator_lost
            from rebalances a left join pauses b
                on {_SAME_GROUP} and a.generation = b.generation and a.source is not distinct from b.source
            left join after_loss l on a.cluster is not distinct from l.cluster and a.group_id = l.group_id
                and a.generation = l.generation and a.joined_ns = l.joined_ns
            order by `time`, a.cluster nulls first, a.group_id, a.generation""",
    )


def assignments(assignments: Frame) -> Frame:
    """Partitions assigned to each member, by generation, newest first, and whether the strategy computes the same.

    `agrees`, for range and round robin: the assignment equals the one that kproxy computes; for sticky strategies: each
    partition is at one subscriber. Null: neither can be checked. `shared`: partitions that another member of the same
    generation got too. Groups in ZooKeeper count their generations anew in each source, so each source is kept apart.
    """
    return ask(
        {"assignments": assignments},
        placed="select *, case when group_type = 'zookeeper' then source end as of_source from assignments",
        owners="""
            select cluster, group_id, of_source, generation, topic, `partition`, count(distinct member_id) as owners
            from placed group by all""",
        answer=f"""
            select {_AT.format("min(a.time_ns)")} as `time`, a.cluster, a.group_id, a.generation, a.client_id,
                a.topic, count(distinct a.`partition`) as partitions, min(a.`partition`) as lowest,
                max(a.`partition`) as highest, count(distinct case when b.owners > 1 then a.`partition` end) as shared,
                min(a.agrees) as agrees, a.member_id, max(a.strategy) as strategy
            from placed a left join owners b
                on {_SAME_GROUP} and a.generation = b.generation and a.topic = b.topic and a.`partition` = b.`partition`
                and a.of_source is not distinct from b.of_source
            group by a.cluster, a.group_id, a.of_source, a.generation, a.member_id, a.client_id, a.topic
            order by a.cluster nulls first, a.group_id, a.of_source nulls first, a.generation desc,
                a.client_id nulls first, a.member_id, a.topic""",
    )


def split_brain(partitions: Frame, exchanges: Frame, group_events: Frame, assignments: Frame) -> Frame:
    """Two members of a group that fetched a partition at the same time, as after a pause beyond the session timeout.

    `together_ns`: how long both fetched, from the later of their first fetches to the earlier of their last ones. A
    Fetch that waits at the broker while its partition moves does not count. A client id and a host identify a member:
    members that share both count as one, and a client that is in two groups at once is left out. A member that
    coordinates through ZooKeeper is identified as the client on its host that fetched its partitions and few others.
    """
    apart = 3_000_000_000  # longest time between two fetches of one spell
    same_exchange = "p.source = e.source and p.connection = e.connection and p.`number` = e.`number`"
    return ask(
        {"partitions": partitions, "exchanges": exchanges, "group_events": group_events, "assignments": assignments},
        whose=f"""
            select distinct p.cluster, {TOPIC.replace("topic", "p.topic")} as topic, p.`partition`, e.client_id,
                e.client_address as host, e.request_start_ns as at_ns
            from partitions p join exchanges e on {same_exchange}
            where p.api = 'Fetch' and e.client_id is not null and e.request_start_ns is not null
                and coalesce(e.replica_id, -1) < 0""",
        owners="""
            select distinct cluster, group_id, member_id, client_address as host from group_events
            where protocol = 'zookeeper' and event = 'assigned' and client_address is not null""",
        claims=f"""
            select a.cluster, a.group_id, a.topic, a.`partition`, a.member_id, a.time_ns, o.host,
                coalesce(lead(a.time_ns) over (partition by a.cluster, a.group_id, a.topic, a.`partition`
                    order by a.time_ns), {FOR_EVER}) as until_ns
            from assignments a join owners o on a.cluster is not distinct from o.cluster and a.group_id = o.group_id
                and a.member_id = o.member_id""",
        hits="""
            select c.cluster, c.group_id, c.member_id, w.client_id, w.host, count(*) as hits,
                sum(count(*)) over (partition by c.cluster, c.group_id, w.client_id, w.host) as fetches
            from claims c join whose w on c.cluster is not distinct from w.cluster and c.topic = w.topic
                and c.`partition` = w.`partition` and c.host = w.host and w.at_ns > c.time_ns and w.at_ns < c.until_ns
            group by c.cluster, c.group_id, c.member_id, w.client_id, w.host""",
        likely="""
            select *, row_number() over (partition by cluster, group_id, member_id
                order by try_divide(hits, fetches) * hits desc, client_id) as place from hits""",
        members="""
            select cluster, group_id, client_id, client_address, min(time_ns) as since, max(time_ns) as until
            from group_events where error is null and client_id is not null and protocol != 'unknown' group by all
            having count(case when event in ('sync_answered', 'assigned') then 1 end) > 0
            union all
            select k.cluster, k.group_id, k.client_id, k.host, min(c.time_ns), max(c.time_ns)
            from likely k join claims c on k.cluster is not distinct from c.cluster and k.group_id = c.group_id
                and k.member_id = c.member_id
            where k.place = 1 group by all""",
        alone="""
            select cluster, group_id, client_id, client_address from members a where not exists (
                select 1 from members b
                where a.cluster is not distinct from b.cluster and a.group_id != b.group_id
                    and a.client_id = b.client_id and a.client_address = b.client_address
                    and a.since <= b.until and b.since <= a.until)
            group by all""",
        touched="""
            select w.cluster, m.group_id, w.topic, w.`partition`, w.client_id, w.host, w.at_ns
            from whose w join alone m on w.cluster is not distinct from m.cluster and w.client_id = m.client_id
                and w.host = m.client_address""",
        steps="""
            select *, at_ns - lag(at_ns) over (partition by cluster, group_id, topic, `partition`, client_id, host
                order by at_ns) as since_ns from touched""",
        counted=f"""
            select *, sum(case when since_ns <= {apart} then 0 else 1 end) over (
                partition by cluster, group_id, topic, `partition`, client_id, host order by at_ns
                rows between unbounded preceding and current row) as spell from steps""",
        spells="""
            select cluster, group_id, topic, `partition`, client_id, host, spell, min(at_ns) as since,
                max(at_ns) as until, count(*) as fetches
            from counted group by all""",
        pairs="""
            select a.cluster, a.group_id, a.topic, a.`partition`, a.client_id as one, a.host as one_host,
                b.client_id as other, b.host as other_host, greatest(a.since, b.since) as since,
                least(a.until, b.until) as until, a.fetches + b.fetches as fetches
            from spells a join spells b
                on a.cluster is not distinct from b.cluster and a.group_id = b.group_id and a.topic = b.topic
                and a.`partition` = b.`partition`
                and concat(a.client_id, ' ', a.host) < concat(b.client_id, ' ', b.host)
                and a.since < b.until and b.since < a.until""",
        answer="""
            select timestamp_micros(cast(floor(since / 1e3) as bigint)) as `time`, cluster, group_id, topic,
                `partition`, one, one_host, other, other_host, until - since as together_ns, fetches
            from pairs
            order by together_ns desc, `time`, cluster nulls first, group_id, topic, `partition`, one, other""",
    )


def coordinators(group_events: Frame, rebalances: Frame, exchanges: Frame, connections: Frame) -> Frame:
    """Coordinator outages of groups, phase by phase.

    `time`: the earliest of these after the last successful response to a member: the first failed request of the group,
    the end of a member's connection to its coordinator, the first refusal.
    `outage_ns`: the time from `time` to the next successful response or, if members had to join, until all had their
    partitions again. A successful response ends an outage; a later refusal begins another. Two kinds of responses do
    not end it, since a broker that resumes after a pause does not know yet that it lost the coordinator's role: a
    heartbeat with refusals less than 3 s before and after it, and a response that took 3 s or more with a refusal less
    than 3 s after it. The phases of an outage:

    `silent_ns`: from `time` until the first refusal, or until another coordinator was found.
    `searching_ns`: from then until FindCoordinator returned a coordinator; `loading_ns`: between the first and the last
    COORDINATOR_LOAD_IN_PROGRESS; `joining_ns`: between the first join of a member and the last assignment.
    Null: the phase was not seen; `outage_ns` is null if the group had no coordinator before, or none after.
    `former_broker` sent the last successful response; `coordinator_id` sent the next, or FindCoordinator returned it.
    `moved`: the two differ; otherwise the coordinator stayed and could not serve for a while (for example, its log
    lacked replicas). `happened`: a summary in words, with the errors that members received.
    """
    served = "('Heartbeat', 'OffsetCommit', 'SyncGroup', 'ConsumerGroupHeartbeat', 'ShareGroupHeartbeat')"
    same_loss = "l.cluster is not distinct from {0}.cluster and l.group_id = {0}.group_id and l.loss = {0}.loss"
    return ask(
        {"group_events": group_events, "rebalances": rebalances, "exchanges": exchanges, "connections": connections},
        once=("near",),
        asked="""
            select cluster, group_id, request_start_ns as at_ns, request_start_ns - lag(request_start_ns)
                over (partition by cluster, group_id order by request_start_ns) as since_ns
            from exchanges where group_id is not null and request_start_ns is not null""",
        # Two losses are separated by a successful response, or by an absence of all members: its end is unknown then.
        moments=f"""
            select cluster, group_id, time_ns as at_ns, 0 as separates, event, error, coordinator_id,
                cast(null as string) as broker, false as is_beat, cast(null as bigint) as asked_ns
            from group_events where error in ({_TROUBLES}) or event = 'coordinator_moved'
            union all
            select cluster, group_id, response_end_ns, 1, 'good', null, broker_id, {GROUPS["broker"]},
                api not in ('OffsetCommit', 'SyncGroup'), request_start_ns
            from exchanges
            where api in {served} and outcome = 'answered' and coalesce(errors, 0) = 0 and group_id is not null
                and response_end_ns is not null
            union all
            select cluster, group_id, at_ns, 1, 'returned', null, null, null, false, null
            from asked where since_ns > {AWAY_NS}""",
        surrounded="""
            select *, max(case when separates = 0 then at_ns end) over (partition by cluster, group_id order by at_ns
                    range between unbounded preceding and current row) as refused_ns,
                min(case when separates = 0 then at_ns end) over (partition by cluster, group_id order by at_ns
                    range between current row and unbounded following) as refuses_ns
            from moments""",
        lasting=f"""
            select * from surrounded where event != 'good' or coalesce(refuses_ns - at_ns >= {HEARTBEAT_NS}, true)
                or not coalesce(is_beat and at_ns - refused_ns < {HEARTBEAT_NS}, false)
                    and not coalesce(at_ns - asked_ns >= {HEARTBEAT_NS}, false)""",
        counted="""
            select *, sum(separates) over (partition by cluster, group_id order by at_ns, separates, event
                    rows between unbounded preceding and current row) as loss,
                lag(separates) over (partition by cluster, group_id order by at_ns, separates, event) as before,
                lead(separates) over (partition by cluster, group_id order by at_ns, separates, event) as behind
            from lasting""",
        near="select * from counted where separates = 0 or before = 0 or behind = 0",
        losses=f"""
            select cluster, group_id, loss, min(at_ns) as began_ns, max(at_ns) as over_ns, count(error) as refusals,
                min(case when error = '{LOADING}' then at_ns end) as load_ns,
                max(case when error = '{LOADING}' then at_ns end) as loaded_ns
            from near where separates = 0 group by cluster, group_id, loss""",
        answers="""
            select cluster, group_id, loss, error, count(*) as times from near where error is not null
            group by cluster, group_id, loss, error""",
        error_lists="""
            select cluster, group_id, loss,
                array_join(array_sort(collect_list(concat(error, ' ×', cast(times as string)))), ', ') as errors
            from answers group by cluster, group_id, loss""",
        framed=f"""
            select l.*, case when a.event = 'good' then a.at_ns end as last_good_ns,
                case when a.event = 'good' then a.broker end as former_broker,
                case when a.event = 'good' then a.coordinator_id end as former_id,
                case when b.event = 'good' then b.at_ns end as next_good_ns,
                case when b.event = 'good' then b.coordinator_id end as next_id,
                case when b.event = 'good' then b.broker end as next_broker,
                coalesce(b.at_ns, {FOR_EVER}) as until_ns,
                coalesce(lead(l.began_ns) over (partition by l.cluster, l.group_id order by l.loss), {FOR_EVER})
                    as next_loss_ns
            from losses l
            left join near a on {same_loss.format("a")} and a.separates = 1
            left join near b on l.cluster is not distinct from b.cluster and l.group_id = b.group_id
                and l.loss + 1 = b.loss and b.separates = 1""",
        # The first sign of the loss: a request that failed, or the end of a member's connection to the coordinator,
        # but for members that left.
        leaving="""
            select cluster, group_id, client_id, client_address, time_ns from group_events
            where event = 'leave' and error is null""",
        signs=f"""
            select cluster, group_id, cast(null as string) as broker, request_start_ns as at_ns from exchanges
            where group_id is not null and (outcome in ('unanswered', 'lost') or error in ({_TROUBLES}))
            union all
            select e.cluster, e.group_id, e.broker, c.end_ns from (
                select distinct source, connection, cluster, group_id, {GROUPS["broker"]} as broker, client_id,
                    client_address
                from exchanges where group_id is not null and api in {served}) e
            join connections c on e.source = c.source and e.connection = c.connection
            left join leaving l on e.cluster is not distinct from l.cluster and e.group_id = l.group_id
                and e.client_id is not distinct from l.client_id and e.client_address = l.client_address
                and c.end_ns between l.time_ns and l.time_ns + {CLOSES_NS}
            where c.close != 'open' and l.group_id is null""",
        first_signs="""
            select l.cluster, l.group_id, l.loss, min(s.at_ns) as sign_ns
            from framed l join signs s on l.cluster is not distinct from s.cluster and l.group_id = s.group_id
                and coalesce(s.broker = l.former_broker, true) and s.at_ns >= l.last_good_ns and s.at_ns < l.began_ns
            group by l.cluster, l.group_id, l.loss""",
        found="""
            select l.cluster, l.group_id, l.loss, min(b.time_ns) as found_ns,
                min_by(b.coordinator_id, named_struct('t', b.time_ns, 'n', b.coordinator_id)) as node
            from framed l join group_events b
                on l.cluster is not distinct from b.cluster and l.group_id = b.group_id
                and b.event in ('coordinator_found', 'coordinator_moved') and b.time_ns >= l.began_ns
                and b.time_ns < l.until_ns
            group by l.cluster, l.group_id, l.loss""",
        # A member that was removed meanwhile learns it from its next heartbeat.
        settled=f"""
            select l.cluster, l.group_id, l.loss, min(b.ended_ns) as stable_ns,
                min_by(b.started_ns, named_struct('t', b.ended_ns, 'n', b.started_ns)) as started_ns
            from framed l join rebalances b
                on l.cluster is not distinct from b.cluster and l.group_id = b.group_id
                and b.ended_ns >= l.began_ns and b.ended_ns < l.next_loss_ns
                and b.started_ns <= coalesce(l.next_good_ns, l.over_ns) + {HEARTBEAT_NS}
                and coalesce(b.protocol, '') = 'classic'
            group by l.cluster, l.group_id, l.loss""",
        phases=f"""
            select {_AT.format("coalesce(i.sign_ns, l.began_ns)")} as `time`, l.cluster, l.group_id, l.loss,
                case when l.last_good_ns is not null and coalesce(l.next_good_ns, s.stable_ns) is not null
                    then greatest(l.next_good_ns, s.stable_ns, l.over_ns, f.found_ns) - coalesce(i.sign_ns, l.began_ns)
                    end as outage_ns,
                case when l.last_good_ns is not null then l.began_ns - coalesce(i.sign_ns, l.began_ns) end as silent_ns,
                f.found_ns - l.began_ns as searching_ns,
                case when l.load_ns is not null then greatest(0, l.loaded_ns - greatest(l.load_ns, f.found_ns)) end
                    as loading_ns,
                case when s.stable_ns is not null
                    then greatest(0, s.stable_ns - greatest(s.started_ns, l.over_ns, f.found_ns)) end as joining_ns,
                l.refusals,
                l.former_broker, l.former_id, coalesce(l.next_id, f.node) as coordinator_id,
                coalesce(l.former_id != coalesce(l.next_id, f.node), l.former_broker != l.next_broker) as moved,
                coalesce(l.next_broker, cast(f.node as string)) is not null as is_back,
                l.last_good_ns is null as had_none
            from framed l
            left join first_signs i on {same_loss.format("i")}
            left join found f on {same_loss.format("f")}
            left join settled s on {same_loss.format("s")}""",
        answer=f"""
            select `time`, l.cluster, l.group_id, outage_ns, silent_ns, searching_ns, loading_ns, joining_ns, refusals,
                former_broker, former_id, coordinator_id, moved,
                concat(case when had_none then 'no coordinator served it before'
                        when moved then 'another broker took over' when not is_back then 'no broker served it again'
                        when moved is null then 'a broker served it again'
                        when refusals > 0 then 'the same broker stayed' else 'the same broker came back' end,
                    case when refusals > 0 then concat('; meanwhile ', t.errors) when had_none then ''
                        else '; meanwhile no answer' end) as happened
            from phases l left join error_lists t on {same_loss.format("t")}
            order by outage_ns desc nulls last, `time`, l.cluster nulls first, l.group_id""",
    )


def leadership(leadership: Frame) -> Frame:
    """Partition leadership: elections, replicas that fell out of sync, time without a leader, the leader at the end.

    `offline_ns`: total time without a leader; where a partition has none at the end, up to the last row of the table.
    `out_of_sync`: replicas that are not in the ISR by the last change that was reported. Partitions that were reported
    once and never changed are left out.
    """
    last = "named_struct('t', time_ns, 'e', coalesce(leader_epoch, -1))"
    return ask(
        {"leadership": leadership},
        with_until="""
            select *, lead(time_ns) over (partition by cluster, topic, `partition` order by time_ns) as until_ns,
                max(time_ns) over (partition by true) as end_ns
            from leadership""",
        counted=f"""
            select cluster, topic, `partition`, count_if(change = 'elected') as elections,
                count_if(change = 'isr_shrunk') as shrunk, count_if(change = 'isr_grown') as grown,
                count_if(change = 'moved') as moved, count_if(change = 'offline') as offline,
                sum(case when change = 'offline' then coalesce(until_ns, end_ns) - time_ns end) as offline_ns,
                max_by(leader, {last}) as leader, max(leader_epoch) as leader_epoch,
                max_by(cast(isr as string), {last}) as isr, max_by(cast(replicas as string), {last}) as replicas,
                max_by(case when replicas is not null and isr is not null then size(replicas) - size(isr) end, {last})
                    as out_of_sync,
                max_by(change, {last}) as last_change, max_by(api, {last}) as told_by,
                min(time_ns) as first_ns, max(time_ns) as last_ns, count(*) as changes
            from with_until group by all""",
        answer=f"""
            select cluster, topic, `partition`, elections, shrunk, grown, moved, offline, offline_ns, leader,
                leader_epoch, isr, replicas, out_of_sync, last_change, told_by,
                {_AT.format("first_ns")} as first, {_AT.format("last_ns")} as last
            from counted where changes > 1 or last_change != 'created'
            order by offline_ns desc nulls last, elections + shrunk desc, cluster nulls first, topic, `partition`""",
    )


def topology(topology: Frame) -> Frame:
    """Cluster topology and its changes: brokers, controllers and topics, in the order of time.

    The time of the first row of each is when a message first named it. Partitions are in `leadership`. A broker has a
    row `listener` for the address of each further listener; `changed` is another address of the same listener, or
    another rack.
    """
    return ask(
        {"topology": topology},
        answer="""
            select `time`, cluster, kind, change, broker_id, host, port, rack, topic, partitions, topic_id, api
            from topology where kind != 'partition'
            order by time_ns, cluster nulls first, kind, broker_id nulls first, topic nulls first, change""",
    )


def transactions(exchanges: Frame, partitions: Frame, transactions: Frame) -> Frame:
    """Transactions, those open at the end first: client, duration, timeout, and the first offsets written.

    A transaction begins with the first request that adds to it, and ends with the request that `ended_by` names:
    EndTxn, or an InitProducerId of the same transactional id, which aborts it. `coordinator`: neither was seen, but a
    read_committed consumer got a last stable offset above the transaction's first offset: the coordinator aborted it
    after its timeout. null: still open. `open_ns` is the time from the first request to that end, or to the end of the
    tables if the transaction is open. `timeout_ms` is the producer's transaction.timeout.ms, after which the
    coordinator aborts the transaction, from the last InitProducerId, DescribeTransactions or `__transaction_state`
    record that a client received; null: there was none. `start_offsets` are
    the first offsets written, by partition, 20 at most: for `kafka-transactions.sh abort --topic TOPIC --partition N
    --start-offset OFFSET`.
    """
    keys = ", ".join(KEYS)
    same = " and ".join(f"{{0}}.{key} = p.{key}" for key in KEYS)
    return ask(
        {"exchanges": exchanges, "partitions": partitions, "transactions": transactions},
        once=("numbered",),
        seen="""
            select cluster as of_cluster, max(us) as end_us from (
                select cluster, unix_micros(`time`) as us from exchanges
                union all select cluster, unix_micros(`time`) from partitions) both_tables
            group by cluster""",
        marked=f"""
            select {keys}, cluster, transactional_id, api, {GROUPS["client"]} as client, unix_micros(`time`) as us,
                case when api in ('EndTxn', 'InitProducerId') and coalesce(errors, 0) = 0 then 1 else 0 end as is_end
            from exchanges
            where transactional_id is not null and api in ({", ".join(map(literal, (*_OF_TRANSACTIONS, *_ENDS)))})""",
        numbered=f"""
            select *, coalesce(sum(is_end) over (partition by cluster, transactional_id
                order by us, {keys} rows between unbounded preceding and 1 preceding), 0) as nth
            from marked""",
        spans=f"""
            select cluster, transactional_id, nth, max(client) as client, count_if({_ADDS}) as requests,
                min(case when {_ADDS} then us end) as began_us, max(us) as last_us,
                max(case when is_end = 1 then us end) as ended_us,
                max(case when is_end = 1 then api end) as ended_by
            from numbered group by cluster, transactional_id, nth having count_if({_ADDS}) > 0""",
        timeouts="""
            select s.cluster, s.transactional_id, s.nth,
                max_by(t.timeout_ms, named_struct('t', t.time_ns, 'n', t.timeout_ms)) as timeout_ms,
                max_by(t.producer_id, named_struct('t', t.time_ns, 'n', t.producer_id)) as producer_id
            from spans s join transactions t on s.cluster is not distinct from t.cluster
                and s.transactional_id = t.transactional_id
                and t.timeout_ms is not null and (s.ended_us is null or t.time_ns <= s.ended_us * 1000)
            group by s.cluster, s.transactional_id, s.nth""",
        asked=f"""
            select n.cluster, n.transactional_id, n.nth, {TOPIC} as topic, p.`partition`,
                {", ".join(f"p.{key}" for key in KEYS)}
            from numbered n join partitions p on {same.format("n")}
            where p.direction = 'request' and p.`partition` is not null
                and n.api in ('Produce', 'AddPartitionsToTxn')""",
        answered=f"""
            select {keys}, {TOPIC} as topic, `partition`, min(`offset`) as `offset` from partitions
            where api = 'Produce' and direction = 'response' and coalesce(error_code, 0) = 0 and `offset` >= 0
            group by {keys}, {TOPIC}, `partition`""",
        wrote=f"""
            select p.cluster, p.transactional_id, p.nth, p.topic, p.`partition`, min(a.`offset`) as `offset`
            from asked p left join answered a on {same.format("a")} and a.topic = p.topic
                and a.`partition` = p.`partition`
            group by p.cluster, p.transactional_id, p.nth, p.topic, p.`partition`""",
        not_ended=f"""
            select w.*, s.began_us as us from wrote w
            join spans s on {_SAME_TRANSACTION.format("w")} and s.ended_us is null""",
        **aborted("not_ended", ("cluster", "transactional_id", "nth")),
        placed="""
            select *, row_number() over (partition by cluster, transactional_id, nth
                order by topic, `partition`) as place from wrote""",
        listed=f"""
            select cluster, transactional_id, nth, count(*) as partitions,
                array_join(array_sort(collect_list(case when place <= {_MAX_LISTED} and `offset` is not null
                    then concat(topic, '-', cast(`partition` as string), ': ', cast(`offset` as string)) end)), ', ')
                    as start_offsets
            from placed group by cluster, transactional_id, nth""",
        answer=f"""
            select {_AT.format("s.began_us * 1e3")} as `time`, s.cluster, s.transactional_id, s.client,
                (coalesce(s.ended_us, a.aborted_us, e.end_us) - s.began_us) * 1000 as open_ns, t.timeout_ms,
                coalesce(s.ended_by, case when a.aborted_us is not null then 'coordinator' end) as ended_by, s.requests,
                coalesce(l.partitions, 0) as partitions, nullif(l.start_offsets, '') as start_offsets,
                {_AT.format("s.last_us * 1e3")} as last, t.producer_id
            from spans s join seen e on s.cluster is not distinct from e.of_cluster
            left join timeouts t on {_SAME_TRANSACTION.format("t")}
            left join listed l on {_SAME_TRANSACTION.format("l")}
            left join aborted a on {_SAME_TRANSACTION.format("a")}
            order by s.ended_by is not null or a.aborted_us is not null, open_ns desc, `time`, s.cluster nulls first,
                s.transactional_id""",
    )


def changes(changes: Frame) -> Frame:
    """Who changed what: every administrative request, a row for each resource, with its outcome.

    `outcome` is `done`, an error, or `unanswered`. `detail` is the request as JSON, without secrets. A request that a
    broker forwarded to its controller for a client is there twice, with the principal in the second.
    """
    return ask(
        {"changes": changes},
        answer=f"""
            select `time`, cluster, api, resource_type, resource_name,
                coalesce(error, case when answered then 'done' else 'unanswered' end) as outcome,
                {GROUPS["client"]} as client, client_address as host, principal, detail
            from changes
            order by time_ns, cluster nulls first, connection, `number`, resource_name nulls first, source""",
    )
