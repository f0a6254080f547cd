"""Opens connections to a cluster's brokers: a dial, then the steps at the start of every connection.

Connections for clients and kproxy's own requests take the same steps, so clients reach every broker that discovery
reaches. Bounded in time: the dial by the dialler, all steps together by the same timeout. Refuses to know what the
steps do.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from kproxy.errors import UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.ends import Admitted, Dialled, Outgoing
from kproxy.proxy.upstream.dial import Dialler
from kproxy.proxy.upstream.request import ClosedByBroker

Step = Callable[[Outgoing], Awaitable[None]]  # raises UpstreamError, OSError if the peer has disconnected


class BrokerConnector:
    """Opens connections to the brokers of one cluster. Close such a socket with `close`, or call `loops.closed`."""

    def __init__(self, dialler: Dialler, steps: Iterable[Step] = ()) -> None:
        self.dialler = dialler
        self._steps = tuple(steps)

    async def open(self, address: Address, *, asking: bool = False, client: Admitted | None = None) -> Dialled:
        """Dial a broker and run the steps. Raises UpstreamError, whose cause is a label of metrics.

        asking: the connection is for kproxy's own request (see `Dialler.dial`). client: the client to connect.
        """
        sock = await self.dialler.dial(address, asking=asking)
        own: Address | None = None
        with suppress(OSError):
            own = self.dialler.loops.own_end(sock)
        outgoing = None
        try:
            outgoing = Outgoing(sock, address, client=client)
            if self._steps:
                await self._run(outgoing)
            return Dialled(outgoing.sock, outgoing.upstream, outgoing.login)
        except BaseException as fault:
            if own is not None:
                self.dialler.loops.closed(own)
            (outgoing.sock if outgoing is not None else sock).close()
            if isinstance(fault, OSError):
                raise ClosedByBroker(f"{address} closed the connection ({fault})") from fault
            raise

    async def _run(self, outgoing: Outgoing) -> None:
        timeout_s = self.dialler.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for step in self._steps:
                    await step(outgoing)
        except TimeoutError:
            text = f"{outgoing.address} was reached, but its TLS or login did not finish within {timeout_s:g} s"
            raise UpstreamError(text, "timeout") from None

    def close(self, sock: socket.socket) -> None:
        """Close a socket that `open` returned."""
        self.dialler.close(sock)
