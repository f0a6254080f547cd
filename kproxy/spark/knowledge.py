"""What captures of one cluster say together, on Spark: one task reads it all in the order of time.

Duty: the tasks of the decoding leave runs of what insight is fed; a task merges them and feeds one `Knowledge`, as
`kproxy convert` does, and writes its tables by date and hour. One task, since a group's coordinator, its members and
the leaders of its topics are seen on any connection; what it reads is a small part of a capture (no record, no answer
of a heartbeat that went well). Its memory: see `convert.knowledge`. Refuses to know how connections are decoded.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa

from kproxy.capture.quality import Quality
from kproxy.convert.job import Job
from kproxy.convert.knowledge import Told, know
from kproxy.convert.rows import Rows
from kproxy.convert.spoken import SPOKEN
from kproxy.spark.decode import hours
from kproxy.spark.places import listed
from kproxy.spark.results import Result, noted, over
from kproxy.tables import schema, writer
from kproxy.tables.names import Names
from kproxy.tables.schema import Table
from kproxy.wire.bodies import TOPICS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def files_of(
    spark: "SparkSession",
    jobs: Sequence[Job],
    work: Path,
    results: Sequence[Result],
    rows: dict[str, int],
    quality: Mapping[str, Quality],
) -> dict[str, Path]:
    """Where the files of insight's tables belong -> where they are. Adds to the counts of rows and of `quality`."""
    rows.update({table.name: 0 for table in schema.KNOWLEDGE})
    runs: dict[str, list[Path]] = {SPOKEN.name: [], schema.REGISTRY.name: []}
    names: dict[str, Names] = {}
    for capture, kind, text in results:
        if kind == "said":
            runs[text["table"]].append(work / text["path"])
        elif kind == "names":
            names.setdefault(jobs[capture].source, Names()).add(text)
    files: dict[str, Path] = {}
    if any(runs.values()):
        task = _task(jobs[0].cluster, runs, names, work)
        for kind, text in over(spark, [0]).mapInArrow(task, "kind string, text string").collect():
            found = json.loads(text)
            if kind == "file":
                files[found["place"]] = Path(found["path"])
                rows[found["table"]] += found["rows"]
            else:
                noted(quality[found["source"]], found["rows"])
    return files


def _task(
    cluster: str, runs: Mapping[str, Sequence[Path]], names: Mapping[str, Names], work: Path
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            attempt = work / f"knowledge-{uuid4().hex}"
            with TemporaryDirectory(prefix="kproxy-") as folder:
                told, left_out = _known(cluster, runs, names, Path(folder))
                for table in schema.KNOWLEDGE:
                    for hour, parts in hours(told.parts(table)):
                        place = f"{table.name}/{hour}/part-knowledge.parquet"
                        path = attempt / place
                        path.parent.mkdir(parents=True)
                        count = writer.store(table, parts, path)
                        file = {"table": table.name, "place": place, "path": str(path), "rows": count}
                        yield _result("file", file)
            for source, quality in left_out.items():
                yield _result("quality", {"source": source, "rows": listed(quality)})

    return run


def _known(
    cluster: str, runs: Mapping[str, Sequence[Path]], names: Mapping[str, Names], folder: Path
) -> tuple[Told, dict[str, Quality]]:
    merged = []
    for table in (SPOKEN, schema.REGISTRY):
        sorter = writer.Sorter(table, folder, ".all")
        sorter.adopt(runs[table.name])
        merged.append(sorter.runs)
    told = Told(folder)
    return told, know(cluster, merged[0], merged[1], names, told)


def rows_of(jobs: Sequence[Job], table: Table) -> Iterator[pa.RecordBatch]:
    """The rows of one of insight's tables, of captures that one task reads."""
    with TemporaryDirectory(prefix="kproxy-") as place:
        folder = Path(place)
        sorters = {each.name: writer.Sorter(each, folder) for each in (SPOKEN, schema.REGISTRY)}
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
        told, _ = _known(jobs[0].cluster, {name: sorter.runs for name, sorter in sorters.items()}, names, folder)
        for part in told.parts(table):
            yield from part.to_batches()


def _result(kind: str, found: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"kind": [kind], "text": [json.dumps(found)]})
