"""The merged cells of several processes: live workers, ended workers, and the parent itself.

Counters of an ended worker are kept, so that none decreases; its gauges end with it, and its open connections count as
ended by `worker_lost`. Counters of a removed cluster that one worker has drained are kept, too, while another worker
still has the cluster. Each worker reports its largest topics, and MAX_TOPICS of all of them are shown. A topic with a
series keeps it as long as a worker reports the topic, or until it has been idle for long. A topic without a series
counts in `other`, and that part stays there when it gets a series. The latest end of a log, from any worker, counts for
all consumers.

The event loop's thread takes messages; `merged` runs on a scrape's thread, which copies first. Bounds: those of one
process, times the workers. Refuses to know processes.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple

from kproxy.metrics.consumers.lag import PARTITION_SERIES, Fetching, Lags
from kproxy.metrics.consumers.log_end import UNKNOWN, Log
from kproxy.metrics.consumers.offsets import COMMITTED as COMMITTED_OFFSET
from kproxy.metrics.consumers.offsets import (
    END,
    MAX_COMMITTED,
    MAX_LOGS,
    MAX_REMOVED,
    Key,
    Position,
    Removal,
    has_ended,
)
from kproxy.metrics.counters.cells import ApiCells, BrokerCells, ClusterCells
from kproxy.metrics.counters.named import MAX_CLIENTS, MAX_TOPICS, Amounts, ClientCells, TopicCells, Topics
from kproxy.metrics.counters.slow import merged as merged_slow
from kproxy.metrics.counters.upstream import UpstreamCells
from kproxy.metrics.process import Metrics
from kproxy.metrics.processes.published import (
    CLIENT,
    COMMITTED,
    FETCHING,
    LOG,
    NAMES,
    PROCESS,
    PUSHED,
    REMOVED,
    SEEN,
    SLOW,
    TOPIC,
    Change,
)
from kproxy.metrics.processes.units import API, BROKER, CLUSTER, METRICS, UPSTREAM, Place, add, units
from kproxy.metrics.pushed.telemetry import Pushes, PushingClient

WORKER_LOST = "worker_lost"
_SUMS = frozenset((METRICS, CLUSTER, UPSTREAM, BROKER, API))
_OF_LAG = frozenset((LOG, COMMITTED))
_LATEST = frozenset((LOG, COMMITTED, NAMES, REMOVED))  # facts, equal for all workers: the latest report counts


class Ended(NamedTuple):
    """Removals and lower ends in a cluster that other workers may not know: see `Offsets.ended`."""

    removed: dict[Removal, int]
    lowered: dict[Key, tuple[int, int, int]]


class Shared:
    """The cells of all processes of a kproxy. own: the parent's cells."""

    def __init__(self, own: Metrics) -> None:
        self.workers = 0  # live ones at the last scrape
        self.restarts = 0
        self._own = own
        self._living: dict[int, dict[Place, Any]] = {}  # by worker
        self._owned = set(own.clusters)  # the names of the parent's clusters, as of the last look for removed ones
        # Sums of ended workers, and of clusters that workers no longer have.
        self._gone: dict[Place, Any] = {}
        self._latest: dict[Place, Any] = {}
        self._topics: dict[str, _Shown] = {}  # by cluster
        self._ended: dict[str, Ended] = {}  # since `take_ended`, by cluster

    def take(self, worker: int, changes: Iterable[Change]) -> None:
        """Apply the changes that a worker sent."""
        if self._own.clusters.keys() != self._owned:
            self._forget_removed()
        units_of = self._living.setdefault(worker, {})
        for path, data in changes:
            if data is None:
                if path[0] == CLUSTER:
                    self._withdrawn(units_of, path[1])
                units_of.pop(path, None)
                continue
            value = pickle.loads(data)
            if path[0] in _LATEST:
                self._learn(path, value)
            else:
                units_of[path] = value

    def has(self, cluster: str) -> bool:
        """Whether a live worker has reported a cluster, and not yet that it has it no longer."""
        return any((CLUSTER, cluster) in units_of for units_of in self._living.values())

    def gone(self, worker: int) -> None:
        """Keep the counters of a worker that has ended, and drop its gauges."""
        for path, value in self._living.pop(worker, {}).items():
            if path[0] == PROCESS:
                self._keep((PROCESS, worker), value[0])
            else:
                self._keep_counts(path, value)
        self._forget_removed()

    def _withdrawn(self, units_of: dict[Place, Any], cluster: str) -> None:
        """A worker has a cluster no longer: its counters stay while another one has it, or the settings."""
        for path in [path for path in units_of if len(path) > 1 and path[1] == cluster]:
            self._keep_counts(path, units_of.pop(path))
        self._forget_removed()

    def _keep_counts(self, path: Place, value: Any) -> None:
        """Keep a unit that nobody counts on, if it has counters."""
        kind = path[0]
        if kind in _SUMS or kind == TOPIC or (kind == PUSHED and path[2] is None):
            self._keep(path, _closed(value) if kind == BROKER else value)

    def _keep(self, path: Place, value: Any) -> None:
        self._gone[path] = add(self._gone[path], value) if path in self._gone else value

    def _forget_removed(self) -> None:
        """Drop the series of clusters that neither the settings nor a worker has."""
        self._owned = set(self._own.clusters)
        known = self._owned | {path[1] for units_of in self._living.values() for path in units_of if path[0] == CLUSTER}
        for units_of in (self._gone, self._latest):
            for path in [path for path in units_of if len(path) > 1 and path[0] != PROCESS and path[1] not in known]:
                del units_of[path]
        for name in self._topics.keys() - known:
            self._topics.pop(name, None)

    def _learn(self, path: Place, value: Any) -> None:
        known = self._latest.pop(path, None)
        if path[0] == NAMES and known is not None:
            value = known | value
        elif path[0] == REMOVED:
            before = known or {}
            news = {removal: at_ns for removal, at_ns in value.items() if at_ns > before.get(removal, 0)}
            self._ending(path[1]).removed.update(news)
            value = _last_removed(before, value)
        elif path[0] == LOG:
            highest = max(log.high_watermark for log in (known, value) if log is not None)
            value = self._later(path, known, value)
            if value is None:
                return
            if value.high_watermark < highest:
                lower = value.high_watermark, value.lowered_ns, value.epoch
                self._ending(path[1]).lowered[self._named(path[1], path[2])] = lower
        elif path[0] == COMMITTED and known is not None:
            value = _newer(known, value)
        limit = (MAX_LOGS + MAX_COMMITTED) * max(1, len(self._own.clusters))
        if len(self._latest) >= limit and path[0] in _OF_LAG:
            oldest = next((each for each in self._latest if each[0] in _OF_LAG), None)
            if oldest is not None:  # names and removals, one entry per cluster, have bounds of their own
                del self._latest[oldest]
                self._count_evicted(oldest)
        self._latest[path] = value

    def _later(self, path: Place, known: Log | None, log: Log) -> Log | None:
        """Merge a report of a log with the known one; None: its topic was deleted since."""
        _, cluster, key = path
        key = self._named(cluster, key)
        removed = self._latest.get((REMOVED, cluster), {})
        reports = [each for each in (known, log) if each is not None and not has_ended(removed, key, each.raised_ns)]
        return reduce(_later, reports) if reports else None

    def _named(self, cluster: str, key: Key) -> Key:
        """Return a partition with its topic's name, or with the topic's id if no name is known."""
        topic, number = key
        return topic if isinstance(topic, str) else self._latest.get((NAMES, cluster), {}).get(topic, topic), number

    def _ending(self, cluster: str) -> Ended:
        return self._ended.setdefault(cluster, Ended({}, {}))

    def take_ended(self) -> Iterator[tuple[str, Ended]]:
        """Yield the removals and lower ends of each cluster, once: all workers need them, at most one has seen them."""
        while self._ended:
            cluster, ended = self._ended.popitem()
            if ended.removed or ended.lowered:
                yield cluster, ended

    def _count_evicted(self, path: Place) -> None:
        kind = {LOG: END, COMMITTED: COMMITTED_OFFSET}.get(path[0])
        cluster = self._own.clusters.get(path[1])
        if kind is not None and cluster is not None:
            cluster.lag_evicted[kind] = cluster.lag_evicted.get(kind, 0) + 1

    # --- kproxy's own requests to brokers ----------------------------------------------------------------------------

    def lags(self, cluster: str) -> Lags | None:
        """Return the consumers and groups that workers have reported in a cluster; None: none so far."""
        if not any(path[0] in _OF_LAG and path[1] == cluster for path in self._latest):
            return None
        topics = Topics()
        topics.names = self._latest.get((NAMES, cluster), {})
        lags = _lags(topics, cluster, self._latest, self._living.values())
        for units_of in self._living.values():
            lags.seen |= dict.fromkeys(units_of.get((SEEN, cluster), ()))
        return lags

    def keep_learned(self, cluster: str, lags: Lags, since_ns: int) -> None:
        """Keep the offsets learned from brokers' responses since `since_ns`."""
        self._learn((REMOVED, cluster), lags.removed)
        for key, log in lags.logs.items():
            if log.reported_ns >= since_ns:
                if log.lowered_ns >= since_ns:  # workers have a higher end, which they do not report again
                    self._ending(cluster).lowered[key] = log.high_watermark, log.lowered_ns, log.epoch
                self._learn((LOG, cluster, key), log)
        for name, position in lags.committed.items():
            if position.reported_ns >= since_ns:
                self._learn((COMMITTED, cluster, name), position)

    # --- a scrape ----------------------------------------------------------------------------------------------------

    def merged(self) -> Metrics:
        """Return the cells of all processes as one `Metrics`. Runs on any thread, one call at a time."""
        living = {number: units_of.copy() for number, units_of in self._living.copy().items()}
        gone = self._gone.copy()
        latest = self._latest.copy()
        own = self._own
        merged = Metrics()
        merged.started_ns, merged.clock_offset_ns = own.started_ns, own.clock_offset_ns
        merged.connection_limit = own.connection_limit
        merged.workers = self.workers
        merged.worker_usage = _usage(living, gone)
        merged.worker_restarts = self.restarts
        merged.reloads = own.reloads
        merged.otlp_pushes, merged.otlp_pushed_ns = own.otlp_pushes, own.otlp_pushed_ns
        merged.slow = merged_slow(units_of.get((SLOW,), ()) for units_of in living.values())
        merged.zookeeper = own.zookeeper  # the parent relays ZooKeeper
        sums: dict[Place, Any] = {}
        for source in (self._own_units(), gone, *living.values()):
            for path, value in source.items():
                if path[0] in _SUMS:
                    sums[path] = add(sums[path], value) if path in sums else value
        for path, value in sums.items():
            _put(merged, path, value)
        for name, cluster in merged.clusters.items():
            ours = own.clusters.get(name)
            if cluster.upstream is not None and ours is not None and ours.upstream is not None:
                cluster.upstream.state = ours.upstream.state
            else:
                cluster.upstream = None  # only the parent has its state
            cluster.insight = None if ours is None else ours.insight
            cluster.partition_series = PARTITION_SERIES if ours is None else ours.partition_series
        now_ns = own.now_ns()
        for name, cells in merged.clusters.items():
            of_cluster = [_of(source, CLIENT, name) for source in living.values()]
            cells.clients.top = _Fixed(_clients(of_cluster))  # type: ignore[assignment]
            if cells.telemetry is not None:
                cells.pushes = _pushes([_of(source, PUSHED, name) for source in (gone, *living.values())])
            topics = [_of(source, TOPIC, name) for source in living.values()]
            kept = _of(gone, TOPIC, name)
            if any(topics) or kept or any(path[0] in _OF_LAG and path[1] == name for path in latest):
                cells.topics = Topics()
                cells.topics.names = latest.get((NAMES, name), {})
                shown = self._topics.setdefault(name, _Shown(MAX_TOPICS))
                cells.topics.top = _Fixed(shown.of(topics, self._still(name, kept, topics, now_ns)))  # type: ignore[assignment]
                cells.lags = _lags(cells.topics, name, latest, living.values())
        return merged

    def _own_units(self) -> dict[Place, Any]:
        """Return the parent's units, with its TLS cells themselves: their callables work in this process."""
        found = dict(units(self._own))
        for name, cluster in self._own.clusters.copy().items():
            found[CLUSTER, name]["tls"] = cluster.tls.copy()
        return found

    def _still(
        self, name: str, kept: dict[Any, TopicCells], topics: list[dict[Any, TopicCells]], now_ns: int
    ) -> dict[Any, TopicCells]:
        """Return the topics of ended workers, without those that are idle and that no live worker reports."""
        for topic in [topic for topic, cells in kept.items() if topic is not None and cells.is_gone(now_ns)]:
            if not any(topic in each for each in topics):
                del kept[topic]
                self._gone.pop((TOPIC, name, topic), None)
        return kept


