"""The composition root of the proxy: builds it, starts it, stops it in reverse.

The only module that knows both the proxy and its siblings (metrics, tables). One process, one event loop, one worker;
and the recorder's thread, if there is one.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kproxy import __version__
from kproxy.admin import parameters
from kproxy.errors import ConfigError, KproxyError, of_extras
from kproxy.metrics import Metrics
from kproxy.metrics.summary import summarise
from kproxy.proxy import log_lines
from kproxy.proxy.cluster.broker_ports import MAX_BROKERS
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.config.tls import ClientTls
from kproxy.proxy.connection.draining import drain
from kproxy.proxy.connection.operating import OPERATIONS, connection_row
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters.flight import FlightRecorder
from kproxy.proxy.filters.policy.audit import require_writable
from kproxy.proxy.process.changing.changes import Changes, same_upstream
from kproxy.proxy.process.changing.reload import Reloader
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.relay.pressure import Pressure
from kproxy.proxy.sockets import descriptors
from kproxy.proxy.sockets.given import GivenSockets
from kproxy.proxy.sockets.listeners import Gate, Listener, is_local, why_unbound
from kproxy.proxy.sockets.poller import Poller
from kproxy.proxy.sockets.redirected import can_mark
from kproxy.proxy.sockets.sockets import READ_BYTES
from kproxy.proxy.tasks import Tasks, waited
from kproxy.proxy.upstream.loops import IsOurs, LoopGuard
from kproxy.wire.connection import Sink

if TYPE_CHECKING:
    from kproxy.admin.server import Admin, Query, Question
    from kproxy.proxy.connection.zookeeper import ZooKeeperProxy
    from kproxy.proxy.process.cautions import Caution
    from kproxy.proxy.process.knowledge.feed_link import FeedLink
    from kproxy.proxy.process.otlp.push import OtlpPush
    from kproxy.proxy.tls.contexts import Reloading
    from kproxy.tables.recorder import Recorder

MAX_ROWS = 10_000  # of /api/connections in one answer
_DEFAULT_ROWS = 1000
_ZOOKEEPER_ROWS = 1000
LOOPBACK = "localhost"
_ROWS_PER_SLICE = 50  # of about 3 us each
_ADMIN_RETIRES_S = 1.0
_MAKING_S = 0.02

log = logging.getLogger("kproxy.server")


class Server:
    """A kproxy: `start` and `stop` inside a running loop. As a process of its own: see `process`.

    given: listening sockets that it takes in place of its own.
    """

    def __init__(self, config: Config, sinks: Sequence[Sink] = ()) -> None:
        self.config = config
        self.metrics = Metrics()
        self.clusters: list[ClusterProxy] = []
        self.zookeeper: list[ZooKeeperProxy] = []
        self.given = GivenSockets()
        self.records_beside = False  # a kproxy that this one follows records into the same folder, while it drains
        self.questions: dict[str, Question] = {}  # further reads of the admin API; whoever composes adds them
        self.reloader = Reloader(self)
        self._is_held = False
        self._sinks = tuple(sinks)
        self._worker: Worker | None = None
        self._admin: Admin | None = None
        self._at_once = asyncio.Event()  # nothing is waited for any more
        self._recorder: Recorder | None = None
        self._flight: FlightRecorder | None = None
        self._otlp: OtlpPush | None = None
        self._draining = False
        self._sampling: asyncio.Task[None] | None = None  # for the page of the admin port
        self._tasks = Tasks("server")
        self._warned_of: set[Caution] = set()
        self._link: FeedLink | None = None  # to the process that decodes; a worker's parent has it

    @property
    def addresses(self) -> dict[str, Address]:
        """Where each cluster's clients bootstrap, by its name."""
        return {cluster.cluster.name: cluster.address for cluster in self.clusters}

    @property
    def admin_address(self) -> Address | None:
        return Address(*self._admin.address) if self._admin else None

    async def start(self) -> None:
        """Bind, listen and serve. Raises ConfigError where the configuration cannot be."""
        if self.config.upstream_mark is not None and not can_mark(self.config.upstream_mark):
            raise ConfigError([("upstream_mark", "kproxy may not mark its sockets: give it CAP_NET_ADMIN")])
        for source in self.config.upstream_source_addresses:
            if not is_local(source):
                text = f"{source} is no address of this machine: see ip address"
                raise ConfigError([("upstream_source_addresses", text)])
        shares = self._shares()
        self._otlp = self._otlp_push()
        self._start_recorder()
        self._start_flight()
        self._start_worker(shares)
        await self._start_workers()
        for cluster in self.config.clusters:
            proxy = self._cluster(self._running, cluster)
            self.clusters.append(proxy)
            proxy.start()
        self._serve_zookeeper()
        self._follow_groups()
        await self._start_admin(self.config.admin, shares)
        for question in self.questions.values():
            self._tasks.spawn(question.follow())
        if self._otlp is not None:
            self._otlp.start()
        self._tasks.spawn(self._warn(self.config))

    async def _warn(self, config: Config) -> None:
        """Log what `kproxy check` warns of, each once: whoever never runs it is to know as well."""
        from kproxy.proxy.process.cautions import cautions  # difflib, for a moment at a start

        for caution in await asyncio.to_thread(lambda: tuple(cautions(config))):
            if caution not in self._warned_of:
                self._warned_of.add(caution)
                log.warning("%s: %s: %s", *caution)

    def _otlp_push(self) -> "OtlpPush | None":
        if self.config.otlp is None:
            return None
        from kproxy.proxy.process.otlp.push import OtlpPush  # few push

        return OtlpPush(self.config.otlp, self.metrics, self.counted, self.config.clusters[0].listen.port)

    def _serve_zookeeper(self) -> None:
        if not self.config.zookeeper:
            return
        from kproxy.proxy.connection.zookeeper import ZooKeeperProxy  # its layouts are not everybody's

        for settings in self.config.zookeeper:
            self.zookeeper.append(ZooKeeperProxy(self._running, settings, self._recorder))
            self.zookeeper[-1].start()

    def _follow_groups(self) -> None:
        """Know the groups and leaders of clusters whose `detail` asks for it."""
        if self._link is None:
            from kproxy.proxy.process.knowledge.feed_link import FeedLink  # with all that follows groups

            self._link = FeedLink(self.metrics, self._give_streams)
        self._link.ensure(self.config)

    def _give_streams(self) -> None:
        """What relays keep goes to the process that decodes, which is new."""
        assert self._link is not None
        self._running.feed.use(self._link.stream())

    async def preflight(self) -> list[tuple[str, str]]:
        """Build what `start` would, and start nothing; returns the faults, those of all clusters."""
        self._start_worker(descriptors.shares(1 << 20, self.config.max_connections or descriptors.DEFAULT_CONNECTIONS))
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
        for cluster in self.config.clusters:
            try:
                self._cluster(self._running, cluster)
            except ConfigError as fault:
                faults += fault.faults
        self._running.poller.close()
        self._running.close()
        return faults

    def objects(self) -> int:
        """About how many objects the garbage collector walks."""
        return self._running.objects

    async def until(self, asked: asyncio.Event) -> None:
        """Return when kproxy is asked to stop, or cannot go on."""
        await asked.wait()

    # What a kproxy of several processes does otherwise; see `parent` and `worker_process`.

    def _shares(self) -> descriptors.Shares:
        require_writable(self.config.audit)  # not in workers, which are replaced while it runs
        shares = descriptors.reserve(self.config.max_connections, self.config.workers)
        log.info("kproxy %s: at most %d connections", __version__, shares.connections)
        return shares

    def _start_recorder(self, worker: int | None = None) -> None:
        config = self.config
        if config.record is not None:
            self._recorder = _started_recorder(config, worker, beside=self.records_beside)
            self.metrics.recorder_dropped = self._recorder.dropped
            self._sinks += (self._recorder,)

    def _start_flight(self, worker: int | None = None) -> None:
        config = self.config
        if config.flight is not None:
            details = {cluster.name: cluster.detail for cluster in config.clusters}
            self._flight = FlightRecorder(config.flight, details, self.metrics, worker)
            self._sinks += (self._flight,)

    def _start_worker(self, shares: descriptors.Shares) -> None:
        self.metrics.connection_limit = shares.connections
        self.metrics.log_lines_dropped = log_lines.dropped
        self._worker = Worker(
            self.config,
            Gate(shares.connections, max_sockets=shares.listening),
            Poller(asyncio.get_running_loop()),
            Pressure(memoryview(bytearray(READ_BYTES))),
            self.metrics.clock_offset_ns,
            self.metrics,
            self._sinks,
            guard=self._guard,
        )
        self._worker.flight = self._flight
        self._worker.gate.given = self.given
        self._worker.gate.is_held = self._is_held

    def _guard(self, is_ours: IsOurs) -> LoopGuard:
        return LoopGuard(is_ours)

    async def _start_workers(self) -> None:
        """Nothing: this process does their work."""

    def _cluster(self, worker: Worker, cluster: Cluster) -> ClusterProxy:
        return ClusterProxy(worker, cluster)

    @property
    def _running(self) -> Worker:
        assert self._worker is not None
        return self._worker

    async def _start_admin(self, address: Address | None, shares: descriptors.Shares) -> None:
        if address is None:
            return
        # HTTP and the text formats take 11 MB: a kproxy without an admin port goes without.
        from kproxy.admin.guard import Guard, Token
        from kproxy.admin.live import Live
        from kproxy.admin.operator import Operator
        from kproxy.admin.page import load_page
        from kproxy.admin.server import Admin

        operator = Operator(self)
        page = load_page() if self.config.page else None
        if self._sampling is not None:
            self._sampling.cancel()
        live = Live(self._gathered, self._live_state, with_history=page is not None)
        token = Token(self.config.admin_token_file) if self.config.admin_token_file is not None else None
        host, port = address
        admin = Admin(
            host or LOOPBACK,
            port,
            scrape=self._scraper(),
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

    async def _gathered(self, with_lags: bool) -> Metrics:
        """The cells of all processes, as they are now."""
        return self.metrics

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
        """Run one of `operating.OPERATIONS` in each process that serves connections; returns what each gave."""
        return [OPERATIONS[operation](self._running, *arguments)]

    async def counted(self) -> Metrics:
        """All cells, of all processes, as they are now."""
        return self.metrics

    def _scraper(self) -> Callable[[str], tuple[bytes, str]]:
        """What renders a scrape, on a thread."""
        from kproxy.metrics.collector import registry_of
        from kproxy.metrics.exposition import render

        registry = registry_of(self.metrics)
        return lambda accept: render(registry, accept)

    @property
    def is_draining(self) -> bool:
        return self._draining

    def not_ready(self) -> list[str]:
        """Why traffic should not be sent here; nothing: it can."""
        if self._draining:
            return ["draining"]
        return list(chain.from_iterable(cluster.not_ready() for cluster in self.clusters))

    # --- another process ---------------------------------------------------------------------------------------------

    @property
    def listeners(self) -> list[Listener]:
        """All open ports, that of the admin server too."""
        gates = [*([self._worker.gate] if self._worker else []), *([self._admin.gate] if self._admin else [])]
        return [listener for gate in gates for listener in gate.listeners]

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return self._worker.gate.connections if self._worker else 0

    def is_broker_port(self, address: Address) -> bool:
        """Whether a port may come to stand for a broker that its cluster has yet to name."""
        return any(
            proxy.cluster.route == "ports"
            and not proxy.cluster.brokers
            and 0 <= address.port - (proxy.cluster.broker_port_base or proxy.address.port + 1) < MAX_BROKERS
            for proxy in self.clusters
        )

    def hold(self, held: bool) -> None:
        """Accept nobody, or go on: clients wait in the backlog meanwhile, of sockets that another process may have."""
        self._is_held = held
        for gate in {listener.gate for listener in self.listeners}:
            gate.hold(held)

    def learn_all(self, bootstraps: Mapping[str, Sequence[str]], learnt: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in what another kproxy knew of the brokers of its clusters, where these are the same."""
        for proxy in self.clusters:
            name = proxy.cluster.name
            if {str(address) for address in proxy.cluster.bootstrap} & set(bootstraps.get(name, ())):
                proxy.learn_all({int(node_id): Address(*at) for node_id, at in learnt.get(name, {}).items()})

    # --- other settings ----------------------------------------------------------------------------------------------

    async def reconfigure(self, new: Config, differing: Changes) -> None:
        """Run by other settings from now on. Raises ConfigError, and then nothing has changed.

        What `differing` does not name is not touched. A cluster that it names is built anew, on the sockets that it
        has; its open connections go on, or end one by one.
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
            self._replace_clusters(new, differing)
        except ConfigError:
            if self._admin is not former and self._admin is not None:
                await self._admin.stop()
                self._admin = former
            raise
        self.config = new
        self._set_limits(new, differing)
        self._follow_groups()
        self._tasks.spawn(self._warn(new))
        for name in differing.drained:
            self._tasks.spawn(self._drain_cluster(name))
        if former is not None and self._admin is not former:
            self._tasks.spawn(self._retire_admin(former))

    def _replace_clusters(self, new: Config, differing: Changes) -> None:
        worker = self._running
        former = {proxy.cluster.name: proxy for proxy in self.clusters}
        before, worker.config = worker.config, new
        built: dict[str, ClusterProxy] = {}
        try:
            for cluster in new.clusters:
                if cluster.name in (*differing.added, *differing.changed):
                    built[cluster.name] = self._cluster(worker, cluster)
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
                else:
                    self.metrics.clusters.pop(name, None)
            if isinstance(fault, OSError):
                raise ConfigError([("", f"no sockets for what is new: {fault.strerror or fault}")]) from None
            raise
        for name, proxy in built.items():
            if name in former:
                same = same_upstream(former[name].cluster, proxy.cluster)
                proxy.follow(former[name], same_upstream=same, ends=name in differing.drained)
        for name in differing.removed:
            former[name].retire(None, ends=True)
        worker.gate.given.close()
        self.clusters[:] = [built.get(cluster.name) or former[cluster.name] for cluster in new.clusters]

    def _set_limits(self, new: Config, differing: Changes) -> None:
        """What takes effect at once and belongs to no single cluster."""
        worker = self._running
        worker.dialler.timeout_s = new.connect_timeout_s
        for proxy in self.clusters:
            proxy.set_pace(new.discovery_interval_s, new.accept_backlog)
        if "max_connections" in differing.process:
            shares = descriptors.reserve(new.max_connections, new.workers)
            worker.gate.max_sockets = shares.listening
            worker.gate.limit(shares.connections)
            self.metrics.connection_limit = shares.connections
        if "log_level" in differing.process:
            log_lines.set_level(new.log_level)

    async def _drain_cluster(self, name: str) -> None:
        """Bring the open connections of a cluster to their ends, those that came before this moment."""
        worker = self._running
        relays = [relay for relay in worker.relays.values() if relay.info.cluster == name]
        drained = await drain(relays, self.config.drain_timeout_s, self._at_once, f"cluster {name}")
        log.info("cluster=%s: %d connections drained, %d closed before their requests were answered", name, *drained)
        if all(proxy.cluster.name != name for proxy in self.clusters):
            self.metrics.clusters.pop(name, None)  # its series end with its last connection

    async def _retire_admin(self, admin: "Admin") -> None:
        """Close an admin port that another has replaced: once the answer under way has left."""
        await asyncio.sleep(_ADMIN_RETIRES_S)
        await admin.stop()

    # --- stopping ----------------------------------------------------------------------------------------------------

    async def stop(self, at_once: asyncio.Event | None = None) -> None:
        """Stop accepting after `drain_delay_s`, let connections finish what is under way, close.

        From the start of it `not_ready` says so. `at_once` ends the waiting.
        """
        start = time.monotonic()
        self._at_once = at_once = at_once or asyncio.Event()
        self._draining = True
        if self.config.drain_delay_s and self._worker is not None:
            await waited(at_once, self.config.drain_delay_s)
        for cluster in self.clusters:
            cluster.retire(None, ends=True)
        for listener in self.zookeeper:
            listener.stop_accepting()
        if self._worker is not None:
            drained, _ = await asyncio.gather(self._drain(self._worker, at_once), self._drain_sessions(at_once))
            for cluster in self.clusters:
                await cluster.stop()
            self._worker.gate.close()
            self._worker.ageing.stop()
            self._worker.poller.close()
            self._worker.close()
            await asyncio.to_thread(self._worker.feed.close)
        if self._link is not None:
            await self._link.close()
        if self._flight is not None:
            await self._flight.stop()
        if self._otlp is not None:
            await self._otlp.stop()
        await self._tasks.cancel()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._admin is not None:
            await self._admin.stop()
        if self._worker is not None:
            text = "stopped in %.1f s: %d connections drained, %d closed before their requests were answered"
            log.info(text, time.monotonic() - start, *drained)

    async def _drain_sessions(self, at_once: asyncio.Event) -> None:
        timeout_s = self.config.drain_timeout_s
        await asyncio.gather(*(listener.drain(timeout_s, at_once) for listener in self.zookeeper))

    async def _drain(self, worker: Worker, at_once: asyncio.Event) -> tuple[int, int]:
        """Let connections finish; returns how many did, and how many were closed at the end of the time."""
        timeout_s = self.config.drain_timeout_s
        end = time.monotonic() + timeout_s
        finished, closed = await drain(tuple(worker.relays.values()), timeout_s, at_once, "drain")
        while any(cluster.making for cluster in self.clusters) and time.monotonic() < end and not at_once.is_set():  # noqa: ASYNC110
            await asyncio.sleep(_MAKING_S)
        left_s = max(0.0, end - time.monotonic())
        further = await drain(tuple(worker.relays.values()), left_s, at_once, "drain")
        return finished + further.finished, closed + further.closed

    async def _api_reload(self, _: "Query") -> tuple[int, Any]:
        outcome = await self.reloader.reload("POST /api/reload")
        return (409 if outcome.outcome == "refused" else 200), outcome.as_json()

    def _api_traffic(self, _: "Query") -> Any:
        return summarise(self.metrics).as_json()

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
        limit = parameters.number(query, "limit", _DEFAULT_ROWS, MAX_ROWS)
        after = parameters.number(query, "after", 0, 1 << 62)
        return self._connection_slices(after, limit)

    async def _api_zookeeper(self, query: "Query") -> Any:
        """Clients of ZooKeeper, the oldest first: at most `limit`, of those whose number is above `after`."""
        limit = parameters.number(query, "limit", _DEFAULT_ROWS, _ZOOKEEPER_ROWS)
        after = parameters.number(query, "after", 0, 1 << 62)
        rows = [row for listener in self.zookeeper for row in listener.rows(after, limit)]
        return sorted(rows, key=lambda row: int(row["number"]))[:limit]

    def _api_groups(self, query: "Query") -> AsyncIterator[list[dict[str, Any]]]:
        assert self._link is not None
        return self._link.api_groups(query)

    async def _connection_slices(self, after: int, limit: int) -> AsyncIterator[list[dict[str, Any]]]:
        relays = self._worker.relays if self._worker else {}
        numbers = sorted(relays)
        first = bisect_right(numbers, after)
        for start in range(first, min(first + limit, len(numbers)), _ROWS_PER_SLICE):
            end = min(start + _ROWS_PER_SLICE, first + limit)
            asked = [relays[number] for number in numbers[start:end] if number in relays]  # some have ended meanwhile
            yield [connection_row(relay) for relay in asked if not relay.closed]


def _admin_tls(settings: ClientTls) -> "Reloading":
    from kproxy.proxy.tls import contexts

    return contexts.Reloading("admin", lambda: contexts.for_clients(settings, None, "admin_tls"))


def _started_recorder(config: Config, worker: int | None, *, beside: bool) -> "Recorder":
    with of_extras(lambda missing: ConfigError([("record", missing)])):  # heavy, and not everybody's
        from kproxy.tables.recorder import Recorder
        from kproxy.tables.retention import Retention
    assert config.record is not None
    detail = {cluster.name: cluster.detail for cluster in config.clusters}
    age_s = config.record_keep_h * 3600 if config.record_keep_h is not None else None
    retention = Retention(age_s, config.record_keep_bytes)
    recorder = Recorder(config.record, {"detail": detail}, worker=worker, retention=retention, beside=beside)
    try:
        recorder.start()
    except KproxyError as fault:
        raise ConfigError([("record", str(fault))]) from None
    return recorder
