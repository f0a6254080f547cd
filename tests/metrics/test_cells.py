"""Cells of a cluster: what has a label of its own, and what shares one."""

import pytest

from kproxy.metrics import Metrics, cells
from kproxy.wire.interest import Interest


@pytest.fixture
def cluster():
    return Metrics().cluster("east")


def test_leaks_are_counted_by_api_and_those_beyond_the_cap_together(cluster):
    born = list(cluster.leaks)  # at 0
    names = [f"Api{number}" for number in range(cells.MAX_LEAKING_APIS - len(born))]
    assert [cluster.leaked(name) for name in names] == names
    assert [cluster.leaked(name) for name in ("One", "Api3", "More", born[0])] == ["other", "Api3", "other", born[0]]
    expected = dict.fromkeys(born, 0) | {born[0]: 1} | dict.fromkeys(names, 1) | {"Api3": 2, "other": 2}
    assert cluster.leaks == expected


def test_plans_of_the_schema_are_remembered_and_those_of_strangers_are_not(cluster):
    """A peer may use 65,536 unknown APIs and versions; they share a few cells and are looked up each time."""
    broker = cluster.broker("1", "main")
    interest = Interest()
    known = interest.plan(3 << 16 | 9)
    assert cluster.api_cells(broker, known) is broker.apis["Metadata", "9"] is broker.by_plan[known]
    strangers = [
        interest.plan(key << 16 | version) for key in range(9000, 9000 + cells.UNKNOWN_APIS + 5) for version in (0, 1)
    ]
    found = {id(cluster.api_cells(broker, plan)) for plan in strangers}
    assert len(found) == cells.UNKNOWN_APIS + 1
    assert set(broker.apis) == {("Metadata", "9"), ("unknown_other", "unknown")} | {
        (f"unknown_{9000 + number}", "unknown") for number in range(cells.UNKNOWN_APIS)
    }
    assert list(broker.by_plan) == [known]
    newer = interest.plan(3 << 16 | 99)
    assert cluster.api_cells(broker, newer) is broker.apis["Metadata", "unknown"]
    assert list(broker.by_plan) == [known]
