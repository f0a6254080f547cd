"""Where the time of exchanges went: the parts of its total time; the largest names the cause, in words.

Duty: one definition for `slow`, `show`, the report, overview and Spark. The parts of an exchange are its whole time,
from the first byte of the request to the last of the answer:

    sending     between its first byte and its last, while the broker would have read them: its client's own pace
    queue       behind earlier requests of its connection, its sending included
    throttle    held back by a quota: the answer (before KIP-219), or the connection, muted after earlier answers
    long_poll   a Fetch waiting for data (at most its max_wait_ms), and waiting for a group's members
    network     waiting for lost segments, or for a receiver whose window was closed; captures only
    round_trip  one round trip of the connection's handshake, captures only: between client and broker, or a part of it,
                depending on where the capture was made
    broker      what is left of the time until the answer begins
    receiving   between the first byte of the answer and its last
    delivery    from the last byte of the answer until its client acknowledged retransmitted bytes of it; captures only,
                the latest answer of each connection only
    unanswered  the whole time of a request without an answer, up to the end of its connection, or of the capture where
                it was overdue then: a long poll may wait

Tables of kproxy before schema 6 have no column `broker_ns`; their queue and mutes begin at the request's last byte.
Refuses to know which exchanges a question is about.
"""

from collections.abc import Iterable

from kproxy.analysis.questions.pieces import GROUPS, OVERDUE_NS, WITHOUT_TLS, duration_of, literal, ns, version_in
from kproxy.wire.events import ANSWERED, UNANSWERED

GROUP_WAITS = ("JoinGroup", "SyncGroup")  # the broker responds when the other members have joined
_WAITS = ", ".join(map(literal, GROUP_WAITS))

# The parts of a total time, with the words for a part that is not the largest. The largest part is the cause; if parts
# are equal, the first of them.
CAUSES = {
    "throttle": "throttled",
    "queue": "behind earlier requests",
    "long_poll": "of expected wait (long poll)",
    "network": "for lost segments or closed windows",
    "round_trip": "of one round trip",
    "sending": "until its last byte was sent",
    "receiving": "until the last byte of the answer",
    "broker": "in the broker",
    "delivery": "until its client had all of the answer",
    "unanswered": "without an answer",
}


