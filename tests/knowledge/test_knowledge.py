"""What insight says of real groups is what their brokers logged and Kafka's own tools described; see `judge`.

Recorded runs are compared exactly. `./dev knowledge` plays all of them anew; here one short playbook is.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kproxy.insight.rows import Assignment, GroupEvent
from tests.knowledge import judge, playbooks, recorded, registry, rig, routes
from tests.knowledge.exchanges import Told
from tests.knowledge.truth import Run

# How often what is explained occurs in each recorded run.
RECORDED = {
    "short": {"a rebalance that ended otherwise than by all members": 1},
    "members": {"an expiry is seen when the others rejoin": 2, "a leader with other topics": 1},
    "epochs": {"an epoch nobody was told": 1},
    "brokers": {"a controller that did not become active": 1},
    "foreign": {"an expiry is seen when the others rejoin": 1},
}
TASKS = {"worker-1": "numbers", "streams-1": "active 0_", "tasks-1": "0-"}  # what members of other kinds are assigned
OLD = {"0.8.2.2": {"an expiry that ended a session": 2}}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_is_known_as_it_was_logged(name: str) -> None:
    found = judge.differences(Run(recorded.DATA / name))
    assert [each for each in found if each.kind not in judge.EXPLAINED] == []
    assert Counter(each.kind for each in found) == RECORDED[name]


def test_all_that_is_explained_occurs() -> None:
    assert {kind for kinds in RECORDED.values() for kind in kinds} == judge.EXPLAINED.keys()
    assert {kind for kinds in OLD.values() for kind in kinds} == registry.EXPLAINED.keys()


def test_leaders_that_assign_wrongly_are_found_and_all_others_agree() -> None:
    rows = [row for row in Told(Run(recorded.DATA / "members")).finish() if isinstance(row, Assignment)]
    found = Counter((row.group_id, row.agrees) for row in rows if row.strategy in ("range", "roundrobin"))
    assert {group for group, agrees in found if not agrees} == judge.WRONG
    assert {group for group, agrees in found if agrees} >= {"range-g", "rr-g", "static-g"}
    assert min(found["moved-g", False], found["twice-g", False]) >= 9


def test_workers_of_connect_and_members_of_streams_are_known_by_their_tasks() -> None:
    rows = Told(Run(recorded.DATA / "foreign")).finish()
    events = [row for row in rows if isinstance(row, GroupEvent) and row.client_id and not row.error]
    kinds = {
        (row.group_id, row.protocol, row.group_type)
        for row in events
        if row.event == "sync_answered" or row.protocol == "streams"
    }
    assert kinds >= {
        ("connect-g", "classic", "connect"),
        ("eager-g", "classic", "connect"),
        ("streams-g", "classic", "streams"),
        ("tasks-g", "streams", "streams"),
    }
    for member, beginning in TASKS.items():
        said = [str(row.reason) for row in events if str(row.client_id).startswith(member) and "assigned" in row.event]
        assert any(words.startswith(beginning) for words in said), member
    standby = [row for row in events if row.event == "tasks_assigned" and "standby 0_" in str(row.reason)]
    assert standby
    workers = [row for row in events if row.event == "join_answered" and row.group_type == "connect"]
    assert (
        all(re.match(r"worker http://127.0.0.1:\d+/, config offset -?\d+", str(row.reason)) for row in workers)
        and workers
    )
    owned = {(row.topic, row.partition) for row in rows if isinstance(row, Assignment) and row.group_type == "connect"}
    assert owned == {("numbers", task) for task in (-1, 0, 1, 2, 3)}


@pytest.mark.parametrize("name", OLD)
def test_a_registry_is_known_as_zookeeper_logged_it(name: str) -> None:
    run = registry.OldRun(recorded.DATA / name)
    found = [*registry.differences(run)]
    assert [each for each in found if each.kind not in registry.EXPLAINED] == []
    assert Counter(each.kind for each in found) == OLD[name]
    assert len(run.transactions) > 300 and len(run.rebalances) == 12
    assert max(each.rejoined for each in run.rebalances) == 4
    assert len(run.happened("claim_lost")) > 0


# Rows of the coordinators' logs, which replicas fetch: `convert` reads these too, `routes.fed` only what clients say.
LOGGED = {
    "short": {("group_events", "stored"): 20, ("assignments", None): 2},
    "brokers": {("group_events", "stored"): 11},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LOGGED)
def test_convert_says_the_same_of_a_run_and_what_its_logs_say(name: str, tmp_path: Path) -> None:
    run = Run(recorded.DATA / name)
    kproxy = Path(sys.executable).with_name("kproxy")
    command = [str(kproxy), "convert", str(run.capture), "--out", str(tmp_path / "tables")]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    fed, converted = routes.fed(run), routes.read(tmp_path / "tables")
    more: Counter[tuple[str, str | None]] = Counter()
    for table, rows in fed.items():
        assert rows
        for which, row in routes.different(table, rows, converted[table]):
            assert which == "other", (table, row)
            more[table, dict(row).get("event")] += 1
    assert more == LOGGED[name]


def test_a_member_that_ends_by_itself_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = "import sys; input(); sys.exit('what went wrong')"
    process = rig.Process([sys.executable, "-c", script], tmp_path / "range-py.err", lambda line: None)
    process.check()
    process.tell("go")
    process.popen.wait(30)
    for said in (process.check, lambda: process.tell("close", last=True)):
        with pytest.raises(rig.ProcessEnded, match=r"(?s)range-py ended, exit code 1:.*what went wrong"):
            said()
    process.end()
    process.check()


@pytest.mark.ring2
@pytest.mark.timeout(600)
def test_a_cluster_of_now_is_known_as_it_logs(tmp_path: Path) -> None:
    """By its traffic, and live: what `/api/groups` of the kproxy between says is what the tools describe."""
    with rig.running(tmp_path / "run", through_kproxy=("--detail", "topics")) as cluster:
        playbooks.short(cluster)
    run = Run(tmp_path / "run")
    assert judge.faults(run) == []
    assert [len(each.live) for each in run.described] == [4, 4, 4]
