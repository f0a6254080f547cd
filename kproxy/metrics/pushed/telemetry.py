"""Metrics that clients push (KIP-714), as cells: series by client, bounded, ending with their client.

Duty: read the data points of a push (OTLP) and keep the latest of each. Names become Prometheus names: characters other
than letters and digits become `_`, and the prefix `org.apache.kafka.` is removed. A client is one instance of a client
library, by its client instance id. It gets its own series up to the limit; the counters of all other clients add up in
`other`, their gauges are left out. Its series end LIFE_INTERVALS push intervals after its last push.

Bounds, per cluster: the settings limit clients, and series of each client, of CHARACTERS on average as on /metrics;
MAX_LABELS labels of a point, MAX_NAME characters of names and MAX_LABEL of values; MAX_OTHER series of `other`;
MAX_ITEMS of one push. Data points left out are counted. A push is read in slices of PER_SLICE, and one of more than
WHOLE_BYTES is parsed in pieces, so that the event loop runs in between.

Refuses to know requests, answers and Prometheus' families (`telemetry_families.py`).
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from sys import intern
from typing import Any, Final, NamedTuple
from uuid import UUID

from kproxy.errors import Malformed
from kproxy.metrics.counters.named import MAX_LABEL
from kproxy.metrics.pushed.pushed_pieces import pieces

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
LIFE_INTERVALS = 3  # a client jitters its interval by a half
MAX_LABELS = 8
MAX_NAME = 160  # characters
CHARACTERS = 512  # most characters of a series' name and label values, on average over a client's series
MAX_OTHER = 2000
MAX_ITEMS = 20_000  # metrics and points read of one push
PER_SLICE = 64
WHOLE_BYTES = 64 * 1024  # largest push that is parsed at once: 1-3 ms

# Reasons for data points without a series. clients: a gauge of a client without own series. series: the client's limit
# of series or characters. kind: neither a counter nor a gauge, a counter below 0, one name for a counter and a gauge,
# a counter pushed both as a cumulative value and as deltas, or a second value of one series in one push.
LEFT_OUT = ("clients", "series", "kind")

# Labels of every series; a client's own labels do not replace them.
OWN_LABELS = ("cluster", "client_id", "client_instance_id", "software_name", "software_version")

Labels = tuple[tuple[str, str], ...]
_KAFKA = "org.apache.kafka."
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_TOTALS = re.compile(r"(_+total)+$")


class Series(NamedTuple):
    """One series of a client, without the labels that all series of the client have."""

    name: str  # its family's name without the common prefix and `_total`
    kind: str  # COUNTER or GAUGE
    labels: Labels


class Answers:
    """Counts of responses to pushing clients, and of data points left out, in one cluster."""

    def __init__(self, errors: Mapping[str, tuple[str, ...]]) -> None:
        """errors: the errors that responses can have, by API."""
        self.answers = {(api, error): 0 for api, names in errors.items() for error in names}
        self.left_out = dict.fromkeys(LEFT_OUT, 0)


class PushingClient:
    """The pushed metrics of one client."""

    def __init__(self, client_id: str, software: tuple[str, str], ends_ns: int, since_ns: int = 0) -> None:
        self.since_ns = since_ns
        self.client_id = client_id[:MAX_LABEL]
        self.software = software[0][:MAX_LABEL], software[1][:MAX_LABEL]
        self.ends_ns = ends_ns  # end of life, by the clock of the events
        self.pushed_ns = 0  # 0: not yet
        self.values: dict[Series, float] = {}
        self.sums: dict[Series, float] = {}  # counters that it pushes as deltas, summed up

    def characters(self, series: Series) -> int:
        """Return the number of characters in names and label values of one of its series on /metrics."""
        own = sum(len(name) + len(value) for name, value in series.labels)
        return len(self.client_id) + len(self.software[0]) + len(self.software[1]) + len(series.name) + own


class Pushes:
    """The clients of one cluster that push to this process."""

    def __init__(self) -> None:
        self.clients: dict[UUID, PushingClient] = {}
        self.other: dict[Series, float] = {}
        self._max_clients = self._max_series = 0
        self._kinds: dict[str, tuple[str, int]] = {}  # by name in use: its kind, and the number of clients that use it

    def limit(self, max_clients: int, max_series: int) -> None:
        """Limit the clients with own series, and the series of each; the newest clients beyond it lose theirs."""
        self._max_clients, self._max_series = max_clients, max_series
        while len(self.clients) > max_clients:
            self._release(self.clients.popitem()[1])

    def has_place(self, instance: UUID, now_ns: int) -> bool:
        """Return whether this client has own series, or the limit allows them."""
        if instance not in self.clients and len(self.clients) >= self._max_clients:
            self._sweep(now_ns)
            return len(self.clients) < self._max_clients
        return True

    def admit(self, instance: UUID, client_id: str, software: tuple[str, str], now_ns: int, life_ns: int) -> bool:
        """Give a client own series, if the limit allows it; return whether it has them."""
        if not self.has_place(instance, now_ns):
            return False
        client = self.clients.get(instance)
        if client is None:
            client = self.clients[instance] = PushingClient(client_id, software, now_ns + life_ns, now_ns)
        client.ends_ns = max(client.ends_ns, now_ns + life_ns)
        return True

    def take(self, instance: UUID, pushed: Any, now_ns: int, left_out: dict[str, int]) -> Iterator[None]:
        """Keep a client's push, as `parse` returned it; yield after each slice, so that the event loop runs.

        Raises Malformed within a push that is parsed in pieces; a client with own series keeps its former values then.
        """
        client = self.clients.get(instance)
        values: dict[Series, float] = {}
        sums = dict(client.sums) if client is not None else self.other
        limit = self._max_series if client is not None else MAX_OTHER
        room = limit * CHARACTERS - sum(map(client.characters, sums)) if client is not None else 0
        item = -1
        for found in _points(pushed):
            if found is None:
                yield
                continue
            metric, point = found
            item += 1
            if item % PER_SLICE == PER_SLICE - 1:
                yield
            if item >= MAX_ITEMS:
                left_out["series"] += 1
                break
            if point is None:
                continue
            if metric.kind is None or self._kinds.get(metric.name, (metric.kind,))[0] != metric.kind:
                left_out["kind"] += 1
                continue
            if client is None and not metric.is_delta:
                left_out["clients"] += 1
                continue
            value = point.as_double if point.WhichOneof("value") == "as_double" else float(point.as_int)
            if metric.kind == COUNTER and not value >= 0:  # NaN too
                left_out["kind"] += 1
                continue
            series = Series(metric.name, metric.kind, _labels(point.attributes))
            into, elsewhere = (sums, values) if metric.is_delta else (values, sums)
            # Pushed as a delta and as a cumulative value, or by two metrics whose names are one here: the first counts.
            if series in elsewhere or series in values:
                left_out["kind"] += 1
                continue
            if series not in into:
                characters = client.characters(series) if client is not None else 0
                if len(values) + len(sums) >= limit or characters > room:
                    left_out["series"] += 1
                    continue
                room -= characters
            into[series] = into.get(series, 0.0) + value if metric.is_delta else value
        if client is not None and self.clients.get(instance) is client:
            self._release(client)
            client.values, client.sums, client.pushed_ns = values, sums, now_ns
            for name, kind in _names(client).items():
                self._kinds[name] = (kind, self._kinds.get(name, (kind, 0))[1] + 1)

    def shown(self, now_ns: int) -> Iterator[tuple[UUID | None, PushingClient]]:
        """Yield the live clients that have pushed; None: all clients without own series."""
        for instance, client in list(self.clients.items()):
            if client.pushed_ns and client.ends_ns > now_ns:
                yield instance, client
        if self.other:
            yield None, of_others(self.other.copy())

    def _sweep(self, now_ns: int) -> None:
        for instance in [instance for instance, client in self.clients.items() if client.ends_ns <= now_ns]:
            self._release(self.clients.pop(instance))

    def _release(self, client: PushingClient) -> None:
        for name in _names(client):
            kind, users = self._kinds[name]
            if users > 1:
                self._kinds[name] = kind, users - 1
            else:
                del self._kinds[name]


def of_others(sums: dict[Series, float]) -> PushingClient:
    """Return all clients without own series, as one."""
    client = PushingClient("", ("", ""), 0)
    client.sums = sums
    return client


class Pieces(NamedTuple):
    """A large push that is not parsed yet."""

    data: bytes


def parse(data: bytes) -> Any:
    """Return OTLP MetricsData (protobuf) for `take`; data of more than WHOLE_BYTES is parsed there.

    Raises Malformed; ImportError without the extra `telemetry`.
    """
    return Pieces(data) if len(data) > WHOLE_BYTES else _parsed(data)


def _parsed(data: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    try:
        return MetricsData.FromString(data)
    except (DecodeError, RecursionError) as fault:
        raise Malformed(f"the {len(data)} bytes pushed are no metrics of OTLP: {fault}") from None


_DELTA = 1  # AGGREGATION_TEMPORALITY_DELTA of opentelemetry/proto/metrics/v1/metrics.proto


class _Metric(NamedTuple):
    name: str
    kind: str | None  # None: neither a counter nor a gauge
    is_delta: bool


def _points(pushed: Any) -> Iterator[tuple[_Metric, Any] | None]:
    """Yield each data point with its metric; None: the caller may let the event loop run."""
    if not isinstance(pushed, Pieces):
        yield from _points_of(pushed)
        return
    for piece in pieces(pushed.data):
        if piece is not None:
            yield from _points_of(_parsed(piece))
        yield None


def _points_of(pushed: Any) -> Iterator[tuple[_Metric, Any]]:
    """Yield each data point with its metric, and (metric, None) for each container, which counts for MAX_ITEMS too."""
    nothing = _Metric("", None, False)
    for resource in pushed.resource_metrics:
        yield nothing, None
        for scope in resource.scope_metrics:
            yield nothing, None
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                if kind is None:
                    yield nothing, None
                    continue
                data = getattr(metric, kind)
                if kind == "gauge" or (kind == "sum" and not data.is_monotonic):
                    found = _Metric(_name(metric.name[:MAX_LABEL], False), GAUGE, False)
                elif kind == "sum":
                    name = _name(metric.name[:MAX_LABEL], True)
                    found = _Metric(name, COUNTER, data.aggregation_temporality == _DELTA)
                else:
                    found = nothing
                yield found, None
                for point in data.data_points:
                    yield found, point


def _names(client: PushingClient) -> dict[str, str]:
    """Return the names that a client uses, with their kinds."""
    return {series.name: series.kind for series in (*client.values, *client.sums)}


@lru_cache(4096)
def _name(name: str, is_counter: bool) -> str:
    """Return the name of a family. Exposition adds `_total` to counters, so no gauge's name may end in it."""
    text = _NOT_A_NAME.sub("_", name.removeprefix(_KAFKA))[:MAX_NAME].strip("_") or "unnamed"
    if is_counter:
        return intern(_TOTALS.sub("", f"_{text}").strip("_") or "unnamed")
    return intern(f"{text}_value" if text.endswith(("_total", "_created")) else text)


def _labels(attributes: Any) -> Labels:
    """Return the labels of a data point, sorted by name."""
    found: dict[str, str] = {}
    for attribute in attributes[:MAX_LABELS]:
        found.setdefault(_label(attribute.key[:MAX_NAME]), _text(attribute.value))
    return tuple(sorted(found.items()))


@lru_cache(1024)
def _label(key: str) -> str:
    text = _NOT_A_NAME.sub("_", key)
    if not text or text[0].isdigit() or text.startswith("__"):
        text = f"label_{text.strip('_')}"
    return intern(f"pushed_{text}" if text in OWN_LABELS else text)


def _text(value: Any) -> str:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        text: str = value.string_value
        return intern(text[:MAX_LABEL])
    if kind in ("int_value", "bool_value", "double_value"):
        return str(getattr(value, kind))
    return ""
