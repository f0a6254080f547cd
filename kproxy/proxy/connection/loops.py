"""Detects connections of one cluster that lead back to this kproxy, and closes them.

If a client's connection proves to be kproxy's own, kproxy closes it and all others to the same upstream. Bounded by the
open connections. Refuses to know how connections are accepted and dialled.
"""

import asyncio
import logging

from kproxy.errors import UpstreamError
from kproxy.metrics.counters.upstream import UpstreamCells
from kproxy.proxy.cluster import transparent
from kproxy.proxy.cluster.questions.question import probe
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.tasks import Tasks
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.loops import loop_through

# A loop that neither addresses nor kproxy's own requests reveal opens connections without end. At this number of
# connections to one upstream, and at each doubling, kproxy sends a request there: in a loop it comes back.
PROBED_AT = 64

log = logging.getLogger("kproxy.cluster")


class Loops:
    """looped: the latest upstream that led back to this kproxy. connector: connects kproxy's own requests."""

    def __init__(
        self,
        cluster: str,
        worker: Worker,
        metrics: UpstreamCells,
        connector: BrokerConnector,
        tasks: Tasks,
        *,
        redirected: bool,
    ) -> None:
        self.looped: Address | None = None
        self._cluster = cluster
        self._worker = worker
        self._metrics = metrics
        self._connector = connector
        self._tasks = tasks
        self._redirected = redirected
        self._open: dict[Address, int] = {}  # connections by upstream
        self._limiter = LogLimiter(log)

    def opened(self, relay: Relay) -> None:
        """Count a connection; probe its upstream if there are many."""
        upstream = _upstream(relay)
        count = self._open[upstream] = self._open.get(upstream, 0) + 1
        if count >= PROBED_AT and count & (count - 1) == 0:
            self._tasks.spawn(self._probe(upstream))

    def closed(self, relay: Relay) -> None:
        """Uncount an ended connection."""
        upstream = _upstream(relay)
        self._open[upstream] -= 1
        if not self._open[upstream]:
            del self._open[upstream]

    def admits(self, first_bytes: bytes) -> bool:
        """Whether a client's first bytes are not one of kproxy's own requests."""
        upstream = self._worker.loops.came_back(first_bytes)
        if upstream is None:
            return True
        # Not now: it closes connections, including the one that is being read.
        asyncio.get_running_loop().call_soon(self.found, upstream, "kproxy's own question")
        return False

    def found(self, upstream: Address, evidence: str) -> None:
        """Refuse an upstream from now on, and close all connections to it."""
        self.looped = upstream
        worker = self._worker
        worker.loops.refuse(upstream)
        self._metrics.loop_refused()
        relays = [relay for relay in worker.relays.values() if _upstream(relay) == upstream]
        self._limiter.log(
            logging.ERROR,
            ("loop", upstream),
            "loop cluster=%s: %s to %s arrived at this kproxy's own port; %d connections to it are closed. %s",
            self._cluster,
            evidence,
            upstream,
            len(relays),
            transparent.FIX if self._redirected else loop_through(upstream),
        )
        for relay in relays:
            relay.close("loop", reset=True)

    async def _probe(self, upstream: Address) -> None:
        try:
            await probe(upstream, self._connector)
        except UpstreamError as fault:
            text = "cluster=%s: %s has many connections, and a question to it failed: %s"
            log.debug(text, self._cluster, upstream, fault)


def _upstream(relay: Relay) -> Address:
    return Address(relay.info.broker_address, relay.info.broker_port)
