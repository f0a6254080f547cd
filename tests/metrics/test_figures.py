"""Cells as rows of the page, now and over the last hour: equal to /metrics, and bounded."""

import json
from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.metrics import Metrics, figures
from kproxy.metrics.consumers.lag import Lag
from kproxy.metrics.counters.bounds import PROXY_NS
from kproxy.metrics.counters.groups import InsightCells
from kproxy.metrics.counters.named import Topics
from kproxy.metrics.scrape.collector import registry_of
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.interest import Interest
from tests.metrics.counters.test_slow import FETCH, MS, PRODUCE, START, exchange

SECOND = 10**9
NUMBERS = st.integers(0, 3)
HISTOGRAMS = st.dictionaries(st.integers(0, 4), st.integers(1, 3), max_size=3)  # counts by bucket


def connected(metrics, cluster="demo", broker="1"):
    info = ConnectionInfo(cluster, "live:bootstrap", "10.0.0.7", 5000, "10.0.0.1", 9092, 1, START)
    return metrics.connection(info, "broker-1", broker)


def run(walk):
    """Return (result of a walk, number of turns)."""
    turns = 1
    while True:
        try:
            next(walk)
            turns += 1
        except StopIteration as end:
            return end.value, turns


def exposed(metrics, name, **labels):
    return sum(
        sample.value
        for family in registry_of(metrics).collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def samples_of(history):
    return [json.loads(text) for _, text in history.samples]


def test_totals_equal_the_values_of_metrics():
    metrics = Metrics()
    failed, throttled = exchange(PRODUCE, 3 * MS), exchange(PRODUCE, 3 * MS)
    failed.errors, throttled.throttle_ms = (6, 6), 250
    connected(metrics).events([failed, throttled, exchange(FETCH, 400 * MS), exchange(PRODUCE, 20_000)])
    connected(metrics, broker="2").events([exchange(PRODUCE, 700 * SECOND)])
    found, _ = run(figures.totals(metrics))
    assert set(found) == {("demo", "1", "Produce"), ("demo", "1", "Fetch"), ("demo", "2", "Produce")}
    for (cluster, broker, api), total in found.items():
        of = {"cluster": cluster, "broker": broker, "api": api}
        requests, errors, request_bytes, response_bytes, throttles, throttle_ms, pairs, waits = total.row()
        assert sum(waits[1::2]) == sum(pairs[1::2]) == exposed(metrics, "kproxy_request_wait_seconds_count", **of)
        assert requests == exposed(metrics, "kproxy_requests_total", **of)
        assert errors == exposed(metrics, "kproxy_errors_total", **of)
        assert request_bytes == exposed(metrics, "kproxy_request_bytes_total", **of)
        assert response_bytes == exposed(metrics, "kproxy_response_bytes_total", **of)
        assert throttles == exposed(metrics, "kproxy_throttled_responses_total", **of)
        assert throttle_ms == 1000 * exposed(metrics, "kproxy_throttle_seconds_sum", **of)
        below = 0
        counts = dict(zip(pairs[::2], pairs[1::2], strict=True))
        for index, bound in enumerate(figures.BOUNDS_S):
            below += counts.get(index, 0)
            le = f"{bound:g}" if bound < 1 else f"{bound:.1f}"
            assert below == exposed(metrics, "kproxy_request_duration_seconds_bucket", **of, le=le), le


def test_samples_add_up_to_the_counts_since_the_first_sample():
    metrics, history = Metrics(), figures.History()
    connection = connected(metrics)
    connection.events([exchange(PRODUCE, 3 * MS)])
    history.close(metrics, run(figures.totals(metrics))[0], START)  # earlier counts belong to no sample
    for step in range(1, 6):
        connection.events([exchange(PRODUCE, 3 * MS)] * step)
        open_now = json.loads(history.open(metrics, run(figures.totals(metrics))[0], START + step * SECOND - 1))
        history.close(metrics, run(figures.totals(metrics))[0], START + step * SECOND)
        (last,) = samples_of(history)[-1:]
        assert open_now["s"] == last["s"] and open_now["n"] == 0 and last["n"] == step
    assert [sample["s"][0][1] for sample in samples_of(history)] == [1, 2, 3, 4, 5]
    assert [sample["d"] for sample in samples_of(history)] == [1.0] * 5
    assert history.series.names == [("other",) * 3, ("demo", "1", "Produce")]
    history.close(metrics, run(figures.totals(metrics))[0], START + 6 * SECOND)
    assert samples_of(history)[-1]["s"] == []  # nothing happened
    history.close(metrics, {}, START + 6 * SECOND + 1_234_567_890)
    assert (samples_of(history)[-1]["d"], samples_of(history)[-1]["t"]) == (1.235, (START + 7_234_567_890) // MS)


@pytest.mark.parametrize(("count", "turns"), [(0, 1), (39, 1), (40, 2), (41, 2), (120, 4)])
def test_totals_are_summed_forty_per_turn(count, turns):
    found = {("demo", str(number), "Produce"): figures.Total() for number in range(count)}
    sums, taken = run(figures.summed(found, figures.by_api))
    assert taken == turns and sums.keys() == ({("demo", "", "Produce")} if count else set())


def test_a_flood_of_brokers_and_apis_is_bounded_in_a_sample_and_in_turns():
    metrics, history = Metrics(), figures.History()
    interest = Interest()
    plans = [interest.plan(key << 16 | version) for key in (0, 1, 2, 3, 8, 9, 10, 11, 12) for version in (5, 6, 7)]
    history.close(metrics, {}, START)
    for round_number in range(3):
        for broker in range(200):
            connection = connected(metrics, broker=f"{round_number}-{broker}")
            connection.events([exchange(plan, MS << n % 20) for n, plan in enumerate(plans)])
        found, turns = run(figures.totals(metrics))
        assert turns >= len(found) // figures._CELLS_PER_TURN
        history.close(metrics, found, START + (round_number + 1) * SECOND)
    for _, text in history.samples:
        sample = json.loads(text)
        assert len(text) < 20_000 and figures.NAMED_SERIES < len(sample["s"]) <= figures.MAX_SERIES
        assert sum(row[1] for row in sample["s"]) == 200 * len(plans)  # the rest is summed by API
        named = {}
        for row in sample["s"]:
            api = history.series.names[row[0]][2]
            named[api] = named.get(api, 0) + row[1]
        assert set(named.values()) == {600} and len(named) == 9
        assert sum(sum(row[7][1::2]) for row in sample["s"]) == 200 * len(plans)
    for number in range(2 * figures.MAX_NAMES):
        history.series.number(("c", str(number), "x"))
    assert len(history.series.names) == figures.MAX_NAMES and history.series.number(("c", "new", "x")) == 0
    for step in range(2 * figures.SAMPLES):
        history.close(metrics, found, START + (10 + step) * SECOND)
    assert len(history.samples) == figures.SAMPLES


def test_rebalances_of_a_new_group_are_in_its_first_sample(monkeypatch):
    found = {}
    monkeypatch.setattr(figures, "_rebalances", lambda metrics: dict(found))
    metrics, history = Metrics(), figures.History()
    found["c", "old"] = (5, False)
    history.close(metrics, {}, START)
    found["c", "new"] = (2, False)
    history.close(metrics, {}, START + SECOND)
    history.close(metrics, {}, START + 2 * SECOND)
    assert [sample["g"] for sample in samples_of(history)] == [[[1, 2, 0]], []]
    assert history.groups.names[1] == ("c", "new")


def test_a_sample_that_has_not_begun_is_null():
    metrics, history = Metrics(), figures.History()
    assert history.open(metrics, {}, START) == "null" and history.last == 0
    history.close(metrics, {}, START)
    assert history.open(metrics, {}, START) == "null" and (history.last, history.begun_ns) == (0, START)
    assert json.loads(history.open(metrics, {}, START + SECOND)) == {
        "n": 0,
        "t": START // MS + 1000,
        "d": 1.0,
        "s": [],
        "g": [],
        "p": [None, None],
    }


@pytest.mark.parametrize("direction", ["request", "response"])
def test_times_inside_kproxy_cover_only_the_sample(direction):
    metrics, history = Metrics(), figures.History()
    inside = metrics.directions[direction].counts
    history.close(metrics, {}, START)
    for number, bucket in enumerate((-2, 0, 4), 1):
        inside[bucket] += 100
        metrics.loop_lag.counts[bucket] += 100
        history.close(metrics, {}, START + number * SECOND)
    slow, fast, middle = (sample["p"] for sample in samples_of(history))
    bounds_s = [bound / 1e9 for bound in PROXY_NS]
    for place in (0, 1):
        assert bounds_s[-2] < slow[place] <= bounds_s[-1]
        assert 0 < fast[place] <= bounds_s[0]
        assert bounds_s[3] < middle[place] <= bounds_s[4]
    assert json.loads(history.open(metrics, {}, START + 4 * SECOND))["p"] == [None, None]


def test_rows_beyond_the_limit_of_apis_are_summed_in_one_row():
    rows = [
        ((f"c{number}", "b", "Fetch"), [number + 1, 0, 0, 0, 0, 0, [3, number + 1], [4, number + 1]])
        for number in range(100)
    ]
    found = figures._rest_by_api(rows)
    assert len(found) == figures.MAX_SERIES - figures.NAMED_SERIES and found[-1][0] == ("other",) * 3
    assert (
        sum(row[0] for _, row in found)
        == sum(row[6][1] for _, row in found)
        == sum(row[7][1] for _, row in found)
        == 5050
    )


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(("a", "b")),
            st.sampled_from(("Fetch", "Produce", "Metadata")),
            st.lists(NUMBERS, min_size=6, max_size=6),
            HISTOGRAMS,
            HISTOGRAMS,
        ),
        min_size=1,
    ),
    room=st.integers(1, 7),
)
def test_rows_by_api_have_the_sums_of_each_column_and_bucket(rows, room):
    """The two histograms are summed separately, and rows beyond the limit become one row."""
    made = [
        ((cluster, "1", api), [*counts, *([n for pair in buckets.items() for n in pair] for buckets in histograms)])
        for cluster, api, counts, *histograms in rows
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "MAX_SERIES", figures.NAMED_SERIES + room)
        found = figures._rest_by_api(made)
    named = {key for key, _ in found if key != ("other",) * 3}
    apis = {(cluster, "other", api) for cluster, api, *_ in rows}
    assert named <= apis and len(found) == min(room, len(apis)) and (len(named) == len(found)) == (len(apis) <= room)
    for key, row in found:
        of = [each for each in rows if ((each[0], "other", each[1]) if key in named else key) == key]
        of = of if key in named else [each for each in rows if (each[0], "other", each[1]) not in named]
        assert row[:6] == [sum(each[2][column] for each in of) for column in range(6)]
        for place in (3, 4):
            buckets = sum((Counter(each[place]) for each in of), Counter())
            assert Counter(dict(zip(row[place + 3][::2], row[place + 3][1::2], strict=True))) == buckets
    requests = [row[0] for key, row in found if key in named]
    assert requests == sorted(requests, reverse=True)


