"""Dials are counted by broker, with bounded series that exist before the first dial, and by known causes."""

from kproxy.metrics.counters import upstream
from kproxy.metrics.counters.bounds import DURATION_NS
from kproxy.metrics.counters.upstream import UpstreamCells


def test_brokers_that_may_be_dialled_have_series_up_to_a_bound_and_those_that_are_always(monkeypatch):
    monkeypatch.setattr(upstream, "MAX_BORN", 3)
    cells = UpstreamCells(("refused", "other"), lambda: None)
    for broker in "abcde":
        cells.broker_known(broker)
    assert list(cells.dials) == ["a", "b", "c"]
    assert all(dial.failures == {"refused": 0, "other": 0} and not sum(dial.duration) for dial in cells.dials.values())
    cells.dialled("x", DURATION_NS[2])
    cells.dialled("x", DURATION_NS[2] + 1)
    cells.dial_failed("y", "refused")
    cells.dial_failed("y", "unheard of")
    cells.broker_known("z")
    assert list(cells.dials) == ["a", "b", "c", "x", "y"]
    assert cells.dials["x"].duration[2:4] == [1, 1] and sum(cells.dials["x"].duration) == 2
    assert cells.dials["x"].duration_ns == 2 * DURATION_NS[2] + 1
    assert cells.dials["y"].failures == {"refused": 1, "other": 1}
    cells.loop_refused()
    assert cells.loops == 1
