"""The exposition as a contract: names, types, labels, series that start at 0, its largest size, and its clock."""

import time
from itertools import pairwise

from prometheus_client.openmetrics import parser as openmetrics

from kproxy.metrics import Metrics
from kproxy.metrics.counters.cells import MAX_APIS, MAX_ERRORS
from kproxy.metrics.counters.upstream import ClusterState
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.metrics.scrape.known import DISCONNECT_CAUSES, MAX_BORN
from kproxy.protocol.error_codes import ERRORS
from kproxy.protocol.schema import schema
from kproxy.wire.events import NO_ANSWER_EXPECTED, ClientNamed, Unanswered
from kproxy.wire.interest import ApiPlan
from tests.metrics.test_metrics import PRODUCE, busy_metrics, consumed, exchange, info, labels, scrape

LABELS = {
    "kproxy_requests": {"cluster", "api", "version", "broker"},
    "kproxy_request_duration_seconds": {"cluster", "api", "broker"},
    "kproxy_request_wait_seconds": {"cluster", "api", "broker"},
    "kproxy_request_sending_seconds": {"cluster", "api", "broker"},
    "kproxy_response_receiving_seconds": {"cluster", "api", "broker"},
    "kproxy_fetch_excess_wait_seconds": {"cluster", "broker"},
    "kproxy_queue_seconds": {"cluster", "broker"},
    "kproxy_mute_seconds": {"cluster", "broker"},
    "kproxy_own_answers": {"cluster", "api"},
    "kproxy_loop_lag_seconds": set(),
    "kproxy_ready": {"cluster"},
    "kproxy_accepting": {"cluster"},
    "kproxy_connection_limit": {"cluster"},
    "kproxy_listeners": {"cluster"},
    "kproxy_dial_seconds": {"cluster", "broker"},
    "kproxy_dial_failures": {"cluster", "broker", "cause"},
    "kproxy_loops_refused": {"cluster"},
    "kproxy_tls_handshakes": {"cluster", "side", "result"},
    "kproxy_tls_handshake_seconds": {"cluster", "side"},
    "kproxy_certificate_expiry_timestamp_seconds": {"cluster", "side", "file"},
    "kproxy_certificate_reloads": {"cluster", "side", "result"},
    "kproxy_log_lines_dropped": set(),
    "kproxy_epoll_refusals": set(),
    "kproxy_proxy_duration_seconds": {"direction"},
    "kproxy_throttle_seconds": {"cluster", "api", "broker"},
    "kproxy_throttled_responses": {"cluster", "api", "broker"},
    "kproxy_request_bytes": {"cluster", "api", "broker"},
    "kproxy_response_bytes": {"cluster", "api", "broker"},
    "kproxy_request_size_bytes": {"cluster", "api"},
    "kproxy_response_size_bytes": {"cluster", "api"},
    "kproxy_errors": {"cluster", "api", "error", "broker"},
    "kproxy_inflight_requests": {"cluster", "broker"},
    "kproxy_unanswered_requests": {"cluster", "api", "cause"},
    "kproxy_open_connections": {"cluster", "listener", "broker"},
    "kproxy_connections": {"cluster", "listener", "broker"},
    "kproxy_disconnects": {"cluster", "listener", "broker", "cause"},
    "kproxy_paused_reads": {"cluster", "side"},
    "kproxy_rewritten_addresses": {"cluster", "api"},
    "kproxy_neutralised_addresses": {"cluster", "api"},
    "kproxy_limits_reached": {"cluster", "limit"},
    "kproxy_unbound_brokers": {"cluster"},
    "kproxy_authentications": {"cluster", "side", "mechanism", "outcome"},
    "kproxy_protocol_faults": {"cluster", "side", "kind"},
    "kproxy_topic_bytes": {"cluster", "topic", "direction"},
    "kproxy_topic_records": {"cluster", "topic", "direction"},
    "kproxy_topic_batches": {"cluster", "topic", "direction", "codec"},
    "kproxy_consumer_lag_records": {"cluster", "client_id", "group", "topic"},
    "kproxy_consumer_lag_seconds": {"cluster", "client_id", "group", "topic"},
    "kproxy_group_rebalances": {"cluster", "group"},
    "kproxy_group_rebalance_seconds": {"cluster", "group"},
    "kproxy_group_rebalancing": {"cluster", "group"},
    "kproxy_group_members": {"cluster", "group"},
    "kproxy_group_generation": {"cluster", "group"},
    "kproxy_group_coordinator_moves": {"cluster", "group"},
    "kproxy_group_split_brains": {"cluster", "group"},
    "kproxy_group_failures": {"cluster", "group", "operation"},
    "kproxy_rebalance_causes": {"cluster", "cause"},
    "kproxy_leadership_changes": {"cluster", "change"},
    "kproxy_partitions_offline": {"cluster"},
    "kproxy_partitions_isr_shrunk": {"cluster"},
    "kproxy_insight_left_out": {"cluster", "why"},
    "kproxy_client_info": {"cluster", "client_id", "software_name", "software_version"},
    "kproxy_recorder_dropped": set(),
    "kproxy_workers": set(),
    "kproxy_worker_restarts": set(),
    "kproxy_insight_restarts": {"why"},
    "kproxy_worker_cpu_seconds": {"worker"},
    "kproxy_worker_resident_memory_bytes": {"worker"},
    "kproxy_build": {"version", "core"},
    "kproxy_start_time_seconds": set(),
}


