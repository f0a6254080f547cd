"""The source of a capture's bytes: a file, a compressed file, standard input, a file that still grows.

Duty: `Bytes.read` returns the plain bytes in pieces, decompressed if necessary, in bounded memory; `storage` opens the
file. A compressed stream that ends early is cut there and marked so; it never raises for that.

Refuses to know what the bytes mean.
"""

import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from kproxy.capture.formats.storage import LOCAL, STDIN, Remote, Storage, local_path, near
from kproxy.errors import CaptureError

LEAST_CAPTURE = 24  # bytes: the header of a pcap file


class _Counted(io.RawIOBase):
    """The file below a decompressor: counts what was read, and waits at the end of a file that still grows."""

    def __init__(self, file: BinaryIO, head: bytes, path: str, waiting: Callable[[], bool] | None) -> None:
        self.consumed = 0
        self.is_replaced = False  # read to its end, and another file has its name now
        self._path = path
        self._file = file
        # read1: the bytes in a pipe, without waiting for more
        self._read: Callable[[int], bytes] = getattr(file, "read1", file.read)
        self._head = head
        self._waiting = waiting

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        """The plain way, without the copies that io's own makes of readinto."""
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
        else:
            data = self._read(size)
            while not data and not self.is_replaced and self._waiting is not None and self._waiting():
                if self._is_shorter():
                    raise OSError("another program has cut the file while it was followed")
                has_successor = self._has_successor()  # asked first: its writer has finished this file then
                data = self._read(size)
                self.is_replaced = has_successor and not data
        self.consumed += len(data)
        return data

    def _is_shorter(self) -> bool:
        """Whether a file, rather than a pipe or a device, ends before what was read of it."""
        if not isinstance(self._file, io.FileIO):
            return False
        status = os.fstat(self._file.fileno())
        return stat.S_ISREG(status.st_mode) and status.st_size < self.consumed

    def _has_successor(self) -> bool:
        """Whether another file has the name of this one, with the header of a capture, as after a rotation."""
        if not isinstance(self._file, io.FileIO):
            return False
        try:
            other = Path(local_path(self._path)).stat()
        except OSError:  # not yet
            return False
        return other.st_size >= LEAST_CAPTURE and not os.path.samestat(other, os.fstat(self._file.fileno()))

    def mapped(self) -> mmap | None:
        if self._waiting is not None or not isinstance(self._file, io.FileIO):
            return None
        try:
            return mmap(self._file.fileno(), 0, access=ACCESS_READ)
        except (OSError, ValueError):  # a pipe, a device, an empty file
            return None

    def length(self) -> int:
        return self._file.length if isinstance(self._file, Remote) else os.fstat(self._file.fileno()).st_size

    @property
    def is_remote(self) -> bool:
        return isinstance(self._file, Remote)

    @property
    def peek(self) -> Callable[[int, int], bytes]:
        return partial(os.pread, self._file.fileno())

    def peek_into(self, room: memoryview, position: int) -> int:
        if isinstance(self._file, Remote):
            return self._file.peek_into(room, position)
        return os.preadv(self._file.fileno(), [room], position)

    def go_to(self, position: int) -> None:
        self._file.seek(position)
        self._head = b""
        self.consumed = position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class Source(Protocol):
    """The interface of a file's plain bytes for readers of captures."""

    name: str
    cut: str

    def read(self, count: int) -> bytes: ...


