"""Requests that kproxy itself sends to brokers: ApiVersions, and Metadata for the list of brokers.

kproxy must know the brokers before a client connects, since it opens a port for each of them. Bounded in time by the
dialler's timeout and _LONGER_S beyond it, so that a dial fails by its own timeout, with its cause in the exception. The
only exception raised is UpstreamError. Refuses to know when to ask, and the use of an answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from uuid import UUID

from kproxy.errors import ProtocolError, UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.apis import METADATA
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.conversation import Conversation, conversation
from kproxy.proxy.upstream.dial_faults import TIMEOUT
from kproxy.proxy.upstream.request import ClosedByBroker
from kproxy.wire.bodies import SUMS, BodyWalker, empty_rest
from kproxy.wire.broker_side import MAX_HEAD

_FIRST_METADATA_BY_ID = 12
_LONGER_S = 0.2


def _bounded(connector: BrokerConnector) -> asyncio.Timeout:
    return asyncio.timeout(connector.dialler.timeout_s + _LONGER_S)


async def ask_brokers(address: Address, connector: BrokerConnector) -> dict[int, Address] | None:
    """Return node id -> address of all brokers, from the one at `address`; None if it requires a login."""
    timeout_s = connector.dialler.timeout_s
    try:
        async with _bounded(connector):
            version = -1
            try:
                async with conversation(address, connector) as talk:
                    version = await talk.metadata_version()
                    return await _brokers(talk, version)
            except ClosedByBroker:
                if version > 0:
                    return None
                if version == 0:
                    raise
            async with conversation(address, connector) as talk:
                return await _brokers(talk, 0)  # a broker older than 0.10, which added ApiVersions
    except TimeoutError:
        raise UpstreamError(f"{address} did not answer within {timeout_s:g} s", *TIMEOUT) from None
    except ProtocolError as fault:
        raise UpstreamError(f"{address} does not answer as a Kafka broker does: {fault}") from fault


async def ask_versions(address: Address, connector: BrokerConnector) -> dict[int, tuple[int, int]]:
    """Return API key -> (lowest, highest) version supported by the broker at `address`. Raises UpstreamError."""
    timeout_s = connector.dialler.timeout_s
    try:
        async with _bounded(connector), conversation(address, connector) as talk:
            return await talk.versions()
    except TimeoutError:
        raise UpstreamError(f"{address} did not answer ApiVersions within {timeout_s:g} s", *TIMEOUT) from None
    except ProtocolError as fault:
        raise UpstreamError(f"{address} does not answer as a Kafka broker does: {fault}") from fault


async def ask_topic_names(
    address: Address, connector: BrokerConnector, topic_ids: Sequence[UUID]
) -> Mapping[UUID, str]:
    """Return the names of the topics with these ids that the broker at `address` has and may disclose."""
    try:
        async with _bounded(connector), conversation(address, connector) as talk:
            return await _topic_names(talk, topic_ids)
    except (TimeoutError, ProtocolError) as fault:
        raise UpstreamError(f"{address} does not answer Metadata: {fault!r}") from fault


async def probe(address: Address, connector: BrokerConnector) -> None:
    """Send only ApiVersions: a request that arrives at one of kproxy's own listeners proves a loop."""
    try:
        async with _bounded(connector), conversation(address, connector) as talk:
            await talk.metadata_version()
    except (TimeoutError, ProtocolError) as fault:
        raise UpstreamError(f"{address} does not answer ApiVersions: {fault!r}") from fault


async def _brokers(talk: Conversation, version: int) -> dict[int, Address]:
    """Return the brokers that Metadata of that version names."""
    walker = BodyWalker(METADATA, version, marks_head=True)
    # Version 0 cannot ask for brokers only: it returns all topics, which are not read.
    head = await talk.walk(version, {"topics": []} if version else {}, walker, MAX_HEAD)
    whole = bytes(4) + head + empty_rest(METADATA, version)
    _, answer = codec.decode_response(whole, METADATA, version)
    return {broker["nodeId"]: Address(broker["host"], broker["port"]) for broker in answer["brokers"]}


async def _topic_names(talk: Conversation, topic_ids: Sequence[UUID]) -> Mapping[UUID, str]:
    """Return the names of the topics with these ids; none from brokers that cannot be asked by id."""
    version = await talk.metadata_version()
    if version < _FIRST_METADATA_BY_ID:
        return {}
    topics = [{"topicId": topic_id, "name": None} for topic_id in topic_ids]
    walker = BodyWalker(METADATA, version, detail=SUMS)
    await talk.walk(version, {"topics": topics, "allowAutoTopicCreation": False}, walker)
    return walker.names
