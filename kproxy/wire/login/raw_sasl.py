"""Both sides between a successful SaslHandshake v0 and the end of the login: tokens without Kafka headers.

Duty: forward tokens by their 4-byte size, and find the first frame after them. Client and broker take turns: kproxy
forwards the client's bytes after an unanswered handshake or token only after the response, so that the broker reads
them in the state that kproxy assumed. `sasl.py` decides which frames are tokens. A login has at most MAX_TOKENS tokens
of the client, so that a peer cannot keep a connection busy with empty ones. At most sasl.MAX_TOKEN bytes wait, and they
count in the sessions' HeldBudget. Bytes of a capture never wait, since they were sent already.

Refuses to know the contents of a token: it is a secret.
"""

from typing import Any

from kproxy.wire import frames
from kproxy.wire.decisions.own_requests import OwnRequests
from kproxy.wire.events import BROKER, CLIENT, Exchange
from kproxy.wire.login import sasl
from kproxy.wire.reading import Piece, Reading

MAX_TOKENS = 64  # tokens of the client in one login; GSSAPI takes three or four rounds


class RawSaslSides(OwnRequests):
    """The handlers of raw SASL."""

    __slots__ = ()

    def _await_handshake(self, view: Any, now: int) -> list[Piece]:
        """Let the client's bytes wait: the response to SaslHandshake v0 decides whether they are a token or a frame."""
        self._keep_waiting(view, "SaslHandshake", now)
        return []

    def _keep_waiting(self, part: Any, what: str, now: int) -> None:
        """Hold the client's bytes until the broker has answered `what`."""
        if self._waiting is None:
            self._waiting = bytearray()
            self._mark(CLIENT, 0)
        if len(self._waiting) + len(part) > sasl.MAX_TOKEN:
            text = f"the client sent more than {sasl.MAX_TOKEN} bytes before {what} was answered"
            self._fatal(CLIENT, "sasl_token", text, None, now)
        elif self._interest.held.take(len(part), now, self):
            self._waiting += part
        else:
            text = (
                f"the client went on before {what} was answered, and all connections together hold "
                f"{self._interest.held.limit_bytes} bytes already: let it await its answers; see max_held_bytes"
            )
            self._fatal(CLIENT, "held_too_many", text, None, now)

    def _read_waiting(self, pieces: list[Piece], now: int) -> None:
        """Continue with the client's waiting bytes, because the broker has answered."""
        waiting = self._take_waiting()
        if waiting:
            brokers = self._rest, self._shift  # state of the broker's current view
            self._rest, self._shift = memoryview(waiting), -len(waiting)
            pieces += self._read_rest(CLIENT, now)
            if self._unread is not None:
                self._received[CLIENT] -= self._put_back(CLIENT)
            self._rest, self._shift = brokers

    def _handshake_answered(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        if exchange.plan.api_version != 0:
            return
        mechanism = self._handshake or ""
        self._handshake = None
        if exchange.error_code == 0:
            self._start_raw(mechanism, now)
        else:
            self._handlers[CLIENT] = type(self)._requests
        self._read_waiting(pieces, now)

    def _start_raw(self, mechanism: str, now: int) -> None:
        self.sasl_mechanism = mechanism
        self._raw = sasl.RawSasl(mechanism)
        if self._raw.open_ended and self._authorizer is not None:
            text = (
                f"a {mechanism} login by raw tokens has no certain end, so requests behind it could pass undecided: "
                "let the client log in by SaslAuthenticate, as all since Kafka 1.0 do"
            )
            self._fatal(CLIENT, "sasl_token", text, None, now)
            return
        self._handlers[CLIENT] = type(self)._client_tokens
        self._handlers[BROKER] = type(self)._broker_tokens

    def _client_tokens(self, view: Any, now: int) -> list[Piece]:
        if self._waiting is not None:
            self._keep_waiting(view, "its token", now)
            return []
        reading = Reading(CLIENT, view, now)
        reading.pos = min(self._client_left, reading.size)
        self._client_left -= reading.pos
        if self._client_head:
            reading.begin_with(self._joined(self._client_head, view), now)
            self._client_head = b""
        raw = self._raw
        view, size = reading.view, reading.size
        while size - reading.pos >= 4:
            pos = reading.pos
            length = _size(view, pos)
            if not 0 <= length <= self._max_request:
                self._not_kafka(reading)
                return self._change(reading)
            is_token = raw.is_token(view, pos, size)
            if is_token is None:
                break
            if raw.must_wait(is_token) and not self._may_be_damaged:
                self._shift += pos
                self._keep_waiting(view[pos:], "its token", now)
                self._shift -= pos
                reading.send(pos)
                return reading.pieces
            if not is_token:
                self._handlers[CLIENT] = type(self)._requests
                if raw.open_ended or raw.replies >= raw.tokens:
                    self._handlers[BROKER] = type(self)._answers
                return self._change(reading)
            if length > sasl.MAX_TOKEN:
                self._not_kafka(reading)
                return self._change(reading)
            if raw.tokens >= MAX_TOKENS:
                self._mark(CLIENT, pos)
                text = f"a {raw.mechanism} login of more than {MAX_TOKENS} tokens: no mechanism of Kafka's has so many"
                self._lost_framing(CLIENT, "sasl_token", text, now)
                return self._change(reading)
            raw.tokens += 1
            self.sasl_tokens += 1
            reading.pos += 4 + length
        if reading.pos > size:
            self._client_left = reading.pos - size
            reading.pos = size
        self._client_head = bytes(view[reading.pos :])
        reading.send(reading.pos)
        return reading.pieces

    def _broker_tokens(self, view: Any, now: int) -> list[Piece]:
        reading = Reading(BROKER, view, now)
        reading.pos = min(self._broker_left, reading.size)
        self._broker_left -= reading.pos
        raw = self._raw
        replied = done = False
        if reading.pos and not self._broker_left:
            replied, done = True, raw.replied(1)
        if self._broker_head:
            reading.begin_with(self._joined(self._broker_head, view), now)
            self._broker_head = b""
        view, size = reading.view, reading.size
        reading.work = self._frames_left
        while not done and size - reading.pos >= 4 and reading.work > 0:
            reading.work -= 1
            length = _size(view, reading.pos)
            if not 0 <= length <= sasl.MAX_TOKEN:
                self._not_kafka(reading)
                return self._change(reading)
            self.sasl_tokens += 1
            reading.pos += 4 + length
            if reading.pos <= size:
                replied, done = True, raw.replied(length)
        if done:
            self._handlers[BROKER] = type(self)._answers
            if self._handlers[CLIENT] is type(self)._client_tokens and not (self._client_left or self._client_head):
                self._handlers[CLIENT] = type(self)._requests
            self._change(reading)
        else:
            if reading.pos > size:
                self._broker_left = reading.pos - size
                reading.pos = size
            if size - reading.pos >= 4:
                self._leave(view[reading.pos :])
            else:
                self._broker_head = bytes(view[reading.pos :])
            reading.send(reading.pos)
        if replied and self._waiting is not None:
            self._read_waiting(reading.pieces, now)
        return reading.pieces


def _size(view: Any, pos: int) -> int:
    return int(frames.SIZE.unpack_from(view, pos)[0])
