"""A connected TLS socket with the methods of a plain non-blocking one.

Callers need not know that it is TLS: `recv_into`, `recvmsg_into` with the kernel's receive time, `recv` with MSG_PEEK,
`send`, `shutdown` of one direction. While it can do nothing, each raises BlockingIOError, whether TLS wants to read or
to write; a fault of TLS is an ssl.SSLError, which is an OSError.

TLS works on memory (ssl.MemoryBIO), not on the file descriptor, so that 512 KiB take one system call each way instead
of two per record of 16 KiB, and a handshake can run on a thread. Consequences:

- All bytes from the kernel are decrypted in the same call: none wait where epoll does not see them. A short read, a
  handshake, and a read of more than _RECORDS records, which cost 4 us each however small they are, can leave some: then
  `leftover` is true, and the next read needs no event. The same holds for an end directly after bytes. `on_leftover` is
  called in both cases.
- Encrypted bytes cannot be taken back. If the kernel does not take all of them, `send` keeps the rest and returns one
  byte less than it was given: the caller sends that byte again, as after any partial send, and it is reported as sent
  once everything before it has left.
- TLS sends bytes of its own: an alert, a key update. `on_blocked` is called if the kernel does not take them; then call
  `send` when the socket is writable, with no data if there is none.

A new key (KeyUpdate, RFC 8446, 4.6.3) costs OpenSSL 0.1 to 0.2 ms, 50 times as much as a small record, and one call of
OpenSSL processes all its input. OpenSSL therefore gets few records at once, and kproxy closes the connection of a peer
that renews keys without sending data.

Bounded: the undecrypted rest of one read of tiny records, outside of OpenSSL; the encrypted, unsent data of one `send`,
and _MAX_OWN bytes of TLS's own; _MAX_WITHOUT_DATA records without data, and one more for each _DATA_PER_RECORD bytes;
the two BIOs keep up to 2 * 45 KiB of a busy connection, and a few hundred bytes of an idle one. Refuses to know
certificates, names and the meaning of the bytes.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_PIECE = 32 * 1024  # bytes into or out of a BIO at once: a BIO keeps the memory of the largest
_RECORD = 17 * 1024  # bytes of a whole TLS record, which may be incomplete in a BIO
_RECORDS = 256  # per read, about 1 ms; a read has 32 of 16 KiB
_MAX_OWN = 16 * 1024  # bytes of key updates and refused renegotiations, which a peer may cause without reading
_FED_RECORDS = 16  # records that end in one input of OpenSSL
_MAX_WITHOUT_DATA = 32  # records without data: peers send a few session tickets, and a new key after gigabytes
_DATA_PER_RECORD = 4096  # bytes of data that compensate for one record without data
_HEAD = 5  # bytes of a record's header: type, version, length
_PARTS = 512  # buffers per sendmsg; the system takes 1024

_recv_into = socket.socket.recv_into
_recvmsg_into = socket.socket.recvmsg_into
_send = socket.socket.send
_sendmsg = socket.socket.sendmsg


class TlsSocket(socket.socket):
    """Takes over the file descriptor of `raw`, a connected non-blocking socket.

    buffer: filled by the kernel and used only within a call; all TLS sockets of a thread can share it.
    """

    __slots__ = (
        "_ahead",
        "_behind",
        "_buffer",
        "_data_bytes",
        "_ended",
        "_fed",
        "_head",
        "_incoming",
        "_outgoing",
        "_owed",
        "_own_unsent",
        "_record_rest",
        "_said_end",
        "_tls",
        "_unsent",
        "_without_data",
        "leftover",
        "on_blocked",
        "on_leftover",
    )

    def __init__(
        self,
        raw: socket.socket,
        context: ssl.SSLContext,
        buffer: memoryview,
        *,
        server_side: bool,
        server_name: str | None = None,
    ) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side, server_name)
        super().__init__(raw.family, raw.type, raw.proto, raw.detach())
        self.setblocking(False)
        self._buffer = buffer
        self._ahead = b""  # decrypted, and only peeked at so far
        self._behind: Any = b""  # encrypted, and not passed to OpenSSL yet
        self._head = b""  # incomplete header of a record
        self._record_rest = 0  # bytes of a record that were not passed to OpenSSL yet
        self._fed = 0  # records in the last input of OpenSSL, minus those that gave data
        self._data_bytes = 0  # data bytes from that input
        self._without_data = 0.0  # records of all earlier inputs without data, minus those compensated by data
        self._unsent: list[Any] = []  # encrypted
        self._owed = False  # the first byte of the next send is already encrypted
        self._own_unsent = 0  # bytes of TLS's own since the last time that nothing was unsent
        self._ended = False  # the peer has sent its end
        self._said_end = False
        self.leftover = False  # a read need not wait for the kernel
        self.on_blocked: Callable[[], None] | None = None
        self.on_leftover: Callable[[], None] | None = None

    @property
    def held_bytes(self) -> int:
        """How many encrypted bytes are unsent or undecrypted."""
        return len(self._behind) + sum(map(len, self._unsent))

    # --- the handshake -----------------------------------------------------------------------------------------------

    @property
    def tls(self) -> ssl.SSLObject:
        """The TLS object, for the peer's certificate, version and cipher once the handshake is done."""
        return self._tls

    def version(self) -> str | None:
        """Return the negotiated TLS version, as "TLSv1.3"; None until the handshake is done."""
        return self._tls.version()

    def step(self) -> bool:
        """Advance the handshake with the received bytes; returns whether it is done. Raises ssl.SSLError.

        It uses no file descriptor, and holds the interpreter's lock for hardly any of its time: run it on a thread.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._behind = self._incoming.read()  # begins with a record: OpenSSL takes no byte in advance
        self.leftover = bool(self._behind) or self._tls.pending() > 0
        return True

    def fetch(self) -> bool:
        """Receive bytes of the handshake; returns False if the peer has ended. Raises BlockingIOError."""
        count = _recv_into(self, self._buffer, _RECORD)
        self._incoming.write(self._buffer[:count])
        return count > 0

    def flush(self) -> None:
        """Send the encrypted bytes. Raises BlockingIOError while the kernel does not take all of them."""
        if self._outgoing.pending:
            self._unsent.append(self._outgoing.read())
        if self._unsent and not self._push():
            raise BlockingIOError

    # --- reading -----------------------------------------------------------------------------------------------------

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer)
        if nbytes:
            view = view[:nbytes]
        if self.leftover or self._ahead:
            count = self._rest(view)
            if count or self._ended:
                return count
            if self._behind:
                raise BlockingIOError
        got = _recv_into(self, self._buffer, min(max(len(view) - _RECORD, _RECORD), len(self._buffer)))
        if not got or self._ended:
            return 0
        count = self._decrypt(view, got)
        if not count and not self._ended:
            raise BlockingIOError
        return count

    def recvmsg_into(self, buffers: Any, ancbufsize: int = 0, flags: int = 0) -> tuple[int, list[Any], int, Any]:
        """Like `recv_into`, for one buffer; the ancillary data is the kernel's for the bytes that it gave."""
        (view,) = buffers
        if self.leftover or self._ahead:
            count = self._rest(view)
            if count or self._ended:
                return count, [], 0, None
            if self._behind:
                raise BlockingIOError
        limit = max(len(view) - _RECORD, _RECORD)
        got, ancillary, flags, address = _recvmsg_into(self, [self._buffer[:limit]], ancbufsize, flags)
        if not got or self._ended:
            return 0, ancillary, flags, address
        count = self._decrypt(view, got)
        if not count and not self._ended:
            raise BlockingIOError
        return count, ancillary, flags, address

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receive like a plain socket; the only flag is MSG_PEEK, which repeats the bytes of the first such read."""
        if flags & socket.MSG_PEEK and self._ahead:
            return self._ahead[:bufsize]
        view = memoryview(bytearray(bufsize))
        data = bytes(view[: self.recv_into(view)])
        if flags & socket.MSG_PEEK:
            self._ahead = data
        return data

    def _rest(self, view: memoryview) -> int:
        """Return bytes that are available without the kernel."""
        count = min(len(view), len(self._ahead))
        if count:
            view[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
        if self.leftover and count < len(view):
            count += self._decrypt(view[count:], 0)
        return count

    def _decrypt(self, view: memoryview, got: int) -> int:
        """Decrypt the first bytes of the shared buffer into `view`, after those left by earlier reads."""
        incoming = self._incoming
        read = self._tls.read
        room = len(view)
        count = at = 0
        left = fed_left = _RECORDS
        fed_count = 0
        buffer: Any = self._buffer
        feeds = True
        if self._behind:
            buffer, got, self._behind = self._behind, len(self._behind), b""
            feeds = not incoming.pending
        self.leftover = False
        try:
            while True:
                if feeds and at < got:
                    self._fed -= fed_left - left
                    self._data_bytes += count - fed_count
                    fed_left, fed_count = left, count
                    end = self._piece_end(buffer, at, got)
                    incoming.write(buffer[at:end])
                    at = end
                feeds = True
                before = left
                try:
                    while incoming.pending or count == 0:
                        n = read(room - count, view[count:])
                        if not n:
                            self._end(count)
                            return count
                        count += n  # type: ignore[operator]
                        left -= 1
                        if count == room or not left:
                            self._leave(buffer[at:got])
                            return count
                except ssl.SSLWantReadError:
                    if left == before and at < got:  # an input without data: it costs as much
                        self._leave(buffer[at:got])
                        return count
                except ssl.SSLZeroReturnError:  # an end after our own
                    self._end(count)
                    return count
                if at >= got:
                    return count
        finally:
            self._fed -= fed_left - left
            self._data_bytes += count - fed_count
            if self._outgoing.pending:
                own = self._outgoing.read()
                self._unsent.append(own)
                self._push_own()
                self._own_unsent = self._own_unsent + len(own) if self._unsent else 0
                if self._own_unsent > _MAX_OWN:
                    raise ssl.SSLError("it causes answers of TLS itself again and again, and reads none of them")

    def _piece_end(self, buffer: Any, at: int, got: int) -> int:
        """Return the end of OpenSSL's next input: after _FED_RECORDS records or _PIECE bytes. Raises ssl.SSLError.

        OpenSSL must have processed its previous input.
        """
        without_data = self._without_data + max(0, self._fed) - self._data_bytes / _DATA_PER_RECORD
        self._without_data = max(0.0, without_data)
        if without_data > _MAX_WITHOUT_DATA:
            raise ssl.SSLError("it sends records without data, such as new keys, again and again")
        self._data_bytes = self._fed = 0
        limit = min(got, at + _PIECE)
        if self._head:
            known = len(self._head)
            self._head += bytes(buffer[at : min(at + _HEAD - known, limit)])
            at += len(self._head) - known
            if len(self._head) < _HEAD:
                return at
            self._record_rest = self._head[3] << 8 | self._head[4]
            self._head = b""
            fed = 0
        else:
            fed = 0 if self._record_rest else -1
        at += self._record_rest
        self._record_rest = 0
        while at <= limit:
            fed += 1
            if fed == _FED_RECORDS:
                break
            if at + _HEAD > limit:
                self._head = bytes(buffer[at:limit])
                at = limit
                break
            at += _HEAD + (buffer[at + 3] << 8 | buffer[at + 4])
        else:
            self._record_rest = at - limit
            at = limit
        self._fed = fed
        return at

    def _leave(self, rest: Any) -> None:
        """Keep the undecrypted rest for the next read: this one has done its share of work."""
        self._behind = rest if isinstance(rest, memoryview) and isinstance(rest.obj, bytes) else memoryview(bytes(rest))
        self.leftover = bool(rest or self._incoming.pending or self._tls.pending())
        if self.leftover and self.on_leftover is not None:
            self.on_leftover()

    def _end(self, count: int) -> None:
        """Record the peer's end: every later read reports it, without an event of the socket."""
        self._ended = self.leftover = True
        if count and self.on_leftover is not None:
            self.on_leftover()

    # --- writing -----------------------------------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> int:
        if self._unsent and not self._push():
            raise BlockingIOError
        size = len(data)
        at = 0
        if self._owed and size:
            self._owed = False
            at = 1
        if at == size:
            return size
        write = self._tls.write
        outgoing = self._outgoing
        if size - at <= _PIECE:
            write(data[at:] if at else data)
            encrypted = outgoing.read()
            try:
                sent = _send(self, encrypted)
            except (BlockingIOError, InterruptedError):
                sent = 0
            if sent == len(encrypted):
                return size
            self._unsent.append(memoryview(encrypted)[sent:])
        else:
            view = memoryview(data)
            unsent = self._unsent
            for start in range(at, size, _PIECE):
                write(view[start : start + _PIECE])
                unsent.append(outgoing.read())
            if self._push():
                return size
        self._owed = True
        if size == 1:
            raise BlockingIOError
        return size - 1

    def shutdown(self, how: int) -> None:
        """End the writing direction with a close_notify. Raises BlockingIOError until that is possible: then retry."""
        if how != socket.SHUT_RD and not self._said_end:
            self._said_end = True
            with suppress(ssl.SSLError, ValueError):  # WantRead, as the peer has not ended; or the peer is gone
                self._tls.unwrap()
        self.flush()
        super().shutdown(how)

    def _push(self) -> bool:
        """Send the encrypted bytes; returns whether all have left. Raises OSError."""
        unsent = self._unsent
        while unsent:
            try:
                sent = _sendmsg(self, unsent[:_PARTS])
            except (BlockingIOError, InterruptedError):
                return False
            gone = 0
            while gone < len(unsent) and sent >= len(unsent[gone]):
                sent -= len(unsent[gone])
                gone += 1
            del unsent[:gone]
            if sent:
                unsent[0] = memoryview(unsent[0])[sent:]
        return True

    def _push_own(self) -> None:
        """Send TLS's own bytes, without raising a fault to a reader."""
        try:
            if not self._push() and self.on_blocked is not None:
                self.on_blocked()
        except OSError:
            self._unsent.clear()  # the next read or send raises the cause
