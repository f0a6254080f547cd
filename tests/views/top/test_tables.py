"""How rows become cells and lines: what fits, what comes first, and that no name does harm."""

import pytest
from rich.cells import cell_len

from kproxy.admin.live import MAX_ROWS
from kproxy.admin.page import load_page
from kproxy.views.top.figures import AtLeast, Figures
from kproxy.views.top.tables import LARGEST, TABLES, as_text, fitting, left_out, matching, ordered, plain
from tests.views.top.test_figures import answer

HOSTILE = [
    "[red]x[/red]",
    "a\x1b[2J\r\nb",
    "\u202eabc",
    "\u05e9\u05dc\u05d5\u05dd",
    "z\u0301\u0301\u0301",
    "w" * 10_000,
]
HOSTILE += ["\u6f22\u5b57" * 200, "", None, "\ud800"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_stays_in_its_cell(name):
    table = TABLES["clients"]
    row = {"cluster": "c", "client_id": name, "software": name, "version": name, "connections": 3}
    for width in (40, 80, 120, 200):
        head, line = as_text(table, [row], width)
        assert cell_len(line) <= width and line.isprintable() and line.endswith("3")
        line.encode()
    assert cell_len(head.rstrip()) <= 200
    assert len(plain(name or "")) <= 10 * 300 + 1
    assert "[red]" in plain(HOSTILE[0])


def test_the_least_needed_columns_are_left_out_first():
    row = dict.fromkeys(column.key for column in TABLES["connections"].columns) | {"cluster": "one", "requests": 12_345}
    keys = {
        width: [column.key for column, _ in fitting(TABLES["connections"], [row], width)] for width in (60, 80, 200)
    }
    assert {"client", "client_id", "requests_pending"} <= set(keys[60]) < set(keys[80]) < set(keys[200])
    assert "cluster" not in keys[200]
    several = [row, row | {"cluster": "two"}]
    assert "cluster" in [column.key for column, _ in fitting(TABLES["connections"], several, 200)]


def test_the_type_of_a_group_fits_into_80_columns():
    shown = {"group": "payments-reconciliation", "state": "PreparingRebalance", "protocol": "classic", "members": 12}
    row = shown | {"type": "consumer", "generation": 1234, "rebalances": 345, "rebalance_s": 3.0, "refused": 7}
    row |= {"cluster": "one", "max_lag_records": None, "lag_unknown_partitions": 0}
    head, line = list(as_text(TABLES["groups"], [row], 80))
    assert head.split() == ["group", "state", "protocol", "type", "members", "rebalances", "max", "lag"]
    assert line.split() == ["payments-reco…", "Prepari…", "classic", "consumer", "12", "345", "–"]
    assert max(len(head), len(line)) <= 80
    narrow = [column.key for column, _ in fitting(TABLES["groups"], [row], 60)]
    assert "type" in narrow and "protocol" not in narrow


def test_rows_without_a_value_come_last_and_equal_rows_keep_their_order():
    values = {"b": None, "d": 1, "c": 3, "a": 1}
    rows = [{"api": api, "p50_s": value} for api, value in values.items()]
    assert [row["api"] for row in ordered(TABLES["apis"], rows, "p50_s", True)] == ["c", "a", "d", "b"]
    assert [row["api"] for row in ordered(TABLES["apis"], rows, "p50_s", False)] == ["a", "d", "c", "b"]
    assert [row["api"] for row in matching(TABLES["apis"], rows, "C")] == ["c"]


def test_a_finding_is_shown_from_its_title_to_its_remedy_with_units():
    evidence = {"connections": 185, "per_minute": 164.16572672866064, "life_p50_ns": 5452631027, "closed_share": 0.25}
    row = {"kind": "connection_churn", "rank": 1, "weight": 0.016416572672866066, "place": {"client": None}}
    row |= {"title": "Connections that come and go", "where": "all clients", "evidence": evidence, "job": "connections"}
    place = TABLES["findings"].opens(row)
    lines = {each["name"]: each["value"] for each in TABLES[place.table].rows(None, *place.of)}
    assert next(iter(lines)) == "what" and lines["what"] == "Connections that come and go"
    text = " ".join(each["value"] for each in TABLES[place.table].rows(None, *place.of))
    shown = list(as_text(TABLES[place.table], TABLES[place.table].rows(None, *place.of), 80))
    assert not [line for line in shown if line.startswith("–")]  # a line that goes on is no value without a name
    assert "connections 185, per minute 164, life p50 5.45 s, closed share 25.0%" in text
    assert not {"weight", "rank", "place", "kind"} & set(lines)
    assert list(lines.items())[-1] == ("ask a recording", "kproxy analyze connections TABLES")


def test_tables_that_a_kproxy_did_not_send_are_named():
    figures = Figures()
    rows = [["c", f"t{number}", 1, 1, 1, 1] for number in range(LARGEST)]
    lags = [["c", "group", f"g{number}", "idle", 7, 1.0, 0] for number in range(LARGEST)]
    figures.add(answer(1, 1, topics=rows, lags=lags[1:]))
    assert left_out(figures, "topics", figures.topics()) == "the 100 with the most bytes"
    assert len(figures.topics()) == LARGEST + 1  # a topic that may have fallen out, of which a lag is known
    assert not left_out(figures, "groups", figures.groups()) and not left_out(figures, "lags", figures.lags())
    assert not left_out(figures, "slow", rows)
    assert left_out(figures, "connections", [{}]) == "the oldest 1 of 2" and not left_out(figures, "connections", rows)
    figures.add(answer(2, 1, topics=rows[1:], lags=lags))
    for name in ("topics", "groups", "lags"):
        assert left_out(figures, name, ()) == "the 100 largest lags of all consumers"
    page = load_page()
    assert LARGEST == MAX_ROWS and page is not None and f"MOST = {MAX_ROWS}," in page["page.js"].body.decode()


def test_an_unknown_lag_is_shown_as_unknown_and_comes_before_no_lag():
    lags = (("at its end", 0, 0), ("behind", 7, 0), ("unknown", None, 2), ("in part", AtLeast(0), 3), ("none", None, 0))
    names = "group", "max_lag_records", "lag_unknown_partitions"
    rows = [dict(zip(names, values, strict=True)) for values in lags]
    down = ordered(TABLES["groups"], rows, "max_lag_records", True)
    assert [row["group"] for row in down] == ["behind", "in part", "unknown", "at its end", "none"]
    shown = [line.split("  ")[-1].strip() for line in as_text(TABLES["groups"], down, 200)]
    assert shown == ["max lag", "7", "≥ 0", "unknown", "0", "–"]
