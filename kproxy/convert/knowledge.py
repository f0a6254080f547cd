"""Exchanges of all captures of a cluster -> the tables of insight: shared by `kproxy convert` and Spark.

Duty: merges the exchanges of all captures, which `kept_frames` wrote to the disk, in the order of time, decodes them,
and feeds them to one `Knowledge`; operations on ZooKeeper's tree go to its groups. So a generation that spans two
rotated files is one rebalance. A row has the source of the exchange that completed it. Brokers are identified by
addresses from any response of their capture, topics by ids from any capture, however late.

Memory: `writer.FAN_IN` runs of writer.STEP_BYTES each; the state of `Knowledge`; RUN_ROWS rows of each table. Does not
read captures.
"""

from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from uuid import UUID

import numpy as np
import pyarrow as pa

from kproxy.capture.clusters import Labels
from kproxy.capture.quality import Quality
from kproxy.convert.kept_frames import KEPT_FRAMES
from kproxy.insight import rows as insight_rows
from kproxy.insight.decoded import decode_exchange
from kproxy.insight.knowledge import Knowledge
from kproxy.insight.logs.coordinator_logs import LOGS, Logged
from kproxy.insight.membership.registry_groups import ConsumerGroups
from kproxy.insight.repeats import Repeats
from kproxy.insight.rows import RegistryRow, Row
from kproxy.protocol.apis import FETCH
from kproxy.tables import schema, writer
from kproxy.tables.knowledge import KnowledgeColumns
from kproxy.tables.names import Names
from kproxy.tables.schema import Table

TOGETHER = 4096  # rows


class InsightRows:
    """The rows of insight, sorted on the disk in `folder`, each table by `keys`, then by its own keys."""

    def __init__(self, folder: Path, keys: tuple[str, ...] = (), prefix: str = ".insight") -> None:
        self._columns = KnowledgeColumns()
        self._sorters = {
            table.name: writer.Sorter(_sorted_by(table, keys), folder, prefix) for table in schema.KNOWLEDGE
        }
        self._keys = keys

    def add(self, source: str | None, row: Row) -> None:
        self._columns.append(insight_rows.TABLES[type(row)], source, row)
        if self._columns.rows >= TOGETHER:
            self._hand_on()

    def add_batch(self, table: Table, batch: pa.RecordBatch) -> None:
        self._sorters[table.name].add(batch)

    def finish(self) -> None:
        self._hand_on()
        for sorter in self._sorters.values():
            sorter.spill()

    def parts(self, table: Table) -> Iterator[pa.Table]:
        """Yield the rows of a table, sorted."""
        return writer.merged(_sorted_by(table, self._keys), self._sorters[table.name].runs)

    def _hand_on(self) -> None:
        for table, batch in self._columns.batches():
            self.add_batch(table, batch)


def by_source(parts: Iterator[pa.Table]) -> Iterator[tuple[str, Iterator[pa.Table]]]:
    """Group rows that are sorted by source. Read the rows of a source before the next source."""
    for source, group in groupby(_pieces(parts), key=lambda piece: piece[0]):
        yield source, (part for _, part in group)


def _pieces(parts: Iterator[pa.Table]) -> Iterator[tuple[str, pa.Table]]:
    """Yield (source, rows), each part cut where the source changes."""
    for part in parts:
        coded = part["source"].combine_chunks().dictionary_encode()
        indices = coded.indices  # to_numpy() may import pandas
        codes = np.frombuffer(indices.buffers()[1], np.int32)[indices.offset :][: len(indices)]
        names = coded.dictionary.to_pylist()
        edges = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), len(codes)]
        for start, stop in pairwise(edges):
            yield names[codes[start]], part.slice(start, stop - start)


