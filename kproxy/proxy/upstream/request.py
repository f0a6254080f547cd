"""One request of kproxy's own to a broker, and its answer.

Bounded: an answer of at most MAX_ANSWER bytes; the caller sets a timeout. Refuses to know what is asked, and why.
"""

import socket
import ssl
from struct import Struct

from kproxy.errors import UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.codec import Body
from kproxy.protocol.schema import schema
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.streams import receive_exactly, send_all

MAX_ANSWER = 64 * 1024 * 1024

_SIZE = Struct(">i")
_TLS_ALERT = 0x1503  # where a size should stand: a Java broker's answer to what is no TLS


class ClosedByBroker(UpstreamError):
    """The broker closed the connection on a request: it does not know it, or wants a login first."""


async def ask(sock: socket.socket, address: Address, api_key: int, version: int, body: Body, *, client_id: str) -> Body:
    """The answer's body. `address` is for messages.

    Raises ClosedByBroker, another UpstreamError for an answer that is none, ProtocolError for one that does not decode.
    """
    request = codec.framed_request(api_key, version, api_key, client_id, body)
    try:
        await send_all(sock, request)
        (size,) = _SIZE.unpack(await receive_exactly(sock, 4))
        if size >> 16 == _TLS_ALERT:
            text = f"{address} speaks TLS: it answers a request in plaintext with an alert; give [cluster.upstream_tls]"
            raise UpstreamError(text, "tls")
        if not 4 <= size <= MAX_ANSWER:
            raise UpstreamError(f"{address} does not speak the Kafka protocol here: an answer of {size} bytes")
        answer = await receive_exactly(sock, size)
    except ssl.SSLError as fault:  # in TLS 1.3 what a broker thinks of our certificate comes after the handshake
        said = (fault.reason or str(fault)).lower().replace("_", " ")
        text = f"{address} ended TLS on {schema().apis[api_key].name} ({said}): does it want a certificate of kproxy?"
        raise UpstreamError(text, "tls") from fault
    except (OSError, EOFError) as fault:
        text = f"{address} closed the connection on {schema().apis[api_key].name} ({fault})"
        raise ClosedByBroker(text) from fault
    header, body = codec.decode_response(answer, api_key, version)
    if header["correlationId"] != api_key:
        raise UpstreamError(f"{address} answers what was not asked")
    return body
