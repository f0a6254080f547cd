"""Turns for answers that are made on the event loop: one at a time, with a rest of as long as it took behind each.

All connections of the admin port may ask at once, on and on: what each answer takes would add up within one turn of the
loop, in which the traffic waits. Refuses to know what is made.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Value = TypeVar("Value")


class Turns:
    """Those of one loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._one = asyncio.Lock()
        self._rests_until = 0.0

    async def make(self, make: Callable[[], Value]) -> Value:
        """What `make` returns, called on the loop when it is its turn. Raises what it raises."""
        async with self._one:
            rest_s = self._rests_until - self._clock()
            if rest_s > 0:
                await self._sleep(rest_s)
            begun = self._clock()
            try:
                return make()
            finally:
                ended = self._clock()
                self._rests_until = ended + (ended - begun)
                await self._sleep(0)  # the next one is made in another turn of the loop, even if its rest is over
