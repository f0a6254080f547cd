"""Figures as people read them."""

import pytest

from kproxy.views import units


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0"),
        (999, "999 ns"),
        (87_000, "87.0 µs"),
        (999_400, "999 µs"),
        (999_600, "1.00 ms"),
        (9_996_000, "10.0 ms"),
        (12_345_678, "12.3 ms"),
        (99_960_000, "100 ms"),
        (999_600_000, "1.00 s"),
        (119_000_000_000, "119 s"),
        (1_819_000_000_000, "30.3 min"),
        (9_000_000_000_000, "2.50 h"),
        (10_000 * 3600 * 10**9, "10,000 h"),
        (-1_234_500, "-1.23 ms"),
    ],
)
def test_durations_have_three_digits(nanoseconds, text):
    assert units.duration(nanoseconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (2_279_012, "2.28 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1.00 GB"),
        (3e9, "3.00 GB"),
        (999.6e9, "1.00 TB"),
        (4.5e15, "4,500 TB"),
    ],
)
def test_sizes_have_three_digits(count, text):
    assert units.size(count) == text
    assert units.rate(count) == f"{text if count else '0 B'}/s"


def test_times_are_of_utc():
    assert units.time(1_763_718_571_159_568_123) == "2025-11-21 09:49:31.159"
    assert units.time(1_763_718_571_159_568_123, decimals=0) == "2025-11-21 09:49:31"
    assert units.time(-1, decimals=9) == "1969-12-31 23:59:59.999999999"
