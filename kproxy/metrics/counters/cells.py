"""The counters of the metrics, as plain integer cells: the hot half.

Duty: one cell for each counter. An exchange costs a few hundred nanoseconds (`counting`): one dictionary look-up by the
identity of its plan, then additions to integers. The collector makes labels, floats and text, at a scrape.

Cells form a tree like their labels: `Metrics` (`process`) has the clusters, a `ClusterCells` its brokers, a
`BrokerCells` the APIs and versions that it served. Counters whose label values are known beforehand (`known`) exist at
0 from the start.

Bounds, per cluster: MAX_APIS known APIs and UNKNOWN_APIS unknown keys have a name, and MAX_ERRORS pairs of an API and
an error code (UNKNOWN_ERRORS unknown codes), the rest share `other` or `unknown_other`; MAX_BORN brokers are exposed
before their first connection. Topics and clients are bounded by `named`, consumers by `lag`.

Everything here runs on the event loop's thread. A scrape reads from another thread, so it copies each container in one
step first; a histogram's count is the sum of its buckets, so the two agree at any moment.

Refuses to know labels' text, sockets and how a scrape arrives.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from kproxy.metrics.consumers.lag import PARTITION_SERIES, Lags
from kproxy.metrics.counters.bounds import (
    DURATION_NS,
    EXCESS_WAIT_NS,
    MUTE_NS,
    PROXY_NS,
    QUEUE_NS,
    SIZE_BYTES,
    THROTTLE_NS,
    cell,
)
from kproxy.metrics.counters.groups import InsightCells
from kproxy.metrics.counters.named import Clients, Topics
from kproxy.metrics.counters.tls import TlsSide
from kproxy.metrics.counters.upstream import UpstreamCells
from kproxy.metrics.pushed.telemetry import Answers, Pushes
from kproxy.metrics.scrape.known import (
    ADDRESS_APIS,
    DISCONNECT_CAUSES,
    EVERYDAY_APIS,
    EVERYDAY_REASONS,
    FAULTS,
    HIDING_APIS,
    LAG_OUTCOMES,
    LIMITS,
    MAX_BORN,
    OTHER_ERROR,
    OWN_APIS,
    UNANSWERED_CAUSES,
    UNHEARD,
    UNKNOWN_OTHER_ERROR,
)
from kproxy.protocol.error_codes import ERRORS
from kproxy.wire.events import (
    SIDES,
)
from kproxy.wire.interest import ApiPlan

MAX_APIS = 64  # known ones with a name: everyday APIs always, others in order of arrival
UNKNOWN_APIS = 16
MAX_ERRORS = 512  # pairs of an API and an error code
UNKNOWN_ERRORS = 16
MAX_LEAKING_APIS = 32
FEW_ERRORS = 32  # error codes of one response; more are grouped by code first
OTHER_API = "other"

Label = TypeVar("Label")

# An owner makes each plan once; more plans than this mean that a caller makes new ones for each message.
_MAX_PLANS = 4096


class ApiCells:
    """The counters of one (cluster, broker, api, version)."""

    __slots__ = (
        "api",
        "duration",
        "duration_ns",
        "errors",
        "excess_wait",
        "excess_wait_ns",
        "receiving_ns",
        "request_bytes",
        "request_size",
        "response_bytes",
        "response_size",
        "sending_ns",
        "throttle",
        "throttle_ns",
        "waits",
        "waits_ns",
    )

    def __init__(self, api: str) -> None:
        self.api = api  # the label
        self.duration = cell(DURATION_NS)
        self.duration_ns = 0
        self.waits = cell(DURATION_NS)  # first byte of the request to last byte of the response
        self.waits_ns = 0
        self.sending_ns = 0  # part of the wait between a request's first and last byte, neither queued nor muted
        self.receiving_ns = 0  # between a response's first and last byte
        self.request_size = cell(SIZE_BYTES)
        self.request_bytes = 0
        self.response_size = cell(SIZE_BYTES)
        self.response_bytes = 0
        self.excess_wait = cell(EXCESS_WAIT_NS)  # empty except for Fetch
        self.excess_wait_ns = 0
        self.throttle = cell(THROTTLE_NS)
        self.throttle_ns = 0
        self.errors: dict[int, int] = {}

    @property
    def requests(self) -> int:
        """Return the number of requests: each has a size, so the buckets count them."""
        return sum(self.request_size)


_PENDING = attrgetter("pending")


class Live(Protocol):
    """A connection, as the cells of its broker use it."""

    pending: Sized  # requests in flight


class BrokerCells:
    """The counters of one (cluster, broker)."""

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
        "silent",
        "tallies",
    )

    def __init__(self, cluster: str, broker: str) -> None:
        self.cluster = cluster
        self.broker = broker
        self.live: set[Live] = set()
        self.elsewhere = 0  # requests in flight in other processes, if these cells are a sum of several
        self.open: dict[str, int] = {}  # connections now, by listener
        self.accepted: dict[str, int] = {}  # connections since the start, by listener
        self.silent: dict[str, int] = {}  # accepted connections that ended without a byte of the client (health checks)
        self.disconnects: dict[tuple[str, str], int] = {}  # by listener and cause
        self.apis: dict[tuple[str, str], ApiCells] = {}  # (api, version) -> cells
        self.by_plan: dict[ApiPlan, ApiCells] = {}  # the same cells by their plan's identity; known APIs only
        # Counters of the compiled core, which fill these cells, by API key, version, and whether records are counted: a
        # reload may change that, and makes new plans.
        self.tallies: dict[tuple[int, int, bool], Any] = {}
        # Times above 0 only: all other answered requests did not queue.
        self.queue = cell(QUEUE_NS)
        self.queue_ns = 0
        self.mute = cell(MUTE_NS)
        self.mute_ns = 0

    @property
    def inflight(self) -> int:
        """Return the number of requests in flight."""
        return self.elsewhere + sum(map(len, map(_PENDING, self.live.copy())))  # thousands, once a second and page

    def listened(self, listener: str, causes: Iterable[str]) -> None:
        """Begin the series of a listener through which connections to this broker can arrive, at 0."""
        if listener not in self.accepted:
            self.disconnects.update(dict.fromkeys(((listener, cause) for cause in causes), 0))
            self.open[listener] = 0
            self.accepted[listener] = 0
            self.silent[listener] = 0


class ClusterCells:
    """The counters of one cluster as a whole, and its brokers."""

    def __init__(self, cluster: str, causes: Iterable[str] = DISCONNECT_CAUSES) -> None:
        """causes: label values for the end of a connection."""
        self.cluster = cluster
        self.brokers: dict[str, BrokerCells] = {}
        self.topics: Topics | None = None  # None: bodies are not decoded
        self.lags: Lags | None = None  # None: bodies are not decoded
        self.lag_evicted: dict[str, int] = {}  # offsets removed at a bound, by kind (offsets.KINDS)
        self.lag_questions: dict[tuple[str, str], int] = {}  # kproxy's own requests for lag, by api and outcome
        self.partition_series = PARTITION_SERIES  # limit of series by partition; with more, none is shown
        self.clients = Clients()
        self.insight: Callable[[], InsightCells] | None = None  # returns the latest cells of groups and leaders
        self.unheard: dict[str, int] = {}  # exchanges that insight did not get, by reason
        self.unanswered: dict[tuple[str, str], int] = {}  # by api and cause
        self.faults = dict.fromkeys(FAULTS, 0)  # by side and kind
        self.paused = dict.fromkeys(SIDES, 0)  # by side
        self.rewritten = dict.fromkeys(ADDRESS_APIS, 0)  # by api
        self.neutralised = dict.fromkeys(HIDING_APIS, 0)
        self.upstream: UpstreamCells | None = None  # of a proxy
        self.tls: dict[str, TlsSide] = {}  # by side with TLS
        self.own_answers = dict.fromkeys(OWN_APIS, 0)
        self.leaks = dict.fromkeys(ADDRESS_APIS, 0)  # by api
        self.limits = dict.fromkeys(LIMITS, 0)  # times that a limit was reached, by its setting
        self.unbound = 0  # brokers in responses without an open port here
        self.authentications: dict[tuple[str, str, str], int] = {}  # (side, mechanism, outcome) -> count; finite sets
        self.telemetry: Answers | None = None  # None: clients cannot push their metrics
        self.pushes: Pushes | None = None  # None: clients cannot push their metrics
        self.refusals: dict[tuple[str, str], int] = {}  # by api and reason; empty without a policy
        self._causes = tuple(causes)
        self._apis = set(EVERYDAY_APIS)
        self._unknown_apis: set[int] = set()
        self._errors: set[tuple[str, int]] = set()
        self._unknown_errors: set[int] = set()

    def broker(self, broker: str, listener: str) -> BrokerCells:
        """Return the cells of a broker that clients reach through this listener."""
        cells = self.brokers.get(broker)
        if cells is None:
            cells = self.brokers[broker] = BrokerCells(self.cluster, broker)
        cells.listened(listener, self._causes)
        return cells

    def expect(self, broker: str, listener: str) -> None:
        """Expose a broker before its first connection; beyond MAX_BORN brokers its series begin with the connection."""
        if len(self.brokers) < MAX_BORN or broker in self.brokers:
            self.broker(broker, listener)

    def has_policy(self, reasons: Iterable[str]) -> None:
        """Begin the series of refusals for these reasons, at 0."""
        for reason in reasons:
            for api in EVERYDAY_APIS if reason in EVERYDAY_REASONS else (OTHER_API,):
                self.refusals.setdefault((api, reason), 0)

    def asks_for_lag(self, apis: Iterable[str]) -> None:
        """Begin the series of kproxy's own requests with these APIs, at 0."""
        for api in apis:
            for outcome in LAG_OUTCOMES:
                self.lag_questions.setdefault((api, outcome), 0)

    def takes_pushes(self, errors: Mapping[str, tuple[str, ...]]) -> tuple[Answers, Pushes]:
        """Begin the series of metrics that clients push, at 0. errors: errors that responses can have, by API."""
        if self.telemetry is None or self.pushes is None:
            self.telemetry, self.pushes = Answers(errors), Pushes()
            for api in errors:
                self.own_answers.setdefault(api, 0)
        return self.telemetry, self.pushes

    def follow(self) -> dict[str, int]:
        """Begin the series of exchanges that insight does not get, at 0; return their counters, by reason."""
        for why in UNHEARD:
            self.unheard.setdefault(why, 0)
        return self.unheard

    def refused(self, api: str, reason: str) -> None:
        """Count a request that the policy refused."""
        add(self.refusals, (OTHER_API if api.startswith("unknown_") else api, reason), 1)

    def leaked(self, api: str) -> str:
        """Count a response of that API with a broker's own address in it; return the label that counts it."""
        label = api if api in self.leaks or len(self.leaks) < MAX_LEAKING_APIS else OTHER_API
        add(self.leaks, label, 1)
        return label

    def expect_authentications(self, side: str, mechanism: str, outcomes: Iterable[str]) -> None:
        """Begin the series of logins of a side, "client" or "broker", at 0."""
        for outcome in outcomes:
            self.authentications.setdefault((side, mechanism, outcome), 0)

    def authenticated(self, side: str, mechanism: str, outcome: str) -> None:
        """Count a login of a side; mechanism and outcome are from finite sets."""
        add(self.authentications, (side, mechanism or "unknown", outcome), 1)

    def api_label(self, plan: ApiPlan) -> str:
        """Return Kafka's name of the API; APIs beyond the bounds share a label."""
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
        """Return the cells of a plan that is new, or whose API or version is unknown."""
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
        """Count the error codes of a response, all levels, or of `times` responses with the same codes."""
        counts = cells.errors
        if len(codes) > FEW_ERRORS:
            for code, count in Counter(codes).items():
                self.count_errors(cells, (code,), count * times)
            return
        for code in codes:
            if code not in counts:
                code = self._error_cell(cells.api, code)
            counts[code] = counts.get(code, 0) + times

    def _error_cell(self, api: str, code: int) -> int:
        """Return the code that counts an error: its own, or a shared one beyond the bounds."""
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
    """Durations inside the proxy; relays add to the cells directly."""

    __slots__ = ("bounds", "counts", "total_ns")

    def __init__(self) -> None:
        self.bounds: Sequence[int] = PROXY_NS
        self.counts = cell(PROXY_NS)
        self.total_ns = 0


def add(counts: dict[Label, int], key: Label, count: int) -> None:
    """Add to a counter, which begins at 0."""
    counts[key] = counts.get(key, 0) + count
