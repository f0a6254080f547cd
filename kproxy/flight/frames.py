"""The bytes that have passed lately, in memory: what the flight recorder knows of frames.

Duty: keep what clients sent and what they got (with kproxy's addresses), each read as it came, so that frames can be
cut out later by another process, or at once for a trace. Bytes of a login without frames are never kept, only counted.
Of a frame that is larger than what passes at once, MAX_FRAME bytes behind its first part are kept.

Bounded: `limit_bytes` for all connections together, and `span_ns` back from the newest; the oldest go first. It costs
whoever relays a copy of what passes. Refuses to know what is in a frame, files and clocks.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.session import Session
from kproxy.wire.state import Piece
from kproxy.wire.watched import boundary, is_framed, read_of

ENDED = -1
MAX_FRAME = 64 * 1024  # bytes of one frame behind those that passed together with its beginning
_new = tuple.__new__  # a named tuple at half the cost of naming its fields
_OVERHEAD = 250  # bytes of memory that a chunk takes beside its data, about
_CONNECTION = 300  # what is known of a connection, about: it stays as long as its last chunk


class Chunk(NamedTuple):
    """Bytes of a side that passed together."""

    info: ConnectionInfo
    side: int  # ENDED: the connection has
    now_ns: int
    offset: int  # in what passed of this side since the connection was watched
    size: int
    data: bytes | None  # None: only counted
    boundary: int  # bytes before the first frame that begins in it or behind it; -1: not known


def _taken(chunk: Chunk) -> int:
    """Bytes of memory, about."""
    if chunk.data is not None:
        return _OVERHEAD + chunk.size
    return _OVERHEAD + _CONNECTION if chunk.side == ENDED else _OVERHEAD


class Frames:
    """All of a process."""

    def __init__(self, limit_bytes: int, span_ns: int) -> None:
        self.limit_bytes = limit_bytes
        self.span_ns = span_ns
        self.held_bytes = 0
        self.chunks: deque[Chunk] = deque()

    def watched(self, info: ConnectionInfo) -> "Watch":
        """The observer of a session that begins."""
        return Watch(self.add, info)

    def ended(self, info: ConnectionInfo, now_ns: int) -> None:
        self.add(Chunk(info, ENDED, now_ns, 0, 0, None, 0))

    def add(self, chunk: Chunk) -> None:
        chunks = self.chunks
        chunks.append(chunk)
        held = self.held_bytes + _taken(chunk)
        oldest_ns = chunk.now_ns - self.span_ns
        while held > self.limit_bytes or chunks[0].now_ns < oldest_ns:
            held -= _taken(chunks.popleft())
            if not chunks:
                break
        self.held_bytes = held


class Watch:
    """What passes on one connection, for `take`; an observer of its session."""

    __slots__ = ("_answers_are_framed", "_boundaries", "_info", "_inside", "_is_framed", "_offsets", "_to")

    def __init__(self, take: Callable[[Chunk], None], info: ConnectionInfo) -> None:
        self._to = take
        self._info = info
        self._offsets = [0, 0]
        self._inside = [0, 0]  # bytes kept of a frame since the part that began it
        self._boundaries = [0, 0]
        self._is_framed = self._answers_are_framed = True

    def before(self, session: Session, side: int) -> None:
        boundaries = self._boundaries
        boundaries[BROKER] = boundary(session, BROKER)
        if side == CLIENT:
            boundaries[CLIENT] = boundary(session, CLIENT)
            self._is_framed = is_framed(session, CLIENT)
        self._answers_are_framed = is_framed(session, BROKER)

    def passed(self, session: Session, side: int, view: Any, pieces: list[Piece], now_ns: int) -> None:
        if side == CLIENT:
            framed = self._is_framed and is_framed(session, CLIENT)
            self._take(CLIENT, read_of(session, CLIENT, view), framed, now_ns)
        framed = self._answers_are_framed and is_framed(session, BROKER)
        for to, piece in pieces:
            if to == CLIENT:
                self._take(BROKER, piece, framed, now_ns)
                left = self._boundaries[BROKER] - len(piece)
                self._boundaries[BROKER] = left if left > 0 else 0 if not left else -1

    def _take(self, side: int, view: Any, framed: bool, now_ns: int) -> None:
        size = len(view)
        if not size:
            return
        offset = self._offsets[side]
        self._offsets[side] = offset + size
        until = self._boundaries[side] if framed else -1
        data: bytes | None = None
        if framed:
            if until >= size:
                self._inside[side] += size
            else:
                self._inside[side] = 0
            if self._inside[side] <= MAX_FRAME:
                data = bytes(view)
        self._to(_new(Chunk, (self._info, side, now_ns, offset, size, data, until)))
