"""What is read beside relaying, of all connections of a loop: TURN_NS of each turn, one small read after another.

Two kinds have their turn alternately: connections whose bytes are read along, and slow work of sessions
(`slow_lanes.py`), so that many of the one do not hold up the other. Refuses to know what is read.
"""

import asyncio
from collections import deque
from time import perf_counter_ns
from typing import Protocol

TURN_NS = 2_000_000


class Reading(Protocol):
    def read(self) -> bool:
        """Read a little; whether there is more."""
        ...


class Readings:
    """Those that have something to read, and the time that they share."""

    def __init__(self) -> None:
        self._waiting: deque[Reading] = deque()
        self._slow: deque[Reading] = deque()
        self._next: asyncio.Handle | None = None
        self.waiting_bytes = 0  # that connections have to read
        self.closed_bytes = 0  # of them, of connections that have ended

    def add(self, reading: Reading) -> None:
        """Have it read in this turn or a later one, until it has nothing more."""
        self._waiting.append(reading)
        self._schedule()

    def add_slow(self, reading: Reading) -> None:
        """As `add`, for slow work."""
        self._slow.append(reading)
        self._schedule()

    def _schedule(self) -> None:
        if self._next is None and (self._waiting or self._slow):
            self._next = asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        self._next = None
        until_ns = perf_counter_ns() + TURN_NS
        try:
            while (self._waiting or self._slow) and perf_counter_ns() < until_ns:
                for readings in (self._waiting, self._slow):
                    if readings:
                        reading = readings.popleft()
                        if reading.read():
                            readings.append(reading)
        finally:  # a reading that raises does not take the turn of the others
            self._schedule()
