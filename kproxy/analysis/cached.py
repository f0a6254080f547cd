"""Tables for questions about captures: converted once, kept next to the capture.

Duty: find the tables of captures in `.kproxy/` next to the first of them, or, if that is not writable, in the folder
for temporary files; convert if there are none. Their key is each capture's path, size, time of change and first bytes,
the way to read it, and the versions of kproxy and of the tables. They appear complete or not at all; damaged ones (a
file is missing, or has another size) are made again, and those of an earlier state of the same captures are deleted.
`batches` is made only for questions that read it. Only users who may read the captures may read them.

Bounds: a folder for each capture, or for several in one question. Refuses to know questions.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING

import kproxy
from kproxy.capture.formats.storage import is_capture, near
from kproxy.errors import CaptureError, KproxyError
from kproxy.tables import dataset, schema

# Modules for converting are imported only for captures: questions to tables do without them.
if TYPE_CHECKING:
    from kproxy.convert.job import Settings, Summary
    from kproxy.convert.workers import Progress

FOLDER = ".kproxy"
_DONE = "_complete.json"  # the sizes of all files: written last
_DRAFT = ".part"  # ends the name of a folder that is being written
_MAX_NAME_BYTES = 150  # of a capture's name: a folder's has 255 at most
_DETAILS = {"batches": "batches"}  # the detail that a table needs; others do with "topics"


def is_dataset(place: str) -> bool:
    """Whether a path is a folder of tables, rather than captures: also where its tables cannot be read."""
    folder = Path(place)
    if place == "-" or folder.is_file() or (is_capture(place) and not folder.exists()):
        return False
    if "://" in place or not folder.exists():
        return True
    if (folder / dataset.MANIFEST).exists() or any((folder / name).is_dir() for name in schema.BY_NAME):
        return True
    from kproxy.convert import job as jobs

    with suppress(KproxyError):
        return not jobs.captures_of([place], jobs.Settings())
    return True


def tables_of(
    captures: Sequence[str],
    tables: Sequence[str],
    settings: "Settings",
    *,
    convert: "Callable[[Path, Settings], Summary]",
    again: bool = False,
) -> tuple[Path, bool]:
    """The folder with the tables of captures, and whether it is to be deleted after use (standard input has no place).

    convert: makes the tables of the captures in a folder. again: the existing ones cannot be read. Raises
    CaptureError where one cannot be read, KproxyError where nothing can be written.
    """
    from kproxy.convert import job as jobs

    found = [path for job in jobs.captures_of(captures, settings) for path in job.paths]
    for path in found:
        if path != "-" and not os.path.isfile(path):  # noqa: PTH113 - raises never
            raise KproxyError(f"{path}: there is no such file{near(path)}")
    need = next((_DETAILS[table] for table in tables if table in _DETAILS), "topics")
    if "-" in found:
        folder = Path(tempfile.mkdtemp(prefix="kproxy-"))
        _convert(convert, folder / "tables", _with_detail(settings, need))
        return folder / "tables", True
    name = _name(found)
    key = _key(found, settings)
    for parent in _parents(found[0]):
        for detail in dict.fromkeys((need, "batches")):
            place = parent / f"{name}-{key}-{detail}"
            if not again and is_whole(place):
                return place, False
    for parent in _parents(found[0]):
        place = parent / f"{name}-{key}-{need}"
        before = _made(place)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            work, claim = _draft(parent, name)
        except OSError:
            continue
        try:
            _convert(convert, work / "tables", _with_detail(settings, need))
            _complete(work / "tables")
            _allow(work / "tables", found)
            if not is_whole(place) or _made(place) == before:  # else somebody was faster, and may be reading them
                _forget(parent, name, key, place)
                with suppress(OSError):
                    (work / "tables").rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            os.close(claim)
        return place, False
    raise KproxyError(
        f"tables of {name} can be written neither beside it nor to {tempfile.gettempdir()}: make them elsewhere with "
        "`kproxy convert`, and ask those"
    )


def forget(place: Path) -> None:
    """Delete tables, if `tables_of` returned that they are to be deleted after use."""
    shutil.rmtree(place.parent, ignore_errors=True)


def is_whole(place: Path) -> bool:
    """Whether all files of a cache are there, each of its size."""
    try:
        sizes = json.loads((place / _DONE).read_text())
        return all((place / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _made(place: Path) -> tuple[int, int] | None:
    """An identity of the tables at a place, to notice others in their stead; None: there are none."""
    try:
        stat = (place / _DONE).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _draft(parent: Path, name: str) -> tuple[Path, int]:
    """A folder to write to, locked while its process lives; those of killed processes are deleted."""
    for old in parent.glob("*" + _DRAFT):
        if old.name.startswith(f"{name}-"):
            with suppress(OSError):  # somebody is at it
                claim = os.open(old, os.O_RDONLY)
                try:
                    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old, ignore_errors=True)
                finally:
                    os.close(claim)
    while True:
        work = Path(tempfile.mkdtemp(prefix=f"{name}-", suffix=_DRAFT, dir=parent))
        claim = os.open(work, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(claim, fcntl.LOCK_EX)
        if work.exists():
            return work, claim
        os.close(claim)  # swept away before it was locked


def _allow(folder: Path, paths: Sequence[str]) -> None:
    """Give read access to users who may read all of the captures."""
    stats = [os.stat(path) for path in paths]  # noqa: PTH116 - a name may be bytes
    read = 0o044
    for stat in stats:
        read &= stat.st_mode
    if read == 0o040:  # the captures' group, which need not be the one that new files get
        groups = {stat.st_gid for stat in stats}
        try:
            os.chown(folder, -1, groups.pop())
        except OSError:
            read = 0
        read = 0 if groups else read
    folder.chmod(0o700 | read | read >> 2)


def _with_detail(settings: "Settings", detail: str) -> "Settings":
    return replace(settings, detail=detail)


def _convert(convert: "Callable[[Path, Settings], Summary]", folder: Path, settings: "Settings") -> None:
    summary = convert(folder, settings)
    if summary.failed:
        raise summary.failed[0]
    if not folder.is_dir():
        raise CaptureError(str(folder), "nothing came of it")


def _complete(folder: Path) -> None:
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    (folder / _DONE).write_text(json.dumps(sizes))


def _forget(parent: Path, name: str, key: str, place: Path) -> None:
    """Delete tables of earlier states of this capture, and any at this place."""
    fingerprint = key.partition("-")[0]
    for old in parent.glob("*"):
        rest = old.name.removeprefix(f"{name}-").split("-")
        if old == place or (old.name.startswith(f"{name}-") and len(rest) == 3 and rest[0] != fingerprint):
            shutil.rmtree(old, ignore_errors=True)


def _name(paths: Sequence[str]) -> str:
    """The beginning of the names of folders: the first capture's name, and a digest of all, if there are several."""
    name = Path(paths[0]).name
    if len(paths) == 1 and len(os.fsencode(name)) <= _MAX_NAME_BYTES:
        return name
    of_all = blake2b(repr([str(Path(path).absolute()) for path in paths]).encode(), digest_size=6).hexdigest()
    return f"{os.fsencode(name)[:_MAX_NAME_BYTES].decode(errors='ignore')}+{of_all}"


