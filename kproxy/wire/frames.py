"""Frame headers: their fixed layout, how bytes that are no Kafka frame are recognised, and how a frame is patched.

A frame is a 4-byte size and that many bytes. A request's first eight are api key, version and correlation id; an
answer's first four the correlation id (Kafka's RequestHeader and ResponseHeader; at a fixed place in every version).

Refuses to know bodies, connections and policy.
"""

from collections.abc import Callable
from functools import cache
from struct import Struct
from types import EllipsisType
from typing import Any

from kproxy.protocol import schema
from kproxy.protocol.codec import Slices

REQUEST_HEAD = Struct(">iIi")  # size, api key and version as one number, correlation id
RESPONSE_HEAD = Struct(">ii")  # size, correlation id
SIZE = Struct(">i")

REQUEST_HEAD_BYTES = 12
RESPONSE_HEAD_BYTES = 8
MIN_REQUEST = 8  # api key, version, correlation id: ControlledShutdown v0 has no more header than that
MIN_RESPONSE = 4

Edit = tuple[int, int, bytes]  # replace [start, end) of a frame
_SLICE_EDITS = 1024

MAX_REQUEST = 100 * 1024 * 1024  # a broker's socket.request.max.bytes by default

_HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"CONN", b"PRI ", b"DELE", b"HTTP")
_CLIENT_ID_AT = 14  # behind its length, in all headers but that of ControlledShutdown v0
NAMELESS = 7 << 16  # which has no client id
_NULL = b"\xff\xff"


@cache
def request_head_and(count: int) -> tuple[Callable[[Any, int], tuple[Any, ...]], int]:
    """(what unpacks a request's head and the `count` bytes behind it in one go, how many bytes that are)"""
    layout = Struct(f"{REQUEST_HEAD.format}{count}s")
    return layout.unpack_from, layout.size


def patched(frame: memoryview, edits: list[Edit]) -> bytes:
    """A frame with its edits made, which do not overlap, and its size corrected. It begins with that size."""
    parts: list[bytes | memoryview] = [b""]
    at = SIZE.size
    for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
        parts += (frame[at:start], new)
        at = end
    parts.append(frame[at:])
    parts[0] = SIZE.pack(sum(map(len, parts)))
    return b"".join(parts)


def patched_in_slices(frame: memoryview, edits: list[Edit]) -> Slices[bytes]:
    """As `patched`; sorts the edits in place."""
    edits.sort()
    parts: list[bytes | memoryview] = [b""]
    at = SIZE.size
    size = len(frame) - at
    for number, (start, end, new) in enumerate(edits, 1):
        if number % _SLICE_EDITS == 0:
            yield
        parts += (frame[at:start], new)
        size += len(new) - (end - start)
        at = end
    parts.append(frame[at:])
    parts[0] = SIZE.pack(size)
    return b"".join(parts)


def sniff(head: bytes) -> tuple[str, str]:
    """(kind, what it is and how to fix it) for bytes that stand where a frame's size should."""
    if head[:1] in (b"\x16", b"\x15", b"\x14", b"\x17") and head[1:2] == b"\x03":
        return "tls", (
            "TLS on a plaintext Kafka port: set security.protocol to PLAINTEXT or SASL_PLAINTEXT in the client, "
            "or point it at a TLS listener"
        )
    if head[:4] in _HTTP:
        return (
            "http",
            "HTTP on a Kafka port: this port speaks the Kafka protocol; the metrics are on the admin port",
        )
    if head[:6] == b"PROXY " or head[:8] == b"\r\n\r\n\0\r\nQ":
        return "proxy_protocol", (
            "a PROXY protocol header on a port that expects none: set accept_proxy_protocol and trusted_proxies in its "
            "[[cluster]], or have the balancer send none, or no second one"
        )
    size = int.from_bytes(head[:4], "big", signed=True)
    return "size", (
        f"a frame size of {size} cannot be: the peer does not speak the Kafka protocol here, or bytes were lost "
        "on the way" + ("; if brokers do take requests so large, raise max_request_bytes" if size > MIN_REQUEST else "")
    )


def plausible_request(view: Any, pos: int, end: int) -> bool:
    """Whether a request could begin at `pos`: its size, a known key and version, a client id that fits in.

    A broker takes a client id of any bytes, so its text decides nothing. False when fewer than 14 bytes are there.
    ControlledShutdown v0, alone without a client id, is not recognised.
    """
    return end - pos >= _CLIENT_ID_AT and is_known(view, pos) and client_id(view, pos, end) is not ...


def is_known(view: Any, pos: int) -> bool:
    """Whether the header at `pos` names an API and a version that the schema has."""
    _, key_version, _ = REQUEST_HEAD.unpack_from(view, pos)
    api = schema.schema().apis.get(key_version >> 16)
    return api is not None and (key_version & 0xFFFF) in api.request.versions


def client_id(view: Any, pos: int, end: int) -> bytes | EllipsisType | None:
    """The client id of the request at `pos`, as far as it is there; ... if it does not fit into the request."""
    size = int.from_bytes(view[pos : pos + 4], signed=True)
    length = int.from_bytes(view[pos + 12 : pos + _CLIENT_ID_AT], signed=True)
    if not 10 <= size <= MAX_REQUEST or not -1 <= length <= size - 10:
        return ...
    if length < 0:
        return None
    return bytes(view[pos + _CLIENT_ID_AT : min(pos + _CLIENT_ID_AT + length, end)])


def is_printable(client_id: bytes | None) -> bool:
    """Whether a client id is a text as clients are configured with."""
    return client_id is None or all(32 <= byte < 127 or byte >= 128 for byte in client_id)


def without_client_id(view: Any, pos: int, end: int) -> bytes:
    """The request in [pos, end), without its size and with a null client id: its text need not be UTF-8."""
    name = client_id(view, pos, end)
    if not isinstance(name, bytes) or REQUEST_HEAD.unpack_from(view, pos)[1] == NAMELESS:
        return bytes(view[pos + 4 : end])
    return b"".join((view[pos + 4 : pos + 12], _NULL, view[pos + _CLIENT_ID_AT + len(name) : end]))
