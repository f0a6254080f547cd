"""The composition root of the proxy: builds it, starts it, stops it in reverse.

The only module that knows both the proxy and its siblings (metrics, tables). One process, one event loop, one worker;
and the recorder's thread, if there is one.
"""

import asyncio
import gc
import logging
import resource
import signal
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kproxy import __version__
from kproxy.errors import ConfigError, missing_package
from kproxy.metrics import Metrics
from kproxy.metrics.collector import registry_of
from kproxy.metrics.exposition import render
from kproxy.metrics.lag import MAX_POSITIONS
from kproxy.metrics.summary import summarise
from kproxy.proxy.config import Address, Config
from kproxy.proxy.control.admin import Admin
from kproxy.proxy.control.cluster import ClusterProxy, Worker
from kproxy.proxy.relay.listeners import Gate
from kproxy.proxy.relay.poller import Poller
from kproxy.proxy.relay.relay import READ_BYTES
from kproxy.wire import pairing
from kproxy.wire.connection import Sink
from kproxy.wire.session import MAX_HELD, MAX_NAMED, MAX_PREFIX

if TYPE_CHECKING:
    from kproxy.tables.recorder import Recorder

_FILES_PER_CONNECTION = 2
_PENDING_BYTES = 600  # about, of one request that waits for its answer
_NAMED_BYTES = 700  # about, of one topic-partition or batch that a body names
_POSITION_BYTES = 400  # about, of one topic-partition that a client fetches or has fetched
_FILES_BESIDE = 256  # listeners, admin, the interpreter's own

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
        """Until SIGTERM, SIGINT or SIGHUP (unless nohup has us ignore it); the second ends the drain at once."""
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

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop, number)
        try:
            await self.start()
            gc.freeze()  # what is here stays: a collection set off by a scrape need not walk it while traffic waits
            await asked.wait()
        finally:
            await self.stop(again)

    async def start(self) -> None:
        config = self.config
        max_connections = _connections_by_files(config.max_connections)
        sinks = self._sinks
        if config.record is not None:
            self._recorder = _recorder(config)
            self._recorder.start()
            self.metrics.recorder_dropped = self._recorder.dropped
            sinks += (self._recorder,)
        self._worker = Worker(
            config,
            Gate(max_connections),
            Poller(asyncio.get_running_loop()),
            bytearray(READ_BYTES),
            self.metrics.clock_offset_ns,
            self.metrics,
            sinks,
        )
        log.info("kproxy %s: %s", __version__, _memory_bound(config, max_connections))
        for cluster in config.clusters:
            proxy = ClusterProxy(self._worker, cluster)
            self.clusters.append(proxy)
            proxy.start()
        if config.admin is not None:
            registry = registry_of(self.metrics)
            admin = Admin(
                *config.admin,
                scrape=lambda accept: render(registry, accept),
                not_ready=self.not_ready,
                api={
                    "clusters": self._api_clusters,
                    "connections": self._api_connections,
                    "traffic": lambda: summarise(self.metrics, time.time_ns()).as_json(),
                },
            )
            try:
                await admin.start()
            except OSError as fault:
                text = f"{config.admin} cannot be bound: {fault.strerror or fault}"
                raise ConfigError([("admin", text)]) from None
            self._admin = admin
            log.info("admin at %s: /metrics /health /ready", admin.url)

    def not_ready(self) -> list[str]:
        """Why traffic should not be sent here; nothing: it can."""
        if self._draining:
            return ["draining"]
        return list(chain.from_iterable(cluster.not_ready() for cluster in self.clusters))

    async def stop(self, at_once: asyncio.Event | None = None) -> None:
        """Stop accepting, let connections finish what is under way, close. `at_once` ends the waiting."""
        self._draining = True
        for cluster in self.clusters:
            await cluster.stop()
        if self._worker is not None:
            await self._drain(self._worker, at_once or asyncio.Event())
            self._worker.gate.close()
            self._worker.poller.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._admin is not None:
            await self._admin.stop()

    async def _drain(self, worker: Worker, at_once: asyncio.Event) -> None:
        worker.idle.clear()
        for relay in tuple(worker.relays):
            relay.drain()
        if worker.relays:
            waits = [asyncio.create_task(event.wait()) for event in (worker.idle, at_once)]
            timeout_s = self.config.drain_timeout_s
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if worker.relays:
            log.warning("%d connections did not finish in time and are closed", len(worker.relays))
        for relay in tuple(worker.relays):
            relay.close("drain_timeout")

    def _api_clusters(self) -> list[dict[str, Any]]:
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

    def _api_connections(self) -> list[dict[str, Any]]:
        relays = self._worker.relays if self._worker else ()
        return [
            {
                "cluster": relay.info.cluster,
                "client": str(Address(relay.info.client_address, relay.info.client_port)),
                "broker": relay.info.broker_id,
                "upstream": str(Address(relay.info.broker_address, relay.info.broker_port)),
                "opened_ns": relay.info.opened_ns,
                "requests_pending": len(relay.session.pending),
            }
            for relay in relays
        ]


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


def _connections_by_files(max_connections: int) -> int:
    """Ask the system for the files that the connections need; returns how many it gives them to.

    Where files are short, clients wait in the backlog: one that is accepted must be able to have its broker.
    """
    wanted = max_connections * _FILES_PER_CONNECTION + _FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return max_connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed == wanted:
        return max_connections
    possible = max(1, (allowed - min(_FILES_BESIDE, allowed // 2)) // _FILES_PER_CONNECTION)
    log.warning(
        "max_connections=%d needs %d open files, the system allows %d, enough for %d connections: "
        "raise the limit (LimitNOFILE)",
        max_connections,
        wanted,
        allowed,
        possible,
    )
    return possible


def _memory_bound(config: Config, max_connections: int) -> str:
    """The bounds of one connection, and their sum."""
    mib = 1 << 20
    each = 2 * READ_BYTES + MAX_PREFIX + pairing.LIMIT * _PENDING_BYTES
    named = ""
    if any(cluster.detail != "headers" for cluster in config.clusters):
        each += 2 * (MAX_NAMED * _NAMED_BYTES + MAX_POSITIONS * _POSITION_BYTES)
        named = f"{MAX_NAMED} topic-partitions or batches named each way, "
    return (
        f"memory per connection at most {READ_BYTES >> 10} KiB unsent each way, {pairing.LIMIT} pending requests, "
        f"{named}a prefix of {MAX_PREFIX >> 10} KiB: {each / mib:.1f} MiB, and an answer while it is held to be "
        f"rewritten (at most {MAX_HELD // mib} MiB); all {max_connections} connections at every bound at once: "
        f"{max_connections * each // mib} MiB and the answers held"
    )
