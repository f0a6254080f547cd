"""Figures of `kproxy top`: a rate is the difference of two answers, and starts again with a restarted kproxy."""

from kproxy.views.top.figures import MAX_SLOW, WINDOW_S, AtLeast, Figures
from kproxy.views.top.source import Source
from kproxy.views.top.tables import TABLES, as_text, is_idle

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
    assert (produce["recent_requests_per_s"], fetch["recent_requests_per_s"]) == ([5.0], [0.0])  # the first time
    figures.add(answer(6, 33, totals=[[*new[:3], 10, *new[4:]]]))
    produce, fetch = figures.traffic()
    assert (produce["recent_requests_per_s"], fetch["recent_requests_per_s"]) == ([5.0, 3.0], [0.0, 2.0])
    lines = list(as_text(TABLES["apis"], figures.traffic(), 160))
    assert lines[0].split()[-6:-3] == ["last", "10", "s"] and "█▅" in lines[1] and "▁█" in lines[2]
    for second in range(7, 40):
        figures.add(answer(second, 33))
    assert WINDOW_S <= figures.seconds < WINDOW_S + 2
    assert figures.traffic()[0]["requests_per_s"] == 0.0
    assert is_idle(figures.traffic()[0]) and not is_idle(produce)


def test_the_same_answer_again_is_no_step_and_a_restart_forgets():
    figures = Figures()
    slow = [[7, "3", 1, "Produce"]]
    assert not figures.add(answer(1, 10, slow=slow))
    assert not figures.add(answer(3, 20, slow=slow)) and not figures.add(answer(3, 20, slow=slow))
    assert figures.seconds == 2.0 and len(figures.slow()) == 1
    figures.add(answer(4, 20, slow=[[50_000_007, "3", 2, "Produce"]]))
    assert figures.slow_after_us == 20_000_007  # one that began before it may end behind it
    assert not figures.add(answer(5, 20, slow=[[50_000_006, "4", 1, "Fetch"], [50_000_007, "3", 2, "Produce"]]))
    assert [row["at_us"] for row in figures.slow()] == [50_000_006, 50_000_007, 7]
    assert figures.add(answer(2, 1, started_ms=2))
    assert (figures.seconds, figures.slow(), figures.traffic()[0]["requests"]) == (0.0, [], 6)
    figures.add(answer(4, 1, started_ms=2, slow=[[number, "3", number, "Fetch"] for number in range(MAX_SLOW + 50)]))
    assert len(figures.slow()) == MAX_SLOW and figures.slow()[0]["at_us"] == MAX_SLOW + 49


def test_rows_that_a_cut_list_had_left_out_have_no_rate():
    figures = Figures()
    figures.add(answer(1, 10, errors=[["c", "1", "Produce", f"E{number}", 5] for number in range(100)]))
    figures.add(answer(2, 10, errors=[["c", "1", "Produce", "NEW", 900], ["c", "1", "Produce", "E1", 7]]))
    assert [(row["error"], row["answers_per_s"]) for row in figures.errors()] == [("NEW", 0.0), ("E1", 2.0)]


def test_sums_cover_all_rows_though_the_list_is_truncated():
    """Of 300 rows an answer has 200, and all of them added up by API and by broker."""
    figures = Figures()
    figures.add(answer(1, 10))
    assert [row["requests"] for row in figures.traffic(of="apis")] == [15]
    every = [
        ["c", str(broker), api, 30, 2, 0, 0, 0, 0, [1, 30]] for broker in range(100) for api in ("Fetch", "Commit")
    ]
    apis = [["c", "", api, 3000, 200, 0, 0, 0, 0, [1, 3000]] for api in ("Produce", "Fetch", "Commit")]
    of_brokers = [["c", str(broker), "", 90, 6, 0, 0, 0, 0, [1, 90]] for broker in range(100)]
    cut = answer(6, 0) | {"totals": every, "apis": apis, "of_brokers": of_brokers}
    figures.add(cut)
    found = {row["api"]: row for row in figures.traffic(of="apis")}
    assert [(name, row["requests"], row["requests_per_s"]) for name, row in found.items()] == [
        ("Produce", 3000, (3000 - 15) / 5),  # there were 15 before the answers were cut
        ("Fetch", 3000, 600),
        ("Commit", 3000, 600),
    ]
    assert (figures.head()["requests"], figures.head()["errors"]) == (9000, 600)
    brokers = {row["broker"]: row for row in figures.brokers()}
    assert len(brokers) == 100 and brokers["1"]["requests_per_s"] == (90 - 10) / 5
    assert [row["requests"] for row in figures.traffic(("api",), lambda key: key[:2] == ("c", "7"))] == [30, 30]


