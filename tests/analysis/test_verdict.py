"""The verdict: figures of all requests, and a sentence with the causes and their consequences."""

import json
from dataclasses import replace

import pytest

from kproxy.analysis import jobs
from kproxy.analysis import verdict as analysis_verdict
from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import KINDS, consuming, findings, limits
from kproxy.analysis.lags import group_lag_while_active
from kproxy.analysis.verdict import verdict
from kproxy.cli.asking import show_overview
from kproxy.views.answers import dicts
from kproxy.views.findings import sentence as found_in_words
from kproxy.views.verdict import EVENTS_SAID, as_dict, counted, figures, more_events, sentence, timeline
from tests.analysis.findings import made

NS = 10**9


def outage(place, also=lambda table: None, tried_s=()):
    """Broker 2 is gone from 20 s to 32 s, and never answers the requests of the second before.

    tried_s: times of failed connects to it.
    """
    table = made.Made()
    for number in range(400):
        at_s = number / 10
        for broker in (1, 2, 3):
            silent = broker == 2 and 20 <= at_s < 32
            end_ns = made.START_NS + round(at_s * NS)
            times = {"request_end_ns": end_ns, "request_start_ns": end_ns}
            if silent:
                continue
            if broker == 2 and at_s == 32:
                table.reconnect("writer", 2)
            times |= {"response_start_ns": end_ns + made.MS, "response_end_ns": end_ns + made.MS}
            is_lost = broker == 2 and 19 <= at_s < 20
            lost = {"outcome": "unanswered", "latency_ns": None, "response_start_ns": None, "response_end_ns": None}
            table.exchange("writer", "Produce", at_s, broker=broker, acks=-1, **(times | (lost if is_lost else {})))
    for broker, spans in ((1, [(0, 41)]), (2, [(0, 20)]), (3, [(0, 41)])):
        for begin_s, end_s in spans:
            table.add(
                "connections",
                begin_s,
                connection=broker - 1,
                start_ns=made.START_NS + begin_s * NS,
                end_ns=made.START_NS + end_s * NS,
                client_address="10.0.0.1",
                broker_address=f"10.0.1.{broker}",
                broker_port=9092,
                broker_id=broker,
                close="fin",
                start_seen=True,
            )
    for at_s in tried_s:
        at_ns = made.START_NS + round(at_s * NS)
        refused = {"start_ns": at_ns, "end_ns": at_ns, "close": "refused", "start_seen": True}
        refused |= {"broker_address": "10.0.1.2", "broker_port": 9092, "broker_id": 2, "client_address": "10.0.0.1"}
        table.add("connections", at_s, connection=10, **refused)
    also(table)
    return table.write(place)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tried_s", "said"), [((25, 31.5), "13.1 s"), ((25,), "6.10 s to 13.1 s"), ((), "999 ms to 13.1 s")]
)
def test_an_outage_with_an_unobserved_end_has_a_minimum_and_a_maximum_duration(tmp_path, tried_s, said):
    with Tables(outage(tmp_path / "tables", tried_s=tried_s)) as tables:
        found = findings(tables, limits({"unanswered_min": 5}))
        answer = verdict(tables, found)
    assert sentence(answer).startswith(f"Broker 2 was gone for {said}: ")
    assert {name: figure for name, figure, _ in figures(answer)}["stood still"] == said.partition(" to ")[0]
    (gone,) = [one for one in found if one.kind == "broker_gone"]
    assert ("no client asked for it afterwards" in found_in_words(gone)) == (" to " in said)


