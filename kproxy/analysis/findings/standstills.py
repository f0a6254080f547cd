"""Findings about producers that stood still: for a time none of their writes was acknowledged, though they tried.

A client waits from its first write that is not acknowledged, which may be the first of the capture, to the first
acknowledgement after it, or to its last try. So does a client that writes nothing and asks for Metadata again and
again: it knows no leader. Other clients that send nothing do not wait, nor do clients whose records are refused as
invalid, nor those over a quota (`throttled`) while it lasts. Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.failures import RETRIED
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import Finding, Probe, Tables, found
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, KEYS, literal, of_clients

ACTIVE_US = 10_000_000  # clients that wrote this long before the standstill count among the producers
_ASKED_MIN = 5  # Metadata requests on each connection, one a second or more, of a client that waits for a leader
_STEADY = 10  # acknowledged writes in ACTIVE_US: a client that wrote so steadily did not pause by itself
NAMED = 3  # clients that stood still, by name


class Standstill(NamedTuple):
    """Producers of a cluster that stood still at one time, or one after another without a pause."""

    cluster: str | None
    clients: int
    producers: int  # that had their writes acknowledged shortly before, these among them
    names: list[str]
    shortest_us: int
    longest_us: int
    longest: str  # the client
    refused: int  # writes with errors
    unanswered: int
    first_us: int
    last_us: int


def standstills(tables: Tables, limits: Limits) -> Frame:
    """Rows of Standstill, those of most clients' time first."""
    keys = ", ".join(KEYS)
    same = " and ".join(f"w.{key} = r.{key}" for key in KEYS)
    least_us = f"{limits.writers_still_s * 1e6:.0f}"
    errors = ", ".join(map(literal, RETRIED))
    theirs = "{0}.cluster is not distinct from {1}.cluster and {0}.client = {1}.client"
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "connections")},
        ("gaps", "periods", "good"),
        writes=f"""
            select {keys}, cluster, {GROUPS["client"]} as client, unix_micros(`time`) as us, outcome,
                coalesce(errors, 0) as errors, cast(floor(response_end_ns / 1e3) as bigint) as answered_us,
                cast(floor(coalesce(muted_ns, 0) / 1e3) as bigint) as muted_us,
                outcome = 'answered' and coalesce(errors, 0) < greatest(coalesce(partitions, 1), 1) as is_good
            from exchanges where api = 'Produce' and coalesce(acks, -1) <> 0 and {of_clients(False)}""",
        good=f"""
            select cluster, client, answered_us, us,
                lag(answered_us) over (partition by cluster, client order by answered_us, us) as before_us,
                count(*) over (partition by cluster, client order by answered_us
                    range between {ACTIVE_US} preceding and current row) as recent
            from writes where is_good and answered_us is not null""",
        tried="select cluster, client, min(us) as first_us from writes group by cluster, client",
        gaps=f"""
            select g.cluster, g.client, coalesce(before_us, t.first_us) as since_us, answered_us as until_us
            from good g join tried t on {theirs.format("g", "t")}
            where answered_us - coalesce(before_us, t.first_us) >= {least_us}
            union all
            select cluster, client, max(answered_us), cast(null as bigint) from good group by cluster, client""",
        asked=f"""
            select cluster, {GROUPS["client"]} as client, connection, unix_micros(`time`) as us from exchanges
            where api = 'Metadata' and {of_clients(False)}""",
        leaderless=f"""
            select g.cluster, g.client, g.since_us, min(a.us) as first_us, max(a.us) as last_us
            from gaps g join asked a on {theirs.format("g", "a")} and a.us > g.since_us
                and a.us < coalesce(g.until_us, a.us + 1)
            group by g.cluster, g.client, g.since_us, g.until_us
            having count(*) >= {_ASKED_MIN} * count(distinct connection)
                and coalesce(g.until_us, max(a.us)) - min(a.us) <= count(*) * 1000000""",
        steady=f"select distinct cluster, client, answered_us from good where recent >= {_STEADY}",
        refusals=f"""
            select distinct {keys}, true as is_retried from partitions
            where api = 'Produce' and direction = 'response' and error in ({errors})""",
        ended="""
            select source, connection, max(end_ns) as end_ns from connections where close != 'open'
            group by source, connection""",
        # A failed write waits until its refusal, or the end of its connection. One that its broker leaves unread for a
        # quota waits from then on.
        waits=f"""
            select w.cluster, w.client, w.us, muted_us, is_good,
                case when not is_good and outcome = 'answered' then 1 else 0 end as is_refused,
                case when outcome = 'unanswered' then 1 else 0 end as is_unanswered,
                coalesce(answered_us, cast(floor(n.end_ns / 1e3) as bigint), w.us) as over_us
            from writes w left join refusals r on {same}
            left join ended n on w.source = n.source and w.connection = n.connection
            where is_good or outcome = 'unanswered' or r.is_retried
            union all
            select l.cluster, l.client, case when s.client is null then first_us else since_us end, 0, false, 0, 0,
                last_us
            from leaderless l left join steady s on {theirs.format("l", "s")} and l.since_us = s.answered_us""",
        waited=f"""
            select g.cluster, g.client, g.until_us, min(greatest(w.us + w.muted_us, g.since_us)) as first_us,
                coalesce(g.until_us, max(w.over_us)) as last_us, max(w.muted_us) as muted_us,
                sum(w.is_refused) as refused, sum(w.is_unanswered) as unanswered
            from gaps g join waits w on {theirs.format("g", "w")}
                and case when w.is_good then w.us < g.until_us and w.over_us >= g.until_us
                    else w.over_us >= g.since_us and w.us < coalesce(g.until_us, w.us + 1) end
            group by g.cluster, g.client, g.since_us, g.until_us""",
        periods=f"""
            select *, last_us - first_us as still_us from waited
            where last_us - first_us >= {least_us} and muted_us < last_us - first_us""",
        ordered="""
            select *, max(last_us) over (partition by cluster order by first_us, client
                rows between unbounded preceding and 1 preceding) as reached_us
            from periods""",
        numbered="""
            select *, sum(case when first_us <= reached_us then 0 else 1 end)
                over (partition by cluster order by first_us, client) as island
            from ordered""",
        by_client="""
            select cluster, island, client, max(still_us) as still_us, sum(refused) as refused,
                sum(unanswered) as unanswered, min(first_us) as first_us, max(last_us) as last_us
            from numbered group by cluster, island, client""",
        islands="""
            select cluster, island, count(*) as clients, array_sort(collect_list(client)) as names,
                min(still_us) as shortest_us, max(still_us) as longest_us,
                max_by(client, named_struct('s', still_us, 'c', client)) as longest, sum(refused) as refused,
                sum(unanswered) as unanswered, sum(still_us) as all_us, min(first_us) as first_us,
                max(last_us) as last_us
            from by_client group by cluster, island""",
        active=f"""
            select i.cluster, i.island, count(distinct g.client) as producers
            from islands i join good g on i.cluster is not distinct from g.cluster
                and g.answered_us >= i.first_us - {ACTIVE_US} and g.us <= i.last_us
            group by i.cluster, i.island""",
        answer="""
            select i.cluster, clients, greatest(coalesce(producers, 0), clients) as producers, names, shortest_us,
                longest_us, longest, refused, unanswered, first_us, last_us
            from islands i left join active a on i.cluster is not distinct from a.cluster and i.island = a.island
            order by all_us desc, i.cluster nulls first, first_us""",
    )


def judge_standstill(row: Standstill, limits: Limits) -> Iterator[Finding]:
    named = ", ".join(f"client {name}" for name in row.names[:NAMED])
    if row.clients == row.producers and row.clients > 1:
        where = f"all {row.clients} producers"
    elif row.clients > NAMED:
        where = f"{row.clients} of {row.producers} producers"
    else:
        where = named
    yield found(
        "producers_standing_still",
        severity(limits, stood_still_ns=row.longest_us * 1000),
        row.clients / max(row.producers, 1) * row.longest_us / 6e7,
        row.cluster,
        where,
        {"client": row.longest} if row.clients == 1 else {"clients": row.names},
        (row.first_us, row.last_us),
        {
            "clients": row.clients,
            "producers": row.producers,
            "shortest_ns": row.shortest_us * 1000 if row.clients > 1 else None,
            "longest_ns": row.longest_us * 1000,
            "longest": row.longest,
            "refused": row.refused or None,
            "unanswered": row.unanswered or None,
        },
    )


PROBES = (
    Probe(
        ("producers_standing_still",),
        ("exchanges", "partitions", "connections"),
        standstills,
        Standstill,
        judge_standstill,
    ),
)
