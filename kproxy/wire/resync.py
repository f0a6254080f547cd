"""Finding the next plausible frame in a side of a capture after its frame boundaries were lost.

A request is plausible by its header (size, known key and version, printable client id), an answer by the correlation
id of a pending request. Either also needs a second indication: it ends where the data end, a plausible frame follows
it, or it starts a segment; and a complete request must decode. Anything else is skipped, and the session reports how
many bytes.

Behind a frame weaker checks suffice: `believable` and `follows` reject only what a damaged size must have led to. A
frame that is found here passes them too; otherwise the session would search again at the same place, for ever.

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

_NAMELESS = 7 << 16  # ControlledShutdown v0, the one header without a client id

# Size < 16 MiB and no less than a header's (zeros are common), key < 256, version < 32, a client id that is null or
# shorter than 512: all big-endian.
_REQUEST = re.compile(rb"(?s)(?=\x00(?!\x00\x00[\x00-\x09]).{3}\x00.\x00[\x00-\x1f].{4}(?:\xff\xff|[\x00\x01]))")


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
        opens = pos in (0, segment) and (before is ... or frames.client_id(data, pos, end) == before)
        if _is_witnessed(data, pos, end, opens) and believable(memoryview(data)[pos:], 0, end - pos, before):
            return pos
    return -1


def _is_witnessed(data: Any, pos: int, end: int, opens: bool) -> bool:
    """Whether a plausible request has a second indication; `opens`: it starts a segment, which is one."""
    after = pos + 4 + int.from_bytes(data[pos : pos + 4])
    if after > end:
        return opens
    if after < end and not frames.plausible_request(data, after, end):
        return False
    try:
        codec.decode_request(memoryview(data)[pos + 4 : after])
    except ProtocolError:
        return False
    return True


def believable(view: Any, pos: int, end: int, before: ClientId) -> bool:
    """Whether a request can stand where one ended. `before`: the client id that those had.

    A connection keeps to one client id: another needs a second witness, and an API or version that the schema does not
    have cannot have one.
    """
    if end - pos < 14:
        return True  # too few bytes to judge
    size, key_version, _ = frames.REQUEST_HEAD.unpack_from(view, pos)
    if key_version == _NAMELESS:
        return bool(size == 12)
    named = frames.client_id(view, pos, end)
    known = frames.is_known(view, pos)
    if named is ... or not (known or _could_be(key_version)):
        return False
    if before is ... or named == before:
        return True
    if before and named is not None and pos + 14 + len(named) == end and before.startswith(named):
        return True  # the rest of the name is not there yet
    return known and _is_witnessed(view, pos, end, False)


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
