"""Findings on the repository's captures and on synthetic tables: each kind is found, and little else."""

import json
import random
from dataclasses import replace
from functools import cache

import pytest

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import KINDS, PROBES, TABLES, THRESHOLDS, Finding, consuming, failures, findings, limits
from kproxy.analysis.findings.thresholds import read
from kproxy.analysis.questions import knowledge, sections
from kproxy.analysis.verdict import verdict
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.views import verdict as views_verdict
from kproxy.views.answers import dicts
from kproxy.views.findings import sentence, value
from tests.analysis.findings import made
from tests.captures import DATA, capture
from tests.insight.truth import CAPTURE

INCIDENTS = DATA.parent / "incidents"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A function that returns the findings of a named capture, by (kind, where)."""

    @cache
    def ask(name, *given):
        place = tmp_path_factory.mktemp("tables")
        convert([CAPTURE if name == "k41_groups_a" else capture(name)], place)
        with Tables(place) as tables:
            return {(one.kind, one.where): one for one in findings(tables, read(given))}

    return ask


def test_a_client_over_its_quotas_is_found_as_throttled(found):
    answer = found("k41_quota")
    throttled = [one for one in answer.values() if one.kind == "throttled"]
    assert {one.where for one in throttled} == {
        "client thr, Fetch",
        "client thr, Produce",
        "client thr-req, Produce",
    }
    produce = answer["throttled", "client thr, Produce"]
    assert dict(produce.evidence) | {"throttled": 15, "answers": 102} == dict(produce.evidence)
    assert produce.severity == "warning" and "producer_byte_rate" in produce.change
    assert (
        sentence(produce) == "15 of 102 answers throttled, 12.3 s in total over all its connections (99% of their time)"
    )
    assert next(iter(answer.values())).kind == "throttled"  # before notes


def test_a_producer_of_single_record_batches_is_found(found):
    one = found("k111_java_cluster")["single_record_batches", "client perftx, topic beta"]
    assert dict(one.evidence)["batches"] == 232
    assert "linger.ms" in one.settings


def test_weak_acks_are_found_on_replicated_topics(found):
    answer = found("k111_java_cluster")
    assert answer["weak_acks", "client perf-snappy, topic alpha"].severity == "warning"  # acks=0
    assert dict(answer["weak_acks", "client thr, topic alpha"].evidence)["acks"] == 1


def test_dropped_versions_of_several_clients_are_one_note_if_old_brokers_may_be_the_cause(found):
    answer = found("k0102_python147")
    legacy = answer["old_versions", "client b'legacy-cli'"]
    assert legacy.severity == "warning" and "OffsetCommit v0" in dict(legacy.evidence)["apis"]
    assert answer["old_versions", "8 clients"].severity == "note"


def test_an_unknown_api_does_not_count_as_dropped(tmp_path, monkeypatch):
    """Vendors have their own APIs, and newer brokers have further ones."""
    monkeypatch.setitem(made.KEYS, "unknown_10007", 10007)
    table = made.Made()
    for second, (api, version) in enumerate((("unknown_10007", 0), ("Produce", 2))):
        table.exchange("app", api, second, api_version=version)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["old_versions"])
    assert dict(one.evidence)["apis"] == "Produce v2"


@pytest.mark.ring2
def test_a_group_that_repeatedly_lost_members_has_a_rebalance_storm(found):
    assert ("rebalance_storm", "group range-g") in found("k41_groups_a")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["k111_kcat_sarama", "k41_librdkafka", "k41_kafkajs"])
def test_short_captures_of_ordinary_clients_give_no_findings(found, name):
    assert not found(name)


def test_a_client_with_a_wrong_password_is_the_only_finding_among_those_that_log_in(found):
    assert list(found("k41_sasl_plain")) == [("login_failed", "client java-badpw, SaslAuthenticate")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["k41_java_cluster", "k39_zk_cluster"])
def test_a_restarted_broker_is_the_only_finding(found, name):
    """In the first capture, its leaders also had not moved back by the end."""
    kinds = {one.kind for one in found(name).values()}
    assert {dict(one.place)["broker_id"] for one in found(name).values()} == {2}
    assert kinds == {"broker_gone"} | ({"leaders_away"} if name == "k41_java_cluster" else set())


def test_every_kind_has_a_probe_and_every_threshold_a_kind():
    probed = {kind for probe in PROBES for kind in probe.kinds}
    assert set(KINDS) - probed == {"core_full"}  # only in a running kproxy
    used = {name for kind in KINDS.values() for name in kind.thresholds}
    assert set(THRESHOLDS) - used == {"places_per_kind"} and used <= set(THRESHOLDS)


def test_thresholds_come_from_a_file_and_from_the_command_line(tmp_path, found):
    file = tmp_path / "t.toml"
    file.write_text("batches_min = 100\nhot_bytes_min = 5\n")
    assert read(["batches_min=300"], str(file)).batches_min == 300
    assert read((), str(file)).hot_bytes_min == 5
    assert limits().batches_min == THRESHOLDS["batches_min"].value
    assert ("single_record_batches", "client perftx, topic beta") not in found("k111_java_cluster", "batches_min=300")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("batches=1", "there is no 'batches': did you mean batches_min"),
        ("batches_min", "give NAME=VALUE"),
        ("batches_min=many", "'many' is no number"),
        ("batches_min=nan", "'nan' is no number"),
        ("batches_min=-1", "'-1' is no number"),
    ],
)
def test_an_invalid_threshold_is_refused_with_a_message(given, said):
    with pytest.raises(KproxyError, match=said):
        read([given])


def test_an_invalid_toml_file_is_refused_with_a_message(tmp_path):
    (tmp_path / "bad.toml").write_text("batches_min : 3")
    with pytest.raises(KproxyError, match="thresholds"):
        read((), str(tmp_path / "bad.toml"))


def test_the_hours_between_two_captures_do_not_count(tmp_path):
    with Tables(made.two_captures(tmp_path / "tables")) as tables:
        found = {(one.kind, one.where): dict(one.evidence) for one in findings(tables, limits())}
    assert found.keys() == {("rebalance_storm", "group restless-g"), ("growing_lag", "client slow, topic orders")}
    storm = found["rebalance_storm", "group restless-g"]
    assert storm["rebalances"] == 16 and storm["rebalancing_share"] == pytest.approx(16 * 3 / 234)
    lag = found["growing_lag", "client slow, topic orders"]
    assert lag["span_ns"] == 234 * 10**9 and lag["growth_per_s"] == pytest.approx(7800 / 234)
    assert lag["last_lag_records"] == 7900


@pytest.mark.parametrize(
    ("first", "last", "highest", "seconds", "age_s", "grows"),
    [
        (1_000, 1_600, 1_600, 60, None, True),  # by 60 %
        (10_000, 11_500, 11_500, 60, None, False),  # ordinary variation
        (288_877, 353_116, 353_116, 110, None, True),  # a large lag that grows fast
        (288_877, 353_116, 400_000, 110, None, False),  # but it has fallen since
        (300_000, 310_000, 310_000, 60, None, False),  # fast, but by less than a tenth
        (0, 900, 900, 60, None, False),
        (288_877, 353_116, 353_116, 8, None, False),  # a burst
        (432, 2_879, 2_879, 52, 2, False),  # the records between two commits
        (432, 28_790, 28_790, 52, 20, True),
    ],
)
def test_a_lag_grows_by_its_share_or_by_its_rate(first, last, highest, seconds, age_s, grows):
    until_us = 1_700_000_000_000_000
    times = (until_us - seconds * 10**6, until_us, seconds * 10**6)
    age_ns = None if age_s is None else age_s * 10**9
    row = consuming.Lagging("main", "reports", "orders", 3, 50, first, last, highest, age_ns, *times, "group")
    assert [one.kind for one in consuming.judge_lagging(row, limits())] == ["growing_lag"] * grows


def test_time_steps_of_failed_requests_are_limited_and_lose_no_request(tmp_path, monkeypatch):
    """Steps become wider if too many seconds have failures; two periods far apart need no wider steps."""
    table = made.Made()
    for number in range(40):
        for client, apart_s in (("long", 1), ("twice", 0.125)):
            at_s = 10 + number * apart_s + (50_000 if client == "twice" and number >= 20 else 0)
            key = table.exchange(client, "Produce", at_s, acks=-1, errors=1)
            table.partition(key, "response", "strict", error_code=19, error="NOT_ENOUGH_REPLICAS")
    monkeypatch.setattr(failures, "_STEPS_MAX", 10)
    with Tables(table.write(tmp_path / "tables")) as tables:
        asked = failures.refused({name: tables[name] for name in ("exchanges", "partitions", "topology")}, limits())
        found = {row["client"]: failures.moments(row["moments"]) for row in dicts(asked)}
    start_s = made.START_NS // 10**9
    told = {
        client: [(each.at_ns / 1e9 - start_s, each.counts["failed"]) for each in moments]
        for client, moments in found.items()
    }
    assert len(told["long"]) == 11 and sum(failed for _, failed in told["long"]) == 40
    assert told["twice"] == [(10, 8), (11, 8), (12, 4), (50012, 4), (50013, 8), (50014, 8)]


def test_of_two_equally_frequent_tls_failures_always_the_same_is_named(tmp_path):
    table = made.Made()
    alerts = ("bad_certificate by client", "unknown_ca by client") * 2 + ("expired by client",)
    for number, alert in enumerate(alerts):
        made._connection(table, number, "10.9.0.12", number, 0.1, tls="tls", tls_failure=alert, requests=0)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["tls_failed"])
    assert dict(one.evidence) == {"failed": 5, "asked": 5, "reason": "unknown_ca by client", "reasons": 3}


def test_a_handshake_failed_only_if_its_client_waited_for_the_answer(tmp_path):
    table = made.Made()
    unanswered = {"tls": "tls", "tls_failure": "unanswered", "requests": 0}
    for number, (life_s, closed_by) in enumerate([(0.4, "client"), (0.4, "broker"), (5.0, "client"), (0.4, None)]):
        made._connection(table, number, "10.9.0.12", number, life_s, **unanswered, closed_by=closed_by)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["tls_failed"])
    assert dict(one.evidence) == {"failed": 3, "asked": 4, "reason": "unanswered", "reasons": 1}


def test_failed_connects_are_counted_by_kind_of_failure(tmp_path):
    table = made.Made()
    how = ["refused", *["closed_at_once"] * 2, "port_unreachable", "prohibited", "prohibited", "unanswered"]
    for number, close in enumerate(how):
        made._connection(table, number, "10.9.0.14", number, 0.1, close=close, requests=0)
        made._connection(table, 100 + number, "10.9.0.15", number, 0.1, close=close, requests=0, broker_port=8080)
    table.exchange("other", "Metadata", 0)  # so port 8080 is not taken for a Kafka port
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["connects_failed"])
    counts = {"refused": 1, "unanswered": 1, "closed_at_once": 2, "undelivered": 3}
    assert dict(one.evidence) == {"failed": 7, "asked": 7, **counts, "reason": "prohibited"}
    assert sentence(one) == ("7 of 7 connects failed: 1 refused, 1 not answered, 2 closed at once, 3 not delivered")


def test_late_answers_have_the_mtu_that_a_router_reported(tmp_path):
    table = made.Made()
    made._connection(table, 0, "10.9.0.11", 0.0, 60.0, **made._late(30.0), path_mtu=1400)
    made._connection(table, 1, "10.9.0.11", 0.0, 60.0, **made._late(20.0), path_mtu=1350)
    made._connection(table, 2, "10.9.0.12", 0.0, 60.0, **made._late(20.0))
    with Tables(table.write(tmp_path / "tables")) as tables:
        named, unnamed = findings(tables, kinds=["late_answers"])
    assert dict(named.evidence)["mtu"] == 1350 and "named an MTU of 1350 bytes" in named.change
    assert "mtu" not in dict(unnamed.evidence) and "smaller MTU" in unnamed.change


@pytest.mark.parametrize("lost_s", [30, 28])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_coordinator_outage_lasts_from_its_first_sign_to_the_return_or_the_last_request(tmp_path, comes_back, lost_s):
    """The first sign is the first refusal, or an earlier close of the member's connection. It is neither the last good
    heartbeat, nor a close by a member that left.
    """
    table = made.Made()
    if lost_s == 28:
        made._connection(table, 0, "10.0.0.1", 0.0, 28.0, close="reset")
    leaver = {"client_id": "leaver", "client_address": "10.0.0.1"}
    table.add("group_events", 27.4, event="leave", group_id="g", time_ns=made.START_NS + 27_400 * made.MS, **leaver)
    for number in range(20):
        at_ns = made.START_NS + 3 * number * 10**9
        is_refused = 10 <= number < (15 if comes_back else 20)
        times = {"request_start_ns": at_ns, "response_end_ns": at_ns + made.MS, "errors": int(is_refused)}
        table.exchange("member", "Heartbeat", 3 * number, group_id="g", **times)
        if number == 8:
            key = table.exchange("leaver", "Heartbeat", 3 * number, group_id="g", **times)
            made._connection(table, key["connection"], "10.0.0.1", 0.0, 27.5)
        if is_refused:
            refusal = {"event": "heartbeat", "group_id": "g", "error": "COORDINATOR_NOT_AVAILABLE", "time_ns": at_ns}
            table.add("group_events", 3 * number, **refusal)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["coordinator_lost"])
    evidence = dict(one.evidence)
    assert evidence["refusals"] == (5 if comes_back else 10)
    assert evidence.get("is_back", True) == comes_back
    ended = "the same broker stayed" if comes_back else "no broker served it again"
    assert sentence(one).endswith(f"; {ended}; meanwhile COORDINATOR_NOT_AVAILABLE ×{evidence['refusals']}")
    outage_s = (45 if comes_back else 57) - lost_s
    assert round(evidence["outage_ns"] / 1e9) == round((one.until_ns - one.since_ns) / 1e9) == outage_s


@pytest.mark.parametrize(
    ("between_s", "error", "is_found"),
    [(3, None, False), (3, "NOT_COORDINATOR", True), (6, None, True), (1, "NOT_COORDINATOR", False)],
)
def test_a_move_of_the_coordinator_between_two_heartbeats_is_no_outage(tmp_path, between_s, error, is_found):
    table = made.Made()
    for number in range(20):
        at_s = 3 * number if number < 10 else 27 + between_s + 3 * (number - 10)
        at_ns = made.START_NS + at_s * 10**9
        times = {"request_start_ns": at_ns, "response_end_ns": at_ns + made.MS}
        table.exchange("member", "Heartbeat", at_s, broker=1 if number < 10 else 3, group_id="g", **times)
    at_ns = made.START_NS + 27 * 10**9 + 500 * made.MS
    event = {"event": "coordinator_moved", "group_id": "g", "coordinator_id": 3, "error": error, "time_ns": at_ns}
    table.add("group_events", 27.5, **event)
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = findings(tables, kinds=["coordinator_lost"])
    assert bool(found) == is_found
    for one in found:
        assert dict(one.evidence)["moved"] is True
        assert one.until_ns - one.since_ns == (between_s - 0.5) * 10**9 + made.MS


@pytest.mark.parametrize(("life_s", "is_short"), [(2, True), (400, False)])
def test_a_rebalance_storm_names_the_client_whose_members_come_and_go(tmp_path, life_s, is_short):
    """One member joined long before and stays, those of `flapper` leave: the storm begins with the first of these.

    Short lives are not attributed to slow polls. Rebalances without an end count until all members had joined.
    """
    table = made.Made()
    made._rebalance(table, "g", -300, 0)
    table.exchange("stays", "Heartbeat", -300, group_id="g")
    for number in range(20):
        at_s = 600 * number / (1 if life_s > 100 else 100)
        table.exchange("stays", "Heartbeat", at_s, group_id="g")
        at_ns = made.START_NS + round(at_s) * 10**9
        member = {"group_id": "g", "member_id": f"flapper-{number}", "client_id": "flapper", "protocol": "classic"}
        for event, time_ns in (("join", at_ns), ("leave", at_ns + life_s * 10**9)):
            table.add("group_events", at_s, event=event, time_ns=time_ns, **member)
        row = {"group_id": "g", "protocol": "classic", "strategy": "range", "generation": number}
        row |= {"cause": "member_left", "cause_member": f"flapper-{number}", "members_before": 2, "members_after": 1}
        times = {"started_ns": at_ns, "joined_ns": at_ns + 10**9, "ended_ns": at_ns + 2 * 10**9 if number % 2 else None}
        table.add("rebalances", at_s, **row, **times)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (storm,) = findings(tables, read(["rebalances_per_hour=1"]), kinds=["rebalance_storm"])
        (group,) = dicts(knowledge.groups(tables["group_events"], tables["rebalances"]))
    evidence = dict(storm.evidence)
    assert evidence["rebalancing_ns"] == 30 * 10**9 == group["rebalancing_ns"] - 3 * 10**9
    assert storm.since_ns == made.START_NS and evidence["rebalances"] == 20
    assert evidence["span_ns"] == 19 * (600 if life_s > 100 else 6) * 10**9
    assert (evidence["client"], evidence["of_client"], evidence["life_ns"]) == ("flapper", 20, life_s * 10**9)
    assert sentence(storm).endswith("most often: member_left; 20 caused by members of client flapper")
    assert ("Keep the consumer open" in storm.change) == is_short == ("lower max.poll.records" not in storm.change)


@pytest.mark.parametrize(("waited_s", "times", "severity"), [(6, 1, "note"), (6, 2, "warning"), (10, 1, "warning")])
def test_a_short_single_wait_for_a_member_is_a_note(tmp_path, waited_s, times, severity):
    table = made.Made()
    for number in range(times):
        begin_ns = made.START_NS + 60 * number * 10**9
        row = {"group_id": "g", "protocol": "classic", "generation": number, "members_after": 3, "last_to_join": "late"}
        joined_ns = begin_ns + (waited_s + 3) * 10**9
        row |= {"started_ns": begin_ns, "joined_ns": joined_ns, "ended_ns": joined_ns}
        table.add("rebalances", 60 * number, **row, waited_ns=waited_s * 10**9)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["straggler"])
    assert (one.severity, dict(one.evidence)["rebalances"]) == (severity, times)


@pytest.mark.parametrize(("is_shared", "where"), [(True, "all brokers"), (False, "broker 2 (10.0.1.2:9092)")])
def test_writes_that_are_slow_at_two_brokers_at_once_blame_no_single_broker(tmp_path, is_shared, where):
    """All wait for a third broker that pauses; they are more than a hundredth of the few writes at broker 2."""
    table = made.Made()
    for number in range(1600):
        at_s = number / 20
        slow = {"latency_ns": 700 * made.MS, "acks": -1}
        is_slow = at_s in (10, 20, 30, 40)
        table.exchange("writer", "Produce", at_s, broker=1, **(slow if is_slow and is_shared else {"acks": -1}))
        if number % 5 == 0:
            table.exchange("writer", "Produce", at_s, broker=2, **(slow if is_slow else {"acks": -1}))
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["slow_broker"])
    assert (one.where, dict(one.evidence)["slow"]) == (where, 4)
    assert dict(one.evidence).get("numbers_of") == ("broker 2 (10.0.1.2:9092)" if is_shared else None)


def test_the_wait_for_a_member_begins_when_all_others_have_joined(tmp_path):
    table = made.Made()
    table.add("rebalances", 20, group_id="g", protocol="classic", generation=2, members_after=3, last_to_join="late",
        started_ns=made.START_NS + 20 * 10**9, joined_ns=made.START_NS + 40 * 10**9,
        ended_ns=made.START_NS + 41 * 10**9, waited_ns=15 * 10**9)  # fmt: skip
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["straggler"])
    assert (one.since_ns - made.START_NS, one.until_ns - made.START_NS) == (25 * 10**9, 41 * 10**9)


def test_the_time_of_a_failure_is_that_of_the_error_or_of_the_end_of_the_connection(tmp_path):
    """A muted client sends 5 s before its connection ends; a request given up after 8 s has failed from its start."""
    table = made.Made()
    for number in range(5):
        ends_ns = made.START_NS + (95 + number) * 10**9 + 6 * 10**9
        key = table.exchange("greedy", "Produce", 95 + number, errors=1, response_end_ns=ends_ns)
        table.partition(key, "response", "t", error_code=19, error="NOT_ENOUGH_REPLICAS")
    for client, connection, life_s in (("muted", 1, 5.5), ("patient", 3, 8)):
        asked_ns = made.START_NS + 95 * 10**9
        for _ in range(3):
            table.exchange(client, "Produce", 95, outcome="unanswered", latency_ns=None, request_end_ns=asked_ns)
        made._connection(table, connection, "10.0.0.1", 90, 5 + life_s)
        table.exchange(client, "Metadata", 150, broker=2)
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = findings(tables, read(["gave_up_s=6"]), kinds=["not_enough_replicas", "unanswered", "client_timeouts"])
    times = {(one.kind, dict(one.place)["client"]): (one.since_ns - made.START_NS) / 1e9 for one in found}
    assert times == {
        ("not_enough_replicas", "greedy"): 101,
        ("unanswered", "muted"): 100.5,
        ("client_timeouts", "patient"): 95,
    }


@pytest.mark.parametrize(("closed_by", "kind"), [("client", "client_timeouts"), ("broker", "unanswered")])
def test_a_client_gives_up_only_if_it_ends_the_connection_itself(tmp_path, closed_by, kind):
    """A broker that resets a connection in the middle of a late answer is not helped by request.timeout.ms."""
    table = made.Made()
    waits = {"outcome": "unanswered", "latency_ns": None, "request_end_ns": made.START_NS + 95 * 10**9}
    table.exchange("waiting", "Produce", 95, **waits)
    made._connection(table, 0, "10.0.0.1", 90, 25, closed_by=closed_by)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (found,) = findings(tables, kinds=["unanswered", "client_timeouts"])
    assert (found.kind, dict(found.evidence).get("gave_up")) == (kind, 1 if closed_by == "client" else None)


@pytest.mark.parametrize(("request_bytes", "says"), [(200 * 2**20, "socket.request.max.bytes"), (50 * 2**20, None)])
def test_a_request_that_the_broker_does_not_receive_to_its_end_has_no_answer(tmp_path, request_bytes, says):
    """Its client never comes back; only a request above the broker's limit is a finding by itself."""
    table = made.Made()
    cut = {"outcome": "unanswered", "latency_ns": None, "request_end_ns": None, "request_bytes": request_bytes}
    table.exchange("cut", "Produce", 95, request_start_ns=made.START_NS + 95 * 10**9, **cut)
    made._connection(table, 0, "10.0.0.1", 90, 5.1, closed_by="broker", close="reset")
    with Tables(table.write(tmp_path / "tables")) as tables:
        of_kind = findings(tables, kinds=["unanswered", "client_timeouts"])
        assert [says in found.change for found in of_kind] == ([True] if says else [])
        assert verdict(tables, []).figures.unanswered == 1


