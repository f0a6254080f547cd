"""Connections to brokers: made without blocking the event loop, refused if they would lead back to kproxy.

Every fault is an UpstreamError, whose cause is a label of metrics. Refuses to know listeners, routes and the bytes of a
connection.
"""

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kproxy.errors import UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.redirected import mark
from kproxy.proxy.sockets.sockets import prepare
from kproxy.proxy.upstream.dial_faults import (
    NO_IPV6,
    RESOLVER,
    UNREACHABLE,
    DialFault,
    SourceAddressError,
    of_connect,
    of_lookup,
)
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.proxy.upstream.resolver import Resolver

_IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h: connect chooses the port, so brokers share the range of ports


class Dialler:
    """Dials brokers for one kproxy. Close such a socket with `close`, or call `loops.closed`.

    mark: the SO_MARK of each of its sockets, for kernel rules that identify them. sources: numeric addresses of this
    machine; connections come from those of the broker's family in turn.
    """

    def __init__(
        self,
        resolver: Resolver,
        loops: LoopGuard,
        timeout_s: float,
        *,
        mark: int | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        self.resolver = resolver
        self.loops = loops
        self.timeout_s = timeout_s
        self._mark = mark
        self._sources: dict[int, Iterator[str]] = {
            family: itertools.cycle(hosts)
            for family in (socket.AF_INET, socket.AF_INET6)
            if (hosts := [host for host in sources if (":" in host) == (family == socket.AF_INET6)])
        }

    async def dial(self, address: Address, *, asking: bool = False) -> socket.socket:
        """Return a connected socket, prepared; tries every address of the name in turn, with its share of the timeout.

        asking: the connection is for kproxy's own request, which also goes to upstreams of loops (LoopGuard.check).
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.timeout_s
        fault: OSError | None = None
        is_resolved = False
        why = UNREACHABLE
        whom = failed = str(address)
        try:
            async with asyncio.timeout_at(end):
                addresses = await self.resolver.addresses(address)
                is_resolved = True
                for left, (family, sockaddr) in zip(range(len(addresses), 0, -1), addresses, strict=True):
                    upstream = Address(*sockaddr[:2])
                    whom = f"{address} ({upstream.host})" if upstream.host != address.host else str(address)
                    self.loops.check(address, upstream, asking=asking)
                    try:
                        async with asyncio.timeout((end - loop.time()) / left):
                            return await self._connected(loop, address, family, sockaddr)
                    except OSError as refused:  # includes TimeoutError
                        cause = _cause(refused, family, sockaddr)
                        # the error of a routable address is more precise
                        if fault is None or cause not in (UNREACHABLE, NO_IPV6):
                            fault, why, failed = refused, cause, whom
                whom = failed
        except OSError as unknown:
            fault = unknown
            if is_resolved:
                why = of_connect(unknown)
            else:
                why = RESOLVER if isinstance(unknown, TimeoutError) else of_lookup(unknown)
        if isinstance(fault, TimeoutError) and fault.errno is None:
            lacks = "did not answer" if is_resolved else "was not looked up"
            raise UpstreamError(f"{whom} {lacks} within {self.timeout_s:g} s", why.cause, why.remedy) from None
        reason = getattr(fault, "strerror", None) or str(fault)
        raise UpstreamError(f"{whom} cannot be reached: {reason}", why.cause, why.remedy) from fault

    async def _connected(
        self, loop: asyncio.AbstractEventLoop, address: Address, family: int, sockaddr: tuple[Any, ...]
    ) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(sock)
            if self._mark is not None:
                mark(sock, self._mark)
            if family in self._sources:
                _bind(sock, next(self._sources[family]))
            await self._connect(loop, sock, sockaddr)
            self.loops.connected(address, sock)
        except BaseException:
            self.close(sock)
            raise
        return sock

    async def _connect(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, sockaddr: tuple[Any, ...]) -> None:
        """Connect without uvloop, which sends every address to its few resolver threads, behind names that hang."""
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
        """Close a socket that `dial` returned."""
        with suppress(OSError):
            self.loops.closed(self.loops.own_end(sock))
        sock.close()


def _bind(sock: socket.socket, source: str) -> None:
    """Bind a socket to a source address of this machine."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    try:
        sock.bind((source, 0))
    except OSError as fault:
        raise SourceAddressError(fault.errno, f"{fault.strerror} ({source})") from None


def _cause(fault: OSError, family: int, sockaddr: tuple[Any, ...]) -> DialFault:
    """Return why an address could not be dialled."""
    why = of_connect(fault)
    if why is UNREACHABLE or (why.cause == "no_port" and not _has_source(family, sockaddr)):
        return NO_IPV6 if family == socket.AF_INET6 else UNREACHABLE
    return why


def _has_source(family: int, sockaddr: tuple[Any, ...]) -> bool:
    """Whether this machine has a source address for a destination: UDP has ports of its own, and sends nothing here."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)
    except OSError as fault:
        return fault.errno != errno.EADDRNOTAVAIL
    return True
