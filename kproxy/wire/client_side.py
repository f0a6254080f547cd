"""The client's side of a session: cuts requests, records them as pending, and reads the fields of the interest.

No byte of a request is forwarded before its header is complete; everything else is forwarded unchanged, at once. Most
requests of a connection begin with the same bytes, so the last prefix is remembered: a request with the same prefix is
recorded without parsing. Refuses to know responses.
"""

from typing import Any

from kproxy.errors import Malformed
from kproxy.protocol.apis import PRODUCE, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy.wire import frames
from kproxy.wire.bodies import BodyWalker
from kproxy.wire.decisions.holding import Holding
from kproxy.wire.decisions.own_answers import unsupported_api_versions
from kproxy.wire.events import (
    ANSWERED,
    CLIENT,
    FAILED,
    NO_ANSWER_EXPECTED,
    ClientNamed,
    Exchange,
)
from kproxy.wire.interest import ANSWER, AUTHORIZE, REFUSE, ApiPlan
from kproxy.wire.login import sasl
from kproxy.wire.observing.keeping import begin_request, end_request, keep_request
from kproxy.wire.observing.kept import MAX_SMALL
from kproxy.wire.reading import Piece, Reading
from kproxy.wire.state import (
    FRAMES_PER_CALL,
    MAX_CUT_ID,
    MAX_NAMED,
    MAX_UNNOTED,
    MIN_NOTED_BYTES,
    MIN_READ_BYTES,
    NAMED_BYTES,
    NO_ROOM,
    NOTE_STEP,
    READ_BYTES_SHIFT,
    SMALL_BODY,
    WIDEST_CHARACTER,
    body_memory_bytes,
    bytes_read,
    named_count,
)

MAX_PREFIX = 64 * 1024  # a transactional id has at most 32 KiB
MAX_USUAL_PREFIX = 512  # a longer prefix is parsed each time
AUTHORIZED_WORK = 4  # work of a decision, in frames
PAYLOAD_SHIFT = 12  # 1 << 12 bytes of a Produce to decide count as one more frame: its records are skipped