@pytest.mark.parametrize("served", [False, True])
def test_one_failed_login_is_a_finding_if_its_client_gets_no_further(tmp_path, monkeypatch, served):
    """Java's clients do not try again."""
    for api, key in (("SaslHandshake", 17), ("SaslAuthenticate", 36), ("Metadata", 3)):
        monkeypatch.setitem(made.KEYS, api, key)
    table = made.Made()
    table.exchange("locked", "SaslHandshake", 95)
    table.exchange("locked", "SaslAuthenticate", 95.1)
    refused = {"errors": 1, "error": "SASL_AUTHENTICATION_FAILED", "error_code": 58}
    table.exchange("locked", "SaslAuthenticate", 95.2, **refused)
    if served:
        table.exchange("locked", "Metadata", 96)
    with Tables(table.write(tmp_path / "tables")) as tables:
        assert [found.where for found in findings(tables, kinds=["login_failed"])] == (
            [] if served else ["client locked, SaslAuthenticate"]
        )


@pytest.mark.parametrize("waits_s", [10, 1])
def test_a_rebalance_that_waits_for_vanished_members_names_their_clients(tmp_path, waits_s):
    """Two clients join as new members, and their old ids expire `waits_s` later; the same two minutes later."""
    table = made.Made()
    member = {"group_id": "g", "protocol": "classic"}
    for join_s in (20, 140):
        _join_anew(table, member, join_s, waits_s)
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = findings(tables, kinds=["members_gone"])
    assert len(found) == (2 if waits_s == 10 else 0)
    for one, join_s in zip(sorted(found, key=lambda one: one.since_ns or 0), (20, 140), strict=False):
        assert one.where == "group g" and one.severity == "critical"
        assert one.since_ns == made.START_NS + join_s * 10**9
        assert sentence(one) == (
            "in 1 rebalance the members waited 10.0 s for 2 that did not come back, 10.0 s at most; these were of a, b"
        )


