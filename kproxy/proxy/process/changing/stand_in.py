"""Stands in for a kproxy that another one follows, where somebody knows only the first one's process id.

A shell, a container, runit or supervisord watches the process that it has started: if that ended with its drain, the
new kproxy would count as dead, or be killed. So the first process stays, as this program, for as long as there is a
kproxy: it passes signals on, learns who follows whom, and ends with the status of the last one. It imports next to
nothing and costs 10 MB. Where systemd is told of the new process (Type=notify), nobody stands in.

Usage: python -P -c SOURCE PID FD: this module's source, then the process id and a file descriptor of the kproxy that
runs now. FD is its end of a socket pair: whoever follows writes its process id, and whoever runs notices by its end
that nobody stands in any more. SOURCE and no name of a module: the package may be removed or replaced by then.
"""

import os
import select
import signal
import sys
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """From now on processes whose parent has gone become this one's children; it outlasts exec. No-op elsewhere."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def command(source: str, pid: int, fd: int) -> list[str]:
    """What becomes of a process that stands in. source: of this module."""
    return [sys.executable, "-P", "-c", source, str(pid), str(fd)]


def stand_in(pid: int, fd: int) -> int:
    """Pass signals on until the last kproxy has ended; returns its exit status."""
    current = pid
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (*FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # those that came before this program ran come now
    watched = [wake_read, fd]
    while True:
        current = follower(fd, current)
        status = _ended(current)
        if status is not None:
            ended, current = current, follower(fd, current)
            if current == ended:
                return status
            continue
        select.select(watched, [], [], 5.0)
        for caught in _caught(wake_read):
            current = follower(fd, current)
            if caught in FORWARDED:
                with suppress(ProcessLookupError):
                    os.kill(current, caught)


def follower(fd: int, current: int) -> int:
    """The process that runs now. fd: reading from it does not block."""
    with suppress(BlockingIOError, ConnectionError):
        while text := os.read(fd, 4096):
            current = int(text.split()[-1])
    return current


def _ended(current: int) -> int | None:
    """Wait for children that have ended; the status of the current one, or None while it runs."""
    status = None
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1 if status is None else status
        if pid == 0:
            return status
        if pid == current:
            code = os.waitstatus_to_exitcode(how)
            status = code if code >= 0 else 128 - code


def _caught(wake: int) -> bytes:
    try:
        return os.read(wake, 4096)
    except BlockingIOError:
        return b""


if __name__ == "__main__":
    sys.exit(stand_in(int(sys.argv[1]), int(sys.argv[2])))
