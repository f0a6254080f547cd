"""Questions about time: how long answers take, which took longest and why, and how two captures differ.

Durations are columns `_ns`, as in the tables. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Sequence

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import KIND_OF
from kproxy.analysis.questions import parts
from kproxy.analysis.questions.pieces import (
    ALL_BYTES,
    FEW,
    GROUPS,
    KEYS,
    MS,
    OVERDUE_NS,
    TOPIC,
    duration_of,
    groups,
    literal,
    name,
    of_clients,
    order,
    percentiles,
    span_us,
)
from kproxy.wire.events import ANSWERED

WORSE = 0.01  # groups whose share of failed requests grew by this or more come first


def latency(exchanges: Frame, by: Sequence[str] = ("api",), every: str | None = None, replicas: bool = False) -> Frame:
    """Response latencies: percentiles by API, version, broker, client, and over time.

    The percentiles are of `latency_ns`, from the request's last byte to the response's first. `queue_p99_ns` is the
    99th percentile of the time that a request waited, from its first byte on, behind earlier requests of its
    connection; `muted_p99_ns` that of the time for which the broker had muted the connection after throttling it. A
    Fetch may wait for data (see `fetching`). `exchanges` and the percentiles count exchanges with a response;
    `unanswered` counts requests without one, including long polls that were open when their connection ended, and
    requests whose response the capture lacks; `errors` counts responses with an error. Groups of fewer than 20
    exchanges come last.
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

    The total time, from the first byte of the request to the last of the response, is divided into parts, and the
    largest part names the cause. queue: waiting behind earlier requests of the connection, since a broker processes one
    at a time. throttle: the broker delayed this response (before KIP-219), or muted the connection after earlier ones.
    long_poll: a Fetch waiting for data, up to its max_wait_ms, or a request waiting for other members of its group.
    network: waiting for lost segments, or for a receiver whose window was closed. sending, receiving: between first and
    last byte, without queue and mute. broker: the rest. unanswered: a request without a response.

    Successive exchanges of one connection that wait for the same cause are one row, that of the longest. `head` is the
    exchange before them that made them wait, `exchanges` their number, `all_total_ns` the sum of their total times.

    With --by, like cause,client,broker,topic: the number of slow exchanges of each group, and the slowest of them. With
    --every: the same for each step of time, by cause unless --by is given.
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
    """Explain every exchange that was answered or should have been, as `slow` does, each in a row of its own."""
    return ask(
        {"exchanges": exchanges, "connections": connections},
        **parts.steps("true"),
        answer=f"""
            select `time`, total_ns, cause, api, client, broker, {parts.explanation()} as explanation, api_version,
                {", ".join(f"{cause}_ns" for cause in parts.CAUSES)}, retransmissions, source, connection, `number`
            from weighed""",
    )


_OF_ITSELF = "cause not in ('queue', 'throttle')"
_RUN_NS = 1_000_000_000  # requests that begin at most this long after the previous exchange ended are the same run
_IN_ORDER = "(partition by source, connection order by `number`)"


def _head(condition: str) -> str:
    """The number of the last earlier exchange of the connection that satisfies a condition."""
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


_LAST_US = "greatest(unix_micros(`time`), coalesce(cast(floor(response_end_ns / 1e3) as bigint), 0))"
_CREATED_US = 2_000_000  # maximum time until a new topic exists, in which its client repeats Metadata
# Metadata responses that lack a new topic: soon after, the client gets a response without errors. Since v13 the
# response has a top-level error, which is NONE then.
_NEW_TOPICS = f"""
    select * from (
        select source, connection, `number`, errors, error, unix_micros(`time`) as us,
            min(case when errors = 0 and outcome = '{ANSWERED}' then unix_micros(`time`) end) over (
                partition by cluster, {GROUPS["client"]}, client_address order by unix_micros(`time`), connection,
                `number` rows between 1 following and unbounded following) as good_us
        from {{table}} where api = 'Metadata') asked
    where errors > 0 and coalesce(error, 'NONE') in ('NONE', 'UNKNOWN_TOPIC_OR_PARTITION', 'LEADER_NOT_AVAILABLE')
        and good_us - us <= {_CREATED_US}"""
