"""Splits of real captures against the same files read in one piece."""

import random
import shutil
from dataclasses import replace

import pytest

from kproxy.capture import splits
from kproxy.capture.captures import Capture
from kproxy.capture.quality import Quality
from tests.captures import capture

BASES = ("k41_BASE", "k41_bigendian", "k41_rawip", "k41_realnano", "k41_realSLL2", "k41_snap96", "k41_ng",
         "k41_mixedlinks", "k41_cut", "k0102_java_cluster")  # fmt: skip


def records(windows):
    """(time, link, where its bytes lie in the file, original length) and the bytes."""
    return [
        (time_ns, link, offset + start, original, data[start:end])
        for data, offset, found, _ in windows
        for time_ns, link, start, end, original in found
    ]


@pytest.mark.parametrize("name", BASES)
def test_splits_hold_every_record_once(name):
    path = capture(name)
    quality = Quality()
    whole = records(Capture([path], quality).windows())
    for size in (20_011, 65_536, 150_001):
        parts = splits.plan(str(path), size)
        assert len(parts) == path.stat().st_size // size
        seen = Quality()
        assert [record for part in parts for record in records(splits.windows(part, seen))] == whole
        assert list(seen) == list(quality)
        for part in parts[1:]:
            assert part.overlap < part.start and records(splits.windows(part.before, Quality()))[-1] in whole


def test_a_boundary_is_the_next_record_whatever_the_range():
    """Each byte offset, as a range's start, leads to the next record that begins with a TCP segment."""
    path = capture("k41_BASE")
    data = path.read_bytes()
    starts = [start - 16 for _, _, start, _, _ in records(Capture([path], Quality()).windows())]
    walker = splits._Records(data)
    offset = starts[200]
    for start in starts[201:260]:
        for place in range(offset + 1, start + 1, 7):
            assert walker.boundary(place, len(data)) == start
        offset = start


def test_what_cannot_be_split_is_read_in_one_piece(tmp_path):
    data = bytearray(capture("k41_BASE").read_bytes())
    starts = [start - 16 for _, _, start, _, _ in records(Capture([capture("k41_BASE")], Quality()).windows())]
    damaged = tmp_path / "damaged.pcap"
    data[starts[700] + 8 : starts[700] + 12] = b"\xff" * 4
    damaged.write_bytes(data)
    sections = tmp_path / "sections.pcapng"
    sections.write_bytes(capture("k41_ng").read_bytes() * 2)
    packed = tmp_path / "packed.pcap.gz"
    shutil.copy(capture("k41_gz"), packed)
    cut = splits.plan(str(damaged), 100_000)
    quality, seen = Quality(), Quality()
    found = [record for part in cut for record in records(splits.windows(part, seen))]
    assert len(cut) > 3 and found == records(Capture([damaged], quality).windows())
    assert seen.count("damaged") == quality.count("damaged") == 1
    for path in (sections, packed):
        assert splits.plan(str(path), 100_000) == [splits.Split(str(path))]
        assert records(splits.windows(splits.Split(str(path)), Quality())) == records(
            Capture([path], Quality()).windows()
        )


def test_splits_that_do_not_meet_are_no_splits():
    path = str(capture("k41_ng"))
    pieces = splits.ranges(path, 200_000)
    surveys = [splits.survey(piece) for piece in pieces]
    assert len(splits.agree(pieces, surveys)) == 3
    wrong = [surveys[0], splits.Survey(True, surveys[1].first + 5, surveys[1].arrival), surveys[2]]
    assert splits.agree(pieces, wrong) == [splits.Split(path)]
    classic = splits.plan(str(capture("k41_BASE")), 200_000)
    for wrong in (classic[1].end - 1, classic[1].end + 1):  # a reader sees where its own records end
        quality = Quality()
        list(splits.windows(replace(classic[1], end=wrong), quality))
        assert quality.count("damaged")


@pytest.mark.parametrize("name", ["k41_BASE", "k41_ng"])
def test_harm_anywhere_loses_nothing_to_splitting(tmp_path, name):
    """Bytes changed at random: the splits hold what one piece holds, or say that they are torn."""
    data = capture(name).read_bytes()
    chance = random.Random(7)
    torn = split = 0
    for _ in range(60):
        harmed = bytearray(data)
        for _ in range(chance.choice((1, 3, 30))):
            place = chance.randrange(24, len(harmed))
            size = chance.choice((1, 4, 40))
            harmed[place : place + size] = chance.randbytes(len(harmed[place : place + size]))
        if chance.random() < 0.3:
            del harmed[chance.randrange(len(harmed) // 2, len(harmed)) :]
        path = tmp_path / "harmed"
        path.write_bytes(harmed)
        parts = splits.plan(str(path), chance.randrange(30_000, 300_000))
        split += len(parts) > 1
        quality, seen = Quality(), Quality()
        found = [record for part in parts for record in records(splits.windows(part, seen))]
        if len(parts) > 1 and seen.count("damaged"):
            torn += 1
            continue
        assert found == records(Capture([path], quality).windows())
        assert list(seen) == list(quality)
    assert split > 10 and torn < split / 2