def _join_anew(table, member, join_s, waits_s):
    join_ns, joined_ns = (made.START_NS + at_s * 10**9 for at_s in (join_s, join_s + waits_s))
    generation = join_s
    for name in ("a", "b"):
        table.add("group_events", join_s, **member, event="join", client_id=name, member_id=f"{name}-{join_s}",
            time_ns=join_ns)  # fmt: skip
        table.add("group_events", join_s, **member, event="expired", client_id=name, member_id=f"{name}-old-{join_s}",
            generation=generation, time_ns=joined_ns)  # fmt: skip
    times = {"started_ns": join_ns - 10**9, "joined_ns": joined_ns, "ended_ns": joined_ns}
    table.add("rebalances", join_s, **member, **times, strategy="range", generation=generation, cause="member_joined",
        members_before=2, members_after=2)  # fmt: skip


@pytest.mark.parametrize(
    ("read_per_s", "stops_s", "leaves", "lag", "silent_s"),
    [
        (1000, 290, True, None, None),
        (1000, 290, False, None, None),
        (1000, 100, True, None, None),
        (1000, 100, False, 200_000, 200),
        (100, 290, True, 261_000, None),
        (100, 300, False, 270_000, None),
    ],
)
def test_the_lag_of_a_group_that_stopped_is_that_at_its_last_request(
    tmp_path, read_per_s, stops_s, leaves, lag, silent_s
):
    """1,000 records per second are written until the end; members that were killed would have returned by then."""
    table = made.Made()
    for second in range(301):
        key = table.exchange("writer", "Produce", second, acks=-1)
        table.partition(key, "response", "orders", error_code=0, offset=1000 * second, end_offset=1000 * (second + 1))
        if second < stops_s:
            key = table.exchange("reader", "OffsetCommit", second + 0.1, group_id="g")
            table.partition(key, "request", "orders", offset=read_per_s * (second + 1))
            table.partition({**key, "at_s": second + 0.1}, "response", "orders", error_code=0)
    if leaves:
        row = {"event": "leave", "group_id": "g", "time_ns": made.START_NS + round((stops_s - 0.9) * 1e9)}
        table.add("group_events", stops_s - 0.9, **row)
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = findings(tables, kinds=["growing_lag"])
    assert bool(found) == (lag is not None)
    for one in found:
        evidence = dict(one.evidence)
        assert evidence["last_lag_records"] == pytest.approx(lag, abs=2000)
        assert evidence.get("no_request_ns", 0) / 1e9 == pytest.approx(silent_s or 0, abs=1)
        assert ("no request of the group for" in sentence(one)) == (silent_s is not None)
        if leaves:  # its records remain unread
            assert evidence["end_lag_records"] == 301_000 - read_per_s * stops_s > evidence["last_lag_records"]
            assert "; its consumer left at 00:0" in sentence(one)


