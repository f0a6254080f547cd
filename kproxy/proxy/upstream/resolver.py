"""Names to addresses, without stopping anything: each name that is asked for has a thread until the system answers.

The loop's own way has four threads for all names and waits for them at the end: a few names that hang would hold up the
rest, and the process when it is to go. Here who asks for a name that is being looked up shares the answer, so there are
never more threads than names, nor than MAX_LOOKUPS: brokers can make names up. Nothing is remembered: brokers move.
Refuses to know what the addresses are for.
"""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any

from kproxy.proxy.config import MAX_PORT, Address

MAX_LOOKUPS = 256

Places = list[tuple[socket.AddressFamily, tuple[Any, ...]]]  # as sockets take them


class Names:
    def __init__(self) -> None:
        self._asked: dict[Address, asyncio.Future[Places]] = {}

    async def addresses(self, of: Address) -> Places:
        """OSError: the name is not known, or that is no port: a broker can say anything."""
        if not 0 < of.port <= MAX_PORT:
            raise OSError(f"{of.port} is no port")
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError, ValueError):
                socket.inet_pton(family, of.host)
                return [(family, tuple(of))]
        asked = self._asked.get(of)
        if asked is None:
            if len(self._asked) >= MAX_LOOKUPS:
                raise OSError(f"{MAX_LOOKUPS} other names are being looked up, and nothing answers")
            loop = asyncio.get_running_loop()
            asked = self._asked[of] = loop.create_future()
            threading.Thread(target=self._look_up, args=(loop, of), name="name", daemon=True).start()
        return await asyncio.shield(asked)

    def _look_up(self, loop: asyncio.AbstractEventLoop, of: Address) -> None:
        found: Places | OSError
        try:
            found = [(info[0], info[4]) for info in socket.getaddrinfo(*of, type=socket.SOCK_STREAM)]
        except OSError as fault:
            found = fault
        except ValueError as fault:  # too long, or with a zero in it
            found = OSError(f"{of.host!r} is no name: {fault}")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._tell, of, found)

    def _tell(self, of: Address, found: Places | OSError) -> None:
        asked = self._asked.pop(of)
        if isinstance(found, OSError):
            asked.set_exception(found)
            asked.exception()  # perhaps nobody waits any more
        else:
            asked.set_result(found)
