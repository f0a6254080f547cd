"""Compressed records as odd as producers write them."""

import gzip
import zlib
from collections.abc import Callable

import lz4.block
import lz4.frame
import zstandard

from kproxy.protocol.compression import GZIP, LZ4, SNAPPY, ZSTD, _lz4_checksum, compress
from kproxy.protocol.records import Record, crc32c, write_batch

HEAD = 61  # bytes of a record batch before its records
VALUES = [b"value %d " % number * 40 for number in range(200)]
SKIPPABLE = bytes.fromhex("502a4d1803000000") + b"abc"  # a frame of both LZ4 and Zstandard


def batch_of(codec: int, change: Callable[[bytes], bytes]) -> bytes:
    """A batch v2 of VALUES whose records are compressed by `change`."""
    plain = write_batch([Record(number, 1_700_000_000_000, None, value) for number, value in enumerate(VALUES)])
    data = bytearray(plain[:HEAD] + change(plain[HEAD:]))
    data[8:12] = (len(data) - 12).to_bytes(4)
    data[22] = data[22] & ~7 | codec
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4)
    return bytes(data)


def xerial(data: bytes, sizes: tuple[int, ...] = (1000, 20_000), versions: bytes = bytes((0, 0, 0, 1)) * 2) -> bytes:
    """Snappy as xerial's Java library frames it: a header, then blocks with their sizes."""
    parts, start, number = [b"\x82SNAPPY\0" + versions], 0, 0
    while start < len(data):
        block = compress(SNAPPY, data[start : start + sizes[number % len(sizes)]])[16:]
        parts.append(block)
        start, number = start + sizes[number % len(sizes)], number + 1
    return b"".join(parts)


def raw_snappy(data: bytes) -> bytes:
    """One block without a frame, as librdkafka and Go's clients write it: nothing but literals."""
    size, left = bytearray(), len(data)
    while left > 127:
        size.append(left & 127 | 128)
        left >>= 7
    size.append(left)
    return bytes(size) + b"".join(
        bytes((61 << 2, *(len(part) - 1).to_bytes(2, "little"))) + part
        for part in (data[start : start + 60_000] for start in range(0, len(data), 60_000))
    )


def lz4_frame(data: bytes, **options: object) -> bytes:
    return lz4.frame.compress(data, **{"block_linked": False, **options})


def changed(data: bytes, place: int, by: int = 0x55) -> bytes:
    mutable = bytearray(data)
    mutable[place] ^= by
    return bytes(mutable)


def false_lz4_size(data: bytes) -> bytes:
    """The content's size in the frame's header is wrong, the header's checksum right."""
    frame = bytearray(lz4_frame(data))
    frame[6:14] = (99).to_bytes(8, "little")
    frame[14] = _lz4_checksum(bytes(frame[4:14]))
    return bytes(frame)


def gzip_with(data: bytes, flags: int, fields: bytes) -> bytes:
    whole = gzip.compress(data, mtime=0)
    return whole[:3] + bytes((flags,)) + whole[4:10] + fields + whole[10:]


