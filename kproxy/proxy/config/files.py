"""Opens files that settings name and that may change at any time, also on the event loop.

It opens only regular files: opening or reading a pipe or a device could block for ever. Refuses to know contents.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def named(path: Path) -> str:
    """Return the name of a file for messages. A text without a folder, or of several lines, may be a secret."""
    text = str(path)
    if path.exists() or ("/" in text and "\n" not in text and "-----" not in text):
        return text
    return "the file (its name is not repeated: it should be a path like /etc/kproxy/secret, not the secret itself)"


def version(path: Path) -> tuple[int, ...]:
    """Return a value that differs after each change of the file; () if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise
