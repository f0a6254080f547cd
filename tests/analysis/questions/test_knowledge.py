"""The jobs of groups, leaders and changes on a captured cluster agree with the logs of its brokers and tools."""

import gzip
import json
import re
from collections import Counter

import pytest

from kproxy.analysis import engine, jobs
from kproxy.analysis.duck import Tables
from kproxy.analysis.lags import TABLES as OF_LAG
from kproxy.analysis.questions import sections
from kproxy.convert.processes import convert
from tests import captures
from tests.analysis.findings import made
from tests.insight.truth import CAPTURE, DATA, generations

NEAR_S = 0.3
OF_COORDINATORS = jobs.JOBS["coordinators"].tables
EVENTS = [json.loads(line) for line in (DATA / "k41_groups_a.events.jsonl").read_text().splitlines()]


def happened(what):
    return next(each for each in EVENTS if each["what"] == what)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    place = tmp_path_factory.mktemp("groups")
    convert([CAPTURE], place)
    with Tables(place) as found:
        yield found


@pytest.fixture
def answer(tables):
    def ask(job, **options):
        known = jobs.JOBS[job]
        frame = known.run(*(tables[name] for name in known.tables), **options)
        names = [column.name for column in engine.columns(frame)]
        return [dict(zip(names, row, strict=True)) for row in engine.rows(frame)]

    return ask


def test_every_generation_in_the_coordinators_logs_is_a_rebalance(answer):
    found = {(row["group_id"], row["generation"]): row for row in answer("rebalances") if row["protocol"] == "classic"}
    assert found.keys() == generations().keys()
    for key, logged in generations().items():
        row = found[key]
        assert row["took_ns"] / 1e9 == pytest.approx(logged.assigned - logged.prepared, abs=NEAR_S)
        assert row["forming_ns"] + row["assigning_ns"] == row["took_ns"]
        assert row["members_after"] == logged.members
    for (group, number), row in found.items():
        if row["rejoined"]:
            assert 0 <= row["longest_pause_ns"] < 10e9, (group, number)
    assert found["range-g", 8]["longest_pause_ns"] > 5e9  # the coordinator was down
    waited = found["range-g", 3]
    assert waited["waited_ns"] > 0 and waited["last_to_join"]


def test_groups_has_the_totals_of_each_group(answer):
    found = {row["group_id"]: row for row in answer("groups")}
    logged = Counter(group for group, _ in generations())
    assert {name: row["rebalances"] for name, row in found.items() if name != "new-g"} == logged
    assert (found["new-g"]["protocol"], found["new-g"]["rebalances"]) == ("consumer", 5)
    assert found["range-g"]["expired"] == 4 and found["static-g"]["replaced"] == 3
    assert found["range-g"]["strategy"] == "range" and found["range-g"]["coordinator_id"] == 2
    assert not any(row["wrong_assignments"] for row in found.values())


def test_the_generation_of_a_group_is_its_last_one(tables):
    """A group that was removed and recreated begins at 1."""
    later = {"generation": "1", "joined_ns": "joined_ns + 1000000000000", "members_after": "7"}
    names = [column.name for column in engine.columns(tables["rebalances"])]
    again = ", ".join(f"{later.get(name, name)} as {name}" for name in names)
    rebalances = engine.ask(
        {"known": tables["rebalances"]},
        answer=f"select * from known union all select {again} from known where group_id = 'rr-g' and generation = 2",
    )
    frame = jobs.JOBS["groups"].run(tables["group_events"], rebalances)
    names = [column.name for column in engine.columns(frame)]
    found = {row["group_id"]: row for row in (dict(zip(names, row, strict=True)) for row in engine.rows(frame))}
    assert (found["rr-g"]["generation"], found["rr-g"]["members"]) == (1, 7)


def test_the_outage_of_a_killed_coordinator_has_its_phases(answer):
    killed = happened("broker_kill")["time"]
    found = answer("coordinators")
    assert_phases_fit(found)
    for name in ("coop-g", "rr-g"):  # the groups of this coordinator
        (row,) = [row for row in found if row["group_id"] == name and row["outage_ns"] and row["outage_ns"] > 2e9]
        assert (row["coordinator_id"], row["moved"]) == (2, True)
        assert -1 < row["time"] / 1e6 - killed < 0.5
        stable = min(
            each.assigned for (group, _), each in generations().items() if group == name and each.assigned > killed
        )
        assert row["time"] / 1e6 + row["outage_ns"] / 1e9 == pytest.approx(stable, abs=3.5)
        assert row["silent_ns"] >= 0 and row["joining_ns"] > 0


