"""The counts of brokers whose ports stand for others by now, under one label.

Where node ids come and go, each would leave series behind for ever. Their sum stays, so that no total decreases.
Refuses to know when a broker has gone.
"""

from kproxy.metrics.counters.cells import BrokerCells, ClusterCells
from kproxy.metrics.counters.named import OTHER
from kproxy.metrics.counters.upstream import UpstreamCells
from kproxy.metrics.processes.units import add

LISTENER = f"broker-{OTHER}"


def fold_broker(cluster: ClusterCells, upstream: UpstreamCells, broker: str) -> None:
    """Add the counts of a broker to those of `other`, and end its own series, unless it has open connections."""
    gone = cluster.brokers.get(broker)
    if gone is not None and any(gone.open.values()):
        return
    dials = upstream.dials.pop(broker, None)
    if dials is not None:
        before = upstream.dials.get(OTHER)
        upstream.dials[OTHER] = dials if before is None else add(before, dials)
    if gone is None:
        return
    del cluster.brokers[broker]
    other = BrokerCells(cluster.cluster, OTHER)
    for cells in (cluster.brokers.get(OTHER), gone):
        if cells is None:
            continue
        other.open = add(other.open, {LISTENER: sum(cells.open.values())})
        other.accepted = add(other.accepted, {LISTENER: sum(cells.accepted.values())})
        other.silent = add(other.silent, {LISTENER: sum(cells.silent.values())})
        for (_, cause), count in cells.disconnects.items():
            other.disconnects[LISTENER, cause] = other.disconnects.get((LISTENER, cause), 0) + count
        other.apis = add(other.apis, cells.apis)
        other.queue, other.queue_ns = add(other.queue, cells.queue), other.queue_ns + cells.queue_ns
        other.mute, other.mute_ns = add(other.mute, cells.mute), other.mute_ns + cells.mute_ns
    cluster.brokers[OTHER] = other
