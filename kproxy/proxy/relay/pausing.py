"""Pauses of a relay between two requests of its client, for requests of kproxy itself (renewal of a login, KIP-368).

The relay first reads the request in transit to its end, and no byte of the next one, which waits in the kernel. The
caller bounds the pause, and must call `go_on`. Refuses to know kproxy's requests.
"""

from collections.abc import Callable
from time import monotonic_ns

from kproxy.proxy.relay.state import RelayState
from kproxy.wire.events import BROKER, CLIENT


class Pausing(RelayState):
    """The part of a relay that pauses it."""

    __slots__ = ()

    def pause(self, on_paused: Callable[[], None]) -> None:
        """Read the client's request in transit to its end and call `on_paused`; no new one is read until `go_on`."""
        self._take_back()
        self._pause = on_paused
        self._between = self._step
        self._read_to_boundary(True)
        self._look()

    def ask(self, frame: bytes, take: Callable[[bytes], None], client_id: str) -> bool:
        """Send a request of kproxy's own, while paused; `take` gets its answer. False: the connection is ending."""
        broker = self._peers[BROKER]
        if self.closed or broker.stops or broker.ended:
            return False
        pieces = self.session.ask(frame, take, client_id, self._now_ns())
        for to, piece in pieces:
            self._send(CLIENT, to, piece, monotonic_ns())
        return bool(pieces) and not broker.dead

    def go_on(self) -> None:
        """Read the client again."""
        self._pause = None
        if self.closed:
            return
        if self._draining and not self._finishing:
            self._drain_on()
            return
        self._between = self._step if self._draining else None
        self._read_to_boundary(False)
        self._resume(CLIENT)

    def _step(self) -> None:
        """Check for the end of a drain and for a pause; `_between` calls it, as a drain may begin during a pause."""
        self._look()
        if self._draining:
            self._drain_on()

    def _look(self) -> None:
        if self._pause is not None and not self.closed and self.session.at_boundary(CLIENT):
            self._unread(CLIENT)
            on_paused, self._pause = self._pause, _is_paused
            on_paused()

    def _read_to_boundary(self, is_bound: bool) -> None:
        """Read the client only to the end of its request in transit, or everything again."""
        was_reading = self._peers[CLIENT].reading
        self._unread(CLIENT)
        self._to_boundary = is_bound
        if was_reading:
            self._resume(CLIENT)


def _is_paused() -> None:
    """Do nothing: replaces the callback for the end of the request in transit once it was called."""
