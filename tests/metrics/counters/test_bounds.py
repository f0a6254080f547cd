"""Histogram bounds are part of the series: changing one breaks recorded queries and old data."""

import pytest

from kproxy.metrics.consumers import lag, offsets
from kproxy.metrics.counters import bounds, cells, groups, named, top
from kproxy.metrics.pushed import pushed_pieces, telemetry
from kproxy.metrics.scrape import known, zookeeper_families
from tests.documented import missing, size

SECONDS = {
    "DURATION_NS": "0.00005 0.0001 0.00025 0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.55 1.1 2.5 5 10 30 60 "
    "300 600",
    "EXCESS_WAIT_NS": "0.001 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 5 30",
    "QUEUE_NS": "0.00005 0.00025 0.001 0.005 0.025 0.1 0.5 2.5 10 60 600",
    "PROXY_NS": "0.000005 0.00001 0.000025 0.00005 0.0001 0.00025 0.0005 0.001 0.0025 0.005 0.01 0.025 0.1 1 10",
    "THROTTLE_NS": "0.001 0.01 0.05 0.1 0.25 0.5 1 2.5 5 10 30",
    "MUTE_NS": "0.001 0.01 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 300",
    "REBALANCE_NS": "0.1 0.5 1 5 15 60 300",
}


def test_every_histogram_of_times_has_the_bounds_that_it_always_had():
    assert {name for name in vars(bounds) if name.endswith("_NS")} == SECONDS.keys()
    for name, seconds in SECONDS.items():
        assert [bound / 1e9 for bound in getattr(bounds, name)] == [float(one) for one in seconds.split()], name
    assert bounds.SIZE_BYTES == (64, 256, 1024, 4096, 16384, 65536, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 100 << 20)
    assert [float(le) for le in zookeeper_families._LES] == [*map(float, SECONDS["DURATION_NS"].split()), float("inf")]


@pytest.mark.parametrize(
    ("counts", "q", "value"),
    [
        ((0, 0, 0, 0), 0.5, None),
        ((4, 0, 0, 0), 0.5, 5.0),  # from 0 to the first bound
        ((0, 4, 0, 0), 0.25, 12.5),
        ((1, 0, 3, 0), 1.0, 40.0),
        ((1, 1, 0, 2), 0.99, 40.0),  # above all bounds: the last one is the best estimate
        ((1, 1, 0, 2), 0.5, 20.0),
    ],
)
def test_a_quantile_is_linear_in_its_bucket(counts, q, value):
    assert bounds.quantile((10, 20, 40), counts, q) == value
    assert len(bounds.cell((10, 20, 40))) == len(counts)


MINUTE_NS = 60 * 10**9


def test_the_bounds_of_names_and_positions_are_those_of_the_docs():
    assert not missing(
        "limits.md",
        f"| {lag.MAX_POSITIONS:,} partitions |",
        f"of a cluster {named.MAX_TOPICS} topics and as many clients with series",
        f" {lag.MAX_ALL_POSITIONS:,} partitions of all connections",
        f" {offsets.MAX_LOGS:,} ends of logs",
        f" {offsets.MAX_COMMITTED:,} commits",
        f" {offsets.MAX_REMOVED:,} removals",
        f" {offsets.MAX_SEEN:,} groups and {offsets.MAX_PENDING:,} offsets of transactions",
        f"names of {named.MAX_LABEL} characters",
    )
    assert named.MAX_CLIENTS == named.MAX_TOPICS


def test_the_bounds_of_series_are_those_of_the_docs():
    assert not missing(
        "inside/bounds.md",
        f"| {cells.MAX_APIS} APIs per cluster, always including the common ones,"
        f" and {cells.MAX_ERRORS} pairs of an API and an error;",
        f"| {cells.UNKNOWN_APIS} each; the rest is in `unknown_other`;",
        f"| series of brokers without a connection so far | {known.MAX_BORN} per cluster |",
        f"| series of groups | {groups.MAX_GROUPS} of a cluster; the rest is in `other`;",
        f"; {groups.MAX_PARTITIONS:,} partitions as offline, and as many as out of sync |",
        f"| names of topics by id | {named.MAX_NAMES} per cluster |",
        f"`other` has {telemetry.MAX_OTHER} |",
        f"; {lag.PARTITION_SERIES} series by partition of each kind, or none;"
        f" the {lag.MAX_SERIES} largest lags of clients and of groups are shown",
    )
    assert cells.UNKNOWN_ERRORS == cells.UNKNOWN_APIS


def test_the_bounds_of_pushed_metrics_are_those_of_the_docs():
    assert not missing(
        "telemetry.md",
        f"of {telemetry.CHARACTERS} characters on average",
        f" {telemetry.MAX_ITEMS:,} metrics and points",
        f"in a push above {size(telemetry.WHOLE_BYTES)} | {size(pushed_pieces.PIECE_BYTES)} per point;",
        f" {size(pushed_pieces.OTHER_BYTES)} per metric",
        f"| {telemetry.MAX_LABELS}, values of {named.MAX_LABEL} characters |",
        {3: "three"}[telemetry.LIFE_INTERVALS] + " intervals after their client's last push",
    )
    assert pushed_pieces.MAX_FIELDS == telemetry.MAX_ITEMS


def test_series_stay_and_change_as_the_docs_say():
    assert not missing(
        "metrics.md",
        "until it has been idle for an hour",
        f"at most {named.MAX_TOPICS // 10} are replaced at once, then one a minute",
        "A replaced series is exposed five minutes longer",
        "A partition whose end no answer has confirmed for a minute has no series",
    )
    assert (named.EXPIRY_NS, top.REPLACE_NS, top.LEAVE_NS) == (60 * MINUTE_NS, MINUTE_NS, 5 * MINUTE_NS)
    assert lag.UNCONFIRMED_NS == MINUTE_NS
