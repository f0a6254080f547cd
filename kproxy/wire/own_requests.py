"""Requests of the session's owner on a client's connection: put in between two of the client's, their answers kept.

So that an owner that has logged in can log in again (KIP-368). One at a time. The broker sees such a request in its
place among the client's, and answers it in its place; its event is emitted like any other. Bound: MAX_OWN_ANSWER bytes
of an answer. Refuses to know what is asked.
"""

from collections.abc import Callable
from functools import cache

from kproxy.protocol import schema
from kproxy.wire import frames
from kproxy.wire.events import BROKER, CLIENT, FULL, Exchange
from kproxy.wire.interest import HOLD, ApiPlan, Interest
from kproxy.wire.own_answers import OwnAnswers
from kproxy.wire.state import NOTHING_USUAL, Piece

MAX_OWN_ANSWER = 512 * 1024

Take = Callable[[bytes], None]  # gets the answer, its 4-byte size included


class OwnRequests(OwnAnswers):
    """The owner's requests of one session."""

    __slots__ = ()

    def ask(self, frame: bytes, take: Take, client_id: str, now_ns: int) -> list[Piece]:
        """Send a request of the owner's, with its 4-byte size; `take` gets its answer within a later call.

        Only while the client's side is between two frames and no other such request is unanswered. Returns the pieces
        to send: none if the connection is not, or no longer, one of frames.
        """
        assert self._asked is None and not self._client_left
        if self._handlers[CLIENT] is not type(self)._requests or self._handlers[BROKER] is not type(self)._answers:
            return []
        length, key_version, correlation_id = frames.REQUEST_HEAD.unpack_from(frame, 0)
        exchange = Exchange(_own_plan(key_version), correlation_id, self._number, len(self.pending), length + 4, now_ns)
        exchange.request_end = now_ns
        exchange.client_id = client_id
        self._number += 1
        self.pending.append(exchange)
        self._asked = exchange, take
        return [(BROKER, memoryview(frame))]

    @property
    def interest(self) -> Interest:
        """What decides about frames."""
        return self._interest

    def use(self, interest: Interest) -> None:
        """From the next request on, that decides. Not within a call of the session; both share a HeldBudget."""
        self._interest = interest
        self._usual = NOTHING_USUAL

    def _take_own(self, exchange: Exchange, frame: bytes) -> bytes:
        """The answer to the owner's request is whole; nothing of it leaves."""
        assert self._asked is not None
        take = self._asked[1]
        self._asked = None
        exchange.decoded = FULL
        take(frame)
        return b""


@cache
def _own_plan(key_version: int) -> ApiPlan:
    """The plan of the owner's requests: their answers are held whole, whatever is in them."""
    api_key, version = key_version >> 16, key_version & 0xFFFF
    plan = ApiPlan(api_key, version, schema.api_name(api_key), True)
    plan.response = HOLD
    plan.transforms_always = True
    plan.max_held_bytes = MAX_OWN_ANSWER
    return plan
