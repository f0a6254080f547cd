"""Metrics that clients push, as Prometheus metric families at scrape time.

Every name is PREFIX and the client's name of the metric. If clients give one name to a counter and to a gauge, the
first kind gets it. Refuses to know data points (`telemetry.py`).
"""

from collections.abc import Iterable, Iterator
from uuid import UUID

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kproxy.metrics.counters.cells import ClusterCells
from kproxy.metrics.counters.named import OTHER, shown
from kproxy.metrics.pushed.telemetry import COUNTER, OWN_LABELS
from kproxy.protocol.shown.render import uuid_text

PREFIX = "kproxy_client_telemetry_"


def telemetry_families(clusters: Iterable[ClusterCells], now_ns: int) -> Iterator[Metric]:
    """Yield the families of responses to pushes, and of the pushed metrics, for clusters that accept pushes."""
    receiving = [cluster for cluster in clusters if cluster.telemetry is not None]
    if not receiving:
        return
    answers = CounterMetricFamily(
        "kproxy_telemetry_answers",
        "Requests of clients that push their metrics, answered by kproxy, by the error of the answer.",
        labels=("cluster", "api", "error"),
    )
    left_out = CounterMetricFamily(
        "kproxy_telemetry_points_left_out",
        "Data points that clients pushed and that have no series, by reason.",
        labels=("cluster", "why"),
    )
    clients = GaugeMetricFamily(
        "kproxy_telemetry_clients", "Clients whose pushed metrics have series of their own.", labels=("cluster",)
    )
    pushed: dict[str, Metric] = {}
    for cluster in receiving:
        assert cluster.telemetry is not None
        for (api, error), count in cluster.telemetry.answers.copy().items():
            answers.add_metric((cluster.cluster, api, error), count)
        for why, count in cluster.telemetry.left_out.copy().items():
            left_out.add_metric((cluster.cluster, why), count)
        own = 0
        for instance, client in cluster.pushes.shown(now_ns) if cluster.pushes is not None else ():
            own += instance is not None
            values = _client_labels(cluster.cluster, instance, client.client_id, client.software)
            for series, value in (*client.values.items(), *client.sums.items()):
                family = pushed.get(series.name)
                if family is None:
                    family = pushed[series.name] = _family(series.name, series.kind)
                if family.type == series.kind:
                    sample = f"{family.name}_total" if series.kind == COUNTER else family.name
                    family.add_sample(sample, {**values, **dict(series.labels)}, value)
        clients.add_metric((cluster.cluster,), own)
    yield from (answers, left_out, clients)
    yield from pushed.values()


def _client_labels(cluster: str, instance: UUID | None, client_id: str, software: tuple[str, str]) -> dict[str, str]:
    if instance is None:
        return dict(zip(OWN_LABELS, (cluster, *[OTHER] * 4), strict=True))
    return dict(zip(OWN_LABELS, (cluster, shown(client_id), uuid_text(instance), *software), strict=True))


def _family(name: str, kind: str) -> Metric:
    make = CounterMetricFamily if kind == COUNTER else GaugeMetricFamily
    return make(PREFIX + name, "Pushed by clients (KIP-714).")
