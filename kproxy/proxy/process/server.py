"""A kproxy that can be started, queried, reconfigured and stopped.

Duty: the parts that exist once for all processes: the admin port, the settings, the push to a collector, the link to
the decoding process. `relays` has the parts of each relaying process, `team` has these processes. Refuses to know
signals and the service manager (`process`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kproxy import __version__
from kproxy.admin import parameters
from kproxy.core import NATIVE, PYTHON, native
from kproxy.errors import ConfigError, KproxyError
from kproxy.metrics import Metrics
from kproxy.metrics.summary import summarise
from kproxy.proxy.cluster.broker_ports import MAX_BROKERS
from kproxy.proxy.cluster.port_assignment import Held
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Config
from kproxy.proxy.config.tls import ClientTls
from kproxy.proxy.filters.policy.audit import require_writable
from kproxy.proxy.process.changing.changes import Changes
from kproxy.proxy.process.changing.reload import Reloader
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.process.relays import Relays
from kproxy.proxy.process.team import Alone, Team
from kproxy.proxy.sockets import descriptors
from kproxy.proxy.sockets.given import GivenSockets
from kproxy.proxy.sockets.listeners import Listener, is_local, why_unbound
from kproxy.proxy.sockets.redirected import can_mark
from kproxy.proxy.tasks import Tasks, waited
from kproxy.wire.connection import Sink

if TYPE_CHECKING:
    from kproxy.admin.server import Admin, Query, Question
    from kproxy.proxy.process.cautions import Caution
    from kproxy.proxy.process.knowledge.feed_link import FeedLink
    from kproxy.proxy.process.otlp.push import OtlpPush
    from kproxy.proxy.tls.contexts import Reloading

MAX_ROWS = 10_000  # rows of /api/connections in one response
_DEFAULT_ROWS = 1000
_ZOOKEEPER_ROWS = 1000
LOOPBACK = "localhost"
_ROWS_PER_SLICE = 50  # about 3 us per row
_ADMIN_RETIRES_S = 1.0
_MAKING_S = 0.02

log = logging.getLogger("kproxy.server")


class Server:
    """A kproxy: call `start` and `stop` inside a running loop. `process` runs it as a process of its own.

    given: listening sockets to use instead of new ones.
    """

    def __init__(self, config: Config, sinks: Sequence[Sink] = (), team: Team | None = None) -> None:
        """team: the processes that relay; None: only this process."""
        self.config = config
        self.metrics = Metrics()
        self.sinks: Sequence[Sink] = tuple(sinks)
        self.given = GivenSockets()
        self.records_beside = False  # the predecessor records into the same folder while it drains
        self.questions: dict[str, Question] = {}  # further reads of the admin API, added by the caller
        self.reloader = Reloader(self)
        self.link: FeedLink | None = None  # to the decoding process
        self._team = team or Alone()
        self._relays: Relays | None = None
        self._is_held = False
        self._admin: Admin | None = None
        self._at_once = asyncio.Event()  # set: a drain waits no longer
        self._otlp: OtlpPush | None = None
        self._draining = False
        self._sampling: asyncio.Task[None] | None = None  # samples for the page of the admin port
        self._tasks = Tasks("server")
        self._warned_of: set[Caution] = set()

    @property
    def relays(self) -> Relays:
        """Return the relays of this process; they exist once it has started."""
        assert self._relays is not None
        return self._relays

    @property
    def clusters(self) -> Sequence[ClusterProxy]:
        """The served clusters, in the order of the settings; empty before the start."""
        return self._relays.clusters if self._relays is not None else ()

    @property
    def addresses(self) -> dict[str, Address]:
        """Each cluster's bootstrap address, by the cluster's name."""
        return {cluster.cluster.name: cluster.address for cluster in self.clusters}

    @property
    def admin_address(self) -> Address | None:
        return Address(*self._admin.address) if self._admin else None

    async def start(self) -> None:
        """Bind, listen and serve. Raises ConfigError for a configuration that cannot work on this machine."""
        if self.config.upstream_mark is not None and not can_mark(self.config.upstream_mark):
            raise ConfigError([("upstream_mark", "kproxy may not mark its sockets: give it CAP_NET_ADMIN")])
        for source in self.config.upstream_source_addresses:
            if not is_local(source):
                text = f"{source} is no address of this machine: see ip address"
                raise ConfigError([("upstream_source_addresses", text)])
        require_writable(self.config.audit)
        shares = descriptors.reserve(self.config.max_connections, self.config.workers)
        self.metrics.core = PYTHON if native() is None else NATIVE
        log.info("kproxy %s: at most %d connections, core: %s", __version__, shares.connections, self.metrics.core)
        self._otlp = self._otlp_push()
        relays = self._relays = self._team.relays(self, shares)
        relays.worker.gate.given = self.given
        relays.worker.gate.is_held = self._is_held
        self._team.keep(beside=self.records_beside)
        await self._team.start()
        relays.start()
        relays.serve_zookeeper()
        self._follow_groups()
        await self._start_admin(self.config.admin, shares)
        for question in self.questions.values():
            self._tasks.spawn(question.follow())
        if self._otlp is not None:
            self._otlp.start()
        self._tasks.spawn(self._warn(self.config))

    async def _warn(self, config: Config) -> None:
        """Log each warning of `kproxy check` once, for operators who never run that command."""
        from kproxy.proxy.process.cautions import cautions  # imports difflib, needed only at a start

        for caution in await asyncio.to_thread(lambda: tuple(cautions(config))):
            if caution not in self._warned_of:
                self._warned_of.add(caution)
                log.warning("%s: %s: %s", *caution)

    def _otlp_push(self) -> "OtlpPush | None":
        if self.config.otlp is None:
            return None
        from kproxy.proxy.process.otlp.push import OtlpPush  # imported only if used

        return OtlpPush(self.config.otlp, self.metrics, self.counted, self.config.clusters[0].listen.port)

    def _follow_groups(self) -> None:
        """Follow the groups and partition leaders of clusters whose `detail` asks for it."""
        if self.link is None:
            from kproxy.proxy.process.knowledge.feed_link import FeedLink  # imports the code that follows groups

            self.link = FeedLink(self.metrics, self._give_streams)
        self.link.ensure(self.config)

    def _give_streams(self) -> None:
        assert self.link is not None
        self._team.give_streams(self.link)

    async def preflight(self) -> list[tuple[str, str]]:
        """Build the same parts as `start`, without starting them; returns the faults of all clusters."""
        shares = descriptors.shares(1 << 20, self.config.max_connections or descriptors.DEFAULT_CONNECTIONS)
        relays = Relays(self.config, self.metrics, shares)
        faults: list[tuple[str, str]] = []
        token, tls = self.config.admin_token_file, self.config.admin_tls
        try:
            if token is not None and self.config.admin is not None:
                from kproxy.admin.guard import Token

                Token(token)
            if tls is not None:
                _admin_tls(tls)
        except ConfigError as fault:
            faults += fault.faults
        try:
            self._otlp_push()
        except ConfigError as fault:
            faults += fault.faults
        faults += relays.faults()
        relays.worker.poller.close()
        relays.worker.close()
        return faults

    def objects(self) -> int:
        """About how many objects the garbage collector walks in a full collection."""
        return self.relays.worker.objects

    async def until(self, asked: asyncio.Event) -> None:
        """Return when kproxy is asked to stop. Raises KproxyError when it cannot go on."""
        stop, lost = asyncio.create_task(asked.wait()), asyncio.create_task(self._team.lost())
        await asyncio.wait((stop, lost), return_when=asyncio.FIRST_COMPLETED)
        for wait in (stop, lost):
            wait.cancel()
        if not asked.is_set():
            raise KproxyError(lost.result())

    async def _start_admin(self, address: Address | None, shares: descriptors.Shares) -> None:
        if address is None:
            return
        # The imports for HTTP and the text formats take 11 MB: load them only if there is an admin port.
        from kproxy.admin.guard import Guard, Token
        from kproxy.admin.live import Live
        from kproxy.admin.operator import Operator
        from kproxy.admin.page import load_page
        from kproxy.admin.server import Admin

        operator = Operator(self)
        page = load_page() if self.config.page else None
        if self._sampling is not None:
            self._sampling.cancel()
        live = Live(self._counted, self._live_state, with_history=page is not None)
        token = Token(self.config.admin_token_file) if self.config.admin_token_file is not None else None
        host, port = address
        admin = Admin(
            host or LOOPBACK,
            port,
            scrape=self._team.renders(),
            not_ready=self.not_ready,
            api={
                "clusters": self._api_clusters,
                "connections": self._api_connections,
                "groups": self._api_groups,
                "live": live.answer,
                "traffic": self._api_traffic,
                "zookeeper": self._api_zookeeper,
                **operator.reads,
                **{name: question.asked for name, question in self.questions.items()},
            },
            actions={**operator.actions, "reload": self._api_reload},
            streams=operator.streams,
            tls=_admin_tls(self.config.admin_tls) if self.config.admin_tls is not None else None,
            guard=Guard(
                token,
                open_metrics=self.config.admin_open_metrics,
                open_page=page is not None,
                hosts=(host, *self.config.admin_hosts),
            ),
            page=page,
            max_connections=shares.admin,
        )
        admin.gate.given = self.given
        admin.gate.is_held = self._is_held
        try:
            await admin.start()
        except OSError as fault:
            text = f"{address} cannot be bound: {why_unbound(fault, hosts=[address.host], port=address.port)}"
            raise ConfigError([("admin", text)]) from None
        self._admin = admin
        self._sampling = self._tasks.spawn(live.run())
        log.info("%s", admin.offers)
        if not host:
            log.info("admin listens on this machine alone; for others: --admin 0.0.0.0:%d", admin.address[1])

    async def _counted(self, with_lags: bool) -> Metrics:
        return await self._team.counted(with_lags=with_lags)

    def _live_state(self) -> dict[str, Any]:
        reasons = self.not_ready()
        return {
            "ready": not reasons,
            "not_ready": reasons,
            "draining": self.is_draining,
            "connections": self.connections,
            "connection_limit": self.metrics.connection_limit,
            "detail": {cluster.name: cluster.detail for cluster in self.config.clusters},
        }

    async def operate(self, operation: str, *arguments: Any) -> list[Any]:
        """Run one of `operating.OPERATIONS` in each process that serves connections; returns each result."""
        return await self._team.operate(operation, *arguments)

    async def counted(self) -> Metrics:
        """Return the current cells of all processes."""
        return await self._team.counted()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def not_ready(self) -> list[str]:
        """Return the reasons not to send traffic here; an empty list: ready."""
        if self._draining:
            return ["draining"]
        return [*chain.from_iterable(cluster.not_ready() for cluster in self.clusters), *self._team.not_ready()]

    # --- another process ---------------------------------------------------------------------------------------------

    @property
    def listeners(self) -> list[Listener]:
        """All open ports, including the admin port."""
        gates = [
            *([self._relays.worker.gate] if self._relays is not None else []),
            *([self._admin.gate] if self._admin is not None else []),
        ]
        return [listener for gate in gates for listener in gate.listeners]

    @property
    def connections(self) -> int:
        """How many clients are connected to this process."""
        return self._relays.worker.gate.connections if self._relays is not None else 0

    def is_broker_port(self, address: Address) -> bool:
        """Whether a port may be assigned to a broker that its cluster has not named yet."""
        return any(
            proxy.cluster.route == "ports" and any(address.port in entry.ports for entry in proxy.cluster.brokers)
            for proxy in self.clusters
        ) or any(
            proxy.cluster.route == "ports"
            and not proxy.cluster.brokers
            and 0 <= address.port - (proxy.cluster.broker_port_base or proxy.address.port + 1) < MAX_BROKERS
            for proxy in self.clusters
        )

    def hold(self, held: bool) -> None:
        """Stop or resume accepting: clients wait in the backlog meanwhile, where another process may accept them."""
        self._is_held = held
        for gate in {listener.gate for listener in self.listeners}:
            gate.hold(held)

    def learn_all(
        self,
        bootstraps: Mapping[str, Sequence[str]],
        learnt: Mapping[str, Mapping[str, Any]],
        ports: Mapping[str, Mapping[str, Sequence[Any]]],
    ) -> None:
        """Apply the broker addresses that another kproxy has learned, for clusters that share a bootstrap broker.

        ports: the ports assigned as node ids appeared, each with the seconds since its broker became absent.
        """
        for proxy in self.clusters:
            name = proxy.cluster.name
            if {str(address) for address in proxy.cluster.bootstrap} & set(bootstraps.get(name, ())):
                if name in ports:
                    proxy.adopt_ports({int(node_id): Held(*held) for node_id, held in ports[name].items()})
                proxy.learn_all({int(node_id): Address(*at) for node_id, at in learnt.get(name, {}).items()})

    # --- other settings ----------------------------------------------------------------------------------------------

    async def reconfigure(self, new: Config, differing: Changes) -> None:
        """Apply other settings. Raises ConfigError; nothing has changed then.

        Settings that `differing` does not name stay as they are. A cluster that it names is rebuilt on the sockets that
        it has; its open connections continue, or are drained.
        """
        former = self._admin
        if "admin" in differing.process:
            self._admin = None
            try:
                await self._start_admin(new.admin, descriptors.reserve(new.max_connections, new.workers))
            except ConfigError:
                self._admin = former
                raise
        try:
            self.relays.replace_clusters(new, differing)
        except ConfigError:
            if self._admin is not former and self._admin is not None:
                await self._admin.stop()
                self._admin = former
            raise
        self.config = new
        self.relays.set_limits(new, differing)
        self._follow_groups()
        self._tasks.spawn(self._warn(new))
        for name in differing.drained:
            self._tasks.spawn(self.relays.drain_cluster(name, self._at_once))
        if former is not None and self._admin is not former:
            self._tasks.spawn(self._retire_admin(former))
        self._team.reconfigured(new, differing)

    async def _retire_admin(self, admin: "Admin") -> None:
        """Close a replaced admin port after _ADMIN_RETIRES_S, so that its current response can leave."""
        await asyncio.sleep(_ADMIN_RETIRES_S)
        await admin.stop()

    # --- stopping ----------------------------------------------------------------------------------------------------

    async def stop(self, at_once: asyncio.Event | None = None) -> None:
        """Stop accepting after `drain_delay_s`, let connections finish the requests in flight, close.

        `not_ready` names the drain as a reason from the start. `at_once` ends every wait.
        """
        start = time.monotonic()
        self._at_once = at_once = at_once or asyncio.Event()
        self._draining = True
        relays = self._relays
        drained = 0, 0
        if relays is not None:
            if self.config.drain_delay_s:
                await waited(at_once, self.config.drain_delay_s)
            relays.retire()
            drained, _ = await asyncio.gather(self._team.drain(at_once), relays.drain_zookeeper(at_once))
            await relays.close()
        if self.link is not None:
            await self.link.close()
        if self._otlp is not None:
            await self._otlp.stop()
        await self._tasks.cancel()
        if relays is not None:
            await relays.stop_recording()
        if self._admin is not None:
            await self._admin.stop()
        if relays is not None:
            text = "stopped in %.1f s: %d connections drained, %d closed before their requests were answered"
            log.info(text, time.monotonic() - start, *drained)

    async def _api_reload(self, _: "Query") -> tuple[int, Any]:
        outcome = await self.reloader.reload("POST /api/reload")
        return (409 if outcome.outcome == "refused" else 200), outcome.as_json()

    async def _api_traffic(self, _: "Query") -> Any:
        return summarise(await self._team.counted(with_lags=False)).as_json()

    def _api_clusters(self, _: "Query") -> list[dict[str, Any]]:
        return [
            {
                "name": proxy.cluster.name,
                "listen": str(proxy.address),
                "route": proxy.cluster.route,
                "bootstrap": [str(address) for address in proxy.cluster.bootstrap],
                "not_ready": list(proxy.not_ready()),
                "brokers": {
                    str(node_id): {"port": port, "upstream": str(proxy.routes.upstreams.get(node_id, ""))}
                    for node_id, port in sorted(proxy.broker_ports().items())
                },
            }
            for proxy in self.clusters
        ]

    def _api_connections(self, query: "Query") -> AsyncIterator[list[dict[str, Any]]]:
        """Yield open connections, oldest first: at most `limit` with a number above `after`."""
        limit = parameters.number(query, "limit", _DEFAULT_ROWS, MAX_ROWS)
        after = parameters.number(query, "after", 0, 1 << 62)
        return self._team.connection_rows(after, limit)

    async def _api_zookeeper(self, query: "Query") -> Any:
        """Return ZooKeeper's clients, oldest first: at most `limit` with a number above `after`."""
        limit = parameters.number(query, "limit", _DEFAULT_ROWS, _ZOOKEEPER_ROWS)
        after = parameters.number(query, "after", 0, 1 << 62)
        rows = [row for listener in self.relays.zookeeper for row in listener.rows(after, limit)]
        return sorted(rows, key=lambda row: int(row["number"]))[:limit]

    def _api_groups(self, query: "Query") -> AsyncIterator[list[dict[str, Any]]]:
        assert self.link is not None
        return self.link.api_groups(query)


def _admin_tls(settings: ClientTls) -> "Reloading":
    from kproxy.proxy.tls import contexts

    return contexts.Reloading("admin", lambda: contexts.for_clients(settings, None, "admin_tls"))
