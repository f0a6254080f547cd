"""Every series of /metrics is in a push, with its type, its labels and its value."""

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from kproxy.metrics.collector import registry_of
from kproxy.metrics.exposition import render
from kproxy.metrics.otlp import metrics_data
from kproxy.metrics.zookeeper import ZooKeeperCells
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
