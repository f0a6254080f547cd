"""The slowest exchanges of late: which are kept, how many, and how they become exemplars."""

import asyncio

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kproxy.metrics import Metrics
from kproxy.metrics.counters.slow import FLOOR_NS, KEPT, PER_SECOND, Slow, merged
from kproxy.metrics.processes.published import Published
from kproxy.metrics.processes.shared import Shared
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import ANSWERED, NONE, Exchange
from kproxy.wire.interest import Interest

SECOND, MS = 10**9, 10**6
START = 1_700_000_000 * SECOND
INTEREST = Interest()
FETCH, PRODUCE, JOIN_GROUP = (INTEREST.plan(key << 16 | version) for key, version in ((1, 12), (0, 9), (11, 5)))
INFO = ConnectionInfo("demo", "live:bootstrap", "10.0.0.7", 5000, "10.0.0.1", 9092, 1, START)


def connected(metrics):
    return metrics.connection(INFO, "broker-1", "1")


def exchange(plan, took_ns, at_ns=START, *, client_id="shop", max_wait_ms=None, correlation_id=7):
    made = Exchange(plan, correlation_id, 0, 0, 100, at_ns - took_ns)
    made.request_end, made.response_start, made.response_end = at_ns - took_ns, at_ns, at_ns
    made.client_id, made.max_wait_ms, made.response_bytes = client_id, max_wait_ms, 50
    made.queue_ns = made.muted_ns = made.throttle_ms = 0
    made.outcome = ANSWERED
    return made


def exemplars(metrics):
    text, kind = render(registry_of(metrics), "application/openmetrics-text")
    assert "openmetrics" in kind
    return {
        (sample.labels["api"], sample.labels["le"]): sample.exemplar
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.exemplar
    }


def test_slow_exchanges_are_kept_and_deliberate_waits_are_not():
    metrics = Metrics()
    connection = connected(metrics)
    connection.events([exchange(PRODUCE, FLOOR_NS), exchange(PRODUCE, 40 * MS, correlation_id=8)])
    connection.events([exchange(JOIN_GROUP, 5 * SECOND)])
    connection.events([exchange(FETCH, 500 * MS, max_wait_ms=500), exchange(FETCH, 900 * MS, max_wait_ms=500)])
    kept = [(row.api, row.correlation_id, row.broker_ns, row.over_ns) for row in metrics.slow.rows]
    assert kept == [("Produce", 8, 40 * MS, 40 * MS), ("Fetch", 7, 900 * MS, 400 * MS)]
    assert (metrics.slow.rows[0].client_id, metrics.slow.rows[0].client) == ("shop", "10.0.0.7")


def test_a_row_says_who_asked_what_and_where_the_time_went():
    metrics = Metrics()
    slow = exchange(PRODUCE, 40 * MS)
    slow.number, slow.request_start, slow.response_end = 5, START - 43 * MS, START + 2 * MS
    slow.queue_ns, slow.muted_ns, slow.throttle_ms, slow.error_code = 3, 4, 70, 6
    connected(metrics).events([slow])
    row = metrics.slow.rows.pop()
    assert row._asdict() == {
        "at_ns": START,
        "cluster": "demo",
        "broker": "1",
        "api": "Produce",
        "version": 9,
        "client_id": "shop",
        "client": "10.0.0.7",
        "correlation_id": 7,
        "connection": INFO.id,
        "number": 5,
        "wait_ns": 45 * MS,
        "broker_ns": 40 * MS,
        "over_ns": 40 * MS,
        "queue_ns": 3,
        "muted_ns": 4,
        "throttle_ms": 70,
        "request_bytes": 100,
        "response_bytes": 50,
        "error_code": 6,
    }
    slow.throttle_ms, slow.error_code = NONE, None  # a response that has none
    connected(metrics).events([slow])
    assert metrics.slow.rows.pop() == row._replace(throttle_ms=0, error_code=0)


