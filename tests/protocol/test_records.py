"""Records: read like the official library reads them, and robust against truncation and mutation."""

import gzip
import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed, Unsupported
from kproxy.protocol import compression
from kproxy.protocol.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD, compress
from kproxy.protocol.records import (
    HEADER_BYTES,
    Checksum,
    Record,
    _write_message,
    control_type,
    iterate_headers,
    read_batches,
    read_header,
    write_batch,
    write_message_set,
)
from kproxy.protocol.shown.decode import records_as_json
from tests.each import each

DATA = Path(__file__).parent.parent / "data"


def fragments_of(name):
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return {fragment["name"]: fragment for fragment in map(json.loads, lines)}


FRAGMENTS = fragments_of("records-dev.jsonl.gz")
# Bytes sent by clients and brokers of Kafka 0.8 to 4.1, and how the official library reads them.
CAPTURED = fragments_of("records-captured.jsonl.gz")

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TIMESTAMP = st.integers(-1, 1 << 45)
BYTES = st.none() | st.binary(max_size=40) | st.binary(min_size=120, max_size=140)
RECORD_HEADERS = st.lists(st.tuples(st.text(max_size=8), BYTES), max_size=4).map(tuple)


@st.composite
def records(draw, with_headers=True, max_offset=1 << 62):
    count = draw(st.integers(1, 6))
    offset = draw(st.integers(0, max_offset))
    out = []
    for _ in range(count):
        headers = draw(RECORD_HEADERS) if with_headers else ()
        out.append(Record(offset, draw(TIMESTAMP), draw(BYTES), draw(BYTES), headers))
        offset += draw(st.integers(1, 1000))
    return out


def fragment_bytes(name):
    return bytes.fromhex(FRAGMENTS[name]["hex"])


def everything(buffer):
    """Read everything in a buffer; raises the errors of reading."""
    batches, trailing = read_batches(buffer)
    return [(batch.header, batch.base_offset, batch.crc_valid, list(batch.records())) for batch in batches], trailing


@each("name", [*FRAGMENTS, *CAPTURED])
def test_records_read_like_in_the_official_library(name):
    fragment = FRAGMENTS.get(name) or CAPTURED[name]
    found = json.loads("".join(records_as_json(bytes.fromhex(fragment["hex"]))))
    assert found == {name: fragment[name] for name in ("batches", "trailing_bytes")}


@each("name", FRAGMENTS)
def test_records_are_written_like_by_the_official_library(name):
    """Rewritten batches have the same bytes, compressed ones after decompression, unless reading loses a field."""
    for batch in read_batches(fragment_bytes(name))[0]:
        header, plain = batch.header, list(batch.records())
        if not plain or not batch.crc_valid or header.timestamp_type == "LogAppendTime":
            continue
        if header.magic == 2:
            written = write_batch(
                plain,
                codec=header.codec,
                base_offset=header.base_offset,
                leader_epoch=header.leader_epoch,
                producer_id=header.producer_id,
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
                is_transactional=header.is_transactional,
                is_control=header.is_control,
                delete_horizon=header.delete_horizon,
            )
        else:
            written = write_message_set(plain, magic=header.magic, codec=header.codec)
        (again,) = read_batches(written)[0]
        assert payload(again) == payload(batch)
        if header.codec == NONE:
            assert written == bytes(batch.view)
        else:
            assert again.header._replace(length=0, crc=0) == header._replace(length=0, crc=0)


def payload(batch):
    """Return the decompressed payload of a batch."""
    header = batch.header
    if header.magic == 2:
        return compression.decompress(header.codec, batch.view[HEADER_BYTES:])
    if header.codec == NONE:
        return bytes(batch.view)
    start = 26 if header.magic else 18  # the key's and the value's sizes follow
    return compression.decompress(header.codec, batch.view[start + 8 :], magic=header.magic)


@given(records(), st.sampled_from(range(5)), st.booleans(), st.booleans(), st.none() | TIMESTAMP, st.none() | TIMESTAMP)
def test_batches_read_as_written(given_records, codec, is_transactional, is_control, log_append_time, delete_horizon):
    written = write_batch(
        given_records,
        codec=codec,
        leader_epoch=7,
        producer_id=1 << 40,
        producer_epoch=3,
        base_sequence=(1 << 31) - 1,
        is_transactional=is_transactional,
        is_control=is_control,
        log_append_time=log_append_time,
        delete_horizon=delete_horizon,
    )
    (batch,), trailing = read_batches(written)
    header = batch.header
    assert trailing == 0
    assert batch.crc_valid
    assert (header.codec, header.producer_id, header.producer_epoch) == (codec, 1 << 40, 3)
    assert (header.is_transactional, header.is_control) == (is_transactional, is_control)
    assert header.delete_horizon == delete_horizon
    assert (batch.base_offset, header.last_offset) == (given_records[0].offset, given_records[-1].offset)
    assert header.record_count == len(given_records)
    if log_append_time is not None:
        given_records = [record._replace(timestamp=log_append_time) for record in given_records]
    assert list(batch.records()) == given_records


