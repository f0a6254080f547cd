"""Consumer lag: of a real consumer that prefetches, and of groups whose lag grows and shrinks."""

from datetime import timedelta
from pathlib import Path

import pytest

import kproxy.spark
from kproxy.analysis import engine, jobs
from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import PROBES, findings, limits
from kproxy.analysis.lags import TABLES as OF_LAG
from kproxy.analysis.lags import ends
from kproxy.analysis.lags.brought import TABLES as OF_FETCHES
from kproxy.analysis.lags.followers import NO_LEADER
from kproxy.analysis.lags.groups import NO_END, NO_OUTCOME
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.tables.schema import CHANGES, COMMITTED_OFFSETS, EXCHANGES, GROUP_EVENTS, PARTITIONS, TOPOLOGY
from kproxy.views.findings import sentence
from tests.analysis.lagging import EARLIEST, LATEST, Traffic
from tests.analysis.test_jobs import START, exchange, frame  # noqa: F401 - the fixture

CAPTURE = Path(__file__).parents[1] / "data" / "incidents" / "k41_lag_prefetch.pcap.zst"
S = 10**9


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    place = tmp_path_factory.mktemp("prefetching")
    convert([CAPTURE], place)
    with Tables(place) as tables:
        yield tables


def dicts(answer):
    names = [column.name for column in engine.columns(answer)]
    return [dict(zip(names, row, strict=True)) for row in engine.rows(answer)]


def test_the_lag_of_a_prefetching_group_follows_its_commits(tables):
    """Kafka's tool printed 35,758 records ten seconds before the end of the capture; 450 per second were written."""
    found = dicts(jobs.group_lag(*(tables[name] for name in OF_LAG)))
    assert [row["group_id"] for row in found] == ["g-slow"] * 3
    assert 35_000 < sum(row["lag_records"] for row in found) < 42_000
    for row in found:
        assert row["growing"] and row["growth_per_s"] > 100 and row["catch_up_ns"] is None
        assert row["client"] == "slow-cons" and row["committed_offset"] < 2000 < row["fetched_offset"]
        assert row["fetch_lag_records"] == row["end_offset"] - row["fetched_offset"] < row["lag_records"]
        assert 25 * S < row["behind_ns"] < 90 * S


def test_lag_by_fetches_also_has_the_lag_by_commits(tables):
    found = dicts(jobs.lag(*(tables[name] for name in OF_LAG)))
    assert [row["last_lag_records"] for row in found] == [0, 0, 0]  # by the consumer's own fetches
    assert all(row["committed_lag_records"] > 13_000 for row in found)
    assert all(row["growing"] for row in found)


def test_the_lag_by_commits_is_a_finding(tables):
    (found,) = (one for one in findings(tables) if one.kind == "growing_lag")
    assert found.where == "group g-slow, topic lagt"
    assert dict(found.evidence)["last_lag_records"] > 35_000