def test_a_second_outage_does_not_inherit_the_elections_of_the_first(tmp_path):
    """Broker 2 is killed twice within half a minute, and is not a leader the second time."""

    def again(table):
        for partition in range(3):
            for at_s, leader in ((1, 2), (25, 1)):
                row = {"topic": "orders", "partition": partition, "leader": leader, "change": "elected"}
                table.add("leadership", at_s, **row, time_ns=made.START_NS + at_s * NS)
        for number in range(400, 800):
            at_s = number / 10
            at_ns = made.START_NS + round(at_s * NS)
            for broker in (1, 3) if 45 <= at_s < 60 else (1, 2, 3):
                times = {"request_start_ns": at_ns, "request_end_ns": at_ns}
                times |= {"response_start_ns": at_ns + made.MS, "response_end_ns": at_ns + made.MS}
                if broker == 2 and 44 <= at_s < 45:
                    times |= {"outcome": "unanswered", "response_start_ns": None, "response_end_ns": None}
                table.exchange("writer", "Produce", at_s, broker=broker, acks=-1, **times)
        link = {"start_ns": made.START_NS + 32 * NS, "end_ns": made.START_NS + 45 * NS, "close": "fin"}
        link |= {"broker_address": "10.0.1.2", "broker_port": 9092, "broker_id": 2, "client_address": "10.0.0.1"}
        table.add("connections", 32, connection=20, start_seen=True, **link)

    with Tables(outage(tmp_path / "tables", again)) as tables:
        gone = [one for one in findings(tables) if one.kind == "broker_gone"]
    assert len(gone) == 2 and not any(one.is_controlled_shutdown for one in gone)


def test_the_sentence_begins_with_a_broker_that_was_gone_and_the_failed_requests(tmp_path):
    with Tables(outage(tmp_path / "tables")) as tables:
        found = findings(tables, limits({"unanswered_min": 5}))
        said = verdict(tables, found)
    (gone,) = [one for one in found if one.kind == "broker_gone"]
    assert [one.kind for one in gone.consequences] == ["unanswered"]
    assert sentence(said) == "Broker 2 was gone for 999 ms to 13.1 s: 10 requests failed."
    assert (said.figures.requests, said.figures.unanswered, said.figures.refused) == (1080, 10, 0)
    assert said.figures.left_out == 10 and said.figures.answered == 1070
    told = {name: (figure, of) for name, figure, of in figures(said)}
    assert told["failed"] == ("10 of 1,080 requests (0.9%)", "10 unanswered, 0 refused")
    assert told["stood still"] == ("999 ms", "broker 2 (10.0.1.2:9092)")
    assert "10 requests without an answer not included" in told["p99"][1]
    assert counted(said, 0).startswith(f"{said.total} finding") and "1 more follow" in counted(said, 0)
    assert as_dict(said)["sentence"] == sentence(said) and as_dict(said)["figures"]["unanswered"] == 10


@pytest.mark.parametrize(("before", "after", "is_in_order"), [(2, 1, True), (0, 3, False), (1, 2, False)])
def test_a_broker_that_moved_its_leaders_before_its_end_had_a_controlled_shutdown(tmp_path, before, after, is_in_order):
    """Other brokers lead before it falls silent; a killed broker loses its leaders afterwards."""

    def leaders(table):
        for partition in range(before + after):
            for at_s, leader in ((1, 2), (18 if partition < before else 25, 1)):
                row = {"topic": "orders", "partition": partition, "leader": leader, "change": "elected"}
                table.add("leadership", at_s, **row, time_ns=made.START_NS + at_s * NS)

    with Tables(outage(tmp_path / "tables", leaders)) as tables:
        found = findings(tables, limits({"unanswered_min": 5}))
        said = verdict(tables, found)
    (gone,) = [one for one in found if one.kind == "broker_gone"]
    assert dict(gone.evidence).get("handed_over") == (before if is_in_order else None)
    how = "after a controlled shutdown" if is_in_order else "at once, before others led its partitions"
    assert dict(gone.evidence)["end"] == f"connections closed {how}, 1 by FIN"
    assert ("This was a controlled shutdown" in gone.change) == (
        "Broker 2 was away for 999 ms to 13.1 s after a controlled shutdown" in sentence(said)
    )
    assert ("out-of-memory" in gone.change) != is_in_order


def test_a_broker_that_metadata_names_again_is_back_although_no_client_uses_it(tmp_path):
    """Before that, a broker with outdated metadata lists it once more."""

    def named(table):
        for at_s, change in ((21, "gone"), (22, "appeared"), (22.5, "gone"), (26, "appeared")):
            row = {"kind": "broker", "change": change, "broker_id": 2}
            table.add("topology", at_s, **row, time_ns=made.START_NS + round(at_s * NS))

    with Tables(outage(tmp_path / "tables", named)) as tables:
        (gone,) = [one for one in findings(tables) if one.kind == "broker_gone"]
    assert dict(gone.evidence)["is_back"] and dict(gone.evidence)["silent_ns"] == 26 * NS - 18_901 * made.MS


