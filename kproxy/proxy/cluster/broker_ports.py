"""The ports that stand for a cluster's brokers: bound as brokers become known, tried again where that failed.

Bounded by MAX_BROKERS, and by the file descriptors set aside for listening: an answer could name as many brokers as
there are ports. A port that cannot be bound is advertised all the same, never the broker's own address. It keeps the
cluster from being ready, and so does a broker for which no port stands: it is not declared, or its node id is too high.
Refuses to know how brokers are found and what happens on a connection.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.sockets.listeners import Accepted, Gate, Listener, why_unbound

MAX_BROKERS = 4096  # those that are not declared
RETRY_S = 10.0
_RETRIES_PER_TURN = 64
_LISTED = 8  # brokers in one line of the log
_REASONS = 3  # why ports are not bound, in one line

log = logging.getLogger("kproxy.cluster")


class BrokerPorts:
    """The broker ports of one cluster. `accepted(node_id)`: what takes the connections of that broker's port."""

    def __init__(
        self,
        gate: Gate,
        cluster: Cluster,
        routes: Routes,
        hosts: Sequence[str],
        backlog: int,
        accepted: Callable[[int], Accepted],
    ) -> None:
        self.open: dict[int, Listener] = {}  # by node id
        self._unbound: dict[int, str] = {}  # node id -> why its port is not bound
        self._without: dict[int, None] = {}  # node ids for which no port stands
        self.backlog = backlog  # of ports that are bound from now on
        self._gate = gate
        self._cluster = cluster
        self._routes = routes
        self._hosts = hosts
        self._accepted = accepted
        self._retry: asyncio.TimerHandle | None = None
        self._report: asyncio.Handle | None = None
        self.former: dict[int, int] = {}  # node id -> the port that it had before a reload: no news
        self._new: list[int] = []  # bound since the log last said so
        self._failed: list[int] = []  # not bound since then
        self._closed = False
        self._limiter = LogLimiter(log)

    def __str__(self) -> str:
        ports = ",".join(f"{node_id}:{listener.port}" for node_id, listener in sorted(self.open.items())) or "-"
        lacking = [*self._unbound, *self._without]
        return f"{ports} without a port: {_listed(lacking)}" if lacking else ports

    def not_ready(self) -> Iterator[str]:
        """Why clients cannot reach some broker."""
        yield from list(self._unbound.values())[:_LISTED]
        if len(self._unbound) > _LISTED:
            yield f"and so {len(self._unbound) - _LISTED} more brokers"
        if self._without:
            yield _without(self._without)

    def bind(self, node_id: int) -> bool:
        """Make sure that a broker's port is open; whether it is. After `close` no further port opens."""
        if node_id in self.open or self._cluster.route != "ports":
            return True
        if self._closed:
            return False
        port_of = self._routes.port_of(node_id)
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
            self.open[node_id] = Listener(
                self._gate, self._hosts, port_of.bind, self.backlog, self._accepted(node_id), f"{name}/{node_id}"
            )
        except OSError as fault:
            why = why_unbound(fault, self._gate, self._hosts, port_of.bind)
            reason = f"{where}, the port of broker {node_id}, cannot be bound: {why}"
            return self._not_bound(node_id, reason)
        self._unbound.pop(node_id, None)
        self._new.append(node_id)
        self._report_soon()
        return True

    def forget(self, known: Collection[int]) -> None:
        """Give up unbound ports of brokers that the cluster no longer names; declared ones are still wanted."""
        wanted = {*known, *self._routes.declared()}
        for brokers in (self._unbound, self._without):
            for node_id in [node_id for node_id in brokers if node_id not in wanted]:
                del brokers[node_id]

    def close(self) -> None:
        """Close all of them, for good."""
        self._closed = True
        for handle in (self._retry, self._report):
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
        """Try some of the ports again, those that waited longest first."""
        self._retry = None
        for node_id in list(self._unbound)[:_RETRIES_PER_TURN]:
            reason = self._unbound[node_id]
            if not self.bind(node_id):
                self._unbound.pop(node_id, None)
                self._unbound[node_id] = reason  # at the end: others have their turn first

    def _report_soon(self) -> None:
        if self._report is None:
            self._report = asyncio.get_running_loop().call_soon(self._report_new)

    def _report_new(self) -> None:
        """One line for all ports of one turn, bound and not: an answer may name thousands."""
        self._report = None
        new, self._new = self._new, []
        without = [node_id for node_id in self._failed if node_id in self._without]
        failed, self._failed = [node_id for node_id in self._failed if node_id in self._unbound], []
        name = self._cluster.name
        new = [node_id for node_id in new if self.former.get(node_id) != self.open[node_id].port]
        if new:
            upstreams = self._routes.upstreams
            ports = (f"{node_id}:{self.open[node_id].port}->{upstreams.get(node_id, 'unknown')}" for node_id in new)
            log.info("listening cluster=%s brokers=%s", name, _listed(list(ports)))
        if without:
            text = "cluster=%s: %s, and clients cannot reach them"
            self._limiter.log(logging.ERROR, "without", text, name, _without(without))
        if failed:
            text = "cluster=%s: %s; tried again every %g s"
            reasons = "; ".join(self._unbound[node_id] for node_id in failed[:_REASONS])
            if len(failed) > _REASONS:
                reasons += f"; nor those of brokers {_listed(failed[_REASONS:])}"
            self._limiter.log(logging.ERROR, "bind", text, name, reasons, RETRY_S)


def _without(node_ids: Collection[int]) -> str:
    return f"no port stands for brokers {_listed(node_ids)}: declare them in [[cluster.brokers]]"


def _listed(values: Collection[object]) -> str:
    """The first of them, and how many more there are."""
    texts = [str(value) for value in list(values)[:_LISTED]]
    if len(values) > _LISTED:
        texts.append(f"and {len(values) - _LISTED} more")
    return ",".join(texts)