def assert_phases_fit(found):
    """No phase is negative, and their sum is at most the whole outage."""
    for row in found:
        phases = [row[name] or 0 for name in ("silent_ns", "searching_ns", "loading_ns", "joining_ns")]
        assert min(phases) >= 0, row
        assert row["outage_ns"] is None or sum(phases) <= row["outage_ns"], row
        assert row["silent_ns"] is not None or row["outage_ns"] is None, row


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    ["k41_java_cluster", "k39_zk_cluster", "k111_java_cluster", "k0822_java_cluster", "k41_kip848_share", "k41_quota"],
)
def test_phases_of_an_outage_fit_into_it(tmp_path, name):
    convert([captures.capture(name)], tmp_path / "tables")
    with Tables(tmp_path / "tables") as found:
        assert_phases_fit(asked_of(jobs.coordinators(*(found[name] for name in OF_COORDINATORS))))


def lost_twice(place):
    """Coordinator 3 stops serving `g` at 20 s: `g` moves to 1, and members join. Coordinator 1 pauses at 50 s.

    Otherwise members get a good response each half second. A request at 22 s is unanswered, and the loss at 50 s is
    visible only in the refusal at 55 s. From 400 s to 700 s the group has no members.
    """
    table = made.Made()
    at = lambda second: made.START_NS + round(second * 1000) * made.MS  # noqa: E731
    away = [(20, 28.5), (50, 57), (400, 702)]
    for number in range(4, 1440):
        second = number / 2
        if any(begin < second < end for begin, end in away):
            continue
        row = {"group_id": "g", "request_start_ns": at(second), "response_end_ns": at(second + 0.01)}
        api = "Heartbeat" if number % 2 else "OffsetCommit"
        table.exchange("app", api, second, broker=3 if second <= 20 else 1, **row)
    lost = {"group_id": "g", "request_start_ns": at(22), "outcome": "unanswered"}
    table.exchange("app", "Heartbeat", 22, broker=3, **lost)
    refused = {"group_id": "g", "request_start_ns": at(700), "response_end_ns": at(700.25), "errors": 1}
    table.exchange("app", "Heartbeat", 700, **refused)
    for second, event, error, node in (
        *[(1.0, "join_answered", "COORDINATOR_LOAD_IN_PROGRESS", 3), (1.5, "coordinator_found", None, 3)],
        *[(25, "commit_failed", "NOT_COORDINATOR", 3), (25.25, "commit_failed", "NOT_COORDINATOR", 3)],
        *[(26, "coordinator_moved", None, 1), (26, "coordinator_found", None, 1)],
        *[(27, "join_answered", "COORDINATOR_LOAD_IN_PROGRESS", 1)],
        *[(27.5, "join_answered", "COORDINATOR_LOAD_IN_PROGRESS", 1)],
        *[(55, "heartbeat_failed", "COORDINATOR_NOT_AVAILABLE", 1), (55.5, "coordinator_found", None, 1)],
        *[(700.25, "heartbeat_failed", "NOT_COORDINATOR", 1)],
    ):
        row = {"group_id": "g", "event": event, "error": error, "coordinator_id": node, "time_ns": at(second)}
        table.add("group_events", second, **row)
    row = {"group_id": "g", "protocol": "classic", "generation": 2, "coordinator_id": 1}
    table.add("rebalances", 29, **row, started_ns=at(29), joined_ns=at(38), ended_ns=at(39))
    return table.write(place)