@given(records(with_headers=False), st.sampled_from((0, 1)), st.sampled_from(range(4)), st.none() | TIMESTAMP)
def test_message_sets_read_as_written(given_records, magic, codec, log_append_time):
    written = write_message_set(given_records, magic=magic, codec=codec, log_append_time=log_append_time)
    batches, trailing = read_batches(written)
    assert trailing == 0
    assert all(batch.crc_valid for batch in batches)
    assert len(batches) == (len(given_records) if codec == NONE else 1)
    assert batches[0].base_offset == given_records[0].offset
    assert batches[-1].header.last_offset == given_records[-1].offset
    stamp = -1 if magic == 0 else log_append_time
    expected = [record if stamp is None else record._replace(timestamp=stamp) for record in given_records]
    assert [record for batch in batches for record in batch.records()] == expected


def test_a_compressed_message_at_offset_0_counts_from_0():
    """Some versions of librdkafka leave the outer offset 0 for any inner offsets."""
    written = bytearray(write_message_set([Record(5, 1, None, b"a"), Record(6, 1, None, b"b")], magic=1, codec=GZIP))
    written[:8] = bytes(8)
    (batch,), _ = read_batches(written)
    assert batch.base_offset == 0
    assert [record.offset for record in batch.records()] == [0, 1]


@each("name", [n for n in FRAGMENTS if n.endswith(("-twenty", "three-batches", "mixed-magic"))])
def test_bytes_of_a_truncated_batch_count_as_trailing(name):
    whole = fragment_bytes(name)
    ends = [0, *(pos + header.size_bytes for pos, header in iterate_headers(whole))]
    assert ends[-1] == len(whole)
    for count, (start, end) in enumerate(pairwise(ends)):
        for cut in {*range(start, min(start + 70, end)), *range(start, end, 97), end - 1}:
            batches, trailing = read_batches(whole[:cut])
            assert (len(batches), trailing) == (count, cut - start)


@pytest.mark.parametrize("magic", [0, 1, 2])
@pytest.mark.parametrize("zeros", [1, 17, 61, 4096, 70_000])
def test_zeros_of_a_preallocated_segment_are_trailing_bytes(magic, zeros):
    records = [Record(0, 1, b"k", b"v")]
    whole = write_batch(records) if magic == 2 else write_message_set(records, magic=magic)
    for count in (0, 2):
        found = json.loads("".join(records_as_json(whole * count + bytes(zeros))))
        assert (len(found["batches"]), found["trailing_bytes"]) == (count, zeros)
    with pytest.raises(Malformed):
        read_batches(whole + bytes(zeros + 60) + b"x")


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("magic", [0, 1])
def test_a_truncated_message_inside_a_compressed_one_is_ignored_like_in_kafka(codec, magic):
    """Kafka's reader returns the complete messages before it; in v1 the last of them has the outer offset."""
    records = [Record(offset, 1, b"k", b"value") for offset in (7, 8, 9)]
    inner = write_message_set([record._replace(offset=offset) for offset, record in enumerate(records)], magic=magic)
    size = len(inner) // 3
    for cut in (1, 13, size - 1):
        for whole in (3, 2):
            plain = (inner * 2)[: whole * size + cut]
            message = _write_message(9, magic, codec, 1, None, compress(codec, plain, magic=magic))
            (batch,), _ = read_batches(message)
            first = 10 - whole if magic else 0
            assert [record.offset for record in batch.records()] == list(range(first, first + whole))
            assert batch.base_offset == first
    nothing = _write_message(9, magic, codec, 1, None, compress(codec, inner[: size - 1], magic=magic))
    (batch,), _ = read_batches(nothing)
    with pytest.raises(Malformed, match="no message"):
        list(batch.records())


def test_the_checksum_excludes_fields_that_brokers_change():
    """Brokers set base offset and leader epoch; a checksum over them would break at every append."""
    batch = write_batch([Record(0, 1, b"k", b"v")])
    moved = patched(patched(batch, 0, (7).to_bytes(8, "big")), 12, (9).to_bytes(4, "big"))
    (again,), _ = read_batches(moved)
    assert (again.base_offset, again.header.leader_epoch, again.crc_valid) == (7, 9, True)
    (harmed,), _ = read_batches(patched(batch, 23, (1).to_bytes(4, "big")))  # lastOffsetDelta
    assert not harmed.crc_valid


