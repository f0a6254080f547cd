"""Captures -> tables, on one machine: `kproxy convert`.

Duty: connects the flows of captures to the writers of tables, and distributes captures among processes. The same
captures give the same files, whatever the number of processes. Small captures are read concurrently, one process each.
Large captures are read in parts (`parts`), some per process. If that is impossible (a compressed file, for example),
each process reads the whole capture and decodes its own flows: flows are assigned to fixed shards, and shards to
processes. The rows of all processes are merged in one order.

Memory: see capture.flows and parts, RUN_ROWS rows of each table, and one row group during the merge.
"""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kproxy.capture.clusters import Earlier, Labels, note
from kproxy.capture.dissection.keys import SHARDS
from kproxy.capture.formats.storage import is_remote
from kproxy.capture.quality import Quality, Twice
from kproxy.convert import clusters, machine
from kproxy.convert.job import (
    Job,
    Settings,
    Summary,
    captures_of,
    manifest,
    output_folder,
    refuse_adding,
    refuse_replacing,
)
from kproxy.convert.kept_frames import KEPT_FRAMES
from kproxy.convert.knowledge import InsightRows, by_source, know
from kproxy.convert.parts import processes as parts
from kproxy.convert.parts.reader import Unsplittable
from kproxy.convert.rows import Rows, quality_batch
from kproxy.convert.shares import FED, Share, remove, share, sorters
from kproxy.convert.workers import Progress, Seen, Workers
from kproxy.errors import CaptureError, KproxyError
from kproxy.tables import schema, writer
from kproxy.tables.dataset import file_of, read_manifest
from kproxy.tables.names import Names
from kproxy.tables.schema import Table
from kproxy.wording import counted

POLL_S = 0.2  # interval of checks whether a followed file has grown
PROCESS_BYTES = 256 << 20  # memory of one process
SMALL_BYTES = 32 << 20  # a smaller capture is not worth a second process
_DEFAULT = Settings()
log = logging.getLogger("kproxy.convert")


@dataclass
class _InsightInput:
    """The input of insight from all captures: sorted runs, and the names from each capture."""

    kept_frames: writer.Sorter
    registry: writer.Sorter
    names: dict[str, Names]


