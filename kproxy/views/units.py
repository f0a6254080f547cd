"""Durations, sizes, rates and times as text: three digits and a unit, the same everywhere.

The caller handles unknown figures.
"""

from datetime import UTC, datetime

_DURATIONS = (
    (7200e9, 3600e9, "h"),
    (120e9, 60e9, "min"),
    (999.5e6, 1e9, "s"),
    (999.5e3, 1e6, "ms"),
    (999.5, 1e3, "µs"),
)  # (smallest duration in nanoseconds, nanoseconds per unit, unit)
_SIZES = ((999.5e9, 1e12, "TB"), (999.5e6, 1e9, "GB"), (999.5e3, 1e6, "MB"), (999.5, 1e3, "kB"))


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if abs(value) >= 99.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def duration(nanoseconds: float) -> str:
    """Return a duration in nanoseconds as text like "12.3 ms"; "0" has no unit."""
    for least, size, unit in _DURATIONS:
        if abs(nanoseconds) >= least:
            return f"{number(nanoseconds / size)} {unit}"
    return f"{nanoseconds:.0f} ns" if nanoseconds else "0"


def size(count: float) -> str:
    """Return bytes as text in units of 1000, like "1.23 MB"; "0" has no unit."""
    for least, unit_bytes, unit in _SIZES:
        if abs(count) >= least:
            return f"{number(count / unit_bytes)} {unit}"
    return f"{count:.0f} B" if count else "0"


def rate(bytes_per_second: float) -> str:
    """Return a rate as text like "1.23 MB/s"."""
    return f"{size(bytes_per_second) if bytes_per_second else '0 B'}/s"


def time(nanoseconds: int, *, decimals: int = 3) -> str:
    """Return nanoseconds since the epoch as date and time in UTC, with `decimals` digits of the second.

    The text has no zone: the caller adds "UTC" once for all times.
    """
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    fraction = f".{rest:09}"[: decimals + 1] if decimals else ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}{fraction}"
