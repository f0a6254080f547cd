"""Events to plain integer cells: the hot half of the metrics.

Duty: count. An exchange costs a few hundred nanoseconds here: one dictionary look-up by the identity of its plan, then
additions to integers; labels, floats and text are made by the collector, at a scrape.

Bounded by what the schema knows: cells exist per (cluster, broker, api, version) of known APIs. What a peer can invent
is capped: unknown api keys at UNKNOWN_APIS names, unknown error codes at UNKNOWN_ERRORS, unknown versions at one;
names of topics and clients as `named` says, consumers as `lag` does.

Everything here runs on the thread of the event loop. A scrape reads from another one, so the containers it walks are
copied in one step first, and a histogram's count is the sum of its buckets: whatever the moment, it agrees with itself.

Refuses to know labels' text, sockets and how a scrape comes.
"""

from bisect import bisect_left
from collections.abc import Sized
from time import time_ns
from typing import Any

from kproxy.metrics.bounds import (
    DURATION_NS,
    EXCESS_WAIT_NS,
    PROXY_NS,
    QUEUE_NS,
    SIZE_BYTES,
    THROTTLE_NS,
    cell,
)
from kproxy.metrics.lag import Fetching, Lags
from kproxy.metrics.named import ClientCells, Clients, Topics
from kproxy.protocol.error_codes import ERRORS, error_name
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import (
    ANSWERED,
    ANSWERED_BY_PROXY,
    NO_ANSWER_EXPECTED,
    SIDES,
    AddressesHidden,
    ClientNamed,
    Closed,
    Desync,
    Event,
    Exchange,
    Repeated,
    Unanswered,
)
from kproxy.wire.interest import ApiPlan

UNKNOWN_APIS = 16
UNKNOWN_ERRORS = 16
OTHER_ERROR = 0x10000  # outside int16: the cell of all unknown error codes beyond the cap

# Plans are made once per owner and remembered by it; more than this many means that someone makes them anew.
_MAX_PLANS = 4096


class ApiCells:
    """What is counted of one (cluster, broker, api, version)."""

    __slots__ = (
        "duration",
        "duration_ns",
        "errors",
        "excess_wait",
        "excess_wait_ns",
        "request_bytes",
        "request_size",
        "response_bytes",
        "response_size",
        "throttle",
        "throttle_ns",
    )

    def __init__(self) -> None:
        self.duration = cell(DURATION_NS)
        self.duration_ns = 0
        self.request_size = cell(SIZE_BYTES)
        self.request_bytes = 0
        self.response_size = cell(SIZE_BYTES)
        self.response_bytes = 0
        self.excess_wait = cell(EXCESS_WAIT_NS)  # stays empty for what is not a Fetch
        self.excess_wait_ns = 0
        self.throttle = cell(THROTTLE_NS)
        self.throttle_ns = 0
        self.errors: dict[int, int] = {}

    @property
    def requests(self) -> int:
        """Each has a size, so they need no count of their own."""
        return sum(self.request_size)


class BrokerCells:
    """What is counted of one (cluster, broker)."""

    __slots__ = ("apis", "broker", "by_plan", "cluster", "connections", "live", "queue", "queue_ns")

    def __init__(self, cluster: str, broker: str) -> None:
        self.cluster = cluster
        self.broker = broker
        self.live: set[ConnectionMetrics] = set()
        self.connections: dict[str, int] = {}  # open now, by listener
        self.apis: dict[tuple[str, str], ApiCells] = {}  # by api and version, as the labels spell them
        self.by_plan: dict[ApiPlan, ApiCells] = {}  # the same cells, found by identity; only plans of known APIs
        # Only times above 0 are counted: those that did not queue are the answered requests less these.
        self.queue = cell(QUEUE_NS)
        self.queue_ns = 0


class DirectionCells:
    """How long whole frames of one direction were inside the proxy."""

    __slots__ = ("duration", "duration_ns")

    def __init__(self) -> None:
        self.duration = cell(PROXY_NS)
        self.duration_ns = 0


