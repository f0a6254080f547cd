"""Sizes and fingerprints of captures: `look`.

Duty: makes a few requests for each file, in the driver for up to MAX_DRIVER_FILES files, in tasks for more. Memory:
MAX_DRIVER_FILES files. Does not read packets.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kproxy.convert.job import Job
from kproxy.errors import CaptureError, StorageError
from kproxy.spark.catalogue import Catalogue
from kproxy.spark.tasks import pieces
from kproxy.spark.tasks.pieces import PIECES, each

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_DRIVER_FILES = 32  # the driver itself reads at most so many files
LEAD_BYTES = 64 << 10  # the fingerprint covers so many bytes at the beginning and at the end of each file


def look(spark: "SparkSession", catalogue: Catalogue) -> dict[int, CaptureError]:
    """Record each capture's bytes, its fingerprint, and the bytes of its largest file in the catalogue.

    Return the errors of storages, by capture number. Any other unreadable file counts 0 bytes; the task that reads the
    capture later reports the reason.
    """
    if (
        len(catalogue) <= MAX_DRIVER_FILES
        and sum(len(job.paths) for _, job, _ in catalogue.every()) <= MAX_DRIVER_FILES
    ):
        return _noted(catalogue, [_seen(number, job) for number, job, _ in catalogue.every()])
    captures = catalogue.every()
    together = iter(lambda: [(number, job) for number, job, _ in islice(captures, MAX_DRIVER_FILES)], [])

    def run(some: Sequence[tuple[int, Job]]) -> Iterator[pa.RecordBatch]:
        seen = [_seen(number, job) for number, job in some]
        yield pieces.words(some[0][0], pieces.REPORT, seen)

    failed = dict[int, CaptureError]()
    for row in each(spark, together, run, PIECES).select("data").collect():
        failed |= _noted(catalogue, json.loads(row["data"]))
    return failed


def _noted(catalogue: Catalogue, seen: Sequence[Sequence[Any]]) -> dict[int, CaptureError]:
    catalogue.note(tuple(each[:4]) for each in seen)
    return {number: StorageError(*fault) for number, *_, fault in seen if fault is not None}


def _seen(number: int, job: Job) -> tuple[int, int, int, str | None, tuple[str, str] | None]:
    size, print_ = 0, blake2b(digest_size=16)
    largest = 0
    for path in job.paths:
        try:
            of_file = job.storage.size(path)
            print_.update(job.storage.read(path, 0, LEAD_BYTES))
            print_.update(job.storage.read(path, max(0, of_file - LEAD_BYTES), of_file))
        except StorageError as fault:
            return number, 0, 0, None, (fault.name, fault.text)
        except (OSError, CaptureError):
            continue
        size += of_file
        largest = max(largest, of_file)
    return number, size, largest, f"{size}:{print_.hexdigest()}", None
