"""The cells of one process in units that can be sent to another, and added up there.

A unit is a path and plain data: the cells of one API of one broker, of one topic, or what is left of a broker or a
cluster without those. Of cells that are objects all public attributes are taken, so a counter that is added to them is
shared without a word here. An integer is a sum, a list a histogram, a dictionary has one entry per label; where that is
wrong (a time, the same fact in every process), the class says so in LATEST. Refuses to know processes and messages.
"""

from collections.abc import Iterator
from typing import Any

from kproxy.metrics.cells import ApiCells, BrokerCells, ClusterCells
from kproxy.metrics.process import Metrics

Place = tuple[Any, ...]  # its first part is one of these kinds
METRICS, CLUSTER, UPSTREAM, BROKER, API = "metrics", "cluster", "upstream", "broker", "api"

# What has units of its own, is found anew by every process, or is the same in all.
_NOT_SUMS: dict[type, set[str]] = {
    Metrics: {
        "clusters",
        "started_ns",
        "clock_offset_ns",
        "connection_limit",
        "workers",
        "worker_restarts",
        "worker_usage",
        "reloads",
        "passive",
        "slow",
        "zookeeper",
        "otlp_pushes",
        "otlp_pushed_ns",
    },
    ClusterCells: {"cluster", "brokers", "topics", "lags", "partition_series", "clients", "upstream", "pushes"},
    BrokerCells: {"cluster", "broker", "live", "apis", "by_plan"},
}
PLAIN = (int, float, str, tuple, list, dict)


def units(metrics: Metrics) -> Iterator[tuple[Place, Any]]:
    """All units but those of topics, clients and consumers. The data are the cells themselves: not to be changed."""
    yield (METRICS,), attributes(metrics) | called(metrics)
    for cluster in list(metrics.clusters.values()):
        name = cluster.cluster
        yield (CLUSTER, name), attributes(cluster)
        if cluster.upstream is not None:
            yield (UPSTREAM, name), attributes(cluster.upstream)
        for broker in list(cluster.brokers.values()):
            yield (BROKER, name, broker.broker), attributes(broker) | {"elsewhere": broker.inflight}
            for (api, version), cells in list(broker.apis.items()):
                yield (API, name, broker.broker, api, version), cells


def attributes(cells: Any) -> dict[str, Any]:
    """What is counted in an object's public attributes; callables, and what is no sum, are left out."""
    left_out: set[str] = _NOT_SUMS.get(type(cells), set())
    return {
        name: _plain(value)
        for name in _names(cells)
        if name not in left_out and not callable(value := getattr(cells, name)) and value is not None
    }


def called(metrics: Metrics) -> dict[str, Any]:
    """What callables among the attributes return now: one number, or several in a list."""
    found = {name: value() for name, value in vars(metrics).items() if callable(value)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _plain(value: Any) -> Any:
    """The same without callables, which no other process could call: one that returns nothing stands in their place."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.copy().items()}
    if isinstance(value, PLAIN):
        return value
    copy = object.__new__(type(value))
    for name in _all_names(value):
        attribute = getattr(value, name)
        setattr(copy, name, dict if callable(attribute) else attribute)
    return copy


def _names(cells: Any) -> list[str]:
    slots = getattr(type(cells), "__slots__", None)
    return [name for name in (slots if slots is not None else vars(cells)) if not name.startswith("_")]


def add(one: Any, other: Any) -> Any:
    """The sum of what two processes have counted in the same place; neither is changed."""
    if isinstance(one, bool | str | tuple):
        return one
    if isinstance(one, int | float):
        return one + other
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    if isinstance(one, dict):
        both = dict(one)
        for key, value in other.copy().items():
            both[key] = add(both[key], value) if key in both else value
        return both
    if isinstance(one, ApiCells):
        return _add_apis(one, other)
    latest: frozenset[str] = getattr(type(one), "LATEST", frozenset())
    total = object.__new__(type(one))
    for name in _all_names(one):
        mine, its = getattr(one, name), getattr(other, name)
        setattr(total, name, max(mine, its) if name in latest else mine if callable(mine) else add(mine, its))
    return total


def _all_names(cells: Any) -> list[str]:
    slots = getattr(type(cells), "__slots__", None)
    return list(slots if slots is not None else vars(cells))


_API_SUMS = (
    *("duration_ns", "waits_ns", "sending_ns", "receiving_ns"),
    *("request_bytes", "response_bytes", "excess_wait_ns", "throttle_ns"),
)


def _add_apis(one: ApiCells, other: ApiCells) -> ApiCells:
    """As `add` does; there are many of these in a scrape."""
    total = ApiCells(one.api)
    for name in ("duration", "waits", "request_size", "response_size", "excess_wait", "throttle"):
        mine, its = getattr(one, name), getattr(other, name)
        setattr(total, name, [a + b for a, b in zip(mine, its, strict=True)] if any(its) else mine)
    for name in _API_SUMS:
        setattr(total, name, getattr(one, name) + getattr(other, name))
    total.errors = add(one.errors, other.errors) if other.errors else one.errors
    return total
