"""Pending requests of a connection, in order of arrival.

A broker serves one request of a connection at a time and answers in order, so the next response belongs to the head of
the queue; the session also checks its correlation id. Ids belong to one connection and may be negative, wrap, or repeat
while pending. Requests without a response (Produce with acks=0) are not in the queue.

The queue is a plain list. A deque takes 760 bytes of each idle connection and is slower up to some hundred requests;
removing the head of LIMIT requests moves 32 KiB, some 0.2 us.

Bound: the owner stops reading the client at LIMIT. Refuses to know bytes and time.
"""

from kproxy.wire.events import Exchange

LIMIT = 4096


def overtaken_by(pending: list[Exchange], correlation_id: int) -> list[Exchange] | None:
    """Remove and return the requests before the first one with that id, which becomes the head.

    Return None, and remove nothing, if no request has the id.
    """
    for index, exchange in enumerate(pending):
        if exchange.correlation_id == correlation_id:
            overtaken = pending[:index]
            del pending[:index]
            return overtaken
    return None
