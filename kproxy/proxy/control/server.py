"""The composition root of the proxy: builds it, starts it, stops it in reverse.

The only module that knows both the proxy and its siblings (metrics, tables). One process, one event loop, one worker;
and the recorder's thread, if there is one.
"""

import asyncio
import logging
import signal
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from kproxy import __version__
from kproxy.errors import ConfigError, missing_package
from kproxy.metrics import Metrics
from kproxy.metrics.summary import summarise
from kproxy.proxy import log_lines
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.control import descriptors
from kproxy.proxy.control.cluster import ClusterProxy
from kproxy.proxy.control.draining import drain
from kproxy.proxy.control.garbage import FullCollections
from kproxy.proxy.control.worker import Worker
from kproxy.proxy.relay.listeners import Gate, why_unbound
from kproxy.proxy.relay.poller import Poller
from kproxy.proxy.relay.redirected import can_mark
from kproxy.proxy.relay.relay import READ_BYTES, Relay
from kproxy.wire.connection import Sink

if TYPE_CHECKING:
    from kproxy.proxy.control.admin import Admin, Query
    from kproxy.tables.recorder import Recorder

MAX_ROWS = 10_000  # of /api/connections in one answer
_DEFAULT_ROWS = 1000
_ROWS_PER_SLICE = 50  # of about 3 us each

log = logging.getLogger("kproxy.server")


