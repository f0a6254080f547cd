"""systemd's protocols: listening sockets passed at the start, and reports of the service's state.

They follow sd_listen_fds(3) and sd_notify(3) and depend on environment variables: without these, nothing happens.
Refuses to know clusters. Bounded: one datagram per call, WAIT_S until the socket is writable.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from time import monotonic_ns

from kproxy.errors import ConfigError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.given import GivenSockets

FIRST_FD = 3  # first file descriptor that systemd passes
EXTEND_S = 30  # s by which each report extends the time limit of the start
REPORT_S = 5.0  # s between reports of a start that waits for the cluster
WAIT_S = 0.2
_MAX_STATUS = 512  # characters

log = logging.getLogger("kproxy.systemd")


def given_sockets(environment: MutableMapping[str, str], given: GivenSockets) -> None:
    """Put the sockets that systemd passes into the pool, with their names (FileDescriptorName=). Raises ConfigError.

    The variables are removed: they do not apply to child processes.
    """
    count, pid, names = (environment.pop(f"LISTEN_{name}", "") for name in ("FDS", "PID", "FDNAMES"))
    environment.pop("LISTEN_PIDFDID", None)
    if not count or pid != str(os.getpid()):
        return
    if not count.isascii() or not count.isdigit():
        raise ConfigError([("LISTEN_FDS", f"{count!r} is no number of sockets")])
    each = names.split(":") if names else []
    faults = []
    for number in range(int(count)):
        name = each[number] if number < len(each) else ""
        fault = _add(FIRST_FD + number, name, given)
        if fault:
            faults.append((f"LISTEN_FDS: socket {number + 1} ({name or 'without a name'})", fault))
    if faults:
        given.close()
        raise ConfigError(faults)


def _add(fd: int, name: str, given: GivenSockets) -> str:
    """Add one socket to the pool; returns why it cannot be used, or an empty text."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as fault:
        return f"file descriptor {fd} is no socket: {fault.strerror}"
    sock.set_inheritable(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return "is no TCP socket: kproxy takes ListenStream= with a port"
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "does not listen: kproxy takes sockets of units with Accept=no"
    given.put("" if name in ("unknown", "connection") or name.endswith(".socket") else name, sock)
    return ""


def unused(
    given: GivenSockets, clusters: Sequence[str], wanted: Sequence[str], is_broker_port: Callable[[Address], bool]
) -> list[tuple[str, str]]:
    """Return the faults of given sockets that no listener has taken.

    wanted: the addresses of kproxy's listeners, for the message. is_broker_port: whether kproxy will listen there once
    a cluster names that broker; then the socket stays in the pool.
    """
    faults = []
    for each in given:
        place = f"systemd's socket {each.name or 'without a name'} at {each.address}"
        if each.name and each.name.partition("/")[0] not in (*clusters, "admin"):
            names = ", ".join((*clusters, "admin"))
            faults.append((place, f"no cluster is called {each.name!r}: FileDescriptorName= is one of {names}"))
            continue
        if is_broker_port(each.address):
            continue
        listens = ", ".join(wanted)
        faults.append((place, f"no listener is there: make ListenStream= equal to one of {listens}, or leave it out"))
    return faults


class Notifier:
    """Reports to the service manager, if it asks for reports (Type=notify)."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._path = environment.get("NOTIFY_SOCKET", "")
        if self._path.startswith("@"):  # abstract namespace
            self._path = "\0" + self._path[1:]
        usec = environment.get("WATCHDOG_USEC", "")
        pid = environment.get("WATCHDOG_PID", "")
        is_ours = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isascii() and usec.isdigit() and is_ours else 0.0

    def __bool__(self) -> bool:
        return bool(self._path)

    def say(self, *lines: str) -> None:
        """Send `NAME=value` lines; kproxy continues if the manager does not read them."""
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(WAIT_S)
                sock.sendto("\n".join(lines).encode(), self._path)
        except OSError as fault:
            log.debug("systemd was not notified of %s: %s", lines[0], fault)

    def status(self, text: str) -> None:
        """Set the line that `systemctl status` shows."""
        self.say(f"STATUS={' '.join(text.split())[:_MAX_STATUS]}")

    def starting(self, reasons: Sequence[str]) -> None:
        """Report the wait for readiness: without it the manager would abort the start after TimeoutStartSec."""
        text = " ".join("; ".join(reasons).split())[:_MAX_STATUS]
        self.say(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}", f"STATUS=waiting: {text}")

    def ready(self, text: str) -> None:
        self.say("READY=1", f"MAINPID={os.getpid()}", f"STATUS={' '.join(text.split())[:_MAX_STATUS]}")

    def reloading(self) -> None:
        """Report the start of a reload; `ready` reports its end."""
        self.say("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}", "STATUS=reloading")

    def stopping(self, text: str, within_s: float) -> None:
        self.say("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}", f"STATUS={text}")

    async def run(self, not_ready: Callable[[], Sequence[str]], describe: Callable[[], str]) -> None:
        """Report READY=1 as soon as kproxy is ready; then, for ever, that the event loop runs (WatchdogSec=)."""
        if not self:
            return
        waits = 0.0
        pause = 0.05
        while reasons := not_ready():
            if waits <= 0:
                self.starting(reasons)
                waits = REPORT_S
            if self.watchdog_s:
                self.say("WATCHDOG=1")
            await asyncio.sleep(pause)
            waits -= pause
        self.ready(describe())
        with suppress(asyncio.CancelledError):
            while self.watchdog_s:
                self.say("WATCHDOG=1")
                await asyncio.sleep(self.watchdog_s / 3)