def families(metrics):
    text, _ = render(registry_of(metrics), "application/openmetrics-text")
    return [
        family
        for family in openmetrics.text_string_to_metric_families(text.decode())
        if family.name.startswith("kproxy_")
    ]


def test_every_family_has_the_labels_of_the_contract():
    found = {
        family.name: set().union(*(sample.labels for sample in family.samples)) - {"le"}
        for family in families(busy_metrics())
    }
    assert {name: found.get(name) for name in LABELS} == LABELS
    for name, of in found.items():
        assert "cluster" in of or not of & {"broker", "topic", "api"}, name


def test_no_name_is_the_beginning_of_another_as_openmetrics_extends_it():
    """A counter `x` has the sample `x_total`: an additional gauge `x` would be the same family."""
    names = sorted(family.name for family in families(busy_metrics()))
    assert all(before != after for before, after in pairwise(names))


def test_counters_are_there_before_anything_happens():
    """Prometheus sees the first burst only if there was a sample before it."""
    metrics = Metrics()
    cluster = metrics.cluster("default")
    cluster.expect("bootstrap", "bootstrap")
    cluster.expect("1", "broker-1")
    born = scrape(metrics)
    one = {"cluster": "default", "broker": "1", "listener": "broker-1"}
    assert born["kproxy_unbound_brokers_total"] == {labels(cluster="default"): 0}
    assert born["kproxy_recorder_dropped_total"] == {(): 0}
    assert born["kproxy_connections_total"][labels(**one)] == 0
    assert born["kproxy_open_connections"][labels(**one)] == 0
    assert {born["kproxy_disconnects_total"][labels(**one, cause=cause)] for cause in DISCONNECT_CAUSES} == {0}
    assert born["kproxy_paused_reads_total"] == {
        labels(cluster="default", side=side): 0 for side in ("client", "broker")
    }
    assert born["kproxy_rewritten_addresses_total"][labels(cluster="default", api="Metadata")] == 0
    assert born["kproxy_neutralised_addresses_total"][labels(cluster="default", api="Fetch")] == 0
    assert born["kproxy_protocol_faults_total"][labels(cluster="default", side="client", kind="tls")] == 0
    connection = metrics.connection(info(), "broker-1", "1")
    connection.events([exchange(PRODUCE)])
    found = scrape(metrics)
    api = {"cluster": "default", "api": "Produce"}
    assert found["kproxy_unanswered_requests_total"][labels(**api, cause="broker_closed")] == 0
    assert found["kproxy_throttled_responses_total"][labels(**api, broker="1")] == 0
    connection.events([Unanswered(exchange(PRODUCE), "broker_closed")])
    assert scrape(metrics)["kproxy_unanswered_requests_total"][labels(**api, cause="broker_closed")] == 1


