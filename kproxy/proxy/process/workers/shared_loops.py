"""Loops through a kproxy of several processes: what one of them dials, another accepts.

All share the token of kproxy's own questions, whose numbers tell which process asked. The parent accepts, so workers
report to it the own end of each connection that they make. Where one process finds a loop, all refuse that upstream and
close what goes there. Refuses to know channels: it is given a callable.
"""

import re
import socket
from collections.abc import Callable, Sequence

from kproxy.addresses import numeric
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.listeners import Listener
from kproxy.proxy.upstream.loops import IsOurs, LoopGuard

PROCESSES = 1024  # more than there can be

Report = Callable[..., None]  # (name, *values): a message to the parent; from there, to all workers


class SharedLoops(LoopGuard):
    """What one process knows of loops. `process`: a worker's number; 0 is the parent."""

    def __init__(self, is_ours: IsOurs, token: str, process: int, report: Report) -> None:
        super().__init__(is_ours, token=token, process=process, processes=PROCESSES)
        self._process = process
        self._report = report

    def dialled(self, sock: socket.socket, upstream: Address) -> None:
        super().dialled(sock, upstream)
        if self._process:
            self._report("dialled", self.own_end(sock), upstream)

    def dialled_elsewhere(self, own: Address, upstream: Address) -> None:
        """A worker is making a connection from `own`."""
        self._dialled[own] = upstream

    def closed(self, own: Address) -> None:
        if own in self._dialled:
            super().closed(own)
            if self._process:
                self._report("undialled", own)

    def came_back(self, first_bytes: bytes) -> Address | None:
        found: re.Match[bytes] | None = self._question.search(first_bytes)
        if found is not None and int(found[1]) % PROCESSES != self._process:
            self._report("question", int(found[1]))  # who asked it knows the upstream
            return None
        return super().came_back(first_bytes)

    def asked(self, number: int) -> Address | None:
        """The upstream of one of this process's own questions, that came back to another."""
        return self._questions.get(number)

    def refuse(self, upstream: Address) -> None:
        super().refuse(upstream)
        self._report("loop", upstream)

    def refused_elsewhere(self, upstream: Address) -> None:
        """Another process has found a loop through that upstream."""
        super().refuse(upstream)


class PortElsewhere(Listener):
    """A port that the parent listens on: a worker knows where it is, so as not to dial it."""

    def __init__(self, hosts: Sequence[str], port: int) -> None:
        self.port = port
        self._addresses = [numeric(host) for host in hosts]
        self._sockets = []  # the parent has them

    def accept(self, wanted: bool) -> None:
        """The parent does."""

    def close(self) -> None:
        """The parent does."""
