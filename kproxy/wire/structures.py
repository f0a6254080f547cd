"""Arrays whose rows are structures: rows are taken, picked and joined as bytes.

Duty: numpy copies such rows field by field, which takes ten to thirty times as long as to copy their bytes. The results
are the same. Refuses to know what the fields mean.
"""

from collections.abc import Sequence

import numpy as np


def taken(data: np.ndarray, at: np.ndarray, layout: np.dtype) -> np.ndarray:
    """The structures that begin at some places in bytes."""
    size = layout.itemsize
    rows: np.ndarray = np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))[at]
    return rows.view(layout)


def picked(rows: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Some of the rows: by their indices, or by a flag for each."""
    some: np.ndarray = rows.view(f"V{rows.itemsize}")[which]
    return some.view(rows.dtype)


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all parts, which are of one layout, as one array."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part.view(f"V{part.itemsize}") for part in parts]).view(parts[0].dtype)