@given(rows=st.lists(st.tuples(st.sampled_from("abc"), *[st.integers(0, 2)] * 4), unique_by=lambda row: row[0]))
def test_brokers_and_topics_are_sorted_by_their_values(rows):
    """A topic counted by name and by id is one row."""
    metrics = Metrics()
    topics = metrics.cluster("demo").topics = Topics()
    for name, one, two, three, four in rows:
        broker = metrics.cluster("demo").broker(name, "main")
        broker.open.update(main=one, other=four)
        broker.disconnects.update({("main", "defect"): two})
        broker.disconnects.update({("main", "limit"): three})
        topics.names[UUID(int=ord(name))] = name
        for key, counts in ((name, (one, two, three, four)), (UUID(int=ord(name)), (four, three, two, one))):
            cells = topics.top.cell_for(key, 1, metrics.now_ns())
            cells.seen_ns = metrics.now_ns()
            carried = cells.request, cells.response
            (carried[0].bytes, carried[0].records, carried[1].bytes, carried[1].records) = counts
    brokers = [["demo", name, one + four, 0, two + three] for name, one, two, three, four in rows]
    assert figures.broker_rows(metrics, 9) == sorted(brokers, key=lambda row: (-row[2], row[1]))
    topics_ = [["demo", name, one + four, two + three, three + two, four + one] for name, one, two, three, four in rows]
    assert figures.topic_rows(metrics, 9) == sorted(topics_, key=lambda row: -(row[2] + row[4]))


