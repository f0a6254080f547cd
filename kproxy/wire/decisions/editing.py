"""Large responses that the authorizer edits in slices (`slow_work.py`), while the broker's next bytes wait.

The session then reads the edited response like one from the broker: a small one in one call, a large one with the
walker, whose head is held for the transform. Bound: the frame, in the budget for held bytes. Refuses to know the edit.
"""

from typing import Any

from kproxy.errors import ProtocolError
from kproxy.wire.client_side import ClientSide
from kproxy.wire.decisions.authorizer import Later
from kproxy.wire.decisions.slow_work import SlowWork
from kproxy.wire.events import BROKER, CLIENT, FAILED, Exchange
from kproxy.wire.observing.keeping import keep_answer
from kproxy.wire.reading import Piece, Reading
from kproxy.wire.state import SMALL_BODY


class Editing(ClientSide):
    """The part of the broker's side that edits large responses."""

    __slots__ = ()

    def _edit_later(self, exchange: Exchange, edit: Later, frame: Any, now: int) -> None:
        """Begin to edit a complete response, which stays in transit until the edit is done."""
        held = self._interest.held
        if not held.take(len(frame), now):
            text = (
                f"{exchange.plan.title} answer must be held until it is edited, and all connections together hold "
                f"{held.limit_bytes} bytes already: let fewer clients ask at once"
            )
            self._give_up(exchange, "desync")
            self._fatal(BROKER, "held_too_many", text, exchange.plan, now)
            return
        work = SlowWork(exchange, edit.begin, bytes(frame))
        work.held_bytes = len(frame)
        self._broker_exchange = exchange
        self._broker_left = len(frame)  # no byte of it was forwarded: later own responses wait
        self._begin_slow(BROKER, work)

    def _editing(self, view: Any, now: int) -> list[Piece]:
        """Do a slice of the edit of the broker's last response; the broker's next frames wait."""
        pieces: list[Piece] = []
        work = self.slow[BROKER]
        assert work is not None
        if not work.step():
            self._leave(view)
            return pieces
        if not work.is_obeyed and not self._edited(work, pieces, now):
            return pieces
        if self._broker_left and not self._walk_edited(work, pieces, now):
            if self.slow[BROKER] is not None:
                self._leave(view)
            return pieces
        self._interest.held.release(work.held_bytes)
        self._end_slow(BROKER, view)
        return pieces

    def _edited(self, work: SlowWork, pieces: list[Piece], now: int) -> bool:
        """Read an edited response if it is small, otherwise begin its walk. False: a fatal fault."""
        exchange = work.exchange
        try:
            edited: bytes | None = work.take()
        except ProtocolError as fault:
            self._unedited(exchange, fault, now)
            return False
        whole = work.frame
        if edited is not None:
            work.frame = memoryview(edited)
        if len(work.frame) > SMALL_BODY:
            work.kept = exchange.plan.kept, whole
            exchange.plan = self._interest.read_on_plan(exchange.plan)
            self._begin_answer(exchange, len(work.frame) - 4, now)
        else:
            replacement = self._read_unedited(exchange, work.frame, now)
            if self.slow[BROKER] is None:
                return False
            self._broker_exchange = None
            self._broker_left = 0
            pieces.append((CLIENT, work.frame if replacement is None else replacement))
            if exchange.plan.kept is not None:
                keep_answer(exchange.plan.kept, exchange, whole)
            self.completed[1] += 1
            self._answered(exchange, now)
            self._after_answer(exchange, pieces, now)
        return self.slow[BROKER] is not None

    def _walk_edited(self, work: SlowWork, pieces: list[Piece], now: int) -> bool:
        """Walk an edited response up to this call's limit; return whether it was read to its end."""
        exchange, frame = work.exchange, work.frame
        response_bytes = exchange.response_bytes
        exchange.response_bytes = len(frame)  # the forwarded head must have the size of the edited frame
        self._handlers[BROKER] = type(self)._answers
        reading = Reading(BROKER, frame, now, pieces)
        reading.pos = work.at
        self._continue_answer(reading)
        work.at = reading.pos
        exchange.response_bytes = response_bytes
        if self.slow[BROKER] is None:
            return False
        if self._broker_left:
            self._handlers[BROKER] = type(self)._editing
            return False
        kept, whole = work.kept
        if kept is not None:
            keep_answer(kept, exchange, whole)
            work.kept = None, None
        return True

    def _unedited(self, exchange: Exchange, fault: ProtocolError, now: int) -> None:
        exchange.decoded = FAILED
        text = f"{exchange.plan.title} answer does not decode ({fault}); it may list what its client may not see"
        self._fatal(BROKER, "malformed_answer", text, exchange.plan, now)

    # --- defined by BrokerSide ---------------------------------------------------------------------------------------

    def _begin_answer(self, exchange: Exchange, length: int, now: int) -> None:
        raise NotImplementedError

    def _continue_answer(self, reading: Reading) -> None:
        raise NotImplementedError

    def _read_unedited(self, exchange: Exchange, frame: Any, now: int) -> bytes | None:
        raise NotImplementedError

    def _after_answer(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        raise NotImplementedError
