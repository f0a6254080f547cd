"""A folder into which captures rotate -> tables, file by file: `kproxy spark follow`.

Duty: a stream of Spark's names the files that are complete, and a checkpoint holds which ones it has named; each batch
of them is ingested, in the way of `kproxy spark ingest --append`. A batch that is run again, after a crash, adds
nothing that the tables have already: so each capture is in them once. A file that cannot be taken, such as one that has
the name of an earlier one, is told and does not stop the others: its batch would fail again after each start. One that
a storage does not give is asked for again; in the end the batch fails, and whoever starts again takes it up.

With `rotated` the files of a batch are one capture, and exchanges that cross from one into the next are whole; between
two batches they are cut, and the tables say so (`unanswered`, `midstream`, `open`). Without it each file is a capture
of its own. Refuses to know how captures are read.
"""

import logging
import time
from collections.abc import Callable, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from kproxy.capture.storage import is_remote, local_path, name_of, near, shown
from kproxy.convert.job import Settings, Summary
from kproxy.errors import CaptureError, KproxyError, StorageError
from kproxy.spark import is_connect, pipeline
from kproxy.spark.target import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

INTERVAL_S = 60.0
QUIET_S = 60.0
AGAIN_S = (1.0, 5.0, 30.0)  # before each further look at files that a storage did not give
log = logging.getLogger("kproxy.spark")


def check(folder: str, out: str, settings: Settings) -> str:
    """Where the tables go. Raises what `follow` raises, as far as that can be known without Spark."""
    place = local_path(folder)
    if not (is_remote(folder) or has_magic(place) or Path(place).exists()):
        raise KproxyError(f"{folder}: there is no such folder{near(place)}; make it, or name another")
    target, _ = pipeline.check([], out, settings, append=True)
    return target


def follow(
    spark: "SparkSession",
    folder: str,
    out: str,
    settings: Settings,
    told: Callable[[Summary], object],
    *,
    checkpoint: str | None = None,
    interval_s: float = INTERVAL_S,
    quiet_s: float = QUIET_S,
    form: str = "parquet",
) -> "StreamingQuery":
    """Begin to follow a folder; the query runs until it is stopped.

    told: called with what became of each batch, in another thread. checkpoint: a folder for Spark's notes; by default
    `_follow` among the tables. A file is complete when it has not changed for `quiet_s`. Raises KproxyError where the
    tables are of a newer kproxy, or were written without a checkpoint.
    """
    if is_connect(spark):
        raise KproxyError("follow has work for the driver, which is elsewhere over Spark Connect: use spark-submit")
    if settings.overwrite:
        raise KproxyError("follow adds to the tables; to begin anew, name another folder")
    target = check(folder, out, settings)
    Target(spark, target).manifest()
    notes = checkpoint or (f"{target}/_follow" if "://" in target else f"file:{target}/_follow")
    stream = spark.readStream.format("kafka-pcap").option("table", "files").option("quietSeconds", str(quiet_s))
    for key, value in settings.storage.options:
        stream = stream.option(f"storage.{key}", value)

    def batch(files: "DataFrame", number: int) -> None:
        left = sorted(row["path"] for row in files.collect())
        for pause_s in (*AGAIN_S, None):
            summary = take(left)
            lost = [fault for fault in summary.failed if isinstance(fault, StorageError)]
            summary.failed = [fault for fault in summary.failed if fault not in lost]
            if summary.quality or summary.failed or not lost:
                told(summary)
            if not lost:
                return
            if pause_s is None:
                raise KproxyError(f"{lost[0]}; no table has it yet: start again when the storage is well")
            log.warning("%s; it is read again in %d s", lost[0], pause_s)
            time.sleep(pause_s)
            names = {fault.name for fault in lost}
            left = [path for path in left if settings.rotated or shown(path) in names]

    def take(files: Sequence[str]) -> Summary:
        summary = Summary(Path(out))
        paths: dict[str, str] = {}  # by the names that tables call them by
        for path in files:
            name = path if settings.rotated else name_of(path)
            fault = pipeline.why_unread([path], settings.storage)
            if fault is None and name in paths:
                fault = CaptureError(
                    path, f"{paths[name]} has the same name, and tables name captures by it: rename one"
                )
            if fault is None:
                paths[name] = path
            else:
                summary.failed.append(fault)
        if settings.rotated and any(isinstance(fault, StorageError) for fault in summary.failed):
            return summary  # they are one capture
        if paths:
            done = pipeline.ingest(spark, sorted(paths.values()), out, settings, append=True, form=form, goes_on=True)
            done.failed = [*summary.failed, *done.failed]
            summary = done
        return summary

    return (
        stream.load(local_path(folder))
        .writeStream.foreachBatch(batch)
        .option("checkpointLocation", notes)
        .trigger(processingTime=f"{interval_s} seconds")
        .start()
    )
