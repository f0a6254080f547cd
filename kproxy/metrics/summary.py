"""The cells at one moment, summed up: the JSON of /api/traffic.

It reads the same cells as a scrape, never a second count. Refuses to know clients and presentation.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kproxy.metrics.counters.bounds import DURATION_NS, PROXY_NS, cell, quantile
from kproxy.metrics.counters.cells import ApiCells
from kproxy.metrics.process import Metrics
from kproxy.metrics.scrape.known import error_label


@dataclass
class Totals:
    """The counters of an API, of a broker, or of everything."""

    requests: int = 0
    duration: list[int] = field(default_factory=lambda: cell(DURATION_NS))
    waits: list[int] = field(default_factory=lambda: cell(DURATION_NS))
    request_bytes: int = 0
    response_bytes: int = 0
    throttled: int = 0
    throttle_ns: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, cells: ApiCells) -> None:
        self.requests += cells.requests
        self.duration = _plus(self.duration, cells.duration)
        self.waits = _plus(self.waits, cells.waits)
        self.request_bytes += cells.request_bytes
        self.response_bytes += cells.response_bytes
        self.throttled += sum(cells.throttle)
        self.throttle_ns += cells.throttle_ns
        for code, count in cells.errors.copy().items():
            self.errors[error_label(code)] += count

    def duration_s(self, q: float) -> float | None:
        """Return the q-quantile of the broker's time, in seconds; None: no data."""
        return _seconds(quantile(DURATION_NS, self.duration, q))

    def wait_s(self, q: float) -> float | None:
        """Return the q-quantile of the client's whole wait, in seconds; None: no data."""
        return _seconds(quantile(DURATION_NS, self.waits, q))


@dataclass
class Summary:
    apis: dict[str, Totals]
    brokers: dict[tuple[str, str], Totals]  # by cluster and broker
    connections: dict[tuple[str, str], int]  # open now, by cluster and broker
    inflight: dict[tuple[str, str], int]
    inside: list[int]  # histogram of the time of frames in the proxy, both directions
    accepted: int
    faults: int
    unanswered: int

    def inside_s(self, q: float) -> float | None:
        """Return the q-quantile of the time of frames inside the proxy, in seconds; None: no data."""
        return _seconds(quantile(PROXY_NS, self.inside, q))

    def as_json(self) -> dict[str, Any]:
        return {
            "apis": {api: _as_json(totals) for api, totals in sorted(self.apis.items())},
            "brokers": [
                {
                    "cluster": key[0],
                    "broker": key[1],
                    "connections": self.connections[key],
                    "inflight_requests": self.inflight[key],
                    **_as_json(totals),
                }
                for key, totals in sorted(self.brokers.items())
            ],
            "proxy_duration_seconds": {"p50": self.inside_s(0.5), "p99": self.inside_s(0.99)},
            "connections_accepted": self.accepted,
            "protocol_faults": self.faults,
            "unanswered_requests": self.unanswered,
        }


def summarise(metrics: Metrics) -> Summary:
    """Return the sums of all cells now."""
    apis: dict[str, Totals] = {}
    brokers: dict[tuple[str, str], Totals] = {}
    connections: dict[tuple[str, str], int] = {}
    inflight: dict[tuple[str, str], int] = {}
    accepted = faults = unanswered = 0
    for cluster in list(metrics.clusters.values()):
        faults += sum(cluster.faults.copy().values())
        unanswered += sum(cluster.unanswered.copy().values())
        for name, broker in list(cluster.brokers.items()):
            key = cluster.cluster, name
            accepted += sum(broker.accepted.copy().values())
            connections[key] = sum(broker.open.copy().values())
            inflight[key] = broker.inflight
            brokers[key] = Totals()
            for (api, _), cells in list(broker.apis.items()):
                brokers[key].add(cells)
                apis.setdefault(api, Totals()).add(cells)
    inside = cell(PROXY_NS)
    for direction in metrics.directions.values():
        inside = _plus(inside, direction.counts)
    return Summary(
        apis,
        brokers,
        connections,
        inflight,
        inside,
        accepted,
        faults,
        unanswered,
    )


def _as_json(totals: Totals) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "request_bytes": totals.request_bytes,
        "response_bytes": totals.response_bytes,
        "duration_seconds": {"p50": totals.duration_s(0.5), "p99": totals.duration_s(0.99)},
        "wait_seconds": {"p50": totals.wait_s(0.5), "p99": totals.wait_s(0.99)},
        "throttled_responses": totals.throttled,
        "errors": dict(totals.errors),
    }


def _plus(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9
