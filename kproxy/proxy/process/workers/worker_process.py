"""A worker process: it relays the clients that its parent accepts, and counts their traffic.

It has `Relays` and no other part of a kproxy: ports, discovery and the admin port are the parent's, connected to it by
a channel. It drains its connections and ends when the parent asks for that or has ended. Refuses to know what other
workers do.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kproxy.errors import KproxyError
from kproxy.metrics import Metrics
from kproxy.metrics.processes.published import Published
from kproxy.proxy import log_lines
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Config
from kproxy.proxy.connection.operating import connection_row
from kproxy.proxy.process.changing.changes import Changes
from kproxy.proxy.process.garbage import Collections
from kproxy.proxy.process.relays import Relays
from kproxy.proxy.process.shared import Known
from kproxy.proxy.process.workers.divided_cluster import PortsOfParent
from kproxy.proxy.process.workers.shared_loops import PortElsewhere, SharedLoops
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sockets import descriptors
from kproxy.proxy.sockets.channel import Channel, Handler
from kproxy.proxy.tasks import Tasks
from kproxy.wire.decisions.authorizer import MAX_HELD_REQUEST

PUBLISH_S = 1.0  # s between reports of counters; a killed worker loses those since its last report
_FLUSH_S = 1.0  # s in which the parent must receive the last messages

log = logging.getLogger("kproxy.processes")


@dataclass
class Beginning:
    """The parent's first message to a worker."""

    config: Config
    number: int
    token: str  # of kproxy's own requests
    connection_limit: int
    clock_offset_ns: int
    started_ns: int


def work(sock: socket.socket) -> None:
    """Run a worker until it ends; `sock`: its end of the channel."""
    import uvloop

    uvloop.run(_Process(sock).run())
    logging.shutdown()


