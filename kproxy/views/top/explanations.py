"""Help of `kproxy top` (key `?`): the keys, and the meaning of the columns of the table on the screen."""

from collections.abc import Iterable, Mapping

KEYS = (
    ("1 to 9", "APIs, brokers, topics, clients, groups, connections, slow exchanges, errors, findings"),
    ("Enter", "opens the row"),
    ("Esc", "goes back, and forgets the filter"),
    ("/", "shows only rows with a text"),
    ("s, S, r", "sorts by the next column, by the one before, the other way round"),
    ("p", "pauses: nothing is asked, the figures stay"),
    ("q, Ctrl-C", "ends"),
)

_LAST = "of the last ten seconds"
_SO_FAR = "since kproxy began"
MEANINGS: Mapping[str, str] = {
    "requests_per_s": f"answered requests a second, {_LAST}",
    "recent_requests_per_s": "answered requests a second, the newest on the right; the highest bar is the most",
    "p50_s": f"half of the requests took the broker no longer, {_LAST}",
    "p99_s": f"99 of 100 requests took the broker no longer, {_LAST}; a Fetch may wait for records",
    "wait_p99_s": f"99 of 100 clients' requests were answered within this time, from first to last byte, {_LAST}",
    "errors_per_s": f"error codes in answers a second, {_LAST}",
    "request_bytes_per_s": f"bytes of requests, {_LAST}",
    "response_bytes_per_s": f"bytes of answers, {_LAST}",
    "requests": f"answered requests {_SO_FAR}; for a connection: requests sent",
    "errors": f"error codes in answers {_SO_FAR}",
    "throttled": f"answers with a throttle time, since the client was over a quota, {_SO_FAR}",
    "in_flight": "requests that wait for an answer now",
    "requests_pending": "requests that wait for an answer now",
    "disconnects": f"connections that ended {_SO_FAR}",
    "produced_bytes_per_s": f"record batches in Produce requests, as they are compressed, {_LAST}",
    "produced_records_per_s": f"records in Produce requests, {_LAST}",
    "fetched_bytes_per_s": f"record batches in Fetch answers, as they are compressed, {_LAST}",
    "fetched_records_per_s": f"records in Fetch answers, {_LAST}",
    "max_lag_records": "lag in records of the consumer furthest behind; ≥: the lag of some partitions is unknown; "
    "unknown: the lag of all partitions is; –: nothing is committed or read, or it is not one of the 100 largest",
    "lag_records": "records between the end of the log and the committed (group) or fetched (client_id) offset; "
    "≥ and unknown: the lag of some or all partitions is unknown",
    "lag_s": "age of the first unread record, or an upper bound of it",
    "lag_unknown_partitions": "partitions with a committed offset whose log end no recent answer showed",
    "rebalances": f"rebalances {_SO_FAR}",
    "rebalance_s": f"time in rebalances {_SO_FAR}",
    "refused": f"joins, syncs, heartbeats and commits that were answered with an error, {_SO_FAR}",
    "generation": "generation of a classic group; epoch of a KIP-848 group",
    "type": "type of its members: consumer, connect, streams, share",
    "broker_s": "time until the broker answered",
    "wait_s": "from the first byte of the request to the last of its answer",
    "over_s": "time of the broker beyond the longest wait (max.wait) of the Fetch",
    "queue_s": "time behind earlier requests of the connection",
    "muted_s": "time in which the broker did not read, since the client was over its quota",
    "throttle_ms": "throttle time in the answer",
    "correlation_id": "correlation id of the request, as on the wire",
}


def of(columns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (key or title, meaning) of the keys, then of columns with these (key, title)."""
    return [*KEYS, *((title, MEANINGS[key]) for key, title in columns if key in MEANINGS)]
