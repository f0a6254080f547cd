"""Captures -> tables, on one machine: `kproxy convert`.

Duty: join the flows of captures to the writers of tables, and share flows out among processes. The same captures give
the same files whatever the number of processes: flows fall into fixed shards, a process takes some of them, and the
rows of all are merged in one order.

Each process reads the whole capture and decodes its own flows; the one that merges their rows never held a flow.
Memory: see capture.flows, RUN_ROWS rows of each table, and while merging one row group.
"""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread, current_thread, main_thread

import pyarrow as pa

from kproxy.capture.flows import SHARDS
from kproxy.capture.quality import Quality
from kproxy.convert import machine
from kproxy.convert.job import Job, Settings, Summary, captures_of, manifest, output_folder, refuse_replacing
from kproxy.convert.knowledge import Told, by_source, know
from kproxy.convert.rows import Rows, quality_batch
from kproxy.convert.spoken import SPOKEN
from kproxy.errors import CaptureError, KproxyError
from kproxy.tables import schema, writer
from kproxy.tables.dataset import file_of
from kproxy.tables.names import Names
from kproxy.tables.schema import Table

_FED = {table.name: table for table in (SPOKEN, schema.REGISTRY)}  # what insight is fed
POLL_S = 0.2  # of a file that grows
COLLECT_AFTER = 20_000  # containers made
PROCESS_BYTES = 256 << 20  # that one may take
SMALL_BYTES = 32 << 20  # a capture below it is not worth a second process
_DEFAULT = Settings()


@dataclass
class _Share:
    """What was read of a capture, or of some of its flows: sorted runs by table, its flaws, and names of topics."""

    runs: dict[str, list[Path]]
    quality: Quality
    names: Names


@dataclass
class _Said:
    """What insight is fed, of all captures: sorted runs, and the names that each capture tells."""

    spoken: writer.Sorter
    registry: writer.Sorter
    names: dict[str, Names]


Progress = Callable[[str, int, int], None]  # (source, bytes read, bytes in all or 0)


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
        numbers: dict[str, int] = {}
        for number, job in enumerate(jobs):
            try:
                read = _read(job, work, number, processes, follow, progress)
            except CaptureError as fault:
                summary.failed.append(fault)
                continue
            summary.quality[job.source] = read.quality
            summary.paths[job.source] = job.paths
            said.spoken.adopt(read.runs.pop(SPOKEN.name, []))
            said.registry.adopt(read.runs.pop(schema.REGISTRY.name, []))
            said.names[job.source] = read.names
            numbers[job.source] = number
            for table in map(schema.BY_NAME.__getitem__, job.tables):
                finished = work / f"{number}.{table.name}.parquet"
                rows = writer.write(table, read.runs[table.name], finished, partial(_finished, table, job, read.names))
                summary.rows[table.name] = summary.rows.get(table.name, 0) + rows
                places[f"{table.name}/{file_of(job.source)}"] = finished
            if settings.records is None:  # those of an earlier run are not of this one
                (dataset.folder / schema.RECORDS.name / file_of(job.source)).unlink(missing_ok=True)
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


def _finished(table: Table, job: Job, names: Names, rows: pa.Table) -> pa.Table:
    """Rows on their way into a file: topics get their names, and records of topics that nobody chose are left out."""
    rows = names.fill(rows)
    return job.records.of(rows) if table is schema.RECORDS and job.records is not None else rows


# --- one capture, in one or more processes ---------------------------------------------------------------------------


def _read(job: Job, work: Path, number: int, processes: int, follow: bool, progress: Progress | None) -> _Share:
    """Read a capture into sorted runs by table."""
    regular = [Path(path) for path in job.paths if os.path.isfile(path)]  # noqa: PTH113 - raises never
    here = follow or len(regular) < len(job.paths)  # a pipe has one reader, and what grows has no common end
    small = sum(path.stat().st_size for path in regular) < SMALL_BYTES
    if here:
        processes = 1
    elif not processes:
        processes = 1 if small else max(1, min(machine.cores(), machine.memory_bytes() // PROCESS_BYTES))
    processes = min(processes, SHARDS)
    shares = [tuple(range(index, SHARDS, processes)) for index in range(processes)]
    if here:
        with _Interrupt(follow) as interrupt, _seldom_collected():
            results = [_share(job, work, f".{number}.0", shares[0], True, interrupt if follow else None, progress)]
    elif processes == 1:
        with _seldom_collected():
            results = [_share(job, work, f".{number}.0", shares[0], True, None, progress)]
    else:
        results = _in_processes(job, work, number, shares, progress)
    whole = _Share({name: [] for name in (*job.tables, *_FED)}, Quality(), Names())
    for share in results:
        whole.quality.add(share.quality)
        whole.names.add(share.names.told())
        for table, paths in share.runs.items():
            whole.runs[table] += paths
    return whole


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


def _in_processes(
    job: Job, work: Path, number: int, shares: list[tuple[int, ...]], progress: Progress | None
) -> list[_Share]:
    context = get_context("spawn")
    workers = []
    for index, share in enumerate(shares):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, job, work, f".{number}.{index}", share, index == 0)
        process = context.Process(target=_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))
    results = []
    try:
        for process, ours in workers:
            while True:
                try:
                    message = ours.recv()
                except EOFError:
                    process.join()
                    raise KproxyError(
                        f"{job.source}: a worker process ended with status {process.exitcode}; "
                        "was it short of memory? --processes 1 needs the least"
                    ) from None
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, _Share):
                    results.append(message)
                    break
                if progress is not None:
                    progress(*message)
    finally:
        for process, ours in workers:
            ours.close()
            process.terminate()
            process.join()
    return results


def _worker(pipe: Connection, job: Job, work: Path, prefix: str, shards: tuple[int, ...], first: bool) -> None:
    """A process of its own: its share of a capture's flows. It ends with its parent, whose folder it writes in."""
    parent = parent_process()
    assert parent is not None
    machine.retain()
    Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        report = (lambda *message: pipe.send(message)) if first else None
        with _seldom_collected():
            pipe.send(_share(job, work, prefix, shards, first, None, report))
    except KproxyError as fault:
        pipe.send(fault)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Exchanges never form reference cycles, so collect rarely: at the default threshold GC costs 12 % of CPU.

    Flows and their sessions do form cycles. They are collected at the end, since what follows needs the memory; objects
    that existed before are not searched.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.collect()
        gc.set_threshold(*before)
        gc.unfreeze()


def _share(
    job: Job,
    work: Path,
    prefix: str,
    shards: tuple[int, ...],
    first: bool,
    follow: Callable[[], bool] | None,
    progress: Progress | None,
) -> _Share:
    """Read a capture and decode the flows of some shards; `first`: count also what belongs to no flow."""
    quality = Quality()
    tables = [*(schema.BY_NAME[name] for name in job.tables), *_FED.values()]
    sorters = {table.name: writer.Sorter(table, work, prefix) for table in tables}
    rows = Rows(lambda table, batch: sorters[table.name].add(batch), job.records, keeps=job.is_known)
    for capture in rows.read(job, quality, shards=shards, first=first, follow=follow):
        if progress is not None:
            progress(job.source, capture.consumed, capture.size)
    for sorter in sorters.values():
        sorter.spill()
    return _Share({name: sorter.runs for name, sorter in sorters.items()}, quality, rows.names)
