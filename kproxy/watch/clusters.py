"""The clusters that brokers' answers show while `kproxy watch` runs, by the rule of `capture.clusters`.

Duty: keep what answers show, and name the cluster of an address or of a connection. While one cluster is known there
are no names, and everything has the one that was given. A name is never taken back: an answer that makes an address
ambiguous later changes nothing for connections that have a name.

Bounded by MAX_ADDRESSES and MAX_CLUSTERS: clusters beyond those keep the name that was given. Refuses to know metrics,
tables and packets.
"""

from collections.abc import Iterable, Mapping

from kproxy.addresses import numeric
from kproxy.capture.clusters import Address, Clusters, of_connections
from kproxy.wire.connection import ConnectionInfo

MAX_ADDRESSES = 4096  # of brokers
MAX_CLUSTERS = 16  # that have a name; each has series of metrics
MAX_ID = 256  # characters of a cluster id

_HERE = ""  # the source of every address: one kproxy sees one network


class LiveClusters:
    """`names`: of the clusters, in the order in which they became known; none while there is only one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.nameless = 0  # clusters without a name: at addresses of another one, or beyond MAX_CLUSTERS
        self._clusters = Clusters(MAX_ADDRESSES)
        self._of_addresses: dict[Address, str] = {}

    def learn(self, info: ConnectionInfo, brokers: Mapping[tuple[str, int], int], cluster_id: str | None) -> bool:
        """An answer names brokers: node ids by host and port; returns whether clusters have other names by that."""
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
        """The name of the cluster at the address that a connection goes to; None: no answer shows it."""
        return self._of_addresses.get((_HERE, info.broker_address, info.broker_port))

    def of(self, connections: Iterable[tuple[int, ConnectionInfo, str | None]]) -> dict[int, str]:
        """The clusters of some connections by number, as far as they are known, with their client ids."""
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
    """An IP address as connections have it; a name as it is."""
    return str(numeric(host) or host)
