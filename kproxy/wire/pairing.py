"""Requests that wait for their answers, in order of arrival.

A broker serves one request of a connection at a time and answers in order, so the next answer belongs to the head of
the queue; its correlation id is checked all the same. Ids belong to one connection and may be negative, wrap, or repeat
while pending. Requests that get no answer (Produce with acks=0) are not in the queue.

Bounded by its owner, who stops reading the client at LIMIT. Refuses to know bytes and time.
"""

from collections import deque

from kproxy.wire.events import Exchange

LIMIT = 4096


class Pending(deque[Exchange]):
    """The queue. Its head is the request that the next answer belongs to."""

    __slots__ = ()

    def overtaken_by(self, correlation_id: int) -> list[Exchange] | None:
        """Remove and return the requests before the first one with that id, which is then the head.

        None, and nothing is removed, if no request has the id.
        """
        for index, exchange in enumerate(self):
            if exchange.correlation_id == correlation_id:
                return [self.popleft() for _ in range(index)]
        return None
