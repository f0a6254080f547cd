"""Each edge of the graph of causes explains only findings at its place and time."""

import pytest

from kproxy.analysis.findings import KINDS, limits
from kproxy.analysis.findings.causes import BEGINS, EDGES, EVER, MOSTLY, folded
from kproxy.analysis.findings.finding import Finding, Moment, found, ranked

SECOND_US = 1_000_000
PLACE = {"broker_id": 2, "broker": "10.0.0.2:9092", "topic": "orders", "client": "app", "clients": ["app"]}
PLACE["group_id"] = "g"
OTHER = {"broker_id": 3, "broker": "10.0.0.3:9092", "topic": "else", "client": "other", "clients": ["other"]}
OTHER["group_id"] = "h"


def one(kind: str, begin_s: float, end_s: float, place: dict = PLACE, severity: str = "warning", **evidence) -> Finding:
    times = round(begin_s * SECOND_US), round(end_s * SECOND_US)
    return found(kind, severity, 0.1, "default", f"{kind} somewhere", place, times, evidence)


def fold(found: list[Finding]) -> list[Finding]:
    return folded([(each, ()) for each in found])


def moment(at_s: int, failed: int, name: str, is_replicated: bool = False, **counts: int) -> Moment:
    return Moment(at_s * 10**9, name, {"failed": failed, **counts}, is_replicated)


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.cause}-{edge.consequence}-{edge.when}")
def test_an_edge_applies_only_at_its_place_and_time(edge):
    cause = one(edge.cause, 1000, 1020, behind_records=5000)
    place = {} if "everywhere" in edge.same else PLACE
    consequence = one(edge.consequence, 1005, 1030, place, severity="critical", last_lag_records=5000)
    (root,) = fold([cause, consequence])
    assert root.kind == edge.cause and [each.kind for each in root.consequences] == [edge.consequence]
    assert root.severity == "critical" and root.change and not root.consequences[0].change
    if "held_back" in edge.same:
        assert len(fold([cause, one(edge.consequence, 1005, 1030, last_lag_records=50_000)])) == 2
    elsewhere = [each for each in EDGES if each[:2] == edge[:2] and not each.same]
    if edge.same and not elsewhere:
        assert len(fold([cause, one(edge.consequence, 1005, 1030, OTHER, last_lag_records=5000)])) == 2
    if edge.when != EVER:
        assert len(fold([cause, one(edge.consequence, 2000, 2010, place, last_lag_records=5000)])) == 2
    before = one(edge.consequence, 900, 1030, last_lag_records=5000)
    others = [each for each in EDGES if each[:2] == edge[:2] and each.when != BEGINS]
    if edge.when == BEGINS and not others:
        assert len(fold([cause, before])) == 2  # the finding began before its cause
    if edge.when == MOSTLY:
        assert len(fold([cause, one(edge.consequence, 1005, 1060, last_lag_records=5000)])) == 2  # it lasted longer
    assert fold([cause._replace(cluster="another"), consequence])[0].consequences == ()


def test_a_finding_without_a_broker_is_not_attributed_to_a_machine():
    """A running kproxy counts handshakes with all brokers together."""
    gone = one("broker_gone", 1000, 1020)
    for place in ({}, {"broker": None}):
        assert len(fold([gone, one("tls_failed", 1005, 1030, place)])) == 2
        assert len(fold([one("broker_gone", 1000, 1020, place), one("tls_failed", 1005, 1030)])) == 2
    ids = ({"broker": name, "broker_id": int(name)} for name in ("1", "2"))  # these are not addresses
    assert len(fold([one("broker_gone", 1000, 1020, next(ids)), one("tls_failed", 1005, 1030, next(ids))])) == 2


def test_edges_connect_known_kinds_without_a_cycle():
    assert {kind for edge in EDGES for kind in edge[:2]} <= set(KINDS)
    explained: dict[str, set[str]] = {}
    for edge in EDGES:
        explained.setdefault(edge.cause, set()).add(edge.consequence)

    def reach(kind: str, seen: tuple[str, ...]) -> None:
        assert kind not in seen, seen
        for follows in explained.get(kind, ()):
            reach(follows, (*seen, kind))

    for kind in explained:
        reach(kind, ())


