"""Fetch without sessions (KIP-227), for clients that may not read every topic.

An incremental Fetch names only changed topics: the broker remembers the others from earlier requests of any client. The
number of a session suffices to read topics that another client named. A client that may not read every topic therefore
gets no session: each of its requests names its topics, as with a broker whose cache of sessions is full.

Pure. Does not evaluate rules.
"""

from functools import cache
from typing import Final, Literal

from kproxy.protocol.apis import FETCH, FETCH_SESSION_ID_NOT_FOUND
from kproxy.protocol.codec import Slices, encode_response, locate_in_slices

UNKNOWN_SESSION: Final = "unknown session"

_FIRST_WITH_SESSIONS = 7
_BODY = 12  # after the size, key, version and correlation id
_NONE = b"\0\0\0\0\xff\xff\xff\xff"  # session id 0, epoch -1: no session, and none requested


def without_session(version: int, frame: memoryview) -> Slices[bytes | Literal["unknown session"] | None]:
    """Return a Fetch, with its 4-byte size, changed to request no session, in slices; None if it requests none.

    UNKNOWN_SESSION: it continues a session. Raises Malformed.
    """
    if version < _FIRST_WITH_SESSIONS:
        return None
    spans_of = locate_in_slices(FETCH, version, "request", ("sessionId", "sessionEpoch"))
    ((_, start, _), (_, _, end)) = yield from spans_of(frame, _BODY, len(frame))
    if int.from_bytes(frame[start + 4 : end], "big", signed=True) > 0:
        return UNKNOWN_SESSION
    if frame[start:end] == _NONE:
        return None
    patched = bytearray(frame)
    patched[start:end] = _NONE
    return bytes(patched)


def unknown_session(version: int, correlation_id: int) -> tuple[bytes, tuple[int, ...]]:
    """Return (answer with its 4-byte size, error codes in it); after it clients send a full Fetch."""
    header, body = _unknown_session(version)
    return header + correlation_id.to_bytes(4, "big", signed=True) + body, (FETCH_SESSION_ID_NOT_FOUND,)


@cache
def _unknown_session(version: int) -> tuple[bytes, bytes]:
    body = {"errorCode": FETCH_SESSION_ID_NOT_FOUND, "responses": []}
    frame = encode_response(FETCH, version, {"correlationId": 0}, body)
    return len(frame).to_bytes(4, "big"), bytes(frame[4:])
