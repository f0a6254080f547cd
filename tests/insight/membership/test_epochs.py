"""Groups with epochs: joins, leaves, epochs and owned partitions equal the coordinator's log and the tools' output."""

import re
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from itertools import zip_longest
from random import Random

import pytest

from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.membership.epochs import PROTOCOLS, EpochGroup
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.protocol.apis import METADATA
from tests import captures
from tests.insight.truth import CAPTURE, decoded_exchanges, log

NEAR_S = 0.6  # the epoch is bumped, its assignment computed, then sent: on a busy machine


def feed_capture(path, ports):
    """The groups at the end of a capture, and all their rows."""
    groups, found, names = {}, [], {}
    for each in decoded_exchanges(path, ports, PROTOCOLS.keys() | {METADATA}):
        if each.api_key == METADATA:
            topics = each.response["topics"] if each.response is not None else ()
            names |= {topic["topicId"]: topic["name"] for topic in topics}
            continue
        name = each.request["groupId"]
        group = groups.setdefault(name, EpochGroup("default", name, PROTOCOLS[each.api_key]))
        found += group.feed(each, names)
    for group in groups.values():
        found += group.finish()
    return groups, found


@cache
def rows():
    return feed_capture(CAPTURE, (9092,))


def rows_of(kind, group="new-g"):
    return [row for row in rows()[1] if isinstance(row, kind) and row.group_id == group]


