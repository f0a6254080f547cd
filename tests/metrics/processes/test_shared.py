"""Merged metrics of several processes: a scrape shows the values that one process would have counted."""

import asyncio
import pickle
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.metrics import Metrics
from kproxy.metrics.consumers.log_end import Log
from kproxy.metrics.consumers.offsets import Position
from kproxy.metrics.counters.named import EXPIRY_NS, MAX_CLIENTS, MAX_TOPICS, TopicCells
from kproxy.metrics.counters.tls import TlsSide
from kproxy.metrics.counters.upstream import ClusterState, UpstreamCells
from kproxy.metrics.processes.published import CLIENT, COMMITTED, FETCHING, LOG, NAMES, PROCESS, SEEN, TOPIC, Published
from kproxy.metrics.processes.shared import Shared, _clients, _last_removed, _later, _pushes, _Shown
from kproxy.metrics.pushed.telemetry import GAUGE, PushingClient, Series
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.metrics.scrape.folding import fold_broker
from kproxy.wire.bodies import Found, Sums
from kproxy.wire.events import ClientNamed
from tests.metrics.consumers.test_lag import NOW_MS, Cluster, batch
from tests.metrics.test_metrics import PRODUCE, answered_at, busy_metrics, consumed, exchange, info


def told(published, with_lags=True):
    """Return a worker's changes after a pickle round trip, as the parent receives them."""

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


def test_the_parents_scrape_of_one_worker_equals_the_workers_own():
    own = Metrics()
    worker = busy_metrics()
    own.started_ns, own.clock_offset_ns = worker.started_ns, worker.clock_offset_ns
    own.upstream("default", (), worker.clusters["default"].upstream.state)
    for name, side in worker.cluster("default").tls.items():  # every process has loaded the certificates
        own.cluster("default").tls[name] = TlsSide(tuple(side.results), side.expiries)
    own.cluster("default").insight = worker.cluster("default").insight  # one process reports groups to the parent
    shared = Shared(own)
    shared.take(1, told(Published(worker)))
    alone, seen = samples(worker), samples(shared.merged())
    apart = {name for name in alone if name.startswith(("kproxy_worker", "kproxy_connection_limit", "kproxy_config"))}
    wrong = {name: (value, seen.get(name)) for name, value in alone.items() if seen.get(name) != value}
    assert not set(wrong) - apart
    assert len(alone) > 500


def test_the_cpu_time_of_a_worker_continues_from_its_predecessors():
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
    last = produced(first, ["topic"])  # since its last report
    last.closed("client_eof")
    del first.clusters["default"]
    shared.take(0, told(published[0]))
    after = counters(shared.merged())
    assert {each: (value, after.get(each)) for each, value in before.items() if after.get(each, 0) < value} == {}
    (requests,) = (each for each in before if each.startswith("kproxy_requests_total"))
    assert after[requests] == before[requests] + 1
    produced(first, ["topic"])  # the cluster was added again
    shared.take(0, told(published[0]))
    assert counters(shared.merged())[requests] == before[requests] + 2
    for number, worker in enumerate(workers):
        del worker.clusters["default"]
        shared.take(number, told(published[number]))
    assert not counters(shared.merged())
    produced(first, ["topic"])  # the removed counters do not return
    shared.take(0, told(published[0]))
    assert counters(shared.merged())[requests] == 1


def test_counters_of_a_cluster_re_created_between_two_reports_do_not_fall():
    shared = Shared(Metrics())
    worker = Metrics()
    published = Published(worker)
    shared._own.cluster("default")  # the settings contain it
    produced(worker, ["topic"])
    shared.take(1, told(published))
    before = counters(shared.merged())
    (requests,) = (each for each in before if each.startswith("kproxy_requests_total"))
    del worker.clusters["default"]
    produced(worker, ["topic"])
    shared.take(1, told(published))
    assert counters(shared.merged())[requests] == before[requests] + 1


def test_a_cluster_that_the_parent_removes_last_leaves_nothing():
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


def test_only_changes_are_sent():
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


def test_topics_of_all_workers_share_one_limit_and_no_counter_falls():
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
    shared.gone(1)  # its topics stay: a replacement will see them again
    after = topics()
    assert sum(after.values()) == sum(before.values()) + 10_000
    assert all(after.get(each, 0) >= value for each, value in before.items())
    third = Metrics()
    produced(third, ["first-3"])
    shared.take(1, told(Published(third)))
    (name,) = (each for each in before if 'topic="first-3"' in each)
    assert topics()[name] == 2000