def test_a_late_first_commit_of_a_partition_does_not_hide_the_growth_of_others(tmp_path):
    """The group commits a tenth of the records of partition 0, and nothing of partition 1 for 290 s."""
    table = made.Made()
    for second in range(301):
        for partition in (0, 1):
            key = table.exchange("writer", "Produce", second, acks=-1)
            told = {"offset": 1000 * second, "end_offset": 1000 * (second + 1)}
            table.partition(key, "response", "orders", partition, error_code=0, **told)
            if partition == 0 or second > 290:
                key = table.exchange("reader", "OffsetCommit", second + 0.1, group_id="g")
                table.partition(key, "request", "orders", partition, offset=100 * (second + 1))
                table.partition(key, "response", "orders", partition, error_code=0)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["growing_lag"])
    assert one.where == "group g, topic orders"
    # At the first eighth of the time 38,000 records were written to partition 0, and 3,800 of them committed.
    evidence = dict(one.evidence)
    assert evidence["first_lag_records"] == 34_200 and evidence["compared_lag_records"] == 270_900
    assert evidence["span_ns"] / 1e9 == pytest.approx(300 * 7 / 8, abs=1)
    assert sentence(one) == (
        "lag grew from 34,200 to 270,900 records in 4.37 min in 1 of its 2 partitions, whose lag was known at both "
        "moments; in all 541,800 records"
    )


def test_lags_of_partitions_assigned_at_different_times_are_not_added(tmp_path):
    """The client has partition 0 from the beginning, gets partition 1 at 200 s, and loses 2 at 100 s."""
    table = made.Made()
    for second in range(301):
        for partition, first_s, last_s, lag in ((0, 0, 300, 0), (1, 200, 300, 50_000), (2, 0, 100, 80_000)):
            if first_s <= second <= last_s:
                key = table.exchange("reader", "Fetch", second + partition / 10, records=1, max_wait_ms=500)
                known = {"lag_records": lag + 200 * (second - first_s), "high_watermark": 10**6}
                table.partition(key, "response", "orders", partition, error_code=0, records=1, **known)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["growing_lag"])
    assert one.where == "client reader, topic orders"
    assert sentence(one) == (
        "lag grew from 50,000 to 70,000 records in 100 s in 1 of its 2 partitions, whose lag was known at both "
        "moments; in all 130,000 records"
    )