# Whether the error of a response belongs to no finding about refused requests.
_EVERYDAY = f"""coalesce(is_new, false) or coalesce(error != 'NONE'
    and error not in ({", ".join(map(literal, KIND_OF))}), false)"""


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

    A change is the other's figure divided by this one's: 2.0 means twice as slow in the other, 0.5 twice as fast. Give
    the later capture as the other. If the captures have different lengths, compare rates instead of totals: they are
    per second of the capture, from its first request to its last response, or of the step with --every; `rate_change`
    is the change of `exchanges_per_second`. Percentiles are of exchanges with a response. Shares are of all requests.
    `everyday_share` has the errors of rebalances, elections, discovery and new topics, which clients handle by
    themselves; `error_share` has the other errors, including those inside a response. `records` are those of Produce
    requests and Fetch responses as sent, even if the write failed. Requests in the last 5 s of a capture never count as
    unanswered, since the capture may end before their responses. Groups whose share of failed requests rose by 0.01 or
    more come first; everyday errors are no failures.

    To compare two parts of one capture, use --to and --with-from with the same tables on both sides.

    Groups that only one capture has come last, after groups with fewer than 20 exchanges in either of them. With
    --every, steps of time begin at the first exchange of each capture, and `after_ns` is the time from there to the
    step.
    """
    rates = ("exchanges_per_second", "throttle_ms_per_second", "bytes_per_second", "records_per_second")
    shares = ("error_share", "everyday_share", "unanswered_share")
    measures = ("exchanges", "p50_ns", "p99_ns", *rates[:1], *shares, "throttle_ms", "bytes", "records", *rates[1:])
    step = span_us(every) if every else 0
    into = f"cast(floor((unix_micros(`time`) - first_us) / {step}e0) as bigint) * {step * 1000} as after_ns, "
    names = [*(["after_ns"] if every else []), *by]

    def figures(table: str) -> str:
        seconds = f"{step / 1e6:.6f}e0" if every else "max(length_s)"
        return f"""
            select {into if every else ""}{groups(by)} count(*) as exchanges,
                {percentiles("latency_ns", "", 0.5, 0.99)},
                avg(case when errors > 0 and not ({_EVERYDAY}) then 1e0 else 0e0 end) as error_share,
                avg(case when errors > 0 and ({_EVERYDAY}) then 1e0 else 0e0 end) as everyday_share,
                try_divide(count(*), {seconds}) as exchanges_per_second,
                try_divide(sum(throttle_ms), {seconds}) as throttle_ms_per_second,
                try_divide(sum({ALL_BYTES}), {seconds}) as bytes_per_second,
                try_divide(sum(records), {seconds}) as records_per_second,
                avg(case when outcome in ('unanswered', 'lost') and unix_micros(`time`) < last_us - {OVERDUE_NS // 1000}
                    then 1e0 else 0e0 end) as unanswered_share,
                sum(throttle_ms) as throttle_ms, sum({ALL_BYTES}) as bytes, sum(records) as records
            from {table} cross join (select min(unix_micros(`time`)) as first_us,
                (max({_LAST_US}) - min(unix_micros(`time`))) / 1e6 as length_s from {table}) began
            join (select source as of_source, max({_LAST_US}) as last_us from {table} group by source) ended
                on source = of_source
            left join (select source as new_source, connection as new_connection, `number` as new_number,
                    true as is_new from ({_NEW_TOPICS.format(table=table)}) m) news
                on source = new_source and connection = new_connection and `number` = new_number
            where {of_clients(replicas)} and {where or "true"}
            group by all"""

    same = " and ".join(f"o.{name(each)} is not distinct from t.{name(each)}" for each in names)
    both = "".join(f"coalesce(o.{name(each)}, t.{name(each)}) as {name(each)}, " for each in names)
    figure = {each: f"o.{each}, t.{each} as b_{each}" for each in measures}
    changes = {"p50_ns": "p50_change", "p99_ns": "p99_change", "exchanges_per_second": "rate_change"}
    figure |= {each: f"{figure[each]}, try_divide(t.{each}, o.{each}) as {change}" for each, change in changes.items()}
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