def test_a_lag_that_may_be_larger_is_marked_so_and_topics_without_traffic_have_a_lag():
    figures = Figures()
    lags = [
        ["c", "group", "billing", "orders", 7500, 2.0, 3],
        ["c", "group", "audit", "orders", 100, 1.0, 0],
        ["c", "group", "audit", "idle", None, None, 2],
        ["c", "client_id", "app", "orders", 9000, 3.0],  # as an older kproxy sends it
    ]
    groups = [["c", name, "Stable", 1, 1, 0, 0.0, 0] for name in ("billing", "audit", "new")]
    figures.add(answer(1, 10, topics=[["c", "orders", 1, 1, 1, 1]], groups=groups, lags=lags))
    orders, idle = figures.topics()
    assert (orders["topic"], orders["max_lag_records"], orders["lag_unknown_partitions"]) == ("orders", 9000, 3)
    assert (idle["topic"], idle["produced_bytes"], idle["fetched_records_per_s"]) == ("idle", None, None)
    assert (idle["max_lag_records"], idle["lag_unknown_partitions"]) == (None, 2)
    billing, audit, new = figures.groups()
    assert isinstance(billing["max_lag_records"], AtLeast) and billing["lag_unknown_partitions"] == 3
    assert isinstance(audit["max_lag_records"], AtLeast) and audit["max_lag_records"] == 100
    assert new["max_lag_records"] is None
    lags = {row["consumer"]: row["lag_records"] for row in figures.lags("c", "orders")}
    assert [type(lags[name]) for name in ("billing", "audit", "app")] == [AtLeast, int, int]
    lines = list(as_text(TABLES["lags"], figures.lags("c", "orders"), 80))
    assert ["billing", "group", "≥", "7,500", "2.00", "s", "3"] in [line.split() for line in lines]


def test_groups_with_a_known_lag_alone_have_rows():
    """After a restart of kproxy, or where offsets are committed without joining a group."""
    figures = Figures()
    lags = [
        ["c", "group", "simple", "orders", 770, None, 0],
        ["c", "client_id", "app", "orders", 9, None, 0],
        ["c", "group", "billing", "orders", 5, None, 0],
    ]
    figures.add(answer(1, 10, groups=[["c", "billing", "Stable", 1, 1, 0, 0.0, 0, "classic", "consumer"]], lags=lags))
    billing, simple = figures.groups()
    assert (billing["group"], billing["max_lag_records"]) == ("billing", 5)
    assert (simple["group"], simple["state"], simple["members"], simple["max_lag_records"]) == (
        "simple",
        None,
        None,
        770,
    )


def test_the_sum_of_the_lags_of_all_other_groups_is_not_taken_as_the_largest_lag():
    figures = Figures()
    lags = [["c", "group", "other", "other", 10**6, None, 0]]
    lags += [["c", "group", f"g{number}", "orders", 7, None, 0] for number in range(99)]
    figures.add(answer(1, 10, lags=lags))
    assert [(row["topic"], row["max_lag_records"]) for row in figures.topics()] == [("orders", 7)]
    assert "other" not in [row["group"] for row in figures.groups()] and len(figures.lags()) == 100


def test_figures_that_are_being_read_do_not_change_with_the_next_answer():
    class Port:
        url = "kproxy"
        answers = iter([answer(1, 10), answer(2, 30), answer(3, 60)])

        def get(self, path, **parameters):
            return {"interval_s": 1.0, **next(self.answers)}

    source = Source(Port())
    source.ask()
    source.ask()
    read = source.figures
    rows = iter(read._answers)
    next(rows)
    seconds = read.seconds
    source.ask()
    assert next(rows)["state"]["now_ms"] and read.seconds == seconds < source.figures.seconds
