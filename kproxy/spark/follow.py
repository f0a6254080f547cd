"""A folder into which captures rotate -> tables, file by file: `kproxy spark follow`.

Duty: a Spark stream lists the complete files, and a checkpoint has the files already listed. Each batch of files is
ingested as by `kproxy spark ingest --append`. A batch that runs again after a crash adds only captures that the tables
lack, so each capture is in the tables once. A file that cannot be ingested, such as one with the name of an earlier
file, is reported and does not stop the others: otherwise its batch would fail again after each start. If a storage
fails to deliver a file, kproxy requests the file again (RETRY_PAUSES_S). After the last attempt the batch fails, and
the next start repeats it.

With `rotated` the files of a batch are one capture, and exchanges that span two of these files are complete. Exchanges
that span two batches are cut, and the tables show it (`unanswered`, `midstream`, `open`). Without `rotated` each file
is a capture of its own.
"""

import logging
import time
from collections.abc import Callable, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from kproxy.capture.formats.storage import is_remote, local_path, name_of, near, shown
from kproxy.convert.job import Settings, Summary
from kproxy.errors import CaptureError, KproxyError, StorageError
from kproxy.spark import is_connect, pipeline
from kproxy.spark.target import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

INTERVAL_S = 60.0
QUIET_S = 60.0
RETRY_PAUSES_S = (1.0, 5.0, 30.0)  # pauses before each retry of files that a storage failed to deliver
log = logging.getLogger("kproxy.spark")


def check(folder: str, out: str, settings: Settings) -> str:
    """Return the folder of the tables. Raises the errors of `follow` that need no Spark session."""
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
    """Start to follow a folder; return the streaming query, which runs until it is stopped.

    told: called with the summary of each batch, in another thread. checkpoint: the folder of Spark's checkpoint, by
    default `_follow` in the folder of the tables. A file is complete when it has not changed for `quiet_s` seconds.
    Raises KproxyError for a session of Spark Connect, for `settings.overwrite`, if `folder` does not exist, and if a
    newer kproxy wrote the tables.
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
        for pause_s in (*RETRY_PAUSES_S, None):
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
        paths: dict[str, str] = {}  # key: the column `source` of the tables
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
            return summary  # all files are one capture
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