class ConnectionMetrics:
    """The counting of one connection; what it counts is shared with all connections to that broker.

    `pending` is whatever has the length of the requests that wait for answers now: the session's own queue.
    """

    __slots__ = (
        "_by_plan",
        "_cells",
        "_client",
        "_fetching",
        "_listener",
        "_metrics",
        "_open",
        "_request",
        "_response",
        "_topics",
        "pending",
    )

    def __init__(
        self,
        metrics: "Metrics",
        cells: BrokerCells,
        listener: str,
        pending: Sized,
        topics: Topics | None,
        lags: Lags | None,
    ) -> None:
        self._metrics = metrics
        self._cells = cells
        self._by_plan = cells.by_plan
        self._listener = listener
        self._topics = topics
        self._fetching = Fetching(lags) if lags is not None else None
        self._client: ClientCells | None = None
        self._open = True
        self._request = metrics.directions["request"]
        self._response = metrics.directions["response"]
        self.pending = pending

    def events(self, events: list[Event]) -> None:
        """Count these events; nothing of them is kept."""
        if self._topics is not None:
            self._topics.events(events)
        if self._fetching is not None:
            self._fetching.events(events)
        plan = cells = None
        request_bytes = response_bytes = -1
        request_bucket = response_bucket = 0
        of_broker = self._cells
        for event in events:
            if event.__class__ is not Exchange or event.outcome is not ANSWERED:
                if event.__class__ is Repeated:
                    self._repeated(event, cells, response_bucket)
                else:
                    self._unusual(event)
                continue
            if event.plan is not plan:
                plan = event.plan
                cells = self._by_plan.get(plan) or self._metrics.api_cells(of_broker, plan)
            size = event.request_bytes
            if size != request_bytes:  # those of one read are often alike
                request_bytes = size
                request_bucket = bisect_left(SIZE_BYTES, size)
            cells.request_bytes += size
            cells.request_size[request_bucket] += 1
            size = event.response_bytes
            if size != response_bytes:
                response_bytes = size
                response_bucket = bisect_left(SIZE_BYTES, size)
            cells.response_bytes += size
            cells.response_size[response_bucket] += 1
            duration = event.response_start - event.request_end - event.muted_ns
            queue = event.queue_ns
            if queue > 0:
                duration -= queue
                of_broker.queue[bisect_left(QUEUE_NS, queue)] += 1
                of_broker.queue_ns += queue
            if duration > 0:
                cells.duration_ns += duration
            cells.duration[bisect_left(DURATION_NS, duration)] += 1
            if event.max_wait_ms is not None:
                excess = duration - event.max_wait_ms * 1_000_000
                if excess > 0:
                    cells.excess_wait_ns += excess
                cells.excess_wait[bisect_left(EXCESS_WAIT_NS, excess)] += 1
            if event.throttle_ms > 0:
                throttle = event.throttle_ms * 1_000_000
                cells.throttle_ns += throttle
                cells.throttle[bisect_left(THROTTLE_NS, throttle)] += 1
            if event.errors:
                self._metrics.count_errors(cells.errors, event.errors)

    def _repeated(self, event: Repeated, cells: ApiCells, response_bucket: int) -> None:
        """More of the exchange before, whose cells and bucket these are: they queued all the time."""
        request_size = cells.request_size
        request_bytes = -1
        for size in event.request_bytes:
            if size != request_bytes:
                request_bytes = size
                bucket = bisect_left(SIZE_BYTES, size)
            request_size[bucket] += 1
        cells.request_bytes += sum(event.request_bytes)
        count = len(event.request_bytes)
        exchange = event.exchange
        cells.response_bytes += count * exchange.response_bytes
        cells.response_size[response_bucket] += count
        cells.duration[0] += count
        queue = exchange.response_end - exchange.request_end
        if queue > 0:
            self._cells.queue[bisect_left(QUEUE_NS, queue)] += count
            self._cells.queue_ns += count * queue

    def _unusual(self, event: Event) -> None:
        metrics = self._metrics
        if isinstance(event, Exchange):
            if event.outcome in (NO_ANSWER_EXPECTED, ANSWERED_BY_PROXY):  # no broker answered
                self._request_only(event)
            # An answer that nobody asked for comes with a Desync, and is counted there.
        elif isinstance(event, Unanswered):
            self._request_only(event.exchange)
            _add(metrics.unanswered, (metrics.api_label(event.exchange.plan), event.cause), 1)
        elif isinstance(event, AddressesHidden):
            self.neutralised(metrics.api_label(event.exchange.plan), 1)
        elif isinstance(event, Desync):
            _add(metrics.faults, (SIDES[event.side], event.kind), 1)
        elif isinstance(event, ClientNamed):
            self._client_left(event.now_ns)
            self._client = metrics.clients.joined(event)
        elif isinstance(event, Closed):
            self._client_left(event.now_ns)

    def _client_left(self, now_ns: int) -> None:
        if self._client is not None:
            self._client.left(now_ns)
            self._client = None

    def _request_only(self, exchange: Exchange) -> None:
        cells = self._by_plan.get(exchange.plan) or self._metrics.api_cells(self._cells, exchange.plan)
        cells.request_bytes += exchange.request_bytes
        cells.request_size[bisect_left(SIZE_BYTES, exchange.request_bytes)] += 1

    def forwarded(self, direction: str, frames: int, duration_ns: int) -> None:
        """`frames` frames of a direction ("request" or "response") left; the time since the recv of their last byte."""
        cells = self._request if direction == "request" else self._response
        cells.duration[bisect_left(PROXY_NS, duration_ns)] += frames
        cells.duration_ns += frames * duration_ns

    def paused(self, side: str) -> None:
        """Reading of a side stopped, since the other takes no more."""
        _add(self._metrics.paused, side, 1)

    def rewritten(self, api: str, count: int) -> None:
        """Addresses of brokers in an answer became addresses of ours."""
        _add(self._metrics.rewritten, api, count)

    def leaked(self, api: str, count: int) -> None:
        """Addresses that should have been rewritten and were not."""
        _add(self._metrics.leaked, api, count)

    def neutralised(self, api: str, count: int) -> None:
        """Address lists made unreadable in passing, so that the client asks Metadata instead."""
        _add(self._metrics.neutralised, api, count)

    def closed(self, cause: str) -> None:
        """The connection is gone; only the first call counts."""
        if self._open:
            self._open = False
            if self._fetching is not None:
                self._fetching.closed()
            self._cells.live.discard(self)
            _add(self._cells.connections, self._listener, -1)
            _add(self._metrics.disconnects, (self._listener, cause), 1)


