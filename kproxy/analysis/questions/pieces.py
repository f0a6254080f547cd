"""Pieces of SQL that questions are made of: names, literals, groups, percentiles, rates, brokers' own exchanges.

Duty: text that Spark and DuckDB both take and mean the same by; one way to write a duration. Refuses to know a single
question, and engines.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from kproxy.errors import KproxyError
from kproxy.protocol.schema import schema
from kproxy.proxy.config.api_groups import BROKER

MS = 1_000_000
ACCURACY = 20_000  # accuracy of approximate percentiles: exact for groups with fewer than half as many rows
FEW = 20  # smaller groups are not representative: they are not ranked before others
KEYS = ("source", "connection", "number")  # of an exchange
# Client ids of brokers that replicate, of today and before 2.3, and of coordinators that end transactions.
_CLIENT_IDS_OF_BROKERS = "^(broker-[0-9]+-(fetcher-[0-9]+|txn-marker-sender)|ReplicaFetcherThread-[0-9]+-[0-9]+)$"

# Groups of exchanges, in addition to any of their columns; and the columns that each is computed from.
GROUPS = {
    "version": "api_version",
    "broker": "concat_ws(':', broker_address, cast(broker_port as string))",
    "client": "coalesce(nullif(client_id, ''), client_address)",
    "host": "client_address",
}
GROUP_COLUMNS = {
    "version": ("api_version",),
    "broker": ("broker_address", "broker_port"),
    "client": ("client_id", "client_address"),
    "host": ("client_address",),
}
# Columns of a row's exchange that `of_exchanges` adds to rows of `partitions` or `batches`.
EXCHANGE_NAMES = ("client", "host", "broker", "client_id", "asked_group")

LONGEST_US = 36_525 * 86_400_000_000  # a hundred years: engines can add a few of them to any time
_UNITS_US = {
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1000),
    **dict.fromkeys(("s", "second", "seconds"), 1_000_000),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60_000_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000_000),
    **dict.fromkeys(("w", "week", "weeks"), 604_800_000_000),
}


def literal(value: str | int) -> str:
    """A value in a text of both engines: Spark interprets backslashes, DuckDB does not."""
    if isinstance(value, int):
        return str(int(value))
    parts = ["'" + part.replace("'", "''") + "'" for part in value.split("\\")]
    return parts[0] if len(parts) == 1 else f"concat({', chr(92), '.join(parts)})"


def name(column: str) -> str:
    """A column's name in a text of both engines."""
    return "`" + column.replace("`", "``") + "`"


def span_us(text: str) -> int:
    """The microseconds of a span of time like "10 seconds", "1 minute", "5m"; raises ValueError for any other text."""
    words = text.strip().lower().removeprefix("interval ").strip()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz ")
    count = int(number) if number.isascii() and number.isdecimal() else 0
    unit = _UNITS_US.get(words[len(number) :].strip(), 0)
    if not 0 < count * unit <= LONGEST_US:
        raise ValueError(f"{text!r} is no span of time: give a number and a unit, like '10 seconds' or '1 minute'")
    return count * unit


def bucket(every: str) -> str:
    """The start of the step of time that `time` is in; steps of `every` begin at the epoch."""
    step = span_us(every)
    return f"timestamp_micros(unix_micros(`time`) - unix_micros(`time`) % {step})"


def group(by: str) -> str:
    """The text that one name of `by` stands for."""
    return GROUPS[by] if by in GROUPS else name(by)


