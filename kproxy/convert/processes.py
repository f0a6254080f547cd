"""Captures -> tables, on one machine: `kproxy convert`.

Duty: join the flows of captures to the writers of tables, and share flows out among processes. The same captures give
the same files whatever the number of processes: flows fall into fixed shards, a process takes some of them, and the
rows of all are merged in one order.

Each process reads the whole capture and decodes its own flows; the one that merges their rows never held a flow. Many
small captures are read side by side, each by one process.
Memory: see capture.flows, RUN_ROWS rows of each table, and while merging one row group.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import cast

import pyarrow as pa

from kproxy.capture.keys import SHARDS
from kproxy.capture.quality import Quality
from kproxy.capture.storage import is_remote
from kproxy.convert import machine, slices
from kproxy.convert.job import Job, Settings, Summary, captures_of, manifest, output_folder, refuse_replacing
from kproxy.convert.knowledge import Told, by_source, know
from kproxy.convert.rows import Rows, quality_batch
from kproxy.convert.slices import Share
from kproxy.convert.spoken import SPOKEN
from kproxy.errors import CaptureError, KproxyError
from kproxy.tables import schema, writer
from kproxy.tables.dataset import file_of
from kproxy.tables.names import Names
from kproxy.tables.schema import Table

POLL_S = 0.2  # of a file that grows
PROCESS_BYTES = 256 << 20  # that one may take
SMALL_BYTES = 32 << 20  # a capture below it is not worth a second process
_DEFAULT = Settings()


@dataclass
class _Said:
    """What insight is fed, of all captures: sorted runs, and the names that each capture tells."""

    spoken: writer.Sorter
    registry: writer.Sorter
    names: dict[str, Names]


_Part = tuple[int, ...] | slices.Slice  # flows by their shards, or a slice of the file

# (source, bytes read, bytes in all or 0); of captures that are read side by side, how many of them
Progress = Callable[[str, int, int], None]


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
        own, named by its file, unless `settings` say that they are one rotated capture.
    follow: the last file still grows; read on until SIGINT or SIGTERM.
    processes: how many decode a capture; 0: as many as cores and memory allow, and one for a small capture.
    progress: called with (source, bytes read, bytes in all or 0) now and then.

    Files appear whole or not at all, and the same captures give the same bytes. A capture that cannot be read is in
    `Summary.failed` and does not stop the others. Raises KproxyError before anything is written if settings exclude
    each other, if two captures have one name, or if the folder has tables of another capture of that name; and where
    the folder cannot be written to.
    """
    folder = output_folder(out)
    jobs = captures_of(captures, settings)
    if not settings.overwrite:
        refuse_replacing(folder, jobs)
    dataset = writer.Dataset(folder)
    summary = Summary(folder, key_log=jobs[0].key_log, chosen=settings.records)
    work = dataset.begin("convert")
    try:
        places: dict[str, Path] = {}
        said = _Said(writer.Sorter(SPOKEN, work, ".all"), writer.Sorter(schema.REGISTRY, work, ".all"), {})
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
            if settings.records is None:  # those of an earlier run are not of this one
                (dataset.folder / schema.RECORDS.name / file_of(job.source)).unlink(missing_ok=True)
        summary.failed = [failed[number] for number in sorted(failed)]
        numbers: dict[str, int] = {}
        for number, read in sorted(done.items()):  # in the order of the captures, whichever was read first
            source = jobs[number].source
            summary.quality[source], summary.paths[source] = read.quality, jobs[number].paths
            said.spoken.adopt(read.runs[SPOKEN.name])
            said.registry.adopt(read.runs[schema.REGISTRY.name])
            said.names[source], numbers[source] = read.names, number
        _know(jobs[0].cluster, said, work, numbers, summary, places)
        if settings.records is not None and not summary.rows.get(schema.RECORDS.name):
            batches = [file for place, file in places.items() if place.startswith(f"{schema.BATCHES.name}/")]
            summary.topics = writer.some_values(batches, ("topic", "topic_id"))
        if places:
            dataset.publish(places, manifest(jobs, summary))
    finally:
        dataset.abandon()
    return summary


