"""Requests of the session's owner on a client's connection: inserted between two of the client's requests.

An owner that has logged in uses them to reauthenticate (KIP-368), one at a time. The broker answers such a request in
order, the client does not get the response, and the session emits its event like any other. Bound: MAX_OWN_ANSWER bytes
of a response. Refuses to know the contents of requests.
"""

from collections.abc import Callable
from functools import cache

from kproxy.protocol import schema
from kproxy.wire import frames
from kproxy.wire.decisions.own_answers import OwnAnswers
from kproxy.wire.events import BROKER, CLIENT, FULL, Exchange
from kproxy.wire.interest import HOLD, ApiPlan, Interest
from kproxy.wire.reading import Piece
from kproxy.wire.state import NOTHING_USUAL

MAX_OWN_ANSWER = 512 * 1024

Take = Callable[[bytes], None]  # takes the response, including its 4-byte size


class OwnRequests(OwnAnswers):
    """The owner's requests of one session."""

    __slots__ = ()

    def ask(self, frame: bytes, take: Take, client_id: str, now_ns: int) -> list[Piece]:
        """Send a request of the owner, with its 4-byte size; a later call passes its response to `take`.

        Call it only while the client's side is between two frames and no other such request is pending. Return the
        pieces to send: none if a side of the connection is not framed.
        """
        assert self._own_request is None and not self._client_left
        if self._handlers[CLIENT] is not type(self)._requests or self._handlers[BROKER] is not type(self)._answers:
            return []
        length, key_version, correlation_id = frames.REQUEST_HEAD.unpack_from(frame, 0)
        exchange = Exchange(_own_plan(key_version), correlation_id, self._number, len(self.pending), length + 4, now_ns)
        exchange.request_end = now_ns
        exchange.client_id = client_id
        self._number += 1
        self.pending.append(exchange)
        self._own_request = exchange, take
        return [(BROKER, memoryview(frame))]

    @property
    def interest(self) -> Interest:
        """Return the interest that selects the plans of frames."""
        return self._interest

    def use(self, interest: Interest) -> None:
        """Use another interest, with the same HeldBudget, from the next request on. Call it between other calls."""
        self._interest = interest
        self._usual = NOTHING_USUAL

    def _take_own(self, exchange: Exchange, frame: bytes) -> bytes:
        """Pass the complete response to the owner's request to `take`; return b"", so that none of it is forwarded."""
        assert self._own_request is not None
        take = self._own_request[1]
        self._own_request = None
        exchange.decoded = FULL
        take(frame)
        return b""


@cache
def _own_plan(key_version: int) -> ApiPlan:
    """Return the plan of the owner's requests: their responses are always held until they are complete."""
    api_key, version = key_version >> 16, key_version & 0xFFFF
    plan = ApiPlan(api_key, version, schema.api_name(api_key), True)
    plan.response = HOLD
    plan.transforms_always = True
    plan.max_held_bytes = MAX_OWN_ANSWER
    return plan
