"""Captures -> tables at any size: `kproxy spark ingest`.

Duty: the same rows as `kproxy convert`, with as many tasks as the size of the captures needs:

1. look: reads the size and the fingerprint of each file (see `looking`). A later task reads the rest of the file.
2. Captures of a split's size or less, and captures whose TLS is decrypted, are read whole, once, from front to end,
   several per task (`decode.whole`). Larger captures are shared out:
   survey: a task per split finds its first record (see `splits`);
   scan: a task per split emits the time and the place of each TCP packet, without the payload (see `places`);
   decode: packets are grouped by connection, in the order of the capture. Spark persists the rows of the scan, which
   give the size of every connection: a connection larger than a task's share gets a separate task.
3. All tasks emit their rows as pieces of one table and hour (see `pieces`), which Spark persists on its disks.
4. know: one task reads the messages of groups, controllers and administrators, in the order of time (see `knowledge`).
5. store: Spark writes pieces as files (see `store`), which are published together (see `target`).

The driver keeps nothing per capture (see `catalogue`), a few numbers per split of captures that are shared out, and
the connections larger than a share. A damaged capture of many splits, or one with TLS keys, is read again whole.

Captures may be in any storage (see `capture.formats.storage`), tables in any file system of Spark. One difference from
`convert`: captures that are shared out have no limit of open connections, which are decoded one after the other.
Memory of a task: see `places` and `decode`.
"""

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import kproxy
from kproxy.capture.clusters import Earlier, Labels
from kproxy.capture.dissection.keys import Pair, pair_of
from kproxy.capture.formats.captures import Capture
from kproxy.capture.formats.splits import SPLIT_BYTES, Range, Split, Survey, agree, ranges, survey
from kproxy.capture.formats.storage import Storage, is_remote, local_path
from kproxy.capture.quality import Quality
from kproxy.convert.job import Job, Settings, Summary, refuse_no_name
from kproxy.convert.parts import reader
from kproxy.convert.parts.joining import Correction, clash
from kproxy.convert.parts.reader import Part
from kproxy.errors import CaptureError, KproxyError
from kproxy.spark import store
from kproxy.spark.catalogue import Catalogue
from kproxy.spark.store import PARQUET, Learnt
from kproxy.spark.target import Target
from kproxy.spark.tasks import clusters, decode, knowledge, pieces, places, results
from kproxy.spark.tasks.looking import MAX_DRIVER_FILES, look
from kproxy.spark.tasks.pieces import PIECES, each
from kproxy.spark.tasks.places import PACKET_SCHEMA, packets
from kproxy.tables import schema
from kproxy.tables.names import Names
from kproxy.tables.schema import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASK_BYTES = 64 << 20  # packets that one task decodes
MERGED_BYTES = 64 << 20  # pieces that one task reads
PARTS = 32  # per capture, at most, unless parts would be larger than MOST_PART_BYTES
MOST_PART_BYTES = 512 << 20
UNIT_BYTES = 32 << 20  # total size of the captures that one task reads whole
UNIT_CAPTURES = 1000  # number of captures that one task reads whole
SURVEYS = 16  # number of parts that one task surveys: each takes some milliseconds
_DEFAULT = Settings()
log = logging.getLogger("kproxy.spark")


