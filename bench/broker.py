"""A broker that stores nothing: every request gets a prepared response with its correlation id.

`python -m bench.broker` binds a free port of 127.0.0.1, prints it, and serves until it is ended. Its cost is not
measured, but it must not be the bottleneck: one thread, one buffer, nothing of a request is read beyond its header, and
as few system calls as the traffic allows. It responds to ApiVersions and Metadata as a cluster of one broker.
"""

import select
import socket
from collections import deque
from itertools import islice
from struct import Struct

from bench import cases

_BUFFER_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16  # responses up to this size are sent together
_HEAD = Struct(">ihhi")  # size, API key, version, correlation id
_PIECES_PER_SEND = 64


class _Connection:
    __slots__ = ("full", "head", "left", "pending", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.head = b""  # of a request whose header is incomplete
        self.left = 0  # bytes of the current request that have not arrived
        self.pending = (0, 0, 0)  # its API key, version and correlation id
        self.unsent: deque[memoryview] = deque()
        self.full = False  # the socket accepts no more for now


class Broker:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)

    def serve(self) -> None:
        accepting = self._listener.fileno()
        while True:
            for fd, ready in self._epoll.poll():
                if fd == accepting:
                    self._accept()
                    continue
                connection = self._connections[fd]
                try:
                    if ready & select.EPOLLOUT:
                        self._send(connection)
                    elif not self._receive(connection):
                        self._close(connection)
                except ConnectionError:
                    self._close(connection)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[sock.fileno()] = _Connection(sock)
        self._epoll.register(sock, select.EPOLLIN)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.sock.fileno()]
        self._epoll.unregister(connection.sock)
        connection.sock.close()

    def _receive(self, connection: _Connection) -> bool:
        """Read once and respond to complete requests. False: the stream has ended."""
        count = connection.sock.recv_into(self._buffer)
        if not count:
            return False
        if connection.left > count:
            connection.left -= count
            return True
        view = self._view[:count]
        answers = bytearray()
        pos = connection.left
        if pos:
            connection.left = 0
            self._answer(connection, answers, *connection.pending)
        elif connection.head:
            view = memoryview(connection.head + view)
            count = len(view)
            connection.head = b""
        while count - pos >= _HEAD.size:
            size, api_key, version, correlation_id = _HEAD.unpack_from(view, pos)
            pos += 4 + size
            if pos > count:
                connection.left = pos - count
                connection.pending = (api_key, version, correlation_id)
                break
            self._answer(connection, answers, api_key, version, correlation_id)
        else:
            connection.head = bytes(view[pos:])
        if answers:
            connection.unsent.append(memoryview(answers))
        self._send(connection)
        return True

    def _answer(
        self, connection: _Connection, answers: bytearray, api_key: int, version: int, correlation_id: int
    ) -> None:
        answer = cases.answer(api_key, version, self.port)
        if len(answer) <= _SMALL_BYTES:
            start = len(answers)
            answers += answer
            cases.INT32.pack_into(answers, start + cases.ANSWER_CORRELATION_ID, correlation_id)
            return
        if answers:
            connection.unsent.append(memoryview(bytes(answers)))
            answers.clear()
        body = cases.ANSWER_CORRELATION_ID + cases.INT32.size
        head = answer[: cases.ANSWER_CORRELATION_ID] + cases.INT32.pack(correlation_id)
        connection.unsent += (memoryview(head), memoryview(answer)[body:])

    def _send(self, connection: _Connection) -> None:
        """Send pending responses; while some remain, the connection waits until it is writable and is not read."""
        unsent = connection.unsent
        while unsent:
            try:
                sent = connection.sock.sendmsg(list(islice(unsent, _PIECES_PER_SEND)))
            except BlockingIOError:
                if not connection.full:
                    connection.full = True
                    self._epoll.modify(connection.sock, select.EPOLLOUT)
                return
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
            if sent:
                unsent[0] = unsent[0][sent:]
        if connection.full:
            connection.full = False
            self._epoll.modify(connection.sock, select.EPOLLIN)


def main() -> None:
    broker = Broker()
    print(broker.port, flush=True)
    broker.serve()


if __name__ == "__main__":
    main()
