"""A queue for answers that are computed on the event loop: one at a time, each followed by a pause of the same length.

All connections of the admin port may send requests at once. Without the queue, the time of all answers would add up
within one turn of the loop, during which the relays wait. Refuses to know the answers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Value = TypeVar("Value")


class Turns:
    """The queue of one loop."""

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
        """Call `make` on the loop when it is its turn; return its value, or raise its exception."""
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
                await self._sleep(0)  # compute the next answer in another turn of the loop, even if the pause is over