def test_topics_of_an_ended_worker_expire_when_no_other_reports_them():
    own = Metrics()
    own.cluster("default")  # the settings contain it
    shared = Shared(own)
    worker = Metrics()
    produced(worker, ["old"])
    shared.take(1, told(Published(worker)))
    shared.gone(1)
    assert any('topic="old"' in each for each in samples(shared.merged()))
    own.clock_offset_ns += EXPIRY_NS + 10**10
    assert not any('topic="old"' in each for each in samples(shared.merged()))


def test_a_group_has_lag_whichever_worker_saw_the_log_end():
    """One worker sees the consumer's commits, the other its fetches."""
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


def test_clients_are_removed_with_their_worker():
    shared = Shared(Metrics())
    worker = Metrics()
    worker.connection(info(), "main", "1").events([ClientNamed("shop", "a-client", "1.2", worker.now_ns())])
    shared.take(1, told(Published(worker)))
    assert any("kproxy_client_info" in each for each in samples(shared.merged()))
    shared.gone(1)
    assert not any("kproxy_client_info" in each for each in samples(shared.merged()))


def test_the_latest_report_of_a_log_and_of_a_group_counts_in_any_order_of_sending(monkeypatch):
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


def test_the_earlier_counts_of_a_topic_that_gets_its_series_late_stay_in_other():
    """So no series falls, and the sum of all series is that of all topics."""
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


def test_pushes_of_a_second_client_under_the_same_instance_id_at_another_worker_do_not_count():
    """A client that moves between workers counts by its latest push; of two clients the first user of the id counts."""

    def clients(*values):
        """Build the clients of each worker from (client id, value)."""
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


def clients_of(*of_workers):
    return [(client, cells.open, cells.left_ns) for client, cells in _clients(list(of_workers))]


def test_connected_clients_come_first_then_the_latest_to_disconnect():
    first = {"idle": (0, 50), "both": (1, 20), "moved": (0, 90), None: (3, 7)}
    second = {"both": (2, 10), "moved": (1, 30), "earlier": (0, 40), None: (1, 9)}
    assert clients_of(first, second) == [
        ("moved", 1, 90),
        ("both", 3, 20),
        ("idle", 0, 50),
        ("earlier", 0, 40),
        (None, 4, 9),
    ]
    assert clients_of({"a": (1, 0)}) == [("a", 1, 0)]


@pytest.mark.parametrize("count", (MAX_CLIENTS, MAX_CLIENTS + 1))
def test_clients_of_all_workers_share_one_limit(count):
    many = {number: (1, number) for number in range(count)}
    shown = clients_of({number: each for number, each in many.items() if number % 2}, many)
    assert [client for client, _, _ in shown][:MAX_CLIENTS] == sorted(many, reverse=True)[:MAX_CLIENTS]
    assert shown[MAX_CLIENTS:] == ([(None, 0, 0)] if count > MAX_CLIENTS else [])


def log_of(end, raised_ns, reported_ns, lowered_ns=0, epoch=-1):
    log = Log()
    log.high_watermark, log.raised_ns, log.reported_ns = end, raised_ns, reported_ns
    log.lowered_ns, log.epoch, log.is_led, log.broker = lowered_ns, epoch, True, str(end)
    return log