def _know(
    cluster: str, said: _Said, work: Path, numbers: dict[str, int], summary: Summary, places: dict[str, Path]
) -> None:
    """Write the tables of insight, and `quality`, which counts what they lack."""
    told = Told(work, ("source",))
    left_out = know(cluster, said.spoken.runs, said.registry.runs, said.names, told)
    for table in schema.KNOWLEDGE:
        summary.rows[table.name] = 0
        files = {source: work / f"{number}.{table.name}.parquet" for source, number in numbers.items()}
        for source, parts in by_source(told.parts(table)):
            summary.rows[table.name] += writer.store(table, parts, files[source])
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
    """The tables of a capture, each with its file and its rows: those of a large capture written side by side."""
    tables = [schema.BY_NAME[name] for name in job.tables]
    files = [work / f"{number}.{table.name}.parquet" for table in tables]
    if sum(run.stat().st_size for runs in read.runs.values() for run in runs) < SMALL_BYTES:
        threads = 1

    def write(table: Table, file: Path) -> int:
        return writer.write(table, read.runs[table.name], file, partial(_finished, table, job, read.names), read.mends)

    with ThreadPoolExecutor(min(threads, len(tables))) as pool:
        yield from zip(tables, files, pool.map(write, tables, files), strict=True)


def _finished(table: Table, job: Job, names: Names, rows: pa.Table) -> pa.Table:
    """Rows on their way into a file: topics get their names, and records of topics that nobody chose are left out."""
    rows = names.fill(rows)
    return job.records.of(rows) if table is schema.RECORDS and job.records is not None else rows


# --- one capture, in one or more processes ---------------------------------------------------------------------------


def _reads(
    jobs: Sequence[Job], work: Path, processes: int, follow: bool, progress: Progress | None
) -> Iterator[tuple[int, Share | CaptureError]]:
    """Read captures, by their numbers: those that are not worth several processes side by side, then the others."""
    small = [] if follow else [number for number, job in enumerate(jobs) if _is_small(job)]
    workers = min(processes or _most_processes(), len(small))
    if workers < 2 or (not processes and sum(_size(jobs[number]) for number in small) < SMALL_BYTES):
        small = []
    if small:
        yield from _side_by_side(jobs, small, work, workers, progress)
    for number in sorted(set(range(len(jobs))) - set(small)):
        try:
            yield number, _read(jobs[number], work, number, processes, follow, progress)
        except CaptureError as fault:
            yield number, fault


def _is_small(job: Job) -> bool:
    """Whether one process is to read it alone: each process reads all of a capture, of a storage's once is enough."""
    try:
        return all(map(job.storage.is_file, job.paths)) and (any(map(is_remote, job.paths)) or _size(job) < SMALL_BYTES)
    except CaptureError:
        return False  # its reader says why


def _size(job: Job) -> int:
    return sum(map(job.storage.size, job.paths))


def _side_by_side(
    jobs: Sequence[Job], numbers: Sequence[int], work: Path, workers: int, progress: Progress | None
) -> Iterator[tuple[int, Share | CaptureError]]:
    """Captures of one process each, `workers` at a time."""
    waiting: deque[tuple[int, Future[Share]]] = deque()
    read = 0
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker) as pool:
        left = deque(numbers)
        while left or waiting:
            while left and len(waiting) < 4 * workers:  # so that few runs are on the disk
                number = left.popleft()
                waiting.append((number, pool.submit(_whole, jobs[number], work, f".{number}.0")))
            number, future = waiting.popleft()
            job = jobs[number]
            try:
                yield number, future.result()
            except CaptureError as fault:
                yield number, fault
            except BrokenProcessPool:
                raise KproxyError(
                    f"{job.source}, or a capture near it: a worker process ended; was it short of memory? "
                    "--processes 1 needs the least"
                ) from None
            read += 1
            if progress is not None:
                progress(f"{len(numbers)} captures", read, len(numbers))


def _whole(job: Job, work: Path, prefix: str) -> Share:
    with machine.seldom_collected():
        return _share(job, work, prefix, tuple(range(SHARDS)), True, None, None)


