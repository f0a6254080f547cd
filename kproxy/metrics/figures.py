"""The cells as plain rows, now and over the last hour, for the page and the terminal that show a running kproxy.

Duty: `totals` adds up the cells of each (cluster, broker, API); `History` keeps their increase in each step of the last
hour. All figures are those of /metrics, read from the same cells. Walks over cells are generators that yield regularly:
the caller lets traffic run in between, and walks less often if a walk is long.

Bounds: a sample has MAX_SERIES series: all, or the NAMED_SERIES largest and the others added up by API, the last ones
as one named `other`; and MAX_GROUPS groups. A sample is stored as the JSON text that is sent, 30 kB at most (usually
1 kB), SAMPLES of them: 11 MB at most. MAX_NAMES names of series and of groups. Refuses to know clients and transport.
"""

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from kproxy.metrics.counters.bounds import DURATION_NS, PROXY_NS, quantile
from kproxy.metrics.counters.cells import ApiCells
from kproxy.metrics.process import Metrics
from kproxy.metrics.scrape.known import error_label

STEP_S = 10.0
SAMPLES = 360
MAX_SERIES = 64
NAMED_SERIES = 32
MAX_GROUPS = 32
MAX_NAMES = 1024
OTHER = "other"
_CELLS_PER_TURN = 40  # of some 5 us each

Key = tuple[str, str, str]  # cluster, broker, API
BOUNDS_S = [bound / 1e9 for bound in DURATION_NS]


class Total:
    """The counters of one (cluster, broker, API), over all versions."""

    __slots__ = (
        "duration",
        "errors",
        "request_bytes",
        "requests",
        "response_bytes",
        "throttle_ns",
        "throttled",
        "waits",
    )

    def __init__(self) -> None:
        self.requests = self.errors = self.request_bytes = self.response_bytes = self.throttled = self.throttle_ns = 0
        self.duration = [0] * (len(DURATION_NS) + 1)
        self.waits = self.duration

    def add(self, cells: ApiCells) -> None:
        self.requests += cells.requests
        self.errors += sum(cells.errors.copy().values()) if cells.errors else 0
        self.request_bytes += cells.request_bytes
        self.response_bytes += cells.response_bytes
        self.throttled += sum(cells.throttle) if cells.throttle_ns else 0
        self.throttle_ns += cells.throttle_ns
        self.duration = [a + b for a, b in zip(self.duration, cells.duration, strict=True)]
        self.waits = [a + b for a, b in zip(self.waits, cells.waits, strict=True)]

    def include(self, other: "Total") -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.duration = [a + b for a, b in zip(self.duration, other.duration, strict=True)]
        self.waits = [a + b for a, b in zip(self.waits, other.waits, strict=True)]

    def row(self, before: "Total | None" = None) -> list[Any]:
        """Return the increase since `before`: [requests, errors, bytes to the broker, bytes to clients, throttled,
        ms of throttle, [bucket, count, ...] of the broker's time, [bucket, count, ...] of the client's whole wait].
        """
        since = before or _NOTHING
        return [
            self.requests - since.requests,
            self.errors - since.errors,
            self.request_bytes - since.request_bytes,
            self.response_bytes - since.response_bytes,
            self.throttled - since.throttled,
            round((self.throttle_ns - since.throttle_ns) / 1e6),
            _buckets(self.duration, since.duration),
            _buckets(self.waits, since.waits),
        ]


