"""What is in memory, to the process that writes it: the other side of `dump.py`.

Duty: start that process, write to it in small pieces, and read what it says. For a thread: writing to a pipe takes the
interpreter only for moments. Bounded: DUMP_S, from the start of the process on. Refuses to know what triggers a dump.
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
from kproxy.tables.portions import Batches

DUMP_S = 120.0
_TOGETHER = 64  # chunks that are pickled in one go
_NICE = 5
_SAID_BYTES = 2000


def command() -> list[str]:
    """What runs the process."""
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
    """Have a dump written into `folder`; returns what `dump.dump` says of it. Raises KproxyError, OSError.

    started: given the process; whoever kills it ends this soon.
    """
    process = subprocess.Popen(
        command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    late = Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = Timer(DUMP_S, end)  # a process that stands still reads nothing: a time for what it says is not enough
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
            pass  # what it says tells why
        out, errors = process.communicate()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    if late.is_set():
        raise KproxyError(f"a dump takes longer than {DUMP_S:.0f} s: its memory is more than this disk takes")
    try:
        told: dict[str, Any] = json.loads(out)
    except ValueError:
        said = errors[-_SAID_BYTES:].decode(errors="replace").strip().rpartition("\n")[2]
        raise KproxyError(f"the process that writes a dump ended with status {process.returncode}: {said}") from None
    if "error" in told:
        raise KproxyError(told["error"])
    return told
