"""Tables in the terminal: units by a column's name, any width, and text from the wire that stays text."""

import sys

import pytest

from kproxy.analysis import engine
from kproxy.views import answers


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("p99_ns", 12_345_678, "12.3 ms"),
        ("p99_ns", 999, "999 ns"),
        ("p99_ns", 0, "0"),
        ("longest_gap_ns", 1_819_000_000_000, "30.3 min"),
        ("life_p50_ns", 9_000_000_000_000, "2.50 h"),
        ("max_throttle_ms", 2141, "2.14 s"),
        ("bytes", 2_279_012, "2.28 MB"),
        ("bytes_per_record", 326.88, "327 B"),
        ("empty_share", 0.399, "39.9%"),
        ("gap_bytes", 0, "0"),
        ("per_minute", 0.2, "0.20"),
        ("records", 10_027, "10,027"),
        ("connection", 259142099832, "259142099832"),
        ("number", 1760, "1760"),  # as --number takes it
        ("port", 9092, "9092"),
        ("broker_id", 1001, "1001"),
        ("started_ns", 1_763_718_150_123_456_789, "2025-11-21 09:42:30.123Z"),
        ("growing", True, "yes"),
        ("client", "kaffee-für-zwei", "kaffee-für-zwei"),
        ("client", "[/red]", "[/red]"),
        ("client", "a\x1b[2Jb\n", "a\\x1b[2Jb\\n"),
        ("client", None, ""),
    ],
)
def test_units(name, value, said):
    assert answers.text(name, value) == said


@pytest.mark.parametrize(("name", "said"), [("time", "2026-11-21 09:49:31.159"), ("first", "2026-11-21 09:49:31.159")])
def test_times(name, said):
    assert answers._cell(engine.Column(name, engine.TIME), "2026-11-21T09:49:31.159568Z") == said
    assert answers._cell(engine.Column(name, engine.TIME), None) == ""


def test_headers_say_utc_and_differ():
    names = ["time", "total_ns", "broker", "broker_ns", "throttle_ms", "max_wait_ms"]
    kinds = ["time", "integer", "text", "integer", "integer", "integer"]
    titles = [answers._title(name, kind, names) for name, kind in zip(names, kinds, strict=True)]
    assert titles == ["time_UTC", "total", "broker", "broker_time", "throttle", "max_wait"]


def columns():
    def column(title, left, *cells):
        return answers._Column(title, left, list(cells), title in answers.SENTENCES)

    return [
        column("client", True, "consumer-1", "x" * 40),
        column("first_lag_records", False, "1", "12,345"),
        column("explanation", True, "waited for data, of which there was none", "the broker"),
        column("connection", False, "1" * 19, "2"),
    ]


def plain(width, made=None):
    return [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in answers.lines(made or columns(), width)]


def test_a_wide_table_has_a_line_per_row():
    assert plain(None) == plain(200)
    head, first, second = plain(None)
    assert head.split() == ["client", "first_lag_records", "explanation", "connection"]
    assert first.startswith("consumer-1 ") and first.endswith("1" * 19) and second.split()[:2] == ["x" * 40, "12,345"]


def test_a_narrow_one_breaks_its_headers_then_sentences_then_leaves_columns_out():
    for width in range(30, 130):
        lines = plain(width)
        assert all(len(line) <= width for line in lines if not line.startswith("Left out")), width
    broken = plain(119)  # one less than all of it in one line each
    assert [line.split() for line in broken[:2]] == [["first"], ["lag"]] and len(broken) == 5
    assert broken[2].split() == ["client", "records", "explanation", "connection"]
    below = plain(75)
    assert "    waited for data, of which there was none" in below and not any("Left out" in line for line in below)
    cropped = plain(60)
    assert f"{'x' * 18}…{'x' * 9} " in cropped[-2] + cropped[-3]  # 28 of 40: without its middle
    narrow = plain(30)
    words = "Left out, since the terminal is narrow: first_lag_records, connection. `| less -S` shows all."
    assert " ".join(narrow[-4:]) == words


def test_no_line_ends_with_blanks():
    """Piped output has no padding; here the last column's cells differ in length."""
    for width in (None, *range(30, 130)):
        assert not [line for line in plain(width, columns()[::-1]) if line.endswith(" ")], width


