"""Terminals on which screens are drawn, and text that cannot move a cursor."""

import io

import pytest
from rich.console import Console

from kproxy.views.progress import bar
from kproxy.views.terminal import can_redraw, printable


@pytest.mark.parametrize(
    ("terminal", "environment", "can"),
    [
        (True, {"TERM": "xterm-256color"}, True),
        (False, {"TERM": "xterm-256color"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
    ],
)
def test_screens_only_where_they_can_be_drawn(monkeypatch, capsys, terminal, environment, can):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert can_redraw(Console(file=io.StringIO(), force_terminal=terminal)) == can
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with bar() as advance:
        assert (advance is not None) == can
        if advance is not None:
            advance("x.pcap", 1, 2)
    assert ("\x1b" in capsys.readouterr().err) == can


def test_the_name_of_a_file_moves_no_cursor():
    assert printable("a\x1b[2J\n\udcffé") == "a\\x1b[2J\\n\\udcffé"
