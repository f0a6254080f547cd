"""An operator's views of connections and actions on them: one function for each operation on a worker.

If there are several processes, each runs the same function and sends its result to the parent. Arguments and results
are therefore plain values, and an operation on one connection finds it in one process and nothing in the others.
`OPERATIONS` is the whole interface. Refuses to know HTTP and the number of processes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kproxy.proxy import log_lines
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters import tracing
from kproxy.proxy.relay.relay import Relay
from kproxy.wire.events import NONE

MAX_REQUESTS = 200  # requests in flight per answer
MAX_NAME = 256  # characters of a client's name
LEVELS = ("debug", "info", "warning", "error")

Json = dict[str, Any]


def connection_row(relay: Relay) -> Json:
    """Return a row of /api/connections, from values that need no request to another process."""
    info, seen = relay.info, relay.counts()
    sent, received = seen.received_bytes
    software = relay.software
    return {
        "number": relay.number,
        "cluster": info.cluster,
        "listener": relay.listener,
        "client": str(Address(info.client_address, info.client_port)),
        "principal": relay.principal,
        "client_id": _cut(seen.client_id),
        "software": None if software is None else " ".join(software)[:MAX_NAME],
        "tls": relay.tls_version,
        "broker": info.broker_id,
        "upstream": str(Address(info.broker_address, info.broker_port)),
        "opened_ns": info.opened_ns,
        "requests": seen.requests,
        "requests_pending": relay.pending_requests,
        "bytes_in": sent,
        "bytes_out": received,
    }


def _cut(client_id: str | None) -> str | None:
    return client_id and client_id[:MAX_NAME]


def requests(worker: Worker, number: int) -> list[Json] | None:
    """Return the requests in flight of a connection, oldest first; None if it is not in this process."""
    relay = worker.relays.get(number)
    if relay is None:
        return None
    now_ns = worker.now_ns()
    return [
        {
            "number": exchange.number,
            "api": exchange.plan.api,
            "version": exchange.plan.api_version,
            "correlation_id": exchange.correlation_id,
            "client_id": exchange.client_id or _cut(relay.counts().client_id),
            "bytes": exchange.request_bytes,
            "pending_s": round(max(0, now_ns - exchange.request_start) / 1e9, 6),
            "is_whole": exchange.request_end != NONE,
            "answer_begun": exchange.response_start != NONE,
        }
        for exchange in relay.session.pending[:MAX_REQUESTS]
    ]


def close(worker: Worker, number: int) -> int:
    """Close a connection at once, even with requests in flight; returns how many were closed."""
    relay = worker.relays.get(number)
    if relay is None or relay.closed:
        return 0
    relay.close("operator")
    return 1


def drain(worker: Worker, number: int | None, cluster: str | None) -> int:
    """Drain connections between two requests: one, all of a cluster, or all; returns how many were asked."""
    asked = 0
    for relay in list(worker.relays.values()):
        if (number in (None, relay.number)) and cluster in (None, relay.info.cluster) and not relay.closed:
            relay.finish("operator")
            asked += 1
    return asked


def log_level(worker: Worker, level: str | None) -> str:
    """Set the log level, unless it is None; returns the level in force. Raises ValueError for an unknown level."""
    if level is not None:
        if level not in LEVELS:
            raise ValueError(f"level={level[:40]!r} is none of {', '.join(LEVELS)}")
        log_lines.set_level(level)
    return log_lines.level()


def trace_start(worker: Worker, name: str, connection: int | None, client: str | None) -> int:
    """Start tracing a connection, or a client's address; returns the number of connections. See `tracing`."""
    return worker.traces.start(name, worker.relays.values(), connection, client)


def trace_take(worker: Worker, name: str) -> tuple[list[tuple[Any, ...]], int, int]:
    """Return (frames since the last call, frames left out since the start, connections traced now)."""
    captured, dropped, watched = worker.traces.take(name)
    return [tuple(one) for one in captured], dropped, watched


def trace_stop(worker: Worker, name: str) -> None:
    worker.traces.stop(name)


def dump_start(worker: Worker, name: str, again: bool = False) -> bool | None:
    """Start a dump of the flight recorder; None: there is no recorder here, False: a dump is being written."""
    return None if worker.flight is None else worker.flight.ask(name, again=again)


def dump_found(worker: Worker, name: str, text: str) -> None:
    """Report a finding that may trigger a dump."""
    if worker.flight is not None:
        worker.flight.found(name, text)


def dump_result(worker: Worker, name: str) -> Json | None:
    """Return the outcome of a dump, `writing` until it is done; None: this process has no dump of that name."""
    return None if worker.flight is None else worker.flight.result(name)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "requests": requests,
    "close": close,
    "drain": drain,
    "log_level": log_level,
    "trace_start": trace_start,
    "trace_take": trace_take,
    "trace_stop": trace_stop,
    "dump_start": dump_start,
    "dump_result": dump_result,
    "dump_found": dump_found,
}


def shown(captured: tuple[Any, ...]) -> Json:
    """Return a frame from `trace_take`, decoded and without secrets. Takes milliseconds: not for the event loop."""
    values = list(captured)
    if values[6] is not None:
        values[6] = tuple(values[6])
    return tracing.as_json(tracing.Captured(*values))


def end_fields(relay: Relay, now_ns: int) -> Iterator[Any]:
    """Yield the fields of the line about an ended connection in the order of END_LINE, without the cause."""
    info = relay.info
    row = connection_row(relay)
    yield from (info.cluster, relay.listener, "bootstrap" if info.broker_id is None else info.broker_id)
    yield from (row["client"], row["principal"], row["client_id"], row["software"], row["tls"])
    yield (now_ns - info.opened_ns) / 1e9
    yield from (row["requests"], relay._counting.errors, row["bytes_in"], row["bytes_out"])


END_LINE = (
    "ended cause=%s cluster=%s listener=%s broker=%s client=%s principal=%s client_id=%s software=%s tls=%s "
    "duration_s=%.3f requests=%d errors=%d bytes_in=%d bytes_out=%d"
)
