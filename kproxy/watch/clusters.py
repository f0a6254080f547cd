"""The clusters that brokers' responses show while `kproxy watch` runs, by the rules of `capture.clusters`.

Duty: keep the addresses in responses, and name the cluster of an address or of a connection. As long as only one
cluster is known, it has the name from the settings. A name is never withdrawn: if a later response makes an address
ambiguous, connections with a name keep it, and others get one by a response of their own.

Bounded by MAX_ADDRESSES and MAX_CLUSTERS: further clusters keep the name from the settings. Refuses to know metrics,
tables and packets.
"""

from collections.abc import Iterable, Mapping

from kproxy.addresses import numeric
from kproxy.capture.clusters import Address, Clusters, Known, of_connections
from kproxy.wire.connection import ConnectionInfo

MAX_ADDRESSES = 4096  # of brokers
MAX_CLUSTERS = 16  # clusters with a name; each has series of metrics
MAX_ID = 256  # characters of a cluster id

_HERE = ""  # the source of every address: one kproxy observes one network


class LiveClusters:
    """`names`: the clusters' names, in the order of their discovery; empty while there is only one cluster."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.nameless = 0  # clusters without a name: at addresses of another one, or beyond MAX_CLUSTERS
        self._clusters = Clusters(MAX_ADDRESSES)
        self._known = Known()

    def learn(
        self,
        info: ConnectionInfo,
        brokers: Mapping[tuple[str, int], int],
        cluster_id: str | None,
        number: int | None = None,
    ) -> bool:
        """Apply the brokers in an answer to a connection; returns whether names of clusters have changed.

        brokers: node ids by (host, port). number: of the connection.
        """
        at = (_HERE, info.broker_address, info.broker_port)
        named: dict[Address, int] = {(_HERE, _address(host), port): node for (host, port), node in brokers.items()}
        if not self._clusters.learn(at, named, cluster_id and cluster_id[:MAX_ID], number):
            return False
        known = self._clusters.labels()
        names = dict.fromkeys((*self.names, *known.of_addresses.values(), *known.of_connections.values()))
        self.names = list(names)[:MAX_CLUSTERS]
        self.nameless = self._clusters.nameless(_HERE, names) + len(names) - len(self.names)
        before, given = self._known, set(self.names)
        self._known = Known(
            {address: name for address, name in known.of_addresses.items() if name in given} or before.of_addresses,
            {connection: name for connection, name in known.of_connections.items() if name in given},
        )
        return self._known != before or self.nameless > 0

    def forget(self, number: int) -> None:
        """Drop the answers of a connection that has ended."""
        self._clusters.forget(_HERE, number)

    def at(self, info: ConnectionInfo, number: int | None = None) -> str | None:
        """Return the name of the cluster of a connection's answers or broker address; None if no answer shows it."""
        if number is not None and (name := self._known.of_connections.get((_HERE, number))):
            return name
        return self._known.of_addresses.get((_HERE, info.broker_address, info.broker_port))

    def of(self, connections: Iterable[tuple[int, ConnectionInfo, str | None]]) -> dict[int, str]:
        """Return connection number -> cluster, as far as known. connections: (number, info, client id)."""
        given = list(connections)
        rows = [
            {
                "connection": number,
                "client_address": info.client_address,
                "broker_address": info.broker_address,
                "broker_port": info.broker_port,
            }
            for number, info, _ in given
        ]
        clients = [(number, client_id) for number, _, client_id in given if client_id is not None]
        return of_connections(_HERE, self._known, rows, clients)


def _address(host: str) -> str:
    """Return an IP address in the notation of connections; a name unchanged."""
    return str(numeric(host) or host)
