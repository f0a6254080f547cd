"""Sends a process's memory to the process that writes the dump: the counterpart of `dump.py`.

Duty: start that process, write to it in small pieces, and read its result. Call it on a thread: writing to a pipe holds
the interpreter's lock only for moments. Bounded: DUMP_S from the start of the process. Refuses to know what triggers a
dump.
"""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from threading import Event, Timer
from typing import Any

from kproxy.errors import KproxyError
from kproxy.flight.frames import Chunk
from kproxy.tables.live.portions import Batches

DUMP_S = 120.0
_TOGETHER = 64  # chunks or rows per pickle
_NICE = 5
_ERROR_BYTES = 2000


def command() -> list[str]:
    """Return the command line of the process."""
    code = f"import sys, os; sys.path[:] = {sys.path!r}; os.nice({_NICE}); from kproxy.flight.dump import main; main()"
    return [sys.executable, "-c", code]


def send(
    folder: Path,
    settings: dict[str, Any],
    *,
    records: bool,
    why: str,
    worker: int | None,
    rows: Iterable[Batches],
    connections: Iterable[dict[str, Any]],
    chunks: Sequence[Chunk],
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> dict[str, Any]:
    """Write a dump into `folder`; returns the result of `dump.dump`. Raises KproxyError, OSError.

    started: called with the process; killing it ends this call soon.
    """
    process = subprocess.Popen(
        command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    late = Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = Timer(DUMP_S, end)  # also ends writes to a process that was stopped and does not read
    timer.daemon = True
    timer.start()
    try:
        started(process)
        try:
            pickle.dump((folder, settings, records, why, worker), process.stdin)
            for item in rows:
                pickle.dump(item, process.stdin)
            of_connections = iter(connections)
            while some := list(islice(of_connections, _TOGETHER)):
                pickle.dump(some, process.stdin)
            for start in range(0, len(chunks), _TOGETHER):
                pickle.dump(chunks[start : start + _TOGETHER], process.stdin)
            pickle.dump(None, process.stdin)
        except BrokenPipeError:
            pass  # its result has the reason
        out, errors = process.communicate()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    if late.is_set():
        raise KproxyError(f"a dump takes longer than {DUMP_S:.0f} s: its memory is more than this disk takes")
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError:
        error = errors[-_ERROR_BYTES:].decode(errors="replace").strip().rpartition("\n")[2]
        raise KproxyError(f"the process that writes a dump ended with status {process.returncode}: {error}") from None
    if "error" in result:
        raise KproxyError(result["error"])
    return result
