"""Ends idle and old connections: the settings idle_timeout_s and max_age_s.

One timer of the event loop serves all connections of a process. Each connection has its place in a timer wheel of whole
seconds and is checked a few times per idle_timeout_s, at least once a minute, from counters that the session has
anyway: the relay does no work for it. An idle connection therefore ends up to a quarter of its timeout and a second
late. It ends as in a drain: kproxy delivers pending answers, and the client sees the close between two requests.

Bounded: an entry per connection with such a limit, kept for at most a minute after its end; SLICE entries are checked
at once. Refuses to know the purpose of limits, and sockets.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from time import monotonic

from kproxy.proxy.config.limits import AGE_JITTER, Limits
from kproxy.proxy.relay.relay import Relay
from kproxy.wire.events import CLIENT

SLICE = 256
_CHECKS = 4  # checks per idle_timeout_s
_LONGEST_S = 60.0  # s between two checks of a connection, so that closed ones are forgotten
BUSY_S = 30.0  # s for an old connection to become idle; then no new request is read
UNANSWERED_S = 600.0  # s for its pending answers after that: a JoinGroup may take minutes

Reached = Callable[[str], None]  # called with the setting that ended a connection


class _Watched:
    """A connection with a limit, by number, so that a closed one can be forgotten."""

    __slots__ = ("ends_at", "idle_s", "idle_since", "number", "reached", "received", "steps")

    def __init__(self, number: int, limits: Limits, now: float, reached: Reached) -> None:
        self.number = number
        self.idle_s = limits.idle_timeout_s
        self.idle_since = now
        self.received = 0
        age_s = limits.max_age_s
        self.ends_at = float("inf") if age_s is None else now + age_s * (1 - AGE_JITTER * random.random())
        self.steps = _ENDING  # remaining steps for a connection beyond max_age_s
        self.reached = reached

    def due(self, now: float) -> float:
        """Return the time of its next check."""
        idle_s = self.idle_s if self.idle_s is not None and self.steps is _ENDING else _LONGEST_S * _CHECKS
        return min(self.ends_at, now + idle_s / _CHECKS, now + _LONGEST_S)


# The steps that end an old connection, and the time allowed for each in seconds.
_ENDING: tuple[tuple[Callable[[Relay], None], float], ...] = (
    (lambda relay: relay.finish("max_age"), BUSY_S),
    (lambda relay: relay.drain("max_age"), UNANSWERED_S),
    (lambda relay: relay.close("max_age"), _LONGEST_S),
)


class Ageing:
    """relays: the open ones by number; their owner removes closed ones."""

    def __init__(self, relays: Mapping[int, Relay]) -> None:
        self._relays = relays
        self._wheel: dict[int, list[_Watched]] = {}  # by the second, rounded up
        self._next_second = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._wheel.values()))

    def watch(self, relay: Relay, limits: Limits, reached: Reached) -> None:
        """Check a connection from now on."""
        now = monotonic()
        if self._timer is None:
            self._next_second = int(now) + 1
            self._timer = asyncio.get_running_loop().call_later(self._next_second - now, self._tick)
        self._place(_Watched(relay.number, limits, now, reached), now)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wheel.clear()

    def _place(self, watched: _Watched, now: float) -> None:
        second = max(int(watched.due(now)) + 1, self._next_second)
        self._wheel.setdefault(second, []).append(watched)

    def _tick(self) -> None:
        """Check the connections whose second has come, at most SLICE at once."""
        loop = asyncio.get_running_loop()
        now = monotonic()
        left = SLICE
        while self._next_second <= now and left:
            batch = self._wheel.get(self._next_second, [])
            while batch and left:
                left -= 1
                watched = batch.pop()
                relay = self._relays.get(watched.number)
                if relay is not None and not relay.closed:
                    self._look(watched, relay, now)
            if not batch:
                self._wheel.pop(self._next_second, None)
                self._next_second += 1
        if not left:
            self._timer = loop.call_soon(self._tick)
        elif self._wheel:
            self._timer = loop.call_later(self._next_second - now, self._tick)
        else:
            self._timer = None

    def _look(self, watched: _Watched, relay: Relay, now: float) -> None:
        """End a connection that has reached a limit, or schedule its next check."""
        if now >= watched.ends_at:
            if watched.steps is _ENDING:
                watched.reached("max_age_s")
            step, patience_s = watched.steps[0]
            watched.steps = watched.steps[1:]
            watched.ends_at = now + patience_s
            step(relay)
        elif watched.idle_s is not None and watched.steps is _ENDING:
            seen = relay.counts()
            received = seen.received_bytes[CLIENT]
            if received != watched.received or seen.awaits_answer:
                watched.received = received
                watched.idle_since = now
            elif now - watched.idle_since >= watched.idle_s:
                watched.reached("idle_timeout_s")
                if relay.session.at_boundary(CLIENT):
                    relay.finish("idle_timeout")
                else:  # the rest of an incomplete request does not arrive
                    relay.close("idle_timeout")
                return
        if not relay.closed:
            self._place(watched, now)