def test_a_shrinking_lag_has_the_time_until_it_is_gone(frame):  # noqa: F811
    """1,000 records at first; 100 written and 150 committed per second."""

    def row(number, at_s, api, direction, **columns):
        own = {"source": "a.pcap", "connection": 1, "topic": "t", "partition": 0, "cluster": "east"}
        at = {"number": number, "time": START + timedelta(seconds=at_s), "api": api, "direction": direction}
        return {name: value for name, value in (own | at | columns).items() if value is not None}

    log = [row(n, n, "ListOffsets", "response", error_code=0, end_offset=5000 + 100 * n) for n in range(16)]
    commits = [row(100 + n, n + 0.5, "OffsetCommit", "request", offset=4000 + 150 * n) for n in range(16)]
    commits += [row(100 + n, n + 0.5, "OffsetCommit", "response", error_code=0) for n in range(16)]
    talk = [exchange(100 + n, n, api="OffsetCommit", group_id="g") for n in range(16)]
    pending = row(0, 0, None, None, group_id="g", offset=1, change="pending")
    nothing = [frame(table, [{}]) for table in (GROUP_EVENTS, CHANGES, TOPOLOGY)]
    inputs = frame(PARTITIONS, log + commits), frame(EXCHANGES, talk), frame(COMMITTED_OFFSETS, [pending]), *nothing
    (found,) = dicts(jobs.group_lag(*inputs))
    assert (found["first_lag_records"], found["lag_records"], found["max_lag_records"]) == (950, 250, 950)
    assert found["growth_per_s"] == pytest.approx(-50, rel=0.1) and not found["growing"]
    assert found["catch_up_ns"] == pytest.approx(5 * S, rel=0.1)
    # The log ended at 6,200, at or before the offset 6,250, at second 12, and the tables end at second 15.
    assert found["behind_ns"] == 3 * S
    assert found["fetched_offset"] is None
    (found,) = dicts(
        jobs.group_lag(frame(PARTITIONS, log[-1:] + commits), *inputs[1:])
    )  # without the earlier ends, the time is unknown
    assert found["lag_records"] == 250 and found["behind_ns"] is None


def group_tables(frame):  # noqa: F811
    """Two of four partitions have commits, one of them from second 8 on; both log ends grow by 100 per second."""

    def row(number, at_s, api, direction, **columns):
        own = {"source": "a.pcap", "connection": 1, "topic": "t", "cluster": "east"}
        at = {"number": number, "time": START + timedelta(seconds=at_s), "api": api, "direction": direction}
        return own | at | columns

    parts = []
    for second in range(17):
        for partition in (0, 1):
            answered = {"partition": partition, "error_code": 0, "end_offset": 1000 + 100 * second}
            parts.append(row(second, second, "ListOffsets", "response", **answered))
    for second, partition in ((0, 0), (8, 1), (14, 0)):
        of = {"partition": partition}
        parts.append(row(100 + second, second + 0.1, "OffsetCommit", "request", offset=500, **of))
        parts.append(row(100 + second, second + 0.1, "OffsetCommit", "response", error_code=0, **of))
    parts.append(row(200, 1, "OffsetFetch", "response", offset=-1, group_id="g", partition=3, error_code=0))
    parts.append(row(201, 1, "Fetch", "response", error_code=3, partition=9))  # a partition that does not exist
    talk = [exchange(100 + second, second, api="OffsetCommit", group_id="g") for second in (0, 8, 14)]
    known = {"cluster": "east", "kind": "topic", "topic": "t", "partitions": 4, "time": START}
    nothing = [frame(table, [{}]) for table in (COMMITTED_OFFSETS, GROUP_EVENTS, CHANGES)]
    return frame(PARTITIONS, parts), frame(EXCHANGES, talk), *nothing, frame(TOPOLOGY, [known])


def test_the_lag_of_a_group_is_the_sum_over_its_partitions_at_one_moment(frame):  # noqa: F811
    """The lag of one partition is 500 at second 0, that of both is 2,100 at second 16; both are known from 8.1 on."""
    inputs = group_tables(frame)
    each = dicts(jobs.group_lag(*inputs))
    assert [(row["partition"], row["lag_records"], row["uncommitted_partitions"]) for row in each] == [
        (0, 2100, 2),
        (1, 2100, 2),
    ]
    # Partition 0: at the end of the first eighth, second 2. Partition 1: at the end of the fifth, second 10.
    assert [row["first_lag_records"] for row in each] == [700, 1500]
    assert [row["first_known"] for row in each] == [int(START.timestamp() + at_s) * 10**6 for at_s in (2, 10)]
    assert [(row["growth_per_s"], row["growing"]) for row in each] == [(100, True), (None, False)]
    (group,) = dicts(jobs.group_lag(*inputs, by=["group_id"]))
    assert (group["lag_records"], group["partitions"], group["uncommitted_partitions"]) == (4200, 2, 2)
    assert (group["first_lag_records"], group["unknown_partitions"]) == (3000, 0)  # both partitions at second 10
    assert group["first_known"] == int(START.timestamp() + 10) * 10**6
    assert group["growth_per_s"] is None  # growth is that of the second half, at whose start one partition was unknown
    (topic,) = dicts(jobs.group_lag(*inputs, by=["cluster", "group_id", "topic"]))
    assert (topic["topic"], topic["lag_records"]) == ("t", 4200)
    with pytest.raises(KproxyError, match="--by 'partition'"):
        jobs.group_lag(*inputs, by=["partition"])