@pytest.mark.parametrize(
    ("silent_s", "alone", "told"),
    [
        (0.8, None, {}),
        (2.1, None, {"all_brokers_silent": 0}),
        (4, None, {"all_brokers_silent": 3}),  # each broker is a finding, too
        (2.1, 3, {}),  # the others wait for its replicas
        (4, 3, {"broker_standing_still": 0}),
    ],
)
def test_brokers_that_fall_silent_together_are_one_cause(tmp_path, silent_s, alone, told):
    """Two clients take turns to send to each broker every 0.1 s; `alone`: only that broker stands still."""
    table = made.Made()
    for number in range(300):
        at_s = number / 10
        ends_s = 10 + silent_s if 10 <= at_s < 10 + silent_s else at_s + 0.01
        ends_ns = made.START_NS + round(ends_s * 1e9)
        for broker in (1, 2, 3):
            api, acks = ("Metadata", None) if alone in (None, broker) else ("Produce", -1)
            at_ns = made.START_NS + round(at_s * 1e9)
            times = {
                "request_end_ns": at_ns,
                "response_start_ns": ends_ns + broker,
                "response_end_ns": ends_ns + broker,
            }
            client = f"app-{number % 2}"
            table.exchange(
                client, api, at_s, broker=broker, acks=acks, in_flight=0, latency_ns=ends_ns - at_ns, **times
            )
    kinds = ["all_brokers_silent", "broker_standing_still", "broker_gone", "unanswered"]
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables, kinds=kinds)
    assert {one.kind: len(one.consequences) for one in answer} == told
    for one in answer:
        assert abs(dict(one.evidence)["silent_ns"] - silent_s * 1e9) < 2e8
        assert one.kind != "all_brokers_silent" or sentence(one).startswith("all 3 brokers answered nothing for ")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("paused_s", "change", "cause"),
    [
        (1.5, {}, "broker_paused"),
        (0.9, {}, None),
        (1.5, {"clients": 1}, "slow_broker"),
        (1.5, {"api": "Produce", "acks": -1}, "slow_broker"),  # it may wait for a replica
        (1.5, {"api": "Fetch", "max_wait_ms": 5000}, "slow_broker"),  # it may wait for data
        (1.8, {"api": "Fetch", "max_wait_ms": 500}, "broker_paused"),
        (1.5, {"api": "ApiVersions"}, "slow_broker"),  # a starting broker delays it
        (1.5, {"loss_ns": made.MS}, "slow_broker"),  # lost segments
        (1.5, {"answered": "at any time"}, "slow_broker"),  # the broker answers others meanwhile
        (1.5, {"answered": "one by one"}, "slow_broker"),
        (1.5, {"paused": (1, 2)}, "all_brokers_silent"),  # both at once
    ],
)
def test_a_pause_of_a_broker_is_found_from_clients_that_wait_for_it(tmp_path, paused_s, change, cause):
    """Three clients send to two brokers every 0.2 s; one of these is silent for a while, then answers all at once.

    A writer with acks=all at the other broker waits for its replica meanwhile, and is slow only for that reason.
    """
    table = made.Made()
    made.pause(table, paused_s, **change)
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables, limits({"very_slow_produce_ms": 500, "slow_produces_min": 10}))
        slow = [one.kind for one in answer if "slow_broker" in (one.kind, *(each.kind for each in one.consequences))]
    found = [one for one in answer if one.kind == "broker_paused"]
    assert len(found) == (cause == "broker_paused")
    for one in found:
        evidence = dict(one.evidence)
        assert (one.severity, dict(one.place)["broker_id"], evidence["clients"]) == ("warning", 2, 3)
        assert paused_s * 1e9 - 6e8 < evidence["paused_ns"] <= paused_s * 1e9
    assert slow == ([cause] if cause else [])


@pytest.mark.parametrize(("throttle_ms", "follows"), [(60_000, True), (2000, False)])
def test_timeouts_of_a_client_are_consequences_of_its_quota_while_the_throttle_lasts(tmp_path, throttle_ms, follows):
    """The broker mutes its connection for a minute, or for 2 s, which does not explain the missing answers."""
    table = made.Made()
    for number in range(5):
        made.ask(table, "greedy", 1, number, 0.002, api="Produce", acks=1, throttle_ms=throttle_ms)
    for number in range(5):
        asked_ns = made.START_NS + (25 + number) * 10**9
        lost = {"outcome": "unanswered", "latency_ns": None, "throttle_ms": None, "request_end_ns": asked_ns}
        key = table.exchange("greedy", "Produce", 25 + number, acks=1, **lost)
    made._connection(table, key["connection"], "10.0.0.1", 0.0, 60.0)
    for number in range(90):
        made.ask(table, "other", 1, number, 0.002, api="Metadata")
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables)
    (throttled,) = [one for one in answer if one.kind == "throttled"]
    assert [each.kind for each in throttled.consequences].count("client_timeouts") == follows
    assert [one.kind for one in answer].count("client_timeouts") == (not follows)


def test_slow_requests_with_one_cause_are_one_row_of_an_overview(tmp_path):
    """Three brokers mute a client that reconnects for each request; one broker makes two clients wait."""
    table = made.Made()
    for number in range(12):
        slow = {"latency_ns": 9 * 10**9, "muted_ns": (8 * 10**9) + number, "total_ns": 9 * 10**9 + number}
        table.exchange("greedy", "Produce", number, broker=number % 3, **slow)
        table.rows["exchanges"][-1] |= {"connection": 100 + number, "number": 0}
        waits = {"latency_ns": 2 * 10**9, "total_ns": 2 * 10**9 + number}
        table.exchange(f"app-{number % 2}", "Produce", number, broker=3, **waits)
        table.rows["exchanges"][-1] |= {"connection": 200 + number, "number": 0}
    with Tables(table.write(tmp_path / "tables")) as tables:
        rows = sections.slowest(tables).arrow().to_pylist()
    assert [(row["cause"], row["exchanges"]) for row in rows] == [("throttle", 12), ("broker", 12)]
    assert rows[0]["total_ns"] == 9 * 10**9 + 11


def test_the_finding_of_replicas_out_of_sync_has_the_time_of_the_last_report(tmp_path):
    table = made.Made()
    for topic, change, at_s, isr in (("a", "created", 1, [1, 2]), ("a", "isr_shrunk", 20, [1])):
        state = {"topic": topic, "partition": 0, "change": change, "isr": isr, "replicas": [1, 2]}
        table.add("leadership", at_s, **state, time_ns=made.START_NS + at_s * 10**9)
    table.add("topology", 0, kind="broker", change="appeared", broker_id=2, time_ns=made.START_NS)
    end_ns = made.START_NS + 80 * 10**9
    table.exchange("app", "Fetch", 80, response_start_ns=end_ns, response_end_ns=end_ns)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["under_replicated"])
    assert sentence(one) == (
        "1 partition lacked it in its ISR, until the next report or the capture's end, 60.0 s later at the latest; "
        "1 at the end, by the last change reported of them, at 00:00:20 UTC: not known afterwards"
    )


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    return made.dataset(tmp_path_factory.mktemp("made") / "tables")


