"""The common part of a session's two sides: fields, ends of exchanges, faults, and the limit of work per call.

Each side has a handler, the function that takes its bytes (`session.py` has the table of states). A handler reads
frames until the bytes end, its state changes, or the call has reached its limit of work. The unread rest of the view
goes to the new state at once (`_change`) or to a later call (`_leave`). Refuses to know the layout of frames.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from kproxy.errors import ProtocolError
from kproxy.protocol.apis import PRODUCE
from kproxy.wire import frames
from kproxy.wire.bodies import BodyWalker, Edit, Found
from kproxy.wire.decisions.authorizer import Answer, Authorizer
from kproxy.wire.decisions.slow_work import NOTHING_SLOW, SlowSides
from kproxy.wire.events import (
    ANSWERED,
    BROKER,
    CLIENT,
    FAILED,
    LOST,
    NO_ANSWER_EXPECTED,
    NONE,
    OPAQUE,
    REQUEST_NOT_SEEN,
    UNANSWERED,
    Desync,
    Event,
    Exchange,
    Unanswered,
)
from kproxy.wire.interest import ApiPlan, Interest
from kproxy.wire.login import sasl
from kproxy.wire.muting import Mutes
from kproxy.wire.observing.keeping import emitted
from kproxy.wire.observing.kept import FrameInParts
from kproxy.wire.pairing import LIMIT
from kproxy.wire.reading import Piece, Reading

Transform = Callable[[Exchange, memoryview], bytes | None]
Handler = Callable[[Any, Any, int], list[Piece]]

SMALL_BODY = 64 * 1024  # a frame up to this size is copied to be read if it arrives in parts; a larger one is walked
MAX_NAMED = 64 * 1024  # topic-partitions, and batches, of one body, and of all pending requests
MAX_UNCOUNTED = 16  # a body with at most so many topic-partitions does not count towards MAX_NAMED of pending requests

# Memory for ids and topic-partitions of pending requests, all connections together (`HeldBudget.note`).
MIN_NOTED_BYTES = 512  # a request that keeps fewer bytes is not counted
MAX_UNNOTED = 2  # a short Produce with at most so many topic-partitions is not counted either
NAMED_BYTES = 300  # approximate memory of a kept topic-partition
WIDEST_CHARACTER = 4  # bytes in memory: one character beyond UCS-2 widens all characters of a text to this
NOTE_STEP = 2 * 1024  # an incomplete body is counted after so many bytes, then whenever it has grown by an eighth
MAX_CUT_ID = 256  # characters that remain of a cut id
NO_ROOM = "all pending requests together name as much as may be kept"

# The limit of work of one call of `receive`, some tenths of a millisecond: all other connections wait for it.
FRAMES_PER_CALL = 64
FRAMES_WHILE_OTHERS_WAIT = 8  # if other connections already wait for their turn
READ_BYTES_SHIFT = 8  # 1 << 8 bytes read of a prefix or a small body count as one frame of work
MIN_READ_BYTES = 2 * 1024  # a smaller body adds no work to its frame
WALKED_PER_CALL = 32 * 1024  # bytes read of walked bodies, without skipped payloads
WALK_SLICE = 2 * 1024
SPARSE_SLICE = 512  # slice after skipped payloads of WALK_SLICE and more; batch headers beyond it are read too
LOOK_BYTES = 64  # approximate size of a batch header
UNLIMITED = 1 << 62

# The usual beginning of a connection's requests: a function that unpacks the head and the bytes of the prefix, the
# number of these bytes, the key and version, the bytes of the prefix, the plan, and the values of the prefix.
Usual = tuple[Callable[[Any, int], tuple[Any, ...]], int, int, bytes, ApiPlan, tuple[Any, ...]]

_NO_LOGIN = sasl.RawSasl("")  # placeholder before a login

UNSEEN = ApiPlan(NONE, NONE, "unknown", False)
NOTHING_USUAL: Usual = (*frames.request_head_and(0), NONE, b"", UNSEEN, ())


class SessionState(SlowSides):
    """The fields of a session, and the methods that its two sides share."""

    __slots__ = (
        "_authorizer",
        "_broker_exchange",
        "_broker_frame",
        "_broker_head",
        "_broker_head_ns",
        "_broker_kept",
        "_broker_left",
        "_broker_walker",
        "_client_body",
        "_client_exchange",
        "_client_frame",
        "_client_head",
        "_client_head_ns",
        "_client_held",
        "_client_left",
        "_client_prefix",
        "_client_replacement",
        "_client_swallow",
        "_client_walker",
        "_ended",
        "_frame_at",
        "_frames_left",
        "_free_at",
        "_gap_ns",
        "_handshake",
        "_held",
        "_max_request",
        "_mutes",
        "_named",
        "_note_at",
        "_noted",
        "_number",
        "_own_answers",
        "_own_bytes",
        "_own_request",
        "_raw",
        "_received",
        "_seen_gap",
        "_shift",
        "_transform",
        "_unread",
        "_usual",
        "_waiting",
        "backlog",
        "client_id",
        "completed",
        "events",
        "faults",
        "max_in_flight",
        "most_in_flight",
        "observers",
        "pending",
        "sasl_mechanism",
        "sasl_tokens",
        "software",
    )

    _may_be_damaged: ClassVar[bool] = False  # whether bytes can be damaged, as in captures
    _frames_per_call: ClassVar[int] = FRAMES_PER_CALL
    _walked_per_call: ClassVar[int] = WALKED_PER_CALL

    def __init__(
        self,
        interest: Interest,
        *,
        transform: Transform | None = None,
        max_request_bytes: int = frames.MAX_REQUEST,
        authorizer: Authorizer | None = None,
        max_in_flight: int = LIMIT,
    ) -> None:
        self.events: list[Event] = []  # the owner takes them and clears the list after each call
        self.pending: list[Exchange] = []  # requests in flight (pairing.py)
        self.completed = [0, 0]  # frames whose last byte has arrived, per side
        self.most_in_flight = max_in_flight  # upper limit for max_in_flight
        self.max_in_flight = max_in_flight  # limit of pending requests; further requests wait in the backlog
        self.backlog: list[memoryview | None] = [None, None]  # per side: bytes that wait for `resume`
        self.slow = NOTHING_SLOW  # per side: work in slices that precedes its backlog
        self.faults = 0  # Desync events so far
        self.sasl_mechanism: str | None = None
        self.sasl_tokens = 0  # number of raw tokens; they emit no events
        self.client_id: str | None = None  # client id of the last request whose prefix was read
        self.observers: tuple[Any, ...] = ()  # who sees the bytes that pass (watched.py)
        self.software: tuple[str, str] | None = None  # name and version, from ApiVersions (KIP-511)

        self._interest = interest
        self._transform = transform
        self._own_request: tuple[Exchange, Callable[[bytes], None]] | None = None  # own_requests.py
        self._authorizer = authorizer  # decides requests whose plan is AUTHORIZE
        self._max_request = max_request_bytes
        self._number = 0  # number of the next request
        self._received = [0, 0]  # per side: stream offset of the current call's view
        self._shift = 0  # offset from there to the first byte of the handler's view
        self._frame_at = [0, 0]  # per side: stream offset of the frame that a fault refers to
        self._frames_left = self._frames_per_call  # work left in this call, in frames
        self._rest: Any = None  # the unread end of this call's view, for the state that the side changed to
        self._unread: Any = None  # the unread end of this call's view, for a later call
        self._needs_finish = False  # the view was not read to its end in one state: `_finish` has work
        self._ended: tuple[int, ...] = ()
        self._seen_gap = False  # only captures have gaps
        self._gap_ns = NONE  # when the broker's side last lost bytes

        self._client_head = b""  # an incomplete header or token
        self._client_head_ns = 0
        self._client_left = 0  # bytes of the frame in transit that have not arrived yet
        self._client_exchange: Exchange | None = None  # exchange of the frame in transit
        self._client_frame: FrameInParts | None = None  # the whole frame, if its plan keeps it (keeping.py)
        self._client_prefix: bytearray | None = None  # the part of its first fields that has arrived
        self._client_body: bytearray | None = None  # its body, if it is small and read
        self._client_walker: BodyWalker | None = None  # the walker of its body, if it is large
        self._client_swallow = False  # the broker does not get the request in transit
        self._client_held: bytearray | None = None  # the whole frame, until the authorizer can decide
        self._client_replacement: bytes | None = None  # the request that replaces the held one
        self._usual: Usual = NOTHING_USUAL
        self._note_at = 0  # bytes of the body in transit after which its memory is counted next
        self._noted: dict[int, int] | None = None  # bytes reserved with `HeldBudget.note`, by number of the request
        self._named = 0  # topic-partitions and batches of pending requests, without bodies of at most MAX_UNCOUNTED

        self._broker_head = b""
        self._broker_head_ns = 0
        self._broker_left = 0
        self._broker_exchange: Exchange | None = None
        self._broker_frame: FrameInParts | None = None
        self._broker_kept: bytearray | None = None  # the response in transit, to be read when it is complete
        self._held = False  # the response in transit is forwarded only when it is complete
        self._broker_walker: BodyWalker | None = None
        self._free_at = 0  # when the previous response ended
        self._mutes: Mutes | None = None  # None: no throttle so far
        self._own_answers: dict[int, Answer] | None = None  # by number: own responses that wait for older ones
        self._own_bytes = 0  # bytes of these responses in the budget for held bytes

        self._handshake: str | None = None  # the mechanism of an unanswered SaslHandshake
        self._waiting: bytearray | None = None  # the client's bytes after that handshake, or after an unanswered token
        self._raw = _NO_LOGIN
        # These are functions, not bound methods: a reference cycle would leave a session to the garbage collector.
        kind = type(self)
        self._handlers: list[Handler] = [kind._requests, kind._answers]

    # --- handlers of the states; each takes the bytes of a side ------------------------------------------------------

    def _requests(self, view: Any, now: int) -> list[Piece]:
        """Take frames of the client."""
        raise NotImplementedError

    def _answers(self, view: Any, now: int) -> list[Piece]:
        """Take frames of the broker."""
        raise NotImplementedError

    def _blind(self, view: Any, now: int) -> list[Piece]:
        return [(BROKER, view)]

    def _blind_broker(self, view: Any, now: int) -> list[Piece]:
        return [(CLIENT, view)]

    def _closed(self, view: Any, now: int) -> list[Piece]:
        return []

    # --- the unread rest of a view -----------------------------------------------------------------------------------

    def _change(self, reading: Reading) -> list[Piece]:
        """Send the bytes that were read, and leave the rest to the handler of the new state."""
        reading.send(reading.pos)
        rest = reading.view[reading.sent :]
        if self.slow[reading.side] is not None:
            self._leave(rest)  # keep a backlog, even an empty one, until the slow work is done
            return reading.pieces
        if rest:
            self._rest = rest
        self._needs_finish = True
        self._shift += reading.sent
        self._frames_left -= 8 + (reading.sent >> 4)  # at least the work of this call so far
        return reading.pieces

    def _read_rest(self, side: int, now: int) -> list[Piece]:
        """Read the rest that `_change` left; it loops, because a view can contain thousands of state changes."""
        pieces: list[Piece] = []
        while self._rest is not None:
            view, self._rest = self._rest, None
            if self._frames_left <= 0:
                self._leave(view)
                break
            pieces += self._handlers[side](self, view, now)
        return pieces

    def _incomplete_head(self, reading: Reading, in_transit: int, head_bytes: int) -> bytes:
        """Send the bytes that were read; return the rest if it is an incomplete header, else leave it for a later call.

        in_transit: bytes of a frame that have not arrived, or were not read in this call.
        """
        if reading.sent < reading.pos:
            reading.send(reading.pos)
        rest_bytes = reading.size - reading.pos
        if not rest_bytes:
            return b""
        rest = reading.view[reading.pos :]
        if not in_transit and rest_bytes < head_bytes:
            return bytes(rest)
        self._leave(rest)  # the limit of this call, or of pending requests, is reached
        return b""

    def _leave(self, rest: Any) -> None:
        """Keep `rest` of the call's view for `resume`, because the call has reached its limit of work."""
        self._unread = rest
        self._needs_finish = True

    def _joined(self, head: bytes, view: Any) -> memoryview:
        """Return an incomplete header joined with the view that continues it."""
        self._shift -= len(head)
        self._needs_finish = True
        return memoryview(head + bytes(view))

    def _put_back(self, side: int) -> int:
        """Keep the rest of the call's view for `resume`; return its size in bytes."""
        rest, self._unread = self._unread, None
        # Keep a view of immutable bytes, but copy other buffers, since they are refilled.
        self.backlog[side] = rest if isinstance(rest.obj, bytes) else memoryview(bytes(rest))
        return len(rest)

    def _walk(self, walker: BodyWalker, view: Any, start: int, end: int) -> tuple[int, list[Edit]]:
        """Let a walker read [start, end) up to this call's limit; return (where it stopped, its edits)."""
        left = self._walked_per_call
        if left == UNLIMITED:
            edits = walker.feed(view, start, end) or []
            start = end
        else:
            edits = []
            while start < end and left > 0:
                ahead = walker.ahead_bytes
                if walker.is_done or ahead >= end - start:
                    stop, far = end, 0
                elif ahead < WALK_SLICE:
                    stop, far = min(end, start + ahead + WALK_SLICE), 0
                    left -= WALK_SLICE
                else:
                    stop, far = min(end, start + ahead + SPARSE_SLICE), end
                    left -= SPARSE_SLICE
                if more := walker.feed(view, start, stop, far):
                    edits += more
                if far:
                    left -= walker.looks * LOOK_BYTES
                start = stop
        if walker.sums or walker.partitions or walker.batches:
            _cap_named(walker)
        return start, edits

    # --- ends of exchanges -------------------------------------------------------------------------------------------

    def _answered(self, exchange: Exchange, now: int) -> None:
        """Emit an exchange at the last byte of its response, with its queue time and muted time."""
        exchange.response_end = now
        if exchange.outcome is REQUEST_NOT_SEEN:
            self.events.append(exchange)
            return
        exchange.outcome = ANSWERED
        if self._client_exchange is exchange and exchange.request_end == NONE:
            return  # a capture may show a response before the end of its request: emit the exchange at that end
        free = self._free_at
        begun = exchange.request_start
        if self._mutes:
            exchange.queue_ns, exchange.muted_ns = self._mutes.split(begun, free, exchange.response_start)
        else:
            exchange.muted_ns = 0
            if free <= begun:
                exchange.queue_ns = 0
            else:
                start = exchange.response_start
                until = free if free < start else start
                exchange.queue_ns = until - begun if until > begun else 0
        self._free_at = now
        plan = exchange.plan
        if exchange.throttle_ms > 0 and plan.throttled_after_answer:
            if self._mutes is None:
                self._mutes = Mutes()
            self._mutes.mute(now, exchange.throttle_ms * 1_000_000)
        if not plan.known and not exchange.errors:
            exchange.decoded = OPAQUE
        if self._named:
            self._named -= named_count(exchange.request_body)
        if self._noted:
            self._forget(exchange)
        self.events.append(exchange)

    def _give_up(self, exchange: Exchange, cause: str) -> None:
        """Emit an exchange whose response will not arrive completely."""
        if self._named:
            self._named -= named_count(exchange.request_body)
        if self._noted:
            self._forget(exchange)
        if exchange.plan.kept is not None:
            if exchange is self._client_exchange:
                self._drop_frame(CLIENT)
            emitted(exchange.plan.kept, exchange)
        if exchange.outcome is REQUEST_NOT_SEEN:
            self.events.append(exchange)  # only a part of the response was seen
            return
        is_overtaken = cause == "overtaken" and self._seen_gap  # brokers answer in order: the response is lost
        is_in_gap = self._gap_ns != NONE and self._gap_ns >= exchange.request_start
        if exchange.outcome is LOST or is_overtaken or is_in_gap:
            exchange.outcome = LOST
            cause = "gap"
        else:
            exchange.outcome = UNANSWERED
        self.events.append(Unanswered(exchange, cause))

    def _note(self, exchange: Exchange, noted_bytes: int) -> bool:
        """Reserve `noted_bytes` in total for a request until its response. False: that would exceed the limit."""
        held = self._interest.held
        before = self._noted.get(exchange.number, 0) if self._noted else 0
        if (noted_bytes < MIN_NOTED_BYTES and not before) or held.noted_limit_bytes is None:
            return True
        if exchange.outcome is NO_ANSWER_EXPECTED and exchange is not self._client_exchange:
            return True  # the request is not pending
        if self._noted is None:
            self._noted = {}
        if not held.note(noted_bytes - before):
            return False
        self._noted[exchange.number] = noted_bytes
        return True

    def _note_copies(self, exchange: Exchange, now: int) -> None:
        """Reserve memory for the copies of an incomplete request, which may never end; beyond the limit, drop them.

        Pairing needs its first fields, which decide whether a response comes: with an authorizer it is a fatal fault.
        """
        prefix, body = self._client_prefix, self._client_body
        if self._client_walker is not None or self._note(exchange, len(prefix or b"") + len(body or b"")):
            return
        self._client_prefix = self._client_body = None
        if self._noted:
            self._forget(exchange)
        if prefix is not None and self._authorizer is not None:
            text = f"{exchange.plan.title} request: its first fields come in parts, and {NO_ROOM}"
            self._fatal(CLIENT, "held_too_many", text, exchange.plan, now)
            return
        self._too_much_named(CLIENT, exchange, NO_ROOM, now)

    def _note_prefix(self, exchange: Exchange, prefix_bytes: int, now: int) -> None:
        """Reserve memory for the ids of a request with a new prefix; beyond the limit, cut them."""
        if prefix_bytes >= MIN_NOTED_BYTES and not self._note(exchange, WIDEST_CHARACTER * prefix_bytes):
            for name in ("client_id", "group_id", "transactional_id"):
                text = getattr(exchange, name)
                setattr(exchange, name, text and text[:MAX_CUT_ID])
            self._too_much_named(CLIENT, exchange, f"{NO_ROOM}: of its ids {MAX_CUT_ID} characters are kept", now)

    def _note_walked(self, exchange: Exchange, walker: BodyWalker, now: int) -> None:
        """Reserve memory for the values of an incomplete body, which may never end; beyond the limit, drop them.

        It counts only after each step of growth, because counting takes time and bytes may arrive one by one.
        """
        walked = exchange.request_bytes - self._client_left
        if walked < self._note_at:
            return
        self._note_at = walked + max(NOTE_STEP, walked >> 3)
        if not self._note(exchange, body_memory_bytes(exchange.plan, walker, walked)):
            self._client_walker = exchange.request_body = None
            if self._noted and exchange.outcome is NO_ANSWER_EXPECTED:
                self._forget(exchange)
            self._too_much_named(CLIENT, exchange, NO_ROOM, now)

    def _forget(self, exchange: Exchange) -> None:
        """Release the memory reserved for a request, whose values now belong to the owner of the event."""
        assert self._noted is not None
        self._interest.held.forget(self._noted.pop(exchange.number, 0))

    def _settle(self, cause: str) -> None:
        """Emit all pending requests as unanswered, because no further response will arrive."""
        self._drop_slow()
        current, self._broker_exchange = self._broker_exchange, None
        self._broker_left = 0
        self._drop_answer()
        self._drop_frame(BROKER)
        if current is not None:
            self._give_up(current, cause)
        self._drop_request(cause)
        for exchange in self.pending:
            self._give_up(exchange, cause)
        self.pending.clear()
        if self._noted:
            self._interest.held.forget(sum(self._noted.values()))
            self._noted = None
        self._interest.held.release(self._own_bytes)
        self._own_bytes = 0
        self._own_answers = None

    def _drop_request(self, cause: str) -> None:
        """Drop a request whose last byte will never arrive, emitting its event if no other path will."""
        exchange, self._client_exchange = self._client_exchange, None
        self._client_left = 0
        self._client_prefix = self._client_body = self._client_walker = None
        self._drop_frame(CLIENT)
        if self._client_held is not None:
            self._interest.held.release(len(self._client_held))
            self._interest.held.end(self)
            self._client_held = None
        if exchange is None:
            return
        exchange.request_body = None
        if exchange.outcome is ANSWERED:
            self._answered(exchange, exchange.response_end)
        elif exchange.outcome is NO_ANSWER_EXPECTED:
            self._give_up(exchange, cause)

    def _take_waiting(self) -> bytes:
        """Release and return the client's bytes that waited for the response to its handshake or token."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return b""
        self._interest.held.release(len(waiting))
        return bytes(waiting)

    def _drop_frame(self, side: int, why: str | None = None) -> None:
        """Drop the copy of the frame in transit, if its plan keeps it (keeping.py)."""
        frame = self._client_frame if side == CLIENT else self._broker_frame
        if frame is not None:
            frame.drop(why)
        if side == CLIENT:
            self._client_frame = None
        else:
            self._broker_frame = None

    def _drop_answer(self) -> None:
        """Drop the copy and the walker of the response in transit."""
        if self._broker_kept is not None:
            self._interest.held.release(len(self._broker_kept))
            self._broker_kept = None
        self._broker_walker = None

    # --- faults ------------------------------------------------------------------------------------------------------

    def _mark(self, side: int, pos: int) -> None:
        """Record that the frame which later faults refer to begins at `pos` of the handler's view."""
        self._frame_at[side] = self._received[side] + self._shift + pos

    def _not_kafka(self, reading: Reading) -> None:
        """Report that the next bytes are not the beginning of a frame; the side's state changes."""
        self._mark(reading.side, reading.pos)
        kind, text = frames.sniff(bytes(reading.view[reading.pos : reading.pos + 8]))
        self._lost_framing(reading.side, kind, text, reading.now)
        waiting = self._take_waiting()
        if waiting and self._handlers[CLIENT] is type(self)._blind:
            reading.pieces.append((BROKER, waiting))  # no response will release these bytes

    def _lost_framing(self, side: int, kind: str, text: str, now: int) -> None:
        """Close a session that rewrites or authorizes; let a transparent session forward unread."""
        if self._interest.rewrite or self._authorizer is not None:
            self._fatal(side, kind, text, None, now)
            return
        if kind == "tls":
            text = "TLS: what is inside cannot be read"
        self._fault(side, kind, f"{text}; from here on this connection is forwarded unread", None, now)
        kind_ = type(self)
        self._handlers = [kind_._blind, kind_._blind_broker]
        self._settle("desync")

    def _fatal(self, side: int, kind: str, text: str, plan: ApiPlan | None, now: int) -> None:
        self._fault(side, kind, text, plan, now, fatal=True)
        self._take_waiting()
        self._handlers = [type(self)._closed, type(self)._closed]
        self._settle("desync")

    def _fault(self, side: int, kind: str, text: str, plan: ApiPlan | None, now: int, fatal: bool = False) -> None:
        api_key, api_version = (plan.api_key, plan.api_version) if plan is not None else (NONE, NONE)
        self.faults += 1
        self.events.append(Desync(side, kind, text, self._frame_at[side], api_key, api_version, fatal, now))

    def _too_much_named(self, side: int, exchange: Exchange, why: str, now: int) -> None:
        what = ("request", "answer")[side]
        text = f"{exchange.plan.title} {what}: not all its topic-partitions are reported, it was forwarded: {why}"
        self._fault(side, "too_much_named", text, exchange.plan, now)

    def _malformed_answer(self, exchange: Exchange, fault: ProtocolError, now: int) -> None:
        """Report a response that does not decode; if it may contain addresses to rewrite, close the session."""
        plan = exchange.plan
        exchange.decoded = FAILED
        if self._transform is not None and (plan.carries_addresses or plan.transforms_always):
            if self._broker_exchange is not exchange:
                self._give_up(exchange, "desync")
            text = f"{plan.title} answer does not decode ({fault}); it may name brokers, so it is not forwarded"
            self._fatal(BROKER, "malformed_answer", text, plan, now)
            return
        self._unread_answer(exchange, fault, now)

    def _unread_answer(self, exchange: Exchange, fault: ProtocolError, now: int) -> None:
        exchange.decoded = FAILED
        text = f"{exchange.plan.title} answer does not decode ({fault}); it was forwarded"
        self._fault(BROKER, "malformed_answer", text, exchange.plan, now)


