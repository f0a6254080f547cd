"""Locks a folder for recording: one kproxy at a time, plus its successor during an upgrade. Needs no pyarrow.

Every recording process holds a shared lock of the folder. A new process takes an exclusive lock first. The caller
decides whether it is a successor.
"""

import fcntl
import os
import shutil
from pathlib import Path

from kproxy.errors import KproxyError, why_no_folder


def claim(folder: Path, *, beside: bool = False) -> int:
    """Return a descriptor that locks the folder until it is closed. Creates the folder if it does not exist.

    beside: this process succeeds the kproxy that records into the folder now and still does so for a while. Raises
    KproxyError if the folder cannot be written to, or if another kproxy records into it.
    """
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)  # it holds clients' data: no access for others
        claimed = os.open(folder, os.O_RDONLY)
    except OSError as fault:
        raise KproxyError(f"{folder}: cannot be written to: {why_no_folder(fault)}") from None
    try:
        if not beside:
            fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob(".unfinished-record*-beside-*"):  # of a killed run; other names are reused
                shutil.rmtree(left, ignore_errors=True)
        fcntl.flock(claimed, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as fault:
        os.close(claimed)
        if isinstance(fault, BlockingIOError):
            raise KproxyError(f"{folder}: another kproxy records into it; give each a folder of its own") from None
        raise KproxyError(f"{folder}: cannot be written to: {fault.strerror or fault}") from None
    return claimed
