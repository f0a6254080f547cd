"""Codecs: compatible with the official library in both directions, and bounded for hostile input."""

import base64
import json
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kproxy.errors import Malformed, Unsupported
from kproxy.protocol import compression
from kproxy.protocol.compression import (
    CODECS,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    _lz4_checksum,
    codec_name,
    compress,
    decompress,
)
from kproxy.protocol.records import read_batches
from tests.broker.jvm import java
from tests.protocol import forms

COMPRESSING = (GZIP, SNAPPY, LZ4, ZSTD)
TEXT = b"the same words again and again, " * 3000  # several xerial blocks


@given(st.sampled_from(range(5)), st.binary(max_size=300), st.integers(1, 500), st.sampled_from((0, 1, 2)))
def test_decompression_reverses_compression(codec, data, times, magic):
    assert decompress(codec, compress(codec, data * times, magic=magic), magic=magic) == data * times


@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
def test_consecutive_frames_are_one_stream(codec):
    assert decompress(codec, compress(codec, TEXT) + compress(codec, b"") + compress(codec, b"end")) == TEXT + b"end"


def test_snappy_framed_joined_and_raw():
    framed = compress(SNAPPY, TEXT)
    assert framed.startswith(b"\x82SNAPPY\0\0\0\0\1\0\0\0\1")
    assert decompress(SNAPPY, framed + compress(SNAPPY, b"more")) == TEXT + b"more"
    raw = bytes((5, 4 << 2)) + b"hello"  # a literal of five bytes
    assert decompress(SNAPPY, raw) == b"hello"


@pytest.mark.parametrize(
    "behind", [b"\0", bytes(9), bytes(100), b"j", b"junk" * 9, b"\x1f\x8b", compress(GZIP, b"x")[:18]]
)
def test_bytes_after_gzip_members_are_ignored(behind):
    """Like Java's GZIPInputStream; a member that begins there must be complete."""
    whole = compress(GZIP, TEXT)
    assert decompress(GZIP, whole + behind) == TEXT
    assert decompress(GZIP, whole + compress(GZIP, b"more") + behind) == TEXT + b"more"
    for cut in (1, 8, 12):
        with pytest.raises(Malformed):
            decompress(GZIP, whole + compress(GZIP, b"some text that is long enough")[:-cut])


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_parts_of_lz4_frames_that_kafkas_reader_ignores_are_ignored(magic):
    """Content size, content checksum and bytes after the end mark are ignored; but the frame must be complete."""

    def frame(**options):
        return lz4.frame.compress(TEXT, block_linked=False, **options)

    plain, summed, sized = frame(store_size=False), frame(content_checksum=True), frame(block_checksum=True)
    false_size = bytearray(sized)
    false_size[6:14] = (99).to_bytes(8, "little")
    false_size[14] = _lz4_checksum(bytes(false_size[4:14]))
    for whole in (plain, summed, sized, false_size, summed[:-4] + b"\1\2\3\4"):
        for behind in (b"", bytes(8), b"junkjunk"):
            assert decompress(LZ4, whole + behind, magic=magic) == TEXT
        assert decompress(LZ4, whole + plain, magic=magic) == TEXT * 2
    for cut in (plain[:-4], plain[:-2], summed[:-4], summed[:-1], summed[:-8], sized[:-4]):
        assert decompress(LZ4, cut, magic=magic) == TEXT  # librdkafka reads it
    for cut in (plain[:-5], summed[:-9], sized[:-5], sized[:-9]):
        with pytest.raises(Malformed, match="cut short"):
            decompress(LZ4, cut, magic=magic)
    wrong = bytearray(summed)
    wrong[14] ^= 0x55
    if magic:
        with pytest.raises(Malformed, match="wrong checksum"):
            decompress(LZ4, wrong, magic=magic)
    else:
        assert decompress(LZ4, wrong, magic=magic) == TEXT


@pytest.mark.parametrize("size", (1, 100, 6_000, 65_536, 300_000))
@pytest.mark.parametrize("store_size", (False, True))
def test_lz4_without_its_end_mark_gives_the_content_of_all_blocks(size, store_size):
    """The library holds output that exceeds its buffer until the end mark: well compressed records used to be lost."""
    plain = b"".join(b"hello world %d " % (number % 7) for number in range(size))
    for linked, summed in ((False, False), (True, False), (False, True)):
        whole = lz4.frame.compress(plain, block_linked=linked, store_size=store_size, block_checksum=summed)
        for cut in range(5):
            assert decompress(LZ4, whole[: len(whole) - cut]) == plain


