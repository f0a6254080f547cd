"""State shared by all clusters and connections of one event loop. Refuses to know any single one of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

from kproxy.metrics import Metrics
from kproxy.proxy.cluster.questions.lag_questions import LagSource, OwnLags
from kproxy.proxy.config.settings import Config
from kproxy.proxy.connection.ageing import Ageing
from kproxy.proxy.filters.feed import Feed
from kproxy.proxy.filters.flight import FlightRecorder
from kproxy.proxy.filters.policy.audit import Audit
from kproxy.proxy.filters.tracing import Traces
from kproxy.proxy.relay.compiled import Core
from kproxy.proxy.relay.pressure import Pressure
from kproxy.proxy.relay.readings import Readings
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.relay.slow_lanes import SlowLanes
from kproxy.proxy.sockets.listeners import Gate
from kproxy.proxy.sockets.poller import Poller
from kproxy.proxy.tls.handshakes import Handshakes
from kproxy.proxy.upstream.dial import Dialler
from kproxy.proxy.upstream.loops import IsOurs, LoopGuard
from kproxy.proxy.upstream.resolver import Resolver
from kproxy.wire.connection import Sink
from kproxy.wire.interest import MAX_NOTED_TOGETHER, HeldBudget

OBJECTS_PER_RELAY = 50


@dataclass
class Worker:
    config: Config
    gate: Gate
    poller: Poller
    pressure: Pressure  # bounds of all relays together, and their read buffer
    clock_offset_ns: int  # wall clock minus monotonic time, in ns; fixed at start
    metrics: Metrics
    sinks: Sequence[Sink]
    relays: dict[int, Relay] = field(default_factory=dict)  # connection number -> relay, oldest first
    held: HeldBudget = field(init=False)  # shared by all sessions
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever the last relay closes
    on_left: Callable[[int], None] | None = None  # called with a number, if another process counts connections
    guard: Callable[[IsOurs], LoopGuard] = LoopGuard
    loops: LoopGuard = field(init=False)
    dialler: Dialler = field(init=False)
    ageing: Ageing = field(init=False)
    flight: FlightRecorder | None = None
    core: Core | None = None  # None: Python relays all connections
    readings: Readings = field(default_factory=Readings)  # turns for ZooKeeper's connections and slow work
    lanes: SlowLanes = field(init=False)  # slow work of all sessions
    traces: Traces = field(default_factory=Traces)
    feed: Feed = field(default_factory=Feed)  # frames decoded in another process
    lags: LagSource = field(init=False)
    audit: Audit | None = field(init=False)  # of all clusters; its thread belongs to this process
    _connections: int = 0
    _handshakes: Handshakes | None = None

    def __post_init__(self) -> None:
        self.loops = self.guard(self.gate.is_ours)
        self.held = HeldBudget(self.config.max_held_bytes, MAX_NOTED_TOGETHER)
        self.held.give_up = self._give_up_held
        self.lanes = SlowLanes(self.readings)
        self.lags = OwnLags(self.metrics)
        self.ageing = Ageing(self.relays)
        self.dialler = Dialler(
            Resolver(),
            self.loops,
            self.config.connect_timeout_s,
            mark=self.config.upstream_mark,
            sources=self.config.upstream_source_addresses,
        )
        self.audit = Audit(self.config.audit) if self.config.audit else None
        if self.audit is not None:
            self.metrics.audit_lines = self.audit.counts

    def _give_up_held(self, session: object) -> None:
        """Close the connection that has held an incomplete request for longest, as the budget is exhausted."""
        for relay in tuple(self.relays.values()):
            if relay.reads_with(session):
                relay.give_up_held()
                return

    def handshakes(self) -> Handshakes:
        """Return the TLS handshakes, created at the first call, since most processes need none."""
        if self._handshakes is None:
            self._handshakes = Handshakes()
        return self._handshakes

    def close(self) -> None:
        """Close the audit and the handshakes; no connection may be left."""
        if self._handshakes is not None:
            self._handshakes.close()
        if self.audit is not None:
            self.audit.close()

    def now_ns(self) -> int:
        return monotonic_ns() + self.clock_offset_ns

    @property
    def objects(self) -> int:
        """The approximate number of Python objects of all connections."""
        return sum(OBJECTS_PER_RELAY + relay.pending_requests for relay in self.relays.values())

    def add(self, relay: Relay, number: int = 0) -> None:
        """Register a relay; `number`: the connection's number, if it already has one."""
        self._connections = number or self._connections + 1
        relay.number = self._connections
        self.relays[relay.number] = relay

    def remove(self, relay: Relay) -> None:
        self.relays.pop(relay.number, None)
        self.left(relay.number)
        if not self.relays:
            self.idle.set()

    def left(self, number: int) -> None:
        """Count the end of a client's connection, with or without a relay."""
        self.gate.leave()
        if self.on_left is not None:
            self.on_left(number)
