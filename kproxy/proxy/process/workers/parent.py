"""The team of a kproxy with workers: their parent, which has the ports and hands each client to one of them.

It relays only ZooKeeper, which has few clients. It adds up the workers' counters (`kproxy.metrics.processes.shared`),
and sends all workers the broker addresses that one of them learns. A worker that dies is replaced, and so is the
process that workers are forked from; if that fails, kproxy drains and exits with an error, so that its supervisor
restarts it. Refuses to know bytes of clients.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kproxy.errors import KproxyError
from kproxy.metrics import Metrics
from kproxy.metrics.consumers.lag import Lags
from kproxy.metrics.processes.shared import Shared
from kproxy.proxy import log_lines
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Config
from kproxy.proxy.filters.flight import make_folder
from kproxy.proxy.process.changing.changes import Changes, Upstream, same_upstream
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.process.relays import Relays
from kproxy.proxy.process.shared import Known
from kproxy.proxy.process.team import Owner, Render
from kproxy.proxy.process.workers.crew import Client, Crew, Member
from kproxy.proxy.process.workers.divided_cluster import HandOver
from kproxy.proxy.process.workers.shared_loops import PROCESSES, SharedLoops
from kproxy.proxy.process.workers.template import Template
from kproxy.proxy.process.workers.worker_process import Beginning
from kproxy.proxy.sockets import descriptors
from kproxy.proxy.sockets.channel import Gone, Handler
from kproxy.tables.live.claim import claim

if TYPE_CHECKING:
    from kproxy.proxy.process.knowledge.feed_link import FeedLink

SCRAPE_S = 0.5  # s in which workers must send their counters; a scrape has the previous counters of a late worker
ROWS_S = 2.0
_ENDS_S = 3.0  # s in which workers must end, beyond the drain timeout
PARENT = 0  # the parent's number as a recorder: workers begin with 1
_SENT_S = 5.0  # s in which a worker must receive a message
_PUSH_S = 0.005  # s: workers get all changes of this time in one message, or earlier if a client comes

log = logging.getLogger("kproxy.processes")


class Parent:
    """A `team.Team` with a number of workers."""

    _server: Owner
    _relays: Relays
    _shared: Shared

    def __init__(self, workers: int, template: Template) -> None:
        self._token = secrets.token_hex(8)
        self._pushed: dict[str, Known] = {}
        self._push: asyncio.TimerHandle | None = None
        self._crew = Crew(workers, template, self._handlers, self._begin, self._ended, self._left)
        self._hand_over = HandOver(self._crew, self._push_now)
        self._drained = (0, 0)

    # --- starting ----------------------------------------------------------------------------------------------------

    def relays(self, server: Owner, shares: descriptors.Shares) -> Relays:
        self._server = server
        self._shared = Shared(server.metrics)
        self._crew.most_in_each = shares.in_each
        self._relays = Relays(
            server.config,
            server.metrics,
            shares,
            guard=lambda is_ours: SharedLoops(is_ours, self._token, 0, self._send_all),
            build=lambda worker, cluster: self._hand_over.serves(worker, cluster, self._changed),
            counts_elsewhere=self._shared.has,
        )
        self._relays.worker.lags = self
        return self._relays

    def keep(self, *, beside: bool) -> None:
        """Claim the folder for all workers until this process ends; each worker records into its own files.

        Workers run the flight recorder too; its folder is checked here, before they start.
        """
        config = self._server.config
        if config.record is not None:
            claim(config.record, beside=beside)
            if config.zookeeper:
                self._relays.record(PARENT, beside=beside)
        if config.flight is not None:
            make_folder(config.flight.folder)

    async def start(self) -> None:
        try:
            await self._crew.start()
        except (Gone, OSError, TimeoutError) as fault:
            raise KproxyError(f"no workers: {fault}") from None

    def not_ready(self) -> Sequence[str]:
        return () if self._crew.ready else ("no worker runs",)

    async def lost(self) -> str:
        await self._crew.lost()
        return "no worker can be started any more"

    # --- messages to workers -----------------------------------------------------------------------------------------

    def _begin(self, member: Member) -> None:
        """Send a new worker the state that it needs before its first client."""
        metrics = self._server.metrics
        beginning = Beginning(
            self._server.config.model_copy(update={"log_level": log_lines.level()}),
            member.number,
            self._token,
            metrics.connection_limit,
            metrics.clock_offset_ns,
            metrics.started_ns,
        )
        member.channel.send("begin", beginning)
        for known in self._pushed.values():
            member.channel.send("known", known)
        if self._server.link is not None:
            self._give_stream(self._server.link, member)

    def _give_stream(self, link: "FeedLink", member: Member) -> None:
        """Give a worker a stream to the decoding process, if that runs."""
        sock = link.stream()
        if sock is not None:
            member.channel.send("insight", files=[sock.fileno()])
            # A descriptor must stay open until it is sent.
            asyncio.get_running_loop().call_later(_SENT_S if member.channel.is_behind else 0.0, sock.close)

    def give_streams(self, link: "FeedLink") -> None:
        for member in self._crew.members:
            self._give_stream(link, member)

    def _changed(self) -> None:
        if self._push is None:
            self._push = asyncio.get_running_loop().call_later(_PUSH_S, self._push_known)

    def _push_now(self) -> None:
        if self._push is not None:
            self._push.cancel()
            self._push_known()

    def _push_known(self) -> None:
        self._push = None
        for cluster in self._relays.clusters:
            known = cluster.known()
            if known is not None and self._pushed.get(known.name) != known:
                self._pushed[known.name] = known
                self._crew.broadcast("known", known)

    def reconfigured(self, new: Config, differing: Changes) -> None:
        self._crew.most_in_each = descriptors.reserve(new.max_connections, new.workers, warns=False).in_each
        self._crew.broadcast("reconfigure", new, differing)
        self._pushed.clear()  # state under the former settings
        self._changed()
        self._push_now()  # before the next client, and the next reload

    # --- messages from workers ---------------------------------------------------------------------------------------

    def _handlers(self, member: Member) -> Mapping[str, Handler]:
        def bind(name: str, upstream: Upstream, node_id: int, host: str, port: int) -> tuple[bool, int | None]:
            """Return whether the broker's port is open, and the port assigned to the broker, if any."""
            cluster = self._named(name)
            if cluster is None:
                return False, None
            if not same_upstream(upstream, cluster.cluster):  # a reload has given the cluster other brokers since
                return node_id in cluster.brokers, None
            return cluster.learn_broker(node_id, host, port), cluster.routes.assigned.get(node_id)

        def lost(name: str) -> None:
            cluster = self._named(name)
            if cluster is not None:
                cluster.broker_lost()

        def count(number: int, host: str) -> str | None:
            client = member.clients.get(number)
            return client.count_address(host) if client is not None else None

        return {
            "bind": bind,
            "count": count,
            "lost": lost,
            "dialled": lambda own, upstream: self._dialled(own, upstream),
            "undialled": self._loops.closed,
            "loop": lambda upstream: self._loop_elsewhere(member, upstream),
            "question": lambda number: self._came_back(number),
            "cells": lambda changes: self._shared.take(member.number, changes),
            "drained": self._count_drained,
            "failed": lambda text: log.error("worker %d cannot start: %s", member.number, text),
        }

    def _named(self, name: str) -> ClusterProxy | None:
        return next((each for each in self._relays.clusters if each.cluster.name == name), None)

    def _ended(self, member: Member) -> None:
        self._shared.gone(member.number)

    def _left(self, client: Client) -> None:
        self._relays.worker.gate.leave()
        client.uncount()

    # --- loops -------------------------------------------------------------------------------------------------------

    @property
    def _loops(self) -> SharedLoops:
        loops = self._relays.worker.loops
        assert isinstance(loops, SharedLoops)
        return loops

    def _send_all(self, name: str, *values: Any) -> None:
        """Send workers a loop that the parent has found (never in a client's bytes, which it does not read)."""
        self._crew.broadcast(name, *values)

    def _dialled(self, own: Address, upstream: Address) -> None:
        self._loops.dialled_elsewhere(own, upstream)
        client = self._crew.connections.get((own, upstream))
        if client is not None:
            self._loop_found(upstream, "a connection that kproxy itself made", client.port[0])

    def _loop_found(self, upstream: Address, evidence: str, name: str = "") -> None:
        clusters = self._relays.clusters
        cluster = self._named(name) or (clusters[0] if clusters else None)
        if cluster is not None:
            cluster.loop_found(upstream, evidence)

    def _loop_elsewhere(self, member: Member, upstream: Address) -> None:
        self._loops.refused_elsewhere(upstream)
        self._crew.broadcast("loop", upstream, but=member)

    def _came_back(self, number: int) -> None:
        process = number % PROCESSES
        if process == 0:
            upstream = self._loops.asked(number)
            if upstream is not None:
                self._loop_found(upstream, "kproxy's own question")
        for asker in self._crew.members:
            if asker.number == process:
                asker.channel.send("question", number)

    # --- counters of all workers -------------------------------------------------------------------------------------

    def renders(self) -> Render:
        from kproxy.metrics.scrape.collector import registry_of
        from kproxy.metrics.scrape.exposition import render

        loop = asyncio.get_running_loop()

        def scrape(accept: str) -> tuple[bytes, str]:
            """Collect the counters on the event loop and render them here, on a thread."""
            asyncio.run_coroutine_threadsafe(self._collect(True), loop).result()
            return render(registry_of(self._shared.merged()), accept)

        return scrape

    async def counted(self, *, with_lags: bool = True) -> Metrics:
        await self._collect(with_lags)
        return self._shared.merged()

    async def _collect(self, with_lags: bool) -> None:
        """Have workers send their current counters."""
        await self._crew.ask_all("publish", with_lags, timeout_s=SCRAPE_S)
        self._spread_ends()
        self._shared.workers = len(self._crew.ready)
        self._shared.restarts = self._crew.restarts

    async def lags(self, cluster: str) -> Lags | None:
        """Return the lags of consumers and groups, of all workers together (`lag_questions.LagSource`)."""
        await self._collect(True)
        return self._shared.lags(cluster)

    def learned(self, cluster: str, lags: Lags, since_ns: int) -> None:
        self._shared.keep_learned(cluster, lags, since_ns)
        self._spread_ends()

    def _spread_ends(self) -> None:
        for cluster, ended in self._shared.take_ended():
            self._crew.broadcast("ended", cluster, *ended)

    async def operate(self, operation: str, *arguments: Any) -> list[Any]:
        here = self._relays.operate(operation, *arguments)
        replies = await self._crew.ask_all("operate", operation, arguments, timeout_s=ROWS_S)
        return [here, *(reply for _, reply in replies)]

    async def connection_rows(self, after: int, limit: int) -> AsyncIterator[list[dict[str, Any]]]:
        replies = await self._crew.ask_all("connections", after, limit, timeout_s=ROWS_S)
        rows = sorted((row for _, rows in replies for row in rows), key=lambda row: int(row["number"]))
        yield rows[:limit]

    # --- stopping ----------------------------------------------------------------------------------------------------

    async def drain(self, at_once: asyncio.Event) -> tuple[int, int]:
        self._crew.stop_replacing()
        self._crew.broadcast("drain")
        hurry = asyncio.create_task(self._hurry(at_once))
        try:
            await self._crew.close(self._server.config.drain_timeout_s + _ENDS_S)
        finally:
            hurry.cancel()
        return self._drained

    async def _hurry(self, at_once: asyncio.Event) -> None:
        await at_once.wait()
        self._crew.broadcast("at_once")

    def _count_drained(self, finished: int, closed: int) -> None:
        self._drained = self._drained[0] + finished, self._drained[1] + closed
