"""The registry: rows have every change that ZooKeeper logged of its tree, and each node has its kind."""

from collections import Counter
from functools import cache

import pytest

from kproxy.insight.registry import KINDS, MAX_VALUE, Ends, kind_of, rows
from kproxy.zookeeper.session import Fault, Operation, Session
from tests.zookeeper.traffic import log, talks


@cache
def registry():
    found = []
    for port, talk in enumerate(talks()):
        session = Session()
        for side, data, now in talk.parts:
            session.receive(side, data, now)
        session.close()
        for event in session.events:
            found += rows(event, "old", Ends("127.0.0.1", port))
    return sorted(found, key=lambda row: row.time_ns)


@pytest.mark.parametrize(
    "path,kind",
    [
        ("/brokers/ids/1", "broker"),
        ("/kafka/east/brokers/ids/1", "broker"),  # a chroot
        ("/brokers/topics/orders", "topic"),
        ("/brokers/topics/orders/partitions", "topic"),
        ("/brokers/topics/orders/partitions/0/state", "partition_state"),
        ("/controller", "controller"),
        ("/controller_epoch", "controller_epoch"),
        ("/isr_change_notification/isr_change_0000000000", "isr_change"),
        ("/consumers/legacy/ids/legacy_host-1", "consumer_id"),
        ("/consumers/legacy/owners/orders/3", "consumer_owner"),
        ("/consumers/legacy/offsets/orders/3", "consumer_offset"),
        ("/config/topics/orders", "config"),
        ("/admin/delete_topics/orders", "admin"),
        ("/kafka-acl/Topic/orders", "acl"),
        ("/kafka-acl-extended/prefixed/Topic", "acl"),
        ("/zookeeper/quota", "other"),
        ("", "other"),
        (None, "other"),
    ],
)
def test_a_node_has_the_kind_of_its_path(path, kind):
    assert kind_of(path) == kind


def test_every_kind_is_in_the_list_above():
    assert len({kind for _, kind in KINDS}) == 12


def test_every_logged_change_of_the_tree_is_a_row():
    changes = ("create", "delete", "setData")
    logged = Counter((f"0x{line.session:x}", line.op, line.zxid) for line in log() if line.op in changes)
    found = Counter((row.session, row.op, row.zxid) for row in registry() if row.op in changes and row.error is None)
    assert found == logged
    assert sum(found.values()) > 900


def test_a_partition_has_one_registered_consumer_as_owner_at_a_time():
    """The rows in the order of ZooKeeper's own transactions; only ZooKeeper's log has the expiry of sessions."""
    changes = [row for row in registry() if row.op in ("create", "delete") and row.error is None and row.zxid]
    ended = {line.zxid: f"0x{line.session:x}" for line in log() if line.op == "closeSession"}
    nodes, taken = {}, 0
    for zxid, row in sorted([*((row.zxid, row) for row in changes), *ended.items()], key=lambda each: each[0]):
        if isinstance(row, str):
            nodes = {path: made for path, made in nodes.items() if made.session != row}
        elif row.op == "delete":
            nodes.pop(row.path, None)
        elif row.ephemeral and row.kind in ("consumer_id", "consumer_owner"):
            assert row.path not in nodes
            nodes[row.path] = row
            if row.kind == "consumer_owner":
                taken += 1
                consumer = row.value.rpartition("-")[0]
                assert any(path.endswith(f"/ids/{consumer}") for path in nodes), zxid
    assert taken > 20


def test_lost_races_for_an_owner_node_are_rows():
    lost = [row for row in registry() if row.kind == "consumer_owner" and row.error == "NODEEXISTS"]
    assert lost
    assert all(row.latency_ns > 0 for row in lost)


def test_watches_are_set_and_fire():
    fired = [row for row in registry() if row.op == "notification"]
    assert Counter(row.value for row in fired) == {"NodeChildrenChanged": 43, "NodeDeleted": 4, "NodeCreated": 3}
    assert {row.kind for row in fired} >= {"consumer_id", "broker"}
    assert any(row.watch for row in registry() if row.op == "getChildren")


def test_a_transaction_is_a_row_for_each_part_and_values_are_bounded():
    parts = [
        {"op": "create", "path": "/config/x", "data": b"v" * 2 * MAX_VALUE, "flags": 1},
        {"op": "check", "path": "/"},
    ]
    done = [{"op": "create", "err": 0, "path": "/config/x"}, {"op": "check", "err": -103}]
    event = Operation("multi", 5, -1, 0, error=0, request={"operations": parts}, response={"operations": done})
    first, second = rows(event, "old")
    assert (first.op, first.kind, first.ephemeral, first.error) == ("create", "config", True, None)
    assert len(first.value) == MAX_VALUE
    assert (second.op, second.error, second.session) == ("check", "BADVERSION", "0xffffffffffffffff")
    assert not list(rows(Fault(0, "no frame", 0, 0), "old"))


def test_a_child_without_a_name_is_ignored():
    answered = Operation("getChildren", 1, 7, 0, response={"children": [None, "b", "a"]})
    assert next(rows(answered, "c")).value == "a,b"
    answered.response = {"children": [None]}
    assert next(rows(answered, "c")).value is None
