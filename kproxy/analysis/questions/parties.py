"""Questions about clients: their software, quotas, errors, connections.

Durations are columns `_ns`, as in the tables. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Sequence

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.questions.pieces import (
    ACCURACY,
    ALL_BYTES,
    CONNECTED,
    CONNECTIONS,
    GROUPS,
    KEYS,
    OF_BROKERS,
    RATE,
    WITHOUT_TLS,
    at_last,
    grouped,
    groups,
    literal,
    missed_answers,
    of_clients,
    order,
    percentiles,
    span_us,
)
from kproxy.protocol.schema import served_versions
from kproxy.wire.events import ANSWERED

AT_END = "in_flight_at_end"
NOT_MISSED = "not_missed"
NO_ERRORS = frozenset((AT_END, NOT_MISSED))  # values of the column `error` that are no errors
INSIDE = "inside_answer"  # error of a response whose errors are not in `partitions`


def throttle(
    exchanges: Frame, by: Sequence[str] = ("client", "api"), every: str | None = None, replicas: bool = False
) -> Frame:
    """Throttled clients: how often, and for how long."""
    return ask(
        {"exchanges": exchanges},
        counted=f"""
            select {groups(by, every)} count(*) as exchanges, count_if(throttle_ms > 0) as throttled,
                avg(case when throttle_ms > 0 then 1e0 else 0e0 end) as share,
                sum(throttle_ms) as throttle_ms, max(throttle_ms) as max_throttle_ms,
                min(case when throttle_ms > 0 then `time` end) as first,
                max(case when throttle_ms > 0 then `time` end) as last
            from exchanges where {of_clients(replicas)}
            group by all""",
        answer=f"""
            select * from counted where throttled > 0
            {order("throttle_ms desc nulls last", by=by, every=every)}""",
    )


def inside(exchanges: Frame, partitions: Frame) -> Frame:
    """The last response that `errors` calls `inside_answer`: a row with its source, connection and number, or none."""
    keys = " and ".join(f"e.{key} = p.{key}" for key in KEYS)
    return ask(
        {"exchanges": exchanges, "partitions": partitions},
        found=f"""
            select e.source, e.connection, e.`number` from exchanges e
            where e.errors > 0 and e.outcome = '{ANSWERED}' and coalesce(e.error_code, 0) = 0 and not exists (
                select 1 from partitions p where {keys} and p.error_code != 0 and p.direction = 'response')
            order by e.`time` desc, e.connection, e.`number` desc, e.source limit 1""",
    )


def errors(
    exchanges: Frame,
    partitions: Frame,
    connections: Frame,
    by: Sequence[str] = ("api", "error"),
    every: str | None = None,
    replicas: bool = False,
) -> Frame:
    """Errors and missing responses, by API and error: how many clients and brokers, the first and the last.

    A response may have no error at its top level and errors inside. It counts under each error of its partitions; where
    no partition has one, as in responses about transactions and replicas, it counts as `inside_answer`, and `kproxy
    show` decodes it. `codes` counts the errors of the responses, at every level. Requests without a response are here
    too: `unanswered` are those whose client missed the response, by the same rule as in an overview; `not_missed` are
    those whose connection ended while nobody waited, such as long polls and a client's last requests, and
    `closed_by_broker` those whose connection the broker ended first. `answered_too_late` are those that were answered
    after their client had waited and closed the connection. `tls_expected` are those of clients without TLS at
    a port that expects it.
    `in_flight_at_end` are requests that waited when the capture ended, on connections that were still open, less than 5
    seconds longer than they may: mostly long polls, and no errors. They come last.
    """
    keys = " and ".join(f"f.{key} = i.{key}" for key in KEYS)
    error = f"""case when waits and is_missed is null then '{AT_END}' when fine then coalesce(part_error, '{INSIDE}')
        when outcome = '{ANSWERED}' and coalesce(errors, 0) = 0 then 'answered_too_late'
        when outcome = '{ANSWERED}' then error
        when outcome = 'unanswered' and without_tls then 'tls_expected'
        when outcome = 'unanswered' and is_waited_for is not true and {of_clients(False)}
            then case when closed_by = 'broker' then 'closed_by_broker' else '{NOT_MISSED}' end
        else outcome end"""
    return ask(
        {"exchanges": exchanges, "partitions": partitions, "connections": connections},
        **missed_answers(),
        failed=f"""
            select *, outcome = '{ANSWERED}' and coalesce(error_code, 0) = 0 as fine
            from exchanges where (errors > 0 or outcome in ('unanswered', 'lost')) and {of_clients(replicas)}
            union all
            select e.*, false from exchanges e join missed m on {" and ".join(f"e.{key} = m.{key}" for key in KEYS)}
            where e.outcome = '{ANSWERED}' and coalesce(e.errors, 0) = 0""",
        inside=f"""
            select distinct {", ".join(KEYS)}, error as part_error from partitions
            where error_code != 0 and direction = 'response'""",
        missing=f"""
            select {", ".join(KEYS)}, true as is_missed, max(is_waited_for or is_open) as is_waited_for from missed
            group by {", ".join(KEYS)}""",
        held=f"""
            select source, connection, max(close = 'open') as is_open, max(closed_by) as closed_by,
                max({WITHOUT_TLS}) as without_tls
            from connections group by source, connection""",
        failures=f"""
            select f.*, coalesce(h.is_open and f.outcome = 'unanswered', false) as waits, i.part_error, m.is_missed,
                m.is_waited_for, h.closed_by, coalesce(h.without_tls, false) as without_tls
            from failed f left join inside i on f.fine and {keys}
            left join missing m on {keys.replace("i.", "m.")}
            left join held h on f.source = h.source and f.connection = h.connection""",
        counted=f"""
            select {groups(by, every, {"error": error})} count(*) as exchanges, sum(errors) as codes,
                count(distinct {GROUPS["client"]}) as clients, count(distinct {GROUPS["broker"]}) as brokers,
                min(`time`) as first, max(`time`) as last,
                {at_last(GROUPS["client"])} as last_client,
                min(case when waits and is_missed is null then 1 else 0 end) as only_waits
            from failures group by all""",
        answer=f"""
            select {grouped(by, every)}
                exchanges, codes, clients, brokers, first, last, last_client
            from counted
            {order("only_waits", "exchanges desc", by=by, every=every)}""",
    )


def talkers(
    exchanges: Frame, by: Sequence[str] = ("client", "host"), every: str | None = None, replicas: bool = False
) -> Frame:
    """Top talkers: requests, bytes in each direction, and the share of all bytes."""
    return ask(
        {"exchanges": exchanges},
        counted=f"""
            select {groups(by, every)} sum({ALL_BYTES}) as bytes,
                sum(request_bytes) as request_bytes, sum(response_bytes) as response_bytes, count(*) as exchanges,
                {RATE} as exchanges_per_second, {CONNECTIONS} as connections
            from exchanges where {of_clients(replicas)}
            group by all""",
        answer=f"""
            select {grouped(by, every)} bytes,
                try_divide(bytes, sum(bytes) over (partition by {"`time`" if every else "true"})) as share,
                request_bytes, response_bytes, exchanges, exchanges_per_second, connections
            from counted
            {order("bytes desc", by=by, every=every)}""",
    )


def clients(
    exchanges: Frame, connections: Frame, kafka: str = "4.1", every: str | None = None, replicas: bool = False
) -> Frame:
    """Client software and the API versions that it uses, and which clients break on a Kafka release.

    `verdict`: `too_old` if the highest version that the client used is lower than all that the release serves (4.0
    dropped many, KIP-896), `gone` if the release has no such API, else `ok`. A client that chose an old version only
    because today's broker has no newer one is `too_old` here too: look at its software version. Versions above
    `served_to` are `ok`: clients choose theirs by ApiVersions, which brokers answer since 0.10.0. The last release
    stands for each line of Kafka since 0.8.0, and the column `kafka` names it: 3.7 and 3.7.1 are judged as 3.7.2.
    """
    release, served = served_by(kafka)
    bounds = ", ".join(f"({key}, {first}, {last})" for key, first, last in served)
    return ask(
        {"exchanges": exchanges, "connections": connections},
        software="""
            select source, connection, max(software_name) as software_name, max(software_version) as software_version
            from connections group by source, connection""",
        used=f"""
            select {groups((), every)} {GROUPS["client"]} as client, s.software_name, s.software_version, api_key, api,
                min(api_version) as lowest, max(api_version) as highest, count(*) as exchanges,
                count(distinct client_address) as hosts
            from exchanges e left join software s on e.source = s.source and e.connection = s.connection
            where api_version is not null and {of_clients(replicas)}
            group by all""",
        judged=f"""
            select u.*, b.served_from, b.served_to,
                case when b.served_from is null then 'gone' when u.highest < b.served_from then 'too_old' else 'ok' end
                    as verdict
            from used u left join (values {bounds}) as b(served_key, served_from, served_to)
                on u.api_key = b.served_key""",
        answer=f"""
            select {grouped((), every)} client, api, verdict, lowest, highest, served_from, served_to, exchanges,
                software_name, software_version, hosts, {literal(release)} as kafka
            from judged
            order by {grouped((), every)} verdict = 'ok', client nulls first, api_key, software_name nulls first,
                software_version nulls first""",
    )


def served_by(kafka: str) -> tuple[str, list[tuple[int, int, int]]]:
    """The release that stands for `kafka`, and (API key, first, last version) of each API that it serves.

    kproxy has one release of each line, the last: "3.7" and "3.7.1" are both 3.7.2, and "3" is the newest 3. Raises
    ValueError for any other line, with the list of lines.
    """
    releases = served_versions()
    line, _, patch = kafka.rpartition(".")
    for release in reversed(releases):
        known = _line(release)
        if f"{known}.".startswith(f"{kafka}.") or (line == known and patch.isdecimal()):
            return release, [(key, versions[0], versions[-1]) for key, versions in releases[release].items()]
    raise ValueError(
        f"Kafka {kafka} is not known here; known are {', '.join(map(_line, releases))}, from whose official jars "
        "kproxy's layouts are made: name one of them"
    )


def _line(release: str) -> str:
    """3.7 of 3.7.2, and 0.8.2 of 0.8.2.2: before 1.0 a line had three numbers."""
    return ".".join(release.split(".")[: 3 if release.startswith("0.") else 2])


def connections(
    connections: Frame,
    exchanges: Frame,
    by: Sequence[str] = ("host", "broker"),
    every: str | None = None,
    replicas: bool = False,
) -> Frame:
    """Connections: churn, lifetime, round-trip time, retransmissions, closed windows, resets, failed connects.

    `per_minute` is churn: connections per minute, from the first packet of all connections to the last, or within a
    step of time. Where packets have no times, both it and the lifetime are unknown. The first request of a connection
    names its client. Connections between brokers are left out. `life_p50_ns` is of connections that were established:
    connects that failed, which `refused` and `unanswered` count, are not in it.
    """
    minutes = f"({span_us(every)} / 6e7)" if every else "max(minutes)"
    life = f"case when {CONNECTED} then end_ns - start_ns end"
    return ask(
        {"connections": connections, "exchanges": exchanges},
        asked=f"""
            select source, connection, max({OF_BROKERS}) as is_theirs,
                min_by(client_id, case when client_id is not null then `number` end) as client_id
            from exchanges group by source, connection""",
        ours=f"""
            select c.*, a.client_id from connections c
            left join asked a on c.source = a.source and c.connection = a.connection
            where {"true" if replicas else "a.is_theirs is not true"}""",
        answer=f"""
            select {groups(by, every)} count(*) as connections,
                try_divide(count(*), {minutes}) as per_minute,
                if(max(minutes) > 0, percentile_approx({life}, 0.5, {ACCURACY}), null) as life_p50_ns,
                {percentiles("handshake_rtt_ns", "round_trip_", 0.5, 0.99)},
                sum(retransmissions) as retransmissions, sum(out_of_order) as out_of_order,
                sum(zero_windows) as zero_windows, count_if(close = 'reset') as resets,
                count_if(requests = 0 and {CONNECTED}) as unused, sum(requests) as requests,
                sum(client_bytes + broker_bytes) as bytes, sum(gap_bytes) as gap_bytes,
                count_if(close = 'refused') as refused, count_if(close = 'unanswered') as unanswered
            from ours
            cross join (select (max(end_ns) - min(start_ns)) / 6e10 as minutes from connections) whole
            group by all
            {order("connections desc", by=by, every=every)}""",
    )


def quality(quality: Frame, every: str | None = None) -> Frame:
    """Quality of captures: gaps and other flaws, so that nobody takes "not captured" for "slow".

    With --every, each kind is listed once, at the step when it first occurred.
    """
    first = "cast(floor(first_ns / 1e3) as bigint)"
    step = f"timestamp_micros({first} - {first} % {span_us(every)}) as `time`, " if every else ""
    return ask(
        {"quality": quality},
        answer=f"""
            select {step}source, kind, sum(`count`) as `count`, sum(bytes) as bytes,
                timestamp_micros(cast(floor(min(first_ns) / 1e3) as bigint)) as first,
                timestamp_micros(cast(floor(max(last_ns) / 1e3) as bigint)) as last,
                max(sentence) as sentence
            from quality group by all
            order by {"`time` nulls last, " if every else ""}source, kind""",
    )
