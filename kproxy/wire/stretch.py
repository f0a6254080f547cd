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
from kproxy.wire.interest import API_VERSIONS
from kproxy.wire.pairing import LIMIT
from kproxy.wire.session import Session, bound

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
        for side, start, end, time_ns in segments:
            if time_ns > now:
                now = time_ns
            side ^= flip
            if side == CLIENT:
                read = self._requests(whole, start, end, now) if handlers[CLIENT] is Session._requests else start
            else:
                read = self._answers(whole, start, end, now) if handlers[BROKER] is Session._answers else start
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
        exchange = session._client_exchange
        left = session._client_left
        if left:
            if session._client_prefix is not None or session._client_body is not None:
                return pos
            if left > end - pos:
                if session._client_walker is not None:
                    session._walk_request(whole, pos, end)
                session._client_left = left - (end - pos)
                return end
            if session._client_walker is not None or session._handshake is not None:
                return pos
            if exchange is None or exchange.outcome is not UNANSWERED:
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
            pos += length + 4
            if pos > end:
                session._client_exchange = exchange
                session._client_left = pos - end
                return end
            exchange.request_end = now
            session.completed[0] += 1
        return pos

    def _learn(self) -> None:
        """Remember how a request began that the session has read."""
        unpack, size, key_version, prefix, plan, values = self._session._usual
        # ApiVersions says what the client's software is, which may be another than last time
        if plan.known and plan.request_reader is None and plan.api_key != API_VERSIONS:
            self._openings[key_version] = unpack, size, prefix, plan, values

    def _answers(self, whole: memoryview, pos: int, end: int, now: int) -> int:
        """Read answers; returns where something begins that the session must see."""
        session = self._session
        left = session._broker_left
        if left:
            if left <= end - pos:
                return pos
            if session._broker_keep is not None:
                session._broker_keep += whole[pos:end]
            elif session._walker is not None:
                session._walker.feed(whole, pos, end)
                bound(session._walker)
            session._broker_left = left - (end - pos)
            return end
        if session._broker_head or session._handshake is not None:
            return pos
        pending = session.pending
        unpack = frames.RESPONSE_HEAD.unpack_from
        while end - pos >= frames.RESPONSE_HEAD_BYTES and pending:
            exchange = pending[0]
            length, correlation_id = unpack(whole, pos)
            stop = pos + 4 + length
            plan = exchange.plan
            if exchange.correlation_id != correlation_id or length < frames.MIN_RESPONSE or stop > end:
                return pos
            if plan.response_reader is not None or exchange.request_end == NONE:
                return pos
            pending.popleft()
            exchange.response_bytes = length + 4
            exchange.response_start = now
            if plan.scan is not None:
                try:
                    exchange.throttle_ms, exchange.error_code, exchange.errors, _ = plan.scan(whole, pos + 8, stop)
                    exchange.decoded = FULL
                except ProtocolError as fault:
                    session._unread_answer(exchange, fault, now)
            session.completed[1] += 1
            session._answered(exchange, now)
            pos = stop
        return pos
