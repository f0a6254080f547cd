"""Cells of two processes, added, are those of one that counted the events of both."""

import pickle

from kproxy.metrics import Metrics
from kproxy.metrics.processes.units import add, units
from kproxy.wire.events import Exchange
from kproxy.wire.interest import Interest
from tests.metrics.counters.test_slow import MS, exchange
from tests.metrics.test_metrics import info

INTEREST = Interest()
PRODUCE, METADATA, FETCH = (INTEREST.plan(key << 16 | version) for key, version in ((0, 9), (3, 9), (1, 12)))


def some(number: int, plan: object, *errors: int) -> Exchange:
    one = exchange(plan, (number + 1) * 3 * MS, max_wait_ms=4 if plan is FETCH else None)
    one.errors, one.throttle_ms, one.request_bytes = errors, number % 3 * 50, 100 * (number + 1)
    return one


EVENTS = [some(0, PRODUCE, 6, 6), some(1, PRODUCE), some(2, METADATA, 3), some(3, FETCH), some(4, PRODUCE, 7)]


def counted(*events: Exchange) -> dict[tuple[str, ...], bytes]:
    metrics = Metrics()
    metrics.started_ns = metrics.clock_offset_ns = 0
    metrics.connection(info(), "main", "1").events(list(events))
    return {path: pickle.dumps(unit) for path, unit in units(metrics)}


def comparable(unit: object) -> object:
    if isinstance(unit, dict):
        return {key: comparable(value) for key, value in unit.items()}
    if isinstance(unit, list | tuple):
        return [comparable(value) for value in unit]
    names = getattr(type(unit), "__slots__", None) or getattr(unit, "__dict__", {})
    return {name: comparable(getattr(unit, name)) for name in names} if names else unit


def test_any_share_of_the_events_adds_up() -> None:
    whole = {path: comparable(pickle.loads(data)) for path, data in counted(*EVENTS).items() if path[0] == "api"}
    assert {path[-2] for path in whole} >= {"Produce", "Metadata", "Fetch"}
    for share in range(1 << len(EVENTS)):
        parts = [
            counted(*(event for number, event in enumerate(EVENTS) if (share >> number & 1) == which))
            for which in (0, 1)
        ]
        for path, expected in whole.items():
            found = [pickle.loads(part[path]) for part in parts if path in part]
            assert comparable(found[0] if len(found) == 1 else add(*found)) == expected, (share, path)
            if len(found) == 2:
                assert comparable(found[0]) == comparable(pickle.loads(parts[0][path]))  # neither is changed
                assert comparable(found[1]) == comparable(pickle.loads(parts[1][path]))
