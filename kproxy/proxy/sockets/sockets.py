"""Options of every relay socket, and reads with the time of arrival."""

import fcntl
import socket
import ssl
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any

READ_BYTES = 512 * 1024  # large bodies cost half as much CPU time as with 256 KiB, as a peer is woken less often
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_SO_TIMESTAMPNS = 35  # Linux asm-generic/socket.h, for the option and its message; not in the socket module
_TIMESPEC = struct.Struct("@qq")  # wall clock seconds and nanoseconds, on systems with a 64-bit long
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)


def prepare(sock: socket.socket) -> None:
    """Set the options of a relay socket: non-blocking, no Nagle, keep-alive probes, receive timestamps.

    Keep-alive ends connections whose peer has silently disappeared. Timestamps (Linux) cost nothing until they are
    read.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def has_unread(sock: socket.socket) -> bool:
    """Whether bytes have arrived that were not read yet."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    try:
        return any(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
    except OSError:
        return False


def flush_small_sends(sock: socket.socket) -> None:
    """Send delayed bytes, and from now on delay less than a full segment until the next call or the end.

    The end of a connection then reaches its peer together with the last bytes. The kernel delays 200 ms at most.
    """
    if hasattr(socket, "TCP_CORK"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)


Receive = Callable[[list[Any], int], tuple[int, list[tuple[int, int, bytes]], int, Any]]


def receive_timed(recvmsg_into: Receive, buffer: Any) -> tuple[int, int | None]:
    """Read into `buffer`; returns (bytes, time of their last segment). Raises as `recvmsg_into` does.

    The time is the kernel's receive time in nanoseconds since the epoch, None if the kernel gives none.
    """
    count, ancillary, _, _ = recvmsg_into([buffer], _ANCILLARY_BYTES)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return count, seconds * 1_000_000_000 + nanoseconds
    return count, None
