"""Findings of a running kproxy: events counted as live ones are, between two moments."""

from kproxy.analysis.findings import limits, live
from kproxy.analysis.findings.following import Following
from kproxy.metrics import Metrics
from kproxy.metrics.bounds import PROXY_NS
from kproxy.metrics.groups import InsightCells
from kproxy.views.findings import sentence
from kproxy.wire.bodies import Found, Sums
from kproxy.wire.interest import ApiPlan
from tests.metrics.test_metrics import MS, PRODUCE, exchange, info
from tests.proxy.live import kproxy
from tests.proxy.live import live as in_a_loop
from tests.proxy.relay.test_relay import asked_while_blocked

SECOND = 10**9


class Running:
    """A kproxy whose clock goes as a test wants it."""

    def __init__(self):
        self.metrics = Metrics()
        self.connections = {}

    def does(self, broker, count, plan=PRODUCE, **fields):
        if broker not in self.connections:
            self.connections[broker] = self.metrics.connection(info(), "main", broker, topics=True)
        fields.setdefault("request_start", self.metrics.now_ns())
        self.connections[broker].events([exchange(plan, **fields) for _ in range(count)])

    def moment(self, at_s):
        taken = live.taken(self.metrics)
        taken.now_ns = self.metrics.started_ns + round(at_s * SECOND)
        taken.cpu_ns = {"1": 0}
        return taken


def found(before, now, **given):
    return {(one.kind, one.where): one for one in live.found_between(before, now, limits(given))}


def test_only_what_happened_between_counts():
    running = Running()
    running.does("1", 50, throttle_ms=100)
    first = running.moment(10)
    assert ("throttled", "Produce") in found(live.began(running.metrics), first)
    running.does("1", 50)
    assert not found(first, running.moment(70))
    running.does("1", 10, throttle_ms=900)
    one = found(first, running.moment(70))["throttled", "Produce"]
    assert dict(one.evidence)["throttled"] == 10 and "producer_byte_rate" in one.change


def test_a_slow_and_hot_broker_beside_others():
    running = Running()
    for broker in ("1", "2", "3"):
        running.does(broker, 600, request_bytes=50_000 if broker == "2" else 2000)
    running.does("3", 30, duration_ns=900 * MS)
    answer = found(live.began(running.metrics), running.moment(60))
    assert set(answer) == {("hot_broker", "broker 2"), ("slow_broker", "broker 3")}


def test_old_versions_are_told_of_the_cluster():
    running = Running()
    running.does("1", 5, ApiPlan(0, 2, "Produce", True))
    (one,) = found(live.began(running.metrics), running.moment(60)).values()
    assert (one.kind, one.severity, dict(one.evidence)["apis"]) == ("old_versions", "note", "Produce v2")
    running.does("1", 5)
    (one,) = found(live.began(running.metrics), running.moment(60)).values()
    assert one.severity == "warning"  # its brokers take newer ones


def test_a_group_that_does_not_come_to_rest_stands_still_by_the_classic_protocol_alone():
    running = Running()
    cells = InsightCells()
    running.metrics.cluster("default").insight = lambda: cells
    first = running.moment(10)
    for protocol in ("classic", "consumer"):
        group = cells.group(f"{protocol}-g", running.metrics.now_ns())
        cells.stands(group, "Stable", 2, 20, protocol, "consumer")
        for _ in range(20):
            cells.rebalanced(group, "session_expired", 3 * SECOND)
    answer = found(first, running.moment(310))
    severities = {where: one.severity for (kind, where), one in answer.items() if kind == "rebalance_storm"}
    assert severities == {"group classic-g": "critical", "group consumer-g": "warning"}


def batches(records, count, codecs, size):
    body = Found()
    body.sums = [Sums("orders", None, size, count, records, codecs)]
    return body


def test_topics_with_single_records_and_without_compression():
    running = Running()
    running.does("1", 3000, request_body=batches(1, 1, 1, 2000))
    answer = found(live.began(running.metrics), running.moment(20))
    assert set(answer) == {("single_record_batches", "topic orders"), ("no_compression", "topic orders")}
    assert dict(answer["single_record_batches", "topic orders"].evidence)["single_share"] == 1
    running = Running()
    running.does("1", 3000, request_body=batches(40, 1, 16, 2000))  # full, and zstd
    assert not found(live.began(running.metrics), running.moment(20))


def test_clients_that_come_and_go():
    running = Running()
    for number in range(100):
        running.does(str(number % 2), 1)
        running.connections.pop(str(number % 2)).closed("client_closed")
    answer = found(live.began(running.metrics), running.moment(50))
    assert set(answer) == {("connection_churn", "all clients")}
    churn = answer["connection_churn", "all clients"]
    assert {"connections", "per_minute", "life_mean_ns"} == dict(churn.evidence).keys()  # no life, no reset is known
    assert "on average" in sentence(churn) and "unknown" not in sentence(churn)


def test_a_full_core_is_critical_where_bytes_wait_for_it():
    running = Running()
    first = running.moment(0)
    running.metrics.loop_lag.counts[-2] += 100  # up to 10 s
    now = running.moment(60)
    assert PROXY_NS[-1] == 10 * SECOND
    assert found(first, now)["core_full", "kproxy"].severity == "warning"
    now.cpu_ns = {"1": 59 * SECOND}
    assert found(first, now)["core_full", "kproxy"].severity == "critical"


def test_a_kproxy_whose_loop_does_something_else_says_so():
    """Bytes of real sockets wait 40 ms at a time, by the kernel's times of their arrival."""

    async def test():
        async with kproxy() as here:
            serving = await asked_while_blocked(here, [])
            findings = Following(here.server.counted)
            (one,) = (await findings.asked({"loop_lag_ms": "20"}))["findings"]
            assert one["kind"] == "core_full" and one["evidence"]["loop_lag_ns"] >= 20e6
            assert not (await findings.asked({"loop_lag_ms": "1000", "core_share": "2"}))["findings"]
        await serving

    in_a_loop(test())
