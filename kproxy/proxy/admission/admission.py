"""The admission of one cluster: decides which accepted clients enter, and runs the first steps of their connections.

Connects the limits (`admission/limits.py`), the welcome steps and their timeout. It closes a refused client at once,
with a log line that names the limit and the fix, and a count. If there are several processes, the accepting one calls
`admit`, and the serving one runs `welcome` and asks the accepting one to count an address from a PROXY header.

Bounded by the open connections. Refuses to know what the steps do, and brokers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import monotonic

from kproxy.errors import RefusedClient
from kproxy.proxy.admission.limits import ConnectionLimits
from kproxy.proxy.admission.proxy_protocol import ReadProxyHeader
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.relay.ends import Incoming

Welcome = Callable[[Incoming], Awaitable[None]]
# The counts to release at the end of a connection: (counted address or None,); None: nothing was counted.
Ticket = tuple[str | None] | None
LAST_WELCOME_S = 1.0  # s from a client's accept to the end of its login once kproxy drains: several round trips
# Counts a client's address; returns the limit that it exceeds.
CountElsewhere = Callable[[Incoming], Awaitable[str | None]]


class Admission:
    """reached: counts by limit, updated here; refuse(client, fault): reports a refused client.

    count_elsewhere: set if another process counts connections.
    """

    def __init__(
        self,
        cluster: Cluster,
        steps: Iterable[Welcome],
        reached: dict[str, int],
        refuse: Callable[[Incoming, RefusedClient], None],
    ) -> None:
        self._cluster = cluster
        self._reached = reached
        self._refuse = refuse
        self._limits = ConnectionLimits(cluster.limits) if cluster.limits.admits_some else None
        self.steps = tuple(self._counted(steps))
        self.count_elsewhere: CountElsewhere | None = None
        self._welcomes: dict[asyncio.Timeout, float] = {}  # running welcome steps -> their start
        self._hurries = False

    @property
    def counts_headers(self) -> bool:
        """Whether the address to count comes in a PROXY header."""
        limits = self._limits
        return limits is not None and limits.limits_addresses and self._cluster.accept_proxy_protocol

    def admit(self, client: Incoming) -> bool:
        """Count a client that was just accepted; False: it exceeds a limit, which is reported, and must be closed."""
        limits = self._limits
        if limits is None:
            return True
        limit = limits.enter(monotonic())
        if limit is None:
            client.ticket = (None,)
            if not self._cluster.accept_proxy_protocol:
                limit = self.count_address(client, client.peer.host)
        if limit is None:
            return True
        self.left(client.ticket)
        self._refuse(client, self._beyond(limits, limit))
        return False

    async def welcome(self, client: Incoming) -> None:
        """Run the first steps of a client's connection. Raises RefusedClient, OSError."""
        timeout_s = self._cluster.limits.handshake_timeout_s
        time = asyncio.timeout(min(timeout_s, LAST_WELCOME_S) if self._hurries else timeout_s)
        self._welcomes[time] = asyncio.get_running_loop().time()
        try:
            async with time:
                for step in self.steps:
                    await step(client)
        except TimeoutError:
            if not time.expired():
                raise
            if self._hurries:
                raise RefusedClient("drained", "kproxy drains, and its login was not done", said_nothing=True) from None
            self._reached["handshake_timeout_s"] += 1
            text = f"its handshake was not done within {timeout_s:g} s: it stopped sending, or handshake_timeout_s in "
            raise RefusedClient("handshake_timeout", text + "[cluster.limits] is too short") from None
        finally:
            del self._welcomes[time]

    def _counted(self, steps: Iterable[Welcome]) -> Iterator[Welcome]:
        """Yield the steps, with the count of the address before steps that are for admitted clients only."""
        for step in steps:
            yield step
            if isinstance(step, ReadProxyHeader) and self.counts_headers:
                yield self._count_header

    async def _count_header(self, client: Incoming) -> None:
        """Count the address from a client's PROXY header. Raises RefusedClient."""
        assert self._limits is not None
        if self.count_elsewhere is not None:
            limit = await self.count_elsewhere(client)
        else:
            limit = self.count_address(client, client.peer.host)
        if limit is not None:
            raise self._beyond(self._limits, limit)

    def hurry(self) -> None:
        """Limit the steps to LAST_WELCOME_S after the accept: the clients in them have no request in flight."""
        self._hurries = True
        now = asyncio.get_running_loop().time()
        for time, began in self._welcomes.items():
            if not time.expired():
                ends = max(now, began + LAST_WELCOME_S)
                time.reschedule(min(ends, time.when() or ends))

    def left(self, ticket: Ticket) -> None:
        """Uncount a client with that ticket, which has disconnected."""
        if self._limits is not None and ticket is not None:
            self._limits.leave()
            (host,) = ticket
            if host is not None:
                self._limits.leave_from(host)

    def reached(self, limit: str) -> None:
        """Count that a limit was reached, by its setting."""
        self._reached[limit] += 1

    def count_address(self, client: Incoming, host: str) -> str | None:
        """Count an admitted client's address; returns the limit that it exceeds."""
        limits = self._limits
        if limits is None or not limits.limits_addresses:
            return None
        limit = limits.enter_from(host, monotonic())
        if limit is None:
            client.ticket = (host,)
        return limit

    def _beyond(self, limits: ConnectionLimits, limit: str) -> RefusedClient:
        self.reached(limit)
        return RefusedClient("limit", limits.why(limit))
