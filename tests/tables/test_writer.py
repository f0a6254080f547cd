"""Files of a dataset: sorted whatever the order of arrival, identical bytes for identical rows, complete or absent."""

import json
import random
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.tables import dataset, schema, writer
from kproxy.tables.schema import EXCHANGES, RECORDS, TABLES
from tests import captures

ALWAYS = {pa.string(): "", pa.int64(): 0, schema.TIME: 0}  # values for columns that are never null


def columns(table):
    """A row without values."""
    return {field.name: None if field.nullable else ALWAYS[field.type] for field in table.schema}


def rows(count, seed=0):
    """Rows with few distinct times, so that the later keys decide."""
    dice = random.Random(seed)
    return [
        columns(EXCHANGES)
        | {"time": dice.randrange(count // 8 + 1), "connection": dice.randrange(9), "number": number, "api": "Fetch"}
        for number in range(count)
    ]


def batches(rows, size):
    for start in range(0, len(rows), size):
        yield pa.RecordBatch.from_pylist(rows[start : start + size], EXCHANGES.schema)


def written(folder, rows, size, workers=1, name="file"):
    runs = []
    folder.mkdir(exist_ok=True)
    for worker in range(workers):
        sorter = writer.Sorter(EXCHANGES, folder, f".{worker}")
        for batch in batches([row for row in rows if row["connection"] % workers == worker], size):
            sorter.add(batch)
        sorter.spill()
        runs += sorter.runs
    path = folder / f"{name}.parquet"
    assert writer.write(EXCHANGES, runs, path) == len(rows)
    assert not list(folder.glob("*.run"))
    return path


@pytest.fixture
def small(monkeypatch):
    """Limits small enough for a test to reach."""
    monkeypatch.setattr(writer, "RUN_ROWS", 500)
    monkeypatch.setattr(writer, "STEP_ROWS", 64)
    monkeypatch.setattr(writer, "FAN_IN", 4)
    monkeypatch.setattr(writer, "ROW_GROUP", 3000)


def test_files_are_sorted_in_fixed_row_groups_and_identical(tmp_path, small):
    data = rows(10_000)
    paths = [
        written(tmp_path / "one", data, 100),
        written(tmp_path / "few", data, 1700),
        written(tmp_path / "three", data, 100, workers=3),
    ]
    got = pq.read_table(paths[0], columns=["time", "connection", "number"]).to_pylist()
    keys = [tuple(row.values()) for row in got]
    assert keys == sorted(keys)
    assert sorted(number for _, _, number in keys) == list(range(10_000))
    groups = pq.ParquetFile(paths[0]).metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [3000, 3000, 3000, 1000]
    assert len({path.read_bytes() for path in paths}) == 1


def test_rows_with_a_weight_are_grouped_by_weight(tmp_path, small, monkeypatch):
    """However the rows arrive in batches; runs are spilled before they weigh too much."""
    monkeypatch.setattr(writer, "GROUP_BYTES", 5000)
    monkeypatch.setattr(writer, "RUN_BYTES", 4000)
    dice = random.Random(5)
    data = [
        columns(RECORDS) | {"time": n, "bytes": dice.choice((1, 9, 2500, 7000)), "value": b"v" * 50} for n in range(900)
    ]
    expected, weight, count = [], 0, 0
    for row in data:
        weight, count = weight + row["bytes"], count + 1
        if weight >= 5000:
            expected.append(count)
            weight = count = 0
    expected += [count] if count else []
    contents = set()
    for size in (7, 100, 450):
        sorter = writer.Sorter(RECORDS, tmp_path)
        for start in range(0, len(data), size):
            sorter.add(pa.RecordBatch.from_pylist(data[start : start + size], RECORDS.schema))
        sorter.spill()
        assert len(sorter.runs) >= (2 if size == 450 else 3)
        path = tmp_path / "records.parquet"
        assert writer.write(RECORDS, sorter.runs, path) == len(data)
        groups = pq.ParquetFile(path).metadata
        assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == expected
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_many_rows_of_one_time_are_merged(tmp_path, small):
    data = [row | {"time": 7} for row in rows(3000)]
    got = pq.read_table(written(tmp_path, data, 100)).to_pylist()
    assert [(row["connection"], row["number"]) for row in got] == sorted(
        (row["connection"], row["number"]) for row in data
    )


def test_packed_pieces_form_a_file_with_the_same_rows_and_groups(tmp_path, small):
    """The writer of the file puts MAGIC after each piece. Without rows there is no file."""
    data = rows(10_000)
    ours = written(tmp_path / "ours", data, 100)
    parts = pa.Table.from_batches(pq.ParquetFile(ours).iter_batches(700))
    pieces = list(writer.packed(EXCHANGES, (parts.slice(start, 700) for start in range(0, 10_000, 700))))
    theirs = tmp_path / "theirs.parquet"
    theirs.write_bytes(b"".join(piece + writer.MAGIC for piece in pieces))
    assert len(pieces) == 5 and pq.read_table(theirs).equals(pq.read_table(ours))
    one, other = pq.ParquetFile(theirs), pq.ParquetFile(ours)
    assert one.schema_arrow.equals(other.schema_arrow)
    for number in range(4):
        assert one.read_row_group(number).equals(other.read_row_group(number))
    for no_rows in ((), (parts.slice(0, 0),)):
        (piece,) = writer.packed(EXCHANGES, no_rows)
        theirs.write_bytes(piece + writer.MAGIC)
        assert pq.read_table(theirs).equals(EXCHANGES.schema.empty_table())


def test_consecutive_runs_are_written_once(tmp_path, small):
    """However many rows: those in order of time, also where runs touch; others are merged in between."""
    data = sorted(rows(9000), key=lambda row: row["time"])
    sorter = writer.Sorter(EXCHANGES, tmp_path, ".inorder")
    for batch in batches(data, 100):
        sorter.add(batch)
    sorter.spill()
    assert len(sorter.runs) == 18 > 4 * writer.FAN_IN
    mixed = writer.Sorter(EXCHANGES, tmp_path, ".mixed")
    for batch in batches(rows(9000), 100):
        mixed.add(batch)
    mixed.spill()
    assert len(mixed.runs) < writer.FAN_IN
    ordered = [row["number"] for row in sorted(data, key=lambda row: (row["time"], row["connection"], row["number"]))]
    for runs in (sorter.runs, mixed.runs):
        merged = pa.concat_tables(writer.merged(EXCHANGES, list(runs)))
        assert merged["number"].to_pylist() == ordered


def packed(rows):
    """Rows as another process hands them over: sorted, with numbers of its own."""
    sink = pa.BufferOutputStream()
    table = pa.Table.from_batches(batches(sorted(rows, key=lambda row: (row["time"], row["connection"])), len(rows)))
    assert writer.store(EXCHANGES, [table], sink, lasts=False) == len(rows)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("parts", [1, 3, 11])
def test_parquet_rows_are_adopted_as_runs_and_changed_while_read(tmp_path, small, parts):
    """Also more runs than are merged at a time; a change may reorder rows of one time."""
    data = rows(4000)
    sorter = writer.Sorter(EXCHANGES, tmp_path)
    for part in range(parts):
        sorter.adopt_packed(packed(data[part::parts]))

    def turned(batch):
        return batch.set_column(
            batch.schema.get_field_index("connection"), "connection", pc.subtract(pa.scalar(9), batch["connection"])
        )

    merged = pa.concat_tables(writer.merged(EXCHANGES, sorter.runs, dict.fromkeys(sorter.runs, turned)))
    keys = (merged["time"].cast(pa.int64()), merged["connection"], merged["number"])
    turned_rows = [(row["time"], 9 - row["connection"], row["number"]) for row in data]
    assert list(zip(*(column.to_pylist() for column in keys), strict=True)) == sorted(turned_rows)
    assert len(sorter.runs) < max(2, writer.FAN_IN)


def test_consecutive_runs_are_in_memory_one_at_a_time(tmp_path):
    """Nothing of a finished run is kept, whatever the number of runs."""
    sorter = writer.Sorter(EXCHANGES, tmp_path)
    for part in range(24):
        sorter.adopt_packed(
            packed([columns(EXCHANGES) | {"time": 1000 * part + number, "number": number} for number in range(1000)])
        )
    before, most = pa.total_allocated_bytes(), []
    for part in writer.merged(EXCHANGES, sorter.runs):
        assert part.num_rows == 1000
        most.append(pa.total_allocated_bytes() - before)
    assert len(most) == 24 and max(most) < 2 * min(most)


@pytest.mark.parametrize("most", [20_000, 500])
def test_rows_of_one_run_do_not_go_to_the_disk(tmp_path, most):
    data = rows(4000)
    sorter = writer.Sorter(EXCHANGES, tmp_path, run_rows=most)
    for batch in batches(data, 300):
        sorter.add(batch)
    assert bool(list(tmp_path.iterdir())) == (most == 500)
    numbers = pa.concat_tables(sorter.in_order())["number"].to_pylist()
    assert numbers == [
        row["number"] for row in sorted(data, key=lambda row: (row["time"], row["connection"], row["number"]))
    ]
    assert not list(sorter.in_order()) or most == 500


def test_rows_dropped_during_a_merge_leave_the_others_in_order(tmp_path, small):
    """Even if all rows of a batch or of a run are dropped."""
    data = sorted(rows(3000), key=lambda row: row["time"])
    runs = []
    for part in range(3):
        sorter = writer.Sorter(EXCHANGES, tmp_path, f".{part}")
        for batch in batches(data[part::3], 500):
            sorter.add(batch)
        sorter.spill()
        runs += sorter.runs

    def late(batch):
        return batch.filter(pc.greater(batch["time"].cast(pa.int64()), 250))

    corrections = {runs[0]: late, runs[2]: late, runs[-1]: lambda batch: batch.slice(0, 0)}
    merged = pa.concat_tables(writer.merged(EXCHANGES, runs, corrections))["number"].to_pylist()
    left = {row["number"] for part in (0, 1) for row in data[part::3][:500] if row["time"] <= 250}
    left |= {row["number"] for row in data[2::3][500:]}
    assert len(left) > 1000
    assert merged == [
        row["number"]
        for row in sorted(data, key=lambda row: (row["time"], row["connection"], row["number"]))
        if row["number"] not in left
    ]


def test_a_table_without_rows_is_a_file_too(tmp_path):
    path = written(tmp_path, [], 100)
    assert pq.read_schema(path).equals(EXCHANGES.schema)


def test_every_table_is_stored_with_its_encodings(tmp_path):
    """Dictionaries for repeated values, deltas for times and counters, zstd for all."""
    for table in TABLES.values():
        path = tmp_path / f"{table.name}.parquet"
        sorter = writer.Sorter(table, tmp_path)
        sorter.add(pa.RecordBatch.from_pylist([columns(table)], table.schema))
        sorter.spill()
        writer.write(table, sorter.runs, path)
        group = pq.ParquetFile(path).metadata.row_group(0)
        for number in range(group.num_columns):
            column = group.column(number)
            assert column.compression == "ZSTD"
            name = column.path_in_schema
            if name in table.deltas:
                assert "DELTA_BINARY_PACKED" in column.encodings
            else:
                assert ("RLE_DICTIONARY" in column.encodings) == (name in table.words)


def test_a_dataset_appears_at_once_with_its_manifest_last_and_can_be_written_again(tmp_path):
    """Files of other runs stay, and stay listed in the manifest."""
    out = tmp_path / "out"
    for turn, source in enumerate(("a", "b", "a"), 1):
        dataset = writer.Dataset(out)
        work = dataset.begin("convert")
        table = pa.Table.from_pylist(rows(8 * turn), EXCHANGES.schema)
        count = writer.store(EXCHANGES, iter((table,)), work / "new")
        assert not (out / "exchanges" / f"{source}.parquet").exists() or turn == 3
        published = {"rows": {"exchanges": count}, "sources": {source: [source]}}
        dataset.publish({f"exchanges/{source}.parquet": work / "new"}, published)
        assert pq.read_metadata(out / "exchanges" / f"{source}.parquet").num_rows == 8 * turn
        assert not work.exists()
        manifest = json.loads((out / "_kproxy.json").read_text())
        assert manifest["sources"] == {each: [each] for each in "ab"[:turn]}
        assert manifest["rows"] == {"exchanges": {1: 8, 2: 8 + 16, 3: 24 + 16}[turn]}


def test_the_remains_of_a_killed_run_are_removed(tmp_path):
    left = tmp_path / ".unfinished-convert"
    (left / "task").mkdir(parents=True)
    for file in (left / "half", left / "task" / "half"):
        file.write_bytes(b"written")
    assert not list(writer.Dataset(tmp_path).begin("convert").iterdir())


@pytest.mark.parametrize("steps", range(10))
def test_tables_of_one_run_are_all_old_or_all_new_wherever_it_ends(tmp_path, monkeypatch, steps):
    """The run ends after that many steps that reach the disk: readers refuse a mixture, and the next run completes
    it."""
    names = ("connections", "exchanges", "quality")

    def publish(turn):
        one = writer.Dataset(tmp_path)
        work = one.begin("convert")
        try:
            files = {f"{name}/a.parquet": work / name for name in names}
            for name in names:
                (work / name).write_text(turn)
            one.publish(files, {"sources": {"a": [turn]}}, ["records/a.parquet"], together=True)
        finally:
            one.abandon()  # as `convert` does

    def turns():
        return {(tmp_path / name / "a.parquet").read_text() for name in names}

    publish("old")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "a.parquet").write_text("old")
    synced = []

    def sync(path):
        if len(synced) == steps:
            raise KeyboardInterrupt
        synced.append(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "sync", sync)
        publish("new")
    if turns() != {"old"}:
        with pytest.raises(KproxyError, match="start it again, which first finishes what was begun"):
            dataset.refuse_unfinished(tmp_path)
    other = writer.Dataset(tmp_path)
    assert not list(other.begin("convert").iterdir())
    other.abandon()
    (turn,) = turns()
    assert turn == ("new" if steps > 3 else "old")  # three files and the list of moves
    assert (tmp_path / "records" / "a.parquet").exists() == (turn == "old")
    assert dataset.read_manifest(tmp_path)["sources"] == {"a": [turn]}
    dataset.refuse_unfinished(tmp_path)


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KproxyError, match="cannot be written"):
        writer.Dataset(tmp_path / "file").begin("convert")
    (tmp_path / "link").symlink_to(tmp_path / "not mounted" / "tables")
    with pytest.raises(KproxyError, match="link is no folder"):
        writer.Dataset(tmp_path / "link").begin("convert")


