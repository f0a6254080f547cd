"""Access to captures: local files, or a remote storage that fsspec supports (s3, webhdfs, gs, abfs, ...).

Duty: all operations that readers of captures need: list the captures of a path, folder or pattern; a file's size, its
first bytes, and its bytes in order. Local files are opened as usual. A remote storage is read in ranges of RANGE_BYTES,
from beginning to end, so that a capture is read once, with few requests.

Memory: two ranges of each open file. Work: a request for each RANGE_BYTES. If the storage refuses a request or fails, a
CaptureError is raised, or a StorageError if the failure may be temporary: it never counts as the capture's end. Refuses
to know the meaning of the bytes.
"""

import io
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from errno import EACCES
from functools import partial
from glob import has_magic, iglob
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from kproxy.errors import CaptureError, KproxyError, StorageError, install_command

STDIN = "-"
RANGE_BYTES = 8 << 20
FIRST_BYTES = 64 << 10  # the first range of a part of a file; each further range is twice as long
BEHIND_BYTES = 1 << 10  # bytes read behind a part's end, since record headers are checked many at a time
SILENCE_S = 60.0  # timeout of a WebHDFS server without a response; the same as that of S3
MOST_FILES = 1_000_000  # most files that one folder or pattern may have
MOST_LOOKED_AT = 10_000  # names below a folder that are searched for a remedy
_MAX_COMPARED = 10_000  # names that are compared with a mistyped one

# .pcap7: as tcpdump -C writes. The last three cannot be read, but an error is better than ignoring them.
_CAPTURE = re.compile(r"\.(?:pcap|pcapng|cap)\d*(?:\.(?:gz|zst|lz4|bz2|xz|zip))?$", re.IGNORECASE)
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_HTTP = re.compile(r"^https?://", re.IGNORECASE)
_WORDS = re.compile(r"key|secret|token|user|pass|account|name", re.IGNORECASE)  # options that stay text, even if digits
_HADOOP = {"s3a": "s3", "s3n": "s3", "wasbs": "abfs", "abfss": "abfs"}  # Hadoop's name -> fsspec's


def near(path: Path | str) -> str:
    """The end of a message about a missing file: a file next to it with a similar name, or nothing."""
    folder, name = os.path.split(os.fspath(path))
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in islice(entries, _MAX_COMPARED)]
    except OSError:
        return f", nor a folder {folder}" if folder and not os.path.isdir(folder) else ""  # noqa: PTH112
    found = get_close_matches(name, names, 1, 0.7)
    return f": did you mean {os.path.join(folder, found[0])}?" if found else ""  # noqa: PTH118


def is_capture(path: str) -> bool:
    """Whether a name has the ending of a capture."""
    return _CAPTURE.search(path) is not None


def is_remote(path: str | Path) -> bool:
    """Whether a path is the URL of a remote storage."""
    found = _SCHEME.match(str(path))
    return found is not None and found[1].lower() != "file"


def local_path(path: str | Path) -> str:
    """A local path without the `file://` that some tools put before it."""
    return re.sub(r"^file:(//)?(?=/)", "", str(path), flags=re.IGNORECASE)


def name_of(path: str) -> str:
    """The last part of a path or URL; bytes that are not UTF-8 are escaped.

    A URL's query is removed: it is no name, and may be a signature that gives everybody access to the file.
    """
    if _HTTP.match(path):
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    return os.fsencode(path.rstrip("/").rsplit("/", 1)[-1]).decode(errors="backslashreplace")


def shown(path: str) -> str:
    """A path or URL for messages, without possible secrets: the password and the query."""
    if not is_remote(path):
        return path
    if _HTTP.match(path):
        path = re.sub(r"\?[^#]*", "?...", path, count=1)
    return re.sub(r"^([^/]*//[^/@:]*):[^/]*@", r"\1:...@", path)


