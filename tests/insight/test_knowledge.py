"""One cluster's knowledge: its parts together report what each reports alone, and invented names are bounded."""

import random
from collections import Counter

import pytest

from kproxy.insight.decoded import DecodedExchange, decode_exchange
from kproxy.insight.knowledge import APIS, Knowledge
from kproxy.insight.membership import groups
from kproxy.insight.rows import TABLES, Assignment, GroupEvent, Leadership, Rebalance
from kproxy.tables.knowledge import KnowledgeColumns
from tests import captures
from tests.insight import hostile, test_leadership
from tests.insight.membership import test_classic, test_epochs
from tests.insight.truth import CAPTURE, decoded_exchanges, generations

BROKERS = range(9091, 9094)
CAPTURES = ("k0822_java_cluster", "k0102_java_cluster", "k111_java_cluster", "k39_zk_cluster", "k41_java_cluster")
OTHERS = ("k0102_python147", "k111_kcat_sarama", "k41_librdkafka", "k41_kafkajs", "k41_kip848_share")  # clients


def feed_capture(path, ports):
    known = Knowledge("default")
    found = [row for each in decoded_exchanges(path, ports, APIS) for row in known.feed(each)]
    return known, found + list(known.finish())


def of_members(rows, kind):
    """Rows from requests of a group's own members; commits and describes show expiries too."""
    others = ("coordinator_", "described", "deleted", "commit_failed", "offset_fetch_failed", "expired")
    return [row for row in rows if isinstance(row, kind) and not getattr(row, "event", "").startswith(others)]


def alike(row):
    """The row without its coordinator and strategy, which only FindCoordinator and describes contain."""
    others = {"coordinator_id": None, "strategy": None if row.group_id == "new-g" else getattr(row, "strategy", None)}
    return row._replace(**{key: others[key] for key in others.keys() & set(row._fields)})


def test_together_the_parts_report_what_each_reports_alone():
    known, found = feed_capture(CAPTURE, (9092,))
    groups = {"range-g", "rr-g", "coop-g", "static-g"}
    alone = [*test_classic.rows()[1], *test_epochs.rows()[1]]
    for kind in (GroupEvent, Rebalance, Assignment):
        ours, theirs = (Counter(map(alike, of_members(rows, kind))) for rows in (found, alone))
        assert ours == theirs
    assert {
        (row.group_id, row.generation) for row in found if isinstance(row, Rebalance) if row.group_id in groups
    } == (generations().keys())
    leaders = [row for row in found if isinstance(row, Leadership)]
    assert leaders == [row._replace(cluster="default") for row in test_leadership.feed_capture(CAPTURE)[1]]
    assert not any(known.left_out.values())
    assert {group.group_id for group in known.groups} == {*groups, "new-g"}
    assert known.groups.get("new-g", "consumer").state == "Empty"


@pytest.mark.parametrize("name", (*CAPTURES, *OTHERS))
def test_traffic_of_every_kafka_version_gives_consistent_rows(name):
    """The times of a rebalance are in order, and the generations of a group only increase."""
    _, found = feed_capture(captures.capture(name), BROKERS)
    last = {}
    for row in found:
        if isinstance(row, Rebalance):
            key = row.group_id, row.protocol
            assert row.started_ns <= row.joined_ns <= (row.ended_ns or row.joined_ns)
            assert row.generation > last.get(key, -1)
            last[key] = row.generation


def join(group, member, at, generation=1):
    request = {"groupId": group, "memberId": member, "protocolType": "connect", "protocols": []}
    request["sessionTimeoutMs"] = 10_000
    answer = {"errorCode": 0, "generationId": generation, "protocolName": "x", "leader": member, "memberId": member}
    return DecodedExchange(11, 5, request, answer | {"members": [{"memberId": member, "metadata": b""}]}, at, at + 1)


def test_the_least_recently_used_group_is_forgotten(monkeypatch):
    monkeypatch.setattr(groups, "MAX_GROUPS", 3)
    known = Knowledge("c")
    found = []
    for at, group in enumerate("abcad"):
        found += known.feed(join(group, f"m{at}", 10 * at, at + 1))
    assert {group.group_id for group in known.groups} == {"a", "c", "d"}
    assert known.left_out == {"topics": 0, "log_records": 0, "groups": 1, "partitions": 0}
    forming = [row.group_id for row in found if isinstance(row, Rebalance)]
    # its first generation ended with the second; b was forgotten while its generation formed
    assert forming == ["a", "b"]


def test_members_of_all_groups_are_bounded(monkeypatch):
    monkeypatch.setattr(groups, "MAX_WEIGHT", 100)
    known = Knowledge("c")
    for number in range(2000):
        list(known.feed(join(f"g{number % 7}", f"m{number}", 10 * number, number)))
        assert sum(group.weight for group in known.groups) <= 100
    leaving = {"groupId": "h", "members": [{"memberId": f"m{number}"} for number in range(200)]}
    list(known.feed(DecodedExchange(13, 4, leaving, {"errorCode": 0}, 1, 2)))  # of members that never joined
    assert sum(group.weight for group in known.groups) <= 100
    assert known.left_out["groups"] > 0


@pytest.mark.parametrize("seed", range(30))
def test_any_decodable_exchange_in_any_order_becomes_rows_of_the_tables(seed):
    """Nonsense of every API in every version raises nothing, keeps a bounded amount, and gives rows that can be
    written."""
    dice = random.Random(seed)
    known, columns = Knowledge("c"), KnowledgeColumns()
    apis = dice.sample(sorted(hostile.pairs()), dice.randrange(1, len(hostile.pairs())))
    fed = at = 0
    for number in range(150):
        asked, response_layout = dice.choice(hostile.pairs()[dice.choice(apis)])
        at += dice.choice((0, 1, 10**6, 10**9, 10**12))
        frames = hostile.frame(asked, dice), hostile.frame(response_layout, dice) if dice.random() < 0.9 else None
        whose = {"client_address": "10.0.0.1", "broker_id": dice.choice((None, 0, 1)), "number": number}
        exchange = decode_exchange(asked.api_key, asked.version, *frames, at, at + 1, cluster="c", **whose)
        fed += exchange is not None
        for row in known.feed(exchange) if exchange is not None else ():
            columns.append(TABLES[type(row)], "s", row)
    assert known.groups._weight == sum(group.weight for group in known.groups)
    for row in known.finish():
        columns.append(TABLES[type(row)], "s", row)
    assert fed > 140
    assert all(batch.num_rows for _, batch in columns.batches())
