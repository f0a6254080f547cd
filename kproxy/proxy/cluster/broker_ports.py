"""The ports that represent a cluster's brokers: bound as brokers become known, retried after a failure.

Bounded by MAX_BROKERS, and by the file descriptors reserved for listening: an answer could name as many brokers as
there are ports. Clients get the port of a broker even if kproxy cannot bind it, never the broker's own address. The
cluster is not ready while a port is not bound, or while a broker has no port: it is not declared, its node id is too
high, or all ports of the range are assigned to others (`port_assignment`). The process that serves clients writes the
assignment to `ports_file`, at most once per turn of the event loop. Refuses to know discovery and connections.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from kproxy.proxy.cluster import ports_file
from kproxy.proxy.cluster.port_assignment import ABSENT_S, Held, PortAssignment
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.sockets.listeners import Accepted, Gate, Listener, why_unbound

MAX_BROKERS = 4096  # brokers that are not declared
RETRY_S = 10.0
_RETRIES_PER_TURN = 64
_HELD_S = 0.5  # s between two checks whether this process serves clients by now
_LISTED = 8  # brokers per log line
_REASONS = 3  # reasons for unbound ports per log line

log = logging.getLogger("kproxy.cluster")


class BrokerPorts:
    """The broker ports of one cluster. `accepted(node_id)`: returns the function that takes a port's connections."""

    def __init__(
        self,
        gate: Gate,
        cluster: Cluster,
        routes: Routes,
        hosts: Sequence[str],
        backlog: int,
        accepted: Callable[[int], Accepted],
        busy: Callable[[], Collection[int]] = tuple,
        evicted: Callable[[int], None] = lambda node_id: None,
    ) -> None:
        """busy(): node ids with open connections; evicted(node_id): called when its port passes to another broker."""
        self.open: dict[int, Listener] = {}  # by node id
        self._unbound: dict[int, str] = {}  # node id -> reason
        self._without: dict[int, None] = {}  # node ids that have no port
        self.backlog = backlog  # listen backlog of further ports
        self._gate = gate
        self._cluster = cluster
        self._routes = routes
        self._hosts = hosts
        self._accepted = accepted
        self._retry: asyncio.TimerHandle | None = None
        self._report: asyncio.Handle | None = None
        self.former: dict[int, int] = {}  # node id -> port before a reload, to log only changes
        self._new: list[int] = []  # bound since the last log line
        self._failed: list[int] = []  # not bound since then
        self._closed = False
        self._limiter = LogLimiter(log)
        self._busy = busy
        self._evicted = evicted
        self._writing: asyncio.TimerHandle | None = None
        self._file: Path | None = None
        self._kept: Mapping[int, int] | None = None  # ports in the file as last read or written; None: unknown
        self._unadvertised: set[int] = set()  # ids whose port of the range was advertised to no client yet
        self.assignment: PortAssignment | None = None
        entry = cluster.any_brokers
        if entry is not None and cluster.route == "ports":
            self.assignment = PortAssignment(entry.ports, routes.is_declared)
            self._file = entry.ports_file
            routes.assigned = self.assignment.ports

    def __str__(self) -> str:
        ports = ",".join(f"{node_id}:{listener.port}" for node_id, listener in sorted(self.open.items())) or "-"
        lacking = self.lacking()
        return f"{ports} without a port: {_listed(lacking)}" if lacking else ports

    def lacking(self) -> list[int]:
        """Return the node ids of brokers without an open port, which clients cannot reach."""
        return [*self._unbound, *self._without]

    def not_ready(self) -> Iterator[str]:
        """Yield the reasons why clients cannot reach some broker."""
        yield from list(self._unbound.values())[:_LISTED]
        if len(self._unbound) > _LISTED:
            yield f"and so {len(self._unbound) - _LISTED} more brokers"
        if self._without:
            yield self._why_without(self._without)

    # --- assigned ports ----------------------------------------------------------------------------------------------

    def restore(self, held: Mapping[int, Held] | None, *, may_give: bool = False) -> None:
        """Start with the ports assigned under the former settings; None: with those of the file.

        may_give: the cluster has already answered.
        """
        if self.assignment is None:
            return
        self.assignment.may_give = may_give
        if held is None and self._file is not None:
            try:
                held = ports_file.read(self._file, self._cluster.name)
                self._kept = {node_id: each.port for node_id, each in held.items()}
            except (ports_file.NotOurs, OSError) as fault:
                self._log_file("read", fault)
        elif held is not None:
            self._write_soon()
        self.assignment.restore(held or {})

    def adopt(self, held: Mapping[int, Held]) -> None:
        """Replace the assignments by those of the process that served clients until now."""
        if self.assignment is None:
            return
        before = dict(self.assignment.ports)
        self._kept = None
        self._unadvertised.clear()
        self.assignment.restore(held)
        for node_id in before:
            listener = self.open.get(node_id)
            if listener is not None and self.assignment.ports.get(node_id) != listener.port:
                for sock in listener.sockets:  # the port stays open, for another broker
                    self._gate.given.put(listener.name, sock.dup())
                del self.open[node_id]
                listener.close()
            self._unbound.pop(node_id, None)
        for node_id in before:
            self.name(node_id)
        self._write_soon()

    def name(self, node_id: int) -> None:
        """Assign a port to a broker that an answer names, if it has none and needs one."""
        assignment = self.assignment
        if assignment is None or node_id < 0:
            return
        if node_id in assignment.ports:
            if assignment.absent and assignment.named(node_id):
                self._write_soon()
            return
        if self._closed or self._routes.is_declared(node_id):
            return
        given = assignment.give(node_id, self._busy)
        if given is None:
            return
        self._without.pop(node_id, None)
        self._unadvertised.add(node_id)
        if given.former is not None:
            text = "cluster=%s: port %d of broker %d, which the cluster has not named for %.0f s, is now broker %d's"
            self._limiter.log(
                logging.INFO, "passed", text, self._cluster.name, given.port, given.former, given.absent_s, node_id
            )
            self._unbound.pop(given.former, None)
            listener = self.open.pop(given.former, None)
            if listener is not None:
                listener.close()
            self._evicted(given.former)
        self._write_soon()

    def was_given(self, node_id: int) -> bool:
        """Whether the broker has a port of the range."""
        return self.assignment is not None and node_id in self.assignment.ports

    def answered(self, node_ids: Collection[int]) -> None:
        """Apply the brokers of a complete answer, which names all brokers of the cluster."""
        if self.assignment is None:
            return
        if self.assignment.answered(node_ids):
            self._write_soon()
        for node_id in sorted(node_ids):
            self.name(node_id)

    def answered_nothing(self) -> None:
        """Start assigning ports as clients' answers name brokers: the cluster names none to kproxy without a login."""
        if self.assignment is not None:
            self.assignment.may_give = True

    def _write_soon(self) -> None:
        if self._file is not None and self._writing is None and not self._closed:
            self._writing = asyncio.get_running_loop().call_later(0, self._write)

    def _write(self) -> None:
        self._writing = None
        assert self._file is not None and self.assignment is not None
        loop = asyncio.get_running_loop()
        if self._gate.is_held:  # another process serves clients, and owns the file
            self._writing = loop.call_later(_HELD_S, self._write)
            return
        try:
            ports_file.write(self._file, self._cluster.name, self.assignment.held(), self._kept)
            self._kept = dict(self.assignment.ports)
        except (ports_file.NotOurs, OSError) as fault:
            self._log_file("write", fault)
            self._writing = loop.call_later(RETRY_S, self._write)

    def _log_file(self, doing: str, fault: Exception) -> None:
        """Log a fault of the file. A file of unknown origin is left unchanged."""
        name = self._cluster.name
        if isinstance(fault, OSError):
            text = "cluster=%s: cannot %s ports_file %s: %s; a restart may give brokers other ports"
            self._limiter.log(logging.ERROR, doing, text, name, doing, self._file, fault.strerror or fault)
        else:
            text = (
                "cluster=%s: ports_file %s is not used: %s; remove it or name another, until then a restart may give "
                "brokers other ports"
            )
            self._limiter.log(logging.ERROR, "file", text, name, self._file, fault)

    def _why_without(self, node_ids: Collection[int]) -> str:
        negative = [node_id for node_id in node_ids if node_id < 0]
        if negative:
            why = (
                f"brokers {_listed(negative)} have negative node ids, which no broker of Kafka has, and get no port: "
                "is what answers at `bootstrap` a broker?"
            )
            others = [node_id for node_id in node_ids if node_id >= 0]
            return f"{why}; {self._why_without(others)}" if others else why
        if self.assignment is None:
            return _without(node_ids)
        ports = self.assignment.range
        return (
            f"no port is left for brokers {_listed(node_ids)}: all {len(ports)} from {ports.start} on stand for "
            f"brokers that are named, were within {ABSENT_S:g} s, or have connections: raise port_count"
        )

    # --- open ports --------------------------------------------------------------------------------------------------

    def bind(self, node_id: int) -> bool:
        """Open a broker's port, unless it is open; returns whether it is. After `close` no further port opens."""
        if node_id in self.open or self._cluster.route != "ports":
            return True
        if self._closed:
            return False
        port_of = self._routes.port_of(node_id)
        if port_of is None and self.assignment is not None and not self.assignment.may_give:
            return False  # until the cluster has answered
        name = self._cluster.name
        known = len(self.open) + len(self._unbound) + len(self._without)
        is_declared = port_of is not None and bool(self._cluster.brokers)
        if known >= MAX_BROKERS and not is_declared and node_id not in self._unbound and node_id not in self._without:
            text = "cluster=%s: broker %d gets no port: %d others have one, or wait for theirs"
            self._limiter.log(logging.ERROR, "brokers", text, name, node_id, MAX_BROKERS)
            return False
        if port_of is None:
            if node_id not in self._without:
                self._without[node_id] = None
                self._failed.append(node_id)
                self._report_soon()
            return False
        where = Address(self._cluster.listen.host, port_of.bind)
        if not self._gate.has_room(len(self._hosts)):
            reason = (
                f"{where}, the port of broker {node_id}, is not bound: the {self._gate.max_sockets} file descriptors "
                "set aside for ports are in use; raise the limit of open files (ulimit -n, LimitNOFILE)"
            )
            return self._not_bound(node_id, reason)
        try:
            self.open[node_id] = self._listener(node_id, port_of.bind)
        except OSError as fault:
            why = why_unbound(fault, self._gate, self._hosts, port_of.bind)
            if not (
                fault.errno == errno.EADDRINUSE and node_id in self._unadvertised and self._open_next(node_id, why)
            ):
                self._unadvertised.discard(node_id)
                reason = f"{where}, the port of broker {node_id}, cannot be bound: {why}"
                return self._not_bound(node_id, reason)
        self._unadvertised.discard(node_id)
        self._unbound.pop(node_id, None)
        self._without.pop(node_id, None)
        self._new.append(node_id)
        self._report_soon()
        return True

    def _listener(self, node_id: int, port: int) -> Listener:
        name = f"{self._cluster.name}/{node_id}"
        return Listener(self._gate, self._hosts, port, self.backlog, self._accepted(node_id), name)

    def _open_next(self, node_id: int, why: str) -> bool:
        """Give a broker whose new port is in use the first free one that opens; returns whether there is one."""
        assert self.assignment is not None
        first = self.assignment.ports[node_id]
        in_use = {first}
        while self.assignment.move(node_id, in_use):
            port = self.assignment.ports[node_id]
            try:
                self.open[node_id] = self._listener(node_id, port)
            except OSError:
                in_use.add(port)
                continue
            text = "cluster=%s: broker %d gets port %d of the range, since port %d cannot be bound: %s"
            self._limiter.log(logging.WARNING, "in_use", text, self._cluster.name, node_id, port, first, why)
            self._write_soon()
            return True
        self.assignment.move(node_id, in_use - {first})
        return False

    def forget(self, known: Collection[int]) -> None:
        """Stop retrying unbound ports of brokers that the cluster no longer names, except declared ones."""
        wanted = {*known, *self._routes.declared()}
        for brokers in (self._unbound, self._without):
            for node_id in [node_id for node_id in brokers if node_id not in wanted]:
                del brokers[node_id]

    def close(self) -> None:
        """Close all ports for good."""
        self._closed = True
        for handle in (self._retry, self._report, self._writing):
            if handle is not None:
                handle.cancel()
        for listener in self.open.values():
            listener.close()

    def _not_bound(self, node_id: int, reason: str) -> bool:
        if node_id not in self._unbound:
            self._failed.append(node_id)
            self._report_soon()
        self._unbound[node_id] = reason
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)
        return False

    def _try_again(self) -> None:
        """Retry the ports that have waited longest, at most _RETRIES_PER_TURN."""
        self._retry = None
        for node_id in list(self._unbound)[:_RETRIES_PER_TURN]:
            reason = self._unbound[node_id]
            if not self.bind(node_id):
                self._unbound.pop(node_id, None)
                self._unbound[node_id] = reason  # moved to the end, so that others come first

    def _report_soon(self) -> None:
        if self._report is None:
            self._report = asyncio.get_running_loop().call_soon(self._report_new)

    def _report_new(self) -> None:
        """Log one line for all ports of one turn, bound and not: an answer may name thousands."""
        self._report = None
        new, self._new = self._new, []
        without = [node_id for node_id in self._failed if node_id in self._without]
        failed, self._failed = [node_id for node_id in self._failed if node_id in self._unbound], []
        name = self._cluster.name
        new = [node_id for node_id in new if node_id in self.open]
        new = [node_id for node_id in new if self.former.get(node_id) != self.open[node_id].port]
        if new:
            upstreams = self._routes.upstreams
            ports = (f"{node_id}:{self.open[node_id].port}->{upstreams.get(node_id, 'unknown')}" for node_id in new)
            log.info("listening cluster=%s brokers=%s", name, _listed(list(ports)))
        if without:
            text = "cluster=%s: %s, and clients cannot reach them"
            self._limiter.log(logging.ERROR, "without", text, name, self._why_without(without))
        if failed:
            text = "cluster=%s: %s; tried again every %g s"
            reasons = "; ".join(self._unbound[node_id] for node_id in failed[:_REASONS])
            if len(failed) > _REASONS:
                reasons += f"; nor those of brokers {_listed(failed[_REASONS:])}"
            self._limiter.log(logging.ERROR, "bind", text, name, reasons, RETRY_S)


def _without(node_ids: Collection[int]) -> str:
    return f"no port stands for brokers {_listed(node_ids)}: declare them in [[cluster.brokers]]"


def _listed(values: Collection[object]) -> str:
    """Return the first values as text, and how many more there are."""
    texts = [str(value) for value in list(values)[:_LISTED]]
    if len(values) > _LISTED:
        texts.append(f"and {len(values) - _LISTED} more")
    return ",".join(texts)
