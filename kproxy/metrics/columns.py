"""Counting of exchanges that come as columns: the same as `ConnectionMetrics.events`, for thousands at once.

It needs numpy, so only the analysis of captures imports it. Refuses to know where the columns come from.
"""

from collections.abc import Sequence

import numpy as np

from kproxy.metrics.counters.bounds import DURATION_NS, EXCESS_WAIT_NS, MUTE_NS, QUEUE_NS, SIZE_BYTES, THROTTLE_NS
from kproxy.metrics.counters.cells import BrokerCells
from kproxy.metrics.counting import ConnectionMetrics
from kproxy.wire.offline.bulk import NULL, Bulk

_DURATION, _EXCESS, _MUTE, _QUEUE, _SIZE, _THROTTLE = (
    np.array(bounds, np.int64) for bounds in (DURATION_NS, EXCESS_WAIT_NS, MUTE_NS, QUEUE_NS, SIZE_BYTES, THROTTLE_NS)
)


def count(connections: Sequence[ConnectionMetrics | None], bulk: Bulk) -> None:
    """Count exchanges. `bulk.connection` has indexes into `connections`; exchanges of None are skipped."""
    cells = {id(each.of_broker): (each, each.of_broker) for each in connections if each is not None}
    number = {of_broker: index for index, of_broker in enumerate(cells)}
    none = len(number)
    of_connection = np.array([none if each is None else number[id(each.of_broker)] for each in connections])
    place = of_connection[bulk.connection]
    for index, (connection, of_broker) in enumerate(cells.values()):
        mine = place == index
        if mine.any():
            _count(connection, of_broker, bulk, slice(None) if mine.all() else mine)


def _count(connection: ConnectionMetrics, of_broker: BrokerCells, bulk: Bulk, mine: "slice | np.ndarray") -> None:
    columns = {name: column[mine] for name, column in bulk.columns.items() if name in _USED}
    cells = connection.api_cells(bulk.plan)
    cells.request_bytes += _add(cells.request_size, _SIZE, columns["request_bytes"])
    cells.response_bytes += _add(cells.response_size, _SIZE, columns["response_bytes"])
    queue, muted = columns["queue_ns"], columns["muted_ns"]
    of_broker.queue_ns += _add(of_broker.queue, _QUEUE, queue[queue > 0])
    of_broker.mute_ns += _add(of_broker.mute, _MUTE, muted[muted > 0])
    begun = columns["request_start"]
    duration = columns["response_start"] - begun - queue - muted
    sending = np.maximum(columns["request_end"] - begun - queue - muted, 0)
    duration -= sending
    cells.duration_ns += _add(cells.duration, _DURATION, np.maximum(duration, 0))
    cells.waits_ns += _add(cells.waits, _DURATION, columns["response_end"] - begun)
    cells.sending_ns += int(sending.sum())
    cells.receiving_ns += int((columns["response_end"] - columns["response_start"]).sum())
    patience = np.array([-1 if prefix[2] is None else prefix[2] for prefix in bulk.prefixes], np.int64)
    if (patience >= 0).any():
        wait_ms = patience[bulk.prefix[mine]]
        excess = (duration - wait_ms * 1_000_000)[wait_ms >= 0]
        cells.excess_wait_ns += _add(cells.excess_wait, _EXCESS, np.maximum(excess, 0))
    throttle = columns["throttle_ms"]
    cells.throttle_ns += _add(cells.throttle, _THROTTLE, throttle[throttle > 0] * 1_000_000)
    codes = columns["error_code"]
    failed = codes[(codes != 0) & (codes != NULL)]
    for code, times in zip(*(each.tolist() for each in np.unique(failed, return_counts=True)), strict=True):
        connection.count_error(cells, code, times)


_USED = frozenset(
    (
        *("request_bytes", "response_bytes", "queue_ns", "muted_ns", "throttle_ms", "error_code"),
        *("request_start", "request_end", "response_start", "response_end"),
    )
)


def _add(cell: list[int], bounds: np.ndarray, values: np.ndarray) -> int:
    """Count values in their buckets; return their sum."""
    if not len(values):
        return 0
    buckets = np.bincount(np.searchsorted(bounds, values, "left"))
    for bucket in np.flatnonzero(buckets).tolist():
        cell[bucket] += int(buckets[bucket])
    return int(values.sum())
