"""A connection of kproxy's own to a broker: one request at a time, each in a version that both sides support.

BrokerConnector logs in if that is configured, not this module. Each connection has a client id that no other process
can know, so that its return proves a loop. Every fault is an UpstreamError, or a ProtocolError for an answer that does
not decode; this module closes the socket before it raises either. The caller bounds the time. Refuses to know the
content of requests and the use of answers.
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
    """Open a connection for requests and close it at the end in any case. Bounded in time by the caller."""
    sock, upstream, _ = await connector.open(address, asking=True)
    try:
        log.debug("asking, connected to %s from %s", address, Address(*sock.getsockname()[:2]))
        loops = connector.dialler.loops
        try:
            yield Conversation(sock, address, upstream, loops)
        except UpstreamError:
            if loops.is_refused(upstream):
                loops.refuse(upstream)  # renew it: the refusal of client connections may have ended this one
                raise loop_through(address) from None
            raise
    except OSError as fault:  # reset before its address could be read
        raise ClosedByBroker(f"{address} closed the connection ({fault})") from fault
    finally:
        connector.close(sock)


class Conversation:
    """Requests, one at a time, on one connection."""

    def __init__(self, sock: socket.socket, address: Address, upstream: Address, loops: LoopGuard) -> None:
        self._sock = sock
        self._address = address
        self._upstream = upstream
        self._loops = loops
        self._client_id = loops.asks(upstream)

    async def metadata_version(self) -> int:
        """Return the newest version of Metadata that both sides support."""
        offers = await self.versions()
        if METADATA not in offers:
            raise UpstreamError(f"{self._address} offers no Metadata, it is a controller: name brokers instead")
        return newest(offers, METADATA)

    async def versions(self) -> dict[int, tuple[int, int]]:
        """Return API key -> (lowest, highest) version that the broker supports."""
        answer = await self.ask(API_VERSIONS, 0, {})
        if answer["errorCode"]:
            raise UpstreamError(f"{self._address} answers ApiVersions with {error_name(answer['errorCode'])}")
        return {
            int(offer["apiKey"]): (int(offer["minVersion"]), int(offer["maxVersion"])) for offer in answer["apiKeys"]
        }

    async def walk(self, version: int, body: Body, walker: BodyWalker, most_head: int = 0) -> bytes:
        """Send Metadata and let `walker` read the answer; returns the head that it marks, or b""."""
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
        """Like `ask`, for an answer that may be long: it is decoded in slices, and the event loop runs in between."""
        answer = await ask_long(self._sock, self._address, api_key, version, body, client_id=self._client_id)
        self._loops.answers(self._upstream)
        return answer


def newest(offers: Mapping[int, tuple[int, int]], api_key: int) -> int:
    """Return the newest version of an API that both the broker and kproxy support."""
    return min(offers[api_key][1], schema().apis[api_key].request.versions[-1])