class Server:
    """A kproxy: `start` and `stop` inside a running loop, or `run` with a loop of its own."""

    def __init__(self, config: Config, sinks: Sequence[Sink] = ()) -> None:
        self.config = config
        self.metrics = Metrics()
        self.clusters: list[ClusterProxy] = []
        self._sinks = tuple(sinks)
        self._worker: Worker | None = None
        self._admin: Admin | None = None
        self._recorder: Recorder | None = None
        self._draining = False

    @property
    def addresses(self) -> dict[str, Address]:
        """Where each cluster's clients bootstrap, by its name."""
        return {cluster.cluster.name: cluster.address for cluster in self.clusters}

    @property
    def admin_address(self) -> Address | None:
        return Address(*self._admin.address) if self._admin else None

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP (unless nohup has us ignore it); the second ends the drain at once.

        For a process that ends with it: the signals stay ignored, so that one that comes late cannot change its status.
        """
        import uvloop

        uvloop.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        again = asyncio.Event()

        def stop(number: int) -> None:
            if asked.is_set():
                again.set()
            log.info("%s: %s", signal.Signals(number).name, "closing at once" if asked.is_set() else "draining")
            asked.set()

        # Not loop.add_signal_handler: a loop that ends restores the default, and that would kill the process.
        numbers = [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if _is_heard(number)]
        for number in numbers:
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(stop, number))
        collections = FullCollections(lambda: self._running.objects)
        try:
            await self.start()
            collections.start()
            await asked.wait()
        finally:
            try:
                await self.stop(again)
            finally:
                collections.stop()
                for number in numbers:
                    signal.signal(number, signal.SIG_IGN)

    async def start(self) -> None:
        """Bind, listen and serve. Raises ConfigError where the configuration cannot be."""
        if self.config.upstream_mark is not None and not can_mark(self.config.upstream_mark):
            raise ConfigError([("upstream_mark", "kproxy may not mark its sockets: give it CAP_NET_ADMIN")])
        shares = descriptors.reserve(self.config.max_connections)
        self._start_recorder()
        self._start_worker(shares)
        log.info("kproxy %s: at most %d connections", __version__, shares.connections)
        for cluster in self.config.clusters:
            proxy = self._cluster(self._running, cluster)
            self.clusters.append(proxy)
            proxy.start()
        await self._start_admin(shares)

    # What a kproxy of several processes does otherwise; see `parent` and `worker_process`.

    def _start_recorder(self) -> None:
        config = self.config
        if config.record is not None:
            self._recorder = _recorder(config)
            self._recorder.start()
            self.metrics.recorder_dropped = self._recorder.dropped
            self._sinks += (self._recorder,)

    def _start_worker(self, shares: descriptors.Shares) -> None:
        self.metrics.connection_limit = shares.connections
        self.metrics.log_lines_dropped = log_lines.dropped
        self._worker = Worker(
            self.config,
            Gate(shares.connections, max_sockets=shares.listening),
            Poller(asyncio.get_running_loop()),
            memoryview(bytearray(READ_BYTES)),
            self.metrics.clock_offset_ns,
            self.metrics,
            self._sinks,
        )

    def _cluster(self, worker: Worker, cluster: Cluster) -> ClusterProxy:
        return ClusterProxy(worker, cluster)

    @property
    def _running(self) -> Worker:
        assert self._worker is not None
        return self._worker

    async def _start_admin(self, shares: descriptors.Shares) -> None:
        if self.config.admin is None:
            return
        # HTTP and the text formats take 11 MB: a kproxy without an admin port goes without.
        from kproxy.proxy.control.admin import Admin

        admin = Admin(
            *self.config.admin,
            scrape=self._scraper(),
            not_ready=self.not_ready,
            api={
                "clusters": self._api_clusters,
                "connections": self._api_connections,
                "traffic": self._api_traffic,
            },
            max_connections=shares.admin,
        )
        try:
            await admin.start()
        except OSError as fault:
            text = f"{self.config.admin} cannot be bound: {why_unbound(fault)}"
            raise ConfigError([("admin", text)]) from None
        self._admin = admin
        log.info("admin at %s: /metrics /health /ready", admin.url)

    def _scraper(self) -> Callable[[str], tuple[bytes, str]]:
        """What renders a scrape, on a thread."""
        from kproxy.metrics.collector import registry_of
        from kproxy.metrics.exposition import render

        registry = registry_of(self.metrics)
        return lambda accept: render(registry, accept)

    def not_ready(self) -> list[str]:
        """Why traffic should not be sent here; nothing: it can."""
        if self._draining:
            return ["draining"]
        return list(chain.from_iterable(cluster.not_ready() for cluster in self.clusters))

    async def stop(self, at_once: asyncio.Event | None = None) -> None:
        """Stop accepting after `drain_delay_s`, let connections finish what is under way, close.

        From the start of it `not_ready` says so. `at_once` ends the waiting.
        """
        start = time.monotonic()
        at_once = at_once or asyncio.Event()
        self._draining = True
        if self.config.drain_delay_s and self._worker is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(at_once.wait(), self.config.drain_delay_s)
        for cluster in self.clusters:
            cluster.close()
        for cluster in self.clusters:
            await cluster.stop()
        if self._worker is not None:
            relays = tuple(self._worker.relays.values())
            drained = await drain(relays, self.config.drain_timeout_s, at_once, "drain")
            self._worker.gate.close()
            self._worker.ageing.stop()
            self._worker.poller.close()
            self._worker.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._admin is not None:
            await self._admin.stop()
        if self._worker is not None:
            text = "stopped in %.1f s: %d connections drained, %d closed before their requests were answered"
            log.info(text, time.monotonic() - start, *drained)

    def _api_traffic(self, _: "Query") -> Any:
        return summarise(self.metrics, time.time_ns()).as_json()

    def _api_clusters(self, _: "Query") -> list[dict[str, Any]]:
        return [
            {
                "name": proxy.cluster.name,
                "listen": str(proxy.address),
                "route": proxy.cluster.route,
                "bootstrap": [str(address) for address in proxy.cluster.bootstrap],
                "not_ready": list(proxy.not_ready()),
                "brokers": {
                    str(node_id): {"port": listener.port, "upstream": str(proxy.routes.upstreams.get(node_id, ""))}
                    for node_id, listener in sorted(proxy.brokers.items())
                },
            }
            for proxy in self.clusters
        ]

    def _api_connections(self, query: "Query") -> AsyncIterator[list[dict[str, Any]]]:
        """Open connections, the oldest first: at most `limit`, of those whose number is above `after`."""
        limit = _number(query, "limit", _DEFAULT_ROWS, MAX_ROWS)
        after = _number(query, "after", 0, 1 << 62)
        return self._connection_slices(after, limit)

    async def _connection_slices(self, after: int, limit: int) -> AsyncIterator[list[dict[str, Any]]]:
        relays = sorted(self._worker.relays.values(), key=lambda relay: relay.number) if self._worker else []
        first = bisect_right(relays, after, key=lambda relay: relay.number)
        for start in range(first, min(first + limit, len(relays)), _ROWS_PER_SLICE):
            end = min(start + _ROWS_PER_SLICE, first + limit)
            yield [_connection_row(relay) for relay in relays[start:end] if not relay.closed]


def _connection_row(relay: Relay) -> dict[str, Any]:
    info = relay.info
    return {
        "number": relay.number,
        "cluster": info.cluster,
        "client": str(Address(info.client_address, info.client_port)),
        "broker": info.broker_id,
        "upstream": str(Address(info.broker_address, info.broker_port)),
        "opened_ns": info.opened_ns,
        "requests_pending": len(relay.session.pending),
    }


def _number(query: "Query", name: str, default: int, highest: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= highest):
        raise ValueError(f"{name}={text[:40]!r} is not a number from 0 to {highest}")
    return int(text)


def _is_heard(number: signal.Signals) -> bool:
    return signal.getsignal(number) is not signal.SIG_IGN


def _recorder(config: Config) -> "Recorder":
    try:
        from kproxy.tables.recorder import Recorder
    except ModuleNotFoundError as fault:  # heavy, and not everybody's
        missing = missing_package(fault.name)
        if missing is None:
            raise
        raise ConfigError([("record", missing)]) from None
    assert config.record is not None
    return Recorder(config.record, {"detail": {cluster.name: cluster.detail for cluster in config.clusters}})
