"""A peer that causes lines without end fills neither disk nor memory, and nothing of it is hidden."""

import logging

from kproxy.proxy import log_limiter


def test_one_a_second_of_each_kind_and_how_many_were_left_out(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(log_limiter, "monotonic", lambda: now)
    limiter = log_limiter.LogLimiter(logging.getLogger("kproxy.test"))
    for _ in range(1000):
        limiter.log(logging.WARNING, "a", "client %s", "x")
    limiter.log(logging.ERROR, "b", "another")
    now += 1.0
    for _ in range(2):
        limiter.log(logging.WARNING, "a", "client %s", "y")
    now += 5.0
    limiter.log(logging.WARNING, "a", "client %s", "z")
    expected = ["client x", "another", "client y (and 999 more like it)", "client z (and 1 more like it)"]
    assert caplog.messages == expected


def test_kinds_without_end_are_few_lines_and_little_memory(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(log_limiter, "monotonic", lambda: now)
    limiter = log_limiter.LogLimiter(logging.getLogger("kproxy.test"))
    for number in range(5 * log_limiter.MAX_KINDS):
        limiter.log(logging.WARNING, number, "broker %d", number)
    assert len(caplog.messages) == log_limiter.MAX_KINDS + 1
    assert len(limiter._last) <= log_limiter.MAX_KINDS + 1
    now += 1.0
    limiter.log(logging.WARNING, "later", "later")
    assert caplog.messages[-1] == "later"
    assert len(limiter._last) == 1
