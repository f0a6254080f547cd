"""Bound ports: accepting, its limits, and knowing which addresses are ours.

A listener hands over connected client sockets and knows nothing of what becomes of them. Accepting stops, for all
listeners at once, at the limit of connections and while the process has no file descriptors left: a level-triggered
accept would spin. Refuses to know Kafka, brokers and routes.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterable

from kproxy.proxy.config import WILDCARDS, Address
from kproxy.proxy.lines import Lines
from kproxy.proxy.relay.sockets import prepare

_ACCEPTS_PER_EVENT = 64
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_EXHAUSTED_PAUSE_S = 1.0

Accepted = Callable[[socket.socket, Address], None]

log = logging.getLogger("kproxy.listen")


class Gate:
    """Counts the open connections, and holds the listeners back where no more can be had."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.connections = 0
        self.listeners: set[Listener] = set()
        self._exhausted: asyncio.TimerHandle | None = None
        self._lines = Lines(log)

    @property
    def is_open(self) -> bool:
        return self.connections < self.max_connections and self._exhausted is None

    def enter(self) -> None:
        self.connections += 1
        if self.connections == self.max_connections:
            text = "%d connections are open, the limit: no more are accepted for now"
            self._lines.say(logging.WARNING, "limit", text, self.connections)
            self._apply()

    def leave(self) -> None:
        self.connections -= 1
        if self.connections == self.max_connections - 1:
            self._apply()

    def check(self, fault: OSError) -> bool:
        """Whether the system gives no more sockets; then accepting waits a moment."""
        if fault.errno not in _EXHAUSTED:
            return False
        if self._exhausted is None:
            log.error("cannot accept: %s; raise the limit of open files (ulimit -n, LimitNOFILE)", fault.strerror)
            self._exhausted = asyncio.get_running_loop().call_later(_EXHAUSTED_PAUSE_S, self._recovered)
            self._apply()
        return True

    def _recovered(self) -> None:
        self._exhausted = None
        self._apply()

    def _apply(self) -> None:
        for listener in self.listeners:
            listener.accept(self.is_open)

    def is_ours(self, host: str, port: int) -> bool:
        """Whether a connection to that address would come to one of these listeners."""
        return any(listener.port == port and listener.takes(host) for listener in self.listeners)

    def close(self) -> None:
        if self._exhausted is not None:
            self._exhausted.cancel()
            self._exhausted = None
        for listener in tuple(self.listeners):
            listener.close()


class Listener:
    """One port, on every address of its host; it accepts from the start."""

    def __init__(self, gate: Gate, hosts: Iterable[str], port: int, backlog: int, accepted: Accepted) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate = gate
        self._accepted = accepted
        self._accepting = False
        self._sockets = listening(hosts, port, backlog)
        self.port: int = self._sockets[0].getsockname()[1]
        self._hosts = frozenset(sock.getsockname()[0] for sock in self._sockets)
        gate.listeners.add(self)
        self.accept(gate.is_open)

    def accept(self, wanted: bool) -> None:
        if wanted != self._accepting:
            self._accepting = wanted
            for sock in self._sockets:
                if wanted:
                    self._loop.add_reader(sock, self._ready, sock)
                else:
                    self._loop.remove_reader(sock)

    def takes(self, host: str) -> bool:
        if host in self._hosts:
            return True
        return not self._hosts.isdisjoint(WILDCARDS) and is_local(host)

    def close(self) -> None:
        self.accept(False)
        for sock in self._sockets:
            sock.close()
        self._gate.listeners.discard(self)

    def _ready(self, sock: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            if not self._accepting:
                return
            try:
                client, peer = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as fault:
                if self._gate.check(fault):
                    return
                continue  # that client has gone already
            try:
                prepare(client)
            except OSError:
                client.close()
                continue
            self._accepted(client, Address(peer[0], peer[1]))


def is_local(host: str) -> bool:
    """Whether an address is one of this machine: only those can be bound."""
    try:
        with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def resolve(host: str) -> list[str]:
    """The addresses of a host to listen on, once and for all; "" means all of the machine. OSError: no such host.

    Of several those of this machine: `localhost` is also ::1 where a container has no IPv6.
    """
    if host == "":
        return ["::", "0.0.0.0"] if is_local("::") else ["0.0.0.0"]
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    return [address for address in found if is_local(address)] or found


def listening(hosts: Iterable[str], port: int, backlog: int) -> list[socket.socket]:
    """A socket on each of these addresses, all on one port (0: any that is free). OSError: then on none."""
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            sock = _bound(host, port)
            sockets.append(sock)
            port = sock.getsockname()[1]
            sock.listen(backlog)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bound(host: str, port: int) -> socket.socket:
    family = _family(host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