def test_time_steps_of_a_group_sum_its_partitions(frame):  # noqa: F811
    """A partition counts in each step from its first commit on, also if the condition selects another partition."""
    inputs = group_tables(frame)
    steps = dicts(jobs.group_lag(*inputs, by=["group_id"], every="4 seconds"))
    names = ("lag_records", "partitions", "uncommitted_partitions")
    assert [tuple(row[name] for name in names) for row in steps] == [
        (800, 1, 3),
        (1200, 1, 3),
        (3200, 2, 2),
        (4000, 2, 2),
        (4200, 2, 2),
    ]
    chosen = dicts(jobs.group_lag(*inputs, every="4 seconds", where="(`partition` = 1)"))
    assert [(row["lag_records"], row["uncommitted_partitions"]) for row in chosen] == [(1600, 2), (2000, 2), (2100, 2)]


def test_a_refused_partition_has_no_commit(made_up):
    with Tables(made_up) as tables:
        found = {row["group_id"]: row for row in dicts(jobs.group_lag(*(tables[name] for name in OF_LAG)))}
    assert found["partly"]["uncommitted_partitions"] == 1
    assert found["produced"]["uncommitted_partitions"] == 0


def test_a_new_leader_whose_high_watermark_rises_again_has_not_truncated_its_log(tmp_path):
    """So the earlier lag counts for the trend. Late responses of the former leader prove nothing."""

    def elected(t):
        for name, told in (("raised", (50, 30, 60)), ("truncated", (50, 30, 40))):
            t.commit(name, name, 10)
            for end, epoch in zip(told, (3, 4, 4), strict=True):
                t.fetch(name, 10, end, epoch=epoch)
            t.fetch(name, 10, 55, epoch=3, client="late")

    with Tables(tables_of(elected, tmp_path)) as tables:
        needed = {name: tables[name] for name in ("partitions", "exchanges", "changes", "topology")}
        answer = "select topic, is_lost from turns"
        found = list(engine.rows(engine.ask(needed, told_ends=ends.TOLD_ENDS, **ends.turns(), answer=answer)))
    assert found == [("truncated", False)]