def groups(by: Sequence[str], every: str | None = None, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """Columns to group by, over time too where `every` is given, like "1 minute": for `select`, with a final comma.

    own: the texts of names that only this question has.
    """
    times = f"{bucket(every)} as `time`, " if every else ""
    return times + "".join(f"{own.get(each) or group(each)} as {name(each)}, " for each in by)


def grouped(by: Sequence[str], every: str | None = None) -> str:
    """The same columns in a later step, by their names."""
    return "".join(f"{name(each)}, " for each in ([*(["time"] if every else []), *by]))


def order(*columns: str, by: Sequence[str] = (), every: str | None = None) -> str:
    """`order by`: steps of time first, then `columns`, texts with their direction, then the groups."""
    words = [f"{name(each)} nulls first" for each in by]
    return f"order by {', '.join([*(['`time`'] if every else []), *columns, *words])}"


def percentiles(column: str, prefix: str, *ranks: float, unit: str = "_ns") -> str:
    """SQL of the percentiles p50_ns, p99_ns, ... of a column, for `select`; null if all its values are null."""
    return ", ".join(
        f"percentile_approx({column}, {rank:g}, {ACCURACY}) as {prefix}p{f'{rank:g}'[2:].ljust(2, '0')}{unit}"
        for rank in ranks
    )


def ns(milliseconds: str) -> str:
    """A column of milliseconds in nanoseconds."""
    return f"(cast({milliseconds} as bigint) * {MS})"


# Brokers by their ids where any answer named them, else by address: the listeners of a broker are one. Steps of a
# question: `known`, and a table's rows with `known_id` and `broker_key`.
KNOWN_BROKERS = """
    select cluster as of_cluster, broker_address as of_address, broker_port as of_port, max(broker_id) as known_id
    from exchanges group by cluster, broker_address, broker_port"""


def keyed(table: str) -> str:
    """A SELECT: rows of a table with `broker_key`, behind a step `known` of KNOWN_BROKERS."""
    return f"""
        select t.*, k.known_id, coalesce(cast(k.known_id as string), {GROUPS["broker"]}) as broker_key
        from {table} t left join known k
            on t.cluster is not distinct from k.of_cluster and t.broker_address = k.of_address
            and t.broker_port = k.of_port"""


# How connects fail (capture.flow); CONNECTED, a condition on `connections`, leaves them out everywhere else.
NOT_DELIVERED = "close in ('port_unreachable', 'host_unreachable', 'net_unreachable', 'prohibited')"
FAILED_CONNECT = f"(close in ('refused', 'unanswered', 'closed_at_once') or {NOT_DELIVERED})"
WITHOUT_TLS = "coalesce(tls_failure = 'TLS expected', false)"  # a client without TLS at a port that expects it
CONNECTED = f"coalesce(not {FAILED_CONNECT}, true)"
# A condition on `connections` that leaves out bare TCP health checks: the client never sent a byte.
SPOKE = "coalesce(client_bytes > 0, true)"

ALL_BYTES = "(coalesce(request_bytes, 0) + coalesce(response_bytes, 0))"  # of an exchange, both ways
TOPIC = "coalesce(topic, topic_id)"  # the topic's name, or its id where no answer named it

# The client software that each connection reports: the rows `software` of a question.
SOFTWARE = """
    select source, connection, max(concat_ws(' ', software_name, software_version)) as software
    from connections group by source, connection"""
# Records that fetches got, with their lag: the rows `fetched` of a question.
FETCHED = "select * from partitions where api = 'Fetch' and direction = 'response' and lag_records is not null"

# Rows per second, from the first of the group to its last; null for less than two.
RATE = "try_divide(count(*) - 1, (max(unix_micros(`time`)) - min(unix_micros(`time`))) / 1e6)"


# Longer pauses divide traffic into stretches, as in captures of several times: a live client sends requests more often
# (metadata.max.age.ms and max.poll.interval.ms are 300 s).
QUIET_S = 300
# Input of `stretches`: groups of rows by STEP, with the first and the last time of each.
STEP = f"cast(floor(unix_micros(`time`) / {QUIET_S}e6) as bigint)"
STEP_TIMES = "min(unix_micros(`time`)) as first_us, max(unix_micros(`time`)) as last_us"


def stretches(rows: str, keys: Sequence[str]) -> dict[str, str]:
    """Steps of a question: the spans of time with traffic, between pauses of more than QUIET_S.

    rows: with `keys`, `step` (STEP) and STEP_TIMES. `stretched` has `keys`, `step` and the number of its `stretch`,
    `stretches` has `keys`, `stretch`, first_us and last_us.
    """
    own = ", ".join(keys)
    return {
        "stepped": f"""
            select {own}, step, min(first_us) as first_us, max(last_us) as last_us from {rows} group by {own}, step""",
        "paused": f"""
            select *, first_us - lag(last_us) over (partition by {own} order by step) as pause_us from stepped""",
        "stretched": f"""
            select *, sum(case when pause_us <= {QUIET_S * 1_000_000} then 0 else 1 end)
                over (partition by {own} order by step) as stretch
            from paused""",
        "stretches": f"""
            select {own}, stretch, min(first_us) as first_us, max(last_us) as last_us from stretched
            group by {own}, stretch""",
    }


CONNECTION = "named_struct('s', source, 'c', connection)"  # its number is unique within a source only
CONNECTIONS = f"count(distinct {CONNECTION})"


def at_last(column: str, order: str = "max_by") -> str:
    """The value of a column in the last row of a group; "min_by": in its first. Rows are in order of time."""
    return f"{order}({column}, named_struct('t', unix_micros(`time`), 'c', connection, 'n', `number`, 's', source))"


# Whether a broker sent the request, for replication. The replica id shows it, or the client id if the replica id is
# unknown, as in a Fetch v15 or newer whose body was not read.
IS_REPLICA = (
    f"case when replica_id is not null then replica_id >= 0 "
    f"else coalesce(regexp_like(client_id, '{_CLIENT_IDS_OF_BROKERS}'), false) end"
)
# Whether a broker sent it to another, or to a controller: also APIs that no client uses.
OF_BROKERS = f"(({IS_REPLICA}) or coalesce(api in ({', '.join(map(literal, BROKER))}), false))"


def of_clients(replicas: bool) -> str:
    """A condition on exchanges: those of clients; all of them where `replicas` asks for brokers' own too."""
    return "true" if replicas else f"not {OF_BROKERS}"


def of_exchanges(rows: str, apis: Sequence[str], replicas: bool = True, also: Sequence[str] = ()) -> str:
    """A SELECT: rows of `partitions` or `batches` with the columns EXCHANGE_NAMES of their exchange.

    apis: the APIs of the rows; exchanges of other APIs are not read. `asked_group` is the group that its request
    names. Without `replicas` it leaves out the rows of brokers' own. also: more columns of `exchanges`.
    """
    brought = {**{each: GROUPS[each] for each in ("client", "host", "broker")}, "client_id": "client_id"}
    wanted = ", ".join([*(f"{text} as {each}" for each, text in brought.items()), *also])
    keys = " and ".join(f"r.{key} = e.{key}" for key in KEYS)
    return (
        f"select r.*, {', '.join(f'e.{each}' for each in (*EXCHANGE_NAMES, *also))} from {rows} r left join "
        f"(select {', '.join(KEYS)}, {wanted}, group_id as asked_group, {OF_BROKERS} as is_broker from exchanges "
        f"where api in ({', '.join(map(literal, apis))})) e on {keys}"
        + ("" if replicas else " where not coalesce(e.is_broker, false)")
    )


def without_brokers(rows: str) -> str:
    """A SELECT: rows of `partitions` or `batches` but those of brokers' own exchanges.

    There are few of these, so this costs much less than `of_exchanges`.
    """
    keys = " and ".join(f"r.{key} = b.{key}" for key in KEYS)
    theirs = f"select distinct {', '.join(KEYS)}, true as is_broker from exchanges where {OF_BROKERS}"
    return f"select r.* from {rows} r left join ({theirs}) b on {keys} where b.is_broker is null"


# Requests that wait for data or for other members: if their connection ends meanwhile, nobody may need the response.
LONG_POLLS = ("Fetch", "ShareFetch", "JoinGroup", "SyncGroup")
_WENT_ON_US = 1_000_000  # a client with a request this long after the end of its connection continues
_TRIED_AGAIN_NS = 10_000_000_000  # above reconnect.backoff.max.ms, 1 s by default: then clients connect again
OVERDUE_NS = 5_000_000_000  # beyond the max_wait_ms of a Fetch; the wait for a group's members has no known limit
_GAVE_UP_NS = 1_000_000_000
_CLOSES_US = 3_000_000  # a consumer that leaves its group closes its connections this soon


def missed_answers() -> dict[str, str]:
    """Steps of a question over `exchanges` and `connections`: `missed`, requests whose client missed the answer.

    They had no response when their connection ended, and their client continued afterwards or had waited, or the broker
    ended the connection first (`by_broker`), maybe before it had received all of the request. A client also continued
    if its host tried to connect to that broker again soon after the end, without success. Requests whose response came
    after their client had waited and closed the connection count, too. The last requests of a client that ends do not
    count, nor those of a consumer that leaves its group, even if another with its client id follows, nor long polls
    that end in time. If their connection was open at the capture's end (`is_open`), they had waited for OVERDUE_NS by
    then. `is_waited_for`: the client continued or had waited.
    """
    polls = ", ".join(map(literal, LONG_POLLS))
    client, broker = GROUPS["client"], GROUPS["broker"]
    at = "client_address, broker_address, broker_port"
    return {
        "last_asked": f"""
            select cluster, {client} as client, client_address as host, max(unix_micros(`time`)) as last_us
            from exchanges group by cluster, {client}, client_address""",
        "hung_up": """
            select source as its_source, connection as its_connection, max(closed_ns) as hung_up_ns
            from connections where closed_by = 'client' group by source, connection""",
        "cut_off": f"""
            select source, connection, `number`, cluster, {client} as client, client_address as host,
                {broker} as broker, broker_id, api, unix_micros(`time`) as us, request_bytes, request_start_ns,
                request_end_ns, coalesce({ns("max_wait_ms")}, 0) as allowed_ns
            from exchanges left join hung_up on source = its_source and connection = its_connection
            where (outcome = 'unanswered' or outcome = 'answered' and response_start_ns > hung_up_ns
                and hung_up_ns >= request_end_ns + {_GAVE_UP_NS}) and {of_clients(False)}""",
        "captured": "select source, max(end_ns) as end_ns from connections group by source",
        "ended": """
            select source, connection,
                max(case when closed_by = 'client' then coalesce(closed_ns, end_ns) else end_ns end) as end_ns,
                false as is_open, coalesce(max(closed_by = 'broker'), false) as by_broker
            from connections where close != 'open' group by source, connection
            union all
            select o.source, o.connection, max(c.end_ns), true, false
            from connections o join captured c on o.source = c.source where o.close = 'open'
            group by o.source, o.connection""",
        "in_vain": f"""
            select {at}, min(start_ns) as first_ns, max(start_ns) as last_ns from connections where {FAILED_CONNECT}
            group by {at}, floor(start_ns / 1e9)""",
        "tried_again": f"""
            select distinct e.source, e.connection, true as has_tried
            from (select distinct source, connection, end_ns, {at} from connections
                where close in ('fin', 'reset')) e
            join in_vain t on {" and ".join(f"e.{each} = t.{each}" for each in at.split(", "))}
            where t.last_ns >= e.end_ns and t.first_ns - e.end_ns <= {_TRIED_AGAIN_NS}""",
        "left_group": f"""
            select cluster, {client} as client, client_address as host, unix_micros(`time`) as left_us
            from exchanges where api = 'LeaveGroup'""",
        "closing": f"""
            select distinct u.source, u.connection, true as has_left from cut_off u
            join ended n on u.source = n.source and u.connection = n.connection
            join left_group g on u.cluster is not distinct from g.cluster and u.client = g.client
                and u.host = g.host and n.end_ns / 1e3 - left_us between 0 and {_CLOSES_US}""",
        "missed": f"""
            select u.*, n.end_ns, n.is_open, n.by_broker, greatest(n.end_ns - coalesce(u.request_end_ns,
                case when n.by_broker then u.request_start_ns end), 0) as waited_ns,
                coalesce(l.last_us >= n.end_ns / 1e3 + {_WENT_ON_US}, false) or coalesce(t.has_tried, false)
                    or coalesce(n.end_ns - u.request_end_ns >= {_GAVE_UP_NS}, false) as is_waited_for
            from cut_off u join ended n on u.source = n.source and u.connection = n.connection
            left join last_asked l on u.cluster is not distinct from l.cluster and u.client = l.client
                and u.host = l.host
            left join closing c on u.source = c.source and u.connection = c.connection
            left join tried_again t on u.source = t.source and u.connection = t.connection
            where case when u.api = 'Fetch' or u.api = 'ShareFetch'
                then n.end_ns - u.request_end_ns >= u.allowed_ns + {OVERDUE_NS}
                when u.api in ({polls}) then false
                when n.is_open then n.end_ns - u.request_end_ns >= {OVERDUE_NS}
                when n.by_broker then true
                else (c.has_left is null and (l.last_us >= n.end_ns / 1e3 + {_WENT_ON_US} or t.has_tried))
                    or n.end_ns - u.request_end_ns >= {_GAVE_UP_NS} end""",
    }


def version_in(versions: Callable[[Any], range]) -> str:
    """Whether an exchange's api and version are among those that a range of each API names."""
    pairs = [str(api.key * 1000 + version) for api in schema().apis.values() for version in versions(api)]
    return f"coalesce(cast(api_key as int) * 1000 + api_version in ({', '.join(pairs)}), false)"


_DURATIONS = (
    (7200e9, 3600e9, "h"),
    (120e9, 60e9, "min"),
    (999.5e6, 1e9, "s"),
    (999.5e3, 1e6, "ms"),
    (999.5, 1e3, "µs"),
)  # as those of `views.units`: a test holds them to the same texts


def duration_of(column: str) -> str:
    """A column of nanoseconds, none of them negative, for people: three digits and a unit, "3.42 s"."""
    cases = []
    for least, size, unit in _DURATIONS:
        amount = f"{column} / {size:.0f}e0"
        cases.append(
            f"when {column} >= {least:.1f}e0 then concat(case when {amount} < 9.995e0 then format_number({amount}, 2) "
            f"when {amount} < 99.95e0 then format_number({amount}, 1) else format_number({amount}, 0) end, ' {unit}')"
        )
    return f"case {' '.join(cases)} when {column} = 0 then '0' else concat(cast({column} as string), ' ns') end"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of a message about a name that is not known."""
    near = get_close_matches(name, known, 3, 0.7) or [each for each in known if name and name in each][:3]
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"


def no_such(what: str, given: str, known: Sequence[str]) -> KproxyError:
    return KproxyError(f"{what} {given!r}: {did_you_mean(given, known)}")


def aborted(wrote: str, keys: Sequence[str]) -> dict[str, str]:
    """Steps `stable` and `aborted`: transactions that their coordinator aborted after their timeout, with `aborted_us`.

    A read_committed consumer then got a last stable offset above the transaction's first offset in a partition. wrote:
    a step of transactions without an end, with `keys`, cluster, topic, partition, their first offset there, and `us`,
    when they wrote it.
    """
    of = ", ".join(f"w.{key}" for key in keys)
    return {
        "stable": f"""
            select cluster as of_cluster, {TOPIC} as of_topic, `partition` as of_partition, last_stable_offset,
                unix_micros(`time`) as us
            from partitions where api = 'Fetch' and direction = 'response' and last_stable_offset > 0""",
        "aborted": f"""
            select {of}, min(s.us) as aborted_us from {wrote} w join stable s
                on w.cluster is not distinct from s.of_cluster and w.topic = s.of_topic
                and w.`partition` = s.of_partition and s.last_stable_offset > w.`offset` and s.us > w.us
            group by {of}""",
    }
