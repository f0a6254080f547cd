"""Bucket bounds of the histograms, and quantiles read from bucket counts.

A cell is a list of counts, one longer than its bounds: the last is what lies above them all. A value belongs to the first
bound that is not below it, `cell[bisect_left(bounds, value)]`, which is Prometheus' inclusive `le`. Times are integer
nanoseconds, sizes bytes; seconds appear only in the text of a scrape.
"""

from collections.abc import Sequence

_US = 1_000
_MS = 1_000_000
_S = 1_000_000_000

# A local broker answers in tens of microseconds; JoinGroup waits for minutes.
DURATION_NS = (
    *(50 * _US, 100 * _US, 250 * _US, 500 * _US),
    *(1 * _MS, 2_500 * _US, 5 * _MS, 10 * _MS, 25 * _MS, 50 * _MS, 100 * _MS, 250 * _MS, 500 * _MS),
    *(1 * _S, 2_500 * _MS, 5 * _S, 10 * _S, 30 * _S, 60 * _S, 300 * _S, 600 * _S),
)
# What a Fetch waited beyond its patience: timers of a broker are coarse, so the first milliseconds say nothing.
EXCESS_WAIT_NS = (1 * _MS, 5 * _MS, 10 * _MS, 25 * _MS, 50 * _MS, 100 * _MS, 250 * _MS, 500 * _MS, 1 * _S, 5 * _S, 30 * _S)
QUEUE_NS = (50 * _US, 250 * _US, 1 * _MS, 5 * _MS, 25 * _MS, 100 * _MS, 500 * _MS, 2_500 * _MS, 10 * _S, 60 * _S, 600 * _S)
PROXY_NS = (
    *(5 * _US, 10 * _US, 25 * _US, 50 * _US, 100 * _US, 250 * _US, 500 * _US),
    *(1 * _MS, 2_500 * _US, 5 * _MS, 10 * _MS, 25 * _MS, 100 * _MS, 1 * _S, 10 * _S),
)
# Brokers throttle by whole milliseconds, up to the quota window (30 s by default).
THROTTLE_NS = (1 * _MS, 10 * _MS, 50 * _MS, 100 * _MS, 250 * _MS, 500 * _MS, 1 * _S, 2_500 * _MS, 5 * _S, 10 * _S, 30 * _S)
# 64 B to 16 MiB by fours, then the largest request that a broker takes by default.
SIZE_BYTES = (*(64 << 2 * power for power in range(10)), 100 << 20)


def cell(bounds: Sequence[int]) -> list[int]:
    """An empty histogram over these bounds."""
    return [0] * (len(bounds) + 1)


def quantile(bounds: Sequence[int], counts: Sequence[int], q: float) -> float | None:
    """The q-quantile, linear within its bucket as Prometheus' histogram_quantile does; None when nothing was counted."""
    total = sum(counts)
    if not total:
        return None
    rank = q * total
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(bounds):
                return float(bounds[-1])
            low = bounds[index - 1] if index else 0
            return low + (bounds[index] - low) * (rank - below) / count
        below += count
    return float(bounds[-1])
