"""Findings about the network: segments sent again, receivers that close their window.

Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import NOTE, WARNING, Finding, Probe, Tables, clean, found, found_between
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import CONNECTED, GROUPS, KNOWN_BROKERS, keyed

UNREAD = 10  # a consumer that reads slowly delays the answers behind: few, as clients have few requests in flight
MTU_CHANGE = (
    "A router dropped packets of these connections as too large, and named an MTU of {mtu} bytes. That message must "
    "reach the sender: allow ICMP 'fragmentation needed' and ICMPv6 'packet too big' on the path, set this MTU on the "
    "sender's interface, or clamp the MSS at the tunnel; check by `ping -M do -s SIZE` (SIZE: the MTU less 28)."
)
SEGMENT_BYTES = 1448  # of payload, with an MTU of 1500 and TCP's timestamps


class Path(NamedTuple):
    """TCP between a client's host and a broker."""

    cluster: str | None
    host: str
    broker: str
    connections: int
    size: int
    retransmissions: int
    zero_windows: int
    requests: int
    first_us: int
    last_us: int


def paths(tables: Tables, limits: Limits) -> Frame:
    """Rows of Path, those with the longest delays first.

    A broker does not read a connection that it mutes, or whose earlier request it still processes: if requests waited
    for that, and UNREAD times less for a reader, a slow reader is not the cause of closed windows.
    """
    return ask(
        {"connections": tables["connections"], "exchanges": tables["exchanges"]},
        unread=f"""
            select source as its_source, connection as its_connection from exchanges
            where queue_ns > 0 or muted_ns > 0 or closed_window_ns > 0
            group by source, connection
            having sum(coalesce(queue_ns, 0) + coalesce(muted_ns, 0))
                > {UNREAD} * sum(coalesce(closed_window_ns, 0))""",
        shut="""
            select c.*, case when u.its_connection is null then c.zero_windows else 0 end as readers_windows
            from connections c
            left join unread u on c.source = u.its_source and c.connection = u.its_connection""",
        answer=f"""
            select cluster, client_address as host, {GROUPS["broker"]} as broker, count(*) as connections,
                sum(coalesce(client_bytes, 0) + coalesce(broker_bytes, 0)) as bytes,
                sum(retransmissions) as retransmissions, sum(readers_windows) as zero_windows,
                sum(coalesce(requests, 0)) as requests,
                cast(floor(min(start_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(coalesce(end_ns, start_ns)) / 1e3) as bigint) as last_us
            from shut where start_ns is not null and {CONNECTED}
            group by cluster, client_address, {GROUPS["broker"]}
            having sum(retransmissions) >= {limits.retransmissions_min}
                or sum(readers_windows) >= {limits.zero_windows_min}
            order by retransmissions desc, zero_windows desc, cluster nulls first, host, broker""",
    )


def judge_path(row: Path, limits: Limits) -> Iterator[Finding]:
    where = f"{clean(row.host)} and {row.broker}"
    place = {"host": row.host, "broker": row.broker}
    times = row.first_us, row.last_us
    # Each request and its answer are two segments at least, and every 1448 bytes one.
    segments = max(row.size / SEGMENT_BYTES, 2 * row.requests) + (row.retransmissions or 0)
    share = (row.retransmissions or 0) / segments if segments else 0.0
    is_loopback = row.host.startswith("127.") or row.host == "::1"  # which loses nothing: its ends are short of CPU
    if (
        not is_loopback
        and (row.retransmissions or 0) >= limits.retransmissions_min
        and share >= limits.retransmission_share
    ):
        evidence = {
            "retransmissions": row.retransmissions,
            "segment_share": share,
            "connections": row.connections,
            "bytes": row.size,
        }
        yield found("retransmissions", WARNING, share, row.cluster, where, place, times, evidence)
    if (row.zero_windows or 0) >= limits.zero_windows_min:
        evidence = {"zero_windows": row.zero_windows, "connections": row.connections, "bytes": row.size}
        yield found("zero_windows", NOTE, row.zero_windows / 1000, row.cluster, where, place, times, evidence)


class Late(NamedTuple):
    """Connections between a host and a broker with answers that were sent again before they were acknowledged."""

    cluster: str | None
    host: str
    broker: str
    broker_id: int | None
    answers: int
    connections: int
    longest_ns: int
    times: int  # that the latest one was sent again
    mtu: int | None  # the smallest that ICMP named for a packet that was too large
    first_us: int
    last_us: int


def late(tables: Tables, limits: Limits) -> Frame:
    """Rows of Late, the latest first."""
    return ask(
        {"connections": tables["connections"], "exchanges": tables["exchanges"]},
        known=KNOWN_BROKERS,
        connected=keyed("connections"),
        answer=f"""
            select cluster, client_address as host, {GROUPS["broker"]} as broker, max(known_id) as broker_id,
                sum(late_answers) as answers, count(*) as connections, max(late_answer_ns) as longest_ns,
                max_by(late_answer_times, late_answer_ns) as times, min(path_mtu) as mtu,
                cast(floor(min(late_answer_since_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(late_answer_since_ns + late_answer_ns) / 1e3) as bigint) as last_us
            from connected where late_answer_ns >= {limits.late_answer_s * 1e9:.0f}
            group by cluster, client_address, {GROUPS["broker"]}
            order by longest_ns desc, cluster nulls first, host, broker""",
    )


def judge_late(row: Late, limits: Limits) -> Iterator[Finding]:
    yield found_between(
        row,
        "late_answers",
        severity(limits, stood_still_ns=row.longest_ns),
        row.longest_ns / 60e9,
        {
            "answers": row.answers,
            "longest_ns": row.longest_ns,
            "times": row.times,
            "connections": row.connections,
            "mtu": row.mtu,
        },
        None if row.mtu is None else MTU_CHANGE.format(mtu=row.mtu),
    )


PROBES = (
    Probe(("retransmissions", "zero_windows"), ("connections", "exchanges"), paths, Path, judge_path),
    Probe(("late_answers",), ("connections", "exchanges"), late, Late, judge_late),
)
