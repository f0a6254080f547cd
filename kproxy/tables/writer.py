"""Batches -> Parquet files of a dataset, which appear whole or not at all, and always the same for the same rows.

Duty: rows come in any order and in any number; `Sorter` sorts them in runs on the disk and merges the runs, so that
memory holds RUN_ROWS rows whatever their number, and the order in the file depends on nothing but the rows. `Dataset`
owns the folder: files are written in a folder of their own inside it, synced and then renamed; what a killed run left
there is swept away by the next.

For one version of pyarrow the same rows give the same bytes: fixed row groups, no clock, no host name.
Refuses to know what rows mean.
"""

import fcntl
import json
import os
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from io import BytesIO
from itertools import chain
from pathlib import Path
from stat import S_ISDIR
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kproxy.errors import KproxyError
from kproxy.tables import schema
from kproxy.tables.arrays import numbers
from kproxy.tables.dataset import MANIFEST, check_version, read_manifest
from kproxy.tables.schema import Table

ROW_GROUP = 256 * 1024
GROUP_BYTES = 32 << 20  # of rows with a weight
MAGIC = b"PAR1"  # at both ends of a Parquet file
RUN_ROWS = 32 * 1024
RUN_BYTES = 16 << 20
STEP_ROWS = 16 * 1024  # of one run in memory while merging; a step costs about as much as 4000 rows
STEP_BYTES = 2 << 20
PACKED = ".packed"  # the ending of runs that are Parquet
_LAST = (1 << 63) - 1  # a key that is null
FAN_IN = 32  # runs merged at a time; those that follow one another count as one
MOST_TRIES = 1000  # to make a folder that others remove when they end
MOST_BESIDE = 16  # kproxies that drain one after the other, and still record


class InUseError(KproxyError):
    """Another process has that piece of work of a dataset."""


class Dataset:
    """A folder of tables. `begin` gives a place to write in; `publish` makes files of it part of the dataset."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._work: Path | None = None
        self._claim = -1  # a descriptor of that folder, locked
        self._made: list[Path] = []  # folders that `begin` made, the innermost first

    def begin(self, name: str, *, by_hour: bool = False) -> Path:
        """A fresh folder for the files of one piece of work; `name` keeps it apart from others at the same dataset.

        Tables by hour know no sources by their files, so that no file of another run could take a source's place.
        """
        check_version(self.folder)
        if not by_hour and any(any((self.folder / name).glob("date=*")) for name in schema.BY_NAME):
            raise KproxyError(f"{self.folder} holds tables by date and hour, as Spark writes them: name another folder")
        work = self.folder / f".unfinished-{name}"
        self._made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        with writing(self.folder):
            claim = _claimed(work)
            if claim is None:
                raise InUseError(f"{self.folder}: another kproxy writes to it; wait, or name another folder")
            for left in work.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._work, self._claim = work, claim
        return work

    def begin_beside(self, name: str) -> Path:
        """As `begin`, and under a name like it where a process that is followed has that one still."""
        for number in range(1, MOST_BESIDE):
            with suppress(InUseError):
                return self.begin(name if number == 1 else f"{name}-beside-{number}")
        return self.begin(f"{name}-beside-{MOST_BESIDE}")

    def publish(self, files: dict[str, Path], manifest: dict[str, Any], gone: Iterable[str] = ()) -> None:
        """Move finished files (their place -> where they are now) into the dataset; the manifest comes last.

        It goes on naming the sources of earlier runs, whose files stay, but for those whose places are `gone`.
        """
        assert self._work is not None
        draft = self._work / MANIFEST
        with writing(self.folder):
            for place, file in sorted(files.items()):
                target = self.folder / place
                target.parent.mkdir(parents=True, exist_ok=True)
                sync(file)
                file.replace(target)
                sync(target.parent)
            for place in gone:
                (self.folder / place).unlink(missing_ok=True)
            with _alone(self.folder / ".unfinished-manifest"):  # else one of two who add to it is forgotten
                draft.write_text(json.dumps(self._manifest(manifest), indent=2, sort_keys=True) + "\n")
                sync(draft)
                draft.replace(self.folder / MANIFEST)
                sync(self.folder)
        self.abandon()

    def _manifest(self, told: dict[str, Any]) -> dict[str, Any]:
        manifest = read_manifest(self.folder)
        before, prints = (_mapping(manifest.get(name)) for name in ("sources", "fingerprints"))
        whole = {"schema_version": schema.VERSION, **told, "sources": before | told["sources"]}
        whole["fingerprints"] = {
            source: print_
            for source, print_ in (prints | told.get("fingerprints", {})).items()
            if source in whole["sources"]
        }
        if before and "rows" in told:
            whole["rows"] = {
                name: sum(pq.read_metadata(file).num_rows for file in (self.folder / name).glob("*.parquet"))
                for name in schema.BY_NAME
                if name in told["rows"] or any((self.folder / name).glob("*.parquet"))
            }
        return whole

    def clear(self) -> None:
        """Remove what earlier runs published, and first the manifest that says it is whole."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for name in schema.BY_NAME:
            for file in (self.folder / name).rglob("*.parquet"):
                file.unlink()

    def abandon(self) -> None:
        """Leave nothing half-written behind, nor folders that were made for nothing."""
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            os.close(self._claim)
            self._work = None
            with suppress(OSError):  # it is not empty: something was published
                for folder in self._made:
                    folder.rmdir()


