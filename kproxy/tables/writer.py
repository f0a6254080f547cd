"""Batches -> Parquet files of a dataset, which appear complete or not at all; the same rows give the same files.

Duty: rows arrive in any order and in any number. `Sorter` sorts them in runs on the disk and merges the runs, so
memory holds at most RUN_ROWS rows, and the order in the file depends only on the rows. `Dataset` owns the folder: files
are written in a working folder inside it, synced and then renamed; the next run removes files of a killed run. Where
several tables must change together, their moves are written down first: the next run finishes those of a killed one.

With the same version of pyarrow the same rows give the same bytes: fixed row groups, no clock, no host name.
"""

import json
import os
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kproxy.errors import KproxyError
from kproxy.tables import schema
from kproxy.tables.arrays import numbers
from kproxy.tables.dataset import MANIFEST, PUBLICATION, check_version, read_manifest
from kproxy.tables.folders import alone, claimed, sync, writing
from kproxy.tables.schema import Table

ROW_GROUP = 256 * 1024
GROUP_BYTES = 32 << 20  # of a row group, for tables with a weight
MAGIC = b"PAR1"  # at both ends of a Parquet file
RUN_ROWS = 32 * 1024
RUN_BYTES = 16 << 20
STEP_ROWS = 16 * 1024  # rows of one run in memory while merging; a step costs about as much as 4000 rows
STEP_BYTES = 2 << 20
PACKED = ".packed"  # suffix of runs that are Parquet
_LAST = (1 << 63) - 1  # the sort key of null
FAN_IN = 32  # overlapping runs merged at a time
MOST_BESIDE = 16  # successive kproxies that drain and still record


class InUseError(KproxyError):
    """Another process has locked the same working folder of a dataset."""


class Dataset:
    """A folder of tables. `begin` returns a working folder; `publish` moves its files into the dataset."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._work: Path | None = None
        self._claim = -1  # a descriptor of that folder, locked
        self._made: list[Path] = []  # folders that `begin` made, the innermost first

    def begin(self, name: str, *, by_hour: bool = False) -> Path:
        """Return an empty, locked working folder; `name` distinguishes it from others in the same dataset.

        by_hour: the dataset may hold tables by date and hour, whose files are not named after sources. Raises
        InUseError if another process has the folder, and KproxyError if the dataset cannot be written to.
        """
        check_version(self.folder)
        if not by_hour and any(any((self.folder / name).glob("date=*")) for name in schema.BY_NAME):
            raise KproxyError(f"{self.folder} holds tables by date and hour, as Spark writes them: name another folder")
        work = self.folder / f".unfinished-{name}"
        self._made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        with writing(self.folder):
            claim = claimed(work)
            if claim is None:
                raise InUseError(f"{self.folder}: another kproxy writes to it; wait, or name another folder")
            self._work, self._claim = work, claim
            self._finish()
            for left in work.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        return work

    def begin_beside(self, name: str) -> Path:
        """Return `begin(name)`, or a numbered variant of `name` while a predecessor process still has that folder."""
        for number in range(1, MOST_BESIDE):
            with suppress(InUseError):
                return self.begin(name if number == 1 else f"{name}-beside-{number}")
        return self.begin(f"{name}-beside-{MOST_BESIDE}")

    def publish(
        self, files: dict[str, Path], manifest: dict[str, Any], gone: Iterable[str] = (), *, together: bool = False
    ) -> None:
        """Move finished files (place in the dataset -> current path) into the dataset; the manifest comes last.

        Files of earlier runs stay, and the manifest still lists their sources. gone: places of files to remove.
        together: kproxy's questions refuse the dataset meanwhile, and `begin` finishes what a killed run began.
        """
        assert self._work is not None
        with writing(self.folder):
            for file in files.values():
                sync(file)
            moves = {place: str(file.relative_to(self._work)) for place, file in files.items()}
            publication = {"moves": moves, "gone": list(gone), "manifest": manifest}
            if together:
                _write(self._work, publication, self._work / PUBLICATION)
            self._move(publication)
            (self._work / PUBLICATION).unlink(missing_ok=True)
        self.abandon()

    def _finish(self) -> None:
        """Finish the publication that a killed run began."""
        assert self._work is not None
        try:
            publication = json.loads((self._work / PUBLICATION).read_text())
            left = {place: name for place, name in publication["moves"].items() if (self._work / name).exists()}
            places = (*left, *left.values(), *publication["gone"])
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
            return  # there is none of kproxy's
        if not any(Path(place).is_absolute() or ".." in Path(place).parts for place in places):
            self._move({**publication, "moves": left})

    def _move(self, publication: Mapping[str, Any]) -> None:
        assert self._work is not None
        for place, name in sorted(publication["moves"].items()):
            (target := self.folder / place).parent.mkdir(parents=True, exist_ok=True)
            (self._work / name).replace(target)
            sync(target.parent)
        for place in publication["gone"]:
            (self.folder / place).unlink(missing_ok=True)
        with alone(self.folder / ".unfinished-manifest"):  # otherwise a concurrent update would be lost
            _write(self._work, self._manifest(publication["manifest"]), self.folder / MANIFEST)

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
        """Remove the files of earlier runs; the manifest first, since it declares them complete."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for name in schema.BY_NAME:
            for file in (self.folder / name).rglob("*.parquet"):
                file.unlink()

    def abandon(self) -> None:
        """Remove the working folder unless its publication is unfinished, and empty folders that `begin` created."""
        if self._work is not None:
            if not (self._work / PUBLICATION).exists():
                shutil.rmtree(self._work, ignore_errors=True)
            os.close(self._claim)
            self._work = None
            with suppress(OSError):  # it is not empty: something was published
                for folder in self._made:
                    folder.rmdir()