class _Fixed:
    """A chosen list of the largest keys, with the interface of `Top` that a collector uses."""

    def __init__(self, shown: list[tuple[Any, Any]]) -> None:
        self._shown = shown

    def shown(self, _: int) -> Iterator[tuple[Any, Any]]:
        return iter(self._shown)


class _Shown:
    """Chooses at most `limit` topics with a series: first the topics that had one, then the largest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._own: dict[Any, TopicCells] = {}  # topics with a series, each with its part that is counted in `other`
        self._others: dict[Any, TopicCells] = {}  # topics without a series, as last added to `other`
        self._left = TopicCells()  # the part of `other` from topics in neither of these

    def of(self, living: list[dict[Any, TopicCells]], gone: dict[Any, TopicCells]) -> list[tuple[Any, TopicCells]]:
        """Return (topic, cells) of each series; topic None: all others."""
        sums: dict[Any, TopicCells] = {}
        for source in (gone, *living):
            for topic, cells in source.items():
                sums[topic] = add(sums[topic], cells) if topic in sums else cells
        other = sums.pop(None, TopicCells())
        self._own = {topic: base for topic, base in self._own.items() if topic in sums}
        largest = sorted(sums.keys() - self._own.keys(), key=lambda topic: -_bytes(sums[topic]))
        for topic in largest[: max(0, self._limit - len(self._own))]:
            before = self._others.pop(topic, None)
            self._own[topic] = before or TopicCells()
            if before is not None:
                self._left = add(self._left, before)
        for topic in self._others.keys() - sums.keys():
            self._left = add(self._left, self._others.pop(topic))
        for topic in sums.keys() - self._own.keys():
            self._others[topic] = sums[topic]
        for cells in (self._left, *self._others.values()):
            other = add(other, cells)
        shown: list[tuple[Any, TopicCells]] = [(topic, _less(sums[topic], base)) for topic, base in self._own.items()]
        return [*shown, (None, other)] if other.rank or _bytes(other) else shown


def _usage(living: dict[int, dict[Place, Any]], gone: dict[Place, Any]) -> dict[str, tuple[int, int]]:
    """Return by worker: CPU time in ns, with that of its predecessors, and memory of the live one in bytes."""
    before = {place[1]: cpu_ns for place, cpu_ns in gone.items() if place[0] == PROCESS}
    now = {number: units_of.get((PROCESS,), (0, 0)) for number, units_of in living.items()}
    return {
        str(number): (before.get(number, 0) + now.get(number, (0, 0))[0], now.get(number, (0, 0))[1])
        for number in sorted(before.keys() | now.keys())
    }


def _bytes(cells: TopicCells) -> int:
    return cells.request.bytes + cells.response.bytes


def _less(cells: TopicCells, base: TopicCells) -> TopicCells:
    if not _bytes(base):
        return cells
    rest = TopicCells()
    rest.seen_ns, rest.rank = cells.seen_ns, cells.rank
    for name in ("request", "response"):
        of, less = getattr(cells, name), getattr(base, name)
        amounts = Amounts()
        amounts.bytes, amounts.records = of.bytes - less.bytes, of.records - less.records
        amounts.batches = {codec: count - less.batches.get(codec, 0) for codec, count in of.batches.items()}
        setattr(rest, name, amounts)
    return rest


def _of(source: dict[Place, Any], kind: str, cluster: str) -> dict[Any, Any]:
    return {path[2]: value for path, value in source.items() if path[0] == kind and path[1] == cluster}


def _closed(broker: dict[str, Any]) -> dict[str, Any]:
    """Return a broker's cells of an ended process: its open connections count as ended."""
    disconnects = broker["disconnects"].copy()
    for listener, count in broker["open"].items():
        disconnects[listener, WORKER_LOST] += count
    return {**broker, "disconnects": disconnects, "open": dict.fromkeys(broker["open"], 0), "elsewhere": 0}


