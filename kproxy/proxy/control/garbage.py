"""When Python looks for unreachable cycles among all objects: seldom, and while there are few.

A full collection walks every object, about 0.15 us each, and everybody waits for it: half a second while 700 clients
have 4,096 requests pending each. Python starts one whenever the number of old objects has grown by a quarter, so a
client that makes objects decides when. kproxy hardly needs any: what a connection owns is freed by its last reference
(`Session`, `Relay`). What is left are cycles of exceptions and of the admin's HTTP server, most of which die young, and
young objects are still collected as ever.

So full collections come every INTERVAL_S, and are left out while more than FEW objects are estimated, but for one in
MOST_LEFT_OUT: memory stays bounded by an hour's cycles. Refuses to know what the objects are.
"""

import asyncio
import gc
from collections.abc import Callable

INTERVAL_S = 60.0
FEW = 200_000  # objects, walked in some 30 ms
MOST_LEFT_OUT = 60
_NEVER = 1 << 30


class FullCollections:
    """Python's full collections for as long as a loop runs. objects(): an estimate of how many there are."""

    def __init__(self, objects: Callable[[], int]) -> None:
        self._objects = objects
        self._left_out = 0
        self._timer: asyncio.TimerHandle | None = None
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """From here on they are ours. What exists now stays until the process ends: no collection walks it again."""
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._later()

    def stop(self) -> None:
        """They are Python's again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.set_threshold(*self._thresholds)

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._next)

    def _next(self) -> None:
        self._later()
        if self._objects() > FEW and self._left_out < MOST_LEFT_OUT:
            self._left_out += 1
            return
        self._left_out = 0
        gc.collect()
