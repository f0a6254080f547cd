"""Events in, exposition out: the numbers, the text, and the caps."""

import subprocess
from bisect import bisect_left
from itertools import pairwise
from math import ceil
from time import time_ns

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kproxy.errors import DIAL_CAUSES
from kproxy.metrics import Metrics
from kproxy.metrics.counters import bounds
from kproxy.metrics.counters.cells import UNKNOWN_APIS, UNKNOWN_ERRORS
from kproxy.metrics.counters.groups import InsightCells
from kproxy.metrics.counters.tls import CLIENT_RESULTS, TlsSide
from kproxy.metrics.counters.upstream import ClusterState
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.wire.bodies import BLANK, Found, Sums
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import (
    ANSWERED,
    BROKER,
    CLIENT,
    NO_ANSWER_EXPECTED,
    REQUEST_NOT_SEEN,
    ClientNamed,
    Closed,
    Desync,
    Exchange,
    Unanswered,
)
from kproxy.wire.interest import ApiPlan, Interest
from tests.wire.playbook import Dialogue, foreign_request

MS = 1_000_000
PRODUCE = ApiPlan(0, 9, "Produce", True)
PRODUCE_13 = ApiPlan(0, 13, "Produce", True)
FETCH = ApiPlan(1, 12, "Fetch", True)


def info(cluster="default"):
    return ConnectionInfo(cluster, "live:main", "127.0.0.1", 40000, "127.0.0.1", 9092, 1, 0)


def answered_at(now_ns):
    return dict.fromkeys(("request_end", "response_start", "response_end"), now_ns)


def exchange(plan, *, duration_ns=2 * MS, request_bytes=1000, response_bytes=100, queue_ns=0, **fields):
    exchange = Exchange(plan, 7, 0, 0, request_bytes, 10)
    exchange.request_end = 10
    exchange.response_start = 10 + queue_ns + duration_ns
    exchange.response_end = exchange.response_start + 5
    exchange.response_bytes = response_bytes
    exchange.queue_ns, exchange.muted_ns = queue_ns, 0
    exchange.outcome = ANSWERED
    for name, value in fields.items():
        setattr(exchange, name, value)
    return exchange


def test_kproxys_own_answer_does_not_count_as_the_brokers_error_or_time():
    """As a session answers an ApiVersions newer than it reads."""
    metrics = Metrics()
    talk = Dialogue(Interest(rewrite=True), transform=lambda exchange, frame: None)
    talk.client(foreign_request(18, 99, 1, b"\0\1c\0"))
    metrics.connection(info(), "main", "1").events(talk.events)
    samples = scrape(metrics)
    assert samples["kproxy_own_answers_total"] == {labels(cluster="default", api="ApiVersions"): 1}
    assert sum(samples["kproxy_requests_total"].values()) == 1
    for name in ("errors_total", "request_duration_seconds_count", "response_size_bytes_sum", "queue_seconds_count"):
        assert not any(samples.get(f"kproxy_{name}", {}).values())


def test_a_mute_is_neither_the_brokers_time_nor_the_queue():
    metrics = Metrics()
    connection = metrics.connection(info(), "main", "1")
    connection.events([exchange(PRODUCE, duration_ns=502 * MS, muted_ns=500 * MS, queue_ns=3 * MS), exchange(PRODUCE)])
    samples = scrape(metrics)
    of = labels(cluster="default", broker="1")
    assert samples["kproxy_request_duration_seconds_sum"] == {
        labels(cluster="default", broker="1", api="Produce"): 0.004
    }
    assert (samples["kproxy_mute_seconds_count"][of], samples["kproxy_mute_seconds_sum"][of]) == (1, 0.5)
    assert (samples["kproxy_queue_seconds_count"][of], samples["kproxy_queue_seconds_sum"][of]) == (2, 0.003)


