"""Two sockets and one Session: read, forward, and nothing else.

Raw non-blocking sockets and readiness callbacks: `recv_into` one buffer that all connections of a worker share, then
`send` views of that buffer at once. Nothing may await between a read and the last use of its view. The relay copies
bytes that the socket did not accept, and stops reading the side that sent them until they are sent (back-pressure). It
reads once per readiness event, and gives the session a bounded share of work per call. The session puts the rest back,
for a turn after other connections had theirs, so that no connection starves another.

Memory per connection: one read (512 KiB) unsent per direction, one read put back per side, the buffers of its session,
and at most pairing.LIMIT pending requests; `pressure.py` bounds the sum. An idle relay has nothing but its sockets.

Ends: a relay passes on an end as an end, after everything before it is delivered, and a reset as a reset. It closes a
side that takes nothing for too long: while that side is not read, its end goes unnoticed, and clients that reconnect
would use up all connections. Refuses to know names, routes, rewriting and metrics' meaning: it is given connected
sockets and callables.
"""

from __future__ import annotations

import logging
import socket
import struct
from asyncio import AbstractEventLoop
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import Any

from kproxy.proxy.relay.compiled import Lendable
from kproxy.proxy.relay.draining import Draining
from kproxy.proxy.relay.ends import ANONYMOUS
from kproxy.proxy.relay.in_flight import FEW, FULL, InFlightLimit
from kproxy.proxy.relay.peer import Counting, Peer, ignore_readiness
from kproxy.proxy.relay.pressure import FREE_REQUESTS, Pressure
from kproxy.proxy.relay.slow_lanes import SlowLanes
from kproxy.proxy.sockets.poller import Poller
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT, SIDES, Desync, Event
from kproxy.wire.session import Session

FIRST_BYTES = 256  # the first bytes of a client, for the admission check
# Longest wait of unsent bytes in s, by side: a client has the connections.max.idle.ms of brokers, a broker the time
# until every client has timed out. HALF_CLOSED_S: how long a side may stay open after the other has ended.
STALLED_S = (600.0, 120.0)
HALF_CLOSED_S = 60.0
HANDSHAKE_S = 5.0  # how long an end waits for the answer to a SaslHandshake, which brokers send at once

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with a timeout of 0: close() sends a reset

log = logging.getLogger("kproxy.relay")


