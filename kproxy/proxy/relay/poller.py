"""Which sockets of the relays can be read or written: one epoll of ours, inside the event loop.

The loop's own add_reader would do, were it not for resets: libuv stops watching a socket for good once epoll reports an
error on it, after one last call of the reader (uv__poll_io). A relay reads once per event; it would get the bytes that
came before the reset, and never hear of the reset. Here an error is reported like anything else, until it is read.

The interface is the loop's. Refuses to know what the sockets are.
"""

import select
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Any

_EVENTS = 256  # in one turn; then the rest of the loop has its own

Callback = Callable[..., None]


class Poller:
    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._readers: dict[int, Callback] = {}
        self._writers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        loop.add_reader(self._epoll.fileno(), self._ready)

    def close(self) -> None:
        if self._epoll.closed:
            return
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def add_reader(self, fd: int, callback: Callback) -> None:
        known = fd in self._readers or fd in self._writers
        self._readers[fd] = callback
        self._apply(fd, known)

    def remove_reader(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._apply(fd, True)

    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None:
        known = fd in self._readers or fd in self._writers
        self._writers[fd] = callback, args
        self._apply(fd, known)

    def remove_writer(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._apply(fd, True)

    def _apply(self, fd: int, known: bool) -> None:
        """A socket that is neither read nor written is not watched: its end is always reported, and would spin us."""
        events = (select.EPOLLIN if fd in self._readers else 0) | (select.EPOLLOUT if fd in self._writers else 0)
        if not events:
            self._epoll.unregister(fd)
        elif known:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)

    def _ready(self) -> None:
        readers = self._readers
        writers = self._writers
        left = _EVENTS
        while left and (ready := self._epoll.poll(0, left)):  # to come back for them would cost two calls more
            left -= len(ready)
            for fd, events in ready:
                # An error and a hang-up are for both: whoever reads or writes then meets them.
                if events != select.EPOLLOUT and fd in readers:
                    readers[fd]()
                if events != select.EPOLLIN and fd in writers:
                    callback, args = writers[fd]
                    callback(*args)
