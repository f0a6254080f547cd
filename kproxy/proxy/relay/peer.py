"""What a relay holds of each of its two sockets, and what it reports its counts and durations to.

Refuses to know what is read, and when. Bounded: `unsent` by one read of the relay, the rest is a few numbers.
"""

from __future__ import annotations

import socket
from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kproxy.proxy.tls.tls_socket import TlsSocket


class Durations(Protocol):
    """A histogram that the relay fills itself, since a call per event would cost more than the counting."""

    counts: list[int]  # one more than bounds
    total_ns: int

    @property
    def bounds(self) -> Sequence[int]: ...  # ns; a duration belongs to the first that is not below it


class Counting(Protocol):
    """What a relay reports about itself; `kproxy.metrics.ConnectionMetrics` is one."""

    @property
    def inside(self) -> tuple[Durations, Durations]:
        """By the side they come from: from the arrival of frames to their send."""

    @property
    def lag(self) -> Durations:
        """From the arrival of bytes to the read of them."""

    @property
    def errors(self) -> int: ...

    def paused(self, side: str) -> None: ...
    def limit_reached(self, limit: str) -> None: ...
    def closed(self, cause: str) -> None: ...


class Peer:
    """One of the two sockets: what is unsent to it, and which sides are not read meanwhile."""

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
        "send",
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
        self.send: Callable[[Any], int] = sock.send
        self.readable: Callable[[], None]
        self.reading = False
        self.resuming = False  # what the session has put back has its turn soon
        self.arrived_ns = 0  # when that was read
        self.unsent: bytearray | None = None
        self.kept_bytes = 0  # counted for it
        self.large_bytes = 0  # of these, those of pieces that are larger than a read
        self.tls_bytes = 0  # counted for what its TLS holds
        self.put_back_bytes = 0  # of what it sent, counted for what the session has put back
        self.feeders: tuple[int, ...] = ()  # the sides that are not read until `unsent` has gone
        self.seen = 0  # frames that it sent and that are counted
        self.frames = 0  # completed by bytes in `unsent`, counted as forwarded when it has gone
        self.since = 0  # when the oldest of them arrived
        self.ended = False  # it sends no more
        self.stops = False  # nothing more is to be sent to it
        self.patience: TimerHandle | None = None  # when it fires, the relay is closed
        self.dead = False  # it takes no more; bytes that it sent before may still be unread


def ignore_readiness() -> None:
    """Replaces the reader of a closed relay."""


def discard_bytes(piece: Any) -> int:
    """Replaces `send` of a peer that takes no more: as many bytes as given are taken, and dropped."""
    return len(piece)