def test_a_consequence_of_a_consequence_belongs_to_the_root_cause():
    """A transaction holds the stable offset, which holds the reader; only a broker with the same id explains."""
    chain = [
        one("open_transaction", 0, 100, {"topics": ["orders"]}),
        one("stuck_stable_offset", 2, 100, {"topic": "orders"}, behind_records=9000),
        one("growing_lag", 3, 100, {"topic": "orders", "client": "reader"}, last_lag_records=9000),
        one("growing_lag", 3, 100, {"topic": "orders", "client": "slow"}, last_lag_records=90_000),
    ]
    roots = {each.kind: each for each in fold(chain)}
    assert [each.kind for each in roots["open_transaction"].consequences] == ["growing_lag", "stuck_stable_offset"]
    assert dict(roots["growing_lag"].place)["client"] == "slow"
    brokers = [one("broker_gone", 10, 20, OTHER), one("broker_standing_still", 9, 21)]
    first, second = fold([*brokers, one("client_timeouts", 12, 15)])
    assert not first.consequences and second.consequences
    assert Finding.of(second.as_dict()) == second


def test_failed_requests_belong_to_the_outage_during_which_they_failed():
    """Each of three outages has its own; requests that failed at another time, or long after, belong to none."""
    brokers = [one("broker_gone", 100, 120, {"broker_id": 2}), one("broker_standing_still", 140, 148, {"broker_id": 3})]
    brokers.append(one("broker_gone", 170, 190, {"broker_id": 1}))
    refused = one("not_enough_replicas", 50, 300, {"client": "strict"}, failed=106, asked=900)
    times = [(50, 3), *((second, 2) for second in (99, 101, 119, 125)), (140, 20), (147, 21), (171, 50), (300, 4)]
    refusals = [moment(second, failed, "NOT_ENOUGH_REPLICAS") for second, failed in times]
    # A member of broker 3 times out while broker 3 stands still, and while broker 2 is gone, for which broker 3 waits.
    waits = one("client_timeouts", 105, 147, {"client": "app", "broker_id": 3}, failed=7, asked=90, gave_up=3)
    waits = waits._replace(evidence=(*waits.evidence, ("longest_wait_ns", 9), ("apis", "Heartbeat, OffsetCommit")))
    waited = [moment(105, 3, "OffsetCommit", True, gave_up=1, longest_wait_ns=5)]
    waited += [moment(147, 4, name, gave_up=1, longest_wait_ns=ns) for name, ns in (("Heartbeat", 9), ("Metadata", 7))]
    # Requests to a healthy broker that wait for no other one, or after the outage, belong to no outage.
    alone = one("unanswered", 110, 124, {"client": "app", "broker_id": 4}, failed=4)
    nobodys = [moment(110, 2, "Metadata"), moment(124, 2, "OffsetCommit", True)]
    timed = [(refused, refusals), (waits, waited), (alone, nobodys)]
    roots = folded([*((broker, ()) for broker in brokers), *timed])
    told = {
        (root.kind, dict(root.place).get("broker_id")): {
            each.kind: (dict(each.evidence)["failed"], dict(each.evidence).get("gave_up")) for each in root.consequences
        }
        for root in roots
    }
    assert told == {
        ("broker_gone", 2): {"not_enough_replicas": (8, None), "client_timeouts": (3, 1)},
        ("broker_standing_still", 3): {"not_enough_replicas": (41, None), "client_timeouts": (8, 2)},
        ("broker_gone", 1): {"not_enough_replicas": (50, None)},
        ("not_enough_replicas", None): {},
        ("unanswered", 4): {},
    }
    (rest,) = [root for root in roots if root.kind == "not_enough_replicas"]
    assert dict(rest.evidence) == {"failed": 7} and rest.change  # the total is unknown
    assert (rest.since_ns, rest.until_ns) == (50 * 10**9, 300 * 10**9)
    apis = {each.evidence[-1] for root in roots for each in root.consequences if each.kind == "client_timeouts"}
    assert apis == {("apis", "OffsetCommit"), ("apis", "Heartbeat, Metadata")}
    for root in roots:
        for each in root.consequences:
            assert root.since_ns - 5e9 <= each.since_ns <= each.until_ns <= root.until_ns + 10e9


