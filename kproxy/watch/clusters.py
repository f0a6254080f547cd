"""The clusters that brokers' answers reveal while `kproxy watch` runs, by the rule of `capture.clusters`.

Duty: keep the addresses in answers, and name the cluster of an address or of a connection. While only one cluster is
known, there are no names: everything has the name from the settings. A name is never withdrawn: if a later answer makes
an address ambiguous, connections with a name keep it.

Bounded by MAX_ADDRESSES and MAX_CLUSTERS: further clusters keep the name from the settings. Refuses to know metrics,
tables and packets.
"""

from collections.abc import Iterable, Mapping

from kproxy.addresses import numeric
from kproxy.capture.clusters import Address, Clusters, of_connections
from kproxy.wire.connection import ConnectionInfo

MAX_ADDRESSES = 4096  # of brokers
MAX_CLUSTERS = 16  # clusters with a name; each has series of metrics
MAX_ID = 256  # characters of a cluster id

_HERE = ""  # the source of every address: one kproxy observes one network


class LiveClusters:
    """`names`: of the clusters, in the order of their discovery; empty while there is only one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.nameless = 0  # clusters without a name: at addresses of another one, or beyond MAX_CLUSTERS
        self._clusters = Clusters(MAX_ADDRESSES)
        self._of_addresses: dict[Address, str] = {}

    def learn(self, info: ConnectionInfo, brokers: Mapping[tuple[str, int], int], cluster_id: str | None) -> bool:
        """Apply the brokers in an answer, node ids by (host, port); returns whether names of clusters have changed."""
        at = (_HERE, info.broker_address, info.broker_port)
        named: dict[Address, int] = {(_HERE, _address(host), port): node for (host, port), node in brokers.items()}
        if not self._clusters.learn(at, named, cluster_id and cluster_id[:MAX_ID]):
            return False
        labels = self._clusters.labels()
        known = dict.fromkeys((*self.names, *labels.values()))
        self.names = list(known)[:MAX_CLUSTERS]
        self.nameless = self._clusters.nameless(_HERE, labels) + len(known) - len(self.names)
        of_addresses = {address: label for address, label in labels.items() if label in self.names}
        is_changed = of_addresses != self._of_addresses
        if of_addresses:
            self._of_addresses = of_addresses
        return is_changed or self.nameless > 0

    def at(self, info: ConnectionInfo) -> str | None:
        """Return the name of the cluster at a connection's broker address; None if no answer shows it."""
        return self._of_addresses.get((_HERE, info.broker_address, info.broker_port))

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
        return of_connections(_HERE, self._of_addresses, rows, clients)


def _address(host: str) -> str:
    """Return an IP address in the notation of connections; a name unchanged."""
    return str(numeric(host) or host)
