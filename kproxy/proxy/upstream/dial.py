"""Connections to brokers: dialling without blocking the loop, and the few questions that kproxy itself asks.

At start kproxy must know the brokers to bind their ports, so it asks the bootstrap for ApiVersions and Metadata, in the
versions that both speak. It does not log in. Everything fails with UpstreamError and nothing else. Refuses to know
listeners and routes, save that kproxy must not dial itself.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from struct import Struct
from typing import Any

from kproxy import __version__
from kproxy.errors import ProtocolError, UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.codec import Body
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from kproxy.proxy.config import Address
from kproxy.proxy.relay.sockets import prepare
from kproxy.proxy.upstream.resolver import Names

API_VERSIONS = 18
METADATA = 3

_SIZE = Struct(">i")
_MAX_ANSWER = 64 * 1024 * 1024

log = logging.getLogger("kproxy.upstream")

IsOurs = Callable[[str, int], bool]  # (address, port): a listener of this kproxy


async def dial(address: Address, names: Names, is_ours: IsOurs, timeout_s: float) -> socket.socket:
    """A connected socket, prepared; every address of the name is tried in turn, with its share of the time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    fault: Exception | None = None
    try:
        async with asyncio.timeout_at(end):
            addresses = await names.addresses(address)
            for left, (family, sockaddr) in zip(range(len(addresses), 0, -1), addresses, strict=True):
                if is_ours(*sockaddr[:2]):
                    raise UpstreamError(
                        f"{address} is kproxy itself: the broker's advertised.listeners, or a name, leads back here; "
                        "it must lead to the broker"
                    )
                sock = socket.socket(family, socket.SOCK_STREAM)
                try:
                    prepare(sock)
                    async with asyncio.timeout((end - loop.time()) / left):
                        await _connect(loop, sock, sockaddr)
                    return sock
                except OSError as refused:  # a TimeoutError is one
                    sock.close()
                    fault = refused
                except BaseException:
                    sock.close()
                    raise
    except OSError as unknown:
        fault = unknown
    if isinstance(fault, TimeoutError) and fault.errno is None:
        raise UpstreamError(f"{address} did not answer within {timeout_s:g} s") from None
    reason = getattr(fault, "strerror", None) or str(fault)
    raise UpstreamError(f"{address} cannot be reached: {reason}") from fault


async def _connect(loop: asyncio.AbstractEventLoop, sock: socket.socket, sockaddr: tuple[Any, ...]) -> None:
    """uvloop's own sends every address to the resolver's few threads, where it would wait behind names that hang."""
    try:
        sock.connect(sockaddr)
    except (BlockingIOError, InterruptedError):
        connected = asyncio.Event()
        loop.add_writer(sock, connected.set)
        try:
            await connected.wait()
        finally:
            loop.remove_writer(sock)
        errno = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if errno:
            raise OSError(errno, os.strerror(errno)) from None


class _Closed(UpstreamError):
    """The broker closed the connection on a question: it does not know it, or wants a login first."""


async def ask_brokers(address: Address, names: Names, is_ours: IsOurs, timeout_s: float) -> dict[int, Address] | None:
    """Node id -> address of all brokers, as the one at `address` tells; None: it is there, but wants a login first."""
    try:
        async with asyncio.timeout(timeout_s):
            sock = await _dial_to_ask(address, names, is_ours, timeout_s)
            try:
                version = await _metadata_version(sock, address)
            except _Closed:
                version = 0  # ApiVersions came with 0.10
                sock.close()
                sock = await _dial_to_ask(address, names, is_ours, timeout_s)
            try:
                topics: Body = {"topics": []} if version else {}
                answer = await _ask(sock, address, METADATA, version, topics)
            except _Closed:
                if version:
                    return None
                raise
            finally:
                sock.close()
            return {broker["nodeId"]: Address(broker["host"], broker["port"]) for broker in answer["brokers"]}
    except TimeoutError:
        raise UpstreamError(f"{address} did not answer within {timeout_s:g} s") from None
    except ProtocolError as fault:
        raise UpstreamError(f"{address} does not answer as a Kafka broker does: {fault}") from fault


async def _dial_to_ask(address: Address, names: Names, is_ours: IsOurs, timeout_s: float) -> socket.socket:
    sock = await dial(address, names, is_ours, timeout_s)
    log.debug("asking for the brokers, connected to %s from %s", address, Address(*sock.getsockname()[:2]))
    return sock


async def _metadata_version(sock: socket.socket, address: Address) -> int:
    """The newest version of Metadata that both sides speak."""
    answer = await _ask(sock, address, API_VERSIONS, 0, {})
    if answer["errorCode"]:
        raise UpstreamError(f"{address} answers ApiVersions with {error_name(answer['errorCode'])}")
    for offer in answer["apiKeys"]:
        if offer["apiKey"] == METADATA:
            return min(int(offer["maxVersion"]), schema().apis[METADATA].request.versions[-1])
    raise UpstreamError(f"{address} offers no Metadata, it is a controller: name brokers instead")


async def _ask(sock: socket.socket, address: Address, api_key: int, version: int, body: Body) -> Body:
    """One request and its answer's body."""
    loop = asyncio.get_running_loop()
    header = {
        "requestApiKey": api_key,
        "requestApiVersion": version,
        "correlationId": api_key,
        "clientId": f"kproxy-{__version__}",
    }
    request = codec.encode_request(header, body)
    try:
        await loop.sock_sendall(sock, _SIZE.pack(len(request)) + request)
        (size,) = _SIZE.unpack(await _receive(sock, 4))
        if not 4 <= size <= _MAX_ANSWER:
            raise UpstreamError(f"{address} does not speak the Kafka protocol here: an answer of {size} bytes")
        answer = await _receive(sock, size)
    except (OSError, EOFError) as fault:
        raise _Closed(f"{address} closed the connection on {schema().apis[api_key].name} ({fault})") from fault
    header, body = codec.decode_response(answer, api_key, version)
    if header["correlationId"] != api_key:
        raise UpstreamError(f"{address} answers what was not asked")
    return body


async def _receive(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        part = await loop.sock_recv(sock, min(count - len(data), 1 << 16))
        if not part:
            raise EOFError("it sent no more")
        data += part
    return bytes(data)
