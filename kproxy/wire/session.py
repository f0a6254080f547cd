"""One client connection with its broker connection, without I/O: the heart of the live path and of the offline one.

Duty: cut frames, pair answers with requests, read what the interest asks for, hand held answers to the owner's
transform, and tell all of it as events. Nothing of a frame leaves before its header is there; everything else leaves as
it came.

Each side is in one state, and the state is the method that takes its bytes:

    client side                              broker side
    framed   _requests                       framed   _answers
    waiting  _wait: SaslHandshake v0 is      framed
             asked, its answer decides
    raw      _client_tokens                  raw      _broker_tokens
    blind    _blind: forwarded unread        blind    _blind
    closed   _closed: a fault, or the end    closed   _closed

A peer's bytes never raise: a fault becomes a `Desync`. A rewriting session fails closed on it, a transparent one goes
on blind; one over a capture looks for the next plausible frame, and knows of gaps (`captured.py`).

Memory, per session: an incomplete header, one prefix (64 KiB) and the usual one (512 bytes), a copy of a small request
whose body is read (64 KiB), one of a small answer (64 KiB) or a held one (64 MiB), and the pending requests, which the
owner bounds by not reading the client; where bodies are read, what the requests that wait name (MAX_NAMED, and
FEW_NAMED of each). Refuses to know sockets and clocks.
"""

from collections.abc import Callable
from typing import Any

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol import codec, schema
from kproxy.wire import frames, sasl
from kproxy.wire.bodies import ERRORS, BodyWalker, Found
from kproxy.wire.events import (
    ANSWERED,
    ANSWERED_BY_PROXY,
    BROKER,
    CLIENT,
    FAILED,
    FULL,
    LOST,
    NO_ANSWER_EXPECTED,
    NONE,
    OPAQUE,
    REQUEST_NOT_SEEN,
    SIDES,
    UNANSWERED,
    AddressesHidden,
    ClientNamed,
    Closed,
    Desync,
    Event,
    Exchange,
    Unanswered,
)
from kproxy.wire.interest import (
    ANSWER,
    API_VERSIONS,
    HOLD,
    REFUSE,
    SASL_HANDSHAKE,
    STREAM,
    UNSUPPORTED_VERSION,
    ApiPlan,
    Interest,
)
from kproxy.wire.muting import Mutes
from kproxy.wire.pairing import LIMIT, Pending

Piece = tuple[int, Any]  # (the side to send to, a buffer that lives until the next receive)
Transform = Callable[[Exchange, memoryview], bytes | None]

SMALL_ANSWER = 64 * 1024  # up to here an answer is copied to be read if it comes in parts
MAX_PREFIX = 64 * 1024  # a transactional id has at most 32 KiB
MAX_USUAL_PREFIX = 512  # what is longer is read each time
MAX_NAMED = 64 * 1024  # topic-partitions, and batches, of one body, and of all requests that wait
FEW_NAMED = 16  # so few of one request are not worth counting
MAX_HELD = 64 * 1024 * 1024

_UNSEEN = ApiPlan(NONE, NONE, "unknown", False)

# How a connection's requests usually begin: what unpacks a head and the bytes behind it, how many bytes that are, the
# key and version, those bytes behind, what is done with such a request, and what its prefix says.
Usual = tuple[Callable[[Any, int], tuple[Any, ...]], int, int, bytes, ApiPlan, tuple[Any, ...]]
_NOTHING_USUAL: Usual = (*frames.request_head_and(0), NONE, b"", _UNSEEN, ())