def test_bytes_after_snappy_blocks_that_cannot_be_a_block_are_ignored():
    whole = compress(SNAPPY, TEXT)
    for behind in (b"\0", bytes(3), whole[:16]):
        assert decompress(SNAPPY, whole + behind) == TEXT
    with pytest.raises(Malformed):
        decompress(SNAPPY, whole + b"junk")


def test_lz4_of_message_sets_v0_has_its_flawed_checksum():
    flawed, right = compress(LZ4, TEXT, magic=0), compress(LZ4, TEXT, magic=1)
    assert flawed[:6] + flawed[7:] == right[:6] + right[7:]
    assert compress(LZ4, b"x" * 70000, magic=0)[6] != compress(LZ4, b"x" * 70000, magic=1)[6]
    assert decompress(LZ4, flawed, magic=0) == decompress(LZ4, right, magic=0) == TEXT
    with pytest.raises(Malformed):
        decompress(LZ4, flawed, magic=1)


def test_lz4_checksum_of_the_official_writer():
    """Frame headers as Kafka's own library writes them: magic 0, then magic 1 and later."""
    for magic, header in ((0, "04224d1860401a"), (1, "04224d18604082")):
        assert decompress(LZ4, bytes.fromhex(header) + bytes(4), magic=magic) == b""


def test_lz4_with_linked_blocks():
    """KafkaJS sends them and brokers store them; Kafka's own reader refuses them."""
    assert decompress(LZ4, lz4.frame.compress(TEXT * 10, block_size=4, block_linked=True)) == TEXT * 10


@pytest.mark.parametrize("codec", COMPRESSING)
def test_every_truncation_is_refused(codec):
    whole = compress(codec, b"some text, some text, some text")
    for cut in range(len(whole)):
        if codec == SNAPPY and 16 <= cut < 20:
            continue  # a xerial header without the size of a block is an empty stream
        if codec == LZ4 and cut >= len(whole) - 4:
            continue  # only its end mark is missing
        for magic in (0, 2):
            with pytest.raises(Malformed):
                decompress(codec, whole[:cut], magic=magic)


@given(st.sampled_from(COMPRESSING), st.sampled_from((0, 2)), st.data())
def test_mutated_bytes_decompress_or_are_refused(codec, magic, data):
    mutated = bytearray(compress(codec, data.draw(st.binary(max_size=100)) * 3, magic=magic))
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Malformed):
        decompress(codec, mutated, magic=magic, limit_bytes=1 << 16)


@given(st.sampled_from(COMPRESSING), st.sampled_from((0, 2)), st.binary(max_size=100))
def test_any_bytes_decompress_or_are_refused(codec, magic, data):
    with suppress(Malformed):
        decompress(codec, data, magic=magic)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_decompression_bomb_costs_no_more_memory_than_the_limit(codec):
    bomb = compress(codec, bytes(1 << 26))
    tracemalloc.start()
    try:
        with pytest.raises(Malformed, match="allowed"):
            decompress(codec, bomb, limit_bytes=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20  # of 64 MiB; libraries double their buffers as they go


@pytest.mark.parametrize("codec", COMPRESSING)
def test_content_is_read_up_to_exactly_the_limit(codec):
    for times in (1, 40, 3000):
        plain = TEXT[: 31 * times]
        packed = compress(codec, plain)
        assert decompress(codec, packed, limit_bytes=len(plain)) == plain
        with pytest.raises(Malformed, match="allowed"):
            decompress(codec, packed, limit_bytes=len(plain) - 1)


def test_a_false_size_allocates_nothing():
    claims_4_gib = b"\xff\xff\xff\xff\x0f" + b"\0" * 20
    with pytest.raises(Malformed, match="cannot become"):
        decompress(SNAPPY, claims_4_gib)
    for claim, said in ((64, "does not decompress"), (65, "cannot become")):  # three bytes become 64 at most
        with pytest.raises(Malformed, match=said):
            decompress(SNAPPY, bytes((claim, 0, 0)))
    with pytest.raises(Malformed):
        decompress(SNAPPY, compress(SNAPPY, b"")[:16] + b"\x7f\xff\xff\xff" + bytes(8))


@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
def test_endless_frames_are_refused(codec):
    with pytest.raises(Malformed, match="more than 1024 frames"):
        decompress(codec, compress(codec, b"") * 2000)
    assert decompress(codec, compress(codec, b"x") * 1024) == b"x" * 1024
    with pytest.raises(Malformed, match="more than 1024 frames"):
        decompress(codec, compress(codec, b"x") * 1025)


def test_frames_have_the_same_form_as_those_of_the_java_client():
    """LZ4 with blocks of their own and no size, Zstandard without the content's size, Snappy in blocks of 32 KiB."""
    for magic in (0, 1, 2):
        for size in (0, 100, 1 << 17):
            flags = compress(LZ4, bytes(size), magic=magic)[4]
            assert flags >> 6 == 1 and flags & 0x20 and not flags & 0x08
    assert zstandard.get_frame_parameters(compress(ZSTD, b"x" * 100)).content_size == zstandard.CONTENTSIZE_UNKNOWN
    assert compress(GZIP, b"x")[:3] == b"\x1f\x8b\x08"
    for size, blocks in ((0, 0), (1, 1), (32_768, 1), (32_769, 2), (100_000, 4)):
        framed = compress(SNAPPY, bytes(size))
        assert framed[:16] == b"\x82SNAPPY\0" + b"\0\0\0\1" * 2
        at, found = 16, 0
        while at < len(framed):
            at, found = at + 4 + int.from_bytes(framed[at : at + 4]), found + 1
        assert (at, found) == (len(framed), blocks)


@pytest.mark.parametrize(("window", "is_read"), [(17 << 3, True), (17 << 3 | 1, False), (18 << 3, False)])
def test_a_zstd_window_may_be_as_large_as_in_javas_reader(window, is_read):
    """128 MiB, by the byte behind the frame's flags (RFC 8878, 3.1.1.1.2); a raw block follows."""
    frame = b"\x28\xb5\x2f\xfd\0" + bytes((window,)) + (3 << 3 | 1).to_bytes(3, "little") + b"abc"
    if is_read:
        assert decompress(ZSTD, frame) == b"abc"
    else:
        with pytest.raises(Malformed, match="does not decompress"):
            decompress(ZSTD, frame)


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0x02CC5D05),
        (b"a", 0x550D7456),
        (b"abc", 0x32D153FF),
        (b"abcd", 0xA3643705),
        (b"abcdefgh", 0x0BB3C6BB),
        (b"abcdefghijkl", 0xED035AB5),
    ],
)
def test_known_checksums_of_xxhash(data, checksum):
    assert compression._xxh32(data) == checksum


