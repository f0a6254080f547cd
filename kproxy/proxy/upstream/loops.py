"""Finds connections of kproxy that lead back to it, directly or through another kproxy.

Three tests, each sufficient on its own:
- a dialled address is one of our listeners, in any notation (checked again once connected, since the kernel rewrites
  0.0.0.0, and since address translation may answer with one of ours);
- a connection accepted by one of our listeners has the two ends of a connection that we are making. The client's end
  alone proves nothing: the kernel may give the same local port to a client that dials another destination;
- the client id of kproxy's own requests has a token of this process, and such a request arrived at our own listener.

Kproxies in a row are legal: only the return of our own token proves a loop. The upstream of a loop is refused for
REFUSED_S, or until a request to it is answered. Bounded: our own connections, MAX_QUESTIONS requests and MAX_REFUSED
upstreams. Refuses to know sockets' traffic, clusters and the reaction to a loop.
"""

import errno
import re
import secrets
import socket
from collections.abc import Callable
from time import monotonic

from kproxy import __version__
from kproxy.errors import UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.listeners import normal

REFUSED_S = 5.0  # s; then it is tried again, since the loop may have been corrected
MAX_REFUSED = 4096
MAX_QUESTIONS = 64

IsOurs = Callable[[str, int], bool]  # (numeric address, port): a listener of this kproxy


class LoopGuard:
    """The loop detection of one kproxy. `upstream` is always a numeric address: the one dialled."""

    def __init__(self, is_ours: IsOurs, *, token: str = "", process: int = 0, processes: int = 1) -> None:
        """token, process, processes: a shared secret, this process's number, the count, if there are several."""
        mark = f"kproxy-{__version__}-{token or secrets.token_hex(8)}"
        self._client_id = mark + "-{number}"
        self._question = re.compile(re.escape(mark.encode()) + rb"-([0-9]{1,18})")
        self._is_ours = is_ours
        self._dialled: dict[Address, Address] = {}  # local address of a connection to a broker -> upstream
        self._questions: dict[int, Address] = {}  # number -> upstream; the latest
        self._asked = process  # numbers identify the process: they equal this modulo `processes`
        self._processes = processes
        self._refused: dict[Address, float] = {}  # upstream -> when it last led here

    # --- dialling ----------------------------------------------------------------------------------------------------

    def check(self, address: Address, upstream: Address, *, asking: bool = False) -> None:
        """Raise UpstreamError if a connection to `upstream`, which `address` resolved to, would come back to us.

        asking: kproxy's own request goes there even if it led here before, to learn whether that was fixed.
        """
        if self._is_ours(*upstream):
            raise UpstreamError(
                f"{address} is kproxy itself: a bootstrap address, or a broker's advertised.listeners, names a port "
                "of this kproxy; it must name the broker's own",
                "loop",
            )
        if not asking and self.is_refused(upstream):
            raise loop_through(address)

    def dialled(self, sock: socket.socket, upstream: Address) -> None:
        """Record the local address of a connection that is being made."""
        own, _ = _ends(sock)
        self._dialled[own] = upstream

    def connected(self, address: Address, sock: socket.socket) -> None:
        """Check a new connection by its two addresses; raises as `check` does."""
        own, upstream = _ends(sock)
        self.check(address, upstream, asking=True)
        if own == upstream:
            raise loop_through(address)

    def own_end(self, sock: socket.socket) -> Address:
        """Return our address on a connection, for `closed` after the socket is closed. Raises OSError."""
        return normal(Address(*sock.getsockname()[:2]))

    def closed(self, own: Address) -> None:
        """Forget a connection by its local address."""
        self._dialled.pop(own, None)

    # --- kproxy's own requests ---------------------------------------------------------------------------------------

    def asks(self, upstream: Address) -> str:
        """Return the client id of a request to that upstream; no other process can know it."""
        self._asked += self._processes
        self._questions[self._asked] = upstream
        if len(self._questions) > MAX_QUESTIONS:
            del self._questions[next(iter(self._questions))]
        return self._client_id.format(number=self._asked)

    def answers(self, upstream: Address) -> None:
        """Record an answered request to that upstream: it is no loop, or no longer one."""
        self._refused.pop(normal(upstream), None)

    # --- accepted connections ----------------------------------------------------------------------------------------

    def is_own(self, client: Address, destination: Callable[[], Address]) -> Address | None:
        """Return the upstream that we dialled, if the connection accepted from `client` is our own.

        destination(): the connection's destination, our own address on it or the one before the redirect.
        """
        upstream = self._dialled.get(normal(client))
        if upstream is None or normal(upstream) != normal(destination()):
            return None
        return upstream

    def came_back(self, first_bytes: bytes) -> Address | None:
        """Return the upstream of one of our own requests, if a client's first bytes are that request."""
        question = self._question.search(first_bytes)
        return self._questions.get(int(question[1])) if question else None

    def refuse(self, upstream: Address) -> None:
        """Record that an upstream leads here."""
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[normal(upstream)] = monotonic()

    def is_refused(self, upstream: Address) -> bool:
        """Whether that upstream led here within the last REFUSED_S."""
        found_at = self._refused.get(normal(upstream))
        return found_at is not None and monotonic() - found_at < REFUSED_S


def loop_through(address: Address) -> UpstreamError:
    """Return the fault of an address that leads back here in a way that its text does not show."""
    return UpstreamError(
        f"{address} leads back to this kproxy, through another proxy, a load balancer or rules of the "
        "kernel: bootstrap and brokers' advertised.listeners must lead to brokers",
        "loop",
    )


def _ends(sock: socket.socket) -> tuple[Address, Address]:
    """Return the (own, peer's) address of a connected socket; while it is connecting both are its own."""
    own = normal(Address(*sock.getsockname()[:2]))
    try:
        return own, normal(Address(*sock.getpeername()[:2]))
    except OSError as fault:
        if fault.errno != errno.ENOTCONN:
            raise
        return own, own
