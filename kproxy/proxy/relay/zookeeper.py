"""A ZooKeeper client and its server: bytes pass unchanged, and a session reads a copy.

Bytes are written to the other side at once. Then the session reads them, SLICE bytes at a time, in turns with all other
connections (`readings.py`), so that neither a large frame nor many connections delay the loop. Unread bytes queue in
order; while a connection has more than QUEUE_BYTES of them, neither side is read. A session that gives up (bytes that
are no frame, a four-letter command) costs nothing more, and the connection continues. A session also gives up if its
connection has more than FREE_BYTES queued while all connections together have WAITING_BYTES.

Ends: the relay passes on an end as an end, since `echo ruok | nc` waits for its answer after one, and a reset as a
reset. It closes a connection if a side accepts nothing for STALLED_S, or stays open HALF_CLOSED_S after the other has
ended.

Memory: QUEUE_BYTES and one write buffer per direction. All connections together: FREE_BYTES each and WAITING_BYTES
queued, including CLOSED_BYTES of closed connections; `Room` bounds the sessions. Refuses to know servers, settings,
metrics and rows: it is given sockets and callables.
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
CLOSED_OPERATIONS = 50  # unanswered operations of a closed connection reported per turn
WRITE_BYTES = 512 * 1024
STALLED_S = 120.0
HALF_CLOSED_S = 60.0
KEEP = 64 * 1024  # bytes kept of a frame
WHOLE = 16 * 1024  # bytes of a body that is read whole
_QUEUE, _WRITE, _EARLY = 1, 2, 4  # why a side is not read

log = logging.getLogger("kproxy.zookeeper")


class ZooKeeperRelay:
    """Relays between two connected sockets, from `start` on.

    events: called with the relay and events of the session. ended: called once, when both sides are closed. total: the
    relay adds the bytes of the client and of the server. values: read bodies, for recording.
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
        self._is_reading = False  # it is in `readings`: bytes are queued, or the end must be reported
        self._draining = False
        self._silent: set[int] = set()  # sides that have ended
        self._lost: dict[int, Exception | None] = {}  # closed sides, with the reason
        self._early = bytearray()  # bytes of the server before the client's side is writable: one read
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._open_sides = 2

    async def start(self) -> None:
        """Connect the transports, the server's first, so that the client's bytes can be written."""
        for side in (SERVER, CLIENT):
            end = self._ends[side]
            await self._loop.create_connection(partial(_itself, end), sock=self._sockets[side])

    def finish(self) -> None:
        """Close as soon as no operation is pending."""
        self._draining = True
        if not self.session.unanswered:
            self.abort()

    def abort(self) -> None:
        """Close now."""
        for end in self._ends:
            if end.transport is not None:
                end.transport.abort()

    # --- called by the ends ------------------------------------------------------------------------------------------

    def made(self, side: int) -> None:
        """Pass on earlier bytes and the end of the other side, since this side is writable now."""
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
        """Handle the end of a side's bytes."""
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
        """Handle that a side accepts no more bytes, or accepts bytes again."""
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
        """Report unanswered operations after both sides have closed and all is read; returns whether there are more."""
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
        """Read the next slice; returns whether there is more."""
        before = self._queued
        try:
            if self._queue and not self.session.opaque:
                self._read_slice()
            self._tell()
        except Exception:  # the relay continues to forward bytes
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
        """Stop reading this connection: too many bytes are queued, of all connections or of closed ones."""
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
        """End both sides after the written bytes."""
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
