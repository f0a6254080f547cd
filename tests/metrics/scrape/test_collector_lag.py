"""Series by partition: all of them up to the limit, and none above it."""

import pytest

from kproxy.metrics.scrape.collector import registry_of
from tests.metrics.consumers.test_lag import Cluster


@pytest.mark.parametrize(("limit", "is_shown"), [(0, False), (2, False), (3, True), (4, True)])
def test_more_partitions_than_the_limit_have_no_series(limit, is_shown):
    cluster = Cluster()
    consumer = cluster.consumer("shop")
    logs = [("orders", number) for number in range(3)]
    consumer.fetch(dict.fromkeys(logs, 0), dict.fromkeys(logs, (10, None)))
    consumer.commit("shop", dict.fromkeys(logs, 4))
    cluster.metrics.cluster("default").partition_series = limit
    families = {family.name: family.samples for family in registry_of(cluster.metrics).collect()}
    for name, kind, value in (("kproxy_log_end_offset", "end", 10), ("kproxy_group_committed_offset", "committed", 4)):
        shown = {sample.labels["partition"]: sample.value for sample in families[name]}
        assert shown == (dict.fromkeys("012", value) if is_shown else {})
        left_out = {s.labels["kind"]: s.value for s in families["kproxy_lag_partition_series_left_out"]}
        assert left_out[kind] == (0 if is_shown else 3)
