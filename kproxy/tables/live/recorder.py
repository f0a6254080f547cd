"""Live events -> files of a dataset: `--record`.

Duty: records the events of sessions in the same tables as a conversion of captures. A relay packs its events into rows:
that costs hardly more than keeping them, and far less than two threads that alternate in the interpreter. A thread
makes columns, sorts, compresses and syncs, nearly all of it without the interpreter's lock. If the thread falls behind,
events are dropped, counted, and reported in `quality`. Files appear complete, after ROLL_S or ROLL_ROWS: a killed
kproxy loses only rows that are in no file yet.

Bounded by: QUEUE_BYTES of packed rows in the queue, `writer.RUN_ROWS` rows per table in memory, the rest of a file's
rows on the disk, and ROLL_ROWS rows of one table while its file is written; if bodies are read, `names.MAX_NAMES`
topics, and `partitions.MAX_POSITIONS` partitions per connection. Old files stay on the disk unless a
`Retention` is given. Does not use sockets.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event as Signal
from threading import Lock, Thread
from typing import Any

from kproxy.errors import KproxyError
from kproxy.tables.live.defects import Defects
from kproxy.tables.live.live_files import Files, Quality
from kproxy.tables.live.portions import Portion, Tally, Tcp
from kproxy.tables.live.retention import Retention
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Event

QUEUE_BYTES = 64 << 20

_EVERYTHING_STAYS = Retention()
_IDLE_S = 0.05
_REPORT_S = 60.0  # between two log lines about rows that cannot be written
_SWITCH_S = 0.0002  # sys.setswitchinterval: a thread may hold the interpreter so long while another waits

_FAILED = "events that are in no table: kproxy could not make rows of them; its log names each kind of failure"

log = logging.getLogger("kproxy.recorder")


class Recorder:
    """A sink of events that writes tables; `close` writes the rows that are left."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        worker: int | None = None,
        retention: Retention = _EVERYTHING_STAYS,
        beside: bool = False,
    ) -> None:
        """settings: stored in the manifest. worker: number of this process, if several write to the folder.

        beside: the predecessor of this kproxy still records into the folder.
        """
        self.folder = folder
        self._retention = retention
        self._quality = Quality()
        self._files = Files(folder, settings, self._quality, worker, beside=beside)
        self._thread = Thread(target=self._run, name="recorder", daemon=True)
        self._stopping = Signal()
        self._lock = Lock()  # of the following
        self._open: Portion | None = Portion()  # None: the queue is full
        self._waiting: deque[Portion] = deque()
        self._waiting_bytes = 0
        self._defects = Defects(log)
        self._lost = 0  # events that could not be written, since the last line about them
        self._lost_by: Exception | None = None
        self._reported_s = -_REPORT_S

    @property
    def dropped(self) -> dict[str, int]:
        """Events that are in no table, by source."""
        return self._quality.dropped

    def start(self) -> None:
        """Lock the folder and start the thread.

        Raises KproxyError if the folder cannot be written to, or if another kproxy writes to it.
        """
        self._files.claim()
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._thread.start()
        log.info("recording into %s", self.folder)

    def note(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows of `quality` that other code counted; rows of the same source and kind are summed."""
        self._quality.add([dict(row) for row in rows])

    def connected(self, info: ConnectionInfo, tcp: Tcp | None = None) -> Callable[[list[Event]], None]:
        """Return a function that takes the events of a connection. tcp: its TCP properties, if packets are read."""
        tally = Tally(info, tcp)
        lock = self._lock
        self.dropped.setdefault(info.source, 0)

        def take(events: list[Event]) -> None:
            with lock:
                portion = self._open
                if portion is None:
                    self._quality.drop(info.source, len(events))
                    return
                for fault in portion.add(tally, events):  # a defect of kproxy must not end a connection
                    self._quality.drop(info.source, 1, "recorder_failed", _FAILED)
                    self._defects.note(fault)
                if portion.full:
                    self._hand_over(portion)

        return take

    def rows(self, source: str) -> Callable[[str, Sequence[Any]], None]:
        """Return a function that takes a table's name and rows of insight, NamedTuples with the table's columns."""
        self.dropped.setdefault(source, 0)

        def take(table: str, rows: Sequence[Any]) -> None:
            with self._lock:
                portion = self._open
                if portion is None:
                    self._quality.drop(source, len(rows))
                    return
                portion.know(source, table, rows)
                if portion.full:
                    self._hand_over(portion)

        return take

    def close(self) -> None:
        """Write all events, and unlock the folder. Blocks until they are written."""
        if self._thread.is_alive():
            self._stopping.set()
            self._thread.join()
            lost = sum(self.dropped.values())
            log.info("recorded %d exchanges into %s; %d events dropped", self._files.exchanges, self.folder, lost)
            self._defects.report()
            if self._lost:
                self._report_lost()
        self._files.release()

    def _hand_over(self, portion: "Portion") -> None:
        self._waiting.append(portion)
        self._waiting_bytes += portion.size
        self._open = Portion() if self._waiting_bytes < QUEUE_BYTES else None
        if self._open is None:  # one line per burst
            log.warning("recording falls behind: events are dropped, and kproxy_recorder_dropped_total counts them")

    # --- the recorder's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        files = self._files
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(_IDLE_S)  # checked before the rows, so that the last pass takes all
            if stopping or files.due:
                with self._lock:
                    if self._open is not None and self._open.events:
                        self._hand_over(self._open)
            while self._waiting:
                self._take(self._waiting.popleft())
            if files.due:
                self._roll()
        self._roll()

    def _take(self, portion: "Portion") -> None:
        size = portion.size
        self._guarded(self._add, portion)
        with self._lock:
            self._waiting_bytes -= size
            if self._open is None and not self._waiting:
                self._open = Portion()
        if self._files.full:
            self._roll()

    def _roll(self) -> None:
        self._guarded(self._files.roll)
        try:
            removed = self._retention.remove_old(self.folder)
        except OSError as fault:
            log.error("recorded files that are too old or too many cannot be removed: %s", fault)
        else:
            if removed:
                log.info("removed the %d oldest files of %s", removed, self.folder)

    def _add(self, portion: Portion) -> None:
        self._files.add(portion.batches())

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do `work`; if it fails, drop the rows that are in no file yet. The proxy and the next file go on."""
        try:
            work(*arguments)
        except Exception as fault:
            self._lost += self._files.give_up()
            self._lost_by = fault
            if time.monotonic() - self._reported_s >= _REPORT_S:  # a full disk fails at each portion
                self._report_lost()

    def _report_lost(self) -> None:
        if isinstance(self._lost_by, (OSError, KproxyError)):
            log.error("%d events are lost: %s", self._lost, self._lost_by)
        else:
            log.error("a defect of kproxy's recorder: %d events are lost", self._lost, exc_info=self._lost_by)
        self._lost = 0
        self._reported_s = time.monotonic()
