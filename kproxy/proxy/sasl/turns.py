"""Runs work of milliseconds on one thread, by address in turn: an address with much work delays others by one piece.

The thread has the priority of the event loop's thread: at a lower one, a busy machine might not run it while it holds
the interpreter's lock (GIL), and the loop would wait too. Bounded by its callers: one piece of work per login in
progress. Refuses to know the work.
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
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by address; the next one's turn comes first

    async def run(self, host: str, work: Callable[[], T]) -> T:
        """Return or raise the outcome of `work`; `host`: the address that it is for."""
        host = network_of(host)
        loop = asyncio.get_running_loop()
        if self._is_busy:
            turn = loop.create_future()
            self._waiting.setdefault(host, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # granted before the cancellation
                    self._next()
                raise
        self._is_busy = True
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            self._next()

    def _next(self) -> None:
        """Grant a turn to the next address; its remaining work then waits behind all others."""
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
