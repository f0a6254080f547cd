"""Cells of several processes as one: what a scrape of all shows is what one process would have counted."""

import asyncio
import pickle
from uuid import UUID

from kproxy.metrics import Metrics
from kproxy.metrics.collector import registry_of
from kproxy.metrics.exposition import render
from kproxy.metrics.named import EXPIRY_NS, MAX_TOPICS, TopicCells
from kproxy.metrics.published import PROCESS, Published
from kproxy.metrics.shared import Shared, _pushes, _Shown
from kproxy.metrics.telemetry import GAUGE, PushingClient, Series
from kproxy.metrics.tls import TlsSide
from kproxy.wire.bodies import Found, Sums
from kproxy.wire.events import ClientNamed
from tests.metrics.test_lag import NOW_MS, Cluster, batch
from tests.metrics.test_metrics import PRODUCE, answered_at, busy_metrics, consumed, exchange, info


def told(published, with_lags=True):
    """What a worker sends, through a pickle as on its way."""

    async def all_of_it():
        return [change async for changes in published.changes(with_lags) for change in changes]

    return pickle.loads(pickle.dumps(asyncio.run(all_of_it())))


def samples(metrics):
    lines = render(registry_of(metrics))[0].decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("kproxy_"))
    return {name: float(value) for name, value in found if "_age" not in name and "start_time" not in name}


def produced(metrics, topics, size=1000):
    connection = metrics.connection(info(), "main", "1", topics=True)
    for topic in topics:
        body = Found()
        body.sums = [Sums(topic, None, size, 1, 1, 1)]
        now_ns = metrics.now_ns()
        connection.events([exchange(PRODUCE, request_start=now_ns, **answered_at(now_ns), request_body=body)])
    return connection


def test_one_worker_shown_by_its_parent_is_what_it_would_show_itself():
    own = Metrics()
    worker = busy_metrics()
    own.started_ns, own.clock_offset_ns = worker.started_ns, worker.clock_offset_ns
    own.upstream("default", (), worker.clusters["default"].upstream.state)
    for name, side in worker.cluster("default").tls.items():  # certificates: every process has loaded them
        own.cluster("default").tls[name] = TlsSide(tuple(side.results), side.expiries)
    own.cluster("default").insight = worker.cluster("default").insight  # one process tells the parent of groups
    shared = Shared(own)
    shared.take(1, told(Published(worker)))
    alone, seen = samples(worker), samples(shared.merged())
    apart = {name for name in alone if name.startswith(("kproxy_worker", "kproxy_connection_limit", "kproxy_config"))}
    wrong = {name: (value, seen.get(name)) for name, value in alone.items() if seen.get(name) != value}
    assert not set(wrong) - apart
    assert len(alone) > 500


def test_the_cpu_time_of_a_worker_goes_on_from_that_of_its_predecessor():
    shared = Shared(Metrics())

    def uses(worker, cpu_ns, memory):
        shared.take(worker, [((PROCESS,), pickle.dumps((cpu_ns, memory)))])

    uses(1, 500, 64)
    uses(2, 40, 32)
    assert shared.merged().worker_usage == {"1": (500, 64), "2": (40, 32)}
    shared.gone(1)
    assert shared.merged().worker_usage == {"1": (500, 0), "2": (40, 32)}
    uses(1, 7, 16)
    assert shared.merged().worker_usage == {"1": (507, 16), "2": (40, 32)}
    shared.gone(1)
    assert shared.merged().worker_usage == {"1": (507, 0), "2": (40, 32)}


def test_two_workers_add_up_and_the_counters_of_one_that_is_gone_stay():
    shared = Shared(Metrics())
    first, second = busy_metrics(), busy_metrics()
    shared.take(1, told(Published(first)))
    one = samples(shared.merged())
    shared.take(2, told(Published(second)))
    both = samples(shared.merged())
    name = next(each for each in one if each.startswith("kproxy_requests_total") and one[each] > 1)
    assert both[name] == 2 * one[name]
    shared.gone(1)
    left = samples(shared.merged())
    gauges = ("kproxy_open", "kproxy_inflight", "kproxy_worker", "kproxy_client", "kproxy_consumer", "kproxy_tls_cert")
    assert not {
        each: value for each, value in both.items() if left.get(each, 0) < value and not each.startswith(gauges)
    }
    open_now = [each for each in one if each.startswith("kproxy_open_connections")]
    assert sum(left[each] for each in open_now) == sum(one[each] for each in open_now)
    lost = sum(value for each, value in left.items() if 'cause="worker_lost"' in each and "disconnects" in each)
    assert lost == sum(one[each] for each in open_now)


def counters(metrics):
    shown = samples(metrics)
    return {each: value for each, value in shown.items() if each.startswith(("kproxy_requests_total", "kproxy_topic_"))}


