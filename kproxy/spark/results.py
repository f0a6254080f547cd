"""What tasks report of captures -> the counts of `quality`.

Duty: the counts of all tasks are added up by capture, in tasks; and for captures that were shared out, packets stamped
too early are counted again where a split began before an earlier one ended.

Memory: of the driver a report for each split, and the counts of SHOWN captures. Refuses to know how connections are
decoded.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kproxy.capture.quality import NONE, Quality
from kproxy.convert.rows import quality_batch
from kproxy.convert.stints import Part
from kproxy.spark import pieces
from kproxy.spark.places import Clock, listed
from kproxy.tables import schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHOWN = 200  # captures whose counts are told one by one; of more they are told together
COUNTED = "counted"  # the kind of a piece: all counts of a capture, or of many
TOGETHER = 500  # captures whose counts one task adds up

Parts = Sequence[tuple[int, Part]]  # with the numbers of their captures


def counted(counts: "DataFrame", sources: Sequence[str]) -> "DataFrame":
    """Pieces of `quality`, and the counts themselves. sources: of captures, by their numbers."""
    tasks = max(1, len(sources) // TOGETHER)
    alone = len(sources) <= SHOWN

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        qualities: dict[int, Quality] = {}
        for batch in batches:
            for capture, data in zip(*(batch.column(name).to_pylist() for name in ("capture", "data")), strict=True):
                noted(qualities.setdefault(capture, Quality()), json.loads(data))
        rows = [quality_batch(sources[capture], quality) for capture, quality in sorted(qualities.items())]
        if rows:
            yield from pieces.rows(schema.QUALITY, [pa.Table.from_batches(rows)])
        whole = Quality()
        for capture, quality in qualities.items():
            if alone:
                yield pieces.words(capture, COUNTED, listed(quality))
            else:  # without the connections that are looked for twice, which are of one capture
                for row in quality:
                    whole.note(row.kind, row.first_ns, count=row.count, size=row.bytes, last_ns=row.last_ns)
        if not alone:
            yield pieces.words(-1, COUNTED, listed(whole))

    return counts.repartition(tasks, "capture").mapInArrow(run, pieces.PIECES)


def of_splits(spark: "SparkSession", parts: Parts, reports: Sequence[Mapping[str, Any]]) -> dict[int, Quality]:
    """The counts that the scans of splits reported, by capture."""
    qualities: dict[int, Quality] = {}
    late: list[tuple[int, int]] = []  # splits that begin earlier than one before them ended
    reached: dict[int, int] = {}
    for report in sorted(reports, key=lambda report: report["split"]):
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
        for row in pieces.each(spark, late, _clocks(parts), pieces.PIECES).collect():
            _add_back(qualities[row["capture"]], json.loads(row["data"]))
    return qualities


def _clocks(parts: Parts) -> Callable[[tuple[int, int]], Iterator[pa.RecordBatch]]:
    """Count packets stamped too early in parts, knowing the latest time before each."""

    def run(late: tuple[int, int]) -> Iterator[pa.RecordBatch]:
        split, before = late
        clock = Clock(before)
        for _, is_warm, window in parts[split][1].windows(Quality()):
            if not is_warm:
                clock.window(window)
        yield pieces.words(parts[split][0], pieces.COUNTS, clock.back)

    return run


def noted(quality: Quality, rows: Sequence[Sequence[Any]]) -> None:
    """Add counts that a task reported."""
    for kind, count, size, first_ns, last_ns in rows:
        quality.note(kind, first_ns, count=count, size=size, last_ns=last_ns)


def _add_back(quality: Quality, back: Sequence[int]) -> None:
    count, first_ns, last_ns = back
    if count:
        quality.note("clock_back", first_ns, count=count, last_ns=last_ns)