def ingest(
    spark: "SparkSession",
    captures: Sequence[Path | str] | Catalogue,
    out: Path | str,
    settings: Settings = _DEFAULT,
    *,
    append: bool = False,
    form: str = PARQUET,
    split_bytes: int = SPLIT_BYTES,
    tasks: int = 0,
    goes_on: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Summary:
    """Write the tables of captures into the folder `out`, by date and hour; return a summary.

    captures: paths of files that every executor can read, folders, patterns, or URLs of storages; or the catalogue that
        `check` returned.
    out: a folder, or a URL that Spark can write to.
    settings: as for `convert`; checksums are not verified.
    append: add to existing tables. A capture that they already have, by its name, size and first and last bytes, adds
        nothing.
    form: a format that the session can write: parquet, or a table format such as delta, which commits each table
        itself.
    split_bytes: a larger file is shared out among tasks, about so many bytes per task.
    tasks: number of decoding tasks; 0: one per 64 MiB of packets, so that the files do not depend on the number of
        cores.
    goes_on: record a capture with the name of another capture in the tables in `Summary.failed`; do not raise an error.
    progress: called with the name of each step before it starts.

    An unreadable capture is in `Summary.failed` and does not stop the others. Raises KproxyError, before it reads any
    capture, if the folder has tables and neither `append` nor `settings.overwrite` is set, if two captures have the
    same name, or if the tables have another capture of that name.
    """
    says = progress or (lambda _: None)
    folder, catalogue = check(captures, out, settings, append=append)
    says(f"looking at {_counted(catalogue)}")
    target = Target(spark, folder)
    target.refuse(append=append, overwrite=settings.overwrite)
    _check_format(spark, folder, form)
    summary = Summary(Path(out), {}, {}, [], catalogue.like.key_log, settings.records)
    try:
        target.begin()
        known = target.refuse(append=append, overwrite=settings.overwrite)  # after `begin` finished an earlier run
        unseen = look(spark, catalogue)
        if append:
            if known and (there := known.get("format", PARQUET)) != form:
                raise KproxyError(f"{out} holds tables of the format {there}: say --format, or name another folder")
            if "contents" in known:
                raise KproxyError(
                    f"{out} holds tables of an older kproxy, which cannot be added to: name another folder"
                )
            refused = catalogue.leave_known(target.captures(), folder)
            if refused and not goes_on:
                raise KproxyError(str(refused[0]))
            summary.failed += refused
            if not catalogue:
                return summary
        with store.settings(spark):
            run = Run(spark, catalogue, split_bytes, tasks, unseen)
            try:
                says(f"reading {_counted(catalogue)}")
                run.decode(known if append else {})
                says("writing the tables")
                place = target.stage if form == PARQUET else target.url
                mode = "append" if append or form == PARQUET else "overwrite"
                tables = catalogue.like.all_tables if form in store.WITH_SCHEMA else ()
                written = run.store(place, form, mode, target.without_files(tables, known) if append else tables)
                run.fill(summary, place, form)
                if run.done:
                    said = _manifest(run, summary, known if append else {}, form)
                    committed = written if form != PARQUET else []
                    lines = catalogue.lines(run.failed)
                    target.publish(said, lines, replace=not append, committed=committed)
            finally:
                run.release()
    finally:
        target.abandon()
    return summary


def check(
    captures: Sequence[Path | str] | Catalogue, out: Path | str, settings: Settings, *, append: bool = False
) -> tuple[str, Catalogue]:
    """Return the folder and the captures of `ingest`, by paths that do not depend on the working directory.

    Raises the errors of `ingest` that need no Spark session.
    """
    refuse_no_name(out)
    folder = str(out).rstrip("/") if is_remote(out) else os.path.abspath(local_path(out))  # noqa: PTH100 - links stay
    if append and settings.overwrite:
        raise KproxyError("--append adds to the tables, --overwrite replaces them: say one of them")
    if not is_remote(out):
        Target(None, folder).refuse(append=append, overwrite=settings.overwrite)  # type: ignore[arg-type]
        if append and Path(folder).is_dir() and any(Path(folder).glob("exchanges/*.parquet")):
            raise KproxyError(f"{out} holds tables that `kproxy convert` wrote: name another folder")
    return folder, captures if isinstance(captures, Catalogue) else catalogue_of(captures, settings)


def catalogue_of(captures: Sequence[Path | str], settings: Settings) -> Catalogue:
    """Return the catalogue of captures, by paths that do not depend on the working directory."""
    paths = [str(path) if is_remote(path) else os.path.abspath(path) for path in captures]  # noqa: PTH100 - links stay
    keys = settings.key_log and os.path.abspath(settings.key_log)  # noqa: PTH100
    return Catalogue(paths, replace(settings, key_log=keys, checksums=False))


def unreadable(catalogue: Catalogue) -> list[CaptureError]:
    """Return an error for each capture if none is readable; otherwise, and beyond MAX_DRIVER_FILES captures, none."""
    faults = []
    for _, job, _ in catalogue.every() if len(catalogue) <= MAX_DRIVER_FILES else ():
        fault = why_unread(job.paths, job.storage)
        if fault is None:
            return []
        faults.append(fault)
    return faults


def why_unread(paths: Sequence[str], storage: Storage) -> CaptureError | None:
    """Return the error of reading the first packets of files; None if they are readable."""
    windows = Capture(paths, Quality(), storage=storage).windows()
    try:
        next(windows, None)
    except CaptureError as fault:
        return fault
    finally:
        windows.close()
    return None


def _counted(catalogue: Catalogue) -> str:
    if len(catalogue) != 1:
        return f"{len(catalogue):,} captures"
    ((_, job, _),) = catalogue.every()
    return job.source


def _check_format(spark: "SparkSession", folder: str, form: str) -> None:
    """Raise KproxyError if the session lacks a format: otherwise the ingest would fail after hours, at the write."""
    if form == PARQUET:
        return
    if form in ("csv", "text"):
        raise KproxyError(f"--format {form}: it has no lists, and tables have: name parquet, orc, json or delta")
    try:
        spark.read.format(form).load(folder)
    except Exception as fault:  # ignore other errors: there may be nothing to read yet
        if "[DATA_SOURCE_NOT_FOUND]" in str(fault):
            raise KproxyError(
                f"--format {form}: the session knows no such format: name parquet, or give the package that has it by "
                "--conf spark.jars.packages=..."
            ) from None


def _manifest(run: "Run", summary: Summary, known: dict[str, Any], form: str) -> dict[str, Any]:
    """Return the manifest, without clock, host or absolute path. `Catalogue.lines` lists the captures."""
    job = run.catalogue.like
    chosen = {} if job.records is None else {"records": list(job.records.topics)}
    counts = known.get("rows", {})
    of_form = {} if form == PARQUET else {"format": form}
    return {
        **of_form,
        "schema_version": schema.VERSION,
        "kproxy": kproxy.__version__,
        "pyarrow": pa.__version__,
        "settings": {"cluster": job.cluster, "ports": list(job.ports), **chosen},
        "clusters": run.clusters or known.get("clusters", []),
        "rows": counts | {name: counts.get(name, 0) + count for name, count in summary.rows.items()},
    }


# --- the work --------------------------------------------------------------------------------------------------------


class Run:
    """The state of one ingest."""

    def __init__(
        self,
        spark: "SparkSession",
        catalogue: Catalogue,
        split_bytes: int,
        tasks: int,
        failed: Mapping[int, CaptureError] = MappingProxyType({}),
    ) -> None:
        self.spark = spark
        self.catalogue = catalogue
        self.failed = dict(failed)
        self._split_bytes = split_bytes
        self._tasks = tasks
        self._kept: list[DataFrame] = []  # frames that Spark persists
        self._pieces: DataFrame | None = None
        self._counted: DataFrame | None = None  # pieces of `quality`
        self.unsplittable: dict[str, str] = {}  # captures that could not be read in parts, and why
        self.conflicting: dict[str, list[Pair]] = {}  # by source: connections of captures in parts with their own task
        self.read_bytes = 0  # bytes of captures that were read in parts
        self._corrections: dict[str, list[Correction]] = {}  # the same captures: corrections of rows, by source
        self._names: dict[str, Names] = {}  # the same captures: names, by source
        self._counts: dict[int, Quality] = {}  # the same captures: counts, by number
        self._clusters: dict[str, Labels] = {}  # clusters of connections, by source; empty: there is one cluster
        self._cluster_counts: dict[str, Quality] = {}  # counts for `quality`, by source
        self.clusters: list[dict[str, Any]] = []  # the clusters in the manifest
        self._sizes: dict[tuple[str, int], int] = {}  # bytes of pieces, by kind and hour
        self._rows: dict[str, int] = {}  # numbers of rows, by kind

    @property
    def done(self) -> int:
        """Return the number of captures in the tables."""
        return len(self.catalogue) - len(self.failed)

    def release(self) -> None:
        for frame in self._kept:
            frame.unpersist()

    def decode(self, known: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Read all captures into pieces; read captures that turn out to be unsplittable a second time.

        known: the manifest of the existing tables, with `append`.
        """
        from pyspark.sql import functions as F

        like = self.catalogue.like
        large = [] if like.key_log is not None else self.catalogue.large(self._split_bytes, 4 * self._split_bytes)
        parts = self._plan({number: self.catalogue.job(number) for number in large})
        apart = {number for number, _ in parts} | set(self.failed)
        frames = []
        if len(apart) < len(self.catalogue):
            frames = [self._whole(some for some in self.catalogue.every() if some[0] not in apart)]
        if parts:
            frames += self._decode_shared(parts)
        if not frames:
            return
        together = frames[0]
        for frame in frames[1:]:
            together = together.union(frame)
        self._count(together)
        # Later steps only read the persisted pieces: one task per MERGED_BYTES, for any number of decoding tasks.
        self._pieces = together = together.coalesce(max(1, sum(self._sizes.values()) // MERGED_BYTES))
        if (pieces.FAILED, pieces.NO_HOUR) in self._sizes:
            for row in together.where(F.col("kind") == pieces.FAILED).select("capture", "data").collect():
                self.failed[row["capture"]] = pieces.fault_of(row["data"])
        if like.is_known:
            self._clusters, self._cluster_counts, self.clusters = clusters.separate_clusters(
                together, lambda table: self.rows(together, table), Earlier(known, like.cluster), self._corrections
            )
            insight = self._keep(knowledge.pieces_of(together, like.cluster, self._corrections, self._clusters))
            self._count(insight)
            self._pieces = together.union(insight)

    def _count(self, frame: "DataFrame") -> None:
        """Compute the pieces of a persisted frame; record their bytes and rows."""
        from pyspark.sql import functions as F

        sums = frame.groupBy("kind", "hour").agg(F.sum("size").alias("size"), F.sum("count").alias("rows"))
        for row in sums.collect():
            key = row["kind"], row["hour"]
            self._sizes[key] = self._sizes.get(key, 0) + int(row["size"])
            self._rows[row["kind"]] = self._rows.get(row["kind"], 0) + int(row["rows"])

    def _decode_shared(self, parts: Sequence[tuple[int, Part]], *, again: bool = True) -> "list[DataFrame]":
        """Return the pieces of captures that are read in parts; unsplittable captures are read whole.

        again: if connections turn out to conflict, the parts of their captures are read a second time.
        """
        from pyspark.sql import functions as F

        jobs = {number: self.catalogue.job(number) for number in {number for number, _ in parts}}

        def scan(numbered: tuple[int, tuple[int, Part]]) -> Iterator[pa.RecordBatch]:
            index, (number, part) = numbered
            yield from packets(index, number, part, jobs[number])

        found = self._keep(each(self.spark, list(enumerate(parts)), scan, PACKET_SCHEMA))
        said = found.where(F.col("file") == places.REPORT).select("capture", "packets").collect()
        reports = [(row["capture"], json.loads(row["packets"])) for row in said]
        # captures with damage that only the packets show, or with TLS keys
        unsplittable = results.apart(parts, [report for _, report in reports])
        unsplittable |= {number: report["unsplittable"] for number, report in reports if report["unsplittable"]}
        conflicting: dict[int, dict[Pair, str]] = {}  # connections, by capture
        for number, report in reports:
            _note_conflicting(conflicting, number, report["conflicting"])
        while True:
            apart = {*unsplittable, *conflicting}
            left = found.where(~F.col("capture").isin(list(apart))) if apart else found
            deferred = left.where((F.col("file") >= 0) | (F.col("file") == places.EXCERPTS))
            order = "capture", "connection", "part", "file", "offset"
            size = sum(report["carried_bytes"] for number, report in reports if number not in apart)
            rest = _shared_out(deferred.drop("kind", "count"), size, self._tasks).sortWithinPartitions(*order)
            decoded = self._keep(rest.mapInArrow(decode.decode(jobs), PIECES))
            kinds = pieces.NAMES, pieces.UNSPLITTABLE, pieces.CONFLICTING, pieces.CORRECTIONS, pieces.LOGS, pieces.READ
            rows = decoded.where(F.col("kind").isin(*kinds)).select("capture", "kind", "data").collect()
            words = [(row["capture"], row["kind"], json.loads(row["data"])) for row in rows]
            more = {number: text for number, kind, text in words if kind == pieces.UNSPLITTABLE}
            more |= self._disagreeing(reports, words)
            unsplittable |= more
            for number, kind, text in words:
                if kind == pieces.CONFLICTING:
                    _note_conflicting(conflicting, number, text)
            if apart == {*unsplittable, *conflicting}:
                break
            self._kept.remove(decoded)
            decoded.unpersist()
        for number, some in conflicting.items():
            why = next(iter(some.values()))
            if not again or len(some) > reader.MAX_CONFLICTING:
                unsplittable.setdefault(number, why)
            elif number not in unsplittable:
                self.conflicting[jobs[number].source] = sorted(some)
                log.info("%s: %d connections are read by one task each: %s", jobs[number].source, len(some), why)
        for number, reason in unsplittable.items():
            log.info("%s is read by one task: %s", jobs[number].source, reason)
        self.unsplittable |= {jobs[number].source: reason for number, reason in unsplittable.items()}
        for number, report in reports:
            self.read_bytes += report["read_bytes"]
            if number not in apart:
                self._names.setdefault(jobs[number].source, Names()).add(report["names"])
        for number, kind, text in words:
            if kind == pieces.NAMES:
                self._names.setdefault(text[0], Names()).add(text[1])
            elif kind == pieces.READ:
                self.read_bytes += text
            elif kind == pieces.CORRECTIONS:
                self._corrections.setdefault(jobs[number].source, []).extend(
                    Correction(*correction) for correction in text
                )
        self._counts |= results.of_splits(
            self.spark, parts, [report for number, report in reports if number not in apart]
        )
        frames = [places.pieces_of(left), decoded]
        if unsplittable:
            frames.append(
                self._whole((number, jobs[number], self.catalogue.size(number)) for number in sorted(unsplittable))
            )
        if rest_of := {number: frozenset(some) for number, some in conflicting.items() if number not in unsplittable}:
            once_more = [
                (number, replace(part, conflicting=rest_of[number])) for number, part in parts if number in rest_of
            ]
            frames += self._decode_shared(once_more, again=False)
        return frames

    def _disagreeing(self, reports: Sequence[tuple[int, Any]], words: Sequence[tuple[int, str, Any]]) -> dict[int, str]:
        """Return the captures whose readers disagree about a topic being a coordinators' log, with the reason."""
        decisions: dict[int, list[tuple[dict[int, bool], set[int]]]] = {}
        for number, (decided, doubted) in (
            *((number, report["logs"]) for number, report in reports),
            *((number, text) for number, kind, text in words if kind == pieces.LOGS),
        ):
            decisions.setdefault(number, []).append((dict(decided), set(doubted)))
        return {number: "logs" for number, logs in decisions.items() if clash(logs)}

    def store(self, folder: str, form: str, mode: str, empty: Collection[str]) -> list[str]:
        """Write pieces as tables; return the names of the written tables. empty: tables to write even without rows."""
        every = self.finished()
        if every is None:
            return []
        return store.store(every, self._sizes, self._learnt(), folder, form, mode, empty)

    def has_rows(self, table: Table) -> bool:
        return any(name == table.name for name, _ in self._sizes)

    def rows(self, every: "DataFrame", table: Table) -> "DataFrame":
        """Return the rows of a table from the pieces that `finished` returned."""
        hours = store.hours_of(table, self._sizes)
        return store.rows(every, table, hours, self._learnt())

    def _learnt(self) -> Learnt:
        return Learnt(self._names, self._corrections, self._clusters, self.catalogue.like.records)

    def finished(self) -> "DataFrame | None":
        """Return all pieces, including `quality`; None if there are none."""
        if self._pieces is None or not self.done:
            return None
        from pyspark.sql import functions as F

        counts = self._pieces.where(F.col("kind") == pieces.COUNTS).select("data")
        by_source = [(self.catalogue.job(number).source, some) for number, some in self._counts.items()]
        extra = [[source, places.listed(some)] for source, some in (*by_source, *self._cluster_counts.items())]
        counts = self._with_counts(counts, extra)
        if len(self.catalogue) > 1:
            twice = results.in_several(
                counts, lambda: [self.catalogue.job(number).source for number in range(len(self.catalogue))]
            )
            counts = self._with_counts(counts, [[source, places.listed(some)] for source, some in twice.items()])
        self._counted = self._keep(results.counted(counts, len(self.catalogue)))
        self._count(self._counted)
        return self._pieces.union(self._counted)

    def _with_counts(self, counts: "DataFrame", extra: Sequence[Any]) -> "DataFrame":
        if not extra:
            return counts
        more = pieces.frame(self.spark, [(json.dumps(each).encode(),) for each in extra], "data binary")
        return counts.union(more)

    def fill(self, summary: Summary, folder: str, form: str) -> None:
        """Fill the summary of the ingest."""
        from pyspark.sql import functions as F

        summary.failed += [self.failed[number] for number in sorted(self.failed)]
        if not self.done or self._counted is None:
            return
        like = self.catalogue.like
        summary.rows = {name: self._rows.get(name, 0) for name in like.all_tables}
        for row in self._counted.where(F.col("kind") == results.COUNTED).select("data").collect():
            source, counts = json.loads(row["data"])
            name = source if source is not None else f"{self.done:,} captures"
            results.noted(summary.quality.setdefault(name, Quality()), counts)
        summary.quality = dict(sorted(summary.quality.items()))
        if like.records is not None:
            records, read = schema.RECORDS.name, self.spark.read.format(form)
            if self._rows.get(records):  # captures in parts count topics that were not chosen
                summary.rows[records] = read.load(store.place_of(folder, schema.RECORDS, form)).count()
            if not summary.rows[records] and self._rows.get(schema.BATCHES.name):
                topic = F.coalesce("topic", "topic_id").alias("topic")
                batches = read.load(store.place_of(folder, schema.BATCHES, form))
                seen = batches.select(topic).distinct().limit(1000)
                summary.topics = sorted(row["topic"] for row in seen.collect() if row["topic"] is not None)

    # --- captures that one task reads ---

    def _whole(self, captures: Iterable[tuple[int, Job, int]]) -> "DataFrame":
        """Return the pieces of captures that are read whole, several per task, by bytes."""

        def units() -> Iterator[list[tuple[int, Job]]]:
            unit: list[tuple[int, Job]] = []
            left = UNIT_BYTES
            for number, job, size in captures:
                if unit and (size > left or len(unit) >= UNIT_CAPTURES):
                    yield unit
                    unit, left = [], UNIT_BYTES
                unit.append((number, job))
                left -= size
            yield unit

        return self._keep(each(self.spark, units(), decode.whole, PIECES))

    def _keep(self, frame: "DataFrame") -> "DataFrame":
        from pyspark import StorageLevel

        self._kept.append(frame.persist(StorageLevel.DISK_ONLY))
        return frame

    # --- captures that are shared out ---

    def _part_bytes(self, capture: int) -> int:
        """Return the bytes of a part: each part costs 0.13 s of CPU, and a dead executor loses all its parts."""
        return max(self._split_bytes, min(self.catalogue.size(capture) // PARTS, MOST_PART_BYTES))

    def _plan(self, jobs: Mapping[int, Job]) -> list[tuple[int, Part]]:
        """Return the parts of captures that are worth several tasks.

        Unreadable captures are recorded as failed; captures that cannot be shared out are left out.
        """
        cut = [
            (number, file, piece)
            for number, job in jobs.items()
            for file, path in enumerate(job.paths)
            for piece in ranges(path, self._part_bytes(number), job.storage)
        ]
        if not cut:
            return []

        def run(some: Sequence[tuple[int, tuple[int, int, Range]]]) -> Iterator[pa.RecordBatch]:
            for index, (_, _, piece) in some:
                try:
                    seen = survey(piece)
                    yield pieces.words(index, pieces.REPORT, {**vars(seen), "opening": seen.opening.hex()})
                except CaptureError as fault:
                    yield pieces.failed(index, fault)

        surveys: dict[tuple[int, int], list[tuple[Range, Survey]]] = {}
        secret = set()
        numbered = iter(enumerate(cut))
        together = iter(lambda: list(islice(numbered, SURVEYS)), [])
        rows = each(self.spark, together, run, PIECES).select("capture", "kind", "data").collect()
        for row in sorted(rows, key=lambda row: row["capture"]):
            number, file, piece = cut[row["capture"]]
            if row["kind"] == pieces.FAILED:
                self.failed.setdefault(number, pieces.fault_of(row["data"]))
                continue
            found = json.loads(row["data"])
            found["opening"] = bytes.fromhex(found["opening"])
            seen = Survey(**found)
            surveys.setdefault((number, file), []).append((piece, seen))
            if seen.secrets:
                secret.add(number)
        splits: dict[int, list[tuple[int, Split]]] = {}
        for (number, file), of_file in surveys.items():
            if number not in self.failed and number not in secret:
                agreed = agree([piece for piece, _ in of_file], [seen for _, seen in of_file])
                splits.setdefault(number, []).extend((file, split) for split in agreed)
        parts = []
        for number, of_job in sorted(splits.items()):
            if len(of_job) < 2:  # the capture is damaged or compressed: one task reads it best
                continue
            following = [split for _, split in of_job[1:]]
            for index, ((file, split), after) in enumerate(zip(of_job, [*following, None], strict=True)):
                parts.append((number, Part(index, split, file, after, reader.OVERLAP_PART)))
        return parts


def _note_conflicting(conflicting: dict[int, dict[Pair, str]], capture: int, reasons: Sequence[Sequence[str]]) -> None:
    for key, why in reasons:
        conflicting.setdefault(capture, {})[pair_of(bytes.fromhex(key))] = why


def _shared_out(packets: "DataFrame", size: int, tasks: int) -> "DataFrame":
    """Partition the rows of the scan: a connection larger than an even share gets its own task, which starts early.

    All sizes are captured bytes of packets, whether or not the files are compressed.
    """
    from pyspark.sql import functions as F

    packets = packets.coalesce(max(1, size // TASK_BYTES))
    tasks = tasks or max(1, size // TASK_BYTES)
    if tasks == 1:
        return packets.repartition(1)
    share = max(1, size // tasks)
    sizes = packets.groupBy("capture", "connection").agg(F.sum("size").alias("size")).where(F.col("size") > share)
    large = sorted(map(tuple, sizes.collect()), key=lambda row: (-row[2], row))
    alone = [(capture, connection, task) for task, (capture, connection, _) in enumerate(large)]
    rest = max(1, (size - sum(row[2] for row in large)) // share)
    together = len(alone) + F.pmod(F.hash("capture", "connection"), F.lit(rest))
    if not alone:
        return packets.repartitionById(rest, together)
    numbers = pieces.frame(packets.sparkSession, alone, "capture int, connection bigint, alone int")
    return (
        packets.join(F.broadcast(numbers), ["capture", "connection"], "left")
        .repartitionById(len(alone) + rest, F.coalesce("alone", together))
        .drop("alone")
    )