def zstd(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def zstd_stream(data: bytes) -> bytes:
    """A frame whose header has no size of the content."""
    made = zstandard.ZstdCompressor().compressobj()
    return made.compress(data) + made.flush()


def deflated(data: bytes) -> bytes:
    return zlib.compress(data)


GZIPPED = {
    "plain": gzip.compress,
    "two members": lambda data: gzip.compress(data[:900]) + gzip.compress(data[900:]),
    "an empty member first": lambda data: gzip.compress(b"") + gzip.compress(data),
    "an empty member last": lambda data: gzip.compress(data) + gzip.compress(b""),
    "stored": lambda data: gzip.compress(data, 0),
    "a name": lambda data: gzip_with(data, 8, b"records\0"),
    "an extra field": lambda data: gzip_with(data, 4, b"\2\0ab"),
    "a comment": lambda data: gzip_with(data, 16, b"why\0"),
    "zeros behind": lambda data: gzip.compress(data) + bytes(8),
    "text behind": lambda data: gzip.compress(data) + b"text behind it",
    "a wrong checksum": lambda data: changed(gzip.compress(data), -8),
    "a wrong size": lambda data: changed(gzip.compress(data), -4),
    "no trailer": lambda data: gzip.compress(data)[:-8],
    "half a trailer": lambda data: gzip.compress(data)[:-4],
    "cut in the middle": lambda data: gzip.compress(data)[:-200],
    "zlib's header": deflated,
}
SNAPPED = {
    "xerial": xerial,
    "raw": raw_snappy,
    "small blocks": lambda data: xerial(data, (7, 300)),
    "other versions": lambda data: xerial(data, versions=bytes((0, 0, 0, 9, 0, 0, 0, 9))),
    "versions of little-endian": lambda data: xerial(data, versions=bytes((1, 0, 0, 0)) * 2),
    "two streams": lambda data: xerial(data[:5000]) + xerial(data[5000:]),
    "a block of no bytes": lambda data: xerial(data) + bytes(4),
    "a byte behind": lambda data: xerial(data) + b"\0",
    "cut in a block": lambda data: xerial(data)[:-5],
}
LZ4ED = {
    "independent": lz4_frame,
    "linked": lambda data: lz4.frame.compress(data, block_linked=True),
    "no size": lambda data: lz4_frame(data, store_size=False),
    "a false size": false_lz4_size,
    "checksum of the content": lambda data: lz4_frame(data, content_checksum=True),
    "a wrong checksum of the content": lambda data: changed(lz4_frame(data, content_checksum=True), -1),
    "checksums of blocks": lambda data: lz4_frame(data, block_checksum=True),
    "a wrong checksum of a block": lambda data: changed(lz4_frame(data, block_checksum=True), -5),
    "a wrong checksum of the header": lambda data: changed(lz4_frame(data, store_size=False), 6),
    "not compressed": lambda data: lz4_frame(data, compression_level=-(1 << 16)),
    "blocks of 4 MiB": lambda data: lz4_frame(data, block_size=lz4.frame.BLOCKSIZE_MAX4MB),
    "two frames": lambda data: lz4_frame(data[:5000]) + lz4_frame(data[5000:]),
    "an empty frame first": lambda data: lz4_frame(b"") + lz4_frame(data),
    "an empty frame last": lambda data: lz4_frame(data) + lz4_frame(b""),
    "zeros behind": lambda data: lz4_frame(data) + bytes(8),
    "a skippable frame first": lambda data: SKIPPABLE + lz4_frame(data),
    "a skippable frame last": lambda data: lz4_frame(data) + SKIPPABLE,
    "no end mark": lambda data: lz4_frame(data)[:-4],
    "half an end mark": lambda data: lz4_frame(data)[:-2],
    "no checksum of the content": lambda data: lz4_frame(data, content_checksum=True)[:-4],
    "half a checksum of the content": lambda data: lz4_frame(data, content_checksum=True)[:-2],
    "no end mark nor checksum": lambda data: lz4_frame(data, content_checksum=True)[:-8],
    "checksums of blocks and no end mark": lambda data: lz4_frame(data, block_checksum=True)[:-4],
    "cut in the middle": lambda data: lz4_frame(data)[:-200],
    "no frame": lz4.block.compress,
}
ZSTDED = {
    "plain": zstd,
    "no size": zstd_stream,
    "a checksum": lambda data: zstd(data, write_checksum=True),
    "a wrong checksum": lambda data: changed(zstd(data, write_checksum=True), -1),
    "level 19": lambda data: zstd(data, level=19),
    "two frames": lambda data: zstd(data[:5000]) + zstd(data[5000:]),
    "two frames without sizes": lambda data: zstd_stream(data[:5000]) + zstd_stream(data[5000:]),
    "an empty frame first": lambda data: zstd(b"") + zstd(data),
    "an empty frame last": lambda data: zstd(data) + zstd(b""),
    "a skippable frame first": lambda data: SKIPPABLE + zstd(data),
    "a skippable frame last": lambda data: zstd(data) + SKIPPABLE,
    "zeros behind": lambda data: zstd(data) + bytes(8),
    "text behind": lambda data: zstd(data) + b"text behind it",
    "a large window": lambda data: zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27)
    ).compress(data),
    "cut in the middle": lambda data: zstd(data)[:-20],
}
CASES = {
    f"{name}: {how}": (codec, change)
    for name, codec, forms in (
        ("gzip", GZIP, GZIPPED),
        ("snappy", SNAPPY, SNAPPED),
        ("lz4", LZ4, LZ4ED),
        ("zstd", ZSTD, ZSTDED),
    )
    for how, change in forms.items()
}
