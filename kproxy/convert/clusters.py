"""The clusters of captures' connections, from responses in the captures to the files of tables: `capture.clusters`.

Duty: reads the responses that name brokers and the cluster id, and the requests to controllers of KRaft that have the
cluster id; writes the clusters into the tables. Memory: MAX_ADDRESSES responses; a number and a name for each
connection. Does not read captures.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kproxy.capture.clusters import (
    BROKER,
    CONNECTED,
    CONTROLLER_REQUESTS,
    MAX_ADDRESSES,
    Address,
    Clusters,
    Known,
    Labels,
    accepted_cluster_id,
    of_connections,
)
from kproxy.convert.kept_frames import KEPT_FRAMES
from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import DESCRIBE_CLUSTER, METADATA
from kproxy.tables import writer
from kproxy.tables.arrays import listed
from kproxy.tables.names import address_of
from kproxy.tables.schema import I64, TEXT, Table

_READ = ["source", "connection", "api_key", "api_version", "broker_address", "broker_port", "request", "response"]
_RESPONSES = (METADATA, DESCRIBE_CLUSTER)


class Answer(NamedTuple):
    """An exchange that names brokers or the cluster: broker's address, node ids by address, cluster id, connection."""

    at: Address
    brokers: dict[Address, int]
    cluster_id: str | None
    connection: int


def clusters_in(runs: Sequence[Path]) -> Clusters:
    """Return the clusters that the exchanges of all captures show. runs: sorted runs of KEPT_FRAMES."""
    clusters = Clusters()
    for learned in answers(writer.merged(KEPT_FRAMES, list(runs))):
        clusters.learn(*learned)
    return clusters


def answers(parts: Iterable[pa.Table]) -> Iterator[Answer]:
    """Yield the answers in rows of KEPT_FRAMES; a repeated answer once for each connection, without brokers."""
    decoded: dict[
        tuple[str, str, int, int], str | None
    ] = {}  # cluster id by hash: most responses repeat an earlier one
    yielded: set[tuple[str, int, str | None]] = set()
    for part in parts:
        keys = listed(part["api_key"].type, [*_RESPONSES, *CONTROLLER_REQUESTS])
        for row in part.select(_READ).filter(pc.is_in(part["api_key"], value_set=keys)).to_pylist():
            at = row["source"], row["broker_address"], row["broker_port"]
            alike_as = (*at, hash((row["response"] or b"")[8:]))  # after the size and the correlation id
            brokers: dict[Address, int] = {}
            if row["api_key"] in CONTROLLER_REQUESTS:
                key_and_version = row["api_key"], row["api_version"]
                cluster_id = accepted_cluster_id(*key_and_version, row["request"], row["response"])
                if not cluster_id:
                    continue
            elif alike_as in decoded:
                cluster_id = decoded[alike_as]
            elif (answer := _answer(row)) is not None:
                brokers, cluster_id = answer
                if len(decoded) < MAX_ADDRESSES:
                    decoded[alike_as] = cluster_id
            else:
                continue
            of_connection = (row["source"], row["connection"], cluster_id)
            if brokers or of_connection not in yielded:
                if len(yielded) < MAX_ADDRESSES:
                    yielded.add(of_connection)
                yield Answer(at, brokers, cluster_id, row["connection"])


def _answer(row: Mapping[str, Any]) -> tuple[dict[Address, int], str | None] | None:
    """Return (node ids of brokers by address, cluster id) of a response; None if it does not decode."""
    if row["response"] is None:
        return None
    try:
        _, body = codec.decode_response(memoryview(row["response"])[4:], row["api_key"], row["api_version"])
    except ProtocolError:
        return None
    key = "nodeId" if row["api_key"] == METADATA else "brokerId"
    source = row["source"]
    brokers = {(source, address_of(each["host"]) or each["host"], each["port"]): each[key] for each in body["brokers"]}
    return brokers, body.get("clusterId")


def of_file(source: str, known: Known, connections: Path, exchanges: Path | None, *, alone: bool = False) -> Labels:
    """Return `of_connections`, from files of the tables `connections` and `exchanges`."""
    rows = pq.read_table(connections, columns=CONNECTED).to_pylist()
    clients = _clients(exchanges) if exchanges is not None else ()
    return of_connections(source, known, rows, clients, alone=alone)


def answering(connections: Path) -> Iterator[tuple[str, int]]:
    """Yield the address and port of the brokers that sent bytes, for each connection in a file of `connections`."""
    with pq.ParquetFile(connections) as file:
        for batch in file.iter_batches(columns=[*BROKER, "broker_bytes"]):
            for row in batch.to_pylist():
                if row["broker_bytes"]:
                    yield row["broker_address"], row["broker_port"]


def _clients(exchanges: Path) -> Iterator[tuple[int, str]]:
    """Yield the distinct pairs (connection, client id) of a file."""
    pairs: dict[tuple[int, str], None] = {}
    with pq.ParquetFile(exchanges) as file:
        for batch in file.iter_batches(columns=["connection", "client_id"]):
            distinct = pa.Table.from_batches([batch]).group_by(["connection", "client_id"]).aggregate([])
            numbers, clients = distinct["connection"].to_pylist(), distinct["client_id"].to_pylist()
            pairs.update(dict.fromkeys((n, c) for n, c in zip(numbers, clients, strict=True) if c is not None))
    yield from pairs


def with_clusters(rows: pa.Table, labels: Mapping[str, Labels]) -> pa.Table:
    """Return rows with the clusters of their connections. labels: by source."""
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
        parts = (with_clusters(pa.Table.from_batches([batch]), labels) for batch in rows.iter_batches())
        writer.store(table, parts, fresh)
    fresh.replace(file)
