"""Metrics of reloads."""

from kproxy.metrics.counters.reloads import ReloadCells


def test_a_refused_reload_leaves_the_settings_that_were_loaded_before():
    cells = ReloadCells(5)
    assert (cells.last_successful, cells.loaded_ns, set(cells.outcomes.values())) == (True, 5, {0})
    told = []
    for now, outcome in enumerate(("applied", "refused", "refused", "unchanged"), 10):
        cells.count(outcome, now)
        told.append((cells.last_successful, cells.loaded_ns))
    assert told == [(True, 10), (False, 10), (False, 10), (True, 13)]
    assert cells.outcomes == {"applied": 1, "unchanged": 1, "refused": 2}
