"""The output of `kproxy ctl` for answers of the admin port: durations, tables, values and frames, each as a whole."""

import pytest

from kproxy.views import operator
from kproxy.views.operator import Frames, age, show_table, show_values

S = 10**9


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 s"),
        (0, "0 s"),
        (0.01234, "0.0123 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (60, "1m"),
        (119.9, "1m"),
        (3_599, "59m"),
        (3_600, "1h"),
        (3_660, "1h 1m"),
        (86_399, "23h 59m"),
        (86_400, "1d"),
        (86_400 + 60, "1d 1m"),
        (3 * 86_400 + 4 * 3_600 + 5 * 60, "3d 4h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, said):
    assert age(seconds) == said


def test_times_of_rows_become_durations():
    (row,) = operator.connections([{"connection": 7, "opened_ns": 100 * S}], 165 * S)
    assert row == {"connection": 7, "opened_ns": 100 * S, "age": "1m"}
    last = {"started_ns": 100 * S, "ended_ns": 102 * S, "cause": "join", "reason": "r"}
    running = {"started_ns": 100 * S, "ended_ns": None}
    rows = operator.groups([{"member_count": 3, "last_rebalance": each} for each in (last, running, None)], 165 * S)
    names = ("members", "last_rebalance", "took", "cause", "reason")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (3, "1m ago", "2 s", "join", "r"),
        (3, "1m ago", None, None, None),
        (3, None, None, None, None),
    ]


def test_a_table_has_a_line_for_each_row_and_a_message_if_there_is_none(capsys):
    rows = [{"group_id": "g\x1b[2J", "members": 2, "more": [1, None, "[red]"]}, {"group_id": "[red]", "members": None}]
    show_table(rows, ("group_id", "members", "more"), "no groups")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "group id  members  more",
        'g\\x1b[2J  2        [1, null, "[red]"]',
        "[red]     -        -",
    ]
    show_table([], ("group_id",), "no [red] groups")
    assert capsys.readouterr().out == "no [red] groups\n"


def test_a_long_row_is_not_wrapped_where_the_output_is_no_terminal(capsys):
    show_table([{"reason": "x" * 230}], ("reason",), "")
    assert capsys.readouterr().out.splitlines()[1].rstrip() == "x" * 230


def test_values_are_on_the_line_of_their_name_if_they_are_short(capsys):
    """80 characters of JSON are; a text is cut after 400."""
    fits, long = ["x" * 76], ["x" * 77]
    show_values({"a": fits, "b": long, "c": {"d": long}, "e": "y" * 400, "f": "y" * 401, "g": None, "h\n": True})
    assert capsys.readouterr().out.splitlines() == [
        f'a: ["{"x" * 76}"]',
        "b: ",
        f"  - {'x' * 77}",
        "c: ",
        "  d: ",
        f"    - {'x' * 77}",
        f"e: {'y' * 400}",
        f"f: {'y' * 400}… (401 characters)",
        "g: -",
        "h\\n: true",
    ]
    show_values({"list": [{"name": "z" * 80, "of": 1}, ["w" * 40, "w" * 40]]})
    assert capsys.readouterr().out.splitlines() == [
        "list: ",
        f"  - name: {'z' * 80}",
        "    of: 1",
        f"  - - {'w' * 40}",
        f"    - {'w' * 40}",
    ]


FRAME = {"time_ns": 3_723_456 * 10**6, "connection": 7, "from": "client", "bytes": 12_345}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"tracing": 7, "connections": 1}, ["tracing 7: 1 connection so far; Ctrl-C ends it"]),
        ({"ended": "its time is over", "left_out": 0}, ["its time is over"]),
        ({"ended": "\x1b", "left_out": 2}, ["\\x1b; 2 frames left out, to keep up"]),
        (FRAME, ["01:02:03.456 7 ->   12,345 bytes"]),
        ({**FRAME, "from": "broker", "left_out": "too\nlarge"}, ["01:02:03.456 7 <-   12,345 bytes", "  too\\nlarge"]),
        (
            {
                **FRAME,
                "api": "Fetch",
                "kind": "request",
                "version": 12,
                "header": {"correlationId": 0, "clientId": ""},
                "body": {"maxWaitMs": 0, "topics": [{"topic": "t" * 80}]},
            },
            [
                "01:02:03.456 7 -> Fetch request v12  correlation id 0  client   12,345 bytes",
                "  maxWaitMs: 0",
                "  topics: ",
                f"    - topic: {'t' * 80}",
            ],
        ),
        ({**FRAME, "header": {"clientId": None}}, ["01:02:03.456 7 ->   12,345 bytes"]),
    ],
)
def test_each_line_of_a_trace(line, said, capsys):
    Frames().show(line)
    assert capsys.readouterr().out.splitlines() == said
