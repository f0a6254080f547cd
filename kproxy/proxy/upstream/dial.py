"""Connections to brokers: made without blocking the loop, refused where they would lead back to kproxy.

Everything fails with UpstreamError, whose cause is a label of metrics. Refuses to know listeners, routes and what is
said on a connection.
"""

import asyncio
import errno
import os
import socket
from contextlib import suppress
from typing import Any

from kproxy.errors import UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.listeners import OUT_OF_DESCRIPTORS
from kproxy.proxy.relay.redirected import mark
from kproxy.proxy.relay.sockets import prepare
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.proxy.upstream.resolver import Resolver

_UNREACHABLE = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN))


class Dialler:
    """Dials brokers for one kproxy. Who closes a socket that it made uses `close`, or `loops.closed`.

    mark: what each of its sockets has as SO_MARK, for rules of the kernel to know them by.
    """

    def __init__(self, resolver: Resolver, loops: LoopGuard, timeout_s: float, *, mark: int | None = None) -> None:
        self.resolver = resolver
        self.loops = loops
        self.timeout_s = timeout_s
        self._mark = mark

    async def dial(self, address: Address, *, asking: bool = False) -> socket.socket:
        """A connected socket, prepared; every address of the name is tried in turn, with its share of the time.

        asking: for a question of kproxy's own, which also goes where a loop was found (see LoopGuard.check).
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.timeout_s
        fault: Exception | None = None
        cause = "name"
        try:
            async with asyncio.timeout_at(end):
                addresses = await self.resolver.addresses(address)
                for left, (family, sockaddr) in zip(range(len(addresses), 0, -1), addresses, strict=True):
                    upstream = Address(*sockaddr[:2])
                    self.loops.check(address, upstream, asking=asking)
                    try:
                        async with asyncio.timeout((end - loop.time()) / left):
                            return await self._connected(loop, address, family, sockaddr)
                    except OSError as refused:  # a TimeoutError is one
                        fault = refused
                        cause = _cause(refused)
        except OSError as unknown:
            fault = unknown
        if isinstance(fault, TimeoutError) and fault.errno is None:
            raise UpstreamError(f"{address} did not answer within {self.timeout_s:g} s", "timeout") from None
        reason = getattr(fault, "strerror", None) or str(fault)
        raise UpstreamError(f"{address} cannot be reached: {reason}", cause) from fault

    async def _connected(
        self, loop: asyncio.AbstractEventLoop, address: Address, family: int, sockaddr: tuple[Any, ...]
    ) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(sock)
            if self._mark is not None:
                mark(sock, self._mark)
            await self._connect(loop, sock, sockaddr)
            self.loops.connected(address, sock)
        except BaseException:
            self.close(sock)
            raise
        return sock

    async def _connect(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, sockaddr: tuple[Any, ...]) -> None:
        """uvloop's own sends every address to its few resolver threads, where it would wait behind names that hang."""
        try:
            sock.connect(sockaddr)
        except (BlockingIOError, InterruptedError):
            self.loops.dialled(sock, Address(*sockaddr[:2]))
            connected = asyncio.Event()
            loop.add_writer(sock, connected.set)
            try:
                await connected.wait()
            finally:
                loop.remove_writer(sock)
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number)) from None
        else:
            self.loops.dialled(sock, Address(*sockaddr[:2]))

    def close(self, sock: socket.socket) -> None:
        """Close a socket that `dial` made."""
        with suppress(OSError):
            self.loops.closed(self.loops.own_end(sock))
        sock.close()


def _cause(fault: OSError) -> str:
    if isinstance(fault, TimeoutError):
        return "timeout"
    if fault.errno == errno.ECONNREFUSED:
        return "refused"
    if fault.errno in _UNREACHABLE:
        return "unreachable"
    return "no_descriptor" if fault.errno in OUT_OF_DESCRIPTORS else "other"
