"""The memory of all relays of a loop together, and its bounds.

Peers determine its amount: pending requests, about 400 bytes each; bytes that were read and cannot be forwarded, since
the other side accepts none or the session has done its share of work; and unread bytes in the kernel of clients that
have ended. Every connection has a small share of the first two, so connections with many never affect one with few:

- Every connection may have FREE_REQUESTS pending. More are lent, up to MOST_REQUESTS in total; a connection that gets
  none is not read until some of its requests are answered.
- While more than MANY_BYTES are kept, every read takes FEW_BYTES at most.
- MOST_ENDED clients that ended while they were not read may wait for answers; beyond that, the one that has waited for
  longest is closed. The kernel keeps their bytes, and when all sockets have more than net.ipv4.tcp_mem, it drops
  segments of every connection: healthy ones then wait for retransmissions, 0.2 to 2 s. An end behind more bytes than
  the kernel buffers goes unnoticed; only limits of connections bound the number of such clients.
- A piece larger than a read is a held frame, or an answer of kproxy. While its receiver does not take it, it counts
  towards MOST_LARGE_BYTES as well. Beyond that, the connection that has waited for longest, and at least PATIENCE_NS,
  is closed; if there is none, the connection that adds the piece.

The bounds are therefore MOST_REQUESTS in total and FREE_REQUESTS per connection; MANY_BYTES and MOST_LARGE_BYTES in
total, and FEW_BYTES per side of a connection. Bytes in the buffers of TLS count like any other. Refuses to know
sockets, sessions and the contents of bytes.
"""

from collections.abc import Callable

FREE_REQUESTS = 64
MOST_REQUESTS = 128 * 1024  # some 50 MiB
FEW_BYTES = 16 * 1024
MANY_BYTES = 64 * 1024 * 1024
MOST_LARGE_BYTES = 64 * 1024 * 1024
PATIENCE_NS = 1_000_000_000
MOST_ENDED = 64


class Pressure:
    """Shared by all relays of a loop. `buffer` is the part of `whole` that the next read may fill."""

    __slots__ = ("_ended", "_few", "_large", "buffer", "kept_bytes", "large_bytes", "lent", "read_bytes", "whole")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = self.whole = buffer
        self.read_bytes = len(buffer)  # of `buffer`
        self._few = buffer[:FEW_BYTES]
        self.kept_bytes = 0
        self.large_bytes = 0  # the part of them in large pieces
        self._large: dict[
            Callable[[], None], int
        ] = {}  # callback that closes the connection -> time since when it waits, the oldest first
        self.lent = 0  # pending requests lent to all connections
        self._ended: dict[Callable[[], None], None] = {}  # callbacks that close the connection, the longest wait first

    def lend(self, requests: int) -> bool:
        """Whether a connection may have so many more pending requests, until `give_back`."""
        if self.lent + requests > MOST_REQUESTS:
            return False
        self.lent += requests
        return True

    def give_back(self, requests: int) -> None:
        self.lent -= requests

    def keep(self, change: int) -> bool:
        """Change the number of kept bytes. Returns whether reads became short by this change."""
        was_long = self.buffer is self.whole
        self.kept_bytes += change
        self.buffer = self._few if self.kept_bytes > MANY_BYTES else self.whole
        self.read_bytes = len(self.buffer)
        return was_long and self.buffer is self._few

    def keep_large(self, count: int, close: Callable[[], None], now_ns: int) -> bool:
        """Add bytes of a piece larger than a read. False: there is no memory, so close that connection."""
        self.large_bytes += count
        self._large.setdefault(close, now_ns)
        while self.large_bytes > MOST_LARGE_BYTES:
            oldest, since_ns = next(iter(self._large.items()))
            if oldest == close or now_ns - since_ns < PATIENCE_NS:
                return False
            oldest()
        return True

    def drop_large(self, count: int, close: Callable[[], None]) -> None:
        """Subtract the bytes of large pieces of a connection, which has none any more."""
        self.large_bytes -= count
        self._large.pop(close, None)

    def add_ended(self, close: Callable[[], None]) -> None:
        """Let a client that ended while it is not read wait for answers; close the oldest beyond MOST_ENDED."""
        self._ended[close] = None
        if len(self._ended) > MOST_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            oldest()

    @property
    def ended(self) -> int:
        """The number of clients that have ended and wait."""
        return len(self._ended)

    def remove_ended(self, close: Callable[[], None]) -> None:
        """Remove a client that is closed, or read again."""
        self._ended.pop(close, None)
