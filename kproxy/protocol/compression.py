"""The four codecs of record batches, with a bound on the output.

No size claimed by a peer's bytes causes an allocation. Output grows as it is produced, and raises Malformed beyond
MAX_DECOMPRESSED_BYTES (or the caller's own limit). The snappy library allocates the size that its input claims, so it
is called only if the input can really expand to that size. Input that Kafka's own reader accepts is accepted: a
truncated frame is Malformed, bytes after the last frame of gzip or LZ4 are ignored, and so are LZ4's content size and
checksum.

Codecs are identified by their number in batches. Their libraries are imported at first use: a proxy that reads no
records never needs them, and they take 2 MB. Refuses to know records.
"""

import zlib
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

from kproxy.errors import Malformed, TooLarge, Unsupported
from kproxy.protocol.primitives import Buffer, read_uvarint

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

# A broker accepts 1 MiB of compressed batch by default; a batch that becomes 128 MiB is a mistake or an attack.
MAX_DECOMPRESSED_BYTES = 1 << 27

_MAX_FRAMES = 1024  # writers make one; an empty frame costs its reader more than its sender
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_GZIP_OR_ZLIB_WBITS = 32 + zlib.MAX_WBITS
_INT32 = Struct(">i")


def codec_name(codec: int) -> str:
    return CODECS[codec] if 0 <= codec < len(CODECS) else f"unknown_{codec}"


