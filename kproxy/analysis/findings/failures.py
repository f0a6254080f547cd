"""Findings about requests that failed: never answered, given up by their client, refused by kind of error.

An exchange counts as unanswered if its client missed the answer: it went on afterwards, or had waited. Long
polls that end with their connection are ordinary, as are the last requests of a client that ends. Refuses to know
engines, and how findings look.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import Finding, Moment, Probe, Tables, at, broker_name, clean, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import (
    GROUPS,
    KEYS,
    TOPIC,
    literal,
    missed_answers,
    of_clients,
)

# Errors by kind of finding. Left out: errors of normal operation, in rebalances, elections and the discovery of
# versions (REBALANCE_IN_PROGRESS, MEMBER_ID_REQUIRED, UNSUPPORTED_VERSION).
REFUSED = {
    "refused_authorization": (
        *("TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"),
        *("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "DELEGATION_TOKEN_AUTHORIZATION_FAILED"),
    ),
    "refused_too_large": ("MESSAGE_TOO_LARGE", "RECORD_LIST_TOO_LARGE", "OFFSET_METADATA_TOO_LARGE"),
    "unknown_topic": (
        *("UNKNOWN_TOPIC_OR_PARTITION", "UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID", "INVALID_TOPIC_EXCEPTION"),
    ),
    "not_enough_replicas": ("NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND"),
    "fenced": (
        *("INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED", "TRANSACTION_COORDINATOR_FENCED", "FENCED_INSTANCE_ID"),
        *("UNKNOWN_PRODUCER_ID", "OUT_OF_ORDER_SEQUENCE_NUMBER"),
    ),
    "no_leader": (
        *("NOT_LEADER_OR_FOLLOWER", "NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "REPLICA_NOT_AVAILABLE"),
        *("BROKER_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR"),
    ),
    "timed_out": ("REQUEST_TIMED_OUT",),
    "refused_records": (
        *("CORRUPT_MESSAGE", "INVALID_RECORD", "INVALID_TIMESTAMP", "UNSUPPORTED_FOR_MESSAGE_FORMAT"),
        *("UNSUPPORTED_COMPRESSION_TYPE", "INVALID_REQUIRED_ACKS", "POLICY_VIOLATION", "INVALID_CONFIG"),
    ),
    "refused_members": (
        *("INCONSISTENT_GROUP_PROTOCOL", "INVALID_SESSION_TIMEOUT", "INVALID_GROUP_ID", "GROUP_MAX_SIZE_REACHED"),
        *("UNSUPPORTED_ASSIGNOR", "UNRELEASED_INSTANCE_ID"),
    ),
    "login_failed": ("SASL_AUTHENTICATION_FAILED", "ILLEGAL_SASL_STATE", "UNSUPPORTED_SASL_MECHANISM"),
}
KIND_OF = {error: kind for kind, errors in REFUSED.items() for error in errors}
# Errors of Produce that producers retry by themselves: the batch is not acknowledged until a retry succeeds.
RETRIED = (
    *("REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NOT_ENOUGH_REPLICAS", "NETWORK_EXCEPTION"),
    *("NOT_LEADER_OR_FOLLOWER", "LEADER_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR", "UNKNOWN_TOPIC_OR_PARTITION"),
)
RETRIED_KINDS = ("no_leader", "timed_out")  # clients retry these requests by themselves
_OWN_EPOCH = (
    "Without a transactional.id no other producer fences this one: it gave up on batches (delivery.timeout.ms), began "
    "a new epoch, and requests of the one before arrived after that. What it gave up on may be missing: look for what "
    "held it up, such as a quota, a broker that was gone, or a full queue in the client."
)
_MAX_REQUEST_BYTES = 100 * 1024 * 1024  # socket.request.max.bytes by default
_TOO_LARGE = (
    "A broker ends the connection of a request above its socket.request.max.bytes, 100 MiB by default: send less at a "
    "time (max.request.size, batch.size), or raise socket.request.max.bytes of the brokers."
)
# A transactional producer that is fenced once has to stop.
_IN_TRANSACTIONS = ("AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
_BEFORE_REQUESTS = ("SaslHandshake", "SaslAuthenticate", "ApiVersions")  # before and during a login
_IN_GROUPS = ("fenced", "refused_members")  # kinds whose errors may name a group instead of a topic

# APIs whose answers wait until other brokers have a record, or the coordinator's log.
REPLICATED = (
    *(
        "Produce",
        "OffsetCommit",
        "TxnOffsetCommit",
        "AddPartitionsToTxn",
        "AddOffsetsToTxn",
        "EndTxn",
        "InitProducerId",
    ),
    *("JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup", "ConsumerGroupHeartbeat", "ShareGroupHeartbeat"),
)
_RARE_SHARE = 0.01  # a smaller share of a client's requests to a broker is rare
_BEHIND = " behind"  # one of those: ends the name of an API
_COUNTS = ("failed", "gave_up", "writes", "longest_wait_ns")  # of a Moment
_STEPS_MAX = 2000  # of one finding: bounds what is kept of its times


def timed(of: str, groups: str, name: str, gave_up: str = "false", waited_ns: str = "0") -> dict[str, str]:
    """Steps of a question that end with `times`: the Moments of each group of rows of `of`, as a text.

    name: the column of the API or the error. Seconds with failures are counted, several of them together if there are
    more than _STEPS_MAX.
    """
    step = "cast(floor(second / width) as bigint) * width * 1000000"
    texts = ", ".join(f"cast({column} as string)" for column in ("step_us", "name", *_COUNTS))
    return {
        "seconds": f"""
            select {groups}, coalesce({name}, '') as name, cast(floor(us / 1e6) as bigint) as second,
                count(*) as failed, count_if({gave_up}) as gave_up, count_if(api = 'Produce') as writes,
                coalesce(max({waited_ns}), 0) as longest_wait_ns
            from {of} group by {groups}, coalesce({name}, ''), cast(floor(us / 1e6) as bigint)""",
        "widths": f"""
            select *, cast(1 + floor((count(*) over (partition by {groups}) - 1) / {_STEPS_MAX}) as bigint) as width
            from seconds""",
        "steps": f"""
            select {groups}, name, {step} as step_us, sum(failed) as failed, sum(gave_up) as gave_up,
                sum(writes) as writes, max(longest_wait_ns) as longest_wait_ns
            from widths group by {groups}, name, {step}""",
        "times": f"""
            select {groups}, array_join(array_sort(collect_list(concat_ws(':', {texts}))), ',') as moments
            from steps group by {groups}""",
    }


def moments(text: str | None) -> tuple[Moment, ...]:
    """The Moments in a text of `timed`, by time."""
    found = []
    for each in (text or "").split(",") if text else ():
        us, name, *numbers = each.split(":")
        counts = dict(zip(_COUNTS, map(int, numbers), strict=True))
        api = name.removesuffix(_BEHIND)
        found.append(Moment(int(us) * 1000, api, counts, api in REPLICATED or api != name))
    return tuple(sorted(found, key=lambda moment: moment[:2]))


class Unanswered(NamedTuple):
    """Requests of a client to a broker that nobody answered, of those whose client missed an answer."""

    cluster: str | None
    client: str | None
    broker: str
    broker_id: int | None
    failed: int  # requests whose connection, or the capture, ended before the answer
    gave_up: int  # failed requests for which the client had waited
    by_broker: int  # failed requests whose connection the broker ended
    still_wait: int  # failed requests that waited when the capture ended
    writes: int  # Produce
    longest_ns: int | None
    waited_ns: int | None  # sum over `gave_up`
    apis: str
    asked: int  # requests of the client to the broker
    first_us: int
    last_us: int
    moments: str | None = None
    too_large: int = 0  # requests above _MAX_REQUEST_BYTES whose connection the broker ended


def unanswered(tables: Tables, limits: Limits) -> Frame:
    """Rows of Unanswered, by client and broker, those with the most first."""
    gave_up = f"not is_open and waited_ns >= {limits.gave_up_s * 1e9:.0f}"
    return ask(
        {"exchanges": tables["exchanges"], "connections": tables["connections"]},
        **missed_answers(),
        # A request that its client gave up on, or that still waits, failed while it waited; another when its connection
        # ended: not before what ended it.
        # The requests behind a replicated one on its connection wait for the other brokers, too.
        replicating=f"""
            select source, connection, min(`number`) as first_number from missed
            where api in ({", ".join(map(literal, REPLICATED))}) group by source, connection""",
        failing=f"""
            select cluster, client, broker, broker_id, api, is_open, by_broker, waited_ns,
                by_broker and request_bytes > {_MAX_REQUEST_BYTES} as too_large,
                case when r.first_number < m.`number` then concat(api, {literal(_BEHIND)}) else api end as name,
                case when is_open or {gave_up} then us else greatest(us, cast(floor(end_ns / 1e3) as bigint)) end as us
            from missed m left join replicating r on m.source = r.source and m.connection = r.connection""",
        asked=f"""
            select cluster, {GROUPS["client"]} as client, {GROUPS["broker"]} as broker, count(*) as asked
            from exchanges where {of_clients(False)}
            group by cluster, {GROUPS["client"]}, {GROUPS["broker"]}""",
        counted=f"""
            select cluster, client, broker, max(broker_id) as broker_id, api, count(*) as failed,
                count_if({gave_up}) as gave_up, count_if({gave_up} and by_broker) as by_broker,
                count_if(too_large) as too_large, count_if(is_open) as still_wait,
                count_if(api = 'Produce') as writes, max(waited_ns) as longest_ns,
                sum(case when {gave_up} then waited_ns end) as waited_ns, min(us) as first_us, max(us) as last_us
            from failing group by cluster, client, broker, api""",
        **timed("failing", "cluster, client, broker", "name", gave_up, "waited_ns"),
        answer=f"""
            select c.cluster, c.client, c.broker, max(broker_id) as broker_id, sum(failed) as failed,
                sum(gave_up) as gave_up, sum(by_broker) as by_broker, sum(still_wait) as still_wait,
                sum(writes) as writes, max(longest_ns) as longest_ns, sum(waited_ns) as waited_ns,
                array_join(array_sort(collect_list(api)), ', ') as apis,
                max(a.asked) as asked, min(first_us) as first_us, max(last_us) as last_us, max(t.moments) as moments,
                sum(too_large) as too_large
            from counted c left join asked a on c.cluster is not distinct from a.cluster
                and c.client is not distinct from a.client and c.broker = a.broker
            left join times t on c.cluster is not distinct from t.cluster
                and c.client is not distinct from t.client and c.broker = t.broker
            group by c.cluster, c.client, c.broker
            having sum(failed) >= {limits.unanswered_min} or sum(gave_up) > 0 or sum(still_wait) > 0
                or sum(too_large) > 0
            order by failed desc, c.cluster nulls first, c.client nulls first, c.broker""",
    )


def judge_unanswered(row: Unanswered, limits: Limits) -> Iterator[Finding]:
    given_up = row.gave_up - row.by_broker
    kind = "client_timeouts" if given_up * 2 > row.failed else "unanswered"
    place = {"client": row.client, "broker": row.broker, "broker_id": row.broker_id}
    evidence = {
        "failed": row.failed,
        "asked": row.asked,
        "writes": row.writes or None,
        "gave_up": given_up or None,
        "still_wait": row.still_wait or None,
        "too_large": row.too_large or None,
        "longest_wait_ns": row.longest_ns,
        "apis": row.apis,
    }
    name = broker_name(row.broker, row.broker_id)
    # One request of many that waited is no standstill: the client went on over its other connections.
    has_waited = row.gave_up + row.still_wait
    is_rare = row.failed < limits.felt_failed_few and row.failed < _RARE_SHARE * row.asked
    stood_still_ns = row.longest_ns if has_waited and not is_rare else None
    felt = severity(limits, failed=row.failed, asked=row.asked, stood_still_ns=stood_still_ns)
    times = row.first_us, row.last_us
    change = _TOO_LARGE if row.too_large else None
    yield found(kind, felt, row.failed / 1e4, row.cluster, at(row.client, name), place, times, evidence, change)


class Refused(NamedTuple):
    """Requests of a client and API that were refused with an error of one kind."""

    cluster: str | None
    client: str | None
    api: str
    kind: str
    failed: int
    asked: int  # requests of that API by that client
    errors: str
    topics: int
    topic: str | None
    group_id: str | None
    broker: str | None  # where there was one alone
    broker_id: int | None
    first_us: int
    last_us: int
    moments: str | None = None
    is_transactional: bool = True  # or not known


def topics_not_given() -> dict[str, str]:
    """Steps of a question over `exchanges` and `topology`: `not_given`, a row for each client and refused topic.

    Errors of single topics in Metadata are in no row of `partitions`. A topic that appeared later was only new.
    """
    kind = "case when m.change = 'unauthorized' then 'refused_authorization' else 'unknown_topic' end"
    return {
        "missing": """
            select t.cluster, t.source, t.time_ns, t.topic, t.change from topology t
            left join (select cluster, topic, max(time_ns) as at_ns from topology
                where kind = 'topic' and change = 'appeared' group by cluster, topic) a
                on t.cluster is not distinct from a.cluster and t.topic = a.topic and a.at_ns > t.time_ns
            where t.kind = 'topic' and t.change in ('unknown', 'invalid_name', 'unauthorized') and a.at_ns is null""",
        "not_given": f"""
            select e.cluster, {GROUPS["client"]} as client, {kind} as kind,
                max(case m.change when 'unauthorized' then 'TOPIC_AUTHORIZATION_FAILED'
                    when 'unknown' then 'UNKNOWN_TOPIC_OR_PARTITION' else 'INVALID_TOPIC_EXCEPTION' end) as error,
                count(distinct m.topic) as topics, min(m.topic) as topic
            from missing m join exchanges e on e.source = m.source and e.response_start_ns = m.time_ns
                and e.api = 'Metadata'
            group by e.cluster, {GROUPS["client"]}, {kind}""",
    }


def refused(tables: Tables, limits: Limits) -> Frame:
    """Rows of Refused, those with the most requests first."""
    cases = " ".join(
        f"when error in ({', '.join(map(literal, errors))}) then '{kind}'" for kind, errors in REFUSED.items()
    )
    keys = ", ".join(KEYS)
    same = " and ".join(f"f.{key} = i.{key}" for key in KEYS)
    in_transactions = ", ".join(map(literal, _IN_TRANSACTIONS))
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "topology")},
        failed=f"""
            select {keys}, cluster, {GROUPS["client"]} as client, {GROUPS["broker"]} as broker, broker_id, api, error,
                group_id, transactional_id, error_code, unix_micros(`time`) as us,
                cast(floor(response_end_ns / 1e3) as bigint) as answered_us
            from exchanges where outcome = 'answered' and errors > 0 and {of_clients(False)}""",
        inside=f"""
            select {keys}, error, {TOPIC} as topic from partitions where direction = 'response' and error_code != 0
            group by {keys}, error, {TOPIC}""",
        each_one=f"""
            select f.cluster, f.client, f.broker, f.broker_id, f.api, f.source, f.connection, f.`number`, f.us,
                f.answered_us, f.group_id, f.transactional_id, i.topic,
                coalesce(i.error, case when coalesce(f.error_code, 0) != 0 then f.error end) as error
            from failed f left join inside i on {same}""",
        named=f"select *, case {cases} end as kind from each_one",
        once_each="""
            select cluster, client, api, kind, source, connection, `number`, max(error) as error, max(topic) as topic,
                count(distinct topic) as topics, max(group_id) as group_id, max(transactional_id) as transactional_id,
                max(broker) as broker, max(broker_id) as broker_id,
                max(case when kind = 'timed_out' then us else coalesce(answered_us, us) end) as us
            from named
            where kind is not null and not (kind = 'unknown_topic' and api = 'OffsetFetch')
            group by cluster, client, api, kind, source, connection, `number`""",
        **timed("once_each", "cluster, client, api, kind", "error"),
        asked=f"""
            select cluster, {GROUPS["client"]} as client, api, count(*) as asked from exchanges
            where {of_clients(False)} group by cluster, {GROUPS["client"]}, api""",
        kinds="""
            select cluster, client, api, kind, error, count(*) as failed, count(distinct topic) as topics,
                min(topic) as topic, max(group_id) as group_id, max(transactional_id) as transactional_id,
                min(broker) as broker, max(broker) as broker_too, max(broker_id) as broker_id,
                min(us) as first_us, max(us) as last_us
            from once_each group by cluster, client, api, kind, error""",
        served=f"""
            select cluster, {GROUPS["client"]} as client, true as is_served from exchanges
            where outcome = 'answered' and api not in ({", ".join(map(literal, _BEFORE_REQUESTS))})
            group by cluster, {GROUPS["client"]}""",
        **topics_not_given(),
        by_metadata="""
            select n.cluster, n.client, 'Metadata' as api, n.kind, count(*) as failed, max(n.topics) as topics,
                max(n.error) as error, min(n.topic) as topic, cast(null as string) as group_id,
                cast(null as string) as transactional_id, cast(null as string) as broker,
                cast(null as string) as broker_too, cast(null as int) as broker_id,
                min(f.us) as first_us, max(f.us) as last_us
            from not_given n join failed f on n.cluster is not distinct from f.cluster and n.client = f.client
                and f.api = 'Metadata'
            group by n.cluster, n.client, n.kind""",
        every_kind="""
            select cluster, client, api, kind, error, failed, topics, topic, group_id, transactional_id, broker,
                broker_too, broker_id, first_us, last_us from kinds
            union all
            select cluster, client, api, kind, error, failed, topics, topic, group_id, transactional_id, broker,
                broker_too, broker_id, first_us, last_us from by_metadata""",
        answer=f"""
            select k.cluster, k.client, k.api, k.kind, sum(failed) as failed, max(a.asked) as asked,
                array_join(array_sort(collect_list(error)), ', ') as errors, max(topics) as topics, min(topic) as topic,
                max(group_id) as group_id, case when min(broker) = max(broker_too) then min(broker) end as broker,
                case when min(broker) = max(broker_too) then max(broker_id) end as broker_id,
                min(first_us) as first_us, max(last_us) as last_us, max(t.moments) as moments,
                max(transactional_id) is not null as is_transactional
            from every_kind k left join asked a on k.cluster is not distinct from a.cluster
                and k.client is not distinct from a.client and k.api = a.api
            left join times t on k.cluster is not distinct from t.cluster
                and k.client is not distinct from t.client and k.api = t.api and k.kind = t.kind
            left join served s on k.cluster is not distinct from s.cluster and k.client is not distinct from s.client
            group by k.cluster, k.client, k.api, k.kind
            having sum(failed) >= {limits.refused_min}
                or (k.kind = 'login_failed' and max(s.is_served) is null)
                or (k.kind = 'fenced' and (k.api in ({in_transactions}) or max(transactional_id) is not null))
            order by failed desc, k.cluster nulls first, k.client nulls first, k.api, k.kind""",
    )


def judge_refused(row: Refused, limits: Limits) -> Iterator[Finding]:
    if row.kind in RETRIED_KINDS and row.failed < limits.retried_min:
        return
    where = [row.api]
    if row.topic is not None:
        more = f" and {row.topics - 1} more" if row.topics > 1 else ""
        where.append(f"topic {clean(row.topic)}{more}")
    elif row.group_id is not None and row.kind in _IN_GROUPS:
        where.append(f"group {row.group_id}")
    place: dict[str, Any] = {"client": row.client, "api": row.api, "topic": row.topic, "group_id": row.group_id}
    place |= {"broker": row.broker, "broker_id": row.broker_id}
    evidence = {"failed": row.failed, "asked": row.asked, "errors": row.errors, "api": row.api}
    yield found(
        row.kind,
        severity(limits, failed=row.failed, asked=row.asked, is_retried=row.kind in RETRIED_KINDS),
        row.failed / 1e4,
        row.cluster,
        at(row.client, *where),
        {name: value for name, value in place.items() if value is not None or name in ("client", "api")},
        (row.first_us, row.last_us),
        evidence,
        _OWN_EPOCH if row.kind == "fenced" and row.api == "Produce" and not row.is_transactional else None,
    )


class Login(NamedTuple):
    """Connections of a host that sent raw SASL tokens (no headers, Kafka before 1.0) and got no further."""

    cluster: str | None
    host: str
    broker: str
    broker_id: int | None
    mechanism: str | None
    failed: int
    asked: int
    first_us: int
    last_us: int


def raw_logins(tables: Tables, limits: Limits) -> Frame:
    """Rows of Login, those with the most connections first."""
    return ask(
        {"connections": tables["connections"], "exchanges": tables["exchanges"]},
        served=f"""
            select source, connection, count(*) as requests from exchanges
            where api not in ({", ".join(map(literal, _BEFORE_REQUESTS))}) group by source, connection""",
        tried=f"""
            select c.cluster, c.client_address as host, {GROUPS["broker"].replace("broker_", "c.broker_")} as broker,
                c.broker_id, c.sasl_mechanism as mechanism, s.requests, c.close, unix_micros(c.`time`) as us,
                cast(floor(coalesce(c.end_ns, c.start_ns) / 1e3) as bigint) as end_us
            from connections c left join served s on c.source = s.source and c.connection = s.connection
            where c.sasl_tokens > 0""",
        answer=f"""
            select cluster, host, broker, max(broker_id) as broker_id, max(mechanism) as mechanism,
                count_if(requests is null and close != 'open') as failed, count(*) as asked,
                min(case when requests is null then us end) as first_us,
                max(case when requests is null then end_us end) as last_us
            from tried group by cluster, host, broker
            having count_if(requests is null and close != 'open') >= {limits.refused_min}
            order by failed desc, cluster nulls first, host, broker""",
    )


def judge_raw_login(row: Login, limits: Limits) -> Iterator[Finding]:
    yield found(
        "login_failed",
        severity(limits, failed=row.failed, asked=row.asked),
        row.failed / 1e4,
        row.cluster,
        f"host {row.host}, {broker_name(row.broker, row.broker_id)}",
        {"host": row.host, "broker": row.broker, "broker_id": row.broker_id},
        (row.first_us, row.last_us),
        {
            "failed": row.failed,
            "asked": row.asked,
            "errors": f"the connection ended after a {row.mechanism or 'SASL'} token",
            "api": "logins by raw SASL tokens",
        },
    )


PROBES = (
    Probe(
        ("unanswered", "client_timeouts"),
        ("exchanges", "connections"),
        unanswered,
        Unanswered,
        judge_unanswered,
        moments=lambda row: moments(row.moments),
    ),
    Probe(
        tuple(REFUSED),
        ("exchanges", "partitions", "topology"),
        refused,
        Refused,
        judge_refused,
        moments=lambda row: moments(row.moments),
    ),
    Probe(("login_failed",), ("connections", "exchanges"), raw_logins, Login, judge_raw_login),
)
