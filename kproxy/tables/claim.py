"""Which process records into a folder: one kproxy at a time, and the one that follows it. Needs no pyarrow.

Whoever records holds a shared lock of the folder; whoever comes anew must be alone first. Refuses to know what is
recorded, and whether somebody is followed.
"""

import fcntl
import os
import shutil
from pathlib import Path

from kproxy.errors import KproxyError, why_no_folder


def claim(folder: Path, *, beside: bool = False) -> int:
    """A descriptor that claims the folder, made if there is none, until it is closed. Raises KproxyError.

    beside: the kproxy that records into it now is followed by this one, and goes on for a while.
    """
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)  # it holds what clients sent: not for everybody
        claimed = os.open(folder, os.O_RDONLY)
    except OSError as fault:
        raise KproxyError(f"{folder}: cannot be written to: {why_no_folder(fault)}") from None
    try:
        if not beside:
            fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob(".unfinished-record*-beside-*"):  # of a killed run; the others' names come again
                shutil.rmtree(left, ignore_errors=True)
        fcntl.flock(claimed, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as fault:
        os.close(claimed)
        if isinstance(fault, BlockingIOError):
            raise KproxyError(f"{folder}: another kproxy records into it; give each a folder of its own") from None
        raise KproxyError(f"{folder}: cannot be written to: {fault.strerror or fault}") from None
    return claimed
