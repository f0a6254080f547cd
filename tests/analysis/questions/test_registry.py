"""The jobs about ZooKeeper on a real capture: their answers agree with ZooKeeper's log and the consumers' logs."""

import gzip
import json
from collections import Counter

import pytest

from kproxy.analysis import engine, jobs
from kproxy.analysis.duck import Tables
from kproxy.analysis.question import Question
from kproxy.convert.processes import convert
from tests.zookeeper.traffic import DATA, deeds, log

OLD = DATA.parent / "knowledge"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """All tables that `convert` makes of the capture."""
    folder = tmp_path_factory.mktemp("old") / "tables"
    convert([DATA / "k0102_zkgroup_a.pcap.zst"], folder)
    with Tables(folder) as found:
        yield found


def asked(tables, name):
    job = jobs.JOBS[name]
    return job.run(*(tables[table] for table in job.tables)).arrow().to_pylist()


def test_the_timeline_contains_every_change_and_session_of_zookeepers_log(tables):
    told = asked(tables, "registry")
    ops = {"created": "create", "changed": "setData", "deleted": "delete"}
    changed = {(row["session"], ops[row["change"]], row["zxid"]) for row in told if row["change"] in ops}
    logged = {(f"0x{line.session:x}", line.op, line.zxid) for line in log() if line.op in ops.values()}
    assert changed <= logged  # changes of offsets are not changes of the cluster
    assert len(changed) > 250
    sessions = Counter(row["change"] for row in told if row["kind"] == "session")
    assert sessions["began"] == sum(line.op == "createSession" for line in log())
    assert sessions["expired"] == 2
    closed = [row for row in told if row["change"] == "gone_with_session"]
    assert Counter(row["kind"] for row in closed)["consumer_id"] == 5
    assert {row["path"] for row in closed if row["kind"] == "broker"} == {"/brokers/ids/1", "/brokers/ids/2"}
    assert Counter(row["change"] for row in told if row["kind"] == "consumer_owner")["lost"] == 1
    elected = [row["detail"] for row in told if (row["kind"], row["change"]) == ("controller", "created")]
    assert [json.loads(detail)["brokerid"] for detail in elected] == [2, 1, 2]  # 2 stops and returns, then 1 stops
    assert any('"isr":[1]' in row["detail"] for row in told if row["kind"] == "partition_state")


def test_conditions_select_sessions_and_their_ephemeral_nodes(tables):
    """Conditions apply to the timeline, not to the table, which lacks the kind of sessions and rows of their nodes."""
    told = asked(tables, "registry")

    def chosen(where):
        question = Question(jobs.JOBS["registry"], {}, None, None, where, None)
        return question.answer({"registry": tables["registry"]}).arrow().to_pylist()

    for kinds in (("session",), ("consumer_owner",), ("broker", "controller", "session")):
        alike = [row for row in told if row["kind"] in kinds]
        assert alike and chosen(f"kind in ({', '.join(map(repr, kinds))})") == alike
    frozen = chosen("session = '0x1a200e43164000e' and kind in ('session', 'consumer_owner')")
    assert [row["change"] for row in frozen if row["kind"] == "session"] == ["began", "closed"]
    assert {row["change"] for row in frozen} > {"gone_with_session"}
    assert all(row["path"] for row in chosen("op = 'create'"))  # the timeline lacks this column


def test_consumers_lists_rebalances_with_rejoining_members_and_partitions_with_two_owners(tables):
    told = asked(tables, "consumers")
    assert [row["rejoined"] for row in told] == [0, 1, 2, 3, 4, 4, 3, 2, 2, 3, 3, 2, 1, 0]
    assert [row["races_lost"] for row in told] == [0] * 10 + [1, 0, 0, 0]
    assert all(row["claimed"] >= 8 for row in told[:10])
    assert all(0 < row["stood_still_ns"] < 2_000_000_000 for row in told[1:10])
    # c2 was frozen until its session expired, and rebalance 8 reassigned its partitions; thawed, it still fetched them.
    stale = {row["generation"]: row for row in told if row["stale_fetches"]}
    assert stale.keys() == {8}
    (thawed,) = [deed for deed in deeds() if deed.what == "thaw"]
    began_ns = int(told[7]["time"].timestamp() * 1e9)
    assert began_ns + stale[8]["stale_ns"] > thawed.time_s * 1e9


def test_rebalances_of_captures_that_were_converted_separately_are_distinguished(tables):
    """Both captures have a first generation. The second capture is the first one, a day later."""
    times = {
        "rebalances": ("started_ns", "joined_ns", "ended_ns"),
        "exchanges": ("request_start_ns",),
        "partitions": (),
    }
    both = {}
    for name in jobs.JOBS["consumers"].tables:
        later = [f"{each} + {24 * 3600 * 10**9} as {each}" for each in times.get(name, ("time_ns",))]
        chosen = ", ".join(["'later' as source", *later])
        text = f"select * from {name} union all select * replace ({chosen}) from {name}"
        both[name] = engine.ask({name: tables[name]}, both=text)
    figures = ("generation", "woken", "claimed", "races_lost", "stood_still_ns", "rebalance_ns")
    alone = [[row[name] for name in figures] for row in asked(tables, "consumers")]
    assert [[row[name] for name in figures] for row in asked(both, "consumers")] == 2 * alone


@pytest.mark.parametrize("release", ["0.10.2.2", "0.8.2.2"])
def test_two_owners_of_a_partition_are_a_split_brain_with_any_kind_of_coordination(tables, release, tmp_path):
    """c2 was frozen until its session expired: then it fetched its former partitions until it read the new members."""
    if release == "0.10.2.2":
        found, thawed_s, clients = asked(tables, "split-brain"), [], ("app-2", "app-3")
        thawed_s = next(deed.time_s for deed in deeds() if deed.what == "thaw")
    else:
        folder = OLD / release
        convert([folder / "traffic.pcap.zst"], tmp_path / "tables")
        with Tables(tmp_path / "tables") as older:
            found, clients = asked(older, "split-brain"), ("c2", "c3")
        events = map(json.loads, gzip.decompress((folder / "events.jsonl.gz").read_bytes()).splitlines())
        thawed_s = next(event["time_ns"] / 1e9 for event in events if event["what"] == "thaw")
    assert {(row["group_id"], row["one"], row["other"]) for row in found} == {("legacy", *clients)}
    assert {(row["topic"], row["partition"]) for row in found} == {("orders", index) for index in range(3)}
    assert all(0 <= row["time"].timestamp() - thawed_s < 3 and row["together_ns"] > 1e9 for row in found)
