"""The questions that kproxy itself asks brokers: which brokers are there, in ApiVersions and Metadata.

To open a port for each broker, kproxy must know them before a client comes. It asks in the versions that both sides
speak, and does not log in. Each question has a client id that nobody else can know, so that one that comes back proves
a loop. Everything fails with UpstreamError and nothing else; sockets are closed before it is raised. Refuses to know
when to ask, and what the answer is for.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from kproxy.errors import ProtocolError, UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.codec import Body
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.door import Door
from kproxy.proxy.upstream.loops import LoopGuard, loop_through
from kproxy.proxy.upstream.request import ClosedByBroker, ask, ask_walked
from kproxy.wire.bodies import SUMS, BodyWalker, empty_rest
from kproxy.wire.broker_side import MAX_HEAD

API_VERSIONS = 18
METADATA = 3
_FIRST_METADATA_BY_ID = 12

log = logging.getLogger("kproxy.upstream")


async def ask_brokers(address: Address, door: Door) -> dict[int, Address] | None:
    """Node id -> address of all brokers, as the one at `address` names them; None: it wants a login first."""
    timeout_s = door.dialler.timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            version = -1
            try:
                async with _conversation(address, door) as conversation:
                    version = await conversation.metadata_version()
                    return await conversation.brokers(version)
            except ClosedByBroker:
                if version > 0:
                    return None
                if version == 0:
                    raise
            async with _conversation(address, door) as conversation:
                return await conversation.brokers(0)  # ApiVersions came with 0.10
    except TimeoutError:
        raise UpstreamError(f"{address} did not answer within {timeout_s:g} s", "timeout") from None
    except ProtocolError as fault:
        raise UpstreamError(f"{address} does not answer as a Kafka broker does: {fault}") from fault


async def ask_versions(address: Address, door: Door) -> dict[int, tuple[int, int]]:
    """API key -> (lowest, highest) version that the broker at `address` offers. Raises UpstreamError."""
    timeout_s = door.dialler.timeout_s
    try:
        async with asyncio.timeout(timeout_s), _conversation(address, door) as conversation:
            return await conversation.versions()
    except TimeoutError:
        raise UpstreamError(f"{address} did not answer ApiVersions within {timeout_s:g} s", "timeout") from None
    except ProtocolError as fault:
        raise UpstreamError(f"{address} does not answer as a Kafka broker does: {fault}") from fault


async def ask_topic_names(address: Address, door: Door, topic_ids: Sequence[UUID]) -> Mapping[UUID, str]:
    """The names of the topics with these ids, of those that the broker at `address` has and tells."""
    try:
        async with asyncio.timeout(door.dialler.timeout_s), _conversation(address, door) as conversation:
            return await conversation.topic_names(topic_ids)
    except (TimeoutError, ProtocolError) as fault:
        raise UpstreamError(f"{address} does not answer Metadata: {fault!r}") from fault


async def probe(address: Address, door: Door) -> None:
    """Ask for nothing but ApiVersions: a question that comes back to one of our listeners proves a loop."""
    try:
        async with asyncio.timeout(door.dialler.timeout_s), _conversation(address, door) as conversation:
            await conversation.metadata_version()
    except (TimeoutError, ProtocolError) as fault:
        raise UpstreamError(f"{address} does not answer ApiVersions: {fault!r}") from fault


@asynccontextmanager
async def _conversation(address: Address, door: Door) -> AsyncIterator["_Conversation"]:
    """One connection to ask on; it is closed at the end, whatever happens."""
    sock, upstream = await door.open(address, asking=True)
    try:
        log.debug("asking for the brokers, connected to %s from %s", address, Address(*sock.getsockname()[:2]))
        loops = door.dialler.loops
        try:
            yield _Conversation(sock, address, upstream, loops)
        except UpstreamError:
            if loops.is_refused(upstream):
                loops.refuse(upstream)  # still: the refusal of client connections may be what ended this one
                raise loop_through(address) from None
            raise
    except OSError as fault:  # it was reset before it could be named
        raise ClosedByBroker(f"{address} closed the connection ({fault})") from fault
    finally:
        door.close(sock)


class _Conversation:
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
        return min(offers[METADATA][1], schema().apis[METADATA].request.versions[-1])

    async def versions(self) -> dict[int, tuple[int, int]]:
        """API key -> (lowest, highest) version that the broker offers."""
        answer = await self._ask(API_VERSIONS, 0, {})
        if answer["errorCode"]:
            raise UpstreamError(f"{self._address} answers ApiVersions with {error_name(answer['errorCode'])}")
        return {
            int(offer["apiKey"]): (int(offer["minVersion"]), int(offer["maxVersion"])) for offer in answer["apiKeys"]
        }

    async def brokers(self, version: int) -> dict[int, Address]:
        """What Metadata names, in that version."""
        walker = BodyWalker(METADATA, version, marks_head=True)
        # Version 0 knows no question for brokers alone: it gets all topics, of which nothing is read.
        head = await self._walk(version, {"topics": []} if version else {}, walker, MAX_HEAD)
        whole = bytes(4) + head + empty_rest(METADATA, version)
        _, answer = codec.decode_response(whole, METADATA, version)
        return {broker["nodeId"]: Address(broker["host"], broker["port"]) for broker in answer["brokers"]}

    async def topic_names(self, topic_ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """What Metadata calls the topics with these ids; brokers that cannot be asked by id name none."""
        version = await self.metadata_version()
        if version < _FIRST_METADATA_BY_ID:
            return {}
        topics = [{"topicId": topic_id, "name": None} for topic_id in topic_ids]
        walker = BodyWalker(METADATA, version, detail=SUMS)
        await self._walk(version, {"topics": topics, "allowAutoTopicCreation": False}, walker)
        return walker.names

    async def _walk(self, version: int, body: Body, walker: BodyWalker, most_head: int = 0) -> bytes:
        """What `walker` marks as the head of a Metadata answer, or nothing of one that it has read."""
        head = await ask_walked(
            self._sock, self._address, METADATA, version, body, walker, client_id=self._client_id, most_head=most_head
        )
        if walker.fault is not None:
            raise walker.fault
        self._loops.answers(self._upstream)
        return head

    async def _ask(self, api_key: int, version: int, body: Body) -> Body:
        answer = await ask(self._sock, self._address, api_key, version, body, client_id=self._client_id)
        self._loops.answers(self._upstream)
        return answer
