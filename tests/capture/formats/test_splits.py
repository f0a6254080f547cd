"""Splits of real captures compared with the same files read whole."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from struct import pack
from tempfile import TemporaryDirectory

import fsspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from bench.offline import KINDS, Connection, generate
from kproxy.capture.formats import pcapng, splits
from kproxy.capture.formats.captures import Capture
from kproxy.capture.formats.storage import Storage
from kproxy.capture.quality import Quality
from kproxy.convert.job import Settings, captures_of
from kproxy.convert.parts import reader
from tests.captures import capture

BASES = ("k41_BASE", "k41_bigendian", "k41_rawip", "k41_realnano", "k41_realSLL2", "k41_snap96", "k41_ng",
         "k41_mixedlinks", "k41_cut", "k0102_java_cluster")  # fmt: skip


def records(windows):
    """(time, link, offset of the bytes in the file, original length) and the bytes."""
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


def test_a_boundary_is_the_next_record_for_any_range():
    """Each byte offset as the start of a range leads to the next record that begins with a TCP segment."""
    path = capture("k41_BASE")
    data = path.read_bytes()
    starts = [start - 16 for _, _, start, _, _ in records(Capture([path], Quality()).windows())]
    walker = splits._Records(data)
    offset = starts[200]
    for start in starts[201:260]:
        for place in range(offset + 1, start + 1, 7):
            assert walker.boundary(place, len(data)) == start
        offset = start


def test_unsplittable_files_are_read_whole(tmp_path):
    data = bytearray(capture("k41_BASE").read_bytes())
    starts = [start - 16 for _, _, start, _, _ in records(Capture([capture("k41_BASE")], Quality()).windows())]
    damaged = tmp_path / "damaged.pcap"
    data[starts[700] + 8 : starts[700] + 12] = b"\xff" * 4
    damaged.write_bytes(data)
    packed = tmp_path / "packed.pcap.gz"
    shutil.copy(capture("k41_gz"), packed)
    cut = splits.plan(str(damaged), 100_000)
    quality, seen = Quality(), Quality()
    found = [record for part in cut for record in records(splits.windows(part, seen))]
    assert len(cut) > 3 and found == records(Capture([damaged], quality).windows())
    assert seen.count("damaged") == quality.count("damaged") == 1
    assert splits.plan(str(packed), 100_000) == [splits.Split(str(packed))]
    empty = tmp_path / "allocated.pcap"  # as left by a power failure
    empty.write_bytes(capture("k41_BASE").read_bytes() + bytes(300_000))
    assert splits.plan(str(empty), 100_000) == [splits.Split(str(empty))]
    whole = records(Capture([packed], Quality()).windows())
    assert records(splits.windows(splits.Split(str(packed)), Quality())) == whole


def block(kind, body):
    body += bytes(-len(body) % 4)
    length = (12 + len(body)).to_bytes(4, "little")
    return kind.to_bytes(4, "little") + length + body + length


def enhanced(packet):
    sizes = len(packet).to_bytes(4, "little")
    return block(6, bytes(12) + 2 * sizes + packet)


SECTION = block(0x0A0D0D0A, b"\x4d\x3c\x2b\x1a\1\0\0\0" + b"\xff" * 8)
INTERFACE = block(1, b"\1\0\0\0" + bytes(4))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (SECTION + INTERFACE, {"sections", "interfaces"}),
        (INTERFACE, {"interfaces"}),
        (block(5, bytes(12) + b"\5\0\x08\0\1" + bytes(11)), {"statistics"}),
        (block(10, b"KSLT\4\0\0\0abcd"), {b"abcd"}),  # it is in `secrets`
        (block(4, bytes(4)), set()),  # names
    ],
)
def test_blocks_that_affect_later_ones_are_reported(tmp_path, more, expected):
    data = capture("k41_ng").read_bytes()
    place = splits._Blocks(data).boundary(300_000, len(data))
    path = tmp_path / "changes.pcapng"
    path.write_bytes(data[:place] + more + data[place:])
    found = []
    for split in splits.plan(str(path), 100_000)[:-1]:
        changes, secrets = set(), []
        list(splits.windows(split, Quality(), secrets, changes))
        found += [*changes, *secrets]
    assert set(found) == expected


def test_a_pcapng_file_that_begins_with_keys_or_has_no_times_is_read_whole(tmp_path):
    data = capture("k41_ng").read_bytes()
    begin = len(pcapng.front(data).data)
    odd = {
        "keys": data[:begin] + block(10, b"KSLT\4\0\0\0abcd") + data[begin:],
        "untimed": SECTION + INTERFACE + block(3, b"\4\0\0\0abcd") * 10_000,
        "late": SECTION + INTERFACE + block(4, bytes(60_000)) * 20 + data[begin:],
    }
    for name, content in odd.items():
        path = tmp_path / f"{name}.pcapng"
        path.write_bytes(content)
        assert splits.plan(str(path), 50_000) == [splits.Split(str(path))], name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32), st.sampled_from((0.1, 0.5, 1.0)), st.integers(0, 3))
def test_payloads_that_contain_blocks_are_no_boundaries(seed, part, shift):
    """A border inside a payload that contains a capture, at any offset: the previous reader does not end there."""
    dice = random.Random(seed)
    (inner,) = {enhanced(next(Connection(7, 1448).send(0, bytes(40))))}
    connection = Connection(1, 60_000)
    packets = []
    while sum(map(len, packets)) < 400_000:
        within = bytes(shift) + inner * dice.randrange(1, 300) if dice.random() < part else bytes(dice.randrange(9000))
        packets += map(enhanced, connection.send(0, within))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "hostile.pcapng"
        path.write_bytes(SECTION + INTERFACE + b"".join(packets))
        parts = splits.plan(str(path), 50_000)
        found, flaws = [], Quality()
        for split in parts:
            found += records(splits.windows(split, flaws))
        event("unsplittable" if flaws.count("cut_file") + flaws.count("damaged") else "read in parts")
        if not flaws.count("cut_file") + flaws.count("damaged"):
            assert found == records(Capture([path], Quality()).windows())


@pytest.mark.parametrize("name", ("busy.pcap", "busy.pcapng"))
def test_each_byte_is_requested_once_from_a_storage_except_around_borders(tmp_path, monkeypatch, name):
    """Including searches for borders and warm-ups: counted where the storage responds."""
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(replace(KINDS[0], connections=8), file, 25_000)
    data = path.read_bytes()
    if name.endswith("ng"):
        whole = Capture([path], Quality())
        packets = [
            (time_ns // 1000, bytes(window.data[start:end]))
            for window in whole.windows()
            for time_ns, _, start, end, _ in window.records
        ]
        data = SECTION + INTERFACE + b"".join(
            block(6, pack("<IIIII", 0, when >> 32, when & 0xFFFFFFFF, len(packet), len(packet)) + packet)
            for when, packet in packets
        )  # fmt: skip
    system = fsspec.filesystem("memory")
    system.pipe(f"/{name}", data)
    asked = []
    read = Storage.read
    monkeypatch.setattr(Storage, "read", lambda *given: asked.append(len(got := read(*given))) or got)
    (job,) = captures_of([f"memory://{name}"], Settings())
    parts = splits.plan(job.paths[0], len(data) // 2, job.storage)
    for number, (split, following) in enumerate(zip(parts, [*parts[1:], None], strict=True)):
        found = reader.read(job, reader.Part(number, split, 0, following), lambda table, rows: None)
        assert not found.unsplittable and not found.deferred and len(found.excerpts) == 8
    monkeypatch.undo()
    if name == "busy.pcap":  # a reader may stop inside a record
        for place in range(100_000, 110_000, 700):
            some = replace(parts[0], end=place, last=False)
            whole = records(splits.windows(replace(some, path=str(path), storage=Storage()), Quality()))
            assert records(splits.windows(some, Quality(), stop=parts[0].end)) == whole and len(whole) > 50
    system.rm(f"/{name}")
    assert len(parts) == 2 and len(data) <= sum(asked) <= 1.1 * len(data), sum(asked) / len(data)
    assert len(asked) < 60


@pytest.mark.parametrize("name", ("k41_BASE", "k41_ng"))
def test_a_reader_notices_a_wrong_end(name):
    for split in splits.plan(str(capture(name)), 200_000)[:2]:
        for wrong in (split.end - 1, split.end + 1, split.end - 44, split.end + 44):
            quality = Quality()
            list(splits.windows(replace(split, end=wrong), quality))
            assert quality.count("damaged") or quality.count("cut_file")


@pytest.mark.parametrize("name", ["k41_BASE", "k41_ng"])
def test_splitting_a_damaged_file_loses_nothing(tmp_path, name):
    """With bytes changed at random, the splits have the records of the whole file, or report that it must not be
    split."""
    data = capture(name).read_bytes()
    chance = random.Random(7)
    unsplittable = split = 0
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 3, 30))):
            place = chance.randrange(24, len(damaged))
            size = chance.choice((1, 4, 40))
            damaged[place : place + size] = chance.randbytes(len(damaged[place : place + size]))
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged) // 2, len(damaged)) :]
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        parts = splits.plan(str(path), chance.randrange(30_000, 300_000))
        split += len(parts) > 1
        quality, seen, changes = Quality(), Quality(), set()
        found = [record for part in parts for record in records(splits.windows(part, seen, [], changes))]
        if len(parts) > 1 and (seen.count("damaged") or seen.count("cut_file") or changes):
            unsplittable += 1
            continue
        assert found == records(Capture([path], quality).windows())
        assert list(seen) == list(quality)
    assert split - unsplittable > 20
