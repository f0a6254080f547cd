"""Finding the next plausible frame in a side of a capture after its frame boundaries were lost.

A request is plausible by its header (size, known key and version, a client id that fits in), a response by the
correlation id of a pending request. Both also need a second indication: the frame ends where the data end, a plausible
frame follows it, or it starts a segment. A complete request must also decode. The session skips all other bytes, and
reports their number.

Directly after a frame weaker checks suffice: `believable` and `follows` reject only bytes that a damaged size must have
led to. A client id may have any bytes and an API any number, since brokers accept them. A frame found by a search also
passes these checks; otherwise the session would search again at the same place, for ever.

Refuses to know connections and events.
"""

import re
from collections.abc import Set
from types import EllipsisType
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.wire import frames

WINDOW = 2048  # bytes kept from one segment to the next: small segments can split a header
CANDIDATES = 256  # the search accepts responses to so many of the oldest pending requests

# Size < 16 MiB and at least the size of a header (zeros are common), key < 256, version < 32, a client id that is null
# or has a length; all big-endian.
_REQUEST = re.compile(rb"(?s)(?=\x00(?!\x00\x00[\x00-\x09]).{3}\x00.\x00[\x00-\x1f].{4}(?:\xff\xff|[\x00-\x7f]))")


ClientId = bytes | EllipsisType | None  # Ellipsis: unknown


def find_request(data: bytes, segment: int, before: ClientId) -> int:
    """Return where a request begins in `data`, whose newest segment starts at `segment`; -1: nowhere so far.

    before: the client id of the connection's earlier requests.
    """
    end = len(data)
    for match in _REQUEST.finditer(data):
        pos = match.start()
        if not frames.plausible_request(data, pos, end):
            continue
        opens = pos in (0, segment) and _is_expected(frames.client_id(data, pos, end), before)
        if _has_second_indication(data, pos, end, opens) and believable(memoryview(data)[pos:], 0, end - pos, before):
            return pos
    return -1


def _is_expected(named: ClientId, before: ClientId) -> bool:
    """Return whether a client id equals the earlier one, or is printable if there is no earlier one."""
    if named is ...:
        return False
    return frames.is_printable(named) if before is ... else _is_same(named, before)


def _is_same(named: bytes | None, before: bytes | None) -> bool:
    """Return whether two client ids are equal; `before` was decoded as text, with invalid UTF-8 replaced."""
    return named == before or (named is not None and _as_text(named) == before)


def _as_text(named: bytes) -> bytes:
    return named.decode("utf-8", "replace").encode()


def _has_second_indication(data: Any, pos: int, end: int, opens: bool) -> bool:
    """Return whether a plausible request has a second indication. opens: it starts a segment, which counts as one."""
    after = pos + 4 + int.from_bytes(data[pos : pos + 4])
    if after > end:
        return opens
    if after < end and not _may_follow(data, after, end, frames.client_id(data, pos, end)):
        return False
    try:
        codec.decode_request(frames.without_client_id(data, pos, after))
    except ProtocolError:
        return False
    return True


def _may_follow(data: Any, pos: int, end: int, before: ClientId) -> bool:
    """Return whether a request could begin at `pos`: it has a known API, or the same client id."""
    if end - pos < 14:
        return False
    named = frames.client_id(data, pos, end)
    return named is not ... and (frames.is_known(data, pos) or named == before)


def believable(view: Any, pos: int, end: int, before: ClientId) -> bool:
    """Return whether a request can begin where the previous one ended. before: the client id of earlier requests.

    Most connections have one client id. A request with another id needs a second indication: it is complete and
    decodes, or it is incomplete and the id is printable. A request of an unknown API or version can have only one
    indication: it ends where another request begins, or at the end of the data. A request above MAX_REQUEST, which a
    broker refuses by default, has a known API and the client id of earlier requests.
    """
    if end - pos < 14:
        return True  # too few bytes to judge
    size, key_version, _ = frames.REQUEST_HEAD.unpack_from(view, pos)
    if key_version == frames.NAMELESS:
        return bool(size == 12)
    named = frames.client_id(view, pos, end, frames.MAX_SIZE)
    if named is ...:
        return False
    is_known = frames.is_known(view, pos)
    if size > frames.MAX_REQUEST:
        return is_known and before is not ... and _is_same(named, before)
    if before is ... and is_known:
        return True
    if before is not ... and (
        _is_same(named, before) or _begins(named, before, is_cut=pos + 14 + len(named or b"") == end)
    ):
        return True
    after = pos + 4 + size
    if is_known:
        return _has_second_indication(view, pos, end, bool(named) and frames.is_printable(named))
    if after > end:
        return before is ... and _could_be(key_version)
    return after == end or _may_follow(view, after, end, named)


def _begins(named: bytes | None, before: bytes | None, *, is_cut: bool) -> bool:
    """Return whether a client id whose rest has not arrived can be the earlier one."""
    if not is_cut or not before or named is None:
        return False
    return before.startswith(named.decode("utf-8", "replace").rstrip("\ufffd").encode())


def _could_be(key_version: int) -> bool:
    """Return whether a later Kafka release could have this API and version."""
    return key_version >> 16 < 256 and key_version & 0xFFFF < 32


def find_answer(data: bytes, segment: int, waiting: Set[int]) -> int:
    """Return where the response to one of the pending correlation ids begins; -1: nowhere so far."""
    end = len(data)
    best = -1
    for correlation_id in waiting:
        pattern = correlation_id.to_bytes(4, signed=True)
        at = data.find(pattern, 4)
        while at != -1:
            pos = at - 4
            if (
                (best < 0 or pos < best)
                and _answers(data, pos, end, segment, waiting)
                and follows(memoryview(data)[pos:], 0, end - pos, waiting)
            ):
                best = pos
                break
            at = data.find(pattern, at + 1)
    return best


def follows(view: Any, pos: int, end: int, waiting: Set[int]) -> bool:
    """Return whether a response out of order can begin at `pos`, by its size and a correlation id near pending ones."""
    size, this = frames.RESPONSE_HEAD.unpack_from(view, pos)
    near = not waiting or min(abs(this - other) for other in waiting) <= CANDIDATES
    if not near or not frames.MIN_RESPONSE <= size <= frames.MAX_REQUEST:
        return False
    after = pos + 4 + size
    if after >= end:
        return after == end or (not pos and this in waiting)
    following = int.from_bytes(view[after + 4 : after + 8], signed=True)
    return end - after >= 8 and (following in waiting or 0 < following - this <= CANDIDATES)


def _answers(data: bytes, pos: int, end: int, segment: int, waiting: Set[int]) -> bool:
    size = int.from_bytes(data[pos : pos + 4], signed=True)
    if size < frames.MIN_RESPONSE:
        return False
    after = pos + 4 + size
    if after >= end:
        return after == end or pos in (0, segment)
    return end - after >= 8 and int.from_bytes(data[after + 4 : after + 8], signed=True) in waiting
