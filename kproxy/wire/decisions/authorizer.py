"""Decisions of a session's owner about a request before it is forwarded: forward, replace, answer, or close.

The owner selects requests per (api key, version) (`Interest.authorizes`); kproxy forwards all others as without an
authorizer. If a decision needs the body, the session holds the request until it is complete and decides it inside the
same call, so that nothing overtakes it. A decision that would exceed the time of one call is made in slices (`Later`,
slow_work.py), while the request is held. Bounds: MAX_HELD_REQUEST bytes of one request, and the Interest's HeldBudget
for all sessions together.

Refuses to know the basis of decisions: rules, identities, bodies.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from kproxy.protocol import codec
from kproxy.wire import frames
from kproxy.wire.events import Exchange

MAX_HELD_REQUEST = 16 * 1024 * 1024  # by default brokers accept records of 1 MiB, and producers send requests of 1 MiB


class Answer(NamedTuple):
    """The broker does not get the request; `frame` is the response, sent after all older responses."""

    frame: bytes  # its 4-byte size included
    errors: tuple[int, ...]  # every error code in it, for the event; the top-level code is the first


class Replace(NamedTuple):
    """The broker gets `frame` instead, which has the same API, version and correlation id."""

    frame: bytes  # its 4-byte size included


class Close(NamedTuple):
    """No byte of the request is forwarded, and the connection is closed: a fatal Desync of the kind "refused"."""

    text: str  # the reason, in one line


class Hold:
    """The type of HOLD: the decision needs the complete request."""


HOLD: Final = Hold()


def answered(exchange: Exchange, body: codec.Body) -> Answer:
    """Return an Answer to a request, with this body; its error is the body's top-level `errorCode`."""
    plan = exchange.plan
    frame = codec.encode_response(plan.api_key, plan.api_version, {"correlationId": exchange.correlation_id}, body)
    code = body.get("errorCode", 0)
    return Answer(frames.SIZE.pack(len(frame)) + frame, (code,) if code else ())


class Later(NamedTuple):
    """A decision or edit that would exceed the time of one call.

    elsewhere: starts a computation in another thread, and calls its argument when `begin` no longer waits for it.
    """

    begin: Callable[[memoryview], codec.Slices[Any]]  # frame (stays valid) -> the result
    elsewhere: Callable[[Callable[[], None]], None] | None = None


Decision = Answer | Replace | Close | None  # None: forward the request unchanged


class Authorizer(Protocol):
    """Decides the requests of one connection, in order. Only `edit` raises."""

    def at_header(self, exchange: Exchange) -> Hold | Close | Answer | None:
        """Decide a request whose body may not have arrived; HOLD: decide it when it is complete."""
        ...

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        """Decide a complete request. `frame` begins with its 4-byte size and is valid during this call only.

        To edit the response later, set `exchange.plan` to `Interest.held_plan(exchange.plan)`.
        """
        ...

    @property
    def is_quiet(self) -> bool:
        """Return whether the authorizer waits for no response to an earlier request."""
        ...

    def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
        """Return the paths of the fields that determine the decision about requests of this plan and client id.

        Empty: all are forwarded unchanged. None: each is decided separately. `head` begins with the request's 4-byte
        size, and has all of its client id. The result is valid until the session reads another request.
        """
        ...

    def passes(self, exchange: Exchange, frame: Any) -> bool:
        """Return whether complete requests with the deciding fields of this one are forwarded unchanged."""
        ...

    def edit(self, exchange: Exchange, frame: Any) -> bytes | Later | None:
        """Return the edited response to a request with a held plan, before addresses are replaced; None: unchanged.

        `frame` begins with its 4-byte size. Raises ProtocolError, also from the slices of a Later; it closes the
        connection.
        """
        ...

    def too_large(self, exchange: Exchange) -> None:
        """Note that a request was not decided: it exceeds a limit for held requests, and the connection is closed."""
        ...