@pytest.mark.parametrize("clients", [2, 1])
def test_a_broker_that_stands_still_at_the_end_of_the_capture_is_a_finding(tmp_path, clients):
    """With one client alone, the cause may be the client."""
    table = made.Made()
    for number in range(400):
        at_s = number / 10
        for client in ("one", "other")[:clients]:
            for broker in (1, 2):
                waits = broker == 2 and at_s >= 34
                if waits and at_s >= 35:
                    continue
                at_ns = made.START_NS + round(at_s * NS)
                times = {"request_start_ns": at_ns, "request_end_ns": at_ns}
                answer = {"response_start_ns": at_ns + made.MS, "response_end_ns": at_ns + made.MS}
                lost = {"outcome": "unanswered", "latency_ns": None}
                table.exchange(client, "Metadata", at_s, broker=broker, **times, **(lost if waits else answer))
    for connection in range(2 * clients):
        made._connection(
            table, connection, "10.0.0.1", 0.0, 40.0, close="open", broker_address=f"10.0.1.{connection % 2 + 1}"
        )
    with Tables(table.write(tmp_path / "tables")) as tables:
        said = verdict(tables, findings(tables))
    told = [text for _, text in timeline(said)]
    assert ("broker 2 stood still for 6.00 s, up to the end" in told) == (clients == 2), told


@pytest.mark.parametrize("clients", [2, 1])
def test_a_broker_that_stands_still_at_the_start_of_the_capture_is_a_finding(tmp_path, clients):
    """It begins with the first delayed request. With one client alone, the cause may be the client."""
    table = made.Made()
    for number in range(200):
        at_s = number / 10
        for client in ("one", "other")[:clients]:
            for broker in (1, 2):
                waits_s = max(6 - at_s, 0) if broker == 2 else 0
                if waits_s and at_s >= 1:
                    continue
                at_ns = made.START_NS + round(at_s * NS)
                answer_ns = at_ns + round(waits_s * NS) + made.MS
                times = {"request_start_ns": at_ns, "request_end_ns": at_ns}
                times |= {"response_start_ns": answer_ns, "response_end_ns": answer_ns}
                table.exchange(client, "Metadata", at_s, broker=broker, **times)
    for connection in range(2 * clients):
        place = {"close": "open", "broker_address": f"10.0.1.{connection % 2 + 1}"}
        made._connection(table, connection, "10.0.0.1", 0.0, 20.0, **place)
    with Tables(table.write(tmp_path / "tables")) as tables:
        said = verdict(tables, findings(tables))
    told = [text for _, text in timeline(said)]
    assert ("broker 2 stood still for 6.00 s" in told) == (clients == 2), told


def test_only_requests_that_failed_during_an_outage_count_as_its_consequences(tmp_path):
    """Half of the requests with too few replicas failed a minute later."""

    def refused(table):
        for number in range(16):
            at_s = 22 + number if number < 8 else 100 + number
            key = table.exchange("strict", "Produce", at_s, broker=1, acks=-1, errors=1)
            table.partition(key, "response", "strict", error_code=19, error="NOT_ENOUGH_REPLICAS")
            table.partition(key, "response", "strict", 1, error_code=19, error="NOT_ENOUGH_REPLICAS")

    with Tables(outage(tmp_path / "tables", refused)) as tables:
        found = findings(tables, limits({"unanswered_min": 5}))
        said = verdict(tables, found)
    (gone,) = [one for one in found if one.kind == "broker_gone"]
    (later,) = [one for one in found if one.kind == "not_enough_replicas"]
    counts = {one.kind: dict(one.evidence)["failed"] for one in gone.consequences}
    assert counts["not_enough_replicas"] == dict(later.evidence)["failed"] == 8
    assert later.since_ns >= made.START_NS + 108 * NS
    assert "Broker 2 was gone for 999 ms to 13.1 s: 18 requests failed" in sentence(said)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("named", "tried_s", "served_s", "is_in_sync", "said"),
    [
        ([("appeared", 0.5), ("gone", 4)], 0.1, None, False, "up to its end 40.0 s later"),
        ([("appeared", 0.5), ("gone", 4), ("appeared", 21)], 0.1, 22, False, "for 21.0 s"),
        ([], None, None, False, "up to its end 40.0 s later"),  # absent from Metadata and from the ISR
        ([("appeared", 0.5)], 0.1, None, True, None),  # an address that clients cannot reach
        ([("appeared", 0.5), ("gone", 20)], 18, None, True, None),  # it stopped later
        ([("appeared", 0.5), ("gone", 4)], 0.1, 0.2, False, None),  # it answered a request
        ([("appeared", 0.5)], None, None, False, None),  # it is there, with replicas out of sync
    ],
)
def test_a_broker_that_stopped_before_the_capture_is_reported_as_absent(
    tmp_path, named, tried_s, served_s, is_in_sync, said
):
    """Broker 2 has a replica of each topic, and the only one of `lone`, which is without a leader."""
    table = made.Made()
    made.absence(table, named, tried_s, served_s, is_in_sync=is_in_sync)
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables)
        whole = sentence(verdict(tables, answer))
    found = [one for one in answer if one.kind == "broker_absent"]
    if said is None:
        assert not found and "was not there" not in whole
        return
    (one,) = found
    assert whole.startswith(f"Broker 2 was not there from the capture's beginning, {said}: one partition had no leader")
    of_named = {"under_replicated", "connects_failed"} if named else set()
    assert {each.kind for each in one.consequences} == {"offline_partitions", *of_named}


