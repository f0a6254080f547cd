"""Ends connections that nobody uses, or that are old: the settings idle_timeout_s and max_age_s.

One timer of the loop for all connections of a process. Each connection has its place in a wheel of whole seconds,
where it is looked at a few times per idle_timeout_s and once a minute at least: by what the session has counted anyway,
so the relay does no work for it. So an idle connection ends up to a quarter of its time and a second late. It ends as
in a drain: answers that are due are delivered, and its client finds it closed between two requests.

Bounded: an entry per connection that has such a limit, kept for a minute at most after its end; SLICE of them have
their turn at once. Refuses to know why there are limits, and sockets.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from time import monotonic

from kproxy.proxy.config.limits import AGE_JITTER, Limits
from kproxy.proxy.relay.relay import Relay
from kproxy.wire.events import CLIENT

SLICE = 256
_CHECKS = 4  # within idle_timeout_s
_LONGEST_S = 60.0  # between two looks at a connection, so that one that has closed is forgotten
BUSY_S = 30.0  # an old connection has so long to have nothing unanswered of itself; then no new request is read
UNANSWERED_S = 600.0  # and then so long for the answers that are due: a JoinGroup may take minutes

Reached = Callable[[str], None]  # a limit ended a connection: its setting


class _Watched:
    """A connection with a limit: by its number, so that a closed one can be forgotten."""

    __slots__ = ("ends_at", "idle_s", "idle_since", "number", "reached", "received", "steps")

    def __init__(self, number: int, limits: Limits, now: float, reached: Reached) -> None:
        self.number = number
        self.idle_s = limits.idle_timeout_s
        self.idle_since = now
        self.received = 0
        age_s = limits.max_age_s
        self.ends_at = float("inf") if age_s is None else now + age_s * (1 - AGE_JITTER * random.random())
        self.steps = _ENDING  # what is left to do to a connection beyond max_age_s
        self.reached = reached

    def due(self, now: float) -> float:
        """When it is to be looked at next."""
        idle_s = self.idle_s if self.idle_s is not None and self.steps is _ENDING else _LONGEST_S * _CHECKS
        return min(self.ends_at, now + idle_s / _CHECKS, now + _LONGEST_S)


# How an old connection ends, and how long each way may take.
_ENDING: tuple[tuple[Callable[[Relay], None], float], ...] = (
    (lambda relay: relay.finish("max_age"), BUSY_S),
    (lambda relay: relay.drain("max_age"), UNANSWERED_S),
    (lambda relay: relay.close("max_age"), _LONGEST_S),
)


class Ageing:
    """relays: the open ones by number; whoever owns it removes those that have closed."""

    def __init__(self, relays: Mapping[int, Relay]) -> None:
        self._relays = relays
        self._wheel: dict[int, list[_Watched]] = {}  # by the second, rounded up
        self._next_second = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._wheel.values()))

    def watch(self, relay: Relay, limits: Limits, reached: Reached) -> None:
        """Look after a connection from now on."""
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
        """Look at those whose second has come, some at once."""
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
        """End a connection that is beyond its time, or give it a further place."""
        if now >= watched.ends_at:
            if watched.steps is _ENDING:
                watched.reached("max_age_s")
            step, patience_s = watched.steps[0]
            watched.steps = watched.steps[1:]
            watched.ends_at = now + patience_s
            step(relay)
        elif watched.idle_s is not None and watched.steps is _ENDING:
            seen = relay.glance()
            received = seen.received_bytes[CLIENT]
            if received != watched.received or seen.awaits_answer:
                watched.received = received
                watched.idle_since = now
            elif now - watched.idle_since >= watched.idle_s:
                watched.reached("idle_timeout_s")
                if relay.session.at_boundary(CLIENT):
                    relay.finish("idle_timeout")
                else:  # in the middle of a request, the rest of which does not come
                    relay.close("idle_timeout")
                return
        if not relay.closed:
            self._place(watched, now)
