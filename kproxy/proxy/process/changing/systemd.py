"""What systemd and kproxy say to each other: sockets handed in at the start, and how the service stands.

The protocols are those of sd_listen_fds(3) and sd_notify(3), by environment variables, so that nothing of this happens
where they are not set. Refuses to know clusters. Bounded: one datagram per call, WAIT_S for room for it.
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

FIRST_FD = 3  # of those that systemd hands in
EXTEND_S = 30  # how much longer a start may take, said anew at each of the reports
REPORT_S = 5.0  # how often a start that waits for the cluster says so
WAIT_S = 0.2
_MAX_STATUS = 512  # characters

log = logging.getLogger("kproxy.systemd")


def given_sockets(environment: MutableMapping[str, str], given: GivenSockets) -> None:
    """Put the sockets that systemd hands in into the pool, with their names (FileDescriptorName=); ConfigError.

    The variables are removed: they are not about the processes that this one starts.
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
    """Take in one socket; why it cannot be one of ours, or nothing."""
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
    """The faults of given sockets that no listener has taken.

    wanted: where kproxy listens, for the message. is_broker_port: whether it will listen there once a cluster names
    that broker: such a socket stays in the pool.
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
    """Reports to the service manager, where there is one that wants to know (Type=notify)."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._path = environment.get("NOTIFY_SOCKET", "")
        if self._path.startswith("@"):  # of the abstract namespace
            self._path = "\0" + self._path[1:]
        usec = environment.get("WATCHDOG_USEC", "")
        pid = environment.get("WATCHDOG_PID", "")
        is_ours = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isascii() and usec.isdigit() and is_ours else 0.0

    def __bool__(self) -> bool:
        return bool(self._path)

    def say(self, *lines: str) -> None:
        """Send some `NAME=value`; a manager that does not listen is no reason to stop."""
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(WAIT_S)
                sock.sendto("\n".join(lines).encode(), self._path)
        except OSError as fault:
            log.debug("systemd was not told %s: %s", lines[0], fault)

    def status(self, text: str) -> None:
        """The line that `systemctl status` shows."""
        self.say(f"STATUS={' '.join(text.split())[:_MAX_STATUS]}")

    def starting(self, reasons: Sequence[str]) -> None:
        """Not ready yet: without this the manager would give up after TimeoutStartSec."""
        text = " ".join("; ".join(reasons).split())[:_MAX_STATUS]
        self.say(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}", f"STATUS=waiting: {text}")

    def ready(self, text: str) -> None:
        self.say("READY=1", f"MAINPID={os.getpid()}", f"STATUS={' '.join(text.split())[:_MAX_STATUS]}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self.say("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}", "STATUS=reloading")

    def stopping(self, text: str, within_s: float) -> None:
        self.say("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}", f"STATUS={text}")

    async def run(self, not_ready: Callable[[], Sequence[str]], describe: Callable[[], str]) -> None:
        """Say READY=1 as soon as nothing speaks against it; then, for ever, that the loop turns (WatchdogSec=)."""
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
