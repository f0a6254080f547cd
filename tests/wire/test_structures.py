"""Structures are taken, picked and joined as numpy does it, only by their bytes."""

import numpy as np
import pytest

from kproxy.wire.structures import joined, picked, taken

LAYOUT = np.dtype([("offset", ">i8"), ("kind", "i1"), ("crc", ">u4")])


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, 50 * LAYOUT.itemsize, np.uint8).view(LAYOUT)


def test_structures_are_taken_from_any_place(rows):
    data = rows.view(np.uint8)
    at = np.array([0, 1, 2, LAYOUT.itemsize, len(data) - LAYOUT.itemsize, 1])
    expected = [np.frombuffer(data[start : start + LAYOUT.itemsize].tobytes(), LAYOUT)[0] for start in at]
    assert taken(data, at, LAYOUT).tolist() == [row.item() for row in expected]
    assert taken(data, np.array([3]), np.dtype(">i4")).tolist() == [int.from_bytes(data[3:7].tobytes(), signed=True)]
    with pytest.raises(IndexError):
        taken(data, np.array([len(data) - LAYOUT.itemsize + 1]), LAYOUT)


def test_rows_are_picked_by_index_or_flag(rows):
    which = np.array([7, 0, 7, 49])
    flags = np.arange(50) % 3 == 0
    for some in (which, flags, np.zeros(0, np.int64)):
        assert picked(rows, some).dtype == LAYOUT
        assert picked(rows, some).tolist() == rows[some].tolist()


def test_rows_are_joined_in_order(rows):
    for parts in ([rows], [rows[:3], rows[3:3], rows[9:]]):
        assert joined(parts).dtype == LAYOUT
        assert joined(parts).tolist() == np.concatenate(parts).tolist()
