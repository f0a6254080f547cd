"""Finding the next plausible frame in a side of a capture after its frame boundaries were lost.

A request is plausible by its header (size, known key and version, a client id that fits in), an answer by the
correlation id of a pending request. Either also needs a second indication: it ends where the data end, a plausible
frame follows it, or it starts a segment; and a complete request must decode. Anything else is skipped, and the session
reports how many bytes.

Behind a frame weaker checks suffice: `believable` and `follows` reject only what a damaged size must have led to. A
client id may have any bytes and an API any number, since brokers take them. A frame that is found here passes them too;
otherwise the session would search again at the same place, for ever.

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
CANDIDATES = 256  # waiting requests whose answer is looked for: the oldest

# Size < 16 MiB and no less than a header's (zeros are common), key < 256, version < 32, a client id that is null or has
# a length: all big-endian.
_REQUEST = re.compile(rb"(?s)(?=\x00(?!\x00\x00[\x00-\x09]).{3}\x00.\x00[\x00-\x1f].{4}(?:\xff\xff|[\x00-\x7f]))")


ClientId = bytes | EllipsisType | None  # ...: not known


def find_request(data: bytes, segment: int, before: ClientId) -> int:
    """Where a request begins in `data`, whose newest segment starts at `segment`; -1: nowhere yet.

    `before`: the client id that the connection's requests had.
    """
    end = len(data)
    for match in _REQUEST.finditer(data):
        pos = match.start()
        if not frames.plausible_request(data, pos, end):
            continue
        opens = pos in (0, segment) and _is_expected(frames.client_id(data, pos, end), before)
        if _is_witnessed(data, pos, end, opens) and believable(memoryview(data)[pos:], 0, end - pos, before):
            return pos
    return -1


def _is_expected(named: ClientId, before: ClientId) -> bool:
    """Whether requests had that client id before; of the first one, whether it is a printable text."""
    if named is ...:
        return False
    return frames.is_printable(named) if before is ... else _is_same(named, before)


def _is_same(named: bytes | None, before: bytes | None) -> bool:
    """`before` was read as text, where what is not UTF-8 is replaced."""
    return named == before or (named is not None and _as_text(named) == before)


def _as_text(named: bytes) -> bytes:
    return named.decode("utf-8", "replace").encode()


def _is_witnessed(data: Any, pos: int, end: int, opens: bool) -> bool:
    """Whether a plausible request has a second indication; `opens`: it starts a segment, which is one."""
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
    """Whether a request could begin at `pos`: of a known API, or of the same client."""
    if end - pos < 14:
        return False
    named = frames.client_id(data, pos, end)
    return named is not ... and (frames.is_known(data, pos) or named == before)


def believable(view: Any, pos: int, end: int, before: ClientId) -> bool:
    """Whether a request can stand where one ended. `before`: the client id that those had.

    A connection mostly keeps to one client id. Another one needs a second witness: that the request is whole and
    decodes, or, while it is not whole, that the id is a printable text. Of an unknown API or version there is one
    witness only: that the request ends where another one begins, or the data end.
    """
    if end - pos < 14:
        return True  # too few bytes to judge
    size, key_version, _ = frames.REQUEST_HEAD.unpack_from(view, pos)
    if key_version == frames.NAMELESS:
        return bool(size == 12)
    named = frames.client_id(view, pos, end)
    if named is ...:
        return False
    is_known = frames.is_known(view, pos)
    if before is ... and is_known:
        return True
    if before is not ... and (
        _is_same(named, before) or _begins(named, before, is_cut=pos + 14 + len(named or b"") == end)
    ):
        return True
    after = pos + 4 + size
    if is_known:
        return _is_witnessed(view, pos, end, bool(named) and frames.is_printable(named))
    if after > end:
        return before is ... and _could_be(key_version)
    return after == end or _may_follow(view, after, end, named)


def _begins(named: bytes | None, before: bytes | None, *, is_cut: bool) -> bool:
    """Whether a client id whose rest is not there yet can be the one that the requests before had."""
    if not is_cut or not before or named is None:
        return False
    return before.startswith(named.decode("utf-8", "replace").rstrip("\ufffd").encode())


def _could_be(key_version: int) -> bool:
    """Whether a later Kafka release could have this API and version."""
    return key_version >> 16 < 256 and key_version & 0xFFFF < 32


def find_answer(data: bytes, segment: int, waiting: Set[int]) -> int:
    """Where the answer to one of the waiting correlation ids begins; -1: nowhere yet."""
    end = len(data)
    best = -1
    for correlation_id in waiting:
        pattern = correlation_id.to_bytes(4, signed=True)
        at = data.find(pattern, 4)
        while at >= 0:
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
    """Whether an answer out of turn can stand at `pos`: its correlation id is near, and its size speaks for it too."""
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