def test_rows_are_the_largest_up_to_the_requested_number():
    metrics = Metrics()
    for number in range(30):
        connected(metrics, broker=str(number)).events([exchange(PRODUCE, MS)] * (number + 1))
    assert len(figures.broker_rows(metrics, 10)) == 10
    failed = exchange(PRODUCE, MS)
    failed.errors = (6,)
    connected(metrics, broker="7").events([failed])
    assert figures.error_rows(metrics, 10) == [["demo", "7", "Produce", "NOT_LEADER_OR_FOLLOWER", 1]]
    assert figures.topic_rows(metrics, 10) == figures.group_rows(metrics, 10) == figures.lag_rows(metrics, 0, 10) == []


def test_rows_are_sorted_by_size_and_then_by_name():
    metrics = Metrics()
    for cluster, broker, count in (("demo", "c", 1), ("demo", "b", 3), ("demo", "a", 1), ("alpha", "z", 1)):
        for _ in range(count):
            connected(metrics, cluster, broker)
    assert [row[:3] for row in figures.broker_rows(metrics, 9)] == [
        ["demo", "b", 3],
        ["alpha", "z", 1],
        ["demo", "a", 1],
        ["demo", "c", 1],
    ]
    once, twice = exchange(PRODUCE, MS), exchange(FETCH, MS)
    once.errors, twice.errors = (6,), (3, 3)
    connected(metrics, broker="a").events([once, twice])
    assert [(row[2], row[4]) for row in figures.error_rows(metrics, 9)] == [("Fetch", 2), ("Produce", 1)]
    assert len(figures.error_rows(metrics, 1)) == 1
    demo, insight = metrics.cluster("demo"), InsightCells()
    demo.insight = lambda: insight
    for name, connections, rebalances, members in (("c", 1, 2, 9), ("b", 5, 2, 10), ("a", 1, 2, 9), ("d", 4, 3, 0)):
        cells = demo.clients.top.cell_for((name, "librdkafka", "2.6"), 1, metrics.now_ns())
        cells.open = connections
        group = insight.groups.cell_for(name, 1, metrics.now_ns())
        group.rebalances, group.members, group.duration_ns = rebalances, members, 1_234_567_890
        group.seen_ns = metrics.now_ns()
    assert [(row[1], row[4]) for row in figures.client_rows(metrics, 9)] == [("b", 5), ("d", 4), ("a", 1), ("c", 1)]
    assert [row[1] for row in figures.group_rows(metrics, 9)] == ["d", "b", "a", "c"]
    assert figures.group_rows(metrics, 1) == [["demo", "d", "Empty", 0, -1, 3, 1.235, 0, None, None]]
    assert len(figures.client_rows(metrics, 2)) == 2


