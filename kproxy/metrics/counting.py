"""Counting of the events of one connection: the hot path of the metrics.

Duty: add events to the cells. Bounds: those of the cells; a connection keeps only its client and group. Refuses to know
labels' text and sockets.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sized
from typing import Final

from kproxy.metrics.consumers.lag import Fetching, Lags
from kproxy.metrics.counters.bounds import DURATION_NS, EXCESS_WAIT_NS, MUTE_NS, QUEUE_NS, SIZE_BYTES, THROTTLE_NS
from kproxy.metrics.counters.cells import ApiCells, BrokerCells, ClusterCells, DurationCells, add
from kproxy.metrics.counters.named import ClientCells, Topics
from kproxy.metrics.counters.produced import Produced
from kproxy.metrics.counters.slow import Slow
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import (
    ANSWERED,
    ANSWERED_BY_PROXY,
    NO_ANSWER_EXPECTED,
    SIDES,
    AddressesHidden,
    ClientNamed,
    Closed,
    Desync,
    Event,
    Exchange,
    Unanswered,
)
from kproxy.wire.interest import HEARTBEATS, ApiPlan

_NO_CELLS: Final = ApiCells("")  # initial value in a loop, before the first exchange


class ConnectionMetrics:
    """The counting of one connection. All connections to a broker share its cells.

    pending: a container whose length is the number of requests in flight, the session's own queue.
    """

    __slots__ = (
        "_by_plan",
        "_cells",
        "_client",
        "_cluster",
        "_fetching",
        "_group",
        "_info",
        "_listener",
        "_open",
        "_seldom",
        "_slow",
        "_topics",
        "errors",
        "inside",
        "lag",
        "pending",
    )

    def __init__(
        self,
        cluster: ClusterCells,
        cells: BrokerCells,
        listener: str,
        pending: Sized,
        topics: Topics | None,
        lags: Lags | None,
        inside: tuple[DurationCells, DurationCells],
        loop_lag: DurationCells,
        slow: Slow,
        info: ConnectionInfo,
    ) -> None:
        self._cluster = cluster
        self._cells = cells
        self._by_plan = cells.by_plan
        self._listener = listener
        self._fetching = Fetching(lags, cells.broker) if lags is not None else None
        self._seldom: tuple[Callable[[list[Event]], None], ...] = ()
        if topics is not None:
            self.tell(topics.events)
        if self._fetching is not None:
            self.tell(self._fetching.events)
        self._client: ClientCells | None = None
        self._group: str | None = None  # group of the last heartbeat that was passed on
        self._open = True
        self._topics = topics
        self._slow = slow
        self._info = info
        self.errors = 0  # error codes in its responses, all levels
        self.lag = loop_lag
        self.inside = inside  # one pair for all connections
        self.pending = pending

    def tell(self, sink: Callable[[list[Event]], None]) -> None:
        """Add a sink that gets the events of each read with a decoded body, kept frames or an unusual event.

        Reads that contain only exchanges without these are not passed on: on an idle cluster most are heartbeats. A
        heartbeat of another group than the last one is passed on.
        """
        self._seldom += (sink,)

    def events(self, events: list[Event]) -> None:
        """Count these events, without keeping any of them."""
        if self._seldom:
            for event in events:
                if (
                    event.__class__ is not Exchange
                    or event.request_body is not None
                    or event.response_body is not None
                    or (event.plan.kept is not None and (event.errors or not event.plan.keeps_small))
                    or (event.group_id != self._group and event.plan.api_key in HEARTBEATS)
                ):
                    if event.__class__ is Exchange and event.plan.api_key in HEARTBEATS:
                        self._group = event.group_id
                    for sink in self._seldom:
                        sink(events)
                    break
        plan: ApiPlan | None = None
        cells = _NO_CELLS
        # Exchanges of one read are often alike: reuse the bucket of the previous one.
        request_bytes = response_bytes = last_queue = last_duration = last_wait = -1
        request_bucket = response_bucket = queue_bucket = duration_bucket = wait_bucket = 0
        of_broker = self._cells
        slow_ns = self._slow.threshold_ns
        unanswered = False
        for event in events:
            if event.__class__ is not Exchange or event.outcome is not ANSWERED:
                if event.__class__ is Unanswered:
                    unanswered = True
                else:
                    self._unusual(event)
                continue
            if event.plan is not plan:
                plan = event.plan
                cells = self._by_plan.get(plan) or self._cluster.api_cells(of_broker, plan)
            size = event.request_bytes
            if size != request_bytes:
                request_bytes = size
                request_bucket = bisect_left(SIZE_BYTES, size)
            cells.request_bytes += size
            cells.request_size[request_bucket] += 1
            size = event.response_bytes
            if size != response_bytes:
                response_bytes = size
                response_bucket = bisect_left(SIZE_BYTES, size)
            cells.response_bytes += size
            cells.response_size[response_bucket] += 1
            duration = between = event.response_start - event.request_end
            queue = event.queue_ns
            if queue:
                duration -= queue
                if queue != last_queue:
                    last_queue = queue
                    queue_bucket = bisect_left(QUEUE_NS, queue)
                of_broker.queue[queue_bucket] += 1
                of_broker.queue_ns += queue
            muted = event.muted_ns
            if muted:
                duration -= muted
                of_broker.mute[bisect_left(MUTE_NS, muted)] += 1
                of_broker.mute_ns += muted
            wait = event.response_end - event.request_start
            if wait != between:  # request or response came in several reads
                duration = self._broker_time(cells, event)
            if duration != last_duration:
                last_duration = duration
                duration_bucket = bisect_left(DURATION_NS, duration)
            if wait != last_wait:
                last_wait = wait
                wait_bucket = duration_bucket if wait == duration else bisect_left(DURATION_NS, wait)
            cells.waits[wait_bucket] += 1
            cells.waits_ns += wait
            cells.duration[duration_bucket] += 1
            if duration > 0:
                cells.duration_ns += duration
                if duration > slow_ns:
                    self._slow.add(event, duration, self._info, of_broker.broker)
            if event.max_wait_ms is not None:
                excess = duration - event.max_wait_ms * 1_000_000
                if excess > 0:
                    cells.excess_wait_ns += excess
                cells.excess_wait[bisect_left(EXCESS_WAIT_NS, excess)] += 1
            if event.throttle_ms > 0:
                throttle = event.throttle_ms * 1_000_000
                cells.throttle_ns += throttle
                cells.throttle[bisect_left(THROTTLE_NS, throttle)] += 1
            if event.errors:
                self.errors += len(event.errors)
                self._cluster.count_errors(cells, event.errors)
        if unanswered:
            self._unanswered(events)

    def _broker_time(self, cells: ApiCells, event: Exchange) -> int:
        """Return the broker's part of a wait if request or response came in several reads; count the other parts."""
        asked, start = event.request_end, event.response_start
        ready = event.request_start + event.queue_ns + event.muted_ns
        if asked > ready:  # it came in several reads, and the broker was ready for it
            cells.sending_ns += asked - ready
            ready = asked
        cells.receiving_ns += max(0, event.response_end - start)
        return start - ready

    # --- used by columns.py, and by passive capture ------------------------------------------------------------------

    @property
    def of_broker(self) -> BrokerCells:
        """Return the cells of the broker."""
        return self._cells

    def api_cells(self, plan: ApiPlan) -> ApiCells:
        """Return the cells of an API at the broker."""
        return self._by_plan.get(plan) or self._cluster.api_cells(self._cells, plan)

    def produced(self, *, by_id: bool) -> Callable[..., None] | None:
        """Return what takes produced records that are added up already; None: they are not counted."""
        if self._topics is None or self._fetching is None:
            return None
        return Produced(self._topics, self._fetching.lags, self._cells.broker, by_id=by_id).add

    def count_error(self, cells: ApiCells, code: int, times: int) -> None:
        """Count the top-level error code of `times` responses."""
        self._cluster.count_errors(cells, (code,), times)

    def move(self, broker: str) -> None:
        """Count in the cells of another broker from now on: the broker at the other end has been identified."""
        former, listener = self._cells, self._listener
        cells = self._cells = self._cluster.broker(broker, listener)
        self._by_plan = cells.by_plan
        if self._fetching is not None:
            self._fetching.broker = broker
        if self._open:
            former.live.discard(self)
            former.open[listener] -= 1
            cells.live.add(self)
            cells.open[listener] += 1

    def _unusual(self, event: Event) -> None:
        cluster = self._cluster
        if isinstance(event, Exchange):
            if event.outcome == NO_ANSWER_EXPECTED:
                self._requests_only(event.plan, event.request_bytes, 1)
            elif event.outcome == ANSWERED_BY_PROXY:  # the broker never got it: no duration, no errors
                self._requests_only(event.plan, event.request_bytes, 1)
                add(cluster.own_answers, cluster.api_label(event.plan), 1)
            # A response without a request comes with a Desync, which counts it.
        elif isinstance(event, AddressesHidden):
            self.neutralised(cluster.api_label(event.exchange.plan), 1)
        elif isinstance(event, Desync):
            add(cluster.faults, (SIDES[event.side], event.kind), 1)
        elif isinstance(event, ClientNamed):
            self._client_left(event.now_ns)
            self._client = cluster.clients.joined(event)
        elif isinstance(event, Closed):
            self._client_left(event.now_ns)

    def _client_left(self, now_ns: int) -> None:
        if self._client is not None:
            self._client.left(now_ns)
            self._client = None

    def _unanswered(self, events: list[Event]) -> None:
        """Count the unanswered requests of an ended connection, grouped: there may be thousands, most alike."""
        cluster = self._cluster
        alike = Counter(
            (event.exchange.plan, event.cause, event.exchange.request_bytes)
            for event in events
            if event.__class__ is Unanswered
        )
        for (plan, cause, size), count in alike.items():
            self._requests_only(plan, size, count)
            add(cluster.unanswered, (cluster.api_label(plan), cause), count)

    def _requests_only(self, plan: ApiPlan, request_bytes: int, count: int) -> None:
        cells = self._by_plan.get(plan) or self._cluster.api_cells(self._cells, plan)
        cells.request_bytes += request_bytes * count
        cells.request_size[bisect_left(SIZE_BYTES, request_bytes)] += count

    def paused(self, side: str) -> None:
        """Count a pause in reading a side, because the other side's buffer is full."""
        add(self._cluster.paused, side, 1)

    def limit_reached(self, limit: str) -> None:
        """Count a limit that slowed this connection down: a setting of [cluster.limits], or one in `known.LIMITS`."""
        add(self._cluster.limits, limit, 1)

    def rewritten(self, api: str, count: int) -> None:
        """Count broker addresses in a response that were replaced by addresses of this proxy."""
        add(self._cluster.rewritten, api, count)

    def unbound(self, count: int) -> None:
        """Count brokers in a response that have no open port here."""
        self._cluster.unbound += count

    def neutralised(self, api: str, count: int) -> None:
        """Count address lists made unreadable, so that the client sends a Metadata request instead."""
        add(self._cluster.neutralised, api, count)

    def closed(self, cause: str, *, spoke: bool = True) -> None:
        """Count the end of the connection; only the first call has an effect. spoke: the client sent something."""
        if self._end():
            self._cells.silent[self._listener] += not spoke
            add(self._cells.disconnects, (self._listener, cause), 1)

    def leave(self, now_ns: int) -> None:
        """Stop counting a connection that continues in other cells."""
        if self._end():
            self._client_left(now_ns)

    def _end(self) -> bool:
        """Stop counting the connection as open; return whether it was open."""
        was_open, self._open = self._open, False
        if was_open:
            if self._fetching is not None:
                self._fetching.closed()
            self._cells.live.discard(self)
            self._cells.open[self._listener] -= 1
        return was_open
