"""Requests that wait for their answers, in order of arrival.

A broker serves one request of a connection at a time and answers in order, so the head of the queue is the one; its
correlation id is checked all the same. Ids belong to one connection and may be negative, wrap, or repeat while pending.
Requests that get no answer (Produce with acks=0) are never in here.

Bounded by its owner, who stops reading the client at LIMIT. Refuses to know bytes and time.
"""

from collections import deque

from kproxy.wire.events import Exchange

LIMIT = 4096


class Pending(deque[Exchange]):
    """The queue; its head is the request that the next answer belongs to."""

    __slots__ = ()

    def overtaken_by(self, correlation_id: int) -> list[Exchange] | None:
        """Take out what stands before the first request with that id, and return it; None if there is no such request.

        The request itself is then the head.
        """
        for index, exchange in enumerate(self):
            if exchange.correlation_id == correlation_id:
                return [self.popleft() for _ in range(index)]
        return None