@pytest.mark.parametrize(
    ("low", "high", "end", "lowered_ns"),
    [
        (log_of(50, 10, 90), log_of(100, 30, 40), 100, 0),
        (log_of(50, 10, 90, lowered_ns=29), log_of(100, 30, 40), 100, 29),  # grown since
        (log_of(50, 10, 90, lowered_ns=30), log_of(100, 30, 40), 50, 30),
        (log_of(50, 10, 90, lowered_ns=35), log_of(100, 30, 40, lowered_ns=7), 50, 35),
        (log_of(50, 10, 30, epoch=6), log_of(100, 30, 40, epoch=5), 50, 30),
        (log_of(50, 10, 29, epoch=6), log_of(100, 30, 40, epoch=5), 100, 0),
        (log_of(50, 10, 90, epoch=5), log_of(100, 30, 40, epoch=5), 100, 0),
        (log_of(50, 10, 90, epoch=0), log_of(100, 30, 40, epoch=-1), 100, 0),  # no known epoch
        (log_of(100, 10, 30), log_of(100, 30, 40), 100, 0),
        (log_of(100, 10, 30, lowered_ns=30, epoch=6), log_of(100, 30, 40, epoch=5), 100, 30),
    ],
)
def test_the_higher_of_two_log_ends_counts_unless_the_lower_one_is_newer(low, high, end, lowered_ns):
    for one, other in ((low, high), (high, low)):
        log = _later(one, other)
        late = low if end < high.high_watermark else high
        assert (log.high_watermark, log.lowered_ns, log.epoch) == (end, lowered_ns, max(low.epoch, high.epoch))
        assert (log.reported_ns, log.broker, log.is_led) == (late.reported_ns, late.broker, True)
        raised_ns = max(low.raised_ns, high.raised_ns) if low.high_watermark == high.high_watermark else late.raised_ns
        assert log.raised_ns == raised_ns
        assert list(log.ends) == ([(50, low.reported_ns)] if low.high_watermark < end else [])


def test_the_latest_removals_of_two_workers_stay(monkeypatch):
    monkeypatch.setattr("kproxy.metrics.processes.shared.MAX_REMOVED", 3)
    assert _last_removed({"a": 5, "b": 9}, {"a": 7, "c": 1, "d": 8}) == {"a": 7, "d": 8, "b": 9}
    assert _last_removed({"a": 7}, {"a": 5}) == {"a": 7}