def test_counters_of_a_removed_cluster_do_not_fall_while_one_worker_still_drains_it():
    shared = Shared(Metrics())
    workers = Metrics(), Metrics()
    first = workers[0]
    published = [Published(each) for each in workers]
    for number, worker in enumerate(workers):
        produced(worker, ["topic"])
        shared.take(number, told(published[number]))
    before = counters(shared.merged())
    assert sum(before.values()) > 0
    last = produced(first, ["topic"])  # since it was last asked
    last.closed("client_eof")
    del first.clusters["default"]
    shared.take(0, told(published[0]))
    after = counters(shared.merged())
    assert {each: (value, after.get(each)) for each, value in before.items() if after.get(each, 0) < value} == {}
    (requests,) = (each for each in before if each.startswith("kproxy_requests_total"))
    assert after[requests] == before[requests] + 1
    produced(first, ["topic"])  # it has been added again meanwhile
    shared.take(0, told(published[0]))
    assert counters(shared.merged())[requests] == before[requests] + 2
    for number, worker in enumerate(workers):
        del worker.clusters["default"]
        shared.take(number, told(published[number]))
    assert not counters(shared.merged())
    produced(first, ["topic"])  # what had been counted until then does not come back
    shared.take(0, told(published[0]))
    assert counters(shared.merged())[requests] == 1


def test_counters_of_a_cluster_that_is_made_anew_between_two_reports_do_not_fall():
    shared = Shared(Metrics())
    worker = Metrics()
    published = Published(worker)
    shared._own.cluster("default")  # the settings have it, or have it again
    produced(worker, ["topic"])
    shared.take(1, told(published))
    before = counters(shared.merged())
    (requests,) = (each for each in before if each.startswith("kproxy_requests_total"))
    del worker.clusters["default"]
    produced(worker, ["topic"])
    shared.take(1, told(published))
    assert counters(shared.merged())[requests] == before[requests] + 1


def test_a_cluster_that_the_parent_is_the_last_to_forget_leaves_nothing():
    own, worker = Metrics(), Metrics()
    shared, published = Shared(own), Published(worker)
    own.cluster("default")
    produced(worker, ["topic"])
    shared.take(1, told(published))
    del worker.clusters["default"]
    shared.take(1, told(published))
    assert counters(shared.merged())
    del own.clusters["default"]
    shared.take(1, told(published))
    assert not shared.merged().clusters


def test_only_what_has_changed_is_sent():
    metrics = busy_metrics()
    published = Published(metrics)
    assert len(told(published)) >= 20
    again = told(published, with_lags=False)
    assert {place[0] for place, _ in again} <= {"process"}
    connection = metrics.connection(info(), "main", "1")
    told(published, with_lags=False)
    connection.events([exchange(PRODUCE)])
    kinds = [place[0] for place, _ in told(published, with_lags=False)]
    assert kinds.count("api") == 1
    assert len(kinds) <= 4


def test_topics_of_all_workers_have_one_limit_and_no_count_goes_back():
    shared = Shared(Metrics())
    first, second = Metrics(), Metrics()
    of_first, of_second = Published(first), Published(second)
    produced(first, [f"first-{number}" for number in range(MAX_TOPICS)])
    produced(second, [f"second-{number}" for number in range(100)], size=500)
    shared.take(1, told(of_first))
    shared.take(2, told(of_second))

    def topics():
        shown = samples(shared.merged())
        return {each: value for each, value in shown.items() if each.startswith("kproxy_topic_bytes_total")}

    before = topics()
    assert len(before) == MAX_TOPICS + 1
    assert sum(before.values()) == MAX_TOPICS * 1000 + 100 * 500
    (other,) = (value for each, value in before.items() if 'topic="other"' in each)
    assert other == 100 * 500
    produced(second, ["second-7"], size=10_000)
    shared.take(2, told(of_second))
    shared.gone(1)  # its topics stay: a replacement will meet them again
    after = topics()
    assert sum(after.values()) == sum(before.values()) + 10_000
    assert all(after.get(each, 0) >= value for each, value in before.items())
    third = Metrics()
    produced(third, ["first-3"])
    shared.take(1, told(Published(third)))
    (name,) = (each for each in before if 'topic="first-3"' in each)
    assert topics()[name] == 2000


def test_topics_of_a_worker_that_is_gone_are_forgotten_when_nobody_names_them():
    own = Metrics()
    own.cluster("default")  # as the settings have it
    shared = Shared(own)
    worker = Metrics()
    produced(worker, ["old"])
    shared.take(1, told(Published(worker)))
    shared.gone(1)
    assert any('topic="old"' in each for each in samples(shared.merged()))
    own.clock_offset_ns += EXPIRY_NS + 10**10
    assert not any('topic="old"' in each for each in samples(shared.merged()))


