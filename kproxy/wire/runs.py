"""Requests by the handful: those of one read that begin alike are noted together, and answered so if they can be.

Duty: what a pipelining client sends at once is read, noted and told of at a fraction of what each would cost alone. A
`Run` stands in the queue once per request, so that the queue is as long as ever. Answers take many of them at once if
they come in one read, whole, in order, and all say the same; before anything else, the session unrolls what is left
into the Exchanges that the requests would have been, and goes on one by one.

Memory: of a waiting request its id, its size and its place in the queue, a fraction of an Exchange. Refuses to know
faults, and what is done with a frame.
"""

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any

from kproxy.wire import frames
from kproxy.wire.events import FULL, Exchange, Repeated

if TYPE_CHECKING:
    from kproxy.wire.session import Usual

MOST = 16  # answers at once; what unpacks so many is remembered
PAUSE = 1000  # requests that are noted alone after a run that was answered one by one

Unpack = Callable[[Any, int], tuple[Any, ...]]


class Run:
    """Whole requests of one read, alike but for their ids and sizes."""

    __slots__ = ("_at", "_correlation_ids", "_end", "_in_flight", "_number", "_plan", "_sizes", "_start", "_values")

    def __init__(self, usual: "Usual", number: int, in_flight: int, start: int, end: int) -> None:
        """`number`, `in_flight` and `start` are the first request's; all are whole at `end`."""
        self._plan = usual[4]
        self._values = usual[5]
        self._correlation_ids: list[int] = []
        self._sizes: list[int] = []
        self._at = 0
        self._number = number
        self._in_flight = in_flight
        self._start = start
        self._end = end

    def __len__(self) -> int:
        return len(self._sizes) - self._at

    def read(self, usual: "Usual", view: Any, pos: int, size: int, max_request: int) -> int:
        """Add the whole requests from `pos` on that begin as usual; returns where they end."""
        unpack, usual_bytes, usual_key_version, usual_prefix = usual[:4]
        correlation_ids, sizes = self._correlation_ids, self._sizes
        max_bytes = max_request + 4
        while size - pos >= usual_bytes:
            length, key_version, correlation_id, prefix = unpack(view, pos)
            frame_bytes = length + 4
            end = pos + frame_bytes
            if prefix != usual_prefix or key_version != usual_key_version or end > size:
                break
            if not usual_bytes <= frame_bytes <= max_bytes:
                break
            correlation_ids.append(correlation_id)
            sizes.append(frame_bytes)
            pos = end
        return pos

    def take(self) -> Exchange:
        """The next request, as if it had been noted alone."""
        at = self._at
        self._at = at + 1
        exchange = Exchange(
            self._plan, self._correlation_ids[at], self._number + at, self._in_flight + at, self._sizes[at], self._start
        )
        exchange.request_end = self._start = self._end
        (
            exchange.client_id,
            exchange.acks,
            exchange.max_wait_ms,
            exchange.group_id,
            exchange.transactional_id,
        ) = self._values
        return exchange

    def answered(self, view: Any, pos: int, size: int) -> tuple[Exchange, Repeated] | None:
        """Take the next requests, at least two, whose answers are whole and say the same; a header stands at `pos`.

        None if there are none, or if what they say must be told of each: a throttle, errors, addresses.
        """
        frame_bytes = 4 + frames.SIZE.unpack_from(view, pos)[0]
        shape = self._plan.shapes.get(frame_bytes - frames.RESPONSE_HEAD_BYTES)
        if shape is None:
            return None
        unpack, values, (throttle_ms, error_code, errors, carries_addresses) = shape
        if throttle_ms > 0 or errors or carries_addresses:
            return None
        at = self._at
        count = min(MOST, len(self._sizes) - at, (size - pos) // frame_bytes)
        while count > 1:
            unpack_ids, unpack_rest = _unpackers(unpack.__self__, frame_bytes, count)
            correlation_ids = self._correlation_ids[at : at + count]
            rest = (frame_bytes - 4, *values) * count
            if [*unpack_ids(view, pos)] == correlation_ids and unpack_rest(view, pos) == rest:
                break
            count //= 2
        else:
            return None
        sizes = self._sizes[at + 1 : at + count]
        exchange = self.take()
        exchange.response_bytes = frame_bytes
        exchange.throttle_ms = throttle_ms
        exchange.error_code = error_code
        exchange.decoded = FULL
        self._at = at + count
        return exchange, Repeated(exchange, correlation_ids[1:], sizes)


@lru_cache(maxsize=256)
def _unpackers(looks: Struct, frame_bytes: int, count: int) -> tuple[Unpack, Unpack]:
    """What unpacks the ids of so many answers, and what their sizes and the bytes that a scan looks at."""
    frame = f"i4x{looks.format.lstrip('>')}{frame_bytes - 8 - looks.size}x"
    return Struct(">" + count * f"4xi{frame_bytes - 8}x").unpack_from, Struct(">" + count * frame).unpack_from
