"""A summary says what a scrape says, and the difference of two what happened between them."""

from kproxy.metrics import Metrics
from kproxy.metrics.summary import summarise
from tests.metrics.test_metrics import MS, PRODUCE, busy_metrics, exchange, info, scrape


def summed(samples, name, label):
    found = {}
    for labels, value in samples[name].items():
        key = dict(labels)[label]
        found[key] = found.get(key, 0) + value
    return found


def test_a_summary_and_a_scrape_agree():
    metrics = busy_metrics()
    samples, summary = scrape(metrics), summarise(metrics, 0).as_json()
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


def test_the_difference_of_two_is_what_happened_between_them():
    metrics = Metrics()
    connection = metrics.connection(info(), "main", "1")
    connection.events([exchange(PRODUCE, duration_ns=900 * MS, errors=(6,))])
    before = summarise(metrics, 1_000_000_000)
    connection.events([exchange(PRODUCE, duration_ns=3 * MS, errors=(87,), throttle_ms=40)] * 10)
    metrics.connection(info(), "main", "2")
    between = summarise(metrics, 3_000_000_000).since(before)
    produce = between.apis["Produce"]
    assert between.seconds == 2
    assert (between.requests, produce.requests, produce.request_bytes) == (10, 10, 10_000)
    assert dict(produce.errors) == {"INVALID_RECORD": 10}
    assert 0.0025 < produce.duration_s(0.99) <= 0.005
    assert produce.throttle_s() == 0.04
    assert between.connections == {("default", "1"): 1, ("default", "2"): 1}  # a state, not a count
    assert between.brokers["default", "2"].requests == 0
    assert between.brokers["default", "2"].duration_s(0.5) is None
    assert between.accepted == 1
