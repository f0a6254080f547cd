"""The slowest recent exchanges, one by one, for the page and for exemplars.

Duty: a few rows of the slowest exchanges. The traffic sets the threshold above which an exchange is kept: it doubles
when more than PER_SECOND would be kept within a second, and halves in three quiet seconds, down to FLOOR_NS. This way
most exchanges cost one comparison, and PER_SECOND bounds the number of others for any traffic. The compared time is the
broker's, as in kproxy_request_duration_seconds, minus max_wait_ms in a Fetch. APIs that wait for other members of a
group (WAITING) are left out.

Bound: KEPT rows. Changed on the event loop's thread only; a scrape copies first. Exchanges that are counted as columns
(`columns`) are not considered. Refuses to know the exposition.
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

    at_ns: int  # first byte of the response
    cluster: str
    broker: str
    api: str
    version: int
    client_id: str | None
    client: str
    correlation_id: int
    connection: int  # column `connection` of the tables
    number: int  # column `number` of the tables: the exchange on its connection
    wait_ns: int  # the client's whole wait: first byte of the request to last byte of the response
    broker_ns: int  # the broker's time
    over_ns: int  # the broker's time, minus max_wait_ms in a Fetch: it is compared with the threshold
    queue_ns: int
    muted_ns: int
    throttle_ms: int
    request_bytes: int
    response_bytes: int
    error_code: int


class Slow:
    """The threshold and the rows. Call `add` for exchanges whose broker's time is above `threshold_ns`."""

    def __init__(self) -> None:
        self.threshold_ns = FLOOR_NS
        self.rows: deque[SlowExchange] = deque(maxlen=KEPT)
        self._second_ns = 0  # when the current second began
        self._in_second = 0
        self._settled_ns = 0

    def add(self, exchange: Exchange, broker_ns: int, info: ConnectionInfo, broker: str) -> None:
        """Keep an exchange if the broker's time without intended waiting is above the threshold."""
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
        """Lower the threshold for the time since the last call: by half in three seconds."""
        passed_ns = now_ns - self._settled_ns
        self._settled_ns = now_ns
        if self.threshold_ns > FLOOR_NS and passed_ns > 0:
            self.threshold_ns = max(FLOOR_NS, int(self.threshold_ns * 0.5 ** min(60.0, passed_ns / _HALF_LIFE_NS)))


def merged(of_processes: Iterable[Iterable[SlowExchange]]) -> Slow:
    """Return the latest KEPT rows of several processes."""
    slow = Slow()
    slow.rows.extend(sorted(row for rows in of_processes for row in rows)[-KEPT:])
    return slow
