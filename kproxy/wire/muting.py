"""Intervals during which a broker muted a connection, and their part in the wait of an exchange (KIP-219).

Since some version of each API, a broker sends a throttled response at once and then reads nothing from the connection
for `throttle_time_ms`. A pipelined request waits through every such interval between its first byte and its response,
not only through that of the previous response. Its bytes wait too: the last byte of a request larger than the broker's
receive buffer leaves the client only when the broker reads again.

Queue and mutes cover one span from the request's first byte on, since every mute begins at the end of an earlier
response. `broker_ns` returns the rest, which is the broker's time.

Memory: the intervals that end after the last answered request began. Each belongs to a response that arrived while that
request waited, so there are at most as many intervals as pending requests. Refuses to know which versions mute.
"""


class Mutes(list[list[int]]):
    """The disjoint intervals during which one connection was muted.

    Each is [start_ns, end_ns, muted time before the start]. A session makes this object at its first throttle; before
    that it costs one truth test.
    """

    __slots__ = ()

    def mute(self, now_ns: int, muted_ns: int) -> None:
        """Mute the connection for `muted_ns` after a response that ended at `now_ns`. Times must not decrease."""
        end = now_ns + muted_ns
        before = 0
        if self:
            last = self[-1]
            if now_ns <= last[1]:
                last[1] = max(last[1], end)
                return
            before = last[2] + last[1] - last[0]
        self.append([now_ns, end, before])

    def split(self, request_start_ns: int, free_ns: int, response_start_ns: int) -> tuple[int, int]:
        """Return (queue_ns, muted_ns) of the time between a request's first byte and its response.

        free_ns: end of the previous response. The queue is the time up to free_ns without its muted part. Call it in
        the order of the requests' starts: it drops intervals that ended before this request.
        """
        if self and self[0][1] <= request_start_ns:
            del self[: next((at for at, each in enumerate(self) if each[1] > request_start_ns), len(self))]
        behind = max(0, min(free_ns, response_start_ns) - request_start_ns)
        if not self or response_start_ns <= request_start_ns:
            return behind, 0
        start, _, before = self[0]
        passed = before + max(0, request_start_ns - start)
        muted = self._until(response_start_ns) - passed
        if behind:
            behind = max(0, behind - (self._until(request_start_ns + behind) - passed))
        return behind, muted

    def _until(self, time_ns: int) -> int:
        """Return the muted time before `time_ns`; before the last interval, all muted time up to that interval."""
        start, end, before = self[-1]
        return before + max(0, min(end, time_ns) - start)


def broker_ns(request_start_ns: int, request_end_ns: int, response_start_ns: int, waited_ns: int) -> int:
    """Return the broker's part of a latency, in ns. waited_ns: queue and mutes, from the request's first byte on."""
    return max(0, response_start_ns - max(request_end_ns, request_start_ns + waited_ns))
