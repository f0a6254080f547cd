"""File descriptors: the limit of this process, and the share of each part.

Each part has its own share: an accepted client must get its broker connection, an operator must reach the admin port
while all clients are connected, and neither many brokers nor silent HTTP connections may take clients' descriptors.
Refuses to know sockets.
"""

import fcntl
import logging
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

DEFAULT_CONNECTIONS = 10_000
PER_CONNECTION = 2
ADMIN = 32  # connections
LISTENING = 1024  # sockets; a port on all addresses of IPv4 and IPv6 needs two
OWN = 64  # interpreter, log, recorder, name resolution, requests to brokers
_ASIDE = ADMIN + LISTENING + OWN

log = logging.getLogger("kproxy.server")


class Shares(NamedTuple):
    """The numbers of client connections, admin connections and listening sockets that fit."""

    connections: int
    admin: int
    listening: int
    in_each: int  # client connections per worker


def shares(files: int, connections: int, workers: int = 1) -> Shares:
    """Divide `files` descriptors per process among the parts; `connections` is the number wanted.

    If descriptors are short, clients wait in the listen backlog.
    """
    aside = min(_ASIDE, files // 2)
    in_each = min(connections, max(1, (files - aside) // PER_CONNECTION))
    possible = min(connections, in_each * workers)
    if aside == _ASIDE:
        listening = max(LISTENING, files - OWN - ADMIN - PER_CONNECTION * in_each)
        return Shares(possible, ADMIN, listening, in_each)
    return Shares(possible, min(ADMIN, max(2, aside // 8)), max(2, aside // 4), in_each)


def reserve(max_connections: int | None, workers: int = 1, *, warns: bool = True) -> Shares:
    """Raise the limit of open files as far as needed and allowed; warns if fewer connections fit all the same.

    max_connections: None means DEFAULT_CONNECTIONS, or as many as the system's limit allows. workers: processes that
    share the connections, each with the same limit of open files.
    """
    wanted = max_connections or DEFAULT_CONNECTIONS
    files = PER_CONNECTION * wanted + _ASIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = shares(files if soft == resource.RLIM_INFINITY else soft, wanted, workers)
    _make_room(files if soft == resource.RLIM_INFINITY else min(files, soft))
    if warns and found.connections < wanted:
        log.warning(
            "%s needs %d open files, the system allows %d, enough for %d connections: further clients wait; raise "
            "the limit (ulimit -n, LimitNOFILE), or take more workers",
            f"max_connections={wanted}" if max_connections is not None else f"the default of {wanted} connections",
            files,
            soft,
            found.connections,
        )
    return found


def _make_room(files: int) -> None:
    """Make the kernel allocate its descriptor table for `files` entries now, 8 bytes each.

    Otherwise it doubles the table whenever it is full. In a process with threads, each doubling blocks the accepting
    thread for a grace period of RCU: 10 to 90 ms on a busy machine.
    """
    with suppress(OSError), Path(os.devnull).open() as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, files - 1))
