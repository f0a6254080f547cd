"""Listening ports: accepting, its limits, and the addresses at which they are reached.

A listener passes connected client sockets on and does not know their use. Accepting pauses, for all listeners of a gate
at once, at its connection limit and while the process has no file descriptors left: a level-triggered accept would
spin. One turn of the event loop accepts at most ACCEPTS_PER_TURN connections of all listeners together. Sockets that
got none of them come first in the next turn, one connection each, so that a flooded port delays no other by more than
its share. Refuses to know Kafka, brokers and routes.
"""

import asyncio
import errno
import ipaddress
import itertools
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kproxy.addresses import numeric, unmapped
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.sockets.given import GivenSockets, takes_both_families
from kproxy.proxy.sockets.redirected import take_any_destination
from kproxy.proxy.sockets.sockets import prepare

ACCEPTS_PER_TURN = 4  # each costs 0.6 ms until it is relayed, and its first read may cost another 1 ms
_OPEN_FILES = "raise the limit of open files (ulimit -n, LimitNOFILE)"
_MEMORY = "the kernel has no memory left for sockets: see net.ipv4.tcp_mem and free -m"
_OUT_OF = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: "raise that of this machine (sysctl fs.file-max), or see which program has them open (lsof)",
    errno.ENOBUFS: _MEMORY,
    errno.ENOMEM: _MEMORY,
}
OUT_OF_DESCRIPTORS = frozenset(_OUT_OF)
_EXHAUSTED_PAUSE_S = 1.0
_UNPRIVILEGED_FROM = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
PRIVILEGED_PORTS = 1024  # where that file is not
MAX_SOCKETS_READ = 50_000  # rows of a kernel table, to find the holder of a port
_LISTENING = "0A"  # TCP_LISTEN of net/tcp_states.h
_RESERVE = (
    "take another port, or keep this one from outgoing connections (sysctl net.ipv4.ip_local_reserved_ports) and end "
    "the one that holds it"
)
_HELD = {
    "listener": "another program listens there, or this kproxy itself (ss -ltnp): stop it, or take another port",
    "connection": f"an outgoing connection of this machine has that port (ss -tnp): {_RESERVE}",
    "": "another program has it, or an outgoing connection of this machine (ss -tanp): stop it, or take another port",
}

Accepted = Callable[[socket.socket, Address], None]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

log = logging.getLogger("kproxy.listen")


class Gate:
    """Counts open connections, and pauses its listeners while no more fit.

    max_sockets: the number of listening sockets with reserved file descriptors; None: no limit. name: for log lines.
    """

    def __init__(self, max_connections: int, *, max_sockets: int | None = None, name: str = "clients") -> None:
        self.max_connections = max_connections
        self.max_sockets = max_sockets
        self.name = name
        self.connections = 0
        self.sockets = 0  # listening
        self.listeners: set[Listener] = set()
        self.given = GivenSockets()  # a listener prefers a socket from here
        self.is_held = False  # clients wait in the backlog
        # Called with a listener's name when the system gives no socket for a client, which waits in the backlog.
        self.starved: Callable[[str], None] = lambda name: None
        self._exhausted: asyncio.TimerHandle | None = None
        self._accepts_left = ACCEPTS_PER_TURN
        self._queue: dict[socket.socket, Listener] = {}  # no accepts left for them in this turn, longest first
        self._limiter = LogLimiter(log)

    @property
    def is_open(self) -> bool:
        return self.connections < self.max_connections and self._exhausted is None and not self.is_held

    def enter(self) -> None:
        self.connections += 1
        if self.connections == self.max_connections:
            text = "%s: %d connections are open, the limit: further ones wait in the listen backlog"
            self._limiter.log(logging.WARNING, "limit", text, self.name, self.connections)
            self._apply()

    def leave(self) -> None:
        self.connections -= 1
        if self.connections == self.max_connections - 1:
            self._apply()

    def limit(self, max_connections: int) -> None:
        """Set the limit of open connections; connections beyond it stay open."""
        self.max_connections = max_connections
        self._apply()

    def hold(self, held: bool) -> None:
        """Stop or resume accepting: clients wait in the listen backlog meanwhile."""
        self.is_held = held
        self._apply()

    def check(self, fault: OSError) -> bool:
        """Whether the fault means that the system gives no more sockets; if so, accepting pauses for a second."""
        if fault.errno not in OUT_OF_DESCRIPTORS:
            return False
        if self._exhausted is None:
            log.error("%s: cannot open a socket: %s; %s", self.name, fault.strerror, _OUT_OF[fault.errno])
            self._exhausted = asyncio.get_running_loop().call_later(_EXHAUSTED_PAUSE_S, self._recovered)
            self._apply()
        return True

    def has_room(self, sockets: int) -> bool:
        """Whether file descriptors are reserved for that many further listening sockets."""
        return self.max_sockets is None or len(self.given) > 0 or self.sockets + sockets <= self.max_sockets

    def take_turn(self) -> bool:
        """Take one of the accepts of this turn of the loop; returns False if none is left."""
        if self._accepts_left == ACCEPTS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._accepts_left -= 1
        return self._accepts_left >= 0

    def queue(self, sock: socket.socket, listener: "Listener") -> None:
        """Put a listening socket with waiting clients at the front of the next turn: this turn has no accepts left.

        The event loop reports the sockets of each turn in the same order.
        """
        self._queue.setdefault(sock, listener)

    def unqueue(self, sock: socket.socket) -> None:
        self._queue.pop(sock, None)

    def _next_turn(self) -> None:
        self._accepts_left = ACCEPTS_PER_TURN
        for sock in tuple(itertools.islice(self._queue, ACCEPTS_PER_TURN)):
            listener = self._queue.pop(sock, None)  # None: closed while another socket was accepted
            if listener is not None and self.take_turn():
                listener.accept_one(sock)

    def _recovered(self) -> None:
        self._exhausted = None
        self._apply()

    def _apply(self) -> None:
        for listener in self.listeners:
            listener.accept(self.is_open)

    def is_ours(self, host: str, port: int) -> bool:
        """Whether a connection to that numeric address, in any notation, would arrive at one of these listeners."""
        return any(listener.port == port and listener.takes(host) for listener in self.listeners)

    def close(self) -> None:
        if self._exhausted is not None:
            self._exhausted.cancel()
            self._exhausted = None
        for listener in tuple(self.listeners):
            listener.close()