class ClientSide(Holding):
    """The framed state of the client's side."""

    __slots__ = ()

    def _requests(self, view: Any, now: int) -> list[Piece]:
        reading = Reading(CLIENT, view, now)
        if self._client_held is not None:
            self._hold(reading)
        elif self._client_left:
            swallow = self._client_swallow
            self._continue_request(reading)
            if swallow:
                reading.sent = reading.pos
        elif self._client_head:
            reading.begin_with(self._joined(self._client_head, view), self._client_head_ns)
            self._client_head = b""
        reading.work = self._frames_left
        framed = type(self)._requests
        while (
            reading.size - reading.pos >= frames.REQUEST_HEAD_BYTES
            and reading.work > 0
            and not self._client_left
            and self._handlers[CLIENT] is framed
        ):
            if not self._request(reading):
                break
        if self._handlers[CLIENT] is not framed:
            return self._change(reading)
        self._client_head = self._incomplete_head(reading, self._client_left, frames.REQUEST_HEAD_BYTES)
        self._client_head_ns = reading.start
        return reading.pieces

    def _request(self, reading: Reading) -> bool:
        """Read the request that begins in a view. False: it waits, because the limit of pending requests is reached."""
        view, pos, size = reading.view, reading.pos, reading.size
        unpack, usual_bytes, usual_key_version, usual_prefix, _, usual_values = self._usual
        prefix = None
        if size - pos >= usual_bytes:
            length, key_version, correlation_id, prefix = unpack(view, pos)
        else:
            length, key_version, correlation_id = frames.REQUEST_HEAD.unpack_from(view, pos)
        if length < frames.MIN_REQUEST or length > self._max_request:
            self._not_kafka(reading)
            return True
        in_flight = len(self.pending)
        if in_flight >= self.max_in_flight and self._is_full():
            return False
        plan = self._interest.plans.get(key_version)
        if plan is None:
            plan = self._interest.plan(key_version)
            if plan.known:
                reading.work -= FRAMES_PER_CALL  # compiling the plan takes as long as all other work of a call
        exchange = Exchange(plan, correlation_id, self._number, in_flight, length + 4, reading.start)
        reading.start = reading.now
        is_complete = pos + 4 + length <= size
        # The same prefix as an earlier request: it is not parsed again.
        is_usual = prefix == usual_prefix and key_version == usual_key_version and length + 4 >= usual_bytes
        if not (is_usual and is_complete):
            self._mark(CLIENT, pos)
        is_odd = plan.request or (self._may_be_damaged and not is_usual) or (not plan.known and not self._number)
        if is_odd and not self._takes(exchange, key_version, reading):
            return True
        reading.work -= 1
        self._number += 1
        self.pending.append(exchange)
        if self._client_held is not None:
            return True
        if is_usual:
            (
                exchange.client_id,
                exchange.acks,
                exchange.max_wait_ms,
                exchange.group_id,
                exchange.transactional_id,
            ) = usual_values
        elif plan.prefix is not None and not self._client_swallow:
            reading.work -= (
                self._read_prefix(exchange, view, pos, pos + 4 + length, size, reading.now) >> READ_BYTES_SHIFT
            )
            if self._handlers[CLIENT] is not type(self)._requests:
                return True
        is_walked = length > SMALL_BODY and plan.request_reader is not None and not self._client_swallow
        if is_walked or not is_complete:
            self._begin_request(exchange, length)
            self._continue_request(reading, begins=True)
            if self._client_prefix is not None:  # a later call passes the bytes that were not walked again
                del self._client_prefix[max(reading.pos - pos - frames.REQUEST_HEAD_BYTES, 0) :]
        else:
            self._read_whole(exchange, reading, pos + 4 + length)
        return True

    def _takes(self, exchange: Exchange, key_version: int, reading: Reading) -> bool:
        """Return whether a request is pending from now on, even if it is held or withheld from the broker.

        If not, the side's state has changed: the bytes are no request, or the connection is closed.
        """
        plan, pos = exchange.plan, reading.pos
        end = min(pos + exchange.request_bytes, reading.size)
        if not self._number and sasl.is_bare_gssapi(key_version):
            self._start_raw("GSSAPI", reading.now)
            return False
        if self._may_be_damaged and not self._looks_like_request(reading.view, pos, reading.size):
            self._not_kafka(reading)
            return False
        if plan.request == REFUSE:
            self._refuse(plan, reading.now)
            return False
        if plan.request == ANSWER:
            reading.replace(end, b"")
            self._swallow(exchange, unsupported_api_versions(exchange.correlation_id))
        elif plan.request == AUTHORIZE:
            reading.work -= AUTHORIZED_WORK
            reading.work -= exchange.request_bytes - 4 >> (
                PAYLOAD_SHIFT if plan.api_key == PRODUCE else READ_BYTES_SHIFT
            )
            if plan.api_key == SASL_AUTHENTICATE:  # after a login, other rules may apply to requests
                reading.work = 1
            instead = self._authorize(exchange, reading.view, pos, end, reading.now)
            if instead is not None:
                reading.replace(end, instead)
            if self._client_held is not None:
                reading.pos = end
                return True
            return self._handlers[CLIENT] is type(self)._requests
        return True

    def _read_whole(self, exchange: Exchange, reading: Reading, end: int) -> None:
        """Read a request that is complete in a view, up to `end`."""
        plan, view, pos = exchange.plan, reading.view, reading.pos
        exchange.request_end = reading.now
        if plan.keeps_small and exchange.request_bytes <= MAX_SMALL:  # heartbeats are the most frequent of these
            exchange.request_frame = bytes(view[pos:end])
            exchange.response_frame = None
        elif plan.reads_request:
            reading.work -= self._read_request(exchange, view, pos, end, reading.now)
        self.completed[0] += 1
        reading.pos = end
        if exchange.outcome is NO_ANSWER_EXPECTED:
            self.events.append(exchange)
        elif self._client_swallow or self._handshake is not None:
            self._whole_request(exchange, reading.pieces, reading.now)

    # --- requests in parts -------------------------------------------------------------------------------------------

    def _begin_request(self, exchange: Exchange, length: int) -> None:
        """Begin a request that is incomplete, or whose body is walked: choose the copies to keep."""
        self._client_left = length + 4
        self._client_exchange = exchange
        plan = exchange.plan
        if plan.kept is not None:
            self._client_frame = begin_request(plan.kept, exchange, length + 4)
        if plan.request_reader is not None:
            if length > SMALL_BODY:
                self._begin_walk(exchange)
            else:
                self._client_body = bytearray()

    def _begin_walk(self, exchange: Exchange) -> None:
        """Begin to walk a large request, reading its topic-partitions."""
        self._client_walker = exchange.request_body = BodyWalker(
            exchange.plan.api_key,
            exchange.plan.api_version,
            "request",
            detail=self._interest.detail,
            room=self._interest.room,
            ahead_bytes=frames.REQUEST_HEAD_BYTES,
        )
        self._note_at = NOTE_STEP

    def _continue_request(self, reading: Reading, *, begins: bool = False) -> None:
        """Read the next bytes of the request in transit, up to its end, the view's, or where a walk stopped.

        begins: these are its first bytes, and its prefix has been read.
        """
        view, pos, now = reading.view, reading.pos, reading.now
        stop = min(pos + self._client_left, reading.size)
        exchange = self._client_exchange
        if self._client_body is not None:
            self._client_body += view[pos:stop]
        elif self._client_walker is not None:
            stop, _ = self._walk(self._client_walker, view, pos, stop)
        if self._client_frame is not None:
            self._client_frame.add(view[pos:stop])
        self._client_left -= stop - pos
        is_whole = not self._client_left
        if exchange is not None and not is_whole:
            if self._client_walker is not None:
                self._note_walked(exchange, self._client_walker, now)
            elif self._client_body is not None:
                self._note_copies(exchange, now)
        if exchange is not None and self._client_prefix is not None and not begins:
            self._extend_prefix(exchange, view[pos:stop], now)
        if self._handlers[CLIENT] is not type(self)._requests:
            return  # a fatal fault
        reading.pos = stop
        if is_whole:
            self._client_exchange = None
            self.completed[0] += 1
            if exchange is not None:
                exchange.request_end = now
                self._whole_request(exchange, reading.pieces, now)

    def _whole_request(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        """Handle the completion of a request: its copies, its body, its event, its SASL state."""
        if self._client_frame is not None and exchange.plan.kept is not None:
            end_request(exchange.plan.kept, exchange, self._client_frame)
            self._client_frame = None
        if self._client_body is not None:
            body, self._client_body = self._client_body, None
            self._read_request(exchange, body, 0, len(body), now, kept=True)
        elif self._client_walker is not None:
            self._request_walked(exchange, now)
        if exchange.outcome is NO_ANSWER_EXPECTED:
            if self._noted:
                self._forget(exchange)
            self.events.append(exchange)
        elif exchange.outcome is ANSWERED:
            self._answered(exchange, exchange.response_end)
        elif self._client_swallow:
            self._swallowed(exchange, pieces, now)
        elif self._handshake is not None and exchange.plan.api_key == SASL_HANDSHAKE:
            self.sasl_mechanism = self._handshake
            if exchange.plan.api_version == 0:
                self._handlers[CLIENT] = type(self)._await_handshake
            else:
                self._handshake = None

    # --- bodies ------------------------------------------------------------------------------------------------------

    def _read_request(self, exchange: Exchange, view: Any, pos: int, end: int, now: int, *, kept: bool = False) -> int:
        """Read the topic-partitions of a complete request at `pos`; return the work that this took, in frames.

        kept: `view` is a copy, whose stream offset is marked, and whose frame is kept if its plan keeps it.
        """
        reader = exchange.plan.request_reader
        if not kept:
            if exchange.plan.kept is not None:
                keep_request(exchange.plan.kept, exchange, view[pos:end])
            if reader is None or self._client_swallow:
                return 0
        assert reader is not None
        try:
            found = reader(view, pos + frames.REQUEST_HEAD_BYTES, end)
        except Malformed as fault:
            if not kept:
                self._mark(CLIENT, pos)
            self._malformed_request(exchange, str(fault), now)
            return 1 + (end - pos >> READ_BYTES_SHIFT)
        exchange.request_body = found
        named = named_count(found)
        size = end - pos
        looked = bytes_read(exchange.plan, found, size) if size >= MIN_READ_BYTES else 0
        count = len(found.sums) + len(found.partitions)
        if looked or count > MAX_UNNOTED or (size >= MIN_NOTED_BYTES and exchange.plan.api_key != PRODUCE):
            if not kept:
                self._mark(CLIENT, pos)
            noted_bytes = count * NAMED_BYTES + WIDEST_CHARACTER * (looked or size)
            self._count_named(exchange, named, noted_bytes, now)
        elif self._noted:
            self._forget(exchange)  # release the memory reserved for its copies while it was incomplete
        return named + (looked >> READ_BYTES_SHIFT)

    def _request_walked(self, exchange: Exchange, now: int) -> None:
        walker, self._client_walker = self._client_walker, None
        assert walker is not None
        walker.finish()
        if walker.fault is not None:
            exchange.request_body = None
            self._malformed_request(exchange, str(walker.fault), now)
        else:
            noted_bytes = body_memory_bytes(exchange.plan, walker, exchange.request_bytes)
            self._count_named(exchange, named_count(walker), noted_bytes, now)
        if walker.left_out:
            self._too_much_named(CLIENT, exchange, f"{walker.left_out} more than {MAX_NAMED}", now)

    def _count_named(self, exchange: Exchange, named: int, noted_bytes: int, now: int) -> None:
        """Limit the topic-partitions of all pending requests: MAX_NAMED per session, and the budget of all sessions."""
        if not self._note(exchange, noted_bytes):
            exchange.request_body = None
            self._too_much_named(CLIENT, exchange, NO_ROOM, now)
        elif self._named + named > MAX_NAMED:
            exchange.request_body = None
            self._too_much_named(CLIENT, exchange, f"with the other pending ones it names more than {MAX_NAMED}", now)
        elif exchange.outcome is not NO_ANSWER_EXPECTED:
            self._named += named

    # --- first fields ------------------------------------------------------------------------------------------------

    def _read_prefix(self, exchange: Exchange, view: Any, pos: int, end: int, size: int, now: int) -> int:
        """Read the first fields of the request at `pos`, and remember their bytes for the next requests.

        Return the number of bytes read: at most MAX_PREFIX.
        """
        plan = exchange.plan
        assert plan.prefix is not None
        begin = pos + frames.REQUEST_HEAD_BYTES
        seen = min(end, size, begin + MAX_PREFIX)
        try:
            found = plan.prefix(view, begin, seen)
        except Malformed as fault:
            self._malformed_prefix(exchange, str(fault), now)
            return seen - begin
        if found is None:
            if self._can_grow(exchange, seen - begin, now):
                self._client_prefix = bytearray(view[begin:seen])
                self._note_copies(exchange, now)
            return seen - begin
        values, stop = found
        self._take_prefix(exchange, *values)
        self._note_prefix(exchange, stop - begin, now)
        # Logins, and requests with the client's software, are parsed each time.
        if (
            exchange.acks != 0
            and values[5:] == (None, None, None)
            and stop - pos < MAX_USUAL_PREFIX
            and plan.request != AUTHORIZE  # the authorizer decides each of these
        ):
            unpack, usual_bytes = frames.request_head_and(stop - begin)
            key_version, _, prefix = unpack(view, pos)[1:]
            self._usual = unpack, usual_bytes, key_version, prefix, plan, values[:5]
        return stop - begin

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
        self.client_id = client_id and client_id[:MAX_CUT_ID]
        exchange.transactional_id = transactional_id
        if acks is not None:
            exchange.acks = acks
            if acks == 0 and self.pending and self.pending[-1] is exchange:
                self.pending.pop()  # undo the record made at its header: no response will come
                exchange.outcome = NO_ANSWER_EXPECTED
            return
        exchange.max_wait_ms = max_wait_ms
        exchange.group_id = group_id
        if mechanism is not None:
            self._handshake = mechanism
        elif software_name is not None and software_version is not None:
            software = software_name[:MAX_CUT_ID], software_version[:MAX_CUT_ID]
            if software != self.software:
                self.software = software
                self.events.append(ClientNamed(client_id, *software, exchange.request_start))

    def _extend_prefix(self, exchange: Exchange, more: Any, now: int) -> None:
        """Read first fields that arrive in parts, from the start each time; long ones only after each doubling."""
        prefix = self._client_prefix
        assert prefix is not None and exchange.plan.prefix is not None
        before = len(prefix)
        prefix += more[: MAX_PREFIX - before]
        is_all = len(prefix) in (MAX_PREFIX, exchange.request_bytes - frames.REQUEST_HEAD_BYTES)
        if before >= MAX_USUAL_PREFIX and len(prefix).bit_length() == before.bit_length() and not is_all:
            self._note_copies(exchange, now)
            return
        try:
            found = exchange.plan.prefix(prefix, 0, len(prefix))
        except Malformed as fault:
            self._client_prefix = None
            self._malformed_prefix(exchange, str(fault), now)
            return
        if found is None and self._can_grow(exchange, len(prefix), now):
            self._note_copies(exchange, now)
            return
        self._client_prefix = None
        if found is not None:
            self._take_prefix(exchange, *found[0])
            self._note_prefix(exchange, found[1], now)

    def _can_grow(self, exchange: Exchange, seen_bytes: int, now: int) -> bool:
        """Return whether first fields that are incomplete after `seen_bytes` can continue; else report a fault."""
        if seen_bytes == exchange.request_bytes - frames.REQUEST_HEAD_BYTES:
            self._malformed_prefix(exchange, "it ends inside its first fields", now)
        elif seen_bytes == MAX_PREFIX:
            self._malformed_prefix(exchange, f"its first fields are longer than {MAX_PREFIX} bytes", now)
        else:
            return True
        return False

    # --- faults, and hooks for captures ------------------------------------------------------------------------------

    def _malformed_prefix(self, exchange: Exchange, why: str, now: int) -> None:
        """Report first fields that do not decode; fatal if pairing matters.

        Pairing needs the acks of a Produce, which decide whether a response comes. A response paired with the wrong
        request could be forwarded unread, so a rewriting session closes on a Produce, and an authorizing session on any
        API. Otherwise the broker decides, and usually closes the connection. Pairing does not need the client id of an
        unknown API or version.
        """
        if not exchange.plan.known:
            return
        if self._authorizer is None and not (self._interest.rewrite and exchange.plan.api_key == PRODUCE):
            self._malformed_request(exchange, why, now)
            return
        exchange.decoded = FAILED
        if exchange.plan.kept is not None:
            exchange.request_frame = exchange.response_frame = None  # it is not kept: the connection ends first
        text = f"{exchange.plan.title} request does not decode ({why}); what follows could not be decided"
        self._fatal(CLIENT, "malformed_request", text, exchange.plan, now)

    def _malformed_request(self, exchange: Exchange, why: str, now: int) -> None:
        exchange.decoded = FAILED
        text = f"{exchange.plan.title} request does not decode ({why}); it was forwarded, the broker decides"
        self._fault(CLIENT, "malformed_request", text, exchange.plan, now)

    def _refuse(self, plan: ApiPlan, now: int) -> None:
        if plan.api_version < 0:
            text = f"{plan.title} does not exist, and its answer could name brokers: the client is broken"
        else:
            text = (
                f"{plan.title} is newer than this kproxy reads, and its answer names brokers: upgrade kproxy, "
                "or let the client ask ApiVersions first and keep to the versions that it offers"
            )
        self._fatal(CLIENT, "unreadable_carrier", text, plan, now)

    def _looks_like_request(self, view: Any, pos: int, size: int) -> bool:
        """Return whether the bytes at `pos`, where a request should begin, look like a request."""
        return True

    def _is_full(self) -> bool:
        """Handle the limit of pending requests; return whether the rest of the view waits in the backlog."""
        return True
