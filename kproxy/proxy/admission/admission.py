"""The admission of one cluster: which accepted clients come in, and the steps that their connections begin with.

Joins the limits (`admission/limits.py`), the welcome steps and their time. A client that is kept out is closed at once,
with a line that names the limit and the fix, and a count. With several processes the one that accepts asks `admit`,
and the one that serves runs `welcome`; an address that a PROXY header tells is counted by the former, too, which the
latter asks.

Bounded by the connections that are open. Refuses to know what the steps do, and brokers.
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
# What an end of a connection gives back: the address that was counted, if one was; None: nothing was counted.
Ticket = tuple[str | None] | None
LAST_WELCOME_S = 1.0  # from its accept, which a client has for its login once kproxy drains: several round trips
# Counts the address of a client; the limit that it is beyond.
CountElsewhere = Callable[[Incoming], Awaitable[str | None]]


class Admission:
    """reached: counts by limit, which this adds to; refuse(client, fault): reports a client that is kept out.

    count_elsewhere: set where another process counts connections.
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
        self._welcomes: dict[asyncio.Timeout, float] = {}  # under way -> when they began
        self._hurries = False

    @property
    def counts_headers(self) -> bool:
        """Whether the address that counts is known only from a PROXY header."""
        limits = self._limits
        return limits is not None and limits.limits_addresses and self._cluster.accept_proxy_protocol

    def admit(self, client: Incoming) -> bool:
        """Count a client that was just accepted; False: it is beyond a limit, which is reported, and must be closed."""
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
        """Run the steps that a client's connection begins with. Raises RefusedClient, OSError."""
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
            text = f"its handshake was not done within {timeout_s:g} s: it stopped speaking, or handshake_timeout_s in "
            raise RefusedClient("handshake_timeout", text + "[cluster.limits] is too short") from None
        finally:
            del self._welcomes[time]

    def _counted(self, steps: Iterable[Welcome]) -> Iterator[Welcome]:
        """The steps, with the count of the address as soon as it is known: what follows is for those that may enter."""
        for step in steps:
            yield step
            if isinstance(step, ReadProxyHeader) and self.counts_headers:
                yield self._count_header

    async def _count_header(self, client: Incoming) -> None:
        """Count the address that a client's PROXY header has named. Raises RefusedClient."""
        assert self._limits is not None
        if self.count_elsewhere is not None:
            limit = await self.count_elsewhere(client)
        else:
            limit = self.count_address(client, client.peer.host)
        if limit is not None:
            raise self._beyond(self._limits, limit)

    def hurry(self) -> None:
        """End clients that are not in LAST_WELCOME_S after their accept: no request of theirs is in flight."""
        self._hurries = True
        now = asyncio.get_running_loop().time()
        for time, began in self._welcomes.items():
            if not time.expired():
                ends = max(now, began + LAST_WELCOME_S)
                time.reschedule(min(ends, time.when() or ends))

    def left(self, ticket: Ticket) -> None:
        """A client with that ticket has gone."""
        if self._limits is not None and ticket is not None:
            self._limits.leave()
            (host,) = ticket
            if host is not None:
                self._limits.leave_from(host)

    def reached(self, limit: str) -> None:
        """Count that a limit was reached, by its setting."""
        self._reached[limit] += 1

    def count_address(self, client: Incoming, host: str) -> str | None:
        """Count a client that was let in, for its address; the limit that it is beyond."""
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