def test_answers_that_lead_around_kproxy_are_no_ports_that_could_not_be_bound():
    metrics = Metrics()
    cluster = metrics.cluster("default")
    cluster.unbound += 2
    assert cluster.leaked("DescribeCluster") == "DescribeCluster"
    samples = scrape(metrics)
    assert samples["kproxy_address_leaks_total"][labels(cluster="default", api="DescribeCluster")] == 1
    assert sum(samples["kproxy_address_leaks_total"].values()) == 1
    assert samples["kproxy_unbound_brokers_total"] == {labels(cluster="default"): 2}


def test_brokers_that_nobody_connects_to_do_not_fill_the_scrape():
    metrics = Metrics()
    cluster = metrics.cluster("default")
    upstream = metrics.upstream("default", ("refused",), lambda: ClusterState(True, True, 1))
    for broker in range(3 * MAX_BORN):
        cluster.expect(str(broker), f"broker-{broker}")
        upstream.broker_known(str(broker))
    assert len(cluster.brokers) == len(upstream.dials) == MAX_BORN
    upstream.dial_failed("9999", "refused")
    upstream.dialled("9999", 1)
    assert upstream.dials["9999"].failures == {"refused": 1} and sum(upstream.dials["9999"].duration) == 1
    assert scrape(metrics)["kproxy_dial_seconds_count"] == {labels(cluster="default", broker="9999"): 1}
    metrics.connection(info(), "broker-9999", "9999")
    assert scrape(metrics)["kproxy_connections_total"][
        labels(cluster="default", broker="9999", listener="broker-9999")
    ] == 1  # fmt: skip


def every_plan():
    for key, api in schema().apis.items():
        for version in api.request.versions:
            yield ApiPlan(key, version, api.name, True)


def test_a_peer_that_uses_every_api_and_every_error_cannot_bloat_a_scrape():
    metrics = Metrics()
    connection = metrics.connection(info(), "bootstrap", "bootstrap")
    plans = list(every_plan())
    connection.events([exchange(plan, throttle_ms=1, errors=tuple(ERRORS)) for plan in plans])
    connection.events([exchange(plan, outcome=NO_ANSWER_EXPECTED) for plan in plans])
    found = scrape(metrics)
    apis = {dict(key)["api"] for key in found["kproxy_requests_total"]}
    assert len({plan.api for plan in plans}) > MAX_APIS
    assert len(apis) == MAX_APIS + 1 and {"other", "Produce", "Fetch", "StreamsGroupHeartbeat"} <= apis
    assert len(found["kproxy_errors_total"]) <= MAX_ERRORS + MAX_APIS + 1
    assert sum(found["kproxy_requests_total"].values()) == 2 * len(plans)
    assert sum(found["kproxy_errors_total"].values()) == len(plans) * len(ERRORS)
    assert len(render(registry_of(metrics))[0]) < 800_000


def test_a_clock_step_hides_nothing(monkeypatch):
    """Events have a clock of their own, which no step of the wall clock reaches; nor does a machine that was asleep."""
    metrics = Metrics()
    now_ns = metrics.now_ns()
    connection = metrics.connection(info(), "main", "1", topics=True)
    wall = time.time_ns
    connection.events([ClientNamed("shop", "a-client", "1.2", now_ns), *consumed(now_ns, wall() // 10**6)])
    before = scrape(metrics)
    for step_s in (61, 3601, 86_400, -3601):
        monkeypatch.setattr(time, "time_ns", lambda step_s=step_s: wall() + step_s * 10**9)
        monkeypatch.setattr(time, "time", lambda step_s=step_s: wall() / 1e9 + step_s)
        for module in ("counters.cells", "scrape.collector", "consumers.lag", "counters.named"):
            monkeypatch.setattr(f"kproxy.metrics.{module}.time_ns", time.time_ns, raising=False)
        after = scrape(metrics)
        for name in ("kproxy_topic_bytes_total", "kproxy_consumer_lag_records", "kproxy_client_info"):
            assert after[name] == before[name], (name, step_s)
        assert after["kproxy_consumer_lag_seconds"].keys() == before["kproxy_consumer_lag_seconds"].keys()