def test_an_unknown_lag_comes_before_a_lag_of_0():
    class Shown:
        def shown(self, *_):
            lags = (("a", 0, 0), ("b", 7, 1), ("c", None, 2), ("d", 9, 0), ("e", 0, 3))
            yield "group", [(name, "orders", Lag(records, None, unknown)) for name, records, unknown in lags]

    metrics = Metrics()
    metrics.cluster("demo").lags = Shown()
    assert [row[2] for row in figures.lag_rows(metrics, 0, 10)] == ["d", "b", "c", "e", "a"]


def test_topics_are_sorted_by_the_bytes_of_both_directions():
    metrics = Metrics()
    topics = metrics.cluster("demo").topics = Topics()
    for name, produced, fetched in (("small", 4, 0), ("even", 3, 3), ("large", 0, 9)):
        cells = topics.top.cell_for(name, 1, metrics.now_ns())
        cells.seen_ns = metrics.now_ns()
        cells.request.bytes, cells.response.bytes, cells.request.records, cells.response.records = (
            produced,
            fetched,
            1,
            2,
        )
    expected = [["demo", "large", 0, 1, 9, 2], ["demo", "even", 3, 1, 3, 2], ["demo", "small", 4, 1, 0, 2]]
    assert figures.topic_rows(metrics, 9) == expected
    assert figures.topic_rows(metrics, 2) == expected[:2]


def test_slow_exchanges_after_a_time_are_listed_with_all_their_times():
    metrics = Metrics()
    slow = exchange(PRODUCE, 40 * MS, START + 3 * MS)
    slow.queue_ns, slow.muted_ns, slow.throttle_ms, slow.error_code = 7 * MS, 5 * MS, 11, 6
    connected(metrics).events([exchange(PRODUCE, 30 * MS), slow])
    first, last = (
        dict(zip(figures.SLOW_COLUMNS, row, strict=True)) for row in figures.slow_rows(metrics, START - 1000)
    )
    assert (first["at_us"], first["broker_s"], first["error"]) == (START // 1000, 0.03, "")
    assert (last["at_us"], last["cluster"], last["broker"], last["api"]) == (
        START // 1000 + 3000,
        "demo",
        "1",
        "Produce",
    )
    assert (last["queue_s"], last["muted_s"], last["throttle_ms"]) == (0.007, 0.005, 11)
    assert last["error"] == "NOT_LEADER_OR_FOLLOWER"
    assert (last["request_bytes"], last["response_bytes"], last["client"]) == (100, 50, "10.0.0.7")
    assert [row[0] for row in figures.slow_rows(metrics, START)] == [START // 1000 + 3000]
    assert figures.slow_rows(metrics, START + 3 * MS) == []
