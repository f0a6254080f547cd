"""The output of a reader of captures: sorted rows on the disk, counts of `quality`, and names of topics.

Memory: see `tables.writer.Sorter`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from kproxy.capture.quality import Quality
from kproxy.convert.job import Job
from kproxy.convert.kept_frames import KEPT_FRAMES
from kproxy.tables import schema, writer
from kproxy.tables.names import Names

FED = {table.name: table for table in (KEPT_FRAMES, schema.REGISTRY)}  # the input of insight


@dataclass
class Share:
    """The result of reading a capture, or some of its flows: sorted runs by table, counts, and names of topics."""

    runs: dict[str, list[Path]]
    quality: Quality
    names: Names
    corrections: dict[Path, Callable[[pa.RecordBatch], pa.RecordBatch]] = field(
        default_factory=dict
    )  # see `writer.merged`


def sorters(job: Job, work: Path, prefix: str) -> dict[str, writer.Sorter]:
    """Return the sorters for the rows of a share, by table."""
    tables = [*(schema.BY_NAME[name] for name in job.tables), *FED.values()]
    return {table.name: writer.Sorter(table, work, prefix) for table in tables}


def share(sorted_by: dict[str, writer.Sorter], quality: Quality, names: Names) -> Share:
    for sorter in sorted_by.values():
        sorter.spill()
    return Share({name: sorter.runs for name, sorter in sorted_by.items()}, quality, names)


def remove(work: Path, prefix: str) -> None:
    """Remove the files of readers with a prefix, since the capture is read again in another way."""
    for left in work.glob(f"*{prefix}*"):
        left.unlink()
