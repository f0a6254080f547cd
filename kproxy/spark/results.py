"""What the tasks of the decoding report -> files with names filled in, and the counts of `quality`.

Duty: the second half of `pipeline`'s work on the driver: rows that call topics by their ids get the names that any
connection of their capture told, and those of a broker whose address is known its id, which tasks do; counts of all
tasks are added up, and packets stamped too early are counted again where a split began before an earlier one ended.

Memory: counts and names, by capture. Refuses to know how connections are decoded.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from kproxy.capture.quality import NONE, Quality
from kproxy.convert.job import Job
from kproxy.spark.places import Clock
from kproxy.spark.splits import Split, windows
from kproxy.tables import schema, writer
from kproxy.tables.names import FILLED, Names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROUNDS = 8  # of tasks for each core: so that late ones are short

Result = tuple[int, str, Any]  # of a task: the capture, what it is, its JSON


def over(spark: "SparkSession", work: Sequence[Any]) -> "DataFrame":
    """The numbers of pieces of work: a task each, or where they are many, a few to a task."""
    return spark.range(0, len(work), 1, min(len(work), ROUNDS * spark.sparkContext.defaultParallelism))


def numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    """Those of a task."""
    for batch in batches:
        yield from batch.column(0).to_pylist()


def files_of(
    spark: "SparkSession", jobs: Sequence[Job], work: Path, results: Sequence[Result], rows: dict[str, int]
) -> dict[str, Path]:
    """Where the tasks' files belong -> where they are; and the rows in them."""
    rows.update(dict.fromkeys(jobs[0].tables, 0))
    names: dict[str, Names] = {}
    files = {}
    unnamed = []
    for capture, kind, text in results:
        if kind == "file":
            files[text["place"]] = work / text["path"]
            if schema.BY_NAME[text["table"]].has_names:
                unnamed.append((text["table"], text["place"]))
            else:
                rows[text["table"]] += text["rows"]
        elif kind == "names":
            names.setdefault(jobs[capture].source, Names()).add(text)
    if unnamed:
        kept = [(table, files[place]) for table, place in unnamed]
        named = over(spark, kept).mapInArrow(_name(jobs, kept, names), "number bigint, text string")
        for index, text in named.collect():
            (table, place), (path, count) = unnamed[index], json.loads(text)
            rows[table] += count
            files[place] = Path(path)
            if not count:  # there were records, but of other topics
                del files[place]
    return files


def _name(
    jobs: Sequence[Job], files: Sequence[tuple[str, Path]], names: dict[str, Names]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Write what was kept as Parquet, each attempt to a file of its own; emits its path and its number of rows."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in numbers(batches):
            name, kept = files[number]
            path = kept.with_name(f"{kept.stem}-{uuid4().hex}.parquet")
            told = _named(kept, names)
            if name == schema.RECORDS.name and jobs[0].records is not None:
                told = map(jobs[0].records.of, told)
            rows = writer.store(schema.BY_NAME[name], told, path)
            text = json.dumps((str(path), rows))
            yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), "text": [text]})

    return run


def _named(kept: Path, names: dict[str, Names]) -> Iterator[pa.Table]:
    with pa.memory_map(str(kept)) as file:
        reader = pa.ipc.open_file(file)
        for index in range(reader.num_record_batches):
            rows = pa.Table.from_batches([reader.get_batch(index)])
            for source in rows["source"].unique().to_pylist():
                if source in names:
                    filled = names[source].fill(rows)
                    of_source = pc.equal(rows["source"], source)
                    for place, column in enumerate(rows.schema.names):
                        if column in FILLED:
                            told = pc.if_else(of_source, filled[column], rows[column])
                            rows = rows.set_column(place, column, told)
            yield rows.cast(reader.schema)


def quality_of(
    spark: "SparkSession", jobs: Sequence[Job], parts: Sequence[tuple[int, int, Split]], results: Sequence[Result]
) -> dict[str, Quality]:
    """The counts of all tasks, by source."""
    qualities: dict[int, Quality] = {}
    reports = sorted((text for _, kind, text in results if kind == "report"), key=lambda text: text["split"])
    late: list[tuple[int, int]] = []  # splits that begin earlier than one before them ended
    reached: dict[int, int] = {}
    for report in reports:
        capture = parts[report["split"]][0]
        clock = report["clock"]
        quality = qualities.setdefault(capture, Quality())
        noted(quality, report["quality"])
        before = reached.get(capture, NONE)
        if clock["first_ns"] != NONE and clock["first_ns"] < before:
            late.append((report["split"], before))
        else:
            _add_back(quality, clock["back"])
        reached[capture] = max(before, clock["last_ns"])
    if late:
        again = over(spark, late).mapInArrow(_clocks(parts, late), "number bigint, text string")
        for index, text in again.collect():
            _add_back(qualities[parts[late[index][0]][0]], json.loads(text))
    for capture, kind, text in results:
        if kind == "quality":
            noted(qualities.setdefault(capture, Quality()), text)
    return {jobs[capture].source: quality for capture, quality in sorted(qualities.items())}


def _clocks(
    parts: Sequence[tuple[int, int, Split]], late: Sequence[tuple[int, int]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Count packets stamped too early in splits, knowing the latest time before each."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in numbers(batches):
            split, before = late[number]
            clock = Clock(before)
            for window in windows(parts[split][2], Quality()):
                clock.window(window, None)
            back = json.dumps(clock.back)
            yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), "text": [back]})

    return run


def noted(quality: Quality, rows: Sequence[Sequence[Any]]) -> None:
    """Add counts that a task reported."""
    for kind, count, size, first_ns, last_ns in rows:
        quality.note(kind, first_ns, count=count, size=size, last_ns=last_ns)


def _add_back(quality: Quality, back: Sequence[int]) -> None:
    count, first_ns, last_ns = back
    if count:
        quality.note("clock_back", first_ns, count=count, last_ns=last_ns)
