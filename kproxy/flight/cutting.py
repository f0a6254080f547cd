"""Relayed bytes -> frames, of requests and responses.

Duty: cut the chunks of `frames.py` at the boundaries reported by the session, and find the API of each response. A
frame whose start is no longer kept is left out; one with missing parts is truncated. Memory: a frame per side of each
connection. Refuses to know a frame's content beyond its first twelve bytes.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kproxy.flight.frames import ENDED, Chunk
from kproxy.wire import frames
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import CLIENT

MAX_AWAITED = 4096  # requests of a connection without a response yet


class Frame(NamedTuple):
    """A frame as it passed."""

    info: ConnectionInfo
    side: int
    start_ns: int  # time of its first bytes
    end_ns: int  # time of its last bytes
    size: int  # including the 4 bytes of its size
    data: bytes  # its bytes from the start, as far as they are kept
    api: tuple[int, int] | None  # key and version; None: a response whose request is no longer kept
    correlation_id: int

    @property
    def is_whole(self) -> bool:
        return len(self.data) == self.size


def cut(chunks: Iterable[Chunk]) -> Iterator[Frame]:
    """Yield the frames of many connections, in the order of their last bytes."""
    cutters: dict[int, Cutter] = {}
    for chunk in chunks:
        if chunk.side == ENDED:
            continue
        cutter = cutters.get(chunk.info.id)
        if cutter is None:
            cutter = cutters[chunk.info.id] = Cutter()
        yield from cutter.feed(chunk)


class Cutter:
    """Cuts one connection, chunk by chunk.

    awaited: (correlation id, (API key, version)) of each request without a response yet. A frame of more than `largest`
    bytes is cut to its first bytes.
    """

    def __init__(self, awaited: Iterable[tuple[int, tuple[int, int]]] = (), largest: int = sys.maxsize) -> None:
        self._sides = (_Side(largest), _Side(largest))
        self._awaited = deque(awaited, maxlen=MAX_AWAITED)

    def feed(self, chunk: Chunk) -> Iterator[Frame]:
        """Yield the frames that end in a chunk."""
        for start_ns, size, data in self._sides[chunk.side].feed(chunk):
            if chunk.side == CLIENT:
                _, key_version, correlation_id = frames.REQUEST_HEAD.unpack_from(data)
                self._awaited.append((correlation_id, (key_version >> 16, key_version & 0xFFFF)))
                api: tuple[int, int] | None = self._awaited[-1][1]
            else:
                _, correlation_id = frames.RESPONSE_HEAD.unpack_from(data)
                api = self._answered(correlation_id)
            yield Frame(chunk.info, chunk.side, start_ns, chunk.now_ns, size, data, api, correlation_id)

    def _answered(self, correlation_id: int) -> tuple[int, int] | None:
        awaited = self._awaited
        found = next((at for at, (expected, _) in enumerate(awaited) if expected == correlation_id), None)
        if found is None:
            return None
        for _ in range(found):  # these get no response: a Produce with acks=0
            awaited.popleft()
        return awaited.popleft()[1]


class _Side:
    """One direction of a connection."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._expected = -1  # offset of the next chunk
        self._held: bytearray | None = None  # the current frame from its start; None: its start was not seen
        self._is_cut = False
        self._left = -1  # bytes of the current frame still to come; -1: its size is unknown
        self._size = 0
        self._start_ns = 0

    def feed(self, chunk: Chunk) -> Iterator[tuple[int, int, bytes]]:
        """Yield (time of its first bytes, size, kept bytes) of each frame that ends in the chunk."""
        least = frames.REQUEST_HEAD_BYTES if chunk.side == CLIENT else frames.RESPONSE_HEAD_BYTES
        in_step = chunk.offset == self._expected and (chunk.boundary < 0 or chunk.boundary == max(self._left, 0))
        self._expected = chunk.offset + chunk.size
        if not in_step or (self._held is None and self._left < 0):
            self._lose(chunk.boundary)
        data, pos = chunk.data, 0
        if data is None:
            self._skip(chunk)
            if not self._left:
                yield from self._ended(least)
            return
        while pos < chunk.size:
            if self._left < 0:  # between two frames, or in the size of one
                if self._held is None:
                    return
                if not self._held:
                    self._start_ns = chunk.now_ns
                    self._is_cut = False
                taken = data[pos : pos + 4 - len(self._held)]
                self._held += taken
                pos += len(taken)
                if len(self._held) < 4:
                    return
                self._left = int.from_bytes(self._held, "big", signed=True)
                self._size = self._left + 4
                if self._size < least:
                    self._lose(-1)
                    return
            taken = data[pos : pos + self._left]
            if self._held is not None and not self._is_cut:
                wanted = self._size if self._size <= self._largest else frames.REQUEST_HEAD_BYTES
                self._held += taken[: wanted - len(self._held)]
            pos += len(taken)
            self._left -= len(taken)
            if not self._left:
                yield from self._ended(least)

    def _ended(self, least: int) -> Iterator[tuple[int, int, bytes]]:
        held, self._held, self._left = self._held, bytearray(), -1
        if held is not None and len(held) >= least:
            yield self._start_ns, self._size, bytes(held)

    def _skip(self, chunk: Chunk) -> None:
        """Skip bytes that were only counted: inside one frame, or unframed."""
        if self._left >= chunk.size:
            self._left -= chunk.size
            self._is_cut = True
        else:
            self._lose(-1)

    def _lose(self, boundary: int) -> None:
        """Forget the position in frames, except for the boundary from the session."""
        self._held = bytearray() if boundary == 0 else None
        self._left = boundary if boundary > 0 else -1
        self._is_cut = False
