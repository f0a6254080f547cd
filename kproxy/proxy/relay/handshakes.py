"""TLS handshakes, off the event loop: one costs 0.2 to 1 ms, during which nobody else would have a turn.

What a handshake computes runs on two threads of lowest priority among those of the process: established connections
come first, and however many clients connect at once, they share what is left. Bounded: AT_ONCE handshakes are under
way; further clients wait in order, and so do steps that are to be computed. The caller limits the time of each.
Refuses to know certificates, and what follows a handshake.
"""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kproxy.proxy.relay.sockets import READ_BYTES
from kproxy.proxy.relay.streams import readable, writable
from kproxy.proxy.relay.tls_socket import TlsSocket

AT_ONCE = 1000
_THREADS = 2
_NICE = 10  # a tenth of a core that is busy with other things


class Handshakes:
    """Those of one event loop. `buffer` is what all its TLS sockets read from the kernel into."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._places = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(_THREADS, "tls", _yield_to_others)

    async def run(self, sock: TlsSocket) -> None:
        """The whole handshake. Raises EOFError if the peer ends in it, ssl.SSLError, and other OSErrors."""
        if sock.tls.server_side:
            await readable(sock)  # who says nothing keeps no place
        async with self._places:
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
                    await readable(sock)

    def close(self) -> None:
        """Let the threads end; handshakes under way are the caller's to cancel."""
        self._threads.shutdown(wait=False, cancel_futures=True)


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
