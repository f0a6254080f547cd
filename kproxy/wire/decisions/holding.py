"""Requests that are decided before they are forwarded: held until they are complete and decided.

If the decision needs the complete request, the session copies the request as it arrives. If the decision would exceed
the time of one call (`Later`), or if the request is large and read for its topic-partitions, the work is done in slices
(`slow_work.py`): the client's next bytes wait meanwhile, and the broker's side continues. Bounds: MAX_HELD_REQUEST, and
the budget for held bytes. Refuses to know the basis of decisions.
"""

from collections.abc import Generator
from functools import partial
from typing import Any

from kproxy.protocol.apis import SASL_AUTHENTICATE
from kproxy.wire.decisions.authorizer import MAX_HELD_REQUEST, Answer, Close, Decision, Hold, Later, Replace
from kproxy.wire.decisions.slow_work import SlowWork
from kproxy.wire.events import BROKER, CLIENT, Exchange
from kproxy.wire.login.raw_sasl import RawSaslSides
from kproxy.wire.observing.keeping import keep_request
from kproxy.wire.reading import Piece, Reading
from kproxy.wire.state import SMALL_BODY


class Holding(RawSaslSides):
    """The part of the client's side that calls the authorizer."""

    __slots__ = ()

    def _authorize(self, exchange: Exchange, view: Any, pos: int, stop: int, now: int) -> Any:
        """Let the authorizer decide the request at `pos`, which ends at `stop` or later.

        Return None to forward it unchanged, otherwise the bytes that the broker gets instead: b"" if the request is
        held, answered or refused.
        """
        authorizer = self._authorizer
        if authorizer is None:
            return None
        decision: Decision | Hold | Later
        if stop - pos == exchange.request_bytes:
            decision = authorizer.decide(exchange, view[pos:stop])
            if decision is None:
                return None
            if isinstance(decision, Later):
                return self._decide_later(exchange, decision, view[pos:stop], now)
            return self._obey(exchange, decision, now)
        decision = authorizer.at_header(exchange)
        if decision is None:
            return None
        if not isinstance(decision, Hold):
            return self._obey(exchange, decision, now)
        self._client_held = bytearray()
        self._client_exchange = exchange
        self._client_left = exchange.request_bytes
        if exchange.plan.kept is not None:
            exchange.request_frame = exchange.response_frame = None  # until it is complete
        if exchange.request_bytes > MAX_HELD_REQUEST:
            text = (
                f"{exchange.plan.title} request of {exchange.request_bytes} bytes must be held until the policy has "
                f"decided, and at most {MAX_HELD_REQUEST} bytes are: send less at a time"
            )
            self._cannot_hold(exchange, "held_too_large", text, now)
            return b""
        self._interest.held.begin(self, now)
        if self._keep_request(exchange, view[pos:stop], now):
            self._client_left -= stop - pos
        return b""

    def _hold(self, reading: Reading) -> None:
        """Take the next bytes of a held request, and decide it when it is complete."""
        held, exchange = self._client_held, self._client_exchange
        assert held is not None and exchange is not None and self._authorizer is not None
        reading.pos = reading.sent = min(self._client_left, reading.size)
        if not self._keep_request(exchange, reading.view[: reading.pos], reading.now):
            return
        self._client_left -= reading.pos
        if self._client_left:
            return
        self._interest.held.end(self)
        frame = memoryview(held)
        self._whole_held(exchange, frame)
        decision = self._authorizer.decide(exchange, frame)
        if isinstance(decision, Later):
            self._begin_slow(CLIENT, SlowWork(exchange, decision.begin, frame, decision.elsewhere))
        elif exchange.plan.request_reader is not None and len(frame) > SMALL_BODY:
            self._begin_slow(CLIENT, SlowWork(exchange, partial(_decided, decision), frame))
        else:
            self._obey_held(exchange, decision, frame, reading.now)
            self._pass_held(exchange, frame, reading.pieces, reading.now)

    def _whole_held(self, exchange: Exchange, frame: Any) -> None:
        """Note that a held request is complete."""
        self.completed[0] += 1
        if exchange.plan.api_key == SASL_AUTHENTICATE:
            self._frames_left = 0  # after a login other rules may decide further frames: read them in the next call
        if exchange.plan.kept is not None:
            keep_request(exchange.plan.kept, exchange, frame)

    def _decide_later(self, exchange: Exchange, decision: Later, frame: Any, now: int) -> bytes:
        """Hold a request that is complete in a view, until a later call has its decision."""
        if not self._interest.held.take(len(frame), now, self):
            self._cannot_hold(exchange, "held_too_many", self._no_room(exchange), now)
            return b""
        self._client_held = bytearray(frame)
        self._client_exchange = exchange
        self._whole_held(exchange, frame)
        self._begin_slow(CLIENT, SlowWork(exchange, decision.begin, self._client_held, decision.elsewhere))
        return b""

    def _deciding(self, view: Any, now: int) -> list[Piece]:
        """Do a slice of the decision about the client's last request; the client's next frames wait."""
        pieces: list[Piece] = []
        work = self.slow[CLIENT]
        assert work is not None
        exchange = work.exchange
        if not work.step():
            self._leave(view)
            return pieces
        if not work.is_obeyed:
            frame = work.frame
            self._obey_held(exchange, work.take(), frame, now)
            if self._handlers[CLIENT] is not type(self)._deciding:
                return pieces
            if exchange.plan.request_reader is not None and len(frame) > SMALL_BODY and not self._client_swallow:
                self._begin_walk(exchange)
        if self._client_walker is not None:
            size = len(work.frame)
            work.at, _ = self._walk(self._client_walker, work.frame, work.at, size)
            if work.at < size:
                self._client_left = size - work.at
                self._note_walked(exchange, self._client_walker, now)
                self._leave(view)
                return pieces
            self._client_left = 0
        if exchange.plan.api_key == SASL_AUTHENTICATE:
            self._frames_left = 0  # after a login other rules may decide further frames: read them in the next call
        self._end_slow(CLIENT, view)
        self._pass_held(exchange, work.frame, pieces, now)
        return pieces

    def _obey_held(self, exchange: Exchange, decision: Decision, frame: Any, now: int) -> None:
        """Apply the decision about a held request, without sending it yet, and read its first fields."""
        self._client_replacement = None if decision is None else self._obey(exchange, decision, now)
        plan = exchange.plan
        if self._handlers[CLIENT] is not type(self)._closed and not self._client_swallow and plan.prefix is not None:
            self._read_prefix(exchange, frame, 0, len(frame), len(frame), now)

    def _pass_held(self, exchange: Exchange, frame: Any, pieces: list[Piece], now: int) -> None:
        """Forward or answer a held request that is decided; read the body of a short one (long ones were walked)."""
        if self._handlers[CLIENT] is type(self)._closed:
            return
        replacement, self._client_replacement = self._client_replacement, None
        self._interest.held.release(len(frame))
        self._client_held = self._client_exchange = None
        exchange.request_end = now
        if not self._client_swallow:
            if exchange.plan.request_reader is not None and len(frame) <= SMALL_BODY:  # a larger body has been walked
                self._read_request(exchange, frame, 0, len(frame), now, kept=True)
            pieces.append((BROKER, frame if replacement is None else replacement))
        self._whole_request(exchange, pieces, now)

    def _keep_request(self, exchange: Exchange, part: Any, now: int) -> bool:
        """Copy the next bytes of a held request. False: the budget of all connections is used up, a fatal fault."""
        assert self._client_held is not None
        if not self._interest.held.take(len(part), now, self):
            self._cannot_hold(exchange, "held_too_many", self._no_room(exchange), now)
            return False
        self._client_held += part
        return True

    def _no_room(self, exchange: Exchange) -> str:
        return (
            f"{exchange.plan.title} request must be held until the policy has decided, and all connections "
            f"together hold {self._interest.held.limit_bytes} bytes already: let fewer clients send at once"
        )

    def give_up_held(self, now: int) -> None:
        """Close the session, because its held request has used the common budget for too long; send no byte of it."""
        exchange = self._client_exchange
        if self._client_held is not None and exchange is not None:
            text = (
                f"{exchange.plan.title} request is not whole yet, and others need its room: all connections together "
                f"hold {self._interest.held.limit_bytes} bytes until the policy has decided; see max_held_bytes"
            )
            self._cannot_hold(exchange, "held_too_many", text, now)

    def _cannot_hold(self, exchange: Exchange, kind: str, text: str, now: int) -> None:
        assert self._authorizer is not None
        self._authorizer.too_large(exchange)
        self._fatal(CLIENT, kind, text, exchange.plan, now)

    def _obey(self, exchange: Exchange, decision: Answer | Replace | Close, now: int) -> bytes:
        """Apply the authorizer's decision about a request; return the bytes that the broker gets instead."""
        if isinstance(decision, Replace):
            return decision.frame
        if isinstance(decision, Answer):
            self._swallow(exchange, decision)
        else:
            self._fatal(CLIENT, "refused", decision.text, exchange.plan, now)
        return b""

    # --- defined by ClientSide ---------------------------------------------------------------------------------------

    def _begin_walk(self, exchange: Exchange) -> None:
        raise NotImplementedError

    def _read_prefix(self, exchange: Exchange, view: Any, pos: int, end: int, size: int, now: int) -> int:
        raise NotImplementedError

    def _read_request(self, exchange: Exchange, view: Any, pos: int, end: int, now: int, *, kept: bool = False) -> int:
        raise NotImplementedError

    def _whole_request(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        raise NotImplementedError


def _decided(decision: Decision, frame: memoryview) -> Generator[None, None, Decision]:
    """Return a decision that is already made, as a generator without slices."""
    yield from ()
    return decision
