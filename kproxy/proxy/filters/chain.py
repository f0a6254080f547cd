"""Filters: the only way to take part in a connection, and the chain of a connection's filters.

A request passes the filters in the order of the chain until one decides it. A held answer passes them in the same
order, and each may replace it. Every filter gets the events afterwards. A filter overrides only the methods that it
needs; the others cost nothing. `connection/filtering.py` has the order.

A filter's cluster part declares the requests and whole answers that the filter needs in the `Interest` of its sessions
(`filtering.py`): requests by `authorizes`, answers by the plan (`Interest.held_plan`). Events need no declaration, but
the compiled core relays no connection whose filters need all of them. Refuses to know the purpose of a filter.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from kproxy.protocol.codec import Slices
from kproxy.wire.decisions.authorizer import Answer, Authorizer, Close, Decision, Hold, Later
from kproxy.wire.events import Event, Exchange
from kproxy.wire.state import Transform


class Filter:
    """Takes part in the exchanges of one connection. Each method lets everything pass."""

    __slots__ = ()

    # --- requests: `wire/decisions/authorizer.py` has the contract -------------------------------------------------

    def at_header(self, exchange: Exchange) -> Hold | Close | Answer | None:
        """Decide a request whose body may not have arrived; HOLD: decide it when it is complete; None: not mine."""
        return None

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        """Decide a complete request; None: the next filter decides it, after the last one it is forwarded."""
        return None

    @property
    def is_quiet(self) -> bool:
        """Return whether no answer to an earlier request is awaited, so that the compiled core may relay."""
        return True

    def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
        """Return the paths of the fields whose values decide all such requests; None: each needs its own decision."""
        return frozenset()

    def passes(self, exchange: Exchange, frame: Any) -> bool:
        """Return whether requests with the deciding fields of this one pass unchanged."""
        return True

    def too_large(self, exchange: Exchange) -> None:
        """Learn that a request that this filter holds exceeds a limit, and that the connection is closed."""

    # --- answers ------------------------------------------------------------------------------------------------------

    def edit(self, exchange: Exchange, frame: Any) -> bytes | Later | None:
        """Return the edited answer to a request whose plan this filter has set to a held one; None: unchanged."""
        return None

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        """Return the replacement of a held answer; None: unchanged. Raises ProtocolError: it must not leave."""
        return None

    # --- events -------------------------------------------------------------------------------------------------------

    needs_all_events: ClassVar[bool] = True  # False: needs no events of exchanges that the compiled core may relay

    def events(self, events: list[Event]) -> None:
        """Take the events of one call of the session."""


def _overrides(each: Filter, name: str) -> bool:
    return getattr(type(each), name) is not getattr(Filter, name)


class Chain(Filter):
    """The filters of one connection, in their order, as one."""

    __slots__ = ("_answering", "_deciding", "_holder", "allows_core", "sinks")

    def __init__(self, filters: Sequence[Filter], *, holds_answers: bool = True) -> None:
        """holds_answers: the session holds answers for the filters to replace."""
        self._deciding = tuple(each for each in filters if _overrides(each, "decide"))
        self._answering = tuple(each for each in filters if holds_answers and _overrides(each, "answer"))
        self._holder: Filter | None = None  # the filter that holds the newest request, or decides it in slices
        listening = [each for each in filters if _overrides(each, "events")]
        self.sinks: tuple[Callable[[list[Event]], None], ...] = tuple(each.events for each in listening)
        self.allows_core = not any(each.needs_all_events for each in listening)

    @property
    def authorizer(self) -> Authorizer | None:
        """Return the decider of requests for a session; None if no filter decides any."""
        if len(self._deciding) > 1:
            return self
        return self._deciding[0] if self._deciding else None

    @property
    def transform(self) -> Transform | None:
        """Return the transform of held answers for a session; None if no filter replaces any."""
        if len(self._answering) > 1:
            return self.answer
        return self._answering[0].answer if self._answering else None

    def at_header(self, exchange: Exchange) -> Hold | Close | Answer | None:
        for each in self._deciding:
            decision = each.at_header(exchange)
            if decision is not None:
                self._holder = each
                return decision
        return None

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        for number, each in enumerate(self._deciding, 1):
            decision = each.decide(exchange, frame)
            if isinstance(decision, Later):
                self._holder = each
                if number < len(self._deciding):
                    return Later(partial(self._decide_later, exchange, decision, number), decision.elsewhere)
            if decision is not None:
                return decision
        return None

    def _decide_later(self, exchange: Exchange, later: Later, number: int, frame: memoryview) -> Slices[Decision]:
        """Finish a decision in slices, then ask the filters from `number` on unless it has decided."""
        decision: Decision | Later = yield from later.begin(frame)
        for each in self._deciding[number:]:
            if decision is not None:
                break
            decision = each.decide(exchange, frame)
            if isinstance(decision, Later):
                decision = yield from decision.begin(frame)
        return decision  # type: ignore[return-value]

    @property
    def is_quiet(self) -> bool:
        return all(each.is_quiet for each in self._deciding)

    def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
        fields: frozenset[str] = frozenset()
        for each in self._deciding:
            more = each.deciding_fields(exchange, head)
            if more is None:
                return None
            fields |= more
        return fields

    def passes(self, exchange: Exchange, frame: Any) -> bool:
        return all(each.passes(exchange, frame) for each in self._deciding)

    def too_large(self, exchange: Exchange) -> None:
        if self._holder is not None:
            self._holder.too_large(exchange)

    def edit(self, exchange: Exchange, frame: Any) -> bytes | Later | None:
        for each in self._deciding:
            edited = each.edit(exchange, frame)
            if edited is not None:
                return edited
        return None

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        replaced: bytes | None = None
        for each in self._answering:
            replacement = each.answer(exchange, frame)
            if replacement is not None:
                replaced = replacement
                frame = memoryview(replacement)
        return replaced
