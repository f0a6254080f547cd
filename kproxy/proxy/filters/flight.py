"""The flight recorder of a process that relays: its memory, its dumps, and their retention.

Duty: connects the memory of `kproxy.flight` to the connections of this process; dumps on demand and on a trigger, on a
thread, one dump at a time, by a trigger at most every `pause_s`; removes the oldest dumps; detects new findings. A dump
that fails is logged, counted and removed, and has no other effect. A stop waits at most STOP_S for a dump that is being
written. Does not decode frames.
"""

import asyncio
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kproxy.errors import ConfigError, KproxyError, of_extras, why_no_folder
from kproxy.metrics import Metrics
from kproxy.proxy.config.flight import SEVERITIES, TRIGGERS, Flight
from kproxy.proxy.tasks import Tasks
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Closed, Event
from kproxy.wire.observing.watched import watch
from kproxy.wire.session import Session

if TYPE_CHECKING:
    from kproxy.flight.headers import Trigger

ASKED, FINDINGS = "asked", "findings"
WRITTEN, FAILED, SKIPPED = "written", "failed", "skipped"
_NAME = re.compile(r"\d{8}T\d{6}\.\d{3}Z-[a-z]+(-worker-\d+)?")
_AFTER_S = 1.0  # delay of a dump, so that it contains the traffic just after its trigger
STOP_S = 10.0
_MAX_RESULTS = 8
_STOP_POLL_S = 0.02
_NAMED = 3  # findings named in a log line
_WHERE = 200  # characters of the place of a finding

log = logging.getLogger("kproxy.flight")


def folder_name(why: str) -> str:
    """Return the name of the folder for a dump that begins now. why: its trigger."""
    now_ns = time.time_ns()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 10**9))
    return f"{stamp}.{now_ns // 10**6 % 1000:03}Z-{why}"


