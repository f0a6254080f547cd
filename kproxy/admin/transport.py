"""The asyncio transport of a TLS connection of the admin port, over a `TlsSocket` whose handshake is done.

The transports of asyncio and uvloop give OpenSSL all bytes of a read in one call: a peer that renews its keys without
end (KeyUpdate, 0.1 to 0.2 ms each) stops the loop for as long as its bytes last. `TlsSocket` bounds that, and ends
such a connection.

Bounded: one read of READ_BYTES, of one connection, in a turn of the loop; HIGH_BYTES and one `write` of unsent bytes
until the protocol is paused, of which _PIECE are encrypted. A closed connection waits LINGER_S for its peer's end:
closing a socket with unread bytes resets the connection, and a reset can overtake the answer. Refuses to know HTTP.
"""

import asyncio
import socket
from collections import deque
from typing import Any

from kproxy.proxy.tls.tls_socket import TlsSocket

READ_BYTES = 16 * 1024
HIGH_BYTES = 64 * 1024
LINGER_S = 1.0
_LOW_BYTES = 16 * 1024
_PIECE = 64 * 1024

_buffer = memoryview(bytearray(READ_BYTES))  # read only within a call


class Readers:
    """The connections that have something to read: one of them reads in a turn of the loop, in order."""

    def __init__(self) -> None:
        self._waiting: dict[TlsTransport, None] = {}
        self._next: asyncio.Handle | None = None

    def add(self, transport: "TlsTransport", loop: asyncio.AbstractEventLoop) -> None:
        self._waiting[transport] = None
        if self._next is None:
            self._next = loop.call_soon(self._turn, loop)

    def remove(self, transport: "TlsTransport") -> None:
        self._waiting.pop(transport, None)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        transport = next(iter(self._waiting), None)
        self._next = None
        if transport is not None:
            del self._waiting[transport]
            if self._waiting:
                self._next = loop.call_soon(self._turn, loop)
            transport.read()


class TlsTransport(asyncio.Transport):
    """Connects `protocol` at once, and owns the socket from then on.

    context: of the handshake. readers: shared by the connections that have their turns in order.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: TlsSocket,
        protocol: asyncio.Protocol,
        context: Any,
        readers: Readers,
    ) -> None:
        try:
            peer = sock.getpeername()
        except OSError:  # it has gone already
            peer = None
        extra = {"socket": sock, "peername": peer, "sockname": sock.getsockname()}
        super().__init__(extra | {"sslcontext": context, "ssl_object": sock.tls})
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._paused = False  # reading
        self._protocol_paused = False
        self._closing = False
        self._lost = False
        self._readers = readers
        self._linger: asyncio.TimerHandle | None = None
        self._writes = False  # waits for room
        sock.on_leftover = self._read_soon
        sock.on_blocked = self._wait_for_room
        protocol.connection_made(self)
        self.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # --- reading -----------------------------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    def pause_reading(self) -> None:
        if self._closing:
            return
        self._paused = True
        self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        if self._closing:
            return
        self._paused = False
        self._loop.add_reader(self._sock, self._read_soon)
        self._read_soon()

    def _read_soon(self) -> None:
        self._readers.add(self, self._loop)

    def read(self) -> None:
        """Read once: it is this connection's turn."""
        if self._paused or self._closing:
            return
        try:
            count = self._sock.recv_into(_buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as fault:  # of TLS, too
            self._fail(fault)
            return
        if not count:
            self._protocol.eof_received()
            self.close()
            return
        self._protocol.data_received(bytes(_buffer[:count]))
        self._read_soon()  # an end or a reset right behind the bytes may have no event of its own

    # --- writing -----------------------------------------------------------------------------------------------------

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes + self._sock.held_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return _LOW_BYTES, HIGH_BYTES

    def write(self, data: Any) -> None:
        if self._closing or not data:
            return
        waits = bool(self._unsent)
        view = memoryview(data)
        self._unsent.append(view if isinstance(view.obj, bytes) else memoryview(bytes(view)))
        self._unsent_bytes += len(view)
        if not waits:
            self._push()
        if self._unsent_bytes > HIGH_BYTES and not self._protocol_paused and not self._lost:
            self._protocol_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return False

    def _push(self) -> None:
        """Send what is unsent, as far as the kernel takes it."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self._sock.send(unsent[0][:_PIECE])
                self._unsent_bytes -= sent
                if sent == len(unsent[0]):
                    unsent.popleft()
                else:
                    unsent[0] = unsent[0][sent:]
            self._sock.send(b"")
        except (BlockingIOError, InterruptedError):
            self._wait_for_room()
        except OSError as fault:
            self._fail(fault)

    def _wait_for_room(self) -> None:
        if not self._writes and not self._lost:
            self._writes = True
            self._loop.add_writer(self._sock, self._has_room)

    def _has_room(self) -> None:
        self._writes = False
        self._loop.remove_writer(self._sock)
        if self._linger is not None:
            self._end()
            return
        self._push()
        if self._lost:
            return
        if self._protocol_paused and self._unsent_bytes <= _LOW_BYTES:
            self._protocol_paused = False
            self._protocol.resume_writing()
        if self._closing and not self._unsent:
            self._end()

    # --- the end -----------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Send what is unsent, then end."""
        if self._closing:
            return
        self._closing = True
        self._loop.remove_reader(self._sock)
        if not self._unsent:
            self._end()

    def abort(self) -> None:
        self._fail(None)

    def _end(self) -> None:
        """End this direction, and wait for the peer's end."""
        if self._linger is None:
            self._linger = self._loop.call_later(LINGER_S, self.abort)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            self._wait_for_room()
        except OSError as fault:
            self._fail(fault)
        else:
            self._loop.add_reader(self._sock, self._drop)

    def _drop(self) -> None:
        """Nobody reads what comes now."""
        try:
            if socket.socket.recv_into(self._sock, _buffer):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.abort()

    def _fail(self, fault: OSError | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._readers.remove(self)
        if self._linger is not None:
            self._linger.cancel()
        self._sock.on_leftover = self._sock.on_blocked = None
        self._unsent.clear()
        self._loop.call_soon(self._gone, fault)

    def _gone(self, fault: OSError | None) -> None:
        try:
            self._protocol.connection_lost(fault)
        finally:
            self._sock.close()
