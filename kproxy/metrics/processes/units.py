"""The cells of one process as units that can be sent to another process and added up there.

A unit is a path and plain data: the cells of one API of one broker, of one topic, or the other cells of a broker or a
cluster. A unit contains all public attributes of a cell object, so a new counter is shared without a change here. An
integer is a sum, a list a histogram, a dictionary has one entry per label; a class lists in LATEST the attributes that
are not sums (a time, a fact that is equal in every process). Refuses to know processes and messages.
"""

from collections.abc import Iterator
from typing import Any

from kproxy.metrics.counters.cells import ApiCells, BrokerCells, ClusterCells
from kproxy.metrics.process import Metrics

Place = tuple[Any, ...]  # its first part is one of these kinds
METRICS, CLUSTER, UPSTREAM, BROKER, API = "metrics", "cluster", "upstream", "broker", "api"

# Attributes that have units of their own, that every process derives itself, or that are equal in all processes.
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
    BrokerCells: {"cluster", "broker", "live", "apis", "by_plan", "tallies"},
}
PLAIN = (int, float, str, tuple, list, dict)


def units(metrics: Metrics) -> Iterator[tuple[Place, Any]]:
    """Yield all units but those of topics, clients and consumers. The data are the cells: do not change them."""
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
    """Return an object's public attributes without callables and those in _NOT_SUMS."""
    left_out: set[str] = _NOT_SUMS.get(type(cells), set())
    return {
        name: _plain(value)
        for name in _names(cells)
        if name not in left_out and not callable(value := getattr(cells, name)) and value is not None
    }


def called(metrics: Metrics) -> dict[str, Any]:
    """Return the current results of the callables among the attributes: a number, or a list of numbers."""
    found = {name: value() for name, value in vars(metrics).items() if callable(value)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _plain(value: Any) -> Any:
    """Return a copy with each callable replaced by `dict`, which returns {}: other processes cannot call them."""
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
    """Return the sum of two processes' values of one unit; neither is changed."""
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
    """Return the sum of two API cells, faster than `add`: a scrape has many of them."""
    total = ApiCells(one.api)
    for name in ("duration", "waits", "request_size", "response_size", "excess_wait", "throttle"):
        mine, its = getattr(one, name), getattr(other, name)
        setattr(total, name, [a + b for a, b in zip(mine, its, strict=True)] if any(its) else mine)
    for name in _API_SUMS:
        setattr(total, name, getattr(one, name) + getattr(other, name))
    total.errors = add(one.errors, other.errors) if other.errors else one.errors
    return total
