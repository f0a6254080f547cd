"""A mapped file gives the same records and flaws as a file that is read."""

import random
from dataclasses import astuple
from struct import pack

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kproxy.capture.columns import mapped
from kproxy.capture.formats.captures import windows_of
from kproxy.capture.formats.files import Bytes
from kproxy.capture.quality import Quality
from tests.capture import packet


class Read(Bytes):
    """A file that cannot be mapped, such as one that grows."""

    def mapped(self):
        return None


def results(source):
    quality = Quality()
    records, columns = [], 0
    for window in windows_of(source, quality, []):
        columns += isinstance(window.records, mapped.Columns)
        records += [
            (time_ns, link, window.offset + start, window.offset + end, original, bytes(window.data[start:end]))
            for time_ns, link, start, end, original in window.records
        ]
    return records, [astuple(row) for row in quality], source.consumed, columns


@settings(max_examples=150, deadline=None)
@example(1_176_013_810, False, 3)  # the last record's header is behind the buffer
@given(st.integers(0, 1 << 32), st.booleans(), st.sampled_from((0, 1, 3)))
def test_mapped_records_equal_those_that_are_read(tmp_path_factory, seed, large, harm):
    dice = random.Random(seed)
    packets = [(number * 1000, dice.randbytes(dice.randrange(14, 300))) for number in range(dice.randrange(60))]
    data = bytearray(packet.pcap(packets, order=dice.choice("<>"), nano=dice.random() < 0.5))
    for _ in range(harm if len(data) > 24 else 0):
        data[dice.randrange(24, len(data))] ^= 1 << dice.randrange(8)
    if harm:
        del data[dice.randrange(24, len(data) + 1) :]
    path = tmp_path_factory.mktemp("mapped") / "file.pcap"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "FIRST_RECORDS", dice.choice((1, 7, 1024)))
        patch.setattr(mapped, "RECORDS", dice.choice((1, 7, 1024)))
        patch.setattr(mapped, "PIECE_BYTES", dice.choice((1, 100, 1000, 1 << 18)))
        patch.setattr(mapped, "BUFFER_BYTES", dice.choice((500, 5000, 1 << 20)))
        patch.setattr(mapped, "LARGE", dice.choice((0, 100)) if large else 1 << 40)
        *at_once, columns = results(Bytes(path))
    *read, plain = results(Read(path))
    assert at_once == read
    assert not plain
    assert columns or len(packets) < 5 or harm


@pytest.mark.parametrize("large", (0, 1 << 14))
def test_a_mapped_file_that_shrinks_counts_as_truncated(tmp_path, monkeypatch, large):
    """As in a ring of captures that is overwritten; the mapping must not be touched any more."""
    monkeypatch.setattr(mapped, "LARGE", large)
    path = tmp_path / "ring.pcap"
    path.write_bytes(packet.pcap([(number * 1000, bytes(1000)) for number in range(10_000)]))
    quality = Quality()
    windows = windows_of(Bytes(path), quality, [])
    taken = [next(windows), next(windows)]  # the first window is never mapped
    assert (taken[1].offset == 0) == (large == 0)
    count = sum(len(window.records) for window in taken)
    assert mapped.FIRST_RECORDS < count < 8000
    with path.open("r+b") as file:
        file.truncate(24 + 1016 * 8000 + 500)
    assert count + sum(len(window.records) for window in windows) == 8000
    assert quality.count("cut_file") == 1


SIZES = (14, 15, 53, 54, 69, 70, 71, 86, 87, 100, 199, 200, 300)  # around the offsets that are checked in a packet


