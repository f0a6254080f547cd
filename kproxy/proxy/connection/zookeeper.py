"""`[[zookeeper]]` listeners: accepts clients, connects each to a server, counts and records their traffic.

Each client gets the next server in turn. If kproxy cannot reach a server, it tries the next one at once, and tries the
former last for RETRY_S. Any of the servers can serve a session. Runs in one process: the parent, if there are workers.
Bounds: clients count among `max_connections`; all sessions of a listener hold at most ROOM_BYTES of large frames and
ROOM_OPERATIONS unanswered operations. Refuses to know bytes, and how a relay forwards them.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic
from typing import Any, Protocol

from kproxy.errors import ConfigError, UpstreamError
from kproxy.insight import registry
from kproxy.insight.membership.registry_groups import ConsumerGroups
from kproxy.insight.rows import TABLES as TABLE_OF
from kproxy.insight.rows import Row
from kproxy.metrics.counters.zookeeper import ZooKeeperCells
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.zookeeper import ZooKeeper
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.relay.zookeeper import ZooKeeperRelay
from kproxy.proxy.sockets.listeners import Listener, resolve, why_unbound
from kproxy.proxy.tasks import Tasks
from kproxy.wire.connection import ConnectionInfo
from kproxy.zookeeper.session import Event, Fault, Operation, Room

ENDED_S = 5.0  # s in which ended connections must report unanswered operations during a drain
DIAL_S = 3.0  # a client allows a server a third of its session timeout
RETRY_S = 30.0
ROOM_BYTES = 64 * 1024 * 1024
# Unanswered operations: eight servers accept as many (globalOutstandingLimit), and a garbage collection walks them in
# 3 ms.
ROOM_OPERATIONS = 8 * 1024
REGISTRY = "registry"

_numbers = count(1)  # numbers of clients, unique over all listeners

log = logging.getLogger("kproxy.zookeeper")


class Recording(Protocol):
    """Records rows: `tables.live.recorder.Recorder`."""

    def rows(self, source: str) -> Callable[[str, Sequence[Any]], None]: ...


class ZooKeeperProxy:
    """One listener: `start` binds it, `stop_accepting` and `drain` end it.

    recorder: None disables recording.
    """

    def __init__(self, worker: Worker, settings: ZooKeeper, recorder: Recording | None) -> None:
        self.settings = settings
        self.cells = ZooKeeperCells([str(server) for server in settings.servers])
        self.source = f"live:zookeeper:{settings.name}"
        self._worker = worker
        self._take = recorder.rows(self.source) if recorder is not None else None
        self._groups = ConsumerGroups(settings.name)
        self._room = Room(ROOM_BYTES, ROOM_OPERATIONS)
        self.cells.values_left_out = lambda: self._room.refused
        self._relays: dict[ZooKeeperRelay, _Connection] = {}
        self._failed_s: dict[Address, float] = {}  # time of the latest failure to reach a server
        self._turn = 0
        self._listener: Listener | None = None
        self._tasks = Tasks(f"zookeeper={settings.name}")
        self._limiter = LogLimiter(log)

    @property
    def address(self) -> Address:
        assert self._listener is not None
        return self._listener.address

    def start(self) -> None:
        """Bind and accept. Raises ConfigError."""
        listen = self.settings.listen
        place = f"zookeeper {self.settings.name}: listen"
        try:
            hosts = resolve(listen.host)
            self._listener = Listener(
                self._worker.gate,
                hosts,
                listen.port,
                self._worker.config.accept_backlog,
                self._accepted,
                f"zookeeper-{self.settings.name}",
            )
        except OSError as fault:
            why = why_unbound(fault, hosts=[listen.host], port=listen.port)
            raise ConfigError([(place, f"{listen} cannot be bound: {why}")]) from None
        self._worker.metrics.zookeeper[self.settings.name] = self.cells
        servers = ", ".join(map(str, self.settings.servers))
        log.info("zookeeper=%s: listening on %s, for %s", self.settings.name, self.address, servers)

    def stop_accepting(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Close each connection once all its requests are answered; its session continues at another server."""
        await self._tasks.cancel()
        for relay in tuple(self._relays):
            relay.finish()
        end = monotonic() + timeout_s
        while self._relays and monotonic() < end and not at_once.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for relay in tuple(self._relays):
            relay.abort()
        end = monotonic() + ENDED_S
        while self._relays and monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._record(list(self._groups.finish()))

    def rows(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Return the oldest clients whose number is above `after`, as rows of /api/zookeeper."""
        found: list[dict[str, Any]] = []
        for relay, connection in self._relays.items():  # ordered by number
            if len(found) == limit:
                break
            if connection.number > after:
                found.append(connection.row(self.settings.name, relay))
        return found

    # --- a client ----------------------------------------------------------------------------------------------------

    def _accepted(self, client: socket.socket, peer: Address) -> None:
        self._worker.gate.enter()
        self.cells.accepted += 1
        self._tasks.spawn(self._connect(client, peer))

    async def _connect(self, client: socket.socket, peer: Address) -> None:
        opened_ns = self._worker.now_ns()
        relayed = False
        server: socket.socket | None = None
        try:
            server = await self._dial()
            if server is None:
                text = "zookeeper=%s: no server can be reached; the client is turned away, and tries again"
                self._limiter.log(logging.ERROR, "unreachable", text, self.settings.name)
                return
            host, port = server.getpeername()[:2]
            info = ConnectionInfo(self.settings.name, self.source, peer.host, peer.port, host, port, None, opened_ns)
            ends = registry.Ends(peer.host, peer.port, host, port, info.id)
            relay = ZooKeeperRelay(
                client,
                server,
                self._worker.now_ns,
                self._take_events,
                self._ended,
                self._room,
                self.cells.bytes,
                self._worker.readings,
                values=self._take is not None,
            )
            self._relays[relay] = _Connection(ends, self._worker.dialler.loops.own_end(server), opened_ns)
            self.cells.connections += 1
            relayed = True
            await relay.start()
        except OSError as fault:
            log.debug("zookeeper=%s: %s ended early: %s", self.settings.name, peer, fault)
        finally:
            if not relayed:
                client.close()
                if server is not None:
                    self._worker.dialler.close(server)
                self._worker.gate.leave()

    async def _dial(self) -> socket.socket | None:
        """Return a connection to the first server that can be reached, or None."""
        servers = self.settings.servers
        first = self._turn % len(servers)
        self._turn += 1
        now_s = monotonic()
        inorder = [*servers[first:], *servers[:first]]
        inorder.sort(key=lambda server: now_s - self._failed_s.get(server, -RETRY_S) < RETRY_S)  # stable
        for server in inorder:
            try:
                async with asyncio.timeout(min(DIAL_S, self._worker.dialler.timeout_s)):
                    sock = await self._worker.dialler.dial(server)
            except (UpstreamError, TimeoutError) as fault:
                self.cells.dial_failures[str(server)] += 1
                self._failed_s[server] = monotonic()
                text = "zookeeper=%s: %s cannot be reached, the next of the list is tried: %s"
                reason = str(fault) or f"no answer within {DIAL_S:g} s"
                self._limiter.log(logging.WARNING, server, text, self.settings.name, server, reason)
                continue
            self._failed_s.pop(server, None)
            return sock
        return None

    # --- traffic -----------------------------------------------------------------------------------------------------

    def _take_events(self, relay: ZooKeeperRelay, events: list[Event]) -> None:
        connection = self._relays[relay]
        cells = self.cells
        for event in events:
            cells.count(event)
            connection.operations += isinstance(event, Operation)
            if isinstance(event, Fault):
                cells.unread["fault"] += 1
                text = "zookeeper=%s: a connection is passed on and no longer read: %s, at byte %d of its %s"
                side = "server" if event.side else "client"
                self._limiter.log(logging.WARNING, "fault", text, self.settings.name, event.text, event.offset, side)
        if relay.session.session and not connection.has_session:
            connection.has_session = True
            cells.sessions += 1
        if self._take is not None:
            rows = [row for event in events for row in registry.rows(event, self.settings.name, connection.ends)]
            self._take(REGISTRY, rows)
            self._record([derived for row in rows for derived in self._groups.feed(row)])

    def _record(self, rows: list[Row]) -> None:
        if self._take is not None:
            for row in rows:
                self._take(TABLE_OF[type(row)], [row])

    def _ended(self, relay: ZooKeeperRelay) -> None:
        connection = self._relays.pop(relay)
        cells = self.cells
        if relay.session.command:
            cells.unread["command"] += 1
        cells.connections -= 1
        cells.sessions -= connection.has_session
        self._worker.dialler.loops.closed(connection.own_end)
        self._worker.gate.leave()


class _Connection:
    __slots__ = ("ends", "has_session", "number", "opened_ns", "operations", "own_end")

    def __init__(self, ends: registry.Ends, own_end: Address, opened_ns: int) -> None:
        self.ends = ends
        self.own_end = own_end
        self.opened_ns = opened_ns
        self.number = next(_numbers)
        self.operations = 0  # operations that have ended
        self.has_session = False

    def row(self, name: str, relay: ZooKeeperRelay) -> dict[str, Any]:
        ends, session = self.ends, relay.session
        return {
            "number": self.number,
            "cluster": name,
            "client": str(Address(str(ends.client_address), int(ends.client_port or 0))),
            "server": str(Address(str(ends.server_address), int(ends.server_port or 0))),
            "session": registry.session_name(session.session),
            "opened_ns": self.opened_ns,
            "operations": self.operations,
            "operations_pending": session.unanswered,
            "is_read": not session.opaque,
        }
