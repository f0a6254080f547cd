"""The in-flight limit: the number of pending requests of a client.

A connection may have FREE_REQUESTS pending, and more while `Pressure` lends them, up to the session's maximum. At the
limit kproxy does not read the client and notices only its end; the client then waits for answers as long as `Pressure`
permits. Refuses to know the requests.
"""

import os
import socket

from kproxy.proxy.relay.pressure import FREE_REQUESTS
from kproxy.proxy.relay.state import RelayState
from kproxy.wire import pairing
from kproxy.wire.events import CLIENT, SIDES

# Seconds that a client's end may wait behind unread bytes while the broker answers nothing. Kafka clients never
# half-close a connection and wait for answers: the client has disconnected.
GONE_S = 5.0

# The number of pending requests: within FREE_REQUESTS, beyond it with a loan, or at the limit. At the limit, and while
# an end waits, only the client's end is read.
FEW, LENT, FULL = range(3)


class InFlightLimit(RelayState):
    """The part of a relay that pauses reading a client at the limit."""

    __slots__ = ()

    def _keep_bytes(self, count: int) -> None:
        if self._pressure.keep(count):
            self._counting.limit_reached("kept_bytes")

    def _limit_in_flight(self) -> None:
        """Lend more requests, or stop reading the client: only its end is noticed then."""
        session = self.session
        if session.in_transit or session.owes:
            return  # the rest of the newest request must be read: it may be the only pending one
        if len(session.pending) >= session.max_in_flight:
            more = min(session.max_in_flight, session.most_in_flight - session.max_in_flight)
            if not more or not self._pressure.lend(more):
                self._fill()
                return
            session.max_in_flight += more
        if self._in_flight_state == FULL:
            self._unfill()
        self._in_flight_state = LENT

    def _thin_out(self) -> None:
        """Give the loan back, since few requests are pending again."""
        if self.session.owes:
            return
        self._give_back()
        if self._in_flight_state == FULL:
            self._unfill()
        self._in_flight_state = FEW

    def _give_back(self) -> None:
        session = self.session
        own = min(session.most_in_flight, FREE_REQUESTS)
        self._pressure.give_back(session.max_in_flight - own)
        session.max_in_flight = own

    def _fill(self) -> None:
        """Stop reading the client at the limit of pending requests; notice only its end."""
        if self._in_flight_state != FULL:
            self._in_flight_state = FULL
            self._unread(CLIENT)
            self._counting.paused(SIDES[CLIENT])
            if self.session.owes:
                self._counting.limit_reached("own_answers")
            elif self.session.max_in_flight < self.session.most_in_flight:
                self._counting.limit_reached("pending_requests")
            elif self.session.most_in_flight < pairing.LIMIT:
                self._counting.limit_reached("max_requests_in_flight")
            self._poller.add_end_reader(self._peers[CLIENT].fd, self._ended_full)

    def _unfill(self) -> None:
        """Read the client again, since fewer requests are pending than the limit."""
        self._in_flight_state = LENT
        self._forget_end()
        self._poller.remove_reader(self._peers[CLIENT].fd)
        self._resume(CLIENT)

    def _ended_full(self) -> None:
        """Handle an end or a reset of the client at the limit of pending requests.

        A client that reset waits for no answers. An end may be a half-close: the broker has GONE_S for its next answer.
        """
        try:
            client = self._peers[CLIENT]
            error = client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._broken(CLIENT, OSError(error, os.strerror(error)))
                return
            self._poller.remove_reader(client.fd)
            # Many timers may end at once, and each drops thousands of pending requests: handle one per turn.
            self._silent = self._loop.call_later(GONE_S, self._poller.later, self._gone)
            self._pressure.add_ended(self._close_ended)
        except Exception:
            self._crashed()

    def _gone(self) -> None:
        if self._silent is not None:
            self.close(f"{SIDES[CLIENT]}_closed")

    def _close_ended(self) -> None:
        """Close the connection, since too many clients that ended wait for answers."""
        self._counting.limit_reached("ended_clients")
        self._gone()

    def _forget_end(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None
            self._pressure.remove_ended(self._close_ended)
