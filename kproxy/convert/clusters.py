"""Which cluster each connection belongs to, where captures show more than one, as on the host of a MirrorMaker.

Duty: what brokers answer of themselves (Metadata, DescribeCluster) tells which addresses are of one cluster: those with
one cluster id, and before Kafka 0.10.1, which has none, those that name each other. A connection to an address that no
answer names, since brokers advertise names, is of the cluster that its client, by address and client id, has to do with
elsewhere. One cluster needs no telling apart: then the column `cluster` has the name that was given.

An address is one cluster's in one capture: in another one it may be another's. One that two clusters call theirs is
nobody's. Two sets of brokers without cluster ids are two clusters if no node id is in both: those of listeners are the
same. Memory: MAX_ADDRESSES; a number and a name for each connection. Refuses to know how captures are read, and where
files go.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kproxy.capture.flow import spelled
from kproxy.capture.quality import Quality
from kproxy.convert.spoken import SPOKEN
from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import DESCRIBE_CLUSTER, METADATA
from kproxy.tables import writer
from kproxy.tables.arrays import listed
from kproxy.tables.names import address_of
from kproxy.tables.schema import I64, TEXT, Table

MAX_ADDRESSES = 65_536
CONNECTED = ["connection", "client_address", "broker_address", "broker_port"]
_READ = ["source", "api_key", "api_version", "broker_address", "broker_port", "response"]

Address = tuple[str, str, int]  # source, IP address or name, port
Labels = Mapping[int, str]  # clusters by connection, those of the name that was given left out


class Clusters:
    """What answers tell of clusters and addresses."""

    def __init__(self) -> None:
        self._ids: dict[Address, set[str]] = {}  # cluster ids of each address
        self._named: dict[Address, dict[Address, int]] = {}  # by who answered without a cluster id: node ids of brokers

    def learn(self, at: Address, brokers: Mapping[Address, int], cluster_id: str | None) -> None:
        """An answer of the broker at an address."""
        if len(self._ids) + len(self._named) + len(brokers) > MAX_ADDRESSES:
            return
        if cluster_id:
            for address in (at, *brokers):
                self._ids.setdefault(address, set()).add(cluster_id)
        else:
            self._named.setdefault(at, {}).update(brokers)

    def labels(self) -> dict[Address, str]:
        """The cluster of each address, where there are several clusters."""
        found = {address: next(iter(ids)) for address, ids in self._ids.items() if len(ids) == 1}
        sets = list(self._sets())
        nodes_of_others: list[set[int]] = [nodes for _, nodes in sets]
        for index, (addresses, nodes) in enumerate(sets):
            known = {found[address] for address in addresses if address in found}
            others = nodes_of_others[:index] + nodes_of_others[index + 1 :]
            if len(known) == 1:
                label = known.pop()
            elif not known and not self._ids and not any(nodes & other for other in others):
                _, host, port = min(addresses)
                label = spelled((host, port))
            else:
                continue
            found.update(dict.fromkeys(addresses, label))
        return found if len(set(found.values())) > 1 else {}

    def _sets(self) -> Iterator[tuple[set[Address], set[int]]]:
        """(addresses, node ids) of brokers without cluster ids that name each other."""
        joined: list[tuple[set[Address], set[int]]] = []
        for at, brokers in self._named.items():
            addresses, nodes = {at, *brokers}, set(brokers.values())
            apart = []
            for each in joined:
                if each[0] & addresses:
                    addresses |= each[0]
                    nodes |= each[1]
                else:
                    apart.append(each)
            joined = [*apart, (addresses, nodes)]
        yield from joined


def heard(runs: Sequence[Path]) -> Clusters:
    """What the exchanges of all captures tell. runs: sorted runs of SPOKEN."""
    clusters = Clusters()
    for told in answers(writer.merged(SPOKEN, list(runs))):
        clusters.learn(*told)
    return clusters


def answers(parts: Iterable[pa.Table]) -> Iterator[tuple[Address, dict[Address, int], str | None]]:
    """(who answered, node ids of brokers by address, the cluster's id) of rows of SPOKEN, each answer once."""
    alike: set[tuple[str, str, int, int]] = set()  # answers that were read: most say what another one has said
    for part in parts:
        said_so = pc.is_in(part["api_key"], value_set=listed(part["api_key"].type, [METADATA, DESCRIBE_CLUSTER]))
        for said in part.select(_READ).filter(said_so).to_pylist():
            at = said["source"], said["broker_address"], said["broker_port"]
            alike_as = (*at, hash((said["response"] or b"")[8:]))  # behind the size and the correlation id
            if alike_as in alike:
                continue
            if len(alike) < MAX_ADDRESSES:
                alike.add(alike_as)
            answer = _answer(said)
            if answer is not None:
                yield at, *answer


def _answer(said: Mapping[str, Any]) -> tuple[dict[Address, int], str | None] | None:
    """(node ids of brokers by address, the cluster's id) that an answer has."""
    if said["response"] is None:
        return None
    try:
        _, body = codec.decode_response(memoryview(said["response"])[4:], said["api_key"], said["api_version"])
    except ProtocolError:
        return None
    key = "nodeId" if said["api_key"] == METADATA else "brokerId"
    source = said["source"]
    brokers = {(source, address_of(each["host"]) or each["host"], each["port"]): each[key] for each in body["brokers"]}
    return brokers, body.get("clusterId")


def of_connections(
    source: str,
    of_addresses: Mapping[Address, str],
    connections: Iterable[Mapping[str, Any]],
    clients: Iterable[tuple[int, str]],
) -> dict[int, str]:
    """The clusters of one capture's connections.

    connections: rows with the columns CONNECTED; clients: (connection, client id), read if an address tells too little.
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


def of_file(source: str, of_addresses: Mapping[Address, str], connections: Path, exchanges: Path | None) -> Labels:
    """The same, of files of the tables `connections` and `exchanges`."""
    rows = pq.read_table(connections, columns=CONNECTED).to_pylist()
    return of_connections(source, of_addresses, rows, _clients(exchanges) if exchanges is not None else ())


def _clients(exchanges: Path) -> Iterator[tuple[int, str]]:
    """(connection, client id) of each pair."""
    pairs: dict[tuple[int, str], None] = {}
    with pq.ParquetFile(exchanges) as file:
        for batch in file.iter_batches(columns=["connection", "client_id"]):
            distinct = pa.Table.from_batches([batch]).group_by(["connection", "client_id"]).aggregate([])
            numbers, clients = distinct["connection"].to_pylist(), distinct["client_id"].to_pylist()
            pairs.update(dict.fromkeys((n, c) for n, c in zip(numbers, clients, strict=True) if c is not None))
    yield from pairs


def told(rows: pa.Table, labels: Mapping[str, Labels]) -> pa.Table:
    """Rows with the clusters of their connections. labels: by source."""
    if not {"source", "connection", "cluster"}.issubset(rows.schema.names):
        return rows
    place = rows.schema.get_field_index("cluster")
    for source in rows["source"].unique().to_pylist():
        if of_source := labels.get(source):
            keys, values = listed(I64, list(of_source)), listed(TEXT, list(of_source.values()))
            label = values.take(pc.index_in(rows["connection"], value_set=keys))
            theirs = pc.if_else(pc.equal(rows["source"], source), label, None)
            rows = rows.set_column(place, rows.schema.field(place), pc.coalesce(theirs, rows["cluster"]))
    return rows


def relabel(table: Table, file: Path, labels: Mapping[str, Labels]) -> None:
    """Write the clusters of connections into a file of a table. labels: by source."""
    fresh = file.with_suffix(".relabelled")
    with pq.ParquetFile(file) as rows:
        parts = (told(pa.Table.from_batches([batch]), labels) for batch in rows.iter_batches())
        writer.store(table, parts, fresh)
    fresh.replace(file)
