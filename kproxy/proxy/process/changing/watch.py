"""Notices when the content of a file changes, however it is replaced.

An editor renames a new file over the old one, Kubernetes replaces a symbolic link somewhere in the path, and some file
systems report neither. So kproxy polls the file. A change counts once two polls in a row find the same state, so that
kproxy does not read a file that is still being written. Refuses to know the meaning of the content.
"""

import asyncio
import hashlib
from pathlib import Path

from kproxy.proxy.config.files import open_regular

LOOK_S = 1.0
MAX_BYTES = 16 * 1024 * 1024

_Look = tuple[int, int, int, int]


class Watch:
    """Watches one file for changes from its content at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._look()
        self._digest = self._content()

    async def changed(self, look_s: float = LOOK_S) -> None:
        """Return when the content differs from that at the last return, or at the start."""
        while True:
            await asyncio.sleep(look_s)
            look = self._look()
            if look == self._seen:
                continue
            while (again := self._look()) != look or again is None:  # being written, or missing
                look = again
                await asyncio.sleep(look_s)
            await asyncio.sleep(look_s)
            if self._look() != look:
                continue
            self._seen = look
            digest = self._content()
            if digest != self._digest:
                self._digest = digest
                return

    def _look(self) -> _Look | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev

    def _content(self) -> bytes:
        try:
            with open_regular(self._path) as file:
                return hashlib.sha256(file.read(MAX_BYTES)).digest()
        except OSError:
            return b""
