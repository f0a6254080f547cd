"""Every series of /metrics is in a push, with its type, its labels and its value."""

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import Gauge, Histogram, Sum

from kproxy.metrics.counters.zookeeper import ZooKeeperCells
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.metrics.scrape.otlp import metrics_data
from tests.metrics.test_metrics import busy_metrics
from tests.otlp import Collector, exposed

STARTED_NS, NOW_NS = 10**18, 10**18 + 5


def test_every_series_is_in_a_push_as_it_is_exposed():
    metrics = busy_metrics()
    metrics.zookeeper["old"] = ZooKeeperCells(["zk1:2181"])
    metrics.otlp_pushes.update(success=1, failed=0)
    registry = registry_of(metrics)
    taken = Collector()
    resource = {"service.name": "kproxy"}
    taken.pushes.append(encode_metrics(metrics_data(registry.collect(), resource, STARTED_NS, NOW_NS)))
    found, wanted = taken.series(), exposed(render(registry)[0].decode())
    moving = {key for key in wanted if key[0].startswith("process_")}  # the process goes on between the two
    assert found.keys() == wanted.keys() and len(found) > 400 and len(moving) > 4
    assert {found[key][0] for key in found} == {"counter", "gauge", "histogram"}
    for key in wanted.keys() - moving:
        assert found[key] == wanted[key], key
    assert taken.resource == resource
    units = {metric.unit for metric in taken.pushes[0].resource_metrics[0].scope_metrics[0].metrics}
    assert units == {""}  # a receiver would put another one behind the name


def test_counters_and_histograms_began_when_counting_began():
    """A receiver takes a later start for a reset, and would count everything once more."""
    pushed = metrics_data(registry_of(busy_metrics()).collect(), {}, STARTED_NS, NOW_NS)
    kinds = set()
    for metric in pushed.resource_metrics[0].scope_metrics[0].metrics:
        kinds.add(kind := type(metric.data))
        started = {point.start_time_unix_nano for point in metric.data.data_points}
        assert started == {None if kind is Gauge else STARTED_NS}, metric.name
        assert {point.time_unix_nano for point in metric.data.data_points} == {NOW_NS}
    assert kinds == {Gauge, Histogram, Sum}
