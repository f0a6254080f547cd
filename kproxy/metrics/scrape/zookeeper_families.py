"""The metric families of `[[zookeeper]]` listeners. Part of the collector, whose rules hold here too.

Refuses to know how a scrape arrives.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from kproxy.metrics.counters.bounds import DURATION_NS
from kproxy.metrics.counters.zookeeper import DIRECTIONS, ZooKeeperCells

_CLUSTER = ("cluster",)
_OP = ("cluster", "op")
_LES = [*(str(floatToGoString(bound / 1e9)) for bound in DURATION_NS), "+Inf"]  # type: ignore[no-untyped-call]


def zookeeper_families(listeners: Mapping[str, ZooKeeperCells]) -> Iterator[Metric]:
    """Yield the families of all listeners; none without listeners. listeners: cells by the listener's name."""
    if not listeners:
        return
    each = list(listeners.items())
    ops = [((name, op), cells) for name, of in each for op, cells in list(of.ops.items())]
    requests = ((label, cells.requests) for label, cells in ops)
    yield _sum("requests", "Completed operations of ZooKeeper, answered or not.", _OP, requests)
    yield _sum(
        "unanswered",
        "Operations of ZooKeeper without an answer: their connection ended.",
        _OP,
        ((label, cells.unanswered) for label, cells in ops),
    )
    yield _sum(
        "errors",
        "Answers of ZooKeeper with an error, by its own name.",
        ("cluster", "op", "error"),
        (((*label, error), count) for label, cells in ops for error, count in list(cells.errors.items())),
    )
    latency = HistogramMetricFamily(
        "kproxy_zookeeper_latency_seconds",
        "ZooKeeper's time: from the request's last byte to the answer's first.",
        labels=_OP,
    )
    for label, cells in ops:
        buckets = list(zip(_LES, accumulate(cells.latency), strict=True))
        latency.add_metric(label, buckets, cells.latency_ns / 1e9)
    yield latency
    yield _sum(
        "watches_fired",
        "Notifications that reached clients, by the type of their event.",
        ("cluster", "type"),
        (((name, kind), count) for name, of in each for kind, count in list(of.fired.items())),
    )
    yield _sum(
        "bytes",
        "Bytes that clients (request) and servers (response) of ZooKeeper sent.",
        ("cluster", "direction"),
        (((name, way), count) for name, of in each for way, count in zip(DIRECTIONS, of.bytes, strict=True)),
    )
    yield _sum("connections", "ZooKeeper client connections.", _CLUSTER, (((name,), of.accepted) for name, of in each))
    yield _gauge("open_connections", "Connected ZooKeeper clients.", each, lambda of: of.connections)
    yield _gauge("sessions", "Connected ZooKeeper sessions.", each, lambda of: of.sessions)
    yield _sum(
        "unread_connections",
        "Connections relayed without decoding: after a four-letter command, or bytes that are not a frame (fault).",
        ("cluster", "cause"),
        (((name, cause), count) for name, of in each for cause, count in of.unread.items()),
    )
    yield _sum(
        "values_left_out",
        "Frames whose values were not recorded: large frames, or too many at once.",
        _CLUSTER,
        (((name,), of.values_left_out()) for name, of in each),
    )
    yield _sum(
        "dial_failures",
        "Failed connections to a ZooKeeper server.",
        ("cluster", "server"),
        (((name, server), count) for name, of in each for server, count in of.dial_failures.items()),
    )


def _sum(name: str, text: str, labels: Sequence[str], counts: Iterable[tuple[tuple[str, ...], int]]) -> Metric:
    family = CounterMetricFamily(f"kproxy_zookeeper_{name}", text, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


def _gauge(
    name: str, text: str, each: list[tuple[str, ZooKeeperCells]], value: Callable[[ZooKeeperCells], int]
) -> Metric:
    family = GaugeMetricFamily(f"kproxy_zookeeper_{name}", text, labels=_CLUSTER)
    for label, cells in each:
        family.add_metric((label,), value(cells))
    return family
