"""Findings about a follower that keeps writes waiting: a pause that no client of the follower itself shows.

A leader acknowledges a write with acks=all once its in-sync replicas have the records. If the writes of several leaders
wait and are acknowledged together, while these leaders answer everything else at once, they waited for a follower that
all of these leaders have. Refuses to know engines, and how findings look.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.findings.felt import severity
from kproxy.analysis.findings.finding import Finding, Probe, Tables, found
from kproxy.analysis.findings.silences import FETCHES, TOGETHER_NS, UNDELAYED, kept_waiting
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.pieces import GROUPS, KEYS, KNOWN_BROKERS, TOPIC, keyed, literal, ns, of_clients

_EACH = "cluster, broker_key"


class Waited(NamedTuple):
    """Writes with acks=all that waited at several leaders and were acknowledged together."""

    cluster: str | None
    leaders: list[str]  # ids, or addresses where these are not known
    waited_ns: int  # at all of these leaders at the same time
    waiting: int  # writes
    clients: list[str]
    answered: int  # other requests that the leaders answered at once meanwhile
    followers: list[int] | None  # brokers that replicate a partition of each of these writes; None: unknown
    first_us: int
    last_us: int


def waits(tables: Tables, limits: Limits) -> Frame:
    """Rows of Waited, the longest first.

    A write counts that waited for `paused_s` without another reason: no earlier request, quota, lost segment or closed
    window. Leaders count that answered another Produce or Fetch at once meanwhile, and let no request wait for half of
    `paused_s` that needs no other broker. Without a follower common to all writes whose replicas are known, there is no
    row.
    """
    least_ns, half_ns = f"{limits.paused_s * 1e9:.0f}", f"{limits.paused_s * 5e8:.0f}"
    fetches = ", ".join(map(literal, FETCHES))
    same_broker = "{0}.cluster is not distinct from {1}.cluster and {0}.broker_key = {1}.broker_key"
    same_moment = "{0}.cluster is not distinct from {1}.cluster and {0}.moment = {1}.moment"
    same_write = " and ".join(f"w.{key} = p.{key}" for key in KEYS)
    return ask(
        {name: tables[name] for name in ("exchanges", "partitions", "leadership", "topology")},
        ("bursts", "moments", "leaders", "held"),
        known=KNOWN_BROKERS,
        exchanged=keyed("exchanges"),
        writes=f"""
            select {", ".join(KEYS)}, cluster, broker_key, known_id, {GROUPS["client"]} as client,
                request_end_ns as since_ns, response_start_ns as until_ns
            from exchanged
            where api = 'Produce' and acks = -1 and outcome = 'answered' and {UNDELAYED}
                and response_start_ns - request_end_ns >= {least_ns} and {of_clients(False)}""",
        ordered=f"""
            select *, until_ns - lag(until_ns) over (partition by {_EACH} order by until_ns, {", ".join(KEYS)})
                as step_ns
            from writes""",
        numbered=f"""
            select *, sum(case when step_ns < {least_ns} then 0 else 1 end)
                over (partition by {_EACH} order by until_ns, {", ".join(KEYS)}
                    rows between unbounded preceding and current row) as burst
            from ordered""",
        # Writes of one leader that were acknowledged together, without another one that had waited shortly before.
        bursts=f"""
            select {_EACH}, burst, min(since_ns) as since_ns, min(until_ns) as until_ns
            from numbered group by {_EACH}, burst having max(until_ns) - min(until_ns) <= {TOGETHER_NS}""",
        released="""
            select *, until_ns - lag(until_ns) over (partition by cluster order by until_ns, broker_key) as step_ns
            from bursts""",
        placed=f"""
            select *, sum(case when step_ns <= {TOGETHER_NS} then 0 else 1 end)
                over (partition by cluster order by until_ns, broker_key
                    rows between unbounded preceding and current row) as moment
            from released""",
        moments=f"""
            select cluster, moment, max(since_ns) as since_ns, min(until_ns) as until_ns from placed
            group by cluster, moment
            having count(distinct broker_key) >= 2 and max(until_ns) - min(until_ns) <= {TOGETHER_NS}
                and min(until_ns) - max(since_ns) >= {least_ns}""",
        asking=kept_waiting(half_ns),
        able=f"""
            select p.cluster, p.broker_key, p.moment, p.burst, m.since_ns, m.until_ns from placed p
            join moments m on {same_moment.format("p", "m")}""",
        late=f"""
            select distinct b.cluster, b.broker_key, b.moment, true as is_late from able b
            join asking a on {same_broker.format("b", "a")} and a.due_ns < b.until_ns
                and least(a.response_start_ns, b.until_ns) - greatest(a.due_ns, b.since_ns) >= {half_ns}""",
        answered=f"""
            select cluster, broker_key, request_end_ns, response_start_ns from exchanged
            where api in ('Produce', {fetches}) and outcome = 'answered' and {of_clients(False)}
                and response_start_ns - request_end_ns < {half_ns}
                    + case when api in ({fetches}) then {ns("coalesce(max_wait_ms, 500)")} else 0 end""",
        leaders=f"""
            select b.cluster, b.broker_key, b.moment, b.burst, b.since_ns, b.until_ns, count(*) as answered
            from able b join answered a on {same_broker.format("b", "a")}
                and a.request_end_ns >= b.since_ns and a.response_start_ns <= b.until_ns
            left join late l on {same_broker.format("b", "l")} and b.moment = l.moment
            where l.is_late is null
            group by b.cluster, b.broker_key, b.moment, b.burst, b.since_ns, b.until_ns""",
        sums="""
            select cluster, moment, since_ns, until_ns, array_sort(collect_list(broker_key)) as leaders,
                sum(answered) as answered
            from leaders group by cluster, moment, since_ns, until_ns having count(*) >= 2""",
        held=f"""
            select n.*, b.moment from numbered n
            join leaders b on {same_broker.format("n", "b")} and n.burst = b.burst""",
        theirs="select cluster, moment, client, count(*) as waiting from held group by cluster, moment, client",
        clients="""
            select cluster, moment, array_sort(collect_list(client)) as clients, sum(waiting) as waiting
            from theirs group by cluster, moment""",
        replicated="""
            select cluster, topic, `partition`, max_by(replicas, time_ns) as replicas from leadership
            where replicas is not null and size(replicas) > 0 group by cluster, topic, `partition`""",
        brokers="select distinct cluster, broker_id from topology where kind = 'broker' and broker_id >= 0",
        placement=f"""
            select w.cluster, w.moment, w.known_id,
                concat_ws(' ', w.source, cast(w.connection as string), cast(w.`number` as string)) as write, r.replicas
            from held w join (
                select {", ".join(KEYS)}, {TOPIC} as of_topic, `partition` as of_partition from partitions
                where api = 'Produce' and direction = 'request') p on {same_write}
            join replicated r on w.cluster is not distinct from r.cluster and p.of_topic = r.topic
                and p.of_partition = r.`partition`""",
        placements="select cluster, moment, count(distinct write) as writes from placement group by cluster, moment",
        shared="""
            select p.cluster, p.moment, b.broker_id, count(distinct p.write) as writes
            from placement p join brokers b on p.cluster is not distinct from b.cluster
                and array_contains(p.replicas, b.broker_id) and coalesce(b.broker_id != p.known_id, true)
            group by p.cluster, p.moment, b.broker_id""",
        common=f"""
            select s.cluster, s.moment, array_sort(collect_list(s.broker_id)) as followers
            from shared s join placements p on {same_moment.format("s", "p")} and s.writes = p.writes
            left join leaders l on {same_moment.format("s", "l")} and l.broker_key = cast(s.broker_id as string)
            where l.moment is null group by s.cluster, s.moment""",
        answer=f"""
            select s.cluster, s.leaders, s.until_ns - s.since_ns as waited_ns, c.waiting, c.clients, s.answered,
                f.followers, cast(floor(s.since_ns / 1e3) as bigint) as first_us,
                cast(floor(s.until_ns / 1e3) as bigint) as last_us
            from sums s join clients c on {same_moment.format("s", "c")}
            left join placements p on {same_moment.format("s", "p")}
            left join common f on {same_moment.format("s", "f")}
            where c.waiting >= {limits.silent_requests_min} and (p.writes is null or f.followers is not null)
            order by waited_ns desc, s.cluster nulls first, s.since_ns""",
    )


def judge_waited(row: Waited, limits: Limits) -> Iterator[Finding]:
    leaders, followers = _brokers(row.leaders, "and"), row.followers or []
    known = {"broker_id": followers[0]} if len(followers) == 1 else {}
    yield found(
        "writes_waiting_together",
        severity(limits, stood_still_ns=row.waited_ns),
        row.waited_ns / 60e9,
        row.cluster,
        _brokers(followers, "or") if known else leaders,
        {**known, "clients": row.clients},
        (row.first_us, row.last_us),
        {
            "waiting": row.waiting,
            "leaders": leaders,
            "longest_ns": row.waited_ns,
            "shared": ", ".join(["a follower", *([_brokers(followers, "or")] if followers else [])]),
            "answered_meanwhile": row.answered,
        },
    )


def _brokers(names: Sequence[str | int], word: str) -> str:
    """Brokers in words, like "brokers 1, 2 and 3" or "broker 2 or 4"."""
    *first, last = sorted(map(str, names), key=lambda each: (len(each), each))
    noun = "brokers" if first and word == "and" else "broker"
    return f"{noun} {', '.join(first)} {word} {last}" if first else f"{noun} {last}"


PROBES = (
    Probe(
        ("writes_waiting_together",),
        ("exchanges", "partitions", "leadership", "topology"),
        waits,
        Waited,
        judge_waited,
    ),
)