@pytest.mark.parametrize(("back_s", "said"), [(21, "12.0 s to 21.0 s: "), (None, "12.0 s to 40.0 s, up to its end")])
def test_an_absence_with_an_unobserved_end_has_a_minimum_and_a_maximum_duration(tmp_path, back_s, said):
    """The last Metadata response without it is long before the first that names it again, or before the end."""
    table = made.Made()
    back = [] if back_s is None else [("appeared", back_s)]
    served_s = None if back_s is None else back_s + 1
    made.absence(table, [("appeared", 0.5), ("gone", 4), *back], 0.1, served_s, is_in_sync=False)
    for row in table.rows["exchanges"]:
        if made.START_NS + 12 * NS < row["response_start_ns"] < made.START_NS + (back_s or 41) * NS:
            row["api"] = "Heartbeat"
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables, kinds=["broker_absent"])
        whole = sentence(verdict(tables, answer))
    (one,) = answer
    assert (dict(one.evidence)["away_ns"], dict(one.evidence)["absent_ns"]) == (12 * NS, (back_s or 40) * NS)
    assert f"{whole[:-1]}: ".startswith(f"Broker 2 was not there from the capture's beginning, for {said}")
    assert "known to be away for 12.0 s: no client asked for it afterwards" in found_in_words(one)


@pytest.mark.parametrize(("asked", "severity"), [(300, "warning"), (20, "critical")])
def test_the_severity_of_one_waiting_request_depends_on_its_share(tmp_path, asked, severity):
    table = made.Made()
    for number in range(asked):
        at_ns = made.START_NS + round(number * 40 / asked * NS)
        answer = {"response_start_ns": at_ns + made.MS, "response_end_ns": at_ns + made.MS}
        table.exchange("reader", "Metadata", number * 40 / asked, request_end_ns=at_ns, **answer)
    lost = {"outcome": "unanswered", "latency_ns": None, "response_start_ns": None, "response_end_ns": None}
    table.reconnect("reader")
    key = table.exchange("reader", "Fetch", 5, request_end_ns=made.START_NS + 5 * NS, max_wait_ms=500, **lost)
    made._connection(table, key["connection"], "10.0.0.1", 0.0, 40.0, close="open")
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["unanswered"])
    assert (one.severity, dict(one.evidence)["still_wait"]) == (severity, 1)


