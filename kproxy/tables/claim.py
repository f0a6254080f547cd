"""Which process records into a folder: one kproxy at a time. Needs no pyarrow. Refuses to know what is recorded."""

import fcntl
import os
from pathlib import Path

from kproxy.errors import KproxyError


def claim(folder: Path) -> int:
    """A descriptor that claims the folder, made if there is none, until it is closed. Raises KproxyError."""
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)  # it holds what clients sent: not for everybody
        claimed = os.open(folder, os.O_RDONLY)
    except OSError as fault:
        raise KproxyError(f"{folder}: cannot be written to: {fault.strerror or fault}") from None
    try:
        fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        os.close(claimed)
        if isinstance(fault, BlockingIOError):
            raise KproxyError(f"{folder}: another kproxy records into it; give each a folder of its own") from None
        raise KproxyError(f"{folder}: cannot be written to: {fault.strerror or fault}") from None
    return claimed
