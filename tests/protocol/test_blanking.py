"""Blanked batches keep counts, offsets, times, sizes and checksums, and no user data."""

import contextlib
import zlib
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed, ProtocolError, TooLarge
from kproxy.protocol.blanking import Allowance, blank
from kproxy.protocol.compression import GZIP, ZSTD, compress
from kproxy.protocol.records import Record, read_batches, write_batch, write_message_set

SECRET = b"user-data"


def record(number, key, value, headers=()):
    return Record(number, 1_700_000_000_000 + number, key, value, headers)


def allowed(records=1 << 20, size=1 << 24):
    return Allowance(records, size)


contents = st.one_of(st.none(), st.binary(max_size=60))
records = st.lists(
    st.tuples(contents, contents, st.lists(st.tuples(st.text(max_size=5), contents), max_size=3)),
    min_size=1,
    max_size=9,
).map(lambda found: [record(n, key, value, tuple(headers)) for n, (key, value, headers) in enumerate(found)])


def sizes(found):
    return None if found is None else len(found)


@settings(max_examples=150, deadline=None)
@given(records, st.sampled_from([0, 1, 2]), st.integers(0, 4), st.integers(0, 80))
def test_only_the_content_is_gone(made, magic, codec, cut):
    if magic == 2:
        data = write_batch(made, codec=codec, base_sequence=7, producer_id=5, producer_epoch=1)
    else:
        made = [one._replace(headers=(), timestamp=one.timestamp if magic else -1) for one in made]
        data = write_message_set(made, magic=magic, codec=codec % 4)
    whole = data + data[: min(cut, len(data) - 1)]
    before, _ = read_batches(whole)
    got = blank(whole, allowed())
    after, _ = read_batches(got)
    assert len(after) == len(before) and all(batch.crc_valid for batch in after)
    for old, new in zip(before, after, strict=True):
        assert new.header._replace(crc=0, length=0) == old.header._replace(crc=0, length=0)
        for was, now in zip(old.records(), new.records(), strict=True):
            assert (was.offset, was.timestamp) == (now.offset, now.timestamp)
            assert [name for name, _ in was.headers] == [name for name, _ in now.headers]
            parts = zip((was.key, was.value, *dict(was.headers).values()), (now.key, now.value), strict=False)
            for had, has in parts:
                assert sizes(had) == sizes(has) and not any(has or b"")
            assert not any(b"".join(value or b"" for _, value in now.headers))
    if codec == 0:
        assert len(got) == len(whole)


@pytest.mark.parametrize("codec", range(5))
def test_what_compresses_well_and_cut_batches_tell_nothing(codec):
    data = write_batch([record(n, SECRET, SECRET * 3, (("h", SECRET),)) for n in range(50)], codec=codec)
    for cut in range(0, len(data), 7):
        assert SECRET not in blank(data + data[:cut], allowed())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), records, st.data())
def test_damage_is_a_protocol_error_or_a_blank(noise, made, data):
    whole = bytearray(write_batch(made))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    for given_bytes in (noise, bytes(whole)):
        with contextlib.suppress(ProtocolError):
            blank(given_bytes, allowed())


def test_what_the_count_leaves_out_is_blank_too():
    one = [record(0, None, SECRET * 9)]
    data = bytearray(write_batch(one))
    data[57:61] = bytes(4)  # the count of records
    assert SECRET in data and SECRET not in blank(data, allowed())
    data = write_message_set(one, magic=1, codec=0)
    longer = int.from_bytes(data[8:12], "big") + len(SECRET)
    assert SECRET not in blank(data[:8] + longer.to_bytes(4, "big") + data[12:] + SECRET, allowed())


def of_many(count):
    """A batch of so many records of seven bytes, which compress to nothing."""
    head = bytearray(write_batch([record(0, None, b"")])[:61])
    head[21:23] = pack(">h", ZSTD)
    head[57:61] = pack(">i", count)
    payload = compress(ZSTD, bytes([12, 0, 0, 0, 1, 1, 0]) * count)
    head[8:12] = pack(">i", 61 - 12 + len(payload))
    return bytes(head) + payload


def test_what_all_batches_become_is_bounded():
    bomb = of_many(100_000)
    assert len(bomb) < 1000
    left = allowed(records=250_000)
    assert blank(bomb * 2, left)
    with pytest.raises(TooLarge):
        blank(bomb, left)
    assert blank(of_many(50_000), left)
    liar = bytearray(write_batch([record(0, None, SECRET)]))
    liar[57:61] = pack(">i", (1 << 31) - 1)
    with pytest.raises(Malformed):
        blank(liar, left := allowed(records=10))
    assert left.records > 0
    left = allowed(size=1_500_000)
    assert blank(bomb * 2, left)
    with pytest.raises(TooLarge):
        blank(bomb, left)
    assert left.unpacked_bytes == 0


def message(value, codec):
    body = pack(">bbqii", 1, codec, 0, -1, len(value)) + value
    return pack(">qiI", 0, len(body) + 4, zlib.crc32(body)) + body


def test_messages_inside_messages_are_unpacked_once():
    inner = message(SECRET, 0)
    once = message(compress(GZIP, inner * 2, magic=1), GZIP)
    left = allowed()
    assert SECRET not in blank(once, left)
    assert left.records == (1 << 20) - 3
    for data in (once, write_batch([record(0, None, SECRET)])):
        with pytest.raises(Malformed):
            blank(message(compress(GZIP, data * 2, magic=1), GZIP), left)


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_of_a_cut_batch_its_header_stays_or_the_16_bytes_before_its_magic(magic):
    one = [record(0, SECRET, SECRET * 9)]
    data = write_batch(one) if magic == 2 else write_message_set(one, magic=magic)
    before = blank(data, allowed())
    header = (18, 26, 61)[magic]
    for cut in range(len(data)):
        kept = header if cut >= header else 16
        assert blank(data + data[:cut], allowed()) == before + data[: min(kept, cut)] + bytes(max(0, cut - kept))


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_an_allowance_is_used_up_by_its_last_record_and_byte(magic):
    made = [record(number, None, SECRET * 20) for number in range(9)]
    data = write_batch(made, codec=GZIP) if magic == 2 else write_message_set(made, magic=magic, codec=GZIP)
    (batch,), _ = read_batches(data)
    plain = write_batch(made)[61:] if magic == 2 else write_message_set(made, magic=magic)
    if magic == 1:  # offsets inside are relative, from 0 here
        assert batch.base_offset == 0
    records = 9 if magic == 2 else 10  # including the wrapper message
    blanked = blank(data, allowed())
    for exact in (Allowance(records, 1 << 20), Allowance(1 << 20, len(plain)), Allowance(99, 1 << 20, len(plain))):
        left = exact.records - records, exact.unpacked_bytes - len(plain)
        assert blank(data, exact) == blanked and (exact.records, exact.unpacked_bytes) == left
    for short in (
        Allowance(records - 1, 1 << 20),
        Allowance(1 << 20, len(plain) - 1),
        Allowance(99, 1 << 20, len(plain) - 1),
    ):
        with pytest.raises(TooLarge):
            blank(data, short)


def test_records_of_no_bytes_are_counted_by_what_there_can_be():
    """The count in a header is whoever wrote it's: seven bytes are the least of a record."""
    data = bytearray(write_batch([record(0, None, b"")]))
    assert len(data) == 61 + 7
    left = allowed(records=1)
    assert blank(data, left) and left.records == 0
    data[57:61] = pack(">i", 5)
    with pytest.raises(Malformed):
        blank(data, left := allowed(records=5))
    assert left.records == 4
