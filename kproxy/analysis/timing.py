"""Questions about time: how long answers take, which took longest and why, and how two captures differ.

Durations are columns `_ns`, as in the tables. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Iterable, Sequence

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.pieces import (
    ALL_BYTES,
    FEW,
    GROUPS,
    MS,
    bucket,
    duration_of,
    groups,
    literal,
    name,
    ns,
    of_clients,
    order,
    percentiles,
    span_us,
    version_in,
)
from kproxy.wire.events import ANSWERED

GROUP_WAITS = ("JoinGroup", "SyncGroup")  # the broker answers when the other members have come

# The parts of a total time, and how one is called beside a larger one; of equal ones the first is the cause.
_CAUSES = {
    "throttle": "throttled",
    "queue": "behind earlier requests",
    "long_poll": "of expected wait (long poll)",
    "network": "on the network",
    "broker": "in the broker",
}


def latency(exchanges: Frame, by: Sequence[str] = ("api",), every: str | None = None, replicas: bool = False) -> Frame:
    """How long answers take: percentiles by api, version, broker, client, and over time.

    `latency_ns` runs from the request's last byte to the answer's first; `queue_p99_ns` is how much of it was spent
    behind an earlier request of the same connection, `muted_p99_ns` while the broker had muted the connection after
    throttling it. A Fetch may wait for data (see `fetching`). Groups of fewer than 20 exchanges come last.
    """
    return ask(
        {"exchanges": exchanges},
        answer=f"""
            select {groups(by, every)} count(*) as exchanges,
                {percentiles("latency_ns", "", 0.5, 0.9, 0.99, 0.999)},
                max(latency_ns) as max_ns,
                {percentiles("queue_ns", "queue_", 0.99)},
                {percentiles("muted_ns", "muted_", 0.99)}
            from exchanges where latency_ns is not null and {of_clients(replicas)}
            group by all
            {order(f"count(*) < {FEW}", "p99_ns desc nulls last", by=by, every=every)}""",
    )


def slow(
    exchanges: Frame,
    connections: Frame,
    slower_than_ms: float = 100,
    every: str | None = None,
    replicas: bool = False,
) -> Frame:
    """The slowest exchanges, each explained: network, throttle, long poll, queue or broker.

    The total time is cut into parts, and the largest names the cause. network: sending the request, receiving the
    answer and one round trip. throttle: what the broker held back, this answer (before KIP-219) or by muting the
    connection after earlier ones. long_poll: what a Fetch may wait (max_wait_ms), and waiting for a group's members.
    queue: behind an earlier request of the connection, since a broker serves one at a time. broker: the rest.

    Over time: how many each cause made slow in a step, how long they took together, and the slowest of them.
    """
    after = version_in(lambda api: api.throttled_after_answer)
    waits = ", ".join(map(literal, GROUP_WAITS))
    most = _most(f"{cause}_ns" for cause in _CAUSES)
    causes = " ".join(f"when {cause}_ns = {most} then '{cause}'" for cause in _CAUSES)
    return ask(
        {"exchanges": exchanges, "connections": connections},
        trips="""
            select source, connection, max(handshake_rtt_ns) as round_trip_ns from connections
            group by source, connection""",
        measured=f"""
            select e.*, t.round_trip_ns,
                coalesce(latency_ns, 0) as wait_ns,
                coalesce(muted_ns, 0) as mute_ns,
                coalesce(queue_ns, 0) as queued_ns,
                coalesce({ns("max_wait_ms")}, 0) as allowed_ns,
                coalesce({ns("throttle_ms")}, 0) as penalty_ns,
                {after} as answers_first
            from exchanges e left join trips t on e.source = t.source and e.connection = t.connection
            where outcome = '{ANSWERED}' and total_ns > {float(slower_than_ms) * MS:.0f} and {of_clients(replicas)}""",
        served="""
            select *,
                case when answers_first then 0 else least(penalty_ns, wait_ns - mute_ns - queued_ns) end as held_ns
            from measured""",
        polled=f"""
            select *, wait_ns - mute_ns - queued_ns - held_ns as rest_ns,
                case when api in ({waits}) then wait_ns - mute_ns - queued_ns - held_ns
                    when allowed_ns > 0 then least(allowed_ns, wait_ns - mute_ns - queued_ns - held_ns)
                    else 0 end as long_poll_ns
            from served""",
        travelled="""
            select *, least(coalesce(round_trip_ns, 0), rest_ns - long_poll_ns) as trip_ns from polled""",
        parts=f"""
            select `time`, total_ns, api, {GROUPS["client"]} as client, {GROUPS["broker"]} as broker, api_version,
                mute_ns + held_ns as throttle_ns, queued_ns as queue_ns, long_poll_ns,
                total_ns - wait_ns + trip_ns as network_ns, rest_ns - long_poll_ns - trip_ns as broker_ns,
                retransmissions, source, connection, `number`,
                mute_ns, held_ns, allowed_ns, muted_ns, in_flight, records, request_bytes, response_bytes, acks
            from travelled""",
        caused=f"select *, case {causes} end as cause from parts",
        weighed=f"select *, {_most(_LESSER.values())} as second_ns from caused",
        answer=_over_time(every)
        if every
        else f"""
            select `time`, total_ns, cause, api, client, broker, {_explanation(waits)} as explanation, api_version,
                {", ".join(f"{cause}_ns" for cause in _CAUSES)}, retransmissions, source, connection, `number`
            from weighed
            order by total_ns desc, `time`, connection, `number`""",
    )


def _over_time(every: str) -> str:
    """The answer of `slow` by steps of time."""

    def of_slowest(column: str) -> str:
        return f"max_by({column}, named_struct('t', total_ns, 'c', connection, 'n', `number`)) as {column}"

    slowest = ", ".join(map(of_slowest, ("api", "client", "broker", "source", "connection", "`number`")))
    return f"""
        select {bucket(every)} as `time`, cause, count(*) as exchanges, sum(total_ns) as all_total_ns,
            max(total_ns) as max_total_ns, {slowest}
        from weighed group by {bucket(every)}, cause
        order by `time`, exchanges desc, cause"""


# Parts beside the one that names the cause.
_LESSER = {cause: f"(case when cause = '{cause}' then 0 else {cause}_ns end)" for cause in _CAUSES}


def _most(parts: Iterable[str]) -> str:
    return f"greatest({', '.join(parts)})"


def _explanation(waits: str) -> str:
    second = " ".join(f"when {part} = second_ns then ' {_CAUSES[each]}'" for each, part in _LESSER.items())
    return f"""concat(
        case when cause = 'throttle' and mute_ns > held_ns then concat('muted for ', {duration_of("throttle_ns")},
                ' after earlier answers that were throttled: the client is over a quota')
            when cause = 'throttle'
            then concat('throttled for ', {duration_of("throttle_ns")}, ': the client is over a quota')
            when cause = 'queue' then concat('waited ', {duration_of("queue_ns")},
                ' behind earlier requests of its connection',
                case when muted_ns is null
                    then ', or muted by their throttles (tables of an older kproxy do not say)' else '' end,
                '; in flight when it came: ', cast(in_flight as string))
            when cause = 'long_poll' and api in ({waits})
            then concat('expected wait of ', {duration_of("long_poll_ns")}, ' for other members of its group')
            when cause = 'long_poll' then concat('expected wait (long poll): ', {duration_of("long_poll_ns")},
                ' for data, of the ', {duration_of("allowed_ns")}, ' that it allowed',
                case when records > 0 then '; data came late' when records = 0 then '; nothing new to read' else '' end)
            when cause = 'network' then concat({duration_of("network_ns")}, ' on the network: ',
                cast(coalesce(request_bytes, 0) as string), ' bytes sent, ',
                cast(coalesce(response_bytes, 0) as string), ' received')
            else concat('the broker took ', {duration_of("broker_ns")},
                case when api = 'Produce' and acks = -1 then ', replication to the others included' else '' end) end,
        case when second_ns * 4 >= total_ns
            then concat('; another ', {duration_of("second_ns")}, case {second} end) else '' end,
        case when retransmissions > 0 then concat('; segments sent again meanwhile: ', cast(retransmissions as string),
            ', so the network has a part in it') else '' end)"""


def compare(
    exchanges: Frame,
    other: Frame,
    by: Sequence[str] = ("api",),
    every: str | None = None,
    replicas: bool = False,
    where: str | None = None,
) -> Frame:
    """Two captures side by side: the same figures of `exchanges` and of `other` (`b_`), and how they changed.

    A change is the other's figure divided by this one's: 2.0 is twice as slow in the other, 0.5 twice as fast. So the
    later of two captures is best given as the other.

    What only one of them has comes last, and before it what one of them has fewer than 20 times. Over time, steps begin
    at the first exchange of each, and `after_ns` is how far into both a step is.
    """
    measures = ("exchanges", "p50_ns", "p99_ns", "error_share", "throttle_ms", "bytes")
    step = span_us(every) if every else 0
    into = f"cast(floor((unix_micros(`time`) - first_us) / {step}e0) as bigint) * {step * 1000} as after_ns, "
    names = [*(["after_ns"] if every else []), *by]

    def figures(table: str) -> str:
        return f"""
            select {into if every else ""}{groups(by)} count(*) as exchanges,
                {percentiles("latency_ns", "", 0.5, 0.99)},
                avg(case when errors > 0 then 1e0 else 0e0 end) as error_share,
                sum(throttle_ms) as throttle_ms, sum({ALL_BYTES}) as bytes
            from {table} cross join (select min(unix_micros(`time`)) as first_us from {table}) began
            where {of_clients(replicas)} and {where or "true"}
            group by all"""

    same = " and ".join(f"o.{name(each)} is not distinct from t.{name(each)}" for each in names)
    both = "".join(f"coalesce(o.{name(each)}, t.{name(each)}) as {name(each)}, " for each in names)
    figure = {each: f"o.{each}, t.{each} as b_{each}" for each in measures}
    figure |= {
        each: f"{figure[each]}, try_divide(t.{each}, o.{each}) as {each.replace('_ns', '_change')}"
        for each in ("p50_ns", "p99_ns")
    }
    return ask(
        {"exchanges": exchanges, "other": other},
        ours=figures("exchanges"),
        theirs=figures("other"),
        answer=f"""
            select {both} {", ".join(figure.values())}
            from ours o full join theirs t on {same}
            {
            order(
                *(["after_ns"] if every else []),
                "case when o.exchanges is null or t.exchanges is null then 2 "
                f"when o.exchanges < {FEW} or t.exchanges < {FEW} then 1 else 0 end",
                "p99_change desc nulls last",
                by=by,
            )
        }""",
    )
