"""The reasons why a connection to a broker cannot be made: the cause, which is a label of metrics, and the remedy.

The kernel and the resolver report numbers; this module translates them for a proxy. Refuses to know addresses and
sockets.
"""

import errno
import socket
from typing import NamedTuple


class DialFault(NamedTuple):
    cause: str  # one of DIAL_CAUSES
    remedy: str


NAME = DialFault("name", "correct the name, or the DNS of this host (getent hosts NAME)")
RESOLVER = DialFault(
    "resolver",
    "no name server answers, or it fails itself (SERVFAIL, REFUSED): check /etc/resolv.conf, its servers, and the way "
    "to them (port 53)",
)
REFUSED = DialFault(
    "refused", "nothing listens there, or a firewall rejects it: is the broker up, is it the right port?"
)
TIMEOUT = DialFault("timeout", "a firewall drops it, or the broker hangs: allow this host, check the port")
UNREACHABLE = DialFault("unreachable", "there is no route: check the network of this host (ip route get ADDRESS)")
NO_IPV6 = DialFault(
    "unreachable",
    "this host has no way there by IPv6: give it one (ip -6 route get ADDRESS), or the broker's name an IPv4 address",
)
NO_HOST = DialFault(
    "unreachable",
    "the host is down, or a router or a firewall refuses the way: check the address (ip neigh, ip route get ADDRESS), "
    "and the rules of both hosts and between them",
)
NOT_PERMITTED = DialFault(
    "not_permitted",
    "rules of this machine forbid it (nft list ruleset, iptables -S, SELinux): allow kproxy's connections to brokers",
)
NO_PORT = DialFault(
    "no_port",
    "no local port is left towards it: widen net.ipv4.ip_local_port_range, give more addresses in "
    "upstream_source_addresses, or run more kproxies (ss -s counts connections)",
)
NO_DESCRIPTOR = DialFault("no_descriptor", "raise the limit of open files (ulimit -n, LimitNOFILE; fs.file-max)")
NO_MEMORY = DialFault("no_descriptor", "the kernel has no memory left for sockets: see net.ipv4.tcp_mem and free -m")
SOURCE_ADDRESS = DialFault(
    "source_address", "it is no address of this machine any more: see ip address, correct upstream_source_addresses"
)
OTHER = DialFault("other", "")

_BY_ERRNO = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: TIMEOUT,
    errno.EHOSTUNREACH: NO_HOST,
    errno.ENETUNREACH: UNREACHABLE,
    errno.EHOSTDOWN: NO_HOST,
    errno.ENOPROTOOPT: NO_HOST,  # this one and the next: ICMP errors of routers and firewalls
    errno.EOPNOTSUPP: NO_HOST,
    errno.ENETDOWN: UNREACHABLE,
    errno.EAFNOSUPPORT: UNREACHABLE,  # IPv6 is switched off
    errno.EINVAL: UNREACHABLE,  # a route of the kind blackhole, or a link-local address without its interface
    errno.EACCES: NOT_PERMITTED,
    errno.EPERM: NOT_PERMITTED,
    errno.EADDRNOTAVAIL: NO_PORT,
    errno.EADDRINUSE: NO_PORT,  # only with a source address
    errno.EAGAIN: NO_PORT,  # according to connect(2)
    errno.EMFILE: NO_DESCRIPTOR,
    errno.ENFILE: NO_DESCRIPTOR,
    errno.ENOBUFS: NO_MEMORY,
    errno.ENOMEM: NO_MEMORY,
}
_UNKNOWN_NAMES = frozenset(
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY") if hasattr(socket, name)
)


class SourceAddressError(OSError):
    """A socket could not be bound to its source address."""


def of_connect(fault: OSError) -> DialFault:
    """Return why a socket could not be created or connected."""
    if isinstance(fault, SourceAddressError) and fault.errno == errno.EADDRNOTAVAIL:
        return SOURCE_ADDRESS
    if isinstance(fault, TimeoutError):
        return TIMEOUT
    return _BY_ERRNO.get(fault.errno or 0, OTHER)


def of_lookup(fault: OSError) -> DialFault:
    """Return why the resolver returned no address: there is no such name, or it could not ask."""
    if not isinstance(fault, socket.gaierror):
        return DialFault("resolver" if fault.errno == errno.EAGAIN else "name", "")  # its text contains the remedy
    if fault.errno in _UNKNOWN_NAMES:
        return NAME
    if fault.errno == socket.EAI_MEMORY:
        return DialFault("resolver", NO_MEMORY.remedy)
    if fault.errno == getattr(socket, "EAI_SYSTEM", None):  # most often the resolver had no descriptor for a socket
        return DialFault("resolver", "see whether it has open files left (ulimit -n), and /etc/resolv.conf")
    return RESOLVER
