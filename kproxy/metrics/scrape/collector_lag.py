"""Offsets and lag to Prometheus metric families, at scrape time; see `collector`.

Refuses to know how they are derived (`lag`, `offsets`).
"""

from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kproxy.metrics.consumers.offsets import COMMITTED, END
from kproxy.metrics.counters.cells import ClusterCells


def of_lag(clusters: Sequence[ClusterCells], now_ns: int, wall_ns: int) -> Iterator[Metric]:
    """Yield the families of lag of clients and groups, of its two offsets, and of kproxy's own requests for them."""
    yield from _lags(clusters, now_ns, wall_ns)
    yield from _by_partition(clusters, now_ns)
    yield from _questions(clusters)


def _lags(clusters: Sequence[ClusterCells], now_ns: int, wall_ns: int) -> Iterator[Metric]:
    records = GaugeMetricFamily(
        "kproxy_consumer_lag_records",
        "Records between the high watermark and a client's fetch position, or a group's committed offset.",
    )
    seconds = GaugeMetricFamily(
        "kproxy_consumer_lag_seconds",
        "Age of the first record that a consumer has not received; an upper bound if its own timestamp is not known.",
    )
    exact = GaugeMetricFamily(
        "kproxy_consumer_lag_seconds_exact",
        "1 if kproxy_consumer_lag_seconds is the age by the record's own timestamp, 0 if it is an upper bound.",
    )
    unknown = GaugeMetricFamily(
        "kproxy_group_lag_unknown_partitions",
        "Partitions with a committed offset whose lag is not known, because no response shows the log's current end.",
        labels=("cluster", "group", "topic"),
    )
    evicted = CounterMetricFamily(
        "kproxy_lag_evicted",
        "State for lag that was dropped at a bound: ends of logs, committed offsets, positions, groups to ask for.",
        labels=("cluster", "kind"),
    )
    for cluster in clusters:
        for kind, count in cluster.lag_evicted.copy().items():
            evicted.add_metric((cluster.cluster, kind), count)
        if cluster.lags is None:
            continue
        for by, consumers in cluster.lags.shown(now_ns, wall_ns):
            for name, topic, lag in consumers:
                labels = {"cluster": cluster.cluster, by: name, "topic": topic}
                if by == "group":
                    unknown.add_metric((cluster.cluster, name, topic), lag.unknown)
                if lag.records is None or (by != "group" and not lag.records and lag.unknown):
                    continue  # no other series of a client shows that its lag is unknown
                records.add_sample(records.name, labels, lag.records)
                if lag.seconds is not None:
                    seconds.add_sample(seconds.name, labels, lag.seconds)
                    exact.add_sample(exact.name, labels, lag.is_exact)
    yield from (records, seconds, exact, unknown, evicted)


def _by_partition(clusters: Sequence[ClusterCells], now_ns: int) -> Iterator[Metric]:
    ends = GaugeMetricFamily(
        "kproxy_log_end_offset",
        "End of a partition's log: its high watermark, or the offset after the records just produced.",
        labels=("cluster", "topic", "partition"),
    )
    offsets = GaugeMetricFamily(
        "kproxy_group_committed_offset",
        "The offset that a group has committed in a partition.",
        labels=("cluster", "group", "topic", "partition"),
    )
    left_out = GaugeMetricFamily(
        "kproxy_lag_partition_series_left_out",
        "Series by partition left out, because there would be more than partition_series of [cluster.lag].",
        labels=("cluster", "kind"),
    )
    for cluster in clusters:
        if cluster.lags is None:
            continue
        name, most = cluster.cluster, cluster.partition_series
        of_logs, of_groups = cluster.lags.ends(now_ns), cluster.lags.offsets()
        for kind, family, found in ((END, ends, of_logs), (COMMITTED, offsets, of_groups)):
            is_shown = len(found) <= most
            left_out.add_metric((name, kind), 0 if is_shown else len(found))
            for labels, offset in found.items() if is_shown else ():
                family.add_metric((name, *map(str, labels)), offset)
    yield from (ends, offsets, left_out)


def _questions(clusters: Sequence[ClusterCells]) -> Iterator[Metric]:
    questions = CounterMetricFamily(
        "kproxy_lag_questions",
        "kproxy's own requests for offsets, and for the brokers that have them, by outcome.",
        labels=("cluster", "api", "outcome"),
    )
    for cluster in clusters:
        for (api, outcome), count in cluster.lag_questions.copy().items():
            questions.add_metric((cluster.cluster, api, outcome), count)
    yield questions
