"""The order of work that sessions do in slices (`wire/decisions/slow_work.py`), for all connections of a loop.

The slices of two lanes alternate; each lane does one piece of work at a time, in order of arrival. All work begins in
the first lane. After FIRST_STEPS slices, unfinished work drops its partial result and begins again in the second lane,
so that requests with some hundred names never wait for those with tens of thousands. Bound: two pieces of work have
partial results; all others have only their frame, which counts in the budget of held bytes. Refuses to know the work
and its connection.
"""

from collections import deque
from collections.abc import Callable

from kproxy.proxy.relay.readings import Readings
from kproxy.wire.decisions.slow_work import SlowWork

FIRST_STEPS = 48  # about 15 ms

Done = Callable[[], None]


class SlowLanes:
    """All slow work of a loop; a part of its `Readings`."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._first: deque[tuple[SlowWork, Done]] = deque()
        self._second: deque[tuple[SlowWork, Done]] = deque()
        self._steps = 0  # slices of the head of the first lane
        self._is_reading = False  # it is in `readings`

    def add(self, work: SlowWork, done: Done) -> None:
        """Do the work, in this turn and later ones; then call `done`, also for dropped work. `done` raises nothing."""
        self._first.append((work, done))
        if not self._is_reading:
            self._is_reading = True
            self._readings.add_slow(self)

    def read(self) -> bool:
        """Do a slice of each lane; return whether there is more work."""
        if self._first:
            work, done = self._first[0]
            self._steps += 1
            if work.step():
                self._first.popleft()
                self._steps = 0
                done()
            elif self._steps >= FIRST_STEPS:
                work.restart()
                self._second.append(self._first.popleft())
                self._steps = 0
        if self._second:
            work, done = self._second[0]
            if work.step():
                self._second.popleft()
                done()
        self._is_reading = bool(self._first or self._second)
        return self._is_reading