def logged(pattern):
    """(seconds, match of the pattern) for the coordinator's lines on new-g."""
    found = re.finditer(rf"b\d (\S+ \S+) \w+ .*\[GroupId new-g\] {pattern}", log())
    return [
        (datetime.strptime(one[1], "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp(), one[2]) for one in found
    ]


def test_every_epoch_sent_to_a_member_is_a_rebalance_at_its_time():
    bumped = {int(epoch): at for at, epoch in logged(r"Bumped group epoch to (\d+) with")}
    found = {row.generation: row for row in rows_of(Rebalance)}
    assert bumped.keys() - found.keys() == {6, 7}  # the remaining members had left before these were sent
    assert found.keys() <= bumped.keys()
    for epoch, row in found.items():
        assert row.joined_ns / 1e9 == pytest.approx(bumped[epoch], abs=NEAR_S)
    causes = {epoch: (row.cause, row.members_before, row.members_after) for epoch, row in found.items()}
    assert causes == {
        1: ("member_joined", 0, 1),
        2: ("member_joined", 1, 2),
        3: ("member_joined", 2, 3),
        4: ("metadata_changed", 3, 3),  # the topic grew
        5: ("member_left", 3, 2),
    }


def test_joins_and_leaves_equal_the_log():
    events = rows_of(GroupEvent)
    for event, pattern in (("join", r"Member (\S+) joins the"), ("leave", r"Member (\S+) left the")):
        found = [(row.time_ns / 1e9, row.member_id) for row in events if row.event == event]
        in_log = logged(pattern)
        assert [member for _, member in found] == [member for _, member in in_log]
        for (ours, _), (theirs, _) in zip(found, in_log, strict=True):
            assert ours == pytest.approx(theirs, abs=NEAR_S)
    assert rows()[0]["new-g"].state == "Empty"


def test_members_own_each_partition_once():
    owned = {}
    for row in rows_of(Assignment):
        owned.setdefault((row.member_id, row.generation), set()).add((row.topic, row.partition))
    fifth = [parts for (_, epoch), parts in owned.items() if epoch == 5]
    assert sorted(part for parts in fifth for part in parts) == [("clicks-21e2", index) for index in range(6)]
    revoked = [row.reason for row in rows_of(GroupEvent) if row.event == "revoked"]
    assert revoked[0] == "clicks-21e2-2, clicks-21e2-3"


def test_share_groups_are_groups_too():
    groups, found = feed_capture(captures.capture("k41_kip848_share"), range(9091, 9094))
    protocols = {group.protocol for group in groups.values()}
    assert protocols == {"consumer", "share"}
    causes = {(row.protocol, row.cause) for row in found if isinstance(row, Rebalance)}
    assert causes >= {("share", "member_joined"), ("consumer", "member_joined"), ("consumer", "member_left")}


def beat(member, epoch, next_epoch, at, **more):
    request = {"groupId": "g", "memberId": member, "memberEpoch": epoch, "subscribedTopicNames": more.get("topics")}
    answer = {
        "errorCode": more.get("error", 0),
        "memberId": member,
        "memberEpoch": next_epoch,
        "heartbeatIntervalMs": 5000,
    }
    return DecodedExchange(68, 1, request, answer | {"assignment": None}, at, at + 1)


def test_expired_sessions_and_changed_subscriptions_are_causes():
    second = 10**9
    group = EpochGroup("default", "g", "consumer")
    talk = [beat("a", 0, 1, 1, topics=["x"]), beat("b", 0, 2, 2, topics=["x"]), beat("a", 1, 2, 3)]
    talk += [beat("a", 2, 3, 30 * second), beat("a", 3, 4, 31 * second, topics=["x", "y"])]
    talk += [beat("a", 4, 4, 32 * second, error=110), beat("a", -1, -1, 33 * second)]
    found = [row for each in talk for row in group.feed(each, {})]
    causes = [(row.generation, row.cause, row.cause_member) for row in found if isinstance(row, Rebalance)]
    assert causes == [
        (1, "member_joined", "a"),
        (2, "member_joined", "b"),
        (3, "session_expired", "b"),
        (4, "subscription_changed", "a"),
    ]
    failed = [row for row in found if isinstance(row, GroupEvent) and row.event == "heartbeat_failed"]
    assert [row.error for row in failed] == ["FENCED_MEMBER_EPOCH"]
    assert group.state == "Empty"


def test_a_member_that_joins_an_empty_group_has_no_members_before_it():
    group = EpochGroup("default", "g", "consumer")
    talk = [beat("a", 0, 1, 1, topics=["x"]), beat("a", -1, -1, 10), beat("b", 0, 3, 500, topics=["x"])]
    row = [row for each in talk for row in [*group.feed(each, {}), *group.finish()] if isinstance(row, Rebalance)][-1]
    assert (row.generation, row.cause, row.cause_member, row.started_ns) == (3, "member_joined", "b", 500)
    assert (row.members_before, row.members_after, row.rejoined) == (0, 1, 0)


def test_a_member_caused_the_epoch_even_if_others_get_it_first():
    """Its heartbeat waits for the first assignment, while other members get the new epoch at once."""
    second = 10**9
    group = EpochGroup("default", "g", "consumer")
    late = beat("b", 0, 2, 2 * second, topics=["x"])
    late.response_start = 4 * second
    talk = [beat("a", 0, 1, second, topics=["x"]), beat("a", 1, 2, 3 * second), late]
    talk += [beat("a", 2, 2, 5 * second), beat("a", 2, 3, 60 * second), beat("a", 3, 3, 61 * second)]
    found = [row for each in talk for row in group.feed(each, {})]
    found += group.finish()
    rows = [row for row in found if isinstance(row, Rebalance)]
    causes = [(row.generation, row.cause, row.cause_member, row.started_ns, row.members_after) for row in rows]
    assert causes == [
        (1, "member_joined", "a", second, 1),
        (2, "member_joined", "b", 2 * second, 2),
        (3, "session_expired", "b", 60 * second, 1),
    ]


def delayed(talk, most_ns, seed):
    """The same exchanges, each with added delays on its way to the broker and back."""
    random = Random(seed)
    found = []
    for connection in {each.connection for each in talk}:
        before_ns = 0
        own = [each for each in talk if each.connection == connection]
        for each, following in zip_longest(own, own[1:]):
            sent_ns = each.request_end - int(random.random() * min(most_ns, each.request_end - before_ns))
            room_ns = most_ns if following is None else following.request_end - each.response_start
            before_ns = each.response_start + int(random.random() * min(most_ns, room_ns))
            found.append(replace(each, request_end=sent_ns, response_start=before_ns))
    return sorted(found, key=lambda each: each.response_start)


def test_the_place_of_capture_and_the_order_of_responses_change_nothing():
    """Next to the broker, next to clients, or in a late process, connections are seen in different orders."""
    talk = [each for each in decoded_exchanges(CAPTURE, (9092,), {68}) if each.response is not None]

    def known(talk):
        groups, found = {}, []
        for each in talk:
            name = each.request["groupId"]
            found += groups.setdefault(name, EpochGroup("default", name, "consumer")).feed(each, {})
        for group in groups.values():
            found += group.finish()
        rows = [row._asdict() for row in found]
        apart = ("reason", "time_ns", "started_ns", "joined_ns", "ended_ns")
        return Counter(tuple((name, row[name]) for name in row if name not in apart) for row in rows)

    expected = known(delayed(talk, 0, 0))
    for seed in range(40):
        assert known(delayed(talk, 300_000_000, seed)) == expected, seed


def test_members_that_join_at_once_cause_the_epochs_in_their_responses():
    """The response to the first comes last. A leaving member gets no epoch: it caused the one that remains."""
    group = EpochGroup("default", "g", "consumer")
    talk = [beat("c", 0, 3, 12, topics=["x"]), beat("b", 0, 2, 11, topics=["x"]), beat("a", 0, 1, 10, topics=["x"])]
    talk += [beat("b", 2, 4, 30), beat("a", 1, 4, 31), beat("c", -1, -1, 20), beat("b", 4, 4, 40)]
    for at, each in enumerate(talk):
        each.response_start = 100 + at
    found = [*(row for each in talk for row in group.feed(each, {})), *group.finish()]
    rows = [row for row in found if isinstance(row, Rebalance)]
    assert [row[4:7] + row[11:15] for row in rows] == [
        (1, "member_joined", "a", 0, 1, 0, "a"),
        (2, "member_joined", "b", 1, 2, 1, "b"),
        (3, "member_joined", "c", 2, 3, 2, "c"),
        (4, "member_left", "c", 3, 2, 2, None),
    ]


def test_members_that_expire_at_once_are_all_removed():
    """The remaining member gets only the last of their epochs."""
    second = 10**9
    group = EpochGroup("default", "g", "consumer")
    talk = [beat("a", 0, 1, 1, topics=["x"]), beat("b", 0, 2, 2, topics=["x"]), beat("c", 0, 3, 3, topics=["x"])]
    talk += [beat("a", 1, 3, 4), beat("a", 3, 5, 60 * second), beat("a", 5, 5, 61 * second)]
    found = [*(row for each in talk for row in group.feed(each, {})), *group.finish()]
    last = [row for row in found if isinstance(row, Rebalance)][-1]
    assert (last.generation, last.cause, last.members_before, last.members_after) == (5, "session_expired", 3, 1)
    assert last.ended_ns is not None
    assert {row.member_id for row in found if isinstance(row, GroupEvent) and row.event == "expired"} == {"b", "c"}
    assert group.state == "Stable"


def test_a_dead_member_expires_after_its_session_even_if_epochs_have_other_causes():
    second = 10**9
    group = EpochGroup("default", "g", "consumer")
    talk = [beat("a", 0, 1, 1, topics=["x"]), beat("b", 0, 2, 2, topics=["x"]), beat("a", 1, 2, 200 * second)]
    talk += [beat("c", 0, 3, 201 * second, topics=["x"]), beat("a", 2, 3, 202 * second)]
    assert [row.member_id for each in talk for row in group.feed(each, {}) if getattr(row, "event", "") == "expired"]
    assert sorted(group.members) == ["a", "c"]


def test_a_recreated_group_has_no_members_of_the_old_one():
    second = 10**9
    group = EpochGroup("default", "g", "consumer")
    talk = [beat("a", 0, 1, 1, topics=["x"]), beat("a", 1, 7, 2), beat("late", 0, 6, 2, topics=["x"])]
    talk[2].request_end = 1  # before any member got epoch 7
    found = [row for each in talk for row in group.feed(each, {})]
    assert group.epoch == 7
    talk = [beat("n", 0, 1, 3600 * second, topics=["x"]), beat("o", 0, 2, 3601 * second, topics=["x"])]
    talk += [beat("n", 1, 2, 3602 * second), beat("o", 2, 2, 3603 * second)]
    found += [*(row for each in talk for row in group.feed(each, {})), *group.finish()]
    rows = [row for row in found if isinstance(row, Rebalance)]
    counts = [(row.generation, row.cause, row.members_before, row.members_after) for row in rows]
    assert counts[:3] == [(1, "member_joined", 0, 1), (6, "member_joined", 1, 2), (7, "metadata_changed", 2, 2)]
    assert counts[3:] == [(1, "member_joined", 0, 1), (2, "member_joined", 1, 2)]
    assert sorted(group.members) == ["n", "o"]
    assert group.state == "Stable"


def test_a_static_member_that_does_not_return_expires():
    second = 10**9
    group = EpochGroup("default", "g", "consumer")
    talk = [beat("a", 0, 1, 1, topics=["x"]), beat("b", 0, 2, 2, topics=["x"]), beat("a", 1, 2, 3)]
    talk += [beat("b", -2, -2, 10 * second), beat("a", 2, 2, 12 * second), beat("a", 2, 3, 60 * second)]
    talk[1].request["instanceId"] = talk[3].request["instanceId"] = "second"
    found = [row for each in talk for row in group.feed(each, {})]
    row = [row for row in (*found, *group.finish()) if isinstance(row, Rebalance)][-1]
    assert (row.generation, row.cause, row.cause_member) == (3, "session_expired", "b")
    (gone,) = [row for row in found if getattr(row, "event", "") == "expired"]
    assert (gone.member_id, gone.group_instance_id) == ("b", "second")
    assert "50.0 s before" in gone.reason
