"""Reads the parts of a large capture with several processes on one machine, for `kproxy convert`.

Duty: `plan` cuts a capture; a process reads each part (`read_part`), and then some of the deferred connections
(`read_deferred`); `read` runs these, and returns shares. Some captures cannot be read in parts, because of their format
or because most connections cannot be claimed at a border; they are read in another way.

Memory: a process holds one part's flows and places of packets, the owner the excerpts of connections at borders. The
caller starts processes (`Workers`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from kproxy.capture.dissection.keys import Pair
from kproxy.capture.dissection.uncut import Lengths
from kproxy.capture.formats import splits
from kproxy.capture.formats.storage import is_remote
from kproxy.capture.quality import Quality
from kproxy.convert.job import Job
from kproxy.convert.parts import clocks, reader
from kproxy.convert.parts.clocks import Times
from kproxy.convert.parts.deferred import Deferred
from kproxy.convert.parts.joining import Correction, clash, corrected, without
from kproxy.convert.parts.places import PLACE, grouped
from kproxy.convert.parts.reader import SEVERAL_LENGTHS, Excerpt, Part, Unsplittable, is_again
from kproxy.convert.shares import FED, Share, remove, share, sorters
from kproxy.convert.workers import Seen, Workers
from kproxy.errors import CaptureError
from kproxy.tables import schema, writer
from kproxy.tables.arrays import batch
from kproxy.tables.folders import writing

PART_PACKETS = 1 << 19  # 20 MB of places
PART_BYTES, MOST_BYTES = 128 << 20, 4 << 30  # bounds of a part, for very small and very large packets
LEAST_BYTES = 16 << 20  # of a part: for smaller parts other ways cost less
LEAST_CLAIMED = 0.5  # smallest share of claimed connections in the bytes at a border
NO_TIMES = Times(0, 0, 0, 0)
NEAR_BYTES = 1 << 20  # up to so many bytes of deferred packets are read in this process
TASK_BYTES = 8 << 20  # of deferred packets per process
log = logging.getLogger("kproxy.convert")


@dataclass(frozen=True)
class Run:
    """Packets of a deferred connection, in a file of `PLACE`."""

    path: Path
    start: int
    count: int
    part: int
    phase: int
    file: int
    size: int


@dataclass
class Told:
    """The result of a process for a part, or for deferred connections."""

    share: Share
    logs: tuple[dict[int, bool], set[int]]
    left: set[int] = field(default_factory=set)  # see `reader.Found`
    excerpts: list[Excerpt] = field(default_factory=list)
    deferred: list[tuple[Pair, Run]] = field(default_factory=list)
    times: Times = NO_TIMES
    lengths: Lengths = field(default_factory=Lengths)  # of its packets
    corrections: list[Correction] = field(default_factory=list)
    conflicting: dict[Pair, str] = field(default_factory=dict)


def plan(job: Job, processes: int) -> list[Part]:
    """Return the parts of a capture, the same number for each process; none if splitting does not pay."""
    if processes < 2 or job.key_log is not None or job.records is not None:
        return []
    try:
        sizes = [job.storage.size(path) for path in job.paths]
        if any(map(is_remote, job.paths)) or not all(splits.is_plain(path, job.storage) for path in job.paths):
            return []
        whole = sum(sizes)
        largest, path = max(zip(sizes, job.paths, strict=True))
        if largest < LEAST_BYTES:
            return []
        most = min(max(PART_PACKETS * _mean(path, largest), PART_BYTES), MOST_BYTES)
        rounds = -(-whole // (most * processes))
        of_part = max(1, whole // (rounds * processes))
        if of_part < LEAST_BYTES:
            return []
        found = [(file, split) for file, path in enumerate(job.paths) for split in splits.plan(path, of_part)]
    except (OSError, CaptureError):
        return []  # its reader reports the error
    if len(found) < 2 or whole // len(found) < LEAST_BYTES // 2:
        return []
    following = [split for _, split in found[1:]]
    return [
        Part(number, split, file, after)
        for number, ((file, split), after) in enumerate(zip(found, [*following, None], strict=True))
    ]


def _mean(path: str, size: int) -> int:
    """Return the mean bytes of records in the middle of a file."""
    window = next(splits.windows(splits.plan(path, -(-size // 2))[-1], Quality()), None)
    if window is None or not window.records:
        return 1
    return (window.records[-1][3] - window.records[0][2]) // len(window.records) + 16


def read_part(job: Job, part: Part, work: Path, prefix: str, seen: Seen) -> Told:
    """Read a part. Raises Unsplittable."""
    sorted_by = sorters(job, work, prefix)
    found = reader.read(job, part, lambda table, rows: sorted_by[table.name].add(rows), least=LEAST_CLAIMED, seen=seen)
    if found.unsplittable:
        raise Unsplittable(found.unsplittable)
    path = work / f"places{prefix}"
    told = Told(
        share(sorted_by, found.quality, found.names),
        (found.logs, found.doubted),
        found.left,
        found.excerpts,
        times=Times(found.begin, found.until, found.first_ns, found.last_ns),
        lengths=found.packets.lengths,
        conflicting=found.conflicting,
    )
    start = 0
    with writing(work), path.open("wb") as sink:
        for group in grouped(found.packets, found.deferred):
            sink.write(group.places.data)  # tofile() does not report a full disk
            sizes = np.add.reduceat(group.places["captured"], group.edges[:-1], dtype=np.int64).tolist()
            edges = group.edges.tolist()
            for owner, begin, end, size in zip(group.owners.tolist(), edges, edges[1:], sizes, strict=False):
                run = Run(path, start + begin, end - begin, part.number, group.phase, group.file, size)
                told.deferred.append((found.packets.pairs[owner], run))
            start += len(group.places)
    return told


Connections = Sequence[tuple[Sequence[Excerpt], Sequence[Run]]]


def read_deferred(job: Job, work: Path, prefix: str, connections: Connections, seen: Seen) -> Told:
    """Read the deferred packets of connections, and join their excerpts. Raises Unsplittable."""
    sorted_by = sorters(job, work, prefix)
    deferred = Deferred(job, lambda table, rows: sorted_by[table.name].add(rows))
    for of_connection, runs in connections:
        deferred.begin(of_connection)
        for run in runs:
            places = np.fromfile(run.path, PLACE, run.count, offset=run.start * PLACE.itemsize)
            deferred.take(run.part, run.phase, run.file, places)
            seen(0)
        if deferred.unsplittable:
            raise Unsplittable(deferred.unsplittable)
    deferred.finish()
    if deferred.unsplittable:
        raise Unsplittable(deferred.unsplittable)
    sorted_by[schema.CONNECTIONS.name].add(batch(schema.CONNECTIONS.schema, deferred.connections))
    logs = deferred.rows.logs
    of_logs = ({}, set()) if logs is None else (logs.decided, logs.doubted)
    return Told(
        share(sorted_by, deferred.quality, deferred.rows.names),
        of_logs,
        corrections=deferred.corrections,
        conflicting=deferred.conflicting,
    )


def read(job: Job, parts: Sequence[Part], workers: Workers, work: Path, prefix: str, processes: int) -> list[Share]:
    """Read a capture in parts; returns the shares of the processes.

    If connections turn out to conflict, the parts are read a second time. Raises Unsplittable if the capture cannot be
    read in parts, and CaptureError.
    """
    every = _read(job, parts, workers, work, prefix, processes)
    if conflicting := _conflicting(every):
        why = next(iter(conflicting.values()))
        if len(conflicting) > reader.MAX_CONFLICTING:
            raise Unsplittable(why)
        log.info("%s: %d connections are read by themselves: %s", job.source, len(conflicting), why)
        remove(work, prefix)
        again = [replace(part, conflicting=frozenset(conflicting)) for part in parts]
        every = _read(job, again, workers, work, prefix, processes)
        if still := _conflicting(every):
            raise Unsplittable(next(iter(still.values())))
    return [each.share for each in every]


def _conflicting(every: Sequence[Told]) -> dict[Pair, str]:
    """Return conflicting connections, with the reasons."""
    return {pair: why for each in every for pair, why in each.conflicting.items()}


def _read(job: Job, parts: Sequence[Part], workers: Workers, work: Path, prefix: str, processes: int) -> list[Told]:
    told = workers.each(job, read_part, [(job, part, work, f"{prefix}.{part.number}") for part in parts])
    times = [each.times for each in told]
    if any(one.times.until != other.times.begin for one, other in pairwise(told)):
        raise Unsplittable("readers differ")
    if reduce(Lengths.with_, (each.lengths for each in told)).has_longer:
        raise Unsplittable(SEVERAL_LENGTHS)
    _settle_clock(job, parts, told, times, workers)
    connections = _connections(told)
    groups = _groups(connections, processes)
    arguments = [(job, work, f"{prefix}.deferred{index}", group) for index, group in enumerate(groups)]
    if len(arguments) == 1 and _size(groups[0]) < NEAR_BYTES:
        joined = [read_deferred(*arguments[0], lambda size: None)]
    else:
        joined = workers.each(job, read_deferred, arguments)
    every = [*told, *joined]
    if any(each.conflicting for each in every):
        return every
    if clash([each.logs for each in every]):
        raise Unsplittable("logs")
    corrections = [correction for each in joined for correction in each.corrections]
    for index, each in enumerate(every):
        _correct(each, corrections, work, f"{prefix}.corrected{index}")
    return every


def _settle_clock(
    job: Job, parts: Sequence[Part], told: Sequence[Told], times: Sequence[Times], workers: Workers
) -> None:
    late = dict(clocks.late(times))
    again = workers.each(job, back, [(parts[number], times[number], before) for number, before in late.items()])
    for number, (count, first_ns, last_ns) in zip(late, again, strict=True):
        quality = Quality()
        for kind, *row in told[number].share.quality.counts():
            if kind != "clock_back":
                quality.note(kind, row[2], count=row[0], size=row[1], last_ns=row[3])
        if count:
            quality.note("clock_back", first_ns, count=count, last_ns=last_ns)
        told[number].share.quality = quality


def back(part: Part, times: Times, before_ns: int, seen: Seen) -> tuple[int, int, int]:
    """Return `clocks.back`, in a worker."""
    seen(0)
    return clocks.back(part, times, before_ns)


def _connections(told: Sequence[Told]) -> list[tuple[list[Excerpt], list[Run]]]:
    """Return connections with excerpts of several readers or with deferred packets, without conflicting ones."""
    conflicting = _conflicting(told)
    of_pairs: dict[Pair, tuple[list[Excerpt], list[Run]]] = {}
    for each in told:
        for excerpt in each.excerpts:
            of_pairs.setdefault(excerpt.pair, ([], []))[0].append(excerpt)
        for pair, run in each.deferred:
            of_pairs.setdefault(pair, ([], []))[1].append(run)
    return [
        (of_connection, runs)
        for pair, (of_connection, runs) in sorted(of_pairs.items())
        if pair not in conflicting
        and (
            runs
            or any(excerpt.snapshot is not None or excerpt.handover is not None for excerpt in of_connection)
            or _is_there_twice(of_connection)
        )
    ]


def _is_there_twice(of_connection: Sequence[Excerpt]) -> bool:
    firsts = None
    for excerpt in of_connection:
        if is_again(excerpt.begun, firsts):
            return True
        firsts = excerpt.firsts or firsts
    return False


def _size(connections: Connections) -> int:
    return sum(run.size for _, runs in connections for run in runs)


def _groups(connections: Connections, processes: int) -> list[list[tuple[Sequence[Excerpt], Sequence[Run]]]]:
    """Distribute connections among processes, with about the same number of bytes for each."""
    count = max(1, min(processes, _size(connections) // TASK_BYTES))
    groups: list[list[tuple[Sequence[Excerpt], Sequence[Run]]]] = [[] for _ in range(count)]
    sizes = [0] * count
    for connection in sorted(connections, key=lambda one: -_size([one])):
        least = sizes.index(min(sizes))
        groups[least].append(connection)
        sizes[least] += _size([connection]) + 1
    return groups


def _correct(told: Told, corrections: Sequence[Correction], work: Path, prefix: str) -> None:
    """Correct rows of connections that began in another part, and remove rows of connections in `told.left`."""
    if not corrections and not told.left:
        return
    correction = partial(_corrected, corrections, told.left)
    for name, runs in told.share.runs.items():
        table = FED.get(name) or schema.BY_NAME[name]
        if "connection" not in table.schema.names or not runs:
            continue
        if name not in FED:
            told.share.corrections.update(dict.fromkeys(runs, correction))
            continue
        sorter = writer.Sorter(table, work, prefix)  # merged with the runs of other captures later
        for part in writer.merged(table, runs, dict.fromkeys(runs, correction)):
            for rows in part.to_batches():
                sorter.add(rows)
        sorter.spill()
        for run in runs:
            run.unlink()
        told.share.runs[name] = sorter.runs


def _corrected(corrections: Sequence[Correction], left: set[int], rows: pa.RecordBatch) -> pa.RecordBatch:
    return corrected(corrections, without(left, rows))
