"""The schedule of Python's garbage collections, which stop the process while they run.

A collection walks every object of a generation, 0.15 to 0.4 us each; gc.get_objects() walks them too, 0.02 to 0.1 us
each. kproxy hardly needs collections: the last reference to a connection frees all that it owns (`Session`, `Relay`).
The remaining cycles come from exceptions and from the admin's HTTP server, and most die young. Clients must not be able
to grow a generation that is walked often:

- Young objects. Python collects when allocations exceed deallocations by a threshold. Pending requests are freed in
  arrival order: each new one replaces an old one, so that Python sees no growth while all pending ones become young
  again, and a collection walks 130,000 objects in 50 ms. Hence kproxy checks every CHECK_S, and every GROWING_CHECK_S
  while more than GROWING_OBJECTS are young.
- Middle generation: objects that survived one collection. Python collects it after every tenth collection of young
  ones; kproxy after its own collections have passed on MIDDLE_OBJECTS objects, and every MIDDLE_S. Survivors become
  old, so it stays small.
- All objects. Python would collect whenever the number of old objects has grown by a quarter, so a client that makes
  objects would decide when: half a second while 700 clients have 4,096 pending requests each. kproxy collects every
  INTERVAL_S and skips while more than MAX_OBJECTS objects are estimated, at most MAX_SKIPPED times in a row: memory is
  bounded by the cycles of one hour.

Refuses to know what the objects are.
"""

import asyncio
import gc
from collections.abc import Callable

CHECK_S = 0.25
GROWING_CHECK_S = 0.02  # s, enough for kproxy to make about 7,000 objects
GROWING_OBJECTS = 1000  # objects; Python itself walks 700 at a time
MIDDLE_S = 1.0
MIDDLE_OBJECTS = 10_000  # objects, walked in some 3 ms
INTERVAL_S = 60.0
MAX_OBJECTS = 200_000  # objects, walked in some 30 ms
MAX_SKIPPED = 60
_NEVER = 1 << 30


class Collections:
    """Schedules Python's collections while a loop runs. objects(): an estimate of the number of all objects."""

    def __init__(self, objects: Callable[[], int]) -> None:
        self._objects = objects
        self._skipped = 0
        self._passed_on = 0  # young objects passed on since the last middle collection, at most
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}  # by callback
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """Take over the schedule, and exempt all objects that exist now from every later collection."""
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._later(CHECK_S, self._young)
        self._later(MIDDLE_S, self._middle)
        self._later(INTERVAL_S, self._all)

    def stop(self) -> None:
        """Return the schedule to Python."""
        if self._timers:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()
            gc.set_threshold(*self._thresholds)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers[what] = asyncio.get_running_loop().call_later(seconds, what)

    def _young(self) -> None:
        young = len(gc.get_objects(0))
        is_growing = young > GROWING_OBJECTS
        if is_growing:
            gc.collect(0)
            self._passed_on += young
            if self._passed_on > MIDDLE_OBJECTS:
                self._collect_middle()
        self._later(GROWING_CHECK_S if is_growing else CHECK_S, self._young)

    def _middle(self) -> None:
        self._later(MIDDLE_S, self._middle)
        self._collect_middle()

    def _collect_middle(self) -> None:
        self._passed_on = 0
        gc.collect(1)

    def _all(self) -> None:
        self._later(INTERVAL_S, self._all)
        if self._objects() > MAX_OBJECTS and self._skipped < MAX_SKIPPED:
            self._skipped += 1
            return
        self._skipped = 0
        gc.collect()
