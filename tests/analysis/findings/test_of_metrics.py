"""Findings of a running kproxy, from counters of live events between two moments."""

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.analysis.findings import failures, limits, of_metrics, of_metrics_failures
from kproxy.analysis.findings.following import Following
from kproxy.analysis.findings.thresholds import THRESHOLDS
from kproxy.metrics import Metrics
from kproxy.metrics.counters.bounds import DURATION_NS, PROXY_NS
from kproxy.metrics.counters.groups import InsightCells
from kproxy.metrics.counters.passive import PassiveCells
from kproxy.metrics.counters.tls import BROKER_RESULTS, CLIENT_RESULTS, TlsSide
from kproxy.views.findings import sentence
from kproxy.wire.bodies import Found, Sums
from kproxy.wire.interest import ApiPlan
from tests.metrics.test_metrics import FETCH, MS, PRODUCE, exchange, info
from tests.proxy.live import kproxy
from tests.proxy.live import live as in_a_loop
from tests.proxy.relay.test_relay import asked_while_blocked

SECOND = 10**9
TOPIC_ID = UUID(int=7)


class Running:
    """The metrics of a kproxy whose clock the test sets."""

    def __init__(self):
        self.metrics = Metrics()
        self.connections = {}

    def does(self, broker, count, plan=PRODUCE, **fields):
        if broker not in self.connections:
            self.connections[broker] = self.metrics.connection(info(), "main", broker, topics=True)
        start_ns = fields.pop("request_start", self.metrics.now_ns())
        done = [exchange(plan, **fields) for _ in range(count)]
        for each in done:
            waited_ns = each.response_start - each.request_end
            each.request_start = each.request_end = start_ns
            each.response_start = each.response_end = start_ns + waited_ns
        self.connections[broker].events(done)

    def moment(self, at_s):
        taken = of_metrics.taken(self.metrics)
        taken.now_ns = self.metrics.started_ns + round(at_s * SECOND)
        taken.cpu_ns = {"1": 0}
        return taken


def found(before, now, **given):
    return {(one.kind, one.where): one for one in of_metrics.found_between(before, now, limits(given))}


def test_only_events_between_the_moments_count():
    running = Running()
    running.does("1", 50, throttle_ms=100)
    first = running.moment(10)
    assert ("throttled", "Produce") in found(of_metrics.began(running.metrics), first)
    running.does("1", 50)
    assert not found(first, running.moment(70))
    running.does("1", 10, throttle_ms=900)
    one = found(first, running.moment(70))["throttled", "Produce"]
    assert dict(one.evidence)["throttled"] == 10 and "producer_byte_rate" in one.change


def test_a_slow_broker_and_a_hot_broker_are_found_among_others():
    running = Running()
    for broker in ("1", "2", "3"):
        running.does(broker, 600, request_bytes=50_000 if broker == "2" else 2000)
    running.does("3", 30, duration_ns=900 * MS)
    answer = found(of_metrics.began(running.metrics), running.moment(60))
    assert set(answer) == {("hot_broker", "broker 2"), ("slow_broker", "broker 3")}


def test_old_versions_are_one_finding_per_cluster():
    running = Running()
    running.does("1", 5, ApiPlan(0, 2, "Produce", True))
    (one,) = found(of_metrics.began(running.metrics), running.moment(60)).values()
    assert (one.kind, one.severity, dict(one.evidence)["apis"]) == ("old_versions", "note", "Produce v2")
    running.does("1", 5)
    (one,) = found(of_metrics.began(running.metrics), running.moment(60)).values()
    assert one.severity == "warning"  # the brokers accept newer versions


def test_a_rebalance_storm_is_critical_only_with_the_classic_protocol():
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


@pytest.mark.parametrize(("before", "now", "told"), [(2, 5, 3), (2, 2, None)])
def test_expired_sessions_are_one_finding_for_all_groups(before, now, told):
    """Causes are counted for all groups together, so the time without a reader is unknown."""
    old, new = (
        of_metrics.Moment(at * SECOND, [], {}, {"main": of_metrics.Taken(causes={"session_expired": count})})
        for at, count in ((0, before), (60, now))
    )
    answer = {kind: one for (kind, _), one in found(old, new).items()}
    assert (told is not None) == ("session_expired" in answer)
    if told is not None:
        one = answer["session_expired"]
        assert (one.severity, one.where, dict(one.evidence)) == ("note", "all groups", {"rebalances": told})
        assert sentence(one).startswith("sessions of members expired in 3 rebalances")