def scene(t):
    """Each rule of lag once, with a topic and a group of the same name."""
    # The log end offset.
    t.commit("produced", "produced", 10)
    t.produce("produced", 10, 5)
    t.commit("follower", "follower", 10)
    t.fetch("follower", 10, 40, broker=1)
    t.fetch("follower", 10, 10, rack="b", broker=2)
    t.commit("replicated", "replicated", 10)
    t.fetch("replicated", 30, 30, replica=2, client="broker-2-fetcher-0")
    t.commit("listed", "listed", 10)
    t.list_offsets("listed", LATEST, 20)
    t.list_offsets("listed", LATEST, 15, isolation=1)
    t.commit("no end", "no end", 10)
    t.list_offsets("no end", EARLIEST, 0)
    t.list_offsets("no end", LATEST, 10, isolation=1)
    t.commit("truncated", "truncated", 10)
    t.fetch("truncated", 10, 50, epoch=3)
    t.fetch("truncated", 10, 30, epoch=4)
    t.commit("former leader", "former leader", 10)
    t.fetch("former leader", 10, 50, epoch=3)
    t.fetch("former leader", 10, 30, epoch=4, broker=2)
    t.fetch("former leader", 10, 50, epoch=3, client="late")
    t.commit("elected", "elected", 10)
    t.fetch("elected", 10, 50, epoch=3)
    t.fetch("elected", 10, 30, epoch=4, rack="b", broker=2)  # from a follower
    # Commits.
    t.commit("partly", "partly", 10, 10, refused=(1,))
    t.produce("partly", 10, 3)
    t.commit("cut", "cut", 10)
    t.produce("cut", 10, 3)
    t.commit("cut", "cut", 13, answered=False)
    t.produce("read", 10, 3)
    t.fetch_offset("read", "read", 12)
    t.commit("none", "none", 10)
    t.produce("none", 10, 3)
    t.fetch_offset("none", "none", -1)
    for name in ("tx-committed", "tx-aborted", "tx-refused", "tx-open"):
        t.commit(name, name, 10)
        t.produce(name, 10, 10)
        t.commit_in(name, name, name, 15)
    t.end("tx-committed", True)
    t.end("tx-aborted", False)
    t.end("tx-refused", True, error=51)
    t.commit_in("tx-only", "tx-only", "tx-only", 15)
    t.commit("minus one", "minus one", 10)
    t.produce("minus one", 10, 3)
    t.commit("minus one", "minus one", -1)
    t.produce("read late", 10, 3)
    t.fetch_offset("read late", "read late", 2, client="tool", meanwhile=lambda: t.commit("read late", "read late", 12))
    t.produce("tx-overtaken", 10, 10)
    t.commit_in("tx-overtaken", "tx-overtaken", "tx-overtaken", 11)
    t.commit_in("tx-overtaking", "tx-overtaken", "tx-overtaken", 14)
    t.fetch_offset("tx-overtaken", "tx-overtaken", -1)
    t.end("tx-overtaking", True)
    t.end("tx-overtaken", True)
    for name, delete in (
        ("tx-topic deleted", t.delete_topic),
        ("tx-group deleted", t.delete_group),
        ("tx-offset deleted", lambda name: t.delete_offset(name, name)),
    ):
        t.produce(name, 10, 10)
        t.commit_in(name, name, name, 11)
        delete(name)
        t.end(name, True)
    t.produce("tx-reset", 10, 10)
    t.commit_in("tx-reset", "tx-reset", "tx-reset", 11)
    t.commit("tx-reset", "tx-reset", 18)
    t.end("tx-reset", True)
    # Removal of commits.
    for name in ("offset deleted", "group deleted", "topic deleted", "kept", "offset again"):
        t.commit(name, name, 10)
        t.produce(name, 10, 3)
    t.delete_offset("offset deleted", "offset deleted")
    t.delete_group("group deleted")
    t.delete_topic("topic deleted")
    t.delete_offset("kept", "kept", error=86)
    t.delete_group("kept", error=68)
    t.delete_topic("kept", error=29)
    t.delete_offset("offset again", "offset again")
    t.commit("offset again", "offset again", 11)
    # A topic that is recreated.
    t.metadata("other id", 1)
    for name in ("other id", "other id idle", "starts again", "denied", "denied elsewhere"):
        t.commit(name, name, 100)
        t.fetch(name, 100, 1000)
    t.metadata("other id", 2)
    t.commit("other id", "other id", 5)
    t.fetch("other id", 5, 20)
    t.commit("recreated", "recreated", 1000)
    t.fetch("recreated", 1000, 1000)
    t.delete_topic("recreated")
    t.fetch("recreated", 0, 20)
    t.commit("recreated", "recreated", 20)
    t.fetch("starts again", 0, 0)
    t.produce("starts again", 0, 20)
    t.fetch("starts again", 20, 20)
    t.commit("starts again", "starts again", 15)
    t.fetch("denied", 100, -1, error=3)
    t.fetch("denied elsewhere", 100, -1, error=3, broker=2)


