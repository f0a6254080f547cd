"""The cluster of each connection, if the captures of an ingest show several clusters: `capture.clusters`, on Spark.

Duty: tasks read the brokers' responses that name brokers and the cluster id, and the driver joins them, as `kproxy
convert` does. A single cluster needs no further step. Memory of the driver: MAX_ADDRESSES addresses, and a number and a
name for each connection if there are several clusters. Does not decode connections, and does not write tables.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from kproxy.capture.clusters import BROKER, CONNECTED, Clusters, Earlier, Labels, note, of_connections
from kproxy.capture.quality import Quality
from kproxy.convert.clusters import answers
from kproxy.convert.kept_frames import KEPT_FRAMES
from kproxy.convert.parts.joining import Correction, corrected
from kproxy.spark.tasks.pieces import INSIGHT, PIECE_ROWS
from kproxy.tables import arrays, schema
from kproxy.tables.schema import TEXT, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def separate_clusters(
    pieces: "DataFrame",
    rows: "Callable[[Table], DataFrame]",
    earlier: Earlier,
    corrections: Mapping[str, Sequence[Correction]],
) -> tuple[dict[str, Labels], dict[str, Quality], list[dict[str, Any]]]:
    """Return (clusters of connections, counts for `quality`, clusters for the manifest), the first two by source.

    The first is empty if there is only one cluster. pieces: the pieces of an ingest. rows: returns the rows of a table
    in those pieces. earlier: the clusters of the existing tables, with `append`. corrections: by source.
    """
    current = _clusters_in(pieces, [each for of_source in corrections.values() for each in of_source])
    names = earlier.labels(current)
    known = earlier.manifest(current, names)
    of_this_run = current.labels().labels
    counts: dict[str, Quality] = {}
    for source in current.sources:
        current.note_nameless(quality := Quality(), source, of_this_run)
        if list(quality):
            counts[source] = quality
    if not names:
        brokers = _by_source(rows(schema.CONNECTIONS).where("broker_bytes > 0").select("source", *BROKER).distinct())
        for source, of_source in brokers.items():
            addresses = [(row["broker_address"], row["broker_port"]) for row in of_source]
            current.note_not_shown(quality := counts.get(source, Quality()), source, addresses)
            if list(quality):
                counts[source] = quality
        return {}, counts, known
    connections = _by_source(rows(schema.CONNECTIONS).select("source", *CONNECTED))
    exchanges = rows(schema.EXCHANGES).where("client_id is not null")
    clients = _by_source(exchanges.select("source", "connection", "client_id").distinct())
    labels: dict[str, Labels] = {}
    for source, of_source in connections.items():
        pairs = [(row["connection"], row["client_id"]) for row in clients.get(source, ())]
        labels[source] = of_connections(source, names, of_source, pairs, alone=earlier.is_given_taken)
        note(counts.setdefault(source, Quality()), labels[source], len(of_source))
    return labels, counts, known


def _clusters_in(pieces: "DataFrame", corrections: Sequence[Correction]) -> Clusters:
    """Return the clusters that the responses of all captures name."""
    from pyspark.sql import functions as F

    clusters = Clusters()
    inputs = pieces.where(F.col("kind") == INSIGHT + KEPT_FRAMES.name).select("data")
    for row in inputs.mapInArrow(_task(corrections), "answer string").collect():
        at, brokers, cluster_id, connection = json.loads(row["answer"])
        clusters.learn(tuple(at), {tuple(address): node for address, node in brokers}, cluster_id, connection)
    return clusters


def _task(corrections: Sequence[Correction]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in batches:
            for data in batch.column("data").to_pylist():
                if data:
                    with pq.ParquetFile(pa.BufferReader(data)) as file:
                        for some in file.iter_batches(PIECE_ROWS):
                            yield pa.Table.from_batches([corrected(corrections, some)])

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [
            json.dumps([each.at, list(each.brokers.items()), each.cluster_id, each.connection])
            for each in answers(parts(batches))
        ]
        yield pa.RecordBatch.from_arrays([arrays.listed(TEXT, found)], ["answer"])

    return run


def _by_source(rows: "DataFrame") -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows.toArrow().to_pylist():
        found.setdefault(row.pop("source"), []).append(row)
    return found
