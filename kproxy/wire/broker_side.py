"""The broker's side of a session: cuts responses, pairs them with requests, reads or changes them as the interest asks.

A response of up to SMALL_BODY bytes is read in one call; if it arrives in parts it is copied first, and held back if
its addresses must be changed. A walker reads a larger response as it streams. A large Metadata response is held only up
to the end of its brokers, the head (MAX_HEAD). Refuses to know the transform.
"""

from typing import Any

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol.apis import FETCH, SASL_HANDSHAKE
from kproxy.wire import frames
from kproxy.wire.bodies import BodyWalker, empty_rest
from kproxy.wire.decisions.authorizer import Later
from kproxy.wire.decisions.editing import Editing
from kproxy.wire.events import (
    BROKER,
    CLIENT,
    FULL,
    NONE,
    OPAQUE,
    REQUEST_NOT_SEEN,
    AddressesHidden,
    Exchange,
)
from kproxy.wire.interest import HOLD, STREAM
from kproxy.wire.observing.keeping import begin_answer, keep_answer
from kproxy.wire.pairing import overtaken_by
from kproxy.wire.reading import Piece, Reading
from kproxy.wire.state import MAX_NAMED, SMALL_BODY, UNSEEN

MAX_HEAD = 256 * 1024  # largest head that is held: four thousand brokers, rewritten in one call