def test_an_outage_ends_with_a_good_response_and_includes_the_join(tmp_path):
    """Two losses half a minute apart are two outages; the second has no move; absent members have no outage."""
    with Tables(lost_twice(tmp_path / "tables")) as tables:
        found = asked_of(jobs.coordinators(*(tables[name] for name in OF_COORDINATORS)))
    assert_phases_fit(found)
    start_us = made.START_NS // 1000
    names = ("outage_ns", "silent_ns", "searching_ns", "loading_ns", "joining_ns", "refusals", "former_id")
    outages = {
        round((row["time"] - start_us) / 1e6, 3): (*(row[name] for name in names), row["coordinator_id"], row["moved"])
        for row in found
    }
    s = 10**9
    assert outages == {
        22.0: (17 * s, 3 * s, s, s // 2, 10 * s, 4, 3, 1, True),
        55.0: (2_010_000_000, 0, s // 2, None, None, 1, 1, 1, False),
        700.25: (None, None, None, None, None, 1, None, 1, None),
        1.0: (None, None, s // 2, 0, None, 1, None, 3, None),
    }


@pytest.mark.parametrize(
    ("good", "asked_s", "outages"),
    [
        (("Heartbeat", 26.1), 26.0, {22.0: 17.0}),  # to one member, between refusals to others
        (("Heartbeat", 24.9), 21.9, {22.0: 17.0}),  # from a broker that still serves, before its first refusal
        (("Heartbeat", 24.9), 24.8, {25.0: 14.0}),
        (("OffsetCommit", 26.1), 26.0, {22.0: 4.1, 26.2: 12.8}),
    ],
)
def test_an_outage_lasts_until_members_can_work_again(tmp_path, good, asked_s, outages):
    """A request at 22 s is unanswered; refusals follow at 25, 26 and 27 s; members have partitions again at 39 s."""
    table = made.Made()
    at = lambda second: made.START_NS + round(second * 1000) * made.MS  # noqa: E731
    api, good_s = good
    for name, begin_s, end_s in (
        *(("Heartbeat", second, second + 0.01) for second in (18, 20, 38.99, 42)),
        (api, asked_s, good_s),
    ):
        row = {"group_id": "g", "request_start_ns": at(begin_s), "response_end_ns": at(end_s)}
        table.exchange("app", name, begin_s, broker=3, **row)
    lost = {"group_id": "g", "request_start_ns": at(22), "outcome": "unanswered"}
    table.exchange("app", "Heartbeat", 22, broker=3, **lost)
    for second in (25, 26, 26.2, 27):
        row = {"group_id": "g", "event": "commit_failed", "error": "NOT_COORDINATOR", "coordinator_id": 3}
        table.add("group_events", second, **row, time_ns=at(second))
    row = {"group_id": "g", "protocol": "classic", "generation": 2, "coordinator_id": 1}
    table.add("rebalances", 28, **row, started_ns=at(28), joined_ns=at(38), ended_ns=at(39))
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = asked_of(jobs.coordinators(*(tables[name] for name in OF_COORDINATORS)))
    durations = {(row["time"] - made.START_NS // 1000) / 1e6: row["outage_ns"] / 1e9 for row in found}
    assert durations == pytest.approx(outages)


def test_rebalances_that_follow_a_lost_coordinator_are_marked(answer):
    """The log of the new coordinator only reports that members joined."""
    killed = happened("broker_kill")["time"]
    marked = {
        (row["group_id"], row["cause"]): row["time"] / 1e6 - killed
        for row in answer("rebalances")
        if row["coordinator_lost"]
    }
    assert marked.keys() >= {("coop-g", "member_joined"), ("rr-g", "member_joined")}
    assert all(0 < after_s < 15 for after_s in marked.values()), marked


def test_the_first_observed_generation_is_marked_too(tables):
    """The previous generation may be from before the capture."""
    first = "select * from rebalances where generation > 1 and group_id in ('coop-g', 'rr-g')"
    first += " qualify row_number() over (partition by group_id order by joined_ns desc) = 1"
    for before_ns, marked in ((5 * 10**9, {True}), (60 * 10**9, {False})):
        asked = {name: tables[name] for name in ("rebalances", "group_events", "exchanges")}
        asked["rebalances"] = engine.ask({"rebalances": tables["rebalances"]}, first=first)
        lost = f"select e.* replace ('NOT_COORDINATOR' as error, r.started_ns - {before_ns} as time_ns)"
        lost += " from group_events e join rebalances r on e.group_id = r.group_id"
        whole = {"group_events": tables["group_events"], "rebalances": asked["rebalances"]}
        asked["group_events"] = engine.ask(whole, lost=lost)
        found = asked_of(jobs.rebalances(**asked))
        assert len(found) == 2 and {row["coordinator_lost"] for row in found} == marked


def test_an_overview_has_groups_and_leaders_and_suggests_further_questions(tables):
    found = {
        name: [dict(zip(frame.columns, row, strict=True)) for row in engine.rows(frame)]
        for name, (frame, _) in sections.overview(tables).items()
    }
    assert {row["group_id"] for row in found["coordinators"]} >= {"coop-g", "rr-g"}
    assert {row["group_id"]: row["rebalances"] for row in found["groups"]}["range-g"] == 9
    assert sum(row["elections"] for row in found["leaders"]) >= 6 and not found["zookeeper"]
    asked = [line.split()[2] for line in sections.next_questions("analyze", ["tables"], found, tables)]
    assert {"groups", "rebalances", "coordinators", "leadership", "group-lag"} < set(asked) and "registry" not in asked


def test_leaders_of_the_killed_broker_moved(answer):
    found = answer("leadership")
    assert sum(row["elections"] for row in found) >= 6
    assert all(row["leader"] is not None for row in found)
    assert any(row["shrunk"] for row in found)


def test_topology_has_the_killed_broker_and_the_topic_with_new_partitions(answer):
    found = answer("topology")
    broker = [(row["change"], row["time"] / 1e6) for row in found if row["broker_id"] == 3]
    assert [change for change, _ in broker] == ["appeared", "gone", "appeared"]
    assert happened("broker_kill")["time"] < broker[1][1] < happened("broker_start")["time"] < broker[2][1]
    (grown,) = [row for row in found if row["change"] == "grown"]
    assert (grown["topic"], grown["partitions"]) == ("clicks-21e2", 6)


def test_changes_have_their_outcome(tmp_path):
    convert([captures.capture("k41_java_cluster")], tmp_path / "tables")
    with Tables(tmp_path / "tables") as tables:
        frame = jobs.changes(tables["changes"])
        names = [column.name for column in engine.columns(frame)]
        found = [dict(zip(names, row, strict=True)) for row in engine.rows(frame)]
    outcomes = {(row["api"], row["resource_name"]): row["outcome"] for row in found}
    assert outcomes["CreatePartitions", "adm-alpha"] == "done"
    assert outcomes["CreatePartitions", "nope"] == "UNKNOWN_TOPIC_OR_PARTITION"
    principals = {row["principal"] for row in found if row["api"] == "CreateTopics"}
    assert principals == {None, "User:ANONYMOUS"}  # sent by the client, and forwarded by its broker


def test_assignments_agree_and_no_partition_is_shared(answer):
    found = answer("assignments")
    assert {row["strategy"] for row in found} == {"range", "roundrobin", "cooperative-sticky", "uniform", None}
    assert all(row["agrees"] is not False for row in found)
    assert not any(row["shared"] for row in found)
    of_range = Counter(row["generation"] for row in found if row["group_id"] == "range-g")
    assert of_range[9] == 2  # one member, two topics


def test_generations_of_groups_in_zookeeper_are_separate_for_each_source(tables):
    """Each source counts them from the start. Groups of brokers have the same generations in all sources."""
    given = "select * replace ('{}' as source, '{}' as group_type, 'm{}' as member_id) from assignments"
    given += " where `partition` = 0"
    for kind, shared in (("zookeeper", {0}), ("consumer", {1})):
        both = " union all ".join(given.format(f"{number}.pcap", kind, number) for number in (1, 2))
        twice = engine.ask({"assignments": tables["assignments"]}, both=both)
        assert {row["shared"] for row in asked_of(jobs.assignments(twice))} == shared


def asked_of(frame):
    names = [column.name for column in engine.columns(frame)]
    return [dict(zip(names, row, strict=True)) for row in engine.rows(frame)]


RUNS_OF_THE_TOOL = [
    run
    for line in gzip.decompress((DATA / "k41_groups_a.describe.jsonl.gz").read_bytes()).splitlines()
    if (run := json.loads(line))["how"] == "--offsets"
]
COMMITTING = ("OffsetCommit", "Produce", "Fetch")  # requests of clients and brokers; the tool requests offsets


def lag_by_the_tool(run):
    """(committed offset, log end offset, lag) by group, topic and partition, from the tool's output."""
    rows = re.findall(r"^(\S+-g)\s+(\S+)\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", run["text"], re.MULTILINE)
    return {(group, topic, int(partition)): tuple(map(int, offsets)) for group, topic, partition, *offsets in rows}


def lag_until(tables, at_s, apis=None):
    """The same from kproxy, of the traffic until a moment."""
    chosen = f" and api in {apis}" if apis else ""
    until = f"select * from t where unix_micros(`time`) <= {int(at_s * 1e6)}"
    frames = (
        engine.ask({"t": tables[name]}, answer=until + (chosen if name == "partitions" else "")) for name in OF_LAG
    )
    return {
        (row["group_id"], row["topic"], row["partition"]): (
            row["committed_offset"],
            row["end_offset"],
            row["lag_records"],
        )
        for row in asked_of(jobs.group_lag(*frames))
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", (4, 1))
def test_group_lag_agrees_with_kafkas_tool(tables, every):
    """Exactly for all groups and partitions at the end, when all members had left, also without the tool's requests.

    Earlier, the tool's figures are between those before and after its run.
    """
    *others, last = RUNS_OF_THE_TOOL
    printed = lag_by_the_tool(last)
    assert len(printed) == 37
    assert lag_until(tables, last["to"]) == printed
    assert lag_until(tables, last["to"], COMMITTING) == printed
    for run in others[::every]:
        before, after = (lag_until(tables, run[at], COMMITTING) for at in ("from", "to"))
        printed = lag_by_the_tool(run)
        assert printed and set(printed) <= set(after)
        for place, (committed, end, _) in printed.items():
            earlier = before.get(place, (0, 0, 0))
            assert earlier[0] <= committed <= after[place][0] and earlier[1] <= end <= after[place][1], (place, run)


def test_a_frozen_member_that_continues_fetches_partitions_of_another_member(answer):
    """Its session expired meanwhile: until it learns that it is no longer a member, both fetch its partitions."""
    found = answer("split-brain")
    assert {(row["group_id"], row["one"], row["other"]) for row in found} == {("range-g", "r0", "r3")}
    assert all(happened("thaw")["time"] - NEAR_S < row["time"] / 1e6 < happened("thaw")["time"] + 3 for row in found)


def test_a_client_in_two_groups_is_no_split_brain(tables):
    """Its fetches cannot be attributed to either: two groups of one application may assign partitions differently."""
    twin = "select * replace ('twin' as group_id) from group_events where group_id = 'range-g'"
    events = engine.ask({"group_events": tables["group_events"]}, both=f"select * from group_events union all {twin}")
    frames = (tables["partitions"], tables["exchanges"], events, tables["assignments"])
    assert list(engine.rows(jobs.split_brain(*frames))) == []


def test_transactions_have_the_request_that_ended_them_or_their_timeout(tmp_path):
    """Transactions of one id: committed, aborted by the next InitProducerId, and open; a refused EndTxn ends none."""
    table = made.Made()

    def wrote(at_s, partition, offset, error=0):
        key = table.exchange("app", "Produce", at_s, transactional_id="tx")
        table.partition(key, "request", "orders", partition)
        table.partition(key, "response", "orders", partition, offset=offset, error_code=error)

    def started(at_s, timeout_ms):
        table.exchange("app", "InitProducerId", at_s, transactional_id="tx")
        at_ns = made.START_NS + at_s * 10**9
        of = {"transactional_id": "tx", "state": "Empty", "timeout_ms": timeout_ms, "producer_id": 7}
        table.add("transactions", at_s, time_ns=at_ns, **of)

    started(0, 60_000)
    wrote(1, 0, 10)
    wrote(2, 1, 20)
    table.exchange("app", "EndTxn", 3, transactional_id="tx", errors=1, error="CONCURRENT_TRANSACTIONS")
    table.exchange("app", "EndTxn", 4, transactional_id="tx")
    wrote(5, 0, 11)
    started(9, 600_000)
    key = table.exchange("app", "AddPartitionsToTxn", 10, transactional_id="tx")
    table.partition(key, "request", "orders", 2)
    wrote(11, 1, -1, error=7)
    wrote(12, 1, 30)
    table.exchange("other", "Heartbeat", 40)
    with Tables(table.write(tmp_path / "tables")) as tables:
        asked = jobs.JOBS["transactions"]
        found = jobs.transactions(*(tables[name] for name in asked.tables)).arrow().to_pylist()
    names = ("ended_by", "open_ns", "timeout_ms", "requests", "partitions", "start_offsets", "client", "producer_id")
    assert [tuple(row[name] for name in names) for row in found] == [
        (None, 30 * 10**9, 600_000, 3, 2, "orders-1: 30", "app", 7),
        ("InitProducerId", 4 * 10**9, 600_000, 1, 1, "orders-0: 11", "app", 7),
        ("EndTxn", 3 * 10**9, 60_000, 2, 2, "orders-0: 10, orders-1: 20", "app", 7),
    ]


def test_a_broker_with_several_listeners_is_one_row_of_an_overview(tmp_path):
    table = made.Made()
    for at_s, port, broker in ((1, 9092, 1), (2, 9092, 1), (3, 9093, 1), (4, 9092, 2)):
        table.exchange("app", "Metadata", at_s, broker=broker, broker_port=port)
    table.exchange("app", "Metadata", 5, broker=3, broker_id=None)
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = sections.overview(tables)["brokers"][0].arrow().to_pylist()
    assert [(row["broker_id"], row["broker"], row["listeners"], row["exchanges"]) for row in found] == [
        (1, "10.0.1.1:9092", "10.0.1.1:9092, 10.0.1.1:9093", 3),
        (2, "10.0.1.2:9092", "10.0.1.2:9092", 1),
        (None, "10.0.1.3:9092", "10.0.1.3:9092", 1),
    ]
