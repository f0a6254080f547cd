"""A worker's report of its cells to its parent: the changed units, in slices.

Slices are small, and the event loop runs between two of them, so that traffic does not wait for counting. A unit is
compared with its last sent version. Topics and clients are sent as `top` shows them, one unit each; consumers and ends
of logs only on request, since only a scrape needs them. Bound: a digest of each unit that was sent. A cluster whose
cells have gone is sent a last time, and then withdrawn. Refuses to know processes and messages.
"""

import asyncio
import pickle
import resource
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kproxy.metrics.consumers.log_end import Log
from kproxy.metrics.consumers.offsets import Key
from kproxy.metrics.counters.cells import ApiCells, ClusterCells
from kproxy.metrics.process import Metrics
from kproxy.metrics.processes.units import API, BROKER, CLUSTER, METRICS, Place, attributes, called, units

TOPIC, CLIENT, LOG, FETCHING, COMMITTED, NAMES, PROCESS, SLOW, PUSHED = (
    *("topic", "client", "log", "fetching", "committed", "names", "process", "slow", "pushed"),
)
REMOVED = "removed"  # removals of groups, topics and offsets: see Offsets.removed
SEEN = "seen"  # groups to ask for: see Offsets.seen
_OF_BROKERS = frozenset((BROKER, API))
_MAY_GO = _OF_BROKERS | {TOPIC, CLIENT, PUSHED}  # units that may go while their cluster stays
PER_SLICE = 32  # units, of some 10 us each

# A unit's current value, pickled; None: it was removed. None for a cluster removes all units of the cluster.
Change = tuple[Place, bytes | None]