def test_the_clients_quota_takes_precedence_over_an_outage_at_the_same_time():
    """All errors are consequences of the quota; without it, those during the outage are consequences of the outage."""
    gone = one("broker_gone", 100, 120, {"broker_id": 1})
    throttled = one("throttled", 50, 200, {"client": "greedy"})
    fenced = one("fenced", 99, 160, {"client": "greedy", "topic": "bulk"}, failed=35, asked=500)
    times = [moment(second, 7, "INVALID_PRODUCER_EPOCH") for second in (99, 105, 110, 115, 160)]
    other = one("throttled", 50, 200, {"client": "other"})
    roots = folded([(gone, ()), (throttled, ()), (other, ()), (fenced, times)])
    told = {(root.kind, dict(root.place).get("client")): len(root.consequences) for root in roots}
    assert told == {("broker_gone", None): 0, ("throttled", "greedy"): 1, ("throttled", "other"): 0}
    (kept,) = (each for root in roots for each in root.consequences)
    assert dict(kept.evidence) == {"failed": 35, "asked": 500}
    roots = folded([(gone, ()), (other, ()), (fenced, times)])
    assert [(root.kind, len(root.consequences)) for root in roots] == [
        ("broker_gone", 1), ("throttled", 0), ("fenced", 0)]  # fmt: skip


@pytest.mark.parametrize(("inside", "outside", "follows"), [(30, 10, True), (10, 30, False)])
def test_a_slow_broker_follows_from_a_standstill_if_most_of_its_slow_requests_do(inside, outside, follows):
    still = one("broker_standing_still", 100, 108, {"broker_id": 3})
    slow = one("slow_broker", 0, 300, {"broker_id": 1}, slow=inside + outside)
    times = [moment(103, inside, "Produce", True), moment(200, outside, "Produce", True)]
    roots = folded([(still, ()), (slow, times)])
    assert len(roots) == (1 if follows else 2)
    (kept,) = [each for root in roots for each in (root, *root.consequences) if each.kind == "slow_broker"]
    assert dict(kept.evidence) == {"slow": 40}  # not divided in either case


def test_retries_and_a_lag_caused_by_an_outage_are_its_consequences():
    """Also retries of a client with too few failures for a finding; not a lag that began long before the outage."""
    gone = one("broker_gone", 100, 120)
    lost = one("coordinator_lost", 100, 118, {"group_id": "g", "broker_id": 2})
    retried = one("resent_not_idempotent", 101, 108, {"client": "pay-writer", "topic": "payments"})
    lags = [one("growing_lag", begin_s, 115, {"group_id": "g", "topic": "t"}) for begin_s in (95, 10)]
    assert [each.kind for each in fold([gone, lost, retried, lags[0]])] == ["broker_gone"]
    assert [each.kind for each in fold([gone, lost, retried, lags[1]])] == ["broker_gone", "growing_lag"]
    later = one("resent_not_idempotent", 125, 128, {"client": "pay-writer", "topic": "payments"})
    assert len(fold([gone, later])) == 2


def test_of_two_severe_causes_the_one_with_more_consequences_comes_first():
    roots = []
    for broker, groups in ((1, 12), (2, 20)):
        roots.append(one("broker_gone", 100 * broker, 100 * broker + 20, {"broker_id": broker}))
        lost = [one("coordinator_lost", 100 * broker, 100 * broker + 9, {"broker_id": broker}) for _ in range(groups)]
        roots += [each._replace(where=f"group {number}") for number, each in enumerate(lost)]
    first, second = ranked(fold(roots), limits())
    assert [dict(each.place)["broker_id"] for each in (first, second)] == [2, 1]
    assert 0 < second.weight < first.weight < 1