def _read(job: Job, work: Path, number: int, processes: int, follow: bool, progress: Progress | None) -> Share:
    """Read a capture into sorted runs by table."""
    here = follow or not all(map(job.storage.is_file, job.paths))  # a pipe has one reader, what grows no common end
    if follow and any(map(is_remote, job.paths)):
        raise KproxyError(f"{job.paths[-1]}: --follow is of files of this machine: a storage holds what is finished")
    if here:
        processes = 1
    elif not processes:
        processes = 1 if _is_small(job) else _most_processes()
    if not here and (sliced := slices.worth(job, processes)) is not None:
        claims = work / f"{number}.claims"
        claims.mkdir()
        readers = [slices.Slice(sliced, index, claims) for index in range(len(sliced.borders) + 1)]
        parts = _in_processes(job, work, number, readers, progress)
        joined = slices.stitched(parts, work, f".{number}")
        if joined is not None:
            return _together(job, joined)
        slices.remove(parts)
    processes = min(processes, SHARDS)
    shares = [tuple(range(index, SHARDS, processes)) for index in range(processes)]
    if here:
        with _Interrupt(follow) as interrupt, machine.seldom_collected():
            results = [_share(job, work, f".{number}.0", shares[0], True, interrupt if follow else None, progress)]
    elif processes == 1:
        with machine.seldom_collected():
            results = [_share(job, work, f".{number}.0", shares[0], True, None, progress)]
    else:
        results = _in_processes(job, work, number, shares, progress)
    return _together(job, results)


def _together(job: Job, results: Sequence[Share]) -> Share:
    whole = Share({name: [] for name in (*job.tables, *slices.FED)}, Quality(), Names())
    for share in results:
        whole.quality.add(share.quality)
        whole.names.add(share.names.told())
        for table, paths in share.runs.items():
            whole.runs[table] += paths
        whole.mends.update(share.mends)
    return whole


def _most_processes() -> int:
    return max(1, min(machine.cores(), machine.memory_bytes() // PROCESS_BYTES))


class _Interrupt:
    """Ctrl-C, while a file is followed or a pipe is read, means that the capture is over: the tables are written.

    Whatever feeds the pipe gets it too, and ends it. A second one breaks off. SIGTERM, as services are ended by, means
    the same for a file that is followed; a pipe goes on being fed, so there it ends the process as ever.
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
        """Wait a little for more of a file; whether to go on."""
        if not self._seen:
            time.sleep(POLL_S)
        return not self._seen

    def _note(self, *_: object) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True


def _in_processes(job: Job, work: Path, number: int, parts: Sequence[_Part], progress: Progress | None) -> list[Share]:
    context = get_context("spawn")
    workers = []
    for index, part in enumerate(parts):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, job, work, f".{number}.{index}", part, index == 0)
        process = context.Process(target=_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))
    results: dict[Connection, Share] = {}
    try:
        while open_pipes := [ours for _, ours in workers if ours not in results]:
            for ours in cast(list[Connection], wait(open_pipes)):  # of all: one may wait for what another was to tell
                try:
                    message = ours.recv()
                except EOFError:
                    process = next(process for process, its in workers if its is ours)
                    process.join()
                    raise KproxyError(
                        f"{job.source}: a worker process ended with status {process.exitcode}; "
                        "was it short of memory? --processes 1 needs the least"
                    ) from None
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Share):
                    results[ours] = message
                elif progress is not None:
                    progress(*message)
    finally:
        for process, ours in workers:
            ours.close()
            process.terminate()
            process.join()
    return [results[ours] for _, ours in workers]


def _worker(pipe: Connection, job: Job, work: Path, prefix: str, part: _Part, first: bool) -> None:
    """A process of its own: its part of a capture."""
    _begin_worker()
    try:
        report = (lambda *message: pipe.send(message)) if first else None
        with machine.seldom_collected():
            if not isinstance(part, slices.Slice):
                read = _share(job, work, prefix, part, first, None, report)
            elif first:
                read = slices.read_first(job, work, prefix, part, report)
            else:
                read = slices.read_slice(job, work, prefix, part)
            pipe.send(read)
    except KproxyError as fault:
        pipe.send(fault)


def _begin_worker() -> None:
    """What a process of ours does first: it ends with its parent, whose folder it writes in."""
    parent = parent_process()
    assert parent is not None
    machine.retain()
    Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _share(
    job: Job,
    work: Path,
    prefix: str,
    shards: tuple[int, ...],
    first: bool,
    follow: Callable[[], bool] | None,
    progress: Progress | None,
) -> Share:
    """Read a capture and decode the flows of some shards; `first`: count also what belongs to no flow."""
    quality = Quality()
    sorted_by = slices.sorters(job, work, prefix)
    rows = Rows(lambda table, batch: sorted_by[table.name].add(batch), job.records, keeps=job.is_known)
    for capture in rows.read(job, quality, shards=shards, first=first, follow=follow):
        if progress is not None:
            progress(job.source, capture.consumed, capture.size)
    return slices.share(sorted_by, quality, rows.names)
