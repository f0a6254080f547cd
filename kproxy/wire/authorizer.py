"""What the owner of a session may decide about a request before it leaves: forward, replace, answer, or close.

The owner says per (api key, version) which requests it wants to see (`Interest.authorizes`); all others pass as if
there were no authorizer. A request whose body is needed is held until it is whole, then decided inside the same call,
so that nothing overtakes it. One that takes longer than a call may is decided in slices (`Later`, slow_work.py): it is
held meanwhile. Bounds: MAX_HELD_REQUEST of one request, the Interest's HeldBudget of all sessions together.

Refuses to know what decides: rules, identities, bodies.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from kproxy.protocol import codec
from kproxy.wire import frames
from kproxy.wire.events import Exchange

MAX_HELD_REQUEST = 16 * 1024 * 1024  # brokers take records of 1 MiB by default, and producers send that much at once


class Answer(NamedTuple):
    """The broker does not get the request; `frame` answers it, after all older answers."""

    frame: bytes  # its 4-byte size included
    errors: tuple[int, ...]  # every error code in it, for the event; the top level's first


class Replace(NamedTuple):
    """The broker gets `frame` instead, which has the same API, version and correlation id."""

    frame: bytes  # its 4-byte size included


class Close(NamedTuple):
    """Nothing of the request leaves, and the connection is closed: a fatal Desync of the kind "refused"."""

    text: str  # why, in one line


class Hold:
    """The type of HOLD: the request is needed whole."""


HOLD: Final = Hold()


def answered(exchange: Exchange, body: codec.Body) -> Answer:
    """The answer to a request with this body, whose top-level error is `errorCode`."""
    plan = exchange.plan
    frame = codec.encode_response(plan.api_key, plan.api_version, {"correlationId": exchange.correlation_id}, body)
    code = body.get("errorCode", 0)
    return Answer(frames.SIZE.pack(len(frame)) + frame, (code,) if code else ())


class Later(NamedTuple):
    """It takes more time than one call may.

    elsewhere: starts what another thread computes, and calls what it is given once `begin` need not wait for that.
    """

    begin: Callable[[memoryview], codec.Slices[Any]]  # the frame, which lives on -> what the call would have returned
    elsewhere: Callable[[Callable[[], None]], None] | None = None


Decision = Answer | Replace | Close | None  # None: the request is forwarded as it came


class Authorizer(Protocol):
    """Decides about the requests of one connection, in order. Only `edit` raises."""

    def at_header(self, exchange: Exchange) -> Hold | Close | Answer | None:
        """Decide a request of which only the header is certainly here; HOLD: decide it when it is whole."""
        ...

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        """Decide a whole request. `frame` begins with its 4-byte size and lives for this call only.

        If the answer is to be edited, set `exchange.plan` to `Interest.held_plan` of it.
        """
        ...

    def edit(self, exchange: Exchange, frame: Any) -> bytes | Later | None:
        """Change the answer of such a request, before addresses are replaced; None: it stays.

        `frame` begins with its 4-byte size. Raises ProtocolError, which closes the connection; so may the slices of
        a Later.
        """
        ...

    def too_large(self, exchange: Exchange) -> None:
        """A request was not decided: it exceeds a bound of what is held, and the connection is closed."""
        ...
