"""A session over a capture: bytes may be missing, and the capture may begin in the middle of a connection.

Duty: what a gap costs, and finding the next plausible frame behind it. A hole inside a body of known size costs that
body only; anything else ends the framing of that side, which is then in a state of its own:

    client side   seeking   _seek_request        broker side   seeking   _seek_answer

Adds to a session's memory what was searched in vain, to resync.WINDOW. The pending requests are bounded here, by giving
up the oldest.
"""

from itertools import islice
from typing import Any

from kproxy.wire import resync
from kproxy.wire.events import BROKER, CLIENT, FAILED, Exchange, Gap
from kproxy.wire.interest import Interest
from kproxy.wire.keeping import keep_answer
from kproxy.wire.kept import GAP
from kproxy.wire.muting import Mutes
from kproxy.wire.session import Session
from kproxy.wire.state import UNLIMITED, Piece, Usual


class CapturedSession(Session):
    """A session that accepts gaps. `midstream`: the connection was open before the capture began."""

    __slots__ = ("_client_id",)

    _doubts = True
    _frames_per_call = UNLIMITED
    _walked_per_call = UNLIMITED

    def __init__(self, interest: Interest, *, midstream: bool = False) -> None:
        super().__init__(interest)
        self._client_id: resync.ClientId = ...  # of the requests so far
        if midstream:
            self._seen_gap = True
            self._handlers = [CapturedSession._seek_request, CapturedSession._seek_answer]

    def gap(self, side: int, count: int, now_ns: int) -> None:
        """The capture does not hold the next `count` bytes of a side."""
        self.events.append(Gap(side, self._received[side], count, False, now_ns))
        self._received[side] += count
        self._seen_gap = True
        if side == CLIENT:
            self._gap_in_requests(count, now_ns)
        else:
            self._gap_ns = now_ns
            self._gap_in_answers(count, now_ns)

    @property
    def is_framed(self) -> bool:
        """Whether both sides are framed, so that `missing` gives the distance to the next frame of each."""
        return (
            not (self._client_head or self._broker_head)
            and self._handshake is None
            and self._handlers[CLIENT] is CapturedSession._requests
            and self._handlers[BROKER] is CapturedSession._answers
        )

    @property
    def number(self) -> int:
        """The number of the next request."""
        return self._number

    @property
    def free_at(self) -> int:
        """When the last answer ended."""
        return self._free_at

    @property
    def mutes(self) -> Mutes:
        """When earlier throttles muted the connection; who reads answers in the session's place adds theirs."""
        if self._mutes is None:
            self._mutes = Mutes()
        return self._mutes

    @property
    def usual(self) -> Usual:
        """How the connection's requests begin lately."""
        return self._usual

    def passed(self, exchanges: int, received_bytes: tuple[int, int], free_at: int) -> None:
        """Count answered requests, between two frames of each side, that the caller has read itself."""
        self._number += exchanges
        for side, count in enumerate(received_bytes):
            self.completed[side] += exchanges
            self._received[side] += count
        self._free_at = free_at

    def _lost_framing(self, side: int, kind: str, text: str, now: int) -> None:
        self._fault(side, kind, text, None, now)
        self._lose(side)

    def _believes(self, view: Any, pos: int, size: int) -> bool:
        return resync.believable(view, pos, size, self._client_id)

    def _take_prefix(self, exchange: Exchange, client_id: str | None, *values: Any) -> None:
        self._client_id = None if client_id is None else client_id.encode()
        super()._take_prefix(exchange, client_id, *values)

    def _unpaired(self, correlation_id: int, view: Any, pos: int, now: int) -> Exchange | None:
        """Without a gap only a damaged size leads to an unexpected answer; after one, `follows` must accept it."""
        if not self._seen_gap or not resync.follows(view, pos, len(view), self._waited_for()):
            self._mark(BROKER, pos)
            text = f"an answer with the correlation id {correlation_id}, which is not due"
            self._lost_framing(BROKER, "unexpected_answer", text, now)
            return None
        return super()._unpaired(correlation_id, view, pos, now)

    def _is_full(self) -> bool:
        """The oldest pending request is given up: a capture of one direction has no answers at all."""
        self._give_up(self.pending.pop(0), "limit")
        return False

    def _gap_in_requests(self, count: int, now: int) -> None:
        exchange = self._client_exchange
        if self._client_prefix is not None and exchange is not None:
            self._client_prefix = None
            exchange.decoded = FAILED
        self._client_body = None
        self._drop_frame(CLIENT, GAP)
        if self._client_walker is not None and exchange is not None:
            # an incomplete list of topic-partitions would look complete
            self._client_walker = exchange.request_body = None
        if self._handlers[CLIENT] is CapturedSession._requests and 0 < count <= self._client_left:
            self._client_left -= count
            if not self._client_left:  # a hole in a body of known size costs that body only
                self._client_exchange = None
                self.completed[0] += 1
                if exchange is not None:
                    exchange.request_end = now
                    self._whole_request(exchange, [], now)
            return
        if self._handlers[CLIENT] is not CapturedSession._closed:
            self._lose(CLIENT)

    def _gap_in_answers(self, count: int, now: int) -> None:
        exchange = self._broker_exchange
        self._drop_answer()
        self._drop_frame(BROKER, GAP)
        if self._handlers[BROKER] is CapturedSession._answers and 0 < count <= self._broker_left:
            self._broker_left -= count
            if not self._broker_left:
                self._broker_exchange = None
                self.completed[1] += 1
                if exchange is not None:
                    if exchange.plan.kept is not None:
                        keep_answer(exchange.plan.kept, exchange, None)
                    self._answered(exchange, now)
            return
        if self._handlers[BROKER] is not CapturedSession._closed:
            self._lose(BROKER)

    def _lose(self, side: int) -> None:
        """The frame boundaries of a side are lost: search for the next plausible frame."""
        if side == CLIENT:
            self._drop_request("gap")
            self._client_head = b""
            self._handlers[CLIENT] = CapturedSession._seek_request
        else:
            exchange, self._broker_exchange = self._broker_exchange, None
            self._broker_head = b""
            self._broker_left = 0
            self._drop_answer()
            self._drop_frame(BROKER)
            if exchange is not None:
                self._give_up(exchange, "gap")
            self._handlers[BROKER] = CapturedSession._seek_answer
        self._seen_gap = True

    def _seek_request(self, view: Any, now: int) -> list[Piece]:
        kept = self._client_head
        data = kept + bytes(view)
        found = resync.find_request(data, len(kept), self._client_id)
        return self._sought(CLIENT, data, len(kept), found, now)

    def _seek_answer(self, view: Any, now: int) -> list[Piece]:
        kept = self._broker_head
        data = kept + bytes(view)
        found = resync.find_answer(data, len(kept), self._waited_for())
        return self._sought(BROKER, data, len(kept), found, now)

    def _waited_for(self) -> set[int]:
        return {exchange.correlation_id for exchange in islice(self.pending, resync.CANDIDATES)}

    def _sought(self, side: int, data: bytes, kept: int, found: int, now: int) -> list[Piece]:
        """`data`, of which `kept` bytes came earlier, was searched: go on at the frame found, or keep its end."""
        head = b""
        skipped = found
        if found < 0:
            head = data[-resync.WINDOW :]
            skipped = len(data) - len(head)
        else:
            self._handlers[side] = CapturedSession._requests if side == CLIENT else CapturedSession._answers
            self._rest = memoryview(data)[found:]
            self._shift += found - kept
            self._is_odd = True
        if side == CLIENT:
            self._client_head = head
        else:
            self._broker_head = head
        if skipped:
            self.events.append(Gap(side, self._received[side] - kept, skipped, True, now))
        return []