def named_count(body: Found | None) -> int:
    """Return the number of topic-partitions and batches in a body; 0 for at most MAX_UNCOUNTED."""
    if body is None or (len(body.sums) <= MAX_UNCOUNTED and len(body.partitions) <= MAX_UNCOUNTED):
        return 0
    return len(body.sums) + len(body.partitions) + len(body.batches)


def bytes_read(plan: ApiPlan, body: Found, size: int) -> int:
    """Return the number of bytes read of a request: all bytes except records, of which only batch headers are read."""
    if plan.api_key == PRODUCE:
        for carried in body.sums or body.partitions:
            size -= carried.bytes - carried.batches * 64
    return size


def body_memory_bytes(plan: ApiPlan, body: Found, walked: int) -> int:
    """Return the approximate memory of a body's values so far; its last batch may be incomplete."""
    looked = max(0, bytes_read(plan, body, walked))
    return (len(body.sums) + len(body.partitions)) * NAMED_BYTES + WIDEST_CHARACTER * looked


def _cap_named(walker: BodyWalker) -> None:
    """Drop a body's topic-partitions and batches beyond MAX_NAMED, and count them."""
    for named in (walker.sums, walker.partitions, walker.batches):
        if len(named) > MAX_NAMED:
            walker.left_out += len(named) - MAX_NAMED
            del named[MAX_NAMED:]