EXPECTED_LAGS = {  # group: committed offset, log end offset, lag
    "produced": (10, 15, 5),
    "follower": (10, 40, 30),
    "replicated": (10, 30, 20),
    "listed": (10, 20, 10),
    "no end": (10, None, None),
    "truncated": (10, 30, 20),
    "former leader": (10, 30, 20),
    "elected": (10, 50, 40),
    "partly": (10, 13, 3),
    "cut": (10, 13, 3),
    "read": (12, 13, 1),
    "tx-committed": (15, 20, 5),
    "tx-aborted": (10, 20, 10),
    "tx-refused": (10, 20, 10),
    "tx-open": (10, 20, 10),
    "tx-only": (None, None, None),
    "read late": (12, 13, 1),
    "tx-overtaken": (14, 20, 6),
    "tx-reset": (18, 20, 2),
    "kept": (10, 13, 3),
    "offset again": (11, 13, 2),
    "other id": (5, 20, 15),
    "other id idle": (100, 1000, 900),
    "recreated": (20, 20, 0),
    "starts again": (15, 20, 5),
    "denied elsewhere": (100, 1000, 900),
}
WHY_UNKNOWN = {"no end": NO_END, "tx-refused": NO_OUTCOME, "tx-open": NO_OUTCOME, "tx-only": NO_OUTCOME}


def tables_of(play, place):
    """The tables of a capture of synthetic traffic, in a folder of `place`."""
    traffic = Traffic()
    play(traffic)
    (place / "a.pcap").write_bytes(traffic.pcap())
    convert([place / "a.pcap"], place / "tables")
    return place / "tables"


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    return tables_of(scene, tmp_path_factory.mktemp("lagging"))


def test_offline_lag_follows_the_rules_of_live_lag(made_up):
    with Tables(made_up) as tables:
        found = dicts(jobs.group_lag(*(tables[name] for name in OF_LAG)))
        assert all(row["group_id"] == row["topic"] and row["partition"] == 0 for row in found)
        told = ("committed_offset", "end_offset", "lag_records")
        assert {row["group_id"]: tuple(row[name] for name in told) for row in found} == EXPECTED_LAGS
        assert {row["group_id"]: row["unknown"] for row in found if row["unknown"]} == WHY_UNKNOWN
        assert {row["group_id"]: row["commits"] for row in found if row["topic"] == "other id"} == {"other id": 1}


def test_the_lag_of_a_fetch_from_a_follower_is_relative_to_the_leaders_end(made_up):
    with Tables(made_up) as tables:
        found = dicts(jobs.lag(*(tables[name] for name in OF_LAG), where="client = 'c'"))
    behind = {row["topic"]: (row["last_lag_records"], row["committed_lag_records"]) for row in found}
    assert behind["follower"] == (30, 30) and behind["elected"] == (40, 40)
    assert behind["truncated"] == (20, 20) and behind["recreated"] == (20, 0)


def test_each_time_step_uses_the_log_of_its_time(made_up):
    with Tables(made_up) as tables:
        inputs = [tables[name] for name in OF_LAG]
        found = dicts(jobs.group_lag(*inputs, every="1 second", where="group_id = 'other id'"))
        assert [(row["committed_offset"], row["end_offset"], row["commits"]) for row in found] == [
            (100, None, 1),
            (100, 1000, 0),  # no commit in this step, but a log end offset
            (5, None, 1),  # in the recreated topic
            (5, 20, 0),
        ]
        found = dicts(jobs.group_lag(*inputs, every="1 hour", where="group_id in ('denied', 'truncated', 'other id')"))
        assert [(row["group_id"], row["committed_offset"], row["end_offset"]) for row in found] == [
            ("truncated", 10, 30),
            ("other id", 5, 20),
        ]


TOPICS_OF_STOPPED = ("stays", "deleted", "forgets", "resumes", "waits", "too late", "loses its log")


