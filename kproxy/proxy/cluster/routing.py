"""Which port of kproxy stands for which broker, which address clients learn, and where a broker is: pure.

The map from node id to port is a function of the configuration and the id alone, so that replicas agree without talking
and a restart changes nothing; but for `ids = "any"`, whose ports are given out as ids appear (`port_assignment`). The
upstream addresses are learnt, keyed by node id: the last answer wins, new dials go there, and a broker that has gone
keeps its port. Refuses to know sockets, names and frames.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from kproxy.proxy.config.addresses import MAX_PORT, Address
from kproxy.proxy.config.settings import Cluster

NO_PORT = 0  # advertised where kproxy has no port for a node id: nothing listens there, anywhere
MAX_NODE_ID = (1 << 31) - 1
MAX_HOST = 255  # bytes of a host name (RFC 1035)


class BrokerPort(NamedTuple):
    """The port that stands for a broker."""

    bind: int
    advertise: int  # what {port} becomes


class ServerNames:
    """Which broker is meant by a server name (SNI), where all share one port."""

    def __init__(self, template: str, bootstrap: Collection[str] = ()) -> None:
        self._template = template
        before, _, rest = template.partition("{")
        after = rest.partition("}")[2]
        self._pattern = re.compile(rf"{re.escape(before)}([0-9]{{1,10}}){re.escape(after)}", re.ASCII)
        self._bootstrap = frozenset(bootstrap) or {f"bootstrap.{template.partition('.')[2]}"}

    def serves(self, server_name: str) -> bool:
        """Whether it is the name of a broker, or one to bootstrap at."""
        return server_name.lower() in self._bootstrap or self.node_id(server_name) is not None

    def node_id(self, server_name: str) -> int | None:
        """The broker's node id; None: clients bootstrap there, or it is no name of ours."""
        match = self._pattern.fullmatch(server_name.lower())
        if match is None or int(match[1]) > MAX_NODE_ID:
            return None
        node_id = int(match[1])
        return node_id if self._template.format(id=node_id) == match[0] else None


class Routes:
    """The map of one cluster. `listen_port` is the bound port of its bootstrap listener."""

    def __init__(self, cluster: Cluster, listen_port: int) -> None:
        self.upstreams: dict[int, Address] = {}
        self._route = cluster.route
        self._listen_port = listen_port
        self._base = cluster.broker_port_base or listen_port + 1
        self._declared = cluster.brokers
        entry = cluster.any_brokers
        self._shift = 0  # from a port that is assigned to what {port} becomes
        if entry is not None and entry.port is not None and entry.advertise_port is not None:
            self._shift = entry.advertise_port - entry.port
        self.assigned: Mapping[int, int] = {}  # node id -> port, of ids that nobody has declared
        host, _, port = cluster.advertised.rpartition(":")
        self._host_template = host.strip("[]")
        self._port_template = port
        for entry in cluster.brokers:
            if entry.upstream is not None:
                host, _, port = entry.upstream.rpartition(":")
                for node_id in entry.declared:
                    self.upstreams[node_id] = Address(host.strip("[]").format(id=node_id), int(port.format(id=node_id)))

    def declared(self) -> Iterator[int]:
        """The node ids whose ports are to be bound before the cluster has named its own."""
        for entry in self._declared:
            yield from entry.declared

    def is_declared(self, node_id: int) -> bool:
        """Whether an entry of [[cluster.brokers]] names that id."""
        return any(node_id in entry.declared for entry in self._declared)

    def port_of(self, node_id: int) -> BrokerPort | None:
        """The port that stands for a node id; None where there is none (not declared, or beyond the last port)."""
        if self._route == "sidecar":
            return BrokerPort(self._listen_port, self._listen_port)
        if node_id < 0:
            return None
        if self._route == "sni":
            return BrokerPort(self._listen_port, self._listen_port)
        if not self._declared:
            port = self._base + node_id
            return BrokerPort(port, port) if port <= MAX_PORT else None
        if node_id in self.assigned:
            port = self.assigned[node_id]
            return BrokerPort(port, port + self._shift)
        for entry in self._declared:
            if node_id in entry.declared and entry.port is not None:
                offset = node_id - entry.declared.start
                return BrokerPort(entry.port + offset, (entry.advertise_port or entry.port) + offset)
        return None

    def advertised(self, node_id: int, host: str) -> Address:
        """The address that clients get instead of a broker's own; never that, even where there is no port for it."""
        port_of = self.port_of(node_id)
        values = {"id": node_id, "host": host, "port": port_of.advertise if port_of else NO_PORT}
        port = int(self._port_template.format(**values)) if port_of else NO_PORT
        return Address(self._host_template.format(**values), port if port <= MAX_PORT else NO_PORT)

    def learn(self, node_id: int, address: Address) -> str:
        """Take in where a broker says it is. Returns why that address is refused, or nothing.

        Refused are the address that clients get for it, since kproxy would dial itself, and what cannot be a host name.
        """
        if self._route == "sidecar" or self.port_of(node_id) is None:
            return ""  # nothing that we would ever dial
        length = len(address.host.encode(errors="replace"))
        if length > MAX_HOST:
            self.upstreams.pop(node_id, None)
            return f"has a host of {length} bytes, which begins {address.host[:32]!r}: a name has at most {MAX_HOST}"
        if address == self.advertised(node_id, address.host):
            return f"says it is at {address}, which is kproxy: its advertised.listeners must name itself"
        self.upstreams[node_id] = address
        return ""