class Sorter:
    """Sorts the rows of one table on the disk, `folder`, in runs of so many rows or bytes: RUN_ROWS or RUN_BYTES."""

    def __init__(self, table: Table, folder: Path, prefix: str = "", *, run_rows: int = 0, run_bytes: int = 0) -> None:
        self._table = table
        self._most = run_rows or RUN_ROWS, run_bytes or RUN_BYTES
        self._stem = folder / f"{table.name}{prefix}"
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0
        self._count = 0
        self.runs: list[Path] = []  # in the order in which their rows came
        self._spans: list[tuple[Any, Any]] = []  # the first and the last key of those that were looked at
        self._look_at = FAN_IN  # as many runs

    def add(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= self._most[0] or self._bytes >= self._most[1]:
            self.spill()

    def spill(self) -> None:
        """Write what is in memory as a sorted run."""
        if self._rows:
            self._write_run(iter((self._taken(),)))
            self._fan_in()

    def in_order(self) -> Iterator[pa.Table]:
        """All rows, which are not the sorter's any more: from memory, where there never were more than a run's."""
        if not self.runs:
            if self._rows:
                yield self._taken()
            return
        self.spill()
        yield from merged(self._table, self.runs)

    def _taken(self) -> pa.Table:
        """The rows in memory, sorted: they are its no more."""
        rows = _sorted(self._table, pa.Table.from_batches(self._batches, self._table.schema))
        self._batches = []
        self._rows = 0
        self._bytes = 0
        return rows

    def adopt(self, runs: Sequence[Path]) -> None:
        """Take over runs that other sorters of this table wrote; those in another folder are left where they are."""
        for run in runs:
            self.runs.append(run)
            self._fan_in()

    def adopt_packed(self, data: bytes) -> None:
        """Take over rows that are in their order, a Parquet file: they are a run."""
        path = self._next_run(PACKED)
        with writing(path.parent):
            path.write_bytes(data)
        self.adopt([path])

    def _fan_in(self) -> None:
        """Where as many runs as are merged at a time are among one another, make one of them all."""
        if len(self.runs) < self._look_at:
            return
        for run in self.runs[len(self._spans) :]:
            seen = _Run(0, run, self._table.keys[0])
            self._spans.append((seen.low, seen.last))
        depth = _depth(self._spans)
        if depth >= FAN_IN:
            runs, self.runs, self._spans, depth = self.runs, [], [], 1
            self._write_run(merged(self._table, runs))
            for run in runs:
                if run.parent == self._stem.parent:
                    run.unlink()
        self._look_at = len(self.runs) + FAN_IN - depth

    def _write_run(self, tables: Iterator[pa.Table]) -> None:
        path = self._next_run(".run")
        with writing(path.parent), pa.ipc.new_file(str(path), self._table.schema) as sink:
            for rows in tables:
                least = max(1, STEP_BYTES * rows.num_rows // max(1, rows.nbytes))
                sink.write_table(rows, max_chunksize=min(STEP_ROWS, least))
        self.runs.append(path)

    def _next_run(self, suffix: str) -> Path:
        self._count += 1
        return self._stem.with_name(f"{self._stem.name}.{self._count}{suffix}")


Corrections = Mapping[
    Path, Callable[[pa.RecordBatch], pa.RecordBatch]
]  # of runs whose rows are not what they should be


def write(
    table: Table,
    runs: list[Path],
    path: Path,
    fill: Callable[[pa.Table], pa.Table] | None = None,
    corrections: Corrections | None = None,
) -> int:
    """Merge runs into one Parquet file; returns its rows. The runs are removed.

    corrections: change rows before they are merged, fill: on their way into the file.
    """
    parts = merged(table, runs, corrections)
    count = store(table, parts if fill is None else map(fill, parts), path)
    for run in runs:
        run.unlink()
    return count


def some_values(files: Sequence[Path], columns: tuple[str, ...], most: int = 1000) -> list[str]:
    """The different values of text columns, in order: of each row the first column that is not null, `most` at most."""
    found: set[str] = set()
    for file in files:
        with pq.ParquetFile(file) as rows:
            for batch in rows.iter_batches(columns=list(columns)):
                if len(found) >= most:
                    break
                found |= set(pc.unique(pc.coalesce(*(batch[name] for name in columns))).to_pylist()) - {None}
    return sorted(found)[:most]


def store(table: Table, parts: Iterable[pa.Table], path: Path | pa.NativeFile, *, lasts: bool = True) -> int:
    """Write rows, in the order in which they come, as one Parquet file; returns how many there were.

    lasts: it is kept, and looked for rows in; one that is read once, soon and whole costs a third less.
    """
    count = 0
    with writing(path.parent) if isinstance(path, Path) else nullcontext(), _parquet(table, path, lasts) as sink:
        for group in _groups(table, parts):
            sink.write_table(group, row_group_size=ROW_GROUP)
            count += group.num_rows
    return count


def packed(table: Table, parts: Iterable[pa.Table]) -> Iterator[bytes]:
    """Rows as one Parquet file, for who writes it: pieces, with MAGIC to be put behind each; of no rows none.

    MAGIC ends a Parquet file. Between groups of rows anything may stand, since readers find these by their places;
    writers for HDFS fill blocks up there.
    """
    pieces = BytesIO()
    with pa.PythonFile(pieces, "w") as file, _parquet(table, file) as sink:
        for group in _groups(table, parts):
            sink.write_table(group, row_group_size=ROW_GROUP)
            file.write(MAGIC)
            yield _piece(pieces)
        is_empty = not file.tell() > len(MAGIC)
        sink.close()
        if not is_empty:
            yield _piece(pieces)


def _piece(pieces: BytesIO) -> bytes:
    """What was written, without the MAGIC at its end."""
    data = pieces.getvalue()[: -len(MAGIC)]
    pieces.seek(0)
    pieces.truncate()
    return data


def _parquet(table: Table, where: Any, lasts: bool = True) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        where,
        table.described if lasts else table.schema,
        compression="zstd" if lasts else "lz4",
        compression_level=3 if lasts else None,
        use_dictionary=table.words,
        column_encoding=dict.fromkeys(table.deltas, "DELTA_BINARY_PACKED"),
        version="2.6",
        write_statistics=lasts,
        store_schema=True,
    )


def _groups(table: Table, parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Rows as row groups, which depend on nothing but the rows: ROW_GROUP of them, or as many as weigh GROUP_BYTES."""
    waiting: list[pa.Table] = []
    rows = weight = 0
    for part in parts:
        while part.num_rows:
            room = ROW_GROUP - rows
            if table.weight is not None:
                sums = pc.add(pc.cumulative_sum(part[table.weight]), weight)
                room = min(room, 1 + _below(sums, pa.scalar(GROUP_BYTES)))
                weight = sums[min(room, part.num_rows) - 1].as_py()
            waiting.append(part.slice(0, room))
            rows += waiting[-1].num_rows
            part = part.slice(room)
            if rows == ROW_GROUP or weight >= GROUP_BYTES:
                yield pa.concat_tables(waiting)
                waiting = []
                rows = weight = 0
    if rows:
        yield pa.concat_tables(waiting)


def merged(table: Table, runs: list[Path], corrections: Corrections | None = None) -> Iterator[pa.Table]:
    """The rows of sorted runs in one order, a few thousand at a time; of equal rows the earlier run's first.

    A run is open while its rows are due, so that those which follow one another cost what one of them does.
    corrections: of runs whose rows change first, but not in the first key.
    """
    every = (_Run(index, run, table.keys[0], (corrections or {}).get(run)) for index, run in enumerate(runs))
    # One that has come to its end is nobody's any more, nor is its last batch.
    waiting = sorted((run for run in every if run.has_more), key=lambda run: run.low, reverse=True)
    begun: list[_Run] = []
    while begun or waiting:
        # What is not below the bound could still be preceded by a row that is not in memory.
        bound = min([run.high for run in begun if run.has_more] + [run.low for run in waiting[-1:]], default=None)
        ready = [rows for run in begun if (rows := run.taken(bound)) is not None]
        if ready:
            yield _sorted(table, pa.concat_tables(ready)) if len(ready) > 1 or corrections else ready[0]
        elif waiting and waiting[-1].low == bound:
            begun = sorted([*begun, waiting.pop()], key=lambda run: run.index)
        else:  # many rows with one and the same first key: more of them must be in memory
            for run in begun:
                if run.has_more and run.high == bound:
                    run.load()
        begun = [run for run in begun if run.has_rows()]


class _Run:
    """A sorted run that is merged: a batch of it is in memory, or more where that takes more."""

    def __init__(
        self, index: int, path: Path, key: str, correction: Callable[[pa.RecordBatch], Any] | None = None
    ) -> None:
        self.index = index
        self._path, self._key, self._correct = path, key, correction
        reader = self._opened()
        self._count: int = reader.num_record_batches
        self._next = 0
        self._reader: Any = None
        self._rows: pa.Table | None = None
        self._keys: Sequence[Any] = list(self._keys_of(self._end_of(reader, 0))[:1]) if self._count else ()

    @property
    def has_more(self) -> bool:
        """Whether there are rows that are not in memory."""
        return self._next < self._count

    @property
    def low(self) -> Any:
        """The first of the keys in memory; at the beginning that of all."""
        return self._keys[0]

    @property
    def high(self) -> Any:
        """The last of the keys in memory."""
        return self._keys[-1]

    @property
    def last(self) -> Any:
        """The last key of all."""
        return self._keys_of(self._end_of(self._opened(), self._count - 1))[-1]

    def has_rows(self) -> bool:
        """Whether rows are in memory, which are read if there are any."""
        while (self._rows is None or not self._rows.num_rows) and self.has_more:
            self.load()
        return self._rows is not None and bool(self._rows.num_rows)

    def load(self) -> None:
        """Have one more batch in memory."""
        self._reader = self._reader or self._opened()
        batch = self._reader.get_batch(self._next)
        self._next += 1
        if not self.has_more:
            self._reader = None
        rows = pa.Table.from_batches([batch if self._correct is None else self._correct(batch)])
        self._rows = pa.concat_tables([self._rows, rows]) if self._rows is not None and self._rows.num_rows else rows
        self._keys = self._keys_of(self._rows)

    def taken(self, bound: Any) -> pa.Table | None:
        """The rows in memory that are below a bound, or all: they are not in memory any more. None: there are none."""
        assert self._rows is not None
        count = self._rows.num_rows if bound is None else bisect_left(self._keys, bound)
        if not count:
            return None
        taken, self._rows = self._rows.slice(0, count), self._rows.slice(count)
        self._keys = self._keys[count:]
        return taken

    def _end_of(self, reader: Any, number: int) -> pa.RecordBatch | pa.Table:
        """The first keys, in a batch by its number or in all: of columns that lie apart only that one is read."""
        return reader.columns([self._key]) if isinstance(reader, _Packed) else reader.get_batch(number)

    def _opened(self) -> Any:
        return _Packed(self._path) if self._path.suffix == PACKED else pa.ipc.open_file(pa.memory_map(str(self._path)))

    def _keys_of(self, rows: pa.RecordBatch | pa.Table) -> Sequence[Any]:
        """The first key of rows in terms that compare as rows are sorted: null last."""
        column = rows[self._key]
        if pa.types.is_string(column.type):
            return [(text is None, text or "") for text in column.to_pylist()]
        return cast("Sequence[int]", numbers(column.cast(pa.int64()), _LAST))


class _Packed:
    """A run that is a Parquet file, as far as a file of Arrow's is used: batches by their numbers, here one by one."""

    def __init__(self, path: Path) -> None:
        self._file = file = pq.ParquetFile(path, memory_map=True)
        groups = range(file.num_row_groups)  # read one by one: whether a batch crosses their borders is not promised
        self.num_record_batches = sum(-(-file.metadata.row_group(group).num_rows // STEP_ROWS) for group in groups)
        self._batches = chain.from_iterable(
            file.iter_batches(STEP_ROWS, row_groups=[group], use_threads=False) for group in groups
        )

    def columns(self, names: list[str]) -> pa.Table:
        return self._file.read(names, use_threads=False)

    def get_batch(self, _: int) -> pa.RecordBatch:
        """The next batch: who merges asks for one after the other."""
        return next(self._batches)


def _depth(spans: Sequence[tuple[Any, Any]]) -> int:
    """How many spans there are at most that have something in common."""
    ends = sorted(end for _, end in spans)
    return max(
        (count - bisect_left(ends, begin) for count, begin in enumerate(sorted(begin for begin, _ in spans), 1)),
        default=0,
    )


def _below(column: pa.ChunkedArray, bound: pa.Scalar) -> int:
    return int(pc.sum(pc.less(column, bound)).as_py() or 0)


def _sorted(table: Table, rows: pa.Table) -> pa.Table:
    if _is_sorted(rows[table.keys[0]]):
        return rows
    return rows.take(pc.sort_indices(rows, sort_keys=[(key, "ascending") for key in table.keys])).combine_chunks()


def _is_sorted(column: pa.ChunkedArray) -> bool:
    """Whether each value of the first key, where it is a time, is above the one before: then no other key matters."""
    if column.null_count or not pa.types.is_timestamp(column.type):
        return False
    # to_numpy() may import pandas
    chunks = [np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset :][: len(chunk)] for chunk in column.chunks]
    times = np.concatenate(chunks)
    return bool((times[1:] > times[:-1]).all())


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _claimed(work: Path) -> int | None:
    """A locked descriptor of that folder, made if there is none; None where another one has it.

    Whoever had it removes it before the lock ends: what was locked then may be a folder that is gone, or another one.
    """
    tries = 0
    while True:
        tries += 1
        try:
            work.mkdir(parents=True, exist_ok=True)
            claim = os.open(work, os.O_RDONLY)
        except (FileExistsError, FileNotFoundError):  # it was there, and is gone
            refuse_file(work.parent)
            if tries >= MOST_TRIES:  # nobody removes it so often: none can be made, as in a folder that is deleted
                raise
            continue
        is_ours = False
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_ours := os.path.samestat(os.fstat(claim), work.stat()):
                return claim
        except BlockingIOError:
            return None
        except FileNotFoundError:
            continue
        finally:
            if not is_ours:
                os.close(claim)


def refuse_file(folder: Path) -> None:
    """Raise KproxyError where a file stands in the place of a folder, or of one above it."""
    for place in (folder, *folder.parents):
        if _is_no_folder(place):
            raise KproxyError(f"{folder}: cannot be written to: {place} is no folder") from None


def _is_no_folder(place: Path) -> bool:
    """Whether a file is there, or a link that leads to no folder, such as one into a disk that is not mounted."""
    try:
        return not S_ISDIR(place.lstat().st_mode) and not place.is_dir()
    except OSError:
        return False


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    while (claim := _claimed(work)) is None:
        time.sleep(0.001)
    try:
        yield
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(claim)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a fault of the disk, that it is full say, into a KproxyError that names the folder."""
    try:
        yield
    except OSError as fault:
        reason = os.strerror(fault.errno) if fault.errno else fault
        raise KproxyError(f"{folder}: cannot be written to: {reason}") from fault


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
