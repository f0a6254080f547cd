"""Cells of groups and leadership to Prometheus metric families, at scrape time; see `collector`.

Refuses to know how they are counted: another process does that.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kproxy.metrics.counters.bounds import REBALANCE_NS
from kproxy.metrics.counters.cells import ClusterCells
from kproxy.metrics.counters.groups import InsightCells
from kproxy.metrics.counters.named import shown
from kproxy.metrics.scrape.families import Histogram

_GROUP = ("cluster", "group")


def of_groups(clusters: Sequence[ClusterCells], now_ns: int) -> Iterator[Metric]:
    """Yield the families of the clusters that insight follows."""
    known = [(each.cluster, each.insight(), each.unheard) for each in clusters if each.insight is not None]
    yield from _groups([(name, cells) for name, cells, _ in known], now_ns)
    yield from _clusters(known)


def _groups(known: Sequence[tuple[str, InsightCells]], now_ns: int) -> Iterator[Metric]:
    rebalances = CounterMetricFamily("kproxy_group_rebalances", "Rebalances of a group.", labels=_GROUP)
    durations = Histogram(
        "kproxy_group_rebalance_seconds",
        "Time from the cause of a rebalance to its last member's assignment.",
        _GROUP,
        REBALANCE_NS,
    )
    rebalancing = GaugeMetricFamily(
        "kproxy_group_rebalancing", "1 while a group rebalances and its members may stand still, else 0.", labels=_GROUP
    )
    members = GaugeMetricFamily("kproxy_group_members", "Members of a group.", labels=_GROUP)
    generation = GaugeMetricFamily(
        "kproxy_group_generation", "Generation of a group; the epoch, for the newer protocols.", labels=_GROUP
    )
    moves = CounterMetricFamily(
        "kproxy_group_coordinator_moves", "Rebalances of a group caused by a move of its coordinator.", labels=_GROUP
    )
    split = CounterMetricFamily(
        "kproxy_group_split_brains",
        "Partitions for which a replaced member's commit was refused, while another member already owned them.",
        labels=_GROUP,
    )
    failures = CounterMetricFamily(
        "kproxy_group_failures",
        "Requests of members that their coordinator refused; errors that are part of every rebalance are left out.",
        labels=(*_GROUP, "operation"),
    )
    for cluster, cells in known:
        for group_id, group in cells.groups.shown(now_ns):
            labels = cluster, shown(group_id)
            rebalances.add_metric(labels, group.rebalances)
            durations.add(labels, group.duration, group.duration_ns)
            moves.add_metric(labels, group.coordinator_moves)
            split.add_metric(labels, group.split)
            for operation, count in group.failures.items():
                failures.add_metric((*labels, operation), count)
            if group_id is not None:  # None is many groups, without a common state
                rebalancing.add_metric(labels, group.is_rebalancing)
                members.add_metric(labels, group.members)
                generation.add_metric(labels, group.generation)
    yield from (rebalances, durations.family(), rebalancing, members, generation, moves, split, failures)


def _clusters(known: Sequence[tuple[str, InsightCells, dict[str, int]]]) -> Iterator[Metric]:
    causes = CounterMetricFamily(
        "kproxy_rebalance_causes", "Rebalances of all groups, by cause.", labels=("cluster", "cause")
    )
    changes = CounterMetricFamily(
        "kproxy_leadership_changes",
        "Changes of partitions' leaders and replicas, reported by controllers and brokers.",
        labels=("cluster", "change"),
    )
    offline = GaugeMetricFamily(
        "kproxy_partitions_offline", "Partitions without a leader, as last reported.", labels=("cluster",)
    )
    shrunk = GaugeMetricFamily(
        "kproxy_partitions_isr_shrunk",
        "Partitions with replicas that are not in sync, as last reported.",
        labels=("cluster",),
    )
    left_out = CounterMetricFamily(
        "kproxy_insight_left_out",
        "Exchanges, groups and partitions that insight left out, by reason.",
        labels=("cluster", "why"),
    )
    for cluster, cells, unheard in known:
        for cause, count in cells.causes.items():
            causes.add_metric((cluster, cause), count)
        for change, count in cells.changes.items():
            changes.add_metric((cluster, change), count)
        offline.add_metric((cluster,), cells.offline)
        shrunk.add_metric((cluster,), cells.shrunk)
        for why, count in (unheard | cells.left_out).items():
            left_out.add_metric((cluster, why), count)
    yield from (causes, changes, offline, shrunk, left_out)