def steps(condition: str) -> dict[str, str]:
    """Steps of a question with the tables `exchanges` and `connections`; `weighed` is the last.

    condition: on exchanges. `weighed` has a row for each that was answered, or should have been: its key,
    its parts, and its cause.
    """
    after = version_in(lambda api: api.throttled_after_answer)
    most = _most(f"{cause}_ns" for cause in CAUSES)
    causes = " ".join(f"when {cause}_ns = {most} then '{cause}'" for cause in CAUSES)
    return {
        "trips": f"""
            select source, connection, max(handshake_rtt_ns) as round_trip_ns, max(end_ns) as ended_ns,
                max(close) as close, max(late_answer_ns) as late_ns, max(late_answer_since_ns) as since_ns,
                max(late_answer_times) as late_times, max(closed_by) as closed_by,
                max(closed_ns) as closed_ns, max({WITHOUT_TLS}) as without_tls
            from connections group by source, connection""",
        "late": """
            select e.source, e.connection, max(e.response_end_ns) as sent_ns from exchanges e join trips t
                on e.source = t.source and e.connection = t.connection and e.response_end_ns <= t.since_ns
            where t.since_ns is not null
            group by e.source, e.connection""",
        "ends": """
            select source, max(last_ns) as last_ns from (
                select source, max(coalesce(response_end_ns, request_end_ns, request_start_ns)) as last_ns
                from exchanges group by source
                union all select source, max(end_ns) from connections group by source) of_both
            group by source""",
        "measured": f"""
            select e.*, t.round_trip_ns, t.close, t.closed_by, coalesce(t.without_tls, false) as without_tls,
                case when t.closed_by = 'client' then e.response_start_ns - t.closed_ns end as unread_ns,
                case when e.response_end_ns = d.sent_ns then t.late_ns else 0 end as late_ns,
                case when e.response_end_ns = d.sent_ns then t.late_times end as late_times,
                coalesce(e.latency_ns, 0) as wait_ns,
                coalesce(e.muted_ns, 0) as mute_ns,
                coalesce(e.queue_ns, 0) as queued_ns,
                coalesce(e.sending_ns, e.request_end_ns - e.request_start_ns, 0) as asked_ns,
                coalesce(e.broker_ns, greatest(0, coalesce(e.latency_ns, 0) - coalesce(e.queue_ns, 0)
                    - coalesce(e.muted_ns, 0))) as work_ns,
                coalesce(e.loss_ns, 0) + coalesce(e.closed_window_ns, 0) as held_up_ns,
                coalesce({ns("e.max_wait_ms")}, 0) as allowed_ns,
                coalesce({ns("e.throttle_ms")}, 0) as penalty_ns,
                {after} as answers_first,
                case when e.outcome = '{ANSWERED}' then e.total_ns
                    when t.close = 'open' and e.api not in ({_WAITS}) and l.last_ns - e.request_end_ns
                        >= coalesce({ns("e.max_wait_ms")}, 0) + {OVERDUE_NS} then l.last_ns - e.request_start_ns
                    else greatest(0, coalesce(t.ended_ns, l.last_ns) - e.request_start_ns) end as whole_ns
            from exchanges e left join trips t on e.source = t.source and e.connection = t.connection
                left join ends l on e.source = l.source
                left join late d on e.source = d.source and e.connection = d.connection
            where e.outcome in ('{ANSWERED}', '{UNANSWERED}') and {condition}""",
        "served": """
            select *, case when answers_first then 0 else least(penalty_ns, work_ns) end as held_ns from measured""",
        "polled": f"""
            select *, case when api in ({_WAITS}) then work_ns - held_ns
                when allowed_ns > 0 then least(allowed_ns, work_ns - held_ns) else 0 end as polled_ns
            from served""",
        "travelled": """
            select *, least(coalesce(round_trip_ns, 0), work_ns - held_ns - polled_ns) as trip_ns from polled""",
        "parts": f"""
            select `time`, whole_ns + late_ns as total_ns, api, {GROUPS["client"]} as client,
                {GROUPS["broker"]} as broker, client_address,
                api_version,
                mute_ns + held_ns as throttle_ns, queued_ns as queue_ns, polled_ns as long_poll_ns,
                held_up_ns as network_ns, trip_ns as round_trip_ns, asked_ns as sending_ns,
                greatest(0, coalesce(receiving_ns, total_ns - asked_ns - mute_ns - queued_ns - work_ns - held_up_ns, 0))
                    as receiving_ns,
                work_ns - held_ns - polled_ns - trip_ns as broker_ns, late_ns as delivery_ns,
                cast(0 as bigint) as unanswered_ns, late_times,
                retransmissions, source, connection, `number`,
                mute_ns, held_ns, allowed_ns, muted_ns, in_flight, records, request_bytes, response_bytes, acks,
                max_wait_ms, loss_ns, closed_window_ns, throttle_ms, outcome, close, closed_by, without_tls,
                unread_ns, request_start_ns, response_end_ns
            from travelled where outcome = '{ANSWERED}'
            union all
            select `time`, whole_ns, api, {GROUPS["client"]}, {GROUPS["broker"]}, client_address, api_version,
                0, 0, 0, 0, 0, 0, 0, 0, 0, whole_ns, null, retransmissions, source, connection, `number`,
                0, 0, allowed_ns, muted_ns, in_flight, records, request_bytes, response_bytes, acks,
                max_wait_ms, loss_ns, closed_window_ns, throttle_ms, outcome, close, closed_by, without_tls,
                unread_ns, request_start_ns, request_start_ns + whole_ns
            from travelled where outcome = '{UNANSWERED}'""",
        "caused": f"select *, case when outcome = '{UNANSWERED}' then 'unanswered' {causes} end as cause from parts",
        "weighed": f"select *, {_most(_LESSER.values())} as second_ns from caused",
    }


# The parts without the one that names the cause.
_LESSER = {cause: f"(case when cause = '{cause}' then 0 else {cause}_ns end)" for cause in CAUSES}