def _parents(path: str) -> list[Path]:
    """Folders for tables of a capture, the best first."""
    absolute = Path(path).absolute()
    where = blake2b(os.fsencode(absolute.parent), digest_size=6).hexdigest()
    own = Path(tempfile.gettempdir()) / f"kproxy-{os.getuid()}"
    return [absolute.parent / FOLDER, *([own / where] if _is_own(own) else [])]


def _is_own(folder: Path) -> bool:
    """Whether a folder, made if there is none, is this user's alone: anybody can make one where all may write."""
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        stat = folder.lstat()
    except OSError:
        return False
    return S_ISDIR(stat.st_mode) and stat.st_uid == os.getuid() and not stat.st_mode & 0o022


def _key(paths: Sequence[str], settings: "Settings") -> str:
    """Two digests, of the captures and of how they are read."""
    states = [(str(Path(path).absolute()), *_state(path)) for path in paths]
    log = () if settings.key_log is None else (str(settings.key_log), *_state(str(settings.key_log)))
    how = (
        kproxy.__version__,
        schema.VERSION,
        settings.cluster,
        settings.ports,
        settings.zookeeper_ports,
        settings.rotated,
        log,
    )
    return "-".join(blake2b(repr(part).encode(), digest_size=6).hexdigest() for part in (states, how))


def _state(path: str) -> tuple[int, int, str | None]:
    from kproxy.convert.job import fingerprint

    stat = os.stat(path)  # noqa: PTH116 - a name may be bytes
    return stat.st_size, stat.st_mtime_ns, fingerprint(path)


def convert_with(captures: Sequence[str], progress: "Progress | None") -> "Callable[[Path, Settings], Summary]":
    """The function `convert` for `tables_of`; it reports to `progress`, if any."""
    from kproxy.convert import processes

    return lambda folder, settings: processes.convert(captures, folder, settings, progress=progress)