class BrokerSide(Editing):
    """The framed state of the broker's side."""

    __slots__ = ()

    def _answers(self, view: Any, now: int) -> list[Piece]:
        reading = Reading(BROKER, view, now)
        if self._broker_left:
            self._continue_answer(reading)
        elif self._broker_head:
            reading.begin_with(self._joined(self._broker_head, view), self._broker_head_ns)
            self._broker_head = b""
        reading.work = self._frames_left
        framed = type(self)._answers
        while (
            reading.size - reading.pos >= frames.RESPONSE_HEAD_BYTES
            and reading.work > 0
            and not self._broker_left
            and self._handlers[BROKER] is framed
        ):
            self._answer(reading)
        if self._handlers[BROKER] is not framed:
            return self._change(reading)
        self._broker_head = self._incomplete_head(reading, self._broker_left, frames.RESPONSE_HEAD_BYTES)
        self._broker_head_ns = reading.start
        return reading.pieces

    def _answer(self, reading: Reading) -> None:
        """Read the response that begins in a view, and pair it with its request."""
        view, pos, now = reading.view, reading.pos, reading.now
        length, correlation_id = frames.RESPONSE_HEAD.unpack_from(view, pos)
        if length < frames.MIN_RESPONSE:
            self._not_kafka(reading)
            return
        if self.pending and self.pending[0].correlation_id == correlation_id:
            exchange = self.pending.pop(0)
        else:
            self._mark(BROKER, pos)
            unpaired = self._unpaired(correlation_id, view, pos, now)
            if unpaired is None:
                return
            exchange = unpaired
        plan = exchange.plan
        end = pos + 4 + length
        exchange.response_bytes = length + 4
        exchange.response_start = reading.start
        reading.start = now
        reading.work -= 1
        if end > reading.size or (length > SMALL_BODY and plan.scan is not None):
            reading.send(pos)
            self._mark(BROKER, pos)
            self._begin_answer(exchange, length, now)
            if self._broker_left:
                self._continue_answer(reading)
            return
        if not self._is_read_quickly(exchange, view, pos + frames.RESPONSE_HEAD_BYTES, end):
            self._mark(BROKER, pos)
            replacement = self._read_answer(exchange, view[pos:end], now)
            if self._handlers[BROKER] is not type(self)._answers:
                if self.slow[BROKER] is not None:  # the slow work has a copy of the response
                    reading.replace(end, b"")
                    reading.pos = end
                return
            if plan.kept is not None:
                keep_answer(plan.kept, exchange, view[pos:end])
            if replacement is not None:
                reading.replace(end, replacement)
                reading.work -= 8 + (length >> 6)  # its work equals that of about so many frames
        if length > 4096:
            reading.work -= length >> 8
        reading.pos = end
        self.completed[1] += 1
        self._answered(exchange, now)
        if self._own_answers or self._handshake is not None:
            reading.send(end)
            self._after_answer(exchange, reading.pieces, now)

    def _is_read_quickly(self, exchange: Exchange, view: Any, begin: int, end: int) -> bool:
        """Read the error codes of a response that is complete in a view. False: `_read_answer` must read it."""
        plan = exchange.plan
        if plan.quick_scan is None:
            return plan.scan is None and not plan.transforms_always
        try:
            exchange.throttle_ms, exchange.error_code, exchange.errors, carries = plan.quick_scan(view, begin, end)
        except ProtocolError:
            return False
        exchange.decoded = FULL
        return not (carries and self._transform is not None)

    def _after_answer(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        """Handle the completion of a response: own responses that waited for it, and a SaslHandshake."""
        if self._own_answers:
            self._send_own_answers(pieces, now)
        if self._handshake is not None and exchange.plan.api_key == SASL_HANDSHAKE:
            self._handshake_answered(exchange, pieces, now)

    def _unpaired(self, correlation_id: int, view: Any, pos: int, now: int) -> Exchange | None:
        """Find the request of a response that does not match the head of the queue; report a fault."""
        overtaken = overtaken_by(self.pending, correlation_id)
        if overtaken is not None:
            if not self._seen_gap:
                plan = self.pending[0].plan
                text = (
                    f"the answer {correlation_id} ({plan.api}) came before {len(overtaken)} older ones; "
                    "those are given up: a broker answers a connection in order"
                )
                self._fault(BROKER, "out_of_order", text, plan, now)
            for exchange in overtaken:
                self._give_up(exchange, "overtaken")
            return self.pending.pop(0)
        if not self._seen_gap:
            text = f"an answer with the correlation id {correlation_id}, which no pending request has"
            if self._interest.rewrite or self._authorizer is not None:
                text += ": it could name what its client may not see, so it is not forwarded"
                self._fatal(BROKER, "unexpected_answer", text, None, now)
                return None
            self._fault(BROKER, "unexpected_answer", f"{text}; it was forwarded", None, now)
        exchange = Exchange(UNSEEN, correlation_id, NONE, len(self.pending), NONE, NONE)
        exchange.outcome = REQUEST_NOT_SEEN
        exchange.decoded = OPAQUE
        return exchange

    # --- responses in parts ------------------------------------------------------------------------------------------

    def _begin_answer(self, exchange: Exchange, length: int, now: int) -> None:
        """Begin a response that is incomplete or walked: choose between walk, copy and hold."""
        plan = exchange.plan
        self._broker_left = length + 4
        self._broker_exchange = exchange
        if plan.kept is not None:
            self._broker_frame = begin_answer(plan.kept, exchange, length + 4)
        streams = plan.response == STREAM
        self._held = plan.response == HOLD or (
            self._transform is not None and plan.carries_addresses and not (streams and length > SMALL_BODY)
        )
        if plan.scan is None and plan.transforms_always and length <= SMALL_BODY:
            self._held = True  # unknown API or version; kproxy forwards a larger response unread
        if self._held:
            self._broker_kept = bytearray()
            if plan.splits and length > SMALL_BODY:
                self._broker_walker = BodyWalker(
                    plan.api_key,
                    plan.api_version,
                    detail=plan.response_detail,
                    ahead_bytes=frames.RESPONSE_HEAD_BYTES,
                    marks_head=True,
                )
            elif length > plan.max_held_bytes:
                text = (
                    f"{plan.title} answer of {length} bytes must be held to rewrite its addresses, and at most "
                    f"{plan.max_held_bytes} bytes are: ask for less at a time"
                )
                self._fatal(BROKER, "held_too_large", text, plan, now)
        elif plan.scan is not None and (plan.known or length <= SMALL_BODY):
            if length > SMALL_BODY:
                self._broker_walker = BodyWalker(
                    plan.api_key,
                    plan.api_version,
                    detail=plan.response_detail,
                    room=self._interest.room,
                    logs=self._interest.logs if plan.api_key == FETCH else None,
                    neutralise=streams and self._transform is not None,
                    ahead_bytes=frames.RESPONSE_HEAD_BYTES,
                )
            else:
                self._broker_kept = bytearray()

    def _continue_answer(self, reading: Reading) -> None:
        """Read and send the next bytes of the response in transit, up to its end, the view's, or the walk's stop."""
        view, pos, now = reading.view, reading.pos, reading.now
        stop = min(pos + self._broker_left, reading.size)
        exchange = self._broker_exchange
        if self._broker_walker is not None and exchange is not None:
            stop = self._walk_answer(exchange, self._broker_walker, view, pos, stop, reading.pieces, now)
        elif (self._broker_kept is None or self._keep(view[pos:stop], now)) and not self._held:
            reading.pieces.append((CLIENT, view[pos:stop]))
        reading.pos = reading.sent = stop
        if self._handlers[BROKER] is not type(self)._answers:
            return  # a fatal fault
        if self._broker_frame is not None:
            self._broker_frame.add(view[pos:stop])
        self._broker_left -= stop - pos
        if self._broker_left:
            return
        self._broker_exchange = None
        self.completed[1] += 1
        if exchange is not None:  # otherwise a capture lost a part of it
            self._whole_answer(exchange, reading)

    def _whole_answer(self, exchange: Exchange, reading: Reading) -> None:
        """Handle the completion of a response that was in transit: its body, its copy, its event."""
        now = reading.now
        framed = type(self)._answers
        if self._broker_walker is not None:
            self._answer_walked(exchange, now)
        elif self._broker_kept is not None:
            frame = memoryview(bytes(self._broker_kept))
            self._drop_answer()
            replacement = self._read_answer(exchange, frame, now)
            if self._handlers[BROKER] is framed and self._held and replacement != b"":
                reading.pieces.append((CLIENT, frame if replacement is None else replacement))
        if self._handlers[BROKER] is not framed:
            if self.slow[BROKER] is not None:
                self.completed[1] -= 1  # counted when it is edited
                self._drop_frame(BROKER)  # the slow work has the whole frame
            return
        if exchange.plan.kept is not None:
            parts, self._broker_frame = self._broker_frame, None
            keep_answer(exchange.plan.kept, exchange, None if parts is None else parts.take())
        self._answered(exchange, now)
        self._after_answer(exchange, reading.pieces, now)

    def _keep(self, part: Any, now: int) -> bool:
        """Copy the next bytes of a response. False: it must be held, and the budget of all connections is used up."""
        kept, exchange = self._broker_kept, self._broker_exchange
        assert kept is not None and exchange is not None
        if not self._interest.held.take(len(part), now):
            plan = exchange.plan
            if self._held:
                text = (
                    f"{plan.title} answer must be held to rewrite its addresses, and all connections together hold "
                    f"{self._interest.held.limit_bytes} bytes already: let fewer clients ask at once"
                )
                self._fatal(BROKER, "held_too_many", text, plan, now)
                return False
            self._drop_answer()  # kproxy forwards the rest unread
            return True
        kept += part
        return True

    # --- contents of responses ---------------------------------------------------------------------------------------

    def _read_answer(self, exchange: Exchange, frame: Any, now: int) -> bytes | None:
        """Read a complete response; return its replacement, or None to forward it. A fatal fault closes the session.

        The replacement of the response to the owner's own request is b"": it is not forwarded.
        """
        if not exchange.plan.is_edited or self._authorizer is None:
            return self._read_unedited(exchange, frame, now)
        try:
            edited = self._authorizer.edit(exchange, frame)
        except ProtocolError as fault:
            self._unedited(exchange, fault, now)
            return None
        if isinstance(edited, Later):
            self._edit_later(exchange, edited, frame, now)
            return None
        replacement = self._read_unedited(exchange, frame if edited is None else memoryview(edited), now)
        return edited if replacement is None else replacement

    def _read_unedited(self, exchange: Exchange, frame: Any, now: int) -> bytes | None:
        plan = exchange.plan
        if plan.scan is None:
            if self._own_request is not None and self._own_request[0] is exchange:
                return self._take_own(exchange, bytes(frame))
            try:
                return None if self._transform is None else self._transform(exchange, frame)
            except ProtocolError as fault:
                self._malformed_answer(exchange, fault, now)
                return None
        reader = plan.response_reader
        replacement = None
        if reader is None or self._transform is not None:
            try:
                exchange.throttle_ms, exchange.error_code, exchange.errors, carries = plan.scan(frame, 8, len(frame))
                exchange.decoded = FULL
                if self._transform is not None and (carries or plan.transforms_always):
                    replacement = self._transform(exchange, frame)
            except ProtocolError as fault:
                self._malformed_answer(exchange, fault, now)
                return None
        if reader is not None:
            try:
                found = reader(frame, 8, len(frame))
            except Malformed as fault:  # the scan has already checked its addresses
                self._unread_answer(exchange, fault, now)
                return replacement
            exchange.throttle_ms = found.throttle_ms
            exchange.error_code = found.error_code
            exchange.errors = found.errors
            exchange.decoded = FULL
            exchange.response_body = found
        return replacement

    def _walk_answer(
        self, exchange: Exchange, walker: BodyWalker, view: Any, pos: int, stop: int, pieces: list[Piece], now: int
    ) -> int:
        """Walk the bytes [pos, stop) and forward them with the walker's edits; return where the walk stopped."""
        stop, edits = self._walk(walker, view, pos, stop)
        if self._held and walker.head_end is not None:
            if not self._send_head(exchange, view[pos : walker.head_end], pieces, now):
                return stop
            pos = walker.head_end
        if walker.fault is not None and self._may_name_brokers(exchange):
            self._malformed_answer(exchange, walker.fault, now)
            return stop
        if self._held:
            self._keep_head(exchange, view[pos:stop], now)
            return stop
        for edit_start, edit_end, replacement in edits:
            if pos < edit_start:
                pieces.append((CLIENT, view[pos:edit_start]))
            if replacement:
                pieces.append((CLIENT, replacement))
            pos = edit_end
        if pos < stop:
            pieces.append((CLIENT, view[pos:stop]))
        return stop

    def _keep_head(self, exchange: Exchange, part: Any, now: int) -> None:
        """Copy bytes of an incomplete head; a head beyond MAX_HEAD is a fatal fault."""
        if not self._keep(part, now):
            return
        assert self._broker_kept is not None
        if len(self._broker_kept) > MAX_HEAD:
            text = (
                f"the brokers of a {exchange.plan.title} answer do not end within {MAX_HEAD} bytes, which must be held "
                "to rewrite their addresses: no cluster has so many"
            )
            self._fatal(BROKER, "held_too_large", text, exchange.plan, now)

    def _send_head(self, exchange: Exchange, last: Any, pieces: list[Piece], now: int) -> bool:
        """Complete the head with `last`, pass it to the transform as a response with an empty rest, send the result.

        kproxy then forwards the rest unchanged; the frame's size covers both. False: a fatal fault.
        """
        if not self._keep(last, now):
            return False
        assert self._broker_kept is not None and self._transform is not None
        plan = exchange.plan
        head = bytes(self._broker_kept)
        self._interest.held.release(len(head))
        self._broker_kept = None
        self._held = False
        rest = empty_rest(plan.api_key, plan.api_version)
        whole = frames.SIZE.pack(len(head) - 4 + len(rest)) + head[4:] + rest
        try:
            answer = self._transform(exchange, memoryview(whole))
        except ProtocolError as fault:
            self._malformed_answer(exchange, fault, now)
            return False
        if answer is not None:
            size = exchange.response_bytes - 4 + len(answer) - len(whole)
            head = frames.SIZE.pack(size) + answer[4 : len(answer) - len(rest)]
        pieces.append((CLIENT, head))
        return True

    def _may_name_brokers(self, exchange: Exchange) -> bool:
        """Return whether the rest of the response in transit may contain broker addresses that must be rewritten."""
        return (
            self._transform is not None and exchange.plan.carries_addresses and (self._held or not exchange.plan.splits)
        )

    def _answer_walked(self, exchange: Exchange, now: int) -> None:
        walker, self._broker_walker = self._broker_walker, None
        assert walker is not None
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
        elif self._may_name_brokers(exchange):
            self._malformed_answer(exchange, walker.fault, now)
        else:
            self._unread_answer(exchange, walker.fault, now)
