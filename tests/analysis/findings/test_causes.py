"""Each edge of the graph explains what lies near it, and nothing that is elsewhere or at another time."""

import pytest

from kproxy.analysis.findings import KINDS
from kproxy.analysis.findings.causes import BEGINS, EDGES, EVER, folded
from kproxy.analysis.findings.finding import Finding, found

SECOND_US = 1_000_000
PLACE = {"broker_id": 2, "broker": "10.0.0.2:9092", "topic": "orders", "client": "app", "group_id": "g"}
OTHER = {"broker_id": 3, "broker": "10.0.0.3:9092", "topic": "else", "client": "other", "group_id": "h"}


def one(kind: str, begin_s: float, end_s: float, place: dict = PLACE, severity: str = "warning", **evidence) -> Finding:
    times = round(begin_s * SECOND_US), round(end_s * SECOND_US)
    return found(kind, severity, 0.1, "default", f"{kind} somewhere", place, times, evidence)


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.cause}-{edge.consequence}-{edge.when}")
def test_an_edge_holds_where_and_when_it_says(edge):
    cause = one(edge.cause, 1000, 1020, behind_records=5000)
    place = {} if "everywhere" in edge.same else PLACE
    consequence = one(edge.consequence, 1005, 1030, place, severity="critical", last_lag_records=5000)
    (root,) = folded([cause, consequence])
    assert root.kind == edge.cause and [each.kind for each in root.consequences] == [edge.consequence]
    assert root.severity == "critical" and root.change and not root.consequences[0].change
    if "held_back" in edge.same:
        assert len(folded([cause, one(edge.consequence, 1005, 1030, last_lag_records=50_000)])) == 2
    elsewhere = [each for each in EDGES if each[:2] == edge[:2] and not each.same]
    if edge.same and not elsewhere:
        assert len(folded([cause, one(edge.consequence, 1005, 1030, OTHER, last_lag_records=5000)])) == 2
    if edge.when != EVER:
        assert len(folded([cause, one(edge.consequence, 2000, 2010, place, last_lag_records=5000)])) == 2
    before = one(edge.consequence, 900, 1030, last_lag_records=5000)
    others = [each for each in EDGES if each[:2] == edge[:2] and each.when != BEGINS]
    if edge.when == BEGINS and not others:
        assert len(folded([cause, before])) == 2  # it began before its cause
    assert folded([cause._replace(cluster="another"), consequence])[0].consequences == ()


def test_edges_are_of_kinds_and_make_no_circle():
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


def test_what_follows_from_a_consequence_is_folded_into_the_root():
    """A transaction holds the offset, the offset holds the reader; of two brokers that with the same id explains."""
    chain = [
        one("open_transaction", 0, 100, {"topics": ["orders"]}),
        one("stuck_stable_offset", 2, 100, {"topic": "orders"}, behind_records=9000),
        one("growing_lag", 3, 100, {"topic": "orders", "client": "reader"}, last_lag_records=9000),
        one("growing_lag", 3, 100, {"topic": "orders", "client": "slow"}, last_lag_records=90_000),
    ]
    roots = {each.kind: each for each in folded(chain)}
    assert [each.kind for each in roots["open_transaction"].consequences] == ["growing_lag", "stuck_stable_offset"]
    assert dict(roots["growing_lag"].place)["client"] == "slow"
    brokers = [one("broker_gone", 10, 20, OTHER), one("broker_standing_still", 9, 21)]
    first, second = folded([*brokers, one("client_timeouts", 12, 15)])
    assert not first.consequences and second.consequences
    assert Finding.of(second.as_dict()) == second
