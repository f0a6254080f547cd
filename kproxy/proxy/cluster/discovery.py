"""Learns a cluster's brokers: asks at the start until one answers, then at an interval, and soon after losing one.

It never ends: after an exception in a round, it logs the exception, reports the cluster as not ready, and starts the
next round. Bounded: one request at a time, at most one round per MIN_INTERVAL_S once the cluster has answered. Refuses
to know ports and the use of an answer.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping

from kproxy.errors import UpstreamError
from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.tasks import waited

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 10.0
DEBOUNCE_S = 0.5  # a broker that goes down closes many connections at once: one round for all of them
MIN_INTERVAL_S = 2.0

Brokers = Mapping[int, Address]

log = logging.getLogger("kproxy.discovery")


class Discovery:
    """Asks one cluster for its brokers for as long as kproxy runs.

    ask(address): returns node id -> address of all brokers, None if the broker requires a login; raises UpstreamError.
    learn(address, brokers): applies an answer; returns why clients still cannot be served, or "". ports(): whether
    clients reach every broker, and the open ports by broker, for the log.
    """

    def __init__(
        self,
        cluster: str,
        addresses: BootstrapAddresses,
        ask: Callable[[Address], Awaitable[Brokers | None]],
        learn: Callable[[Address, Brokers | None], Awaitable[str]],
        interval_s: float,
        ports: Callable[[], tuple[bool, str]],
    ) -> None:
        self.not_ready = "the cluster has not been asked yet"
        self._cluster = cluster
        self._addresses = addresses
        self._ask = ask
        self._learn = learn
        self.interval_s = interval_s
        self._ports = ports
        self._lost = asyncio.Event()
        self._limiter = LogLimiter(log)

    def broker_lost(self) -> None:
        """Ask soon: a broker could not be dialled, or reset a connection."""
        self._lost.set()

    async def run(self) -> None:
        """Ask for ever."""
        loop = asyncio.get_running_loop()
        retry_s = FIRST_RETRY_S
        while True:
            self._lost.clear()
            asked_at = loop.time()
            self._report(await self._round())
            if self.not_ready:
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
                retry_s = min(2 * retry_s, LAST_RETRY_S)
                continue
            retry_s = FIRST_RETRY_S
            if await waited(self._lost, self.interval_s * random.uniform(0.9, 1.1)):
                await asyncio.sleep(max(DEBOUNCE_S, asked_at + MIN_INTERVAL_S - loop.time()))

    async def _round(self) -> str:
        """Ask the addresses in turn until one answers; returns why clients cannot be served, or ""."""
        reason = "no bootstrap address"
        for address in self._addresses.in_order():
            try:
                reason = await self._learn(address, await self._ask(address))
                if not reason:
                    return ""
            except UpstreamError as fault:
                self._addresses.failed(address)
                reason = str(fault)
            except Exception as fault:  # a defect here must not end discovery: /ready and new brokers depend on it
                self._addresses.failed(address)
                reason = f"a defect of kproxy, asking {address}: {fault!r}"
                text = "cluster=%s: %s; it is asked again. Please report these lines"
                self._limiter.log(logging.ERROR, type(fault), text, self._cluster, reason, exc_info=fault)
            text = "not ready cluster=%s: %s"
            if not self.not_ready:
                text = "cluster=%s: %s; the next bootstrap address is asked"
            self._limiter.log(logging.WARNING, address, text, self._cluster, reason)
        return reason

    def _report(self, reason: str) -> None:
        before, self.not_ready = self.not_ready, reason
        if before and not reason:
            is_reached, ports = self._ports()
            state = "ready" if is_reached else "not ready, although its brokers are known:"
            log.info("%s cluster=%s brokers=%s", state, self._cluster, ports)
        elif reason and not before:
            log.warning("no longer ready cluster=%s: %s", self._cluster, reason)
