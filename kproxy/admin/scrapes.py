"""Scrapes, rendered on one thread: one at a time, for all who asked before it began, and with rests in between.

Who asks while a scrape is rendered gets the next, so none is older than its request. Before the next one begins, the
interpreter is the relays' for as long as the last one took: however many scrape, they take half of it at most. Bounded
by the formats that there are, each rendered once for all, whoever has left meanwhile. Refuses to know HTTP.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

Scrape = Callable[[str], tuple[bytes, str]]
OPENMETRICS = "application/openmetrics-text"


def is_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics; else it gets the classic format."""
    return OPENMETRICS in accept


class Scrapes:
    """scrape(accept) -> (body, content type), for what an Accept header names; called on a thread.

    format_of(accept): what the scrape makes of it, one of few.
    """

    def __init__(
        self,
        scrape: Scrape,
        format_of: Callable[[str], Hashable] = is_openmetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._scrape = scrape
        self._format_of = format_of
        self._clock = clock
        self._sleep = sleep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrape")
        self._turn = asyncio.Lock()
        self._rests_until = 0.0
        self._next: dict[Hashable, asyncio.Task[tuple[bytes, str]]] = {}  # that have not begun, by their formats

    async def rendered(self, accept: str) -> tuple[bytes, str]:
        """(body, content type), made since this was asked. Raises what the scrape raises."""
        wanted = self._format_of(accept)
        task = self._next.get(wanted)
        if task is None:
            task = self._next[wanted] = asyncio.create_task(self._render(wanted, accept))
        return await asyncio.shield(task)

    async def _render(self, wanted: Hashable, accept: str) -> tuple[bytes, str]:
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
