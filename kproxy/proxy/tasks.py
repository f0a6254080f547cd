"""Tasks of one owner: kept until they end, cancelled together, and never lost silently.

Refuses to know what the tasks do. Bounded by their owner: by its connections and its one discovery.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from kproxy.proxy.log_limiter import LogLimiter

log = logging.getLogger("kproxy.tasks")


async def waited(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, no longer than that; whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    return event.is_set()


class Tasks:
    """Starts tasks; an exception that ends one is a defect of kproxy, and is logged with its traceback."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._running: set[asyncio.Task[None]] = set()
        self._limiter = LogLimiter(log)

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            text = "%s: a defect of kproxy ended what it was doing (%s); the rest goes on. Please report these lines"
            self._limiter.log(logging.ERROR, type(fault), text, self._owner, fault, exc_info=fault)

    def stop(self) -> None:
        """Cancel all of them, without waiting for their ends."""
        for task in tuple(self._running):
            task.cancel()

    async def cancel(self) -> None:
        """Cancel all of them and wait for their ends."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
