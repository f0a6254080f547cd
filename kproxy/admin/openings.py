"""A queue for TLS handshakes with the admin port. A handshake takes 1 to 3 ms of a core.

A handshake begins every EVERY_S at most, and client networks take turns. A flood of handshakes therefore uses only a
part of a core, and delays a network with few connections by one round at most. Bounded: beyond `most` queued
handshakes, the newest of the network with the most of them is refused. If every network has one, none is refused,
since an attacker that reconnects would take the place; the port then stops accepting (`waiting`). Refuses to know
sockets.
"""

import asyncio
from collections import deque

from kproxy.proxy.config.addresses import network_of

EVERY_S = 0.02


class Openings:
    """The queue of one loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, deque[asyncio.Future[bool]]] = {}  # by network; the first one is next
        self._count = 0
        self._free_at = 0.0  # the loop's time
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of queued handshakes; if there are any, one begins within EVERY_S."""
        return self._count

    async def turn(self, host: str) -> None:
        """Wait for a turn. Raises ConnectionAbortedError if the queue is full."""
        host = network_of(host)
        loop = asyncio.get_running_loop()
        if not self._waiting and loop.time() >= self._free_at:
            self._free_at = loop.time() + EVERY_S
            return
        granted: asyncio.Future[bool] = loop.create_future()
        self._waiting.setdefault(host, deque()).append(granted)
        self._count += 1
        if self._count > self._most:
            self._refuse_one()
        if self._timer is None:
            self._timer = loop.call_at(self._free_at, self._grant)
        try:
            is_granted = await granted  # an exception would keep this frame alive through its traceback
        finally:
            self._forget(host, granted)
        if not is_granted:
            raise ConnectionAbortedError("too many wait for their handshakes")

    def _forget(self, host: str, granted: "asyncio.Future[bool]") -> None:
        """Remove a handshake from the queue, if it was cancelled there."""
        turns = self._waiting.get(host)
        if turns is not None and granted in turns:
            turns.remove(granted)
            self._count -= 1
            if not turns:
                del self._waiting[host]

    def _refuse_one(self) -> None:
        host = max(self._waiting, key=lambda host: len(self._waiting[host]))
        if len(self._waiting[host]) == 1:
            return
        newest = self._waiting[host].pop()
        self._count -= 1
        if not newest.done():
            newest.set_result(False)

    def _grant(self) -> None:
        """Grant a turn to the next network, which then queues behind all others."""
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting:
            host = next(iter(self._waiting))
            turns = self._waiting.pop(host)
            granted = turns.popleft()
            self._count -= 1
            if turns:
                self._waiting[host] = turns
            if not granted.done():
                granted.set_result(True)
                self._free_at = loop.time() + EVERY_S
                break
        if self._waiting:
            self._timer = loop.call_at(self._free_at, self._grant)
