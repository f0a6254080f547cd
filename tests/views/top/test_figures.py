"""Figures of `kproxy top`: rates are of what was added between two answers, and a restarted kproxy begins anew."""

from kproxy.views.top.figures import MAX_SLOW, WINDOW_S, Figures

COLUMNS = ("at_us", "connection", "number", "api")


def answer(second, requests, started_ms=1, slow=(), **more):
    state = {"started_ms": started_ms, "now_ms": 1000 * second, "cpu_s": second / 10, "connections": 2}
    totals = [["c", "1", "Produce", requests, 1, 100 * requests, 10, 0, 0, [1, requests]]]
    totals += [["c", "2", "Produce", 5, 0, 0, 0, 0, 0, []], *more.pop("totals", [])]
    rows = {"brokers": [], "errors": [], "topics": [], "clients": [], "groups": [], **more}
    return {
        "state": state,
        "totals": totals,
        "bounds_s": [0.001, 0.002],
        "slow_columns": COLUMNS,
        "slow": list(slow),
        **rows,
    }


def test_rates_are_of_the_window_and_counts_of_all_brokers():
    figures = Figures()
    figures.add(answer(1, 10))
    (row,) = figures.traffic()
    assert (row["requests"], row["requests_per_s"], row["p50_s"]) == (15, 0.0, None)
    new = ["c", "1", "Fetch", 8, 0, 0, 0, 0, 0, [2, 8]]
    figures.add(answer(5, 30, totals=[new]))
    produce, fetch = figures.traffic()
    assert (produce["requests"], produce["requests_per_s"], produce["request_bytes_per_s"]) == (35, 5.0, 500.0)
    assert produce["p50_s"] == 0.0015 and fetch["requests_per_s"] == 2.0
    assert figures.head()["requests"] == 43 and round(figures.head()["cpu_share"], 3) == 0.1
    assert [row["broker"] for row in figures.traffic(("broker",), lambda key: key[2] == "Fetch")] == ["1"]
    for second in range(6, 40):
        figures.add(answer(second, 30))
    assert WINDOW_S <= figures.seconds < WINDOW_S + 2
    assert figures.traffic()[0]["requests_per_s"] == 0.0


def test_the_same_answer_again_is_no_step_and_a_restart_forgets():
    figures = Figures()
    slow = [[7, "3", 1, "Produce"]]
    assert not figures.add(answer(1, 10, slow=slow))
    assert not figures.add(answer(3, 20, slow=slow)) and not figures.add(answer(3, 20, slow=slow))
    assert figures.seconds == 2.0 and figures.slow_after_us == 7 and len(figures.slow()) == 1
    assert figures.add(answer(2, 1, started_ms=2))
    assert (figures.seconds, figures.slow(), figures.traffic()[0]["requests"]) == (0.0, [], 6)
    figures.add(answer(4, 1, started_ms=2, slow=[[number, "3", number, "Fetch"] for number in range(MAX_SLOW + 50)]))
    assert len(figures.slow()) == MAX_SLOW and figures.slow()[0]["at_us"] == MAX_SLOW + 49


def test_rows_that_a_cut_list_had_left_out_have_no_rate():
    figures = Figures()
    figures.add(answer(1, 10, errors=[["c", "1", "Produce", f"E{number}", 5] for number in range(100)]))
    figures.add(answer(2, 10, errors=[["c", "1", "Produce", "NEW", 900], ["c", "1", "Produce", "E1", 7]]))
    assert [(row["error"], row["answers_per_s"]) for row in figures.errors()] == [("NEW", 0.0), ("E1", 2.0)]
