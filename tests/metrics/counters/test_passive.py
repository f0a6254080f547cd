"""Counters of a passive kproxy begin at 0 and never fall."""

from kproxy.metrics.counters.passive import PassiveCells
from kproxy.metrics.scrape.passive_families import passive_families


def test_findings_are_known_kinds_and_only_grow():
    cells = PassiveCells("eth0", ["gap", "stray"])
    one = cells.interfaces["eth0"]
    assert (one.packets, one.dropped, one.is_up) == (0, 0, True)
    assert (cells.duplicates, cells.behind_ns, cells.copies) == (0, 0, {})
    assert cells.found() == {"gap": 0, "stray": 0}
    for now, known in (({"gap": 3, "unheard of": 1}, 3), ({"gap": 1}, 3), ({"gap": 4}, 4)):  # 1: of another capture
        cells.findings = now.copy
        assert cells.found() == {"gap": known, "stray": 0}


def test_each_value_is_exposed_under_its_name():
    cells = PassiveCells("eth0", ["gap"])
    one = cells.interfaces["eth0"]
    one.packets, one.dropped, one.is_up = 11, 12, True
    cells.duplicates, cells.behind_ns = 13, 2_500_000_000
    cells.copies["east"] = 14
    cells.findings = lambda: {"gap": 15}
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in passive_families(cells)
        for sample in family.samples
    }
    assert found == {
        ("kproxy_watch_packets_total", "eth0"): 11,
        ("kproxy_watch_dropped_packets_total", "eth0"): 12,
        ("kproxy_watch_interface_up", "eth0"): 1,
        ("kproxy_watch_duplicate_packets_total",): 13,
        ("kproxy_watch_copied_connections_total", "east"): 14,
        ("kproxy_watch_findings_total", "gap"): 15,
        ("kproxy_watch_delay_seconds",): 2.5,
    }
