"""From an accepted client to a relay: dial its broker, join the two, note what became of them.

A client is read only once its broker is connected. A connection that proves to be kproxy's own is closed, and with it
all that lead the same way. Bounded by the gate's connections. Refuses to know how brokers are found and ports bound.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic_ns

from kproxy.errors import ConfigError, RefusedClient, UpstreamError, of_extras
from kproxy.metrics.upstream import UpstreamCells
from kproxy.protocol.apis import HEARTBEAT
from kproxy.protocol.schema import schema
from kproxy.proxy.admission.entrance import Entrance, Ticket, Welcome
from kproxy.proxy.admission.logins import Logins
from kproxy.proxy.cluster import transparent
from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.cluster.question import ask_topic_names, probe
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.cluster.transparent import Transparent
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.connection.draining import drain
from kproxy.proxy.connection.operating import END_LINE, end_fields
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters.policy.auditing import Peer
from kproxy.proxy.filters.policy.authorizer import PolicyAuthorizer
from kproxy.proxy.filters.policy.policy import Policy
from kproxy.proxy.filters.policy.topic_names import TopicNames
from kproxy.proxy.filters.relogin import wants as wants_login
from kproxy.proxy.filters.telemetry import ERRORS_OF, TELEMETRY_APIS, AnswerTelemetry, Receiver
from kproxy.proxy.filters.telemetry import wants as wants_telemetry
from kproxy.proxy.filters.transform import Advertise, FindLeak, Rewriter
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.relay.ends import Incoming, PortCheck
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.sockets.listeners import Accepted
from kproxy.proxy.tasks import Tasks
from kproxy.proxy.tls.tls_socket import TlsSocket
from kproxy.proxy.upstream.door import Door
from kproxy.proxy.upstream.loops import loop_through
from kproxy.wire.authorizer import Authorizer
from kproxy.wire.bodies import DETAILS, Logs
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import SIDES, Desync
from kproxy.wire.interest import Interest
from kproxy.wire.kept import Kept
from kproxy.wire.pairing import LIMIT
from kproxy.wire.session import Session

BOOTSTRAP = "bootstrap"
# A loop that neither addresses nor questions show makes connections without end. At so many to one upstream, and at
# each doubling, kproxy asks there: its question comes back if it is one.
PROBED_AT = 64
NAMING_PAUSE_S = 0.5  # between two questions for the names of topics that clients call by id

FIRST_REQUEST_S = 0.3  # for the first request of a client that came just before its port closed

log = logging.getLogger("kproxy.cluster")


def label(broker_id: int | None) -> str:
    """The label `broker` of metrics."""
    return BOOTSTRAP if broker_id is None else str(broker_id)


def listener_name(node_id: int | None, route: str = "ports") -> str:
    """The label `listener`: of the port for a broker's clients, or of the one where clients bootstrap."""
    if route == transparent.ROUTE:
        return route
    return BOOTSTRAP if node_id is None else f"broker-{node_id}"


Wants = Callable[[int, int], bool]  # (api key, version)


def _either(one: Wants, other: Wants | None) -> Wants:
    """What an Interest has authorized for two authorizers."""
    return one if other is None else lambda key, version: one(key, version) or other(key, version)


