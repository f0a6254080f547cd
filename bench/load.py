"""The client's end: connections that each keep `depth` requests in flight and check every response.

It is as light as the broker, for the same reason: it checks the size and correlation id of a response, and its bytes
only on request (`compare`). Everything is bounded: in requests, and in time without progress.

`Load` is Python and slower than the proxies: they wait for it, and find one or two ready sockets at a time.
`SaturatingLoad` is the same in C (saturate.c): the proxies are the bottleneck, and find many ready sockets.
"""

import select
import socket
import subprocess
from pathlib import Path
from struct import Struct
from typing import Any

from bench import cases

_BUFFER_BYTES = 1 << 20
_HEAD = Struct(">ii")  # size, correlation id
_NO_PROGRESS_S = 10.0


class LoadError(Exception):
    """A response is late, missing, or not the expected one."""


class _Connection:
    __slots__ = ("full", "got", "head", "left", "next_id", "quota", "requests", "sock", "unsent", "waits_for")

    def __init__(self, sock: socket.socket, requests: bytearray) -> None:
        self.sock = sock
        self.requests = requests  # `depth` requests in a row, so that one call sends all that are due
        self.quota = 0  # requests of this run that have not been sent
        self.next_id = 0
        self.waits_for = 0  # the correlation id of the next response
        self.left = 0  # bytes of the current response that have not arrived
        self.head = b""  # of a response, incomplete
        self.unsent = memoryview(b"")
        self.full = False  # the socket accepts no more for now
        self.got = bytearray()  # only if responses are compared


class SaturatingLoad:
    """A process of saturate.c with open connections to one address; like `Load`, but without comparing bytes."""

    def __init__(self, binary: Path, address: tuple[str, int], request: Path, connections: int, depth: int) -> None:
        self.sent = 0
        command = [str(binary), "load", str(address[1]), str(connections), str(depth), str(request)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "SaturatingLoad":
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()

    def run(self, requests: int) -> None:
        """Send `requests` requests over all connections; returns when all are answered."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{requests}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise LoadError(self._process.communicate()[1].strip())
        self.sent += requests


class Load:
    """Open connections to one address; `run` sends requests over all of them and receives the responses."""

    def __init__(self, address: tuple[str, int], request: bytes, answer: bytes, connections: int, depth: int) -> None:
        self._request_bytes = len(request)
        self._answer = answer
        self._depth = depth
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        for _ in range(connections):
            sock = self._connect(address)
            self._connections[sock.fileno()] = _Connection(sock, bytearray(request * depth))
            self._epoll.register(sock, select.EPOLLIN)

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: Any) -> None:
        for connection in self._connections.values():
            connection.sock.close()
        self._epoll.close()

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        """A non-blocking connection that is ready for use."""
        sock = socket.create_connection(address, timeout=_NO_PROGRESS_S)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    @property
    def sent(self) -> int:
        """Requests so far."""
        return sum(connection.next_id for connection in self._connections.values())

    def run(self, requests: int, *, compare: bool = False) -> None:
        """Send `requests` requests, at least one per connection; with `compare` each response is checked byte by
        byte."""
        connections = self._connections.values()
        for index, connection in enumerate(connections):
            connection.quota = max(1, (requests + index) // len(connections))
        busy = len(connections)
        for connection in connections:
            self._ask(connection, self._depth)
        while busy:
            ready = self._epoll.poll(_NO_PROGRESS_S)
            if not ready:
                raise LoadError(f"no answer within {_NO_PROGRESS_S:g} s")
            for fd, event in ready:
                connection = self._connections[fd]
                if event & select.EPOLLOUT:
                    self._send(connection)
                    continue
                answered = self._receive(connection, compare)
                if not answered:
                    continue
                if connection.quota:
                    self._ask(connection, answered)
                elif connection.waits_for == connection.next_id and not connection.left:
                    busy -= 1

    def _ask(self, connection: _Connection, count: int) -> None:
        """Send the next `count` requests at once, or the rest of the quota."""
        count = min(count, connection.quota)
        connection.quota -= count
        requests = connection.requests
        size = self._request_bytes
        correlation_id = connection.next_id
        for at in range(cases.REQUEST_CORRELATION_ID, count * size, size):
            cases.INT32.pack_into(requests, at, correlation_id)
            correlation_id += 1
        connection.next_id = correlation_id
        connection.unsent = memoryview(requests)[: count * size]
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        """While bytes are unsent, no responses are read, so no further requests are added."""
        unsent = connection.unsent
        try:
            sent = connection.sock.send(unsent)
        except BlockingIOError:
            sent = 0
        connection.unsent = unsent[sent:]
        if sent == len(unsent):
            if connection.full:
                connection.full = False
                self._epoll.modify(connection.sock, select.EPOLLIN)
        elif not connection.full:
            connection.full = True
            self._epoll.modify(connection.sock, select.EPOLLOUT)

    def _receive(self, connection: _Connection, compare: bool) -> int:
        """Read once; returns the number of responses that are complete now."""
        count = connection.sock.recv_into(self._buffer)
        if not count:
            raise LoadError("the connection was closed with answers due")
        view = self._view[:count]
        if compare:
            connection.got += view
        if connection.left > count:
            connection.left -= count
            return 0
        pos = connection.left
        if pos:
            connection.left = 0
            if compare:
                self._compare(connection)
        elif connection.head:
            view = memoryview(connection.head + view)
            count = len(view)
            connection.head = b""
        answered = 1 if pos else 0
        due = len(self._answer) - 4
        while count - pos >= _HEAD.size:
            size, correlation_id = _HEAD.unpack_from(view, pos)
            if size != due or correlation_id != connection.waits_for:
                raise LoadError(
                    f"an answer of {size} bytes with id {correlation_id}, "
                    f"where {due} bytes with id {connection.waits_for} are due"
                )
            connection.waits_for += 1
            pos += 4 + size
            if pos > count:
                connection.left = pos - count
                break
            answered += 1
            if compare:
                self._compare(connection)
        else:
            connection.head = bytes(view[pos:])
        return answered

    def _compare(self, connection: _Connection) -> None:
        """Check that the oldest response received equals the broker's, except for the correlation id."""
        answer, got = self._answer, connection.got
        same_from = _HEAD.size
        if got[same_from : len(answer)] != answer[same_from:]:
            raise LoadError(f"the answer {connection.waits_for - 1} is not what the broker sent")
        del got[: len(answer)]
