"""When Python looks for unreachable cycles, and among how many objects: everybody waits for it.

A collection walks every object of a generation, 0.15 to 0.4 us each; to ask for a generation's objects walks them, too,
0.02 to 0.1 us each. kproxy hardly needs any: what a connection owns is freed by its last reference (`Session`,
`Relay`). What is left are cycles of exceptions and of the admin's HTTP server, most of which die young. So no
generation that kproxy or Python walks often may grow with what clients make:

- Young ones. Python collects after some allocations more than there were deallocations. Requests that wait for a broker
  are freed in the order in which they came: each new one then pays for the end of an old one, so that Python sees no
  growth while all that are pending become young again, and a collection walks 130,000 objects in 50 ms. Hence kproxy
  looks itself every LOOK_S, and every SOON_S while more than SOME are young.
- Middle ones, those that one collection has left: by Python after every tenth collection of young ones, by kproxy once
  its own have handed on MANY, and every MIDDLE_S. What they leave becomes old, so there are never many.
- All. Python would start one whenever the number of old objects has grown by a quarter, so a client that makes objects
  would decide when: half a second while 700 clients have 4,096 requests pending each. They come every INTERVAL_S, and
  are left out while more than FEW objects are estimated, but for one in MOST_LEFT_OUT: memory stays bounded by an
  hour's cycles.

Refuses to know what the objects are.
"""

import asyncio
import gc
from collections.abc import Callable

LOOK_S = 0.25
SOON_S = 0.02  # in which kproxy makes some 7,000 objects at most
SOME = 1000  # of which Python itself walks 700 at a time
MIDDLE_S = 1.0
MANY = 10_000  # objects, walked in some 3 ms
INTERVAL_S = 60.0
FEW = 200_000  # objects, walked in some 30 ms
MOST_LEFT_OUT = 60
_NEVER = 1 << 30


class Collections:
    """Python's collections for as long as a loop runs. objects(): an estimate of how many objects there are in all."""

    def __init__(self, objects: Callable[[], int]) -> None:
        self._objects = objects
        self._left_out = 0
        self._handed_on = 0  # young objects that our collections met, at most, since they became old
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}  # by what they call
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """From here on they are ours. What exists now stays until the process ends: no collection walks it again."""
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._later(LOOK_S, self._young)
        self._later(MIDDLE_S, self._middle)
        self._later(INTERVAL_S, self._all)

    def stop(self) -> None:
        """They are Python's again."""
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
