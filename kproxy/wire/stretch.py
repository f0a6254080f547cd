"""Many segments of a captured connection in one go: what `Session.receive` does with each, where it has no choice.

Duty: requests that begin as an earlier one did, whole answers to the request that waits longest, and what lies in the
middle of a frame. Everything else goes to `receive` itself, from the byte on where it is something else; so the session
alone decides, and what it tells does not depend on who read its bytes. A test holds the two against each other.

Memory: per session and API version in use, the first bytes of its requests (session.MAX_USUAL_PREFIX each), and EVENTS
events. Refuses to know TCP, and why the segments are in order.
"""

from collections.abc import Callable, Iterable
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.wire import frames
from kproxy.wire.captured import CapturedSession
from kproxy.wire.events import BROKER, CLIENT, FULL, NONE, UNANSWERED, Exchange
from kproxy.wire.pairing import LIMIT
from kproxy.wire.session import SMALL_ANSWER, Session, bound

EVENTS = 64  # told at a time

# What unpacks a request's head and the bytes behind it, how many bytes that are, those bytes, and what is known then.
Opening = tuple[Callable[[Any, int], tuple[Any, ...]], int, bytes, Any, tuple[Any, ...]]


class Reader:
    """Reads the stretches of one session."""

    __slots__ = ("_openings", "_session")

    def __init__(self, session: CapturedSession) -> None:
        self._session = session
        self._openings: dict[int, Opening] = {}

    def read(
        self,
        whole: memoryview,
        segments: Iterable[tuple[int, int, int, int]],
        flip: int,
        now: int,
        tell: Callable[[], None],
    ) -> int:
        """Segments as (side ^ flip, start, end, time) of `whole`; returns the time that is reached.

        `tell` is called when the session has events.
        """
        session = self._session
        events, handlers, received = session.events, session._handlers, session._received
        framed_requests, framed_answers = Session._requests, Session._answers
        requests, answers = self._requests, self._answers
        for side, start, end, time_ns in segments:
            if time_ns > now:
                now = time_ns
            side ^= flip
            if side == CLIENT:
                read = requests(whole, start, end, now) if handlers[CLIENT] is framed_requests else start
            else:
                read = answers(whole, start, end, now) if handlers[BROKER] is framed_answers else start
            received[side] += read - start
            if read < end:
                session.receive(side, whole[read:end], now)
                if side == CLIENT:
                    self._learn()
            if len(events) >= EVENTS:
                tell()
        if events:
            tell()
        return now

    def _requests(self, whole: memoryview, pos: int, end: int, now: int) -> int:
        """Read requests; returns where something begins that the session must see."""
        session = self._session
        left = session._client_left
        if left:
            if session._client_prefix is not None:
                return pos
            if left > end - pos:
                if session._client_body is not None:
                    session._client_body += whole[pos:end]
                elif session._client_walker is not None:
                    session._walk_request(whole, pos, end)
                session._client_left = left - (end - pos)
                return end
            exchange = session._client_exchange
            if exchange is None or exchange.outcome is not UNANSWERED or session._handshake is not None:
                return pos
            if session._client_body is not None or session._client_walker is not None:
                return pos
            session._client_exchange = None
            session._client_left = 0
            session.completed[0] += 1
            exchange.request_end = now
            pos += left
        elif session._client_head:
            return pos
        pending, openings = session.pending, self._openings
        unpack_head, max_request = frames.REQUEST_HEAD.unpack_from, session._max_request
        while end - pos >= frames.REQUEST_HEAD_BYTES:
            length, key_version, correlation_id = unpack_head(whole, pos)
            opening = openings.get(key_version)
            if opening is None:
                return pos
            unpack, size, prefix, plan, values = opening
            in_flight = len(pending)
            if end - pos < size or not size <= length + 4 <= max_request or in_flight >= LIMIT:
                return pos
            if unpack(whole, pos)[3] != prefix:
                return pos
            exchange = Exchange(plan, correlation_id, session._number, in_flight, length + 4, now)
            (
                exchange.client_id,
                exchange.acks,
                exchange.max_wait_ms,
                exchange.group_id,
                exchange.transactional_id,
            ) = values
            session._number += 1
            pending.append(exchange)
            stop = pos + 4 + length
            if plan.request_reader is not None:
                session._read_request(exchange, whole, pos + 12, stop, end, now)
            if stop > end:
                session._client_exchange = exchange
                session._client_left = stop - end
                return end
            exchange.request_end = now
            session.completed[0] += 1
            pos = stop
        return pos

    def _learn(self) -> None:
        """Remember how a request began that the session has read."""
        unpack, size, key_version, prefix, plan, values = self._session._usual
        if plan.known:
            self._openings[key_version] = unpack, size, prefix, plan, values

    def _answers(self, whole: memoryview, pos: int, end: int, now: int) -> int:
        """Read answers; returns where something begins that the session must see."""
        session = self._session
        left = session._broker_left
        keep = session._broker_keep
        if left > end - pos:
            if keep is not None:
                keep += whole[pos:end]
            elif session._walker is not None:
                session._walker.feed(whole, pos, end)
                bound(session._walker)
            session._broker_left = left - (end - pos)
            return end
        if session._broker_head or session._handshake is not None:
            return pos
        if left:
            begun = session._broker_exchange
            if keep is None or begun is None or begun.request_end == NONE:
                return pos
            keep += whole[pos : pos + left]
            session._broker_exchange = session._broker_keep = None
            session._broker_left = 0
            self._answered(begun, memoryview(keep), 0, len(keep), now)
            pos += left
        pending = session.pending
        unpack = frames.RESPONSE_HEAD.unpack_from
        while end - pos >= frames.RESPONSE_HEAD_BYTES and pending:
            exchange = pending[0]
            length, correlation_id = unpack(whole, pos)
            if (
                exchange.correlation_id != correlation_id
                or length < frames.MIN_RESPONSE
                or exchange.request_end == NONE
            ):
                return pos
            stop = pos + 4 + length
            if stop > end and (length + 4 > SMALL_ANSWER or exchange.plan.scan is None):
                return pos
            pending.popleft()
            exchange.response_bytes = length + 4
            exchange.response_start = now
            if stop > end:
                session._broker_left = stop - end
                session._broker_exchange = exchange
                session._broker_keep = bytearray(whole[pos:end])
                return end
            self._answered(exchange, whole, pos, stop, now)
            pos = stop
        return pos

    def _answered(self, exchange: Exchange, buffer: memoryview, start: int, stop: int, now: int) -> None:
        """An answer is whole: read it."""
        session = self._session
        plan = exchange.plan
        if plan.response_reader is not None:
            session._read_answer(exchange, buffer, start + 8, stop, now)
        elif plan.scan is not None:
            try:
                exchange.throttle_ms, exchange.error_code, exchange.errors, _ = plan.scan(buffer, start + 8, stop)
                exchange.decoded = FULL
            except ProtocolError as fault:
                session._unread_answer(exchange, fault, now)
        session.completed[1] += 1
        session._answered(exchange, now)
