"""The state of each of a relay's two sockets, and the interface for a relay's counts and durations.

Refuses to know the contents and the time of reads. Bounded: `unsent` by one read of the relay; the rest are numbers.
"""

from __future__ import annotations

import socket
from asyncio import TimerHandle
from collections.abc import Callable, Sequence, Sized
from typing import Any, Protocol

from kproxy.proxy.tls.tls_socket import TlsSocket


class Durations(Protocol):
    """A histogram that the relay fills itself, since a call per event would cost more than the counting."""

    counts: list[int]  # one more than bounds
    total_ns: int

    @property
    def bounds(self) -> Sequence[int]: ...  # ns; a duration counts at the first bound that is not below it


class Counting(Protocol):
    """The counters of a relay; `kproxy.metrics.ConnectionMetrics` implements it."""

    pending: Sized  # requests in flight

    @property
    def inside(self) -> tuple[Durations, Durations]:
        """Durations from the arrival of frames to their send, by the sending side."""

    @property
    def lag(self) -> Durations:
        """Durations from the arrival of bytes to their read."""

    @property
    def errors(self) -> int: ...

    def paused(self, side: str) -> None: ...
    def limit_reached(self, limit: str) -> None: ...
    def closed(self, cause: str, *, spoke: bool = True) -> None: ...


class Peer:
    """One of the two sockets: its unsent bytes, and the sides that are paused until these are sent."""

    __slots__ = (
        "arrived_ns",
        "dead",
        "ended",
        "fd",
        "feeders",
        "frames",
        "kept_bytes",
        "large_bytes",
        "patience",
        "put_back_bytes",
        "readable",
        "reading",
        "resuming",
        "seen",
        "since",
        "sock",
        "stops",
        "tls",
        "tls_bytes",
        "unsent",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tls = sock if isinstance(sock, TlsSocket) else None
        self.fd = sock.fileno()
        self.readable: Callable[[], None]
        self.reading = False
        self.resuming = False  # a turn is scheduled for the bytes that the session has put back
        self.arrived_ns = 0  # when these bytes were read
        self.unsent: bytearray | None = None
        self.kept_bytes = 0  # counted for `unsent`
        self.large_bytes = 0  # the part of it from pieces larger than a read
        self.tls_bytes = 0  # counted for the buffers of its TLS
        self.put_back_bytes = 0  # counted for its bytes that the session has put back
        self.feeders: tuple[int, ...] = ()  # the sides that are not read until `unsent` is sent
        self.seen = 0  # frames from this side that are counted
        self.frames = 0  # completed by bytes in `unsent`; counted as forwarded when these are sent
        self.since = 0  # when the oldest of these frames arrived
        self.ended = False  # this side sends no more
        self.stops = False  # nothing more is sent to this side
        self.patience: TimerHandle | None = None  # when it fires, the relay is closed
        self.dead = False  # this side accepts no more bytes; earlier bytes from it may be unread

    def send(self, piece: Any) -> int:
        """Send bytes; return how many were accepted. Bytes to a dead side are dropped, and count as sent."""
        return len(piece) if self.dead else self.sock.send(piece)


def ignore_readiness() -> None:
    """Replaces the reader of a closed relay."""
