"""Detection of loops through a kproxy of several processes: one process dials, another accepts.

All processes share the token of kproxy's own requests; a request's number identifies the process that sent it. Workers
report the local address of each connection that they dial to the parent, which accepts. When one process finds a loop,
all refuse that upstream and close their connections to it. Refuses to know channels: it calls a given function.
"""

import re
import socket
from collections.abc import Callable, Sequence

from kproxy.addresses import numeric
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.listeners import Listener
from kproxy.proxy.upstream.loops import IsOurs, LoopGuard

PROCESSES = 1024  # upper bound

Report = Callable[..., None]  # (name, *values): sends a message to the parent, which sends it to all workers


class SharedLoops(LoopGuard):
    """The loop detection of one process. `process`: a worker's number; 0 is the parent."""

    def __init__(self, is_ours: IsOurs, token: str, process: int, report: Report) -> None:
        super().__init__(is_ours, token=token, process=process, processes=PROCESSES)
        self._process = process
        self._report = report

    def dialled(self, sock: socket.socket, upstream: Address) -> None:
        super().dialled(sock, upstream)
        if self._process:
            self._report("dialled", self.own_end(sock), upstream)

    def dialled_elsewhere(self, own: Address, upstream: Address) -> None:
        """Record a connection from `own` that a worker is making."""
        self._dialled[own] = upstream

    def closed(self, own: Address) -> None:
        if own in self._dialled:
            super().closed(own)
            if self._process:
                self._report("undialled", own)

    def came_back(self, first_bytes: bytes) -> Address | None:
        found: re.Match[bytes] | None = self._question.search(first_bytes)
        if found is not None and int(found[1]) % PROCESSES != self._process:
            self._report("question", int(found[1]))  # the process that sent it knows the upstream
            return None
        return super().came_back(first_bytes)

    def asked(self, number: int) -> Address | None:
        """Return the upstream of one of this process's own requests that another process received."""
        return self._questions.get(number)

    def refuse(self, upstream: Address) -> None:
        super().refuse(upstream)
        self._report("loop", upstream)

    def refused_elsewhere(self, upstream: Address) -> None:
        """Refuse an upstream through which another process has found a loop."""
        super().refuse(upstream)


class PortElsewhere(Listener):
    """A port on which the parent listens: a worker knows its addresses, so that it does not dial it."""

    def __init__(self, hosts: Sequence[str], port: int) -> None:
        self.port = port
        self._addresses = [numeric(host) for host in hosts]
        self._sockets = []  # held by the parent

    def accept(self, wanted: bool) -> None:
        """Do nothing: the parent accepts."""

    def close(self) -> None:
        """Do nothing: the parent closes it."""
