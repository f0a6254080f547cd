"""Asynchronous reads and writes on a non-blocking socket, plain (socket.socket) or TLS (TlsSocket).

The start of a connection, before its relay, and kproxy's own requests use them; a relay reads by its own callbacks.
Bounded by the caller's sizes; a caller that must not wait for ever sets a timeout. Refuses to know the meaning of the
bytes.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

_PART = 64 * 1024  # bytes per read


async def receive(sock: socket.socket, at_most: int) -> bytes:
    """Return at least one byte and at most `at_most`; b"" at the end of the stream. Raises OSError."""
    return await _when_ready(lambda: sock.recv(at_most), lambda: readable(sock))


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Return `count` bytes. Raises EOFError if the stream ends before that, OSError."""
    data = bytearray()
    while len(data) < count:
        part = await receive(sock, min(count - len(data), _PART))
        if not part:
            raise EOFError("it sent no more")
        data += part
    return bytes(data)


async def send_all(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send all data. Raises OSError."""
    view = memoryview(data)
    while view:
        part = view[:_PART]
        sent = await _when_ready(lambda part=part: sock.send(part), lambda: writable(sock))  # type: ignore[misc]
        view = view[sent:]


async def readable(sock: socket.socket, ready: asyncio.Future[None] | None = None) -> None:
    """Wait until the socket is readable (bytes, end or reset), or until another task completes `ready`."""
    await _ready(sock, False, ready)


async def writable(sock: socket.socket) -> None:
    """Wait until the socket is writable, or the peer has stopped reading."""
    await _ready(sock, True)


async def _when_ready(call: Callable[[], T], wait: Callable[[], Awaitable[None]]) -> T:
    """Return the result of `call` once it does not block."""
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