def test_a_transaction_stays_open_after_a_refused_end_and_is_reported_with_its_timeout(made_up):
    """The jobs `transactions` and `findings` agree."""
    with Tables(made_up) as tables:
        (opened,) = findings(tables, kinds=["open_transaction"])
        frames = (tables[name] for name in ("exchanges", "partitions", "transactions"))
        (first, *others) = dicts(knowledge.transactions(*frames))
    assert sentence(opened).endswith("until the capture ended; transaction.timeout.ms is 15.0 min")
    assert (first["transactional_id"], first["ended_by"], first["timeout_ms"]) == ("hung-tx", None, 900_000)
    assert first["open_ns"] == dict(opened.evidence)["open_ns"]
    ends = {other["transactional_id"]: (other["ended_by"], other["open_ns"] // 10**9) for other in others}
    assert ends == {"ends-tx": ("EndTxn", 0), "late-tx": ("coordinator", 1)}


def test_the_finding_of_a_hung_consumer_begins_at_its_last_progress(made_up):
    """Its last commit with progress is at 7 s, and it prefetches until 9.5 s."""
    with Tables(made_up) as tables:
        (one,) = findings(tables, kinds=["stopped_fetching"])
    assert one.since_ns == made.START_NS + 7 * 10**9
    assert sentence(one) == (
        "fetches until 00:00:09 UTC, commits no further offset since 00:00:07 UTC; 36 heartbeats in the 108 s without "
        "a Fetch"
    )


def test_each_kind_is_found_only_in_its_own_case(made_up):
    with Tables(made_up) as tables:
        answer = findings(tables)
        assert {(one.kind, one.where) for one in answer} == made.PROVOKED
        assert all(sentence(one) and "unknown" not in sentence(one) for one in answer)
        assert all(one.since_ns >= made.START_NS and one.until_ns >= one.since_ns for one in answer)
        assert all(Finding.of(json.loads(json.dumps(one.as_dict()))) == one for one in answer)
        only = findings(tables, kinds=["slow_broker"])
        assert [one.kind for one in only] == ["slow_broker"]


def test_records_sent_again_in_different_batches_are_recognised(made_up):
    """No later batch equals one that failed, yet all records are sent twice."""
    with Tables(made_up) as tables:
        (again,) = [each for each in findings(tables, kinds=["resent_not_idempotent"]) if "cutter" in each.where]
    numbers = {"outcome": "50 records are perhaps in the log twice"}
    numbers |= {"resent": 5, "recut": 5, "failed": 5, "doubtful_records": 50, "error": "unanswered"}
    assert dict(again.evidence) == numbers


def test_written_records_of_topics_are_the_acknowledged_ones(made_up):
    """Five requests of `twice` were refused; their retries were written."""
    with Tables(made_up) as tables:
        rows = {row["topic"]: row for row in sections.topics(tables).arrow().to_pylist()}
    assert (rows["of-twice"]["written_records"], rows["of-twice"]["failed_attempts"]) == (35, 5)
    assert rows["of-twice"]["lost_batches"] == rows["of-trusting"]["failed_attempts"] == 0
    assert rows["of-gives-up"]["failed_attempts"] == rows["of-gives-up"]["lost_batches"] == 5
    assert rows["of-cutter"]["failed_attempts"] == 5 and rows["of-cutter"]["lost_batches"] == 0  # in different batches


@pytest.mark.parametrize(
    ("error", "sent_again", "goes_on", "ends_s", "lost"),
    [
        ("NOT_ENOUGH_REPLICAS", True, True, 100, 0),
        ("NOT_ENOUGH_REPLICAS", False, True, 100, 1),
        ("NOT_ENOUGH_REPLICAS", False, False, 100, 0),  # a retry may follow after the end
        ("NOT_ENOUGH_REPLICAS", False, False, 200, 1),  # no retry after delivery.timeout.ms
        ("MESSAGE_TOO_LARGE", False, False, 100, 1),
        (None, False, False, 100, 0),  # it still waits for a response
    ],
)
def test_a_failed_batch_without_a_retry_is_lost(tmp_path, error, sent_again, goes_on, ends_s, lost):
    """The retry goes to the new leader, and is in another capture."""
    table = made.Made()

    def write(at_s, batch, source, error="NONE"):
        waits = {} if error else {"outcome": "unanswered", "latency_ns": None}
        key = table.exchange("app", "Produce", at_s, acks=-1, source=source, **waits) | {"source": source}
        table.partition(key, "request", "orders", records=3, bytes=300)
        if error:
            table.partition(key, "response", "orders", error_code=int(error != "NONE"), error=error)
        times = {"base_timestamp": 1_000_000 + 100 * batch, "max_timestamp": 1_000_050 + 100 * batch}
        table.add("batches", **key, direction="request", topic="orders", partition=0, records=3, magic=2, **times)

    write(1, 1, "one")
    write(50, 2, "one", error)
    if sent_again:
        write(55, 2, "other")
    if goes_on:
        write(56, 3, "other")
    table.exchange("else", "Metadata", ends_s, broker=2)
    for source in ("one", "other"):
        table.add("connections", 0, source=source, connection=0, close="open")
    with Tables(table.write(tmp_path / "tables")) as tables:
        (row,) = sections.topics(tables).arrow().to_pylist()
    assert (row["failed_attempts"], row["lost_batches"]) == (int(error is not None), lost)
    assert row["written_records"] == 3 * (1 + sent_again + goes_on)


@pytest.mark.parametrize(
    ("error", "again", "later", "unsent"),
    [
        ("NOT_LEADER_OR_FOLLOWER", None, {"producer_epoch": 3}, (20_000_000_000, 4000)),
        (None, None, {"producer_epoch": 3}, (20_000_000_000, 4000)),
        ("NOT_LEADER_OR_FOLLOWER", None, {}, (None, None)),  # no new epoch: the application had nothing to send
        ("NOT_LEADER_OR_FOLLOWER", None, {"producer_id": -1}, None),  # another process with the same client id
        ("NOT_LEADER_OR_FOLLOWER", None, None, None),  # the producer has ended
        ("NOT_LEADER_OR_FOLLOWER", ("NONE", 0), {}, None),
        ("NOT_LEADER_OR_FOLLOWER", ("NONE", 1), {"producer_epoch": 1}, None),
        (None, ("DUPLICATE_SEQUENCE_NUMBER", 0), {}, None),
        ("INVALID_PRODUCER_EPOCH", None, {"transactional": True}, None),  # aborted with its transaction
        ("MESSAGE_TOO_LARGE", None, None, (None, None)),
    ],
)
def test_records_that_a_producer_gave_up_on_are_counted(tmp_path, error, again, later, unsent):
    """Ten batches of 20 records per second; the last is refused, or unanswered. The next records are 20 s younger."""
    table = made.Made()

    def write(at_s, made_s, sequence, error="NONE", **columns):
        lost = {} if error else {"outcome": "unanswered", "latency_ns": None}
        key = table.exchange("app", "Produce", at_s, acks=-1, **lost)
        table.partition(key, "request", "orders", records=20, bytes=300)
        if error:
            code = {"NONE": 0, "DUPLICATE_SEQUENCE_NUMBER": 46}.get(error, 6)
            table.partition(key, "response", "orders", error_code=code, error=error)
        at_ms = made.START_NS // made.MS + round(made_s * 1000)
        columns = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence, "transactional": False} | columns
        times = {"base_timestamp": at_ms, "max_timestamp": at_ms + 50}
        table.add("batches", **key, direction="request", topic="orders", partition=0, records=20, **times, **columns)

    kind = {"transactional": bool((later or {}).get("transactional"))}
    for number in range(100):
        write(number / 10 + 0.06, number / 10, 20 * number, **kind)
    write(10.06, 10, 2000, error, **kind)
    if again:
        write(31, 10, 2000 if again[1] == 0 else 0, again[0], producer_epoch=again[1])
    if later is not None:
        write(35, 30.05, 2020, **later)
    with Tables(table.write(tmp_path / "tables")) as tables:
        given_up = [dict(one.evidence) for one in findings(tables, kinds=["records_given_up"])]
        (row,) = sections.topics(tables).arrow().to_pylist()
    told = [
        (one["given_up_records"], one["errors"], one.get("unsent_ns"), one.get("about_records")) for one in given_up
    ]
    assert told == ([] if unsent is None else [(20, error or "unanswered", *unsent)])
    assert row["failed_attempts"] == 1 and row["lost_batches"] >= len(told)


def test_a_loss_of_unknown_size_has_a_minimum_and_is_weighed_by_its_duration(tmp_path):
    """With a queue minutes old, epochs rise from 0 to 9 in two partitions, before and after the failed batch."""
    table = made.Made()

    def write(at_s, made_s, epoch, error="NONE", **columns):
        for partition in (0, 1):
            key = table.exchange("app", "Produce", at_s, acks=-1)
            table.partition(key, "request", "orders", partition, records=20, bytes=300)
            code = int(error != "NONE" and partition == 0) * 47
            table.partition(key, "response", "orders", partition, error_code=code, error=error if code else "NONE")
            at_ms = made.START_NS // made.MS + round(made_s * 1000)
            times = {"base_timestamp": at_ms, "max_timestamp": at_ms + 50, "transactional": False}
            id_ = {"producer_id": 7, "producer_epoch": epoch, "base_sequence": 0}
            table.add(
                "batches", **key, direction="request", topic="orders", partition=partition, records=20, **times, **id_
            )

    for at_s, made_s, epoch in ((100, 1, 0), (120, 2, 0), (140, 22.05, 3)):
        write(at_s, made_s, epoch)
    write(141, 23, 3, "INVALID_PRODUCER_EPOCH")
    write(150, 42.05, 9)
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = findings(tables, kinds=["records_given_up"])
        said = verdict(tables, found)
    (one,) = found
    numbers = {"given_up_records": 20, "at_least_records": 20, "new_epochs": 9}
    assert dict(one.evidence)["unsent_ns"] == 39_000_000_000  # in one of the partitions
    assert numbers.items() <= dict(one.evidence).items() and "about_records" not in dict(one.evidence)
    assert one.severity == "critical" and one.weight > 0.5
    assert sentence(one).startswith("at least 20 records failed")
    told = value("unsent_ns", dict(one.evidence)["unsent_ns"])
    assert f"began 9 new epochs, and {told} have no records: what it had to send then, possibly far more" in sentence(
        one
    )
    small = one._replace(kind="broker_gone", weight=1.0, consequences=(one._replace(weight=0.1),))
    quota = one._replace(kind="throttled", weight=0.5, consequences=(one,))
    text = views_verdict.sentence(replace(said, findings=[small] * 3 + [quota]))
    assert text.endswith(
        f"and one more cause: throttled by a quota; client app, topic orders gave up on at least 20 records, possibly "
        f"far more: {told} without records."
    )


def test_offsets_show_which_retries_are_in_the_log_twice(made_up):
    """Refused batches were not written; skipped offsets were written, by this client if it is the only writer."""
    with Tables(made_up) as tables:
        answer = {one.where: one for one in findings(tables, kinds=["resent_not_idempotent", "doubtful_records"])}
    twice = answer["client twice, topic of-twice"]
    assert {"resent": 2, "failed": 2, "not_in_log_records": 7}.items() <= dict(twice.evidence).items()
    assert sentence(twice).startswith("5 records are in the log twice, 6 records are out of order in the log: ")
    assert dict(answer["client among, topic of-among"].evidence)["doubtful_records"] == 12


def test_producers_whose_writes_are_not_acknowledged_stand_still(made_up):
    """The time begins with the first write without an acknowledgement. Producers without valid writes do not count."""
    with Tables(made_up) as tables:
        (still,) = findings(tables, kinds=["producers_standing_still"])
    assert [round((at_ns - made.START_NS) / 1e6) for at_ns in (still.since_ns, still.until_ns)] == [510_000, 522_002]
    said = "2 of 6 producers had no write acknowledged for 8.00 s or more, refused-a-while for 12.0 s"
    assert sentence(still) == said and dict(still.evidence)["refused"] == 24


@pytest.mark.parametrize("refused_s", [8, 2])
def test_a_standstill_at_the_start_of_the_capture_begins_with_the_first_write(tmp_path, refused_s):
    table = made.Made()

    def write(client, at_s, **columns):
        ended = {"response_end_ns": made.START_NS + round(at_s * 1000 + 2) * made.MS}
        return table.exchange(client, "Produce", at_s, acks=-1, partitions=1, **ended, **columns)

    for number in range(40):
        key = write("waiting", number / 2, errors=int(number < 2 * refused_s))
        if number < 2 * refused_s:
            table.partition(key, "response", "x", error_code=19, error="NOT_ENOUGH_REPLICAS")
        write("calm", number / 2)
        if number > 20:
            write("later", number / 2)
    with Tables(table.write(tmp_path / "tables")) as tables:
        still = findings(tables, kinds=["producers_standing_still"])
    told = [(one.where, *(round((ns - made.START_NS) / 1e6) for ns in (one.since_ns, one.until_ns))) for one in still]
    assert told == ([("client waiting", 0, 8_002)] if refused_s == 8 else [])


@pytest.mark.parametrize(
    ("writes_s", "asks_s", "connections", "still"),
    [
        (0.2, 0.1, 1, [(10.0, 16.0)]),  # a steady writer: since its last acknowledgement
        (2.0, 0.1, 1, [(12.0, 16.0)]),  # it may have had nothing to write until 12 s
        (0.2, 1.5, 1, []),  # an ordinary refresh of metadata
        (0.2, 0.1, 20, []),  # successive processes with the same client id
    ],
)
def test_a_producer_that_repeatedly_requests_metadata_stands_still(tmp_path, writes_s, asks_s, connections, still):
    """Its writes are acknowledged until 10 s and from 16 s on; from 12 s on it sends Metadata requests."""
    table = made.Made()
    at = lambda second: made.START_NS + round(second * 1000) * made.MS  # noqa: E731
    before = [number * writes_s for number in range(round(10 / writes_s) + 1)]
    for at_s in (*before, 16):
        table.exchange("aio", "Produce", at_s, acks=1, response_end_ns=at(at_s))
    for number in range(int(3.9 / asks_s)):
        table.exchange("aio", "Metadata", 12 + number * asks_s, broker=1 + number % connections)
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = findings(tables, kinds=["producers_standing_still"])
    assert [tuple(round((ns - made.START_NS) / 1e9, 3) for ns in (one[5], one[6])) for one in found] == still


def test_the_standstill_of_a_throttled_producer_excludes_the_throttle(tmp_path):
    """A broker mutes its connection for 2.4 s, then stands still."""
    table = made.Made()
    times = {"acks": -1, "response_end_ns": made.START_NS + 16_130 * made.MS, "muted_ns": 2_400 * made.MS}
    table.exchange("app", "Produce", 9, acks=-1, response_end_ns=made.START_NS + 9_000 * made.MS)
    table.exchange("app", "Produce", 10, **times)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (still,) = findings(tables, kinds=["producers_standing_still"])
    assert [round((ns - made.START_NS) / 1e9, 3) for ns in (still.since_ns, still.until_ns)] == [12.4, 16.13]


def test_the_standstill_of_a_throttled_producer_begins_after_its_throttle(tmp_path):
    """The broker mutes it for 2 s, then stands still for 8 s."""
    table = made.Made()
    for number in range(60):
        at_s = number / 4 if number < 40 else number / 4 + 10
        ends_s, muted_s = (at_s + 10, 2) if number == 39 else (at_s + 0.01, 0)
        ended = {"response_end_ns": made.START_NS + round(ends_s * 1e9), "muted_ns": muted_s * 10**9}
        table.exchange("over", "Produce", at_s, acks=-1, partitions=1, **ended)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (still,) = findings(tables, kinds=["producers_standing_still"])
    assert [(ns - made.START_NS) / 1e9 for ns in (still.since_ns, still.until_ns)] == [11.75, 19.75]


def test_records_whose_offsets_are_acknowledged_again_are_lost(made_up):
    """Other records get the offsets: all five of partition 0, and the last two of four of partition 1."""
    with Tables(made_up) as tables:
        (lost,) = findings(tables, kinds=["records_lost"])
    assert lost.severity == "critical"
    said = "acknowledged by broker 1 (acks=1), are lost: the same offsets were acknowledged again for other records"
    assert sentence(lost) == f"7 records, {said} (partition and offsets 0: 100 to 104, 1: 42 to 43)"


def test_records_lost_by_two_brokers_are_two_findings_with_their_own_times(tmp_path):
    table = made.Made()
    for at_s, broker, offset, batch in (
        (1, 1, 100, 1),
        (2, 2, 100, 2),
        (3, 2, 105, 3),
        (50, 2, 110, 4),
        (51, 3, 110, 5),
    ):
        key = table.exchange("writer", "Produce", at_s, broker=broker, acks=1)
        table.partition(key, "request", "t", bytes=250, records=5)
        table.partition(key, "response", "t", error_code=0, error="NONE", offset=offset)
        table.add("batches", **key, direction="request", topic="t", partition=0, records=5, base_timestamp=batch)
    with Tables(table.write(tmp_path / "tables")) as tables:
        lost = findings(tables, kinds=["records_lost"])
    told = {(dict(one.place)["broker_id"], dict(one.evidence)["offsets"]): one.until_ns for one in lost}
    assert told.keys() == {(1, "0: 100 to 104"), (2, "0: 110 to 114")}
    assert round((told[1, "0: 100 to 104"] - made.START_NS) / 1e9) == 2


@pytest.mark.parametrize("transactional_id", [None, "tx"])
def test_the_advice_for_a_fenced_producer_depends_on_transactions(tmp_path, transactional_id):
    table = made.Made()
    for number in range(5):
        key = table.exchange("greedy", "Produce", number, errors=1, transactional_id=transactional_id)
        table.partition(key, "response", "t", error_code=47, error="INVALID_PRODUCER_EPOCH")
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["fenced"])
    assert one.change.startswith("Without a transactional.id" if transactional_id is None else "Give each process")


