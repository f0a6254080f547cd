"""What insight is fed: a request and its answer, decoded, with whose they are and when they came.

Whoever feeds it decides what is decoded, and gives it in the order of answers. Refuses to know sockets and captures.
"""

from dataclasses import dataclass
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.primitives import Buffer

Body = dict[str, Any]


@dataclass(slots=True, eq=False)
class Spoken:
    """One exchange. Bodies are as `protocol.codec` decodes them; times are nanoseconds since the epoch."""

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
    broker: tuple[str, int] | None = None  # the address that its connection leads to
    principal: str | None = None  # whom the client logged in as, where it is known


def spoken_of(
    api_key: int,
    api_version: int,
    request_frame: Buffer,
    response_frame: Buffer | None,
    request_end: int,
    response_start: int,
    **whose: Any,
) -> Spoken | None:
    """Decode an exchange, whose frames have their 4-byte sizes; None: its request, or its answer, cannot be decoded.

    whose: the other fields of `Spoken`, by name; the client id is that of the request's header if it is not given.
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
    return Spoken(api_key, api_version, request, response, request_end, response_start, **whose)