def scrape(metrics):
    """{sample name: {sorted labels: value}} of the classic text format."""
    samples = {}
    for family in text_string_to_metric_families(render(registry_of(metrics))[0].decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def labels(**pairs):
    return tuple(sorted(pairs.items()))


def forwarded(connection, side, frames, duration_ns):
    """As a relay counts frames that it has sent."""
    cells = connection.inside[side]
    cells.counts[bisect_left(cells.bounds, duration_ns)] += frames
    cells.total_ns += frames * duration_ns


def busy_metrics():
    """Every metric with at least one series."""
    metrics = Metrics()
    connection = metrics.connection(info(), "main", "1", pending=[None] * 3)
    other = metrics.connection(info(), "main", "bootstrap")
    connection.events(
        [
            exchange(PRODUCE, throttle_ms=250, errors=(6, 6, 87)),
            exchange(PRODUCE_13, duration_ns=40 * MS, request_bytes=64),
            exchange(PRODUCE, outcome=NO_ANSWER_EXPECTED, response_bytes=-1),
            exchange(FETCH, duration_ns=530 * MS, max_wait_ms=500, queue_ns=4 * MS),
            exchange(FETCH, duration_ns=480 * MS, max_wait_ms=500),
            Unanswered(exchange(FETCH), "broker_closed"),
            Desync(BROKER, "unexpected_answer", "an answer nobody asked for", 0, -1, -1, False, 0),
            exchange(ApiPlan(-1, -1, "unknown", False), number=-1, outcome=REQUEST_NOT_SEEN, request_bytes=-1),
            Closed(CLIENT, 0),
        ]
    )
    forwarded(connection, CLIENT, 3, 30_000)
    forwarded(connection, BROKER, 1, 7_000)
    connection.paused("client")
    connection.rewritten("Metadata", 3)
    connection.unbound(1)
    metrics.cluster("default").authenticated("broker", "PLAIN", "success")
    metrics.cluster("default").has_policy(["rule", "malformed"])
    metrics.cluster("default").refused("Produce", "rule")
    metrics.cluster("default").refused("unknown_777", "unknown_api")
    connection.neutralised("Fetch", 2)
    other.events([ClientNamed("shop", "a-client", "1.2", 0)])
    other.closed("client")
    other.closed("again")
    metrics.recorder_dropped["live:main"] = 4
    metrics.worker_usage["1"] = 2_500_000_000, 36 << 20
    written_ms = metrics.now_ns() // MS + 86_400_000  # of tomorrow: an age that is the same in every scrape, none
    upstream = metrics.upstream("default", DIAL_CAUSES, lambda: ClusterState(True, True, 4))
    upstream.dialled("1", 3 * MS)
    upstream.dial_failed("1", "refused")
    tls = metrics.cluster("default").tls["client"] = TlsSide(CLIENT_RESULTS, lambda: {"tls.crt": 1_900_000_000})
    tls.ended("ok", 2 * MS)
    tls.ended("plaintext", MS)
    tls.reloads["failed"] += 1
    metrics.cluster("default").follow()
    metrics.cluster("default").insight = followed
    bodies = metrics.connection(info("bodies"), "main", "2", topics=True)
    bodies.events([*consumed(metrics.now_ns(), written_ms)])
    return metrics


def followed():
    """Cells of groups and partitions counted by another process."""
    cells = InsightCells()
    group = cells.group("billing", time_ns())
    cells.rebalanced(group, "member_left", 3_000 * MS)
    cells.stands(group, "PreparingRebalance", 4, 12, "classic", "consumer")
    group.failures["commit"] += 2
    cells.leadership("orders", 0, "offline", None, 2)
    cells.left_out["undecodable"] += 1
    return cells


def consumed(now_ns, written_ms):
    """Exchanges whose bodies produce to a topic, fetch from it, and commit offsets of a group."""
    body = Found()
    body.sums = [Sums("orders", None, 700, 2, 9, 1)]
    yield exchange(PRODUCE, request_start=now_ns, **answered_at(now_ns), request_body=body)
    asked, told = Found(), Found()
    asked.partitions = [BLANK._replace(topic="orders", partition=0, offset=2)]
    told.partitions = [
        BLANK._replace(
            topic="orders",
            partition=0,
            bytes=300,
            batches=1,
            records=3,
            codecs=1,
            high_watermark=9,
            first_offset=2,
            last_offset=4,
            max_timestamp=written_ms,
        )
    ]
    fetched = exchange(FETCH, request_body=asked, response_body=told, client_id="shop")
    fetched.response_start = now_ns
    yield fetched
    committed = Found()
    committed.partitions = [BLANK._replace(topic="orders", partition=0, group_id="billing", offset=5)]
    kept = exchange(ApiPlan(8, 8, "OffsetCommit", True), request_body=committed)
    kept.response_start = now_ns
    yield kept


def test_each_event_is_counted_where_it_belongs():
    found = {
        name: {key: value for key, value in series.items() if dict(key).get("cluster") != "bodies"}
        for name, series in scrape(busy_metrics()).items()
    }
    of = {"cluster": "default"}
    broker = of | {"broker": "1"}
    bootstrap = of | {"broker": "bootstrap", "listener": "main"}
    produce, fetch = broker | {"api": "Produce"}, broker | {"api": "Fetch"}
    expected = {
        "kproxy_requests_total": {
            labels(**produce, version="9"): 2,
            labels(**produce, version="13"): 1,
            labels(**fetch, version="12"): 3,
        },
        "kproxy_request_bytes_total": {labels(**produce): 2064, labels(**fetch): 3000},
        "kproxy_response_bytes_total": {labels(**produce): 200, labels(**fetch): 200},
        "kproxy_request_duration_seconds_count": {labels(**produce): 2, labels(**fetch): 2},
        "kproxy_request_duration_seconds_sum": {labels(**produce): 0.042, labels(**fetch): 1.01},
        "kproxy_request_size_bytes_count": {labels(**of, api="Produce"): 3, labels(**of, api="Fetch"): 3},
        "kproxy_response_size_bytes_sum": {labels(**of, api="Produce"): 200, labels(**of, api="Fetch"): 200},
        "kproxy_throttle_seconds_sum": {labels(**produce): 0.25},
        "kproxy_throttled_responses_total": {labels(**produce): 1},
        "kproxy_errors_total": {
            labels(**produce, error="NOT_LEADER_OR_FOLLOWER"): 2,
            labels(**produce, error="INVALID_RECORD"): 1,
        },
        "kproxy_fetch_excess_wait_seconds_count": {labels(**broker): 2},
        "kproxy_fetch_excess_wait_seconds_sum": {labels(**broker): 0.03},
        "kproxy_queue_seconds_count": {labels(**broker): 4},
        "kproxy_queue_seconds_sum": {labels(**broker): 0.004},
        "kproxy_proxy_duration_seconds_count": {labels(direction="request"): 3, labels(direction="response"): 1},
        "kproxy_proxy_duration_seconds_sum": {labels(direction="request"): 90e-6, labels(direction="response"): 7e-6},
        "kproxy_inflight_requests": {labels(**broker): 3},
        "kproxy_open_connections": {labels(**broker, listener="main"): 1},
        "kproxy_connections_total": {labels(**broker, listener="main"): 1, labels(**bootstrap): 1},
        "kproxy_disconnects_total": {labels(**bootstrap, cause="client"): 1},
        "kproxy_unanswered_requests_total": {labels(**of, api="Fetch", cause="broker_closed"): 1},
        "kproxy_protocol_faults_total": {labels(**of, side="broker", kind="unexpected_answer"): 1},
        "kproxy_paused_reads_total": {labels(**of, side="client"): 1},
        "kproxy_rewritten_addresses_total": {labels(**of, api="Metadata"): 3},
        "kproxy_neutralised_addresses_total": {labels(**of, api="Fetch"): 2},
        "kproxy_unbound_brokers_total": {labels(**of): 1},
        "kproxy_authentications_total": {labels(**of, side="broker", mechanism="PLAIN", outcome="success"): 1},
        "kproxy_recorder_dropped_total": {labels(): 4},
        "kproxy_ready": {labels(**of): 1},
        "kproxy_listeners": {labels(**of): 4},
        "kproxy_dial_seconds_count": {labels(**broker): 1},
        "kproxy_dial_seconds_sum": {labels(**broker): 0.003},
        "kproxy_dial_failures_total": {labels(**broker, cause="refused"): 1},
        "kproxy_tls_handshakes_total": {
            labels(**of, side="client", result="ok"): 1,
            labels(**of, side="client", result="plaintext"): 1,
        },
        "kproxy_tls_handshake_seconds_sum": {labels(**of, side="client"): 0.002},
        "kproxy_certificate_expiry_timestamp_seconds": {labels(**of, side="client", file="tls.crt"): 1_900_000_000},
        "kproxy_certificate_reloads_total": {labels(**of, side="client", result="failed"): 1},
        "kproxy_client_info": {
            labels(**of, client_id="shop", software_name="a-client", software_version="1.2"): 1,
        },
    }
    assert {name: {key: value for key, value in found[name].items() if value} for name in expected} == expected
    assert {"kproxy_build_info", "kproxy_start_time_seconds", "process_resident_memory_bytes"} <= found.keys()
    # A request of exactly 64 bytes lies in the bucket of 64 bytes, and a Fetch that came early waited no time too long.
    assert found["kproxy_request_size_bytes_bucket"][labels(cluster="default", api="Produce", le="64.0")] == 1
    assert found["kproxy_fetch_excess_wait_seconds_bucket"][labels(**broker, le="0.001")] == 1


def assert_histograms_agree(found):
    for name, series in found.items():
        if not name.endswith("_bucket"):
            continue
        stem = name.removesuffix("_bucket")
        by_labels = {}
        for key, value in series.items():
            rest = dict(key)
            by_labels.setdefault(labels(**{k: v for k, v in rest.items() if k != "le"}), []).append(
                (float(rest["le"]), value)
            )
        for key, buckets in by_labels.items():
            buckets.sort()
            assert all(a <= b for (_, a), (_, b) in pairwise(buckets))
            assert buckets[-1] == (float("inf"), found[f"{stem}_count"][key])
            # The sum lies between what the buckets allow at least and, without the open one, at most.
            counts = [(low, high, b - a) for (low, a), (high, b) in pairwise([(0.0, 0), *buckets])]
            total = found[f"{stem}_sum"][key]
            assert sum(low * count for low, _, count in counts) <= total * (1 + 1e-12)
            if not counts[-1][2]:
                assert total <= sum(high * count for _, high, count in counts[:-1]) * (1 + 1e-12)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            exchange,
            st.sampled_from([PRODUCE, PRODUCE_13, FETCH]),
            duration_ns=st.integers(-5, 10**12),
            queue_ns=st.integers(0, 10**12),
            request_bytes=st.integers(12, 2**31),
            response_bytes=st.integers(8, 2**31),
            throttle_ms=st.integers(-1, 2**31 - 1),
            max_wait_ms=st.none() | st.integers(0, 60_000),
        )
    )
)
def test_histograms_agree_with_themselves(exchanges):
    metrics = Metrics()
    metrics.connection(info(), "main", "1").events(exchanges)
    found = scrape(metrics)
    assert_histograms_agree(found)
    assert sum(found.get("kproxy_request_duration_seconds_count", {}).values()) == len(exchanges)


