"""What is counted of a passive kproxy begins at nothing and never goes back."""

from kproxy.metrics.passive import PassiveCells


def test_findings_are_known_kinds_and_only_grow():
    cells = PassiveCells("eth0", ["gap", "stray"])
    one = cells.interfaces["eth0"]
    assert (one.packets, one.dropped, one.is_up) == (0, 0, True)
    assert (cells.duplicates, cells.behind_ns, cells.copies) == (0, 0, {})
    assert cells.found() == {"gap": 0, "stray": 0}
    for now, known in (({"gap": 3, "unheard of": 1}, 3), ({"gap": 1}, 3), ({"gap": 4}, 4)):  # 1: of another capture
        cells.findings = now.copy
        assert cells.found() == {"gap": known, "stray": 0}