def decompress(codec: int, data: Buffer, *, magic: int = 2, limit_bytes: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """Return `data`, decompressed. Raises Malformed (TooLarge beyond the limit) or Unsupported.

    `magic` is that of the batch: LZ4 in message sets v0 has a wrong header checksum (KAFKA-3160).
    """
    if codec == NONE:
        return bytes(data)
    if codec == LZ4 and magic == 0:
        data = _with_true_lz4_checksum(bytes(data))
    try:
        reader = _READERS[codec]
    except KeyError:
        raise Unsupported(f"compression codec {codec} is not one of {', '.join(CODECS)}") from None
    out: list[bytes] = []
    produced = 0

    def take(piece: bytes) -> int:
        nonlocal produced
        produced += len(piece)
        if produced > limit_bytes:
            raise TooLarge(f"{len(data)} bytes of {CODECS[codec]} become more than the {limit_bytes} bytes allowed")
        out.append(piece)
        return limit_bytes - produced

    try:
        reader(bytes(data), take, limit_bytes)
    except (zlib.error, RuntimeError, EOFError) as fault:
        raise Malformed(f"the {CODECS[codec]} data does not decompress: {fault}") from None
    return b"".join(out)


def compress(codec: int, data: bytes, *, magic: int = 2) -> bytes:
    """Compress `data`, framed as Kafka's Java client does. Raises Unsupported.

    LZ4 in message sets v0 gets the wrong checksum that its readers expect (KAFKA-3160).
    """
    if codec == NONE:
        return data
    if codec == GZIP:
        return zlib.compress(data, wbits=_GZIP_WBITS)
    if codec == SNAPPY:
        import snappy

        blocks = (snappy.compress(data[at : at + _XERIAL_BLOCK]) for at in range(0, len(data), _XERIAL_BLOCK))
        return _XERIAL_HEADER + b"".join(_INT32.pack(len(block)) + block for block in blocks)
    if codec == LZ4:
        import lz4.frame

        frame: bytes = lz4.frame.compress(data, block_linked=False, store_size=False)
        return _with_false_lz4_checksum(frame) if magic == 0 else frame
    if codec == ZSTD:
        import zstandard

        return zstandard.ZstdCompressor(write_content_size=False).compress(data)
    raise Unsupported(f"compression codec {codec} is not one of {', '.join(CODECS)}")


Take = Callable[[bytes], int]  # takes a piece of output, returns the number of bytes still allowed


class _Frame(NamedTuple):
    decompressor: Any
    header_bytes: int = 0  # bytes that the decompressor already has, or does not need
    trailer_bytes: int = 0  # bytes after the end that it detects


def _reader_of_frames(
    begin: Callable[[memoryview], _Frame],
    expansion: int,
    follows: Callable[[memoryview], bool] | None = None,
    is_whole: Callable[[memoryview], bool] | None = None,
) -> Callable[[Buffer, Take, int], None]:
    """Return a reader of one or more concatenated frames.

    One byte of this codec expands to at most `expansion` bytes, so input is passed in slices that cannot exceed the
    limit. `follows`: whether the bytes after a frame are another one; they are ignored if not. `is_whole`: whether a
    last frame without its end has all of its content.
    """

    def read(data: Buffer, take: Take, left: int) -> None:
        view, pos = memoryview(data), 0
        for _ in range(_MAX_FRAMES):
            decompressor, header_bytes, trailer_bytes = begin(view[pos:])
            start, pos = pos, pos + header_bytes
            while not decompressor.eof:
                if pos >= len(view):
                    if is_whole is not None and is_whole(view[start:]):
                        take(decompressor.decompress(_LZ4_END_MARK))  # flushes the output that it holds back
                        return
                    raise EOFError("it is cut short")
                step = max(64, left // expansion)
                left = take(decompressor.decompress(view[pos : pos + step]))
                pos += step
            pos = min(pos, len(view)) - len(decompressor.unused_data or b"") + trailer_bytes
            if pos >= len(view) or (follows is not None and not follows(view[pos:])):
                return
        raise Malformed(f"more than {_MAX_FRAMES} frames, or bytes after the last one")

    return read


# ---------------------------------------------------------------------------------------------------------------- gzip

_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_LEAST = 18  # a header and a trailer; Java's GZIPInputStream does not look for a member in so few bytes


def _gzip_member(rest: memoryview) -> _Frame:
    """Start a decompressor that also accepts zlib's header, as librdkafka does."""
    return _Frame(zlib.decompressobj(_GZIP_OR_ZLIB_WBITS))


def _gzip_follows(rest: memoryview) -> bool:
    return len(rest) > _GZIP_LEAST and rest[:3] == _GZIP_MAGIC


# -------------------------------------------------------------------------------------------------------------- snappy

# The framing of xerial's snappy-java: this header, then blocks of a size (int32) and raw snappy. The header may recur
# between blocks if streams were joined. Clients in other languages often send one raw block instead.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + _INT32.pack(1) * 2
_XERIAL_BLOCK = 32 * 1024


def _snappy(data: bytes, take: Take, left: int) -> None:
    if not data.startswith(_XERIAL_MAGIC):
        take(_snappy_block(data, left))
        return
    pos, end = 0, len(data)
    while pos < end:
        if data.startswith(_XERIAL_MAGIC, pos):
            pos += len(_XERIAL_HEADER)
            continue
        if end - pos < 4:  # no size: snappy-java takes it for the end
            return
        (size,) = _INT32.unpack_from(data, pos)
        pos += 4
        if not 0 <= size <= end - pos:
            raise Malformed(f"a snappy block of {size} bytes where {end - pos} are left")
        left = take(_snappy_block(data[pos : pos + size], left))
        pos += size
    if pos > end:
        raise EOFError("it is cut short")


def _snappy_block(block: bytes, left: int) -> bytes:
    """Decompress a block; checks its claimed size first, as the library allocates it: 3 bytes expand to 64 at most."""
    import snappy

    claimed, _ = read_uvarint(block, 0)
    if claimed * 3 > len(block) * 64:
        raise Malformed(f"{len(block)} bytes of snappy cannot become the {claimed} bytes that they claim")
    if claimed > left:
        raise TooLarge(f"{len(block)} bytes of snappy become {claimed} bytes where {left} are allowed")
    try:
        plain: bytes = snappy.uncompress(block)
    except snappy.UncompressError:
        raise Malformed(f"a snappy block of {len(block)} bytes does not decompress") from None
    return plain


# ----------------------------------------------------------------------------------------------------------------- lz4

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_LZ4_END_MARK = bytes(4)
_LZ4_MAX_HEADER = 19
_LZ4_BLOCK_CHECKSUM, _LZ4_CONTENT_SIZE, _LZ4_CONTENT_CHECKSUM = 0x10, 0x08, 0x04
_LZ4_MAX_BLOCKS = 1 << 16  # limit of the search; Kafka's own blocks have 64 KiB


def _lz4_frame(rest: memoryview) -> _Frame:
    """Start a decompressor without the content's size and checksum in its header, which Kafka's reader ignores."""
    import lz4.frame

    decompressor = lz4.frame.LZ4FrameDecompressor()
    head = bytes(rest[:_LZ4_MAX_HEADER])
    end = _lz4_descriptor_end(head)
    flags = head[4]
    if not flags & (_LZ4_CONTENT_SIZE | _LZ4_CONTENT_CHECKSUM):
        return _Frame(decompressor)
    if head[end] != _lz4_checksum(head[4:end]):
        raise Malformed("the lz4 frame's header has a wrong checksum")
    descriptor = bytes((flags & ~(_LZ4_CONTENT_SIZE | _LZ4_CONTENT_CHECKSUM), head[5]))
    descriptor += head[14 if flags & _LZ4_CONTENT_SIZE else 6 : end]  # the dictionary id
    decompressor.decompress(_LZ4_MAGIC + descriptor + bytes((_lz4_checksum(descriptor),)))
    return _Frame(decompressor, end + 1, 4 if flags & _LZ4_CONTENT_CHECKSUM else 0)


def _lz4_is_whole(frame: memoryview) -> bool:
    """Whether a frame without its complete end mark has all of its blocks: librdkafka reads such a frame."""
    head = bytes(frame[:_LZ4_MAX_HEADER])
    checksum_bytes = 4 if head[4] & _LZ4_BLOCK_CHECKSUM else 0
    pos = _lz4_descriptor_end(head) + 1
    for blocks in range(_LZ4_MAX_BLOCKS):
        if pos + 4 > len(frame):
            return blocks > 0 and pos <= len(frame) and not any(frame[pos:])
        size = int.from_bytes(frame[pos : pos + 4], "little") & 0x7FFF_FFFF  # the highest bit marks uncompressed blocks
        pos += 4 + size + checksum_bytes
    return False


def _lz4_follows(rest: memoryview) -> bool:
    return rest[:4] == _LZ4_MAGIC


def _lz4_descriptor_end(frame: bytes) -> int:
    """Return the offset of the header's checksum byte, after the flags, the block size and the optional fields."""
    if len(frame) < 7 or not frame.startswith(_LZ4_MAGIC):
        raise Malformed("the lz4 data does not begin with a frame")
    flags = frame[4]
    end = 6 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
    if end >= len(frame):
        raise Malformed("the lz4 frame's header is cut short")
    return end


def _with_true_lz4_checksum(frame: bytes) -> bytes:
    """Correct the header checksum of message sets v0, which also covers the magic (KAFKA-3160)."""
    end = _lz4_descriptor_end(frame)
    return frame[:end] + bytes((_lz4_checksum(frame[4:end]),)) + frame[end + 1 :]


def _with_false_lz4_checksum(frame: bytes) -> bytes:
    end = _lz4_descriptor_end(frame)
    return frame[:end] + bytes((_lz4_checksum(frame[:end]),)) + frame[end + 1 :]


def _lz4_checksum(descriptor: bytes) -> int:
    """Return the checksum byte of a frame's header."""
    return _xxh32(descriptor) >> 8 & 0xFF


def _xxh32(data: bytes) -> int:
    """Return xxHash32, seed 0, of fewer than sixteen bytes, such as a frame's header."""
    mask, pos, size = 0xFFFFFFFF, 0, len(data)
    prime1, prime2, prime3, prime4, prime5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1
    value = prime5 + size & mask
    while pos <= size - 4:
        value = _rotate(value + int.from_bytes(data[pos : pos + 4], "little") * prime3 & mask, 17) * prime4 & mask
        pos += 4
    while pos < size:
        value = _rotate(value + data[pos] * prime5 & mask, 11) * prime1 & mask
        pos += 1
    value = (value ^ value >> 15) * prime2 & mask
    value = (value ^ value >> 13) * prime3 & mask
    return value ^ value >> 16


def _rotate(value: int, by: int) -> int:
    return (value << by | value >> 32 - by) & 0xFFFFFFFF


# ---------------------------------------------------------------------------------------------------------------- zstd


def _zstd_frame(rest: memoryview) -> _Frame:
    import zstandard

    # The default window limit of Java's reader.
    return _Frame(zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj())


_zstd_frames = _reader_of_frames(_zstd_frame, 1 << 15)  # a block of four bytes becomes 128 KiB


def _zstd(data: bytes, take: Take, left: int) -> None:
    import zstandard

    try:
        _zstd_frames(data, take, left)
    except zstandard.ZstdError as fault:
        raise RuntimeError(str(fault)) from None


_READERS: dict[int, Callable[[bytes, Take, int], None]] = {
    GZIP: _reader_of_frames(_gzip_member, 1032, _gzip_follows),
    SNAPPY: _snappy,
    LZ4: _reader_of_frames(_lz4_frame, 255, _lz4_follows, _lz4_is_whole),
    ZSTD: _zstd,
}
