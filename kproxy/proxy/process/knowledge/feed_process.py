"""The process that decodes the exchanges copied by relays and keeps the knowledge of each cluster.

Decoding an answer about 50,000 partitions takes a second of Python, and a thread of the relaying process would take
that from its event loop. Therefore a separate program with low priority decodes. It has a channel to its owner (the
parent of several workers, or the only process), and a stream from each relaying process. It ends when its owner does.

Exchanges of several connections and processes are sorted by the times of their answers, if none is later than
REORDER_S. No exchange waits longer than WAIT_S: packets of `kproxy watch` have wall clock time, which an administrator
may change, and this process learns the change (`clock`) a little later. Once a second it sends its owner all cells of
each cluster that has changed. With `record`, it writes rows to tables; when the owner ends, it decodes and writes all
exchanges received before it ends too.

Bounded: HELD_BYTES of waiting exchanges, beyond which streams are not read and relays drop; and the bounds of each
cluster's knowledge. Refuses to know relays and HTTP.
"""

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any

from kproxy.insight import rows
from kproxy.insight.rows import Row
from kproxy.proxy import log_lines
from kproxy.proxy.filters.feed import KeptExchange, Unpacker
from kproxy.proxy.process.knowledge.known_cluster import KnownCluster
from kproxy.proxy.sockets.channel import Channel, Handler

if TYPE_CHECKING:
    from kproxy.tables.live.knowledge_recorder import KnowledgeRecorder

REORDER_S = 0.15
WAIT_S = 1.0
HELD_BYTES = 32 << 20
PUBLISH_S = 1.0
_TURN_S = 0.02  # s of decoding before it reads the channel again
_STEP_S = 0.05
_READ_BYTES = 1 << 20
_NICE = 5
_MAX_CLUSTERS = 4096

log = logging.getLogger("kproxy.insight")


def run(file: int) -> None:
    """Run the decoding process until it ends; `file`: its end of the channel."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # its owner handles them, and ends
    os.nice(_NICE)
    gc.freeze()
    asyncio.run(_Process(socket.socket(fileno=file)).run())


def command(file: int) -> list[str]:
    """Return the command line that runs it as a separate program."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run; run({file})"]


