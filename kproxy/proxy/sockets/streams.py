"""Reading and writing a non-blocking socket in asyncio's style, plain (socket.socket) and TLS (TlsSocket) alike.

For the few bytes that are said before a relay starts, and for kproxy's own questions; a relay reads by callbacks of its
own. Bounded by what the caller asks for; a caller that must not wait for ever sets a timeout. Refuses to know what the
bytes mean.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

_PART = 64 * 1024  # bytes of one read


async def receive(sock: socket.socket, at_most: int) -> bytes:
    """At least one byte and at most so many; nothing: the peer has ended. Raises OSError."""
    return await _when_ready(lambda: sock.recv(at_most), lambda: readable(sock))


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
        part = view[:_PART]
        sent = await _when_ready(lambda part=part: sock.send(part), lambda: writable(sock))  # type: ignore[misc]
        view = view[sent:]


async def readable(sock: socket.socket, ready: asyncio.Future[None] | None = None) -> None:
    """Wait until the kernel has bytes of the peer, its end, or its reset; or until somebody else ends `ready`."""
    await _ready(sock, False, ready)


async def writable(sock: socket.socket) -> None:
    """Wait until the kernel has room for more bytes, or knows that the peer takes none."""
    await _ready(sock, True)


async def _when_ready(call: Callable[[], T], wait: Callable[[], Awaitable[None]]) -> T:
    """What `call` returns once it need not wait."""
    while True:
        try:
            return call()
        except (BlockingIOError, InterruptedError):
            await wait()


async def _ready(sock: socket.socket, for_room: bool, ready: asyncio.Future[None] | None = None) -> None:
    loop = asyncio.get_running_loop()
    ready = ready or loop.create_future()

    def wake(*_: Any) -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if for_room else (loop.add_reader, loop.remove_reader)
    add(sock, wake)
    try:
        await ready
    finally:
        remove(sock)
