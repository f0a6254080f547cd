"""Relaying by the compiled core: connections whose frames need no decision leave Python until one does.

Duty: lend a relay's connection to the core (`native/`) between two frames, and take it back for everything that the
core does not do: a frame that is not plain, bytes that a side does not accept, an end, a pause, a drain, a trace. While
it is lent, the poller calls the core's functions instead of the relay's own, and the session is stale: `relay.session`
takes the connection back first, `relay.counts` reads the core's counts and leaves it there.

A connection that came back is lent again after a number of reads, which doubles each time it comes back soon, so that
repeated lending does not slow down traffic that Python must read. If an authorizer decides requests, the core asks
about each kind of request once, and forgets the decisions when it gives the connection back. Refuses to know the
contents of frames.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kproxy.metrics.counters.bounds import DURATION_NS, EXCESS_WAIT_NS, PROXY_NS, QUEUE_NS, SIZE_BYTES
from kproxy.metrics.counting import ConnectionMetrics
from kproxy.metrics.process import Metrics
from kproxy.protocol.programs import collecting, plain_response
from kproxy.proxy.relay.in_flight import FEW
from kproxy.proxy.relay.pressure import FREE_REQUESTS, Pressure
from kproxy.proxy.relay.state import RelayCounts, RelayState
from kproxy.proxy.sockets.poller import Poller
from kproxy.wire import frames
from kproxy.wire.events import BROKER, CLIENT, NONE, Exchange
from kproxy.wire.interest import ApiPlan
from kproxy.wire.lending import (
    Values,
    counts_records,
    cut_id,
    first_fields,
    forget_notes,
    give_back,
    is_lent,
    lend,
    passes,
    produces_by_id,
)
from kproxy.wire.session import Session

FEW_READS = 8  # before a connection is lent
MOST_READS = 1024
MAX_PART = 64 * 1024  # bytes of an incomplete frame that waits in the core for its rest
MAX_PARTS = 4 * 1024 * 1024  # incomplete frames and pending Produces of all connections; Python reads further ones
LONG_FRAMES = 64  # a connection that was lent for so many frames is soon lent again

# Why the core gives a connection back, as in native/src/conn.rs.
FRAME, UNSENT, ENDED, BROKEN, UNWRITABLE = range(1, 6)


class Core:
    """The compiled core of one event loop."""

    def __init__(self, module: Any, poller: Poller, pressure: Pressure, metrics: Metrics) -> None:
        self.module = module
        self.metrics = metrics
        bounds = DURATION_NS, EXCESS_WAIT_NS, QUEUE_NS, PROXY_NS, SIZE_BYTES
        self.lane = module.Lane(
            poller,
            pressure,
            metrics.clock_offset_ns,
            len(pressure.whole),
            (MAX_PART, MAX_PARTS),
            tuple(map(list, bounds)),
            (metrics.directions["request"], metrics.directions["response"]),
            metrics.loop_lag,
            metrics.slow,
        )
        self._responses: dict[tuple[int, int, bool], Any] = {}
        self._requests: dict[tuple[int, int, frozenset[str], bool], Any] = {}
        poller.core = self.lane

    @property
    def part_bytes(self) -> int:
        """Return the bytes in the core of incomplete frames and of the counts of pending Produce requests."""
        count: int = self.lane.part_bytes
        return count

    def of_response(self, plan: ApiPlan, *, counts: bool) -> Any:
        """Return the program that recognises plain responses; None: there are none. counts: it collects offsets."""
        key = plan.api_key, plan.api_version, counts
        if key not in self._responses:
            operations = plain_response(plan.api_key, plan.api_version, offsets=counts)
            self._responses[key] = None if operations is None else self.module.Program(operations)
        return self._responses[key]

    def of_request(self, plan: ApiPlan, paths: frozenset[str], *, counts: bool) -> Any:
        """Return the program that collects fields of requests; None: there are none. counts: it adds records up."""
        if not (paths or counts):
            return None
        key = plan.api_key, plan.api_version, paths, counts
        if key not in self._requests:
            operations = collecting(plan.api_key, plan.api_version, paths, records=counts)
            self._requests[key] = self.module.Program(operations)
        return self._requests[key]

    def tally(self, counting: ConnectionMetrics, plan: ApiPlan, *, counts: bool) -> Any:
        """Return the core's counters of an API at the connection's broker. counts: records are counted too."""
        tallies = counting.of_broker.tallies
        key = plan.api_key, plan.api_version, counts
        tally = tallies.get(key)
        if tally is None:
            produced = counting.produced(by_id=produces_by_id(plan.api_version)) if counts else None
            tally = tallies[key] = self.lane.tally(counting.api_cells(plan), counting.of_broker, produced)
        return tally


class Lending:
    """A relay's connection while the core relays it, or until it does."""

    __slots__ = (
        "_conn",
        "_core",
        "_counting",
        "_max_request_bytes",
        "_relay",
        "_since",
        "_wait",
        "is_lent",
        "reads",
    )

    def __init__(self, core: Core, relay: "Lendable", counting: ConnectionMetrics, max_request_bytes: int) -> None:
        self._core = core
        self._relay = relay
        self._counting = counting
        self._wait = self.reads = FEW_READS  # reads in Python before it is lent
        self._since = 0  # frames when it was lent
        self.is_lent = False
        self._max_request_bytes = max_request_bytes
        self._conn: Any = None  # made when it is lent for the first time

    def try_it(self) -> None:
        """Lend the connection if the core can relay it now."""
        self.reads = self._wait
        relay = self._relay
        session = relay._session
        state = lend(session) if relay.is_quiet else None
        if state is None:
            self._wait = min(2 * self._wait, MOST_READS)
            return
        pending = []
        for exchange, carried in state.pending:
            values = (
                exchange.client_id,
                exchange.acks,
                exchange.max_wait_ms,
                exchange.group_id,
                exchange.transactional_id,
            )
            given = self._given(exchange.plan, values)
            if given is None:
                return
            pending.append(
                (
                    given,
                    exchange.correlation_id & 0xFFFFFFFF,
                    exchange.number,
                    exchange.request_bytes,
                    exchange.request_start,
                    exchange.request_end,
                    carried,
                )
            )
        forget_notes(session)
        if self._conn is None:
            self._conn = self._made()
        self._since = sum(state.completed)
        self._conn.enter(pending, *state[1:], relay._session_ns)
        session.pending.clear()
        self._counting.pending = self._conn
        self.is_lent = True
        relay._read_by((self._reader(CLIENT), self._reader(BROKER)))

    def _reader(self, side: int) -> Callable[[], None]:
        """Return the callback for a readable side: the core receives its bytes, those of TLS are decrypted first."""
        reader: Callable[[], None] = self._conn.side(side)
        return reader if self._relay._peers[side].tls is None else partial(self._relay._feed, self, side)

    def feed(self, side: int, view: memoryview, arrived_ns: int) -> None:
        """Relay the bytes of a view; Python does, if the core gave the connection back while they were decrypted."""
        if self.is_lent:
            self._conn.feed(side, view, arrived_ns)
        elif not self._relay.closed:
            self._relay._read_on(side, bytes(view), arrived_ns)

    def end_of(self, side: int) -> None:
        """Take the connection back, since a side has ended; Python reads the first bytes of an incomplete frame."""
        self.take_back()
        if self._relay._session.backlog[side] is None:
            self._relay._ended(side)

    def _given(self, plan: ApiPlan, values: Values) -> tuple[Any, ...] | None:
        """Return the core's instructions for all requests that begin with these values; None: none of them is plain."""
        counts = counts_records(self._relay._session, plan)
        program = self._core.of_response(plan, counts=counts)
        if program is None:
            return None
        return plan, values, values[2], program, self._core.tally(self._counting, plan, counts=counts), counts

    def _made(self) -> Any:
        client, broker = self._relay._peers
        return self._core.module.Conn(
            self._core.lane,
            (client.fd, broker.fd),
            tuple(None if peer.tls is None else peer.tls.send for peer in (client, broker)),
            self._max_request_bytes,
            min(self._relay._session.most_in_flight, FREE_REQUESTS),
            self,
        )

    def counts(self) -> RelayCounts:
        """Return the core's counts; the connection stays lent."""
        requests, received_bytes, last, awaits_answer = self._conn.counts()
        client_id = self._relay._session.client_id if last is None else cut_id(last[0])
        return RelayCounts(requests, received_bytes, client_id, awaits_answer)

    def take_back(self) -> None:
        """Restore the session's state; sends and reads nothing. Raises nothing: a defect closes the connection."""
        if not self.is_lent:
            return
        self.is_lent = False
        try:
            self._bring_home()
        except Exception:
            self._relay._crashed()

    def _bring_home(self) -> None:
        relay = self._relay
        session = relay._session
        pending, number, received, completed, free_at, missing, session_ns, last, parts = self._conn.take()
        give_back(session, pending, number, received, completed, free_at, missing, last)
        relay._session_ns = session_ns
        self._counting.pending = session.pending
        for side, peer in enumerate(relay._peers):
            peer.seen = completed[side]
        self._wait = FEW_READS if sum(completed) - self._since >= LONG_FRAMES else min(2 * self._wait, MOST_READS)
        self.reads = self._wait
        relay._read_in_python()
        for side, part in enumerate(parts):
            if part is None:
                continue
            if relay.closed:  # a request in parts counts as unanswered
                session.receive(side, memoryview(part[0]), relay._now_ns())
            else:  # it is read in a later turn
                session.backlog[side] = memoryview(part[0])
                relay._put_back(side, part[1])

    def end(self) -> None:
        """Release the connection, which is closed."""
        if self._conn is not None:
            self._conn.end()

    # --- called by the core ------------------------------------------------------------------------------------------

    def learn(self, part: bytes) -> Any:
        """Return how to relay requests that begin like this one; None: Python reads it."""
        size, key_version, _ = frames.REQUEST_HEAD.unpack_from(part, 0)
        session = self._relay._session
        plan = session.interest.plan(key_version)
        if not is_lent(session, plan):
            return None
        first = first_fields(session, plan, part, size + 4)
        given = None if first is None else self._given(plan, first.values)
        if first is None or given is None:
            return None
        collects = self._core.of_request(plan, first.deciding, counts=counts_records(session, plan))
        return first.size, given, first.is_read, collects, bool(first.deciding)

    def passes(self, plan: ApiPlan, frame: bytes) -> bool:
        """Return whether all requests that begin like this one and have the same names are relayed."""
        return passes(self._relay._session, plan, frame)

    def came_back(
        self, side: int, unsent: bytes | None, rest: bytes | None, frames_read: int, arrived: int, why: int, errno: int
    ) -> None:
        """Go on in Python with bytes that the core read and did not send, or with an end."""
        relay = self._relay
        try:
            if why == BROKEN:
                relay._broken(side, OSError(errno, os.strerror(errno)))
                return
            self.take_back()
            if unsent is not None:
                relay._peers[1 - side].frames += frames_read
                relay._keep(side, 1 - side, unsent, arrived)
            if why == ENDED:
                relay._ended(side)
            elif why == UNWRITABLE:
                relay._unwritable(1 - side)
            if rest is not None and not relay.closed:
                relay._read_on(side, rest, arrived)
        except Exception:
            relay._crashed()

    def crashed(self, fault: BaseException) -> None:
        """Close the connection after a defect of the core."""
        try:
            raise fault
        except Exception:
            self._relay._crashed()

    def report_slow(self, plan: ApiPlan, values: Sequence[Any], request: Sequence[int], response: Sequence[int]) -> int:
        """Report a slow exchange; return the time above which the next one is reported, in ns."""
        correlation_id, number, request_bytes, start, end = request
        response_bytes, start_ns, end_ns, queue_ns, duration_ns = response
        exchange = Exchange(plan, correlation_id, number, 0, request_bytes, start)
        exchange.client_id, _, exchange.max_wait_ms, _, _ = values
        exchange.request_end = end
        exchange.response_bytes = response_bytes
        exchange.response_start, exchange.response_end = start_ns, end_ns
        exchange.queue_ns, exchange.muted_ns = queue_ns, 0
        slow = self._core.metrics.slow
        slow.add(exchange, duration_ns, self._relay.info, self._counting.of_broker.broker)
        return slow.threshold_ns