def _buckets(counts: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return the increase of a histogram as [bucket, count, ...]."""
    return [n for index, count in enumerate(counts) if count > before[index] for n in (index, count - before[index])]


_COUNTS = tuple(name for name in Total.__slots__ if name not in ("duration", "waits"))
_NOTHING = Total()
Totals = dict[Key, Total]


def totals(metrics: Metrics) -> Generator[None, None, Totals]:
    """Return the totals so far, as the generator's value; yield so that the caller can let traffic run."""
    found: Totals = {}
    walked = 0
    for cluster in list(metrics.clusters.values()):
        for broker in list(cluster.brokers.values()):
            for (api, _), cells in list(broker.apis.items()):
                key = cluster.cluster, broker.broker, api
                total = found.get(key)
                if total is None:
                    total = found[key] = Total()
                total.add(cells)
                walked += 1
                if walked % _CELLS_PER_TURN == 0:
                    yield
    return found


def by_api(key: Key) -> Key:
    return key[0], "", key[2]


def by_broker(key: Key) -> Key:
    return key[0], key[1], ""


def summed(found: Totals, key: Callable[[Key], Key]) -> Generator[None, None, Totals]:
    """Return the totals added up by another key, as the generator's value; yield like `totals`."""
    sums: Totals = {}
    for number, (of, total) in enumerate(found.items(), 1):
        sums.setdefault(key(of), Total()).include(total)
        if number % _CELLS_PER_TURN == 0:
            yield
    return sums


class Names:
    """Names by number; number 0 is the common name of all beyond MAX_NAMES."""

    def __init__(self, parts: int) -> None:
        self.names: list[tuple[str, ...]] = [(OTHER,) * parts]
        self._numbers: dict[tuple[str, ...], int] = {}

    def number(self, name: tuple[str, ...]) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) >= MAX_NAMES:
                return 0
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number


class History:
    """Samples of the last hour, the youngest last, each as (number, text that is sent)."""

    def __init__(self) -> None:
        self.samples: deque[tuple[int, str]] = deque(maxlen=SAMPLES)
        self.series = Names(3)
        self.groups = Names(2)
        self._number = 0
        self._base: Totals | None = None  # at the end of the last sample
        self._base_process: list[float] = []
        self._rebalances: dict[tuple[str, str], int] = {}
        self._since_ns = 0

    @property
    def last(self) -> int:
        """Return the number of the last sample; 0: there is none yet."""
        return self._number

    @property
    def begun_ns(self) -> int:
        """Return the time at which the next sample began; 0: none has begun."""
        return self._since_ns

    def close(self, metrics: Metrics, now: Totals, now_ns: int) -> None:
        """End a sample; the first call only stores the totals that the first sample is compared with."""
        groups = _rebalances(metrics)
        if self._base is not None:
            self._number += 1
            self.samples.append((self._number, self._text(metrics, now, groups, now_ns, self._number)))
        self._base, self._since_ns = now, now_ns
        self._base_process = _process(metrics)
        self._rebalances = {key: count for key, (count, _) in groups.items()}

    def open(self, metrics: Metrics, now: Totals, now_ns: int) -> str:
        """Return the increase since the last sample's end, as a sample with the number 0; "null": none has begun."""
        if self._base is None or now_ns <= self._since_ns:
            return "null"
        return self._text(metrics, now, _rebalances(metrics), now_ns, 0)

    def _text(
        self,
        metrics: Metrics,
        now: Totals,
        groups: dict[tuple[str, str], tuple[int, bool]],
        now_ns: int,
        number: int,
    ) -> str:
        assert self._base is not None
        rows = []
        for key, total in now.items():
            before = self._base.get(key)
            if before is None or total.requests != before.requests or total.response_bytes != before.response_bytes:
                rows.append((key, total.row(before)))
        rows.sort(key=lambda item: -item[1][0])
        if len(rows) > MAX_SERIES:
            rows = rows[:NAMED_SERIES] + _rest_by_api(rows[NAMED_SERIES:])
        shown: dict[int, list[list[Any]]] = {}  # rows by the number of their name; 0: beyond MAX_NAMES
        for key, row in rows:
            shown.setdefault(self.series.number(key), []).append(row)
        changed = [
            [self.groups.number(key), max(0, count - self._rebalances.get(key, 0)), int(rebalances_now)]
            for key, (count, rebalances_now) in groups.items()
            if rebalances_now or count > self._rebalances.get(key, 0)
        ]
        sample = {
            "n": number,
            "t": now_ns // 1_000_000,
            "d": round(max(1, now_ns - self._since_ns) / 1e9, 3),
            "s": [[number, *(some[0] if len(some) == 1 else _added(some))] for number, some in shown.items()],
            "g": changed[:MAX_GROUPS],
            "p": _since(_process(metrics), self._base_process),
        }
        return json.dumps(sample, separators=(",", ":"))


