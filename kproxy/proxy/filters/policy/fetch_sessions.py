"""Fetch without sessions (KIP-227), for clients that may not read every topic.

A Fetch that goes on with a session names no topic: the broker remembers those of earlier requests, whoever sent them.
Its number is all that it takes to read what somebody else asked for. So a client that may not read every topic gets no
session: each of its requests names what it wants, and clients do so as at a broker that has no room for more sessions.

Pure. Refuses to know rules.
"""

from functools import cache
from typing import Final, Literal

from kproxy.protocol.apis import FETCH, FETCH_SESSION_ID_NOT_FOUND
from kproxy.protocol.codec import Slices, encode_response, locate_in_slices

UNKNOWN_SESSION: Final = "unknown session"

_FIRST_WITH_SESSIONS = 7
_BODY = 12  # behind the size, key, version and correlation id
_NONE = b"\0\0\0\0\xff\xff\xff\xff"  # no session, and none is wanted


def without_session(version: int, frame: memoryview) -> Slices[bytes | Literal["unknown session"] | None]:
    """The Fetch, with its 4-byte size, as one that has and wants no session, in slices; None: it is one.

    UNKNOWN_SESSION: it goes on with one. Raises Malformed.
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
    """(the answer, with its 4-byte size, after which clients ask for all that they want; the error in it)"""
    header, body = _unknown_session(version)
    return header + correlation_id.to_bytes(4, "big", signed=True) + body, (FETCH_SESSION_ID_NOT_FOUND,)


@cache
def _unknown_session(version: int) -> tuple[bytes, bytes]:
    body = {"errorCode": FETCH_SESSION_ID_NOT_FOUND, "responses": []}
    frame = encode_response(FETCH, version, {"correlationId": 0}, body)
    return len(frame).to_bytes(4, "big"), bytes(frame[4:])