@dataclass(frozen=True)
class Storage:
    """Access to storages. options: those of fsspec's file system (key, secret, endpoint_url, user, ...), as text."""

    options: tuple[tuple[str, str], ...] = ()

    def open(self, path: str | Path, stop: int = 0) -> BinaryIO:
        """Open a file at its beginning. Raises OSError for local files, CaptureError for a remote storage.

        stop: the end of the part that the caller reads; little beyond this offset is requested from a storage.
        """
        if not is_remote(path):
            return Path(local_path(path)).open("rb", buffering=0)
        return Remote(self, str(path), stop)  # type: ignore[return-value]

    def size(self, path: str | Path) -> int:
        """Bytes of a file; raises as `open`."""
        if not is_remote(path):
            return Path(local_path(path)).stat().st_size
        with _as_capture_errors(str(path)):
            system, place = self._system(str(path))
            return int(system.size(place) or 0)

    def seen(self, path: str) -> tuple[int, int]:
        """Size of a file and time of its last change, in ns; 0: files appear complete, as in S3. Raises as `open`."""
        if not is_remote(path):
            seen = Path(local_path(path)).stat()
            return seen.st_size, seen.st_mtime_ns
        with _as_capture_errors(path):
            system, place = self._system(path)
            info = system.info(place)
            return int(info["size"] or 0), 1_000_000 * int(info.get("modificationTime", 0))  # of WebHDFS, in ms

    def is_file(self, path: str) -> bool:
        """Whether it is an existing file that can be read repeatedly: no pipe and no folder."""
        if path == STDIN:
            return False
        if not is_remote(path):
            return os.path.isfile(local_path(path))  # noqa: PTH113 - raises never
        with _as_capture_errors(path):
            system, place = self._system(path)
            return bool(system.isfile(place))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` to `stop`, or to its end; raises as `open`."""
        if not is_remote(path):
            with Path(local_path(path)).open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        with _as_capture_errors(path):
            system, place = self._system(path)
            return bytes(system.cat_file(place, start=start, end=stop)) if stop > start else b""

    def captures(self, path: str) -> list[str]:
        """The captures of a path: a file, the files of a folder with names of captures, or those of a pattern.

        An existing name is taken literally, even if it has characters of a pattern. Raises KproxyError for a folder
        without captures and a pattern without matches.
        """
        return sorted(self.listed(path))

    def listed(self, path: str) -> Iterator[str]:
        """The result of `captures`, unordered; local files one by one."""
        if path == STDIN:
            yield path
            return
        for count, file in enumerate(self._remote(path) if is_remote(path) else _local(local_path(path))):
            if count >= MOST_FILES:
                raise KproxyError(f"{shown(path)}: more than {MOST_FILES:,} files; name folders or patterns with fewer")
            yield file

    def _remote(self, path: str) -> list[str]:
        with _as_capture_errors(path):
            system, place = self._system(path)
            if has_magic(path) and not system.exists(place):
                found = [file for file in system.glob(place) if not system.isdir(file)]
                if not found:
                    raise KproxyError(f"{shown(path)}: no file matches this pattern")
                return list(map(_spelled_as(path), found))
            if not system.isdir(place):
                return [path]
            found = [entry["name"] for entry in system.ls(place, detail=True) if entry["type"] == "file"]
        captures = list(map(_spelled_as(path), filter(is_capture, found)))
        if not captures:
            raise KproxyError(_no_captures(path))
        return captures

    @contextmanager
    def here(self, paths: Sequence[str]) -> Iterator[list[str]]:
        """Local paths of files, for programs without access to storages; remote files are copied for the duration."""
        if not any(map(is_remote, paths)):
            yield [path if path == STDIN else local_path(path) for path in paths]
            return
        with TemporaryDirectory(prefix="kproxy-") as folder:
            copies = []
            for number, path in enumerate(paths):
                copy = Path(folder) / f"{number}-{name_of(path)}"
                with self.open(path) as file, copy.open("wb") as target:
                    shutil.copyfileobj(file, target, RANGE_BYTES)
                copies.append(str(copy))
            yield copies

    def _system(self, path: str) -> tuple[Any, str]:
        """fsspec's file system for a URL, and the file's name there."""
        found = _SCHEME.match(path)
        assert found is not None
        scheme = found[1].lower()
        known = _HADOOP.get(scheme, scheme)
        try:
            import fsspec
        except ModuleNotFoundError:
            raise KproxyError(f"{shown(path)}: {scheme}:// needs fsspec: {install_command('storage')}") from None
        try:
            kind = fsspec.get_filesystem_class(known)
        except ValueError:
            raise KproxyError(
                f"{shown(path)}: there is no storage {scheme}://; fsspec knows s3, gs, abfs, webhdfs"
            ) from None
        except ImportError as fault:
            raise KproxyError(f"{shown(path)}: {fault}") from None  # it names the package
        url = known + path[len(found[1]) :]
        # the URL's host and port override options; listings are not cached, since the folder may change
        options = {"use_listings_cache": False, **_typed(dict(self.options)), **kind._get_kwargs_from_urls(url)}
        system = kind(**options)
        if known == "webhdfs":  # `requests` has no default timeout; the packages of other storages have one
            system.session.request = partial(system.session.request, timeout=SILENCE_S)
        return system, kind._strip_protocol(url)


LOCAL = Storage()


def options_of(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse options of the form KEY=VALUE; raises KproxyError for any other form."""
    pairs = []
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise KproxyError(f"--storage-option {word}: KEY=VALUE is needed, like endpoint_url=http://minio:9000")
        pairs.append((key, value))
    return tuple(pairs)


class Remote(io.RawIOBase):
    """One file of a remote storage, read in ranges; `requested_bytes`: bytes requested so far.

    stop: see `Storage.open`; with it the first ranges are small, since a reader may need only the file's header before
    it seeks.
    """

    def __init__(self, storage: Storage, path: str, stop: int = 0) -> None:
        self.name = path
        self.length = storage.size(path)
        self._stop = min(self.length, stop + BEHIND_BYTES) if stop else self.length
        self._range_bytes = FIRST_BYTES if stop else RANGE_BYTES
        self.requested_bytes = 0
        self._storage = storage
        self._ranges: list[tuple[int, bytes]] = []  # the last two: readers seek back to an incomplete record
        self._place = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._at(self._place, self.length - self._place if size < 0 else size)
        self._place += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def peek_into(self, room: memoryview, position: int) -> int:
        """Fill `room` with the bytes from `position` on; return their number."""
        filled = 0
        while filled < len(room) and (data := self._at(position + filled, len(room) - filled)):
            room[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        assert whence == os.SEEK_SET
        self._place = position
        return position

    def tell(self) -> int:
        return self._place

    def _at(self, position: int, count: int) -> bytes:
        """At most `count` bytes, from a kept range or a new one."""
        for begin, data in reversed(self._ranges):
            if 0 <= position - begin < len(data):
                return data[position - begin : position - begin + count]
        stop = min(self._stop, position + self._range_bytes)
        self._range_bytes = min(2 * self._range_bytes, RANGE_BYTES)
        if position >= stop or not count:
            return b""
        data = self._storage.read(self.name, position, stop)
        if len(data) < stop - position:
            raise StorageError(
                shown(self.name), "the storage gave fewer bytes than the file has: did it change?", position
            )
        self._ranges = [*self._ranges[-1:], (position, data)]
        self.requested_bytes += len(data)
        return data[:count]


@contextmanager
def _as_capture_errors(path: str) -> Iterator[None]:
    """Raise any exception of a storage's package as a CaptureError."""
    try:
        yield
    except KproxyError:
        raise
    except FileNotFoundError:
        raise CaptureError(shown(path), "cannot be opened: there is no such file in the storage") from None
    except PermissionError as fault:
        raise CaptureError(shown(path), f"cannot be opened: the storage refuses: {_first_line(fault)}") from fault
    except Exception as fault:  # each package has errors of its own
        if isinstance(fault, TypeError) and (wrong := re.search(r"unexpected keyword argument '(\w+)'", str(fault))):
            raise CaptureError(shown(path), f"its storage knows no option {wrong[1]} (--storage-option)") from fault
        raise StorageError(
            shown(path), f"the storage cannot be read: {type(fault).__name__}: {_first_line(fault)}"
        ) from fault


def _first_line(fault: BaseException) -> str:
    return str(fault).strip().partition("\n")[0]


def _typed(options: Mapping[str, str]) -> dict[str, Any]:
    """Options as file systems take them: flags and numbers are no text; `client_kwargs.region_name` is of a group."""
    whole: dict[str, Any] = {}
    for key, value in options.items():
        *groups, name = key.split(".")
        inner = whole
        for group in groups:
            inner = inner.setdefault(group, {})
        flag = None if _WORDS.search(name) else {"true": True, "false": False}.get(value.lower())
        is_number = re.fullmatch(r"\d{1,9}", value) and not _WORDS.search(name)
        inner[name] = flag if flag is not None else int(value) if is_number else value
    return whole


def _local(path: str) -> Iterator[str]:
    none = f"{shown(path)}: no file matches this pattern"
    if os.path.isdir(path):  # noqa: PTH112 - raises never
        folder = str(Path(path))
        none = _no_captures(path)
        before = "" if folder == "." else os.path.join(folder, "")  # noqa: PTH118 - a Path keeps each name for good
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if is_capture(entry.name) and entry.is_file():
                        none = ""
                        yield before + entry.name
        except OSError as fault:
            raise CaptureError(path, f"cannot be opened: {fault.strerror}") from fault
        none = none and none + _below(folder)
    elif has_magic(path) and not os.path.lexists(path):  # as a shell hands it on where nothing matches, or in quotes
        for file in iglob(path, recursive=True):  # noqa: PTH207 - links stay; ** as in storages
            if not os.path.isdir(file):  # noqa: PTH112
                none = ""
                yield file
        if none and (closed := _closed(path)):
            none = f"{none}: the folder {closed} cannot be opened: {os.strerror(EACCES)}"
    else:
        yield path
        return
    if none:
        raise KproxyError(none)


def _closed(pattern: str) -> str | None:
    """A folder on a pattern's way that we may not list: glob() does not report it."""
    for parent in reversed(Path(pattern).parents):
        for folder in iglob(str(parent), recursive=True):  # noqa: PTH207
            if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):  # noqa: PTH112
                return folder
    return None


def _no_captures(path: str) -> str:
    return f"{shown(path)}: no captures in this folder (*.pcap, *.pcapng or *.cap, also compressed): name the files"


def _below(folder: str) -> str:
    """The pattern for captures in folders below this one, by day for example, as the end of a sentence; or nothing.

    Looks at MOST_LOOKED_AT names.
    """
    looked_at = 0
    for place, _, names in os.walk(folder):
        if ends := {found[0] for found in map(_CAPTURE.search, names) if found is not None}:
            pattern = os.path.join(folder, "**", f"*{min(ends)}")  # noqa: PTH118
            return f", or those of the folders below it by a pattern in quotes: {shlex.quote(pattern)}"
        looked_at += len(names) + 1
        if looked_at > MOST_LOOKED_AT or place.count(os.sep) - folder.count(os.sep) > 3:
            break
    return ""


def _spelled_as(path: str) -> Any:
    """Makes names of a storage URLs like `path`, whose scheme and host they lack.

    Of abfs://container@account/path a name has the container, and not the account.
    """
    found = _SCHEME.match(path)
    assert found is not None
    rest = path[found.end() :]
    host = rest.partition("/")[0] if found[1].lower() in ("webhdfs", "swebhdfs", "hdfs", "http", "https") else None

    container, _, account = rest.partition("/")[0].rpartition("@")

    def spelled(name: str) -> str:
        if "://" in name:
            return name
        if container and host is None:
            return f"{found[0]}{container}@{account}/{name.lstrip('/').removeprefix(container).lstrip('/')}"
        return f"{found[0]}{name.lstrip('/')}" if host is None else f"{found[0]}{host}/{name.lstrip('/')}"

    return spelled