def test_unanswered_and_refused_requests_are_counted_alike_everywhere(tmp_path):
    """Unanswered are requests of a client that continues, and overdue ones at the end of the capture; not those of a
    client that ends, nor of a consumer that left its group and has a successor of the same name. Topics that Metadata
    refuses are refused."""

    def also(table):
        lost = {"outcome": "unanswered", "latency_ns": None}
        key = table.exchange("ending", "Metadata", 39, request_end_ns=made.START_NS + 39 * NS, **lost)
        ends = {"start_ns": made.START_NS, "end_ns": made.START_NS + 39 * NS, "close": "fin"}
        table.add("connections", 0, connection=key["connection"], client_address="10.0.0.1", **ends)
        table.exchange("flapper", "LeaveGroup", 10, group_id="g", broker=3)
        key = table.exchange("flapper", "Metadata", 10, request_end_ns=made.START_NS + 10 * NS, **lost)
        ends = {"start_ns": made.START_NS, "end_ns": made.START_NS + 10_100 * made.MS, "close": "reset"}
        table.add("connections", 0, connection=key["connection"], client_address="10.0.0.1", **ends)
        table.exchange("flapper", "Metadata", 12, broker=3)
        for at_s in (20, 38):
            key = table.exchange("waiting", "Heartbeat", at_s, request_end_ns=made.START_NS + at_s * NS, **lost)
            table.add("connections", 0, connection=key["connection"], client_address="10.0.0.1", close="open")
        for number in range(5):
            at_ns = made.START_NS + number * NS
            table.exchange("typo", "Metadata", number, errors=1, response_start_ns=at_ns)
        table.add("topology", 0, kind="topic", change="unknown", topic="ordres", time_ns=made.START_NS)
        table.exchange("member", "Heartbeat", 3, errors=1, error="REBALANCE_IN_PROGRESS", error_code=27)

    with Tables(outage(tmp_path / "tables", also)) as tables:
        said = verdict(tables, findings(tables))
        refused = list(dicts(jobs.errors(tables["exchanges"], tables["partitions"], tables["connections"])))
    of = said.figures
    assert (of.unanswered, of.left_out, of.refused, of.everyday) == (11, 14, 5, 1)
    (typo,) = [one for one in said.findings if one.kind == "unknown_topic"]
    assert dict(typo.evidence)["failed"] == 5
    counts = {(row["api"], row["error"]): row["exchanges"] for row in refused}
    assert (counts["Produce", "unanswered"], counts["Metadata", "not_missed"]) == (10, 2)
    assert counts["Heartbeat", "unanswered"] == counts["Heartbeat", "in_flight_at_end"] == 1
    parts = next(figures(said))[2]
    assert parts == "11 unanswered, 5 refused; 1 answer with errors of rebalances and elections apart"


def test_an_overview_shows_unanswered_requests_and_the_number_of_findings(tmp_path, capsys):
    """A group that looks for its first coordinator has not lost one."""
    trouble = {
        "event": "coordinator_not_found",
        "group_id": "new-g",
        "time_ns": made.START_NS + 5 * NS,
        "error": "COORDINATOR_NOT_AVAILABLE",
    }
    place = outage(tmp_path / "tables", lambda table: table.add("group_events", 5, **trouble))
    asked = {"since": None, "until": None, "limit": None, "out": None, "quiet": True}
    with Tables(place) as tables:
        (lost,) = dicts(jobs.coordinators(*(tables[name] for name in jobs.JOBS["coordinators"].tables)))
        assert lost["group_id"] == "new-g" and lost["outage_ns"] is None
        show_overview("analyze", ["tables"], tables, shown="json", **asked)
        told = json.loads(capsys.readouterr().out)
        show_overview("analyze", ["tables"], tables, shown="table", **asked)
    assert [(row["api"], row["exchanges"], row["unanswered"]) for row in told["apis"]] == [("Produce", 1080, 10)]
    assert told["coordinators"] == []
    out = capsys.readouterr().out
    assert f"What stands out ({told['verdict']['findings']} finding" in out
    kinds = [
        "broker_standing_still",
        "records_lost",
        "records_given_up",
        "producers_standing_still",
        "resent_not_idempotent",
    ]
    assert told["verdict"]["not_found"] == kinds
    assert (
        "Checked, nothing found: a broker that stood still, acknowledged records lost, records that a producer gave up "
        "on, producers that stood still, retries without idempotence. No offset was acknowledged for two different "
        "batches, as after a loss."
    ) in " ".join(out.split())


def test_an_overview_computes_the_lags_of_groups_once(tmp_path, monkeypatch, capsys):
    asked = []

    def recorded(*frames):
        asked.append(frames)
        return group_lag_while_active(*frames)

    for module in (analysis_verdict, consuming):
        monkeypatch.setattr(module, "group_lag_while_active", recorded)
    given = {"since": None, "until": None, "limit": None, "out": None, "quiet": True}
    with Tables(outage(tmp_path / "tables")) as tables:
        show_overview("analyze", ["tables"], tables, shown="json", **given)
        told = json.loads(capsys.readouterr().out)
        alone = verdict(tables, findings(tables)).figures
    assert len(asked) == 3  # one by the overview, and two by a separate verdict and findings
    assert told["verdict"]["figures"]["behind_records"] == alone.behind_records


