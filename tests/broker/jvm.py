"""Kafka's jars, and its command line tools in JVMs that are kept running: starting one costs ten times most tools.

The jars are those of the pom.xml in this folder; `./dev test` downloads them.
"""

import atexit
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

JARS = Path(__file__).parents[2] / ".cache/kafka"
SMALL_JVM = (
    *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"),
    # Kafka's classes are unmodified: verifying them takes a seventh of a broker's start.
    *("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"),
)
ARCHIVE = JARS / "classes.jsa"  # the classes that a broker loads: see classes.py
TOOL_TIMEOUT_S = 120
_TOOLS = Path(__file__).with_name("Tools.java")


def java(main: str, *arguments: str, options: Sequence[str] = (), classes: str = "") -> list[str]:
    """The command that runs a main class of Kafka's jars, or of the folder `classes`."""
    executable = shutil.which("java")
    if executable is None or not (JARS / "stamp").exists():
        raise RuntimeError("no Java or no Kafka jars: run ./dev test, which fetches both")
    path = f"{classes}:{JARS}/*" if classes else f"{JARS}/*"
    kept = (f"-XX:SharedArchiveFile={ARCHIVE}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off") if ARCHIVE.exists() else ()
    return [executable, *SMALL_JVM, *kept, *options, "-cp", path, main, *arguments]


class Ended(NamedTuple):
    """The outcome of a tool that has ended or timed out."""

    from_ns: int
    to_ns: int
    status: int | None  # None: it timed out, or the JVM has exited
    output: str
    errors: str  # includes the log of the JVM


class Tools:
    """A JVM that runs tools one after another: see Tools.java."""

    def __init__(self, options: Sequence[str] = (), classes: str = "") -> None:
        self._one_at_a_time = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        self._process = subprocess.Popen(
            java(str(_TOOLS), options=("-Xmx256m", *options), classes=classes),
            bufsize=0,
            stdin=subprocess.PIPE,  # ends with this process, and so does the JVM
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def run(self, main: str, *arguments: str, stdin: bytes = b"", timeout_s: float = TOOL_TIMEOUT_S) -> Ended:
        """Run a main class to its end. After one that times out, only `close` is possible."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._one_at_a_time, tempfile.TemporaryDirectory() as folder:
            input_file, output_file = Path(folder, "input"), Path(folder, "output")
            input_file.write_bytes(stdin)
            output_file.touch()
            parts = (str(input_file), str(output_file), main, *arguments)
            assert not any("\n" in part for part in parts)
            said_before = os.fstat(self._errors.fileno()).st_size
            begin = time.time_ns()
            self._process.stdin.write("\n".join((str(len(parts)), *parts, "")).encode())
            ended, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            status = self._process.stdout.readline() if ended else b""
            end = time.time_ns()
            errors = os.pread(self._errors.fileno(), 1 << 20, said_before)
            output = output_file.read_bytes()
        text, words = (said.decode(errors="replace") for said in (output, errors))
        return Ended(begin, end, int(status) if status else None, text, words)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


_running: dict[tuple[str, ...], Tools] = {}  # by the options of their JVMs


@atexit.register
def _close() -> None:
    while _running:
        _running.popitem()[1].close()


def tool(
    main: str,
    *arguments: str,
    stdin: bytes = b"",
    timeout_s: float = TOOL_TIMEOUT_S,
    options: Sequence[str] = (),
) -> str:
    """Run one of Kafka's command line tools to its end; returns its standard output. options: of the JVM."""
    wanted = tuple(options)
    if wanted not in _running:
        _running[wanted] = Tools(wanted)
    ended = _running[wanted].run(main, *arguments, stdin=stdin, timeout_s=timeout_s)
    if ended.status is None:
        _running.pop(wanted).close()
    if ended.status != 0:
        how = f"did not end within {timeout_s} s" if ended.status is None else f"exited {ended.status}"
        raise AssertionError(f"{main} {' '.join(arguments)} {how}\n{ended.output}\n{ended.errors}")
    return ended.output
