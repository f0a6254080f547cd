"""One configured cluster, live: its listeners, its routes, and what happens between an accept and a relay.

Every broker's port is bound before an answer that names it leaves, by asking the cluster at start and, for a broker
first seen later, inside the transform of that answer. A port that cannot be bound is still what clients are told,
never the broker's own address: it is logged, counted and tried again. Refuses to know bytes, and metrics' meaning.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Any

from kproxy.errors import ConfigError, UpstreamError
from kproxy.proxy.config import Address, Cluster, Config
from kproxy.proxy.lines import Lines
from kproxy.proxy.relay.listeners import Gate, Listener, is_local, resolve
from kproxy.proxy.relay.poller import Poller
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.upstream.dial import ask_brokers, dial
from kproxy.proxy.upstream.resolver import Names
from kproxy.proxy.upstream.rewrite import API_VERSIONS, cap_versions, rewrite_addresses
from kproxy.proxy.upstream.routing import Routes
from kproxy.wire.bodies import DETAILS
from kproxy.wire.connection import ConnectionInfo, Sink
from kproxy.wire.events import SIDES, Desync, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.session import Session

BOOTSTRAP = "bootstrap"
MAX_BROKERS = 4096  # that are not declared: an answer could name as many as there are ports, and each takes a file

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 10.0
_AVOIDED_S = 30.0  # a bootstrap address that failed is asked last for so long

log = logging.getLogger("kproxy.cluster")


@dataclass
class Worker:
    """What all clusters and connections of one event loop share."""

    config: Config
    gate: Gate
    poller: Poller
    buffer: bytearray  # every relay's reads land here
    clock_offset_ns: int  # monotonic time and this is the time of day, fixed at start
    metrics: Any  # kproxy.metrics.Metrics
    sinks: Sequence[Sink]
    names: Names = field(default_factory=Names)
    relays: set[Relay] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever the last relay closes

    def now_ns(self) -> int:
        return monotonic_ns() + self.clock_offset_ns


class ClusterProxy:
    def __init__(self, worker: Worker, cluster: Cluster) -> None:
        self.cluster = cluster
        self.routes: Routes
        self.brokers: dict[int, Listener] = {}  # by node id
        self._worker = worker
        self._interest = Interest(
            rewrite=True,
            details=bool(worker.sinks),  # metrics alone need no groups, and of bodies only what carries records
            detail=DETAILS[cluster.detail],
        )
        self._bootstrap: Listener | None = None
        self._hosts: list[str] = []
        self._beside: int | None = None  # route sidecar: the node id of the upstream, once known
        self._not_ready = "the cluster has not been asked yet"
        self._unbound: dict[int, str] = {}  # node id -> why its port is not bound
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_at: dict[Address, float] = {}
        self._turn = 0
        self._lines = Lines(log)
        self._cells = worker.metrics.cluster(cluster.name)

    @property
    def address(self) -> Address:
        """Where clients bootstrap; the port is the bound one."""
        assert self._bootstrap is not None
        return Address(self.cluster.listen.host, self._bootstrap.port)

    def not_ready(self) -> Iterator[str]:
        if self._not_ready:
            yield f"cluster {self.cluster.name}: {self._not_ready}"

    # --- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind what the configuration tells; the rest follows as soon as the cluster answers."""
        listen = self.cluster.listen
        try:
            self._hosts = resolve(listen.host)
            self._bootstrap = self._listener(None, listen.port)
        except OSError as fault:
            text = f"{listen} cannot be bound: {fault.strerror or fault}"
            raise ConfigError([(f"{self.cluster.name}: listen", text)]) from None
        self.routes = Routes(self.cluster, self._bootstrap.port)
        log.info(
            "listening cluster=%s route=%s listen=%s bootstrap=%s advertise=%s",
            self.cluster.name,
            self.cluster.route,
            self.address,
            ",".join(map(str, self.cluster.bootstrap)),
            self.cluster.advertised,
        )
        for node_id in self.routes.declared():
            self._bind(node_id)
        self._spawn(self._discover())

    async def stop(self) -> None:
        """Accept no more; connections that are still being made are given up."""
        if self._retry is not None:
            self._retry.cancel()
        for listener in (self._bootstrap, *self.brokers.values()):
            if listener is not None:
                listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the cluster's brokers ---------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Ask until someone answers, and bind what the answer names; then clients can come."""
        pause_s = _FIRST_RETRY_S
        while True:
            for address in self._bootstrap_order():
                try:
                    brokers = await self._ask(address)
                    if self.cluster.route == "sidecar":
                        self._beside = await self._who(address, brokers or {})
                        self._not_ready = ""
                    else:
                        self._not_ready = self._learn(address, brokers)
                except UpstreamError as fault:
                    self._failed_at[address] = monotonic()
                    self._not_ready = str(fault)
                if not self._not_ready:
                    log.info("ready cluster=%s brokers=%s", self.cluster.name, self._doors())
                    return
                self._lines.say(
                    logging.WARNING, address, "not ready cluster=%s: %s", self.cluster.name, self._not_ready
                )
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LAST_RETRY_S)

    async def _ask(self, address: Address) -> dict[int, Address] | None:
        worker = self._worker
        return await ask_brokers(address, worker.names, worker.gate.is_ours, worker.config.connect_timeout_s)

    async def _who(self, asked: Address, brokers: dict[int, Address]) -> int | None:
        """Which of the brokers answers at an address, if that is certain: no answer tells who gave it.

        A sidecar dials localhost, and the broker tells its name: then it is the one of this machine at that port.
        """
        same = [node_id for node_id, at in brokers.items() if at == asked]
        if same or len(brokers) == 1:
            return (same or list(brokers))[0]
        here = {node_id for node_id, at in brokers.items() if at.port == asked.port and await self._is_here(at)}
        return here.pop() if len(here) == 1 and await self._is_here(asked) else None

    async def _is_here(self, address: Address) -> bool:
        try:
            places = await self._worker.names.addresses(address)
        except OSError:
            return False
        return any(is_local(place[0]) for _, place in places)

    def _learn(self, asked: Address, brokers: dict[int, Address] | None) -> str:
        """Take in what a broker tells of all; returns what still keeps clients from coming, or nothing."""
        if brokers is None:
            if self.cluster.brokers:
                self._warn_of_unknown_upstreams()
                return "; ".join(self._unbound.values())
            return (
                f"{asked} tells its brokers only after a login, and kproxy has none: "
                "declare the node ids and their ports in [[cluster.brokers]]"
            )
        if not brokers:
            return f"{asked} names no brokers"
        for node_id, (host, port) in brokers.items():
            self.tell(node_id, host, port)
        return "; ".join(self._unbound.values())

    def _warn_of_unknown_upstreams(self) -> None:
        """Some clients dial brokers alone once they know them, and would not come back after a restart of kproxy."""
        unknown = [str(node_id) for node_id in self.routes.declared() if node_id not in self.routes.upstreams]
        if unknown:
            log.warning(
                "cluster=%s tells its brokers only after a login: until a client's does, those who come to broker %s "
                "are sent away; give [[cluster.brokers]] an upstream",
                self.cluster.name,
                ", ".join(unknown[:8] + ["..."] * (len(unknown) > 8)),
            )

    def tell(self, node_id: int, host: str, port: int) -> tuple[Address, bool]:
        """What clients are told of a broker that says it is at host:port, and whether that address is good."""
        told = self.routes.advertised(node_id, host)
        if not self.routes.learn(node_id, Address(host, port)):
            self._lines.say(
                logging.ERROR,
                "loop",
                "broker %d of cluster %s says it is at %s, which is kproxy: its advertised.listeners must name itself",
                node_id,
                self.cluster.name,
                Address(host, port),
            )
        return told, self._bind(node_id)

    def _bind(self, node_id: int) -> bool:
        """Make sure that a broker's port is open. False: it is not."""
        if node_id in self.brokers or self.cluster.route == "sidecar":
            return True
        door = self.routes.door(node_id)
        if door is None:
            text = f"no port stands for broker {node_id}: declare it in [[cluster.brokers]]"
            self._lines.say(logging.ERROR, "door", "cluster=%s: %s", self.cluster.name, text)
            return False
        doors = len(self.brokers) + len(self._unbound)
        if doors >= MAX_BROKERS and node_id not in self._unbound and not self.cluster.brokers:
            text = f"broker {node_id} gets no port: {MAX_BROKERS} others have one, or wait for theirs"
            self._lines.say(logging.ERROR, "brokers", "cluster=%s: %s", self.cluster.name, text)
            return False
        try:
            self.brokers[node_id] = self._listener(node_id, door.bind)
        except OSError as fault:
            where = Address(self.cluster.listen.host, door.bind)
            text = f"{where}, the port of broker {node_id}, cannot be bound: {fault.strerror or fault}"
            if node_id not in self._unbound:
                log.error("cluster=%s: %s; it is tried again", self.cluster.name, text)
            self._unbound[node_id] = text
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(_LAST_RETRY_S, self._bind_again)
            return False
        self._unbound.pop(node_id, None)
        log.info(
            "listening cluster=%s broker=%d port=%d upstream=%s",
            self.cluster.name,
            node_id,
            door.bind,
            self.routes.upstreams.get(node_id, "unknown"),
        )
        return True

    def _bind_again(self) -> None:
        self._retry = None
        for node_id in tuple(self._unbound):
            self._bind(node_id)

    def _doors(self) -> str:
        return ",".join(f"{node_id}:{listener.port}" for node_id, listener in sorted(self.brokers.items())) or "-"

    def _listener(self, node_id: int | None, port: int) -> Listener:
        self._cells.expect(self._label(node_id), listener_name(node_id))

        def accepted(client: socket.socket, peer: Address) -> None:
            self._worker.gate.enter()
            self._spawn(self._connect(node_id, client, peer))

        return Listener(self._worker.gate, self._hosts, port, self._worker.config.accept_backlog, accepted)

    # --- connections -------------------------------------------------------------------------------------------------

    async def _connect(self, node_id: int | None, client: socket.socket, peer: Address) -> None:
        """Find a client its broker; it is read only once that is connected."""
        opened_ns = self._worker.now_ns()
        broker_id = self._beside if node_id is None else node_id
        try:
            broker = await self._dial(node_id)
        except BaseException as fault:
            client.close()
            self._worker.gate.leave()
            if not isinstance(fault, UpstreamError):
                raise
            nowhere = self._info(peer, Address("", 0), broker_id, opened_ns)
            label = self._label(broker_id)
            self._worker.metrics.connection(nowhere, listener_name(node_id), label).closed("unreachable")
            self._lines.say(
                logging.WARNING, label, "unreachable cluster=%s broker=%s: %s", self.cluster.name, label, fault
            )
            return
        try:
            upstream = Address(*broker.getpeername()[:2])
            info = self._info(peer, upstream, broker_id, opened_ns)
            if log.isEnabledFor(logging.DEBUG):
                source = Address(*broker.getsockname()[:2])
                log.debug("connected client=%s broker=%s to %s from %s", peer, self._label(broker_id), upstream, source)
            self._relay(client, broker, info, listener_name(node_id))
        except BaseException as fault:
            client.close()
            broker.close()
            self._worker.gate.leave()
            if not isinstance(fault, OSError):  # that: one of them has gone already
                raise

    def _relay(self, client: socket.socket, broker: socket.socket, info: ConnectionInfo, listener: str) -> None:
        worker = self._worker
        rewriter = _Rewriter(self.tell)
        session = Session(self._interest, transform=rewriter, max_request_bytes=self.cluster.max_request_bytes)
        counting = worker.metrics.connection(
            info,
            listener,
            self._label(info.broker_id),
            session.pending,
            topics=bool(self._interest.detail),
        )
        rewriter.counting = counting
        relay = Relay(
            asyncio.get_running_loop(),
            worker.poller,
            worker.buffer,
            worker.clock_offset_ns,
            client,
            broker,
            session,
            info,
            counting,
            [counting.events, *(sink.connected(info) for sink in worker.sinks)],
            self._fault,
            self._closed,
        )
        worker.relays.add(relay)
        relay.start()

    async def _dial(self, node_id: int | None) -> socket.socket:
        if node_id is not None:
            address = self.routes.upstreams.get(node_id)
            if address is None:
                raise UpstreamError("no answer has told yet where it is")
            return await self._dial_one(address)
        fault = UpstreamError("no bootstrap address")
        for address in self._bootstrap_order():
            try:
                return await self._dial_one(address)
            except UpstreamError as refused:
                self._failed_at[address] = monotonic()
                fault = refused
        raise fault

    async def _dial_one(self, address: Address) -> socket.socket:
        worker = self._worker
        try:
            return await dial(address, worker.names, worker.gate.is_ours, worker.config.connect_timeout_s)
        except UpstreamError as fault:
            if isinstance(fault.__cause__, OSError):
                worker.gate.check(fault.__cause__)
            raise

    def _bootstrap_order(self) -> list[Address]:
        """All bootstrap addresses, taking turns at being the first; those that failed lately come last."""
        addresses = self.cluster.bootstrap
        self._turn = (self._turn + 1) % len(addresses)
        since = monotonic() - _AVOIDED_S
        return sorted(
            addresses[self._turn :] + addresses[: self._turn],
            key=lambda address: self._failed_at.get(address, since) > since,
        )

    def _info(self, peer: Address, upstream: Address, broker_id: int | None, opened_ns: int) -> ConnectionInfo:
        name = self.cluster.name
        return ConnectionInfo(name, f"live:{name}", *peer, *upstream, broker_id, opened_ns)

    def _label(self, broker_id: int | None) -> str:
        return BOOTSTRAP if broker_id is None else str(broker_id)

    def _fault(self, relay: Relay, fault: Desync) -> None:
        info = relay.info
        self._lines.say(
            logging.ERROR if fault.fatal else logging.WARNING,
            fault.kind,
            "fault=%s side=%s cluster=%s client=%s broker=%s offset=%d%s: %s",
            fault.kind,
            SIDES[fault.side],
            info.cluster,
            Address(info.client_address, info.client_port),
            self._label(info.broker_id),
            fault.offset,
            " closed" if fault.fatal else "",
            fault.text,
        )

    def _closed(self, relay: Relay) -> None:
        relays = self._worker.relays
        relays.discard(relay)
        if not relays:
            self._worker.idle.set()
        self._worker.gate.leave()


def listener_name(node_id: int | None) -> str:
    """The label of the listener for a broker's clients, or of the one where clients bootstrap."""
    return BOOTSTRAP if node_id is None else f"broker-{node_id}"


class _Rewriter:
    """The transform of one connection's session."""

    __slots__ = ("_tell", "counting")

    def __init__(self, tell: Callable[[int, str, int], tuple[Address, bool]]) -> None:
        self._tell = tell
        self.counting: Any = None

    def __call__(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        plan = exchange.plan
        if plan.api_key == API_VERSIONS:
            return cap_versions(plan.api_version, frame)
        told = unbound = 0

        def advertise(node_id: int, host: str, port: int) -> Address:
            nonlocal told, unbound
            address, is_bound = self._tell(node_id, host, port)
            told += 1
            unbound += not is_bound
            return address

        answer = rewrite_addresses(plan.api_key, plan.api_version, frame, advertise)
        if told:
            self.counting.rewritten(plan.api, told)
        if unbound:
            self.counting.unbound(unbound)
        return answer