def test_a_timeline_lists_the_effects_on_users_in_order_of_time(tmp_path):
    with Tables(outage(tmp_path / "tables")) as tables:
        said = verdict(tables, findings(tables, limits({"unanswered_min": 5})))
    (gone,) = [one for one in said.findings if one.kind == "broker_gone"]
    lag = gone._replace(kind="growing_lag", where="group g", since_ns=made.START_NS, evidence=())
    advice = lag._replace(kind="no_compression")
    said = replace(said, findings=[gone, lag, advice, *[gone] * 9])
    events = timeline(said)
    times = [f"2026-01-01 00:00:{second}" for second in ("00.0", "18.9")]
    assert events[:2] == [(times[0], "group g: lag that grows"), (times[1], "broker 2 was gone for 999 ms to 13.1 s")]
    assert len(events) == EVENTS_SAID
    assert more_events(said) == 11 - EVENTS_SAID  # advice is not an event


def test_an_overview_shows_the_number_of_events_omitted_from_its_timeline(tmp_path, monkeypatch, capsys):
    def throttle(table):
        for number in range(100):
            for client in ("over", "over-too"):
                table.exchange(client, "Produce", number / 10, broker=1, throttle_ms=90)

    place = outage(tmp_path / "tables", throttle)
    asked = {"since": None, "until": None, "limit": None, "out": None, "quiet": True}
    monkeypatch.setattr("kproxy.views.verdict.EVENTS_SAID", 2)
    with Tables(place) as tables:
        events = len(verdict(tables, findings(tables)).felt)
        show_overview("analyze", ["tables"], tables, shown="table", **asked)
    assert events == 3
    assert "\nand 1 more: kproxy analyze findings tables\n" in capsys.readouterr().out


def test_a_cause_with_visible_symptoms_is_not_reported_as_not_found(tmp_path):
    """A capture that begins after a broker's end has failed connects, but no broker that stopped."""
    apis = ("Produce", "Metadata", "Heartbeat", "EndTxn")
    with Tables(outage(tmp_path / "tables")) as tables:
        said = verdict(tables, findings(tables))
    (gone,) = [one for one in said.findings if one.kind == "broker_gone"]
    of = {kind: replace(said, findings=[gone._replace(kind=kind, consequences=())]) for kind in KINDS}
    everything = set(of["no_compression"].not_found(apis))
    assert everything >= {"broker_gone", "coordinator_lost", "open_transaction"}
    for sign, kinds in (
        ("connects_failed", {"broker_gone", "coordinator_lost"}),
        ("under_replicated", {"broker_gone", "coordinator_lost"}),
        ("stuck_stable_offset", {"open_transaction"}),
    ):
        assert everything - set(of[sign].not_found(apis)) == kinds
    explained = replace(said, findings=[gone._replace(consequences=(gone._replace(kind="client_timeouts"),))])
    assert "broker_standing_still" in explained.not_found(apis)


def test_other_causes_are_named_by_their_titles(tmp_path):
    """Numbers as words, the most severe causes first, and a limited number of them."""
    with Tables(outage(tmp_path / "tables")) as tables:
        said = verdict(tables, findings(tables, limits({"unanswered_min": 5})))
    (gone,) = [one for one in said.findings if one.kind == "broker_gone"]
    kinds = ["broker_gone"] * 3 + ["growing_lag", "tls_failed", "growing_lag"]
    many = replace(said, findings=[gone._replace(kind=kind, severity="critical") for kind in kinds])
    assert "; and three more causes: lag that grows (2), TLS handshakes that fail." in sentence(many)
    more = [kind for kind in KINDS if kind != "no_broker_may_stop"][:8]
    many = replace(said, findings=[gone._replace(kind=kind, severity="critical") for kind in kinds[:3] + more])
    titles = ", ".join(f"{KINDS[kind].title[0].lower()}{KINDS[kind].title[1:]}" for kind in more[:6])
    titles = titles.replace("tLS", "TLS")
    assert sentence(many).endswith(f"; and eight more causes: {titles} and two more kinds.")
    one = replace(said, findings=[gone._replace(kind=kind, severity="critical") for kind in kinds[:4]])
    assert "; and one more cause: lag that grows." in sentence(one)


