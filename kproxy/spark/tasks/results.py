"""Reports of tasks about captures -> the counts of `quality`.

Duty: tasks add up all counts by capture. If a split of a shared-out capture has a packet time before the latest time of
the earlier splits, a task repeats the count of packets whose time goes back for that split.

Memory of the driver: a report for each split, and the counts of MAX_SHOWN captures.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kproxy.capture.quality import NAME_AT, Quality, Stream, Twice
from kproxy.convert.parts import clocks
from kproxy.convert.parts.clocks import Times
from kproxy.convert.parts.reader import Part
from kproxy.convert.rows import quality_batch
from kproxy.spark.tasks import pieces
from kproxy.spark.tasks.places import listed
from kproxy.tables import schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_SHOWN = 200  # up to so many captures are reported separately; more are reported as one sum
COUNTED = "counted"  # the kind of a piece: all counts of a capture, or of many
CAPTURES_PER_TASK = 500  # number of captures whose counts one task adds up

Parts = Sequence[tuple[int, Part]]  # (number of the capture, part)


def counted(counts: "DataFrame", captures: int) -> "DataFrame":
    """Return pieces of `quality`, and of the counts themselves (COUNTED).

    counts: the data of pieces. captures: the number of captures.
    """
    from pyspark.sql import functions as F

    tasks = max(1, captures // CAPTURES_PER_TASK)
    alone = captures <= MAX_SHOWN

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        qualities: dict[str, Quality] = {}
        for batch in batches:
            for data in batch.column("data").to_pylist():
                source, some = json.loads(data)
                noted(qualities.setdefault(source, Quality()), some)
        rows = [quality_batch(source, quality) for source, quality in sorted(qualities.items())]
        if rows:
            yield from pieces.rows(schema.QUALITY, [pa.Table.from_batches(rows)])
        whole = Quality()
        for source, quality in qualities.items():
            if alone:
                yield pieces.words(-1, COUNTED, [source, listed(quality)])
            else:  # leave out the fingerprints of connections, which are per capture
                for row in quality:
                    whole.note(row.kind, row.first_ns, count=row.count, size=row.bytes, last_ns=row.last_ns)
        if not alone:
            yield pieces.words(-1, COUNTED, [None, listed(whole)])

    source = F.get_json_object(F.col("data").cast("string"), "$[0]")
    return counts.select("data").repartition(tasks, source).mapInArrow(run, pieces.PIECES)


def in_several(counts: "DataFrame", jobs: Callable[[], Sequence[str]]) -> dict[str, Quality]:
    """Return counts of connections that an earlier capture also has, by source.

    counts: the data of pieces. jobs: returns all sources in their order.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for data in batch.column("data").to_pylist():
                source, some = json.loads(data)
                quality = Quality()
                noted(quality, some)
                found = [(each.key, source, each.first_ns, each.last_ns, each.size) for each in quality.streams()]
                if found:
                    yield pa.RecordBatch.from_arrays(list(map(pa.array, zip(*found, strict=True))), _STREAM_COLUMNS)

    kinds = "stream string, source string, first_ns bigint, last_ns bigint, bytes bigint"
    each_one = counts.select("data").mapInArrow(run, kinds).groupBy("stream", "source")
    streams = each_one.agg(
        F.min("first_ns").alias("first_ns"), F.max("last_ns").alias("last_ns"), F.sum("bytes").alias("bytes")
    ).withColumn("name", F.expr(f"substring(stream, {NAME_AT + 1})"))
    before = Window.partitionBy("name").orderBy("first_ns", "source").rowsBetween(Window.unboundedPreceding, -1)
    overlapping = streams.withColumn("before_ns", F.max("last_ns").over(before)).where("before_ns >= first_ns")
    equal = streams.groupBy("name", "stream").count().where("count > 1")
    names = overlapping.select("name").union(equal.select("name")).distinct()
    rows = streams.join(names, "name").collect()
    if not rows:
        return {}
    found: dict[str, list[Stream]] = {source: [] for source in jobs()}
    for row in rows:
        found[row["source"]].append(Stream(row["stream"], row["first_ns"], row["last_ns"], row["bytes"]))
    twice = Twice()
    qualities: dict[str, Quality] = {}
    for source, mine in found.items():
        for stream in twice.add(mine):
            quality = qualities.setdefault(source, Quality())
            quality.note("in_two_captures", stream.first_ns, size=stream.size)
    return qualities


_STREAM_COLUMNS = ["stream", "source", "first_ns", "last_ns", "bytes"]


def of_splits(spark: "SparkSession", parts: Parts, reports: Sequence[Mapping[str, Any]]) -> dict[int, Quality]:
    """Return the counts that the scans of splits reported, by capture number."""
    qualities: dict[int, Quality] = {}
    of_captures: dict[int, list[Mapping[str, Any]]] = {}
    for report in sorted(reports, key=lambda report: report["split"]):
        of_captures.setdefault(parts[report["split"]][0], []).append(report)
    again: list[tuple[int, Times, int]] = []  # splits with a packet time before the latest time of earlier splits
    for capture, of_capture in of_captures.items():
        quality = qualities[capture] = Quality()
        times = [Times(*report["clock"]["times"]) for report in of_capture]
        late = dict(clocks.late(times))
        for number, report in enumerate(of_capture):
            noted(quality, report["quality"])
            if number in late:
                again.append((report["split"], times[number], late[number]))
            else:
                _add_back(quality, report["clock"]["back"])
    if again:
        for row in pieces.each(spark, again, _again(parts), pieces.PIECES).collect():
            _add_back(qualities[row["capture"]], json.loads(row["data"]))
    return qualities


def apart(parts: Parts, reports: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the captures with a part that does not begin where the previous part ends, with the reason."""
    found = {}
    for one, other in pairwise(sorted(reports, key=lambda report: report["split"])):
        capture, following = (parts[report["split"]][0] for report in (one, other))
        if capture == following and Times(*one["clock"]["times"]).until != Times(*other["clock"]["times"]).begin:
            found[capture] = "readers differ"
    return found


def _again(parts: Parts) -> Callable[[tuple[int, Times, int]], Iterator[pa.RecordBatch]]:
    """Count packets whose time goes back, given the latest time before each part."""

    def run(late: tuple[int, Times, int]) -> Iterator[pa.RecordBatch]:
        split, times, before_ns = late
        yield pieces.words(parts[split][0], pieces.COUNTS, clocks.back(parts[split][1], times, before_ns))

    return run


def noted(quality: Quality, rows: Sequence[Sequence[Any]]) -> None:
    """Add counts that a task reported."""
    for kind, count, size, first_ns, last_ns in rows:
        quality.note(kind, first_ns, count=count, size=size, last_ns=last_ns)


def _add_back(quality: Quality, back: Sequence[int]) -> None:
    count, first_ns, last_ns = back
    if count:
        quality.note("clock_back", first_ns, count=count, last_ns=last_ns)
