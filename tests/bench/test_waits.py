"""The bench of waits: every attack reaches its listener, and the healthy clients beside it are measured."""

from dataclasses import replace

import pytest

from bench import waits
from bench.attacks import ATTACKS
from bench.processes import get


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    with waits.attacked(tmp_path_factory.mktemp("waits")) as kproxy:
        yield kproxy


def test_every_attack_is_measured(attacked):
    found = {name: waits.measure(attacked, name, 0.3) for name in ATTACKS}
    assert all(each.requests > 0 and 0 < each.median_ms <= each.longest_ms for each in found.values())
    assert not found["nothing"].sent_mb
    assert all(found[name].sent_mb > 0 for name in ("small", "tokens", "garbage", "refused", "deep", "zookeeper"))
    exposed = get(attacked.listeners["admin"], "/metrics")[1]
    for counter in (
        'kproxy_authentications_total{cluster="login",mechanism="OAUTHBEARER",outcome="disconnected"',
        'kproxy_authentications_total{cluster="login",mechanism="PLAIN",outcome="failed"',
        'kproxy_policy_refusals_total{api="DescribeGroups",cluster="policy",reason="rule"',
        'kproxy_connections_total{broker="bootstrap",cluster="tls"',
    ):
        (line,) = (line for line in exposed.splitlines() if line.startswith(counter))
        assert float(line.rsplit(" ", 1)[1]) > 0


def test_a_wait_is_judged_beside_the_control():
    wait = waits.Waits("small", 1, 1.0, longest_ms=60.0, control_longest_ms=9.0, sent_mb=0.0, rss_mb=0.0)
    assert not wait.is_kept
    assert replace(wait, control_longest_ms=10.0).is_kept
