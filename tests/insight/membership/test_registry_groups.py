"""Consumers that coordinate through ZooKeeper: the rows about a real group equal its members' logs."""

import json
from collections import Counter
from functools import cache

import pytest

from kproxy.insight.membership import registry_groups as module
from kproxy.insight.membership.registry_groups import ConsumerGroups
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance, RegistryRow
from tests.insight.test_registry import registry
from tests.zookeeper.traffic import begun, deeds, owned

JOINED, LEFT, EXPIRED = "member_joined", "member_left", "session_expired"


@cache
def produced():
    groups = ConsumerGroups("old")
    return [each for row in registry() for each in groups.feed(row)] + list(groups.finish())


def rebalances():
    return [each for each in produced() if isinstance(each, Rebalance)]


def events(kind):
    return [each for each in produced() if isinstance(each, GroupEvent) and each.event == kind]


def test_every_rebalance_has_its_cause():
    """Actions on the consumers in order; a kill and a freeze take effect 12 to 16 s later, when the session expires."""
    causes = {"join": JOINED, "leave": LEFT, "kill": EXPIRED, "freeze": EXPIRED, "thaw": JOINED}
    wanted = [(causes[deed.what], f"legacy_c{deed.consumer}") for deed in deeds()]
    # c4, the last but one to be stopped, closes its session after c9
    wanted[-2:] = reversed(wanted[-2:])
    found = rebalances()
    assert [(each.cause, each.cause_member) for each in found] == wanted
    for deed, each in zip(deeds(), found[:-2], strict=False):
        latest_s = deed.time_s + (20 if deed.what in ("kill", "freeze", "thaw") else 2)
        assert deed.time_s < each.started_ns / 1e9 < latest_s
    assert [each.generation for each in found] == list(range(1, 15))


def test_the_members_of_each_rebalance_are_those_that_logged_its_beginning():
    found = rebalances()
    ends = [each.started_ns for each in found[1:]] + [1 << 63]
    logged = []
    for each, end in zip(found, ends, strict=True):
        herd = {member for time_ns, member in begun() if each.started_ns <= time_ns < end}
        logged.append(len(herd - {each.cause_member}))
    # c9's leaving woke c4, which closed its session instead, as it had been told to
    logged[12] += 1
    assert [each.rejoined for each in found] == logged
    assert logged == [0, 1, 2, 3, 4, 4, 3, 2, 2, 3, 3, 2, 1, 0]
    # watches also fired at the leaving member and at the frozen one
    assert Counter(each.generation for each in events("woken")) == {
        2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 3, 8: 3, 9: 2, 10: 3, 11: 4, 12: 3, 13: 2
    }  # fmt: skip


def test_owners_equal_the_consumers_logs_and_the_range_assignment():
    claims = Counter((each.member_id, each.reason.rpartition("-")[2]) for each in events("assigned"))
    assert claims == owned()
    given = [each for each in produced() if isinstance(each, Assignment)]
    assert len(given) > 80
    assert all(each.agrees for each in given)


def test_a_lost_race_for_an_owner_node_is_an_event():
    (lost,) = events("claim_lost")
    assert (lost.member_id, lost.reason, lost.error) == ("legacy_c4", "orders-3 of legacy_c3", "NODEEXISTS")
    (race,) = [each for each in rebalances() if "races lost" in each.reason]
    assert race.generation == lost.generation == 11
    assert race.ended_ns is None  # the next rebalance began before its partitions had owners


def test_rebalances_have_the_time_without_owners():
    ended = [each for each in rebalances() if each.ended_ns is not None]
    assert len(ended) == 10
    assert all(each.started_ns <= each.joined_ns <= each.ended_ns < each.started_ns + 2_000_000_000 for each in ended)
    assert all("stood still for" in each.reason for each in ended[1:])


