"""Cached tables of captures: made once, made again if necessary, and deleted when no longer needed."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from click.testing import CliRunner

from kproxy.analysis import cached
from kproxy.cli import cli
from kproxy.convert import processes
from kproxy.convert.job import Settings
from kproxy.errors import KproxyError
from tests.captures import capture


@pytest.fixture
def place(tmp_path):
    return shutil.copy(capture("k41_BASE"), tmp_path / "a.pcap")


@pytest.fixture
def made(monkeypatch):
    """The `detail` of each conversion."""
    calls = []
    convert = processes.convert

    def count(captures, folder, settings=Settings(), **options):  # noqa: B008
        calls.append(settings.detail)
        return convert(captures, folder, settings, **options)

    monkeypatch.setattr(processes, "convert", count)
    return calls


def asked(job, *places):
    done = CliRunner().invoke(cli, ["analyze", job, *map(str, places), "--format", "csv"], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def folders(place):
    return sorted(path.name for path in (place.parent / cached.FOLDER).iterdir())


def test_a_capture_is_converted_once_and_with_batches_only_on_demand(place, made, tmp_path):
    first = asked("latency", place)
    assert asked("latency", place) == first and made == ["topics"]
    assert asked("batching", place) and made == ["topics", "batches"]
    shutil.rmtree(place.parent / cached.FOLDER / folders(place)[1])
    assert asked("lag", place) == asked("lag", place) and made == ["topics", "batches"]  # has all it needs
    processes.convert([place], tmp_path / "tables")
    assert asked("latency", tmp_path / "tables") == first
    assert asked("latency", place, "--cluster", "east", "--by", "cluster").splitlines()[1].startswith("east,")


def test_a_changed_capture_gets_new_tables(place, made):
    asked("latency", place)
    (before,) = folders(place)
    shutil.copy(capture("k41_quota"), place)
    assert "Produce" in asked("latency", place) and len(made) == 2
    (after,) = folders(place)
    assert before != after


@pytest.mark.parametrize("harm", ["cut", "gone", "scribbled", "mark"])
def test_damaged_tables_are_made_again(place, made, harm):
    first = asked("latency", place)
    (folder,) = (place.parent / cached.FOLDER).iterdir()
    file = folder / "exchanges" / "a.pcap.parquet"
    if harm == "cut":
        os.truncate(file, 100)
    elif harm == "gone":
        file.unlink()
    elif harm == "scribbled":  # with its former length
        file.write_bytes(b"\xff" * file.stat().st_size)
    else:
        (folder / "_complete.json").write_text("[]")
    assert asked("latency", place) == first and made == ["topics", "topics"]
    assert asked("latency", place) == first and len(made) == 2


def test_tables_go_to_the_temporary_folder_if_the_captures_folder_is_not_writable(place, made, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (place.parent / cached.FOLDER).write_text("a file, so no folder")
    first = asked("latency", place)
    assert asked("latency", place) == first and len(made) == 1
    assert any((tmp_path / "tmp").rglob("*.parquet"))
    (tmp_path / "tmp").rename(tmp_path / "gone")
    (tmp_path / "tmp").write_text("neither")
    with pytest.raises(KproxyError, match="can be written neither beside it nor to"):
        asked("latency", place)


def test_a_failed_conversion_leaves_no_files(place, tmp_path):
    place.write_bytes(b"no capture" * 100)
    for name, said in ((place, "a.pcap"), (tmp_path / "b.pcap", "there is no such file")):
        with pytest.raises(KproxyError, match=said):
            asked("latency", name)
    assert folders(place) == []
    (tmp_path / "tables").mkdir()
    with pytest.raises(KproxyError, match=r"ask one such folder|holds no tables"):
        asked("latency", place, tmp_path / "tables")


def test_standard_input_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = Settings()
    monkeypatch.setattr(cached, "_convert", lambda convert, folder, settings: folder.mkdir())
    found, passing = cached.tables_of(["-"], ["exchanges"], settings, convert=lambda folder, settings: None)
    assert passing and found.is_dir()
    cached.forget(found)
    assert not any(tmp_path.iterdir())


def test_tables_of_several_captures_and_of_one_of_them_are_cached_separately(place, made):
    other = shutil.copy(capture("k41_quota"), place.parent / "b.pcap")
    first = asked("compare", place, other, "--with", place)
    assert len(made) == 2 and len(folders(place)) == 2
    assert asked("compare", place, other, "--with", place) == first and len(made) == 2
    shutil.copy(capture("k41_gaps"), other)
    assert asked("latency", place, other) and len(made) == 3
    assert len(folders(place)) == 2  # the former tables of the two are deleted


def test_a_slower_process_keeps_the_tables_that_another_process_made(place, monkeypatch):
    convert = cached._convert
    faster = []

    def ask(again=False):
        done = cached.convert_with([place], lambda *_: None)
        return cached.tables_of([str(place)], ["exchanges"], Settings(), convert=done, again=again)[0]

    def overtaken(*given):
        monkeypatch.setattr(cached, "_convert", convert)
        faster.append(ask(again=bool(faster)))
        faster.append((faster[-1] / "exchanges").stat().st_ino)
        convert(*given)

    for again in (False, True):
        monkeypatch.setattr(cached, "_convert", overtaken)
        found = ask(again)
        assert [found, (found / "exchanges").stat().st_ino] == faster[-2:]
        assert [each.name for each in found.parent.iterdir()] == [found.name]


def test_tables_have_the_permissions_of_their_capture(place, tmp_path, monkeypatch):
    place.chmod(0o640)
    asked("latency", place)
    (folder,) = (place.parent / cached.FOLDER).iterdir()
    assert folder.stat().st_mode & 0o777 == 0o750
    shutil.rmtree(place.parent / cached.FOLDER)
    (place.parent / cached.FOLDER).write_text("a file, so no folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    asked("latency", place)
    (own,) = (tmp_path / "tmp").iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)  # a folder that another user prepared, to supply other tables
    with pytest.raises(KproxyError, match="can be written neither beside it nor to"):
        asked("latency", place)


def test_tables_of_another_groups_capture_are_not_readable_for_ones_own_group(place, monkeypatch):
    """New files have the group of the user, whose other members may not read the capture."""
    place.chmod(0o640)
    group = 12_345 if os.getuid() == 0 else os.getgid()
    os.chown(place, -1, group)
    asked("latency", place)
    (folder,) = (place.parent / cached.FOLDER).iterdir()
    assert (folder.stat().st_gid, folder.stat().st_mode & 0o777) == (group, 0o750)
    shutil.rmtree(folder)

    def refused(*given):
        raise PermissionError("as who is not root may not give files to any group")

    monkeypatch.setattr(os, "chown", refused)
    asked("latency", place)
    (folder,) = (place.parent / cached.FOLDER).iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.ring2
def test_partial_tables_of_a_killed_process_are_deleted(place, made):
    script = (
        "import os, sys\nfrom kproxy.analysis import cached\nfrom kproxy.convert.job import Settings\n"
        "def killed(folder, settings):\n    folder.mkdir()\n    os.kill(os.getpid(), 9)\n"
        "cached.tables_of(sys.argv[1:], ['exchanges'], Settings(), convert=killed)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(place)], check=False).returncode == -9
    (left,) = folders(place)
    alive, claim = cached._draft(place.parent / cached.FOLDER, place.name)
    assert folders(place) == [alive.name] != [left]
    asked("latency", place)
    assert alive.name in folders(place) and len(folders(place)) == 2
    os.close(claim)
    asked("lag", place)
    asked("batching", place)
    assert alive.name not in folders(place)


def test_a_capture_may_have_the_longest_name(place, made):
    long = place.rename(place.parent / ("é" * 125 + ".pcap"))
    assert asked("latency", long) == asked("latency", long) and len(made) == 1