def test_codecs_by_name():
    assert [codec_name(codec) for codec in range(-1, 6)] == ["unknown_-1", *CODECS, "unknown_5"]
    assert decompress(NONE, memoryview(b"as it is")) == b"as it is"
    for work in (compress, decompress):
        with pytest.raises(Unsupported, match="codec 5"):
            work(5, b"")


# --- compared with Java's client and librdkafka ----------------------------------------------------------------------

# A consumer of librdkafka 2.16 aborts at the first, fetches the second for ever, and hangs at the others.
NOT_FOR_LIBRDKAFKA = {f"gzip: {how}" for how in ("an empty member first", "two members", "cut in the middle")}
NOT_FOR_LIBRDKAFKA |= {f"gzip: {how}" for how in ("no trailer", "half a trailer")}
READ_BY_NEITHER = {"lz4: two frames", "lz4: an empty frame first"}  # but by kproxy, and by lz4's own library


def read_by(command, paths):
    """Return {file stem: record values, or an error text} as Reads.java and librdkafka.py print them."""
    done = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, timeout=120, check=True)
    results = map(json.loads, done.stdout.splitlines())
    values = [each if isinstance(each, str) else [base64.b64decode(value) for value in each] for each in results]
    return dict(zip([path.stem for path in paths], values, strict=True))


@pytest.mark.ring2
def test_batches_that_javas_client_or_librdkafka_reads_are_read(tmp_path):
    """For records compressed in unusual ways kproxy reads the same values."""
    paths = []
    for name, (codec, change) in forms.CASES.items():
        paths.append(tmp_path / f"{name}.batch")
        paths[-1].write_bytes(forms.batch_of(codec, change))
    by_java = read_by(java(str(Path(__file__).with_name("Reads.java"))), paths)
    fit = [path for path in paths if path.stem not in NOT_FOR_LIBRDKAFKA]
    by_librdkafka = read_by([sys.executable, "-m", "tests.protocol.librdkafka"], fit)
    for path in paths:
        others = [by_java[path.stem], by_librdkafka.get(path.stem, "")]
        read = [values for values in others if not isinstance(values, str)]
        assert all(values == forms.VALUES for values in read), path.stem
        (batch,), _ = read_batches(path.read_bytes())
        if read or path.stem in READ_BY_NEITHER:
            assert [record.value for record in batch.records()] == forms.VALUES, (path.stem, others)
        else:
            with pytest.raises(Malformed):
                list(batch.records())
    assert len([values for values in by_java.values() if values == forms.VALUES]) > 30
    assert len([values for values in by_librdkafka.values() if values == forms.VALUES]) > 30