class Relay(InFlightLimit, Draining, Lendable):
    """A client connection and its broker connection, until both are closed."""

    __slots__ = ()

    def __init__(
        self,
        loop: AbstractEventLoop,
        poller: Poller,
        pressure: Pressure,
        clock_offset_ns: int,
        client: socket.socket,
        broker: socket.socket,
        session: Session,
        info: ConnectionInfo,
        counting: Counting,
        sinks: Sequence[Callable[[list[Event]], None]],
        on_fault: Callable[[Relay, Desync], None],
        on_closed: Callable[[Relay, str], None],
        lanes: SlowLanes | None = None,
    ) -> None:
        """lanes: run the session's slow work; None: the relay runs it, in turns like all work that is put back."""
        self.info = info
        self.number = 0
        self.principal = ANONYMOUS
        self.listener = ""
        self.tls_version = None
        self._session = session
        self._lending = None
        self._loop = loop
        self._poller = poller
        self._pressure = pressure
        self._clock_offset_ns = clock_offset_ns
        self._peers = (Peer(client), Peer(broker))
        self._counting = counting
        self._sinks = tuple(sinks)
        self._on_fault = on_fault
        self._on_closed = on_closed
        self._lanes = lanes
        self._session_ns = 0
        self._faults = 0
        session.max_in_flight = min(session.most_in_flight, FREE_REQUESTS)  # the rest is lent
        self._in_flight_state = FEW
        self._silent = None
        self._first_end = CLIENT
        self._between = None
        self._pause = None
        self._draining = False
        self._finishing = False
        self._to_boundary = False
        self._drained_as = "drained"
        self._lingering = None
        self._unheard = None
        self.closed = False

    def start(self, admits: Callable[[bytes], bool] | None = None) -> None:
        """Read both sides. `admits` gets a copy of the client's first bytes before they are read; False: close."""
        for side, peer in enumerate(self._peers):
            self._poller.meet(peer.fd)
            peer.readable = self._reader(side)
            if peer.tls is not None:
                peer.tls.on_blocked = partial(self._wait_for_room, side)
                peer.tls.on_leftover = partial(self._read_leftover, peer, side)
        if admits is not None:
            client = self._peers[CLIENT]
            client.readable = self._first_read(admits, client.readable)
        for side in (CLIENT, BROKER):
            self._resume(side)

    def _first_read(self, admits: Callable[[bytes], bool], readable: Callable[[], None]) -> Callable[[], None]:
        """Return the callback for a client's first bytes; it is replaced by `readable`."""
        client = self._peers[CLIENT]

        def first() -> None:
            try:
                first_bytes = client.sock.recv(FIRST_BYTES, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as fault:
                self._broken(CLIENT, fault)
                return
            try:
                if first_bytes and not admits(first_bytes):
                    self.close("loop", reset=True)
                    return
            except Exception:
                self._crashed()
                return
            client.readable = readable
            self._poller.add_reader(client.fd, readable)
            readable()

        return first

    # --- the hot path ------------------------------------------------------------------------------------------------

    def _reader(self, side: int) -> Callable[[], None]:
        return partial(Relay._readable, self, side)

    def _readable(self, side: int) -> None:
        """Read a side once, and forward what it sent."""
        try:
            session, peer = self._session, self._peers[side]
            start = self._poller.now_ns
            resumes = session.backlog[side] is not None
            if resumes:
                count, arrived = 1, peer.arrived_ns
            else:
                try:
                    count, arrived = self._receive(side, start)
                except (BlockingIOError, InterruptedError):
                    return
                except OSError as fault:
                    self._broken(side, fault)
                    return
            if not count:
                self._ended(side)
                return
            session_ns = self._session_time(side, start, arrived)
            if self._poller.queuing:
                session.limit_next_call()
            if resumes:
                pieces = session.resume(side, session_ns)
            else:
                pieces = session.receive(side, self._pressure.buffer[:count], session_ns)
            for to, piece in pieces:
                self._send(side, to, piece, arrived)
            self._count_forwarded(side, arrived)
            if session.events:
                self._emit()
            if len(session.pending) >= min(session.most_in_flight, FREE_REQUESTS):
                self._limit_in_flight()
            elif self._in_flight_state:
                self._thin_out()
            if resumes or session.backlog[CLIENT] is not None or session.backlog[BROKER] is not None:
                self._put_back(side, arrived)
            if self._between is not None:
                self._between()
            elif (lending := self._lending) is not None:
                lending.reads -= 1
                if lending.reads <= 0:
                    lending.try_it()
        except Exception:
            self._crashed()

    def _receive(self, side: int, start: int) -> tuple[int, int]:
        """Receive into the common buffer, and count how long the bytes waited; return (bytes, when they arrived)."""
        poller, sock, buffer, lag = self._poller, self._peers[side].sock, self._pressure.buffer, self._counting.lag
        arrived = poller.turn_ns
        if self._to_boundary and side == CLIENT:
            count = self._receive_to_boundary(buffer)
        elif poller.is_late and self._between is None:
            count, arrived = poller.receive_late(sock, buffer)
            poller.lag_bucket = bisect_left(lag.bounds, start - arrived)
        else:
            count = sock.recv_into(buffer)
        if count:
            lag.counts[poller.lag_bucket] += 1
            lag.total_ns += start - arrived
        return count, arrived

    def _session_time(self, side: int, start: int, arrived: int) -> int:
        """Return the session's time of a read, which never decreases.

        The broker's time begins when kproxy handles the request, and ends when the answer arrives. Bytes that arrived
        with earlier ones, or were put back, have the time of these.
        """
        self._session_ns = start if side == CLIENT else max(arrived, self._session_ns)
        return self._session_ns + self._clock_offset_ns

    def _send(self, side: int, to: int, piece: Any, arrived: int) -> None:
        """Send a piece of the bytes of `side`; keep what is not accepted."""
        receiver = self._peers[to]
        if receiver.unsent is None:
            try:
                sent = receiver.send(piece)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._unwritable(to)
                return
            if sent == len(piece):
                return
            piece = piece[sent:]
        self._keep(side, to, piece, arrived)

    def _count_forwarded(self, side: int, arrived: int) -> None:
        """Count how long the frames that a read completed were inside kproxy, now or once they are sent."""
        poller, peer, target = self._poller, self._peers[side], self._peers[1 - side]
        inside = self._counting.inside[side]
        poller.now_ns = done = monotonic_ns()
        took = done - arrived
        # Unless the turn is late, the next event has waited since the begin of the turn.
        poller.lag_bucket = bucket = bisect_left(inside.bounds, took)
        frames = self._session.completed[side] - peer.seen
        if frames:
            peer.seen += frames
            if target.unsent is None:
                inside.counts[bucket] += frames
                inside.total_ns += frames * took
            else:
                target.frames += frames

    # --- unsent bytes ------------------------------------------------------------------------------------------------

    def _keep(self, side: int, to: int, rest: Any, since: int) -> None:
        """Copy bytes that `to` did not accept, and stop reading the side that sent them."""
        peer = self._peers[to]
        if not peer.unsent:  # it is empty while only bytes of TLS itself wait
            peer.since = since
        self._wait_for_room(to)
        assert peer.unsent is not None
        peer.unsent += rest
        peer.kept_bytes += len(rest)
        self._keep_bytes(len(rest))
        self._count_tls(peer)
        if len(rest) > len(self._pressure.buffer) and not self._keep_large(to, len(rest)):
            return
        if side not in peer.feeders:
            peer.feeders += (side,)
        self._unread(side, counted=True)

    def _count_tls(self, peer: Peer) -> None:
        """Count the bytes that TLS buffers; only when a send or read stops, not at each one."""
        if peer.tls is not None and not self.closed:
            held_bytes = peer.tls.held_bytes
            self._keep_bytes(held_bytes - peer.tls_bytes)
            peer.tls_bytes = held_bytes

    def _keep_large(self, to: int, count: int) -> bool:
        """Count a piece that is larger than a read. False: there is no memory, and the connection is closed."""
        peer = self._peers[to]
        peer.large_bytes += count
        if not self._pressure.keep_large(count, self._takes_none, monotonic_ns()):
            self._takes_none()
        return not self.closed

    def _takes_none(self) -> None:
        """Close the connection: one side does not take a large frame, and others need the memory."""
        self._counting.limit_reached("unsent_frames")
        self.close(f"{SIDES[CLIENT if self._peers[CLIENT].large_bytes else BROKER]}_stalled", reset=True)

    def _drop_large(self, peer: Peer) -> None:
        if peer.large_bytes:
            self._pressure.drop_large(peer.large_bytes, self._takes_none)
            peer.large_bytes = 0

    def _wait_for_room(self, to: int) -> None:
        """Call `_writable` when a side accepts bytes again, from the relay or from its TLS."""
        peer = self._peers[to]
        if peer.unsent is None and not self.closed:
            peer.unsent = bytearray()
            peer.patience = self._loop.call_later(STALLED_S[to], self.close, f"{SIDES[to]}_stalled")
            self._poller.add_writer(peer.fd, self._writable, to)

    def _writable(self, to: int) -> None:
        peer = self._peers[to]
        unsent = peer.unsent
        try:
            assert unsent is not None
            try:
                sent = peer.send(unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._unwritable(to)
                return
            if sent < len(unsent):
                del unsent[:sent]
            else:
                self._flushed(to)
        except Exception:
            self._crashed()

    def _flushed(self, to: int) -> None:
        """Count the bytes as sent, pass on an end, and read the sides that were paused."""
        peer = self._peers[to]
        peer.unsent = None
        self._pressure.keep(-peer.kept_bytes)
        peer.kept_bytes = 0
        self._drop_large(peer)
        self._count_tls(peer)
        assert peer.patience is not None
        peer.patience.cancel()
        peer.patience = None
        self._poller.remove_writer(peer.fd)
        if peer.frames:
            inside = self._counting.inside[1 - to]
            duration_ns = monotonic_ns() - peer.since
            inside.counts[bisect_left(inside.bounds, duration_ns)] += peer.frames
            inside.total_ns += peer.frames * duration_ns
            peer.frames = 0
        if peer.stops:
            self._stop(to)
            if self.closed:
                return
        feeders, peer.feeders = peer.feeders, ()
        for side in feeders:
            self._resume(side)
        if self._draining:
            self._drain_on()

    def _put_back(self, side: int, arrived: int) -> None:
        """Schedule the bytes that the session has put back for a later turn of the loop."""
        if self.closed:  # by a fault in this call
            return
        self._peers[side].arrived_ns = arrived
        for each, peer in enumerate(self._peers):
            backlog = self.session.backlog[each]
            put_back = 0 if backlog is None else len(backlog)
            if put_back != peer.put_back_bytes:
                self._keep_bytes(put_back - peer.put_back_bytes)
                peer.put_back_bytes = put_back
            if backlog is None:
                peer.arrived_ns = 0
            else:
                peer.arrived_ns = peer.arrived_ns or arrived  # a call for one side can leave bytes of the other
                self._unread(each)
            if each == CLIENT and self.session.owes:
                self._fill()
            self._resume(each)

    def _go_on(self, side: int) -> None:
        """Continue with the bytes that the session has put back."""
        peer = self._peers[side]
        peer.resuming = False
        if not self._waits(side):
            self._poller.now_ns = monotonic_ns()
            peer.readable()
            self._count_tls(peer)
            self._resume(side)

    def _unread(self, side: int, counted: bool = False) -> None:
        peer = self._peers[side]
        if peer.reading:
            peer.reading = False
            self._poller.remove_reader(peer.fd)
            if counted:
                self._counting.paused(SIDES[side])

    def _resume(self, side: int) -> None:
        """Read a side again, unless it has ended, feeds unsent bytes, or is paused for another reason."""
        peer = self._peers[side]
        if peer.reading or peer.resuming or self._waits(side):
            return
        if self.session.backlog[side] is not None:
            peer.resuming = True
            work = self.session.slow[side]
            if work is not None and work.elsewhere is not None:
                elsewhere, work.elsewhere = work.elsewhere, None
                elsewhere(partial(self._go_on, side))
            elif work is None or self._lanes is None:
                self._poller.later(self._go_on, side)
            else:
                self._lanes.add(work, partial(self._poller.later, self._go_on, side))
            return
        peer.reading = True
        self._poller.add_reader(peer.fd, peer.readable)
        self._read_leftover(peer, side)

    def _read_leftover(self, peer: Peer, side: int) -> None:
        """Read, in a later turn, bytes that TLS has already taken from the kernel: epoll does not report them."""
        if peer.tls is not None and peer.tls.leftover and not peer.resuming:
            self._count_tls(peer)
            peer.resuming = True
            self._poller.later(self._go_on, side)

    def _waits(self, side: int) -> bool:
        """Whether a side must not be read for now."""
        if self.closed or self._peers[side].ended or any(side in other.feeders for other in self._peers):
            return True
        stops = (self._pause is not None or (self._draining and not self._finishing)) and side == CLIENT
        return (stops and self.session.at_boundary(CLIENT)) or (side == CLIENT and self._in_flight_state == FULL)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _ended(self, side: int) -> None:
        """Handle the end of a side: pass it on once everything before it is sent."""
        if self._unheard is not None and not self._draining:
            self._unheard.cancel()
            self._unheard = None
        if side == CLIENT and self.session.holds_back:
            # Its bytes wait for the broker's next answer; the end is read again after that.
            self._unread(CLIENT)
            self._in_flight_state = FULL
            if self._unheard is None:
                self._unheard = self._loop.call_later(HANDSHAKE_S, self.close, f"{SIDES[CLIENT]}_closed")
            return
        peer, other = self._peers[side], self._peers[1 - side]
        peer.ended = True
        if not other.ended:
            self._first_end = side
        self._unread(side)
        self.session.close(side, self._now_ns())
        self._emit()
        if peer.dead:
            self.close(f"{SIDES[side]}_reset", reset=True)
        if self.closed:
            return
        other.stops = True
        if other.unsent is None:
            self._stop(1 - side)
        if side == BROKER and self._in_flight_state == FULL:  # no request is pending any more
            self._unfill()
        if self._draining:
            self._drain_on()

    def _stop(self, to: int) -> None:
        """Shut down writing to a side once all bytes of the ended side are sent; close if both have ended."""
        one, other = self._peers
        if one.ended and other.ended and one.unsent is None and other.unsent is None:
            self.close(f"{SIDES[self._first_end]}_closed")
            return
        try:
            self._peers[to].sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:  # TLS cannot send its close_notify yet: try again when writable
            self._wait_for_room(to)
            return
        except OSError:
            self._unwritable(to)
            return
        self._peers[to].patience = self._loop.call_later(HALF_CLOSED_S, self.close, f"{SIDES[1 - to]}_closed")

    def _broken(self, side: int, fault: OSError) -> None:
        """Reset the other side, since one was reset or is unreachable."""
        log.debug("%s side of %s broke: %s", SIDES[side], self.info.client_address, fault)
        self.close(f"{SIDES[side]}_reset", reset=True)

    def _unwritable(self, to: int) -> None:
        """Handle a side that accepts no more bytes: read its pending bytes; the reader then finds its end or reset."""
        peer = self._peers[to]
        if peer.ended:
            self.close(f"{SIDES[to]}_reset", reset=True)
            return
        peer.dead = True
        if peer.unsent is not None:
            peer.frames = 0
            self._flushed(to)

    def _crashed(self) -> None:
        """Close this connection after a defect of kproxy, so that others continue."""
        log.exception("a defect of kproxy closed the connection of %s", self.info.client_address)
        self.session.events.clear()  # sinks have taken them, or raised: none gets an event twice
        self.close("defect", reset=True)

    def close(self, cause: str, *, reset: bool = False) -> None:
        """Close both sides now, even with unsent bytes. `cause` is a label with few values."""
        if self.closed:
            return
        self.closed = True
        self._between = self._pause = None
        for timer in (self._lingering, self._unheard):
            if timer is not None:
                timer.cancel()
        self._forget_end()
        lending = self._lending
        if lending is not None:
            lending.take_back()
            lending.end()
            self._lending = None
        now_ns = self._now_ns()
        first = BROKER if cause.startswith(SIDES[BROKER]) else CLIENT
        try:
            self.session.close(first, now_ns, cause)
            self.session.close(1 - first, now_ns, cause)
        except Exception:
            log.exception("a defect of kproxy: the session of %s did not close", self.info.client_address)
        self._give_back()
        for peer in self._peers:
            self._pressure.keep(-peer.kept_bytes - peer.put_back_bytes - peer.tls_bytes)
            peer.kept_bytes = peer.put_back_bytes = peer.tls_bytes = 0
            self._drop_large(peer)
            if peer.patience is not None:
                peer.patience.cancel()
            self._poller.remove_reader(peer.fd)
            if peer.unsent is not None:
                self._poller.remove_writer(peer.fd)
                peer.unsent = None
            if peer.tls is not None:
                peer.tls.on_blocked = peer.tls.on_leftover = None
            if reset:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            elif peer.tls is not None:
                with suppress(OSError):
                    peer.tls.shutdown(socket.SHUT_WR)
            peer.sock.close()
            peer.dead = True  # drops further pieces of the current read
            peer.readable = (
                ignore_readiness  # the reader refers to this relay: without the cycle, memory is freed at once
            )
        self._emit_last()
        self._counting.closed(cause, spoke=self.session.received_bytes[CLIENT] > 0)
        self._on_closed(self, cause)

    def give_up_held(self) -> None:
        """Close a client whose incomplete request is held, since others need the memory. Raises nothing."""
        try:
            self.session.give_up_held(self._now_ns())
            self._emit()
        except Exception:
            self._crashed()

    # --- events ------------------------------------------------------------------------------------------------------

    def _emit(self) -> None:
        """Pass events to the sinks, and faults to `on_fault`; a fatal fault closes both sides."""
        events = self.session.events
        for sink in self._sinks:
            sink(events)
        self._report_faults()

    def _emit_last(self) -> None:
        """Pass the events of a close to each sink, even if another raises. Raises nothing."""
        events = self.session.events
        for sink in self._sinks:
            try:
                sink(events)
            except Exception:
                log.exception("a defect of kproxy lost events of the connection of %s", self.info.client_address)
        try:
            self._report_faults()
        except Exception:
            log.exception("a defect of kproxy lost a fault of the connection of %s", self.info.client_address)

    def _report_faults(self) -> None:
        events = self.session.events
        fatal = False
        if self.session.faults != self._faults:
            self._faults = self.session.faults
            for event in events:
                if isinstance(event, Desync):
                    self._on_fault(self, event)
                    fatal |= event.fatal
        events.clear()
        if fatal:
            self.close("fault")

    def _now_ns(self) -> int:
        return monotonic_ns() + self._clock_offset_ns
