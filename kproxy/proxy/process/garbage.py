"""The schedule of Python's garbage collections, which stop the process while they run.

A collection walks every object of a generation, 0.15 to 0.4 us each; gc.get_objects() walks them too, 0.02 to 0.1 us
each. kproxy hardly needs collections: the last reference to a connection frees all that it owns (`Session`, `Relay`).
The remaining cycles come from exceptions and from the admin's HTTP server, and most die young. So clients must not be
able to grow a generation that is walked often:

- Young objects. Python collects when allocations exceed deallocations by a threshold. Pending requests are freed in
  arrival order: each new one replaces an old one, so that Python sees no growth while all pending ones become young
  again, and a collection walks 130,000 objects in 50 ms. Hence kproxy checks every LOOK_S, and every SOON_S while more
  than SOME are young.
- Middle generation: objects that survived one collection. Python collects it after every tenth collection of young
  ones; kproxy after its own collections have passed on MANY objects, and every MIDDLE_S. Survivors become old, so it
  stays small.
- All objects. Python would collect whenever the number of old objects has grown by a quarter, so a client that makes
  objects would decide when: half a second while 700 clients have 4,096 pending requests each. kproxy collects every
  INTERVAL_S and skips while more than FEW objects are estimated, at most MOST_LEFT_OUT times in a row: memory is
  bounded by the cycles of one hour.

Refuses to know what the objects are.
"""

import asyncio
import gc
from collections.abc import Callable

LOOK_S = 0.25
SOON_S = 0.02  # s, enough for kproxy to make about 7,000 objects
SOME = 1000  # objects; Python itself walks 700 at a time
MIDDLE_S = 1.0
MANY = 10_000  # objects, walked in some 3 ms
INTERVAL_S = 60.0
FEW = 200_000  # objects, walked in some 30 ms
MOST_LEFT_OUT = 60
_NEVER = 1 << 30


class Collections:
    """Schedules Python's collections while a loop runs. objects(): an estimate of the number of all objects."""

    def __init__(self, objects: Callable[[], int]) -> None:
        self._objects = objects
        self._left_out = 0
        self._handed_on = 0  # young objects passed on since the last middle collection, at most
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}  # by callback
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """Take over the schedule, and exempt all objects that exist now from every later collection."""
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._later(LOOK_S, self._young)
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
        is_growing = young > SOME
        if is_growing:
            gc.collect(0)
            self._handed_on += young
            if self._handed_on > MANY:
                self._collect_middle()
        self._later(SOON_S if is_growing else LOOK_S, self._young)

    def _middle(self) -> None:
        self._later(MIDDLE_S, self._middle)
        self._collect_middle()

    def _collect_middle(self) -> None:
        self._handed_on = 0
        gc.collect(1)

    def _all(self) -> None:
        self._later(INTERVAL_S, self._all)
        if self._objects() > FEW and self._left_out < MOST_LEFT_OUT:
            self._left_out += 1
            return
        self._left_out = 0
        gc.collect()
