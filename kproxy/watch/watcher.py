"""The composition root of `kproxy watch`: the socket, the flows, metrics and recorder, and the admin server.

One process, one event loop. It reads packets a window at a time, and serves the admin port between two windows. Once a
second it handles everything that packets do not trigger: the kernel's counters, interfaces that came or went, brokers
whose names were resolved, flows that have been silent for IDLE_S.

No loss is silent: packets that the kernel drops and bytes that are missing are counted, and reported in `quality`.
Memory: the ring, the bounds of `capture.connections.flows`, the recorder's. Refuses to know the content of packets.
"""

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kproxy import __version__
from kproxy.admin import parameters
from kproxy.capture.connections.flow import Handlers
from kproxy.capture.connections.flows import Flows
from kproxy.capture.quality import KINDS, Quality
from kproxy.errors import KproxyError, of_extras
from kproxy.metrics import Metrics
from kproxy.metrics.counters.passive import PassiveCells
from kproxy.metrics.summary import summarise
from kproxy.proxy import log_lines
from kproxy.proxy.cluster.destinations import Destinations
from kproxy.proxy.filters.feed import Feed
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.process.changing import systemd
from kproxy.proxy.process.garbage import Collections
from kproxy.proxy.process.knowledge.feed_link import FeedLink
from kproxy.proxy.sockets.listeners import why_unbound
from kproxy.proxy.tasks import Tasks
from kproxy.proxy.upstream.resolver import Resolver
from kproxy.watch import privileges
from kproxy.watch.clusters import MAX_CLUSTERS, LiveClusters
from kproxy.watch.connections import Connections
from kproxy.watch.copies import OneInterface
from kproxy.watch.filters import MAX_PORTS, program
from kproxy.watch.interfaces import ANY, Asked, refused
from kproxy.watch.ring import BLOCK_BYTES, WINDOW_PACKETS, Ring
from kproxy.watch.settings import Settings
from kproxy.watch.zookeeper import ZooKeeperConnections
from kproxy.wire.bodies import BATCHES, DETAILS, ERRORS, Logs
from kproxy.wording import counted

if TYPE_CHECKING:
    from kproxy.admin.server import Admin, Question
    from kproxy.tables.live.recorder import Recorder

IDLE_S = 20 * 60  # twice the time after which brokers close idle connections (connections.max.idle.ms)
CONNECT_S = 130  # Linux aborts a connect after 127 s (net.ipv4.tcp_syn_retries)
TICK_S = 1.0
SET_NS = 10**9  # smallest step of the clock that matters here
EXPIRE_TICKS = 30
LOOK_TICKS = 2  # between two searches for processes
NAME_TICKS = 5  # between two attempts to name clusters of connections that have none by address
REPORT_TICKS = 60  # between two reports of findings into `quality`
DRAIN_S = 2.0  # longest time to read remaining packets at the end
TURN_S = 0.05  # longest time to read packets before the admin port is served
FEWEST_PACKETS = 1 << 10  # per window: columns of fewer packets cost more than they save
MAX_ROWS = 10_000  # rows of /api/connections per response
_DEFAULT_ROWS = 1000
_ROWS_PER_SLICE = 50
_LOOPBACK = "localhost"
_ENDING = (signal.SIGTERM, signal.SIGINT)

# Counters of a flow that are added up at its end, and shown while it is open.
_OF_OPEN = {
    "duplicate_packets": "duplicates",
    "retransmissions": "retransmissions",
    "out_of_order": "out_of_order",
    "zero_windows": "zero_windows",
    "long_gap": "long_gaps",
    "gap": "gaps",
    "truncated": "truncated",
}

log = logging.getLogger("kproxy.watch")


class _Found(Quality):
    """Findings of an endless capture: duplicate connections are detected at their start (copies.Twins)."""

    def stream(self, numbers: tuple[int, int], name: str, time_ns: int, last_ns: int, size: int) -> None:
        pass


