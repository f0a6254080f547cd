"""When a broker muted a connection, and how much of an exchange's wait that explains (KIP-219).

From some version of each API on, a broker sends a throttled answer at once and then reads nothing from the connection
for `throttle_time_ms`. A request that was sent ahead waits through every such interval between its first byte and its
answer, not only through the one of the answer before. Its bytes are among what waits: of a request that is larger than
the broker's receive buffer the last one leaves its client only when the broker reads again.

Queue and mutes cover one span from the request's first byte on, since every mute begins where an answer before ended.
So `broker_ns` finds what is left for the broker.

Memory: the intervals that end after the request answered last began. Each belongs to an answer that came while
that request waited, so there are at most as many as requests may be pending. Refuses to know which versions mute.
"""


class Mutes(list[list[int]]):
    """The intervals in which one connection was muted, of which none overlaps another.

    Each is [start_ns, end_ns, muted time before the start]. A session makes one at its first throttle, and until then
    pays for one truth test.
    """

    __slots__ = ()

    def mute(self, now_ns: int, muted_ns: int) -> None:
        """An answer ended at `now_ns` and mutes the connection for `muted_ns`. Times must not decrease."""
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
        """(queue_ns, muted_ns) of the time between a request's first byte and its answer.

        `free_ns`: when the answer before ended. The queue is the time up to there less what of it was muted. Requests
        come in the order in which they began: what ended before this one is forgotten.
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
        """The muted time before `time_ns`, which is not before the start of the last interval, or before all of it."""
        start, end, before = self[-1]
        return before + max(0, min(end, time_ns) - start)


def broker_ns(request_start_ns: int, request_end_ns: int, response_start_ns: int, waited_ns: int) -> int:
    """The part of a latency that is the broker's own. waited_ns: queue and mutes, from the request's first byte on."""
    return max(0, response_start_ns - max(request_end_ns, request_start_ns + waited_ns))