def _rest_by_api(rows: Sequence[tuple[Key, list[Any]]]) -> list[tuple[Key, list[Any]]]:
    """Return rows added up by cluster and API, since some APIs wait on purpose; beyond the bound, in one row."""
    of_apis: dict[Key, list[list[Any]]] = {}
    for (cluster, _, api), row in rows:
        of_apis.setdefault((cluster, OTHER, api), []).append(row)
    sums = sorted(((key, _added(some)) for key, some in of_apis.items()), key=lambda item: -item[1][0])
    room = MAX_SERIES - NAMED_SERIES
    if len(sums) <= room:
        return sums
    return [*sums[: room - 1], ((OTHER, OTHER, OTHER), _added([row for _, row in sums[room - 1 :]]))]


def _added(rows: Sequence[list[Any]]) -> list[Any]:
    histograms = []
    for place in (6, 7):
        buckets: dict[int, int] = {}
        for row in rows:
            for index, count in zip(row[place][::2], row[place][1::2], strict=True):
                buckets[index] = buckets.get(index, 0) + count
        histograms.append([n for item in buckets.items() for n in item])
    return [*(sum(row[column] for row in rows) for column in range(6)), *histograms]


def _rebalances(metrics: Metrics) -> dict[tuple[str, str], tuple[int, bool]]:
    """Return (number of rebalances, whether it rebalances now) of each (cluster, group)."""
    now_ns = metrics.now_ns()
    return {
        (cluster.cluster, group): (cells.rebalances, cells.is_rebalancing)
        for cluster in list(metrics.clusters.values())
        if cluster.insight is not None
        for group, cells in cluster.insight().groups.shown(now_ns)
        if group is not None
    }


def _process(metrics: Metrics) -> list[Any]:
    inside = [a + b for a, b in zip(*(cells.counts for cells in metrics.directions.values()), strict=True)]
    return [inside, metrics.loop_lag.counts.copy()]


def _since(now: list[Any], before: list[Any]) -> list[float | None]:
    """Return the p99 of the time inside kproxy, and of the time that bytes waited to be read, in s; None: no data."""
    found: list[float | None] = []
    for counts, earlier in zip(now, before, strict=True):
        p99 = quantile(PROXY_NS, [max(0, a - b) for a, b in zip(counts, earlier, strict=True)], 0.99)
        found.append(None if p99 is None else p99 / 1e9)
    return found


# --- rows by name -----------------------------------------------------------------------------------------------------


