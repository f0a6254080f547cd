"""Findings about members of groups whose session expired: they sent nothing, though nobody had closed them.

A process that is killed leaves its group without a word, and so does one that stands still. Refuses to know engines,
and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.finding import CRITICAL, NOTE, WARNING, Finding, Probe, Tables, clean, found
from kproxy.analysis.findings.thresholds import Limits

_SILENT_NS = 5_000_000_000  # heartbeat.interval.ms is 3 s: a member with a later request did not expire for silence
_ENDED_NS = 1_000_000_000


class Expired(NamedTuple):
    """Members of a group on one client whose sessions expired; times are those of the longest silence."""

    cluster: str | None
    group_id: str
    client: str | None
    host: str | None
    members: int
    silent_ns: int  # from its last request until the coordinator gave it up
    back_ns: int | None  # until its next request on the same connection
    is_closed: bool  # its connection had ended
    first_us: int
    last_us: int


def expired(tables: Tables, limits: Limits) -> Frame:
    """Rows of Expired, the longest silence first: of members whose own requests the capture has."""
    return ask(
        {name: tables[name] for name in ("rebalances", "group_events", "exchanges", "connections")},
        given_up="""
            select source, cluster, group_id, cause_member as member_id, started_ns from rebalances
            where cause = 'session_expired' and cause_member is not null and started_ns is not null""",
        members="""
            select source, group_id, member_id, max(client_id) as client, max(client_address) as host,
                max(connection) as connection
            from group_events where member_id is not null and connection is not null and event in ('join', 'sync')
            group by source, group_id, member_id""",
        theirs="""
            select g.cluster, g.group_id, g.member_id, g.started_ns, m.client, m.host, g.source, m.connection
            from given_up g join members m
                on g.source = m.source and g.group_id = m.group_id and g.member_id = m.member_id""",
        requests="""
            select t.cluster, t.group_id, t.client, t.host, t.member_id, t.started_ns, t.source, t.connection,
                max(case when e.request_end_ns <= t.started_ns then e.request_end_ns end) as last_ns,
                min(case when e.request_end_ns > t.started_ns then e.request_end_ns end) as next_ns
            from theirs t join exchanges e on t.source = e.source and t.connection = e.connection
            group by t.cluster, t.group_id, t.client, t.host, t.member_id, t.started_ns, t.source, t.connection""",
        silent=f"""
            select h.*, h.started_ns - h.last_ns as silent_ns, h.next_ns - h.last_ns as back_ns,
                coalesce(c.close != 'open' and c.end_ns <= h.started_ns + {_ENDED_NS}, false) as is_closed
            from requests h left join connections c on h.source = c.source and h.connection = c.connection
            where h.started_ns - h.last_ns >= {_SILENT_NS}""",
        answer="""
            select cluster, group_id, client, host, count(distinct member_id) as members, max(silent_ns) as silent_ns,
                max_by(back_ns, silent_ns) as back_ns, max_by(is_closed, silent_ns) as is_closed,
                cast(floor(min(last_ns) / 1e3) as bigint) as first_us,
                cast(floor(max(started_ns) / 1e3) as bigint) as last_us
            from silent group by cluster, group_id, client, host
            order by silent_ns desc, cluster nulls first, group_id, client nulls first, host nulls first""",
    )


def judge_expired(row: Expired, limits: Limits) -> Iterator[Finding]:
    if row.is_closed:
        happened = "its connection had ended without LeaveGroup, as when a process is killed"
    elif row.back_ns is not None:
        happened = "it went on over the same connection: its process or its host stood still"
    else:
        happened = "it was not heard of again"
    silent_s = row.silent_ns / 1e9
    yield found(
        "session_expired",
        # Records that wait meanwhile are a finding of their own, which this one explains.
        CRITICAL if silent_s >= limits.unread_s else WARNING if silent_s >= limits.felt_stood_still_s else NOTE,
        row.silent_ns / 600e9,
        row.cluster,
        f"group {row.group_id}, client {clean(row.client)}",
        {"group_id": row.group_id, "client": row.client, "host": row.host},
        (row.first_us, row.last_us),
        {
            "members": row.members,
            "silent_ns": row.silent_ns,
            "back_ns": None if row.is_closed else row.back_ns,
            "happened": happened,
        },
    )


PROBES = (
    Probe(
        ("session_expired",),
        ("rebalances", "group_events", "exchanges", "connections"),
        expired,
        Expired,
        judge_expired,
    ),
)
