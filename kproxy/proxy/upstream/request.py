"""One request of kproxy's own to a broker, and its answer.

A long answer is read as it arrives, a slice at a time: the event loop continues between two of them. Bounded:
MAX_ANSWER bytes of an answer that is decoded at once, MAX_LONG_ANSWER in slices, MAX_WALKED of one that is read as it
arrives; the caller sets a timeout. Refuses to know the content and purpose of a request.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct

from kproxy.errors import UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.codec import Body
from kproxy.protocol.schema import schema
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.streams import receive, receive_exactly, send_all
from kproxy.proxy.upstream.tls import of_alert
from kproxy.wire.bodies import BodyWalker

MAX_ANSWER = 64 * 1024  # ten thousand APIs in ApiVersions
MAX_LONG_ANSWER = 4 * 1024 * 1024
MAX_WALKED = 64 * 1024 * 1024
SLICE = 4 * 1024  # 0.2 to 0.4 ms of a walk

_INT32 = Struct(">i")
_HTTP = int.from_bytes(b"HTTP")
_TEXT = re.compile(rb"[ -~]{4}")  # servers of other protocols greet, or complain, in ASCII
_TLS_ALERT = 0x1503  # in place of a size: a Java broker's answer to bytes that are not TLS


class ClosedByBroker(UpstreamError):
    """The broker closed the connection on a request: it does not support it, or requires a login first."""


async def ask(sock: socket.socket, address: Address, api_key: int, version: int, body: Body, *, client_id: str) -> Body:
    """Send a request and return the body of its short answer. `address` is for messages.

    Raises ClosedByBroker, another UpstreamError for an invalid answer, ProtocolError for one that does not decode.
    """
    with _named(address, api_key):
        left = await _answer(sock, address, api_key, version, body, client_id, MAX_ANSWER)
        answer = await receive_exactly(sock, left)
    return codec.decode_response(_INT32.pack(api_key) + answer, api_key, version)[1]


async def ask_long(
    sock: socket.socket, address: Address, api_key: int, version: int, body: Body, *, client_id: str
) -> Body:
    """Like `ask`, for an answer that may be long, which is decoded in slices."""
    with _named(address, api_key):
        left = await _answer(sock, address, api_key, version, body, client_id, MAX_LONG_ANSWER)
        answer = await receive_exactly(sock, left)
    slices = codec.decoded_in_slices(_INT32.pack(api_key) + answer, api_key, version)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            decoded: Body = end.value[1]
            return decoded
        await asyncio.sleep(0)


async def ask_walked(
    sock: socket.socket,
    address: Address,
    api_key: int,
    version: int,
    body: Body,
    walker: BodyWalker,
    *,
    client_id: str,
    most_head: int = 0,
) -> bytes:
    """Let `walker` read an answer. Raises as `ask` does; a fault in decoding is in `walker.fault`.

    most_head: limits the head in bytes if the walker marks one: the head is returned, and the rest of the answer is not
    read.
    """
    head = bytearray()
    with _named(address, api_key):
        left = await _answer(sock, address, api_key, version, body, client_id, MAX_WALKED)
        while left and walker.fault is None:
            part = await receive(sock, min(left, SLICE))
            if not part:
                raise EOFError("it sent no more")
            left -= len(part)
            walker.feed(part, 0, len(part))
            if most_head:
                head += part[: walker.head_end]
                if walker.head_end is not None:
                    return bytes(head)
                if len(head) > most_head:
                    api = schema().apis[api_key].name
                    raise UpstreamError(f"{address} lists more in {api} than fits into {most_head} bytes")
            await asyncio.sleep(0)
    walker.finish()
    return bytes(head)


async def _answer(
    sock: socket.socket, address: Address, api_key: int, version: int, body: Body, client_id: str, most: int
) -> int:
    """Send a request; returns how many bytes follow the answer's correlation id."""
    await send_all(sock, codec.framed_request(api_key, version, api_key, client_id, body))
    size = int.from_bytes(await receive_exactly(sock, 4), signed=True)
    if size >> 16 == _TLS_ALERT:
        text = f"{address} speaks TLS: it answers a request in plaintext with an alert; give [cluster.upstream_tls]"
        raise UpstreamError(text, "tls")
    if not 4 <= size <= most:
        start = _INT32.pack(size)
        says = f", or a text that begins with {start.decode()!r}" if _TEXT.fullmatch(start) else ""
        how = "it answers in HTTP" if size == _HTTP else f"an answer of {size} bytes{says}"
        raise UpstreamError(f"{address} does not speak the Kafka protocol here: {how}")
    if await receive_exactly(sock, 4) != _INT32.pack(api_key):
        raise UpstreamError(f"{address} answers what was not asked")
    return size - 4


@contextmanager
def _named(address: Address, api_key: int) -> Iterator[None]:
    """Convert faults of the socket to faults of the broker on that API."""
    try:
        yield
    except ssl.SSLError as fault:  # a broker with TLS 1.3 rejects our certificate only after the handshake
        reason = fault.reason or str(fault)
        plain = reason.lower().replace("_", " ")
        text = f"{address} ended TLS on {schema().apis[api_key].name} ({plain}): {of_alert(reason.upper())}"
        raise UpstreamError(text, "tls") from fault
    except (OSError, EOFError) as fault:
        how = getattr(fault, "strerror", None) or fault
        text = f"{address} closed the connection on {schema().apis[api_key].name} ({how})"
        raise ClosedByBroker(text) from fault
