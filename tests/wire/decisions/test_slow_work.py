"""Work in slices: a slice a step, its result or its fault at the end, and nothing after it was dropped."""

from collections.abc import Iterator
from typing import Any

import pytest

from kproxy.errors import Malformed
from kproxy.protocol.apis import METADATA
from kproxy.wire.decisions.slow_work import SlowWork
from kproxy.wire.events import Exchange
from kproxy.wire.interest import Interest


class Work:
    """Work on a frame in `slices` slices, and its result or error."""

    def __init__(self, slices: int, end: Any) -> None:
        self.slices, self.end, self.begun, self.done = slices, end, 0, 0
        exchange = Exchange(Interest().plan(METADATA << 16), 1, 0, 0, 10, 0)
        self.work = SlowWork(exchange, self._begin, b"frame")

    def _begin(self, frame: memoryview) -> Iterator[None]:
        self.begun += 1
        assert frame == b"frame"
        for _ in range(self.slices):
            self.done += 1
            yield
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.mark.parametrize("slices", [0, 1, 5])
@pytest.mark.parametrize("end", ["result", None, Malformed("no"), ZeroDivisionError("a defect")])
def test_each_step_is_a_slice_and_the_last_one_has_the_result(slices: int, end: Any) -> None:
    made = Work(slices, end)
    work = made.work
    assert not work.is_done and not made.begun
    for step in range(slices):
        assert work.step() is False and made.done == step + 1 and not work.is_done
    assert work.step() is True and work.is_done and made.begun == 1
    assert work.step() is True and made.begun == 1  # no step is repeated
    assert not work.is_obeyed
    if isinstance(end, Exception):
        with pytest.raises(type(end)):
            work.take()
    else:
        assert work.take() == end
    assert work.is_obeyed


def test_work_begins_anew_and_is_dropped() -> None:
    made = Work(3, "result")
    work = made.work
    assert [work.step(), work.step()] == [False, False]
    work.restart()
    assert [work.step() for _ in range(4)] == [False] * 3 + [True] and (made.begun, made.done) == (2, 5)
    made = Work(3, "result")
    made.work.step()
    made.work.drop()
    assert made.work.is_done and made.work.step() is True and made.done == 1 and made.work.take() is None
    assert (made.work.held_bytes, made.work.at, made.work.kept, made.work.elsewhere) == (0, 0, (None, None), None)
