"""A mapped file gives the records, and the flaws, that reading it gives."""

import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture.captures import windows_of
from kproxy.capture.columns import mapped
from kproxy.capture.files import Bytes
from kproxy.capture.quality import Quality
from tests.capture import packet


class Read(Bytes):
    """A file that cannot be mapped, as one that grows."""

    def mapped(self):
        return None


def told(source):
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
@given(st.integers(0, 1 << 32), st.booleans(), st.sampled_from((0, 1, 3)))
def test_mapped_records_are_those_that_reading_gives(tmp_path_factory, seed, large, harm):
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
        *at_once, columns = told(Bytes(path))
    *read, plain = told(Read(path))
    assert at_once == read
    assert not plain
    assert columns or len(packets) < 5 or harm


@pytest.mark.parametrize("large", (0, 1 << 14))
def test_a_mapped_file_that_shrinks_is_cut(tmp_path, monkeypatch, large):
    """As by a ring of captures that is written over; what was mapped of it must not be touched any more."""
    monkeypatch.setattr(mapped, "LARGE", large)
    path = tmp_path / "ring.pcap"
    path.write_bytes(packet.pcap([(number * 1000, bytes(1000)) for number in range(10_000)]))
    quality = Quality()
    windows = windows_of(Bytes(path), quality, [])
    taken = [next(windows), next(windows)]  # the first one is never mapped
    assert (taken[1].offset == 0) == (large == 0)
    count = sum(len(window.records) for window in taken)
    assert mapped.FIRST_RECORDS < count < 8000
    with path.open("r+b") as file:
        file.truncate(24 + 1016 * 8000 + 500)
    assert count + sum(len(window.records) for window in windows) == 8000
    assert quality.count("cut_file") == 1
