"""Bucket bounds of the histograms, and quantiles read from bucket counts.

A cell is a list of counts, one longer than its bounds: the last one counts values above all bounds. A value belongs to
the first bound that is not below it, `cell[bisect_left(bounds, value)]`, which is Prometheus' inclusive `le`. Times are
integer nanoseconds, sizes bytes; seconds appear only in the text of a scrape.
"""

from collections.abc import Sequence


def _times(us: Sequence[int] = (), ms: Sequence[int] = (), s: Sequence[int] = ()) -> tuple[int, ...]:
    return (*(n * 1_000 for n in us), *(n * 1_000_000 for n in ms), *(n * 1_000_000_000 for n in s))


# A local broker answers in tens of microseconds; JoinGroup waits for minutes. A Fetch that finds nothing ends just
# after its max_wait_ms, mostly 500 or 1000: bounds are just above those, or a quantile would be in the next bucket.
DURATION_NS = _times(
    us=(50, 100, 250, 500, 1000, 2500),
    ms=(5, 10, 25, 50, 100, 250, 550, 1100, 2500),
    s=(5, 10, 30, 60, 300, 600),
)
# A Fetch's wait beyond max_wait_ms: a broker's timers are coarse, so the first milliseconds have no meaning.
EXCESS_WAIT_NS = _times(ms=(1, 5, 10, 25, 50, 100, 250, 500), s=(1, 5, 30))
QUEUE_NS = _times(us=(50, 250), ms=(1, 5, 25, 100, 500, 2500), s=(10, 60, 600))
PROXY_NS = _times(us=(5, 10, 25, 50, 100, 250, 500, 1000, 2500), ms=(5, 10, 25, 100), s=(1, 10))
# Brokers throttle by whole milliseconds, up to the quota window (30 s by default).
THROTTLE_NS = _times(ms=(1, 10, 50, 100, 250, 500, 1000, 2500), s=(5, 10, 30))
# A wait may span several throttles, and a quota window may be configured to minutes.
MUTE_NS = _times(ms=(1, 10, 50, 100, 250, 500, 1000, 2500), s=(5, 10, 30, 60, 300))
# A rebalance waits for the slowest member: as long as max.poll.interval.ms, which is 5 minutes by default.
REBALANCE_NS = _times(ms=(100, 500), s=(1, 5, 15, 60, 300))
# 64 B to 16 MiB by fours, then the largest request that a broker takes by default.
SIZE_BYTES = (*(64 << 2 * power for power in range(10)), 100 << 20)


def cell(bounds: Sequence[int]) -> list[int]:
    """Return an empty histogram over these bounds."""
    return [0] * (len(bounds) + 1)


def quantile(bounds: Sequence[int], counts: Sequence[int], q: float) -> float | None:
    """Return the q-quantile, linear within its bucket like Prometheus' histogram_quantile; None: no data."""
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
