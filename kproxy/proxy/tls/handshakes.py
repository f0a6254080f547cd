"""TLS handshakes, off the event loop: one costs 0.2 to 1 ms, during which nobody else would have a turn.

What a handshake computes runs on two threads of lowest priority among those of the process: established connections
come first, and however many clients connect at once, they share what is left. The caller limits the time of each.

Bounded: AT_ONCE handshakes with clients are under way, of up to 50 KiB each, and as many with brokers. A client takes a
place once its first record is complete; until then the kernel keeps its bytes. Further clients wait in order. While
some wait, the handshake that has waited for its own client for longest, and for STALLED_S, is given up, so clients that
begin handshakes and leave them open keep nobody out. Refuses to know certificates, and what follows a handshake.
"""

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from kproxy.proxy.sockets.sockets import READ_BYTES
from kproxy.proxy.sockets.streams import readable, writable
from kproxy.proxy.tls.tls_socket import TlsSocket

AT_ONCE = 1000
STALLED_S = 1.0
_THREADS = 2
_NICE = 10  # a tenth of a core that is busy with other things
_HANDSHAKE = 0x16  # the type of a client's first record
_HEAD_BYTES = 5  # of a record: type, version and length (RFC 8446, 5.1)
_MAX_RECORD_BYTES = 1 << 14


class Stalled(TimeoutError):
    """A handshake was given up: others waited for its place, and it for its client."""


class Places:
    """So many handshakes with clients may be under way."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[None]] = deque()
        self._silent: dict[asyncio.Future[None], float] = {}  # waiting for their clients -> since when, about in order
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def one(self) -> "AsyncIterator[Place]":
        """Wait for a place, and have it."""
        await self._take()
        try:
            yield Place(self)
        finally:
            self._leave()

    async def _take(self) -> None:
        if self._free:
            self._free -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        self._queue.append(granted)
        self.give_up()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._leave()  # granted in the same turn
            raise

    def _leave(self) -> None:
        while self._queue:
            granted = self._queue.popleft()
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1

    @property
    def are_wanted(self) -> bool:
        """Whether clients wait for a place."""
        return bool(self._queue)

    def waits(self, ready: "asyncio.Future[None]", since: float) -> None:
        """A handshake waits for its client until `ready` is done; `since`: now, less the time that it has waited."""
        self._silent[ready] = since
        self.give_up()

    def goes_on(self, ready: "asyncio.Future[None]") -> None:
        """A handshake waits no longer."""
        del self._silent[ready]

    def give_up(self) -> None:
        """Give up stalled handshakes, one for each client that waits for a place; look again when the next stalls."""
        wanted = len(self._queue)
        if not wanted or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        for ready, since in self._silent.items():
            if since + STALLED_S > now:
                self._timer = loop.call_at(since + STALLED_S, self._look_again)
                return
            if not ready.done():
                ready.set_exception(Stalled())
            wanted -= 1
            if not wanted:
                return

    def _look_again(self) -> None:
        self._timer = None
        self.give_up()


class Place:
    """That of one handshake."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._waited_s = 0.0

    async def readable(self, sock: socket.socket) -> None:
        """Wait for bytes of the client. Raises Stalled."""
        loop = asyncio.get_running_loop()
        if self._waited_s >= STALLED_S and self._places.are_wanted:
            raise Stalled  # it sends its bytes one by one
        start = loop.time()
        ready = loop.create_future()
        self._places.waits(ready, start - self._waited_s)
        try:
            await readable(sock, ready)
        finally:
            self._places.goes_on(ready)
            self._waited_s += loop.time() - start


class Handshakes:
    """Those of one event loop. `buffer` is what all its TLS sockets read from the kernel into."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._clients = Places(AT_ONCE)
        self._brokers = asyncio.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(_THREADS, "tls", _yield_to_others)

    async def run(self, sock: TlsSocket) -> None:
        """The whole handshake. Raises EOFError if the peer ends in it, Stalled, ssl.SSLError, and other OSErrors."""
        if not sock.tls.server_side:
            async with self._brokers:
                await self._run(sock, None)
            return
        await first_record(sock)
        async with self._clients.one() as place:
            await self._run(sock, place)

    async def _run(self, sock: TlsSocket, place: Place | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                done = await loop.run_in_executor(self._threads, sock.step)
            except OSError:
                with suppress(OSError):
                    sock.flush()  # the alert that says why
                raise
            await _flushed(sock)
            if done:
                return
            while True:
                with suppress(BlockingIOError):
                    if not sock.fetch():
                        raise EOFError("it closed the connection in the TLS handshake")
                    break
                await (readable(sock) if place is None else place.readable(sock))

    def close(self) -> None:
        """Let the threads end; handshakes under way are the caller's to cancel."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def first_record(sock: socket.socket) -> bool:
    """Wait until a client's first record is in the kernel's buffer; False: it has ended, or says no TLS. OSError."""
    wanted = _HEAD_BYTES
    while True:
        if len(head := _peek(sock, wanted)) < wanted:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            try:
                await readable(sock)
            finally:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            head = _peek(sock, _HEAD_BYTES)
        if wanted > _HEAD_BYTES or len(head) < _HEAD_BYTES or head[0] != _HANDSHAKE:
            return len(head) >= _HEAD_BYTES and head[0] == _HANDSHAKE
        wanted += min(int.from_bytes(head[3:5], "big"), _MAX_RECORD_BYTES)


def _peek(sock: socket.socket, count: int) -> bytes:
    try:
        return socket.socket.recv(sock, count, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return b""


async def _flushed(sock: TlsSocket) -> None:
    while True:
        try:
            sock.flush()
        except BlockingIOError:
            await writable(sock)
        else:
            return


def _yield_to_others() -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # on Linux: of this thread alone
