"""Scrapes, rendered on one thread: one at a time, for all who asked before it began, and with rests in between.

Who asks while a scrape is rendered gets the next, so none is older than its request. Before the next one begins, the
interpreter is the relays' for as long as the last one took: however many scrape, they take half of it at most. Bounded
by the connections of the admin port. Refuses to know HTTP.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

Scrape = Callable[[str], tuple[bytes, str]]


class Scrapes:
    """scrape(accept) -> (body, content type), for what an Accept header names; called on a thread."""

    def __init__(
        self,
        scrape: Scrape,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._scrape = scrape
        self._clock = clock
        self._sleep = sleep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrape")
        self._turn = asyncio.Lock()
        self._rests_until = 0.0
        self._next: dict[str, asyncio.Task[tuple[bytes, str]]] = {}  # that have not begun, by their Accept headers

    async def rendered(self, accept: str) -> tuple[bytes, str]:
        """(body, content type), made since this was asked. Raises what the scrape raises."""
        task = self._next.get(accept)
        if task is None:
            task = self._next[accept] = asyncio.create_task(self._render(accept))
        return await asyncio.shield(task)

    async def _render(self, accept: str) -> tuple[bytes, str]:
        async with self._turn:
            rest_s = self._rests_until - self._clock()
            if rest_s > 0:
                await self._sleep(rest_s)
            del self._next[accept]
            begun = self._clock()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._scrape, accept)
            finally:
                ended = self._clock()
                self._rests_until = ended + (ended - begun)

    def stop(self) -> None:
        """No scrape begins any more."""
        for task in self._next.values():
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
