"""Events to plain integer cells: the hot half of the metrics.

Duty: count. An exchange costs a few hundred nanoseconds here: one dictionary look-up by the identity of its plan, then
additions to integers; labels, floats and text are made by the collector, at a scrape.

Cells form a tree as labels do: `Metrics` has the clusters, a `ClusterCells` its brokers, a `BrokerCells` the APIs and
versions that it served. Counters whose label values are known beforehand (`known`) exist at 0 from the start.

Bounds, per cluster: MAX_APIS known APIs and UNKNOWN_APIS unknown keys have a name, and MAX_ERRORS pairs of an API and
an error code (UNKNOWN_ERRORS unknown codes), the rest share `other` or `unknown_other`; MAX_BORN brokers are exposed
before their first connection. Topics and clients are bounded by `named`, consumers by `lag`.

Everything here runs on the thread of the event loop. A scrape reads from another one, so the containers it walks are
copied in one step first, and a histogram's count is the sum of its buckets: whatever the moment, it agrees with itself.

Refuses to know labels' text, sockets and how a scrape comes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, TypeVar

from kproxy.metrics.bounds import (
    DURATION_NS,
    EXCESS_WAIT_NS,
    MUTE_NS,
    PROXY_NS,
    QUEUE_NS,
    SIZE_BYTES,
    THROTTLE_NS,
    cell,
)
from kproxy.metrics.groups import InsightCells
from kproxy.metrics.known import (
    ADDRESS_APIS,
    DISCONNECT_CAUSES,
    EVERYDAY_APIS,
    EVERYDAY_REASONS,
    FAULTS,
    HIDING_APIS,
    LIMITS,
    MAX_BORN,
    OTHER_ERROR,
    OWN_APIS,
    UNANSWERED_CAUSES,
    UNHEARD,
    UNKNOWN_OTHER_ERROR,
)
from kproxy.metrics.lag import Fetching, Lags
from kproxy.metrics.named import ClientCells, Clients, Topics
from kproxy.metrics.passive import ENDS, PassiveCells
from kproxy.metrics.reloads import ReloadCells
from kproxy.metrics.slow import Slow
from kproxy.metrics.telemetry import Answers, Pushes
from kproxy.metrics.tls import TlsSide
from kproxy.metrics.upstream import ClusterState, UpstreamCells
from kproxy.protocol.error_codes import ERRORS
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
    Unanswered,
)
from kproxy.wire.interest import ApiPlan

if TYPE_CHECKING:
    from kproxy.metrics.zookeeper import ZooKeeperCells

MAX_APIS = 64  # known ones by name: those of every day always, the others in the order in which they come
UNKNOWN_APIS = 16
MAX_ERRORS = 512  # pairs of an API and an error code
UNKNOWN_ERRORS = 16
MAX_LEAKING_APIS = 32
OTHER_API = "other"

Label = TypeVar("Label")

# Plans are made once per owner and remembered by it; more than this many means that someone makes them anew.
_MAX_PLANS = 4096


class ApiCells:
    """What is counted of one (cluster, broker, api, version)."""

    __slots__ = (
        "api",
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

    def __init__(self, api: str) -> None:
        self.api = api  # as its label spells it
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


_NO_CELLS = ApiCells("")  # of no exchange: what a loop holds before its first


class BrokerCells:
    """What is counted of one (cluster, broker)."""

    __slots__ = (
        "accepted",
        "apis",
        "broker",
        "by_plan",
        "cluster",
        "disconnects",
        "elsewhere",
        "live",
        "mute",
        "mute_ns",
        "open",
        "queue",
        "queue_ns",
    )

    def __init__(self, cluster: str, broker: str) -> None:
        self.cluster = cluster
        self.broker = broker
        self.live: set[ConnectionMetrics] = set()
        self.elsewhere = 0  # requests that wait in other processes, where these cells are the sum of several
        self.open: dict[str, int] = {}  # connections now, by listener
        self.accepted: dict[str, int] = {}  # connections since the start, by listener
        self.disconnects: dict[tuple[str, str], int] = {}  # by listener and cause
        self.apis: dict[tuple[str, str], ApiCells] = {}  # by api and version, as the labels spell them
        self.by_plan: dict[ApiPlan, ApiCells] = {}  # the same cells, found by identity; only plans of known APIs
        # Only times above 0 are counted: those that did not queue are the answered requests less these.
        self.queue = cell(QUEUE_NS)
        self.queue_ns = 0
        self.mute = cell(MUTE_NS)
        self.mute_ns = 0

    @property
    def inflight(self) -> int:
        """Requests that wait for an answer now."""
        return self.elsewhere + sum(len(connection.pending) for connection in self.live.copy())

    def listened(self, listener: str, causes: Iterable[str]) -> None:
        """Connections to this broker can come through a listener: its series begin, at 0."""
        if listener not in self.accepted:
            self.disconnects.update(dict.fromkeys(((listener, cause) for cause in causes), 0))
            self.open[listener] = 0
            self.accepted[listener] = 0


class ClusterCells:
    """What is counted of one cluster as a whole, and its brokers."""

    def __init__(self, cluster: str, causes: Iterable[str] = DISCONNECT_CAUSES) -> None:
        """causes: why connections may end."""
        self.cluster = cluster
        self.brokers: dict[str, BrokerCells] = {}
        self.topics: Topics | None = None  # with a detail that reads bodies, and so are:
        self.lags: Lags | None = None
        self.clients = Clients()
        self.insight: Callable[[], InsightCells] | None = None  # what is known of groups, as last counted
        self.unheard: dict[str, int] = {}  # exchanges that insight did not get, by why
        self.unanswered: dict[tuple[str, str], int] = {}  # by api and cause
        self.faults = dict.fromkeys(FAULTS, 0)  # by side and kind
        self.paused = dict.fromkeys(SIDES, 0)  # by side
        self.rewritten = dict.fromkeys(ADDRESS_APIS, 0)  # by api
        self.neutralised = dict.fromkeys(HIDING_APIS, 0)
        self.upstream: UpstreamCells | None = None  # of a proxy
        self.tls: dict[str, TlsSide] = {}  # by side, where kproxy speaks TLS
        self.own_answers = dict.fromkeys(OWN_APIS, 0)
        self.leaks = dict.fromkeys(ADDRESS_APIS, 0)  # by api
        self.limits = dict.fromkeys(LIMITS, 0)  # by the setting: times that it was reached
        self.unbound = 0  # brokers in answers for which no port is open
        self.authentications: dict[tuple[str, str, str], int] = {}  # by side, mechanism and outcome: all are known
        self.telemetry: Answers | None = None  # where clients push their metrics, and so is:
        self.pushes: Pushes | None = None
        self.refusals: dict[tuple[str, str], int] = {}  # by api and reason; of a cluster without a policy empty
        self._causes = tuple(causes)
        self._apis = set(EVERYDAY_APIS)
        self._unknown_apis: set[int] = set()
        self._errors: set[tuple[str, int]] = set()
        self._unknown_errors: set[int] = set()

    def broker(self, broker: str, listener: str) -> BrokerCells:
        """The cells of a broker that clients reach through this listener."""
        cells = self.brokers.get(broker)
        if cells is None:
            cells = self.brokers[broker] = BrokerCells(self.cluster, broker)
        cells.listened(listener, self._causes)
        return cells

    def expect(self, broker: str, listener: str) -> None:
        """Expose a broker before its first connection; beyond MAX_BORN of them it begins with that."""
        if len(self.brokers) < MAX_BORN or broker in self.brokers:
            self.broker(broker, listener)

    def has_policy(self, reasons: Iterable[str]) -> None:
        """Requests can be refused for these reasons: the series of everyday APIs begin, at 0."""
        for reason in reasons:
            for api in EVERYDAY_APIS if reason in EVERYDAY_REASONS else (OTHER_API,):
                self.refusals.setdefault((api, reason), 0)

    def takes_pushes(self, errors: Mapping[str, tuple[str, ...]]) -> tuple[Answers, Pushes]:
        """Clients can push their metrics: the series begin, at 0. errors: of the answers to them, by API."""
        if self.telemetry is None or self.pushes is None:
            self.telemetry, self.pushes = Answers(errors), Pushes()
            for api in errors:
                self.own_answers.setdefault(api, 0)
        return self.telemetry, self.pushes

    def follow(self) -> dict[str, int]:
        """Insight is fed from here: what it does not get is counted in what this returns, from 0."""
        for why in UNHEARD:
            self.unheard.setdefault(why, 0)
        return self.unheard

    def refused(self, api: str, reason: str) -> None:
        """A request was refused by the policy."""
        _add(self.refusals, (OTHER_API if api.startswith("unknown_") else api, reason), 1)

    def leaked(self, api: str) -> str:
        """An answer of that API has a broker's own address in it; returns the label under which it is counted."""
        label = api if api in self.leaks or len(self.leaks) < MAX_LEAKING_APIS else OTHER_API
        _add(self.leaks, label, 1)
        return label

    def expect_authentications(self, side: str, mechanism: str, outcomes: Iterable[str]) -> None:
        """Expose the logins of that side, "client" or "broker", before the first."""
        for outcome in outcomes:
            self.authentications.setdefault((side, mechanism, outcome), 0)

    def authenticated(self, side: str, mechanism: str, outcome: str) -> None:
        """A login of that side ended; mechanism and outcome are of known sets."""
        _add(self.authentications, (side, mechanism or "unknown", outcome), 1)

    def api_label(self, plan: ApiPlan) -> str:
        """Kafka's name of the API; those beyond the caps share one."""
        if plan.known or not plan.api.startswith("unknown_"):
            if plan.api not in self._apis:
                if len(self._apis) >= MAX_APIS:
                    return OTHER_API
                self._apis.add(plan.api)
            return plan.api
        if plan.api_key not in self._unknown_apis:
            if len(self._unknown_apis) >= UNKNOWN_APIS:
                return "unknown_other"
            self._unknown_apis.add(plan.api_key)
        return plan.api

    def api_cells(self, broker: BrokerCells, plan: ApiPlan) -> ApiCells:
        """The cells of a plan that is met for the first time, or whose API or version is unknown."""
        api = self.api_label(plan)
        version = api if api == OTHER_API else str(plan.api_version) if plan.known else "unknown"
        cells = broker.apis.get((api, version))
        if cells is None:
            for cause in UNANSWERED_CAUSES:
                self.unanswered.setdefault((api, cause), 0)
            cells = broker.apis[api, version] = ApiCells(api)
        if plan.known:
            if len(broker.by_plan) >= _MAX_PLANS:
                broker.by_plan.clear()
            broker.by_plan[plan] = cells
        return cells

    def count_errors(self, cells: ApiCells, codes: tuple[int, ...], times: int = 1) -> None:
        """Add the error codes of one answer, all levels, or of several that have the same."""
        counts = cells.errors
        for code in codes:
            if code not in counts:
                code = self._error_cell(cells.api, code)
            counts[code] = counts.get(code, 0) + times

    def _error_cell(self, api: str, code: int) -> int:
        """The code under which an error is counted: its own, while there is room for it."""
        if code not in ERRORS and code not in self._unknown_errors:
            if len(self._unknown_errors) >= UNKNOWN_ERRORS:
                return UNKNOWN_OTHER_ERROR
            self._unknown_errors.add(code)
        if (api, code) not in self._errors:
            if len(self._errors) >= MAX_ERRORS:
                return OTHER_ERROR
            self._errors.add((api, code))
        return code


