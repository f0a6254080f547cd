"""Work on one frame that would exceed the time of one call: done in slices, so that other sessions run in between.

A session with such work keeps the frame, puts the rest of its view into `Session.backlog` and the work into
`Session.slow`. Each `resume` of that side does one slice; an owner with many sessions does the slices itself instead,
in its own order (`proxy/relay/slow_lanes.py`), and resumes the session when the work is done. Work can be restarted,
since it has no effect before its last slice. Refuses to know the kind of work.
"""

from collections.abc import Callable, Generator
from typing import Any

from kproxy.wire.events import CLIENT, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.observing.keeping import emitted
from kproxy.wire.observing.kept import Kept


class SlowWork:
    """Work in slices. begin(frame): a generator that yields between slices, then returns or raises."""

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
        self.elsewhere = elsewhere  # the owner calls it once: see `Later`
        self.frame = memoryview(frame)  # begins with its size; an edited frame replaces it
        self.is_done = False
        self.result: Any = None
        self.fault: Exception | None = None  # the exception that ended it
        # The session sets these:
        self.is_obeyed = False  # the result was applied, and the frame is being walked
        self.held_bytes = 0  # bytes of a response in the budget for held bytes
        self.kept: tuple[Kept | None, Any] = None, None  # the unedited response, and the Kept that keeps it
        self.at = 0  # position of the walk in the frame
        self._begin: Callable[[memoryview], Generator[None, None, Any]] | None = begin
        self._slices: Generator[None, None, Any] | None = None

    def step(self) -> bool:
        """Do one slice; return whether the work is done."""
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
        """Drop the results of the slices so far; the next step begins again."""
        self._slices = None

    def drop(self) -> None:
        """Drop the work: its result is no longer needed."""
        self._end(None, None)

    def take(self) -> Any:
        """Return the result. Raises ProtocolError, or the exception of a defect."""
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
    """The part of a session that has the slow work of its sides."""

    __slots__ = ("_handlers", "_interest", "_needs_finish", "_rest", "slow")

    slow: tuple[SlowWork | None, SlowWork | None]  # per side: work that precedes its backlog
    _handlers: list[Any]
    _interest: Interest
    _needs_finish: bool
    _rest: Any

    def _begin_slow(self, side: int, work: SlowWork) -> None:
        """Begin work on a side, a slice per call."""
        self.slow = (work, self.slow[1]) if side == CLIENT else (self.slow[0], work)
        self._handlers[side] = type(self)._deciding if side == CLIENT else type(self)._editing

    def _end_slow(self, side: int, view: Any) -> None:
        """End the work of a side; the side continues with this view."""
        self.slow = (None, self.slow[1]) if side == CLIENT else (self.slow[0], None)
        self._handlers[side] = type(self)._requests if side == CLIENT else type(self)._answers
        self._rest = view
        self._needs_finish = True

    def _drop_slow(self) -> None:
        """Drop the work of both sides, which are closed."""
        for work in self.slow:
            if work is not None:
                work.drop()
                self._interest.held.release(work.held_bytes)
                if work.kept[0] is not None:
                    emitted(work.kept[0], work.exchange)
        self.slow = NOTHING_SLOW

    def _deciding(self, view: Any, now: int) -> list[tuple[int, Any]]:
        """Take frames of the client after a request that is decided in slices."""
        raise NotImplementedError

    def _editing(self, view: Any, now: int) -> list[tuple[int, Any]]:
        """Take frames of the broker after a response that is edited in slices."""
        raise NotImplementedError

    def _requests(self, view: Any, now: int) -> list[tuple[int, Any]]:
        raise NotImplementedError

    def _answers(self, view: Any, now: int) -> list[tuple[int, Any]]:
        raise NotImplementedError
