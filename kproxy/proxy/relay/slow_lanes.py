"""Work that sessions do in slices (`wire/slow_work.py`), of all connections of a loop: who has the next slice.

Two lanes, whose slices alternate; in each of them one work is done at a time, in the order in which it came. All begins
in the first lane. What is not done after FIRST_STEPS slices gives back what it has made and begins again in the second,
so that a request of some hundred names does not wait for those of tens of thousands, however many there are. Bound: of
two works there are results at a time; of all others there is the frame, which counts in the budget of held bytes.
Refuses to know what the work is, and whose.
"""

from collections import deque
from collections.abc import Callable

from kproxy.proxy.relay.readings import Readings
from kproxy.wire.slow_work import SlowWork

FIRST_STEPS = 48  # some 15 ms

Done = Callable[[], None]


class SlowLanes:
    """All slow work of a loop; a part of its `Readings`."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._first: deque[tuple[SlowWork, Done]] = deque()
        self._second: deque[tuple[SlowWork, Done]] = deque()
        self._steps = 0  # of the head of the first lane
        self._is_reading = False  # it is among the readings

    def add(self, work: SlowWork, done: Done) -> None:
        """Do the work, in this turn and later ones, then call `done`, which raises nothing; also if it is dropped."""
        self._first.append((work, done))
        if not self._is_reading:
            self._is_reading = True
            self._readings.add_slow(self)

    def read(self) -> bool:
        """Do a slice of each lane; whether there is more."""
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
