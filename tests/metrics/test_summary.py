"""A summary shows the same values as a scrape."""

from bisect import bisect_left

from kproxy.metrics.counters.bounds import DURATION_NS
from kproxy.metrics.counters.cells import ApiCells
from kproxy.metrics.summary import Totals, summarise
from tests.metrics.test_metrics import busy_metrics, scrape


def summed(samples, name, label):
    found = {}
    for labels, value in samples[name].items():
        key = dict(labels)[label]
        found[key] = found.get(key, 0) + value
    return found


def test_a_summary_and_a_scrape_agree():
    metrics = busy_metrics()
    samples, summary = scrape(metrics), summarise(metrics).as_json()
    apis = summary["apis"]
    assert {api: found["requests"] for api, found in apis.items()} == summed(samples, "kproxy_requests_total", "api")
    for key in ("request_bytes", "response_bytes"):
        assert {api: found[key] for api, found in apis.items()} == summed(samples, f"kproxy_{key}_total", "api")
    assert apis["Produce"]["errors"] == summed(samples, "kproxy_errors_total", "error")
    assert apis["Produce"]["throttled_responses"] == 1
    brokers = {broker["broker"]: broker for broker in summary["brokers"]}
    for key, name in (("connections", "kproxy_open_connections"), ("inflight_requests", "kproxy_inflight_requests")):
        assert {broker: found[key] for broker, found in brokers.items()} == summed(samples, name, "broker")
    assert brokers["1"]["requests"] == 6
    assert summary["connections_accepted"] == 3
    assert summary["protocol_faults"] == summary["unanswered_requests"] == 1
    # Three requests of 30 us and a response of 7 us: the median is in the bucket from 25 to 50.
    assert 25e-6 < summary["proxy_duration_seconds"]["p50"] <= 50e-6


def test_the_whole_wait_of_a_client_is_not_the_time_of_the_broker():
    """A request that waited for a second in the queue, and for a millisecond of the broker."""
    cells = ApiCells("Produce")
    cells.duration[bisect_left(DURATION_NS, 10**6)] += 1
    cells.waits[bisect_left(DURATION_NS, 10**9)] += 1
    totals = Totals()
    totals.add(cells)
    assert totals.duration_s(0.5) <= 0.001 < 0.5 <= totals.wait_s(0.5) <= 1
