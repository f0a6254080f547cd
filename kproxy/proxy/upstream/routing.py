"""Which port of kproxy stands for which broker, what clients are told, and where a broker is: pure.

The map from node id to port is a function of the configuration and the id alone, so that replicas agree without talking
and a restart changes nothing. Only the upstream addresses are learnt, keyed by node id: the last answer wins, new dials
go there, and a broker that has gone keeps its port. Refuses to know sockets, names and frames.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy.proxy.config import MAX_PORT, Address, Cluster

NO_DOOR = 0  # the port that is told where kproxy has none for a node id: nothing listens there, anywhere


class Door(NamedTuple):
    """The port that stands for a broker."""

    bind: int
    advertise: int  # what {port} becomes


class Routes:
    """The map of one cluster. `listen_port` is the bound port of its bootstrap listener."""

    def __init__(self, cluster: Cluster, listen_port: int) -> None:
        self.upstreams: dict[int, Address] = {}
        self._route = cluster.route
        self._listen_port = listen_port
        self._base = cluster.broker_port_base or listen_port + 1
        self._declared = cluster.brokers
        host, _, port = cluster.advertised.rpartition(":")
        self._host_template = host.strip("[]")
        self._port_template = port
        for entry in cluster.brokers:
            if entry.upstream is not None:
                host, _, port = entry.upstream.rpartition(":")
                for node_id in entry.ids:
                    self.upstreams[node_id] = Address(host.strip("[]").format(id=node_id), int(port.format(id=node_id)))

    def declared(self) -> Iterator[int]:
        """The node ids whose ports are to be bound before the cluster has told its own."""
        for entry in self._declared:
            yield from entry.ids

    def door(self, node_id: int) -> Door | None:
        """The port that stands for a node id; None where there is none (not declared, or beyond the last port)."""
        if self._route == "sidecar":
            return Door(self._listen_port, self._listen_port)
        if node_id < 0:
            return None
        if not self._declared:
            port = self._base + node_id
            return Door(port, port) if port <= MAX_PORT else None
        for entry in self._declared:
            if node_id in entry.ids:
                offset = node_id - entry.ids.start
                return Door(entry.port + offset, (entry.advertise_port or entry.port) + offset)
        return None

    def advertised(self, node_id: int, host: str) -> Address:
        """What clients are told instead of a broker's own address; never that, even where there is no door."""
        door = self.door(node_id)
        values = {"id": node_id, "host": host, "port": door.advertise if door else NO_DOOR}
        port = int(self._port_template.format(**values)) if door else NO_DOOR
        return Address(self._host_template.format(**values), port if port <= MAX_PORT else NO_DOOR)

    def learn(self, node_id: int, address: Address) -> bool:
        """A broker says where it is. False: refused, since that is what kproxy tells clients, and would dial itself."""
        if self._route == "sidecar" or self.door(node_id) is None:
            return True  # nothing that we would ever dial
        if address == self.advertised(node_id, address.host):
            return False
        self.upstreams[node_id] = address
        return True