def test_the_connection_and_number_that_show_takes_are_never_left_out():
    made = [*columns(), answers._Column("number", False, ["7", "8"], False)]
    lines = list(answers.lines(made, 44))
    assert "    connection 1111111111111111111, number 7" in lines and "    connection 2, number 8" in lines
    assert not any("connection" in line for line in lines if "Left out" in line)


def test_columns_with_one_value_in_all_rows_are_left_out_first():
    """Only where the terminal is narrow, and there are rows to compare."""

    def column(title, *cells):
        return answers._Column(title, True, list(cells), False)

    def shown(width, rows):
        cells = {"cluster": "default", "strategy": "", "group_id": "billing", "worst_cause": "session_expired"}
        different = {"group_id": ["billing", "orders"], "worst_cause": ["session_expired", "member_left"]}
        made = [column(name, *different.get(name, [cell] * 2)[:rows]) for name, cell in cells.items()]
        return [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in answers.lines(made, width)]

    assert shown(80, 2)[0].split() == ["cluster", "strategy", "group_id", "worst_cause"]
    narrow = shown(30, 2)
    assert narrow[0].split() == ["group_id", "worst_cause"]
    assert narrow[3:] == ["In all rows: cluster default.", "Empty: strategy."]
    assert "cluster" in shown(40, 1)[0] + shown(40, 1)[1]


def test_a_date_that_all_share_and_the_middle_of_ids_give_way():
    """Assignments at 80 columns: members and partitions stay, and ids made by libraries are shortened."""

    def column(title, left, *cells):
        return answers._Column(title, left, list(cells), False)

    def shown(width, *dates):
        made = [
            column("time_UTC", True, *(f"{date} 01:45:5{n}.624" for n, date in enumerate(dates))),
            column("cluster", True, "default", "default"),
            column("group_id", True, "billing", "orders"),
            column("error", True, "UNKNOWN_TOPIC_OR_PARTITION", "NONE"),
            column("partitions", False, "7", "4"),
            column("member_id", True, *(f"c{n}-c687c374-4844-42d4-bd5f-43de711a3fe{n}" for n in (1, 2))),
        ]
        return [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in answers.lines(made, width)]

    lines = shown(80, "2026-11-22", "2026-11-22")
    assert lines[0].split() == ["time_UTC", "group_id", "error", "partitions", "member_id"]
    words = ["01:45:50.624", "billing", "UNKNOWN_TOPIC_OR_PARTITION", "7", "c1-c687c3…3fe1"]
    assert lines[1].split() == words
    assert lines[3:] == ["All times are of 2026-11-22.", "In all rows: cluster default."]
    several = shown(80, "2026-11-22", "2026-11-23")
    assert any(line.startswith("2026-11-22 01:45:50.624") for line in several)
    assert not any("All times" in line for line in several)
    assert "All times" not in "".join(shown(160, "2026-11-22", "2026-11-22"))


def test_lines_fit_into_a_terminal_and_stay_whole_elsewhere(monkeypatch, tmp_path):
    line = "warning   Protocol versions that newer brokers dropped: client console-consumer-90373"
    with (tmp_path / "out").open("w") as file:
        assert answers.wrapped(line, file, 10) == [line]
    monkeypatch.setattr(answers, "width_of", lambda file: 80)
    first = "warning   Protocol versions that newer brokers dropped: client"
    assert answers.wrapped(line, sys.stdout, 10) == [first, f"{' ' * 10}console-consumer-90373"]


def test_a_comparison_names_captures_of_different_length():
    """By any row whose group is in that capture; steps of time have one length."""

    def row(count, rate, other_count, other_rate):
        names = ("exchanges", "exchanges_per_second", "b_exchanges", "b_exchanges_per_second")
        return dict(zip(names, (count, rate, other_count, other_rate), strict=True))

    rows = [row(None, None, 60, 2.0), row(100, 10.0, None, None)]
    assert answers.lengths(rows) == "This capture lasts 10.0 s, the other 30.0 s: compare rates per second, not totals."
    assert [answers.lengths(each) for each in ([], rows[:1], [row(100, 10.0, 108, 10.0)])] == ["", "", ""]


def test_a_code_that_is_no_error_of_kafka_is_shown_in_words():
    """Conditions and JSON keep the values; a name of Kafka's stays."""
    said = [answers.text("error", value) for value in ("inside_answer", "not_missed", "NOT_COORDINATOR", None)]
    assert said == ["errors inside the answer", "no answer, nobody waited for it", "NOT_COORDINATOR", ""]
    assert answers.text("topic", "not_missed") == "not_missed"
