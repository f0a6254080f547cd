"""The bounds of histograms are part of the series' names: to change one breaks what was recorded with the old one."""

import pytest

from kproxy.metrics import bounds, zookeeper_families

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
        ((1, 1, 0, 2), 0.99, 40.0),  # above them all: the last bound is all that is known
        ((1, 1, 0, 2), 0.5, 20.0),
    ],
)
def test_a_quantile_is_linear_in_its_bucket(counts, q, value):
    assert bounds.quantile((10, 20, 40), counts, q) == value
    assert len(bounds.cell((10, 20, 40))) == len(counts)
