"""Options that every socket of a relay has, and reads that say when the bytes arrived."""

import fcntl
import socket
import ssl
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any

READ_BYTES = 512 * 1024  # of one read: large bodies cost half of what they do at 256 KiB, as a peer is woken less often
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h of Linux, for the option and its message; not in the socket module
_TIMESPEC = struct.Struct("@qq")  # seconds and nanoseconds of the time of day, where a long has 64 bits
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)


def prepare(sock: socket.socket) -> None:
    """What every socket of the relay needs: no blocking, no Nagle, and an end when its peer has silently gone.

    And the time of arrival of what is read, where the kernel has it (Linux): it costs nothing until it is asked for.
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
    """Whether bytes have arrived that nobody has read yet."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    try:
        return any(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
    except OSError:
        return False


def flush_small_sends(sock: socket.socket) -> None:
    """Send what was held back, and from now on hold back less than a full segment, for the next call or the end.

    So the end of a connection reaches its peer together with what was sent last. The kernel waits 200 ms at most.
    """
    if hasattr(socket, "TCP_CORK"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)


Receive = Callable[[list[Any], int], tuple[int, list[tuple[int, int, bytes]], int, Any]]


def receive_timed(recvmsg_into: Receive, buffer: Any) -> tuple[int, int | None]:
    """Read into `buffer`; returns (bytes, when the last segment of them arrived), as recvmsg_into raises.

    The time is nanoseconds since the epoch by the kernel's clock at its receipt, None where the kernel has none.
    """
    count, ancillary, _, _ = recvmsg_into([buffer], _ANCILLARY_BYTES)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return count, seconds * 1_000_000_000 + nanoseconds
    return count, None
