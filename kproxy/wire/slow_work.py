"""Work on one frame that takes longer than a call of a session may: it is done in slices, between which others run.

A session that meets such work keeps the frame, hands the rest of its view back (`Session.backlog`) and has the work in
`Session.slow`. Each `resume` of that side does one slice; an owner with many sessions does them itself instead, in the
order that it wants (`proxy/relay/slow_lanes.py`), and resumes the session when the work is done. Work can be begun
again: it has no effect before its last slice. Refuses to know what the work is.
"""

from collections.abc import Callable, Generator
from typing import Any

from kproxy.wire.events import CLIENT, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.keeping import emitted
from kproxy.wire.kept import Kept


class SlowWork:
    """begin(frame): a generator that yields between two slices and ends with the result; it raises ProtocolError."""

    __slots__ = (
        "_begin",
        "_slices",
        "at",
        "elsewhere",
        "exchange",
        "fault",
        "frame",
        "held_bytes",
        "is_done",
        "is_obeyed",
        "kept",
        "result",
    )

    def __init__(
        self,
        exchange: Exchange,
        begin: Callable[[memoryview], Generator[None, None, Any]],
        frame: Any,
        elsewhere: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.exchange = exchange
        self.elsewhere = elsewhere  # the owner's, who calls it once: see `Later`
        self.frame = memoryview(frame)  # then what is read on, which begins with its size too
        self.is_done = False
        self.result: Any = None
        self.fault: Exception | None = None  # that it ended with
        self.is_obeyed = False  # the session's: the result has been dealt with, and the frame is being walked
        self.held_bytes = 0  # the session's: of an answer, in the budget for held bytes
        self.kept: tuple[Kept | None, Any] = None, None  # the session's: for whom the whole answer is kept
        self.at = 0  # the session's: where that walk has come to
        self._begin: Callable[[memoryview], Generator[None, None, Any]] | None = begin
        self._slices: Generator[None, None, Any] | None = None

    def step(self) -> bool:
        """Do one slice; whether the work is done."""
        if self.is_done or self._begin is None:
            return True
        try:
            if self._slices is None:
                self._slices = self._begin(self.frame)
            next(self._slices)
        except StopIteration as end:
            self._end(end.value, None)
        except Exception as fault:
            self._end(None, fault)
        return self.is_done

    def restart(self) -> None:
        """Give back what the slices so far have made."""
        self._slices = None

    def drop(self) -> None:
        """Nobody waits for the result any more."""
        self._end(None, None)

    def take(self) -> Any:
        """The result. Raises ProtocolError, or what a defect raised."""
        self.is_obeyed = True
        if self.fault is not None:
            raise self.fault
        return self.result

    def _end(self, result: Any, fault: Exception | None) -> None:
        self.is_done = True
        self.result, self.fault = result, fault
        self._begin = self._slices = None


NOTHING_SLOW: tuple[SlowWork | None, SlowWork | None] = (None, None)


class SlowSides:
    """The part of a session whose sides can have such work."""

    __slots__ = ("_handlers", "_interest", "_is_odd", "_rest", "slow")

    slow: tuple[SlowWork | None, SlowWork | None]  # per side: what is done before its backlog is read
    _handlers: list[Any]
    _interest: Interest
    _is_odd: bool
    _rest: Any

    def _begin_slow(self, side: int, work: SlowWork) -> None:
        """From now on the side does this work, a slice per call."""
        self.slow = (work, self.slow[1]) if side == CLIENT else (self.slow[0], work)
        self._handlers[side] = type(self)._deciding if side == CLIENT else type(self)._editing

    def _end_slow(self, side: int, view: Any) -> None:
        """The work is done: the side reads on, first of all this view."""
        self.slow = (None, self.slow[1]) if side == CLIENT else (self.slow[0], None)
        self._handlers[side] = type(self)._requests if side == CLIENT else type(self)._answers
        self._rest = view
        self._is_odd = True

    def _drop_slow(self) -> None:
        """Drop what is done in slices: its side is closed."""
        for work in self.slow:
            if work is not None:
                work.drop()
                self._interest.held.release(work.held_bytes)
                if work.kept[0] is not None:
                    emitted(work.kept[0], work.exchange)
        self.slow = NOTHING_SLOW

    def _deciding(self, view: Any, now: int) -> list[tuple[int, Any]]:
        """Frames of the client, behind a request that is decided in slices."""
        raise NotImplementedError

    def _editing(self, view: Any, now: int) -> list[tuple[int, Any]]:
        """Frames of the broker, behind an answer that is edited in slices."""
        raise NotImplementedError

    def _requests(self, view: Any, now: int) -> list[tuple[int, Any]]:
        raise NotImplementedError

    def _answers(self, view: Any, now: int) -> list[tuple[int, Any]]:
        raise NotImplementedError
