"""Observers of a session, which see the bytes that pass, for traces and the flight recorder.

`Session.receive` calls the observers of its session. Refuses to know the use of observed bytes.
"""

from typing import Any, Protocol

from kproxy.wire.events import CLIENT
from kproxy.wire.reading import Piece
from kproxy.wire.session import Session

UNKNOWN = -1


class Observer(Protocol):
    """An observer: it must not raise or keep views. One with a reference to the session must end its watch itself."""

    def before(self, session: Session, side: int) -> None:
        """Called before bytes of a side are read."""
        ...

    def passed(self, session: Session, side: int, view: Any, pieces: list[Piece], now_ns: int) -> None:
        """Called after all of `view` except the side's backlog was read. pieces: the pieces to send."""
        ...


def watch(session: Session, observer: Observer) -> None:
    """Add an observer to a session."""
    session.observers += (observer,)


def unwatch(session: Session, observer: Observer) -> None:
    """Remove an observer; do nothing if it does not watch the session."""
    session.observers = tuple(each for each in session.observers if each is not observer)


def read_of(session: Session, side: int, view: Any) -> Any:
    """Return the part of a call's view that was read, for use in an observer's `passed`."""
    backlog = session.backlog[side]
    return view if backlog is None else view[: len(view) - len(backlog)]


def boundary(session: Session, side: int) -> int:
    """Return the bytes of a side before the first byte of its next frame; UNKNOWN: an incomplete header has passed,
    or the side has no frames.

    On the client's side these are bytes as read, on the broker's side bytes as forwarded to the client.
    """
    if session._handlers[side] is not (Session._requests, Session._answers)[side]:
        return UNKNOWN
    if side == CLIENT:
        return session._client_left if session._client_left or not session._client_head else UNKNOWN
    nothing_sent = bool(session._broker_head) or (session._broker_kept is not None and session._held)
    return 0 if nothing_sent else session._broker_left


def is_framed(session: Session, side: int) -> bool:
    """Return whether the bytes of a side are frames, not tokens of a login or other bytes."""
    return session._handlers[side] is (Session._requests, Session._answers)[side]
