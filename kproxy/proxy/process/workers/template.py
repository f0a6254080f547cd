"""The process that workers are forked from: it has imported all modules, and runs neither an event loop nor a thread.

Neither an event loop nor a process with threads may be forked: a child would find locks of those threads locked for
ever. kproxy therefore forks this process before it starts either, and this process forks each worker on demand,
including replacements. All workers share the memory pages of the imported modules.

It reports the end of each worker to its parent. When the parent has ended, it waits for its workers, which detect the
parent's end themselves and have the drain time to finish, and then ends. It ignores the signals that stop kproxy, as
workers do: the parent handles them.

If it is killed, kproxy has a loop and threads by then and cannot fork another one: a new program that imports all
modules anew takes its place (`anew`). Refuses to know what a worker does.
"""

import asyncio
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import traceback
from array import array
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from kproxy import __version__
from kproxy.proxy.sockets.channel import pair

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
FORK_S = 30.0  # s in which the template must fork a worker
_KILL_AFTER_S = 5.0  # s beyond the workers' drain time
_REAP_S = 0.01

Work = Callable[[socket.socket], None]


class Template:
    """The parent's end: forks workers, and reports their ends."""

    def __init__(self, work: Work, drain_s: float) -> None:
        """Fork the process. `work(sock)`: runs a worker with its end of a channel; the worker ends when it returns."""
        self._work = work
        self._drain_s = drain_s
        self._sock, theirs = pair()
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, every page
        self.pid = os.fork()
        if self.pid == 0:
            self._sock.close()
            _run(lambda: _serve(theirs, work, drain_s))
        theirs.close()
        self._ended: Callable[[int, int], None] = lambda pid, status: None
        self._lost: Callable[[], None] = lambda: None
        self._asked = 0
        self._pids: dict[int, asyncio.Future[int]] = {}

    def watch(self, ended: Callable[[int, int], None], lost: Callable[[], None]) -> None:
        """Call `ended(pid, waitpid's status)` at the end of each worker and `lost()` at the end of the template."""
        self._ended, self._lost = ended, lost
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock, self._readable)

    def _readable(self) -> None:
        """Read all messages: libuv reports a reset only once, so nothing may be left before the end of the channel."""
        while True:
            try:
                data = self._sock.recv(4096)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:  # it ended before it had read all requests; its own messages can still be read
                continue
            except OSError:
                data = b""
            if not data:
                break
            name, *values = pickle.loads(data)
            if name == "forked":
                number, pid = values
                forked = self._pids.get(number)
                if forked is not None and not forked.done():
                    forked.set_result(pid)
            else:
                self._ended(*values)
        asyncio.get_running_loop().remove_reader(self._sock)
        for asked in self._pids.values():
            if not asked.done():
                asked.set_exception(OSError("the process that workers are forked from has gone"))
        self._lost()

    async def fork(self, sock: socket.socket) -> int:
        """Fork a worker that gets this end of a channel; returns its pid. Raises OSError, TimeoutError."""
        self._asked += 1
        number = self._asked
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pids[number] = forked
        try:
            with sock:
                socket.send_fds(self._sock, [b"%d" % number], [sock.fileno()])
            async with asyncio.timeout(FORK_S):
                pid = await forked
        finally:
            del self._pids[number]
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    async def anew(self) -> None:
        """Start another process in place of one that has ended. Raises OSError; calls `lost` if it cannot work."""
        await _reaped(self.pid)
        sock, theirs = pair()  # if this fails, `close` still has the former one
        with theirs:
            self._sock.close()
            self._sock = sock
            self.pid = await asyncio.to_thread(_start, theirs, self._work, self._drain_s)
        self.watch(self._ended, self._lost)

    async def close(self) -> None:
        """Stop the template; its workers are ending and it ends after them."""
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_AFTER_S):
                await _reaped(self.pid)
            return
        self.kill()  # it hangs, or a worker does
        await _reaped(self.pid)

    def kill(self) -> None:
        """Kill a template that hangs."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


async def _reaped(pid: int) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:  # noqa: ASYNC110, ASYNC222 - it does not block; it is a process
            await asyncio.sleep(_REAP_S)


def _start(sock: socket.socket, work: Work, drain_s: float) -> int:
    """Start a template as a separate program, for a process that must not fork; returns its pid."""
    file = sock.fileno()
    begin = f"again({file}, {work.__module__!r}, {work.__qualname__!r}, {drain_s!r}, {__version__!r})"
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import again; {begin}"
    child = subprocess.Popen([sys.executable, "-c", program], pass_fds=[file], stdin=subprocess.DEVNULL)
    child.returncode = 0  # `_reaped` waits for it instead of Popen
    return child.pid


def again(file: int, module: str, work: str, drain_s: float, version: str) -> None:
    """Run the template in place of one that has ended. `version`: that of the running kproxy."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if version != __version__:  # replaced on disk since: the two may not understand each other
        sys.exit(f"kproxy {version} runs, {__version__} is installed: no worker can be forked for it")
    found = getattr(importlib.import_module(module), work)
    gc.collect()
    gc.freeze()
    _run(lambda: _serve(socket.socket(fileno=file), found, drain_s))


def _run(work: Callable[[], None]) -> None:
    """Run a forked process until it ends, without returning into its parent's stack."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit:  # the parent has received the reason
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _serve(sock: socket.socket, work: Work, drain_s: float) -> None:
    os.closerange(3, sock.fileno())  # else sockets passed to kproxy would stay open here after kproxy has closed them
    os.closerange(sock.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    workers: set[int] = set()
    end: float | None = None  # when workers that still run are killed
    while end is None or workers:
        waited = [woken] if end is not None else [woken, sock.fileno()]
        ready, _, _ = select.select(waited, [], [], None if end is None else max(0.0, end - monotonic()))
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        _reap(workers, sock if end is None else None)
        if sock.fileno() in ready:
            try:
                data, ancillary, _, _ = sock.recvmsg(64, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:  # the parent has ended before it read all messages
                data, ancillary = b"", []
            if data and ancillary:
                pid = _fork(sock, array("i", ancillary[0][2])[0], work, (woken, wakes))
                workers |= {pid} if pid > 0 else set()
                _send(sock, ("forked", int(data), pid))
            elif not data:
                end = monotonic() + drain_s + _KILL_AFTER_S
        if end is not None and monotonic() >= end:
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            end += _KILL_AFTER_S


def _fork(sock: socket.socket, file: int, work: Work, others: tuple[int, int]) -> int:
    try:
        pid = os.fork()
    except OSError as fault:
        os.close(file)
        return -(fault.errno or 1)
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock.close()
        for other in others:
            os.close(other)
        _run(lambda: work(socket.socket(fileno=file)))
    os.close(file)
    return pid


def _reap(workers: set[int], sock: socket.socket | None) -> None:
    while workers:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        workers.discard(pid)
        if sock is not None:
            _send(sock, ("ended", pid, status))


def _send(sock: socket.socket, message: tuple[object, ...]) -> None:
    with suppress(OSError):  # the parent has ended
        sock.send(pickle.dumps(message))