class _Process:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ended = asyncio.Event()
        self._clusters: dict[str, KnownCluster] = {}
        self._heap: list[tuple[int, int, float, KeptExchange]] = []
        self._held_bytes = 0
        self._serial = 0
        self._sources: dict[socket.socket, Unpacker] = {}
        self._is_reading = True
        self._changed: set[str] = set()
        self._clock_offset_ns = 0
        self._recorder: KnowledgeRecorder | None = None
        self._reported_dropped = 0  # lost rows that were reported
        self._last_source: dict[str, str] = {}  # cluster -> source of its latest exchange

    async def run(self) -> None:
        handlers: dict[str, Handler] = {
            "begin": self._begin,
            "source": self._source,
            "groups": self._groups,
            "forget": self._forget,
            "clock": self._clock,
        }
        self._channel = Channel(self._sock, handlers, self._ended.set)
        working = asyncio.create_task(self._work())
        publishing = asyncio.create_task(self._publish())
        await self._ended.wait()
        working.cancel()
        publishing.cancel()
        if self._recorder is not None:
            self._finish()

    def _begin(self, clock_offset_ns: int, record: Path | None, settings: dict[str, Any], log_format: str) -> None:
        """Begin: set the clock offset and the log; record: the folder for tables of rows."""
        log_lines.begin("warning", log_format)
        self._clock_offset_ns = clock_offset_ns
        if record is not None:
            from kproxy.tables.live.knowledge_recorder import KnowledgeRecorder  # heavy, and optional

            self._recorder = KnowledgeRecorder(record, settings)

    def _clock(self, offset_ns: int) -> None:
        """Set the difference of wall clock and monotonic time, which gives the time of later exchanges."""
        self._clock_offset_ns = offset_ns

    def _forget(self, names: Iterable[str]) -> None:
        """Complete clusters that the settings no longer contain."""
        for name in names:
            self._complete(name)

    def _complete(self, name: str) -> None:
        """Record the last rows of a cluster and forget it."""
        cluster = self._clusters.pop(name, None)
        if cluster is not None and self._recorder is not None:
            self._record(self._last_source.pop(name, None), cluster.knowledge.finish())

    def _finish(self) -> None:
        """Decode what ended processes have sent, and write all rows."""
        assert self._recorder is not None
        for sock, unpacker in self._sources.items():
            with suppress(OSError):
                while data := sock.recv(_READ_BYTES):
                    self._push(unpacker, data)
        while self._heap:
            self._process_first()
        for name in list(self._clusters):
            self._complete(name)
        self._recorder.close()

    # --- streams -----------------------------------------------------------------------------------------------------

    def _source(self, files: Iterable[int]) -> None:
        """Read the exchanges of another relaying process."""
        for file in files:
            sock = socket.socket(fileno=file)
            sock.setblocking(False)
            self._sources[sock] = Unpacker()
            if self._is_reading:
                asyncio.get_running_loop().add_reader(sock, self._readable, sock)

    def _readable(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(sock)
            self._sources.pop(sock, None)
            sock.close()
            return
        self._push(self._sources[sock], data)
        if self._held_bytes > HELD_BYTES and self._is_reading:
            self._read(False)

    def _push(self, unpacker: Unpacker, data: bytes) -> None:
        now = monotonic()
        for kept in unpacker.feed(data):
            self._serial += 1
            self._held_bytes += kept.size_bytes
            heappush(self._heap, (kept.at_ns, self._serial, now, kept))

    def _read(self, reads: bool) -> None:
        """Start or stop reading the streams; unread data stays in their buffers."""
        self._is_reading = reads
        loop = asyncio.get_running_loop()
        for sock in self._sources:
            if reads:
                loop.add_reader(sock, self._readable, sock)
            else:
                loop.remove_reader(sock)

    # --- knowledge ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            end = monotonic() + _TURN_S
            while self._heap and self._is_due() and monotonic() < end:
                self._process_first()
            if not self._is_reading and self._held_bytes < HELD_BYTES // 2:
                self._read(True)
            await asyncio.sleep(0 if self._heap and self._is_due() else _STEP_S)

    def _is_due(self) -> bool:
        """Whether to decode the first waiting exchange: it has waited for earlier ones, or streams are not read."""
        if not self._is_reading:
            return True
        at_ns, _, came_s, _ = self._heap[0]
        now_ns = monotonic_ns() + self._clock_offset_ns
        return at_ns + int(REORDER_S * 1e9) <= now_ns or came_s + WAIT_S <= monotonic()

    def _process_first(self) -> None:
        *_, kept = heappop(self._heap)
        self._held_bytes -= kept.size_bytes
        try:
            self._process(kept)
        except Exception:  # a fault in one exchange must not stop the decoding of others
            log.exception("a defect of kproxy: api=%d is not understood", kept.api_key)
            self._cluster(kept.whose.cluster).cells.left_out["undecodable"] += 1

    def _process(self, kept: KeptExchange) -> None:
        cluster = self._cluster(kept.whose.cluster)
        found = cluster.learn(kept)
        self._changed.add(cluster.name)
        if self._recorder is not None:
            self._last_source[cluster.name] = kept.whose.source
            self._record(kept.whose.source, found)

    def _record(self, source: str | None, found: Iterable[Row]) -> None:
        assert self._recorder is not None
        for row in found:
            self._recorder.add(rows.TABLES[type(row)], source, row)

    def _cluster(self, name: str) -> KnownCluster:
        cluster = self._clusters.get(name)
        if cluster is None:
            if len(self._clusters) >= _MAX_CLUSTERS:
                del self._clusters[next(iter(self._clusters))]
            cluster = self._clusters[name] = KnownCluster(name)
        return cluster

    # --- reports to the owner ----------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_S)
            self._tick()
            if self._recorder is not None:
                self._recorder.tick()
                if self._recorder.dropped > self._reported_dropped:
                    self._channel.send("dropped", self._recorder.dropped - self._reported_dropped)
                    self._reported_dropped = self._recorder.dropped
            if self._channel.is_behind:
                continue
            for name in list(self._changed):
                self._changed.discard(name)
                cluster = self._clusters.get(name)
                if cluster is not None:
                    self._channel.send("cells", name, pickle.dumps(cluster.cells, pickle.HIGHEST_PROTOCOL))
                await asyncio.sleep(0)

    def _tick(self) -> None:
        """Record rows that waited for later exchanges, once their time to wait has passed."""
        now_ns = monotonic_ns() + self._clock_offset_ns - int(REORDER_S * 1e9)
        for name, cluster in self._clusters.items():
            found = cluster.tick(now_ns)
            if found:
                self._changed.add(name)
                if self._recorder is not None:
                    self._record(self._last_source.get(name), found)

    def _groups(self, after: tuple[str, str], limit: int) -> list[dict[str, Any]]:
        """Return groups of all clusters after `after`, in the order of (cluster, group)."""
        found: list[dict[str, Any]] = []
        for name in sorted(self._clusters):
            if name >= after[0] and len(found) < limit:
                found += self._clusters[name].groups(after[1] if name == after[0] else None, limit - len(found))
        return found