def test_two_writers_of_one_dataset_do_not_interfere(tmp_path):
    first = writer.Dataset(tmp_path)
    (first.begin("convert") / "half").write_bytes(b"written")
    with pytest.raises(KproxyError, match="another kproxy writes to it"):
        writer.Dataset(tmp_path).begin("convert")
    assert (tmp_path / ".unfinished-convert" / "half").exists()
    first.abandon()
    writer.Dataset(tmp_path).begin("convert")


def test_processes_that_start_and_stop_remove_nothing_of_each_other(tmp_path):
    """Workers and the kproxy that follows theirs have the same names, and remove their own remains when others
    begin."""
    turns = 150

    def come_and_go(writer_number):
        for turn in range(turns):
            work = writer.Dataset(tmp_path)
            file = work.begin_beside("record") / "rows"
            file.write_text(f"{writer_number}")
            place = f"exchanges/{writer_number}-{turn}.parquet"
            work.publish({place: file}, {"sources": {place: []}})

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(come_and_go, range(4))) == [None] * 4
    assert len(list((tmp_path / "exchanges").iterdir())) == 4 * turns
    assert len(dataset.read_manifest(tmp_path)["sources"]) == 4 * turns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_kproxy.json", "exchanges"]


def test_tables_by_hour_do_not_mix_with_others(tmp_path):
    """Otherwise the rows of one source would be there twice."""
    (tmp_path / "exchanges" / "date=2026-01-01").mkdir(parents=True)
    with pytest.raises(KproxyError, match="by date and hour"):
        writer.Dataset(tmp_path).begin("convert")
    writer.Dataset(tmp_path).begin("spark", by_hour=True)


