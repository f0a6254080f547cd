"""Keeps recent exchanges, packed as rows of tables, and detects events that trigger a dump.

Duty: a sink of a relaying process. Rows of all tables are packed as in the recorder (`tables.live.portions`), and
nothing is written. Signs of a fault (a slow exchange, an error of the cluster, a broker that disconnects with requests
pending) are passed to `on_trigger`, which must be quick.

Bounded: `limit_bytes` plus a portion, and `span_ns` back from now, in portions of PORTION_S; the oldest are dropped
first. Refuses to know files, and the reaction to a trigger.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection
from time import monotonic_ns
from typing import NamedTuple

from kproxy.protocol.error_codes import error_name
from kproxy.tables.live.defects import Defects
from kproxy.tables.live.portions import Batches, Portion, Tally
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import NONE, Closed, Event, Exchange, Unanswered

PORTION_S = 5
SLOW, ERROR, DISCONNECT = "slow", "error", "disconnect"

# Errors that indicate trouble in the cluster, not an invalid request.
TROUBLE = frozenset((-1, 2, 7, 13, 19, 20, 56))
# APIs whose response waits for others: members of a group, records, acknowledgements.
_WAITS = frozenset((11, 14, 78, 79))
_MS = 1_000_000
_CHECK_EVERY = 16  # calls, of a few events each, between two checks of the clock and the portion's size

log = logging.getLogger("kproxy.flight")


class Trigger(NamedTuple):
    """The kind, SLOW, ERROR or DISCONNECT, and a line for readers."""

    kind: str
    text: str


class Kept:
    """The rows of a few seconds."""

    def __init__(self, full_ns: int, size: int, rows: Portion) -> None:
        self.full_ns = full_ns
        self.size = size
        self._rows: Portion | Batches = rows

    def batches(self) -> Batches:
        """Return the rows by column, converted at the first call; call it on a thread, one at a time."""
        if isinstance(self._rows, Portion):
            self._rows = self._rows.batches()
        return self._rows


class Headers:
    """A sink: keeps the exchanges and connections of a process."""

    def __init__(
        self,
        limit_bytes: int,
        span_ns: int,
        *,
        slow_ns: int = 0,
        triggers: Collection[str] = (),
        on_trigger: Callable[[Trigger], None] | None = None,
    ) -> None:
        """slow_ns: duration from which an exchange is slow, apart from the allowed wait of a Fetch or in a group."""
        self.limit_bytes = limit_bytes
        self.span_ns = span_ns
        self.held_bytes = 0  # of complete portions
        self._defects = Defects(log)
        self._slow_ns = slow_ns if SLOW in triggers else 1 << 62
        self._trouble = TROUBLE if ERROR in triggers else frozenset()
        self._hangs_up = DISCONNECT in triggers
        self._on_trigger = on_trigger
        self._portions: deque[Kept] = deque()
        self._open = Portion()
        self._open_until_ns = 0
        self._calls = 0
        self._tallies: dict[int, Tally] = {}  # of open connections

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        tally = self._tallies[info.id] = Tally(info, None)

        def take(events: list[Event]) -> None:
            self._calls += 1
            if not self._calls % _CHECK_EVERY or self._open_until_ns == 0:
                now_ns = monotonic_ns()
                if now_ns >= self._open_until_ns or self._open.full:
                    self._turn(now_ns)
            for fault in self._open.add(tally, events):
                self._defects.note(fault)
            for event in events:
                if isinstance(event, Exchange):
                    self._check(tally.info, event)
                elif isinstance(event, Unanswered):
                    self._unanswered(tally.info, event)
                elif isinstance(event, Closed):
                    self._tallies.pop(info.id, None)

        return take

    def taken(self) -> "tuple[list[Kept], list[Tally]]":
        """Return all rows so far, in portions that no longer change, and the open connections."""
        self._turn(monotonic_ns())
        return list(self._portions), list(self._tallies.values())

    def _turn(self, now_ns: int) -> None:
        """Start a new portion; drop the oldest."""
        if self._open.events:
            size = self._open.size
            self._portions.append(Kept(now_ns, size, self._open))
            self.held_bytes += size
        self._open = Portion()
        self._open_until_ns = now_ns + PORTION_S * 1_000 * _MS
        while self._portions:
            oldest = self._portions[0]
            is_room = self.held_bytes <= self.limit_bytes or len(self._portions) == 1
            if is_room and oldest.full_ns >= now_ns - self.span_ns:
                break
            self.held_bytes -= oldest.size
            self._portions.popleft()

    # --- triggers ----------------------------------------------------------------------------------------------------

    def _check(self, info: ConnectionInfo, exchange: Exchange) -> None:
        if exchange.response_start != NONE and exchange.request_end != NONE:
            took_ns = exchange.response_start - exchange.request_end
            if took_ns >= self._slow_ns and exchange.plan.api_key not in _WAITS:
                took_ns -= (exchange.max_wait_ms or 0) * _MS
                if took_ns >= self._slow_ns:
                    self._trigger(SLOW, info, exchange, f"took {took_ns / 1e9:.3f} s")
        if exchange.errors and self._trouble:
            code = next((code for code in exchange.errors if code in self._trouble), 0)
            if code:
                self._trigger(ERROR, info, exchange, f"was answered {error_name(code)}")

    def _unanswered(self, info: ConnectionInfo, event: Unanswered) -> None:
        if self._hangs_up and event.cause in ("broker_closed", "broker_reset", "desync"):
            self._trigger(DISCONNECT, info, event.exchange, f"was not answered: {event.cause}")

    def _trigger(self, kind: str, info: ConnectionInfo, exchange: Exchange, text: str) -> None:
        if self._on_trigger is not None:
            broker = "" if info.broker_id is None else f" of broker {info.broker_id}"
            self._on_trigger(Trigger(kind, f"{exchange.plan.title}{broker}, connection {info.id}, {text}"))
