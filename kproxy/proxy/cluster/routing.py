"""The port of kproxy for each broker, the address that clients get for it, and each broker's own address. Pure.

The map from node id to port depends only on the configuration and the id, so that replicas agree without communicating
and a restart changes nothing; except for `ids = "any"`, whose ports are assigned as ids appear (`port_assignment`).
New connections go to the upstream address of the node id in the latest answer. A broker that has disappeared keeps its
port. Refuses to know sockets, names and frames.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from kproxy.proxy.config.addresses import MAX_PORT, Address
from kproxy.proxy.config.settings import Cluster

NO_PORT = 0  # advertised if kproxy has no port for a node id: nothing ever listens on port 0
MAX_NODE_ID = (1 << 31) - 1
MAX_HOST = 255  # bytes of a host name (RFC 1035)


class BrokerPort(NamedTuple):
    """The port that represents a broker."""

    bind: int
    advertise: int  # the value of {port}


class ServerNames:
    """The broker that a server name (SNI) selects, if all brokers share one port."""

    def __init__(self, template: str, bootstrap: Collection[str] = ()) -> None:
        self._template = template
        before, _, rest = template.partition("{")
        after = rest.partition("}")[2]
        self._pattern = re.compile(rf"{re.escape(before)}([0-9]{{1,10}}){re.escape(after)}", re.ASCII)
        self._bootstrap = frozenset(bootstrap) or {f"bootstrap.{template.partition('.')[2]}"}

    def serves(self, server_name: str) -> bool:
        """Whether it is a broker's name, or a bootstrap name."""
        return server_name.lower() in self._bootstrap or self.node_id(server_name) is not None

    def node_id(self, server_name: str) -> int | None:
        """Return the broker's node id; None for a bootstrap name or an unknown one."""
        match = self._pattern.fullmatch(server_name.lower())
        if match is None or int(match[1]) > MAX_NODE_ID:
            return None
        node_id = int(match[1])
        return node_id if self._template.format(id=node_id) == match[0] else None


class Routes:
    """The routes of one cluster. `listen_port` is the bound port of its bootstrap listener."""

    def __init__(self, cluster: Cluster, listen_port: int) -> None:
        self.upstreams: dict[int, Address] = {}
        self._route = cluster.route
        self._listen_port = listen_port
        self._base = cluster.broker_port_base or listen_port + 1
        self._declared = cluster.brokers
        entry = cluster.any_brokers
        self._shift = 0  # the value of {port} minus the assigned port
        if entry is not None and entry.port is not None and entry.advertise_port is not None:
            self._shift = entry.advertise_port - entry.port
        self.assigned: Mapping[int, int] = {}  # node id -> port, of ids that are not declared
        host, _, port = cluster.advertised.rpartition(":")
        self._host_template = host.strip("[]")
        self._port_template = port
        for entry in cluster.brokers:
            if entry.upstream is not None:
                host, _, port = entry.upstream.rpartition(":")
                for node_id in entry.declared:
                    self.upstreams[node_id] = Address(host.strip("[]").format(id=node_id), int(port.format(id=node_id)))

    def declared(self) -> Iterator[int]:
        """Yield the node ids whose ports are bound before the cluster has named its brokers."""
        for entry in self._declared:
            yield from entry.declared

    def is_declared(self, node_id: int) -> bool:
        """Whether an entry of [[cluster.brokers]] contains that id."""
        return any(node_id in entry.declared for entry in self._declared)

    def port_of(self, node_id: int) -> BrokerPort | None:
        """Return the port that represents a node id; None if it has none (not declared, or beyond the last port)."""
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
        """Return the address that clients get for a broker; never the broker's own, even if it has no port here."""
        port_of = self.port_of(node_id)
        values = {"id": node_id, "host": host, "port": port_of.advertise if port_of else NO_PORT}
        port = int(self._port_template.format(**values)) if port_of else NO_PORT
        return Address(self._host_template.format(**values), port if port <= MAX_PORT else NO_PORT)

    def learn(self, node_id: int, address: Address) -> str:
        """Apply the address that a broker advertises. Returns why it is refused, or "".

        It refuses the address that clients get for this broker, since kproxy would dial itself, and invalid host names.
        """
        if self._route == "sidecar" or self.port_of(node_id) is None:
            return ""  # kproxy never dials it
        length = len(address.host.encode(errors="replace"))
        if length > MAX_HOST:
            self.upstreams.pop(node_id, None)
            return f"has a host of {length} bytes, which begins {address.host[:32]!r}: a name has at most {MAX_HOST}"
        if address == self.advertised(node_id, address.host):
            return f"says it is at {address}, which is kproxy: its advertised.listeners must name itself"
        self.upstreams[node_id] = address
        return ""
