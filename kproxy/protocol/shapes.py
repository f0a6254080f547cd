"""A cache of plans' results, keyed by a frame's length and the bytes that the plan reads.

The result of a plan depends only on the frame's length and on the bytes that it reads. A shape records the offsets and
values of those bytes for one length: a frame of that length with the same bytes at those offsets gets the recorded
result, at a third of the cost. Most responses of a busy connection differ only in bytes that plans skip: correlation
ids, offsets, timestamps, payloads.

Bounded: at most LENGTHS shapes per plan and FIELDS byte ranges per shape. Only every LEARN_EVERY-th miss records a new
shape, so traffic without repetition costs almost nothing extra. Refuses to know the purpose of a plan.
"""

import re
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from kproxy.errors import Malformed
from kproxy.protocol.primitives import Buffer

LENGTHS = 64
FIELDS = 48
LEARN_EVERY = 64

_ITEM = re.compile(r"(\d*)([xbBhHiIqQd?s])")

Result = TypeVar("Result")
Plan = Callable[[Any, int, int], Result]


# (unpack_from of the bytes that a plan reads, their values, the plan's result)
Shape = tuple[Any, tuple[Any, ...], Result]


def remembered(plan: Plan[Result], wants: Callable[[Result], bool] | None = None) -> Plan[Result]:
    """Return the plan over (buffer, start, end), cached by shape. wants: other results raise Malformed."""
    shapes: dict[int, Shape[Result]] = {}  # by length
    misses = 0

    def cached(buffer: Buffer, start: int, end: int) -> Result:
        shape = shapes.get(end - start)
        if shape is not None:
            unpack, values, result = shape
            if unpack(buffer, start) == values:
                return result
        nonlocal misses
        misses += 1
        if misses % LEARN_EVERY == 0:
            if len(shapes) >= LENGTHS:
                shapes.clear()
            shape = _trace(plan, buffer, start, end)
            if shape is not None and (wants is None or wants(shape[2])):
                shapes[end - start] = shape
        result = plan(buffer, start, end)
        if wants is not None and not wants(result):
            raise Malformed("not what the caller wants")
        return result

    return cached


class _Untraceable(Exception):
    """The plan reads more than FIELDS byte ranges, or bytes outside the frame."""


class _Traced:
    """A buffer that records which bytes are read."""

    def __init__(self, buffer: Buffer, start: int, end: int) -> None:
        self._buffer = buffer
        self._start = start
        self._end = end
        self.seen: set[tuple[int, int]] = set()  # (start, end) as offsets in the frame

    def __getitem__(self, pos: int | slice) -> Any:
        if isinstance(pos, slice):
            self._record(pos.start, pos.stop)
        else:
            self._record(pos, pos + 1)
        return self._buffer[pos]

    def unpack(self, layout: struct.Struct, pos: int) -> tuple[Any, ...]:
        at = pos
        for count, code in _ITEM.findall(layout.format.lstrip(">")):
            if code == "s":
                count, code = 1, f"{count}s"
            size = struct.calcsize(f">{code}")
            for _ in range(int(count or 1)):
                if code != "x":
                    self._record(at, at + size)
                at += size
        return layout.unpack_from(self._buffer, pos)

    def _record(self, pos: int, stop: int) -> None:
        self.seen.add((pos - self._start, stop - self._start))
        if not self._start <= pos <= stop <= self._end or len(self.seen) > FIELDS:
            raise _Untraceable


def _trace(plan: Plan[Result], buffer: Buffer, start: int, end: int) -> Shape[Result] | None:
    """Return the shape of a frame, or None if the plan's reads cannot be traced."""
    traced = _Traced(buffer, start, end)
    unpackers = getattr(plan, "__defaults__", None) or ()

    def tracing(unpack_from: Any) -> Callable[[Any, int], tuple[Any, ...]]:
        return lambda _, pos: traced.unpack(unpack_from.__self__, pos)

    try:
        result = plan(traced, start, end, *map(tracing, unpackers))
    except Exception:  # the plan on the plain buffer then raises the frame's fault
        return None
    spans: list[list[int]] = []
    for offset, stop in sorted(traced.seen):
        if spans and offset <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], stop)
        else:
            spans.append([offset, stop])
    layout = ">"
    at = 0
    for offset, stop in spans:
        layout += f"{offset - at}x{stop - offset}s"
        at = stop
    unpack = struct.Struct(layout).unpack_from
    return unpack, unpack(buffer, start), result
