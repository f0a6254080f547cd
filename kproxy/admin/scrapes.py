"""Scrapes, rendered on one thread: one at a time, for all that asked before it began, with a rest between two.

A client that asks while a scrape is rendered gets the next one, so no answer is older than its request. The next one
begins after a rest as long as the last one took: however many clients scrape, they take half of the interpreter at
most, and the relays have the rest. Bounded: one scrape of each of two formats waits at most. Refuses to know HTTP.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from kproxy.metrics.scrape.exposition import is_openmetrics

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
        self._next: dict[bool, asyncio.Task[tuple[bytes, str]]] = {}  # that have not begun, by `is_openmetrics`

    async def rendered(self, accept: str) -> tuple[bytes, str]:
        """(body, content type), made since this was asked. Raises what the scrape raises."""
        wanted = is_openmetrics(accept)
        task = self._next.get(wanted)
        if task is None:
            task = self._next[wanted] = asyncio.create_task(self._render(wanted, accept))
        return await asyncio.shield(task)

    async def _render(self, wanted: bool, accept: str) -> tuple[bytes, str]:
        async with self._turn:
            rest_s = self._rests_until - self._clock()
            if rest_s > 0:
                await self._sleep(rest_s)
            del self._next[wanted]
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
        self._next.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