class Session:
    """A pair of byte streams, read. See the module for the states; `receive` and `close` are the whole input.

    `transform(exchange, frame)` gets a held answer, its 4-byte size included, and returns what to send instead, or
    None; a ProtocolError from it is a fatal Desync.
    """

    __slots__ = (
        "_broker_exchange",
        "_broker_head",
        "_broker_head_ns",
        "_broker_held",
        "_broker_keep",
        "_broker_left",
        "_client_body",
        "_client_exchange",
        "_client_head",
        "_client_head_ns",
        "_client_left",
        "_client_prefix",
        "_client_swallow",
        "_client_walker",
        "_ended",
        "_free_at",
        "_gap_ns",
        "_handlers",
        "_handshake",
        "_interest",
        "_max_request",
        "_mutes",
        "_number",
        "_own_answers",
        "_raw",
        "_received",
        "_seen_gap",
        "_transform",
        "_unread",
        "_usual",
        "_waiting",
        "_walker",
        "completed",
        "events",
        "faults",
        "pending",
        "sasl_mechanism",
        "sasl_tokens",
        "software",
    )

    _doubts = False  # whether bytes can be damaged, as in captures

    def __init__(
        self,
        interest: Interest,
        *,
        transform: Transform | None = None,
        max_request_bytes: int = frames.MAX_REQUEST,
    ) -> None:
        self.events: list[Event] = []  # the owner's to take and to clear after each call
        self.pending = Pending()
        self.completed = [0, 0]  # frames whose last byte has arrived, per side
        self.faults = 0  # Desync events so far
        self.sasl_mechanism: str | None = None
        self.sasl_tokens = 0  # raw ones; they give no events
        self.software: tuple[str, str] | None = None  # name and version, as ApiVersions tells (KIP-511)

        self._interest = interest
        self._transform = transform
        self._max_request = max_request_bytes
        self._number = 0
        self._received = [0, 0]
        self._ended: list[int] = []
        self._seen_gap = False  # only captures have gaps
        self._gap_ns = NONE  # when the broker's side last lost bytes

        self._client_head = b""
        self._client_head_ns = 0
        self._client_left = 0
        self._client_exchange: Exchange | None = None
        self._client_prefix: bytearray | None = None
        self._client_body: bytearray | None = None
        self._client_walker: BodyWalker | None = None
        self._client_swallow = False
        self._usual: Usual = _NOTHING_USUAL

        self._broker_head = b""
        self._broker_head_ns = 0
        self._broker_left = 0
        self._broker_exchange: Exchange | None = None
        self._broker_keep: bytearray | None = None
        self._broker_held = False
        self._walker: BodyWalker | None = None
        self._free_at = 0  # when the previous answer ended
        self._mutes = Mutes()

        self._own_answers: dict[int, bytes] = {}  # by number: ours, waiting for older ones
        self._handshake: str | None = None
        self._waiting = bytearray()
        self._unread: Any = None  # of this receive, for the state that is now
        self._raw = sasl.RawSasl("")
        # Functions, not bound methods: a session must not hold itself, or only the garbage collector would free it.
        self._handlers: list[Callable[[Any, Any, int], list[Piece]]] = [Session._requests, Session._answers]

    # --- the owner's calls -------------------------------------------------------------------------------------------

    def receive(self, side: int, view: Any, now_ns: int) -> list[Piece]:
        """Bytes of a side arrived; returns the pieces to send, in order."""
        pieces = self._handlers[side](self, view, now_ns)
        if self._unread is not None:
            pieces += self._go_on(side, now_ns)
        self._received[side] += len(view)
        return pieces

    def close(self, side: int, now_ns: int, cause: str | None = None) -> None:
        """A side ended. The broker's end, or both, settles what is pending; then comes `Closed`."""
        if side in self._ended:
            return
        self._ended.append(side)
        self._handlers[side] = Session._closed
        cause = cause or f"{SIDES[self._ended[0]]}_closed"
        if side == BROKER or len(self._ended) == 2:
            self._settle(cause, now_ns)
        if len(self._ended) == 2:
            received = self._received[CLIENT], self._received[BROKER]
            login = self.sasl_mechanism, self.sasl_tokens
            self.events.append(Closed(self._ended[0], now_ns, cause, received, self.software, *login))

    def at_boundary(self, side: int) -> bool:
        """Whether a side stands between two frames, so that it can be closed without cutting one."""
        if side == CLIENT:
            return not self._client_left and not self._client_head
        return not self._broker_left and not self._broker_head

    def missing(self, side: int) -> int:
        """Bytes until the frame in transit, or its header, is whole; 0 between two frames: what a drain still reads."""
        left, head = (
            (self._client_left, self._client_head) if side == CLIENT else (self._broker_left, self._broker_head)
        )
        if left or not head:
            return left
        return max(1, (frames.REQUEST_HEAD_BYTES if side == CLIENT else frames.RESPONSE_HEAD_BYTES) - len(head))

    # --- requests ----------------------------------------------------------------------------------------------------

    def _requests(self, view: Any, now: int) -> list[Piece]:
        size = len(view)
        pieces: list[Piece] = []
        pos = sent = 0
        start = now
        if self._client_left:
            pos, sent = self._continue_request(view, size, now, pieces)
            if self._handshake is not None and self._handlers[CLIENT] is not Session._requests:
                return self._rest(CLIENT, view, pos, sent, pieces)
        elif self._client_head:
            view = memoryview(self._client_head + bytes(view))
            size = len(view)
            self._client_head = b""
            start = self._client_head_ns
        pending = self.pending
        completed = self.completed
        max_request = self._max_request
        unpack, usual_bytes, usual_key_version, usual_prefix, usual_plan, usual_values = self._usual
        while size - pos >= 12:
            if size - pos >= usual_bytes:
                length, key_version, correlation_id, prefix = unpack(view, pos)
            else:
                length, key_version, correlation_id = frames.REQUEST_HEAD.unpack_from(view, pos)
                prefix = None
            if length < 8 or length > max_request:
                return self._not_kafka(CLIENT, view, pos, sent, pieces, now)
            end = pos + 4 + length
            in_flight = len(pending)
            is_usual = prefix == usual_prefix and key_version == usual_key_version and length + 4 >= usual_bytes
            if is_usual and end <= size and in_flight < LIMIT:
                # Same prefix as the previous request and complete in this read: record it without parsing.
                exchange = Exchange(usual_plan, correlation_id, self._number, in_flight, length + 4, start)
                exchange.request_end = start = now
                (
                    exchange.client_id,
                    exchange.acks,
                    exchange.max_wait_ms,
                    exchange.group_id,
                    exchange.transactional_id,
                ) = usual_values
                pending.append(exchange)
                self._number += 1
                completed[0] += 1
                if usual_plan.request_reader is not None:
                    self._read_request(exchange, view, pos + 12, end, size, now)
                pos = end
                continue
            if in_flight >= LIMIT:
                self._overfull()
            plan = self._interest.plans.get(key_version) or self._interest.plan(key_version)
            exchange = Exchange(plan, correlation_id, self._number, in_flight, length + 4, start)
            start = now
            if plan.request or (self._doubts and not is_usual) or (not plan.known and self._number == 0):
                if sasl.is_bare_gssapi(key_version) and self._number == 0:
                    self._start_raw("GSSAPI")
                    return self._rest(CLIENT, view, pos, sent, pieces)
                if self._doubts and not self._believes(view, pos, size):
                    return self._not_kafka(CLIENT, view, pos, sent, pieces, now)
                if plan.request == REFUSE:
                    return self._refuse(plan, view, pos, sent, pieces, now)
                if plan.request == ANSWER:
                    if sent < pos:
                        pieces.append((BROKER, view[sent:pos]))
                    sent = end if end < size else size
                    self._client_swallow = True
                    self._own_answers[self._number] = _unsupported_version(correlation_id)
            self._number += 1
            pending.append(exchange)
            if is_usual:
                self._take_prefix(exchange, *usual_values)
            elif plan.prefix is not None:
                self._read_prefix(exchange, view, pos, end, size, now)
                unpack, usual_bytes, usual_key_version, usual_prefix, usual_plan, usual_values = self._usual
            if plan.request_reader is not None:
                self._read_request(exchange, view, pos + 12, end, size, now)
            if end > size:
                self._client_left = end - size
                self._client_exchange = exchange
                pos = size
                break
            exchange.request_end = now
            completed[0] += 1
            pos = end
            if exchange.outcome is NO_ANSWER_EXPECTED:
                self.events.append(exchange)
            elif self._client_swallow or self._handshake is not None:
                self._whole_request(exchange, pieces, now)
                if self._handlers[CLIENT] is not Session._requests:
                    return self._rest(CLIENT, view, pos, sent, pieces)
        if pos < size:  # an incomplete header stays until it is whole
            self._client_head = bytes(view[pos:])
            self._client_head_ns = start
            if sent < pos:
                pieces.append((BROKER, view[sent:pos]))
        elif sent < size:
            pieces.append((BROKER, view[sent:] if sent else view))
        return pieces

    def _continue_request(self, view: Any, size: int, now: int, pieces: list[Piece]) -> tuple[int, int]:
        """The next bytes of a request begun earlier; returns (where it ends in the view, what must not be sent)."""
        left = self._client_left
        take = left if left < size else size
        exchange = self._client_exchange
        if self._client_body is not None:
            self._client_body += view[:take]
        elif self._client_walker is not None:
            self._walk_request(view, 0, take)
        if self._client_prefix is not None and exchange is not None:
            self._extend_prefix(exchange, view[: min(take, MAX_PREFIX)], left == take, now)
        self._client_left = left - take
        sent = take if self._client_swallow else 0
        if left == take:
            self._client_exchange = None
            self.completed[0] += 1
            if exchange is not None:
                exchange.request_end = now
                self._whole_request(exchange, pieces, now)
        return take, sent

    def _read_request(self, exchange: Exchange, view: Any, start: int, end: int, size: int, now: int) -> None:
        """Read what a request says of topic-partitions, of what is there of it."""
        plan = exchange.plan
        if end - start > SMALL_ANSWER and end > size:
            self._client_walker = BodyWalker(
                plan.api_key, plan.api_version, "request", detail=self._interest.detail, room=self._interest.room
            )
            exchange.request_body = self._client_walker
            self._walk_request(view, start, size)
            return
        if end > size:
            self._client_body = bytearray(view[start:size])
            return
        assert plan.request_reader is not None
        try:
            found = plan.request_reader(view, start, end)
        except Malformed as fault:
            self._bad_prefix(exchange, str(fault), now)
            return
        exchange.request_body = found
        if len(found.sums) > FEW_NAMED or len(found.partitions) > FEW_NAMED:
            self._bound_waiting(exchange, found, now)

    def _walk_request(self, view: Any, start: int, end: int) -> None:
        walker = self._client_walker
        assert walker is not None
        walker.feed(view, start, end)
        bound(walker)

    def _request_walked(self, exchange: Exchange, now: int) -> None:
        walker, self._client_walker = self._client_walker, None
        assert walker is not None
        walker.finish()
        if walker.fault is not None:
            exchange.request_body = None
            self._bad_prefix(exchange, str(walker.fault), now)
        elif len(walker.sums) > FEW_NAMED or len(walker.partitions) > FEW_NAMED:
            self._bound_waiting(exchange, walker, now)
        if walker.left_out:
            self._too_much_named(CLIENT, exchange, f"{walker.left_out} more than {MAX_NAMED}", now)

    def _bound_waiting(self, exchange: Exchange, body: Found, now: int) -> None:
        """What the requests that wait name, all together, must not outgrow what one body may."""
        waiting = {id(each.request_body): each.request_body for each in self.pending if each.request_body is not None}
        waiting[id(body)] = body
        if sum(len(each.sums) + len(each.partitions) + len(each.batches) for each in waiting.values()) > MAX_NAMED:
            exchange.request_body = None
            self._too_much_named(CLIENT, exchange, f"with those that wait it names more than {MAX_NAMED}", now)

    def _too_much_named(self, side: int, exchange: Exchange, why: str, now: int) -> None:
        plan = exchange.plan
        what = f"not all that a {plan.api} v{plan.api_version} {('request', 'answer')[side]} says of topic-partitions"
        self._fault(side, "too_much_named", f"{what} is told, and it was passed on: {why}", plan, now)

    def _read_prefix(self, exchange: Exchange, view: Any, pos: int, end: int, size: int, now: int) -> None:
        """Read the first fields of the request at `pos`; most requests of a connection then repeat those bytes."""
        plan = exchange.plan
        assert plan.prefix is not None
        try:
            found = plan.prefix(view, pos + 12, end if end < size else size)
        except Malformed as fault:
            self._bad_prefix(exchange, str(fault), now)
            return
        if found is None:
            self._await_prefix(exchange, view, pos, end, size, now)
            return
        values, stop = found
        self._take_prefix(exchange, *values)
        # What logs in, or names the client's software, is read each time.
        if exchange.acks != 0 and values[5:] == (None, None, None) and stop - pos < MAX_USUAL_PREFIX:
            unpack, usual_bytes = frames.request_head_and(stop - pos - 12)
            key_version, _, prefix = unpack(view, pos)[1:]
            self._usual = unpack, usual_bytes, key_version, prefix, plan, values[:5]

    def _take_prefix(
        self,
        exchange: Exchange,
        client_id: str | None,
        acks: int | None,
        max_wait_ms: int | None,
        group_id: str | None,
        transactional_id: str | None,
        mechanism: str | None = None,
        software_name: str | None = None,
        software_version: str | None = None,
    ) -> None:
        exchange.client_id = client_id
        exchange.transactional_id = transactional_id
        if acks is not None:
            exchange.acks = acks
            if acks == 0 and self.pending and self.pending[-1] is exchange:
                self.pending.pop()  # noted at its header, taken back: no answer will come
                exchange.outcome = NO_ANSWER_EXPECTED
            return
        exchange.max_wait_ms = max_wait_ms
        exchange.group_id = group_id
        if mechanism is not None:
            self._handshake = mechanism
        elif software_name is not None and software_version is not None:
            software = software_name, software_version
            if software != self.software:
                self.software = software
                self.events.append(ClientNamed(client_id, *software, exchange.request_start))

    def _await_prefix(self, exchange: Exchange, view: Any, pos: int, end: int, size: int, now: int) -> None:
        """The first fields of the request at `pos` are not all there: keep what is, if more can come."""
        if end <= size:
            self._bad_prefix(exchange, "it ends inside its first fields", now)
        elif size - pos > MAX_PREFIX:
            self._bad_prefix(exchange, f"its first fields are longer than {MAX_PREFIX} bytes", now)
        else:
            self._client_prefix = bytearray(view[pos + 12 : size])

    def _extend_prefix(self, exchange: Exchange, more: Any, whole: bool, now: int) -> None:
        prefix = self._client_prefix
        assert prefix is not None and exchange.plan.prefix is not None
        prefix += more
        try:
            found = exchange.plan.prefix(prefix, 0, len(prefix))
        except Malformed as fault:
            self._client_prefix = None
            self._bad_prefix(exchange, str(fault), now)
            return
        if found is not None:
            self._client_prefix = None
            self._take_prefix(exchange, *found[0])
        elif whole or len(prefix) >= MAX_PREFIX:
            self._client_prefix = None
            self._bad_prefix(exchange, "it ends inside its first fields, or they have no end", now)

    def _bad_prefix(self, exchange: Exchange, why: str, now: int) -> None:
        exchange.decoded = FAILED
        plan = exchange.plan
        self._fault(
            CLIENT,
            "malformed_request",
            f"a {plan.api} v{plan.api_version} request does not decode ({why}); it was passed on, the broker decides",
            plan,
            now,
        )

    def _whole_request(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        """What a complete request sets off, besides waiting for its answer."""
        if self._client_body is not None:
            body, self._client_body = self._client_body, None
            self._read_request(exchange, body, 0, len(body), len(body), now)
        elif self._client_walker is not None:
            self._request_walked(exchange, now)
        if exchange.outcome is NO_ANSWER_EXPECTED:
            self.events.append(exchange)
        elif exchange.outcome is ANSWERED:
            self._answered(exchange, exchange.response_end)
        elif self._client_swallow:
            self._client_swallow = False
            self._send_own_answers(pieces, now)
        elif self._handshake is not None and exchange.plan.api_key == SASL_HANDSHAKE:
            self.sasl_mechanism = self._handshake
            if exchange.plan.api_version == 0:
                self._handlers[CLIENT] = Session._wait
            else:
                self._handshake = None

    def _send_own_answers(self, pieces: list[Piece], now: int) -> None:
        """Send the answers of our own that nothing older waits before."""
        pending = self.pending
        while self._own_answers and pending and not self._broker_left:
            answer = self._own_answers.get(pending[0].number)
            if answer is None or pending[0].request_end == NONE:
                return
            exchange = pending.popleft()
            del self._own_answers[exchange.number]
            pieces.append((CLIENT, answer))
            exchange.response_bytes = len(answer)
            exchange.response_start = now
            exchange.error_code = UNSUPPORTED_VERSION
            exchange.errors = (UNSUPPORTED_VERSION,)
            exchange.decoded = FULL
            exchange.response_end = now
            exchange.outcome = ANSWERED_BY_PROXY
            exchange.queue_ns, exchange.muted_ns = self._mutes.split(exchange.request_end, self._free_at, now)
            self.events.append(exchange)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _answers(self, view: Any, now: int) -> list[Piece]:
        size = len(view)
        pieces: list[Piece] = []
        pos = sent = 0
        start = now
        if self._broker_left:
            pos, sent = self._continue_answer(view, size, now, pieces)
            if self._handlers[BROKER] is not Session._answers:
                return self._rest(BROKER, view, pos, sent, pieces)
        elif self._broker_head:
            view = memoryview(self._broker_head + bytes(view))
            size = len(view)
            self._broker_head = b""
            start = self._broker_head_ns
        pending = self.pending
        completed = self.completed
        unpack = frames.RESPONSE_HEAD.unpack_from
        transform = self._transform
        while size - pos >= 8:
            length, correlation_id = unpack(view, pos)
            if length < 4:
                return self._not_kafka(BROKER, view, pos, sent, pieces, now)
            if pending and pending[0].correlation_id == correlation_id:
                exchange = pending.popleft()
            else:
                unpaired = self._unpaired(correlation_id, view, pos, now)
                if unpaired is None:
                    return self._rest(BROKER, view, pos, sent, pieces)
                exchange = unpaired
            plan = exchange.plan
            end = pos + 4 + length
            exchange.response_bytes = length + 4
            exchange.response_start = start
            start = now
            if end > size:
                if sent < pos:
                    pieces.append((CLIENT, view[sent:pos]))
                if self._begin_answer(exchange, view, pos, end, size, pieces, now):
                    pieces.append((CLIENT, view[pos:] if pos else view))
                return pieces
            scan = plan.scan
            if plan.response_reader is not None and transform is None:
                self._read_answer(exchange, view, pos + 8, end, now)
            elif scan is not None:
                try:
                    exchange.throttle_ms, exchange.error_code, exchange.errors, carries = scan(view, pos + 8, end)
                    exchange.decoded = FULL
                    if transform is not None and (carries or plan.transforms_always):
                        replacement = transform(exchange, view[pos:end])
                        if replacement is not None:
                            if sent < pos:
                                pieces.append((CLIENT, view[sent:pos]))
                            pieces.append((CLIENT, replacement))
                            sent = end
                except ProtocolError as fault:
                    if not self._bad_answer(exchange, fault, now):
                        return self._rest(BROKER, view, pos, sent, pieces)
                if plan.response_reader is not None and exchange.decoded is FULL:
                    self._read_answer(exchange, view, pos + 8, end, now)
            pos = end
            completed[1] += 1
            self._answered(exchange, now)
            if self._own_answers:
                if sent < pos:
                    pieces.append((CLIENT, view[sent:pos]))
                    sent = pos
                self._send_own_answers(pieces, now)
            if self._handshake is not None and plan.api_key == SASL_HANDSHAKE:
                self._handshake_answered(exchange, pieces, now)
                if self._handlers[BROKER] is not Session._answers:
                    return self._rest(BROKER, view, pos, sent, pieces)
        if pos < size:
            self._broker_head = bytes(view[pos:])
            self._broker_head_ns = start
            if sent < pos:
                pieces.append((CLIENT, view[sent:pos]))
        elif sent < size:
            pieces.append((CLIENT, view[sent:] if sent else view))
        return pieces

    def _begin_answer(
        self, exchange: Exchange, view: Any, pos: int, end: int, size: int, pieces: list[Piece], now: int
    ) -> bool:
        """An answer that is not whole yet: decide what is kept of it. True: what is there of it passes on."""
        plan = exchange.plan
        self._broker_left = end - size
        self._broker_exchange = exchange
        length = end - pos
        streams = plan.response == STREAM
        holds = plan.response == HOLD or (self._transform is not None and plan.carries_addresses)
        if length > SMALL_ANSWER and plan.scan is not None and (streams or not holds):
            detail = ERRORS if plan.response_reader is None else self._interest.detail
            self._walker = BodyWalker(
                plan.api_key,
                plan.api_version,
                detail=detail,
                room=self._interest.room,
                neutralise=streams and self._transform is not None,
            )
            self._walk(exchange, view, pos, pos + 8, size, pieces, now)
            return False
        self._broker_held = holds
        if self._broker_held and length > MAX_HELD:
            self._fatal(
                BROKER,
                "held_too_large",
                f"a {plan.api} v{plan.api_version} answer of {length} bytes must be held to rewrite its addresses, "
                f"and at most {MAX_HELD} bytes are: ask for less at a time (fewer topics)",
                plan,
                now,
            )
            return False
        if holds or plan.scan is not None:
            self._broker_keep = bytearray(view[pos:size])
        return not self._broker_held

    def _continue_answer(self, view: Any, size: int, now: int, pieces: list[Piece]) -> tuple[int, int]:
        """The next bytes of an answer begun earlier; returns (where it ends in the view, what must not be sent)."""
        left = self._broker_left
        take = left if left < size else size
        exchange = self._broker_exchange
        self._broker_left = left - take
        sent = 0
        if exchange is None:  # its request was not seen
            pass
        elif self._broker_keep is not None:
            self._broker_keep += view[:take]
            if self._broker_held:
                sent = take
        elif self._walker is not None:
            self._walk(exchange, view, 0, 0, take, pieces, now)
            sent = take
            if self._broker_exchange is None:
                return take, sent  # a fatal fault
        if left > take:
            return take, sent
        self._broker_exchange = None
        self.completed[1] += 1
        if exchange is None:
            return take, sent
        if self._walker is not None:
            self._walked(exchange, now)
        elif self._broker_keep is not None and not self._read_kept(exchange, pieces, now):
            return take, sent
        self._answered(exchange, now)
        if self._own_answers:
            if sent < take:
                pieces.append((CLIENT, view[:take]))
                sent = take
            self._send_own_answers(pieces, now)
        if self._handshake is not None and exchange.plan.api_key == SASL_HANDSHAKE:
            self._handshake_answered(exchange, pieces, now)
        return take, sent

    def _read_kept(self, exchange: Exchange, pieces: list[Piece], now: int) -> bool:
        """Read an answer that came in parts; a held one goes to the transform. False: a fatal fault."""
        assert self._broker_keep is not None and exchange.plan.scan is not None
        frame = memoryview(self._broker_keep)
        self._broker_keep = None
        if exchange.plan.response_reader is not None and self._transform is None:
            self._read_answer(exchange, frame, 8, len(frame), now)
            return True
        replacement = None
        try:
            exchange.throttle_ms, exchange.error_code, exchange.errors, carries = exchange.plan.scan(
                frame, 8, len(frame)
            )
            exchange.decoded = FULL
            if self._transform is not None and (carries or exchange.plan.transforms_always):
                replacement = self._transform(exchange, frame)
        except ProtocolError as fault:
            if not self._bad_answer(exchange, fault, now):
                return False
        if exchange.plan.response_reader is not None and exchange.decoded is FULL:
            self._read_answer(exchange, frame, 8, len(frame), now)
        if self._broker_held:
            pieces.append((CLIENT, frame if replacement is None else replacement))
        return True

    def _read_answer(self, exchange: Exchange, view: Any, start: int, end: int, now: int) -> None:
        """Read an answer that is wholly there: its throttle and errors, and what it says of topic-partitions."""
        assert exchange.plan.response_reader is not None
        try:
            found = exchange.plan.response_reader(view, start, end)
        except Malformed as fault:  # its addresses, if it has any, have been read by the scan
            self._unread_answer(exchange, fault, now)
            return
        exchange.throttle_ms = found.throttle_ms
        exchange.error_code = found.error_code
        exchange.errors = found.errors
        exchange.decoded = FULL
        exchange.response_body = found

    def _walk(
        self, exchange: Exchange, view: Any, begin: int, start: int, end: int, pieces: list[Piece], now: int
    ) -> None:
        """Give the walker its bytes [start, end) and pass [begin, end) on as it says."""
        walker = self._walker
        assert walker is not None
        edits = walker.feed(view, start, end)
        bound(walker)
        if walker.fault is not None and self._transform is not None and exchange.plan.carries_addresses:
            self._bad_answer(exchange, walker.fault, now)
            return
        for edit_start, edit_end, replacement in edits or ():
            if begin < edit_start:
                pieces.append((CLIENT, view[begin:edit_start]))
            if replacement:
                pieces.append((CLIENT, replacement))
            begin = edit_end
        if begin < end:
            pieces.append((CLIENT, view[begin:end]))

    def _walked(self, exchange: Exchange, now: int) -> None:
        walker = self._walker
        assert walker is not None
        self._walker = None
        walker.finish()
        if walker.neutralised:
            self.events.append(AddressesHidden(exchange))
        exchange.throttle_ms = walker.throttle_ms
        exchange.error_code = walker.error_code
        exchange.errors = walker.errors
        if walker.fault is None:
            exchange.decoded = FULL
            if exchange.plan.response_reader is not None:
                exchange.response_body = walker
                if walker.left_out:
                    self._too_much_named(BROKER, exchange, f"{walker.left_out} more than {MAX_NAMED}", now)
        else:
            self._bad_answer(exchange, walker.fault, now)

    def _bad_answer(self, exchange: Exchange, fault: ProtocolError, now: int) -> bool:
        """An answer does not decode. False: it could carry addresses that we must rewrite, so nothing of it leaves."""
        plan = exchange.plan
        if self._transform is not None and (plan.carries_addresses or plan.transforms_always):
            exchange.decoded = FAILED
            if self._broker_exchange is not exchange:
                self._give_up(exchange, "desync")
            text = f"a {plan.api} v{plan.api_version} answer does not decode ({fault})"
            self._fatal(BROKER, "malformed_answer", f"{text}; it may name brokers, so it is not passed on", plan, now)
            return False
        self._unread_answer(exchange, fault, now)
        return True

    def _unread_answer(self, exchange: Exchange, fault: ProtocolError, now: int) -> None:
        plan = exchange.plan
        exchange.decoded = FAILED
        text = f"a {plan.api} v{plan.api_version} answer does not decode ({fault}); it was passed on"
        self._fault(BROKER, "malformed_answer", text, plan, now)

    def _unpaired(self, correlation_id: int, view: Any, pos: int, now: int) -> Exchange | None:
        """The head of the queue is not the request of this answer: find it, or say that nobody asked."""
        overtaken = self.pending.overtaken_by(correlation_id)
        if overtaken is not None:
            if not self._seen_gap:
                plan = self.pending[0].plan
                self._fault(
                    BROKER,
                    "out_of_order",
                    f"the answer {correlation_id} ({plan.api}) came before {len(overtaken)} older ones; "
                    "those are given up: a broker answers a connection in order",
                    plan,
                    now,
                )
            for exchange in overtaken:
                self._give_up(exchange, "overtaken")
            return self.pending.popleft()
        if not self._seen_gap:
            text = f"an answer with the correlation id {correlation_id}, which no request on this connection has"
            if self._interest.rewrite:
                self._fatal(
                    BROKER, "unexpected_answer", f"{text}: it could name brokers, so it is not passed on", None, now
                )
                return None
            self._fault(BROKER, "unexpected_answer", f"{text}; it was passed on", None, now)
        exchange = Exchange(_UNSEEN, correlation_id, NONE, len(self.pending), NONE, NONE)
        exchange.outcome = REQUEST_NOT_SEEN
        exchange.decoded = OPAQUE
        return exchange

    def _answered(self, exchange: Exchange, now: int) -> None:
        """The last byte of an answer is here: emit the exchange, its latency split into queue, mute and the rest."""
        exchange.response_end = now
        if exchange.outcome is REQUEST_NOT_SEEN:
            self.events.append(exchange)
            return
        exchange.outcome = ANSWERED
        ready = exchange.request_end
        if ready == NONE and self._client_exchange is exchange:
            return  # a capture may show an answer before the last of its request: told when that is there
        free = self._free_at
        if self._mutes:
            exchange.queue_ns, exchange.muted_ns = self._mutes.split(ready, free, exchange.response_start)
        else:
            exchange.muted_ns = 0
            if free <= ready:
                exchange.queue_ns = 0
            else:
                start = exchange.response_start
                until = free if free < start else start
                exchange.queue_ns = until - ready if until > ready else 0
        self._free_at = now
        plan = exchange.plan
        if exchange.throttle_ms > 0 and plan.throttled_after_answer:
            self._mutes.mute(now, exchange.throttle_ms * 1_000_000)
        if not plan.known:
            exchange.decoded = OPAQUE
        self.events.append(exchange)

    def _give_up(self, exchange: Exchange, cause: str) -> None:
        if exchange.outcome is REQUEST_NOT_SEEN:
            self.events.append(exchange)  # part of an answer is all there is of it
            return
        if self._gap_ns != NONE and self._gap_ns >= exchange.request_start:
            exchange.outcome = LOST
            cause = "gap"
        else:
            exchange.outcome = UNANSWERED
        self.events.append(Unanswered(exchange, cause))

    def _settle(self, cause: str, now: int) -> None:
        """No answer will come any more."""
        current = self._broker_exchange
        self._broker_exchange = self._broker_keep = self._walker = None
        self._broker_left = 0
        if current is not None:
            self._give_up(current, cause)
        self._drop_request(cause)
        while self.pending:
            self._give_up(self.pending.popleft(), cause)

    def _drop_request(self, cause: str) -> None:
        """A request whose end will not be seen: if nothing else will tell of it, do so now."""
        exchange, self._client_exchange = self._client_exchange, None
        self._client_left = 0
        self._client_prefix = self._client_body = self._client_walker = None
        if exchange is None:
            return
        exchange.request_body = None
        if exchange.outcome is ANSWERED:
            self._answered(exchange, exchange.response_end)
        elif exchange.outcome is NO_ANSWER_EXPECTED:
            self._give_up(exchange, cause)

    # --- raw SASL ----------------------------------------------------------------------------------------------------

    def _wait(self, view: Any, now: int) -> list[Piece]:
        """SaslHandshake v0 is asked: what the client sends now is a token or a frame, as the answer will tell."""
        self._waiting += view
        if len(self._waiting) > sasl.MAX_TOKEN:
            self._fatal(CLIENT, "sasl_token", "the client sends on before SaslHandshake is answered", None, now)
        return []

    def _handshake_answered(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        if exchange.plan.api_version != 0:
            return
        mechanism = self._handshake or ""
        self._handshake = None
        waiting = self._waiting
        self._waiting = bytearray()
        if exchange.error_code == 0:
            self._start_raw(mechanism)
        else:
            self._handlers[CLIENT] = Session._requests
        if waiting:
            unread = self._unread
            self._unread = memoryview(waiting)
            pieces += self._go_on(CLIENT, now)
            self._unread = unread

    def _start_raw(self, mechanism: str) -> None:
        self.sasl_mechanism = mechanism
        self._raw = sasl.RawSasl(mechanism)
        self._handlers[CLIENT] = Session._client_tokens
        self._handlers[BROKER] = Session._broker_tokens

    def _client_tokens(self, view: Any, now: int) -> list[Piece]:
        size = len(view)
        pos = min(self._client_left, size)
        self._client_left -= pos
        if self._client_head:
            view = memoryview(self._client_head + bytes(view))
            size = len(view)
            self._client_head = b""
        sent = 0
        pieces: list[Piece] = []
        while size - pos >= 4:
            if self._raw.open_ended and self._raw.tokens and size - pos < 14 and size - pos != 4 + _size(view, pos):
                break  # too little to tell a token from a frame
            if self._raw.ends_with(view, pos, size):
                self._handlers[CLIENT] = Session._requests
                self._handlers[BROKER] = Session._answers
                return self._rest(CLIENT, view, pos, sent, pieces)
            length = _size(view, pos)
            if not 0 <= length <= sasl.MAX_TOKEN:
                return self._not_kafka(CLIENT, view, pos, sent, pieces, now)
            self._raw.tokens += 1
            self.sasl_tokens += 1
            pos += 4 + length
        if pos > size:
            self._client_left = pos - size
            pos = size
        self._client_head = bytes(view[pos:])
        return [(BROKER, view[:pos])] if pos else []

    def _broker_tokens(self, view: Any, now: int) -> list[Piece]:
        size = len(view)
        pieces: list[Piece] = []
        pos = min(self._broker_left, size)
        self._broker_left -= pos
        done = False
        if pos and not self._broker_left:
            done = self._raw.replied(1)
        if self._broker_head:
            view = memoryview(self._broker_head + bytes(view))
            size = len(view)
            self._broker_head = b""
        while not done and size - pos >= 4:
            length = _size(view, pos)
            if not 0 <= length <= sasl.MAX_TOKEN:
                return self._not_kafka(BROKER, view, pos, 0, pieces, now)
            self.sasl_tokens += 1
            pos += 4 + length
            if pos <= size:
                done = self._raw.replied(length)
        if done:
            self._handlers[CLIENT] = Session._requests
            self._handlers[BROKER] = Session._answers
            return self._rest(BROKER, view, pos, 0, pieces)
        if pos > size:
            self._broker_left = pos - size
            pos = size
        self._broker_head = bytes(view[pos:])
        return [(CLIENT, view[:pos])] if pos else []

    # --- faults ------------------------------------------------------------------------------------------------------

    def _rest(self, side: int, view: Any, pos: int, sent: int, pieces: list[Piece]) -> list[Piece]:
        """The state changed inside a view: send what is read, leave the rest to the state that is now."""
        if sent < pos:
            pieces.append((BROKER if side == CLIENT else CLIENT, view[sent:pos]))
            sent = pos
        if sent < len(view):
            self._unread = view[sent:]
        return pieces

    def _go_on(self, side: int, now: int) -> list[Piece]:
        """Read what `_rest` left; a loop, since a hostile stream can change states thousands of times in one view."""
        pieces: list[Piece] = []
        while self._unread is not None:
            view, self._unread = self._unread, None
            pieces += self._handlers[side](self, view, now)
        return pieces

    def _not_kafka(self, side: int, view: Any, pos: int, sent: int, pieces: list[Piece], now: int) -> list[Piece]:
        """What stands where a frame should begin is none."""
        kind, text = frames.sniff(bytes(view[pos : pos + 8]))
        self._lost_framing(side, kind, text, now)
        return self._rest(side, view, pos, sent, pieces)

    def _lost_framing(self, side: int, kind: str, text: str, now: int) -> None:
        """Fail closed, or go blind."""
        if self._interest.rewrite:
            self._fatal(side, kind, text, None, now)
            return
        self._fault(side, kind, f"{text}; from here on this connection is passed on unread", None, now)
        self._handlers = [Session._blind, Session._blind_broker]
        self._settle("desync", now)

    def _believes(self, view: Any, pos: int, size: int) -> bool:
        """Whether what stands where a request should begin looks like one."""
        return True

    def _overfull(self) -> None:
        """As many requests wait as the owner should let: it stops reading the client after this receive."""

    def _refuse(self, plan: ApiPlan, view: Any, pos: int, sent: int, pieces: list[Piece], now: int) -> list[Piece]:
        self._fatal(
            CLIENT,
            "unreadable_carrier",
            f"{plan.api} v{plan.api_version} is newer than this kproxy reads, and its answer names brokers: "
            "upgrade kproxy, or let the client ask ApiVersions first and keep to what it offers",
            plan,
            now,
        )
        return self._rest(CLIENT, view, pos, sent, pieces)

    def _fatal(self, side: int, kind: str, text: str, plan: ApiPlan | None, now: int) -> None:
        self._fault(side, kind, text, plan, now, fatal=True)
        self._handlers = [Session._closed, Session._closed]
        self._settle("desync", now)

    def _fault(self, side: int, kind: str, text: str, plan: ApiPlan | None, now: int, fatal: bool = False) -> None:
        api_key, api_version = (plan.api_key, plan.api_version) if plan is not None else (NONE, NONE)
        self.faults += 1
        self.events.append(Desync(side, kind, text, self._received[side], api_key, api_version, fatal, now))

    def _blind(self, view: Any, now: int) -> list[Piece]:
        return [(BROKER, view)]

    def _blind_broker(self, view: Any, now: int) -> list[Piece]:
        return [(CLIENT, view)]

    def _closed(self, view: Any, now: int) -> list[Piece]:
        return []


def bound(walker: BodyWalker) -> None:
    """What a body names must not outgrow what a connection may hold."""
    if not (walker.sums or walker.partitions or walker.batches):
        return
    for named in (walker.sums, walker.partitions, walker.batches):
        if len(named) > MAX_NAMED:
            walker.left_out += len(named) - MAX_NAMED
            del named[MAX_NAMED:]


def _size(view: Any, pos: int) -> int:
    return int(frames.SIZE.unpack_from(view, pos)[0])


def _unsupported_version(correlation_id: int) -> bytes:
    """What a broker says to an ApiVersions newer than it knows: v0, error 35, and the versions that it would take."""
    versions = schema.schema().apis[API_VERSIONS].request.versions
    answer = codec.encode_response(
        API_VERSIONS,
        0,
        {"correlationId": correlation_id},
        {
            "errorCode": UNSUPPORTED_VERSION,
            "apiKeys": [{"apiKey": API_VERSIONS, "minVersion": versions[0], "maxVersion": versions[-1]}],
        },
    )
    return frames.SIZE.pack(len(answer)) + answer