class Published:
    """The state of a worker's reports: the counts that were already sent."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._clusters: dict[str, ClusterCells] = {}  # clusters with cells that were sent
        self._sent: dict[Place, int] = {}
        self._counts: dict[Place, int] = {}  # last counts of units whose change shows without pickling
        self._logs: dict[str, dict[Key, int]] = {}  # digests of the ends of logs sent, by cluster
        self._learned: dict[str, int] = {}  # commits sent, by cluster
        self._named: dict[str, int] = {}  # names of topics sent, by cluster
        self._lock = asyncio.Lock()

    async def changes(self, with_lags: bool) -> AsyncIterator[list[Change]]:
        """Yield the changes since the last call, in slices; the event loop runs between two slices."""
        async with self._lock:
            found = self._changes(with_lags)
            while True:
                slice_ = list(islice(found, PER_SLICE))
                changed = [change for change in slice_ if change is not None]
                if changed:
                    yield changed
                if len(slice_) < PER_SLICE:
                    return
                await asyncio.sleep(0)

    def _changes(self, with_lags: bool) -> Iterator[Change | None]:
        """Yield for each unit its change, or None if it has not changed."""
        metrics = self._metrics
        now_ns = metrics.now_ns()
        clusters = metrics.clusters.copy()  # some may go, or be made anew, between two slices
        for name, cells in list(self._clusters.items()):
            if clusters.get(name) is not cells:
                yield from self._withdrawn(cells, now_ns)
        yield self._if_changed((METRICS,), attributes(metrics) | called(metrics))
        yield self._if_changed((PROCESS,), (time.process_time_ns(), _resident_bytes()))
        yield self._if_changed((SLOW,), list(metrics.slow.rows))
        seen: set[Place] = set()
        for name, cluster in clusters.items():
            self._clusters[name] = cluster
            yield from self._cluster(cluster, now_ns, seen)
            if with_lags and cluster.lags is not None:
                yield from self._lags(name, cluster.lags, seen)
        gone = [path for path in self._sent if path[0] in _MAY_GO and path not in seen]
        if with_lags:
            gone += [path for path in self._sent if path[0] == FETCHING and path not in seen]
        for path in gone:
            self._forget(path)
            yield path, None

    def _cluster(self, cluster: ClusterCells, now_ns: int, seen: set[Place]) -> Iterator[Change | None]:
        """All of a cluster but its consumers and ends of logs. seen: gets the units that may go by themselves."""
        name = cluster.cluster
        for path, unit in _units(cluster):
            if path[0] in _OF_BROKERS:
                seen.add(path)
            if isinstance(unit, ApiCells):
                yield self._if_counted(path, unit, unit.request_bytes + unit.response_bytes)
            else:
                yield self._if_changed(path, unit)
        for client, each in list(cluster.clients.top.shown(now_ns)):
            path = (CLIENT, name, client)
            seen.add(path)
            yield self._if_changed(path, (each.open, each.left_ns))
        if cluster.pushes is not None:
            for instance, pushing in cluster.pushes.shown(now_ns):
                path = (PUSHED, name, instance)
                seen.add(path)
                if instance is None:
                    yield self._if_changed(path, pushing.sums)
                else:
                    yield self._if_counted(path, pushing, pushing.pushed_ns)
        if cluster.topics is not None:
            for topic, cells in list(cluster.topics.top.shown(now_ns)):
                path = (TOPIC, name, topic)
                seen.add(path)
                yield self._if_counted(path, cells, cells.request.bytes + cells.response.bytes)
            names = cluster.topics.names
            if len(names) != self._named.get(name):
                self._named[name] = len(names)
                yield (NAMES, name), pickle.dumps(names.copy())

    def _withdrawn(self, cluster: ClusterCells, now_ns: int) -> Iterator[Change | None]:
        """A removed cluster: its last counts, and its removal.

        The other process keeps the counts while another worker has the cluster, so it needs the last of them.
        """
        name = cluster.cluster
        yield from self._cluster(cluster, now_ns, set())
        for path in [path for path in self._sent if len(path) > 1 and path[1] == name]:
            self._forget(path)
        for of_cluster in (self._clusters, self._named, self._logs, self._learned):
            of_cluster.pop(name, None)
        yield (CLUSTER, name), None

    def _forget(self, path: Place) -> None:
        self._sent.pop(path, None)
        self._counts.pop(path, None)

    def _lags(self, name: str, lags: Any, seen: set[Place]) -> Iterator[Change | None]:
        """Yield the changes of consumers, commits and ends of logs since the last call."""
        # A slow response has the time of its start, which may precede times already sent. So logs and consumers are
        # compared by digest, and commits by their number.
        if lags.seen:
            yield self._if_changed((SEEN, name), list(lags.seen))
        if lags.removed:
            yield self._if_changed((REMOVED, name), lags.removed.copy())
        sent = self._logs.get(name, {})
        logs = self._logs[name] = {}
        for key, log in lags.logs.copy().items():
            logs[key] = digest = _digest(log)
            yield ((LOG, name, key), pickle.dumps(log)) if digest != sent.get(key) else None
        for each in lags.fetching.copy():
            path = (FETCHING, name, id(each))
            seen.add(path)
            at = hash((each.asked_ns, len(each.positions), len(each.left)))
            if self._sent.get(path) != at:
                self._sent[path] = at
                yield path, pickle.dumps((each.client_id, each.asked_ns, each.positions, each.left))
        committed, learned = lags.committed.copy(), lags.learned
        for key in islice(reversed(committed), learned - self._learned.get(name, 0)):  # the latest come last
            yield (COMMITTED, name, key), pickle.dumps(committed[key])
        self._learned[name] = learned

    def _if_counted(self, path: Place, unit: Any, count: int) -> Change | None:
        if self._counts.get(path) == count:
            return None
        self._counts[path] = count
        self._sent[path] = 0
        return path, pickle.dumps(unit, pickle.HIGHEST_PROTOCOL)

    def _if_changed(self, path: Place, unit: Any) -> Change | None:
        data = pickle.dumps(unit, pickle.HIGHEST_PROTOCOL)
        digest = hash(data)
        if self._sent.get(path) == digest:
            return None
        self._sent[path] = digest
        return path, data


def _units(cluster: ClusterCells) -> Iterator[tuple[Place, Any]]:
    """Those of a single cluster, which need not be among those of the process any more."""
    alone = Metrics()
    alone.clusters[cluster.cluster] = cluster
    return islice(units(alone), 1, None)  # the first is that of the process


def _digest(log: Log) -> int:
    last = log.marks[-1] if log.marks else None
    return hash((log.high_watermark, log.reported_ns, log.raised_ns, log.lowered_ns, log.epoch, log.is_led, last))


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