def know(
    cluster: str,
    runs: Sequence[Path],
    registry: Sequence[Path],
    names: Mapping[str, Names],
    insight: InsightRows,
    clusters: Mapping[str, Labels] = MappingProxyType({}),
) -> dict[str, Quality]:
    """Feed exchanges to one `Knowledge`, and its rows to `insight`; returns counts of omitted input, by source.

    runs, registry: sorted runs of KEPT_FRAMES and of the table registry. names: by source. clusters: by source, the
    clusters of connections if there are several; then each cluster has a `Knowledge` of its own.
    """
    everything = Names()
    for each in names.values():
        everything.add(each.as_json())
    topics = {_uuid(identity): name for identity, name in everything.topics.items()}
    every: dict[str, tuple[Knowledge, Repeats]] = {cluster: (Knowledge(cluster, topics), Repeats())}
    left_out: dict[str, Quality] = {}
    last: dict[str, tuple[str | None, int | None]] = {}  # by cluster: source and time of the last exchange
    source: str | None = None
    for part in writer.merged(KEPT_FRAMES, list(runs)):
        for batch in part.to_batches(max_chunksize=TOGETHER):
            before = _left_out(every)
            for said in batch.to_pylist():
                source = said.pop("source")
                at_ns = said.pop("at_ns")
                whose = clusters[source].get(said["connection"], cluster) if source in clusters else cluster
                if whose not in every:
                    every[whose] = Knowledge(whose, topics), Repeats()
                known, repeats = every[whose]
                last[whose] = source, at_ns
                host, port = said.pop("broker_address"), said.pop("broker_port")
                if said["broker_id"] is None and source in names:
                    said["broker_id"] = names[source].broker_at(host, port)
                frames = said.pop("request"), said.pop("response")
                plan = said.pop("api_key"), said.pop("api_version")
                if repeats.is_one(*plan, *frames):
                    continue
                times = said.pop("request_end"), said.pop("response_start")
                of_log = said.pop("topic"), said.pop("topic_id"), said.pop("partition")
                if plan[0] == FETCH:
                    topic = of_log[0] or everything.topics.get(of_log[1] or "")
                    if topic not in LOGS:
                        left_out.setdefault(source, Quality()).note("log_unnamed", at_ns, size=_size(frames[1]))
                        continue
                    logged = Logged(
                        at_ns,
                        topic,
                        of_log[2],
                        frames[1],
                        said["broker_id"],
                        said["connection"],
                        said["number"],
                        source,
                    )
                    for row in known.feed_log(logged):
                        insight.add(source, row)
                    continue
                exchange = decode_exchange(
                    *plan, *frames, *times, cluster=whose, source=source, broker=(host, port), **said
                )
                if exchange is None:
                    left_out.setdefault(source, Quality()).note("not_decoded", at_ns, size=sum(map(_size, frames)))
                    continue
                rows = list(known.feed(exchange))
                repeats.fed(exchange, rows, known.topics.changes)
                for row in rows:
                    insight.add(source, row)
            missing = _left_out(every) - before
            if missing and source is not None:
                left_out.setdefault(source, Quality()).note("forgotten", count=missing)
    for whose, (known, _) in every.items():
        source, at_ns = last.get(whose, (None, None))
        for row in (*known.due(at_ns), *known.finish()):
            insight.add(source, row)
    _registry(cluster, registry, insight)
    insight.finish()
    return left_out


def _left_out(every: Mapping[str, tuple[Knowledge, Repeats]]) -> int:
    """Return the number of exchanges that all clusters together left out."""
    return sum(sum(known.left_out.values()) for known, _ in every.values())


def _registry(cluster: str, runs: Sequence[Path], insight: InsightRows) -> None:
    """Feed operations on ZooKeeper's tree, which are rows already, to the groups that coordinate through it."""
    groups = ConsumerGroups(cluster)
    source: str | None = None
    fields = RegistryRow._fields
    for part in writer.merged(schema.REGISTRY, list(runs)):
        for batch in part.to_batches(max_chunksize=TOGETHER):
            insight.add_batch(schema.REGISTRY, batch)
            for said in batch.to_pylist():
                source = said["source"]
                for row in groups.feed(RegistryRow(*(said[name] for name in fields))):
                    insight.add(source, row)
    for row in groups.finish():
        insight.add(source, row)


def _sorted_by(table: Table, keys: tuple[str, ...]) -> Table:
    return Table(table.name, table.schema, (*keys, *table.keys), table.weight)


def _uuid(identity: str) -> UUID:
    return UUID(bytes=urlsafe_b64decode(identity + "=="))


def _size(frame: bytes | None) -> int:
    return 0 if frame is None else len(frame)