@settings(max_examples=60)
@given(
    limit=st.integers(0, 3),
    rounds=st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 5)), st.booleans()), min_size=1, max_size=8
    ),
)
def test_no_topic_series_falls_and_their_sum_is_the_total(limit, rounds):
    """Each round counts more for some topics at one of two workers; the first may have ended."""
    shown, workers, before = _Shown(limit), [{}, {}], {}
    for number, (more, is_over) in enumerate(rounds):
        of_worker = workers[number % 2]
        for topic, count in more.items():
            of_worker[topic] = topic_cells(
                count + (of_worker[topic].request.bytes // 1000 if topic in of_worker else 0)
            )
        gone, living = (workers[0], workers[1:]) if is_over else ({}, workers)
        found = dict(shown.of(living, gone))
        named = found.keys() - {None}
        assert len(named) == min(limit, len(workers[0].keys() | workers[1].keys()))
        assert all(each not in before or before[each].request.bytes <= found[each].request.bytes for each in found)
        assert before.keys() <= found.keys()
        for name in ("bytes", "records"):
            sums = [sum(getattr(cells.request, name) for cells in each.values()) for each in (found, *workers)]
            assert sums[0] == sum(sums[1:])
        before = found


def test_clusters_stay_apart():
    """Clusters have equal topics, groups and clients; one without reported lag shows none."""
    own = Metrics()
    for name in ("a", "b", "c"):
        own.cluster(name)
    shared, identity = Shared(own), UUID(int=7)
    for size, name in enumerate(("a", "b"), 1):
        units = {
            ("cluster", name): {},
            (LOG, name, ("orders", 0)): log_of(100 * size, 5, 5),
            (LOG, name, (identity, 0)): log_of(300 * size, 5, 5),
            (NAMES, name): {identity: f"named-{name}"},
            (COMMITTED, name, ("billing", ("orders", 0))): Position(10 * size, -1, 5),
            (COMMITTED, name, ("billing", (identity, 0))): Position(20 * size, -1, 5),
            (FETCHING, name, 1): ("client", 5, {("orders", 0): Position(50 * size, -1, 5)}, {}),
            (SEEN, name): [f"seen-{name}"],
            (TOPIC, name, "orders"): topic_cells(size),
            (CLIENT, name, ("client", "java", "1")): (size, 0),
        }
        shared.take(size, [(path, pickle.dumps(value)) for path, value in units.items()])
    shared.take(3, [(("cluster", "c"), pickle.dumps({})), ((SEEN, "c"), pickle.dumps(["seen-c"]))])
    merged = shared.merged().clusters
    for size, name in enumerate(("a", "b"), 1):
        for lags in (merged[name].lags, shared.lags(name)):
            assert {key: log.high_watermark for key, log in lags.logs.items()} == {
                ("orders", 0): 100 * size,
                (f"named-{name}", 0): 300 * size,
            }
            assert {key: position.offset for key, position in lags.committed.items()} == {
                ("billing", ("orders", 0)): 10 * size,
                ("billing", (f"named-{name}", 0)): 20 * size,
            }
            assert [each.positions["orders", 0].offset for each in lags.fetching] == [50 * size]
        assert list(shared.lags(name).seen) == [f"seen-{name}"]
        assert [(topic, cells.request.bytes) for topic, cells in merged[name].topics.top.shown(0)] == [
            ("orders", 1000 * size)
        ]
        assert [cells.open for _, cells in merged[name].clients.top.shown(0)] == [size]
    assert shared.lags("c") is None and merged["c"].lags is None and merged["c"].topics is None
    assert shared.has("a") and not shared.has("d")
    shared.take(1, [(("cluster", "a"), None)])
    assert not shared.has("a") and shared.has("b")
    assert shared.lags("b").logs["orders", 0].high_watermark == 200


def test_offsets_that_kproxy_requested_are_kept_from_the_time_of_the_request():
    shared = Shared(Metrics())
    shared.take(1, [((LOG, "default", (topic, 0)), pickle.dumps(log_of(100, 5, 5))) for topic in "abc"])
    lags = shared.lags("default")
    for topic, at_ns in (("a", 9), ("b", 10), ("c", 11)):
        lags.logs[topic, 0] = log_of(40, at_ns, at_ns, lowered_ns=at_ns)
        lags.committed["g", (topic, 0)] = Position(7, -1, at_ns)
    shared.keep_learned("default", lags, 10)
    found = shared.lags("default")
    assert {topic: log.high_watermark for (topic, _), log in found.logs.items()} == {"a": 100, "b": 40, "c": 40}
    assert {topic for _, (topic, _) in found.committed} == {"b", "c"}
    ((cluster, ended),) = shared.take_ended()
    assert (cluster, ended.lowered) == ("default", {("b", 0): (40, 10, -1), ("c", 0): (40, 11, -1)})


def test_an_instance_id_that_two_clients_used_at_the_same_time_stays_with_the_known_one():
    def client(client_id, pushed_ns, value):
        made = PushingClient(client_id, ("", ""), 0, since_ns=5)
        made.pushed_ns, made.values = pushed_ns, {Series("x", GAUGE, ()): value}
        return {UUID(int=7): made}

    for second, value in (("a", 1.0), ("thief", 1.0)):
        pushes = _pushes([client("a", 9, 1.0), client(second, 9, 2.0)])
        assert [*pushes.clients[UUID(int=7)].values.values()] == [value]


def test_topic_names_of_all_workers_are_merged():
    """Workers see different responses; for an id that both name, the newer report counts."""
    shared, of_main = Shared(Metrics()), (NAMES, "main")
    first, second, third = UUID(int=1), UUID(int=2), UUID(int=3)
    shared._learn(of_main, {first: "a", second: "b"})
    assert shared._latest[of_main] == {first: "a", second: "b"}
    shared._learn(of_main, {second: "c", third: "d"})
    shared._learn((NAMES, "other"), {first: "x"})
    assert shared._latest[of_main] == {first: "a", second: "c", third: "d"}
    assert shared._latest[NAMES, "other"] == {first: "x"}
    assert shared._named("main", (third, 5)) == ("d", 5) and shared._named("main", ("t", 5)) == ("t", 5)
    assert shared._named("other", (third, 5)) == (third, 5)


def test_a_broker_whose_counts_a_worker_adds_to_others_counts_once():
    """The parent once kept its series too: the totals grew by what it had counted."""
    worker, own = Metrics(), Metrics()
    own.started_ns, own.clock_offset_ns = worker.started_ns, worker.clock_offset_ns
    published, shared = Published(worker), Shared(own)
    cluster = worker.cluster("default")
    connection = worker.connection(info(), "broker-7", "7")
    connection.events([exchange(PRODUCE, **answered_at(worker.now_ns()))])
    connection.closed("client_closed")
    for is_folded in (False, True):
        if is_folded:
            fold_broker(cluster, UpstreamCells(("other",), lambda: ClusterState(True, True, 1)), "7")
        shared.take(1, told(published))
        alone, seen = samples(worker), samples(shared.merged())
        of_brokers = {name: value for name, value in alone.items() if 'broker="' in name}
        assert len(of_brokers) > 20
        assert {name: value for name, value in seen.items() if 'broker="' in name} == of_brokers
