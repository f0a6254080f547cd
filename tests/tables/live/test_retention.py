"""Retention removes recorded files by age and by total size, the oldest first, and no file that kproxy did not
record."""

import os
import time

import pytest

from kproxy.tables.live.retention import Retention

RECORDED = ("20260101T000000.123456789Z-{:06}", "20260101T000000.123456789Z-worker-2-{:06}")
RECORDED += ("20260101T000000.123456789Z-knowledge-{:06}",)


@pytest.fixture
def folder(tmp_path):
    now_s = time.time()
    for number in range(10):
        for name in RECORDED:
            path = tmp_path / "exchanges" / f"{name.format(number)}.parquet"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(100))
            os.utime(path, (now_s, now_s - 3600 * (9 - number)))
    for foreign in ("exchanges/capture.pcap.parquet", "mine/notes.parquet", "exchanges/x.txt"):
        path = tmp_path / foreign
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100_000))
        os.utime(path, (0, 0))
    return tmp_path


def numbers(folder):
    return sorted({int(path.stem[-6:]) for path in folder.glob("exchanges/2026*")})


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(), range(10)),
        (Retention(age_s=4.5 * 3600), range(5, 10)),
        (Retention(total_bytes=900), range(7, 10)),
        (Retention(age_s=8.5 * 3600, total_bytes=600), range(8, 10)),
        (Retention(total_bytes=0), []),
    ],
)
def test_the_oldest_files_are_removed_and_nothing_else(folder, retention, stay):
    assert retention.remove_old(folder) == 3 * (10 - len(stay))
    assert numbers(folder) == list(stay)
    assert len(list(folder.glob("exchanges/capture*"))) == len(list(folder.glob("mine/*"))) == 1
    assert retention.remove_old(folder) == 0


def test_files_with_future_times_are_removed_first_and_new_ones_stay(folder):
    """The clock was set back by years after the first five files, and by a minute before the last one."""
    ahead_s = time.time() + 4 * 365 * 86400
    for number in range(5):
        for name in RECORDED:
            os.utime(folder / "exchanges" / f"{name.format(number)}.parquet", (ahead_s + number, ahead_s + number))
    os.utime(folder / "exchanges" / f"{RECORDED[0].format(9)}.parquet", (time.time() + 60, time.time() + 60))
    assert Retention(total_bytes=1800).remove_old(folder) == 12
    assert numbers(folder) == [4, 5, 6, 7, 8, 9]
    # number 5; the age of number 4 is unknown
    assert Retention(age_s=3.5 * 3600, total_bytes=10**6).remove_old(folder) == 3
    assert numbers(folder) == [4, 6, 7, 8, 9]
    assert Retention(total_bytes=300).remove_old(folder) == 12
    assert numbers(folder) == [9]
