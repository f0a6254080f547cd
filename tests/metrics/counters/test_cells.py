"""Cells: own labels up to a limit and a shared one beyond it, and expiry of idle cells.

Each row of BOUNDS is one limit: for a count of things, how many get their own label.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from kproxy.metrics import Metrics, figures
from kproxy.metrics.counters import cells, groups, named, upstream
from kproxy.metrics.counters.groups import GroupCells, InsightCells
from kproxy.metrics.counters.named import MAX_LABEL, ClientCells, TopicCells, Topics
from kproxy.metrics.counters.upstream import UpstreamCells
from kproxy.protocol.error_codes import ERRORS
from kproxy.wire.interest import Interest

PLANS = Interest()
CODES = sorted(code for code in ERRORS if code)
SECOND = 10**9


def cluster() -> cells.ClusterCells:
    return Metrics().cluster("demo")


def errors(first_unknown: int | None, count: int) -> tuple[int, int]:
    of = cluster()
    counted = cells.ApiCells("Fetch")
    codes = CODES[:count] if first_unknown is None else range(first_unknown, first_unknown + count)
    for code in codes:
        of.count_errors(counted, (code, code))
    others = (cells.OTHER_ERROR, cells.UNKNOWN_OTHER_ERROR)
    return len(counted.errors.keys() - set(others)), sum(counted.errors.get(each, 0) for each in others) // 2


def labels(plans: list[Any], other: str) -> tuple[int, int]:
    of = cluster()
    found = [of.api_label(plan) for plan in plans * 2]
    assert found[: len(plans)] == found[len(plans) :]
    return len({*found} - {other}), found.count(other) // 2


def rare(count: int) -> tuple[int, int]:
    """APIs outside EVERYDAY_APIS."""
    every = [PLANS.plan(key << 16) for key in range(90)]
    return labels([plan for plan in every if plan.known and plan.api not in cells.EVERYDAY_APIS][:count], "other")


def unknown(count: int) -> tuple[int, int]:
    return labels([PLANS.plan(key << 16) for key in range(9000, 9000 + count)], "unknown_other")


def expected(count: int) -> tuple[int, int]:
    of = cluster()
    for number in range(count):
        of.expect(str(number), "main")
    of.expect("0", "other")
    assert of.brokers["0"].open.keys() == {"main", "other"}
    return len(of.brokers), count - len(of.brokers)


def dialled(count: int) -> tuple[int, int]:
    of = UpstreamCells(("refused",), lambda: pytest.fail("asked"))
    for number in range(count):
        of.broker_known(str(number))
    return len(of.dials), count - len(of.dials)


def partitions(count: int) -> tuple[int, int]:
    of = InsightCells()
    for number in range(count):
        of.leadership("orders", number, "offline", None, 1)
    assert of.offline == of.shrunk
    for number in range(count):
        of.leadership("orders", number, "elected", 1, 1)
    assert of.offline == 0 < of.shrunk
    return of.shrunk, count - of.shrunk


def ids(count: int) -> tuple[int, int]:
    of = Topics()
    for number in range(count):
        of._learn({UUID(int=number): "t"})
    assert UUID(int=count - 1) in of.names
    return len(of.names), count - len(of.names)


def series(count: int) -> tuple[int, int]:
    """Rows of a sample of the page: those beyond the largest are summed by API."""
    metrics, history = Metrics(), figures.History()
    history.close(metrics, {}, SECOND)
    found = {("demo", str(number), "Fetch"): figures.Total() for number in range(count)}
    for total in found.values():
        total.requests = 1
    history.close(metrics, found, 2 * SECOND)
    shown = len(history.series.names) - 1
    return (shown, 0) if ("demo", "other", "Fetch") not in history.series.names else (shown - 1, count - shown + 1)


class Bound(NamedTuple):
    where: Any
    name: str
    count: Callable[[int], tuple[int, int]]  # count of things -> (with their own label, sharing one)
    before: int = 0  # labels that always exist
    kept: int | None = None  # own labels beyond the limit; None: unchanged


BOUNDS = {
    "errors": Bound(cells, "MAX_ERRORS", lambda count: errors(None, count)),
    "unknown errors": Bound(cells, "UNKNOWN_ERRORS", lambda count: errors(3000, count)),
    "unknown errors among all": Bound(cells, "MAX_ERRORS", lambda count: errors(3000, count)),
    "APIs": Bound(cells, "MAX_APIS", rare, len(cells.EVERYDAY_APIS)),
    "unknown APIs": Bound(cells, "UNKNOWN_APIS", unknown),
    "brokers": Bound(cells, "MAX_BORN", expected),
    "dialled brokers": Bound(upstream, "MAX_BORN", dialled),
    "partitions": Bound(groups, "MAX_PARTITIONS", partitions),
    "topic ids": Bound(named, "MAX_NAMES", ids),
    "rows of a sample": Bound(figures, "MAX_SERIES", series, 0, figures.NAMED_SERIES),
}


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_things_have_their_own_label_up_to_a_limit_and_share_one_beyond(bound, monkeypatch):
    room = 3 if bound.kept is None else 40
    monkeypatch.setattr(bound.where, bound.name, bound.before + room)
    for count in (room - 1, room, room + 1, room + 3):
        own = count if count <= room else room if bound.kept is None else bound.kept
        assert bound.count(count) == (own, count - own), count


@pytest.mark.parametrize("length", [MAX_LABEL - 1, MAX_LABEL, MAX_LABEL + 1])
def test_names_that_differ_only_beyond_the_longest_label_share_a_series(length):
    """No real topic name is that long, so invented ones share a series."""
    topics = Topics()
    for end in "ab":
        topics.produced("t" * (length - 1) + end, 5, 1, (), SECOND)
    assert [len(topic) for topic in topics.top.cells] == ([length] * 2 if length <= MAX_LABEL else [MAX_LABEL])
    assert sum(each.request.bytes for each in topics.top.cells.values()) == 10


def seen(make: Any, **fields: Any) -> Any:
    made = make()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("cell", "idle_ns"), [
    (seen(TopicCells, seen_ns=SECOND), named.EXPIRY_NS),
    (seen(ClientCells, left_ns=SECOND), named.EXPIRY_NS),
    (seen(GroupCells, seen_ns=SECOND, members=1), groups.EXPIRY_NS),
    (seen(GroupCells, seen_ns=SECOND), groups.EMPTY_EXPIRY_NS),
    (seen(ClientCells, left_ns=SECOND, open=1), None),
], ids=["topic", "client", "group", "empty group", "connected client"])  # fmt: skip
def test_idle_cells_are_exposed_exactly_until_they_expire(cell, idle_ns):
    last_ns = SECOND + (idle_ns or 10**18)
    assert [cell.is_gone(last_ns + more) for more in (-1, 0, 1)] == [False, False, idle_ns is not None]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_errors_of_one_response_are_counted_the_same_for_any_number(count):
    of, counted = cluster(), cells.ApiCells("Fetch")
    codes = (6, 3, 6, 9999)
    of.count_errors(counted, tuple(codes[at % 4] for at in range(count)), 2)
    assert counted.errors == {
        code: 2 * sum(codes[at % 4] == code for at in range(count)) for code in codes[: min(count, 4)]
    }


def test_leaks_are_counted_by_api_up_to_a_limit_and_together_beyond():
    of = cluster()
    born = list(of.leaks)  # at 0
    names = [f"Api{number}" for number in range(cells.MAX_LEAKING_APIS - len(born))]
    assert [of.leaked(name) for name in names] == names
    assert [of.leaked(name) for name in ("One", "Api3", "More", born[0])] == ["other", "Api3", "other", born[0]]
    expected = dict.fromkeys(born, 0) | {born[0]: 1} | dict.fromkeys(names, 1) | {"Api3": 2, "other": 2}
    assert of.leaks == expected


def test_plans_of_the_schema_are_cached_and_those_of_unknown_apis_are_not():
    """A peer may use 65,536 unknown APIs and versions; they share a few cells and are looked up each time."""
    of = cluster()
    broker = of.broker("1", "main")
    interest = Interest()
    known = interest.plan(3 << 16 | 9)
    assert of.api_cells(broker, known) is broker.apis["Metadata", "9"] is broker.by_plan[known]
    strangers = [
        interest.plan(key << 16 | version) for key in range(9000, 9000 + cells.UNKNOWN_APIS + 5) for version in (0, 1)
    ]
    found = {id(of.api_cells(broker, plan)) for plan in strangers}
    assert len(found) == cells.UNKNOWN_APIS + 1
    assert set(broker.apis) == {("Metadata", "9"), ("unknown_other", "unknown")} | {
        (f"unknown_{9000 + number}", "unknown") for number in range(cells.UNKNOWN_APIS)
    }
    assert list(broker.by_plan) == [known]
    newer = interest.plan(3 << 16 | 99)
    assert of.api_cells(broker, newer) is broker.apis["Metadata", "unknown"]
    assert list(broker.by_plan) == [known]