def stopped(t):
    """Groups that commit once, each with its own topic; every action takes a second."""
    for group in TOPICS_OF_STOPPED:
        t.commit(group, group, 10)
    for topic in TOPICS_OF_STOPPED:
        t.produce(topic, 10, 5)
    t.delete_group("deleted")
    t.delete_offset("forgets", "forgets")
    t.commit("resumes", "resumes", 15)
    t.delete_topic("loses its log")
    t.commit_in("x", "waits", "waits", 15)  # the capture has no end of its transaction
    t.commit_in("y", "too late", "too late", 15)
    t.delete_offset("too late", "too late")
    t.end("y", committed=True)
    t.fetch_offset("stays", "stays", 10)
    for topic in TOPICS_OF_STOPPED:
        t.produce(topic, 15, 5)


STEPS_OF_STOPPED = {  # committed offset, lag and commits by steps of a second
    "stays": [(10, None, 1), (10, 5, 0), (10, 5, 0), (10, 10, 0)],
    "deleted": [(10, None, 1), (10, 5, 0)],
    "forgets": [(10, None, 1), (10, 5, 0)],
    "resumes": [(10, None, 1), (10, 5, 0), (15, 0, 1), (15, 5, 0)],
    "waits": [(10, None, 1), (10, 5, 0), (10, 5, 0), (10, 10, 0)],
    "too late": [(10, None, 1), (10, 5, 0)],
    "loses its log": [(10, None, 1), (10, 5, 0)],
}


@pytest.fixture(scope="module")
def with_stopped(tmp_path_factory):
    return tables_of(stopped, tmp_path_factory.mktemp("stopped"))


def check_stopped(tables):
    """The lag of stopped groups grows with each record, until their commits or topics are removed."""
    found = dicts(jobs.group_lag(*(tables[name] for name in OF_LAG), every="1 second"))
    steps = {group: [] for group in STEPS_OF_STOPPED}
    for row in found:
        steps[row["group_id"]].append((row["committed_offset"], row["lag_records"], row["commits"]))
    assert steps == STEPS_OF_STOPPED
    assert {row["last_commit"] for row in found if row["group_id"] == "stays"} == {found[0]["last_commit"]}
    assert {row["unknown"] for row in found if row["group_id"] == "waits" and row["end_offset"]} == {None, NO_OUTCOME}


def test_time_steps_continue_after_a_group_has_stopped(with_stopped):
    with Tables(with_stopped) as tables:
        check_stopped(tables)


@pytest.mark.ring2
def test_time_steps_continue_after_a_group_has_stopped_on_spark(with_stopped, spark):
    check_stopped({name: kproxy.spark.table(spark, str(with_stopped), name) for name in OF_LAG})


def by_followers(t):
    """Consumers in a rack, each with its own topic; those of `growing` and `idle` run for a minute."""
    for number, topic in enumerate(("led", "denied", "elected", "growing", "idle"), 1):
        t.metadata(topic, number, brokers=(1, 2))

    def fetch(topic, at, end, broker):
        t.fetch(topic, at, end, rack="b", broker=broker, client=f"of {topic}")

    fetch("led", 20, 50, 1)  # from the leader
    fetch("led", 40, 45, 2)
    fetch("told", 60, 60, 2)
    t.produce("told", 90, 10)
    fetch("told", 60, 60, 2)
    fetch("alone", 60, 100, 2)
    fetch("denied", 60, 100, 2)
    t.list_offsets("ahead", LATEST, 40)
    fetch("ahead", 60, 70, 2)
    t.produce("again", 0, 1000)
    fetch("again", 900, 950, 2)
    t.delete_topic("again")
    fetch("again", 0, 20, 2)
    fetch("elected", 10, 50, 1)
    t.metadata("elected", 3, leader=2, brokers=(1, 2))
    t.produce("elected", 50, 30)
    fetch("elected", 50, 50, 1)
    for number in range(20):
        t.produce("growing", 100 * number, 100)
        fetch("growing", 10 * number, 10 * number, 2)
        fetch("idle", 10, 100 * number, 2)
        fetch("idle too", 10, 10, 2)


