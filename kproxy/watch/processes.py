"""Finds the process of this host at an end of a connection, and its container, in /proc.

Duty: `look` finds, for ends of connections, the socket (/proc/PID/net/tcp of each network namespace), the process that
has it (/proc/PID/fd) and the container of its control group. It reads all of /proc, so it runs on a thread, and only
for ends that are not known yet.

Other users' processes are visible with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, own ones without. Formats: proc(5).
Bounded by PATIENCE_S per call, and MAX_NAMESPACES. Refuses to know packets, and whose connections those are.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_ntop
from time import monotonic
from typing import NamedTuple

PROC = Path("/proc")
PATIENCE_S = 10.0
MAX_NAMESPACES = 1024

End = tuple[str, int, str, int]  # local address and port, peer address and port

_CONTAINER = re.compile(r"([0-9a-f]{64})(?:\.scope)?(?:/|$)")
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Process(NamedTuple):
    """The process that has a socket."""

    pid: int
    command: str
    container: str | None  # first 12 digits of its id, as container tools show it


def look(wanted: Iterable[End]) -> dict[End, Process]:
    """Return the processes at some ends; processes on other hosts, and those without access, are missing."""
    ends = set(wanted)
    until = monotonic() + PATIENCE_S
    inodes: dict[int, End] = {}
    pids = [int(name) for name in os.listdir(PROC) if name.isdecimal()]  # noqa: PTH208
    for pid in _one_per_namespace(pids):
        if len(inodes) == len(ends) or monotonic() > until:
            break
        for end, inode in _sockets(pid):
            if end in ends:
                inodes[inode] = end
    found: dict[End, Process] = {}
    for pid in pids if inodes else ():
        if len(found) == len(inodes) or monotonic() > until:
            break
        for inode in _open_sockets(pid):
            if inode in inodes and inodes[inode] not in found:
                process = _process(pid)
                if process is not None:
                    found[inodes[inode]] = process
    return found


def _one_per_namespace(pids: list[int]) -> Iterator[int]:
    """Yield one process per network namespace, our own first."""
    seen: set[str] = set()
    for pid in (os.getpid(), *pids):
        with suppress(OSError):
            namespace = os.readlink(PROC / str(pid) / "ns/net")  # noqa: PTH115
            if namespace not in seen and len(seen) < MAX_NAMESPACES:
                seen.add(namespace)
                yield pid


def _sockets(pid: int) -> Iterator[tuple[End, int]]:
    """Yield the TCP sockets of a process's network namespace: (end, inode)."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError), (PROC / str(pid) / "net" / name).open() as lines:
            next(lines, None)
            for line in lines:
                words = line.split()
                inode = int(words[9])
                if inode:
                    yield (*_address(words[1]), *_address(words[2])), inode


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    words = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    if len(words) == 16 and words[:12] == bytes(10) + b"\xff\xff":
        words = words[12:]
    return inet_ntop(AF_INET if len(words) == 4 else AF_INET6, words), int(port, 16)


def _open_sockets(pid: int) -> Iterator[int]:
    folder = PROC / str(pid) / "fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208
            with suppress(OSError):
                match = _SOCKET.fullmatch(os.readlink(folder / name))  # noqa: PTH115
                if match is not None:
                    yield int(match[1])


def _process(pid: int) -> Process | None:
    with suppress(OSError):
        command = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
        found = _CONTAINER.findall((PROC / str(pid) / "cgroup").read_text(errors="replace").replace("\n", "/"))
        return Process(pid, command, found[-1][:12] if found else None)
    return None
