"""The relays of one process: its worker, clusters, recorder and flight recorder.

A kproxy of one process has one `Relays`. With workers, each worker has one. Their parent has one too: it accepts all
clients but relays only those of ZooKeeper. Refuses to know admin ports, signals and other processes.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kproxy.core import native
from kproxy.errors import ConfigError, KproxyError, of_extras
from kproxy.metrics import Metrics
from kproxy.proxy import log_lines
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.connection.draining import drain
from kproxy.proxy.connection.operating import OPERATIONS, connection_row
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters.flight import FlightRecorder
from kproxy.proxy.process.changing.changes import Changes, same_upstream
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.relay.compiled import Core
from kproxy.proxy.relay.pressure import Pressure
from kproxy.proxy.sockets import descriptors
from kproxy.proxy.sockets.listeners import Gate
from kproxy.proxy.sockets.poller import Poller
from kproxy.proxy.sockets.sockets import READ_BYTES
from kproxy.proxy.tasks import waited
from kproxy.proxy.upstream.loops import IsOurs, LoopGuard
from kproxy.wire.connection import Sink

if TYPE_CHECKING:
    from kproxy.proxy.connection.zookeeper import ZooKeeperProxy
    from kproxy.tables.live.recorder import Recorder

_ROWS_PER_SLICE = 50  # about 3 us per row
_MAKING_S = 0.02
_LEAVING_S = 0.1

log = logging.getLogger("kproxy.server")


class Relays:
    """Serves the clusters of the configuration: call `start`, then `drain`, then `close`."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        shares: descriptors.Shares,
        sinks: Sequence[Sink] = (),
        *,
        guard: Callable[[IsOurs], LoopGuard] = LoopGuard,
        build: Callable[[Worker, Cluster], ClusterProxy] = ClusterProxy,
        counts_elsewhere: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """build: makes each cluster; guard: detects connections that lead back here.

        counts_elsewhere(name): whether another process counts the connections of that cluster.
        """
        self.config = config
        self.clusters: list[ClusterProxy] = []
        self.zookeeper: list[ZooKeeperProxy] = []
        self.flight: FlightRecorder | None = None
        self._former: list[ClusterProxy] = []  # retired by the last reload, or still setting up clients' connections
        self._metrics = metrics
        self._build = build
        self._counts_elsewhere = counts_elsewhere
        self._recorder: Recorder | None = None
        metrics.connection_limit = shares.connections
        metrics.log_lines_dropped = log_lines.dropped
        poller = Poller(asyncio.get_running_loop())
        metrics.epoll_refusals = lambda: poller.refused
        self.worker = Worker(
            config,
            Gate(shares.connections, max_sockets=shares.listening),
            poller,
            Pressure(memoryview(bytearray(READ_BYTES))),
            metrics.clock_offset_ns,
            metrics,
            sinks,
            guard=guard,
        )
        self.worker.gate.starved = self._starved
        module = native()
        if module is not None:
            self.worker.core = Core(module, self.worker.poller, self.worker.pressure, metrics)

    def _starved(self, listener: str) -> None:
        """Count that a client of a listener had to wait for a file descriptor."""
        for cluster in self.clusters:
            name = cluster.cluster.name
            if listener == name or listener.rpartition("/")[0] == name:
                self._metrics.cluster(name).limits["open_files"] += 1

    # --- recording, begun before `start` -----------------------------------------------------------------------------

    def record(self, number: int | None = None, *, beside: bool = False) -> None:
        """Start recording tables, if `record` is set. number: the worker's; beside: another kproxy also records."""
        if self.config.record is not None:
            self._recorder = _started_recorder(self.config, number, beside=beside)
            self._metrics.recorder_dropped = self._recorder.dropped
            self.worker.sinks = (*self.worker.sinks, self._recorder)

    def keep_flight(self, number: int | None = None) -> None:
        """Start keeping the last exchanges for dumps, if `flight` is set. number: the worker's."""
        if self.config.flight is not None:
            details = {cluster.name: cluster.detail for cluster in self.config.clusters}
            self.flight = FlightRecorder(self.config.flight, details, self._metrics, number)
            self.worker.sinks = (*self.worker.sinks, self.flight)
            self.worker.flight = self.flight

    # --- serving -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve all clusters. Raises ConfigError."""
        for cluster in self.config.clusters:
            proxy = self._build(self.worker, cluster)
            self.clusters.append(proxy)
            proxy.start()

    def faults(self) -> Iterator[tuple[str, str]]:
        """Build the clusters without starting them; yields the faults of their settings: (place, text)."""
        for cluster in self.config.clusters:
            try:
                self._build(self.worker, cluster)
            except ConfigError as fault:
                yield from fault.faults

    def serve_zookeeper(self) -> None:
        """Serve the clients of each registry. Raises ConfigError."""
        if not self.config.zookeeper:
            return
        from kproxy.proxy.connection.zookeeper import ZooKeeperProxy  # few installations need its layouts

        for settings in self.config.zookeeper:
            self.zookeeper.append(ZooKeeperProxy(self.worker, settings, self._recorder))
            self.zookeeper[-1].start()

    def operate(self, operation: str, *arguments: Any) -> Any:
        """Run one of `operating.OPERATIONS` on the connections; returns its result."""
        return OPERATIONS[operation](self.worker, *arguments)

    def connection_rows(self, after: int, limit: int) -> Iterator[list[dict[str, Any]]]:
        """Yield open connections, oldest first, with a number above `after`, in slices that each take little time."""
        relays = self.worker.relays
        numbers = sorted(relays)
        first = bisect_right(numbers, after)
        for start in range(first, min(first + limit, len(numbers)), _ROWS_PER_SLICE):
            end = min(start + _ROWS_PER_SLICE, first + limit)
            asked = [relays[number] for number in numbers[start:end] if number in relays]  # some have ended since
            yield [connection_row(relay) for relay in asked if not relay.closed]

    # --- other settings ----------------------------------------------------------------------------------------------

    def replace_clusters(self, new: Config, differing: Changes) -> None:
        """Serve the clusters of other settings. Raises ConfigError; nothing has changed then."""
        worker = self.worker
        former = {proxy.cluster.name: proxy for proxy in self.clusters}
        before, worker.config = worker.config, new
        built: dict[str, ClusterProxy] = {}
        try:
            for cluster in new.clusters:
                if cluster.name in (*differing.added, *differing.changed):
                    built[cluster.name] = self._build(worker, cluster)
            for name in (*differing.changed, *differing.removed):
                for listener in former[name].listeners:
                    for sock in listener.sockets:
                        worker.gate.given.put(listener.name, sock.dup())
            for name, proxy in built.items():
                proxy.start(former.get(name))
        except (ConfigError, OSError) as fault:
            worker.gate.given.close()
            worker.config = before
            for name, proxy in built.items():
                proxy.retire(None, ends=True)
                if name in former:
                    former[name].show_state()
                elif not self._is_leaving(name):  # else `drain_cluster` ends its series
                    self._metrics.clusters.pop(name, None)
            if isinstance(fault, OSError):
                raise ConfigError([("", f"no sockets for what is new: {fault.strerror or fault}")]) from None
            raise
        for name, proxy in built.items():
            if name in former:
                same = same_upstream(former[name].cluster, proxy.cluster)
                proxy.follow(former[name], same_upstream=same, ends=name in differing.drained)
        for name in differing.removed:
            former[name].retire(None, ends=True)
        self._former = [proxy for proxy in self._former if proxy.making]
        for proxy in self._former:
            if proxy.cluster.name in differing.drained:
                proxy.end_new()
        self._former += [former[name] for name in (*differing.changed, *differing.removed)]
        worker.gate.given.close()
        self.clusters[:] = [built.get(cluster.name) or former[cluster.name] for cluster in new.clusters]
        self.config = new

    def set_limits(self, new: Config, differing: Changes) -> None:
        """Apply the settings that belong to no single cluster and take effect at once."""
        worker = self.worker
        worker.dialler.timeout_s = new.connect_timeout_s
        for proxy in self.clusters:
            proxy.set_pace(new.discovery_interval_s, new.accept_backlog)
        if "max_connections" in differing.process:
            shares = descriptors.reserve(new.max_connections, new.workers)
            worker.gate.max_sockets = shares.listening
            worker.gate.limit(shares.connections)
            self._metrics.connection_limit = shares.connections
        if "log_level" in differing.process:
            log_lines.set_level(new.log_level)

    async def drain_cluster(self, name: str, at_once: asyncio.Event) -> None:
        """Drain the connections of a cluster that are open now.

        No further request is read from them: the policy or the route that applied to them is no longer in force.
        """
        relays = [relay for relay in self.worker.relays.values() if relay.info.cluster == name]
        drained = await drain(relays, self.config.drain_timeout_s, at_once, f"cluster {name}", serves=False)
        log.info("cluster=%s: %d connections drained, %d closed before their requests were answered", name, *drained)
        while self._is_leaving(name) and not at_once.is_set():  # connections still being set up; each ends in time
            await waited(at_once, _LEAVING_S)
        if not self._serves(name):
            self._metrics.clusters.pop(name, None)  # the series end with the last connection

    def _serves(self, name: str) -> bool:
        return any(proxy.cluster.name == name for proxy in self.clusters)

    def _is_leaving(self, name: str) -> bool:
        """Whether a removed cluster still has clients, whose connections are counted until they end."""
        if self._serves(name):
            return False
        if self._counts_elsewhere(name) or any(p.making for p in self._former if p.cluster.name == name):
            return True
        return any(relay.info.cluster == name for relay in self.worker.relays.values())

    # --- stopping ----------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Close all ports to new clients."""
        for cluster in self.clusters:
            cluster.retire(None, ends=True)
        for listener in self.zookeeper:
            listener.stop_accepting()

    async def drain(self, at_once: asyncio.Event) -> tuple[int, int]:
        """Let connections finish; returns how many finished and how many were closed at the timeout."""
        timeout_s = self.config.drain_timeout_s
        end = time.monotonic() + timeout_s
        relays = self.worker.relays
        finished, closed = await drain(tuple(relays.values()), timeout_s, at_once, "drain")
        while any(cluster.making for cluster in self.clusters) and time.monotonic() < end and not at_once.is_set():  # noqa: ASYNC110
            await asyncio.sleep(_MAKING_S)
        left_s = max(0.0, end - time.monotonic())
        further = await drain(tuple(relays.values()), left_s, at_once, "drain")
        return finished + further.finished, closed + further.closed

    async def drain_zookeeper(self, at_once: asyncio.Event) -> None:
        """Let ZooKeeper's clients finish."""
        timeout_s = self.config.drain_timeout_s
        await asyncio.gather(*(listener.drain(timeout_s, at_once) for listener in self.zookeeper))

    async def close(self) -> None:
        """Close sockets and threads; call it after `drain`."""
        for cluster in self.clusters:
            await cluster.stop()
        self.worker.gate.close()
        self.worker.ageing.stop()
        self.worker.poller.close()
        self.worker.close()
        await asyncio.to_thread(self.worker.feed.close)

    async def stop_recording(self) -> None:
        """Write the remaining rows and stop both recorders."""
        if self.flight is not None:
            await self.flight.stop()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)


def _started_recorder(config: Config, number: int | None, *, beside: bool) -> "Recorder":
    with of_extras(lambda missing: ConfigError([("record", missing)])):  # heavy, and optional
        from kproxy.tables.live.recorder import Recorder
        from kproxy.tables.live.retention import Retention
    assert config.record is not None
    detail = {cluster.name: cluster.detail for cluster in config.clusters}
    age_s = config.record_keep_h * 3600 if config.record_keep_h is not None else None
    retention = Retention(age_s, config.record_keep_bytes)
    recorder = Recorder(config.record, {"detail": detail}, worker=number, retention=retention, beside=beside)
    try:
        recorder.start()
    except KproxyError as fault:
        raise ConfigError([("record", str(fault))]) from None
    return recorder
