"""Listening sockets bound by systemd, by a kproxy that is being replaced, or under former settings.

A listener takes the socket of its address from here before it binds a new one. A replacement of kproxy therefore
refuses no client, and clients in a socket's backlog stay there. Bounded by the sockets put in. Refuses to know clusters
and the origin of sockets.
"""

import socket
from collections.abc import Iterator
from typing import NamedTuple

from kproxy.addresses import numeric
from kproxy.proxy.config.addresses import Address


class Given(NamedTuple):
    """A listening socket and its name: a cluster, `CLUSTER/NODE_ID`, `admin`, or ""."""

    name: str
    sock: socket.socket

    @property
    def address(self) -> Address:
        """The address that it listens on."""
        return Address(*self.sock.getsockname()[:2])


class GivenSockets:
    """The given sockets that no listener has taken yet."""

    def __init__(self) -> None:
        self._left: list[Given] = []

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[Given]:
        return iter(tuple(self._left))

    def put(self, name: str, sock: socket.socket) -> None:
        """Add a bound and listening TCP socket; it belongs to the pool until it is taken."""
        sock.setblocking(False)
        self._left.append(Given(name, sock))

    def take(self, host: str, port: int, name: str) -> socket.socket | None:
        """Return the socket that listens there, or None. Port 0 means any port: then name and host must match."""
        for given in self._left:
            at = given.address
            if numeric(at.host) == numeric(host) and (at.port == port if port else given.name == name):
                self._left.remove(given)
                return given.sock
        return None

    def close(self) -> None:
        """Close the sockets that were not taken."""
        for given in self._left:
            given.sock.close()
        self._left.clear()


def takes_both_families(sock: socket.socket) -> bool:
    """Whether an IPv6 socket also accepts IPv4, like one that systemd binds to a bare port."""
    return sock.family == socket.AF_INET6 and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
