"""The fields of a relay, and the methods that its parts call on each other.

Refuses to know the work of the parts.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kproxy.proxy.relay.peer import Counting, Peer
from kproxy.proxy.relay.pressure import Pressure
from kproxy.proxy.relay.slow_lanes import SlowLanes
from kproxy.proxy.sockets.poller import Poller
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Desync, Event
from kproxy.wire.session import Session


class RelayCounts(NamedTuple):
    """Counters and state of a connection at one moment."""

    requests: int
    received_bytes: tuple[int, int]  # (from the client, from the broker)
    client_id: str | None  # client id of the last request whose first fields were read
    awaits_answer: bool  # the oldest pending request is complete


class Loan(Protocol):
    """A relay's connection while the compiled core relays it, or until it does."""

    reads: int  # remaining reads in Python before it is lent
    is_lent: bool

    def counts(self) -> RelayCounts: ...
    def try_it(self) -> None: ...
    def take_back(self) -> None: ...
    def end(self) -> None: ...


class RelayState:
    """The fields of a relay, as slots: a connection needs no dictionary for them."""

    __slots__ = (
        "__weakref__",
        "_between",
        "_clock_offset_ns",
        "_counting",
        "_drained_as",
        "_draining",
        "_faults",
        "_finishing",
        "_first_end",
        "_in_flight_state",
        "_lanes",
        "_lending",
        "_lingering",
        "_loop",
        "_on_closed",
        "_on_fault",
        "_pause",
        "_peers",
        "_poller",
        "_pressure",
        "_session",
        "_session_ns",
        "_silent",
        "_sinks",
        "_to_boundary",
        "_unheard",
        "closed",
        "info",
        "listener",
        "number",
        "principal",
        "tls_version",
    )

    info: ConnectionInfo
    number: int  # unique among the connections of its owner
    principal: str  # the client's
    listener: str  # a label of metrics
    tls_version: str | None  # of the client's side; None: no TLS
    closed: bool

    _loop: AbstractEventLoop
    _poller: Poller
    _pressure: Pressure
    _clock_offset_ns: int
    _peers: tuple[Peer, Peer]
    _counting: Counting
    _sinks: tuple[Callable[[list[Event]], None], ...]
    _on_fault: Callable[[Any, Desync], None]  # the relay and its fault
    _on_closed: Callable[[Any, str], None]  # the relay and the cause
    _lanes: SlowLanes | None
    _session: Session  # stale while the compiled core has the connection
    _session_ns: int  # the last time passed to the session: it never decreases
    _lending: Loan | None  # None: the connection is never lent to the compiled core
    _faults: int  # faults of the session that have been handled
    _in_flight_state: int  # FEW, LENT or FULL
    _silent: TimerHandle | None  # runs while the client has ended and the in-flight limit is FULL
    _first_end: int
    _between: Callable[[], None] | None  # called after each read, to check whether both sides are between two frames
    _pause: Callable[[], None] | None  # called once the client's request in transit is complete
    _draining: bool
    _finishing: bool  # draining, while new requests are still served
    _to_boundary: bool  # the relay reads only the client's request in transit
    _drained_as: str  # the cause of closing after a drain
    _lingering: TimerHandle | None
    _unheard: TimerHandle | None  # runs after the client has ended, and closes the connection at last

    @property
    def session(self) -> Session:
        raise NotImplementedError

    def close(self, cause: str, *, reset: bool = False) -> None:
        raise NotImplementedError

    def _ended(self, side: int) -> None:
        raise NotImplementedError

    def _waits(self, side: int) -> bool:
        raise NotImplementedError

    def _put_back(self, side: int, arrived: int) -> None:
        raise NotImplementedError

    def _unread(self, side: int, counted: bool = False) -> None:
        raise NotImplementedError

    def _resume(self, side: int) -> None:
        raise NotImplementedError

    def _broken(self, side: int, fault: OSError) -> None:
        raise NotImplementedError

    def _crashed(self) -> None:
        raise NotImplementedError

    def _take_back(self) -> None:
        raise NotImplementedError

    def _reader(self, side: int) -> Callable[[], None]:
        """Return the callback for a readable side."""
        raise NotImplementedError

    def _receive_to_boundary(self, buffer: memoryview) -> int:
        raise NotImplementedError

    def _keep(self, side: int, to: int, rest: Any, since: int) -> None:
        raise NotImplementedError

    def _send(self, side: int, to: int, piece: Any, arrived: int) -> None:
        raise NotImplementedError

    def _unwritable(self, to: int) -> None:
        raise NotImplementedError

    def _drain_on(self) -> None:
        raise NotImplementedError

    def _now_ns(self) -> int:
        raise NotImplementedError

    def _read_leftover(self, peer: Peer, side: int) -> None:
        raise NotImplementedError
