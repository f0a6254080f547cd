"""The verdict over tables: figures of an incident, before any list of findings.

    failed requests, the longest standstill, latency of answers, the largest lag of a group

Duty: the figures, from tables and findings, and the findings for its sentence. Refuses to know engines, and the
words (`views.verdict`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kproxy.analysis.engine import Frame, ask, rows
from kproxy.analysis.findings.causes import DOWN
from kproxy.analysis.findings.failures import REFUSED, RETRIED_KINDS, topics_not_given
from kproxy.analysis.findings.finding import CRITICAL, WARNING, Finding
from kproxy.analysis.lags import TABLES as OF_LAG
from kproxy.analysis.lags import group_lag_while_active
from kproxy.analysis.questions.pieces import GROUPS, KEYS, LONG_POLLS, literal, missed_answers, of_clients, percentiles

TABLES = tuple(dict.fromkeys(("exchanges", "connections", "partitions", "topology", *OF_LAG)))
# Kinds of findings, with the evidence that is the duration of a standstill.
STANDSTILLS = {
    "all_brokers_silent": "silent_ns",
    "broker_gone": "silent_ns",
    "broker_standing_still": "silent_ns",
    "broker_paused": "paused_ns",
    "writes_waiting_together": "longest_ns",
    "coordinator_lost": "outage_ns",
    "offline_partitions": "longest_ns",
    "stuck_stable_offset": "stuck_ns",
    "client_timeouts": "longest_wait_ns",
    "producers_standing_still": "longest_ns",
    "late_answers": "longest_ns",
    "session_expired": "silent_ns",
}
# Kinds that users of the cluster feel; the others are advice.
FELT = (
    *("broker_gone", "broker_standing_still", "all_brokers_silent", "coordinator_lost", "offline_partitions"),
    *("broker_absent", "broker_paused", "writes_waiting_together", "not_enough_replicas"),
    *("connects_failed", "tls_failed", "unanswered", "client_timeouts", *REFUSED, "reconnect_storm", "late_answers"),
    *("topic_deleted", "producers_standing_still", "records_lost", "records_given_up", "doubtful_records"),
    "resent_not_idempotent",
    *("open_transaction", "stuck_stable_offset", "stopped_fetching", "growing_lag", "rebalance_storm"),
    "session_expired",
    *("slow_broker", "throttled"),
)
# Kinds whose absence is worth reporting, with the APIs of which at least one is needed to check it.
CHECKED = {
    "broker_gone": (),
    "broker_standing_still": (),
    "records_lost": ("Produce",),
    "records_given_up": ("Produce",),
    "producers_standing_still": ("Produce",),
    "resent_not_idempotent": ("Produce",),
    "offline_partitions": ("Metadata",),
    "coordinator_lost": ("Heartbeat", "OffsetCommit"),
    "growing_lag": ("Fetch", "OffsetCommit"),
    "open_transaction": ("AddPartitionsToTxn", "EndTxn"),
}
# Kinds of findings that are signs of a kind in CHECKED, even if the capture begins or ends during the event, or that
# imply it: with one of these its absence is not reported.
_SIGNS = {
    "broker_gone": ("broker_absent", "connects_failed", "unanswered", "client_timeouts", "under_replicated"),
    "broker_standing_still": (
        *("all_brokers_silent", "broker_paused", "writes_waiting_together", "client_timeouts", "unanswered"),
        "late_answers",
    ),
    "producers_standing_still": ("not_enough_replicas", "offline_partitions", "client_timeouts", "unanswered"),
    "records_given_up": ("unanswered", "client_timeouts", "not_enough_replicas", "doubtful_records", "throttled"),
    "resent_not_idempotent": ("doubtful_records", "client_timeouts", "unanswered"),
    "coordinator_lost": (
        "broker_gone",
        "broker_absent",
        "broker_standing_still",
        "connects_failed",
        "under_replicated",
    ),
    "growing_lag": ("stopped_fetching", "stuck_stable_offset"),
    "open_transaction": ("stuck_stable_offset",),
}
# Kinds whose evidence `failed` is a number of requests.
FAILURES = ("unanswered", "client_timeouts", *REFUSED)


@dataclass(frozen=True)
class Figures:
    """None: unknown, or there is none. Times in nanoseconds; only requests of clients count."""

    requests: int
    unanswered: int  # requests whose client missed the response
    refused: int  # requests answered with an error that is a finding
    everyday: int  # requests answered with another error: rebalances, elections, discovery of coordinators
    longest_ns: int | None  # duration of the longest standstill
    longest_where: str | None
    p99_ns: int | None  # latency of requests that do not wait for data or members
    answered: int  # number of these requests
    left_out: int  # number of these requests without a response, which no percentile includes
    behind_records: int | None
    behind_group: str | None
    behind_uncommitted: int  # partitions of its topics without a commit of that group: not in its lag
    behind_fetched: int  # the part of `behind_uncommitted` that its clients fetched
    behind_fetched_records: int | None  # their lag by these fetches
    retried: int = 0  # the part of `refused` that clients retry by themselves, for example when leaders move
    lost: int = 0  # requests whose response the capture lacks: their outcome is unknown
    connections: int = 0  # connections with requests, and encrypted ones
    encrypted: int = 0  # the part of `connections` with TLS and without keys: their requests are unknown


@dataclass(frozen=True)
class Verdict:
    """findings: findings that are no consequence of another; `total` counts them, `explained` their consequences."""

    figures: Figures
    findings: Sequence[Finding]

    @property
    def total(self) -> int:
        return sum(1 + one.more for one in self.findings)

    @property
    def explained(self) -> int:
        return sum(len(one.consequences) for one in self.findings)

    @property
    def is_blind(self) -> bool:
        """Whether the capture lacks most responses, as with one captured direction: absent findings prove nothing."""
        return 2 * self.figures.lost > self.figures.requests

    def gravest(self) -> list[Finding]:
        """The findings for a sentence: critical ones, else warnings of the kinds in FELT."""
        chosen = [one for one in self.findings if one.severity == CRITICAL]
        return chosen or [one for one in self.findings if one.severity == WARNING and one.kind in FELT]

    def not_found(self, apis: Collection[str]) -> list[str]:
        """The kinds of CHECKED without a finding, a consequence or a sign; apis: the APIs in the tables."""
        if self.is_blind:
            return []
        kinds = {one.kind for root in self.findings for one in (root, *root.consequences)}
        signs = {  # consequences of a broker's outage are no signs of other kinds
            one.kind for root in self.findings for one in (root, *(() if root.kind in DOWN else root.consequences))
        }
        return [
            kind
            for kind, needed in CHECKED.items()
            if kind not in kinds
            and signs.isdisjoint(_SIGNS.get(kind, ()))
            and (not needed or not set(apis).isdisjoint(needed))
        ]

    @property
    def felt(self) -> list[Finding]:
        """The findings that users felt and that have a time, the most severe first."""
        return [one for one in self.findings if one.kind in FELT and one.since_ns is not None]

    def timeline(self, limit: int) -> list[Finding]:
        """The most severe findings that users felt, at most as many, in the order of time."""
        return sorted(self.felt[:limit], key=lambda one: one.since_ns or 0)

    def as_dict(self) -> dict[str, Any]:
        return {"figures": asdict(self.figures), "findings": self.total, "explained": self.explained}


def lags_of(tables: Mapping[str, Frame]) -> Frame:
    """The lags of groups, for the verdict and for findings (`consuming.GROUP_LAGS`): to be kept for both."""
    return group_lag_while_active(*(tables[name] for name in OF_LAG))


def verdict(tables: Mapping[str, Frame], findings: Sequence[Finding], lags: Frame | None = None) -> Verdict:
    """The verdict over TABLES and their findings. lags: those of `lags_of`, if they are computed already."""
    (requests, answered, left_out, lost, p99_ns), *_ = rows(_counted(tables))
    ((unanswered,),) = rows(ask(_only(tables, "exchanges", "connections"), **missed_answers(), answer=_MISSED))
    ((refused, retried, with_errors),) = rows(_refused(tables))
    ((connections, encrypted),) = rows(ask(_only(tables, "connections"), answer=_ENCRYPTED))
    behind = next(rows(_behind(lags_of(tables) if lags is None else lags)), (None, None, 0, 0, None))
    longest_ns, where = max(_standstills(findings), default=(None, None), key=lambda each: each[0] or 0)
    records, group, uncommitted, fetched, fetched_records = behind
    everyday = with_errors - refused
    figures = Figures(
        requests,
        unanswered,
        refused,
        everyday,
        longest_ns,
        where,
        p99_ns,
        answered,
        left_out,
        records,
        group,
        uncommitted or 0,
        fetched or 0,
        fetched_records,
        retried,
        lost,
        connections,
        encrypted,
    )
    return Verdict(figures, findings)


_ENCRYPTED = """
    select count_if(requests > 0 or tls = 'tls') as connections,
        count_if(tls = 'tls' and coalesce(requests, 0) = 0 and tls_failure is null) as encrypted
    from connections"""
_MISSED = "select count(*) as unanswered from missed"


def _only(tables: Mapping[str, Frame], *names: str) -> dict[str, Frame]:
    return {name: tables[name] for name in names}


def _counted(tables: Mapping[str, Frame]) -> Frame:
    polls = ", ".join(map(literal, LONG_POLLS))
    prompt = f"api not in ({polls})"
    return ask(
        _only(tables, "exchanges"),
        answer=f"""
            select count(*) as requests, count(case when {prompt} then latency_ns end) as answered,
                count_if({prompt} and outcome = 'unanswered') as left_out, count_if(outcome = 'lost') as lost,
                {percentiles(f"case when {prompt} then latency_ns end", "", 0.99)}
            from exchanges where {of_clients(False)}""",
    )


def _refused(tables: Mapping[str, Frame]) -> Frame:
    errors = ", ".join(literal(error) for several in REFUSED.values() for error in several)
    for_good = ", ".join(
        literal(error) for kind, several in REFUSED.items() if kind not in RETRIED_KINDS for error in several
    )
    keys = ", ".join(KEYS)
    same = " and ".join(f"e.{key} = i.{key}" for key in KEYS)
    return ask(
        _only(tables, "exchanges", "partitions", "topology"),
        inside=f"""
            select {keys}, 1 as is_in, max(case when error in ({for_good}) then 1 else 0 end) as for_good
            from partitions where direction = 'response' and error in ({errors}) group by {keys}""",
        **topics_not_given(),
        to_whom="select distinct cluster, client, true as has_none from not_given",
        failed=f"""
            select {keys}, cluster, {GROUPS["client"]} as client, api, error from exchanges
            where errors > 0 and {of_clients(False)}""",
        answer=f"""
            select count_if(coalesce(e.error in ({errors}), false) or i.is_in = 1
                    or e.api = 'Metadata' and coalesce(n.has_none, false)) as refused,
                count_if(coalesce(e.error in ({errors}), false) and e.error not in ({for_good})
                        and coalesce(i.for_good, 0) = 0
                    or coalesce(e.error, 'NONE') = 'NONE' and i.for_good = 0) as retried,
                count(*) as with_errors
            from failed e left join inside i on {same}
            left join to_whom n on n.cluster is not distinct from e.cluster and n.client = e.client""",
    )


def _behind(lags: Frame) -> Frame:
    """The group with the largest lag, by its committed offsets, at the tables' end."""
    once = ("uncommitted_partitions", "fetched_partitions", "fetched_lag_records")  # figures of a topic, in each row
    return ask(
        {"lags": lags},
        numbered="""
            select *, row_number() over (partition by cluster, group_id, topic order by `partition`) as nth
            from lags""",
        summed=f"""
            select cluster, group_id, sum(end_known_records) as lag_records,
                {", ".join(f"sum(case when nth = 1 then {each} end) as {each}" for each in once)}
            from numbered group by cluster, group_id""",
        answer="""
            select lag_records, group_id, uncommitted_partitions, fetched_partitions, fetched_lag_records
            from summed where lag_records > 0
            order by lag_records desc, group_id, cluster limit 1""",
    )


def _standstills(findings: Sequence[Finding]) -> Iterator[tuple[int, str]]:
    for root in findings:
        for one in (root, *root.consequences):
            of = dict(one.evidence)
            value = of.get("away_ns", of.get(STANDSTILLS.get(one.kind, "")))
            if value:
                yield value, one.where
