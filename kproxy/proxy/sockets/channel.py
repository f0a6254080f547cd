"""Messages with file descriptors between two processes of one kproxy: complete, in order, never blocking the loop.

A message is a name and values, pickled: both ends run the same program, and nobody else can reach the socket pair. Long
messages are split into packets. `ask` awaits the reply; `ask_now` blocks, for callers that cannot await (a session's
transform). A channel ends once, when the other process has ended or no longer reads.

Bounded: MAX_WAITING packets that the other process has not read yet, MAX_MESSAGE bytes per message. Refuses to know the
meaning of messages.
"""

import asyncio
import logging
import pickle
import select
import socket
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from kproxy.proxy.log_limiter import LogLimiter

PACKET_BYTES = 48 * 1024
MAX_MESSAGE = 64 << 20
MAX_WAITING = 8192
MAX_DESCRIPTORS = 8  # per message
BEAT = "beat"  # request to check that the other event loop runs
_PACKETS_PER_TURN = 64
_LAST, _MORE = b"\0", b"\1"
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)

Handler = Callable[..., Any]
Answer = Callable[..., Any]

log = logging.getLogger("kproxy.processes")


class Gone(Exception):
    """The other process has ended, or does not answer in time."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. `handlers`: message name -> function of the message's values (and of its descriptors, as `files`).

    If this process has no descriptors left, the message arrives without `files`. The result of a request's handler,
    which may be awaitable, is the reply. `ended()`: called when the other process has ended.
    """

    def __init__(self, sock: socket.socket, handlers: Mapping[str, Handler], ended: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._handlers = handlers
        self._on_end = ended
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._parts: list[bytes] = []
        self._files: list[int] = []
        self._received: deque[tuple[tuple[Any, ...], list[int]]] = deque()  # not handled yet
        self._questions = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_writing = False
        self._limiter = LogLimiter(log)
        self.closed = False
        self.given_up = False  # True: this end closed the channel, since the other process read nothing
        self._loop.add_reader(sock, self._readable)

    # --- sending -----------------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether packets wait that the other process has not read."""
        return bool(self._waiting)

    def send(self, name: str, *values: Any, files: Sequence[int] = ()) -> None:
        """Send a message. Its descriptors are duplicated by the kernel, and stay open until `is_behind` is False."""
        self._send((name, *values), files)

    async def ask(self, name: str, *values: Any, timeout_s: float) -> Any:
        """Return the reply to a request. Raises Gone."""
        number, reply = self._question()
        try:
            self._send(("?", number, name, *values), ())
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise Gone(f"no reply within {timeout_s:g} s") from None
        finally:
            self._replies.pop(number, None)

    async def has_beat(self, patience_s: float) -> bool:
        """Whether the other process answers in time. Retries once, shortly: this process may have been stopped."""
        for timeout_s in (patience_s, patience_s / 6):
            with suppress(Gone):
                await self.ask(BEAT, timeout_s=timeout_s)
                return True
        return False

    def ask_now(self, name: str, *values: Any, timeout_s: float) -> Any:
        """Return the reply to a request, blocking the loop; other messages are handled later. Raises Gone."""
        number, reply = self._question()
        end = monotonic() + timeout_s
        try:
            self._send(("?", number, name, *values), ())
            poll = select.poll()
            while True:
                left_s = end - monotonic()
                if self.closed or left_s <= 0:
                    raise Gone(f"no reply within {timeout_s:g} s")
                poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._waiting else 0))
                if poll.poll(left_s * 1000):
                    self._flush()
                    self._receive()
                for at, (message, _) in enumerate(self._received):
                    if message[0] == "!" and message[1] == number:
                        del self._received[at]
                        return message[2]
        finally:
            self._replies.pop(number, None)
            reply.cancel()
            if self._received:
                self._loop.call_soon(self._handle)

    def _question(self) -> tuple[int, "asyncio.Future[Any]"]:
        if self.closed:
            raise Gone("it is gone")
        self._questions += 1
        reply = self._replies[self._questions] = self._loop.create_future()
        return self._questions, reply

    def _send(self, message: tuple[Any, ...], files: Sequence[int]) -> None:
        if self.closed:
            return
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        last = max(0, len(data) - 1) // PACKET_BYTES * PACKET_BYTES
        for start in range(0, last, PACKET_BYTES):
            self._waiting.append((_MORE + data[start : start + PACKET_BYTES], ()))
        self._waiting.append((_LAST + data[last:], tuple(files)))
        if len(self._waiting) > MAX_WAITING or len(data) > MAX_MESSAGE:
            log.error("%d messages wait for a process that does not read: its channel is closed", len(self._waiting))
            self.given_up = True
            self._end()
        elif not self._is_writing:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                data, files = self._waiting[0]
                if files:
                    socket.send_fds(self._sock, [data], list(files))
                else:
                    self._sock.send(data)
                self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # it has ended: the reader sees the end after its last messages
            self._waiting.clear()
        self._write(bool(self._waiting))

    def _write(self, wanted: bool) -> None:
        if wanted != self._is_writing:
            self._is_writing = wanted
            if wanted:
                self._loop.add_writer(self._sock, self._flush)
            else:
                self._loop.remove_writer(self._sock)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        self._receive()
        self._handle()

    def _receive(self) -> None:
        """Read the available packets into complete messages."""
        for _ in range(_PACKETS_PER_TURN):
            if self.closed:
                return
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    PACKET_BYTES + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:  # it ended before it had read all messages; its own can still be read
                continue
            except OSError:
                data, ancillary, flags = b"", [], 0
            if flags & socket.MSG_CTRUNC:
                text = "no file descriptor is left for what another process hands over: raise the limit (ulimit -n)"
                self._limiter.log(logging.ERROR, "descriptors", text)
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    files = array("i")
                    files.frombytes(content[: len(content) - len(content) % files.itemsize])
                    self._files += files
            if not data:
                self._received.append((("",), []))
                self._loop.remove_reader(self._sock)
                return
            self._parts.append(data[1:])
            if data[:1] == _LAST:
                self._received.append((pickle.loads(b"".join(self._parts)), self._files))
                self._parts, self._files = [], []
        self._loop.call_soon(self._readable)  # may have more; libuv calls the reader of a reset socket once

    def _handle(self) -> None:
        while self._received and not self.closed:
            (name, *values), files = self._received.popleft()
            try:
                self._take(name, values, files)
            except Exception:  # continue with the other messages
                log.exception("a defect of kproxy: a message of another process is not handled")

    def _take(self, name: str, values: list[Any], files: list[int]) -> None:
        if name == "":
            self._end()
        elif name == "!":
            number, value = values
            reply = self._replies.pop(number, None)
            if reply is not None and not reply.done():
                reply.set_result(value)
        elif name == "?":
            number, question, *of = values
            value = None if question == BEAT else self._handlers[question](*of)
            if asyncio.iscoroutine(value):
                task = self._loop.create_task(self._reply(number, value))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._send(("!", number, value), ())
        elif files:
            self._handlers[name](*values, files=files)
        else:
            self._handlers[name](*values)

    async def _reply(self, number: int, value: Any) -> None:
        try:
            self._send(("!", number, await value), ())
        except Exception:  # the requester's wait times out
            log.exception("a defect of kproxy: a question of another process has no answer")

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._on_end()

    def close(self) -> None:
        """Close this end; the other process sees the end."""
        if self.closed:
            return
        self.closed = True
        self._write(False)
        self._loop.remove_reader(self._sock)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(Gone("it is gone"))
                reply.exception()
        for _, files in self._received:
            for file in files:
                with suppress(OSError):
                    socket.close(file)
        self._waiting.clear()
        self._sock.close()
