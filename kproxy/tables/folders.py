"""Folders of tables that several processes share: locks, disk errors by name, and names that are taken.

Duty: `claimed` locks a working folder that the last owner may be removing; `writing` and `refuse_file` name the folder
and the cause where it cannot be written to. Refuses to know tables.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR

from kproxy.errors import KproxyError

MOST_TRIES = 1000  # attempts to create a folder that other processes remove at their end


def claimed(work: Path) -> int | None:
    """Return a locked descriptor of a working folder, created if needed; None if another process has locked it.

    The previous owner removes the folder before it releases the lock, so the locked folder may be a deleted one; then
    the attempt is repeated.
    """
    tries = 0
    while True:
        tries += 1
        try:
            work.mkdir(parents=True, exist_ok=True)
            claim = os.open(work, os.O_RDONLY)
        except (FileExistsError, FileNotFoundError):  # another process removed it meanwhile
            refuse_file(work.parent)
            if tries >= MOST_TRIES:  # no process removes it so often: the parent folder is deleted
                raise
            continue
        is_ours = False
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_ours := os.path.samestat(os.fstat(claim), work.stat()):
                return claim
        except BlockingIOError:
            return None
        except FileNotFoundError:
            continue
        finally:
            if not is_ours:
                os.close(claim)


def refuse_file(folder: Path) -> None:
    """Raise KproxyError if a file is in the place of a folder, or of one of its parents."""
    for place in (folder, *folder.parents):
        if _is_no_folder(place):
            raise KproxyError(f"{folder}: cannot be written to: {place} is no folder") from None


def _is_no_folder(place: Path) -> bool:
    """Return whether the place is a file, or a link without a folder at its end (a disk that is not mounted)."""
    try:
        return not S_ISDIR(place.lstat().st_mode) and not place.is_dir()
    except OSError:
        return False


@contextmanager
def alone(work: Path) -> Iterator[None]:
    while (claim := claimed(work)) is None:
        time.sleep(0.001)
    try:
        yield
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(claim)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError (a full disk, for example) into a KproxyError that names the folder, and a name that is taken."""
    try:
        yield
    except OSError as fault:
        reason = os.strerror(fault.errno) if fault.errno else fault
        if isinstance(fault, (FileExistsError, IsADirectoryError, NotADirectoryError)):
            reason = f"{reason}: {fault.filename2 or fault.filename}"
        raise KproxyError(f"{folder}: cannot be written to: {reason}") from fault


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
