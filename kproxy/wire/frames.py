"""Frame headers: their fixed layout, recognition of bytes that are not Kafka frames, and patching of frames.

A frame is a 4-byte size and that many bytes. The first eight bytes of a request are api key, version and correlation
id; the first four of a response are the correlation id (Kafka's RequestHeader and ResponseHeader, in every version).

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
MAX_SIZE = (1 << 31) - 1

_HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"CONN", b"PRI ", b"DELE", b"HTTP")
_CLIENT_ID_AT = 14  # offset of the client id, after its length; ControlledShutdown v0 has none
NAMELESS = 7 << 16  # key and version of ControlledShutdown v0, which has no client id
_NULL = b"\xff\xff"


@cache
def request_head_and(count: int) -> tuple[Callable[[Any, int], tuple[Any, ...]], int]:
    """Return (a function that unpacks a request's head and the `count` bytes after it, the sum of their sizes)."""
    layout = Struct(f"{REQUEST_HEAD.format}{count}s")
    return layout.unpack_from, layout.size


def patched(frame: memoryview, edits: list[Edit]) -> bytes:
    """Return a frame, which begins with its size, with edits applied and its size corrected. Edits do not overlap."""
    parts: list[bytes | memoryview] = [b""]
    at = SIZE.size
    for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
        parts += (frame[at:start], new)
        at = end
    parts.append(frame[at:])
    parts[0] = SIZE.pack(sum(map(len, parts)))
    return b"".join(parts)


def patched_in_slices(frame: memoryview, edits: list[Edit]) -> Slices[bytes]:
    """Return the same as `patched`, in slices; sort the edits in place."""
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
    """Return (kind of the bytes, description and fix) for bytes where a frame's size should be."""
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
    """Return whether a request could begin at `pos`, by its size, a known key and version, and a client id that fits.

    Brokers accept any bytes as a client id, so its text is not checked. False if fewer than 14 bytes are available.
    ControlledShutdown v0, the only request without a client id, is not recognised.
    """
    return end - pos >= _CLIENT_ID_AT and is_known(view, pos) and client_id(view, pos, end) is not ...


def is_known(view: Any, pos: int) -> bool:
    """Return whether the header at `pos` has an API key and version of the schema."""
    _, key_version, _ = REQUEST_HEAD.unpack_from(view, pos)
    api = schema.schema().apis.get(key_version >> 16)
    return api is not None and (key_version & 0xFFFF) in api.request.versions


def client_id(view: Any, pos: int, end: int, max_bytes: int = MAX_REQUEST) -> bytes | EllipsisType | None:
    """Return the client id of the request at `pos`, cut at `end`; Ellipsis if it does not fit into the request."""
    size = int.from_bytes(view[pos : pos + 4], signed=True)
    length = int.from_bytes(view[pos + 12 : pos + _CLIENT_ID_AT], signed=True)
    if not 10 <= size <= max_bytes or not -1 <= length <= size - 10:
        return ...
    if length < 0:
        return None
    return bytes(view[pos + _CLIENT_ID_AT : min(pos + _CLIENT_ID_AT + length, end)])


def is_printable(client_id: bytes | None) -> bool:
    """Return whether a client id has no control characters, like configured ones."""
    return client_id is None or all(32 <= byte < 127 or byte >= 128 for byte in client_id)


def without_client_id(view: Any, pos: int, end: int) -> bytes:
    """Return the request in [pos, end), without its size and with a null client id, which need not be UTF-8."""
    name = client_id(view, pos, end)
    if not isinstance(name, bytes) or REQUEST_HEAD.unpack_from(view, pos)[1] == NAMELESS:
        return bytes(view[pos + 4 : end])
    return b"".join((view[pos + 4 : pos + 12], _NULL, view[pos + _CLIENT_ID_AT + len(name) : end]))