@given(
    st.lists(
        st.builds(
            exchange,
            st.sampled_from([PRODUCE, FETCH]),
            duration_ns=st.sampled_from([-1, 0, 60_000, 3 * MS]),
            queue_ns=st.sampled_from([0, 40_000, 60_000, 9 * MS]),
            request_bytes=st.sampled_from([64, 65, 5000]),
            response_bytes=st.sampled_from([64, 65, 5000]),
        )
    )
)
def test_events_of_one_read_count_as_those_of_many(exchanges):
    at_once, one_by_one = Metrics(), Metrics()
    at_once.connection(info(), "main", "1").events(exchanges)
    connection = one_by_one.connection(info(), "main", "1")
    for each in exchanges:
        connection.events([each])
    found, expected = (
        {
            name: values
            for name, values in scrape(each).items()
            if name.endswith(("_bucket", "_sum", "_count", "_total"))
        }
        for each in (at_once, one_by_one)
    )
    del found["process_cpu_seconds_total"], expected["process_cpu_seconds_total"]
    assert found == expected


def test_a_peer_cannot_create_unbounded_series():
    metrics = Metrics()
    connection = metrics.connection(info(), "main", "1")
    for number in range(100_000):
        key = 1000 + number % 31_000
        connection.events(
            [
                exchange(
                    ApiPlan(key, number % 777, f"unknown_{key}", False),
                    errors=(1000 + number % 30_000,),
                ),
            ]
        )
    connection.events([exchange(ApiPlan(3, 9999, "Metadata", False))])
    found = scrape(metrics)
    apis = {dict(key)["api"] for key in found["kproxy_requests_total"]}
    assert len(apis) == UNKNOWN_APIS + 2
    assert {"unknown_1000", "unknown_other", "Metadata"} <= apis
    assert {dict(key)["version"] for key in found["kproxy_requests_total"]} == {"unknown"}
    errors = {dict(key)["error"] for key in found["kproxy_errors_total"]}
    assert len(errors) == UNKNOWN_ERRORS + 1
    assert "unknown_other" in errors
    assert sum(found["kproxy_requests_total"].values()) == 100_001
    assert sum(found["kproxy_errors_total"].values()) == 100_000
    assert not metrics.cluster("default").brokers["1"].by_plan


