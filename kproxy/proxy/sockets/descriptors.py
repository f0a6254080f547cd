"""File descriptors: how many the system gives this process, and how many each of its parts may use.

Each part has its share, so that none can take those of another: a client that is accepted must be able to have its
broker, an operator must reach the admin port while all clients are there, and neither many brokers nor silent HTTP
connections may cost clients theirs. Refuses to know sockets.
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
LISTENING = 1024  # sockets; two for each port on all addresses of IPv4 and IPv6
OWN = 64  # of the interpreter, the log, the recorder, names that are looked up, questions to brokers
_ASIDE = ADMIN + LISTENING + OWN

log = logging.getLogger("kproxy.server")


class Shares(NamedTuple):
    """How many connections, connections of the admin port and listening sockets there may be."""

    connections: int
    admin: int
    listening: int
    in_each: int  # of the connections, in one worker


def shares(files: int, connections: int, workers: int = 1) -> Shares:
    """What each part may use of so many descriptors per process, if so many connections are wanted.

    Where descriptors are short, clients wait in the listen backlog.
    """
    aside = min(_ASIDE, files // 2)
    in_each = min(connections, max(1, (files - aside) // PER_CONNECTION))
    possible = min(connections, in_each * workers)
    if aside == _ASIDE:
        listening = max(LISTENING, files - OWN - ADMIN - PER_CONNECTION * in_each)
        return Shares(possible, ADMIN, listening, in_each)
    return Shares(possible, min(ADMIN, max(2, aside // 8)), max(2, aside // 4), in_each)


def reserve(max_connections: int | None, workers: int = 1, *, warns: bool = True) -> Shares:
    """Raise the limit of open files as far as needed and allowed; warns if that leaves room for fewer connections.

    None: DEFAULT_CONNECTIONS, or as many as the system's limit allows. workers: processes that have the connections,
    each with a limit of open files as high as this one's.
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
    """Let the kernel make its table of so many descriptors now, 8 bytes each.

    Else it doubles the table whenever a connection has no place in it. In a process with threads that takes a grace
    period of RCU, in which the one that accepts stands still: 10 to 90 ms on a machine with much to do.
    """
    with suppress(OSError), Path(os.devnull).open() as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, files - 1))
