"""A connection of kproxy's own to a broker: one question after the other, each in a version that both sides speak.

BrokerConnector logs in where that is configured, not this. Each connection has a client id that nobody else can know,
so that a question that comes back proves a loop. Everything fails with UpstreamError, or ProtocolError for an
answer that does not decode; the socket is closed before either is raised. The caller bounds the time. Refuses to know
what is asked, and what the answer is for.
"""

import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from kproxy.errors import UpstreamError
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.protocol.codec import Body
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.loops import LoopGuard, loop_through
from kproxy.proxy.upstream.request import ClosedByBroker, ask, ask_long, ask_walked
from kproxy.wire.bodies import BodyWalker

log = logging.getLogger("kproxy.upstream")


@asynccontextmanager
async def conversation(address: Address, connector: BrokerConnector) -> AsyncIterator["Conversation"]:
    """One connection to ask on; it is closed at the end, whatever happens. Bounded in time by the caller."""
    sock, upstream, _ = await connector.open(address, asking=True)
    try:
        log.debug("asking, connected to %s from %s", address, Address(*sock.getsockname()[:2]))
        loops = connector.dialler.loops
        try:
            yield Conversation(sock, address, upstream, loops)
        except UpstreamError:
            if loops.is_refused(upstream):
                loops.refuse(upstream)  # still: the refusal of client connections may be what ended this one
                raise loop_through(address) from None
            raise
    except OSError as fault:  # it was reset before it could be named
        raise ClosedByBroker(f"{address} closed the connection ({fault})") from fault
    finally:
        connector.close(sock)


class Conversation:
    """One question after the other on one connection."""

    def __init__(self, sock: socket.socket, address: Address, upstream: Address, loops: LoopGuard) -> None:
        self._sock = sock
        self._address = address
        self._upstream = upstream
        self._loops = loops
        self._client_id = loops.asks(upstream)

    async def metadata_version(self) -> int:
        """The newest version of Metadata that both sides speak."""
        offers = await self.versions()
        if METADATA not in offers:
            raise UpstreamError(f"{self._address} offers no Metadata, it is a controller: name brokers instead")
        return newest(offers, METADATA)

    async def versions(self) -> dict[int, tuple[int, int]]:
        """API key -> (lowest, highest) version that the broker offers."""
        answer = await self.ask(API_VERSIONS, 0, {})
        if answer["errorCode"]:
            raise UpstreamError(f"{self._address} answers ApiVersions with {error_name(answer['errorCode'])}")
        return {
            int(offer["apiKey"]): (int(offer["minVersion"]), int(offer["maxVersion"])) for offer in answer["apiKeys"]
        }

    async def walk(self, version: int, body: Body, walker: BodyWalker, most_head: int = 0) -> bytes:
        """Ask Metadata; returns what `walker` marks as the head of the answer, or nothing of one that it has read."""
        head = await ask_walked(
            self._sock, self._address, METADATA, version, body, walker, client_id=self._client_id, most_head=most_head
        )
        if walker.fault is not None:
            raise walker.fault
        self._loops.answers(self._upstream)
        return head

    async def ask(self, api_key: int, version: int, body: Body) -> Body:
        answer = await ask(self._sock, self._address, api_key, version, body, client_id=self._client_id)
        self._loops.answers(self._upstream)
        return answer

    async def ask_long(self, api_key: int, version: int, body: Body) -> Body:
        """As `ask`, where the answer may be long: it is decoded in slices, between which the loop has its turn."""
        answer = await ask_long(self._sock, self._address, api_key, version, body, client_id=self._client_id)
        self._loops.answers(self._upstream)
        return answer


def newest(offers: Mapping[int, tuple[int, int]], api_key: int) -> int:
    """The newest version of an API that the broker offers and kproxy reads."""
    return min(offers[api_key][1], schema().apis[api_key].request.versions[-1])