class Connector:
    """Connects the clients of one cluster.

    advertise: what rewrites a broker's address; find_leak: what looks at answers before they leave;
    broker_lost(): a broker could not be dialled, or reset a connection; welcome: the steps that a client's connection
    begins with, in order, each raising RefusedClient for one that is to be closed; redirected: with route transparent,
    what knows where clients were going; logins: of kproxy and of clients.
    """

    def __init__(
        self,
        worker: Worker,
        cluster: Cluster,
        metrics: UpstreamCells,
        addresses: BootstrapAddresses,
        advertise: Advertise,
        find_leak: FindLeak,
        broker_lost: Callable[[], None],
        door: Door,
        welcome: Iterable[Welcome] = (),
        redirected: Transparent | None = None,
        logins: Logins | None = None,
    ) -> None:
        self.routes: Routes  # set by the owner once the bootstrap port is bound
        self.beside: int | None = None  # route sidecar: the node id of the upstream, once known
        self.serve = self.connect  # what gets the clients that are accepted: another process, where there are several
        self._worker = worker
        self._cluster = cluster
        self._metrics = metrics
        self._addresses = addresses
        self._advertise = advertise
        self._find_leak = find_leak
        self._broker_lost = broker_lost
        self._door = door
        self._redirected = redirected
        self.looped: Address | None = None  # the upstream that led back to this kproxy last
        steps = (*((redirected.find_destination,) if redirected is not None else ()), *welcome)
        self.entrance = Entrance(cluster, steps, worker.metrics.cluster(cluster.name).limits, self._kept_out)
        self._logins = logins if logins is not None and logins.answers_clients else None
        policy = Policy(cluster, audits=worker.audit is not None)
        self._policy = None if policy.is_empty else policy
        self._names = TopicNames(self._name_topics)
        self._is_naming = False
        self._caps = policy.caps()
        if policy.is_active:
            worker.metrics.cluster(cluster.name).has_policy(policy.reasons)
        self._tasks = Tasks(f"cluster={cluster.name}")
        self._telemetry = self._receiver = self._telemetry_receiver()
        self._kept: Kept | None = None
        if cluster.detail != "headers":
            from kproxy.insight.knowledge import APIS, ONLY_FAILED  # 1 MB, of no use for headers

            unheard = worker.metrics.cluster(cluster.name).follow()
            self._kept = Kept(APIS, only_failed=ONLY_FAILED, small=(HEARTBEAT,), left_out=unheard)
        interest = partial(
            Interest,
            rewrite=redirected is None,
            brokers=redirected is not None,
            details=bool(worker.sinks),  # metrics alone need no groups, and of bodies only what carries records
            detail=DETAILS[cluster.detail],
            held=worker.held,
            names=self._policy is not None and self._policy.needs_names,
            kept=self._kept,
            logs=None if self._kept is None else Logs(),
        )
        authorizes: Wants | None = None if self._policy is None else self._policy.authorizes
        if self._telemetry is not None:
            authorizes = _either(wants_telemetry, authorizes)
        if self._logins is not None:
            authorizes = _either(wants_login, authorizes)
        self._interest = interest(authorizes=authorizes)
        self._interest_expired = interest(authorizes=lambda api_key, version: True)
        self._to: dict[Address, int] = {}  # upstream -> open connections
        self._limiter = LogLimiter(log)
        self._logs_ends = worker.config.log_connections
        self._source = f"live:{cluster.name}"
        self.making = 0  # connections
        self.ends = False  # what is being made ends soon: kproxy drains, or the cluster is run by other settings

    def follow(self, former: "Connector") -> None:
        """Take over from a connector that was run by other settings: clients that push theirs to it get ours."""
        if former._receiver is None:
            return
        former._receiver.change(self._cluster.telemetry, self._tasks.spawn)
        self._receiver = former._receiver
        if self._telemetry is not None:
            self._telemetry = self._receiver

    async def stop(self) -> None:
        """Give up the connections that are still being made."""
        await self._tasks.cancel()

    def accepted(self, node_id: int | None) -> Accepted:
        """What takes the connections of a broker's port; None: of the bootstrap port."""

        def accepted(client: socket.socket, peer: Address) -> None:
            try:
                upstream = self._worker.loops.is_own(peer, partial(self.destination_of, client))
            except OSError:  # it has gone already
                client.close()
                return
            if upstream is not None:
                client.close()
                self.loop_found(upstream, "a connection that kproxy itself made")
                return
            incoming = Incoming(client, peer, node_id, self._worker.now_ns())
            if not self.entrance.admit(incoming):
                client.close()
                return
            self._worker.gate.enter()
            self.serve(incoming)

        return accepted

    def connect(self, client: Incoming) -> None:
        """Begin to serve a client that the gate has counted."""
        self._tasks.spawn(self._connect(client))

    def destination_of(self, client: socket.socket) -> Address:
        """Where an accepted client was going: to our own port, or where the kernel redirected it from. OSError."""
        if self._redirected is not None:
            return self._redirected.destination_of(client)
        return Address(*client.getsockname()[:2])

    async def _connect(self, client: Incoming) -> None:
        """Welcome a client, dial its broker and start their relay; a client that gets no relay is closed."""
        worker = self._worker
        broker = None
        relayed = False
        self.making += 1
        try:
            if self.entrance.steps:
                await self.entrance.welcome(client)
            broker, upstream = await self._open(client)
            info = self._info(client, upstream)
            if log.isEnabledFor(logging.DEBUG):
                source = Address(*broker.getsockname()[:2])
                whom = label(info.broker_id)
                log.debug("connected client=%s broker=%s to %s from %s", client.peer, whom, upstream, source)
            self._relay(client, broker, info, listener_name(client.node_id, self._cluster.route))
            relayed = True
        except RefusedClient as fault:
            listener = listener_name(client.node_id, self._cluster.route)
            self._refused(self._info(client, Address("", 0)), listener, fault)
        except UpstreamError as fault:
            self._unreachable(
                self._info(client, Address("", 0)), listener_name(client.node_id, self._cluster.route), fault
            )
        except PortCheck:
            pass
        except OSError:  # it has gone already
            info = self._info(client, Address("", 0))
            listener = listener_name(client.node_id, self._cluster.route)
            worker.metrics.connection(info, listener, label(info.broker_id)).closed("client_reset")
        finally:
            self.making -= 1
            if not relayed:
                client.sock.close()
                if broker is not None:
                    self._door.close(broker)
                self.entrance.left(client.ticket)
                worker.left(client.number)

    def _kept_out(self, client: Incoming, fault: RefusedClient) -> None:
        self._refused(self._info(client, Address("", 0)), listener_name(client.node_id), fault)

    def _refused(self, info: ConnectionInfo, listener: str, fault: RefusedClient) -> None:
        self._worker.metrics.connection(info, listener, label(info.broker_id)).closed(fault.cause)
        self._limiter.log(
            logging.DEBUG if fault.said_nothing else logging.WARNING,
            ("refused", fault.kind, fault.said_nothing),
            "refused=%s cluster=%s client=%s: %s",
            fault.cause,
            info.cluster,
            Address(info.client_address, info.client_port),
            fault,
        )

    def _unreachable(self, info: ConnectionInfo, listener: str, fault: UpstreamError) -> None:
        broker = label(info.broker_id)
        name = self._cluster.name
        self._worker.metrics.connection(info, listener, broker).closed("unreachable")
        if fault.cause == "loop":
            self._metrics.loop_refused()
        elif fault.cause != "no_descriptor":
            self._broker_lost()
        self._limiter.log(logging.WARNING, broker, "unreachable cluster=%s broker=%s: %s", name, broker, fault)

    def _relay(self, client: Incoming, broker: socket.socket, info: ConnectionInfo, listener: str) -> None:
        worker = self._worker
        of_policy = self._authorizer(client)
        authorizer: Authorizer | None = of_policy
        telemetry: AnswerTelemetry | None = None
        if self._telemetry is not None:
            software = client.session.software if client.session is not None else None
            authorizer = telemetry = AnswerTelemetry(
                self._telemetry, str(client.peer), client.principal, software, of_policy
            )
            telemetry.broker_answers = client.broker_takes_telemetry
        rewriter = None
        if self._redirected is None:
            rewriter = Rewriter(self._advertise, self._find_leak, self._caps, telemetry)
        if self._logins is not None:
            authorizer = self._logins.authorizer(client, authorizer)
        session = Session(
            self._interest,
            transform=rewriter,
            max_request_bytes=self._cluster.max_request_bytes,
            max_in_flight=min(LIMIT, self._cluster.limits.max_requests_in_flight or LIMIT),
            authorizer=authorizer,
        )
        if worker.flight is not None:
            worker.flight.watch(session, info)
        counting = worker.metrics.connection(
            info,
            listener,
            label(info.broker_id),
            session.pending,
            topics=bool(self._interest.detail),
        )
        if rewriter is not None:
            rewriter.counting = counting
        if self._kept is not None:
            counting.tell(worker.feed.connected(info, client.principal, self._kept.left_out))
        relay = Relay(
            asyncio.get_running_loop(),
            worker.poller,
            worker.pressure,
            worker.clock_offset_ns,
            client.sock,
            broker,
            session,
            info,
            counting,
            [
                counting.events,
                *(sink.connected(info) for sink in worker.sinks),
                *((self._redirected.look_for_brokers,) if self._redirected is not None else ()),
                *((of_policy.events,) if of_policy is not None else ()),
            ],
            self._fault,
            partial(self._closed, worker.loops.own_end(broker), client.ticket),
            worker.lanes,
        )
        relay.principal = sys.intern(client.principal)
        relay.listener = listener
        relay.tls_version = client.sock.version() if isinstance(client.sock, TlsSocket) else None
        worker.add(relay, client.number)
        self._count(Address(info.broker_address, info.broker_port), 1)
        relay.start(self.admits)
        if worker.traces:
            worker.traces.connected(relay)
        if self._cluster.limits.ends_some:
            worker.ageing.watch(relay, self._cluster.limits, self.entrance.reached)
        if self._logins is not None:
            self._logins.named(session, client, worker.now_ns())
            self._logins.begin(relay, client, authorizer, self._interest_expired)
        if self.ends:
            self._tasks.spawn(self._end(relay))

    async def _end(self, relay: Relay) -> None:
        """Bring a connection to its end that was being made when its settings ceased to hold."""
        await asyncio.sleep(FIRST_REQUEST_S)
        await drain([relay], self._worker.config.drain_timeout_s, asyncio.Event(), f"cluster {self._cluster.name}")

    def _authorizer(self, client: Incoming) -> PolicyAuthorizer | None:
        """What decides a client's requests; None: the listener has no policy."""
        if self._policy is None:
            return None
        worker, name = self._worker, self._cluster.name
        peer = Peer(name, str(client.peer), client.peer.host, client.principal)
        refused = worker.metrics.cluster(name).refused
        return PolicyAuthorizer(self._policy, peer, self._interest, self._names, refused, worker.audit)

    def _telemetry_receiver(self) -> Receiver | None:
        """What takes the metrics that clients push; None: they go to brokers, if to anybody."""
        settings, name = self._cluster.telemetry, self._cluster.name
        if settings is None:
            return None
        with of_extras(lambda missing: ConfigError([(f"{name}: telemetry", f"it {missing}")])):
            import opentelemetry.proto.metrics.v1.metrics_pb2  # noqa: F401 - so that one that is missing is told at the start
        if settings.answer == "always":  # brokers may offer versions that only they know
            versions = schema().apis
            self._caps = {**self._caps, **{key: versions[key].request.versions[-1] for key in TELEMETRY_APIS}}
        worker = self._worker
        cells, pushes = worker.metrics.cluster(name).takes_pushes(ERRORS_OF)
        return Receiver(name, settings, cells, pushes, self._tasks.spawn, worker.now_ns)

    def _closed(self, own: Address, ticket: Ticket, relay: Relay, cause: str) -> None:
        """A relay ended, whose connection to its broker had the own end `own`."""
        worker = self._worker
        worker.loops.closed(own)
        self._count(Address(relay.info.broker_address, relay.info.broker_port), -1)
        worker.remove(relay)
        if self._logs_ends or log.isEnabledFor(logging.DEBUG):
            level = logging.INFO if self._logs_ends else logging.DEBUG
            log.log(level, END_LINE, cause, *end_fields(relay, worker.now_ns()))
        self.entrance.left(ticket)
        if self._logins is not None:
            self._logins.ended(relay)
        if cause == "broker_reset":
            self._broker_lost()

    def _count(self, upstream: Address, change: int) -> None:
        count = self._to.get(upstream, 0) + change
        if count:
            self._to[upstream] = count
        else:
            self._to.pop(upstream, None)
        if change > 0 and count >= PROBED_AT and count & (count - 1) == 0:
            self._tasks.spawn(self._probe(upstream))

    def _name_topics(self) -> None:
        """A client named a topic by an id that the policy does not know: ask, unless that is being done."""
        if not self._is_naming:
            self._is_naming = True
            self._tasks.spawn(self._ask_topic_names())

    async def _ask_topic_names(self) -> None:
        try:
            unknown = self._names.unknown()
            for address in self._addresses.in_order():
                try:
                    self._names.learn(await ask_topic_names(address, self._door, unknown))
                    break
                except UpstreamError as fault:
                    log.debug("cluster=%s: topics have no names yet: %s", self._cluster.name, fault)
            await asyncio.sleep(NAMING_PAUSE_S)
        finally:
            self._is_naming = False

    async def _probe(self, upstream: Address) -> None:
        try:
            await probe(upstream, self._door)
        except UpstreamError as fault:
            log.debug(
                "cluster=%s: %s has many connections, and a question to it failed: %s",
                self._cluster.name,
                upstream,
                fault,
            )

    # --- loops -------------------------------------------------------------------------------------------------------

    def admits(self, first_bytes: bytes) -> bool:
        """Whether a client is somebody else: by the first bytes that it sent."""
        upstream = self._worker.loops.came_back(first_bytes)
        if upstream is None:
            return True
        # Not now: it closes connections, the one that is being read among them.
        asyncio.get_running_loop().call_soon(self.loop_found, upstream, "kproxy's own question")
        return False

    def loop_found(self, upstream: Address, evidence: str) -> None:
        """Refuse that upstream from now on, and close all connections that go there."""
        self.looped = upstream
        worker = self._worker
        worker.loops.refuse(upstream)
        self._metrics.loop_refused()
        relays = [
            relay
            for relay in worker.relays.values()
            if (relay.info.broker_address, relay.info.broker_port) == tuple(upstream)
        ]
        self._limiter.log(
            logging.ERROR,
            ("loop", upstream),
            "loop cluster=%s: %s to %s arrived at this kproxy's own port; %d connections to it are closed. %s",
            self._cluster.name,
            evidence,
            upstream,
            len(relays),
            loop_through(upstream) if self._redirected is None else transparent.MEND,
        )
        for relay in relays:
            relay.close("loop", reset=True)

    # --- dialling ----------------------------------------------------------------------------------------------------

    def upstreams(self, client: Incoming) -> list[Address]:
        """The addresses of a client's broker, as far as one is known: that of the first which answers."""
        if client.destination is not None:
            return [client.destination]
        if client.node_id is None:
            return list(self._addresses.in_order())
        address = self.routes.upstreams.get(client.node_id)
        return [address] if address is not None else []

    async def _open(self, client: Incoming) -> tuple[socket.socket, Address]:
        """The connection to a client's broker, and the numeric address that it leads to."""
        node_id = client.node_id
        broker = label(self._broker_of(client))
        if client.destination is not None:
            return await self._open_one(client.destination, client, broker)
        if node_id is not None:
            address = self.routes.upstreams.get(node_id)
            if address is None:
                fault = UpstreamError("no answer has named its address yet", "no_address")
                self._metrics.dial_failed(broker, fault.cause)
                raise fault
            return await self._open_one(address, client, broker)
        fault = UpstreamError("no bootstrap address")
        for address in self._addresses.in_order():
            try:
                return await self._open_one(address, client, broker)
            except UpstreamError as refused:
                self._addresses.failed(address)
                fault = refused
        raise fault

    async def _open_one(self, address: Address, client: Incoming, broker: str) -> tuple[socket.socket, Address]:
        start = monotonic_ns()
        try:
            opened = await self._door.open(address, client=client)
        except UpstreamError as fault:
            self._metrics.dial_failed(broker, fault.cause)
            if isinstance(fault.__cause__, OSError):
                self._worker.gate.check(fault.__cause__)
            raise
        self._metrics.dialled(broker, monotonic_ns() - start)
        return opened

    # --- what is said of a connection --------------------------------------------------------------------------------

    def _broker_of(self, client: Incoming) -> int | None:
        """The node id of the broker that a client comes for, if it is known."""
        if self._redirected is not None:
            return self._redirected.broker_of(client)
        return self.beside if client.node_id is None else client.node_id

    def _info(self, client: Incoming, upstream: Address) -> ConnectionInfo:
        # Many connections have few hosts: interned, these share one text as long as one of them is open.
        return ConnectionInfo(
            self._cluster.name,
            self._source,
            sys.intern(client.peer.host),
            client.peer.port,
            sys.intern(upstream.host),
            upstream.port,
            self._broker_of(client),
            client.opened_ns,
            isinstance(client.sock, TlsSocket),
        )

    def _fault(self, relay: Relay, fault: Desync) -> None:
        info = relay.info
        self._limiter.log(
            logging.ERROR if fault.fatal else logging.WARNING,
            fault.kind,
            "fault=%s side=%s cluster=%s client=%s broker=%s offset=%d%s: %s",
            fault.kind,
            SIDES[fault.side],
            info.cluster,
            Address(info.client_address, info.client_port),
            label(info.broker_id),
            fault.offset,
            " closed" if fault.fatal else "",
            fault.text,
        )