class Listener:
    """One port, on every address of its host; it accepts from the start. Raises OSError if it cannot be bound.

    name: identifies its sockets when another process receives them.
    """

    def __init__(
        self, gate: Gate, hosts: Iterable[str], port: int, backlog: int, accepted: Accepted, name: str = ""
    ) -> None:
        self.name = name
        self.gate = gate
        self._loop = asyncio.get_running_loop()
        self._accepted = accepted
        self._accepting = False
        self._sockets = listening(hosts, port, backlog, gate.given, name)
        self.port: int = self._sockets[0].getsockname()[1]
        self._addresses = [numeric(sock.getsockname()[0]) for sock in self._sockets]
        gate.listeners.add(self)
        gate.sockets += len(self._sockets)
        self.accept(gate.is_open)

    @property
    def address(self) -> Address:
        """The first address that it listens on, with the bound port."""
        return Address(*self._sockets[0].getsockname()[:2])

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """One socket for each of its addresses."""
        return tuple(self._sockets)

    def set_backlog(self, backlog: int) -> None:
        """Set how many clients may wait to be accepted."""
        for sock in self._sockets:
            sock.listen(backlog)

    @property
    def hosts(self) -> list[str]:
        """The numeric addresses that it listens on."""
        return [str(address) for address in self._addresses]

    def accept(self, wanted: bool) -> None:
        if wanted != self._accepting:
            self._accepting = wanted
            for sock in self._sockets:
                if wanted:
                    self._loop.add_reader(sock, self._ready, sock)
                else:
                    self._loop.remove_reader(sock)
                    self.gate.unqueue(sock)

    def takes(self, host: str) -> bool:
        """Whether connections to that address of this machine arrive here."""
        address = numeric(host)
        if address is None:
            return False
        if address.is_unspecified:  # dialling 0.0.0.0 or :: means this machine
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        same_family = [own for own in self._addresses if own is not None and own.version == address.version]
        if address in same_family:
            return True
        everywhere = any(own.is_unspecified for own in same_family) or any(map(takes_both_families, self._sockets))
        return everywhere and is_local(str(address))

    def take_any_destination(self) -> bool:
        """Accept connections to any address, as TPROXY needs; returns False if that is not permitted."""
        return take_any_destination(self._sockets)

    def close(self) -> None:
        self.accept(False)
        for sock in self._sockets:
            sock.close()
        if self in self.gate.listeners:
            self.gate.listeners.discard(self)
            self.gate.sockets -= len(self._sockets)

    def accept_one(self, sock: socket.socket) -> bool:
        """Accept a client and pass it on; returns False if none waits, or the system gives no more sockets."""
        try:
            client, peer = sock.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as fault:
            if not self.gate.check(fault):
                return True  # the client has disconnected
            self.gate.starved(self.name)
            return False
        try:
            prepare(client)
        except OSError:
            client.close()
            return True
        self._accepted(client, Address(unmapped(peer[0]), peer[1]))
        return True

    def _ready(self, sock: socket.socket) -> None:
        while self._accepting:
            if not self.gate.take_turn():
                self.gate.queue(sock, self)
                return
            if not self.accept_one(sock):
                return


def normal(address: Address) -> Address:
    """Return the address with its host in the canonical form for comparisons."""
    host = numeric(address.host)
    return address if host is None else Address(sys.intern(str(host)), address.port)


