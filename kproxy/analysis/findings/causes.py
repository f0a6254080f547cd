"""Causes of findings: one entry for a cause, with its consequences folded in.

Duty: the graph as data, EDGES, and `folded`, which applies it. A finding has one cause at most, the nearest: the one
that shares most with it, then one during which it began, then the one whose time covers most of its own. A finding of
failed requests is divided by time: each outage gets those that failed during it, the rest is a finding of its own; one
of slow requests follows from the outage during which most of them were sent. The severity of a cause is the highest of
it and its consequences; only the cause has advice. Refuses to know how anything is found.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from kproxy.analysis.findings.finding import SEVERITIES, Finding, Moment, without_advice
from kproxy.analysis.findings.kinds import LARGEST, NAMED

NS = 1_000_000_000
# Conditions on times. OVERLAPS: consequence and cause at the same time, or soon after it. BEGINS: the consequence began
# meanwhile or soon after. FOLLOWS: it began soon after the cause began. DURING: it began meanwhile. WITHIN: the same,
# to the second. MOSTLY: the cause lasted for at least half of its time. EVER: the consequence is of a longer time, such
# as a percentile.
OVERLAPS, BEGINS, FOLLOWS, EVER = "overlaps", "begins", "follows", "ever"
DURING, WITHIN, MOSTLY = "during", "within", "mostly"
_STEP_NS = NS  # failures are counted in steps of at least this time
_BEFORE_NS = 5 * NS  # a standstill begins at the last successful answer: one heartbeat (3 s) earlier
_AFTER_NS = {
    OVERLAPS: 10 * NS,
    BEGINS: 30 * NS,
    FOLLOWS: 30 * NS,
    DURING: NS,
    WITHIN: 0,
}  # session.timeout.ms, request.timeout.ms


class Edge(NamedTuple):
    """A finding of kind `cause` explains one of kind `consequence` where they share `same` and times lie as `when`.

    same: names of places (broker, topic, client, group_id); `held_back`: a reader stands where the last stable offset
    does; `everywhere`: the consequence is of no single broker; `machine`: listeners of one address; `clients`:
    all of the consequence's are among the cause's.
    """

    cause: str
    consequence: str
    same: tuple[str, ...]
    when: str


def _edges(causes: Iterable[str], consequences: Iterable[str], same: tuple[str, ...], when: str) -> tuple[Edge, ...]:
    return tuple(Edge(cause, consequence, same, when) for cause in causes for consequence in consequences)


_OF_BROKER = ("broker_gone", "broker_standing_still")
DOWN = (*_OF_BROKER, "all_brokers_silent")  # outages of brokers
_PAUSED = ("broker_paused",)  # too short for elections and timeouts
_ABSENT = ("broker_absent",)
_FOLLOWER = ("writes_waiting_together",)  # a pause of a follower, by its leaders
_TIMED = (*DOWN, *_PAUSED, *_FOLLOWER, *_ABSENT)  # causes of failures by the times of these
EDGES: tuple[Edge, ...] = (
    # Brokers that fall silent together.
    *_edges(("all_brokers_silent",), (*_OF_BROKER, *_PAUSED), (), MOSTLY),
    *_edges(_OF_BROKER, _PAUSED, ("broker",), OVERLAPS),  # as it begins, or is back
    *_edges(("all_brokers_silent",), ("unanswered", "client_timeouts", "late_answers"), (), OVERLAPS),
    # Consequences of a broker: its partitions, its groups and its requests.
    *_edges(DOWN, ("coordinator_lost", "under_replicated", "offline_partitions"), ("broker",), OVERLAPS),
    *_edges(DOWN, ("unanswered", "client_timeouts", "reconnect_storm"), ("broker",), OVERLAPS),
    *_edges(DOWN, ("records_lost",), ("broker",), OVERLAPS),
    *_edges(("late_answers",), ("reconnect_storm", "unanswered", "client_timeouts"), ("broker",), OVERLAPS),
    *_edges(DOWN, ("connects_failed", "tls_failed"), ("machine",), OVERLAPS),  # its other listeners too
    *_edges(("tls_failed",), ("reconnect_storm", "unanswered"), ("broker",), OVERLAPS),
    *_edges(DOWN, ("retransmissions", "zero_windows"), ("broker",), EVER),
    *_edges(DOWN, ("slow_broker",), ("broker",), OVERLAPS),
    *_edges(DOWN, ("slow_broker",), ("everywhere",), OVERLAPS),
    # Elsewhere in the cluster, meanwhile: elections, and leaders that wait for its replicas.
    *_edges(DOWN, ("not_enough_replicas",), (), BEGINS),
    *_edges(DOWN, ("client_timeouts", "unanswered"), (), DURING),  # at brokers that wait for its replication
    *_edges(DOWN, ("no_leader", "timed_out"), (), OVERLAPS),
    *_edges(DOWN, ("producers_standing_still",), (), BEGINS),
    *_edges(DOWN, ("resent_not_idempotent", "doubtful_records"), (), DURING),  # one failed request is no finding
    *_edges(DOWN, ("coordinator_lost", "controller_changes", "offline_partitions", "fenced"), (), BEGINS),
    *_edges(DOWN, ("straggler", "members_gone"), (), BEGINS),  # members that joined anew, under new ids
    # A broker that stopped before the capture: elections and timeouts end soon, missing replicas stay missing.
    *_edges(_ABSENT, ("coordinator_lost", "under_replicated", "offline_partitions"), ("broker",), OVERLAPS),
    *_edges(_ABSENT, ("reconnect_storm", "unanswered", "client_timeouts"), ("broker",), OVERLAPS),
    *_edges(_ABSENT, ("connects_failed", "tls_failed"), ("machine",), OVERLAPS),
    *_edges(_ABSENT, ("not_enough_replicas",), (), OVERLAPS),
    *_edges(_ABSENT, ("client_timeouts", "unanswered", "no_leader", "timed_out"), (), FOLLOWS),
    *_edges(_ABSENT, ("producers_standing_still", "coordinator_lost", "controller_changes"), (), FOLLOWS),
    # A follower that pauses.
    *_edges(DOWN, _FOLLOWER, (), DURING),
    *_edges(_PAUSED, _FOLLOWER, (), WITHIN),
    *_edges(_FOLLOWER, ("under_replicated",), ("broker",), OVERLAPS),
    *_edges(_FOLLOWER, ("client_timeouts", "unanswered", "producers_standing_still"), ("clients",), OVERLAPS),
    # Replicas and leaders.
    *_edges(("under_replicated",), ("not_enough_replicas", "timed_out"), (), OVERLAPS),
    *_edges(("offline_partitions",), ("no_leader", "growing_lag"), ("topic",), OVERLAPS),
    # A topic that is no longer there.
    *_edges(("topic_deleted",), ("unknown_topic",), ("topic",), OVERLAPS),
    *_edges(("topic_deleted",), ("producers_standing_still", "records_given_up"), ("clients",), OVERLAPS),
    # Clients retry requests that were not answered, or refused for a while.
    *_edges(
        ("unanswered", "client_timeouts", "timed_out", "not_enough_replicas", "no_leader"),
        ("resent_not_idempotent", "doubtful_records"),
        ("client",),
        OVERLAPS,
    ),
    # Producers give up records that brokers refuse, and records that they have retried for too long.
    *_edges(DOWN, ("records_given_up",), ("broker",), OVERLAPS),
    *_edges(DOWN, ("records_given_up",), (), DURING),
    *_edges(
        (
            *("refused_too_large", "refused_authorization", "refused_records", "throttled", "not_enough_replicas"),
            *("no_leader", "timed_out", "unanswered", "client_timeouts", "fenced"),
        ),
        ("records_given_up",),
        ("client",),
        OVERLAPS,
    ),
    # Groups.
    *_edges(("coordinator_lost",), ("rebalance_storm", "straggler", "members_gone"), ("group_id",), BEGINS),
    *_edges(("rebalance_storm",), ("straggler", "members_gone", "session_expired"), ("group_id",), OVERLAPS),
    *_edges(("coordinator_lost",), ("session_expired",), ("group_id",), BEGINS),
    *_edges(DOWN, ("session_expired",), (), BEGINS),  # its heartbeats wait
    *_edges(("session_expired",), ("growing_lag",), ("group_id",), MOSTLY),
    # Consumers. A group that cannot commit, or whose members join anew, lags by the records written meanwhile.
    *_edges(("coordinator_lost", "rebalance_storm"), ("growing_lag",), ("group_id",), MOSTLY),
    *_edges(("stopped_fetching",), ("growing_lag",), ("group_id",), OVERLAPS),
    *_edges(("stopped_fetching",), ("growing_lag",), ("client",), OVERLAPS),
    # Transactions.
    *_edges(("open_transaction",), ("stuck_stable_offset",), ("topic",), OVERLAPS),
    *_edges(("stuck_stable_offset",), ("growing_lag",), ("topic", "held_back"), OVERLAPS),
    # Clients.
    *_edges(("login_failed",), ("connection_churn", "reconnect_storm", "unanswered"), ("client",), OVERLAPS),
    *_edges(("refused_authorization",), ("connection_churn", "reconnect_storm"), ("client",), OVERLAPS),
    *_edges(("reconnect_storm",), ("connection_churn",), ("client",), OVERLAPS),
    *_edges(("throttled",), ("client_timeouts", "unanswered", "producers_standing_still"), ("client",), OVERLAPS),
    *_edges(("throttled",), ("growing_lag",), ("clients",), MOSTLY),
    *_edges(("throttled",), ("fenced", "resent_not_idempotent", "doubtful_records"), ("client",), OVERLAPS),
    # kproxy.
    *_edges(("core_full",), ("slow_broker",), (), EVER),
)
# Findings whose requests' times alone show their cause. A leader is slow while it waits for the replicas of another
# broker; without these times, as live, nobody knows which. A percentile has no parts: most of the requests decide.
_BY_MOMENTS = (
    *_edges(DOWN, ("slow_broker",), (), DURING),
    *_edges((*_PAUSED, *_FOLLOWER), ("slow_broker",), (), WITHIN),
)
_BY_CONSEQUENCE: dict[str, tuple[Edge, ...]] = {
    edge.consequence: tuple(each for each in EDGES if each.consequence == edge.consequence) for edge in EDGES
}


def folded(found: Sequence[tuple[Finding, Sequence[Moment]]]) -> list[Finding]:
    """The findings without a cause, each with its consequences, and theirs.

    Each is given with the moments at which its requests failed, where these are known.
    """
    of_kind: dict[str, list[Finding]] = {}
    for one, _ in found:
        of_kind.setdefault(one.kind, []).append(one)
    parted = [(part, cause, bool(moments)) for one, moments in found for part, cause in _parted(one, moments, of_kind)]
    whole = [part for part, _, _ in parted]
    places: dict[str, list[int]] = {}
    for index, one in enumerate(whole):
        places.setdefault(one.kind, []).append(index)
    at = {id(part): index for index, part in enumerate(whole)}
    parents = [
        _cause(index, whole, places, is_timed) if cause is None else at[id(cause)]
        for index, (_, cause, is_timed) in enumerate(parted)
    ]
    followers: dict[int, list[Finding]] = {}
    for index, parent in enumerate(parents):
        if parent is None:
            continue
        root = parent
        while (above := parents[root]) is not None:
            root = above
        followers.setdefault(root, []).append(without_advice(whole[index]))
    return [_with(one, followers.get(index, [])) for index, one in enumerate(whole) if parents[index] is None]


def _parted(
    one: Finding, moments: Sequence[Moment], of_kind: Mapping[str, Sequence[Finding]]
) -> list[tuple[Finding, Finding | None]]:
    """Failures during each outage, with that outage, and the others, whose cause is still to be found.

    Among several outages, that of the same broker is the cause, else the one that began last. A cause of another kind
    that shares more with the failure is nearer: the quota of a client, rather than a broker that was gone meanwhile.
    """
    by_moments = tuple(edge for edge in _BY_MOMENTS if edge.consequence == one.kind)
    edges = (*_BY_CONSEQUENCE.get(one.kind, ()), *by_moments) if moments else ()
    first = [edge for edge in edges if edge.cause in _TIMED or edge.cause not in _BY_CONSEQUENCE]  # no consequences
    causes = [(edge, cause) for edge in first for cause in of_kind.get(edge.cause, ())]
    parts: dict[int, tuple[Finding | None, list[Moment]]] = {}
    for moment in moments:
        then = one._replace(since_ns=moment.at_ns, until_ns=moment.at_ns)
        able = [
            (len(edge.same), cause.kind in _TIMED, cause.since_ns or 0, cause)
            for edge, cause in causes
            if explains(edge, cause, then) and (edge.when not in (DURING, WITHIN) or moment.is_replicated)
        ]
        begun = [each for each in able if each[2] <= moment.at_ns + _STEP_NS]
        nearest = max(begun or able, key=lambda each: each[:3])[3] if able else None
        if nearest is not None and nearest.kind not in _TIMED:
            nearest = None
        parts.setdefault(id(nearest), (nearest, []))[1].append(moment)
    if len(parts) < 2:
        return [(one, next((cause for cause, _ in parts.values()), None))]
    every = sum(moment.counts["failed"] for moment in moments)
    if by_moments:
        caused = [part for part in parts.values() if part[0] is not None]
        failed = [sum(moment.counts["failed"] for moment in some) for _, some in caused]
        most = max(zip(failed, caused, strict=True), key=lambda each: each[0])[1][0]
        return [(one, most if 2 * sum(failed) > every else None)]
    return [(_part(one, some, every), cause) for cause, some in parts.values()]


def _part(one: Finding, moments: Sequence[Moment], every: int) -> Finding:
    """A finding about the failures in some of its moments; `every`: the failures in all of them.

    A part has no number of requests `asked` meanwhile.
    """
    counts: dict[str, Any] = {
        name: (max if name in LARGEST else sum)(moment.counts[name] for moment in moments) for name in moments[0].counts
    }
    failed = counts["failed"]
    counts |= dict.fromkeys(NAMED, ", ".join(sorted({moment.name for moment in moments})))
    evidence = ((name, counts.get(name, value)) for name, value in one.evidence if name != "asked")
    since, until = moments[0].at_ns, moments[-1].at_ns + _STEP_NS
    return one._replace(
        since_ns=max(since, one.since_ns or since),
        until_ns=min(until, one.until_ns or until),
        evidence=tuple((name, value) for name, value in evidence if value or name not in counts or name in LARGEST),
        weight=one.weight * failed / max(1, every),
    )


def explains(edge: Edge, cause: Finding, one: Finding) -> bool:
    """Whether an edge holds between two findings of its kinds."""
    if cause.cluster != one.cluster and cause.cluster is not None:
        return False
    of_cause, of_one = dict(cause.place), dict(one.place)
    return all(_is_same(name, cause, of_cause, one, of_one) for name in edge.same) and _is_near(edge.when, cause, one)


def _with(root: Finding, consequences: Sequence[Finding]) -> Finding:
    if not consequences:
        return root
    order = sorted(consequences, key=lambda one: (SEVERITIES.index(one.severity), one.kind, -one.weight, one.where))
    gravest = min((root, *order), key=lambda one: SEVERITIES.index(one.severity)).severity
    weight = 1 - prod(1 - one.weight for one in (root, *order))  # a sum of many would be 1 for all of them
    return root._replace(severity=gravest, weight=weight, consequences=tuple(order))


def _cause(index: int, found: Sequence[Finding], by_kind: Mapping[str, Sequence[int]], is_timed: bool) -> int | None:
    """The index in `found` of the cause of one of them. is_timed: its moments have shown that no outage does."""
    one = found[index]
    best: tuple[tuple[int, bool, int, int], int] | None = None
    for edge in _BY_CONSEQUENCE.get(one.kind, ()):
        if is_timed and edge.cause in _TIMED:
            continue
        for at in by_kind.get(edge.cause, ()):
            if at != index and explains(edge, found[at], one):
                rank = len(edge.same), _began_within(found[at], one), _shared_ns(found[at], one), -at
                if best is None or rank > best[0]:
                    best = rank, at
    return None if best is None else best[1]


def _is_same(name: str, cause: Finding, of_cause: Mapping[str, Any], one: Finding, of_one: Mapping[str, Any]) -> bool:
    if name == "broker":
        ids = of_cause.get("broker_id"), of_one.get("broker_id")
        if None not in ids:
            return ids[0] == ids[1]
        return of_cause.get("broker") is not None and of_cause.get("broker") == of_one.get("broker")
    if name == "machine":
        mine, its = of_cause.get("broker"), of_one.get("broker")
        if mine is None or its is None:  # handshakes of all brokers are counted together, for example
            return False
        host = mine.rpartition(":")[0]
        return (host != "" and host == its.rpartition(":")[0]) or _is_same("broker", cause, of_cause, one, of_one)
    if name == "everywhere":
        return of_one.get("broker") is None and of_one.get("broker_id") is None
    if name == "held_back":
        behind = dict(cause.evidence).get("behind_records") or 0
        lag = dict(one.evidence).get("last_lag_records") or 0
        return bool(0 < lag <= 1.2 * behind + 1000)
    if name == "clients":
        its, causing = (of.get("clients") or [of.get("client")] for of in (of_one, of_cause))
        return None not in causing and {*its} <= {*causing}
    if name == "topic" and of_cause.get("topics"):
        return of_one.get("topic") in of_cause["topics"]
    return of_cause.get(name) is not None and of_cause.get(name) == of_one.get(name)


def _is_near(when: str, cause: Finding, one: Finding) -> bool:
    if when == MOSTLY:
        lasted_ns = (one.until_ns or 0) - (one.since_ns or 0)
        return 0 < lasted_ns <= 2 * _shared_ns(cause, one)
    if when == EVER or cause.since_ns is None or one.since_ns is None:
        return True
    before_ns = _STEP_NS if when == WITHIN else _BEFORE_NS
    over_ns = cause.since_ns if when == FOLLOWS else cause.until_ns or cause.since_ns
    begins, ends = cause.since_ns - before_ns, over_ns + _AFTER_NS[when]
    if when in (BEGINS, FOLLOWS, DURING, WITHIN):
        return begins <= one.since_ns <= ends
    return one.since_ns <= ends and (one.until_ns or one.since_ns) >= begins


def _began_within(cause: Finding, one: Finding) -> bool:
    if cause.since_ns is None or one.since_ns is None:
        return False
    return cause.since_ns - _BEFORE_NS <= one.since_ns <= (cause.until_ns or cause.since_ns)


def _shared_ns(cause: Finding, one: Finding) -> int:
    """How long both lasted together."""
    if cause.since_ns is None or one.since_ns is None:
        return 0
    ends = min(cause.until_ns or cause.since_ns, one.until_ns or one.since_ns)
    return max(0, ends - max(cause.since_ns, one.since_ns))
