"""Sessions of ShareFetch (KIP-932), for clients that may not read every topic.

An incremental ShareFetch names only changed topics: the broker remembers the others by group and member, also those
that another client named. Acknowledgements need a session, so clients cannot do without one. A client that may not read
every topic may continue sessions that it began on the same connection, where kproxy judged each topic. Any other
session returns the error that the broker has no such session, and the client begins one, as after a broker's restart. A
client that knows a member's id can begin that member's session anew on another connection, through another kproxy or
directly. The authorizer therefore removes topics that the client may not read from each answer.

Bounded: MOST sessions of a connection, the oldest is dropped. Pure. Does not evaluate rules.
"""

from functools import cache, partial
from hashlib import blake2b

from kproxy.protocol.apis import SHARE_FETCH, SHARE_SESSION_NOT_FOUND
from kproxy.protocol.codec import Slices, encode_response, locate_in_slices

MOST = 64
_BODY = 12  # after the size, key, version and correlation id
_digest = partial(blake2b, digest_size=16)
_FIELDS = ("groupId", "memberId", "shareSessionEpoch")


class ShareSessions:
    """The share sessions of one connection."""

    def __init__(self) -> None:
        self._begun: dict[bytes, None] = {}  # digests: a group and a member may have 32 KiB each

    def goes_on(self, api_key: int, version: int, frame: memoryview) -> Slices[bool]:
        """Record a request, with its 4-byte size, in slices. Raises Malformed.

        Returns False if it continues a session that did not begin on this connection.
        """
        found: list[bytes] = []
        spans_of = locate_in_slices(api_key, version, "request", _FIELDS)
        for _, start, end in (yield from spans_of(frame, _BODY, len(frame))):
            found.append(bytes(frame[start:end]))
        session = _digest(found[0]).digest() + _digest(found[1]).digest()
        epoch = int.from_bytes(found[2], "big", signed=True)
        if epoch == 0 and api_key == SHARE_FETCH:
            self._begun.pop(session, None)
            self._begun[session] = None
            if len(self._begun) > MOST:
                del self._begun[next(iter(self._begun))]
            return True
        known = session in self._begun
        if epoch < 0:
            self._begun.pop(session, None)
        return known


def no_session(api_key: int, version: int, correlation_id: int) -> tuple[bytes, tuple[int, ...]]:
    """Return (answer with its 4-byte size, error codes in it); after it clients begin a session."""
    header, body = _no_session(api_key, version)
    return header + correlation_id.to_bytes(4, "big", signed=True) + body, (SHARE_SESSION_NOT_FOUND,)


@cache
def _no_session(api_key: int, version: int) -> tuple[bytes, bytes]:
    body = {"errorCode": SHARE_SESSION_NOT_FOUND, "responses": []}
    frame = encode_response(api_key, version, {"correlationId": 0}, body)
    return len(frame).to_bytes(4, "big"), bytes(frame[4:])