def is_local(host: str) -> bool:
    """Whether the address belongs to this machine: no other can be bound."""
    try:
        with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def resolve(host: str) -> list[str]:
    """Return the addresses of a host to listen on; "" means all of the machine. Raises OSError for an unknown host.

    If some of them belong to this machine, the others are left out: `localhost` is also ::1 in a container without
    IPv6.
    """
    if host == "":
        return ["::", "0.0.0.0"] if is_local("::") else ["0.0.0.0"]
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except ValueError:  # a label is empty or too long, or there is a zero byte
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name") from None
    found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    return [address for address in found if is_local(address)] or found


def why_unbound(fault: OSError, gate: Gate | None = None, hosts: Iterable[str] = (), port: int = 0) -> str:
    """Return why a port could not be bound, and how to fix that.

    gate: its listeners may hold the port. hosts: the numeric addresses to bind; none: any of this machine.
    """
    hosts = tuple(hosts)
    if fault.errno == errno.EADDRINUSE:
        for own in gate.listeners if gate is not None else ():
            if own.port == port and any(map(own.takes, hosts)):
                text = "this kproxy has it already (%s): keep its ports apart (admin, listen, broker_port_base)"
                return text % own.name
        return _HELD[_holder(tuple(map(numeric, hosts)), port)]
    if fault.errno == errno.EADDRNOTAVAIL:
        if hosts and not is_local("::1") and all(":" in host for host in hosts):
            return (
                "IPv6 is switched off here (net.ipv6.conf.*.disable_ipv6): listen at an IPv4 address, such as 0.0.0.0"
            )
        return "that is no address of this machine: see ip address"
    if fault.errno in (errno.EACCES, errno.EPERM):
        privileged = _privileged_ports()
        if port >= privileged:
            return "rules of this machine (SELinux, a seccomp profile) do not let kproxy bind it: allow it there"
        return (
            f"ports below {privileged} need root or CAP_NET_BIND_SERVICE (or sysctl "
            "net.ipv4.ip_unprivileged_port_start)"
        )
    if fault.errno == errno.EAFNOSUPPORT:
        return "IPv6 is switched off here: listen at an IPv4 address, such as 0.0.0.0"
    reason = fault.strerror or str(fault)
    if fault.errno == errno.EINVAL:
        return (
            f"{reason}: a link-local address (fe80::) without its interface, perhaps: listen at another, such as [::]"
        )
    if isinstance(fault, socket.gaierror):
        return f"{reason}: correct the name, or the DNS of this host (getent hosts NAME), or listen at an address"
    if fault.errno in _OUT_OF:
        return f"{reason}: {_OUT_OF[fault.errno]}"
    return reason


def _privileged_ports() -> int:
    """Return the first port that every user may bind."""
    try:
        return int(_UNPRIVILEGED_FROM.read_bytes())
    except (OSError, ValueError):
        return PRIVILEGED_PORTS


def _holder(hosts: tuple[IPAddress | None, ...], port: int) -> str:
    """Return the holder of a port at one of these addresses: "listener", "connection", or "" if there is none."""
    found = ""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):  # listeners come first; the format is in proc(5)
        with suppress(OSError, ValueError), table.open(encoding="ascii", errors="replace") as lines:
            for line in itertools.islice(lines, 1, MAX_SOCKETS_READ):
                _, local, _, state, *_ = (*line.split(maxsplit=4), "", "", "", "")
                words, _, of_port = local.partition(":")
                if int(of_port, 16) == port and (not hosts or any(_excludes(_address(words), host) for host in hosts)):
                    if state == _LISTENING:
                        return "listener"
                    found = "connection"
    return found


def _address(words: str) -> IPAddress | None:
    """Return an address of /proc/net/tcp or tcp6: hexadecimal 32-bit words, each in the machine's byte order."""
    packed = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    return numeric(str(ipaddress.ip_address(packed)))


def _excludes(held: IPAddress | None, wanted: IPAddress | None) -> bool:
    """Whether a socket at `held` prevents another one with its port at `wanted`; None: a name, which may be any."""
    if held is None or wanted is None or held == wanted:
        return True
    if held.is_unspecified:  # [::] may accept IPv4 too
        return held.version in (wanted.version, 6)
    return wanted.is_unspecified and held.version == wanted.version


def listening(
    hosts: Iterable[str], port: int, backlog: int, given: GivenSockets | None = None, name: str = ""
) -> list[socket.socket]:
    """Return a listening socket for each address, all on one port (0: a free one). Raises OSError; none is open then.

    Given sockets are preferred; a given IPv6 socket that also accepts IPv4 covers all addresses of the machine.
    """
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            if host == "0.0.0.0" and any(map(takes_both_families, sockets)):
                continue
            sock = given.take(host, port, name) if given else None
            sock = sock or _bound(host, port)
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
