"""The connections that `kproxy watch` observes: counted, recorded and shown like those of a proxy.

Duty: pass the events of flows to metrics and sinks, learn brokers from answers, and assign each connection its broker
and its cluster as soon as they are known. Bounded by the flows (capture.flows), with a row per open connection. Runs on
the thread of the event loop. Refuses to know interfaces, and how packets are read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kproxy.addresses import numeric
from kproxy.capture.clusters import CONTROLLER_REQUESTS, accepted_cluster_id
from kproxy.capture.connections import content
from kproxy.capture.connections.flow import Flow
from kproxy.insight.knowledge import APIS, ONLY_FAILED
from kproxy.metrics import Metrics
from kproxy.metrics.columns import count
from kproxy.metrics.counting import ConnectionMetrics
from kproxy.protocol.apis import FETCH
from kproxy.proxy.cluster.destinations import MAX_BROKERS, Destinations
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.filters.feed import Feed
from kproxy.proxy.sockets.listeners import normal
from kproxy.watch.clusters import MAX_ID, LiveClusters
from kproxy.watch.copies import Twins
from kproxy.watch.processes import End, Process, look
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import CLIENT, SIDES, ClientNamed, Closed, Event, Exchange, Unanswered
from kproxy.wire.observing.kept import Kept
from kproxy.wire.offline.bulk import Bulk

if TYPE_CHECKING:
    from kproxy.tables.live.recorder import Recorder

LISTENER = "watch"  # the label `listener`
UNKNOWN = "bootstrap"  # the label of brokers that no response has listed yet
LOOKS = 3  # searches for the processes of one connection: its socket may not be visible to the first
MAX_LOOKED_FOR = 1024
MAX_CLUSTERS = 16  # clusters whose id is shown, and whose brokers have a name resolution of their own
_MAX_NAME = 256

Json = dict[str, Any]


class Connection:
    """One Kafka connection; the listener of its events."""

    __slots__ = ("_feed", "_kept", "_owner", "_record", "counting", "flow", "looked", "number", "processes")

    def __init__(self, flow: Flow, number: int, owner: "Connections", counting: ConnectionMetrics) -> None:
        assert flow.info is not None
        self.flow = flow
        self.number = number
        self.counting = counting
        self._owner = owner
        self._kept: Closed | None = None  # its last event, until its end is complete
        self._record = None if owner.recorder is None else owner.recorder.connected(flow.info, self)
        self._feed = owner.fed(flow.info)
        self.looked = 0  # searches for its processes
        self.processes: list[Process | None] = [None, None]  # client's and broker's, if on this host

    @property
    def ends(self) -> tuple[End, End]:
        """The connection as seen from the client, and from the broker."""
        info = self.flow.info
        assert info is not None
        client, broker = (info.client_address, info.client_port), (info.broker_address, info.broker_port)
        return (*client, *broker), (*broker, *client)

    @property
    def info(self) -> ConnectionInfo:
        """The current information about it."""
        assert self.flow.info is not None
        return self.flow.info

    def named(self, info: ConnectionInfo) -> None:
        """Assign it to a broker that has become known."""
        self.flow.info = info
        self.counting.move(str(info.broker_id))
        self._feed = self._owner.fed(info)

    def of_cluster(self, cluster: str) -> None:
        """Assign it to its cluster, now that it is known; further events are counted and recorded there."""
        flow = self.flow
        flow.info = info = replace(self.info, cluster=cluster)
        self.counting.leave(flow.last_ns)
        self.counting = self._owner.counted(flow, is_new=False)
        session = flow.session
        if session is not None and session.software is not None:
            self.counting.events([ClientNamed(session.client_id, *session.software, flow.last_ns)])
        self._feed = self._owner.fed(info)

    def __call__(self, events: list[Event]) -> None:
        owner = self._owner
        for event in events:
            if event.__class__ is Exchange and event.response_body is not None and event.response_body.brokers:
                found = event.response_body
                owner.learn(self.info, found.brokers, found.cluster_id, self.number)
            elif event.__class__ is Exchange and event.plan.api_key in CONTROLLER_REQUESTS and event.request_frame:
                frames = event.request_frame, event.response_frame
                if cluster_id := accepted_cluster_id(event.plan.api_key, event.plan.api_version, *frames):
                    owner.learn(self.info, {}, cluster_id, self.number)
        self.counting.events(events)  # after `learn`, which may have changed the cells
        if self._feed is not None:
            owner.hear(self._feed, events)
        if self._record is not None:
            last = events[-1] if events else None
            if isinstance(last, Closed):
                self._kept = last
                events = events[:-1]
            if events:
                self._record(events)

    def end(self) -> None:
        """Count and record its end, after the end of the flow."""
        flow = self.flow
        self.counting.closed(_cause(flow, self._kept))
        if self._record is not None:
            self._record([self._kept or _closed(flow)])

    # --- for the recorder (tables.recorder.Tcp) ----------------------------------------------------------------------

    def columns(self) -> Json:
        return self.flow.columns()

    def sent_again(self, exchange: Exchange) -> int:
        return self.flow.sent_again(exchange)

    def stalled(self, exchange: Exchange) -> Sequence[int]:
        return self.flow.stalled(exchange)

    # --- for operators -----------------------------------------------------------------------------------------------

    @property
    def client_id(self) -> str | None:
        """The client id of its last request that has one."""
        return None if self.flow.session is None else self.flow.session.client_id

    def row(self) -> Json:
        """Return a row of /api/connections."""
        flow = self.flow
        info, session = flow.info, flow.session
        assert info is not None
        client_id = software = None
        requests = pending = 0
        if session is not None:
            client_id = session.client_id
            software = session.software
            requests, pending = session.requests, len(session.pending)
        return {
            "number": self.number,
            "cluster": info.cluster,
            "listener": LISTENER,
            "client": str(Address(info.client_address, info.client_port)),
            "client_id": None if client_id is None else client_id[:_MAX_NAME],
            "software": None if software is None else " ".join(software)[:_MAX_NAME],
            "broker": info.broker_id,
            "upstream": str(Address(info.broker_address, info.broker_port)),
            "opened_ns": info.opened_ns,
            "last_packet_ns": flow.last_ns,
            "start_seen": flow.start_seen,
            "requests": requests,
            "requests_pending": pending,
            "bytes_in": flow.payload_bytes[flow.client ^ CLIENT],
            "bytes_out": flow.payload_bytes[flow.client ^ 1],
            "gaps": flow.total("gaps"),
            "gap_bytes": flow.total("gap_bytes"),
            "retransmissions": flow.total("retransmissions"),
            **{
                f"{side}_process": process._asdict()
                for side, process in zip(SIDES, self.processes, strict=True)
                if process is not None
            },
        }


class OnlyTcp:
    """A connection with only TCP visible, due to TLS or a failed connect: it has a row once it has ended."""

    __slots__ = ("_record", "flow")

    def __init__(self, flow: Flow, owner: "Connections") -> None:
        assert flow.info is not None
        self.flow = flow
        self._record = None if owner.recorder is None else owner.recorder.connected(flow.info, self)

    def __call__(self, events: list[Event]) -> None:
        pass

    def end(self) -> None:
        if self._record is not None:
            self._record([_closed(self.flow)])

    @property
    def info(self) -> ConnectionInfo:
        assert self.flow.info is not None
        return self.flow.info

    def columns(self) -> Json:
        return self.flow.columns()

    def sent_again(self, exchange: Exchange) -> int:
        return 0

    def stalled(self, exchange: Exchange) -> Sequence[int]:
        return ()


class Connections:
    """All connections; the handlers of their flows."""

    def __init__(
        self,
        metrics: Metrics,
        cluster: str,
        destinations: Callable[[], Destinations],
        *,
        bodies: bool,
        recorder: "Recorder | None" = None,
        feed: Feed | None = None,
        on_ports: Callable[[set[int]], None] = lambda ports: None,
        on_clusters: Callable[[LiveClusters], None] = lambda clusters: None,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        """cluster: the name of the cluster of all connections, or, once several clusters are known, of the connections
        without a known cluster. destinations: creates the name resolution for the brokers of a cluster. bodies: count
        topics too. feed: receives the frames for insight (`kept`).

        on_ports: called with the ports of brokers in responses. on_clusters: called when names of clusters change,
        before they are assigned to connections. on_unknown: called when a connection without a cluster's name has ended
        while clusters have names.
        """
        self.recorder = recorder
        self._metrics = metrics
        self._cluster = cluster
        self._cells = metrics.cluster(cluster)
        self._feed = feed
        self.kept = None if feed is None else Kept(APIS, only_failed=ONLY_FAILED, left_out=self._cells.follow())
        self._bodies = bodies
        self._new_destinations = destinations
        self._destinations: dict[str | None, Destinations] = {}  # by cluster id: clusters use the same node ids
        self._on_ports = on_ports
        self._on_clusters = on_clusters
        self._on_unknown = on_unknown
        self.cluster_ids: list[str] = []  # the first MAX_CLUSTERS ids in responses
        self.clusters = LiveClusters()
        self._open: dict[Flow, Connection] = {}  # oldest first
        self._others: dict[Flow, OnlyTcp] = {}
        self._copies: set[Flow] = set()
        self._twins = Twins()
        self._numbers = 0
        self._window_events: list[tuple[int, int, Callable[[list[Event]], None], Event]] = []  # of the current window
        self._nameless: dict[Connection, None] = {}  # connections without a known broker
        self._numeric: dict[Address, int] = {}  # brokers that advertise numeric addresses: no name to resolve

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open.values()))

    @property
    def objects(self) -> int:
        """The approximate number of Python objects of all connections."""
        return 50 * (len(self._open) + len(self._others))

    def fed(self, info: ConnectionInfo) -> Callable[[list[Event]], None] | None:
        """Return the function that passes a connection's events on to insight; None if there is no insight."""
        if self._feed is None or self.kept is None:
            return None
        return self._feed.connected(info, None, self._metrics.cluster(info.cluster).follow())

    def counted(self, flow: Flow, *, is_new: bool = True) -> ConnectionMetrics:
        """Return the counters of a connection, under its cluster and broker as far as they are known."""
        info = flow.info
        assert info is not None
        pending = flow.session.pending if flow.session is not None else ()
        label = UNKNOWN if info.broker_id is None else str(info.broker_id)
        return self._metrics.connection(info, LISTENER, label, pending, topics=self._bodies, is_new=is_new)

    def hear(self, feed: Callable[[list[Event]], None], events: list[Event]) -> None:
        """Keep events for insight until `hand_on`: it needs the order of time, but flows are read one by one."""
        for event in events:
            exchange = event.exchange if event.__class__ is Unanswered else event
            if exchange.__class__ is not Exchange:
                continue
            if exchange.plan.kept is None:
                body = exchange.response_body if exchange.plan.api_key == FETCH else None
                if body is not None and body.logged:
                    self._window_events.append((exchange.response_start, len(self._window_events), feed, event))
            elif exchange.request_frame is not None:
                at_ns = exchange.response_start if exchange.response_frame is not None else exchange.request_end
                self._window_events.append((at_ns, len(self._window_events), feed, event))

    def hand_on(self) -> None:
        """Pass the events of a window on to insight, in the order of answers."""
        self._window_events.sort()
        for _, _, feed, event in self._window_events:
            feed([event])
        self._window_events.clear()

    # --- the handlers of flows ---------------------------------------------------------------------------------------

    def decided(self, flow: Flow) -> Callable[[list[Event]], None]:
        """Register a flow recognised as Kafka or TLS; returns the function that takes its events."""
        info = flow.info
        assert info is not None
        if self._twins.is_copy(flow):
            self._copies.add(flow)
            passive = self._metrics.passive
            if passive is not None:
                passive.copies[self._cluster] = passive.copies.get(self._cluster, 0) + 1
            return _nothing
        node_id = self._broker_of(info)
        if node_id is not None:
            flow.info = info = replace(info, broker_id=node_id)
        self._place(flow)
        if flow.speaks == content.TLS:
            encrypted = self._others[flow] = OnlyTcp(flow, self)
            return encrypted
        self._numbers += 1
        connection = self._open[flow] = Connection(flow, self._numbers, self, self.counted(flow))
        if node_id is None:
            self._nameless[connection] = None
        return connection

    def many(self, flows: Sequence[Flow], bulk: Bulk) -> None:
        """Count exchanges of several flows at once."""
        of_flows = [self._open.get(flow) for flow in flows]
        count([None if each is None else each.counting for each in of_flows], bulk)

    def ended(self, flow: Flow) -> None:
        connection = self._open.pop(flow, None) or self._others.pop(flow, None)
        if connection is not None:
            connection.end()
            if isinstance(connection, Connection):
                self._nameless.pop(connection, None)
                self.clusters.forget(connection.number)
            if self.clusters.names and connection.info.cluster not in self.clusters.names:
                self._on_unknown()
        self._copies.discard(flow)

    def unconnected(self, flow: Flow) -> None:
        """Record a failed connect."""
        self._place(flow)
        OnlyTcp(flow, self).end()

    # --- brokers -----------------------------------------------------------------------------------------------------

    def learn(
        self,
        info: ConnectionInfo,
        brokers: Mapping[tuple[str, int], int],
        cluster_id: str | None = None,
        number: int | None = None,
    ) -> None:
        """Apply the brokers in an answer to a connection with a number: node ids by (host, port)."""
        if cluster_id and (name := cluster_id[:MAX_ID]) not in self.cluster_ids:
            self.cluster_ids = [*self.cluster_ids, name][:MAX_CLUSTERS]
        if self.clusters.learn(info, brokers, cluster_id, number):
            self._on_clusters(self.clusters)
            self.name_clusters()
        cells = self._metrics.cluster(self.clusters.at(info, number) or self._cluster)
        named = [(node_id, Address(*at)) for at, node_id in brokers.items()]
        known = [(node_id, address) for node_id, address in named if address.host and 0 < address.port < 1 << 16]
        for node_id in self._destinations_of(cluster_id).learn(known):
            cells.expect(str(node_id), LISTENER)
        before = len(self._numeric)
        for node_id, address in known:
            if numeric(address.host) is not None and (len(self._numeric) < MAX_BROKERS or address in self._numeric):
                self._numeric[normal(address)] = node_id
        if len(self._numeric) > before:
            self.name_brokers()
        self._on_ports({address.port for _, address in known})

    def _destinations_of(self, cluster_id: str | None) -> Destinations:
        known = self._destinations
        key = cluster_id if cluster_id in known or len(known) < MAX_CLUSTERS else next(iter(known))
        if key not in known:
            known[key] = self._new_destinations()
        return known[key]

    def _place(self, flow: Flow) -> None:
        """Set the cluster of a new flow by its broker's address, if the address is known."""
        info = flow.info
        assert info is not None
        cluster = self.clusters.at(info)
        if cluster is not None:
            flow.info = replace(info, cluster=cluster)

    def restart(self) -> None:
        """Forget the lags of the cluster from the settings: most belong to connections that get another cluster."""
        self._metrics.restart_lags(self._cluster)
        for connection in self:
            connection.of_cluster(connection.info.cluster)

    def name_clusters(self) -> None:
        """Assign connections to their clusters, if several are known, as far as possible."""
        names = self.clusters.names
        if not names or all(each.info.cluster in names for each in self._open.values()):
            return
        connections = {connection.number: connection for connection in self}
        known = self.clusters.of((number, each.info, each.client_id) for number, each in connections.items())
        for number, cluster in known.items():
            if connections[number].info.cluster != cluster:
                connections[number].of_cluster(cluster)
        for other in list(self._others):
            self._place(other)

    def strangers(self) -> list[Connection]:
        """Return the newest MAX_LOOKED_FOR connections with fewer than LOOKS searches for their processes."""
        return [each for each in self._open.values() if each.looked < LOOKS][-MAX_LOOKED_FOR:]

    @staticmethod
    def look_for_processes(strangers: Sequence[Connection]) -> None:
        """Find the processes of connections in /proc. Slow: run it on a thread."""
        found = look(end for connection in strangers for end in connection.ends)
        for connection in strangers:
            connection.processes = [found.get(end) for end in connection.ends]
            connection.looked = LOOKS if any(connection.processes) else connection.looked + 1

    def _broker_of(self, info: ConnectionInfo) -> int | None:
        address = Address(info.broker_address, info.broker_port)
        node_id = self._numeric.get(normal(address))
        if node_id is not None:
            return node_id
        known = (destinations.broker_at(address) for destinations in self._destinations.values())
        return next((each for each in known if each is not None), None)

    def name_brokers(self) -> None:
        """Assign connections to brokers that have become known."""
        for connection in list(self._nameless):
            info = connection.flow.info
            assert info is not None
            node_id = self._broker_of(info)
            if node_id is not None:
                del self._nameless[connection]
                connection.named(replace(info, broker_id=node_id))


def _nothing(events: list[Event]) -> None:
    """Drop events: the connection is counted elsewhere."""


def _closed(flow: Flow) -> Closed:
    return Closed(CLIENT, flow.last_ns)


def _cause(flow: Flow, closed: Closed | None) -> str:
    """Return why a connection ended, as one of `metrics.counters.passive.ENDS`."""
    if flow.close == "reset":
        return "client_reset" if flow.reset_by == flow.client else "broker_reset"
    if flow.close == "fin":
        return "client_closed" if closed is None or closed.first == CLIENT else "broker_closed"
    return "reused" if flow.close == "reused" else "idle"