@each("name", [*FRAGMENTS, *CAPTURED])
def test_a_checksum_computed_in_pieces_equals_that_of_the_whole(name):
    """Split at every seventh byte, within the header too; the checksum is valid only after the last piece."""
    content = memoryview(bytes.fromhex({**FRAGMENTS, **CAPTURED}[name]["hex"]))
    try:
        batches, _ = read_batches(content)
    except (Malformed, Unsupported):
        return
    end = 0
    for batch in batches:
        whole, end = content[end : end + batch.header.size_bytes], end + batch.header.size_bytes
        for cut in range(1, len(whole), 7):
            checksum = Checksum(batch.header)
            checksum.add(whole[:cut])
            assert not checksum.is_valid
            checksum.add(whole[cut:])
            assert checksum.is_valid == batch.crc_valid


def test_unusual_batches_that_the_official_reader_accepts_are_accepted():
    """Found by mutating fragments and running the official reader."""
    good = write_batch([Record(0, 0, b"", b"value")], base_sequence=5, producer_id=1)
    (batch,), _ = read_batches(patched(good, 65, b"\x07"))
    assert next(batch.records()).key is None  # any negative length is null
    (batch,), _ = read_batches(patched(good, 22, b"\x04", 57, bytes(4)))
    assert list(batch.records()) == []  # no records: nothing to decompress
    (batch,), _ = read_batches(patched(good, 53, (-33).to_bytes(4, "big", signed=True), 23, (750).to_bytes(4, "big")))
    assert batch.header.last_sequence == 717


def test_a_header_is_read_before_its_payload_arrives():
    for name in ("m0-none-single", "m0-gzip-twenty", "m1-snappy-twenty", "m2-zstd-headers"):
        whole = fragment_bytes(name)
        header = read_header(whole, 0, len(whole))
        needed = {0: 18, 1: 26, 2: HEADER_BYTES}[header.magic]
        assert [read_header(whole, 0, end) for end in range(needed)] == [None] * needed
        assert read_header(b"?" + whole[:needed], 1, needed + 1) == header


@settings(max_examples=1000)
@given(st.sampled_from([name for name in FRAGMENTS if "-big" not in name]), st.data())
def test_mutated_bytes_are_read_or_refused(name, data):
    mutated = bytearray(fragment_bytes(name))
    if not mutated:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Malformed, Unsupported):
        everything(mutated)


@given(st.binary(max_size=200), st.sampled_from((0, 1, 2)), st.integers(0, 7))
def test_any_bytes_behind_a_plausible_header_are_read_or_refused(tail, magic, attributes):
    if magic == 2:
        whole = bytearray(write_batch([Record(0, 0, b"k", b"v")])[:HEADER_BYTES] + tail)
        whole[22] = attributes
    else:
        whole = bytearray(write_message_set([Record(0, 0, b"k", b"v")], magic=magic)[: 26 if magic else 18] + tail)
        whole[17] = attributes
    whole[8:12] = (len(whole) - 12).to_bytes(4, "big")
    with suppress(Malformed, Unsupported):
        everything(whole)


def malformed(buffer, reason):
    with pytest.raises(Malformed, match=reason):
        everything(buffer)


def test_impossible_batches_are_refused_with_their_reason():
    good = write_batch([Record(0, 0, b"key", b"value")])
    malformed(patched(good, 8, (48).to_bytes(4, "big")), "49 is the least")
    malformed(patched(good, 8, b"\xff" * 4), "49 is the least")
    malformed(patched(good, 57, b"\xff" * 4), "a batch of -1 records")
    malformed(patched(good, 57, (2).to_bytes(4, "big")), "cut short")
    two = write_batch([Record(0, 0, b"key", b"value"), Record(1, 0, b"key", b"value")])
    malformed(patched(two, 57, (1).to_bytes(4, "big")), "after the last of 1 records")
    malformed(patched(good, 57, b"\x7f\xff\xff\xff"), "cut short")
    malformed(patched(good, 0, b"\x7f" + b"\xff" * 7, 64, b"\x02"), "leaves the range")
    malformed(patched(good, 65, b"\x20"), "16 bytes in a record that has 10 left")
    with pytest.raises(Unsupported, match="magic 3"):
        read_batches(patched(good, 16, b"\x03"))
    inner = write_message_set([Record(0, 0, None, b"v")], magic=1, codec=GZIP)
    malformed(compressed_message(inner), "only uncompressed")
    malformed(compressed_message(inner[:20]), "no message")
    malformed(compressed_message(b""), "no message")
    malformed(compressed_message(write_message_set([Record(9, 0, None, b"v")], magic=1), offset=3), "relative offset 9")
    with pytest.raises(Unsupported, match="zstd"):
        everything(patched(compressed_message(inner), 17, bytes((ZSTD,))))


