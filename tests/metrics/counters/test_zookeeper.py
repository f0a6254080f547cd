"""ZooKeeper metrics: values of a real capture, series from the start, bounded four-letter words."""

from collections import Counter

from kproxy.metrics.counters.bounds import DURATION_NS
from kproxy.metrics.counters.zookeeper import ZooKeeperCells
from kproxy.metrics.scrape.zookeeper_families import zookeeper_families
from kproxy.zookeeper.session import ANSWERED, Notification, Operation, Session
from tests.zookeeper.traffic import talks


def test_operations_errors_and_watches_of_a_capture_are_counted():
    cells = ZooKeeperCells(["zk1:2181"])
    events = []
    for talk in talks():
        session = Session()
        for side, data, now in talk.parts:
            session.receive(side, data, now)
        session.close()
        events += session.events
    for event in events:
        cells.count(event)
    operations = [event for event in events if isinstance(event, Operation)]
    counted = {op: of.requests for op, of in cells.ops.items() if of.requests}
    assert counted == Counter(event.op for event in operations)
    assert sum(sum(of.latency) for of in cells.ops.values()) == sum(each.outcome == ANSWERED for each in operations)
    assert cells.ops["create"].errors["NODEEXISTS"] > 10
    assert cells.fired["NodeChildrenChanged"] == 43
    assert all(of.unanswered <= of.requests for of in cells.ops.values())


def test_series_of_every_day_begin_at_0_and_no_peer_makes_others():
    cells = ZooKeeperCells(["zk1:2181"])
    assert cells.ops["multi"].requests == cells.fired["NodeDeleted"] == cells.dial_failures["zk1:2181"] == 0
    for number in range(100):
        cells.count(Notification(1, f"invented {number}", "x", "/", 0, 0, 0))
        cells.count(Operation("getData", 1, 0, 0, outcome=ANSWERED, error=-1000 - number))
    assert cells.fired["other"] == cells.ops["getData"].errors["other"] == 100


def test_a_scrape_has_the_times_in_buckets_of_seconds_and_each_figure_under_its_name():
    cells = ZooKeeperCells(["zk1:2181"])
    for milliseconds in (1, 2, 30, 700_000):
        cells.count(Operation("getData", 1, 0, 0, outcome=ANSWERED, request_end=0, response_start=milliseconds * 10**6))
    cells.bytes[:] = 11, 12
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in zookeeper_families({"zk": cells})
        for sample in family.samples
    }
    name = "kproxy_zookeeper_latency_seconds"
    bounds = [(float(key[3]), value) for key, value in found.items() if key[:3] == (f"{name}_bucket", "zk", "getData")]
    assert [bound for bound, _ in bounds] == [*(each / 1e9 for each in DURATION_NS), float("inf")]
    assert all(value == sum(each <= bound for each in (0.001, 0.002, 0.03, 700)) for bound, value in bounds)
    assert found[f"{name}_count", "zk", "getData"] == found["kproxy_zookeeper_requests_total", "zk", "getData"] == 4
    assert found[f"{name}_sum", "zk", "getData"] == 700.033
    assert [found["kproxy_zookeeper_bytes_total", "zk", way] for way in ("request", "response")] == [11, 12]
