"""Requests that wait for their answers, in order of arrival.

A broker serves one request of a connection at a time and answers in order, so the head of the queue is the one; its
correlation id is checked all the same. Ids belong to one connection and may be negative, wrap, or repeat while pending.
Requests that get no answer (Produce with acks=0) are never in here. Runs, where there are any, stand before all others,
once for each of their requests; whoever looks at those unrolls them first.

Bounded by its owner, who stops reading the client at LIMIT. Refuses to know bytes and time.
"""

from collections import deque
from itertools import repeat
from typing import cast

from kproxy.wire.events import Exchange
from kproxy.wire.runs import Run

LIMIT = 4096


class Pending(deque[Exchange]):
    """The queue; its head is the request that the next answer belongs to."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0  # requests that stand here as runs

    @property
    def run(self) -> Run:
        """The one at the head."""
        return cast(Run, self[0])

    def note(self, run: Run) -> int:
        """Add a run to those that wait; returns how many requests that are."""
        count = len(run)
        self.extend(repeat(cast(Exchange, run), count))
        self.runs += count
        return count

    def forget(self, count: int) -> None:
        """Take out so many, all in runs."""
        self.runs -= count
        if count == len(self):
            self.clear()
        else:
            for _ in range(count):
                self.popleft()

    def unroll(self) -> None:
        """Put each request's own exchange where its run stood."""
        exchanges = [cast(Run, self.popleft()).take() for _ in range(self.runs)]
        self.runs = 0
        self.extendleft(reversed(exchanges))

    def overtaken_by(self, correlation_id: int) -> list[Exchange] | None:
        """Take out what stands before the first request with that id, and return it; None if there is no such request.

        The request itself is then the head.
        """
        for index, exchange in enumerate(self):
            if exchange.correlation_id == correlation_id:
                return [self.popleft() for _ in range(index)]
        return None