BEHIND = {  # topic: lag at the first and the last fetch; None: unknown
    "led": (30, 10),
    "told": (None, 40),
    "alone": (None, None),
    "denied": (None, None),
    "ahead": (10, 10),
    "again": (100, None),
    "elected": (40, 30),
    "growing": (100, 2000 - 190),
    "idle": (None, None),
    "idle too": (None, None),
}
# Tables of schema versions below 7 do not mark responses that may be from a follower.
BEHIND_BEFORE = BEHIND | {
    "led": (30, 10),
    "told": (0, 0),
    "alone": (40, 40),
    "again": (50, 20),
    "elected": (40, 0),
    "growing": (None, None),
    "idle too": (0, 0),
}


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    return tables_of(by_followers, tmp_path_factory.mktemp("followed"))


def without_ends(frames):
    """The tables as in schema versions below 7."""
    columns = [name for name in frames["partitions"].columns if name != "end_offset"]
    chosen = ", ".join(f"`{name}`" for name in columns)
    before = f"select {chosen}, cast(null as bigint) as end_offset from partitions"
    return {**frames, "partitions": engine.ask({"partitions": frames["partitions"]}, before=before)}


def lags_of_followers(frames):
    """By topic: the first and the last lag of `lag`, and the figures of `behind`."""
    theirs = "client like 'of %'"
    by_client = dicts(jobs.lag(*(frames[name] for name in OF_LAG), where=theirs))
    assert all((row["unknown"] == NO_LEADER) == (row["last_lag_records"] is None) for row in by_client)
    in_all = dicts(jobs.behind(*(frames[name] for name in OF_FETCHES), where=theirs))
    behind = {row["topic"]: (row["lag_records"], row["sum_lag_records"], row["unknown_partitions"]) for row in in_all}
    return {row["topic"]: (row["first_lag_records"], row["last_lag_records"]) for row in by_client}, behind


def check_followers(frames, truth):
    lags, behind = lags_of_followers(frames)
    assert lags == truth
    assert behind == {topic: (last, last, int(last is None)) for topic, (_, last) in truth.items()}


def test_the_lag_of_a_follower_fetch_is_relative_to_the_leaders_end_or_unknown(followed):
    with Tables(followed) as tables:
        check_followers({name: tables[name] for name in OF_LAG}, BEHIND)


def test_without_log_ends_high_watermarks_are_trusted_except_those_of_known_followers(followed):
    with Tables(followed) as tables:
        check_followers(without_ends({name: tables[name] for name in OF_LAG}), BEHIND_BEFORE)


def growing(frames):
    few = limits({"lag_records_min": 100})
    return {one.where for one in findings(frames, few) if one.kind == "growing_lag"}


def test_a_lag_grows_by_the_leaders_end_and_not_by_a_followers(followed):
    with Tables(followed) as tables:
        assert growing(tables) == {"client of growing, topic growing"}


def groups_of_followers(t):
    """Groups whose consumers read from a follower, each with its own topic; that of `falling` runs for a minute."""
    t.metadata("led", 1, brokers=(1, 2))
    for name in ("alone", "led", "told", "denied"):
        t.commit(name, name, 10)
    t.fetch("alone", 10, 100, rack="b", broker=2)
    t.fetch("led", 10, 50, rack="b", broker=1)  # from the leader
    t.fetch("told", 10, 60, rack="b", broker=2)
    t.produce("told", 90, 10)
    t.produce("again", 0, 1000)
    t.delete_topic("again")
    t.commit("again", "again", 5)
    t.fetch("again", 5, 20, rack="b", broker=2)
    for number in range(1, 21):
        t.fetch("falling", 10, 100 * number, rack="b", broker=2, client="of falling")
        t.commit("falling", "falling", 10)


GROUPS_BEHIND = {  # group: committed offset, log end offset, lag, lag at least, reason if it is unknown
    "alone": (10, None, None, 90, NO_LEADER),
    "led": (10, 50, 40, 40, None),
    "told": (10, 100, 90, 90, None),
    "denied": (10, None, None, None, NO_END),
    "again": (5, None, None, 15, NO_LEADER),
    "falling": (10, None, None, 1990, NO_LEADER),
}


