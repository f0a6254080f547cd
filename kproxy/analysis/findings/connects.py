"""Findings about connections that could not be made: refused, undelivered, unanswered, closed at once, or without TLS.

A connect counts as one to Kafka if a connection to that port carried Kafka, an answer named the port, it is a usual
port of Kafka, or nothing else was captured. Failures before the first successful connect to that address mean a
broker that starts, and are no finding. A TLS handshake counts only if one was tried: the client sent TLS, or the port
answered with an alert. Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import NOTE, Finding, Probe, Tables, found_between
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import (
    CONNECTED,
    FAILED_CONNECT,
    GROUPS,
    KNOWN_BROKERS,
    NOT_DELIVERED,
    SPOKE,
    keyed,
)

_USUAL_PORTS = 9092, 9099  # range of ports in Kafka's documentation and images


class Unconnected(NamedTuple):
    """Connects of a host to a broker's address that failed."""

    cluster: str | None
    host: str
    broker: str  # its address
    broker_id: int | None
    refused: int
    unanswered: int
    closed_at_once: int
    undelivered: int  # as ICMP reports
    reason: str | None  # the last by name, where several
    failed: int
    asked: int  # connects of that host to that address
    first_us: int
    last_us: int


def unconnected(tables: Tables, limits: Limits) -> Frame:
    """Rows of Unconnected, those with the most first."""
    first, last = _USUAL_PORTS
    return ask(
        {name: tables[name] for name in ("connections", "exchanges", "topology")},
        known=KNOWN_BROKERS,
        ports="""
            select distinct of_port as port from known union select distinct port from topology
            where kind = 'broker' and port is not null""",
        size="select count(*) as exchanges from exchanges",
        connected=keyed("connections"),
        opened=f"""
            select cluster, client_address as host, {GROUPS["broker"]} as broker, known_id, close,
                unix_micros(`time`) as us, {FAILED_CONNECT} as is_failed,
                min(case when {CONNECTED} then unix_micros(`time`) end)
                    over (partition by cluster, broker_address, c.broker_port) as works_us
            from connected c left join ports p on c.broker_port = p.port cross join size
            where coalesce(start_seen, true)
                and (p.port is not null or c.broker_port between {first} and {last} or size.exchanges = 0)""",
        answer=f"""
            select cluster, host, broker, max(known_id) as broker_id, count_if(close = 'refused') as refused,
                count_if(close = 'unanswered') as unanswered, count_if(close = 'closed_at_once') as closed_at_once,
                count_if({NOT_DELIVERED}) as undelivered,
                max(case when {NOT_DELIVERED} then replace(close, '_', ' ') end) as reason,
                count_if(is_failed) as failed, count(*) as asked,
                min(case when is_failed then us end) as first_us, max(case when is_failed then us end) as last_us
            from opened where works_us is null or us >= works_us
            group by cluster, host, broker having count_if(is_failed) >= {limits.connects_failed_min}
            order by failed desc, cluster nulls first, host, broker""",
    )


def judge_unconnected(row: Unconnected, limits: Limits) -> Iterator[Finding]:
    is_rare = row.failed < limits.unanswered_min and row.failed < row.asked  # and others were made
    parts = {name: getattr(row, name) for name in ("refused", "unanswered", "closed_at_once", "undelivered", "reason")}
    yield found_between(
        row,
        "connects_failed",
        NOTE if is_rare else severity(limits, failed=row.failed, asked=row.asked),
        row.failed / 1e4,
        {"failed": row.failed, "asked": row.asked, **parts},
    )


class FailedHandshakes(NamedTuple):
    """TLS handshakes of a host with a broker that failed."""

    cluster: str | None
    host: str
    broker: str  # its address
    broker_id: int | None
    failed: int
    asked: int  # connections of that host to that address
    reason: str  # of most of them
    reasons: int  # different ones
    first_us: int
    last_us: int


def failed_handshakes(tables: Tables, limits: Limits) -> Frame:
    """Rows of FailedHandshakes, those with the most first.

    A client that closes its connection before it gave up waiting needs it no longer: no handshake failed.
    """
    is_dropped = f"""tls_failure = 'unanswered' and closed_by = 'client'
        and end_ns - start_ns < {limits.gave_up_s * 1e9:.0f}"""
    return ask(
        {name: tables[name] for name in ("connections", "exchanges")},
        known=KNOWN_BROKERS,
        connected=keyed("connections"),
        tried=f"""
            select *, case when coalesce({is_dropped}, false) then null else tls_failure end as failure
            from connected where {CONNECTED} and {SPOKE}""",
        counted=f"""
            select cluster, client_address as host, {GROUPS["broker"]} as broker, failure as tls_failure,
                max(known_id) as known_id, count(failure) as failures, count(*) as handshakes,
                min(unix_micros(`time`)) as begin_us, max(unix_micros(`time`)) as end_us
            from tried group by cluster, client_address, {GROUPS["broker"]}, failure""",
        # Among equally frequent reasons, the last by name.
        answer=f"""
            select cluster, host, broker, max(known_id) as broker_id, sum(failures) as failed, sum(handshakes) as asked,
                max_by(tls_failure, named_struct('n', failures, 'r', tls_failure)) as reason,
                count(tls_failure) as reasons, min(case when tls_failure is not null then begin_us end) as first_us,
                max(case when tls_failure is not null then end_us end) as last_us
            from counted group by cluster, host, broker having sum(failures) >= {limits.tls_failed_min}
            order by failed desc, cluster nulls first, host, broker""",
    )


def judge_failed_handshakes(row: FailedHandshakes, limits: Limits) -> Iterator[Finding]:
    is_rare = row.failed < limits.unanswered_min and row.failed < row.asked  # and others came about
    yield found_between(
        row,
        "tls_failed",
        NOTE if is_rare else severity(limits, failed=row.failed, asked=row.asked),
        row.failed / 1e4,
        {"failed": row.failed, "asked": row.asked, "reason": row.reason, "reasons": row.reasons},
    )


PROBES = (
    Probe(("tls_failed",), ("connections", "exchanges"), failed_handshakes, FailedHandshakes, judge_failed_handshakes),
    Probe(("connects_failed",), ("connections", "exchanges", "topology"), unconnected, Unconnected, judge_unconnected),
)
