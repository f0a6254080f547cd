"""The slowest exchanges of late, one by one: what the page and exemplars name.

Duty: a few rows of what took longest. What is slow follows from the traffic: an exchange is kept above a threshold,
which doubles when more than PER_SECOND would be kept within a second, and halves in three quiet seconds, down to
FLOOR_NS. So an exchange costs one comparison, and the rest is bounded by PER_SECOND, whatever peers do. The time is the
broker's, as in kproxy_request_duration_seconds; of a Fetch that part that is beyond its max_wait_ms; what waits for
other members of a group (WAITING) is left out.

Bounded: KEPT rows. Changed on the thread of the event loop only; a scrape copies first. Exchanges that
are counted as columns (`columns`) are not looked at. Refuses to know what is shown.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Exchange

KEPT = 200
PER_SECOND = 5
FLOOR_NS = 10_000_000
MAX_CLIENT_ID = 64  # characters
_HALF_LIFE_NS = 3 * 10**9
WAITING = frozenset(
    ("JoinGroup", "SyncGroup", "ConsumerGroupHeartbeat", "ShareGroupHeartbeat", "StreamsGroupHeartbeat")
)


class SlowExchange(NamedTuple):
    """One exchange; times in nanoseconds, of the clock of the events."""

    at_ns: int  # first byte of the answer
    cluster: str
    broker: str
    api: str
    version: int
    client_id: str | None
    client: str
    correlation_id: int
    connection: int  # as tables call it
    number: int  # of the exchange on its connection, likewise
    wait_ns: int  # the client's whole wait: first byte of the request to the last of the answer
    broker_ns: int  # the broker's time
    over_ns: int  # the part of it by which it is slow
    queue_ns: int
    muted_ns: int
    throttle_ms: int
    request_bytes: int
    response_bytes: int
    error_code: int


class Slow:
    """What is slow now: compare with `threshold_ns`, give `add` what is above."""

    def __init__(self) -> None:
        self.threshold_ns = FLOOR_NS
        self.rows: deque[SlowExchange] = deque(maxlen=KEPT)
        self._second_ns = 0  # when the current second began
        self._in_second = 0
        self._settled_ns = 0

    def add(self, exchange: Exchange, broker_ns: int, info: ConnectionInfo, broker: str) -> None:
        """Keep an exchange whose broker took longer than the threshold, if it did not wait on purpose."""
        over_ns = broker_ns
        if exchange.max_wait_ms is not None:
            over_ns -= exchange.max_wait_ms * 1_000_000
        plan = exchange.plan
        if over_ns <= self.threshold_ns or plan.api in WAITING:
            return
        now_ns = exchange.response_start
        if now_ns - self._second_ns >= 10**9:
            self._second_ns, self._in_second = now_ns, 0
            self.settle(now_ns)
        self._in_second += 1
        if self._in_second > PER_SECOND:
            self.threshold_ns *= 2
            self._in_second = 0
        client_id = exchange.client_id
        self.rows.append(
            SlowExchange(
                now_ns,
                info.cluster,
                broker,
                plan.api,
                plan.api_version,
                None if client_id is None else client_id[:MAX_CLIENT_ID],
                info.client_address,
                exchange.correlation_id,
                info.id,
                exchange.number,
                exchange.response_end - exchange.request_start,
                broker_ns,
                over_ns,
                exchange.queue_ns,
                exchange.muted_ns,
                max(0, exchange.throttle_ms),
                exchange.request_bytes,
                exchange.response_bytes,
                exchange.error_code or 0,
            )
        )

    def settle(self, now_ns: int) -> None:
        """Lower the threshold by the time since the last call: half of it in three seconds."""
        passed_ns = now_ns - self._settled_ns
        self._settled_ns = now_ns
        if self.threshold_ns > FLOOR_NS and passed_ns > 0:
            self.threshold_ns = max(FLOOR_NS, int(self.threshold_ns * 0.5 ** min(60.0, passed_ns / _HALF_LIFE_NS)))


def merged(of_processes: Iterable[Iterable[SlowExchange]]) -> Slow:
    """What several processes kept: the latest of all."""
    slow = Slow()
    slow.rows.extend(sorted(row for rows in of_processes for row in rows)[-KEPT:])
    return slow
