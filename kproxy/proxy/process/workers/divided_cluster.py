"""A cluster shared by several processes: the parent has its ports and its discovery, workers its connections.

The parent holds the state of the brokers and sends all of it to the workers at every change. A worker that learns an
address from an answer sends it to the parent, which sends it to the others. A worker that finds a broker without a port
in an answer asks the parent to open one and waits for the reply before it forwards the answer. Bounded: ASK_S for one
such wait, WAIT_S of waits in any second; beyond, the answer leaves, and the broker counts as one without a port. A
worker's message about a broker names the settings under which it learned the address, as the parent may have others by
then. A client whose address comes in a PROXY header waits at most COUNT_S for the parent to count it. Refuses to know
metrics, and the transport of messages.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

from kproxy.errors import RefusedClient
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.process.changing.changes import Upstream
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.process.shared import Known
from kproxy.proxy.process.workers.crew import Crew
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sockets.channel import Channel, Gone

ASK_S = 0.25
COUNT_S = 5.0
WAIT_S = 0.5
AGAIN_S = 1.0  # s before asking the parent again for a port that it could not open; it reports the port when it is open
MAX_REFUSED = 4096

log = logging.getLogger("kproxy.cluster")


class HandOver:
    """Gives the clients that the parent accepts to workers. send_state(): sends workers the parent's state."""

    def __init__(self, crew: Crew, send_state: Callable[[], None]) -> None:
        self._crew = crew
        self._send_state = send_state

    def serves(self, worker: Worker, cluster: Cluster, changed: Callable[[], None]) -> ClusterProxy:
        """Return the parent's part of a cluster. Raises ConfigError."""
        proxy = ClusterProxy(
            worker,
            cluster,
            changed=changed,
            serve=lambda client: self._give(worker, proxy, client),
            busy=lambda: self._crew.brokers_with_clients(cluster.name),
        )
        return proxy

    def _give(self, worker: Worker, proxy: ClusterProxy, client: Incoming) -> None:
        """Give an accepted client to a worker, which has received all learned broker addresses by then."""
        self._send_state()
        admission = proxy.admission  # the one that counted it, even if a reload replaces it
        try:
            own = proxy.destination_of(client.sock)
        except OSError:  # it has disconnected
            client.sock.close()
            worker.gate.leave()
            admission.left(client.ticket)
            return
        port = proxy.cluster.name, client.node_id
        if admission.counts_headers:  # counting a PROXY header's address changes the ticket
            count = partial(admission.count_address, client)
            self._crew.hand_over(port, own, client, lambda: admission.left(client.ticket), count)
        else:
            self._crew.hand_over(port, own, client, partial(admission.left, client.ticket))


class PortsOfParent:
    """A worker's part of a cluster whose ports (`cluster.Ports`) the parent has."""

    def __init__(self, worker: Worker, cluster: Cluster, channel: Channel) -> None:
        """Create the cluster. Raises ConfigError."""
        self.proxy = ClusterProxy(worker, cluster, ports=self)
        self.proxy.admission.count_elsewhere = self._count
        self._worker = worker
        self._channel = channel
        self._name = cluster.name
        self._upstream = Upstream(cluster.route, cluster.bootstrap)
        self._all_open = cluster.route == "sidecar"
        self._gives_ports = cluster.any_brokers is not None
        self._open: set[int] = set()
        self._waited_s = 0.0  # spent waiting for replies in `_second`
        self._second = 0
        self._refused: dict[int, float] = {}  # broker without a port -> when to ask the parent again
        self._limits = LogLimiter(log)

    def take(self, known: Known) -> None:
        """Apply the parent's state."""
        self._open = set(known.open) if self._gives_ports else self._open | known.open
        self.proxy.take(known)

    def connect(self, client: Incoming) -> None:
        """Serve a client that the parent has accepted and sent, after its state."""
        self._worker.gate.enter()
        self.proxy.connect(client)

    async def _count(self, client: Incoming) -> str | None:
        """Have the parent count a client's address, which only the worker knows; returns the limit that it exceeds."""
        try:
            limit = await self._channel.ask("count", client.number, client.peer.host, timeout_s=COUNT_S)
        except Gone as fault:
            raise RefusedClient("limit", f"the process that counts addresses does not answer: {fault}") from None
        return None if limit is None else str(limit)

    def broker_lost(self) -> None:
        self._channel.send("lost", self._name)

    def bind(self, node_id: int, host: str, port: int, *, is_news: bool) -> bool:
        if not self._all_open and node_id not in self._open:
            return self._ask_for_port(node_id, host, port)
        if is_news:
            self._channel.send("bind", self._name, self._upstream, node_id, host, port)
        return True

    def _ask_for_port(self, node_id: int, host: str, port: int) -> bool:
        """Have the parent open a broker's port; returns whether it is open."""
        now = time.monotonic()
        if int(now) != self._second:
            self._second, self._waited_s = int(now), 0.0
        if self._waited_s > WAIT_S or self.proxy.has_stopped or self._refused.get(node_id, 0.0) > now:
            self._channel.send("bind", self._name, self._upstream, node_id, host, port)
            return False
        try:
            question = "bind", self._name, self._upstream, node_id, host, port
            reply: tuple[bool, int | None] = self._channel.ask_now(*question, timeout_s=ASK_S)
        except Gone as fault:
            text = "cluster=%s: an answer that names broker %d leaves before its port is known to be open: %s"
            self._limits.log(logging.WARNING, "bind", text, self._name, node_id, fault)
            reply = False, None
        is_open, given = reply
        if given is not None:
            routes = self.proxy.routes
            others = {other: port for other, port in routes.assigned.items() if port != given}
            routes.assigned = {**others, node_id: given}
        self._waited_s += time.monotonic() - now
        if is_open:
            self._open.add(node_id)
            self._refused.pop(node_id, None)
        else:
            if len(self._refused) >= MAX_REFUSED:
                self._refused.clear()
            self._refused[node_id] = now + AGAIN_S
        return is_open
