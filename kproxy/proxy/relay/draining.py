"""Closing a relay between two requests: pending answers are delivered, then both sides close.

Two ways: `finish` serves requests until none is pending, `drain` reads no new request. The caller bounds the time, and
closes relays that take longer; a client has LINGER_S to notice the end. Refuses to know the reason.
"""

import socket

from kproxy.proxy.relay.pausing import Pausing
from kproxy.proxy.sockets.sockets import flush_small_sends, has_unread
from kproxy.wire.events import BROKER, CLIENT

QUIET_S = 0.25  # how long `finish` waits for a request of an idle client: an end with an answer is noticed at once
LINGER_S = 1.0  # how long a drained client has to notice the end and to close


class Draining(Pausing):
    """The part of a relay that closes it in order."""

    __slots__ = ()

    def finish(self, cause: str = "drained") -> None:
        """Serve until no request of the client is pending, then close: the end leaves with the last answer."""
        if not self._draining:
            self._take_back()
            self._draining = self._finishing = True
            self._drained_as = cause
            self._between = self._step
            flush_small_sends(self._peers[CLIENT].sock)
            self._loop.call_later(QUIET_S, self._drain_on)  # without a request until then, close without an answer

    def drain(self, cause: str | None = None) -> None:
        """Read the request in transit to its end and no new one, deliver pending answers, close between two frames."""
        if self._draining and not self._finishing:
            return
        self._take_back()
        self._draining = True
        self._finishing = False
        self._drained_as = cause or self._drained_as
        self._between = self._step
        self._read_to_boundary(True)
        self._drain_on()

    def _receive_to_boundary(self, buffer: memoryview) -> int:
        """Read the rest of the request in transit, and no byte of the next."""
        missing = self.session.missing(CLIENT)
        return self._peers[CLIENT].sock.recv_into(buffer, min(missing, len(buffer)))

    def _drain_on(self) -> None:
        if self.closed or self._lingering is not None:
            return
        session = self.session
        client, broker = self._peers
        if self._finishing:
            whole = session.at_boundary(CLIENT) and session.at_boundary(BROKER) and client.unsent is None
            if client.ended or (whole and not session.pending and not has_unread(client.sock)):
                self.drain()
            else:
                flush_small_sends(client.sock)
            return
        if not client.ended:
            if not session.at_boundary(CLIENT):
                if client.reading:
                    self._read_leftover(client, CLIENT)
                return
            self._unread(CLIENT)
        elif self._unheard is None:  # kproxy cannot distinguish a client that closed from one that still reads
            self._unheard = self._loop.call_later(LINGER_S, self.close, self._drained_as)
        if session.pending or not (broker.ended or session.at_boundary(BROKER)):
            return
        if client.unsent is None and broker.unsent is None:
            self._linger()

    def _linger(self) -> None:
        """Shut down writing after the last answer, and wait LINGER_S at most for the client's end.

        Closing with an unread request would send a reset, which could overtake the last answers.
        """
        client, broker = self._peers
        self._unread(BROKER)
        self._lingering = self._loop.call_later(LINGER_S, self.close, self._drained_as)
        if client.ended:
            self.close(self._drained_as)
            return
        try:
            client.sock.shutdown(socket.SHUT_WR)
            broker.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:  # TLS cannot send its close_notify; the client sees the end after LINGER_S
            pass
        except OSError:
            self.close(self._drained_as)
            return
        self._poller.add_reader(client.fd, self._discard)

    def _discard(self) -> None:
        try:
            if self._peers[CLIENT].sock.recv_into(self._pressure.whole):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.close(self._drained_as)