class Watcher:
    """Captures and serves: call `open` with the right to capture, then `run`, which returns after a signal."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._asked = Asked(settings.interfaces)
        self._passive = self.metrics.passive = PassiveCells(self._asked.label or ANY, KINDS)
        self._interface = self._passive.interfaces[self._asked.label or ANY]
        self._ports = set(settings.ports)
        self._quality = _Found()
        self._reported: dict[str, tuple[int, int]] = {}  # counts of findings that are already in `quality`
        self._one_interface = None if self._asked.is_one else OneInterface()
        self._ring: Ring | None = None
        self._recorder: Recorder | None = None
        self._admin: Admin | None = None
        self.questions: dict[str, Question] = {}  # further reads of the admin API, added by the caller
        self._missing: list[str] = []  # why named interfaces are not watched
        self._numbers: tuple[int, ...] = ()  # numbers of the interfaces that pass the filter
        self._tasks = Tasks("watch")
        self._ends = asyncio.Event()
        self._resolver = Resolver()
        self._clusters = 0  # clusters with names
        self._connections: Connections
        self._zookeeper: ZooKeeperConnections
        self._flows: Flows
        self._feed: Feed | None = None  # set if groups are followed
        self._link: FeedLink | None = None
        self._ticks = 0
        self._expires_s = 0.0  # no flow is ended for silence before this time
        self._dropping = False
        self._window_packets = WINDOW_PACKETS
        self._limiter = LogLimiter(log)
        self._who = ""  # uid, gid and capabilities

    # --- start -------------------------------------------------------------------------------------------------------

    def open(self, environment: Mapping[str, str]) -> None:
        """Open the socket, then drop the privileges needed for that. Raises KproxyError."""
        settings = self.settings
        self._asked.check()
        user = privileges.user_to_become(settings.user, environment)
        blocks = max(2, settings.buffer_mib * (1 << 20) // BLOCK_BYTES)
        try:
            self._ring = Ring(self._program(), blocks)
            self._bind()
        except OSError as fault:
            raise refused(fault) from None
        keep = (privileges.SYS_PTRACE, privileges.DAC_READ_SEARCH) if settings.processes else ()
        self._who = privileges.drop(user, keep)

    def _program(self) -> list[bytes]:
        found = self._asked.found()
        numbers = () if self._asked.names == (ANY,) else tuple(each.number for each in found)
        self._numbers = tuple(each.number for each in found)
        ports = self._ports | set(self.settings.zookeeper_ports) if self._ports else self._ports
        return program(ports, () if len(numbers) == 1 else numbers, [i.number for i in found if i.is_loopback])

    def _bind(self) -> None:
        assert self._ring is not None
        self._ring.bind(self._numbers[0] if self._asked.is_one and self._numbers else 0)

    async def run(self, environment: Mapping[str, str]) -> None:
        """Watch until a signal. Raises KproxyError if the admin port or the folder is unavailable."""
        assert self._ring is not None
        settings, metrics = self.settings, self.metrics
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._signalled, number))
        metrics.log_lines_dropped = log_lines.dropped
        log.info("kproxy %s: the packet socket is open, privileges now: %s", __version__, self._who)
        self._start_recorder()
        self._start_flows()
        notifier = systemd.Notifier(dict(environment))
        collections = Collections(lambda: self._connections.objects)
        await self._start_admin()
        collections.start()
        self._arm()
        self._tasks.spawn(self._tick())
        self._tasks.spawn(notifier.run(self.not_ready, self._describe))
        ports = ",".join(map(str, sorted(self._ports))) or "any"
        log.info("watching interface=%s ports=%s buffer_mib=%d", self._asked.label, ports, settings.buffer_mib)
        if settings.zookeeper_ports:
            log.info("watching zookeeper_ports=%s", ",".join(map(str, settings.zookeeper_ports)))
        try:
            await self._ends.wait()
        finally:
            notifier.stopping("reads the packets that wait", DRAIN_S + 10)
            loop.remove_reader(self._ring.fileno())
            self._finish()
            collections.stop()
            await self._tasks.cancel()
            if self._feed is not None and self._link is not None:
                await asyncio.to_thread(self._feed.close)
                await self._link.close()
            if self._recorder is not None:
                await asyncio.to_thread(self._recorder.close)
            if self._admin is not None:
                await self._admin.stop()
            self._ring.close()
            text = "stopped: packets=%d dropped=%d"
            log.info(text, self._interface.packets, self._interface.dropped)

    def _start_recorder(self) -> None:
        settings = self.settings
        if settings.record is None:
            return
        with of_extras(lambda missing: KproxyError(f"--record {missing}")):  # heavy, and optional
            from kproxy.tables.live.recorder import Recorder
        self._recorder = Recorder(settings.record, {"detail": {settings.cluster: settings.detail}, "watch": True})
        self._recorder.start()
        self.metrics.recorder_dropped = self._recorder.dropped

    def _start_flows(self) -> None:
        settings = self.settings
        detail = min(DETAILS[settings.detail], BATCHES)
        if detail != ERRORS:
            self._feed = Feed()
            self._link = FeedLink(self.metrics, self._give_stream)
            self._link.record = settings.record
            self._link.settings = {"detail": {settings.cluster: settings.detail}, "watch": True}
            self._link.follow({settings.cluster})
        self._connections = Connections(
            self.metrics,
            settings.cluster,
            self._new_destinations,
            bodies=detail != ERRORS,
            recorder=self._recorder,
            feed=self._feed,
            on_ports=self._learn_ports,
            on_clusters=self._name_clusters,
            on_unknown=self._count_unknown_cluster,
        )
        # Columns cost least; topics and rows need each exchange as an event.
        by_column = detail == ERRORS and self._recorder is None
        self._zookeeper = ZooKeeperConnections(
            settings.cluster, None if self._recorder is None else self._recorder.rows(self._source)
        )
        if settings.zookeeper_ports or not settings.ports:
            self.metrics.zookeeper[settings.cluster] = self._zookeeper.cells
        handlers = Handlers(
            self._connections.decided,
            self._connections.many if by_column else None,
            self._connections.ended,
            self._zookeeper.connected,
            self._connections.unconnected,
        )
        kept = self._connections.kept
        self._flows = Flows(
            self._source,
            self._quality,
            handlers,
            cluster=settings.cluster,
            ports=settings.ports,
            zookeeper_ports=settings.zookeeper_ports,
            detail=detail,
            kept=None if kept is None else lambda: kept,
            logs=None if kept is None else Logs(),
        )
        self._passive.findings = self._findings

    def _give_stream(self) -> None:
        """Send the frames kept by sessions to the new decoding process."""
        if self._feed is not None and self._link is not None:
            self._feed.use(self._link.stream())

    @property
    def _source(self) -> str:
        return f"watch:{self._asked.label}"

    async def _start_admin(self) -> None:
        address = self.settings.admin
        if address is None:
            return
        from kproxy.admin.guard import Guard
        from kproxy.admin.live import Live
        from kproxy.admin.page import load_page
        from kproxy.admin.server import Admin
        from kproxy.metrics.scrape.collector import registry_of
        from kproxy.metrics.scrape.exposition import render

        page = load_page()
        live = Live(self._gathered, self._live_state, with_history=page is not None)
        registry = registry_of(self.metrics)
        admin = Admin(
            address.host or _LOOPBACK,
            address.port,
            scrape=lambda accept: render(registry, accept),
            not_ready=self.not_ready,
            api={
                "connections": self._api_connections,
                "live": live.answer,
                "traffic": self._api_traffic,
                "watch": self._api_watch,
                **({"groups": self._link.api_groups} if self._link is not None else {}),
                **{name: question.asked for name, question in self.questions.items()},
            },
            page=page,
            guard=Guard(hosts=(address.host,)),
        )
        try:
            await admin.start()
        except OSError as fault:
            why = why_unbound(fault, hosts=[address.host], port=address.port)
            raise KproxyError(f"--admin {address} cannot be bound: {why}") from None
        self._admin = admin
        self._tasks.spawn(live.run())
        for question in self.questions.values():
            self._tasks.spawn(question.follow())
        log.info("%s", admin.offers)

    async def counted(self) -> Metrics:
        """Return the current metrics."""
        return self.metrics

    async def _gathered(self, _: bool) -> Metrics:
        return self.metrics

    def _live_state(self) -> dict[str, Any]:
        reasons = list(self.not_ready())
        return {
            "ready": not reasons,
            "not_ready": reasons,
            "draining": False,
            "connections": len(self._connections),
            "connection_limit": None,
            "detail": dict.fromkeys((self.settings.cluster, *self._connections.clusters.names), self.settings.detail),
        }

    # --- packets -----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Watch for packets again: libuv stops after an error on the socket, such as the end of an interface."""
        assert self._ring is not None
        fault = self._ring.fault()
        if fault and fault != errno.ENETDOWN:
            log.warning("the packet socket reports: %s", os.strerror(fault))
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._ring.fileno())
        loop.add_reader(self._ring.fileno(), self._readable)

    def _readable(self) -> None:
        """Read packets for TURN_S; a window has as many packets as take about that long."""
        started_s = begun_s = time.monotonic()
        while self._read():
            now_s = time.monotonic()
            if now_s - begun_s > TURN_S:
                self._window_packets = max(self._window_packets // 2, FEWEST_PACKETS)
            elif now_s - begun_s < TURN_S / 4:
                self._window_packets = min(self._window_packets * 2, WINDOW_PACKETS)
            if now_s - started_s > TURN_S:
                return
            begun_s = now_s

    def _read(self) -> bool:
        """Read a window of packets; returns whether there was one."""
        ring = self._ring
        assert ring is not None
        window = ring.window(self._window_packets)
        if window is None:
            return False
        last_ns = window.records[-1][0]
        try:
            if self._one_interface is not None:
                window, left_out = self._one_interface(window, ring.interface)
                self._passive.duplicates += left_out
            self._flows.window(window)
        except Exception as fault:  # a fault in one window must not cost all others
            self._defect(fault)
        finally:
            ring.release()
        self._connections.hand_on()
        self._zookeeper.hand_on()
        self._passive.behind_ns = max(0, time.time_ns() - last_ns)
        return True

    def _finish(self) -> None:
        """Read the waiting packets, and end all flows."""
        assert self._ring is not None
        end_s = time.monotonic() + DRAIN_S
        while self._ring.has_more and time.monotonic() < end_s:
            self._read()
        self._count()
        try:
            self._flows.finish()
        except Exception as fault:
            self._defect(fault)
        self._connections.hand_on()
        self._zookeeper.finish()
        self._report()

    def _defect(self, fault: Exception) -> None:
        text = "a defect of kproxy: packets of a moment are not counted (%s). Please report these lines"
        self._limiter.log(logging.ERROR, type(fault), text, fault, exc_info=fault)
        self._quality.note("fault", time.time_ns())

    # --- once a second -----------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._ticks += 1
            self._follow_clock()
            self._count()
            self._look_after_interfaces()
            self._arm()
            self._connections.name_brokers()
            if not self._ticks % NAME_TICKS:
                self._connections.name_clusters()
            looks = self.settings.processes and not self._ticks % LOOK_TICKS
            if looks and (strangers := self._connections.strangers()):
                await asyncio.to_thread(self._connections.look_for_processes, strangers)
            if not self._ticks % EXPIRE_TICKS:
                self._expire()
            if not self._ticks % REPORT_TICKS:
                self._report()

    def _follow_clock(self) -> None:
        """Follow steps of the clock: the kernel stamps packets with wall clock time."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        if abs(offset_ns - self.metrics.clock_offset_ns) > SET_NS:
            log.info("the clock was set, by %.1f s", (offset_ns - self.metrics.clock_offset_ns) / 1e9)
            self._expires_s = time.monotonic() + IDLE_S
        self.metrics.clock_offset_ns = offset_ns

    def _expire(self) -> None:
        """End flows that have been silent for long; after a clock step, only once all live flows have new times."""
        if time.monotonic() >= self._expires_s:
            now_ns = time.time_ns()
            self._flows.expire(now_ns - IDLE_S * 10**9, now_ns - CONNECT_S * 10**9)

    def _count(self) -> None:
        """Apply the kernel's counters."""
        ring, cells = self._ring, self._interface
        assert ring is not None
        ring.count()
        dropped = ring.dropped - cells.dropped
        cells.packets = ring.packets - ring.dropped
        cells.dropped = ring.dropped
        if dropped:
            now_ns = time.time_ns()
            self._quality.note("kernel_drops", now_ns, count=dropped)
            if not self._dropping:  # one line per burst
                log.warning(
                    "packets are dropped: more come than kproxy reads; kproxy_watch_dropped_packets_total counts them. "
                    "Watch fewer ports (--port), give it a larger --buffer-mib, or a core of its own"
                )
        self._dropping = bool(dropped)

    def _look_after_interfaces(self) -> None:
        """Watch the interfaces that exist now: they come and go."""
        assert self._ring is not None
        missing = self._asked.missing()
        numbers = tuple(each.number for each in self._asked.found())
        if numbers != self._numbers:
            try:
                self._ring.attach(self._program())
                if self._numbers or not self._asked.is_one:
                    self._bind()
            except OSError as fault:  # it was removed again
                self._numbers = ()
                missing = missing or [f"interface {self._asked.label} cannot be watched ({fault})"]
        had_missing = bool(self._missing)
        self._missing = missing
        if bool(missing) != had_missing:
            self._interface.is_up = not missing
            if missing:
                log.warning("%s: its packets are missing until it is back", "; ".join(missing))
            else:
                log.info("interface=%s is back", self._asked.label)

    def _learn_ports(self, ports: set[int]) -> None:
        """Watch further ports of brokers that answers name."""
        if not self._ports or not self.settings.learns_ports or ports <= self._ports:
            return
        known = self._ports | set(self.settings.zookeeper_ports)
        new = sorted(ports - known)[: MAX_PORTS - len(known)]
        if not new:
            return
        self._ports |= set(new)
        self._flows.trust(new)
        assert self._ring is not None
        with suppress(OSError):
            self._ring.attach(self._program())
        log.info("brokers have other ports too: ports=%s", ",".join(map(str, sorted(self._ports))))

    def _findings(self) -> Mapping[str, int]:
        """Return the count of each kind of finding, in ended and open flows."""
        counts = {kind: self._quality.count(kind) for kind in KINDS if kind != "same_stream"}
        for flow in self._flows.open:
            for kind, counter in _OF_OPEN.items():
                counts[kind] += flow.total(counter)
            if flow.speaks is not None:
                counts[flow.speaks] = counts.get(flow.speaks, 0) + 1
        return counts

    def _report(self) -> None:
        """Record findings that are not in `quality` yet."""
        if self._recorder is None:
            return
        rows = []
        for row in self._quality:
            count, size = self._reported.get(row.kind, (0, 0))
            if row.count > count or row.bytes > size:
                self._reported[row.kind] = row.count, row.bytes
                now_ns = time.time_ns()
                rows.append(
                    {
                        "source": self._source,
                        "kind": row.kind,
                        "count": row.count - count,
                        "bytes": row.bytes - size,
                        "first_ns": now_ns if row.first_ns < 0 else row.first_ns,
                        "last_ns": now_ns if row.last_ns < 0 else row.last_ns,
                        "sentence": row.sentence,
                    }
                )
        self._recorder.note(rows)

    def _new_destinations(self) -> Destinations:
        destinations = Destinations(self._resolver)
        self._tasks.spawn(destinations.run())
        return destinations

    def _name_clusters(self, clusters: LiveClusters) -> None:
        """Count and record each cluster under its own name, as answers show several, or a further one."""
        names, given = clusters.names, self.settings.cluster
        known = self._quality.count("clusters_as_one")
        if clusters.nameless > known:
            self._quality.note("clusters_as_one", time.time_ns(), count=clusters.nameless - known)
            log.warning(
                "%d clusters cannot be told apart: brokers of other clusters have the same addresses, or more than %d "
                "clusters answer; they are counted and recorded as cluster=%s. Watch each by its --interface or "
                "--port, in a kproxy of its own",
                clusters.nameless,
                MAX_CLUSTERS,
                given,
            )
        if len(names) == self._clusters:
            return
        self._quality.note("clusters", time.time_ns(), count=len(names) - self._clusters)
        is_first, self._clusters = not self._clusters, len(names)
        log.info(
            "brokers of %d clusters answer: each is counted and recorded under a name of its own from now on (%s); "
            "cluster=%s keeps what came before, and connections whose cluster no answer shows",
            len(names),
            ", ".join(map(repr, names)),
            given,
        )
        settings = {"detail": dict.fromkeys((given, *names), self.settings.detail), "watch": True}
        if self._link is not None:
            if is_first:
                self._link.follow(set(names))  # the groups so far belong to other names now
            self._link.settings = settings
            self._link.follow({given, *names})
        if is_first:
            self._connections.restart()

    def _count_unknown_cluster(self) -> None:
        """Count an ended connection without a known cluster, while there were several."""
        self._quality.note("cluster_unknown", time.time_ns())

    # --- operators ---------------------------------------------------------------------------------------------------

    def not_ready(self) -> list[str]:
        """Return why nothing is captured now; empty: it watches."""
        return self._missing

    def _describe(self) -> str:
        return f"kproxy {__version__}: watches {self._asked.label}, {counted(len(self._connections), 'connection')}"

    def _signalled(self, number: int) -> None:
        log.info("%s: stopping", signal.Signals(number).name)
        self._ends.set()

    def _api_traffic(self, _: Mapping[str, str]) -> Any:
        return summarise(self.metrics).as_json()

    def _api_watch(self, _: Mapping[str, str]) -> Any:
        cells = self._passive
        return {
            "interfaces": list(self._asked.names),
            "missing": self._asked.missing(),
            "ports": sorted(self._ports),
            "packets": self._interface.packets,
            "dropped_packets": self._interface.dropped,
            "duplicate_packets": cells.duplicates,
            "delay_s": round(cells.behind_ns / 1e9, 6),
            "connections": len(self._connections),
            "flows": len(self._flows.open),
            "cluster_ids": list(self._connections.cluster_ids),
            "clusters": self._connections.clusters.names or [self.settings.cluster],
            "findings": {kind: count for kind, count in cells.found().items() if count},
        }

    def _api_connections(self, query: Mapping[str, str]) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield open connections, oldest first: at most `limit` with a number above `after`."""
        limit = parameters.number(query, "limit", _DEFAULT_ROWS, MAX_ROWS)
        after = parameters.number(query, "after", 0, 1 << 62)
        return self._connection_slices(after, limit)

    async def _connection_slices(self, after: int, limit: int) -> AsyncIterator[list[dict[str, Any]]]:
        wanted = [connection for connection in self._connections if connection.number > after][:limit]
        for start in range(0, len(wanted), _ROWS_PER_SLICE):
            yield [connection.row() for connection in wanted[start : start + _ROWS_PER_SLICE]]
