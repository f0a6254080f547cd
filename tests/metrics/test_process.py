"""Complete scrapes: of a process without traffic, and of one with a little of everything."""

import csv
from pathlib import Path

from kproxy.errors import DIAL_CAUSES
from kproxy.metrics import Metrics
from kproxy.metrics.counters.groups import InsightCells
from kproxy.metrics.counters.passive import PassiveCells
from kproxy.metrics.counters.tls import CLIENT_RESULTS, TlsSide
from kproxy.metrics.counters.upstream import ClusterState
from kproxy.metrics.counters.zookeeper import ZooKeeperCells
from tests.metrics.test_metrics import busy_metrics, info, scrape

EXPECTED = Path(__file__).with_name("process.csv")
# Values that depend on the clock or on the test process.
OF_NOW = {"kproxy_start_time_seconds", "kproxy_config_last_reload_success_timestamp_seconds", "kproxy_build_info"}
NOW_S = 10**9  # values from here on are times since the Unix epoch


def figures(metrics):
    """Return rows (sample, labels, value) without zeros and without histogram buckets that no value fell in."""
    rows = []
    for name, samples in scrape(metrics).items():
        if name in OF_NOW or name.startswith("process_"):
            continue
        highest = {}
        for labels, value in sorted(samples.items(), key=lambda item: float(dict(item[0]).get("le", 0))):
            series = tuple(label for label in labels if label[0] != "le")
            if 0 != value < NOW_S and (not name.endswith("_bucket") or value > highest.get(series, 0)):
                rows.append([name, " ".join(f"{key}={text}" for key, text in labels), f"{value:.9g}"])
            highest[series] = value
    return sorted(rows)


def test_a_process_without_traffic_exposes_only_zeros():
    """Counters must begin at 0: otherwise the rate of a burst soon after the start is wrong."""
    metrics = Metrics()
    metrics.zookeeper["zk"] = ZooKeeperCells(["zk1:2181"])
    cluster = metrics.cluster("demo")
    cluster.has_policy(["rule", "malformed"])
    cluster.follow()
    cluster.insight = InsightCells
    cluster.tls["client"] = TlsSide(CLIENT_RESULTS, dict)
    metrics.upstream("demo", DIAL_CAUSES, lambda: ClusterState(False, False, 0))
    metrics.connection(info("demo"), "main", "1", topics=True).closed("client_closed")
    of = "broker=1 cluster=demo listener=main"
    assert figures(metrics) == [
        ["kproxy_config_last_reload_successful", "", "1"],
        ["kproxy_connections_total", of, "1"],
        ["kproxy_disconnects_total", "broker=1 cause=client_closed cluster=demo listener=main", "1"],
        ["kproxy_workers", "", "1"],
    ]
    watching = Metrics()
    watching.passive = PassiveCells("eth0", ["mute"])
    watching.cluster("demo")
    assert figures(watching) == [["kproxy_watch_interface_up", "interface=eth0", "1"]]


def test_a_little_of_everything_is_exposed_as_it_was_counted():
    with EXPECTED.open(newline="") as file:
        assert figures(busy_metrics()) == [*csv.reader(file)]
