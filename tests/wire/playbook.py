"""A dialogue with a session: bytes sent by each side, and the bytes and events that result.

Each step takes one millisecond. Bytes that the session sends are joined per side, so that a playbook does not depend
on the number of pieces; events keep their order.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from kproxy.protocol import codec
from kproxy.wire.events import BROKER, CLIENT, Desync, Event, Exchange, Unanswered
from kproxy.wire.interest import Interest
from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.pairing import LIMIT
from kproxy.wire.session import Session
from kproxy.wire.state import Piece

MS = 1_000_000


def sized(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big", signed=True) + frame


def request(
    key: int, version: int, correlation_id: int, body: dict[str, Any] | None = None, client: str | None = "c"
) -> bytes:
    header = {
        "requestApiKey": key,
        "requestApiVersion": version,
        "correlationId": correlation_id,
        "clientId": client,
    }
    return sized(codec.encode_request(header, body or {}))


def response(key: int, version: int, correlation_id: int, body: dict[str, Any] | None = None) -> bytes:
    return sized(codec.encode_response(key, version, {"correlationId": correlation_id}, body or {}))


def foreign_request(key: int, version: int, correlation_id: int, rest: bytes = b"") -> bytes:
    """A request of an API or a version that the schema does not have."""
    return sized(
        key.to_bytes(2, "big", signed=True)
        + version.to_bytes(2, "big", signed=True)
        + correlation_id.to_bytes(4, "big", signed=True)
        + rest
    )


class Dialogue:
    def __init__(self, interest: Interest | None = None, kind: type[Session] = Session, **settings: Any) -> None:
        self.session = kind(interest or Interest(), **settings)
        self.now = 0
        self.calls = 0  # number of calls of `resume`
        self.sent = {CLIENT: b"", BROKER: b""}
        self.events: list[Event] = []

    def says(self, side: int, data: bytes, chunks: Iterable[int] = ()) -> "Dialogue":
        """The side sends `data`, cut after each of the given offsets."""
        cuts = [0, *chunks, len(data)]
        for begin, end in pairwise(cuts):
            self.now += MS
            view = memoryview(bytearray(data[begin:end]))
            self._send(self.session.receive(side, view, self.now))
            view[:] = b"\xaa" * len(view)  # overwrite the shared buffer: a kept view would read other bytes
            self._resume()
        return self

    def _send(self, pieces: list[Piece]) -> None:
        for to, piece in pieces:
            self.sent[to] += bytes(piece)
        self._take()

    def _resume(self) -> None:
        """Resume the session's backlogs while the pending limit allows."""
        backlog, pending = self.session.backlog, self.session.pending
        while backlog[BROKER] is not None or (backlog[CLIENT] is not None and len(pending) < LIMIT):
            side = CLIENT if backlog[BROKER] is None else BROKER
            self._send(self.session.resume(side, self.now))
            self.calls += 1

    def client(self, data: bytes, chunks: Iterable[int] = ()) -> "Dialogue":
        return self.says(CLIENT, data, chunks)

    def broker(self, data: bytes, chunks: Iterable[int] = ()) -> "Dialogue":
        return self.says(BROKER, data, chunks)

    def close(self, side: int) -> "Dialogue":
        self.now += MS
        self.session.close(side, self.now)
        self._take()
        return self

    def gap(self, side: int, count: int) -> "Dialogue":
        assert isinstance(self.session, CapturedSession)
        self.now += MS
        self.session.gap(side, count, self.now)
        self._take()
        return self

    def _take(self) -> None:
        self.events += self.session.events
        self.session.events.clear()

    @property
    def exchanges(self) -> list[Exchange]:
        return [event for event in self.events if isinstance(event, Exchange)]

    @property
    def unanswered(self) -> list[Unanswered]:
        return [event for event in self.events if isinstance(event, Unanswered)]

    @property
    def faults(self) -> list[Desync]:
        return [event for event in self.events if isinstance(event, Desync)]
