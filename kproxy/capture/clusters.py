"""The cluster of each connection, if packets show more than one, as on the host of a MirrorMaker.

Duty: brokers' answers about themselves (Metadata, DescribeCluster) show which addresses belong to one cluster: those
with one cluster id, and before Kafka 0.10.1, which has none, those that name each other. If no answer names the address
of a connection, since brokers advertise host names, it belongs to the cluster that its client, by address and client
id, uses in other connections. With a single cluster, the column `cluster` has the name that was given.

An address belongs to one cluster in one capture: in another one it may belong to another. An address that two clusters
advertise belongs to neither. Two sets of brokers without cluster ids are two clusters if no node id is in both: the
listeners of one cluster have the same ids. Memory: `max_addresses`; a number and a name for each connection. Refuses to
know where answers come from.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kproxy.capture.flow import spelled
from kproxy.capture.quality import Quality

MAX_ADDRESSES = 65_536
CONNECTED = ["connection", "client_address", "broker_address", "broker_port"]

Address = tuple[str, str, int]  # source, IP address or name, port
Labels = Mapping[int, str]  # clusters by connection, those of the name that was given left out


class Clusters:
    """Clusters and addresses in answers."""

    def __init__(self, max_addresses: int = MAX_ADDRESSES) -> None:
        self._max_addresses = max_addresses
        self._ids: dict[Address, set[str]] = {}  # cluster ids of each address
        # by broker that answered without a cluster id: node ids of brokers
        self._named: dict[Address, dict[Address, int]] = {}

    def learn(self, at: Address, brokers: Mapping[Address, int], cluster_id: str | None) -> bool:
        """An answer of the broker at an address; returns whether it adds anything to former ones."""
        if len(self._ids) + len(self._named) + len(brokers) > self._max_addresses:
            return False
        if cluster_id:
            is_new = False
            for address in (at, *brokers):
                ids = self._ids.setdefault(address, set())
                if cluster_id not in ids:
                    ids.add(cluster_id)
                    is_new = True
            return is_new
        named = self._named.setdefault(at, {})
        if brokers.items() <= named.items():
            return False
        named.update(brokers)
        return True

    def labels(self) -> dict[Address, str]:
        """The cluster of each address, where there are several clusters."""
        found = {address: next(iter(ids)) for address, ids in self._ids.items() if len(ids) == 1}
        sets = self._sets()
        of_sets = Counter(node for _, nodes in sets for node in nodes)
        for addresses, nodes in sets:
            known = {found[address] for address in addresses if address in found}
            if len(known) == 1:
                label = known.pop()
            elif not known and not self._ids and all(of_sets[node] == 1 for node in nodes):
                _, host, port = min(addresses)
                label = spelled((host, port))
            else:
                continue
            found.update(dict.fromkeys(addresses, label))
        return found if len(set(found.values())) > 1 else {}

    @property
    def sources(self) -> set[str]:
        """The captures with a cluster id in answers."""
        return {source for source, _, _ in self._ids}

    def nameless(self, source: str, labels: Mapping[Address, str]) -> int:
        """How many clusters of a source have one name with another one, since they have no address of their own."""
        ids = {each for address, ids in self._ids.items() if address[0] == source for each in ids}
        return max(0, len(ids - set(labels.values())) - (not labels))

    def note_nameless(self, quality: Quality, source: str, labels: Mapping[Address, str]) -> None:
        """Count a source's clusters that have one name with another one."""
        if count := self.nameless(source, labels):
            quality.note("clusters_as_one", count=count)

    def _sets(self) -> list[tuple[set[Address], set[int]]]:
        """(addresses, node ids) of brokers without cluster ids that name each other."""
        sets: dict[int, tuple[set[Address], set[int]]] = {}
        place: dict[Address, int] = {}  # of each address in `sets`
        for number, (at, brokers) in enumerate(self._named.items()):
            addresses, nodes = {at, *brokers}, set(brokers.values())
            joined = {place[address] for address in addresses if address in place}
            into = max(joined, key=lambda n: len(sets[n][0]), default=number)  # the largest: each address moves seldom
            mine = sets.setdefault(into, (set(), set()))
            for other in joined - {into}:
                others, their_nodes = sets.pop(other)
                addresses |= others
                nodes |= their_nodes
            mine[0].update(addresses)
            mine[1].update(nodes)
            place.update(dict.fromkeys(addresses, into))
        return list(sets.values())


def of_connections(
    source: str,
    of_addresses: Mapping[Address, str],
    connections: Iterable[Mapping[str, Any]],
    clients: Iterable[tuple[int, str]],
) -> dict[int, str]:
    """The clusters of one capture's connections.

    connections: rows with the columns CONNECTED; clients: (connection, client id), read if an address is not enough.
    """
    found: dict[int, str] = {}
    hosts: dict[int, str] = {}  # of clients, by connection
    for row in connections:
        label = of_addresses.get((source, row["broker_address"], row["broker_port"]))
        if label is not None:
            found[row["connection"]] = label
        hosts[row["connection"]] = row["client_address"]
    if len(found) < len(hosts):
        pairs = [(hosts[number], client, number) for number, client in clients if number in hosts]
        by_client: dict[tuple[str, str], set[str]] = {}
        for host, client, number in pairs:
            if number in found:
                by_client.setdefault((host, client), set()).add(found[number])
        known = dict(found)
        for host, client, number in pairs:
            labels = by_client.get((host, client), set())
            if number not in known and len(labels) == 1:
                found[number] = next(iter(labels))
    return found


def note(quality: Quality, labels: Labels, connections: int) -> None:
    """Count the clusters of a capture that has so many connections, and connections that are of no known one."""
    if labels:
        quality.note("clusters", count=len(set(labels.values())))
    if len(labels) < connections:
        quality.note("cluster_unknown", count=connections - len(labels))
