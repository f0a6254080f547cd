"""The owner's side of the decoding process (`feed_process.py`): starts it, gives it streams, keeps its counters.

Nothing runs until a cluster's `detail` asks for it. If the process ends, it is restarted after a pause that doubles
each time; its knowledge is lost, its counters restart at 0, and relays continue. A process that does not answer for
HANGS_S is killed. Refuses to know what is decoded.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from kproxy.admin import parameters
from kproxy.admin.parameters import NotNow
from kproxy.metrics import Metrics
from kproxy.metrics.counters.groups import InsightCells
from kproxy.proxy import log_lines
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.knowledge import feed_process
from kproxy.proxy.sockets.channel import Channel, Gone, pair

MAX_GROUPS = 1000  # groups of /api/groups per response
DEFAULT_GROUPS = 100
GROUPS_PER_SLICE = 16  # 2 ms of the event loop if each group has a hundred members
ASK_S = 2.0
BEAT_S = 5.0
CLOCK_NS = 10_000_000  # smallest change of the clock offset that is passed on
HANGS_S = 30.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_END_S = 3.0
_WRITE_S = 15.0  # replaces _END_S if the process has rows to write
SNDBUF_BYTES = 1 << 20

log = logging.getLogger("kproxy.insight")


def is_wanted(config: Config) -> bool:
    """Whether any cluster is to be decoded."""
    return any(cluster.detail != "headers" for cluster in config.clusters)


def _start_process(theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the process with its end of the channel, and close that end here, also if the caller was cancelled."""
    with theirs:
        return subprocess.Popen(
            feed_process.command(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the owner only, also while this process still imports
        )


class FeedLink:
    """The decoding process and its channel. give(): called for each new process, to hand out streams to it."""

    def __init__(self, metrics: Metrics, give: Callable[[], None]) -> None:
        self._metrics = metrics
        self._give = give
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._restart: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._hung = False  # the process was killed because it hung
        self._closed = False
        self.record: Path | None = None  # the folder for tables of its rows
        self.settings: dict[str, Any] = {}  # how the tables' content was made, for their metadata
        self._cells: dict[str, bytes] = {}  # pickled cells by cluster, as last received

    @property
    def is_running(self) -> bool:
        return self._channel is not None

    def ensure(self, config: Config) -> None:
        """Start the process if the settings need it and it does not run; forget clusters that were removed."""
        self.record = config.record
        self.settings = {"detail": {cluster.name: cluster.detail for cluster in config.clusters}}
        self.follow({cluster.name for cluster in config.clusters if cluster.detail != "headers"})

    def follow(self, wanted: Set[str]) -> None:
        """Start the process for these clusters, as `ensure` does."""
        for name in wanted:
            self._show(name)
        for name in self._cells.keys() - wanted:
            del self._cells[name]
            if self._channel is not None:
                self._channel.send("forget", [name])
        if wanted and not self.is_running and self._starting is None and self._restart is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())

    def stream(self) -> socket.socket | None:
        """Return the writing end of a new stream to the process; None if it does not run."""
        if self._channel is None:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SNDBUF_BYTES)
        try:
            self._channel.send("source", files=[theirs.fileno()])
            if self._channel.is_behind:  # the descriptor must stay open until it is sent
                file = theirs.detach()
                asyncio.get_running_loop().call_later(_END_S, lambda: socket.close(file))
        finally:
            theirs.close()
        return ours

    def api_groups(self, query: Mapping[str, str]) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield groups, ordered by cluster and group: at most `limit`, those after `after` (CLUSTER/GROUP).

        They come in slices that do not block the event loop; none if no cluster is followed. Raises ValueError, and
        NotNow at any point while the decoding process is restarting.
        """
        self._groups_channel()
        limit = parameters.number(query, "limit", DEFAULT_GROUPS, MAX_GROUPS)
        cluster, _, group = query.get("after", "").partition("/")
        return self._group_slices((cluster, group), limit)

    def _groups_channel(self) -> Channel | None:
        """Return the channel for requests about groups; None if no cluster is followed. Raises NotNow."""
        if self._cells and self._channel is None:
            raise NotNow("the process that follows groups is being started: ask again")
        return self._channel

    async def _group_slices(self, after: tuple[str, str], limit: int) -> AsyncIterator[list[dict[str, Any]]]:
        while limit > 0 and (channel := self._groups_channel()) is not None:  # the process may end between two slices
            wanted = min(limit, GROUPS_PER_SLICE)
            try:
                found: list[dict[str, Any]] = await channel.ask("groups", after, wanted, timeout_s=ASK_S)
            except Gone:
                raise NotNow("the process that follows groups does not answer now: ask again") from None
            yield found
            if len(found) < wanted:
                return
            limit -= len(found)
            after = found[-1]["cluster"], found[-1]["group"]

    async def close(self) -> None:
        """Stop the process, and wait until it has written its rows."""
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process = self._process
        if process is not None:
            within_s = _END_S if self.record is None else _WRITE_S
            try:
                await asyncio.to_thread(process.wait, within_s)
            except subprocess.TimeoutExpired:
                if self.record is not None:
                    text = "the process that follows groups has not ended after %g s: killed, its last rows are lost"
                    log.error(text, within_s)
                process.kill()
                await asyncio.to_thread(process.wait)

    # --- starting and restarting -------------------------------------------------------------------------------------

    async def _start(self) -> None:
        ours, theirs = pair()
        try:
            self._process = await asyncio.to_thread(_start_process, theirs)
        except OSError as fault:
            ours.close()
            log.error("groups and leaders are not followed: no process can be started for it: %s", fault)
            self._later()
            return
        finally:
            self._starting = None
        self._channel = Channel(ours, {"cells": self._take, "dropped": self._dropped}, self._ended)
        self._channel.send("begin", self._metrics.clock_offset_ns, self.record, self.settings, log_lines.form())
        log.info("groups and leaders are followed by process %d", self._process.pid)
        if self._closed:
            return
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._channel, self._process.pid))
        self._give()

    async def _watch(self, channel: Channel, pid: int) -> None:
        """Kill the process if it hangs; `_ended` then restarts it. Send it changes of the clock offset."""
        told_ns = self._metrics.clock_offset_ns
        while await channel.has_beat(HANGS_S):
            if abs(self._metrics.clock_offset_ns - told_ns) > CLOCK_NS:
                told_ns = self._metrics.clock_offset_ns
                channel.send("clock", told_ns)
            await asyncio.sleep(BEAT_S)
        if channel.closed:  # `_ended` restarts it
            return
        self._hung = True
        log.error("the process that follows groups (pid %d) hangs: no answer for %g s, it is killed", pid, HANGS_S)
        with suppress(ProcessLookupError):  # the child has not been reaped, so the pid is still valid
            os.kill(pid, signal.SIGKILL)

    def _ended(self) -> None:
        """Restart the process: it has ended unasked, or no longer reads its channel."""
        channel, self._channel = self._channel, None
        if self._closed:
            return
        process = self._process
        status = None if process is None else process.poll()
        if process is not None and status is None:
            process.kill()
        hung = self._hung or (channel is not None and channel.given_up)
        self._metrics.insight_restarts["hung" if hung else "ended"] += 1
        self._hung = False
        log.error("the process that follows groups has ended (status %s): another is started", status)
        self._later()

    def _later(self) -> None:
        def again() -> None:
            self._restart = None
            if not self._closed:
                self._starting = asyncio.get_running_loop().create_task(self._start())

        self._restart = asyncio.get_running_loop().call_later(self._pause_s, again)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    # --- counters ----------------------------------------------------------------------------------------------------

    def _take(self, name: str, cells: bytes) -> None:
        if name in self._cells:
            self._cells[name] = cells
            self._pause_s = _FIRST_PAUSE_S

    def _dropped(self, rows: int) -> None:
        self._metrics.insight_dropped += rows

    def _show(self, name: str) -> None:
        """Add the cluster's knowledge to scrapes; they unpickle it on their own thread, once per change."""
        self._cells.setdefault(name, b"")
        loaded = b"", InsightCells()

        def load() -> InsightCells:
            nonlocal loaded
            data = self._cells.get(name, b"")
            if data != loaded[0]:
                loaded = data, pickle.loads(data) if data else InsightCells()
            return loaded[1]

        self._metrics.cluster(name).insight = load