class DurationCells:
    """Durations inside the proxy; relays fill the cells themselves."""

    __slots__ = ("bounds", "counts", "total_ns")

    def __init__(self) -> None:
        self.bounds: Sequence[int] = PROXY_NS
        self.counts = cell(PROXY_NS)
        self.total_ns = 0


class ConnectionMetrics:
    """The counting of one connection; what it counts is shared with all connections to that broker.

    `pending` is whatever has the length of the requests that wait for answers now: the session's own queue.
    """

    __slots__ = (
        "_by_plan",
        "_cells",
        "_client",
        "_cluster",
        "_fetching",
        "_info",
        "_listener",
        "_open",
        "_seldom",
        "_slow",
        "errors",
        "inside",
        "lag",
        "pending",
    )

    def __init__(
        self,
        cluster: ClusterCells,
        cells: BrokerCells,
        listener: str,
        pending: Sized,
        topics: Topics | None,
        lags: Lags | None,
        inside: "tuple[DurationCells, DurationCells]",
        loop_lag: "DurationCells",
        slow: Slow,
        info: ConnectionInfo,
    ) -> None:
        self._cluster = cluster
        self._cells = cells
        self._by_plan = cells.by_plan
        self._listener = listener
        self._fetching = Fetching(lags) if lags is not None else None
        self._seldom: tuple[Callable[[list[Event]], None], ...] = ()
        if topics is not None:
            self.tell(topics.events)
        if self._fetching is not None:
            self.tell(self._fetching.events)
        self._client: ClientCells | None = None
        self._open = True
        self._slow = slow
        self._info = info
        self.errors = 0  # codes in its answers, all levels
        self.lag = loop_lag
        self.inside = inside  # one pair for all connections
        self.pending = pending

    def tell(self, sink: Callable[[list[Event]], None]) -> None:
        """From now on it gets the events too, but where all of them are exchanges that have neither a body nor frames:
        as heartbeats, which are by far the most where nothing else happens.
        """
        self._seldom += (sink,)

    def events(self, events: list[Event]) -> None:
        """Count these events; nothing of them is kept."""
        if self._seldom:
            for event in events:
                if (
                    event.__class__ is not Exchange
                    or event.request_body is not None
                    or event.response_body is not None
                    or (event.plan.kept is not None and (event.errors or not event.plan.keeps_small))
                ):
                    for sink in self._seldom:
                        sink(events)
                    break
        plan: ApiPlan | None = None
        cells = _NO_CELLS
        request_bytes = response_bytes = -1
        request_bucket = response_bucket = 0
        of_broker = self._cells
        slow_ns = self._slow.threshold_ns
        for event in events:
            if event.__class__ is not Exchange or event.outcome is not ANSWERED:
                self._unusual(event)
                continue
            if event.plan is not plan:
                plan = event.plan
                cells = self._by_plan.get(plan) or self._cluster.api_cells(of_broker, plan)
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
            duration = event.response_start - event.request_end
            queue = event.queue_ns
            if queue:
                duration -= queue
                of_broker.queue[bisect_left(QUEUE_NS, queue)] += 1
                of_broker.queue_ns += queue
            muted = event.muted_ns
            if muted:
                duration -= muted
                of_broker.mute[bisect_left(MUTE_NS, muted)] += 1
                of_broker.mute_ns += muted
            if duration > 0:
                cells.duration_ns += duration
            cells.duration[bisect_left(DURATION_NS, duration)] += 1
            if duration > slow_ns:
                self._slow.add(event, duration, self._info, of_broker.broker)
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
                self.errors += len(event.errors)
                self._cluster.count_errors(cells, event.errors)

    # --- what is read by column (columns.py), and seen from beside the connection ------------------------------------

    @property
    def of_broker(self) -> BrokerCells:
        """What is counted of the broker."""
        return self._cells

    def api_cells(self, plan: ApiPlan) -> ApiCells:
        """What is counted of an API at the broker."""
        return self._by_plan.get(plan) or self._cluster.api_cells(self._cells, plan)

    def count_error(self, cells: ApiCells, code: int, times: int) -> None:
        """Add the error code that so many answers have at their top level."""
        self._cluster.count_errors(cells, (code,), times)

    def move(self, broker: str) -> None:
        """It has become known which broker is at the other end: from now on its cells count."""
        former, listener = self._cells, self._listener
        cells = self._cells = self._cluster.broker(broker, listener)
        self._by_plan = cells.by_plan
        if self._open:
            former.live.discard(self)
            former.open[listener] -= 1
            cells.live.add(self)
            cells.open[listener] += 1

    def _unusual(self, event: Event) -> None:
        cluster = self._cluster
        if isinstance(event, Exchange):
            if event.outcome == NO_ANSWER_EXPECTED:
                self._request_only(event)
            elif event.outcome == ANSWERED_BY_PROXY:  # the broker never saw it: it has neither its time nor its errors
                self._request_only(event)
                _add(cluster.own_answers, cluster.api_label(event.plan), 1)
            # An answer without a request comes with a Desync, and is counted there.
        elif isinstance(event, Unanswered):
            self._request_only(event.exchange)
            _add(cluster.unanswered, (cluster.api_label(event.exchange.plan), event.cause), 1)
        elif isinstance(event, AddressesHidden):
            self.neutralised(cluster.api_label(event.exchange.plan), 1)
        elif isinstance(event, Desync):
            _add(cluster.faults, (SIDES[event.side], event.kind), 1)
        elif isinstance(event, ClientNamed):
            self._client_left(event.now_ns)
            self._client = cluster.clients.joined(event)
        elif isinstance(event, Closed):
            self._client_left(event.now_ns)

    def _client_left(self, now_ns: int) -> None:
        if self._client is not None:
            self._client.left(now_ns)
            self._client = None

    def _request_only(self, exchange: Exchange) -> None:
        cells = self._by_plan.get(exchange.plan) or self._cluster.api_cells(self._cells, exchange.plan)
        cells.request_bytes += exchange.request_bytes
        cells.request_size[bisect_left(SIZE_BYTES, exchange.request_bytes)] += 1

    def paused(self, side: str) -> None:
        """Reading of a side stopped, since the other takes no more."""
        _add(self._cluster.paused, side, 1)

    def limit_reached(self, limit: str) -> None:
        """A limit slowed this connection down: a setting of [cluster.limits], or one of all connections (known.py)."""
        _add(self._cluster.limits, limit, 1)

    def rewritten(self, api: str, count: int) -> None:
        """Addresses of brokers in an answer became addresses of this proxy."""
        _add(self._cluster.rewritten, api, count)

    def unbound(self, count: int) -> None:
        """An answer named `count` brokers for which no port is open."""
        self._cluster.unbound += count

    def neutralised(self, api: str, count: int) -> None:
        """Address lists made unreadable in passing, so that the client asks Metadata instead."""
        _add(self._cluster.neutralised, api, count)

    def closed(self, cause: str) -> None:
        """The connection is gone; only the first call counts."""
        if self._open:
            self._open = False
            if self._fetching is not None:
                self._fetching.closed()
            cells = self._cells
            cells.live.discard(self)
            cells.open[self._listener] -= 1
            _add(cells.disconnects, (self._listener, cause), 1)