@pytest.mark.parametrize("large", (-1, 1 << 40), ids=("mapped", "copied"))
@pytest.mark.parametrize("count", (1, 3, 1 << 10))
def test_a_range_of_a_file_has_the_records_that_begin_in_it(tmp_path, monkeypatch, count, large):
    """Whatever is read at a time; an end inside a record, which is read completely, reveals a wrong border."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", count)
    monkeypatch.setattr(mapped, "RECORDS", count)
    monkeypatch.setattr(mapped, "LARGE", large)
    packets = [(number * 1000, bytes([number]) * size) for number, size in enumerate(SIZES, 1)]
    path = tmp_path / "file.pcap"
    path.write_bytes(packet.pcap(packets))
    size = path.stat().st_size
    starts = [24]
    for each in SIZES:
        starts.append(starts[-1] + 16 + each)
    inside = {place + by for place in starts for by in (-17, -16, -1, 1, 15, 16, 17) if 24 < place + by < size}
    for begin in (24, *starts[-5:-1]):
        for end in sorted({0, *starts, *inside}):
            if 0 < end <= begin:
                continue
            quality = Quality()
            windows = list(windows_of(Bytes(path), quality, [], begin, end))
            found = [(window.offset + record[2] - 16, record[0]) for window in windows for record in window.records]
            assert found == [
                (place, time_ns)
                for place, (time_ns, _) in zip(starts[:-1], packets, strict=True)
                if begin <= place < (end or size)
            ]
            assert [(row.kind, row.count, row.first_ns) for row in quality] == (
                [("damaged", 1, found[-1][1])] if end in inside else []
            )


@pytest.mark.parametrize("piece", (1, 86, 87, 1 << 18))
@pytest.mark.parametrize("room", (-1, 0, 1, 71, 72))
def test_a_buffer_of_any_size_holds_complete_records_only(tmp_path, monkeypatch, piece, room):
    """room: the bytes of the buffer beyond a record and the header of the next one."""
    largest = 16 + max(SIZES)
    monkeypatch.setattr(mapped, "PIECE_BYTES", piece)
    monkeypatch.setattr(mapped, "BUFFER_BYTES", largest + mapped.HEAD + room)
    packets = [(number * 1000, bytes([number]) * size) for number, size in enumerate(SIZES * 3, 1)]
    path = tmp_path / "file.pcap"
    path.write_bytes(packet.pcap(packets))
    *at_once, columns = results(Bytes(path))
    *read, _ = results(Read(path))
    assert at_once == read and len(read[0]) == len(packets)
    assert columns > 5


@pytest.mark.parametrize("large", (-1, 1 << 40), ids=("mapped", "copied"))
@pytest.mark.parametrize("begun", (1, 15, 16, 17, 71, 100))
def test_a_growing_file_ends_with_its_incomplete_record(tmp_path, monkeypatch, begun, large):
    """begun: the bytes of that record when the file was opened."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 1)
    monkeypatch.setattr(mapped, "LARGE", large)
    packets = [(number * 1000, bytes(100)) for number in range(6)]
    whole = packet.pcap(packets)
    path = tmp_path / "file.pcap"
    path.write_bytes(whole[: 24 + 3 * 116 + begun])
    quality = Quality()
    windows = windows_of(Bytes(path), quality, [])
    found = [record[0] for record in next(windows).records]
    path.write_bytes(whole)
    found += [record[0] for window in windows for record in window.records]
    assert found == [0, 1000, 2000, 3000]
    assert quality.count("cut_file") == 1 and not quality.count("damaged")


@pytest.mark.parametrize("large", (-1, 1 << 40), ids=("mapped", "copied"))
@pytest.mark.parametrize("nano", (False, True))
@pytest.mark.parametrize(
    "fraction, size, original, sound",
    ((-1, 60, 60, True), (0, 60, 60, False), (-1, 60, 0, False), (-1, 1 << 18, 9, True), (-1, (1 << 18) + 1, 9, False)),
)
def test_an_impossible_record_is_damage(tmp_path, monkeypatch, large, nano, fraction, size, original, sound):
    """fraction: units of the file beyond a whole second."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 4)
    monkeypatch.setattr(mapped, "LARGE", large)
    second = 1_700_000_000
    usual = [(second * 10**9 + number * 1000, b"\xff" * 60) for number in range(1, 9)]
    whole, front = packet.pcap(usual, nano=nano), 24 + 5 * 76
    odd = pack("<IIII", second, (10**9 if nano else 10**6) + fraction, size, original) + bytes(size)
    path = tmp_path / "file.pcap"
    path.write_bytes(whole[:front] + odd + whole[front:])
    *at_once, columns = results(Bytes(path))
    *read, _ = results(Read(path))
    assert at_once == read and columns
    assert (len(read[0]), [row[0] for row in read[1]]) == ((9, []) if sound else (8, ["damaged"]))
