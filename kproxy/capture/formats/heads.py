"""Possible beginnings of records in bytes without known borders.

Duty: excludes, by column, places with an implausible length; the caller checks the others one by one. A step of Python
for each byte would take an hour for a hole of 16 GB, such as a full disk leaves.

Memory: PIECE_BYTES places. Refuses to know formats.
"""

from collections.abc import Iterator
from mmap import mmap

import numpy as np

FIRST_BYTES = 1 << 12  # the next head is mostly near
PIECE_BYTES = 1 << 20


def places(
    data: bytes | mmap, start: int, stop: int, *, step: int, order: str, length_at: int, least: int, most: int
) -> Iterator[int]:
    """Every `step`th place from `start` to before `stop` that has a number from `least` to `most` behind it.

    length_at: where that number of four bytes is, from such a place on; it must lie in the data for all of them.
    """
    size = FIRST_BYTES
    while start < stop:
        end = min(stop, start + size)
        lengths = np.ndarray((-(-(end - start) // step),), f"{order}u4", data, start + length_at, (step,))
        found = np.flatnonzero((lengths >= least) & (lengths <= most))
        del lengths  # else a file that is mapped could not be closed
        yield from (found * step + start).tolist()
        start += -(-(end - start) // step) * step
        size = min(2 * size, PIECE_BYTES)