class Metrics:
    """All cells of one process, and the clock of its events."""

    def __init__(self) -> None:
        self.started_ns = time_ns()
        # Monotonic time and this is the time of day at the start. Every event has this clock, so whatever compares with
        # an event's time must ask `now_ns`: the wall clock steps, and goes on while a virtual machine is suspended.
        self.clock_offset_ns = self.started_ns - monotonic_ns()
        self.clusters: dict[str, ClusterCells] = {}
        self.directions = {"request": DurationCells(), "response": DurationCells()}
        self._inside = self.directions["request"], self.directions["response"]
        self.loop_lag = DurationCells()  # from the arrival of bytes to the read of them
        self.slow = Slow()
        self.connection_limit = 0
        self.workers = 1  # processes that relay
        self.worker_restarts = 0
        self.insight_restarts = {"ended": 0, "hung": 0}  # of the process that decodes what relays keep
        self.worker_usage: dict[str, tuple[int, int]] = {}  # of several: ns of CPU, bytes of memory
        self.log_lines_dropped: Callable[[], int] = int  # since the start; a program's own logging drops none
        self.audit_lines: Callable[[], tuple[int, int]] = lambda: (0, 0)  # written and dropped since the start
        self.reloads = ReloadCells(self.started_ns)
        self.upgrades = {"failed": 0}  # attempts to have another process take over; one that succeeds ends this one
        self.predecessor_connections = 0  # that the process before this one still has
        self.flight_dumps: dict[str, dict[str, int]] = {}  # by cause and outcome; empty: no flight recorder
        self.flight_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)  # that it holds: of frames, of headers
        self.otlp_pushes: dict[str, int] = {}  # by outcome; empty: none are made
        self.otlp_pushed_ns = 0  # when the last was taken, since the epoch
        self.recorder_dropped: dict[str, int] = {}  # by source; the recorder's own, where there is one
        self.passive: PassiveCells | None = None  # of `kproxy watch`
        self.zookeeper: dict[str, ZooKeeperCells] = {}  # by listener

    def upstream(self, cluster: str, causes: Sequence[str], state: Callable[[], ClusterState]) -> UpstreamCells:
        """The cells of a cluster's upstream: why dials may fail, and from now on a function that returns its state."""
        of_cluster = self.cluster(cluster)
        if of_cluster.upstream is None:
            of_cluster.upstream = UpstreamCells(causes, state)
        of_cluster.upstream.state = state
        return of_cluster.upstream

    def now_ns(self) -> int:
        """The clock of the events, in nanoseconds: the time of day at the start, monotonic from then on."""
        return monotonic_ns() + self.clock_offset_ns

    def cluster(self, name: str) -> ClusterCells:
        """The cells of a cluster; its series begin with the first call."""
        cells = self.clusters.get(name)
        if cells is None:
            cells = self.clusters[name] = ClusterCells(name, DISCONNECT_CAUSES if self.passive is None else ENDS)
        return cells

    def connection(
        self, info: ConnectionInfo, listener: str, broker: str, pending: Sized = (), *, topics: bool = False
    ) -> ConnectionMetrics:
        """Count a new connection, and what it does from now on; with `topics` also what its bodies say of those."""
        cluster = self.cluster(info.cluster)
        cells = cluster.broker(broker, listener)
        if topics and cluster.topics is None:
            cluster.topics = Topics()
            cluster.lags = Lags(cluster.topics)
        of_bodies = (cluster.topics, cluster.lags) if topics else (None, None)
        connection = ConnectionMetrics(
            cluster, cells, listener, pending, *of_bodies, self._inside, self.loop_lag, self.slow, info
        )
        cells.live.add(connection)
        cells.open[listener] += 1
        cells.accepted[listener] += 1
        return connection


def _add(counts: dict[Label, int], key: Label, count: int) -> None:
    counts[key] = counts.get(key, 0) + count
