"""Brokers that come and go leave one sum behind, and no total decreases."""

from kproxy.metrics.counters.cells import ApiCells, ClusterCells
from kproxy.metrics.counters.upstream import ClusterState, UpstreamCells
from kproxy.metrics.scrape.folding import fold_broker


def test_the_counts_of_many_brokers_are_kept_as_one():
    cluster = ClusterCells("default")
    upstream = UpstreamCells(("refused", "other"), lambda: ClusterState(True, True, 1))
    for number in range(1000):
        broker, listener = str(1_840_211_337 + number), f"broker-{1_840_211_337 + number}"
        cells = cluster.broker(broker, listener)
        cells.accepted[listener] += 2
        cells.silent[listener] += 1
        cells.disconnects[listener, "client_closed"] += 2
        cells.queue[0] += 1
        cells.queue_ns += 5
        api = cells.apis["Fetch", "12"] = ApiCells("Fetch")
        api.duration[3] += 7
        api.errors[6] = 1
        upstream.dialled(broker, 1000)
        upstream.dial_failed(broker, "refused")
        fold_broker(cluster, upstream, broker)
        fold_broker(cluster, upstream, broker)
    (other,) = cluster.brokers.values()
    assert other.broker == "other"
    assert other.accepted == {"broker-other": 2000}
    assert other.silent == {"broker-other": 1000}
    assert other.open == {"broker-other": 0}
    assert other.disconnects["broker-other", "client_closed"] == 2000
    assert (other.queue[0], other.queue_ns) == (1000, 5000)
    (api,) = other.apis.values()
    assert (api.duration[3], api.errors) == (7000, {6: 1000})
    (dials,) = upstream.dials.values()
    assert (sum(dials.duration), dials.duration_ns, dials.failures["refused"]) == (1000, 1_000_000, 1000)


def test_a_broker_with_connections_keeps_its_series():
    cluster = ClusterCells("default")
    upstream = UpstreamCells(("other",), lambda: ClusterState(True, True, 1))
    cells = cluster.broker("7", "broker-7")
    cells.open["broker-7"] += 1
    fold_broker(cluster, upstream, "7")
    assert cluster.brokers == {"7": cells}
