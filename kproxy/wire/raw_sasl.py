"""Both sides between a successful SaslHandshake v0 and the end of the login: tokens without Kafka headers.

Duty: hold the client's bytes while the handshake is unanswered, forward tokens by their 4-byte size, and find the first
frame behind them. `sasl.py` knows how many rounds a mechanism has. A login has at most MAX_TOKENS tokens of the client,
so that a peer cannot keep a connection busy with empty ones. Refuses to know what is in a token: it is a secret.
"""

from typing import Any

from kproxy.wire import frames, sasl
from kproxy.wire.events import BROKER, CLIENT, Exchange
from kproxy.wire.own_requests import OwnRequests
from kproxy.wire.state import Piece

MAX_TOKENS = 64  # of one login; GSSAPI takes three or four rounds


class RawSaslSides(OwnRequests):
    """The states of raw SASL."""

    __slots__ = ()

    def _await_handshake(self, view: Any, now: int) -> list[Piece]:
        """SaslHandshake v0 is unanswered: whether the client's bytes are a token or a frame depends on the answer."""
        if self._waiting is None:
            self._waiting = bytearray()
            self._mark(CLIENT, 0)
        self._waiting += view
        if len(self._waiting) > sasl.MAX_TOKEN:
            text = f"the client sent more than {sasl.MAX_TOKEN} bytes before SaslHandshake was answered"
            self._fatal(CLIENT, "sasl_token", text, None, now)
        return []

    def _handshake_answered(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        if exchange.plan.api_version != 0:
            return
        mechanism = self._handshake or ""
        self._handshake = None
        waiting = bytes(self._waiting or b"")
        self._waiting = None
        if exchange.error_code == 0:
            self._start_raw(mechanism, now)
        else:
            self._handlers[CLIENT] = type(self)._requests
        if waiting:
            brokers = self._rest, self._shift  # of the view at hand
            self._rest, self._shift = memoryview(waiting), -len(waiting)
            pieces += self._read_rest(CLIENT, now)
            if self._unread is not None:
                self._received[CLIENT] -= self._put_back(CLIENT)
            self._rest, self._shift = brokers

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

    def _end_raw(self) -> None:
        self._handlers[CLIENT] = type(self)._requests
        self._handlers[BROKER] = type(self)._answers

    def _client_tokens(self, view: Any, now: int) -> list[Piece]:
        size = len(view)
        pos = min(self._client_left, size)
        self._client_left -= pos
        if self._client_head:
            view = self._joined(self._client_head, view)
            size = len(view)
            self._client_head = b""
        raw = self._raw
        while size - pos >= 4:
            if raw.open_ended and raw.tokens and size - pos < 14 and size - pos != 4 + _size(view, pos):
                break  # too few bytes to distinguish a token from a frame
            if raw.ends_with(view, pos, size):
                self._end_raw()
                return self._change(CLIENT, view, pos, 0, [])
            length = _size(view, pos)
            if not 0 <= length <= sasl.MAX_TOKEN:
                return self._not_kafka(CLIENT, view, pos, 0, [], now)
            if raw.tokens >= MAX_TOKENS:
                self._mark(CLIENT, pos)
                text = f"a {raw.mechanism} login of more than {MAX_TOKENS} tokens: no mechanism of Kafka's has so many"
                self._lost_framing(CLIENT, "sasl_token", text, now)
                return self._change(CLIENT, view, pos, 0, [])
            raw.tokens += 1
            self.sasl_tokens += 1
            pos += 4 + length
        if pos > size:
            self._client_left = pos - size
            pos = size
        self._client_head = bytes(view[pos:])
        return [(BROKER, view[:pos])] if pos else []

    def _broker_tokens(self, view: Any, now: int) -> list[Piece]:
        size = len(view)
        pos = min(self._broker_left, size)
        self._broker_left -= pos
        done = False
        if pos and not self._broker_left:
            done = self._raw.replied(1)
        if self._broker_head:
            view = self._joined(self._broker_head, view)
            size = len(view)
            self._broker_head = b""
        left = self._frames_left
        while not done and size - pos >= 4 and left > 0:
            left -= 1
            length = _size(view, pos)
            if not 0 <= length <= sasl.MAX_TOKEN:
                return self._not_kafka(BROKER, view, pos, 0, [], now)
            self.sasl_tokens += 1
            pos += 4 + length
            if pos <= size:
                done = self._raw.replied(length)
        if done:
            self._end_raw()
            return self._change(BROKER, view, pos, 0, [])
        if pos > size:
            self._broker_left = pos - size
            pos = size
        if size - pos >= 4:
            self._leave(view[pos:])
        else:
            self._broker_head = bytes(view[pos:])
        return [(CLIENT, view[:pos])] if pos else []


def _size(view: Any, pos: int) -> int:
    return int(frames.SIZE.unpack_from(view, pos)[0])