def _most(parts: Iterable[str]) -> str:
    return f"greatest({', '.join(parts)})"


def explanation() -> str:
    """Why an exchange of `weighed` took its time, in a sentence."""
    second = " ".join(f"when {part} = second_ns then ' {CAUSES[each]}'" for each, part in _LESSER.items())
    return f"""concat(
        case when cause = 'unanswered' and without_tls
            then 'no answer: its client sent no TLS, and the port expects it'
            when cause = 'unanswered' and coalesce(close, 'open') in ('open', 'idle')
            then concat('no answer within ', {duration_of("total_ns")}, ', when the capture ended')
            when cause = 'unanswered'
            then concat('no answer: ', case closed_by when 'broker' then 'the broker closed its connection'
                when 'client' then 'its client closed the connection' else 'its connection ended' end,
                ' after ', {duration_of("total_ns")})
            when cause = 'throttle' and mute_ns > held_ns then concat('muted for ', {duration_of("throttle_ns")},
                ' after earlier answers that were throttled: the client is over a quota')
            when cause = 'throttle'
            then concat('throttled for ', {duration_of("throttle_ns")}, ': the client is over a quota')
            when cause = 'queue' then concat('waited ', {duration_of("queue_ns")},
                ' behind earlier requests of its connection',
                case when muted_ns is null
                    then ', or muted by their throttles (tables of an older kproxy do not say)' else '' end,
                '; in flight when it came: ', cast(in_flight as string))
            when cause = 'long_poll' and api in ({_WAITS})
            then concat('waited ', {duration_of("long_poll_ns")},
                ' for other members of its group to come, or to be dropped')
            when cause = 'long_poll' then concat('expected wait (long poll): ', {duration_of("long_poll_ns")},
                ' for data, of the ', {duration_of("allowed_ns")}, ' that it allowed',
                case when records > 0 then '; data came late' when records = 0 then '; nothing new to read' else '' end)
            when cause = 'network' and loss_ns >= closed_window_ns
            then concat('the network lost segments of it: ', {duration_of("loss_ns")}, ' until they were sent again')
            when cause = 'network'
            then concat('its reader took nothing for ', {duration_of("closed_window_ns")}, ': its window was closed')
            when cause = 'round_trip'
            then concat('one round trip between client and broker takes ', {duration_of("round_trip_ns")})
            when cause = 'sending' then concat('its client took ', {duration_of("sending_ns")}, ' to send ',
                cast(coalesce(request_bytes, 0) as string), ' bytes, which the broker would have taken at once')
            when cause = 'receiving' then concat('its answer of ', cast(coalesce(response_bytes, 0) as string),
                ' bytes took ', {duration_of("receiving_ns")}, ' from the first to the last')
            when cause = 'delivery'
            then concat('its answer was sent again ',
                case when late_times = 1 then 'once' else concat(cast(late_times as string), ' times') end, ': ',
                {duration_of("delivery_ns")}, ' until its client acknowledged it, or nothing more was seen')
            when api in ('Fetch', 'ShareFetch') and max_wait_ms is null and cause = 'broker'
            then concat({duration_of("broker_ns")}, ' of the broker, a long poll perhaps: how long this version of a ',
                'request may wait cannot be read')
            else concat('the broker took ', {duration_of("broker_ns")},
                case when api = 'Produce' and acks = -1 then ', replication to the others included' else '' end) end,
        case when second_ns * 4 >= total_ns
            then concat('; another ', {duration_of("second_ns")}, case {second} end) else '' end,
        case when loss_ns > 0 and cause <> 'network'
            then concat('; lost segments delayed it by ', {duration_of("loss_ns")})
            when retransmissions > 0 and loss_ns = 0
            then concat('; segments sent again meanwhile: ', cast(retransmissions as string), ', which delayed nothing')
            when retransmissions > 0 and loss_ns is null
            then concat('; segments sent again meanwhile: ', cast(retransmissions as string)) else '' end,
        case when unread_ns > 0 and outcome = '{ANSWERED}' then concat('; its client had closed the connection ',
            {duration_of("unread_ns")}, ' before the answer') else '' end)"""