def test_a_flood_of_slow_exchanges_is_bounded_by_what_is_kept_a_second_and_in_all():
    metrics = Metrics()
    connection = connected(metrics)
    for number in range(100_000):  # a second of them
        connection.events([exchange(PRODUCE, 50 * MS, START + number * 10_000)])
    assert len(metrics.slow.rows) <= 5 * PER_SECOND and metrics.slow.threshold_ns > 50 * MS
    metrics.slow.settle(START + 60 * SECOND)
    assert metrics.slow.threshold_ns == FLOOR_NS  # a quiet time makes it sensitive again
    for number in range(10 * KEPT):
        connection.events([exchange(PRODUCE, 50 * MS, START + (100 + number) * SECOND, client_id="x" * 30_000)])
    assert len(metrics.slow.rows) == KEPT
    assert max(len(row.client_id) for row in metrics.slow.rows) == 64


def test_slow_buckets_lead_to_a_client_and_a_correlation_id():
    metrics = Metrics()
    connection = connected(metrics)
    connection.events([exchange(PRODUCE, 40 * MS, correlation_id=8), exchange(PRODUCE, 3 * MS)])
    connection.events([exchange(PRODUCE, 45 * MS, correlation_id=9, client_id='a"}\n' + "ü" * 300)])
    connection.events([exchange(PRODUCE, 2 * SECOND, correlation_id=10, client_id=None)])
    found = exemplars(metrics)
    assert set(found) == {("Produce", "0.05"), ("Produce", "2.5")}
    fast, slow = found["Produce", "0.05"], found["Produce", "2.5"]
    assert fast.labels["correlation_id"] == "9" and fast.labels["client_id"].startswith("a???ü")
    assert (slow.labels, slow.value) == ({"client": "10.0.0.7", "correlation_id": "10"}, 2.0)
    assert float(slow.timestamp) == START / SECOND
    assert b"# {" not in render(registry_of(metrics))[0]  # the classic format has none


async def changes(published):
    return [change async for changed in published.changes(False) for change in changed]


def test_a_parent_has_the_slow_exchanges_of_all_workers():
    own = Metrics()
    shared = Shared(own)
    for worker in (1, 2):
        metrics = Metrics()
        connected(metrics).events([exchange(PRODUCE, worker * 100 * MS, START + worker, correlation_id=worker)])
        shared.take(worker, asyncio.run(changes(Published(metrics))))
    merged = shared.merged()
    assert [row.correlation_id for row in merged.slow.rows] == [1, 2]
    assert {each.labels["correlation_id"] for each in exemplars(merged).values()} == {"1", "2"}


def test_the_threshold_halves_in_three_seconds_and_has_a_floor():
    slow = Slow()
    slow.settle(START)
    slow.threshold_ns = 64 * FLOOR_NS
    for second, times in ((0, 64), (3, 32), (6, 16), (5, 16), (14, 2), (17, 1), (1000, 1)):  # 5: the clock went back
        slow.settle(START + second * SECOND)
        assert slow.threshold_ns == times * FLOOR_NS


def test_the_threshold_doubles_when_more_than_so_many_come_in_one_second():
    for last_ns, times in ((SECOND - 1, 2), (SECOND, 1)):
        metrics = Metrics()
        connection = connected(metrics)
        connection.events([exchange(PRODUCE, 50 * MS, START)] * PER_SECOND)
        assert metrics.slow.threshold_ns == FLOOR_NS
        connection.events([exchange(PRODUCE, 50 * MS, START + last_ns)])
        assert metrics.slow.threshold_ns == times * FLOOR_NS and len(metrics.slow.rows) == PER_SECOND + 1


def test_of_too_many_rows_of_several_processes_the_latest_stay():
    metrics = Metrics()
    connected(metrics).events([exchange(PRODUCE, 40 * MS)])
    (row,) = metrics.slow.rows
    times = [START + number for number in range(KEPT + 7)]
    processes = [[row._replace(at_ns=at_ns, broker=str(one)) for at_ns in times[one::2]] for one in range(2)]
    assert [each.at_ns for each in merged(processes).rows] == times[-KEPT:]