@pytest.fixture(scope="module")
def followed_groups(tmp_path_factory):
    return tables_of(groups_of_followers, tmp_path_factory.mktemp("followed groups"))


def of_groups(found):
    columns = ("committed_offset", "end_offset", "lag_records", "least_lag_records", "unknown")
    return {row["group_id"]: tuple(row[name] for name in columns) for row in found}


def test_the_lag_of_a_group_is_relative_to_a_leaders_end_or_a_lower_bound(followed_groups):
    with Tables(followed_groups) as tables:
        inputs = [tables[name] for name in OF_LAG]
        found = dicts(jobs.group_lag(*inputs))
        assert of_groups(found) == GROUPS_BEHIND
        assert of_groups(dicts(jobs.group_lag(*inputs, every="1 hour"))) == GROUPS_BEHIND
    assert all(row["catch_up_ns"] is row["behind_ns"] is None for row in found if row["lag_records"] is None)


def test_without_log_ends_groups_have_a_lag_except_by_known_followers(followed_groups):
    told_by_high_watermarks = {
        "alone": (10, 100, 90, 90, None),
        "told": (10, 60, 50, 50, None),
        "again": (5, 20, 15, 15, None),
        "falling": (10, 2000, 1990, 1990, None),
    }
    with Tables(followed_groups) as tables:
        frames = without_ends({name: tables[name] for name in OF_LAG})
        found = of_groups(dicts(jobs.group_lag(*(frames[name] for name in OF_LAG))))
    assert found == GROUPS_BEHIND | told_by_high_watermarks


def test_an_unknown_lag_grows_by_its_lower_bound(followed_groups):
    few = limits({"lag_records_min": 100, "lag_span_s": 10})
    with Tables(followed_groups) as tables:
        (found,) = (one for one in findings(tables, few) if one.kind == "growing_lag")
    assert found.where == "group falling, topic falling"
    evidence = dict(found.evidence)
    assert (evidence["last_lag_records"], evidence["unknown_partitions"]) == (1990, 1)
    assert sentence(found).endswith(f" at least: it is not known of 1 of its partitions, since {NO_LEADER}")


@pytest.mark.ring2
def test_lag_of_groups_that_read_from_followers_is_the_same_on_spark(followed_groups, spark):
    frames = [kproxy.spark.table(spark, str(followed_groups), name) for name in OF_LAG]
    assert of_groups(dicts(jobs.group_lag(*frames))) == GROUPS_BEHIND


@pytest.mark.ring2
def test_lag_of_follower_fetches_is_the_same_on_spark(followed, spark):
    frames = {name: kproxy.spark.table(spark, str(followed), name) for name in OF_LAG}
    check_followers(frames, BEHIND)
    check_followers(without_ends(frames), BEHIND_BEFORE)
    (probe,) = (probe for probe in PROBES if probe.kinds == ("growing_lag",) and "group_events" not in probe.tables)
    with Tables(followed) as tables:
        mine, theirs = (
            list(engine.rows(probe.ask(each, limits({"lag_records_min": 100})))) for each in (tables, frames)
        )
    assert mine and mine == theirs


@pytest.mark.ring2
def test_lag_is_the_same_on_spark(made_up, spark):
    asked = [{}, {"every": "7 seconds"}]
    frames = [kproxy.spark.table(spark, str(made_up), name) for name in OF_LAG]
    with Tables(made_up) as tables:
        for job in (jobs.lag, jobs.group_lag):
            for options in asked:
                mine, theirs = (job(*inputs, **options) for inputs in ([tables[name] for name in OF_LAG], frames))
                assert engine.columns(mine) == engine.columns(theirs)
                rows = list(engine.rows(mine))
                assert rows and rows == list(engine.rows(theirs))
