"""The cluster of each connection, if packets show more than one, as on the host of a MirrorMaker.

Duty: brokers' answers about themselves (Metadata, DescribeCluster) show which addresses belong to one cluster: those
with one cluster id, and before Kafka 0.10.1, which has none, those that name each other. If no answer names the address
of a connection, since brokers advertise host names, it belongs to the cluster that its client, by address and client
id, uses in other connections. With a single cluster, the column `cluster` has the name that was given.

An address belongs to one cluster in one capture: in another one it may belong to another. An address that two clusters
advertise belongs to neither, as after a cluster was built anew: then the answers on a connection show its cluster. Two
sets of brokers without cluster ids are two clusters if no node id is in both: the listeners of one cluster have the
same ids. Clusters of earlier runs, to whose tables captures are added, count as those of other captures (`Earlier`).
Memory: `max_addresses` addresses, and as many connections with an answer; a number and a name for each connection.
Refuses to know where answers come from.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kproxy.capture.connections.flow import spelled
from kproxy.capture.quality import Quality
from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import BEGIN_QUORUM_EPOCH, BROKER_REGISTRATION, END_QUORUM_EPOCH, VOTE

MAX_ADDRESSES = 65_536
BROKER = ["broker_address", "broker_port"]
CONNECTED = ["connection", "client_address", *BROKER]
# Requests to controllers with a cluster id, which these compare with their own (INCONSISTENT_CLUSTER_ID).
CONTROLLER_REQUESTS = (VOTE, BEGIN_QUORUM_EPOCH, END_QUORUM_EPOCH, BROKER_REGISTRATION)

Address = tuple[str, str, int]  # source, IP address or name, port
Labels = Mapping[int, str]  # clusters by connection, those of the name that was given left out
Connection = tuple[str, int]  # source, number


@dataclass(frozen=True)
class Known:
    """The clusters of addresses, and of connections to an address of several clusters. False: all are one cluster."""

    of_addresses: Mapping[Address, str] = field(default_factory=dict)
    of_connections: Mapping[Connection, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.of_addresses or self.of_connections)

    @property
    def labels(self) -> set[str]:
        return {*self.of_addresses.values(), *self.of_connections.values()}

    def renamed(self, names: Mapping[str, str]) -> "Known":
        """Return the same with other names for some labels."""
        return Known(
            {address: names.get(label, label) for address, label in self.of_addresses.items()},
            {connection: names.get(label, label) for connection, label in self.of_connections.items()},
        )


class Clusters:
    """Clusters and addresses in answers."""

    def __init__(self, max_addresses: int = MAX_ADDRESSES) -> None:
        self._max_addresses = max_addresses
        self._ids: dict[Address, set[str]] = {}  # cluster ids of each address
        # broker's address and cluster ids in the answers of each connection
        self._answered: dict[Connection, tuple[Address, set[str]]] = {}
        # by broker that answered without a cluster id: node ids of brokers
        self._named: dict[Address, dict[Address, int]] = {}
        self._earlier: dict[str, Collection[int]] = {}  # see `known`
        self._naming: set[str] = set()  # captures with answers that name brokers

    def learn(
        self,
        at: Address,
        brokers: Mapping[Address, int],
        cluster_id: str | None,
        connection: int | None = None,
    ) -> bool:
        """Apply an answer of the broker at an address; return whether it adds anything to former ones."""
        if brokers:
            self._naming.add(at[0])
        is_new = cluster_id is not None and connection is not None and self._answer(at, connection, cluster_id)
        if len(self._ids) + len(self._named) + len(brokers) > self._max_addresses:
            return is_new
        if cluster_id:
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

    def _answer(self, at: Address, connection: int, cluster_id: str) -> bool:
        """Keep the cluster id of a connection's answer; return whether it matters now: its address has several."""
        key = (at[0], connection)
        if key not in self._answered and len(self._answered) >= self._max_addresses:
            return False
        ids = self._answered.setdefault(key, (at, set()))[1]
        if cluster_id in ids:
            return False
        ids.add(cluster_id)
        return len(self._ids.get(at, ())) > 1

    def forget(self, source: str, connection: int) -> None:
        """Drop the answers of a connection that has ended."""
        self._answered.pop((source, connection), None)

    def add_earlier(self, nodes: Mapping[str, Collection[int]]) -> None:
        """Clusters of earlier runs, as `known` returned them."""
        self._earlier = dict(nodes)

    def known(self) -> dict[str, list[int]]:
        """The clusters of all addresses: for each the node ids of brokers that have no cluster id."""
        nodes: dict[str, list[int]] = {label: [] for label in self.all().labels}
        of_sets = self._nodes_of_sets()
        return {label: sorted(of_sets.get(label, ())) for label in sorted(nodes)}

    def labels(self) -> Known:
        """The clusters, where there are several, those of earlier runs included."""
        found = self.all()
        return found if len({*found.labels, *self._earlier}) > 1 else Known()

    def all(self) -> Known:
        """The clusters, even if there is only one."""
        return Known(self._by_address(), self._by_connection())

    def _by_connection(self) -> dict[Connection, str]:
        """The cluster of each connection to an address of several clusters, by its own answers."""
        return {
            connection: next(iter(ids))
            for connection, (at, ids) in self._answered.items()
            if len(ids) == 1 and len(self._ids.get(at, ())) > 1
        }

    def _by_address(self) -> dict[Address, str]:
        """The cluster of each address, even if there is only one."""
        found = {address: next(iter(ids)) for address, ids in self._ids.items() if len(ids) == 1}
        has_ids = bool(self._ids) or not all(self._earlier.values())
        of_sets = Counter(node for nodes in (self._earlier | self._nodes_of_sets()).values() for node in nodes)
        for addresses, nodes in self._sets():
            known = {found[address] for address in addresses if address in found}
            if len(known) == 1:
                label = known.pop()
            elif not known and not has_ids and all(of_sets[node] == 1 for node in nodes):
                label = _label(addresses)
            else:
                continue
            found.update(dict.fromkeys(addresses, label))
        return found

    @property
    def sources(self) -> set[str]:
        """The captures with answers that show a cluster."""
        return {source for source, _, _ in (*self._ids, *self._named)}

    def nameless(self, source: str, labels: Collection[str]) -> int:
        """How many clusters of a source have one name with another one, since nothing is theirs alone."""
        ids = {each for address, ids in self._ids.items() if address[0] == source for each in ids}
        return max(0, len(ids.difference(labels)) - (not labels))

    def note_nameless(self, quality: Quality, source: str, labels: Collection[str]) -> None:
        """Count a source's clusters that have one name with another one, and brokers that may be of several."""
        if count := self.nameless(source, labels):
            quality.note("clusters_as_one", count=count)
        if count := self._unclear(source):
            quality.note("clusters_unclear", count=count)

    def note_not_shown(self, quality: Quality, source: str, brokers: Iterable[tuple[str, int]]) -> None:
        """Count the brokers of a source, by address and port, if no response shows whether they are one cluster."""
        count = len(set(brokers))
        if count > 1 and source not in self._naming:
            quality.note("clusters_not_shown", count=count)

    def _unclear(self, source: str) -> int:
        """How many sets of a source's brokers without cluster ids have a node id with another one in common."""
        sets = [
            nodes
            for addresses, nodes in self._sets()
            if any(each[0] == source for each in addresses) and addresses.isdisjoint(self._ids)
        ]
        of_sets = Counter(node for nodes in sets for node in nodes)
        return sum(any(of_sets[node] > 1 for node in nodes) for nodes in sets)

    def _nodes_of_sets(self) -> dict[str, set[int]]:
        """Node ids by label: brokers at the same addresses in two captures are one cluster."""
        found: dict[str, set[int]] = {}
        for addresses, nodes in self._sets():
            found.setdefault(_label(addresses), set()).update(nodes)
        return found

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