@pytest.mark.parametrize(
    ("acknowledged", "lost"),
    [
        # The former leader (1) still acknowledges after the next one (2), which continues: records of 1 are lost.
        (((1, 90, 10), (2, 100, 5), (1, 100, 3), (2, 105, 5)), (1, "0: 100 to 102")),
        # The failed leader (1) leads again after the other one (2) has acknowledged some of its offsets.
        (((1, 90, 10), (1, 100, 10), (2, 100, 5), (1, 105, 7), (1, 112, 5)), (1, "0: 100 to 109")),
        # Neither continues in the capture: the later leader has the log.
        (((1, 90, 10), (1, 100, 3), (2, 100, 5)), (1, "0: 100 to 102")),
    ],
)
def test_records_of_the_leader_whose_log_was_truncated_are_lost(tmp_path, acknowledged, lost):
    table = made.Made()
    for at_s, (broker, offset, records) in enumerate(acknowledged):
        key = table.exchange(f"at-{broker}", "Produce", at_s, broker=broker, acks=1)
        table.partition(key, "request", "t", bytes=50 * records, records=records)
        table.partition(key, "response", "t", error_code=0, error="NONE", offset=offset)
        batch = {"topic": "t", "partition": 0, "magic": 2, "records": records, "base_timestamp": at_s}
        table.add("batches", **key, direction="request", **batch)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["records_lost"])
    assert (dict(one.place)["broker_id"], dict(one.evidence)["offsets"]) == lost
    assert dict(one.place)["client"] == f"at-{lost[0]}" and one.since_ns < one.until_ns