def error_rows(metrics: Metrics, limit: int) -> list[list[Any]]:
    """Return rows [cluster, broker, API, error, count so far], the most frequent first."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for cluster in list(metrics.clusters.values()):
        for broker in list(cluster.brokers.values()):
            for (api, _), cells in list(broker.apis.items()):
                if cells.errors:
                    for code, count in cells.errors.copy().items():
                        key = cluster.cluster, broker.broker, api, error_label(code)
                        counts[key] = counts.get(key, 0) + count
    return [[*key, count] for key, count in sorted(counts.items(), key=lambda item: -item[1])[:limit]]


def broker_rows(metrics: Metrics, limit: int) -> list[list[Any]]:
    """Return rows [cluster, broker, open connections, requests in flight, disconnects so far], most open first."""
    rows: list[list[Any]] = [
        [
            cluster.cluster,
            name,
            sum(broker.open.copy().values()),
            broker.inflight,
            sum(broker.disconnects.copy().values()),
        ]
        for cluster in list(metrics.clusters.values())
        for name, broker in list(cluster.brokers.items())
    ]
    return sorted(rows, key=lambda row: (-row[2], row[0], row[1]))[:limit]


def topic_rows(metrics: Metrics, limit: int) -> list[list[Any]]:
    """Return rows [cluster, topic, bytes produced, records produced, bytes fetched, records fetched], largest first."""
    now_ns = metrics.now_ns()
    rows: dict[tuple[str, str], list[Any]] = {}
    for cluster in list(metrics.clusters.values()):
        if cluster.topics is None:
            continue
        for topic, cells in cluster.topics.top.shown(now_ns):
            name = cluster.topics.label(topic)  # also for a topic id whose name a response contained
            produced, fetched = cells.request, cells.response
            row = [cluster.cluster, name, produced.bytes, produced.records, fetched.bytes, fetched.records]
            before = rows.setdefault((cluster.cluster, name), row)
            if before is not row:
                before[2:] = [a + b for a, b in zip(before[2:], row[2:], strict=True)]
    return sorted(rows.values(), key=lambda row: -(row[2] + row[4]))[:limit]


def client_rows(metrics: Metrics, limit: int) -> list[list[Any]]:
    """Return rows [cluster, client id, software, its version, open connections], connected clients first."""
    now_ns = metrics.now_ns()
    rows: list[list[Any]] = [
        [cluster.cluster, *(client or (OTHER, OTHER, "")), cells.open]
        for cluster in list(metrics.clusters.values())
        for client, cells in cluster.clients.top.shown(now_ns)
    ]
    return sorted(rows, key=lambda row: (-row[4], row[0], row[1]))[:limit]


def group_rows(metrics: Metrics, limit: int) -> list[list[Any]]:
    """Return rows [cluster, group, state, members, generation, rebalances, seconds in them, requests refused, protocol,
    type], most rebalances first.
    """
    now_ns = metrics.now_ns()
    rows: list[list[Any]] = [
        [
            cluster.cluster,
            group,
            cells.state,
            cells.members,
            cells.generation,
            cells.rebalances,
            round(cells.duration_ns / 1e9, 3),
            sum(cells.failures.values()),
            cells.protocol,
            cells.group_type,
        ]
        for cluster in list(metrics.clusters.values())
        if cluster.insight is not None
        for group, cells in cluster.insight().groups.shown(now_ns)
        if group is not None
    ]
    return sorted(rows, key=lambda row: (-row[5], -row[3], row[1]))[:limit]


def lag_rows(metrics: Metrics, wall_ns: int, limit: int) -> list[list[Any]]:
    """Return rows [cluster, "group" or "client_id", name, topic, records or null, seconds or null, unknown partitions].

    The largest lag comes first, and an unknown lag precedes a lag of 0. records: the sum over the
    partitions with a known lag or lower bound.
    """
    now_ns = metrics.now_ns()
    found = [
        (lag.rank, [cluster.cluster, by, name, topic, lag.records, lag.seconds, lag.unknown])
        for cluster in list(metrics.clusters.values())
        if cluster.lags is not None
        for by, consumers in cluster.lags.shown(now_ns, wall_ns)
        for name, topic, lag in consumers
    ]
    return [row for _, row in sorted(found, key=lambda item: -item[0])[:limit]]


def slow_rows(metrics: Metrics, after_ns: int) -> list[list[Any]]:
    """Return the slow exchanges after `after_ns`, with the columns SLOW_COLUMNS."""
    return [
        [
            row.at_ns // 1000,
            *row[1:8],
            str(row.connection),  # exceeds JavaScript's integers
            row.number,
            *(round(ns / 1e9, 6) for ns in (row.wait_ns, row.broker_ns, row.over_ns, row.queue_ns, row.muted_ns)),
            row.throttle_ms,
            row.request_bytes,
            row.response_bytes,
            "" if not row.error_code else error_label(row.error_code),
        ]
        for row in metrics.slow.rows.copy()
        if row.at_ns // 1000 > after_ns // 1000
    ]


SLOW_COLUMNS = (
    *("at_us", "cluster", "broker", "api", "version", "client_id", "client", "correlation_id", "connection", "number"),
    *("wait_s", "broker_s", "over_s", "queue_s", "muted_s", "throttle_ms", "request_bytes", "response_bytes", "error"),
)
