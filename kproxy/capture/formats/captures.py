"""Capture files as packet records, in the order of the file, in bounded memory.

Duty: `Capture` reads a file, or rotated files one after the other, in windows; the first bytes of a file choose
its reader. Memory: one window of 512 KiB and the records in it, or one record if that is larger; plain files of
classic pcap are read by column instead (columns/mapped.py).

A file that ends inside a record, and an implausible record header, are flaws of the capture, not errors: they are
counted, and reading resumes at the next chain of plausible records. Only a file that is no capture raises
`CaptureError`.

Refuses to know what is in a packet.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from math import inf
from pathlib import Path
from struct import Struct

from kproxy.capture.formats import files
from kproxy.capture.formats.pcap import CLASSIC, HEADER_BYTES, LINK_MASK, Classic
from kproxy.capture.formats.pcapng import Sections
from kproxy.capture.formats.records import Window
from kproxy.capture.formats.storage import LOCAL, STDIN, Storage
from kproxy.capture.quality import Quality
from kproxy.errors import CaptureError

SECTION = b"\x0a\x0d\x0d\x0a"
MAGIC = frozenset((*CLASSIC, SECTION))  # how plain captures begin


class Capture:
    """One capture: a file, or rotated files one after the other. Iterate `windows()` once."""

    def __init__(
        self,
        paths: Sequence[Path | str],
        quality: Quality,
        *,
        follow: Callable[[], bool] | None = None,
        storage: Storage = LOCAL,
    ) -> None:
        self.quality = quality
        self.paths = list(paths)
        self.size = sum(_size(path, storage) for path in paths if str(path) != STDIN)
        self._storage = storage
        self._follow = follow
        self.secrets: list[bytes] = []  # TLS key logs that a pcapng file carries
        self._before = 0
        self._bytes: files.Bytes | None = None

    @property
    def consumed(self) -> int:
        """Bytes of the files read so far, for a progress bar; compressed bytes of compressed files."""
        return self._before + (self._bytes.consumed if self._bytes else 0)

    def windows(self) -> Generator[Window, None, None]:
        """Windows of all files; with `follow` also of the files that replace the last one under its name."""
        for path in self.paths[:-1]:
            yield from self._windows(path, None)
        is_replaced = bool(self.paths)
        while is_replaced:
            is_replaced = yield from self._windows(self.paths[-1], self._follow)

    def _windows(self, path: Path | str, follow: Callable[[], bool] | None) -> Generator[Window, None, bool]:
        """Windows of a file; returns whether another file replaced it under its name."""
        source = self._bytes = files.Bytes(path, follow=follow, storage=self._storage)
        try:
            before = self.quality.count("cut_file")
            yield from windows_of(source, self.quality, self.secrets)
            if source.cut and self.quality.count("cut_file") == before:
                self.quality.note("cut_file")  # between two records
        finally:
            source.close()
        self._before += source.consumed
        self._bytes = None
        return source.is_replaced


def in_time(paths: Sequence[str], storage: Storage = LOCAL) -> list[str]:
    """Files of one capture in the order of their first packets: `tcpdump -C` does not pad the numbers in names."""
    # anything but a file, like a pipe, can be read only once
    if not all(map(storage.is_file, paths)):
        return list(paths)
    return sorted(paths, key=lambda path: _begin_ns(path, storage))


def _begin_ns(path: str, storage: Storage) -> float:
    """The time of a file's first packet; infinite for a file without packets and for one that is no capture."""
    windows = Capture([path], Quality(), storage=storage).windows()
    try:
        return next((window.records[0][0] for window in windows), inf)
    except CaptureError:
        return inf
    finally:
        windows.close()


def _size(path: Path | str, storage: Storage) -> int:
    """The size of a file, 0 if it cannot be read: opening it raises the error that names the reason."""
    try:
        return storage.size(path)
    except (OSError, CaptureError):
        return 0


def windows_of(
    source: files.Source, quality: Quality, secrets: list[bytes], begin: int = HEADER_BYTES, end: int = 0
) -> Iterator[Window]:
    """The records of one file, whose first bytes name its format. Raises CaptureError if it is no capture.

    begin, end: offsets to begin and stop reading at, in an uncompressed pcap file: records begin there.
    """
    head = _exactly(source, 4)
    if head in CLASSIC:
        order, unit = CLASSIC[head]
        rest = _exactly(source, 20)
        if len(rest) < 20:
            raise CaptureError(source.name, "a pcap file that ends inside its header: there is nothing to read", 4)
        snap, link = Struct(order + "12xII").unpack(rest)
        if isinstance(source, files.Bytes) and ((held := source.mapped()) is not None or source.is_remote):
            from kproxy.capture.columns.mapped import Mapped  # numpy, which `kproxy decode` has no need of

            return Mapped(source, held, quality, order, unit, link & LINK_MASK, snap, end).windows(begin)
        return Classic(source, quality, order, unit, link & LINK_MASK, snap).windows()
    if head == SECTION:
        return Sections(source, quality, head, secrets).windows()
    if not head:
        cause = f"no byte of it can be read: {source.cut}" if source.cut else "the file is empty"
        raise CaptureError(source.name, cause)
    raise CaptureError(source.name, _what_is(head), 0)


def _what_is(head: bytes) -> str:
    known = {
        b"\x34\xcd\xb2\xa1": "a pcap file in Kuznetzov's modified format",
        b"\xa1\xb2\xcd\x34": "a pcap file in Kuznetzov's modified format",
        b"snoo": "a snoop file",
    }
    packed = {b"PK\x03\x04": "a zip archive", b"\xfd7zX": "an xz file"}
    packed |= {b"BZh%d" % level: "a bzip2 file" for level in range(1, 10)}
    if head in known:
        return f"{known[head]}, not read yet: convert it with `editcap -F pcapng`"
    if head in packed:
        return f"{packed[head]}, not read: unpack it, or pack it with gzip, zstd or lz4"
    return f"no capture file (it begins with {head.hex(' ')}): pcap or pcapng is needed, plain, gzip, zstd or lz4"


def _exactly(source: files.Source, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := source.read(count - len(data))):
        data += more
    return data
