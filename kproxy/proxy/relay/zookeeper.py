"""One ZooKeeper client with its server: bytes pass untouched, and a session reads along.

What arrives is written to the other side at once, as it came. Then the session reads it, SLICE bytes at a time. All
connections together take turns at that (`readings.py`), so that neither a frame nor many connections hold it, nor what
those that end leave unanswered; what is not read yet waits in order, and while that is more than QUEUE_BYTES neither
side is read. A session that gives up (bytes of no frame, a command of four letters) costs nothing
more, and the connection goes on. So does one with more than FREE_BYTES to read, if all together have WAITING_BYTES.

Ends: an end is passed on as an end, since `echo ruok | nc` waits for its answer behind one; a reset as a reset. A side
that takes nothing for STALLED_S, or stays open HALF_CLOSED_S after the other has ended, is given up.

Memory: QUEUE_BYTES and one write buffer per direction, of all together FREE_BYTES each and WAITING_BYTES to be read, of
which CLOSED_BYTES of connections that have ended before all was read; what sessions hold is their room's. Refuses to
know servers, settings, metrics and rows: it is given sockets and callables.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from kproxy.proxy.relay.readings import Readings
from kproxy.zookeeper.session import CLIENT, SERVER, Event, Room, Session

SLICE = 2048
QUEUE_BYTES = 512 * 1024
FREE_BYTES = 16 * 1024
WAITING_BYTES = 64 * 1024 * 1024
CLOSED_BYTES = 16 * 1024 * 1024
CLOSED_OPERATIONS = 50  # without an answer that one turn reports at most, of a connection that has ended
WRITE_BYTES = 512 * 1024
STALLED_S = 120.0
HALF_CLOSED_S = 60.0
KEEP = 64 * 1024  # of a frame
WHOLE = 16 * 1024  # of a body
_QUEUE, _WRITE, _EARLY = 1, 2, 4  # why a side is not read

log = logging.getLogger("kproxy.zookeeper")


class ZooKeeperRelay:
    """Made with both sockets connected; `start` it once.

    events: is given what the session says, with the relay. ended: is called once, when both sides are closed.
    total: bytes of clients and of servers are added to it.
    values: bodies are read, for who records them.
    """

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        now_ns: Callable[[], int],
        events: Callable[[ZooKeeperRelay, list[Event]], None],
        ended: Callable[[ZooKeeperRelay], None],
        room: Room,
        total: list[int],
        readings: Readings,
        *,
        values: bool,
    ) -> None:
        self.session = Session(resync=False, values=values, keep=KEEP, whole=WHOLE, room=room)
        self._total = total
        self._sockets = client, server
        self._now_ns = now_ns
        self._events = events
        self._on_end = ended
        self._loop = asyncio.get_running_loop()
        self._ends = (_End(self, CLIENT), _End(self, SERVER))
        self._queue: deque[tuple[int, memoryview, int]] = deque()
        self._queued = 0
        self._readings = readings
        self._is_reading = False  # it is among `readings`: bytes wait, or the end has to be told
        self._draining = False
        self._silent: set[int] = set()  # sides that have ended
        self._lost: dict[int, Exception | None] = {}  # sides that are closed, and why
        self._early = bytearray()  # of the server, before the client's side can be written to: one read
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._open_sides = 2

    async def start(self) -> None:
        """The server's side first: the client's bytes have somewhere to go."""
        for side in (SERVER, CLIENT):
            end = self._ends[side]
            await self._loop.create_connection(partial(_itself, end), sock=self._sockets[side])

    def finish(self) -> None:
        """End as soon as nothing waits for an answer."""
        self._draining = True
        if not self.session.unanswered:
            self.abort()

    def abort(self) -> None:
        """End now."""
        for end in self._ends:
            if end.transport is not None:
                end.transport.abort()

    # --- called by the ends ------------------------------------------------------------------------------------------

    def made(self, side: int) -> None:
        """A side can be written to: what the other one did before is passed on."""
        early, self._early = self._early, bytearray()
        if early:
            self.take(1 - side, bytes(early))
        self._ends[1 - side].pause(_EARLY, False)
        if 1 - side in self._silent:
            self._pass_end(side)
        if 1 - side in self._lost:
            self._pass_loss(side, self._lost[1 - side])

    def take(self, side: int, data: bytes) -> None:
        other = self._ends[1 - side].transport
        if other is None:
            self._early += data
            self._ends[side].pause(_EARLY, True)
            return
        if other.is_closing():
            return
        other.write(data)
        self._total[side] += len(data)
        if self.session.opaque:
            return
        self._queue.append((side, memoryview(data), self._now_ns()))
        self._queued += len(data)
        self._readings.waiting_bytes += len(data)
        if not self._is_reading:
            self._is_reading = True
            self._readings.add(self)
        if self._readings.waiting_bytes > WAITING_BYTES and self._queued > FREE_BYTES:
            self._give_up()
        self._pause_if_full()

    def ended(self, side: int) -> None:
        """A side sends nothing more."""
        self._silent.add(side)
        if len(self._silent) == len(self._ends):
            self.close()
            return
        self._pass_end(1 - side)
        self._after(HALF_CLOSED_S, "half")

    def _pass_end(self, side: int) -> None:
        transport = self._ends[side].transport
        if transport is not None and not transport.is_closing() and transport.can_write_eof():
            transport.write_eof()

    def stalled(self, side: int, is_stalled: bool) -> None:
        """A side takes no more bytes, or again."""
        self._ends[1 - side].pause(_WRITE, is_stalled)
        if is_stalled:
            self._after(STALLED_S, side)
        elif (timer := self._timers.pop(side, None)) is not None:
            timer.cancel()

    def lost(self, side: int, fault: Exception | None) -> None:
        self._lost[side] = fault
        self._pass_loss(1 - side, fault)
        self._after(HALF_CLOSED_S, "half")
        self._open_sides -= 1
        if self._open_sides:
            return
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._readings.closed_bytes += self._queued
        if self._readings.closed_bytes > CLOSED_BYTES:
            self._readings.closed_bytes -= self._queued
            self._give_up()
        if not self._is_reading:
            self._is_reading = True
            self._readings.add(self)

    def _finish(self) -> bool:
        """Both sides are closed, and all is read: report operations without an answer; whether there are more."""
        more = False
        try:
            more = self.session.close(CLOSED_OPERATIONS)
            self._tell()
        except Exception:
            log.exception("a defect of kproxy: what a connection said at its end is not understood")
            more = False
        if not more:
            self._on_end(self)
        return more

    def _pass_loss(self, side: int, fault: Exception | None) -> None:
        transport = self._ends[side].transport
        if transport is not None:
            transport.abort() if fault is not None else transport.close()

    def _after(self, seconds: float, what: object) -> None:
        if what not in self._timers:
            self._timers[what] = self._loop.call_later(seconds, self.abort)

    # --- reading along -----------------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read the next slice; whether there is more."""
        before = self._queued
        try:
            if self._queue and not self.session.opaque:
                self._read_slice()
            self._tell()
        except Exception:  # bytes pass all the same
            log.exception("a defect of kproxy: a connection is passed on and no longer read")
            self.session.give_up()
            self.session.events.clear()
        if self.session.opaque:
            self._clear()
        self._is_reading = bool(self._queue)
        if not self._open_sides:
            self._readings.closed_bytes -= before - self._queued
            if not self._queue:
                self._is_reading = self._finish()
            return self._is_reading
        self._pause_if_full()
        if self._draining and not self._queue and not self.session.unanswered:
            self.close()
        return self._is_reading

    def _give_up(self) -> None:
        """Read nothing more of it: too much waits of all connections, or of those that have ended."""
        self.session.give_up()
        self._clear()

    def _clear(self) -> None:
        self._queue.clear()
        self._readings.waiting_bytes -= self._queued
        self._queued = 0

    def _pause_if_full(self) -> None:
        for end in self._ends:
            end.pause(_QUEUE, self._queued > QUEUE_BYTES)

    def _read_slice(self) -> None:
        side, data, now_ns = self._queue.popleft()
        self.session.receive(side, data[:SLICE], now_ns)
        count = min(SLICE, len(data))
        self._queued -= count
        self._readings.waiting_bytes -= count
        if count < len(data):
            self._queue.appendleft((side, data[count:], now_ns))

    def _tell(self) -> None:
        if self.session.events:
            self._events(self, self.session.events)
            self.session.events.clear()

    def close(self) -> None:
        """End both sides behind what is written."""
        for end in self._ends:
            if end.transport is not None:
                end.transport.close()


def _itself(end: _End) -> _End:
    return end


class _End(asyncio.Protocol):
    """One side's socket."""

    def __init__(self, relay: ZooKeeperRelay, side: int) -> None:
        self.transport: asyncio.Transport | None = None
        self._relay = relay
        self._side = side
        self._paused = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BYTES)
        self._relay.made(self._side)

    def data_received(self, data: bytes) -> None:
        self._relay.take(self._side, data)

    def eof_received(self) -> bool:
        self._relay.ended(self._side)
        return True

    def connection_lost(self, fault: Exception | None) -> None:
        self._relay.lost(self._side, fault)

    def pause_writing(self) -> None:
        self._relay.stalled(self._side, True)

    def resume_writing(self) -> None:
        self._relay.stalled(self._side, False)

    def pause(self, why: int, wanted: bool) -> None:
        before = self._paused
        self._paused = before | why if wanted else before & ~why
        if self.transport is None or self.transport.is_closing() or bool(before) == bool(self._paused):
            return
        if self._paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