def _write(work: Path, content: dict[str, Any], to: Path) -> None:
    draft = work / MANIFEST
    draft.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    sync(draft)
    draft.replace(to)
    sync(to.parent)


class Sorter:
    """Sorts the rows of one table in `folder`, in runs of up to RUN_ROWS rows or RUN_BYTES bytes by default."""

    def __init__(self, table: Table, folder: Path, prefix: str = "", *, run_rows: int = 0, run_bytes: int = 0) -> None:
        self._table = table
        self._most = run_rows or RUN_ROWS, run_bytes or RUN_BYTES
        self._stem = folder / f"{table.name}{prefix}"
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0
        self._count = 0
        self.runs: list[Path] = []  # in the order of their rows' arrival
        self._spans: list[tuple[Any, Any]] = []  # first and last key of the first runs
        self._look_at = FAN_IN  # number of runs at which the next overlap is computed

    def add(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= self._most[0] or self._bytes >= self._most[1]:
            self.spill()

    def spill(self) -> None:
        """Write the rows in memory as a sorted run."""
        if self._rows:
            self._write_run(iter((self._taken(),)))
            self._fan_in()

    def in_order(self) -> Iterator[pa.Table]:
        """Yield all rows sorted, and empty the sorter; without runs directly from memory."""
        if not self.runs:
            if self._rows:
                yield self._taken()
            return
        self.spill()
        yield from merged(self._table, self.runs)

    def _taken(self) -> pa.Table:
        """Return and remove the rows in memory, sorted."""
        rows = _sorted(self._table, pa.Table.from_batches(self._batches, self._table.schema))
        self._batches = []
        self._rows = 0
        self._bytes = 0
        return rows

    def adopt(self, runs: Sequence[Path]) -> None:
        """Add runs that other sorters of this table wrote; runs in another folder are not deleted."""
        for run in runs:
            self.runs.append(run)
            self._fan_in()

    def adopt_packed(self, data: bytes) -> None:
        """Add a run: sorted rows as the bytes of a Parquet file."""
        path = self._next_run(PACKED)
        with writing(path.parent):
            path.write_bytes(data)
        self.adopt([path])

    def _fan_in(self) -> None:
        """Merge all runs into one as soon as FAN_IN of them overlap."""
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


Corrections = Mapping[Path, Callable[[pa.RecordBatch], pa.RecordBatch]]  # by run: a function that corrects its rows


def write(
    table: Table,
    runs: list[Path],
    path: Path,
    fill: Callable[[pa.Table], pa.Table] | None = None,
    corrections: Corrections | None = None,
) -> int:
    """Merge runs into one Parquet file; returns its rows. The runs are removed.

    corrections: change rows before they are merged. fill: changes merged rows before they are written.
    """
    parts = merged(table, runs, corrections)
    count = store(table, parts if fill is None else map(fill, parts), path)
    for run in runs:
        run.unlink()
    return count


def some_values(files: Sequence[Path], columns: tuple[str, ...], most: int = 1000) -> list[str]:
    """Return up to `most` distinct values in order; the value of a row is the first of `columns` that is not null."""
    found: set[str] = set()
    for file in files:
        with pq.ParquetFile(file) as rows:
            for batch in rows.iter_batches(columns=list(columns)):
                if len(found) >= most:
                    break
                found |= set(pc.unique(pc.coalesce(*(batch[name] for name in columns))).to_pylist()) - {None}
    return sorted(found)[:most]


def store(table: Table, parts: Iterable[pa.Table], path: Path | pa.NativeFile, *, lasts: bool = True) -> int:
    """Write rows in the given order as one Parquet file; returns the number of rows.

    lasts: False writes a temporary file (lz4, no statistics) for one full read, which costs a third less.
    """
    count = 0
    with writing(path.parent) if isinstance(path, Path) else nullcontext(), _parquet(table, path, lasts) as sink:
        for group in _groups(table, parts):
            sink.write_table(group, row_group_size=ROW_GROUP)
            count += group.num_rows
    return count


def packed(table: Table, parts: Iterable[pa.Table]) -> Iterator[bytes]:
    """Yield the bytes of one Parquet file in pieces; the caller writes MAGIC after each piece.

    MAGIC ends a Parquet file. Any bytes may stand between row groups, since readers find row groups by their offsets;
    writers for HDFS pad blocks there.
    """
    pieces = BytesIO()
    with pa.PythonFile(pieces, "w") as file, _parquet(table, file) as sink:
        for group in _groups(table, parts):
            sink.write_table(group, row_group_size=ROW_GROUP)
            file.write(MAGIC)
            yield _piece(pieces)
        sink.close()
        yield _piece(pieces)


def _piece(pieces: BytesIO) -> bytes:
    """Return and remove the written bytes, without the MAGIC at their end."""
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
    """Yield row groups of ROW_GROUP rows, or of GROUP_BYTES by weight; their bounds depend only on the rows."""
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
    """Yield the rows of sorted runs in order, a few thousand at a time; equal rows in the order of their runs.

    A run is open only while its rows are merged, so runs that do not overlap cost as much memory as one of them.
    corrections: change rows of some runs before the merge; the first sort key must stay the same.
    """
    every = (_Run(index, run, table.keys[0], (corrections or {}).get(run)) for index, run in enumerate(runs))
    # No other reference to a run may remain: a finished run, and its last batch, must be freed.
    waiting = sorted((run for run in every if run.has_more), key=lambda run: run.low, reverse=True)
    begun: list[_Run] = []
    while begun or waiting:
        # A row that is not below the bound could still be preceded by a row that is not in memory.
        bound = min([run.high for run in begun if run.has_more] + [run.low for run in waiting[-1:]], default=None)
        ready = [rows for run in begun if (rows := run.taken(bound)) is not None]
        if ready:
            yield _sorted(table, pa.concat_tables(ready)) if len(ready) > 1 or corrections else ready[0]
        elif waiting and waiting[-1].low == bound:
            begun = sorted([*begun, waiting.pop()], key=lambda run: run.index)
        else:  # many rows with the same first key: load more of them
            for run in begun:
                if run.has_more and run.high == bound:
                    run.load()
        begun = [run for run in begun if run.has_rows()]


class _Run:
    """A sorted run during a merge, with one batch in memory, or more if many rows have the same first key."""

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
        """Return whether there are rows that are not in memory yet."""
        return self._next < self._count

    @property
    def low(self) -> Any:
        """Return the first key in memory; before the first `load`, the first key of the run."""
        return self._keys[0]

    @property
    def high(self) -> Any:
        """Return the last key in memory."""
        return self._keys[-1]

    @property
    def last(self) -> Any:
        """Return the last key of the run."""
        return self._keys_of(self._end_of(self._opened(), self._count - 1))[-1]

    def has_rows(self) -> bool:
        """Return whether there are rows in memory; loads the next batch if there are none."""
        while (self._rows is None or not self._rows.num_rows) and self.has_more:
            self.load()
        return self._rows is not None and bool(self._rows.num_rows)

    def load(self) -> None:
        """Load one more batch."""
        self._reader = self._reader or self._opened()
        batch = self._reader.get_batch(self._next)
        self._next += 1
        if not self.has_more:
            self._reader = None
        rows = pa.Table.from_batches([batch if self._correct is None else self._correct(batch)])
        self._rows = pa.concat_tables([self._rows, rows]) if self._rows is not None and self._rows.num_rows else rows
        self._keys = self._keys_of(self._rows)

    def taken(self, bound: Any) -> pa.Table | None:
        """Return and remove the rows in memory below a bound, or all without a bound; None if there are none."""
        assert self._rows is not None
        count = self._rows.num_rows if bound is None else bisect_left(self._keys, bound)
        if not count:
            return None
        taken, self._rows = self._rows.slice(0, count), self._rows.slice(count)
        self._keys = self._keys[count:]
        return taken

    def _end_of(self, reader: Any, number: int) -> pa.RecordBatch | pa.Table:
        """Return a batch with the first key; of a Parquet file the whole key column, since columns lie apart."""
        return reader.columns([self._key]) if isinstance(reader, _Packed) else reader.get_batch(number)

    def _opened(self) -> Any:
        return _Packed(self._path) if self._path.suffix == PACKED else pa.ipc.open_file(pa.memory_map(str(self._path)))

    def _keys_of(self, rows: pa.RecordBatch | pa.Table) -> Sequence[Any]:
        """Return the first sort key of each row, as values that compare in the order of sorting: null last."""
        column = rows[self._key]
        if pa.types.is_string(column.type):
            return [(text is None, text or "") for text in column.to_pylist()]
        return cast("Sequence[int]", numbers(column.cast(pa.int64()), _LAST))


class _Packed:
    """A run in a Parquet file, with the part of Arrow's file reader that `_Run` uses; batches only in order."""

    def __init__(self, path: Path) -> None:
        self._file = file = pq.ParquetFile(path, memory_map=True)
        groups = range(file.num_row_groups)  # one by one: pyarrow does not define whether a batch spans groups
        self.num_record_batches = sum(-(-file.metadata.row_group(group).num_rows // STEP_ROWS) for group in groups)
        self._batches = chain.from_iterable(
            file.iter_batches(STEP_ROWS, row_groups=[group], use_threads=False) for group in groups
        )

    def columns(self, names: list[str]) -> pa.Table:
        return self._file.read(names, use_threads=False)

    def get_batch(self, _: int) -> pa.RecordBatch:
        """Return the next batch; the number is ignored, since a merge reads batches in order."""
        return next(self._batches)


def _depth(spans: Sequence[tuple[Any, Any]]) -> int:
    """Return the largest number of spans that overlap at one point."""
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
    """Return whether a column of times increases strictly: then no other sort key matters."""
    if column.null_count or not pa.types.is_timestamp(column.type):
        return False
    # to_numpy() may import pandas
    chunks = [np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset :][: len(chunk)] for chunk in column.chunks]
    times = np.concatenate(chunks)
    return bool((times[1:] > times[:-1]).all())


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