def test_refused_and_unanswered_requests_are_reported_by_api_and_kind():
    running = Running()
    running.does("1", 50)
    first = running.moment(10)
    assert not found(of_metrics.began(running.metrics), first)
    running.does("1", 20, errors=(29,))  # TOPIC_AUTHORIZATION_FAILED
    running.does("1", 4, errors=(10,))  # MESSAGE_TOO_LARGE
    running.does("1", 2, errors=(3,))  # below the threshold
    cluster = running.metrics.cluster("default")
    cluster = cluster if "1" in cluster.brokers else running.metrics.clusters["main"]
    cluster.unanswered["Produce", "broker_reset"] = 9
    cluster.unanswered["Fetch", "broker_reset"] = 9  # long polls
    cluster.unanswered["Produce", "gap"] = 99  # packets that a watching kproxy missed
    cells = cluster.brokers["1"]
    ((listener, _), *_) = cells.disconnects
    cells.disconnects[listener, "unreachable"] = 5
    cluster.authentications["client", "PLAIN", "failed"] = 7
    cluster.authentications["client", "PLAIN", "success"] = 3
    answer = found(first, running.moment(70))
    says = {kind: sentence(one) for (kind, _), one in answer.items()}
    assert says == {
        "refused_authorization": "20 of 26 Produce requests were refused: TOPIC_AUTHORIZATION_FAILED",
        "refused_too_large": "4 of 26 Produce requests were refused: MESSAGE_TOO_LARGE",
        "login_failed": "7 of 10 PLAIN logins at kproxy failed: failed",
        "broker_gone": "5 connections to it could not be made",
    }
    (gone,) = [one for (kind, _), one in answer.items() if kind == "broker_gone"]
    assert [one.kind for one in gone.consequences] == ["unanswered"]
    assert dict(gone.consequences[0].evidence) == {"failed": 9, "asked": 35, "apis": "Produce"}
    assert not found(running.moment(70), running.moment(130))


def test_failed_tls_handshakes_are_reported_by_side():
    running = Running()
    running.does("1", 1)
    (cluster,) = running.metrics.clusters.values()
    for side, results in (("client", CLIENT_RESULTS), ("broker", BROKER_RESULTS)):
        cluster.tls[side] = TlsSide(results, dict)
    clients, brokers = cluster.tls["client"].results, cluster.tls["broker"].results
    clients.update(ok=100, closed=50)  # health checks close early
    brokers.update(ok=9)
    first = running.moment(10)
    assert not found(of_metrics.began(running.metrics), first)
    clients["rejected"] += 2
    clients["ok"] += 1
    brokers["closed"] += 40
    answer = found(first, running.moment(70))
    says = {place: (one.severity, sentence(one)) for (_, place), one in answer.items()}
    assert says == {
        "TLS of clients with kproxy": (
            "note",
            "2 of 3 TLS handshakes failed, most often: an alert: kproxy's certificate is not accepted",
        ),
        "TLS of kproxy with brokers": (
            "critical",
            "40 of 40 TLS handshakes failed, most often: closed by the peer",
        ),
    }
    assert {one.kind for one in answer.values()} == {"tls_failed"}
    assert not found(running.moment(70), running.moment(130))
    assert set(CLIENT_RESULTS) | set(BROKER_RESULTS) == {*of_metrics_failures._REASONS, "ok", "closed"}


def test_failed_handshakes_while_a_broker_is_gone_are_a_separate_finding():
    """They are counted for all brokers together, so they cannot be attributed to that broker."""
    before, now = (of_metrics.Moment(at_s * SECOND, [0] * (len(PROXY_NS) + 1), {}, {}) for at_s in (0, 60))
    taken = of_metrics.Taken()
    taken.failed.lost["1", "unreachable"] = 5
    taken.failed.handshakes["client", "http"] = 1
    now.clusters["main"] = taken
    assert set(found(before, now)) == {("broker_gone", "broker 1"), ("tls_failed", "TLS of clients with kproxy")}


