"""State of a cluster (groups, leaders, topics) from all its captures, on Spark: one task reads in the order of time.

Duty: the decoding tasks emit the input of `insight` as pieces. One task merges them and passes them to one `Knowledge`,
as `kproxy convert` does; its tables are pieces too. There is only one such task, since any connection may show a
group's coordinator, its members and the leaders of its topics. Its input is a small part of a capture: no records, and
no responses to heartbeats without errors. Memory: see `convert.knowledge`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow as pa

from kproxy.capture.clusters import Labels
from kproxy.capture.quality import Quality
from kproxy.convert import machine
from kproxy.convert.job import Job
from kproxy.convert.kept_frames import KEPT_FRAMES
from kproxy.convert.knowledge import InsightRows, know
from kproxy.convert.parts.joining import Correction
from kproxy.convert.rows import Rows
from kproxy.spark.tasks.pieces import COUNTS, INSIGHT, NAMES, PIECES, adopt, words
from kproxy.spark.tasks.pieces import rows as piece_rows
from kproxy.spark.tasks.places import listed
from kproxy.tables import schema, writer
from kproxy.tables.names import Names
from kproxy.tables.schema import Table
from kproxy.wire.bodies import TOPICS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def pieces_of(
    pieces: "DataFrame", cluster: str, corrections: Mapping[str, Sequence[Correction]], clusters: Mapping[str, Labels]
) -> "DataFrame":
    """Return the pieces of insight's tables, and counts of omitted input. corrections, clusters: by source."""
    from pyspark.sql import functions as F

    kind = F.col("kind")
    return (
        pieces.where(kind.startswith(INSIGHT) | (kind == NAMES))
        .repartition(1)
        .mapInArrow(_task(cluster, corrections, clusters), PIECES)
    )


def _task(
    cluster: str, corrections: Mapping[str, Sequence[Correction]], clusters: Mapping[str, Labels]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        machine.retain()
        with TemporaryDirectory(prefix="kproxy-") as place:
            folder = Path(place)
            runs: dict[str, writer.Sorter] = {
                table.name: writer.Sorter(table, folder, ".all") for table in (KEPT_FRAMES, schema.REGISTRY)
            }
            names: dict[str, Names] = {}
            every = [correction for of_source in corrections.values() for correction in of_source]
            is_fed = False
            for batch in batches:
                for index, kind in enumerate(batch.column("kind").to_pylist()):
                    data = batch.column("data")[index].as_py()
                    if kind == NAMES:
                        source, learned = json.loads(data)
                        names.setdefault(source, Names()).add(learned)
                    else:
                        adopt(runs[kind.removeprefix(INSIGHT)], data, every)
                        is_fed = True
            if is_fed:
                for sorter in runs.values():
                    sorter.spill()
                insight = InsightRows(folder)
                kept_frames, registry = (runs[table.name].runs for table in (KEPT_FRAMES, schema.REGISTRY))
                left_out = know(cluster, kept_frames, registry, names, insight, clusters)
                for table in schema.KNOWLEDGE:
                    yield from piece_rows(table, insight.parts(table))
                for source, quality in left_out.items():
                    yield words(-1, COUNTS, [source, listed(quality)])

    return run


def _known(
    cluster: str, runs: Mapping[str, Sequence[Path]], names: Mapping[str, Names], folder: Path
) -> tuple[InsightRows, dict[str, Quality]]:
    merged = []
    for table in (KEPT_FRAMES, schema.REGISTRY):
        sorter = writer.Sorter(table, folder, ".all")
        sorter.adopt(runs[table.name])
        merged.append(sorter.runs)
    insight = InsightRows(folder)
    return insight, know(cluster, merged[0], merged[1], names, insight)


def rows_of(jobs: Sequence[Job], table: Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one of insight's tables, from captures that one task reads."""
    with TemporaryDirectory(prefix="kproxy-") as place:
        folder = Path(place)
        sorters = {each.name: writer.Sorter(each, folder) for each in (KEPT_FRAMES, schema.REGISTRY)}
        names: dict[str, Names] = {}

        def add(of: Table, batch: pa.RecordBatch) -> None:
            if of.name in sorters:
                sorters[of.name].add(batch)

        for job in jobs:
            rows = Rows(add, keeps=True)
            for _ in rows.read(replace(job, detail=TOPICS, records=None), Quality()):
                pass
            names[job.source] = rows.names
        for sorter in sorters.values():
            sorter.spill()
        insight, _ = _known(jobs[0].cluster, {name: sorter.runs for name, sorter in sorters.items()}, names, folder)
        for part in insight.parts(table):
            yield from part.to_batches()