def convert(
    captures: Sequence[Path | str],
    out: Path | str,
    settings: Settings = _DEFAULT,
    *,
    follow: bool = False,
    processes: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Write the tables of captures into the folder `out`, one Parquet file for each table and capture.

    captures: paths of pcap and pcapng files, plain or compressed, or "-" for standard input; each is a source of its
        own, named after its file, unless `settings.rotated` is set.
    follow: the last file still grows; read on until SIGINT or SIGTERM.
    processes: number of processes per capture; 0: as many as cores and memory allow, and one for a small capture.
    progress: called with (source, bytes read, total bytes or 0) now and then; for captures that are read concurrently,
        with the numbers of captures instead of bytes.

    Returns a summary. Files appear complete or not at all, and the same captures give the same bytes. An unreadable
    capture is in `Summary.failed` and does not stop the others. Raises KproxyError before anything is written if
    settings exclude each other, if two captures have one name, if the folder has tables of another capture of that
    name, or if it has tables of other captures and `settings.append` is not set; also if the folder cannot be written
    to.
    """
    folder = output_folder(out)
    jobs = captures_of(captures, settings)
    if not settings.overwrite:
        refuse_replacing(folder, jobs)
    if not settings.append:
        refuse_adding(folder, jobs)
    dataset = writer.Dataset(folder)
    summary = Summary(folder, key_log=jobs[0].key_log, chosen=settings.records)
    work = dataset.begin("convert")
    try:
        places: dict[str, Path] = {}
        inputs = _InsightInput(
            writer.Sorter(KEPT_FRAMES, work, ".all"), writer.Sorter(schema.REGISTRY, work, ".all"), {}
        )
        done: dict[int, Share] = {}
        failed: dict[int, CaptureError] = {}
        for number, read in _reads(jobs, work, processes, follow, progress):
            if isinstance(read, CaptureError):
                failed[number] = read
                continue
            done[number] = read
            job = jobs[number]
            for table, finished, rows in _written(job, read, work, number, processes or _most_processes()):
                summary.rows[table.name] = summary.rows.get(table.name, 0) + rows
                places[f"{table.name}/{file_of(job.source)}"] = finished
        summary.failed = [failed[number] for number in sorted(failed)]
        numbers: dict[str, int] = {}
        for number, read in sorted(done.items()):  # in the order of the captures
            source = jobs[number].source
            summary.quality[source], summary.paths[source] = read.quality, jobs[number].paths
            inputs.kept_frames.adopt(read.runs[KEPT_FRAMES.name])
            inputs.registry.adopt(read.runs[schema.REGISTRY.name])
            inputs.names[source], numbers[source] = read.names, number
        _count_twice(summary.quality)
        labels, known = _separate_clusters(jobs[0].cluster, inputs, summary, places)
        _know(jobs[0].cluster, inputs, work, numbers, summary, places, labels)
        if settings.records is not None and not summary.rows.get(schema.RECORDS.name):
            batches = [file for place, file in places.items() if place.startswith(f"{schema.BATCHES.name}/")]
            summary.topics = writer.some_values(batches, ("topic", "topic_id"))
        if places:
            without = summary.paths if settings.records is None else ()  # records of an earlier run are removed
            gone = [f"{schema.RECORDS.name}/{file_of(source)}" for source in without]
            dataset.publish(places, manifest(jobs, summary) | {"clusters": known}, gone, together=True)
    finally:
        dataset.abandon()
    return summary


def _count_twice(qualities: Mapping[str, Quality]) -> None:
    """Count in each capture the connections that an earlier one holds too."""
    twice = Twice()
    for quality in qualities.values():
        for stream in list(twice.add(quality.streams())):
            quality.note("in_two_captures", stream.first_ns, size=stream.size)


def _separate_clusters(
    given: str, inputs: _InsightInput, summary: Summary, places: Mapping[str, Path]
) -> tuple[dict[str, Labels], list[dict[str, Any]]]:
    """Write the clusters of connections into the tables, if the dataset has several.

    Returns them by source, and the manifest's entries of clusters for later runs.
    """
    before = read_manifest(summary.folder)
    is_anew = set(before.get("sources", ())) <= summary.paths.keys()
    earlier = Earlier({} if is_anew else before, given)
    current = clusters.clusters_in(inputs.kept_frames.runs)
    names = earlier.labels(current)
    of_this_run = current.labels().labels
    for source in summary.paths:
        quality = summary.quality[source]
        current.note_nameless(quality, source, of_this_run)
        if not names:
            current.note_not_shown(
                quality, source, clusters.answering(places[f"{schema.CONNECTIONS.name}/{file_of(source)}"])
            )
    found: dict[str, Labels] = {}
    for source in summary.paths if names else ():
        files = {
            table: places[place]
            for table in (schema.CONNECTIONS, schema.EXCHANGES, schema.PARTITIONS, schema.BATCHES, schema.RECORDS)
            if (place := f"{table.name}/{file_of(source)}") in places
        }
        connections, exchanges = files[schema.CONNECTIONS], files.get(schema.EXCHANGES)
        found[source] = clusters.of_file(source, names, connections, exchanges, alone=earlier.is_given_taken)
        note(summary.quality[source], found[source], pq.read_metadata(connections).num_rows)
        for table, file in files.items():
            clusters.relabel(table, file, found)
    return found, earlier.manifest(current, names)


def _know(
    cluster: str,
    inputs: _InsightInput,
    work: Path,
    numbers: dict[str, int],
    summary: Summary,
    places: dict[str, Path],
    labels: Mapping[str, Labels],
) -> None:
    """Write the tables of insight, and `quality`, with counts of omitted input."""
    insight = InsightRows(work, ("source",))
    left_out = know(cluster, inputs.kept_frames.runs, inputs.registry.runs, inputs.names, insight, labels)
    for table in schema.KNOWLEDGE:
        summary.rows[table.name] = 0
        files = {source: work / f"{number}.{table.name}.parquet" for source, number in numbers.items()}
        for source, of_source in by_source(insight.parts(table)):
            summary.rows[table.name] += writer.store(table, of_source, files[source])
        for source, file in files.items():
            if not file.exists():
                writer.store(table, (), file)
            places[f"{table.name}/{file_of(source)}"] = file
    for source, number in numbers.items():
        quality = summary.quality[source]
        quality.add(left_out.get(source, Quality()))
        sorter = writer.Sorter(schema.QUALITY, work, f".{number}")
        sorter.add(quality_batch(source, quality))
        sorter.spill()
        finished = work / f"{number}.quality.parquet"
        rows = writer.write(schema.QUALITY, sorter.runs, finished)
        summary.rows["quality"] = summary.rows.get("quality", 0) + rows
        places[f"quality/{file_of(source)}"] = finished


def _written(job: Job, read: Share, work: Path, number: int, threads: int) -> Iterator[tuple[Table, Path, int]]:
    """Write the tables of a capture, concurrently if it is large; yield (table, file, number of rows)."""
    tables = [schema.BY_NAME[name] for name in job.tables]
    files = [work / f"{number}.{table.name}.parquet" for table in tables]
    if sum(run.stat().st_size for runs in read.runs.values() for run in runs) < SMALL_BYTES:
        threads = 1

    def write(table: Table, file: Path) -> int:
        return writer.write(
            table, read.runs[table.name], file, partial(_finished, table, job, read.names), read.corrections
        )

    with ThreadPoolExecutor(min(threads, len(tables))) as pool:
        yield from zip(tables, files, pool.map(write, tables, files), strict=True)


def _finished(table: Table, job: Job, names: Names, rows: pa.Table) -> pa.Table:
    """Return the final rows of a file, with topic names, and without records of topics that were not chosen."""
    rows = names.fill(rows)
    return job.records.of(rows) if table is schema.RECORDS and job.records is not None else rows


# --- one capture, in one or more processes ---------------------------------------------------------------------------


def _reads(
    jobs: Sequence[Job], work: Path, processes: int, follow: bool, progress: Progress | None
) -> Iterator[tuple[int, Share | CaptureError]]:
    """Read captures; yield (number, result). Small captures are read first, concurrently, then the others."""
    with Workers(processes or _most_processes()) as workers:
        small = [] if follow else [number for number, job in enumerate(jobs) if _is_small(job)]
        if (processes or workers.most) < 2 or len(small) < 2:
            small = []
        if not processes and sum(_size(jobs[number]) for number in small) < SMALL_BYTES:
            small = []
        if small:
            yield from _side_by_side(jobs, small, work, workers, progress)
        for number in sorted(set(range(len(jobs))) - set(small)):
            try:
                yield number, _read(jobs[number], work, number, processes, follow, progress, workers)
            except CaptureError as fault:
                yield number, fault


def _is_small(job: Job) -> bool:
    """Return whether one process reads a capture alone: a small one, or one in a storage, to transfer it only once."""
    try:
        return all(map(job.storage.is_file, job.paths)) and (any(map(is_remote, job.paths)) or _size(job) < SMALL_BYTES)
    except CaptureError:
        return False  # its reader reports the error


def _size(job: Job) -> int:
    return sum(map(job.storage.size, job.paths))


def _side_by_side(
    jobs: Sequence[Job], numbers: Sequence[int], work: Path, workers: Workers, progress: Progress | None
) -> Iterator[tuple[int, Share | CaptureError]]:
    """Read captures concurrently, one process each; yield (number, result)."""
    waiting: deque[tuple[int, Future[Share]]] = deque()
    left = deque(numbers)
    read = 0
    while left or waiting:
        while left and len(waiting) < 4 * workers.most:  # limits the runs on the disk
            number = left.popleft()
            waiting.append((number, workers.submit(_whole, jobs[number], work, f".{number}.0")))
        number, future = waiting.popleft()
        try:
            yield number, workers.result(jobs[number].source, future)
        except CaptureError as fault:
            yield number, fault
        read += 1
        if progress is not None:
            progress(counted(len(numbers), "capture"), read, len(numbers))


def _whole(job: Job, work: Path, prefix: str, seen: Seen) -> Share:
    return _share(job, work, prefix, tuple(range(SHARDS)), True, None, None, lambda size: seen(0))


def _read(
    job: Job, work: Path, number: int, processes: int, follow: bool, progress: Progress | None, workers: Workers
) -> Share:
    """Read a capture into sorted runs by table."""
    here = follow or not all(map(job.storage.is_file, job.paths))  # pipes have one reader, growing files no fixed end
    if follow and any(map(is_remote, job.paths)):
        raise KproxyError(f"{job.paths[-1]}: --follow takes files of this machine: files in a storage do not grow")
    if here:
        processes = 1
    elif not processes:
        processes = 1 if _is_small(job) else workers.most
    if processes == 1:
        with _Interrupt(follow) if here else nullcontext() as interrupt, machine.seldom_collected():
            waits = interrupt if follow else None
            return _together(job, [_share(job, work, f".{number}.0", tuple(range(SHARDS)), True, waits, progress)])
    workers.watch(job.source, _size(job), progress)
    prefix = f".{number}.part"
    if cut := parts.plan(job, processes):
        try:
            return _together(job, parts.read(job, cut, workers, work, prefix, processes))
        except Unsplittable as fault:
            log.info("%s is read by connections: %s", job.source, fault)
            remove(work, prefix)
    processes = min(processes, SHARDS)
    shards = [tuple(range(index, SHARDS, processes)) for index in range(processes)]
    arguments = [(job, work, f".{number}.{index}", mine, index == 0) for index, mine in enumerate(shards)]
    return _together(job, workers.each(job, _some_flows, arguments))


def _some_flows(job: Job, work: Path, prefix: str, shards: tuple[int, ...], first: bool, seen: Seen) -> Share:
    return _share(job, work, prefix, shards, first, None, None, seen if first else lambda size: seen(0))


def _together(job: Job, results: Sequence[Share]) -> Share:
    whole = Share({name: [] for name in (*job.tables, *FED)}, Quality(), Names())
    for each in results:
        whole.quality.add(each.quality)
        whole.names.add(each.names.as_json())
        for table, paths in each.runs.items():
            whole.runs[table] += paths
        whole.corrections.update(each.corrections)
    return whole


def _most_processes() -> int:
    return max(1, min(machine.cores(), machine.memory_bytes() // PROCESS_BYTES))


class _Interrupt:
    """Ctrl-C, while a file is followed or a pipe is read, ends the capture: the tables are written.

    The writer of the pipe gets the signal, too, and ends. A second Ctrl-C aborts. SIGTERM (the stop of a service) also
    ends a followed file; the writer of a pipe does not get it, so with a pipe it ends the process as usual.
    """

    def __init__(self, follow: bool) -> None:
        self._seen = False
        self._signals = (signal.SIGINT, signal.SIGTERM) if follow else (signal.SIGINT,)
        self._before = [signal.getsignal(number) for number in self._signals]

    def __enter__(self) -> "_Interrupt":
        if current_thread() is main_thread():
            for number in self._signals:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if current_thread() is main_thread():
            for number, before in zip(self._signals, self._before, strict=True):
                signal.signal(number, before)

    def __call__(self) -> bool:
        """Wait POLL_S for a file to grow; returns whether to go on."""
        if not self._seen:
            time.sleep(POLL_S)
        return not self._seen

    def _note(self, *_: object) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True


def _share(
    job: Job,
    work: Path,
    prefix: str,
    shards: tuple[int, ...],
    first: bool,
    follow: Callable[[], bool] | None,
    progress: Progress | None,
    seen: Seen | None = None,
) -> Share:
    """Read a capture and decode the flows of some shards. first: also count packets of no flow.

    seen: called after each window with the bytes read.
    """
    quality = Quality()
    sorted_by = sorters(job, work, prefix)
    rows = Rows(lambda table, batch: sorted_by[table.name].add(batch), job.records, keeps=job.is_known)
    consumed = 0
    for capture in rows.read(job, quality, shards=shards, first=first, follow=follow):
        if progress is not None:
            progress(job.source, capture.consumed, capture.size)
        if seen is not None:
            seen(capture.consumed - consumed)
            consumed = capture.consumed
    return share(sorted_by, quality, rows.names)