def test_reset_counters_count_from_0():
    """A cluster was removed and added again between two moments."""

    def taken(requests, failed):
        of = of_metrics.Taken(open=1, accepted=requests, causes={"member_left": failed})
        of.apis["1", "Produce"] = of_metrics.Api(requests, 100 * requests, failed, failed * 1000 * MS)
        of.groups["g"] = failed, failed * SECOND, 2, "classic"
        of.failed.errors["Produce", "refused_authorization"] = failed
        of.failed.names["Produce", "refused_authorization"] = {"TOPIC_AUTHORIZATION_FAILED"}
        of.failed.unanswered["Produce"] = failed
        of.failed.logins = {("PLAIN", "success"): requests - failed, ("PLAIN", "failed"): failed}
        of.failed.handshakes = {("broker", "ok"): requests - failed, ("broker", "other"): failed}
        of.failed.lost["2", "unreachable"] = failed
        return of

    empty = [0] * (len(PROXY_NS) + 1)
    now = of_metrics.Moment(600 * SECOND, empty, {}, {"main": taken(50, 40)})
    new, old = (of_metrics.Moment(0, empty, {}, clusters) for clusters in ({}, {"main": taken(1000, 500)}))
    given = {"throttled_min": 3, "rebalances_min": 3}
    kinds = {kind for kind, _ in found(new, now, **given)}
    assert {"throttled", "rebalance_storm", "refused_authorization", "login_failed", "tls_failed"} <= kinds
    assert found(old, now, **given) == found(new, now, **given)


COUNTS = st.sampled_from((0, 0, 1, 3, 50, 10_000, 10**7))


def counted(*keys, values=COUNTS):
    return st.dictionaries(st.sampled_from(keys), values, max_size=3)


def cells(bounds):
    return st.lists(COUNTS, min_size=3, max_size=3).map(lambda some: [*[0] * (len(bounds) - 2), *some])


def pairs(some, others):
    return [(one, other) for one in some for other in others]


BROKERS, APIS = ("bootstrap", "1", "2", "3"), ("Produce", "Fetch", "Metadata", "Unheard")
KINDS_OF_ERRORS = pairs(APIS, sorted(set(failures.KIND_OF.values())))
FAILED = st.builds(
    of_metrics_failures.Failed,
    errors=counted(*KINDS_OF_ERRORS),
    names=st.just({each: {"SOME_ERROR"} for each in KINDS_OF_ERRORS}),
    unanswered=counted(*APIS),
    logins=counted(*pairs(("PLAIN", "OAUTHBEARER"), ("success", "renewed", "failed"))),
    handshakes=counted(*pairs(("client",), CLIENT_RESULTS), *pairs(("broker",), BROKER_RESULTS)),
    lost=counted(*pairs(BROKERS, ("unreachable", "broker_reset"))),
    offline=COUNTS,
    shrunk=COUNTS,
)
APIS_OF_BROKERS = st.builds(
    of_metrics.Api,
    COUNTS,
    COUNTS,
    COUNTS,
    COUNTS.map(lambda count: count * MS),
    cells(DURATION_NS),
    counted("0", "3", "9"),
)
TAKEN = st.builds(
    of_metrics.Taken,
    apis=counted(*pairs(BROKERS, APIS), values=APIS_OF_BROKERS),
    open=COUNTS,
    accepted=COUNTS,
    topics=counted("orders", "events", values=st.tuples(COUNTS, COUNTS, COUNTS, COUNTS)),
    groups=counted("g", "h", values=st.tuples(COUNTS, COUNTS, COUNTS, st.sampled_from((None, "classic", "consumer")))),
    causes=counted("member_left", "session_expired"),
    lags=counted(("group", "g", "orders"), ("client", "app", "events")),
    failed=FAILED,
)
LEAST = dict.fromkeys(THRESHOLDS, 0)
MOMENTS = st.builds(
    of_metrics.Moment, st.just(0), cells(PROXY_NS), counted("1", "2"), st.dictionaries(st.just("main"), TAKEN)
)


@settings(max_examples=300, deadline=None)
@given(MOMENTS, MOMENTS, st.sampled_from((0, 1, 60, 3600)), st.booleans())
def test_any_counters_give_findings_without_negative_evidence(before, now, seconds, tells_all):
    now.now_ns = before.now_ns + seconds * SECOND
    for one in of_metrics.found_between(before, now, limits(LEAST if tells_all else {})):
        for each in (one, *one.consequences):
            numbers = [value for _, value in each.evidence if isinstance(value, int | float)]
            assert all(number >= 0 for number in numbers), each
            assert each.weight >= 0