def make_folder(folder: Path) -> None:
    """Create the folder of dumps. Raises ConfigError if it cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "this user may not write there")
    except OSError as fault:
        raise ConfigError([("flight.folder", f"{folder} cannot be used: {why_no_folder(fault)}")]) from None


def _is_full(held_bytes: int, limit_bytes: int) -> bool:
    """Return whether a memory may have dropped recent data for space: it certainly has not while half of it is free."""
    return held_bytes > limit_bytes // 2


class FlightRecorder:
    """A sink; `watch` is called for each session. A thread writes dumps; all else runs on the loop."""

    def __init__(self, settings: Flight, details: Mapping[str, str], metrics: Metrics, worker: int | None) -> None:
        """Raises ConfigError if the folder cannot be created, or if a package is missing."""
        with of_extras(lambda missing: ConfigError([("flight", missing)])):  # heavy imports of an optional extra
            from kproxy.flight.frames import Frames
            from kproxy.flight.headers import Headers
        make_folder(settings.folder)
        span_ns = int(settings.minutes * 60e9)
        self.settings = settings
        self._worker = worker
        self._details = details
        self._frames = Frames(settings.frame_memory, span_ns)
        self._headers = Headers(
            settings.header_memory,
            span_ns,
            slow_ns=int(settings.slow_s * 1e9),
            triggers=settings.triggers,
            on_trigger=self._triggered,
        )
        self._counts = metrics.flight_dumps
        for cause in (ASKED, *TRIGGERS):
            self._counts[cause] = {WRITTEN: 0, FAILED: 0, SKIPPED: 0}
        metrics.flight_bytes = lambda: (self._frames.held_bytes, self._headers.held_bytes)
        self._tasks = Tasks("flight")
        self._is_dumping = False
        self._last_s = -1e9
        self._results: dict[str, dict[str, Any]] = {}  # folder -> result, for the last requested dumps
        self._process: subprocess.Popen[bytes] | None = None  # the process that writes a dump
        self._timer: asyncio.TimerHandle | None = None  # starts a triggered dump

    def watch(self, session: Session, info: ConnectionInfo) -> None:
        """Record a new session."""
        watch(session, self._frames.watched(info))

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        of_headers = self._headers.connected(info)

        def take(events: list[Event]) -> None:
            of_headers(events)
            if events and isinstance(events[-1], Closed):
                self._frames.ended(info, events[-1].now_ns)

        return take

    # --- dumps -------------------------------------------------------------------------------------------------------

    def ask(self, name: str, *, again: bool = False) -> bool:
        """Begin a dump into that folder; `result` returns its state. Returns False while another dump is being written.

        again: the caller retries until the other dump has ended: no skipped dump is counted, and a dump of this name
        that has begun is not repeated.
        """
        if again and name in self._results:
            return True
        if self._is_dumping:
            self._counts[ASKED][SKIPPED] += not again
            return False
        while len(self._results) >= _MAX_RESULTS:
            del self._results[next(iter(self._results))]
        self._results[name] = {"writing": True}
        self._begin(ASKED, name, "asked for")
        return True

    def result(self, name: str) -> dict[str, Any] | None:
        """Return the state of a dump, `writing` until it is done; None if this process has begun none of that name."""
        return self._results.get(name)

    async def stop(self) -> None:
        """Begin no further dump; wait up to STOP_S for a dump that is being written."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with asyncio.timeout(STOP_S):
                while len(self._tasks):  # noqa: ASYNC110 (its end is a thread's)
                    await asyncio.sleep(_STOP_POLL_S)
        except TimeoutError:
            process = self._process
            if process is not None:
                process.kill()  # the thread that waits for it ends too
        await self._tasks.cancel()

    def found(self, name: str, text: str) -> None:
        """Dump into that folder, which all processes share, because of a severe finding."""
        self._trigger(FINDINGS, name, text)

    def _triggered(self, trigger: "Trigger") -> None:
        self._trigger(trigger.kind, folder_name(trigger.kind), trigger.text)

    def _trigger(self, cause: str, name: str, text: str) -> None:
        now_s = time.monotonic()
        if self._is_dumping or now_s - self._last_s < self.settings.pause_s:
            self._counts[cause][SKIPPED] += 1
            return
        self._last_s = now_s
        self._is_dumping = True
        log.warning("dump cause=%s: %s", cause, text)
        self._timer = asyncio.get_running_loop().call_later(_AFTER_S, self._begin, cause, name, text)

    def _begin(self, cause: str, name: str, text: str) -> None:
        self._is_dumping = True
        self._tasks.spawn(self._dump(cause, name, text))

    async def _dump(self, cause: str, name: str, text: str) -> None:
        from kproxy.flight.sending import send

        begun_s = time.monotonic()
        folder = self.settings.folder / name
        now_ns = time.time_ns()
        kept, tallies = self._headers.taken()
        chunks = list(self._frames.chunks)
        full = {
            "tables_full": _is_full(self._headers.held_bytes, self.settings.header_memory),
            "frames_full": _is_full(self._frames.held_bytes, self.settings.frame_memory),
        }

        def started(process: subprocess.Popen[bytes]) -> None:
            self._process = process

        def work() -> dict[str, Any]:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the folder may have been removed
                return send(
                    folder,
                    {"detail": dict(self._details)},
                    records=self.settings.records,
                    why=f"{cause}: {text}",
                    worker=self._worker,
                    rows=(each.batches() for each in kept),
                    connections=(tally.row_so_far(now_ns) for tally in tallies),
                    chunks=chunks,
                    started=started,
                )
            except BaseException:
                self._discard(folder)
                raise
            finally:
                self._process = None
                self._remove_old()

        try:
            result = await asyncio.to_thread(work) | full
        except (KproxyError, OSError) as fault:
            self._counts[cause][FAILED] += 1
            log.error("no dump cause=%s: %s", cause, fault)
            result = {"error": str(fault)}
        except Exception as fault:  # the caller must get a result even after a defect
            self._counts[cause][FAILED] += 1
            log.exception("no dump cause=%s: a defect of kproxy", cause)
            result = {"error": f"a defect of kproxy, which its log shows: {type(fault).__name__}"}
        else:
            self._counts[cause][WRITTEN] += 1
            log.info(
                "dumped into %s cause=%s exchanges=%d frames=%d in %.1f s",
                folder,
                cause,
                result["exchanges"],
                result["frames"],
                time.monotonic() - begun_s,
            )
        finally:
            self._is_dumping = False
        if cause == ASKED:
            self._results[name] = result

    def _discard(self, folder: Path) -> None:
        """Remove the files of this process in a failed dump: half a dump is useless, and the disk may be full."""
        with suppress(OSError):
            if self._worker is None:
                shutil.rmtree(folder)
                return
            own = re.compile(rf"-worker-{self._worker}[-.]")  # other files belong to other workers
            for path in sorted(folder.rglob("*"), reverse=True):  # the content of a folder before the folder
                with suppress(OSError):
                    if own.search(path.name):
                        path.unlink()
                    elif path.is_dir():
                        path.rmdir()  # fails if it is not empty
            folder.rmdir()

    def _remove_old(self) -> None:
        """Remove the oldest dumps beyond `keep` and `keep_bytes`; the newest stays. Workers may do so at once.

        Dumps with a time in the future count as the oldest: the clock has been set back since.
        """
        now = folder_name("~")
        try:
            found = [path for path in self.settings.folder.iterdir() if _NAME.fullmatch(path.name)]
            dumps = sorted(found, key=lambda path: (path.name <= now, path.name))
        except OSError as fault:
            log.error("dumps in %s cannot be listed: %s", self.settings.folder, fault.strerror)
            return
        sizes = {path: _size(path) for path in dumps}
        held = sum(sizes.values())
        while len(dumps) > 1 and (len(dumps) > self.settings.keep or held > self.settings.keep_bytes):
            oldest = dumps.pop(0)
            held -= sizes[oldest]
            shutil.rmtree(oldest, ignore_errors=True)
            log.info("removed the dump %s", oldest)


class Found(Protocol):
    """The fields of a finding (`kproxy.analysis`) that are used here."""

    @property
    def kind(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def cluster(self) -> str | None: ...
    @property
    def where(self) -> str: ...


class FindingsTrigger:
    """Trigger `findings`: compares findings with the previous ones, and makes all processes dump if there are new ones.

    operate(operation, *arguments): runs an operation in each process. Bounded by the findings of one evaluation.
    """

    def __init__(self, settings: Flight, operate: Callable[..., Awaitable[list[Any]]]) -> None:
        self._severities = SEVERITIES[: SEVERITIES.index(settings.findings_severity) + 1]
        self._operate = operate
        self._known: set[tuple[str, str | None, str]] = set()

    async def update(self, found: Sequence[Found]) -> None:
        """Take all current findings."""
        grave = {(one.kind, one.cluster, one.where): one for one in found if one.severity in self._severities}
        new = [one for key, one in grave.items() if key not in self._known]
        self._known = set(grave)
        if new:
            text = "; ".join(f"{one.severity} {one.kind}: {one.where[:_WHERE]}" for one in new[:_NAMED])
            await self._operate("dump_found", folder_name(FINDINGS), text)


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder; files that another process removes meanwhile count 0."""
    size = 0
    with suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                size += path.lstat().st_size
    return size
