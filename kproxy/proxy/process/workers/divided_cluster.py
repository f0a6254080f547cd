"""A cluster that several processes share: the parent has its ports and its discovery, workers its connections.

The parent is the one source of what is known of brokers. It sends the whole of it to the workers whenever it changes;
what a worker learns from an answer goes to the parent first, and from there to the others. A worker that meets a broker
without a port asks the parent to open it and waits for the reply, since the answer that names the broker must not
leave before. Bounded: ASK_S for such a wait, WAIT_S of waits in any second; beyond, the answer leaves, and the broker
counts as one without a port. A client whose address only a PROXY header tells waits COUNT_S at most for the parent to
count it. Refuses to know metrics, and how messages travel.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from kproxy.errors import RefusedClient
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.process.workers.crew import Crew
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sockets.channel import Channel, Gone
from kproxy.proxy.sockets.listeners import Listener

ASK_S = 0.25
COUNT_S = 5.0
WAIT_S = 0.5
AGAIN_S = 1.0  # a port that could not be opened is asked for again; the parent says so when it is
MAX_REFUSED = 4096

log = logging.getLogger("kproxy.cluster")


@dataclass
class ClusterState:
    """What workers must know of a cluster."""

    name: str
    listen_port: int
    upstreams: dict[int, Address] = field(default_factory=dict)  # where to dial each broker
    known: dict[int, Address] = field(default_factory=dict)  # where each says it is, to find leaks of it
    open: frozenset[int] = frozenset()  # brokers whose port is open
    beside: int | None = None  # route sidecar
    ports: tuple[tuple[int, tuple[str, ...]], ...] = ()  # each port that kproxy listens on, and the addresses


class ParentCluster(ClusterProxy):
    """The parent's part.

    changed(): what workers must know is not what it was; tell(): they must know it now.
    """

    def __init__(
        self,
        worker: Worker,
        cluster: Cluster,
        crew: Crew,
        changed: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        super().__init__(worker, cluster)
        self._connections.serve = self._hand_over
        self._crew = crew
        self._named: dict[int, Address] = {}  # by the cluster, when it was last asked
        self._changed = changed
        self._tell = tell

    def state(self) -> ClusterState:
        """What workers must know now."""
        listeners = [*self.brokers.values()]
        if self._bootstrap is not None:
            listeners.append(self._bootstrap)
        return ClusterState(
            self.cluster.name,
            self.address.port,
            dict(self.routes.upstreams),
            self._known.brokers | self._named,
            frozenset(self.brokers),
            self._topology.beside,
            tuple((listener.port, tuple(listener.hosts)) for listener in listeners),
        )

    def start(self, former: ClusterProxy | None = None) -> None:
        super().start(former)
        self._changed()

    def _hand_over(self, client: Incoming) -> None:
        """Give a client that is accepted to a worker, which knows by then what any of them has learnt of brokers."""
        self._tell()
        try:
            own = self._topology.destination_of(client.sock)
        except OSError:  # it has gone already
            client.sock.close()
            self._worker.gate.leave()
            self._connections.admission.left(client.ticket)
            return
        admission = self._connections.admission  # where it was counted, whatever follows
        port = self.cluster.name, client.node_id
        if admission.counts_headers:
            count = partial(admission.count_address, client)
            self._crew.hand_over(port, own, client, lambda: admission.left(client.ticket), count)
        else:
            self._crew.hand_over(port, own, client, partial(admission.left, client.ticket))

    @property
    def has_started(self) -> bool:
        return self._bootstrap is not None

    def learn_from_worker(self, node_id: int, host: str, port: int) -> bool:
        """An answer that a worker has seen says where a broker is; whether its port is open."""
        return self._learn_broker(node_id, host, port)

    def _learn_broker(self, node_id: int, host: str, port: int) -> bool:
        self._changed()
        return super()._learn_broker(node_id, host, port)

    def _bind(self, node_id: int) -> bool:
        is_open = node_id in self.brokers
        bound = super()._bind(node_id)
        if bound and not is_open:
            self._changed()
        return bound

    async def _learn(self, asked: Address, brokers: "dict[int, Address] | None") -> str:  # type: ignore[override]
        self._named = dict(brokers or {})
        reason = await super()._learn(asked, brokers)
        self._changed()
        return reason


class WorkerCluster(ClusterProxy):
    """A worker's part: no ports, no discovery; `take` brings what the parent knows."""

    def __init__(self, worker: Worker, cluster: Cluster, channel: Channel) -> None:
        super().__init__(worker, cluster)
        self._channel = channel
        self._open: set[int] = set()
        self._early: list[Incoming] = []  # clients that came before the parent's state
        self._waited_s = 0.0  # for replies, in the second that began at
        self._second = 0
        self._refused: dict[int, float] = {}  # brokers that the parent has no port for -> until when it is not asked
        self._limits = LogLimiter(log)
        self._connections.admission.count_elsewhere = self._count_at_parent

    def start(self, former: ClusterProxy | None = None) -> None:
        """Nothing yet: the parent's state brings the rest."""

    def take(self, state: ClusterState) -> None:
        """Take in what the parent knows."""
        if not hasattr(self, "routes"):
            self.routes = self._topology.routes = Routes(self.cluster, state.listen_port)
            self._serve()
        self.routes.upstreams.update(state.upstreams)
        for node_id, address in state.known.items():
            self._known.learn(node_id, address)
        if self._redirected is not None:
            self._redirected.learn(state.known.items(), again=True)
        self._open |= state.open
        self._topology.beside = state.beside
        while self._early:
            self._connections.connect(self._early.pop(0))

    def connect(self, client: Incoming) -> None:
        """Serve a client that the parent has accepted."""
        self._worker.gate.enter()
        if hasattr(self, "routes"):
            self._connections.connect(client)
        else:
            self._early.append(client)

    def learn_all(self, upstreams: Mapping[int, Address]) -> None:
        """The parent's state brings all of it."""

    @property
    def listeners(self) -> list[Listener]:
        return []

    @property
    def address(self) -> Address:
        return self.cluster.listen

    async def _count_at_parent(self, client: Incoming) -> str | None:
        """Have the parent count the address of a client, which only we know; the limit that it is beyond."""
        try:
            limit = await self._channel.ask("count", client.number, client.peer.host, timeout_s=COUNT_S)
        except Gone as fault:
            raise RefusedClient("limit", f"the process that counts addresses does not answer: {fault}") from None
        return None if limit is None else str(limit)

    def _broker_lost(self) -> None:
        self._channel.send("lost", self.cluster.name)

    def _learn_broker(self, node_id: int, host: str, port: int) -> bool:
        before = self.routes.upstreams.get(node_id), self._known.brokers.get(node_id)
        is_open = node_id in self._open or self.cluster.route == "sidecar"
        if is_open:
            bound = super()._learn_broker(node_id, host, port)
        else:
            bound = super()._learn_broker(node_id, host, port) and self._ask_for_port(node_id, host, port)
        after = self.routes.upstreams.get(node_id), self._known.brokers.get(node_id)
        if is_open and before != after:
            self._channel.send("learned", self.cluster.name, node_id, host, port)
        return bound

    def _bind(self, node_id: int) -> bool:
        return True

    def _ask_for_port(self, node_id: int, host: str, port: int) -> bool:
        """Have the parent open a broker's port; whether it is open."""
        now = time.monotonic()
        if int(now) != self._second:
            self._second, self._waited_s = int(now), 0.0
        name = self.cluster.name
        if self._waited_s > WAIT_S or self._stopped or self._refused.get(node_id, 0.0) > now:
            self._channel.send("learned", name, node_id, host, port)
            return False
        try:
            is_open = bool(self._channel.ask_now("bind", name, node_id, host, port, timeout_s=ASK_S))
        except Gone as fault:
            text = "cluster=%s: an answer that names broker %d leaves before its port is known to be open: %s"
            self._limits.log(logging.WARNING, "bind", text, name, node_id, fault)
            is_open = False
        self._waited_s += time.monotonic() - now
        if is_open:
            self._open.add(node_id)
            self._refused.pop(node_id, None)
        else:
            if len(self._refused) >= MAX_REFUSED:
                self._refused.clear()
            self._refused[node_id] = now + AGAIN_S
        return is_open
