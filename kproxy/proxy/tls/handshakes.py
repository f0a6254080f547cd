"""TLS handshakes on threads: one would block the event loop for 0.2 to 1 ms.

Handshakes run on two threads with the lowest priority in the process: established connections come first, and all
connecting clients share the remaining CPU time. The caller limits the time of each handshake.

Bounded: AT_ONCE handshakes with clients at once, of up to 50 KiB each, and as many with brokers. A client takes a place
once its first record is complete; until then the kernel keeps its bytes. Further clients wait in order. While some
wait, kproxy aborts the handshake that has waited longest for its own client, and at least STALLED_S: clients that start
handshakes and leave them open do not block others. Refuses to know certificates, and the use of a connection.
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
_NICE = 10  # a tenth of a core that is otherwise busy
_HANDSHAKE = 0x16  # the type of a client's first record
_HEAD_BYTES = 5  # of a record's header: type, version and length (RFC 8446, 5.1)
_MAX_RECORD_BYTES = 1 << 14
_CLOSE_WAIT = 8  # include/net/tcp_states.h of Linux


class Stalled(TimeoutError):
    """A handshake was aborted because it waited for its client while others waited for its place."""


class Places:
    """A limited number of places for handshakes with clients."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[None]] = deque()
        self._silent: dict[asyncio.Future[None], float] = {}  # waiting for a client -> since when, about in order
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def one(self) -> "AsyncIterator[Place]":
        """Wait for a place and hold it."""
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
                self._leave()  # granted before the cancellation
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
        """Record that a handshake waits for its client until `ready` is done; `since`: now minus its wait so far."""
        self._silent[ready] = since
        self.give_up()

    def goes_on(self, ready: "asyncio.Future[None]") -> None:
        """Record that a handshake has stopped waiting."""
        del self._silent[ready]

    def give_up(self) -> None:
        """Abort stalled handshakes, one per client that waits for a place; check again when the next one stalls."""
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
    """The place of one handshake."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._waited_s = 0.0

    async def readable(self, sock: socket.socket) -> None:
        """Wait for bytes of the client. Raises Stalled."""
        loop = asyncio.get_running_loop()
        if self._waited_s >= STALLED_S and self._places.are_wanted:
            raise Stalled  # the client sends its bytes one by one
        start = loop.time()
        ready = loop.create_future()
        self._places.waits(ready, start - self._waited_s)
        try:
            await readable(sock, ready)
        finally:
            self._places.goes_on(ready)
            self._waited_s += loop.time() - start


class Handshakes:
    """The handshakes of one event loop. All its TLS sockets read from the kernel into `buffer`."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._clients = Places(AT_ONCE)
        self._brokers = asyncio.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(_THREADS, "tls", _yield_to_others)

    async def run(self, sock: TlsSocket) -> None:
        """Run a handshake. Raises EOFError if the peer ends during it, Stalled, ssl.SSLError, and other OSErrors."""
        if not sock.tls.server_side:
            async with self._brokers:
                await self._run(sock, None)
            return
        await first_record(sock)
        if _has_ended(sock):
            raise EOFError("it closed the connection before its TLS handshake was answered")
        async with self._clients.one() as place:
            await self._run(sock, place)

    async def _run(self, sock: TlsSocket, place: Place | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                done = await loop.run_in_executor(self._threads, sock.step)
            except OSError:
                with suppress(OSError):
                    sock.flush()  # the alert with the reason
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
        """Stop the threads; the caller cancels running handshakes."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def first_record(sock: socket.socket) -> bool:
    """Wait for a client's first record in the kernel; returns False for an end or other bytes. Raises OSError."""
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


def _has_ended(sock: socket.socket) -> bool:
    """Whether the peer has sent its FIN: it waits for no answer, and there is no certificate that it could reject."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
    except (AttributeError, OSError):  # not on Linux
        return False


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
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # on Linux for this thread only
