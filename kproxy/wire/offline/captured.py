"""A session over a capture: bytes may be missing, and the capture may begin in the middle of a connection.

Duty: limit the loss at a gap, and find the next plausible frame after it. A gap inside a body of known size loses only
that body; after any other gap the frame boundaries of that side are lost, and the side is in a separate state:

    client side   seeking   _seek_request        broker side   seeking   _seek_answer

Memory in addition to a session's: resync.WINDOW bytes searched without success. At the limit of pending requests the
session drops the oldest.
"""

from itertools import islice
from typing import Any

from kproxy.wire import frames
from kproxy.wire.events import BROKER, CLIENT, FAILED, LOST, NONE, Exchange, Gap
from kproxy.wire.interest import Interest
from kproxy.wire.muting import Mutes
from kproxy.wire.observing.keeping import keep_answer
from kproxy.wire.observing.kept import GAP
from kproxy.wire.offline import resync
from kproxy.wire.reading import Piece
from kproxy.wire.session import Session
from kproxy.wire.state import UNLIMITED, Usual


class CapturedSession(Session):
    """A session that accepts gaps. `midstream`: the connection was open before the capture began."""

    __slots__ = ("_client_id", "is_surprised")

    _may_be_damaged = True
    _frames_per_call = UNLIMITED
    _walked_per_call = UNLIMITED

    def __init__(self, interest: Interest, *, midstream: bool = False) -> None:
        super().__init__(interest, max_request_bytes=frames.MAX_SIZE)
        self._client_id: resync.ClientId = ...  # client id of the requests so far
        self.is_surprised = False  # a response without a pending request arrived, although no byte was missing so far
        if midstream:
            self._seen_gap = True
            self._handlers = [CapturedSession._seek_request, CapturedSession._seek_answer]

    def gap(self, side: int, count: int, now_ns: int) -> None:
        """Skip the next `count` bytes of a side, which the capture lacks."""
        self.events.append(Gap(side, self._received[side], count, False, now_ns))
        self._received[side] += count
        self._seen_gap = True
        if side == CLIENT:
            self._gap_in_requests(count, now_ns)
        else:
            self._gap_ns = now_ns
            self._gap_in_answers(count, now_ns)

    @property
    def ends_in_header(self) -> bool:
        """Return whether the client's last bytes are an incomplete header of a request."""
        return bool(self._client_head)

    @property
    def is_framed(self) -> bool:
        """Return whether both sides are framed, so that `missing` is the distance to the next frame of each."""
        return (
            not (self._client_head or self._broker_head)
            and self._handshake is None
            and self._handlers[CLIENT] is CapturedSession._requests
            and self._handlers[BROKER] is CapturedSession._answers
        )

    @property
    def number(self) -> int:
        """Return the number of the next request."""
        return self._number

    @property
    def free_at(self) -> int:
        """Return the time at which the last response ended, in ns."""
        return self._free_at

    @property
    def mutes(self) -> Mutes:
        """Return the intervals during which the connection was muted; a caller of `passed` adds its own."""
        if self._mutes is None:
            self._mutes = Mutes()
        return self._mutes

    @property
    def usual(self) -> Usual:
        """Return the usual beginning of the connection's requests."""
        return self._usual

    @property
    def snapshot(self) -> tuple[Any, ...] | None:
        """Return the state that determines later exchanges, by value: sessions with equal snapshots emit equal events.

        Numbers of exchanges are relative to the number of the next request. The snapshot omits earlier gaps: they
        affect only responses without a pending request. None: an unusual state, such as a login.
        """
        kind = type(self)
        if self._handlers != [kind._requests, kind._answers] or self._handshake is not None or self._ended:
            return None
        transit = self._client_exchange, self._broker_exchange
        since_ns = self.waits_since_ns
        if self._gap_ns != NONE and self._gap_ns >= since_ns:
            return None
        return (
            [self._snapshot_of(exchange) for exchange in self.pending],
            [None if exchange is None else self._snapshot_of(exchange) for exchange in transit],
            (self._client_head, self._broker_head),
            (self._client_head and self._client_head_ns, self._broker_head and self._broker_head_ns),
            (self._client_left, self._broker_left),
            [
                None if part is None else len(part)
                for part in (self._client_prefix, self._client_body, self._broker_kept)
            ],
            [bool(part) for part in (self._client_walker, self._broker_walker, self._client_frame, self._broker_frame)],
            self._client_id,
            self._free_at,
            [(max(each[0], since_ns), each[1]) for each in self._mutes or () if each[1] > since_ns],
        )

    @property
    def waits_since_ns(self) -> int:
        """Return the time at which the oldest pending request began; without one, when the last response ended."""
        transit = (self._client_exchange, self._broker_exchange)
        waiting = [exchange for exchange in (*transit, *self.pending) if exchange is not None]
        return min((exchange.request_start for exchange in waiting), default=self._free_at)

    @property
    def oldest_number(self) -> int:
        """Return the number of the oldest request that is pending or in transit; without one, the next number."""
        waiting = [
            each for each in (self._client_exchange, self._broker_exchange, *self.pending[:1]) if each is not None
        ]
        return min((exchange.number for exchange in waiting), default=self._number)

    def _snapshot_of(self, exchange: Exchange) -> tuple[Any, ...]:
        return (
            self._number - exchange.number,
            exchange.plan.api_key,
            exchange.plan.api_version,
            exchange.correlation_id,
            exchange.in_flight,
            exchange.client_id,
            (exchange.request_bytes, exchange.request_start, exchange.request_end),
            (exchange.response_bytes, exchange.response_start),
            (exchange.acks, exchange.max_wait_ms, exchange.group_id, exchange.transactional_id),
            exchange.outcome,
            exchange.decoded,
        )

    def count_anew(self) -> None:
        """Reset the counters, because another reader reports the counts so far; assume that no bytes are missing."""
        self._seen_gap = self.is_surprised = False
        self.faults = self.sasl_tokens = 0

    @property
    def has_seen_gap(self) -> bool:
        """Return whether bytes were missing, so that responses to unseen requests are expected."""
        return self._seen_gap

    def passed(self, exchanges: int, received_bytes: tuple[int, int], free_at: int, usual: Usual) -> None:
        """Count answered requests that the caller has read itself, between two frames of each side.

        usual: the beginning of the last one of them.
        """
        self._number += exchanges
        for side, count in enumerate(received_bytes):
            self.completed[side] += exchanges
            self._received[side] += count
        self._free_at = free_at
        self._usual = usual
        self._client_id = _encoded(usual[5][0])

    def _lost_framing(self, side: int, kind: str, text: str, now: int) -> None:
        self._fault(side, kind, text, None, now)
        self._lose(side)

    def _looks_like_request(self, view: Any, pos: int, size: int) -> bool:
        return resync.believable(view, pos, size, self._client_id)

    def _take_prefix(self, exchange: Exchange, client_id: str | None, *values: Any) -> None:
        self._client_id = _encoded(client_id)
        super()._take_prefix(exchange, client_id, *values)

    def _unpaired(self, correlation_id: int, view: Any, pos: int, now: int) -> Exchange | None:
        """Find the request of a response out of order.

        Without a gap it must be the only request with this correlation id, and older requests stay pending. If there is
        no such request, a damaged size led here; after a gap, `resync.follows` must accept the response.
        """
        if not self._seen_gap:
            places = [place for place, each in enumerate(self.pending) if each.correlation_id == correlation_id]
            if len(places) == 1:
                exchange = self.pending.pop(places[0])
                for older in self.pending[: places[0]]:
                    older.outcome = LOST  # unless its response arrives later
                text = (
                    f"the answer {correlation_id} ({exchange.plan.api}) came before {places[0]} older ones; "
                    "a broker answers a connection in order"
                )
                self._fault(BROKER, "out_of_order", text, exchange.plan, now)
                return exchange
        self.is_surprised |= not self._seen_gap
        if not self._seen_gap or not resync.follows(view, pos, len(view), self._pending_ids()):
            self._mark(BROKER, pos)
            text = f"an answer with the correlation id {correlation_id}, which is not due"
            self._lost_framing(BROKER, "unexpected_answer", text, now)
            return None
        return super()._unpaired(correlation_id, view, pos, now)

    def _is_full(self) -> bool:
        """Drop the oldest pending request: a capture of one direction has no responses at all."""
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
            # Drop the walker: an incomplete list of topic-partitions would look complete.
            self._client_walker = exchange.request_body = None
        if self._handlers[CLIENT] is CapturedSession._requests and 0 < count <= self._client_left:
            self._client_left -= count
            if not self._client_left:  # a gap in a body of known size loses only that body
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
        """Search for the next plausible frame, because the frame boundaries of a side are lost."""
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
        return self._search_ended(CLIENT, data, len(kept), found, now)

    def _seek_answer(self, view: Any, now: int) -> list[Piece]:
        kept = self._broker_head
        data = kept + bytes(view)
        found = resync.find_answer(data, len(kept), self._pending_ids())
        return self._search_ended(BROKER, data, len(kept), found, now)

    def _pending_ids(self) -> set[int]:
        return {exchange.correlation_id for exchange in islice(self.pending, resync.CANDIDATES)}

    def _search_ended(self, side: int, data: bytes, kept: int, found: int, now: int) -> list[Piece]:
        """Continue at the frame found in `data`; if found is -1, keep the end of `data`.

        kept: the number of bytes of `data` from earlier calls.
        """
        head = b""
        skipped = found
        if found < 0:
            head = data[-resync.WINDOW :]
            skipped = len(data) - len(head)
        else:
            self._handlers[side] = CapturedSession._requests if side == CLIENT else CapturedSession._answers
            self._rest = memoryview(data)[found:]
            self._shift += found - kept
            self._needs_finish = True
        if side == CLIENT:
            self._client_head = head
        else:
            self._broker_head = head
        if skipped:
            self.events.append(Gap(side, self._received[side] - kept, skipped, True, now))
            if side == BROKER:
                self._gap_ns = now
        return []


def _encoded(client_id: str | None) -> bytes | None:
    return None if client_id is None else client_id.encode()