def test_a_batch_without_a_producer_has_the_default_producer_fields():
    """The same defaults as in the official library."""
    (batch,), _ = read_batches(write_batch([Record(7, 1_000, b"k", b"v"), Record(9, 3_000, None, None)]))
    assert batch.header._replace(length=0, crc=0) == (7, 0, -1, 2, 0, 0, 2, 1_000, 3_000, -1, -1, -1, 2)
    assert batch.header.last_sequence == -1 and batch.header.delete_horizon is None
    plain = FRAGMENTS["m2-none-single"]["batches"][0]
    assert (plain["producer_id"], plain["epoch"], plain["sequence"], plain["last_sequence"]) == (-1,) * 4


@pytest.mark.parametrize(
    ("first", "count", "last"),
    [(0, 1, 0), ((1 << 31) - 1, 1, (1 << 31) - 1), ((1 << 31) - 1, 2, 0), (-1, 3, -1), (7, 3, 9)],
)
def test_sequences_wrap_from_the_largest_int32_to_0(first, count, last):
    records = [Record(offset, 1, b"k", b"v") for offset in range(count)]
    (batch,), _ = read_batches(write_batch(records, base_sequence=first, producer_id=1))
    assert batch.header.last_sequence == last


@pytest.mark.parametrize("magic", [0, 1, 2])
@pytest.mark.parametrize(("bit", "name"), [(0x10, "is_transactional"), (0x20, "is_control"), (0x40, "delete_horizon")])
def test_only_batches_of_magic_2_are_transactional_control_or_have_a_delete_horizon(magic, bit, name):
    """Kafka's readers ignore these bits in older messages; each bit sets one field only."""
    record = [Record(0, 1_000, b"k", b"v")]
    whole = write_batch(record) if magic == 2 else write_message_set(record, magic=magic)
    (batch,), _ = read_batches(patched(whole, 22 if magic == 2 else 17, bytes((bit,))))
    header = batch.header
    flags = {each: getattr(header, each) for each in ("is_transactional", "is_control", "delete_horizon")}
    nothing = {"is_transactional": False, "is_control": False, "delete_horizon": None}
    expected = {name: 1_000 if name == "delete_horizon" else True} if magic == 2 else {}
    assert flags == nothing | expected and header.codec == NONE
    assert header.timestamp_type == ("NoTimestampType" if magic == 0 else "CreateTime")
    (batch,), _ = read_batches(patched(whole, 22 if magic == 2 else 17, b"\x08"))
    assert batch.header.timestamp_type == ("NoTimestampType" if magic == 0 else "LogAppendTime")


@pytest.mark.parametrize(("field", "at"), [("offset", 0), ("timestamp", 27)])
@pytest.mark.parametrize(("edge", "step"), [(-(1 << 63), -1), ((1 << 63) - 1, 1)])
def test_offsets_and_timestamps_cover_int64_and_no_more(field, at, edge, step):
    for delta in (0, step):
        first = Record(10, 10, b"k", b"v")
        whole = write_batch([first, first._replace(**{field: 10 + delta})], base_offset=10)
        (batch,), _ = read_batches(patched(whole, at, edge.to_bytes(8, "big", signed=True)))
        if delta:
            with pytest.raises(Malformed, match=f"{field} leaves the range of int64"):
                list(batch.records())
        else:
            assert [getattr(record, field) for record in batch.records()] == [edge, edge]


def patched(whole, *edits):
    out = bytearray(whole)
    for at, content in zip(edits[::2], edits[1::2], strict=True):
        out[at : at + len(content)] = content
    return out


def compressed_message(content, offset=0):
    """A v1 message around any content."""
    value = compression.compress(GZIP, content)
    body = b"\x01\x01" + bytes(8) + b"\xff" * 4 + len(value).to_bytes(4, "big") + value
    return offset.to_bytes(8, "big") + (len(body) + 4).to_bytes(4, "big") + bytes(4) + body


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_decompression_bomb_ends_at_the_limit(codec):
    (batch,), _ = read_batches(write_batch([Record(0, 0, None, bytes(1 << 20))], codec=codec))
    with pytest.raises(Malformed, match="allowed"):
        next(batch.records(limit_bytes=1 << 19))
    assert next(batch.records(limit_bytes=(1 << 20) + 100)).value == bytes(1 << 20)


def test_control_records_by_name():
    def names(fragment):
        batches = [batch for batch in read_batches(fragment_bytes(fragment))[0] if batch.header.is_control]
        return [control_type(record) for batch in batches for record in batch.records()]

    assert names("m2-control-commit") == ["COMMIT"]
    assert names("m2-control-kraft-voters") == ["KRAFT_VOTERS"]
    assert names("m2-transaction-log") == ["ABORT", "COMMIT"]
    assert control_type(Record(0, 0, b"\0\0\0\x63", None)) == "unknown_99"
    with pytest.raises(Malformed):
        control_type(Record(0, 0, b"\0", None))
