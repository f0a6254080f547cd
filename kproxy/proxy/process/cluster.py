"""One configured cluster, live: its ports, its brokers, and the connections through them.

kproxy binds a broker's port before it forwards an answer that names the broker: after `discovery` has found it or, if
it appears later, inside the transform of that answer. If a port cannot be bound, clients still get that port and never
the broker's own address; kproxy logs and counts the fault, and retries. If another process has the ports and asks the
cluster (`Ports`), this one serves the clients passed to it. Refuses to know bytes, and the meaning of metrics.
"""

import logging
import socket
from collections.abc import Callable, Collection, Iterator, Mapping

from kproxy.errors import DIAL_CAUSES, LOGIN_CAUSES, ConfigError, UpstreamError
from kproxy.metrics.counters.upstream import ClusterState
from kproxy.metrics.scrape.folding import fold_broker
from kproxy.proxy.admission.admission import Admission, Welcome
from kproxy.proxy.admission.authentication import Authentication, BrokerVersions
from kproxy.proxy.admission.logins import Logins
from kproxy.proxy.admission.proxy_protocol import ReadProxyHeader
from kproxy.proxy.admission.tls import ClusterTls
from kproxy.proxy.cluster import transparent
from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.cluster.broker_ports import BrokerPorts
from kproxy.proxy.cluster.discovery import Brokers, Discovery
from kproxy.proxy.cluster.port_assignment import Held
from kproxy.proxy.cluster.questions.lag_questions import LagQuestions
from kproxy.proxy.cluster.questions.question import ask_brokers
from kproxy.proxy.cluster.routing import Routes, ServerNames
from kproxy.proxy.cluster.sidecar import find_broker_here
from kproxy.proxy.cluster.topology import Topology
from kproxy.proxy.cluster.transparent import Transparent
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.connection.connecting import Connections
from kproxy.proxy.connection.labels import BOOTSTRAP, broker_label, listener_label
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters.leaks import KnownAddresses, Leaks
from kproxy.proxy.filters.policy.idle import idle_rules
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.process.changing.changes import same_upstream
from kproxy.proxy.process.shared import Known, Ports
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sockets.listeners import Accepted, Listener, resolve, why_unbound
from kproxy.proxy.tasks import Tasks
from kproxy.proxy.upstream.connector import BrokerConnector, Step
from kproxy.proxy.upstream.proxy_protocol import UNREAD, SendProxyHeader
from kproxy.proxy.upstream.request import ClosedByBroker

log = logging.getLogger("kproxy.cluster")

_EXPECTS_MORE = (
    "is that a broker's port, and does it expect TLS ([cluster.upstream_tls]) or a PROXY header (proxy_protocol)?"
)


def _welcome_steps(cluster: Cluster, tls: ClusterTls, find_broker: Welcome, authenticate: Welcome) -> Iterator[Welcome]:
    """Yield the steps at the start of a client's connection, in wire order."""
    if cluster.accept_proxy_protocol:
        yield ReadProxyHeader(cluster.trusted_proxies)
    if tls.welcome is not None:
        yield tls.welcome
    if cluster.route == "sni":
        yield find_broker
    if cluster.authentication is not None:
        yield authenticate


def _connector_steps(cluster: Cluster, tls: ClusterTls, login: Step | None) -> Iterator[Step]:
    """Yield the steps at the start of a connection to a broker, in wire order."""
    if cluster.proxy_protocol is not None:
        yield SendProxyHeader(cluster.proxy_protocol)
    if tls.broker_step is not None:
        yield tls.broker_step
    if login is not None:
        yield login


