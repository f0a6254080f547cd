"""The transform of one connection's session: rewrites addresses and versions in the broker's answers.

Uses no sockets; `Advertise` maps brokers to ports.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kproxy.errors import Malformed
from kproxy.metrics.counting import ConnectionMetrics
from kproxy.protocol.apis import API_VERSIONS
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.filters.rewrite import add_offers, cap_versions, rewrite_addresses
from kproxy.proxy.filters.telemetry import TELEMETRY_APIS, AnswerTelemetry
from kproxy.wire.events import Exchange
from kproxy.wire.interest import ApiPlan

# (node id, the broker's own host and port) -> (the address that clients receive for it, whether that port is open)
Advertise = Callable[[int, str, int], tuple[Address, bool]]
# (api, version, the answer as it would leave) -> why the connection must be closed instead, or nothing
FindLeak = Callable[[str, int, bytes | memoryview], str]
NO_CAPS: Mapping[int, int] = MappingProxyType({})


class Rewriter:
    """Rewrites held answers; counts rewritten answers in the connection's metrics, once those exist."""

    __slots__ = ("_advertise", "_caps", "_find_leak", "_telemetry", "counting")

    def __init__(
        self,
        advertise: Advertise,
        find_leak: FindLeak,
        caps: Mapping[int, int] = NO_CAPS,
        telemetry: AnswerTelemetry | None = None,
    ) -> None:
        """caps: the highest version to offer, by API key, for APIs that the policy must be able to read.

        telemetry: the authorizer that answers clients' pushes of metrics; ApiVersions answers then offer its APIs.
        """
        self._advertise = advertise
        self._find_leak = find_leak
        self._caps = caps
        self._telemetry = telemetry
        self.counting: ConnectionMetrics | None = None

    def __call__(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        """Return the answer with kproxy's addresses, or with readable versions; None if unchanged. Raises Malformed."""
        plan = exchange.plan
        if plan.api_key == API_VERSIONS:
            capped = cap_versions(plan.api_version, frame, self._caps)
            if self._telemetry is None:
                return capped
            of_broker = frame if capped is None else memoryview(capped)
            offered, self._telemetry.broker_answers = add_offers(plan.api_version, of_broker, TELEMETRY_APIS)
            return capped if offered is None else offered
        if not plan.known:
            self._look(plan, frame)
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
        self._look(plan, frame if answer is None else answer)
        return answer

    def _look(self, plan: ApiPlan, answer: bytes | memoryview) -> None:
        """Search a final answer for addresses of brokers. Raises Malformed if it must not be sent."""
        leak = self._find_leak(plan.api, plan.api_version, answer)
        if leak:
            raise Malformed(leak)