class Bytes:
    """The plain bytes of one file. `size` and `consumed` count the file's own bytes, compressed or not."""

    def __init__(
        self,
        path: Path | str,
        *,
        follow: Callable[[], bool] | None = None,
        storage: Storage = LOCAL,
        stop: int = 0,
    ) -> None:
        """stop: as `Storage.open` has it."""
        self.name = str(path)
        self.cut = ""  # why the stream ended before its end, if it did
        try:
            if self.name == STDIN:
                file = cast(BinaryIO, sys.stdin.buffer)
                self.size = 0  # not known
            else:
                file = storage.open(path, stop)
                self.size = storage.size(path)
        except OSError as fault:
            fix = near(path) if isinstance(fault, FileNotFoundError) else ""
            raise CaptureError(self.name, f"cannot be opened: {fault.strerror or fault}{fix}") from None
        head = b""
        try:
            while len(head) < 4 and (more := file.read(4 - len(head))):
                head += more
        except OSError as fault:
            raise CaptureError(self.name, f"cannot be read: {fault.strerror or fault}") from fault
        self._counted = _Counted(file, head, self.name, follow)
        self._unpacked = _decompress(head, self._counted)

    @property
    def consumed(self) -> int:
        return self._counted.consumed

    @property
    def is_replaced(self) -> bool:
        """Whether the file was followed until another one had its name."""
        return self._counted.is_replaced

    def mapped(self) -> mmap | None:
        """The bytes as memory, where they lie in a plain file that does not grow."""
        return None if self._unpacked else self._counted.mapped()

    @property
    def is_remote(self) -> bool:
        """Whether they lie in a storage, as they are: `peek_into` and `go_to` are at hand, and nothing is mapped."""
        return self._unpacked is None and self._counted.is_remote

    def length(self) -> int:
        """How long a mapped file is now, or one of a storage."""
        return self._counted.length()

    @property
    def peek(self) -> Callable[[int, int], bytes]:
        """Reads so many bytes of a mapped file, from a position on."""
        return self._counted.peek

    def peek_into(self, room: memoryview, position: int) -> int:
        """Fills `room` with what a mapped file has from a position on; how much that was."""
        return self._counted.peek_into(room, position)

    def go_to(self, position: int) -> None:
        """What lies before is read; a mapped file's next bytes are those at `position`."""
        self._counted.go_to(position)

    def read(self, count: int) -> bytes:
        """At most `count` bytes; b"" at the end."""
        if self.cut:
            return b""
        try:
            data = (self._unpacked or self._counted).read(count) or b""
        except OSError as fault:
            self.cut = str(fault)
            return b""
        if not data and self._unpacked is not None:
            self.cut = self._unpacked.cut
        return data

    def close(self) -> None:
        self._counted.close()


class _Unpacked:
    """The plain bytes of a compressed stream, member after member: all that there are before it ends or breaks.

    How much a member's reader makes of one piece is bounded by the piece and the format.
    """

    def __init__(self, raw: _Counted, begin: Callable[[], Any], fault: type[Exception], piece: int) -> None:
        self.cut = ""
        self._raw = raw
        self._begin = begin  # a reader of one member, with decompress(), eof and unused_data
        self._fault = fault  # what it raises
        self._piece = piece
        self._plain = bytearray()
        self._pieces = self._unpack()

    def read(self, count: int) -> bytes:
        """Return `count` bytes, fewer only at the end; then `cut` is whether the file ends too early."""
        plain = self._plain
        while len(plain) < count:
            try:
                piece = next(self._pieces, None)
            except (OSError, self._fault) as fault:
                self.cut = str(fault)
                if "too much memory" in self.cut:  # of a zstd stream
                    self.cut += ": unpack it first, with `zstd -d --long=31`"
                piece = None
            if piece is None:
                break
            plain += piece
        data = bytes(plain[:count])
        del plain[:count]
        return data

    def _unpack(self) -> Iterator[bytes]:
        member: Any = None
        packed = b""
        while packed or (packed := self._raw.read(self._piece)):
            if member is None:
                packed = packed.lstrip(b"\0")  # as gzip does: tapes and block devices pad
                if not packed:
                    continue
                member = self._begin()
            yield member.decompress(packed)
            packed = b""
            if member.eof:
                packed = member.unused_data or b""
                member = None
        if member is not None:
            self.cut = "the compressed stream ends early"


def _decompress(head: bytes, raw: _Counted) -> _Unpacked | None:
    """The decompressor for a file that begins with `head`; None for a plain one."""
    if head[:2] == b"\x1f\x8b":
        return _Unpacked(raw, lambda: zlib.decompressobj(wbits=31), zlib.error, 1 << 14)  # 16 MiB of it at most
    if head == b"\x28\xb5\x2f\xfd" or head[1:] == b"\x2a\x4d\x18":  # pzstd begins with a frame to be skipped
        import zstandard

        unpack = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
        # four bytes may stand for a block of 128 KiB: 16 MiB of it at most
        return _Unpacked(raw, unpack, zstandard.ZstdError, 1 << 9)
    if head == b"\x04\x22\x4d\x18":
        import lz4.frame

        return _Unpacked(raw, lz4.frame.LZ4FrameDecompressor, RuntimeError, 1 << 14)  # 4 MiB at most
    return None
