"""Rewrites brokers' addresses in answers to kproxy's, and checks that none of the brokers' own is left.

Uses no sockets; `Advertise` maps brokers to ports, `FindLeak` (`leaks.py`) knows the brokers' own addresses.
"""

from collections.abc import Callable

from kproxy.errors import Malformed
from kproxy.metrics.counting import ConnectionMetrics
from kproxy.protocol.apis import API_VERSIONS
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.filters.rewrite import rewrite_addresses
from kproxy.wire.events import Exchange

# (node id, the broker's own host and port) -> (the address that clients receive for it, whether that port is open)
Advertise = Callable[[int, str, int], tuple[Address, bool]]
# (api, version, the answer as it would leave) -> why the connection must be closed instead, or nothing
FindLeak = Callable[[str, int, bytes | memoryview], str]


class Addresses(Filter):
    """Rewrites addresses; counts them in the connection's metrics, once those exist."""

    __slots__ = ("_advertise", "counting")

    def __init__(self, advertise: Advertise) -> None:
        self._advertise = advertise
        self.counting: ConnectionMetrics | None = None

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        plan = exchange.plan
        if plan.api_key == API_VERSIONS or not plan.known:
            return None
        rewritten = unbound = 0

        def advertise(node_id: int, host: str, port: int) -> Address:
            nonlocal rewritten, unbound
            address, is_bound = self._advertise(node_id, host, port)
            rewritten += 1
            unbound += not is_bound
            return address

        answer = rewrite_addresses(plan.api_key, plan.api_version, frame, advertise)
        if self.counting is not None:
            if rewritten:
                self.counting.rewritten(plan.api, rewritten)
            if unbound:
                self.counting.unbound(unbound)
        return answer


class LeakCheck(Filter):
    """Searches final answers for addresses of brokers. Raises Malformed for one that must not leave."""

    __slots__ = ("_find_leak",)

    def __init__(self, find_leak: FindLeak) -> None:
        self._find_leak = find_leak

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        plan = exchange.plan
        if plan.api_key != API_VERSIONS:
            leak = self._find_leak(plan.api, plan.api_version, frame)
            if leak:
                raise Malformed(leak)
        return None