def test_offline_and_under_replicated_partitions_are_reported_until_they_recover():
    running = Running()
    cells = InsightCells()
    running.metrics.cluster("default").insight = lambda: cells
    cells.leadership("orders", 0, "offline", None, 0)
    cells.leadership("orders", 1, "isr_shrunk", 2, 1)
    answer = found(of_metrics.began(running.metrics), running.moment(60))
    assert {(kind, dict(one.evidence)["partitions"]) for (kind, _), one in answer.items()} == {
        ("offline_partitions", 1),
        ("under_replicated", 1),
    }
    cells.leadership("orders", 0, "elected", 1, 0)
    cells.leadership("orders", 1, "isr_grown", 2, 0)
    assert not found(running.moment(60), running.moment(120))


def batches(records, count, codecs, size, topic="orders", topic_id=None):
    body = Found()
    body.sums = [Sums(topic, topic_id, size, count, records, codecs)]
    return body


def test_topics_with_single_record_batches_and_without_compression_are_found():
    running = Running()
    running.does("1", 3000, request_body=batches(1, 1, 1, 2000))
    answer = found(of_metrics.began(running.metrics), running.moment(20))
    assert set(answer) == {("single_record_batches", "topic orders"), ("no_compression", "topic orders")}
    assert dict(answer["single_record_batches", "topic orders"].evidence)["single_share"] == 1
    names = Found()
    names.names = {TOPIC_ID: "orders"}  # consumers use the topic's id
    running.does("1", 1, response_body=names)
    running.does("1", 9, FETCH, response_body=batches(1, 1, 1, 2000, None, TOPIC_ID))
    assert set(found(of_metrics.began(running.metrics), running.moment(20))) == set(answer)
    running = Running()
    running.does("1", 3000, request_body=batches(40, 1, 16, 2000))  # full batches with zstd
    assert not found(of_metrics.began(running.metrics), running.moment(20))


def test_connection_churn_is_found():
    running = Running()
    for number in range(100):
        running.does(str(number % 2), 1)
        running.connections.pop(str(number % 2)).closed("client_closed")
    answer = found(of_metrics.began(running.metrics), running.moment(50))
    assert set(answer) == {("connection_churn", "all clients")}
    churn = answer["connection_churn", "all clients"]
    assert {"connections", "per_minute", "life_mean_ns"} == dict(churn.evidence).keys()  # no more is known
    assert "on average" in sentence(churn) and "unknown" not in sentence(churn)


def test_health_checks_do_not_count_as_connection_churn():
    running = Running()
    running.does("client", 1)
    for number in range(100):
        running.does(f"check {number}", 0)
        running.connections.pop(f"check {number}").closed("client_closed", spoke=False)
    assert not found(of_metrics.began(running.metrics), running.moment(50))


def test_a_full_core_is_critical_if_bytes_wait_for_it():
    running = Running()
    first = running.moment(0)
    running.metrics.loop_lag.counts[-2] += 100  # up to 10 s
    now = running.moment(60)
    assert PROXY_NS[-1] == 10 * SECOND
    assert found(first, now)["core_full", "kproxy"].severity == "warning"
    now.cpu_ns = {"1": 59 * SECOND}
    assert found(first, now)["core_full", "kproxy"].severity == "critical"


def test_cpu_time_is_not_taken_for_a_watching_kproxy():
    running = Running()
    assert of_metrics.taken(running.metrics).cpu_ns
    running.metrics.passive = PassiveCells("eth0", ())
    assert not of_metrics.taken(running.metrics).cpu_ns


def test_a_blocked_loop_of_a_running_kproxy_is_found():
    """Bytes of real sockets wait 40 ms each time, by the kernel's timestamps."""

    async def test():
        async with kproxy() as here:
            serving = await asked_while_blocked(here, [])
            findings = Following(here.server.counted)
            (one,) = (await findings.asked({"loop_lag_ms": "20"}))["findings"]
            assert one["kind"] == "core_full" and one["evidence"]["loop_lag_ns"] >= 20e6
            assert not (await findings.asked({"loop_lag_ms": "1000", "core_share": "2"}))["findings"]
        await serving

    in_a_loop(test())
