"""Where a client wanted to go, for connections that the kernel has redirected to a listener (Linux).

nftables has two ways. REDIRECT changes the destination, and connection tracking keeps the original one
(SO_ORIGINAL_DST; linux/netfilter_ipv4.h and netfilter_ipv6/ip6_tables.h). TPROXY leaves it as it is and hands the
connection to a socket that may take any destination (IP_TRANSPARENT): it is the accepted socket's own address.
Refuses to know who is behind a destination, and whether it should be dialled.
"""

import socket
import struct
from collections.abc import Iterable

from kproxy.addresses import numeric, unmapped
from kproxy.proxy.config.addresses import Address

SO_ORIGINAL_DST = 80  # for IPv4 at SOL_IP, for IPv6 at SOL_IPV6 (IP6T_SO_ORIGINAL_DST); not in the socket module
IP_TRANSPARENT = 19  # linux/in.h
IPV6_TRANSPARENT = 75  # linux/in6.h
SO_MARK = 36  # asm-generic/socket.h

_SOCKADDR_IN = struct.Struct("!2xH4s8x")
_SOCKADDR_IN6 = struct.Struct("!2xH4x16s4x")


def original_destination(client: socket.socket) -> Address:
    """The numeric address that the client of an accepted connection dialled. Raises OSError: it has gone.

    For a connection that nothing has redirected it is the listener's own address.
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
    except OSError:  # connection tracking does not know it, or is not there at all
        return own
    return Address(str(numeric(socket.inet_ntop(family, packed))), port)


def take_any_destination(listening: Iterable[socket.socket]) -> bool:
    """Let listening sockets take connections to any address, as TPROXY needs; False: that is not permitted."""
    try:
        for sock in listening:
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)
            else:
                sock.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
    except OSError:  # EPERM without CAP_NET_ADMIN; unknown elsewhere than on Linux
        return False
    return True


def mark(sock: socket.socket, value: int) -> None:
    """Set the mark by which rules tell kproxy's own connections (`meta mark`). OSError: it needs CAP_NET_ADMIN."""
    sock.setsockopt(socket.SOL_SOCKET, SO_MARK, value)


def can_mark(value: int) -> bool:
    """Whether this process may set such a mark."""
    with socket.socket() as sock:
        try:
            mark(sock, value)
        except OSError:
            return False
    return True
