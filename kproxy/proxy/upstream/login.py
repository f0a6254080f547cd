"""kproxy's login at a broker: a step of `BrokerConnector`, and the renewal on the same connection (KIP-368).

Bounds: MAX_ANSWER bytes of a broker's answer; BrokerConnector bounds the time. Refuses to know mechanisms, and when a
login is renewed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from struct import Struct

from kproxy.errors import UpstreamError
from kproxy.proxy.relay.ends import Outgoing
from kproxy.proxy.sasl.identities import Identities
from kproxy.proxy.sasl.login import CLIENT_ID, Dialogue, LoggedIn, Send, log_in
from kproxy.proxy.sasl.mechanisms import Mechanism
from kproxy.proxy.sockets.streams import receive_exactly, send_all
from kproxy.proxy.upstream.loops import LoopGuard

MAX_ANSWER = 64 * 1024  # ten thousand APIs in ApiVersions; the answers to tokens are shorter

Exchange = Callable[[bytes], Awaitable[bytes]]  # sends a frame with its size; returns the answer without

_SIZE = Struct(">i")

log = logging.getLogger("kproxy.upstream")


class Ended(Exception):
    """The connection is ending, so its login is not renewed. begun: a part of the new login was sent."""

    def __init__(self, *, begun: bool) -> None:
        self.begun = begun


class BrokerLogin:
    """Logs in on connections to the brokers of one cluster. `counts(mechanism, outcome)` is called for each login."""

    def __init__(self, identities: Identities, loops: LoopGuard, counts: Callable[[str, str], None]) -> None:
        self._identities = identities
        self._loops = loops
        self._counts = counts

    async def __call__(self, outgoing: Outgoing) -> None:
        """Log in for the client, or for kproxy itself; a step of the connector. Raises UpstreamError."""
        client = outgoing.client
        principal = client.principal if client is not None else None
        # kproxy's own requests begin with this login: if it comes back, its client id proves a loop.
        client_id = CLIENT_ID if client is not None else self._loops.asks(outgoing.upstream)

        async def exchange(data: bytes) -> bytes:
            await send_all(outgoing.sock, data)
            (size,) = _SIZE.unpack(await receive_exactly(outgoing.sock, 4))
            if not 0 <= size <= MAX_ANSWER:
                raise UpstreamError(f"an answer of {size} bytes to a login: no broker sends that", "login_protocol")
            return await receive_exactly(outgoing.sock, size)

        try:
            mechanism = await self.prepare(principal)
            done = await self._run(mechanism, client_id, exchange, None)
        except UpstreamError as fault:
            raise UpstreamError(f"{outgoing.address}: {fault}", fault.cause) from None
        log.debug("logged in at %s for %s", outgoing.address, principal or "kproxy itself")
        if client is not None and done.lifetime_ms:
            outgoing.login = done

    async def prepare(self, principal: str | None) -> Mechanism:
        """Return the mechanism with credentials for a client's principal, or kproxy's own. Raises UpstreamError."""
        name = ""
        try:
            identity = self._identities.of(principal)
            name = identity.mechanism
            return await identity.login()
        except UpstreamError as fault:
            self._counts(name, fault.cause)
            raise

    async def again(self, mechanism: Mechanism, exchange: Exchange, before: LoggedIn) -> LoggedIn:
        """Log in again on a connection in use. Raises UpstreamError, and Ended, which `exchange` raises."""
        return await self._run(mechanism, CLIENT_ID, exchange, before)

    async def _run(self, mechanism: Mechanism, client_id: str, exchange: Exchange, before: LoggedIn | None) -> LoggedIn:
        name = mechanism.name
        try:
            done = await converse(log_in(mechanism, client_id, before and before.versions), exchange)
        except UpstreamError as fault:
            self._counts(name, fault.cause)
            raise
        except (OSError, EOFError) as fault:
            self._counts(name, "login_failed")
            text = f"the broker closed the connection during a login by {name}: wrong credentials, or no SASL listener"
            raise UpstreamError(f"{text} ({fault})", "login_failed") from None
        except Ended as end:
            if end.begun:
                self._counts(name, "disconnected")
            raise
        except asyncio.CancelledError:  # the owner cancels a renewal when its connection has closed
            self._counts(name, "timeout" if before is None else "disconnected")
            raise
        self._counts(name, "renewed" if before else "success")
        return done


async def converse(dialogue: Dialogue, exchange: Exchange) -> LoggedIn:
    """Run a dialogue to its end; steps that compute for milliseconds run on a thread."""

    def on(answer: bytes | None) -> Send | LoggedIn:
        try:
            return next(dialogue) if answer is None else dialogue.send(answer)
        except StopIteration as end:
            done: LoggedIn = end.value
            return done

    step = on(None)
    while isinstance(step, Send):
        answer = await exchange(step.data)
        step = await asyncio.to_thread(on, answer) if step.computes else on(answer)
    return step
