"""Work of milliseconds on one thread, for addresses in turn: however much one has, it delays others by one piece each.

The thread has the priority of the loop's: at a lower one, a machine that is busy would not run it while it holds the
interpreter's lock (GIL), and the loop would wait for both. Bounded by who asks: a piece of work for each login that is
under way. Refuses to know what the work is.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kproxy.proxy.config.addresses import network_of

T = TypeVar("T")


class Turns:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._is_busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by address, the one whose turn is next first

    async def run(self, host: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises; `host`: for whose address it is done."""
        host = network_of(host)
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