def test_partitions_without_a_commit_are_mentioned_next_to_the_lag(tmp_path):
    def also(table):
        for api, at_s in (("OffsetCommit", 1), ("Produce", 2)):
            key = table.exchange("reader", api, at_s, group_id="g" if api == "OffsetCommit" else None)
            if api == "OffsetCommit":
                table.partition(key, "request", "orders", 0, offset=5)
                table.partition(key, "response", "orders", 0, error_code=0)
            else:
                table.partition(key, "response", "orders", 0, error_code=0, offset=10, end_offset=30)
        key = table.exchange("reader", "Fetch", 3)
        fetched = {"error_code": 0, "high_watermark": 100, "lag_records": 60, "offset": 30}
        table.partition(key, "response", "orders", 1, **fetched)
        table.add("topology", 0, kind="topic", change="appeared", topic="orders", partitions=3)

    with Tables(outage(tmp_path / "tables", also)) as tables:
        said = verdict(tables, findings(tables))
    assert (said.figures.behind_records, said.figures.behind_uncommitted) == (25, 2)
    told = {name: (figure, of) for name, figure, of in figures(said)}
    assert told["behind"] == (
        "25 records",
        "group g; 60 more in 1 partition without a commit, by its last fetches; 1 partition without a commit or fetch "
        "not counted",
    )


def test_the_verdict_of_healthy_traffic_mentions_no_failure(tmp_path):
    table = made.Made()
    for number in range(50):
        table.exchange("writer", "Produce", number, acks=-1)
    with Tables(table.write(tmp_path / "tables")) as tables:
        said = verdict(tables, findings(tables))
    assert sentence(said) == "Nothing failed; nothing stands out."
    assert [figure for _, figure, _ in figures(said)] == ["0 of 50 requests", "nobody", "2.00 ms", "nobody"]


def test_a_comparison_begins_with_the_api_that_fails_more_often(tmp_path):
    """A third of the other's Heartbeats fail, half of these without a response; its Produce is only slower.

    A Heartbeat in flight a second before the end of either capture has not failed.
    """
    sides = []
    for name, failing in (("one", False), ("other", True)):
        table = made.Made()
        for number in range(60):
            lost = {"outcome": "unanswered", "latency_ns": None} if failing and number % 6 == 0 else {}
            refused = {"errors": 1} if failing and number % 6 == 3 else {}
            table.exchange("app", "Heartbeat", number, **lost, **refused)
            table.exchange("app", "Produce", number, latency_ns=(50 if failing else 2) * made.MS)
        table.exchange("app", "Heartbeat", 69, outcome="unanswered", latency_ns=None)
        table.exchange("app", "Produce", 70)
        sides.append(table.write(tmp_path / name))
    with Tables(sides[0], [sides[1]]) as tables:
        answer = jobs.compare(tables["exchanges"], tables.beside(sides[1], "exchanges")).arrow().to_pylist()
    assert [row["api"] for row in answer] == ["Heartbeat", "Produce"]
    worse, slower = answer
    shares = [worse[name] for name in ("error_share", "b_error_share", "unanswered_share", "b_unanswered_share")]
    assert shares == [0, 10 / 61, 0, 10 / 61] and slower["p99_change"] == 25


def test_a_verdict_says_how_much_is_encrypted(tmp_path):
    """The capture has two readable connections and two with TLS; the handshake of one of these failed."""
    table = made.Made()
    for number in range(100):
        table.exchange("writer", "Produce", number / 10, acks=-1)
    for number, tls, requests, failure in (
        (0, "plain", 100, None),
        (1, "tls", 0, None),
        (2, "tls", 0, "unknown_ca by client"),
        (3, "tls_decrypted", 5, None),
    ):
        row = {"connection": number, "tls": tls, "requests": requests, "tls_failure": failure}
        table.add("connections", 0, **row, start_ns=made.START_NS, close="open")
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = verdict(tables, [])
    assert sentence(answer) == (
        "No readable request failed; nothing stands out. 1 of 4 connections is encrypted with TLS: what happened in "
        "it is not known."
    )
