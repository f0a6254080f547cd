"""The captures that an ingest takes are those of `convert`, and the driver's memory does not grow with their number."""

import json
import os
import shutil
import tracemalloc
from weakref import WeakSet

import pyarrow as pa
import pytest

from kproxy.capture.formats.storage import name_of
from kproxy.convert.job import Settings, captures_of
from kproxy.errors import KproxyError
from kproxy.spark.catalogue import Catalogue
from kproxy.spark.tasks import pieces
from tests.captures import capture


def jobs(catalogue):
    return [job for _, job, _ in catalogue.every()]


def seen(catalogue):
    return ((number, 10 + number, 5, f"{number}:print") for number, _, _ in list(catalogue.every()))


def test_captures_are_listed_as_by_convert(tmp_path):
    names = [b"b.pcap", b"a.pcap", b"\xff.pcap", b"10.pcap", b"9.pcap", "ä.pcap".encode(), b"notes.txt"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(b"")
    last = tmp_path / "last"
    last.mkdir()
    shutil.copy(capture("k41_midstream"), last / "1.pcap")
    settings = Settings(ports=(9092,), cluster="east")
    for paths in ([tmp_path], [last, tmp_path / "?.pcap"], [last / "1.pcap", tmp_path / "a.pcap", tmp_path / "none"]):
        assert jobs(Catalogue(paths, settings)) == captures_of(paths, settings)
    rotated = [last / "1.pcap", capture("k41_BASE")]
    (job,) = jobs(Catalogue(rotated, Settings(rotated=True)))
    assert [job] == captures_of(rotated, Settings(rotated=True)) and len(job.paths) == 2
    for wrong, message in (
        ([last / "*.gz"], "no file matches"),
        ([tmp_path, tmp_path / "a.pcap"], "have the same name"),
    ):
        with pytest.raises(KproxyError, match=message):
            captures_of(wrong, settings)
        with pytest.raises(KproxyError, match=message):
            Catalogue(wrong, settings)


def test_captures_in_the_tables_are_skipped_and_others_of_their_name_refused(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.pcap").write_bytes(b"")
    first = Catalogue([tmp_path], Settings())
    first.note(seen(first))
    lines = list(first.lines(failed={2}))
    assert [json.loads(line)["source"] for line in lines] == ["0.pcap", "1.pcap", "3.pcap"]
    second = Catalogue([tmp_path], Settings())
    second.note(seen(second))
    assert second.leave_known(lines, "tables") == []
    assert [(number, job.source, size) for number, job, size in second.every()] == [(2, "2.pcap", 12)]
    assert second.large(4, 100) == second.large(5, 11) == [2] and second.large(5, 12) == []
    third = Catalogue([tmp_path], Settings())
    unseen = Catalogue([tmp_path], Settings())
    # a storage failed: the task that reads them reports it
    unseen.note((number, 0, 0, None) for number, *_ in unseen.every())
    assert unseen.leave_known(lines, "tables") == [] and len(unseen) == len(third)
    third.note((number, size + 1, 5, f"{number}:other") for number, size, *_ in seen(third))
    refused = third.leave_known(lines, "tables")
    assert ["another capture that is called" in str(fault) for fault in refused] == [True] * 3
    assert [job.source for _, job, _ in third.every()] == ["2.pcap"]


def test_only_two_captures_are_held_at_a_time(tmp_path):
    (tmp_path / "captures").mkdir()
    for number in range(50):
        (tmp_path / "captures" / f"{number}.pcap").touch()
    catalogue = Catalogue([tmp_path / "captures"], Settings())
    held = WeakSet()
    for _, job, _ in catalogue.every():
        held.add(job)
        assert len(held) <= 2  # this one and the one before it
    assert len(catalogue) == 50


@pytest.mark.ring2
def test_memory_does_not_grow_with_the_number_of_captures(tmp_path):
    """Five times as many captures need as much memory of the driver: to list, record, look up, share out and report
    them."""

    def most(count):
        folder = tmp_path / str(count)
        folder.mkdir()
        (tmp_path / "one").touch()
        for number in range(count):
            (folder / f"a capture with a long name {number}.pcap").hardlink_to(tmp_path / "one")
        settings, peak = Settings(), []
        known = tmp_path / f"{count}.jsonl"
        tracemalloc.start()
        before = pa.total_allocated_bytes()
        for _ in range(2):
            catalogue = Catalogue([folder], settings)
            catalogue.note((number, 100, 100, "100:of it") for number, _, _ in catalogue.every())
            with pieces.spooled(name_of(job.source).encode() for _, job, _ in catalogue.every()) as rows:
                assert rows.num_rows == count
                peak.append(pa.total_allocated_bytes() - before)
            if not known.exists():
                with known.open("w") as file:
                    file.writelines(catalogue.lines(()))
        with known.open() as file:
            catalogue.leave_known(file, "tables")
        assert not len(catalogue)
        _, most_ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most_, max(peak)

    most(1500)  # loads the modules that are imported at first use
    (python, arrow), (of_many, arrow_of_many) = most(2000), most(10_000)  # both more than are written at once
    assert of_many < python + 50 * 8000 and arrow_of_many <= arrow + 1000  # a Job alone is about 350 bytes
