"""Log lines to standard error: one per event, times in UTC, as text or as JSON, written by a thread.

The fields of a line are the `name=%s` of its format: part of the message in text, separate keys in JSON, with numbers
as numbers. docs/logs.md lists them all, and a test compares.

The reader may stall: a terminal, a pipe, a container's log driver. A write would then block the event loop, and with
it all traffic. So at most MAX_WAITING lines wait for the thread; further ones are dropped and counted, and the next
line that fits reports their number. Refuses to know who logs what.
"""

import json
import logging
import os
import queue
import re
import threading
import time
from functools import lru_cache
from typing import Any

MAX_WAITING = 1000
TEXT, JSON = FORMATS = ("text", "json")
# A peer's name may not end a line, move a cursor (C1 has sequences of its own) or reverse the direction of the text.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_CONTROLS_OF_LINES = {code: text for code, text in _CONTROLS.items() if code != 10}  # a traceback has several
_FLUSH_S = 1.0  # to write waiting lines when the process ends


# A conversion of a format, with its field name, if any; %% is no conversion.
_CONVERSION = re.compile(r"%%|(?:(?<![\w.])([a-z][a-z0-9_]*)=)?%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_OURS = frozenset(("time", "level", "logger", "worker", "message", "left_out", "exception"))


@lru_cache(maxsize=1024)  # formats are written in code
def field_names(text: str) -> tuple[str | None, ...]:
    """Return the field name of each argument of a log format; None: only part of the message."""
    return tuple(match[1] or None for match in _CONVERSION.finditer(text) if match[0] != "%%")


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a line by name: text, numbers, booleans and null."""
    names = field_names(record.msg) if isinstance(record.msg, str) else ()
    if not isinstance(record.args, tuple) or len(names) != len(record.args):
        return {}
    return {
        name: value if value is None or isinstance(value, bool | int | float) else str(value)
        for name, value in zip(names, record.args, strict=True)
        if name is not None and name not in _OURS
    }


class TextFormatter(logging.Formatter):
    """Formats lines for people: time, level, logger, message."""

    converter = staticmethod(time.gmtime)

    def __init__(self, worker: int | None = None) -> None:
        who = "" if worker is None else f"worker={worker} "
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s {who}%(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line.translate(_CONTROLS_OF_LINES if record.exc_info else _CONTROLS)


class JsonFormatter(logging.Formatter):
    """Formats lines for programs: an object with time, level, logger, message, and the message's fields."""

    converter = staticmethod(time.gmtime)

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._who = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._who,
            "message": record.getMessage(),
            **fields(record),
        }
        left_out = getattr(record, "left_out", 0)  # by a LogLimiter
        if left_out:
            line["left_out"] = left_out
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LineHandler(logging.Handler):
    def __init__(self, file: int = 2, form: str = TEXT, worker: int | None = None) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter(worker) if form == JSON else TextFormatter(worker))
        self.form = form
        self._file = file
        self._lines: queue.Queue[str] = queue.Queue(MAX_WAITING)
        self._left_out = 0  # since the last line that was written
        self.dropped = 0  # since the start
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._left_out:
                line = f"{self._gap(record)}\n{line}"
            self._lines.put_nowait(line)
            self._left_out = 0
        except queue.Full:
            self._left_out += 1
            self.dropped += 1
        except Exception:
            self.handleError(record)

    def _gap(self, record: logging.LogRecord) -> str:
        """Return the line that reports dropped lines."""
        text = f"({self._left_out} lines were left out here: nobody read them)"
        if self.form == TEXT:
            return text
        gap = logging.LogRecord("kproxy.log", logging.WARNING, "", 0, text[1:-1], (), None)
        gap.created, gap.msecs, gap.left_out = record.created, record.msecs, self._left_out
        return self.format(gap)

    def flush(self) -> None:
        """Wait up to _FLUSH_S until all lines are written; `logging` calls this at exit."""
        end = time.monotonic() + _FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            data = memoryview(f"{self._lines.get()}\n".encode(errors="backslashreplace"))
            try:
                while data:  # without sys.stderr, since its lock would be held at exit
                    data = data[os.write(self._file, data) :]
            except OSError:
                pass  # nobody is left to read it
            self._lines.task_done()


def dropped() -> int:
    """Return the number of lines that this process has dropped."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LineHandler))


def begin(level: str, form: str = TEXT, *, worker: int | None = None) -> None:
    """Send the log lines of kproxy and its libraries to standard error. worker: its index, if there are several."""
    logging.basicConfig(level=level.upper(), handlers=[LineHandler(form=form, worker=worker)])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def form() -> str:
    """How lines are written, for another process that writes some of them; TEXT where a program logs in its own way."""
    handlers = (handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler))
    return next((handler.form for handler in handlers), TEXT)


def level() -> str:
    """The lowest level that is logged, as the setting spells it."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_level(level: str) -> None:
    """Log from that level on, from now on."""
    logging.getLogger().setLevel(level.upper())