class Metrics:
    """All cells of one process."""

    def __init__(self) -> None:
        self.started_ns = time_ns()
        self.brokers: dict[tuple[str, str], BrokerCells] = {}
        self.topics: dict[str, Topics] = {}  # by cluster, and so are:
        self.lags: dict[str, Lags] = {}
        self.clients = Clients()
        self.directions = {"request": DirectionCells(), "response": DirectionCells()}
        self.connects: dict[tuple[str, str], int] = {}  # by listener and cause
        self.disconnects: dict[tuple[str, str], int] = {}
        self.unanswered: dict[tuple[str, str], int] = {}  # by api and cause
        self.faults: dict[tuple[str, str], int] = {}  # by side and kind
        self.paused: dict[str, int] = {}  # by side
        self.rewritten: dict[str, int] = {}  # by api
        self.leaked: dict[str, int] = {}
        self.neutralised: dict[str, int] = {}
        self.recorder_dropped: dict[str, int] = {}  # by source; the recorder's own, where there is one
        self._unknown_apis: set[int] = set()
        self._unknown_errors: set[int] = set()

    def connection(
        self,
        info: ConnectionInfo,
        listener: str,
        broker: str,
        pending: Sized = (),
        cause: str = "accepted",
        *,
        topics: bool = False,
    ) -> ConnectionMetrics:
        """Count a new connection, and what it does from now on; with `topics` also what its bodies tell of those."""
        key = (info.cluster, broker)
        cells = self.brokers.get(key)
        if cells is None:
            cells = self.brokers[key] = BrokerCells(*key)
        of_bodies: tuple[Topics | None, Lags | None] = (None, None)
        if topics:
            of_cluster = self.topics.setdefault(info.cluster, Topics())
            of_bodies = of_cluster, self.lags.setdefault(info.cluster, Lags(of_cluster))
        connection = ConnectionMetrics(self, cells, listener, pending, *of_bodies)
        cells.live.add(connection)
        _add(cells.connections, listener, 1)
        _add(self.connects, (listener, cause), 1)
        return connection

    def api_label(self, plan: ApiPlan) -> str:
        """Kafka's name of the API; unknown ones beyond the cap share one."""
        if plan.known or not plan.api.startswith("unknown_"):
            return plan.api
        if plan.api_key not in self._unknown_apis:
            if len(self._unknown_apis) >= UNKNOWN_APIS:
                return "unknown_other"
            self._unknown_apis.add(plan.api_key)
        return plan.api

    def api_cells(self, broker: BrokerCells, plan: ApiPlan) -> ApiCells:
        """The cells of a plan that is met for the first time, or whose API or version is unknown."""
        key = (self.api_label(plan), str(plan.api_version) if plan.known else "unknown")
        cells = broker.apis.get(key)
        if cells is None:
            cells = broker.apis[key] = ApiCells()
        if plan.known:
            if len(broker.by_plan) >= _MAX_PLANS:
                broker.by_plan.clear()
            broker.by_plan[plan] = cells
        return cells

    def count_errors(self, counts: dict[int, int], codes: tuple[int, ...]) -> None:
        """Add the error codes of one answer, all levels."""
        for code in codes:
            if code not in counts and code not in ERRORS and code not in self._unknown_errors:
                if len(self._unknown_errors) >= UNKNOWN_ERRORS:
                    code = OTHER_ERROR
                else:
                    self._unknown_errors.add(code)
            counts[code] = counts.get(code, 0) + 1


def error_label(code: int) -> str:
    """What the cell of an error code stands for."""
    return "unknown_other" if code == OTHER_ERROR else error_name(code)


def _add(counts: dict[Any, int], key: Any, count: int) -> None:
    counts[key] = counts.get(key, 0) + count
