"""Stands in for a kproxy that was replaced, if its parent knows only the first process's id.

A shell, a container, runit or supervisord watches the process that it started: if that process ended after its drain,
the new kproxy would be considered dead, or be killed. Therefore the first process runs this program until the last
kproxy ends: it passes signals on, follows further upgrades, and ends with the status of the last kproxy. It
imports next to nothing and costs 10 MB. It is not used if systemd is notified of the new process (Type=notify).

Usage: python -P -c SOURCE PID FD: this module's source, then the process id of the running kproxy and a file
descriptor. FD is this end of a socket pair: each successor writes its process id, and the running kproxy detects the
end of the stand-in by the end of the channel. SOURCE is not a module's name, as the package may be removed or replaced
by then.
"""

import os
import select
import signal
import sys
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, also after exec (Linux only; elsewhere a no-op)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def command(source: str, pid: int, fd: int) -> list[str]:
    """Return the command line of a stand-in process. source: the source of this module."""
    return [sys.executable, "-P", "-c", source, str(pid), str(fd)]


def stand_in(pid: int, fd: int) -> int:
    """Pass signals on until the last kproxy has ended; returns its exit status."""
    current = pid
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (*FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # delivers signals that arrived before this program ran
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
    """Return the process id of the running kproxy. fd: must be non-blocking."""
    with suppress(BlockingIOError, ConnectionError):
        while text := os.read(fd, 4096):
            current = int(text.split()[-1])
    return current


def _ended(current: int) -> int | None:
    """Reap children that have ended; return the status of the current one, or None while it runs.

    A kproxy that ended before its predecessor may have been reaped by that one, whose status then stands for both.
    """
    status: int | None = None
    last = 1  # status of the child that was reaped last
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return last if status is None else status
        if pid == 0:
            return status
        code = os.waitstatus_to_exitcode(how)
        last = code if code >= 0 else 128 - code
        if pid == current:
            status = last


def _caught(wake: int) -> bytes:
    try:
        return os.read(wake, 4096)
    except BlockingIOError:
        return b""


if __name__ == "__main__":
    sys.exit(stand_in(int(sys.argv[1]), int(sys.argv[2])))
