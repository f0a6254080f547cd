"""Questions about time: how long answers take, which took longest and why, and how two captures differ.

Durations are columns `_ns`, as in the tables. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Sequence

from kproxy.analysis import parts
from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.pieces import (
    ALL_BYTES,
    FEW,
    KEYS,
    MS,
    TOPIC,
    duration_of,
    groups,
    name,
    of_clients,
    order,
    percentiles,
    span_us,
)

WORSE = 0.01  # a share of failed requests that grew by so much comes before all times


def latency(exchanges: Frame, by: Sequence[str] = ("api",), every: str | None = None, replicas: bool = False) -> Frame:
    """How long answers take: percentiles by api, version, broker, client, and over time.

    `latency_ns` runs from the request's last byte to the answer's first; `queue_p99_ns` is how long requests were,
    from their first byte on, behind an earlier one of the same connection, `muted_p99_ns` how long the broker had muted
    the connection after throttling it. A Fetch may wait for data (see `fetching`). `exchanges` and the percentiles are
    of answers that came: `unanswered` says how many are left out, long polls that ended with their connection among
    them, `errors` how many of the answers have one. Groups of fewer than 20 exchanges come last.
    """
    return ask(
        {"exchanges": exchanges},
        answer=f"""
            select {groups(by, every)} count(latency_ns) as exchanges, count_if(errors > 0) as errors,
                count_if(outcome in ('unanswered', 'lost')) as unanswered,
                {percentiles("latency_ns", "", 0.5, 0.9, 0.99, 0.999)},
                max(latency_ns) as max_ns,
                {percentiles("queue_ns", "queue_", 0.99)},
                {percentiles("muted_ns", "muted_", 0.99)}
            from exchanges
            where (latency_ns is not null or outcome in ('unanswered', 'lost')) and {of_clients(replicas)}
            group by all
            {order(f"count(latency_ns) < {FEW}", "p99_ns desc nulls last", by=by, every=every)}""",
    )


def slow(
    exchanges: Frame,
    connections: Frame,
    partitions: Frame | None = None,
    slower_than_ms: float = 100,
    by: Sequence[str] = (),
    every: str | None = None,
    replicas: bool = False,
) -> Frame:
    """The slowest exchanges, each explained: queue, throttle, long poll, network, sending, receiving or broker.

    The total time, from the first byte of the request to the last of the answer, is cut into parts, and the largest
    names the cause. queue: behind an earlier request of the connection, since a broker serves one at a time. throttle:
    how long the broker delayed this answer (before KIP-219), or muted the connection after earlier ones. long_poll:
    what a Fetch may wait (max_wait_ms), and waiting for a group's members. network: waiting for lost segments, or for a
    reader whose window was closed. sending, receiving: between first and last byte, neither queue nor mute. broker: the
    rest. unanswered: a request without an answer.

    A run of exchanges of one connection that wait for one cause is one row, that of the longest; `head` is what stood
    before it, `exchanges` how many they are, `all_total_ns` how long they took together.

    With --by, like cause,client,broker,topic: how many are slow by those, and the slowest of them. Over time: likewise
    in each step, by cause if --by does not say otherwise.
    """
    least = f"{float(slower_than_ms) * MS:.0f}"
    tables = {"exchanges": exchanges, "connections": connections}
    steps = parts.steps(of_clients(replicas))
    chosen = f"select * from weighed where total_ns > {least}"
    if every or by:
        own, steps["chosen"] = {"cause": "cause", "client": "client", "broker": "broker"}, chosen
        if "topic" in by:
            if partitions is None:
                raise ValueError("by topic: slow() needs the table partitions")
            tables["partitions"] = partitions
            keys = " and ".join(f"c.{key} = p.{key}" for key in KEYS)
            own["topic"] = "topic"
            steps["topics"] = f"select distinct {', '.join(KEYS)}, {TOPIC} as topic from partitions"
            steps["named"] = f"select c.*, p.topic from chosen c left join topics p on {keys}"
        rows = "named" if "topic" in by else "chosen"
        return ask(tables, **steps, answer=_grouped(rows, by or ("cause",), every, own))
    return ask(
        tables,
        **steps,
        candidates=f"select * from weighed where total_ns > {least} or throttle_ms > 0",
        headed=f"""
            select *, case
                when cause = 'throttle' then {_head("throttle_ms > 0")}
                when cause = 'queue' then {_head(f"total_ns > {least} and {_OF_ITSELF}")} end as `before`
            from candidates""",
        sought=f"""
            select *, lag(cause) over {_IN_ORDER} as cause_before, lag(api) over {_IN_ORDER} as api_before,
                lag(response_end_ns) over {_IN_ORDER} as ended_ns
            from headed where total_ns > {least}""",
        begun=f"""
            select *, case when cause = cause_before and request_start_ns - ended_ns <= {_RUN_NS}
                and (api = api_before or cause in ('queue', 'throttle')) then 0 else 1 end as begins
            from sought""",
        numbered="""
            select *, sum(begins) over (partition by source, connection order by `number`
                rows between unbounded preceding and current row) as run
            from begun""",
        ranked="""
            select *,
                row_number() over (partition by source, connection, run order by total_ns desc, `number`) as place,
                count(*) over (partition by source, connection, run) as exchanges,
                sum(total_ns) over (partition by source, connection, run) as all_total_ns
            from numbered""",
        runs=f"select *, {parts.explanation()} as explanation from ranked where place = 1",
        answer=f"""
            select r.`time`, r.total_ns, r.cause, r.api, r.client, r.broker, r.explanation,
                r.exchanges, cast(r.all_total_ns as bigint) as all_total_ns, {_HEAD_TEXT} as head, r.api_version,
                {", ".join(f"r.{cause}_ns" for cause in parts.CAUSES)}, r.retransmissions, r.source, r.connection,
                r.`number`
            from runs r left join candidates h
                on r.source = h.source and r.connection = h.connection and r.`before` = h.`number`
            order by r.total_ns desc, r.`time`, r.connection, r.`number`, r.source""",
    )


def each(exchanges: Frame, connections: Frame) -> Frame:
    """As `slow` explains them: every exchange that was answered or should have been, in a row of its own."""
    return ask(
        {"exchanges": exchanges, "connections": connections},
        **parts.steps("true"),
        answer=f"""
            select `time`, total_ns, cause, api, client, broker, {parts.explanation()} as explanation, api_version,
                {", ".join(f"{cause}_ns" for cause in parts.CAUSES)}, retransmissions, source, connection, `number`
            from weighed""",
    )


_OF_ITSELF = "cause not in ('queue', 'throttle')"
_RUN_NS = 1_000_000_000  # what begins so long after the end of the one before it still waits for the same
_IN_ORDER = "(partition by source, connection order by `number`)"


def _head(condition: str) -> str:
    """The last exchange before this one on its connection for which a condition holds."""
    return f"""max(case when {condition} then `number` end) over (partition by source, connection order by `number`
        rows between unbounded preceding and 1 preceding)"""


_HEAD_TEXT = f"""case when h.api is null or (r.cause = 'queue' and h.response_end_ns <= r.request_start_ns) then null
    when r.cause = 'throttle' then concat('the answer to ', h.api, ' ', cast(h.`number` as string),
        ' announced a throttle of ', format_number(h.throttle_ms, 0), ' ms')
    else concat(h.api, ' ', cast(h.`number` as string), ' took ', {duration_of("h.total_ns")}, ': ',
        case h.cause {" ".join(f"when '{cause}' then '{words}'" for cause, words in parts.CAUSES.items())} end)
    end"""


def _grouped(rows: str, by: Sequence[str], every: str | None, own: dict[str, str]) -> str:
    """The answer of `slow` by columns, and by steps of time."""

    def of_slowest(column: str) -> str:
        return f"max_by({column}, named_struct('t', total_ns, 'c', connection, 'n', `number`, 's', source)) as {column}"

    names = [
        each for each in ("api", "client", "broker", "cause", "source", "connection", "`number`") if each not in by
    ]
    return f"""
        select {groups(by, every, own)} count(*) as exchanges, cast(sum(total_ns) as bigint) as all_total_ns,
            max(total_ns) as max_total_ns, {", ".join(map(of_slowest, names))}
        from {rows} group by all
        {order("exchanges desc", by=by, every=every)}"""


def _fails(side: str) -> str:
    return f"({side}.error_share + {side}.unanswered_share)"


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
    later of two captures is best given as the other. Percentiles are of answers that came; `error_share` and
    `unanswered_share` are of all requests. Groups that fail more often by one in a hundred come first.

    What only one of them has comes last, and before it what one of them has fewer than 20 times. Over time, steps begin
    at the first exchange of each, and `after_ns` is how far into both a step is.
    """
    measures = ("exchanges", "p50_ns", "p99_ns", "error_share", "unanswered_share", "throttle_ms", "bytes")
    step = span_us(every) if every else 0
    into = f"cast(floor((unix_micros(`time`) - first_us) / {step}e0) as bigint) * {step * 1000} as after_ns, "
    names = [*(["after_ns"] if every else []), *by]

    def figures(table: str) -> str:
        return f"""
            select {into if every else ""}{groups(by)} count(*) as exchanges,
                {percentiles("latency_ns", "", 0.5, 0.99)},
                avg(case when errors > 0 then 1e0 else 0e0 end) as error_share,
                avg(case when outcome in ('unanswered', 'lost') then 1e0 else 0e0 end) as unanswered_share,
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
                f"case when coalesce({_fails('t')} - {_fails('o')}, 0) >= {WORSE} then {_fails('o')} - {_fails('t')} "
                "else 0 end",
                "p99_change desc nulls last",
                by=by,
            )
        }""",
    )
