"""Log lines to standard error: one per event, times in UTC, written by a thread.

Whoever reads them may stop: a terminal, a pipe, a container's log driver. A write would then block the event loop, and
with it all traffic. So lines wait for the thread, at most MAX_WAITING of them; how many more there were is written as
soon as there is room, and counted for metrics. Refuses to know who logs what.
"""

import logging
import os
import queue
import threading
import time

MAX_WAITING = 1000
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127)}  # a peer's name may not end a line or move a cursor
_FLUSH_S = 1.0  # for the lines that wait when the process ends


class LineHandler(logging.Handler):
    def __init__(self, file: int = 2) -> None:
        super().__init__()
        formatter = logging.Formatter(
            "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        formatter.converter = time.gmtime
        self.setFormatter(formatter)
        self._file = file
        self._lines: queue.Queue[str] = queue.Queue(MAX_WAITING)
        self._left_out = 0  # since the last line that was written
        self.dropped = 0  # since the start
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if record.exc_info is None:
                line = line.translate(_CONTROLS)
            if self._left_out:
                line = f"({self._left_out} lines were left out here: nobody read them)\n{line}"
            self._lines.put_nowait(line)
            self._left_out = 0
        except queue.Full:
            self._left_out += 1
            self.dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait a moment for what is not written yet; `logging` does so at exit."""
        end = time.monotonic() + _FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            data = memoryview(f"{self._lines.get()}\n".encode(errors="backslashreplace"))
            try:
                while data:  # not sys.stderr, whose lock would be held at exit
                    data = data[os.write(self._file, data) :]
            except OSError:
                pass  # nobody is left to read it
            self._lines.task_done()


def dropped() -> int:
    """How many lines of this process were left out, since its log handler began."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LineHandler))


def begin(level: str) -> None:
    """From now on what kproxy and its libraries log goes to standard error."""
    logging.basicConfig(level=level.upper(), handlers=[LineHandler()])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
