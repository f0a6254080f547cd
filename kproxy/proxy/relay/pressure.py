"""What all relays of a loop hold together, and how each is kept short when that is much.

Things that peers decide the amount of: requests that wait for a broker, some 400 bytes each; bytes that were read and
cannot go on, since the other side takes none or the session has done its share of work; and what clients that have
ended leave unread in the kernel. Each connection has a little of the first two whatever the others have, so one that
holds few never notices those that hold many:

- FREE_REQUESTS may be pending on any connection. More are lent out of MOST_REQUESTS for all; who gets none is not read
  until some of its own are answered.
- While more than MANY_BYTES are kept, every read takes FEW_BYTES at most.
- Of the clients that ended while they were not read MOST_ENDED wait for answers; one more, and the one that has waited
  for longest goes. The kernel holds what they sent, and when connections hold more than net.ipv4.tcp_mem it drops
  segments of everybody: healthy connections then wait for retransmissions, 0.2 to 2 s. An end behind more than the
  kernel takes is not seen; such a client is one that is not read, of which only limits of connections bound the number.
- A piece that is larger than a read is a frame that was held, or an answer of kproxy's own. While its receiver does not
  take it, it counts besides: MOST_LARGE_BYTES of all. Beyond it the connection that has waited for longest, and for
  PATIENCE_NS at least, is closed; if there is none, the one that makes it more.

So the bounds are MOST_REQUESTS and FREE_REQUESTS per connection, MANY_BYTES, MOST_LARGE_BYTES and FEW_BYTES per side of
a connection. What TLS has encrypted and not sent, or not decrypted, is kept like any other byte.
Refuses to know sockets, sessions and what is in the bytes.
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
    """Shared by all relays of a loop. `buffer` is what the next read may fill; `whole` is all of it."""

    __slots__ = ("_ended", "_few", "_large", "buffer", "kept_bytes", "large_bytes", "lent", "whole")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = self.whole = buffer
        self._few = buffer[:FEW_BYTES]
        self.kept_bytes = 0
        self.large_bytes = 0  # of those
        self._large: dict[Callable[[], None], int] = {}  # what closes each, and since when it waits, the oldest first
        self.lent = 0  # requests
        self._ended: dict[Callable[[], None], None] = {}  # what closes each, the one that has waited for longest first

    def lend(self, requests: int) -> bool:
        """Whether so many more requests may be pending on one connection, until they are given back."""
        if self.lent + requests > MOST_REQUESTS:
            return False
        self.lent += requests
        return True

    def give_back(self, requests: int) -> None:
        self.lent -= requests

    def keep(self, change: int) -> bool:
        """So many more bytes are kept, or less than 0: fewer. Whether reads became short by it."""
        was_long = self.buffer is self.whole
        self.kept_bytes += change
        self.buffer = self._few if self.kept_bytes > MANY_BYTES else self.whole
        return was_long and self.buffer is self._few

    def keep_large(self, count: int, close: Callable[[], None], now_ns: int) -> bool:
        """So many bytes of a piece larger than a read are kept, too; False: there is no room, close that connection."""
        self.large_bytes += count
        self._large.setdefault(close, now_ns)
        while self.large_bytes > MOST_LARGE_BYTES:
            oldest, since_ns = next(iter(self._large.items()))
            if oldest == close or now_ns - since_ns < PATIENCE_NS:
                return False
            oldest()
        return True

    def drop_large(self, count: int, close: Callable[[], None]) -> None:
        """So many fewer are kept; that connection keeps none any more, or `keep_large` comes again."""
        self.large_bytes -= count
        self._large.pop(close, None)

    def add_ended(self, close: Callable[[], None]) -> None:
        """A client ended while it is not read; it waits for answers, unless more than MOST_ENDED do."""
        self._ended[close] = None
        if len(self._ended) > MOST_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            oldest()

    @property
    def ended(self) -> int:
        """Clients that ended and wait."""
        return len(self._ended)

    def remove_ended(self, close: Callable[[], None]) -> None:
        """That client is closed, or read again."""
        self._ended.pop(close, None)
