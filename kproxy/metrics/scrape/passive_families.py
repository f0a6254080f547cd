"""The metric families of a passive kproxy, and the names of a proxy's families that it lacks.

Part of the collector, whose rules hold here too. Refuses to know how a scrape arrives.
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kproxy.metrics.counters.passive import PassiveCells

# Families that a passive kproxy lacks: it dials, listens, rewrites, refuses and delays nothing.
OF_A_PROXY = frozenset(
    f"kproxy_{name}"
    for name in (
        *("accepting", "address_leaks", "audit_lines", "audit_lines_dropped", "authentications"),
        *(
            "certificate_expiry_timestamp_seconds",
            "certificate_reloads",
            "config_last_reload_success_timestamp_seconds",
        ),
        *("config_last_reload_successful", "config_reloads", "connection_limit", "dial_failures", "dial_seconds"),
        *("epoll_refusals", "failed_upgrades", "limits_reached", "listeners", "loop_lag_seconds", "loops_refused"),
        *("neutralised_addresses", "own_answers", "paused_reads", "policy_refusals", "predecessor_connections"),
        *("proxy_duration_seconds", "ready", "rewritten_addresses", "tls_handshake_seconds", "tls_handshakes"),
        *("zookeeper_bytes", "zookeeper_connections", "zookeeper_dial_failures", "zookeeper_open_connections"),
        *("zookeeper_sessions", "zookeeper_unread_connections", "zookeeper_values_left_out"),
        *("unbound_brokers", "worker_cpu_seconds", "worker_resident_memory_bytes", "worker_restarts", "workers"),
    )
)


def passive_families(cells: PassiveCells) -> Iterator[Metric]:
    """Yield the families about packets of a passive kproxy."""
    packets = CounterMetricFamily("kproxy_watch_packets", "Packets of the watched ports.", labels=("interface",))
    dropped = CounterMetricFamily(
        "kproxy_watch_dropped_packets",
        "Packets that the kernel dropped because kproxy fell behind in reading: they are in no other metric.",
        labels=("interface",),
    )
    is_up = GaugeMetricFamily(
        "kproxy_watch_interface_up", "1 while the interface is there and up.", labels=("interface",)
    )
    for interface, each in cells.interfaces.copy().items():
        packets.add_metric((interface,), each.packets)
        dropped.add_metric((interface,), each.dropped)
        is_up.add_metric((interface,), each.is_up)
    yield packets
    yield dropped
    yield is_up
    yield CounterMetricFamily(
        "kproxy_watch_duplicate_packets",
        "Packets already captured at another interface, as of a bridge and its member; other metrics count each once.",
        value=cells.duplicates,
    )
    copies = CounterMetricFamily(
        "kproxy_watch_copied_connections",
        "Connections captured twice under different addresses, as on both sides of a NAT: one of them is counted.",
        labels=("cluster",),
    )
    for cluster, count in cells.copies.copy().items():
        copies.add_metric((cluster,), count)
    yield copies
    findings = CounterMetricFamily(
        "kproxy_watch_findings",
        "Findings about the capture and the network: gaps, segments sent again, other protocols, by kind.",
        labels=("kind",),
    )
    for kind, count in cells.found().items():
        findings.add_metric((kind,), count)
    yield findings
    yield GaugeMetricFamily(
        "kproxy_watch_delay_seconds",
        "Time that the packets read last have waited: if it grows towards a second, the kernel will drop packets.",
        value=cells.behind_ns / 1e9,
    )
