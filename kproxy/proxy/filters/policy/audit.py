"""The audit: a line of JSON for every administrative request and every refusal, to a file or to standard error.

A thread writes queued lines, at most MAX_WAITING with MAX_WAITING_BYTES in all: a full disk or a pipe without reader
never blocks the event loop. Lines beyond the queue are counted, and the next written line has their number. A file is
opened to append, and opened again when another file is in its place, so that logrotate works with and without
`copytruncate`, and several processes can share it. Lines hold names of resources and no values, so no secrets.
"""

import contextlib
import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from kproxy.errors import ConfigError
from kproxy.proxy.log_limiter import LogLimiter

log = logging.getLogger("kproxy.audit")

STDERR = "stderr"
MAX_WAITING = 10_000
MAX_WAITING_BYTES = 16 * 1024 * 1024  # a client can cause lines of up to half a megabyte
MAX_NAMES = 100  # names of one kind in one line; further names are counted
MAX_NAME = 256  # characters
_FLUSH_S = 1.0
_RETRY_S = 1.0  # s between a failed write and the next one
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def require_writable(target: str | None) -> None:
    """Open the file of an audit once, which creates it. Raises ConfigError if that fails."""
    if target is None or target == STDERR:
        return
    try:
        os.close(os.open(target, _FLAGS | os.O_NONBLOCK, 0o640))
    except OSError as fault:
        if fault.errno != errno.ENXIO:  # a pipe without reader yet
            raise ConfigError([("audit", f"{target} cannot be written to: {fault.strerror or fault}")]) from None


class Audit:
    """Writes lines. `target`: "stderr" or a file's path. `lines` and `dropped` count since the start."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._file = 2 if target == STDERR else -1
        self._identity: tuple[int, int] | None = None
        self._waiting: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._waiting_bytes = 0
        self._missing = 0  # lines dropped since the last written line
        self._lock = threading.Lock()
        self._limiter = LogLimiter(log)
        self.lines = 0
        self.dropped = 0
        self._stopped = False
        threading.Thread(target=self._write, name="audit", daemon=True).start()

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of lines that are not written yet."""
        return self._waiting_bytes

    def counts(self) -> tuple[int, int]:
        """Return (lines written, lines dropped) since the start."""
        return self.lines, self.dropped

    def add(self, line: dict[str, Any]) -> None:
        """Queue a line. Never blocks, and raises nothing."""
        text = json.dumps(line, ensure_ascii=True, separators=(",", ":"), default=str)
        with self._lock:
            fits = self._waiting_bytes + len(text) <= MAX_WAITING_BYTES
            if fits:
                self._waiting_bytes += len(text)
        try:
            if not fits:
                raise queue.Full
            self._waiting.put_nowait(text)
        except queue.Full:
            self._lose(1, len(text) if fits else 0)

    def _lose(self, count: int, waited_bytes: int = 0) -> None:
        with self._lock:
            self.dropped += count
            self._missing += count
            self._waiting_bytes -= waited_bytes

    def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait up to `timeout_s` for queued lines to be written."""
        end = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def close(self) -> None:
        """Write queued lines, then end the thread."""
        self.flush()
        self._stopped = True
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _write(self) -> None:
        torn = False
        while True:
            text = self._waiting.get()
            if text is None or self._stopped:
                self._waiting.task_done()
                break
            with self._lock:
                missing, self._missing = self._missing, 0
            size = len(text)
            if missing:
                text = json.dumps({"time": timestamp(time.time_ns()), "missing_lines": missing}) + "\n" + text
            data = whole = memoryview(("\n" * torn + text + "\n").encode())
            try:
                self._reopen()
                while data:
                    data = data[os.write(self._file, data) :]
                self.lines += 1
                torn = False
            except OSError as fault:
                text = "the audit loses lines: %s cannot be written to: %s"
                self._limiter.log(logging.ERROR, "lost", text, self._target, fault.strerror or fault)
                torn |= len(data) < len(whole)  # a full disk took a part: the next line must not go on with it
                with self._lock:
                    self._missing += missing
                self._lose(1)
                if not self._stopped:
                    time.sleep(_RETRY_S if self._waiting.empty() else 0.01)
            with self._lock:
                self._waiting_bytes -= size
            self._waiting.task_done()
        if self._file > 2:
            os.close(self._file)

    def _reopen(self) -> None:
        """Open the file if it is not open, or if another file is in its place."""
        if self._target == STDERR:
            return
        try:
            found = Path(self._target).stat()
            identity = found.st_dev, found.st_ino
        except FileNotFoundError:
            identity = None
        if self._file >= 0 and identity is not None and identity == self._identity:
            return
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = os.open(self._target, _FLAGS, 0o640)
        status = os.fstat(self._file)
        self._identity = status.st_dev, status.st_ino


def timestamp(now_ns: int) -> str:
    """Return a time in UTC with milliseconds, in the format of RFC 3339."""
    return datetime.fromtimestamp(now_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(names: Sequence[str | UUID]) -> list[str]:
    """Return distinct names for a line, at most MAX_NAMES; a last element has the number of further names."""
    distinct = list(dict.fromkeys(names))
    few = [str(name)[:MAX_NAME] for name in distinct[:MAX_NAMES]]
    return few if len(distinct) <= MAX_NAMES else [*few, f"... and {len(distinct) - MAX_NAMES} more"]