def test_a_failed_login_by_raw_tokens_is_found(found):
    one = found("k0102_sasl_plain")["login_failed", "host 127.0.0.1, broker 1 (127.0.0.1:9094)"]
    assert {"failed": 6, "asked": 38}.items() <= dict(one.evidence).items()


def test_two_slow_requests_do_not_make_a_broker_slow(tmp_path):
    """Two slow requests of 133 determine the p99, but ten are needed. If all brokers are slow, none is singled out."""
    told = {}
    for slow in (2, 10):
        table = made.Made()
        for broker in (1, 2, 3):
            for number in range(133):
                late = {"latency_ns": 900 * made.MS} if broker == 2 and number < slow else {}
                table.exchange("writer", "Produce", number, broker=broker, acks=-1, **late)
        with Tables(table.write(tmp_path / f"{slow}")) as tables:
            told[slow] = [one.where for one in findings(tables, kinds=["slow_broker"])]
    assert told == {2: [], 10: ["broker 2 (10.0.1.2:9092)"]}
    table = made.Made()
    for broker in (1, 2):
        for number in range(200):
            table.exchange("writer", "Produce", number, broker=broker, acks=-1, latency_ns=2000 * made.MS)
    with Tables(table.write(tmp_path / "all")) as tables:
        (one,) = findings(tables, kinds=["slow_broker"])
    assert (one.where, sentence(one)) == (
        "all brokers",
        "Produce takes 2.00 s at p99 (200 requests) on broker 1 (10.0.1.1:9092); others are slow too",
    )


def test_the_most_severe_places_are_listed_and_the_rest_counted(made_up):
    with Tables(made_up) as tables:
        loose = ["connections_min=1", "connections_per_minute=0", "short_connection_s=1000", "places_per_kind=1"]
        answer = findings(tables, read(loose), kinds=["connection_churn"])
    assert [(one.where, one.more) for one in answer] == [("client 10.9.0.7", 14)]


def test_recorded_values_are_compressed_to_measure_the_ratio(tmp_path):
    """Batches of the same size: text that shrinks, and random values that do not."""
    table = made.Made()
    for topic in ("text", "noise"):
        for number in range(400):
            key = table.exchange(f"to-{topic}", "Produce", number / 20, acks=-1)
            table.add(
                "batches", **key, direction="request", topic=topic, records=4, bytes=16_000, codec="none", magic=2
            )
            value = (
                b"a line of a log, number %d; " % number if topic == "text" else random.Random(number).randbytes(100)
            )
            size = {"value": value, "value_bytes": len(value)}
            table.add("records", **key, direction="request", topic=topic, partition=0, offset=number, **size)
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = {one.where: dict(one.evidence) for one in findings(tables, kinds=["no_compression"])}
        assert list(answer) == ["client to-text, topic text"]
        assert answer["client to-text, topic text"]["measured_ratio"] > 2
        without = findings({name: tables[name] for name in TABLES}, kinds=["no_compression"])
        assert len(without) == 2  # without records, by size alone


def test_zero_windows_of_a_muting_broker_are_not_blamed_on_a_slow_reader(tmp_path):
    """Its window was closed 19 times while it did not read the requests of a client over its quota."""
    convert([INCIDENTS / "k41_quota_muted.pcap.zst"], tmp_path / "tables")
    with Tables(tmp_path / "tables") as tables:
        assert sum(row["zero_windows"] for row in tables["connections"].arrow().to_pylist()) == 19
        kinds = {one.kind for one in findings(tables)}
    assert "throttled" in kinds and "zero_windows" not in kinds


@pytest.mark.parametrize(
    "waits, is_found",
    (
        ({"closed_window_ns": 5 * 10**9, "queue_ns": 9 * 10**9}, True),  # responses behind one that is not read
        ({"closed_window_ns": 0, "queue_ns": 0, "muted_ns": 0}, True),
        ({"closed_window_ns": 10**6, "queue_ns": 9 * 10**9}, False),  # the broker is slow
        ({"closed_window_ns": 0, "muted_ns": 10**9}, False),
        ({"closed_window_ns": None, "queue_ns": None, "muted_ns": None}, True),
    ),
)
def test_zero_windows_are_blamed_on_the_reader_if_exchanges_waited_for_it(tmp_path, waits, is_found):
    rows = made.Made()
    made._connection(rows, 0, "10.9.0.3", 0.0, 60.0, zero_windows=50)
    rows.exchange("one", "Fetch", 1.0, **waits)
    with Tables(rows.write(tmp_path)) as tables:
        assert bool(findings(tables, kinds=("zero_windows",))) == is_found