def _put(metrics: Metrics, path: Place, value: Any) -> None:
    """Put a unit into these cells."""
    kind, *rest = path
    if kind == METRICS:
        for name, total in value.items():
            is_called = callable(getattr(metrics, name, None))
            setattr(metrics, name, _returning(total) if is_called else total)
        return
    cluster: ClusterCells = metrics.cluster(rest[0])
    if kind == CLUSTER:
        _set(cluster, value)
    elif kind == UPSTREAM:
        if cluster.upstream is None:
            cluster.upstream = object.__new__(UpstreamCells)
        _set(cluster.upstream, value)
    else:
        broker = cluster.brokers.get(rest[1])
        if broker is None:
            broker = cluster.brokers[rest[1]] = BrokerCells(rest[0], rest[1])
        if kind == BROKER:
            _set(broker, value)
        else:
            assert isinstance(value, ApiCells)
            broker.apis[rest[2], rest[3]] = value


def _returning(total: Any) -> Callable[[], Any]:
    return lambda: tuple(total) if isinstance(total, list) else total


def _set(cells: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(cells, name, value)


def _clients(of_workers: list[dict[Any, tuple[int, int]]]) -> list[tuple[Any, ClientCells]]:
    """Merge the clients of all workers: connected ones first, then the most recently disconnected."""
    cells: dict[Any, ClientCells] = {}
    for clients in of_workers:
        for client, (open_now, left_ns) in clients.items():
            cell = cells.setdefault(client, ClientCells())
            cell.open += open_now
            cell.left_ns = max(cell.left_ns, left_ns)
    other = cells.pop(None, None)
    largest = sorted(cells.items(), key=lambda item: (-bool(item[1].open), -item[1].left_ns))
    if len(largest) > MAX_CLIENTS:
        other = other or ClientCells()
    shown: list[tuple[Any, ClientCells]] = [*largest[:MAX_CLIENTS]]
    return [*shown, (None, other)] if other is not None else shown


def _pushes(of_workers: list[dict[Any, Any]]) -> Pushes:
    """Merge the pushed metrics of all workers: the latest push of each client counts.

    An instance id belongs to the client id that used it first: pushes of another client id under it are ignored.
    """
    pushes = Pushes()
    for clients in of_workers:
        for instance, pushed in clients.items():
            if instance is None:
                pushes.other = add(pushes.other, pushed)
            elif (known := pushes.clients.get(instance)) is None or _replaces(pushed, known):
                pushes.clients[instance] = pushed
    return pushes


def _replaces(one: PushingClient, other: PushingClient) -> bool:
    if one.client_id != other.client_id:
        return one.since_ns < other.since_ns
    return one.pushed_ns > other.pushed_ns


# --- consumers -------------------------------------------------------------------------------------------------------


def _later(one: Log, other: Log) -> Log:
    """Merge two workers' reports of a log: the higher end, unless the lower one is newer, and the marks of both.

    The lower end is newer if it was lowered after the higher one was last raised (a truncation, or a response to
    kproxy's own request), or if a newer leader epoch has confirmed it since.
    """
    low, high = sorted((one, other), key=lambda log: (log.high_watermark, log.reported_ns))
    is_lowered = low.high_watermark < high.high_watermark and (
        low.lowered_ns >= high.raised_ns or (low.epoch > high.epoch != UNKNOWN and low.reported_ns >= high.raised_ns)
    )
    early, late = (high, low) if is_lowered else (low, high)
    log = Log()
    log.lowered_ns = max(one.lowered_ns, other.lowered_ns, high.raised_ns if is_lowered else 0)
    log.high_watermark, log.raised_ns, log.source = late.high_watermark, late.raised_ns, late.source
    if early.high_watermark == late.high_watermark:
        log.raised_ns = max(early.raised_ns, late.raised_ns)
    log.reported_ns = late.reported_ns
    log.epoch, log.broker = max(one.epoch, other.epoch), late.broker
    log.is_led = one.is_led or other.is_led
    log.marks.extend(sorted({*late.marks, *early.marks}))
    ends: dict[int, int] = {}
    for end, at_ns in (*early.ends, *late.ends, (early.high_watermark, early.reported_ns)):
        if end < log.high_watermark:
            ends[end] = max(at_ns, ends.get(end, 0))
    log.ends.extend(sorted(ends.items()))
    for each in (early, late):
        for offset, at_ns in each.earlier_ends.points():
            log.earlier_ends.add(offset, at_ns, log.reported_ns)
        for offset, at_ns in each.written.points():
            log.written.add(offset, at_ns, log.reported_ns)
    return log


def _last_removed(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    """Merge two workers' removals: the latest MAX_REMOVED, each with its last time."""
    both = one | {removal: max(at_ns, one.get(removal, 0)) for removal, at_ns in other.items()}
    return dict(sorted(both.items(), key=lambda item: item[1])[-MAX_REMOVED:])


def _lags(topics: Topics, name: str, latest: dict[Place, Any], living: Iterable[dict[Place, Any]]) -> Lags:
    """Return the consumers of a cluster over all workers."""
    lags = Lags(topics)
    lags.removed = latest.get((REMOVED, name), {}).copy()
    for (_, _, (topic, partition)), log in _paths(latest, LOG, name):
        key = (topics.names.get(topic, topic) if not isinstance(topic, str) else topic), partition
        if not lags.is_removed(key, log.raised_ns):
            lags.logs[key] = _later(lags.logs[key], log) if key in lags.logs else log
    for (_, _, (group, (topic, partition))), position in _paths(latest, COMMITTED, name):
        key = (topics.names.get(topic, topic) if not isinstance(topic, str) else topic), partition
        if lags.is_removed(key, position.reported_ns, group):
            continue
        known = lags.committed.get((group, key))
        position = position if known is None else _newer(known, position)
        lags.committed[group, key] = _dated(lags, key, position)
    for source in living:
        for _, (client_id, asked_ns, positions, left) in _paths(source, FETCHING, name):
            fetching = Fetching(lags)
            fetching.client_id, fetching.asked_ns = client_id, asked_ns
            fetching.positions, fetching.left = positions, left
            lags.fetching.add(fetching)
    return lags


def _paths(source: dict[Place, Any], kind: str, cluster: str) -> Iterator[tuple[Any, Any]]:
    return ((path, value) for path, value in source.items() if path[0] == kind and path[1] == cluster)


def _newer(known: Position, position: Position) -> Position:
    return position.after(known) if known.reported_ns <= position.reported_ns else known.after(position)


def _dated(lags: Lags, key: Any, position: Position) -> Position:
    """Complete a commit's `written_ms`: another worker may have seen the records."""
    if position.written_ms > 0:
        return position
    return position._replace(written_ms=lags.position(key, position.offset, position.reported_ns).written_ms)
