"""The connections of one cluster, from an accepted client to the end of its relay.

The order is: accept, admit (`admission/admission.py`), dial (`dialling.py`), build (`building.py`), relay. Except for
its admission, a client is not read until its broker is connected. Bounded by the gate's connections. Refuses to know
how brokers are found and ports bound.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from functools import partial

from kproxy.errors import RefusedClient, UpstreamError
from kproxy.metrics.counters.upstream import UpstreamCells
from kproxy.proxy.admission.admission import Admission, Ticket, Welcome
from kproxy.proxy.admission.failed_handshakes import FailedHandshakes, is_failed_handshake
from kproxy.proxy.admission.failed_logins import CERTIFICATE, FailedLogins, is_failed_login
from kproxy.proxy.admission.logins import Logins
from kproxy.proxy.cluster.questions.topic_naming import TopicNaming
from kproxy.proxy.cluster.topology import Topology
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.connection.building import Reports, build
from kproxy.proxy.connection.dialling import Dialling
from kproxy.proxy.connection.draining import drain
from kproxy.proxy.connection.filtering import ClusterFilters
from kproxy.proxy.connection.labels import broker_label, listener_label
from kproxy.proxy.connection.loops import Loops
from kproxy.proxy.connection.operating import END_LINE, end_fields
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters.addresses import Advertise, FindLeak
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.relay.ends import Admitted, Dialled, Incoming, PortCheck, admitted
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.sockets.listeners import Accepted
from kproxy.proxy.tasks import Tasks
from kproxy.proxy.tls.tls_socket import TlsSocket
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import SIDES, Desync

FIRST_REQUEST_S = 0.3  # time for the first request of a client that connected just before its port closed
NOWHERE = Address("", 0)  # the upstream of a client without a broker connection

log = logging.getLogger("kproxy.cluster")


class Connections:
    """Serves the clients of one cluster.

    topology: the brokers. advertise: rewrites a broker's address; find_leak: checks answers before they leave;
    broker_lost(): called when a broker could not be dialled or reset a connection; connector: connects to brokers;
    welcome: the steps of a client's admission, in order; each raises RefusedClient for a client that must be closed;
    logins: of kproxy and of clients.
    """

    def __init__(
        self,
        worker: Worker,
        cluster: Cluster,
        metrics: UpstreamCells,
        topology: Topology,
        advertise: Advertise,
        find_leak: FindLeak,
        broker_lost: Callable[[], None],
        connector: BrokerConnector,
        welcome: Iterable[Welcome] = (),
        logins: Logins | None = None,
    ) -> None:
        # Called with each accepted client; passes the client to another process if there are several.
        self.serve: Callable[[Incoming], None] = self.connect
        self.making = 0  # connections being set up
        self.ends = False  # drain new connections soon: kproxy drains, or the cluster has newer settings
        self._worker = worker
        self._cluster = cluster
        self._metrics = metrics
        self._topology = topology
        self._broker_lost = broker_lost
        redirected = topology.redirected
        self._sinks = () if redirected is None else (redirected.look_for_brokers,)
        self._tasks = Tasks(f"cluster={cluster.name}")
        steps = (*((redirected.find_destination,) if redirected is not None else ()), *welcome)
        self.admission = Admission(cluster, steps, worker.metrics.cluster(cluster.name).limits, self._kept_out)
        self.loops = Loops(cluster.name, worker, metrics, connector, self._tasks, redirected=redirected is not None)
        self.naming = TopicNaming(cluster.name, topology.addresses, connector, self._tasks)
        self._dialling = Dialling(topology, connector, metrics, worker.gate)
        self._logins = logins if logins is not None and logins.answers_clients else None
        self.filters = ClusterFilters(
            worker,
            cluster,
            self.naming.names,
            self._logins,
            advertise,
            find_leak,
            self._tasks,
            rewrites=redirected is None,
        )
        self._limiter = LogLimiter(log)
        self._failed_logins = (
            FailedLogins(cluster.name, worker.audit, worker.now_ns) if worker.audit is not None else None
        )
        self._failed_handshakes = FailedHandshakes(cluster.name)
        if self._logins is not None:
            self._logins.failed = self._failed_logins
        self._logs_ends = worker.config.log_connections
        self._source = f"live:{cluster.name}"

    def follow(self, former: "Connections") -> None:
        """Take over the state of connections that ran with former settings."""
        self.filters.follow(former.filters)

    async def stop(self) -> None:
        """Cancel the connections that are being set up."""
        await self._tasks.cancel()
        self._failed_handshakes.stop()

    def accepted(self, node_id: int | None) -> Accepted:
        """Return the function that takes connections accepted at a broker's port; None: at the bootstrap port."""

        def accepted(client: socket.socket, peer: Address) -> None:
            try:
                upstream = self._worker.loops.is_own(peer, partial(self._topology.destination_of, client))
            except OSError:  # it has disconnected
                client.close()
                return
            if upstream is not None:
                client.close()
                self.loops.found(upstream, "a connection that kproxy itself made")
                return
            incoming = Incoming(client, peer, node_id, self._worker.now_ns())
            if not self.admission.admit(incoming):
                client.close()
                return
            self._worker.gate.enter()
            self.serve(incoming)

        return accepted

    def connect(self, client: Incoming) -> None:
        """Start serving a client that the gate has counted."""
        self._tasks.spawn(self._connect(client))

    async def _connect(self, client: Incoming) -> None:
        """Admit a client, dial its broker and start their relay; a client that gets no relay is closed."""
        dialled = None
        relayed = False
        self.making += 1
        try:
            if self.admission.steps:
                await self.admission.welcome(client)
                self._failed_handshakes.admitted += 1
            admitted_client = admitted(client)
            dialled = await self._dialling.open(admitted_client)
            self._relay(admitted_client, dialled)
            relayed = True
        except RefusedClient as fault:
            self._refused(client, self._listener(client), fault)
        except UpstreamError as fault:
            self._unreachable(client, fault)
        except PortCheck:
            pass
        except OSError:  # it has disconnected
            self._never_relayed("client_reset", client, self._listener(client))
        finally:
            self.making -= 1
            if not relayed:
                client.sock.close()
                if dialled is not None:
                    self._dialling.close(dialled)
                self.admission.left(client.ticket)
                self._worker.left(client.number)

    def _relay(self, client: Admitted, dialled: Dialled) -> None:
        """Build a client's relay and start it."""
        worker = self._worker
        info = self._info(client, dialled.upstream)
        if log.isEnabledFor(logging.DEBUG):
            source = Address(*dialled.sock.getsockname()[:2])
            broker = broker_label(info.broker_id)
            log.debug("connected client=%s broker=%s to %s from %s", client.peer, broker, dialled.upstream, source)
        relay, login = build(
            worker,
            self.filters,
            client,
            dialled,
            info,
            Reports(self._fault, partial(self._closed, worker.loops.own_end(dialled.sock), client.ticket), self._sinks),
        )
        worker.add(relay, client.number)
        self.loops.opened(relay)
        relay.start(self.loops.admits)
        if worker.traces:
            worker.traces.connected(relay)
        if self._cluster.limits.ends_some:
            worker.ageing.watch(relay, self._cluster.limits, self.admission.reached)
        if self._logins is not None:
            self._logins.named(relay.session, client, worker.now_ns())
            self._logins.begin(relay, client, dialled.login, login, self.filters.expired_interest)
        if self.ends:
            self._tasks.spawn(self._end(relay))

    async def _end(self, relay: Relay) -> None:
        """Drain a connection that was being set up when its settings were replaced."""
        await asyncio.sleep(FIRST_REQUEST_S)
        timeout_s, name = self._worker.config.drain_timeout_s, self._cluster.name
        await drain([relay], timeout_s, asyncio.Event(), f"cluster {name}", serves=False)

    def _closed(self, own: Address, ticket: Ticket, relay: Relay, cause: str) -> None:
        """Clean up after a relay; `own` is the local address of its broker connection."""
        worker = self._worker
        worker.loops.closed(own)
        self.loops.closed(relay)
        worker.remove(relay)
        if self._logs_ends or log.isEnabledFor(logging.DEBUG):
            level = logging.INFO if self._logs_ends else logging.DEBUG
            log.log(level, END_LINE, cause, *end_fields(relay, worker.now_ns()))
        self.admission.left(ticket)
        if self._logins is not None:
            self._logins.ended(relay)
        if cause == "broker_reset":
            self._broker_lost()

    # --- reports on clients and connections --------------------------------------------------------------------------

    def _info(self, client: Incoming | Admitted, upstream: Address) -> ConnectionInfo:
        # Many connections share few hosts: interning keeps one text per host.
        return ConnectionInfo(
            self._cluster.name,
            self._source,
            sys.intern(client.peer.host),
            client.peer.port,
            sys.intern(upstream.host),
            upstream.port,
            self._topology.broker_of(client),
            client.opened_ns,
            isinstance(client.sock, TlsSocket),
        )

    def _listener(self, client: Incoming | Admitted) -> str:
        return listener_label(client.node_id, self._cluster.route)

    def _never_relayed(self, cause: str, client: Incoming, listener: str, *, spoke: bool = True) -> str:
        """Count a client that gets no relay; returns its label `broker`."""
        info = self._info(client, NOWHERE)
        broker = broker_label(info.broker_id)
        self._worker.metrics.connection(info, listener, broker).closed(cause, spoke=spoke)
        return broker

    def _kept_out(self, client: Incoming, fault: RefusedClient) -> None:
        self._refused(client, self._listener(client), fault)

    def _refused(self, client: Incoming, listener: str, fault: RefusedClient) -> None:
        self._never_relayed(fault.cause, client, listener, spoke=not fault.said_nothing)
        if self._failed_logins is not None and is_failed_login(fault):
            mechanism = CERTIFICATE if fault.cause == "tls" else fault.mechanism
            self._failed_logins.add(client.peer, mechanism, fault.claimed, fault.kind, str(fault), renewal=False)
        if is_failed_handshake(fault):
            self._failed_handshakes.add(client.peer, fault)
            return
        self._limiter.log(
            logging.DEBUG if fault.said_nothing else logging.WARNING,
            ("refused", fault.kind, fault.said_nothing),
            "refused=%s cluster=%s client=%s: %s",
            fault.cause,
            self._cluster.name,
            client.peer,
            fault,
        )

    def _unreachable(self, client: Incoming, fault: UpstreamError) -> None:
        broker = self._never_relayed("unreachable", client, self._listener(client))
        name = self._cluster.name
        if fault.cause == "loop":
            self._metrics.loop_refused()
        elif fault.cause != "no_descriptor":
            self._broker_lost()
        self._limiter.log(logging.WARNING, broker, "unreachable cluster=%s broker=%s: %s", name, broker, fault)

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
            broker_label(info.broker_id),
            fault.offset,
            " closed" if fault.fatal else "",
            fault.text,
        )
