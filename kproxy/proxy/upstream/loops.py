"""Finds connections of kproxy that lead back to it, directly or through another kproxy.

Three tests, each sound on its own:
- an address to be dialled is one of our listeners, in whatever spelling (checked again once connected, since the kernel
  rewrites 0.0.0.0, and since address translation may answer with one of ours);
- a connection that one of our listeners accepted has the two ends of a connection that we are making. Its client's end
  alone proves nothing: for another destination, the kernel gives the same port of this machine to a client too;
- the client id of kproxy's own questions has a token of this process, and such a question arrived at our own listener.

Kproxies in a row are legal: only our own token coming back proves a loop. The upstream that a loop was found through is
refused for REFUSED_S, or until a question to it is answered. Bounded: our own connections, MAX_QUESTIONS questions and
MAX_REFUSED upstreams. Refuses to know sockets' traffic, clusters and what is done about a loop.
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

REFUSED_S = 5.0  # then it is tried again, since what led here may have been corrected
MAX_REFUSED = 4096
MAX_QUESTIONS = 64

IsOurs = Callable[[str, int], bool]  # (numeric address, port): a listener of this kproxy


class LoopGuard:
    """What one kproxy knows of loops through itself. `upstream` is always a numeric address: where a dial went."""

    def __init__(self, is_ours: IsOurs, *, token: str = "", process: int = 0, processes: int = 1) -> None:
        """token, process, processes: of several that are one kproxy, the same secret in all, which one, of how many."""
        mark = f"kproxy-{__version__}-{token or secrets.token_hex(8)}"
        self._client_id = mark + "-{number}"
        self._question = re.compile(re.escape(mark.encode()) + rb"-([0-9]{1,18})")
        self._is_ours = is_ours
        self._dialled: dict[Address, Address] = {}  # own end of a connection to a broker -> upstream
        self._questions: dict[int, Address] = {}  # number -> upstream; the latest
        self._asked = process  # numbers tell who asked: they are this modulo `processes`
        self._processes = processes
        self._refused: dict[Address, float] = {}  # upstream -> when it last led here

    # --- dialling ----------------------------------------------------------------------------------------------------

    def check(self, address: Address, upstream: Address, *, asking: bool = False) -> None:
        """Raise UpstreamError if a connection to `upstream`, which `address` resolved to, would come back to us.

        asking: kproxy's own question goes there even if it led here before, to learn whether that was fixed.
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
        """Remember the own end of a connection that is being made."""
        own, _ = _ends(sock)
        self._dialled[own] = upstream

    def connected(self, address: Address, sock: socket.socket) -> None:
        """Check a connection that has just been made by its own two ends; raises as `check` does."""
        own, upstream = _ends(sock)
        self.check(address, upstream, asking=True)
        if own == upstream:
            raise loop_through(address)

    def own_end(self, sock: socket.socket) -> Address:
        """Our address on a connection: what `closed` wants when the socket has gone. Raises OSError."""
        return normal(Address(*sock.getsockname()[:2]))

    def closed(self, own: Address) -> None:
        """Forget a connection by its own end."""
        self._dialled.pop(own, None)

    # --- questions ---------------------------------------------------------------------------------------------------

    def asks(self, upstream: Address) -> str:
        """The client id of a question to that upstream: nobody else can know it."""
        self._asked += self._processes
        self._questions[self._asked] = upstream
        if len(self._questions) > MAX_QUESTIONS:
            del self._questions[next(iter(self._questions))]
        return self._client_id.format(number=self._asked)

    def answers(self, upstream: Address) -> None:
        """A question to that upstream was answered: it is no loop, or no longer."""
        self._refused.pop(normal(upstream), None)

    # --- what arrives ------------------------------------------------------------------------------------------------

    def is_own(self, client: Address, destination: Callable[[], Address]) -> Address | None:
        """The upstream that we dialled, if the connection that was accepted from `client` is our own.

        destination(): where that connection was going, by our own address on it or as the kernel redirected it.
        """
        upstream = self._dialled.get(normal(client))
        if upstream is None or normal(upstream) != normal(destination()):
            return None
        return upstream

    def came_back(self, first_bytes: bytes) -> Address | None:
        """The upstream of one of our own questions, if a client's first bytes are that question."""
        question = self._question.search(first_bytes)
        return self._questions.get(int(question[1])) if question else None

    def refuse(self, upstream: Address) -> None:
        """From now on that upstream is known to lead here."""
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[normal(upstream)] = monotonic()

    def is_refused(self, upstream: Address) -> bool:
        """Whether that upstream led here within the last REFUSED_S."""
        found_at = self._refused.get(normal(upstream))
        return found_at is not None and monotonic() - found_at < REFUSED_S


def loop_through(address: Address) -> UpstreamError:
    """The fault of an address that leads back here by a way that its text does not show."""
    return UpstreamError(
        f"{address} leads back to this kproxy, through another proxy, a load balancer or rules of the "
        "kernel: bootstrap and brokers' advertised.listeners must lead to brokers",
        "loop",
    )


def _ends(sock: socket.socket) -> tuple[Address, Address]:
    """(own, peer's) address of a connected socket; while it is being connected both are its own."""
    own = normal(Address(*sock.getsockname()[:2]))
    try:
        return own, normal(Address(*sock.getpeername()[:2]))
    except OSError as fault:
        if fault.errno != errno.ENOTCONN:
            raise
        return own, own
