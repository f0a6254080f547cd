"""A peer that causes lines without end fills no disk, and nothing of it is hidden."""

import logging

from kproxy.proxy import lines


def test_one_a_second_of_each_kind_and_how_many_were_left_out(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(lines, "monotonic", lambda: now)
    said = lines.Lines(logging.getLogger("kproxy.test"))
    for _ in range(1000):
        said.say(logging.WARNING, "a", "client %s", "x")
    said.say(logging.ERROR, "b", "another")
    now += 1.0
    for _ in range(2):
        said.say(logging.WARNING, "a", "client %s", "y")
    now += 5.0
    said.say(logging.WARNING, "a", "client %s", "z")
    expected = ["client x", "another", "client y (and 999 more like it)", "client z (and 1 more like it)"]
    assert caplog.messages == expected
