"""Network interfaces by name: lists them, and explains why a requested one cannot be watched.

Duty: `Asked` finds the interfaces that the user named, at the start and again while kproxy runs, since they come and
go. Refuses to know packets.
"""

import errno
import fcntl
import os
import socket
from dataclasses import dataclass
from struct import pack, unpack_from

from kproxy.errors import KproxyError

ANY = "any"  # all interfaces, including later ones

_GET_FLAGS = 0x8913  # SIOCGIFFLAGS
_UP, _LOOPBACK = 0x1, 0x8

_MAY_NOT = (
    "kproxy may not capture packets: it needs CAP_NET_RAW. Start it with sudo (it gives root up once the socket is "
    "open), as a service with AmbientCapabilities=CAP_NET_RAW (deploy/kproxy-watch.service), or in a container with "
    "the capability NET_RAW; docs/watch.md shows each"
)


@dataclass(frozen=True)
class Interface:
    """One interface at a moment; its number changes when it is created again."""

    name: str
    number: int
    is_up: bool
    is_loopback: bool


def all_of_them() -> list[Interface]:
    """Return the interfaces of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return [_look(sock, number, name) for number, name in socket.if_nameindex()]


def _look(sock: socket.socket, number: int, name: str) -> Interface:
    try:
        flags = unpack_from("H", fcntl.ioctl(sock, _GET_FLAGS, pack("16s16x", name.encode()[:15])), 16)[0]
    except OSError:  # it was removed meanwhile
        flags = 0
    return Interface(name, number, bool(flags & _UP), bool(flags & _LOOPBACK))


class Asked:
    """The interfaces to watch."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Check the names. Raises KproxyError if they exclude each other."""
        self.names = tuple(dict.fromkeys(names))
        if ANY in self.names and len(self.names) > 1:
            raise KproxyError(f"--interface any has all interfaces in it: leave {self._others()} out")

    def _others(self) -> str:
        return ", ".join(name for name in self.names if name != ANY)

    @property
    def label(self) -> str:
        """The common label in metrics and tables."""
        return ",".join(self.names)

    @property
    def is_one(self) -> bool:
        """Whether all packets come from one interface, so that there are no duplicates."""
        return len(self.names) == 1 and self.names[0] != ANY

    def found(self) -> list[Interface]:
        """Return the requested interfaces that are up now."""
        there = all_of_them()
        return [each for each in there if each.is_up and (self.names == (ANY,) or each.name in self.names)]

    def missing(self) -> list[str]:
        """Return why some cannot be watched now; empty if all can."""
        there = {each.name: each for each in all_of_them()}
        if self.names == (ANY,):
            return []
        return [
            f"interface {name} is down" if name in there else f"there is no interface {name}"
            for name in self.names
            if name not in there or not there[name].is_up
        ]

    def check(self) -> None:
        """Raise KproxyError if one cannot be watched, with the names of the existing ones."""
        there = all_of_them()
        names = ", ".join(f"{each.name}{'' if each.is_up else ' (down)'}" for each in there)
        if not self.names:
            raise KproxyError(f"name the interface to watch with --interface; there are: {names}; any: all of them")
        known = {each.name: each for each in there}
        for name in self.names:
            if name == ANY:
                continue
            if name not in known:
                raise KproxyError(f"there is no interface {name!r} here; there are: {names}; any: all of them")
            if not known[name].is_up:
                raise KproxyError(f"interface {name} is down: bring it up with `ip link set {name} up`")


def refused(fault: OSError) -> KproxyError:
    """Return the fault to report if the kernel gives no packet socket."""
    if isinstance(fault, PermissionError):
        return KproxyError(_MAY_NOT)
    if fault.errno == errno.ENOMEM:
        return KproxyError("the kernel has no memory for the buffer of packets: make it smaller with --buffer-mib")
    if fault.errno in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EINVAL, errno.ENOPROTOOPT):
        return KproxyError(
            f"this kernel has no packet sockets as kproxy needs them ({fault.strerror}; AF_PACKET with TPACKET_V3): "
            "capture with tcpdump elsewhere, and read it with kproxy convert"
        )
    return KproxyError(f"packets cannot be captured: {fault.strerror or os.strerror(fault.errno or 0)}")