def test_re_created_plans_do_not_accumulate():
    metrics = Metrics()
    connection = metrics.connection(info(), "main", "1")
    by_plan, most = metrics.cluster("default").brokers["1"].by_plan, 0
    for _ in range(10_000):
        connection.events([exchange(ApiPlan(0, 9, "Produce", True))])
        most = max(most, len(by_plan))
    assert most == 4096
    assert sum(scrape(metrics)["kproxy_requests_total"].values()) == 10_000


def test_labels_are_escaped():
    cluster = 'a "quoted"\\\nname'
    metrics = Metrics()
    metrics.connection(info(cluster), "main", "1").events([exchange(PRODUCE)])
    assert [dict(key)["cluster"] for key in scrape(metrics)["kproxy_requests_total"]] == [cluster]


def test_promtool_accepts_the_exposition():
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=render(registry_of(busy_metrics()))[0], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200), st.floats(0.01, 1))
def test_quantiles_lie_in_the_bucket_of_the_exact_one(values, q):
    counts = bounds.cell(bounds.DURATION_NS)
    for value in values:
        counts[bisect_left(bounds.DURATION_NS, value)] += 1
    exact = sorted(values)[max(0, ceil(len(values) * q) - 1)]
    bucket = bisect_left(bounds.DURATION_NS, exact)
    found = bounds.quantile(bounds.DURATION_NS, counts, q)
    low = bounds.DURATION_NS[bucket - 1] if bucket else 0
    high = bounds.DURATION_NS[min(bucket, len(bounds.DURATION_NS) - 1)]
    assert min(low, high) <= found <= high


def test_no_values_have_no_quantile():
    assert bounds.quantile(bounds.DURATION_NS, bounds.cell(bounds.DURATION_NS), 0.5) is None
