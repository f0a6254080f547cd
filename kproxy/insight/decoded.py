"""The input of insight: a decoded request and response, with their client, broker and times.

The caller decides which exchanges to decode, and feeds them in the order of responses. Refuses to know sockets and
captures.
"""

from dataclasses import dataclass
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.primitives import Buffer

Body = dict[str, Any]


@dataclass(slots=True, eq=False)
class DecodedExchange:
    """One exchange. `protocol.codec` defines the shape of bodies; times are nanoseconds since the Unix epoch."""

    api_key: int
    api_version: int
    request: Body
    response: Body | None  # None: it was never answered
    request_end: int
    response_start: int
    cluster: str = "default"
    client_id: str | None = None
    client_address: str | None = None
    broker_id: int | None = None
    connection: int | None = None
    number: int | None = None
    source: str | None = None  # the capture, or live:<listener>
    broker: tuple[str, int] | None = None  # the address that its connection goes to
    principal: str | None = None  # the client's authenticated principal, if known


def decode_exchange(
    api_key: int,
    api_version: int,
    request_frame: Buffer,
    response_frame: Buffer | None,
    request_end: int,
    response_start: int,
    **whose: Any,
) -> DecodedExchange | None:
    """Decode an exchange. Frames include their 4-byte sizes. Return None if request or response cannot be decoded.

    whose: the other fields of `DecodedExchange`, by name; the client id defaults to the one in the request's header.
    """
    try:
        header, request = codec.decode_request(memoryview(request_frame)[4:])
        response = None
        if response_frame is not None:
            _, response = codec.decode_response(memoryview(response_frame)[4:], api_key, api_version)
    except ProtocolError:
        return None
    if whose.get("client_id") is None:
        whose["client_id"] = header.get("clientId")
    return DecodedExchange(api_key, api_version, request, response, request_end, response_start, **whose)