def test_in_a_late_capture_the_first_list_names_the_members():
    groups = ConsumerGroups("old")
    late = [row for row in registry() if row.time_ns > rebalances()[4].ended_ns]
    found = [each for row in late for each in groups.feed(row)] + list(groups.finish())
    causes = [(each.cause, each.cause_member) for each in found if isinstance(each, Rebalance)]
    # the members of the first changes are unknown: no list had named them
    assert causes[2:] == [(each.cause, each.cause_member) for each in rebalances()[7:]]


def _row(op="create", path="/consumers/g/ids/c", **fields):
    given = {"time_ns": 1, "cluster": "old", "session": "0x1", "client_address": None, "client_port": None, "xid": 1}
    given |= {"op": op, "path": path, "version": None, "zxid": 1, "ephemeral": True, "error": None, "latency_ns": 1}
    return RegistryRow(**(given | {"value": None, "kind": "consumer_id", "watch": None} | fields))


def test_a_topic_that_grows_wakes_its_consumers():
    groups = ConsumerGroups()
    value = json.dumps({"subscription": {"t": 1}})
    topic = {"path": "/brokers/topics/t", "kind": "topic"}
    registry_changes = [
        _row(value=value),
        _row("getData", value=json.dumps({"partitions": {"0": [1]}}), **topic),
        _row("notification", value="NodeDataChanged", time_ns=10**10, **topic),
        _row("getData", value=json.dumps({"partitions": {"0": [1], "1": [1]}}), **topic),
        *(
            _row(path=f"/consumers/g/owners/t/{index}", kind="consumer_owner", value="c-0", time_ns=10**10 + index)
            for index in (0, 1)
        ),
    ]
    found = [each for row in registry_changes for each in groups.feed(row)] + list(groups.finish())
    first, second = [each for each in found if isinstance(each, Rebalance)]
    assert (first.cause, second.cause, second.ended_ns) == (JOINED, "metadata_changed", 10**10 + 1)
    assert [each.agrees for each in found if isinstance(each, Assignment)] == [True, True]


def test_invented_groups_members_partitions_and_topics_are_bounded(monkeypatch):
    for name in ("MAX_GROUPS", "MAX_NAMES", "MAX_SESSIONS", "MAX_TOPICS"):
        monkeypatch.setattr(module, name, 10)
    groups = ConsumerGroups()
    rows = 0
    for index in range(1000):
        registry_changes = [
            _row(path=f"/consumers/g{index}/ids/c", session=f"0x{index}", value='{"subscription": {"t": 1000000000}}'),
            _row(path=f"/consumers/g/ids/c{index}", session=f"0x{index}", value="[" * 100_000),
            _row(path=f"/consumers/g/owners/t/{index}", kind="consumer_owner", value=f"c{index}-0"),
            _row(path=f"/brokers/topics/t{index}", kind="topic", value='{"partitions": {"0": []}}'),
            _row(path=f"/x{index}/brokers/topics/t", kind="topic", value='{"partitions": {"0": []}}'),
            _row("getChildren", path="/consumers/g/ids", value=",".join(f"m{each}" for each in range(100))),
            _row("notification", path="/consumers/g/ids", session=f"0x{index}", value="NodeChildrenChanged"),
        ]
        rows += sum(1 for row in registry_changes for _ in groups.feed(row))
    assert len(groups._groups) <= 10
    assert len(groups._sessions) <= 10
    assert sum(map(len, groups._counts.values())) <= 10
    assert all(len(group._members) <= 10 and len(group._owners) <= 10 for group in groups._groups.values())
    assert groups.left_out > 900
    assert rows < 20_000


@pytest.mark.parametrize("value", [None, "[]", "{}", '{"subscription": 1}', '{"subscription": {"t": "x"}}', "{" * 9])
def test_assignments_are_not_checked_if_nodes_lack_subscriptions(value):
    groups = ConsumerGroups()
    registry_changes = [_row(value=value), _row(path="/consumers/g/owners/t/0", kind="consumer_owner", value="c-0")]
    found = [each for row in registry_changes for each in groups.feed(row)] + list(groups.finish())
    assert [each.agrees for each in found if isinstance(each, Assignment)] == [None]
