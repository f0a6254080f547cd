"""Reading apart from relaying, for all connections of a loop: TURN_NS of each turn, in small pieces.

Two kinds alternate: connections whose copied bytes are read, and slow work of sessions (`slow_lanes.py`), so that many
of one kind do not delay the other. Refuses to know the bytes.
"""

import asyncio
from collections import deque
from time import perf_counter_ns
from typing import Protocol

TURN_NS = 2_000_000


class Reading(Protocol):
    def read(self) -> bool:
        """Read a small piece; return whether there is more."""
        ...


class Readings:
    """The queue of readings, which share the time."""

    def __init__(self) -> None:
        self._waiting: deque[Reading] = deque()
        self._slow: deque[Reading] = deque()
        self._next: asyncio.Handle | None = None
        self.waiting_bytes = 0  # queued by all connections
        self.closed_bytes = 0  # the part of closed connections

    def add(self, reading: Reading) -> None:
        """Read from it in this turn and later ones, until there is nothing more."""
        self._waiting.append(reading)
        self._schedule()

    def add_slow(self, reading: Reading) -> None:
        """Do slow work in this turn and later ones, until there is none."""
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
