"""Builds a relay with its session from an admitted client, a dialled broker and the cluster's filters.

Refuses to know how clients are admitted and brokers dialled, and the relay's further life.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy.proxy.connection.filtering import ClusterFilters
from kproxy.proxy.connection.labels import broker_label, listener_label
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.relay.compiled import Lending
from kproxy.proxy.relay.ends import Admitted, Dialled
from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.tls.tls_socket import TlsSocket
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Desync, Event
from kproxy.wire.pairing import LIMIT
from kproxy.wire.session import Session


class Reports(NamedTuple):
    """Where a relay reports faults, its end, and, in addition to metrics and recorder, its events."""

    on_fault: Callable[[Relay, Desync], None]
    on_closed: Callable[[Relay, str], None]  # with the cause
    sinks: Sequence[Callable[[list[Event]], None]] = ()


def build(
    worker: Worker,
    filters: ClusterFilters,
    client: Admitted,
    dialled: Dialled,
    info: ConnectionInfo,
    reports: Reports,
) -> tuple[Relay, Filter | None]:
    """Return a relay that has not started, and the filter of its client's logins.

    info: the connection's labels in metrics and tables.
    """
    cluster = filters.cluster
    listener = listener_label(client.node_id, cluster.route)
    chain, addresses, login = filters.of(client)
    session = Session(
        filters.interest,
        transform=chain.transform,
        max_request_bytes=cluster.max_request_bytes,
        max_in_flight=min(LIMIT, cluster.limits.max_requests_in_flight or LIMIT),
        authorizer=chain.authorizer,
    )
    if worker.flight is not None:
        worker.flight.watch(session, info)
    counting = worker.metrics.connection(
        info, listener, broker_label(info.broker_id), session.pending, topics=bool(filters.interest.detail)
    )
    if addresses is not None:
        addresses.counting = counting
    if filters.kept is not None:
        counting.tell(worker.feed.connected(info, client.principal, filters.kept.left_out))
    relay = Relay(
        asyncio.get_running_loop(),
        worker.poller,
        worker.pressure,
        worker.clock_offset_ns,
        client.sock,
        dialled.sock,
        session,
        info,
        counting,
        [
            counting.events,
            *(sink.connected(info) for sink in worker.sinks),
            *reports.sinks,
            *chain.sinks,
        ],
        reports.on_fault,
        reports.on_closed,
        worker.lanes,
    )
    needs_events = worker.sinks or worker.flight or reports.sinks or not chain.allows_core
    if worker.core is not None and not needs_events:
        relay.lend_to(Lending(worker.core, relay, counting, cluster.max_request_bytes))
    relay.principal = sys.intern(client.principal)
    relay.listener = listener
    relay.tls_version = client.sock.version() if isinstance(client.sock, TlsSocket) else None
    return relay, login