@pytest.mark.parametrize("processes", ("1", "2"))
def test_a_full_disk_is_reported_in_one_line_and_leaves_nothing(tmp_path, processes):
    """A limit on the size of files stands for the full disk; child processes inherit it."""
    command = [sys.executable, "-c", "from kproxy.cli import main; main()", "convert", captures.capture("k41_quota")]
    done = subprocess.run(
        [*command, "--out", tmp_path, "--processes", processes],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"kproxy: {tmp_path}/.unfinished-convert: cannot be written to: File too large\n"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_reported(tmp_path, monkeypatch):
    """As in a shell whose working directory is deleted; a folder that others remove is made again."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(KproxyError, match=r"^tables: cannot be written to: No such file or directory$"):
        writer.Dataset("tables").begin("convert")


def test_a_newer_dataset_is_neither_read_nor_written_to(tmp_path):
    (tmp_path / dataset.MANIFEST).write_text(json.dumps({"schema_version": schema.VERSION + 1, "kproxy": "9.9"}))
    for use in (dataset.check_version, lambda folder: writer.Dataset(folder).begin("convert")):
        with pytest.raises(KproxyError, match=r"written by a newer kproxy \(9\.9, schema version .*: upgrade kproxy"):
            use(tmp_path)
    for known in ('{"schema_version": 1}', "[]", "no json"):
        (tmp_path / dataset.MANIFEST).write_text(known)
        dataset.check_version(tmp_path)


@pytest.mark.parametrize("stands", [True, False])
def test_work_without_a_result_removes_the_folders_that_it_made(tmp_path, stands):
    folder = tmp_path / "of" / "tables"
    if stands:
        folder.parent.mkdir()
    work = writer.Dataset(folder)
    (work.begin("convert") / "half").write_bytes(b"")
    work.abandon()
    assert [path.name for path in tmp_path.rglob("*")] == ["of"] * stands


@pytest.mark.parametrize("taken", ("exchanges", "exchanges/k41_BASE.pcap.parquet"))
def test_a_name_that_is_taken_in_the_folder_is_named(tmp_path, taken):
    place = tmp_path / "out" / taken
    place.parent.mkdir(parents=True)
    if place.suffix:
        place.mkdir()
    else:
        place.touch()
    with pytest.raises(KproxyError, match=rf"out: cannot be written to: .*: {re.escape(str(place))}$"):
        convert([captures.capture("k41_BASE")], tmp_path / "out", processes=1)
