"""The original destination of a connection that the kernel has redirected to a listener (Linux).

nftables has two ways. REDIRECT changes the destination, and connection tracking keeps the original one
(SO_ORIGINAL_DST; linux/netfilter_ipv4.h and netfilter_ipv6/ip6_tables.h). TPROXY leaves it unchanged and passes the
connection to a socket that may take any destination (IP_TRANSPARENT): it is the accepted socket's own address. Refuses
to know the broker at a destination, and whether it should be dialled.
"""

import socket
import struct
from collections.abc import Iterable

from kproxy.addresses import numeric, unmapped
from kproxy.proxy.config.addresses import Address

SO_ORIGINAL_DST = 80  # level SOL_IP for IPv4, SOL_IPV6 (IP6T_SO_ORIGINAL_DST) for IPv6; the socket module lacks it
IP_TRANSPARENT = 19  # linux/in.h
IPV6_TRANSPARENT = 75  # linux/in6.h
SO_MARK = 36  # asm-generic/socket.h

_SOCKADDR_IN = struct.Struct("!2xH4s8x")
_SOCKADDR_IN6 = struct.Struct("!2xH4x16s4x")


def original_destination(client: socket.socket) -> Address:
    """Return the numeric address that an accepted client dialled. Raises OSError if it has disconnected.

    If the connection was not redirected, this is the listener's own address.
    """
    host, port = client.getsockname()[:2]
    own = Address(unmapped(host), port)
    try:
        if client.family == socket.AF_INET6 and ":" in own.host:
            port, packed = _SOCKADDR_IN6.unpack(
                client.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, _SOCKADDR_IN6.size)
            )
            family = socket.AF_INET6
        else:
            port, packed = _SOCKADDR_IN.unpack(client.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, _SOCKADDR_IN.size))
            family = socket.AF_INET
    except OSError:  # the kernel does not track this connection, or none
        return own
    return Address(str(numeric(socket.inet_ntop(family, packed))), port)


def take_any_destination(listening: Iterable[socket.socket]) -> bool:
    """Let listening sockets take connections to any address, as TPROXY needs; returns False if not permitted."""
    try:
        for sock in listening:
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)
            else:
                sock.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
    except OSError:  # EPERM without CAP_NET_ADMIN; other systems than Linux lack the option
        return False
    return True


def mark(sock: socket.socket, value: int) -> None:
    """Set a mark, so that rules (`meta mark`) identify kproxy's connections. Raises OSError without CAP_NET_ADMIN."""
    sock.setsockopt(socket.SOL_SOCKET, SO_MARK, value)


def can_mark(value: int) -> bool:
    """Whether this process may set such a mark."""
    with socket.socket() as sock:
        try:
            mark(sock, value)
        except OSError:
            return False
    return True
