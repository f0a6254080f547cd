"""kproxy's own responses: each is sent after the responses to all older requests of its connection.

Own responses accumulate if a client pipelines requests after one that the broker answers slowly. Therefore waiting own
responses count in the sessions' `HeldBudget`, and a session with more than MAX_OWN_BYTES of them reads no further
request before some have been sent. Bound per connection: MAX_OWN_BYTES and one response, which is at most about as
large as its request (MAX_HELD_REQUEST). Refuses to know why kproxy answers.
"""

from functools import cache
from typing import Any

from kproxy.protocol import codec, schema
from kproxy.protocol.apis import API_VERSIONS, UNSUPPORTED_VERSION
from kproxy.wire import frames
from kproxy.wire.decisions.authorizer import Answer
from kproxy.wire.events import ANSWERED_BY_PROXY, CLIENT, FULL, NONE, Exchange
from kproxy.wire.muting import Mutes
from kproxy.wire.observing.keeping import keep_answer
from kproxy.wire.reading import Piece
from kproxy.wire.state import SessionState

MAX_OWN_BYTES = 1024 * 1024


class OwnAnswers(SessionState):
    """The part of a session that answers requests in the broker's place."""

    __slots__ = ()

    @property
    def owes(self) -> bool:
        """Return whether own responses that wait for older ones exceed MAX_OWN_BYTES: no further request is read."""
        return self._handlers[CLIENT] is type(self)._owing

    def _swallow(self, exchange: Exchange, answer: Answer) -> None:
        """Withhold the request that begins now from the broker; `answer` is sent after all older responses."""
        self._client_swallow = True
        if self._own_answers is None:
            self._own_answers = {}
        self._own_answers[exchange.number] = answer

    def _swallowed(self, exchange: Exchange, pieces: list[Piece], now: int) -> None:
        """Complete a withheld request: send its response, or count the response and let it wait."""
        self._client_swallow = False
        self._send_own_answers(pieces, now, exchange)
        answer = self._own_answers and self._own_answers.get(exchange.number)
        if not answer:
            return
        held = self._interest.held
        if not held.take(len(answer.frame), now, self):
            text = (
                f"kproxy's answer to a {exchange.plan.title} waits for older ones, and all connections together "
                f"hold {held.limit_bytes} bytes already: let the client wait for its answers; see max_held_bytes"
            )
            self._fatal(CLIENT, "held_too_many", text, exchange.plan, now)
            return
        self._own_bytes += len(answer.frame)
        if self._own_bytes > MAX_OWN_BYTES:
            self._handlers[CLIENT] = type(self)._owing

    def _owing(self, view: Any, now: int) -> list[Piece]:
        """Let frames of the client wait until own responses have been sent."""
        self._leave(view)
        return []

    def _send_own_answers(self, pieces: list[Piece], now: int, fresh: Exchange | None = None) -> None:
        """Send own responses without an older pending request. The response to `fresh` is not counted yet."""
        pending = self.pending
        while self._own_answers and pending and not self._broker_left:
            exchange = pending[0]
            answer = self._own_answers.get(exchange.number)
            if answer is None or exchange.request_end == NONE:
                return
            del pending[0]
            del self._own_answers[exchange.number]
            if exchange is not fresh:
                self._own_bytes -= len(answer.frame)
                self._interest.held.release(len(answer.frame))
            if pieces and isinstance(pieces[-1][1], bytearray) and pieces[-1][0] == CLIENT:
                pieces[-1][1].extend(answer.frame)  # send several in a row together
            else:
                pieces.append((CLIENT, bytearray(answer.frame)))
            exchange.response_bytes = len(answer.frame)
            exchange.response_start = exchange.response_end = now
            exchange.error_code = answer.errors[0] if answer.errors else None
            exchange.errors = answer.errors
            exchange.decoded = FULL
            exchange.outcome = ANSWERED_BY_PROXY
            if exchange.plan.kept is not None:
                keep_answer(exchange.plan.kept, exchange, answer.frame)
            mutes = self._mutes or Mutes()
            exchange.queue_ns, exchange.muted_ns = mutes.split(exchange.request_start, self._free_at, now)
            self.events.append(exchange)
        if self._own_bytes <= MAX_OWN_BYTES and self._handlers[CLIENT] is type(self)._owing:
            self._handlers[CLIENT] = type(self)._requests


def unsupported_api_versions(correlation_id: int) -> Answer:
    """Return a broker's response to an unsupported ApiVersions version: v0, error 35, and its ApiVersions range."""
    size, body = _unsupported_version()
    return Answer(size + frames.SIZE.pack(correlation_id) + body, (UNSUPPORTED_VERSION,))


@cache
def _unsupported_version() -> tuple[bytes, bytes]:
    """Return (the size field of that response, the bytes after its correlation id)."""
    versions = schema.schema().apis[API_VERSIONS].request.versions
    served = {"apiKey": API_VERSIONS, "minVersion": versions[0], "maxVersion": versions[-1]}
    body = {"errorCode": UNSUPPORTED_VERSION, "apiKeys": [served]}
    answer = codec.encode_response(API_VERSIONS, 0, {"correlationId": 0}, body)
    return frames.SIZE.pack(len(answer)), bytes(answer[4:])