def test_a_group_is_behind_whoever_saw_the_end_of_the_log():
    """One worker has the consumer's coordinator connection, the other its fetches."""
    alone, fetches, commits = Metrics(), Metrics(), Metrics()
    now_ns = alone.now_ns()
    fetches.clock_offset_ns = commits.clock_offset_ns = alone.clock_offset_ns
    for metrics, some in ((alone, slice(None)), (fetches, slice(0, -1)), (commits, slice(-1, None))):
        connection = metrics.connection(info(), "main", "2", topics=True)
        connection.events([*consumed(now_ns, now_ns // 10**6 + 86_400_000)][some])
    own = Metrics()
    own.clock_offset_ns = alone.clock_offset_ns
    shared = Shared(own)
    shared.take(1, told(Published(fetches)))
    shared.take(2, told(Published(commits)))

    def lags(metrics):
        return {
            each: value for each, value in samples(metrics).items() if "lag_records" in each or "lag_seconds{" in each
        }

    expected = {each: value for each, value in lags(alone).items() if "loop" not in each}
    assert any("group=" in each for each in expected)
    assert lags(shared.merged()) == expected


def test_clients_go_with_their_worker():
    shared = Shared(Metrics())
    worker = Metrics()
    worker.connection(info(), "main", "1").events([ClientNamed("shop", "a-client", "1.2", worker.now_ns())])
    shared.take(1, told(Published(worker)))
    assert any("kproxy_client_info" in each for each in samples(shared.merged()))
    shared.gone(1)
    assert not any("kproxy_client_info" in each for each in samples(shared.merged()))


def test_of_a_log_and_of_a_group_the_latest_report_of_all_workers_counts_whoever_sends_it_last(monkeypatch):
    monkeypatch.setattr(Metrics, "now_ns", lambda self: NOW_MS * 10**6)
    orders = ("orders", 0)
    workers = []
    for age_s, high_watermark, offset in ((0, 10, 9), (5, 7, 3), (1, 8, 5)):
        cluster = Cluster()
        cluster.now_ns -= age_s * 10**9
        consumer = cluster.consumer()
        consumer.fetch({orders: 0}, {orders: (high_watermark, batch(0, 1))})
        consumer.commit("billing", {orders: offset})
        workers.append(cluster)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        shared = Shared(Metrics())
        for number in order:
            shared.take(number, told(Published(workers[number].metrics)))
        lags = shared.merged().clusters["default"].lags
        assert lags.logs[orders].high_watermark == 10
        assert [end for end, _ in lags.logs[orders].ends] == [7, 8]
        assert lags.committed["billing", orders].offset == 9


def topic_cells(count):
    made = TopicCells()
    for carried in (made.request, made.response):
        carried.bytes, carried.records = 1000 * count, 10 * count
        carried.batches = {"zstd": count, "none": 1}
    return made


def test_a_topic_that_has_a_series_late_leaves_what_it_had_before_in_other():
    """So that no series goes back, and their sum is that of all topics."""
    shown = _Shown(1)
    assert [topic for topic, _ in shown.of([{"a": topic_cells(3), "b": topic_cells(1)}], {})] == ["a", None]
    for count in (2, 7):
        (own, cells), (_, other) = shown.of([{"b": topic_cells(count)}], {})
        assert own == "b"
        for name in ("request", "response"):
            mine, left = getattr(cells, name), getattr(other, name)
            assert (mine.bytes, mine.records) == (1000 * (count - 1), 10 * (count - 1))
            assert {codec: each for codec, each in mine.batches.items() if each} == {"zstd": count - 1}
            assert (left.bytes, left.records, left.batches["zstd"]) == (1000, 10, 1)


def test_what_another_client_pushes_under_an_instance_id_at_another_worker_does_not_count():
    """The latest push counts of a client that moves from worker to worker; of two, the one that used the id first."""

    def clients(*values):
        """By worker, one after another: (client id, value)."""
        of_workers = []
        for number, (client_id, value) in enumerate(values, 1):
            client = PushingClient(client_id, ("", ""), 0, since_ns=number)
            client.pushed_ns = 100 + number
            client.values = {Series("x", GAUGE, ()): value}
            of_workers.append({UUID(int=7): client})
        return of_workers

    def shown(*values):
        (client,) = _pushes(clients(*values)).clients.values()
        return client.client_id, *client.values.values()

    assert shown(("a", 1.0), ("a", 2.0)) == ("a", 2.0)
    assert shown(("a", 1.0), ("thief", 666.0)) == ("a", 1.0)
    assert shown(("a", 1.0), ("thief", 666.0), ("a", 3.0)) == ("a", 3.0)
