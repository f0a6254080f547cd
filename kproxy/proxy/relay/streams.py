"""Reading and writing a non-blocking socket in asyncio's style, plain and TLS alike.

For the few bytes that are said before a relay starts, and for kproxy's own questions; a relay reads by callbacks of its
own. Bounded by what the caller asks for; a caller that must not wait for ever sets a timeout. Refuses to know what the
bytes mean.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_PART = 64 * 1024  # bytes of one read


async def receive(sock: socket.socket, at_most: int) -> bytes:
    """At least one byte and at most so many; nothing: the peer has ended. Raises OSError."""
    try:
        return await _when_ready(sock, lambda: sock.recv(at_most), writes=False)
    except ssl.SSLEOFError:  # its end without a close_notify
        return b""


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes. Raises EOFError if the peer ends before they are here, OSError."""
    data = bytearray()
    while len(data) < count:
        part = await receive(sock, min(count - len(data), _PART))
        if not part:
            raise EOFError("it sent no more")
        data += part
    return bytes(data)


async def send_all(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send all of it. Raises OSError."""
    view = memoryview(data)
    while view:
        part = view[:_PART]  # after WantWrite, TLS wants the same bytes again
        sent = await _when_ready(sock, lambda part=part: sock.send(part), writes=True)  # type: ignore[misc]
        view = view[sent:]


async def handshake(sock: ssl.SSLSocket) -> None:
    """The TLS handshake, whichever side begins it. Raises OSError; ssl.SSLError and its kinds are some."""
    await _when_ready(sock, sock.do_handshake, writes=False)


async def _when_ready(sock: socket.socket, call: Callable[[], T], *, writes: bool) -> T:
    """What `call` returns once it need not wait for bytes or for room. writes: a plain socket waits for room."""
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            for_room = False
        except ssl.SSLWantWriteError:
            for_room = True
        except (BlockingIOError, InterruptedError):
            for_room = writes
        await _ready(sock, for_room)


async def _ready(sock: socket.socket, for_room: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake(*_: Any) -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if for_room else (loop.add_reader, loop.remove_reader)
    add(sock, wake)
    try:
        await ready
    finally:
        remove(sock)
