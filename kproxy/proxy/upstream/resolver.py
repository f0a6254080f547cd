"""Host names to addresses without blocking the event loop: one thread per name, until the system answers.

The loop's own resolver has four threads for all names and waits for them at exit: a few names that hang would hold up
the rest, and the end of the process. Here concurrent lookups of one name share a thread. At most MAX_LOOKUPS run at
once, since brokers can invent names. Nothing is cached: brokers move. Refuses to know what the addresses are for.
"""

import asyncio
import errno
import socket
import threading
from contextlib import suppress
from typing import Any

from kproxy.proxy.config.addresses import MAX_PORT, Address

MAX_LOOKUPS = 256

SocketAddresses = list[tuple[socket.AddressFamily, tuple[Any, ...]]]  # as accepted by socket.connect


class Resolver:
    def __init__(self) -> None:
        self._lookups: dict[Address, asyncio.Future[SocketAddresses]] = {}

    async def addresses(self, of: Address) -> SocketAddresses:
        """Return the socket addresses of HOST:PORT. Raises OSError: unknown name, invalid port, or no thread."""
        if not 0 < of.port <= MAX_PORT:
            raise OSError(f"{of.port} is no port")
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError, ValueError):
                socket.inet_pton(family, of.host)
                return [(family, tuple(of))]
        lookup = self._lookups.get(of)
        if lookup is None:
            lookup = self._start(of)
        return await asyncio.shield(lookup)

    def _start(self, of: Address) -> "asyncio.Future[SocketAddresses]":
        """Resolve a name on a thread of its own. It is registered only once that thread runs, so it cannot hang."""
        if len(self._lookups) >= MAX_LOOKUPS:
            text = f"{MAX_LOOKUPS} other names are being looked up, and no name server answers: see /etc/resolv.conf"
            raise OSError(errno.EAGAIN, text)
        loop = asyncio.get_running_loop()
        lookup: asyncio.Future[SocketAddresses] = loop.create_future()
        try:
            threading.Thread(target=self._look_up, args=(loop, of), name="resolver", daemon=True).start()
        except (RuntimeError, MemoryError) as fault:
            text = (
                f"no thread can be started to look {of.host!r} up ({fault}): raise the limit of processes (ulimit -u)"
            )
            raise OSError(errno.EAGAIN, text) from fault
        self._lookups[of] = lookup
        return lookup

    def _look_up(self, loop: asyncio.AbstractEventLoop, of: Address) -> None:
        found: SocketAddresses | OSError
        try:
            found = [(info[0], info[4]) for info in socket.getaddrinfo(*of, type=socket.SOCK_STREAM)]
        except OSError as fault:
            found = fault
        except ValueError as fault:  # too long, or with a zero byte
            found = OSError(f"{of.host!r} is no name: {fault}")
        except Exception as fault:  # the waiters must get a result after any fault
            found = OSError(f"{of.host!r} could not be looked up: {fault!r}")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._finish, of, found)

    def _finish(self, of: Address, found: SocketAddresses | OSError) -> None:
        lookup = self._lookups.pop(of)
        if isinstance(found, OSError):
            lookup.set_exception(found)
            lookup.exception()  # mark it as retrieved: perhaps nobody waits any more
        else:
            lookup.set_result(found)
