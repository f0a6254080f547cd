"""Captures -> tables at any size: `kproxy spark ingest`.

Duty: the same rows as `kproxy convert`, by as many tasks as there is work for:

1. survey: a task per 128 MiB of a file finds its first record and walks the headers to the next; the driver checks
   that the ends meet (splits.agree).
2. scan: a task per split emits of each TCP packet its time and place, never the payload (see `places`).
3. decode: packets are brought together by connection, in the order of the capture, and become rows by date and hour
   (see `decode`). The rows of the scan are kept on the disks, so that the size of every connection is known before: one
   larger than a task's share has a task of its own, begun first, and the rest go on while it is at work.
4. name: rows that call topics by their ids get the names that any connection of their capture told, and those of a
   broker whose address is known its id (see `results`).
5. know: one task reads what groups, controllers and administrators said, in the order of time (see `knowledge`).
6. publish: the driver renames the files of the tasks that succeeded and writes the counts of `quality`.

Nothing but plans and counts comes to the driver: of connections only those that are larger than a share. An attempt
writes into a folder of its own, so that what failed or ran twice is never seen.

Captures and tables must lie where every executor can read and write them by the same path. Different from `convert`: no
connection is put away because too many are open, since one is decoded after the other. A capture whose TLS is to be
decrypted is decoded by one task, with tshark. Memory of a task: see `places` and `decode`.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from kproxy.convert.job import Job, Settings, Summary, captures_of, manifest, output_folder
from kproxy.convert.rows import quality_batch
from kproxy.errors import CaptureError, KproxyError
from kproxy.spark import knowledge
from kproxy.spark.decode import RESULT_SCHEMA, decode
from kproxy.spark.places import PACKET_SCHEMA, WHOLE, packets
from kproxy.spark.results import files_of, numbers, over, quality_of
from kproxy.spark.splits import SPLIT_BYTES, Range, Split, Survey, agree, ranges, survey
from kproxy.tables import schema, writer
from kproxy.tables.dataset import MANIFEST, check_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASK_BYTES = 64 << 20  # of packets, to be decoded by one task
_DEFAULT = Settings()


def ingest(
    spark: "SparkSession",
    captures: Sequence[Path | str],
    out: Path | str,
    settings: Settings = _DEFAULT,
    *,
    split_bytes: int = SPLIT_BYTES,
    tasks: int = 0,
) -> Summary:
    """Write the tables of captures into the folder `out`, by date and hour.

    captures: paths of files that every executor can read.
    settings: as for `convert`; checksums are not taken.
    split_bytes: the size of what one task reads of a large file.
    tasks: of the decoding; 0: one per 64 MiB of packets, so that the files do not depend on the number of cores.

    A capture that cannot be read is in `Summary.failed` and does not stop the others. Raises KproxyError before
    anything is read if the folder holds tables and `settings.overwrite` is not set, or if two captures have one name.
    """
    from pyspark import StorageLevel

    folder, jobs = check(captures, out, settings)
    dataset = writer.Dataset(folder)
    splits, failed = _plan(spark, jobs, split_bytes)
    work = dataset.begin("spark", by_hour=True)
    try:
        while True:
            parts = [(number, file, split) for number, of_job in splits.items() for file, split in of_job]
            found = over(spark, parts).mapInArrow(_scan(jobs, parts), PACKET_SCHEMA).persist(StorageLevel.DISK_ONLY)
            decoded = (
                _shared_out(found, tasks)
                .sortWithinPartitions("capture", "connection", "file", "offset")
                .mapInArrow(decode(jobs, work), RESULT_SCHEMA)
                .collect()
            ) if parts else []  # fmt: skip
            found.unpersist()
            results = [(row["capture"], row["kind"], json.loads(row["text"])) for row in decoded]
            reports = [(capture, text) for capture, kind, text in results if kind == "report"]
            torn = {(capture, text["file"]) for capture, text in reports if text["torn"]}
            late = {capture for capture, text in reports if text["secrets"]}
            if not torn and not late:
                break
            for number, file in torn:  # damaged in a way that only its packets show: read it in one piece
                kept = [entry for entry in splits[number] if entry[0] != file]
                splits[number] = sorted([*kept, (file, Split(jobs[number].paths[file]))], key=lambda entry: entry[0])
            splits.update({number: _as_a_whole(jobs[number]) for number in late})
        quality = quality_of(spark, jobs, parts, results)
        summary = Summary(Path(out), {}, quality, failed, jobs[0].key_log, settings.records)
        files = files_of(spark, jobs, work, results, summary.rows)
        files |= knowledge.files_of(spark, jobs, work, results, summary.rows, quality)
        if settings.records is not None and not summary.rows[schema.RECORDS.name]:
            batches = [file for place, file in files.items() if place.startswith(f"{schema.BATCHES.name}/")]
            summary.topics = writer.some_values(batches, ("topic", "topic_id"))
        sorter = writer.Sorter(schema.QUALITY, work)
        for source, of_source in quality.items():
            sorter.add(quality_batch(source, of_source))
        sorter.spill()
        finished = work / "quality.parquet"
        summary.rows["quality"] = writer.write(schema.QUALITY, sorter.runs, finished)
        if quality:
            dataset.clear()
            dataset.publish({**files, "quality/quality.parquet": finished}, manifest(jobs, summary))
    finally:
        dataset.abandon()
    return summary


def check(captures: Sequence[Path | str], out: Path | str, settings: Settings) -> tuple[Path, list[Job]]:
    """The folder and the captures of `ingest`, by paths that do not depend on the working directory.

    It raises what `ingest` raises before anything is read, and needs no Spark.
    """
    folder = Path(os.path.abspath(output_folder(out)))  # noqa: PTH100 - not where a link leads: rows know its own name
    check_version(folder)
    if (folder / MANIFEST).exists() and not settings.overwrite:
        raise KproxyError(f"{out} holds tables already: name another folder, or say --overwrite")
    paths = [str(path) if "://" in str(path) else os.path.abspath(path) for path in captures]  # noqa: PTH100
    keys = settings.key_log and os.path.abspath(settings.key_log)  # noqa: PTH100
    return folder, captures_of(paths, replace(settings, key_log=keys, checksums=False))


def _plan(
    spark: "SparkSession", jobs: Sequence[Job], split_bytes: int
) -> tuple[dict[int, list[tuple[int, Split]]], list[CaptureError]]:
    """The splits of each capture, by the number of the file; and what is no capture."""
    files = [(number, file, path) for number, job in enumerate(jobs) for file, path in enumerate(job.paths)]
    pieces = [(number, file, piece) for number, file, path in files for piece in ranges(path, split_bytes)]
    surveyed = over(spark, pieces).mapInArrow(_survey(pieces), "number bigint, text string")
    surveys: dict[tuple[int, int], list[tuple[Range, Survey]]] = {}
    failed: dict[int, CaptureError] = {}
    for index, text in sorted(tuple(row) for row in surveyed.collect()):
        number, file, piece = pieces[index]
        found = json.loads(text)
        if "fault" in found:
            failed.setdefault(number, CaptureError(*found["fault"]))
            continue
        found["opening"] = bytes.fromhex(found["opening"])
        surveys.setdefault((number, file), []).append((piece, Survey(**found)))
    secret = {number for (number, _), found in surveys.items() if any(seen.secrets for _, seen in found)}
    secret |= {number for number, job in enumerate(jobs) if job.key_log is not None}
    splits: dict[int, list[tuple[int, Split]]] = {}
    for (number, file), found in surveys.items():
        if number in secret and number not in failed:
            splits[number] = _as_a_whole(jobs[number])
        elif number not in failed:
            agreed = agree([piece for piece, _ in found], [seen for _, seen in found])
            splits.setdefault(number, []).extend((file, split) for split in agreed)
    return splits, list(failed.values())


def _as_a_whole(job: Job) -> list[tuple[int, Split]]:
    return [(WHOLE, Split(job.paths[0]))]


def _survey(pieces: Sequence[tuple[int, int, Range]]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in numbers(batches):
            try:
                seen = survey(pieces[number][2])
                text = json.dumps({**vars(seen), "opening": seen.opening.hex()})
            except CaptureError as fault:
                said = str(fault).removeprefix(f"{fault.name}: ")
                text = json.dumps({"fault": (fault.name, said)})
            yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), "text": [text]})

    return run


def _scan(
    jobs: Sequence[Job], parts: Sequence[tuple[int, int, Split]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in numbers(batches):
            capture, file, split = parts[number]
            yield from packets(number, capture, file, split, jobs[capture])

    return run


def _shared_out(packets: "DataFrame", tasks: int) -> "DataFrame":
    """The rows of the scan by task: a connection larger than an even share is alone, in a task that starts early.

    All sizes are of packets as they were captured, whether or not the files are compressed.
    """
    from pyspark.sql import functions as F

    size = packets.agg(F.sum("size")).first()[0] or 0  # type: ignore[index]
    tasks = tasks or max(1, size // TASK_BYTES)
    if tasks == 1:
        return packets.repartition(1)
    share = max(1, size // tasks)
    sizes = packets.groupBy("capture", "connection").agg(F.sum("size").alias("size")).where(F.col("size") > share)
    large = sorted(map(tuple, sizes.collect()), key=lambda row: (-row[2], row))
    alone = [(capture, connection, task) for task, (capture, connection, _) in enumerate(large)]
    rest = max(1, (size - sum(row[2] for row in large)) // share)
    numbers = packets.sparkSession.createDataFrame(alone, "capture int, connection int, alone int")
    together = len(alone) + F.pmod(F.hash("capture", "connection"), F.lit(rest))
    return (
        packets.join(F.broadcast(numbers), ["capture", "connection"], "left")
        .repartitionById(len(alone) + rest, F.coalesce("alone", together))
        .drop("alone")
    )