def accepted_cluster_id(key: int, version: int, request: bytes, response: bytes | None) -> str | None:
    """Return the cluster id of a request of CONTROLLER_REQUESTS that was answered without an error, else None.

    request, response: frames with their size.
    """
    if response is None:
        return None
    try:
        _, asked = codec.decode_request(memoryview(request)[4:])
        _, answered = codec.decode_response(memoryview(response)[4:], key, version)
    except ProtocolError:
        return None
    return None if answered["errorCode"] else asked["clusterId"]


def _label(addresses: Iterable[Address]) -> str:
    """The label of a cluster without id: its first address."""
    _, host, port = min(addresses)
    return spelled((host, port))


def of_connections(
    source: str,
    clusters: Known,
    connections: Iterable[Mapping[str, Any]],
    clients: Iterable[tuple[int, str]],
    *,
    alone: bool = False,
) -> dict[int, str]:
    """The clusters of one capture's connections.

    connections: rows with the columns CONNECTED; clients: (connection, client id), read if an address is not enough.
    alone: if all known connections are of one cluster, the others are so too: the given name is another cluster's.
    """
    found: dict[int, str] = {}
    hosts: dict[int, str] = {}  # of clients, by connection
    for row in connections:
        address = (source, row["broker_address"], row["broker_port"])
        label = clusters.of_connections.get((source, row["connection"])) or clusters.of_addresses.get(address)
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
    if alone and len(of_all := set(found.values())) == 1:
        return dict.fromkeys(hosts, of_all.pop())
    return found


class Earlier:
    """The clusters in a dataset's tables, from its manifest; a run that adds captures distinguishes its own from them.

    Earlier tables stay as they are: a cluster keeps the name that it has there, and another cluster with the same given
    name is called by its label.
    """

    def __init__(self, manifest: Mapping[str, Any], given: str) -> None:
        """given: the name of `--cluster`. Clusters with another given name are different clusters."""
        self._given = given
        told = manifest.get("clusters")
        keys = {"given", "label", "name", "nodes"}
        self._told = [each for each in told if keys <= each.keys()] if isinstance(told, list) else []
        mine = [each for each in self._told if each["given"] == given]
        self.names: dict[str, str] = {each["label"]: each["name"] for each in mine}
        self._nodes: dict[str, list[int]] = {each["label"]: each["nodes"] for each in mine}

    @property
    def is_given_taken(self) -> bool:
        """Whether the tables use the given name for a known cluster."""
        return self._given in self.names.values()

    def labels(self, current: Clusters) -> Known:
        """The names of clusters; empty if all have the given name. current: the clusters of this run."""
        current.add_earlier(self._nodes)
        is_named = any(name != self._given for name in self.names.values())  # even if this run shows only one
        return (current.all() if is_named else current.labels()).renamed(self.names)

    def manifest(self, current: Clusters, labels: Known) -> list[dict[str, Any]]:
        """Return the manifest's entries for all clusters. labels: as `labels` returned them."""
        fresh = [
            {"given": self._given, "label": label, "name": label if labels else self._given, "nodes": nodes}
            for label, nodes in current.known().items()
            if label not in self.names
        ]
        return self._told + fresh


def note(quality: Quality, labels: Labels, connections: int) -> None:
    """Count the clusters of a capture that has so many connections, and connections that are of no known one."""
    if labels:
        quality.note("clusters", count=len(set(labels.values())))
    if len(labels) < connections:
        quality.note("cluster_unknown", count=connections - len(labels))
