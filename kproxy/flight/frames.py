"""Recently relayed bytes, kept in memory for the flight recorder.

Duty: keep the bytes that clients sent and received (with kproxy's addresses), per read, so that another process can cut
frames out of them later, or a trace at once. Unframed bytes of a login are never kept, only counted. If a frame is
larger than one read, MAX_FRAME bytes after its first part are kept.

Bounded: `limit_bytes` for all connections together, and `span_ns` back from the newest; the oldest are dropped first.
Costs a relay a copy of its bytes. Refuses to know a frame's content, files and clocks.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.observing.watched import boundary, is_framed, read_of
from kproxy.wire.reading import Piece
from kproxy.wire.session import Session

ENDED = -1
MAX_FRAME = 64 * 1024  # bytes of one frame after the read with its start
_new = tuple.__new__  # a named tuple at half the cost of naming its fields
_OVERHEAD = 250  # approximate memory of a chunk in bytes, without its data
_CONNECTION = 300  # approximate memory of a connection in bytes; it is kept as long as its last chunk


class Chunk(NamedTuple):
    """Bytes of one side that passed in one read."""

    info: ConnectionInfo
    side: int  # CLIENT, BROKER, or ENDED for the end of the connection
    now_ns: int
    offset: int  # position in this side's bytes, counted from the first one that was watched
    size: int
    data: bytes | None  # None: bytes that were only counted
    boundary: int  # bytes before the first frame that starts in or after the chunk; -1: unknown


def _memory_bytes(chunk: Chunk) -> int:
    """Return the approximate memory of a chunk in bytes."""
    if chunk.data is not None:
        return _OVERHEAD + chunk.size
    return _OVERHEAD + _CONNECTION if chunk.side == ENDED else _OVERHEAD


class Frames:
    """The chunks of all connections of a process."""

    def __init__(self, limit_bytes: int, span_ns: int) -> None:
        self.limit_bytes = limit_bytes
        self.span_ns = span_ns
        self.held_bytes = 0
        self.chunks: deque[Chunk] = deque()

    def watched(self, info: ConnectionInfo) -> "Watch":
        """Return the observer of a new session."""
        return Watch(self.add, info)

    def ended(self, info: ConnectionInfo, now_ns: int) -> None:
        self.add(Chunk(info, ENDED, now_ns, 0, 0, None, 0))

    def add(self, chunk: Chunk) -> None:
        chunks = self.chunks
        chunks.append(chunk)
        held = self.held_bytes + _memory_bytes(chunk)
        oldest_ns = chunk.now_ns - self.span_ns
        while held > self.limit_bytes or chunks[0].now_ns < oldest_ns:
            held -= _memory_bytes(chunks.popleft())
            if not chunks:
                break
        self.held_bytes = held


class Watch:
    """An observer of a session: passes the connection's bytes to `take` as chunks."""

    __slots__ = ("_answers_are_framed", "_boundaries", "_info", "_inside", "_is_framed", "_offsets", "_to")

    def __init__(self, take: Callable[[Chunk], None], info: ConnectionInfo) -> None:
        self._to = take
        self._info = info
        self._offsets = [0, 0]
        self._inside = [0, 0]  # bytes kept of a frame since the part with its start
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