class Lendable(RelayState):
    """The part of a relay that lends its connection."""

    __slots__ = ()

    @property
    def session(self) -> Session:
        """Return the session, with the state of the connection: the core gives it back first."""
        self._take_back()
        return self._session

    def counts(self) -> RelayCounts:
        """Return the counts of the connection, which stays with the core if it is lent."""
        if self._lending is not None and self._lending.is_lent:
            return self._lending.counts()
        session = self._session
        pending = session.pending
        client_id = session.client_id
        if client_id is None:
            client_id = next((one.client_id for one in pending if one.client_id is not None), None)
        awaits_answer = bool(pending) and pending[0].request_end != NONE
        return RelayCounts(session.requests, session.received_bytes, client_id, awaits_answer)

    @property
    def software(self) -> tuple[str, str] | None:
        """Return the name and version of the client's software, which the core never changes."""
        return self._session.software

    @property
    def pending_requests(self) -> int:
        """Return the number of requests in flight, wherever they are counted."""
        return len(self._counting.pending)

    def reads_with(self, session: object) -> bool:
        """Return whether this is the relay's session."""
        return self._session is session

    def lend_to(self, lending: Lending) -> None:
        """Let the core relay requests and answers that need no decision."""
        self._lending = lending

    def _take_back(self) -> None:
        if self._lending is not None:
            self._lending.take_back()

    @property
    def is_quiet(self) -> bool:
        """Return whether the relay only forwards: no drain, no pause, no unsent bytes, and both sides open and read."""
        client, broker = self._peers
        return (
            not self.closed
            and self._between is None
            and self._pause is None
            and not self._draining
            and self._in_flight_state == FEW
            and client.reading
            and broker.reading
            and client.unsent is None
            and broker.unsent is None
            and not (client.dead or broker.dead or client.ended or broker.ended)
        )

    def _read_by(self, readable: tuple[Callable[[], None], Callable[[], None]]) -> None:
        """Read both sides by these functions from now on."""
        for peer, each in zip(self._peers, readable, strict=True):
            peer.readable = each
            self._poller.replace_reader(peer.fd, each)

    def _feed(self, lending: Lending, side: int) -> None:
        """Decrypt bytes of a readable side, and let the core relay them."""
        poller, sock, buffer = self._poller, self._peers[side].sock, self._pressure.buffer
        try:
            try:
                if poller.is_late:
                    count, arrived_ns = poller.receive_late(sock, buffer)
                else:
                    count, arrived_ns = sock.recv_into(buffer), poller.turn_ns
            except (BlockingIOError, InterruptedError):
                return
            except OSError as fault:
                self._broken(side, fault)
                return
            if count:
                lending.feed(side, buffer[:count], arrived_ns)
            else:
                lending.end_of(side)
        except Exception:
            self._crashed()

    def _read_in_python(self) -> None:
        self._read_by((self._reader(CLIENT), self._reader(BROKER)))

    def _read_on(self, side: int, rest: bytes, arrived: int) -> None:
        """Read bytes in Python that the core has received."""
        self._session.backlog[side] = memoryview(rest)
        self._peers[side].arrived_ns = arrived
        if not self._waits(side):
            self._peers[side].readable()
        else:
            self._put_back(side, arrived)
