"""Limits of connections: counts return to zero, rates hold over any second, and memory has a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.metrics.scrape.known import LIMITS as KNOWN
from kproxy.proxy.admission import limits as module
from kproxy.proxy.admission.limits import MAX_ADDRESSES, Bucket, ConnectionLimits
from kproxy.proxy.config.limits import Limits


def test_the_limits_of_metrics_are_settings():
    of_all = {
        "ended_clients",
        "kept_bytes",
        "open_files",
        "own_answers",
        "pending_requests",
        "unsent_frames",
    }  # no settings
    assert set(KNOWN) - of_all <= set(Limits.model_fields) and of_all <= set(KNOWN)
    assert {module.CONNECTIONS, module.CONNECTIONS_PER_ADDRESS, module.RATE, module.RATE_PER_ADDRESS} <= set(KNOWN)


@given(
    st.floats(0.01, 500, allow_nan=False),
    st.lists(st.floats(0, 3, allow_nan=False), min_size=1, max_size=200),
)
def test_a_bucket_lets_in_a_second_worth_at_once_and_its_rate_from_then_on(rate, pauses):
    bucket, now, taken = Bucket(rate), 1000.0, []
    for pause in pauses:
        now += pause
        if bucket.take(now):
            taken.append(now)
    assert taken[0] == 1000.0 + pauses[0], "one may always come first"
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            allowed = max(1.0, rate) + rate * (taken[last] - taken[first])
            assert last - first + 1 <= allowed + 1e-3


def test_a_bucket_reaches_its_rate():
    bucket = Bucket(10)
    assert sum(bucket.take(5.0) for _ in range(100)) == 10
    assert sum(bucket.take(5.0 + tick / 100) for tick in range(1000)) == 99


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"))))
def test_the_counts_are_zero_after_all_connections_have_ended(steps):
    limits = ConnectionLimits(Limits(max_connections=4, max_connections_per_address=2))
    inside = []
    for comes, host in steps:
        if not comes and inside:
            limits.leave()
            limits.leave_from(inside.pop())
        elif comes:
            limit = limits.enter(0.0)
            assert (limit == module.CONNECTIONS) == (len(inside) == 4)
            if limit is None and limits.enter_from(host, 0.0) is None:
                inside.append(host)
            elif limit is None:
                assert inside.count(host) == 2
                limits.leave()
        assert limits.connections == len(inside)
    for host in inside:
        limits.leave()
        limits.leave_from(host)
    assert limits.connections == 0 and not limits._open


def test_addresses_that_many_share_are_not_limited():
    limits = ConnectionLimits(Limits(max_connections_per_address=1, unlimited_addresses=["10.0.0.0/8", "2001:db8::1"]))
    for host in ("10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1"):
        assert [limits.enter_from(host, 0.0) for _ in range(3)] == [None] * 3
    assert [limits.enter_from("2001:db8::2", 0.0) for _ in range(2)] == [None, module.CONNECTIONS_PER_ADDRESS]


@pytest.mark.parametrize(
    ("prefix", "hosts", "let_in"),
    [
        (64, ["2001:db8::1", "2001:db8::2", "2001:db8:0:0:ffff::3"], 1),
        (64, ["2001:db8::1", "2001:db8:0:1::1", "2001:db8:0:2::1"], 3),
        (48, ["2001:db8::1", "2001:db8:0:1::1", "2001:db8:1::1"], 2),
        (128, ["2001:db8::1", "2001:db8::2", "2001:db8::1"], 2),
        (64, ["fe80::1%eth0", "fe80::2%eth0", "fe80::1%eth1"], 3),  # link-local: each its own machine
        (64, ["10.0.0.1", "10.0.0.2", "::ffff:10.0.0.3"], 3),
        (64, ["64:ff9b::10.0.0.1", "64:ff9b::10.0.0.2", "::ffff:0:10.0.0.1", "::1"], 4),  # IPv4 behind a translator
        (64, ["64:ff9b:1::10.0.0.1", "64:ff9b:1::10.0.0.2", "64:ff9b:1:a00:0:300::"], 3),
        # 6to4: 192.0.2.4 with some of its networks, and 192.0.2.5
        (64, ["2002:c000:204::1", "2002:c000:204:1::1", "2002:c000:204:ffff::", "2002:c000:205::1"], 2),
        (32, ["2002:c000:204::1", "2002:c000:205::1", "2002:c001::1"], 2),
        (128, ["2002:c000:204::1", "2002:c000:204:1::1"], 2),
        # Teredo: 192.0.2.4 by two servers and from two ports, itself, and 192.0.2.5
        (
            64,
            ["2001:0:a00:1:8000:1:3fff:fdfb", "2001:0:a00:2::2:3fff:fdfb", "192.0.2.4", "2001:0:a00:1::1:3fff:fdfa"],
            2,
        ),
        (128, ["2001:0:a00:1:8000:1:3fff:fdfb", "2001:0:a00:2::2:3fff:fdfb"], 2),
    ],
)
def test_an_ipv6_network_counts_as_one_address(prefix, hosts, let_in):
    limits = ConnectionLimits(Limits(max_connections_per_address=1, ipv6_prefix=prefix))
    inside = [host for host in hosts if limits.enter_from(host, 0.0) is None]
    assert len(inside) == let_in
    for host in inside:
        limits.leave_from(host)
    assert not limits._open
    rates = ConnectionLimits(Limits(max_connection_rate_per_address=1, ipv6_prefix=prefix))
    assert sum(rates.enter_from(host, 0.0) is None for host in hosts) == let_in


def test_the_end_of_an_unlimited_address_leaves_the_count_of_its_network_unchanged():
    limits = ConnectionLimits(Limits(max_connections_per_address=1, unlimited_addresses=["2001:db8::1"]))
    assert limits.enter_from("2001:db8::2", 0.0) is None
    assert limits.enter_from("2001:db8::1", 0.0) is None
    limits.leave_from("2001:db8::1")
    assert limits.enter_from("2001:db8::3", 0.0) == module.CONNECTIONS_PER_ADDRESS


def test_clients_from_many_addresses_take_bounded_memory_and_share_one_rate():
    limits = ConnectionLimits(Limits(max_connection_rate_per_address=2))
    let_in = sum(limits.enter_from(f"address {number}", 1.0) is None for number in range(3 * MAX_ADDRESSES))
    assert len(limits._buckets) == MAX_ADDRESSES
    assert let_in == MAX_ADDRESSES + 2, "those that are not remembered are one address"
    assert limits.enter_from("newcomer", 1.5) is None, "half a second is worth one more"
    assert limits.enter_from("newcomer", 1.5) == module.RATE_PER_ADDRESS
    assert limits.enter_from("newcomer", 10.0) is None
    assert len(limits._buckets) == 1, "full buckets were forgotten"


@pytest.mark.parametrize("limit", [module.CONNECTIONS, module.RATE_PER_ADDRESS])
def test_the_reason_names_the_setting_and_its_value(limit):
    limits = ConnectionLimits(Limits(max_connections=7, max_connection_rate_per_address=0.5))
    text = limits.why(limit)
    assert limit in text and ("7 " in text or "0.5 " in text) and "[cluster.limits]" in text
