"""Work of milliseconds on one thread, for addresses in turn: however much one has, it delays others by one piece each.

The thread steps back behind that of the loop. Bounded by who asks: a piece of work for each login that is under way.
Refuses to know what the work is.
"""

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def _step_back() -> None:
    """The thread waits for that of the loop where both want a core."""
    if sys.platform == "linux":  # elsewhere threads have no priorities of their own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Turns:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_step_back)
        self._is_busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by address, the one whose turn is next first

    async def run(self, host: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises; `host`: for whose address it is done."""
        loop = asyncio.get_running_loop()
        if self._is_busy:
            turn = loop.create_future()
            self._waiting.setdefault(host, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was granted in the same turn of the loop
                    self._next()
                raise
        self._is_busy = True
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            self._next()

    def _next(self) -> None:
        """Grant a turn to the next address, whose further work then waits behind that of all others."""
        while self._waiting:
            host = next(iter(self._waiting))
            turns = self._waiting.pop(host)
            turn = turns.popleft()
            if turns:
                self._waiting[host] = turns
            if not turn.done():  # else its login has ended
                turn.set_result(None)
                return
        self._is_busy = False