class ClusterProxy:
    """One cluster of a kproxy: `start` binds the configured ports, `stop` closes every port for good."""

    def __init__(
        self,
        worker: Worker,
        cluster: Cluster,
        *,
        ports: Ports | None = None,
        serve: Callable[[Incoming], None] | None = None,
        changed: Callable[[], None] = lambda: None,
        busy: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """ports: set if another process holds them and sends the cluster's state (`take`).

        serve(client): passes an accepted client to another process; changed(): called when the state shared with other
        processes (`known`) may have changed; busy(): brokers with connections in other processes. Raises ConfigError.
        """
        if faults := [(f"{cluster.name}: {place}", text) for place, text in idle_rules(cluster)]:
            raise ConfigError(faults)
        self.cluster = cluster
        self.routes: Routes
        self.ports = ports
        self._worker = worker
        self._changed = changed
        self._busy = busy if busy is not None else self._brokers_with_relays
        self._named: dict[int, Address] = {}  # brokers that the cluster named when last asked
        causes = DIAL_CAUSES if cluster.login is None else (*DIAL_CAUSES, *LOGIN_CAUSES)
        self._metrics = worker.metrics.upstream(cluster.name, causes, self._state)
        self._cells = worker.metrics.cluster(cluster.name)
        self._cells.partition_series = cluster.lag.partition_series
        self._logins = Logins(cluster, worker.loops, self._cells)
        names = ServerNames(cluster.sni, cluster.sni_bootstrap) if cluster.sni is not None else None
        self._tls = ClusterTls(cluster, self._cells, worker.handshakes, names)
        self._connector = BrokerConnector(worker.dialler, _connector_steps(cluster, self._tls, self._logins.of_broker))
        self._redirected: Transparent | None = None
        if cluster.route == transparent.ROUTE:
            self._redirected = Transparent(
                worker.gate,
                worker.dialler.resolver,
                lambda node_id: self._expose(str(node_id), node_id),
                cluster.destinations,
            )
        addresses = BootstrapAddresses(cluster.bootstrap)
        self._discovery = Discovery(
            cluster.name, addresses, self._ask, self._learn, worker.config.discovery_interval_s, self._open_ports
        )
        self._topology = Topology(addresses, self._redirected)
        self._known = KnownAddresses(cluster.bootstrap, lambda node_id, host: self.routes.advertised(node_id, host))
        self._leaks = Leaks(cluster, self._known, self._cells)
        self._connections = Connections(
            worker,
            cluster,
            self._metrics,
            self._topology,
            self._advertise,
            self._leaks.found,
            self._broker_lost,
            # Redirected clients do their own TLS and login: kproxy's are for its own requests only.
            self._connector if self._redirected is None else BrokerConnector(worker.dialler),
            _welcome_steps(cluster, self._tls, self._find_broker, self._authenticate),
            logins=self._logins if self._redirected is None else None,
        )
        if serve is not None:
            self._connections.serve = serve
        self._authentication: Authentication | None = None
        if self._logins.of_clients is not None:
            bare = BrokerConnector(worker.dialler, _connector_steps(cluster, self._tls, None))
            self._authentication = Authentication(
                self._logins.of_clients,
                BrokerVersions(bare),
                self._topology.upstreams,
                self._connections.loops.admits,
                self._connections.filters.before_login,
                takes_telemetry=cluster.telemetry is not None,
            )
        self._bootstrap: Listener | None = None
        self._ports: BrokerPorts | None = None
        self._gives_ports = cluster.any_brokers is not None
        self._stopped = False
        self._successor: ClusterProxy | None = None  # runs with newer settings; receives what open connections learn
        self._same_upstream = True  # as the successor; if not, broker addresses learned here do not apply there
        self._tasks = Tasks(f"cluster={cluster.name}")
        self._limiter = LogLimiter(log)

    @property
    def address(self) -> Address:
        """The bootstrap address, with the bound port."""
        assert self._bootstrap is not None
        return Address(self.cluster.listen.host, self._bootstrap.port)

    @property
    def connector(self) -> BrokerConnector:
        """The connector to its brokers, with every step at the start of a connection."""
        return self._connector

    @property
    def brokers(self) -> dict[int, Listener]:
        """The open ports of brokers, by node id."""
        return self._ports.open if self._ports is not None else {}

    def broker_ports(self) -> dict[int, int | None]:
        """Return the open ports of brokers by node id; None: clients cannot reach that broker."""
        if self._ports is None:
            return {}
        open_ports = {node_id: listener.port for node_id, listener in self._ports.open.items()}
        return dict.fromkeys(self._ports.lacking(), None) | open_ports

    @property
    def listeners(self) -> list[Listener]:
        """All its open ports."""
        return [*([self._bootstrap] if self._bootstrap is not None else []), *self.brokers.values()]

    @property
    def admission(self) -> Admission:
        """The admission that counts its clients."""
        return self._connections.admission

    def destination_of(self, client: socket.socket) -> Address:
        """Return the address that an accepted client believes it reached. Raises OSError if it has disconnected."""
        return self._topology.destination_of(client)

    def connect(self, client: Incoming) -> None:
        """Serve an accepted client that the gate has counted."""
        self._connections.connect(client)

    def not_ready(self) -> Iterator[str]:
        """Yield the reasons not to send clients of this cluster here."""
        name = self.cluster.name
        if self._discovery.not_ready:
            yield f"cluster {name}: {self._discovery.not_ready}"
        looped = self._connections.loops.looped
        if looped is not None and self._worker.loops.is_refused(looped):
            yield f"cluster {name}: connections to {looped} lead back to this kproxy"
        if self._ports is not None:
            for reason in self._ports.not_ready():
                yield f"cluster {name}: {reason}"

    # --- start and stop ----------------------------------------------------------------------------------------------

    def start(self, former: "ClusterProxy | None" = None) -> None:
        """Bind the configured ports; the others follow as soon as the cluster answers. Raises ConfigError.

        former: the cluster that this one replaces at a reload; its ports stay open.
        """
        if self.ports is not None:
            return  # `take` brings the state
        worker = self._worker
        cluster = self.cluster
        listen = cluster.listen
        backlog = worker.config.accept_backlog
        hosts: list[str] = []
        try:
            hosts = resolve(listen.host)
            self._bootstrap = Listener(worker.gate, hosts, listen.port, backlog, self._accepted(None), cluster.name)
        except OSError as fault:
            text = f"{listen} cannot be bound: {why_unbound(fault, worker.gate, hosts, listen.port)}"
            raise ConfigError([(f"{cluster.name}: listen", text)]) from None
        self._expose(BOOTSTRAP, None)
        self.routes = self._topology.routes = Routes(cluster, self._bootstrap.port)
        self._ports = BrokerPorts(
            worker.gate, cluster, self.routes, hosts, backlog, self._accepted, self._busy, self._evicted
        )
        goes_on = former is not None and former.address == self.address
        before = former._ports.assignment if former is not None and former._ports is not None else None
        if former is not None and not same_upstream(former.cluster, cluster):
            self._ports.restore({})
        elif before is not None:
            self._ports.restore(before.held(), may_give=before.may_give)
        else:
            self._ports.restore(None)
        if former is not None:
            self._ports.former = {node_id: listener.port for node_id, listener in former.brokers.items()}
        log.log(
            logging.DEBUG if goes_on else logging.INFO,
            "listening cluster=%s route=%s listen=%s bootstrap=%s advertise=%s",
            cluster.name,
            cluster.route,
            self.address,
            ",".join(map(str, cluster.bootstrap)),
            cluster.advertised if self._redirected is None else "-",
        )
        for node_id in self.routes.declared():
            self._bind(node_id)
        if self._redirected is not None and not self._bootstrap.take_any_destination():
            log.info("cluster=%s: nftables REDIRECT works, TPROXY does not: CAP_NET_ADMIN is missing", cluster.name)
        self._tasks.spawn(self._discovery.run())
        if cluster.lag.ask_interval_s and cluster.detail != "headers":
            self._tasks.spawn(self._lag_questions().run())
        self._serve()
        self._changed()

    def _lag_questions(self) -> LagQuestions:
        cluster, worker = self.cluster, self._worker
        return LagQuestions(
            self._cells,
            self._connector,
            BootstrapAddresses(cluster.bootstrap),
            lambda node_id: self.routes.upstreams.get(node_id),
            worker.lags,
            cluster.lag.ask_interval_s,
            worker.now_ns,
        )

    def _serve(self) -> None:
        """Start the tasks of every process that serves clients; ports and discovery are not among them."""
        self._tasks.spawn(self._tls.watch())
        if self._redirected is not None:
            self._tasks.spawn(self._redirected.destinations.run())

    def _accepted(self, node_id: int | None) -> Accepted:
        """Return the function that takes connections accepted at a broker's port; None: at the bootstrap port."""
        return self._connections.accepted(node_id)

    def _broker_lost(self) -> None:
        self._latest.broker_lost()

    def broker_lost(self) -> None:
        """Ask for the brokers soon: one could not be dialled, or reset a connection."""
        if self.ports is not None:
            self.ports.broker_lost()
        else:
            self._discovery.broker_lost()

    def loop_found(self, upstream: Address, evidence: str) -> None:
        """Refuse this upstream and close its connections: one of them came back to this kproxy."""
        self._connections.loops.found(upstream, evidence)

    def close(self) -> None:
        """Close every port for good: answers still in flight open no port again."""
        self._stopped = True
        if self._bootstrap is not None:
            self._bootstrap.close()
        if self._ports is not None:
            self._ports.close()

    # --- other settings ----------------------------------------------------------------------------------------------

    def learn_all(self, upstreams: Mapping[int, Address]) -> None:
        """Apply broker addresses that a predecessor learned, and bind the brokers' ports."""
        if self.ports is None:
            for node_id, address in upstreams.items():
                has_port = self._ports is not None and self._ports.was_given(node_id)
                self.learn_broker(node_id, *address, is_named=not has_port)

    @property
    def given_ports(self) -> dict[int, Held]:
        """The ports assigned as node ids appeared."""
        assignment = self._ports.assignment if self._ports is not None else None
        return assignment.held() if assignment is not None else {}

    def adopt_ports(self, held: Mapping[int, Held]) -> None:
        """Take over port assignments of the process that has served clients until now."""
        if self._ports is not None:
            self._ports.adopt(held)
            for node_id in held:
                if node_id in self.routes.upstreams:
                    self._bind(node_id)
            self._changed()

    def _brokers_with_relays(self) -> set[int]:
        infos = (relay.info for relay in self._worker.relays.values())
        return {info.broker_id for info in infos if info.cluster == self.cluster.name and info.broker_id is not None}

    def _evicted(self, node_id: int) -> None:
        """Forget a broker whose port was assigned to another one."""
        self.routes.upstreams.pop(node_id, None)
        self._known.forget(node_id)
        fold_broker(self._cells, self._metrics, str(node_id))

    @property
    def _latest(self) -> "ClusterProxy":
        """The newest successor of this cluster, or this one."""
        latest = self
        while latest._successor is not None:
            self._same_upstream = self._same_upstream and latest._same_upstream
            latest = latest._successor
        if latest is not self:
            self._successor = latest  # drops the references to those between
        return latest

    def follow(self, former: "ClusterProxy", *, same_upstream: bool, ends: bool) -> None:
        """Replace a cluster that ran with other settings.

        same_upstream: the brokers are the same, so their addresses and the cluster's readiness are kept. ends:
        connections that `former` is setting up are closed as soon as all requests of their clients are answered.
        """
        if same_upstream:
            if former._named and self._ports is not None:
                self._ports.answered(former._named.keys())
            self.learn_all(former.routes.upstreams)
            self._discovery.not_ready = former._discovery.not_ready
        self.show_state()
        former._same_upstream = same_upstream
        self._connections.follow(former._connections)
        former.retire(self, ends=ends)

    def retire(self, successor: "ClusterProxy | None", *, ends: bool) -> None:
        """Close every port and stop asking; open connections continue, and unless `ends`, so do those being set up."""
        self._successor = successor
        if ends:
            self.end_new()
        self.close()
        self._tasks.stop()

    def end_new(self) -> None:
        """Drain further connections as soon as they are set up."""
        self._connections.ends = True
        self._connections.admission.hurry()

    @property
    def making(self) -> int:
        """How many clients' connections are being set up."""
        return self._connections.making

    def show_state(self) -> None:
        """Make the metrics show the state of this cluster from now on."""
        self._worker.metrics.upstream(self.cluster.name, DIAL_CAUSES, self._state)

    def set_pace(self, discovery_interval_s: float, accept_backlog: int) -> None:
        """Set how often the cluster is asked, in seconds, and the listen backlog."""
        self._discovery.interval_s = discovery_interval_s
        if self._ports is not None:
            self._ports.backlog = accept_backlog
        for listener in self.listeners:
            listener.set_backlog(accept_backlog)

    async def stop(self) -> None:
        """Stop accepting, and cancel connections that are being set up."""
        self.close()
        await self._connections.stop()
        await self._tasks.cancel()

    def _state(self) -> ClusterState:
        listeners = len(self.brokers) + (self._bootstrap is not None)
        if self._stopped:
            return ClusterState(ready=False, accepting=False, listeners=0)
        return ClusterState(not any(self.not_ready()), self._worker.gate.is_open, listeners)

    async def _find_broker(self, client: Incoming) -> None:
        """Refuse a server name of a broker that no answer has named. Raises UpstreamError.

        Clients choose the name, so kproxy counts such a dial as a bootstrap connection, without a series of its own.
        """
        node_id = client.node_id
        if node_id is not None and node_id not in self.routes.upstreams:
            client.node_id = None
            text = f"{client.server_name!r} is broker {node_id}, which no answer has named yet"
            fault = UpstreamError(text, "no_address")
            self._metrics.dial_failed(BOOTSTRAP, fault.cause)
            raise fault

    async def _authenticate(self, client: Incoming) -> None:
        assert self._authentication is not None
        await self._authentication(client)

    # --- several processes -------------------------------------------------------------------------------------------

    def known(self) -> Known | None:
        """Return the state that all processes of the cluster share; None before the start."""
        if self._bootstrap is None:
            return None
        assignment = self._ports.assignment if self._ports is not None else None
        assigned, absent = (assignment.ports, assignment.absent) if assignment is not None else ({}, {})
        return Known(
            self.cluster.name,
            self.address.port,
            dict(self.routes.upstreams),
            self._known.brokers | self._named,
            # The port of an absent broker may be assigned to another one, so workers ask the parent before they forward
            # an answer that names the absent broker.
            frozenset(self.brokers.keys() - absent.keys()),
            {node_id: port for node_id, port in assigned.items() if node_id not in absent},
            self._topology.sidecar_broker,
            tuple((listener.port, tuple(listener.hosts)) for listener in [*self.brokers.values(), self._bootstrap]),
        )

    def take(self, known: Known) -> None:
        """Apply the state sent by the process that holds the ports; the first call starts serving."""
        if not self.has_routes:
            self.routes = self._topology.routes = Routes(self.cluster, known.listen_port)
            self._serve()
        if self.cluster.any_brokers is not None:
            self.routes.assigned = dict(known.assigned)
            for node_id in [node_id for node_id in self.routes.upstreams if node_id not in known.upstreams]:
                self._evicted(node_id)
            for node_id in [node_id for node_id in self._known.brokers if node_id not in known.brokers]:
                self._known.forget(node_id)
        self.routes.upstreams.update(known.upstreams)
        for node_id, address in known.brokers.items():
            self._known.learn(node_id, address)
        if self._redirected is not None:
            self._redirected.learn(known.brokers.items(), again=True)
        self._topology.sidecar_broker = known.sidecar_broker

    @property
    def has_stopped(self) -> bool:
        """Whether its ports are closed for good."""
        return self._stopped

    @property
    def has_routes(self) -> bool:
        """Whether it has started or, if another process holds the ports, has received that process's state."""
        return hasattr(self, "routes")

    # --- the cluster's brokers ---------------------------------------------------------------------------------------

    async def _ask(self, address: Address) -> Brokers | None:
        try:
            return await ask_brokers(address, self._connector)
        except ClosedByBroker as fault:
            if self.cluster.proxy_protocol is not None:
                raise ClosedByBroker(f"{fault}; {UNREAD}") from fault
            if self.cluster.upstream_tls is None:
                raise ClosedByBroker(f"{fault}; {_EXPECTS_MORE}") from fault
            raise

    async def _learn(self, asked: Address, brokers: Brokers | None) -> str:
        """Apply a broker's list of all brokers; returns why clients must still wait, or an empty text."""
        self._named = dict(brokers or {})
        reason = await self._apply_brokers(asked, brokers)
        self._changed()
        return reason

    async def _apply_brokers(self, asked: Address, brokers: Brokers | None) -> str:
        if self.cluster.route == "sidecar":
            for node_id, address in (brokers or {}).items():
                self._known.learn(node_id, address)
            self._topology.sidecar_broker = await find_broker_here(asked, brokers or {}, self._worker.dialler)
            self._expose(broker_label(self._topology.sidecar_broker), None)
            return ""
        if self._redirected is not None:
            self._redirected.learn((brokers or {}).items(), again=True)
            return ""
        if brokers is None:
            if self._ports is not None:
                self._ports.answered_nothing()
            if any(entry.declared for entry in self.cluster.brokers):
                self._warn_of_unknown_upstreams()
                return ""
            return (
                f"{asked} names its brokers only after a login, and kproxy has none: "
                "give it one in [cluster.login], or declare the node ids and their ports in [[cluster.brokers]]"
            )
        if not brokers:
            return f"{asked} names no brokers"
        if self._ports is not None:
            self._ports.answered(brokers.keys())
        for node_id, (host, port) in brokers.items():
            self.learn_broker(node_id, host, port)
        if self._ports is not None:
            self._ports.forget(brokers.keys())
            if self._ports.assignment is not None:
                for node_id in self._known.brokers.keys() - brokers.keys() - self.routes.upstreams.keys():
                    self._known.forget(node_id)
        return ""

    def _warn_of_unknown_upstreams(self) -> None:
        """Warn: clients that dial only brokers they already know would not come back after a restart of kproxy."""
        unknown = [str(node_id) for node_id in self.routes.declared() if node_id not in self.routes.upstreams]
        if unknown and self._discovery.not_ready:  # logged once, not at every interval
            log.warning(
                "cluster=%s names its brokers only after a login: until a client's answer does, clients of broker %s "
                "are refused; give [[cluster.brokers]] an upstream",
                self.cluster.name,
                ", ".join(unknown[:8] + ["..."] * (len(unknown) > 8)),
            )

    def _advertise(self, node_id: int, host: str, port: int) -> tuple[Address, bool]:
        """Return (the address that clients get for a broker that advertises host:port, whether that port is open)."""
        latest = self._latest
        # A worker's new cluster has no routes until its parent sends the state; until then these routes are in force.
        if latest is not self and not self._same_upstream:  # use the ports in force, learn no broker
            self._known.learn(node_id, Address(host, port))
            return (latest if latest.has_routes else self).routes.advertised(node_id, host), True
        if latest is not self and latest.has_routes:
            return latest._advertise(node_id, host, port)
        is_bound = self.learn_broker(node_id, host, port)
        return self.routes.advertised(node_id, host), is_bound

    def learn_broker(self, node_id: int, host: str, port: int, *, is_named: bool = True) -> bool:
        """Apply a broker's address; returns whether its port is open. is_named: it is from an answer just received."""
        if is_named and self._gives_ports and self._ports is not None:
            self._ports.name(node_id)
        before, said_before = self.routes.upstreams.get(node_id), self._known.brokers.get(node_id)
        self._known.learn(node_id, Address(host, port))
        refused = self.routes.learn(node_id, Address(host, port))
        upstream = self.routes.upstreams.get(node_id)
        name = self.cluster.name
        if refused:
            self._limiter.log(logging.ERROR, "refused", "broker %d of cluster %s %s", node_id, name, refused)
        elif before is not None and upstream != before:
            text = "moved cluster=%s broker=%d from %s to %s"
            self._limiter.log(logging.INFO, "moved", text, name, node_id, before, upstream)
        if self.ports is not None:
            is_news = (before, said_before) != (upstream, self._known.brokers.get(node_id))
            return self.ports.bind(node_id, host, port, is_news=is_news)
        self._changed()
        return self._bind(node_id)

    def _bind(self, node_id: int) -> bool:
        assert self._ports is not None
        was_open = node_id in self.brokers
        if not self._ports.bind(node_id):
            return False
        if not was_open:
            self._changed()
        if self.cluster.route != "sidecar":
            self._expose(str(node_id), node_id)
        return True

    def _expose(self, broker: str, node_id: int | None) -> None:
        """Start the series of the broker behind a port at 0, before its first connection."""
        self._cells.expect(broker, listener_label(node_id, self.cluster.route))
        self._metrics.broker_known(broker)

    def _open_ports(self) -> tuple[bool, str]:
        return self._ports is not None and not self._ports.lacking(), str(self._ports)