class _Process:
    """The message handlers of a worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._begun = asyncio.Event()
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._beginning: Beginning
        self._serving: Serving | None = None
        self._early: dict[str, Known] = {}  # latest state by cluster, received before it serves
        self._stream: socket.socket | None = None  # received before it serves

    async def run(self) -> None:
        handlers: dict[str, Handler] = {
            "begin": self._begin,
            "known": self._known,
            "client": self._client,
            "reconfigure": self._reconfigure,
            "operate": self._operate,
            "publish": self._publish,
            "connections": self._connections,
            "ended": self._ended,
            "loop": self._loop,
            "question": self._question,
            "insight": self._insight,
            "drain": self._stop.set,
            "at_once": self._at_once.set,
        }
        self._channel = channel = Channel(self._sock, handlers, self._parent_gone)
        waits = [asyncio.create_task(event.wait()) for event in (self._begun, self._stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._begun.is_set():
            return
        try:
            serving = self._serve()
        except (KproxyError, OSError) as fault:
            channel.send("failed", str(fault))
            await self._flushed()
            sys.exit(1)
        channel.send("ready")
        collections = Collections(lambda: serving.objects)
        collections.start()
        publishing = asyncio.create_task(self._publish_often())
        await self._stop.wait()
        drained = await serving.stop(self._at_once)
        collections.stop()
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing
        await self._publish(False)
        channel.send("drained", *drained)
        await self._flushed()
        channel.close()

    def _serve(self) -> "Serving":
        """Start serving with the current settings and the messages received so far. Raises KproxyError, OSError."""
        serving = Serving(self._beginning, self._channel)
        serving.start()
        self._serving = serving
        for known in self._early.values():
            serving.take(known)
        self._early.clear()
        if self._stream is not None:
            serving.feed_into(self._stream)
        return serving

    async def _flushed(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + _FLUSH_S
        while self._channel.is_behind and not self._channel.closed and loop.time() < end:  # noqa: ASYNC110 - polled at its end, once
            await asyncio.sleep(0.005)

    def _begin(self, beginning: Beginning) -> None:
        self._beginning = beginning
        logging.getLogger().handlers.clear()  # the parent's handlers, whose thread does not run here
        log_lines.begin(beginning.config.log_level, beginning.config.log_format, worker=beginning.number)
        self._begun.set()

    def _parent_gone(self) -> None:
        if not self._stop.is_set():
            if self._begun.is_set():  # else there is nothing to drain, and no log yet
                log.error("the parent process is gone: draining")
            self._stop.set()

    def _known(self, known: Known) -> None:
        if self._serving is None:
            self._early[known.name] = known
        else:
            self._serving.take(known)

    def _reconfigure(self, new: Config, differing: Changes) -> None:
        if self._serving is not None:
            try:
                self._serving.reconfigure(new, differing)
            except Exception as fault:  # a changed file, for example: never serve a client with the former settings
                log.error("the new settings do not work here: %s", fault)
                logging.shutdown()
                os._exit(1)  # the parent starts another worker with these settings
        else:
            self._beginning.config = new
            self._early.clear()  # state of the former settings; the parent sends that of all clusters again
            if "log_level" in differing.process:
                log_lines.set_level(new.log_level)

    def _client(
        self, number: int, name: str, node_id: int | None, peer: tuple[str, int], files: Iterable[int] = ()
    ) -> None:
        self._channel.send("taken", number)
        client = None
        for file in files:
            client = socket.socket(fileno=file)
            client.setblocking(False)
        if (
            client is None
            or self._serving is None
            or not self._serving.connect(
                name, Incoming(client, Address(*peer), node_id, self._serving.now_ns(), number=number)
            )
        ):
            if client is not None:
                client.close()
            self._channel.send("left", number)

    def _insight(self, files: Iterable[int] = ()) -> None:
        """Use a new stream to the decoding process."""
        for file in files:
            sock = socket.socket(fileno=file)
            if self._serving is None:
                if self._stream is not None:
                    self._stream.close()
                self._stream = sock
            else:
                self._serving.feed_into(sock)

    async def _publish_often(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_S)
            if not self._channel.is_behind:
                await self._publish(False)

    async def _publish(self, with_lags: bool) -> bool:
        """Send changed counters; the reply to `publish` follows them in the channel."""
        if self._serving is not None:
            async for changes in self._serving.published.changes(with_lags):
                self._channel.send("cells", changes)
        return True

    def _ended(self, cluster: str, *ended: Any) -> None:
        """Forget groups, topics and lower ends of logs that other workers have seen end."""
        cells = self._serving.metrics.clusters.get(cluster) if self._serving is not None else None
        if cells is not None and cells.lags is not None:
            cells.lags.ended(*ended)

    def _connections(self, after: int, limit: int) -> list[dict[str, Any]]:
        return self._serving.rows(after, limit) if self._serving is not None else []

    def _operate(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        assert self._serving is not None  # only ready workers are asked
        return self._serving.operate(operation, *arguments)

    def _loop(self, upstream: Address) -> None:
        if self._serving is not None:
            self._serving.loop_elsewhere(upstream)

    def _question(self, number: int) -> None:
        if self._serving is not None:
            self._serving.came_back(number)


class Serving:
    """Serves the clients that the parent accepts, from `start` to `stop`."""

    def __init__(self, beginning: Beginning, channel: Channel) -> None:
        """Create the relays. Raises ConfigError if tables cannot be recorded."""
        config, number = beginning.config, beginning.number
        self.metrics = Metrics()
        self.metrics.clock_offset_ns = beginning.clock_offset_ns
        self.metrics.started_ns = beginning.started_ns
        self.published = Published(self.metrics)
        self._number = number
        self._channel = channel
        self._draining = False
        self._elsewhere: dict[str, set[PortElsewhere]] = {}  # the parent's ports, by cluster
        self._at_once = asyncio.Event()
        self._tasks = Tasks("worker")
        shares = descriptors.reserve(config.max_connections, warns=False)
        self._relays = Relays(
            config,
            self.metrics,
            # All connections that the parent admits within its limit may come to this worker.
            shares._replace(connections=max(shares.connections, beginning.connection_limit)),
            guard=lambda is_ours: SharedLoops(is_ours, beginning.token, number, channel.send),
            build=lambda worker, cluster: PortsOfParent(worker, cluster, channel).proxy,
        )
        self._worker = self._relays.worker
        self._worker.held.limit_bytes = max(MAX_HELD_REQUEST, config.max_held_bytes // config.workers)
        self._worker.on_left = lambda number: channel.send("left", number)
        self._relays.record(number)
        self._relays.keep_flight(number)

    def start(self) -> None:
        """Serve all clusters. Raises ConfigError."""
        self._relays.start()

    async def stop(self, at_once: asyncio.Event) -> tuple[int, int]:
        """Drain and close, as `Relays.drain` does; `at_once` ends the waiting."""
        self._at_once = at_once
        self._draining = True
        self._relays.retire()
        drained = await self._relays.drain(at_once)
        await self._relays.close()
        await self._tasks.cancel()
        await self._relays.stop_recording()
        return drained

    @property
    def objects(self) -> int:
        return self._worker.objects

    def operate(self, operation: str, *arguments: Any) -> Any:
        return self._relays.operate(operation, *arguments)

    def feed_into(self, sock: socket.socket) -> None:
        """Send relays' copies into this stream from now on."""
        self._worker.feed.use(sock)

    def reconfigure(self, new: Config, differing: Changes) -> None:
        """Apply other settings, which the parent has applied already."""
        limit = self._worker.gate.max_connections
        self._relays.replace_clusters(new, differing)
        self._relays.set_limits(new, differing)
        self._worker.gate.max_connections = max(limit, self._worker.gate.max_connections)
        for name in differing.removed:
            self._listens(name, ())
        for name in differing.drained:
            self._tasks.spawn(self._relays.drain_cluster(name, self._at_once))

    def now_ns(self) -> int:
        return self._worker.now_ns()

    def take(self, known: Known) -> None:
        """Apply the parent's state of a cluster."""
        cluster = self._named(known.name)
        if cluster is not None:
            cluster.take(known)
            self._listens(known.name, known.ports)

    def _listens(self, name: str, ports: Iterable[tuple[int, tuple[str, ...]]]) -> None:
        """Treat exactly these ports of a cluster as kproxy's own from now on."""
        listeners = self._worker.gate.listeners
        listeners -= self._elsewhere.pop(name, set())
        now = {PortElsewhere(hosts, port) for port, hosts in ports}
        if now:
            self._elsewhere[name] = now
            listeners |= now

    def connect(self, name: str, client: Incoming) -> bool:
        """Serve a client; returns False if its cluster is gone or the worker drains."""
        cluster = self._named(name)
        if cluster is None or self._draining:
            return False
        cluster.connect(client)
        return True

    def rows(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Return the oldest open connections whose number is above `after`, as rows of /api/connections."""
        relays = sorted(self._worker.relays.values(), key=lambda relay: relay.number)
        rows = [connection_row(relay) for relay in relays if relay.number > after][:limit]
        return [{**row, "worker": self._number} for row in rows]

    def loop_elsewhere(self, upstream: Address) -> None:
        """Close and refuse connections to an upstream through which another process has found a loop."""
        loops = self._worker.loops
        assert isinstance(loops, SharedLoops)
        loops.refused_elsewhere(upstream)
        for relay in list(self._worker.relays.values()):
            if (relay.info.broker_address, relay.info.broker_port) == tuple(upstream):
                relay.close("loop", reset=True)

    def came_back(self, number: int) -> None:
        """Handle the arrival of one of this worker's requests at one of kproxy's own ports."""
        loops = self._worker.loops
        assert isinstance(loops, SharedLoops)
        upstream = loops.asked(number)
        if upstream is not None:
            self._relays.clusters[0].loop_found(upstream, "kproxy's own question")

    def _named(self, name: str) -> PortsOfParent | None:
        for cluster in self._relays.clusters:
            if cluster.cluster.name == name and isinstance(cluster.ports, PortsOfParent):
                return cluster.ports
        return None
