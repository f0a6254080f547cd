"""Classic groups: every generation that the coordinators logged is a rebalance with its cause, members and times."""

import re
from collections import Counter
from functools import cache

import pytest

from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.membership.classic import APIS, STATES, ClassicGroup
from kproxy.insight.membership.group import MAX_REASON
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.protocol.apis import JOIN_GROUP, METADATA
from tests.insight.truth import CAPTURE, decoded_exchanges, departures, generations

# The beginnings of the coordinator's reasons, and kproxy's names of these causes.
REASONS = {
    "Adding new member (\\S+) ": "member_joined",
    "explicit `LeaveGroup` request for \\((\\S+)\\)": "member_left",
    "removing member (\\S+) on heartbeat expiration": "session_expired",
    "Leader (\\S+) re-joining group": "leader_rejoined",
    "Updating metadata for member (\\S+) ": "subscription_changed",
}
NEAR_S = 0.15  # between the wire and the coordinator's log, on the machine of the capture


@cache
def rows():
    """The groups at the end of the capture, and all their rows."""
    groups, found, partitions = {}, [], {}
    for each in decoded_exchanges(CAPTURE, (9092,), APIS | {METADATA}):
        if each.api_key == METADATA:
            topics = each.response["topics"] if each.response is not None else ()
            partitions |= {topic["name"]: len(topic["partitions"]) for topic in topics}
            continue
        name = each.request["groupId"]
        group = groups.setdefault(name, ClassicGroup("default", name))
        found += group.feed(each, partitions)
    for group in groups.values():
        found += group.finish()
    return groups, found


def rows_of(kind):
    return [row for row in rows()[1] if isinstance(row, kind)]


def test_every_logged_generation_is_a_rebalance_with_its_cause_and_times():
    found = {(row.group_id, row.generation): row for row in rows_of(Rebalance)}
    assert found.keys() == generations().keys()
    assert len(found) == 19
    seen = Counter()
    for key, logged in generations().items():
        row = found[key]
        pattern, cause = next(each for each in REASONS.items() if re.match(each[0], logged.reason))
        assert (row.cause, row.cause_member) == (cause, re.match(pattern, logged.reason)[1])
        assert row.members_after == logged.members
        assert row.started_ns / 1e9 == pytest.approx(logged.prepared, abs=NEAR_S)
        assert row.joined_ns / 1e9 == pytest.approx(logged.stabilised, abs=NEAR_S)
        assert row.ended_ns / 1e9 == pytest.approx(logged.assigned, abs=NEAR_S)
        assert row.started_ns <= row.joined_ns <= row.ended_ns
        seen[cause] += 1
    assert seen == {"member_joined": 12, "member_left": 4, "session_expired": 2, "leader_rejoined": 1}


def test_rebalances_count_the_members_before_and_those_that_rejoined():
    found = {(row.group_id, row.generation): row for row in rows_of(Rebalance)}
    for (group, number), row in found.items():
        before = found.get((group, number - 1))
        assert row.members_before == (before.members_after if before else 0)
        assert row.rejoined <= min(row.members_before, row.members_after)
    assert found["range-g", 3].rejoined == 2
    assert found["range-g", 8].rejoined == 0  # both had been away for longer than their session timeout


def test_a_leaders_assignment_is_checked():
    agreeing = Counter((row.strategy, row.agrees) for row in rows_of(Assignment))
    assert set(agreeing) == {("range", True), ("roundrobin", True), ("cooperative-sticky", True)}
    last = {}
    for row in rows_of(Assignment):
        last.setdefault((row.group_id, row.generation), set()).add((row.topic, row.partition))
    assert len(last["range-g", 9]) == 7 + 6  # one topic had grown


def test_groups_have_the_final_state_that_their_members_left():
    groups, _ = rows()
    assert {name: group.state for name, group in groups.items() if name != "new-g"} == {
        "range-g": "Empty",
        "rr-g": "Empty",
        "coop-g": "Empty",
        "static-g": "Stable",  # static members do not leave when they close
    }


def test_events_have_leaves_and_refusals():
    events = rows_of(GroupEvent)
    assert {row.member_id for row in events if row.event == "leave"} == departures()
    failed = Counter(row.error for row in events if row.event == "heartbeat_failed")
    assert set(failed) >= {"REBALANCE_IN_PROGRESS", "UNKNOWN_MEMBER_ID"}
    refused = Counter(row.error for row in events if row.event == "join_answered" and row.error)
    assert refused["MEMBER_ID_REQUIRED"] >= 12


def test_states_are_those_of_the_coordinator():
    names = {"Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead"}
    assert {state for state, _ in STATES} | set(STATES.values()) == names


def test_other_types_of_groups_have_no_assignments_and_raise_nothing():
    """Kafka Connect's members use their own format; an unanswered request changes nothing."""
    group = ClassicGroup("default", "connect")
    metadata = b"\0\2" + b"\xff" * 9
    protocols = [{"name": "sessioned", "metadata": metadata}]
    request = {"groupId": "connect", "memberId": "m", "protocolType": "connect", "protocols": protocols}
    request["sessionTimeoutMs"] = 10_000
    members = [{"memberId": "m", "metadata": metadata}]
    answer = {"errorCode": 0, "generationId": 1, "protocolName": "sessioned", "leader": "m", "memberId": "m"}
    joined = DecodedExchange(11, 2, request, answer | {"members": members}, 1, 2)
    synced = {"groupId": "connect", "memberId": "m", "generationId": 1}
    assigned = synced | {"assignments": [{"memberId": "m", "assignment": b"\xff" * 5}]}
    found = [
        row
        for each in (joined, DecodedExchange(14, 2, assigned, {"errorCode": 0, "assignment": b"12345"}, 3, 4))
        for row in group.feed(each, {})
    ]
    assert not [row for row in found if isinstance(row, Assignment)]
    (row,) = [row for row in found if isinstance(row, Rebalance)]
    assert (row.strategy, row.ended_ns, row.cause) == ("sessioned", 4, "member_joined")
    assert group.state == "Stable"
    (asked,) = group.feed(DecodedExchange(11, 2, request, None, 5, 0), {})
    assert (asked.event, asked.time_ns, asked.reason) == ("join", 5, "it was never answered")


NOTHING = b"\0\0\0\0\0\0\xff\xff\xff\xff"  # no subscribed topics


def joined(member, number, at, members=(), metadata=NOTHING):
    protocols = [{"name": "range", "metadata": metadata}]
    request = {"groupId": "g", "memberId": member, "protocolType": "consumer", "protocols": protocols}
    request["sessionTimeoutMs"] = 10_000
    members_joined = [{"memberId": each, "metadata": protocols[0]["metadata"]} for each in members]
    answer = {"errorCode": 0, "generationId": number, "protocolName": "range", "leader": "a", "memberId": member}
    return DecodedExchange(11, 7, request, answer | {"members": members_joined}, at, at + 1)


def synced(member, number, at, assignments=()):
    request = {"groupId": "g", "memberId": member, "generationId": number, "assignments": assignments}
    return DecodedExchange(14, 5, request, {"errorCode": 0, "assignment": b""}, at, at + 1)


def test_a_follower_that_rejoins_a_stable_group_causes_no_rebalance():
    """The coordinator returns the current generation. librdkafka rejoins like this after it has looked up topics
    again."""
    group = ClassicGroup("default", "g")
    begin = [joined("a", 1, 10, "ab"), joined("b", 1, 11), synced("a", 1, 20, [{"memberId": "a", "assignment": b""}])]
    talk = [*begin, synced("b", 1, 21), joined("b", 1, 90), synced("b", 1, 95)]
    found = [row for each in talk for row in group.feed(each, {})]
    found += group.finish()
    (row,) = [row for row in found if isinstance(row, Rebalance)]
    assert (row.generation, row.members_after, row.ended_ns) == (1, 2, 22)
    assert group.state == "Stable" and group.members.keys() == {"a", "b"}
    answered = [row for row in found if isinstance(row, GroupEvent) and row.event == "join_answered"]
    assert [row.member_id for row in answered] == ["a", "b", "b"]


@pytest.mark.parametrize("called,cause", [(False, ("leader_rejoined", "a")), (True, ("session_expired", "b"))])
def test_a_leader_that_rejoins_by_itself_is_the_cause_and_a_later_expiry_is_not(called, cause):
    """b is dead but not expired yet when a rejoins by itself; or a rejoins because the coordinator reports that b
    expired."""
    group = ClassicGroup("default", "g")
    talk = [joined("a", 1, 10, "ab"), joined("b", 1, 11), synced("a", 1, 20), synced("b", 1, 21)]
    if called:
        request = {"groupId": "g", "memberId": "a", "generationId": 1}
        talk.append(DecodedExchange(12, 4, request, {"errorCode": 27}, 30, 31))
    talk += [joined("a", 2, 40, "a"), synced("a", 2, 50)]
    found = [row for each in talk for row in group.feed(each, {})]
    row = [row for row in found if isinstance(row, Rebalance)][-1]
    assert (row.generation, row.members_after, (row.cause, row.cause_member)) == (2, 1, cause)


def test_members_that_the_capture_lacks_join_and_go_without_expiring():
    """u speaks inside TLS: the leader's lists alone name it. a leaves while u's SyncGroups are still awaited."""
    group = ClassicGroup("default", "g")

    def called(number, at):
        return DecodedExchange(
            12, 4, {"groupId": "g", "memberId": "a", "generationId": number}, {"errorCode": 27}, at, at
        )

    leaving = DecodedExchange(13, 1, {"groupId": "g", "memberId": "a"}, {"errorCode": 0}, 90, 91)
    talk = [joined("a", 1, 10, "a"), synced("a", 1, 20), called(1, 30), joined("a", 2, 40, "au"), synced("a", 2, 50)]
    talk += [called(2, 60), joined("a", 3, 70, "a"), synced("a", 3, 75), joined("a", 4, 80, "au"), leaving]
    found = [row for each in talk for row in group.feed(each, {})]
    found += group.finish()
    causes = [(row.cause, row.cause_member, row.rejoined) for row in found if isinstance(row, Rebalance)]
    assert causes == [
        ("member_joined", "a", 0),
        ("member_joined", "u", 1),
        ("unknown", "u", 1),
        ("leader_rejoined", "a", 1),  # as long as no heartbeat called it
    ]
    assert "expired" not in {row.event for row in found if isinstance(row, GroupEvent)}


@pytest.mark.parametrize("number,state", [(2, "PreparingRebalance"), (1, "Stable")])
def test_a_heartbeat_reveals_a_rebalance_before_any_join_is_answered(number, state):
    """A heartbeat of another generation is late: the group has rebalanced since."""
    group = ClassicGroup("default", "g")
    talk = [joined("a", 2, 10, "ab"), joined("b", 2, 11), synced("a", 2, 20), synced("b", 2, 21)]
    request = {"groupId": "g", "memberId": "a", "generationId": number}
    for each in [*talk, DecodedExchange(12, 4, request, {"errorCode": 27}, 30, 31)]:
        list(group.feed(each, {}))
    assert group.state == state
    list(group.feed(joined("b", 2, 35), {}))  # from another coordinator, which has seen no rebalance
    assert group.state == "Stable"
    for each in (joined("a", 3, 40, "ab"), joined("b", 3, 41), synced("a", 3, 50), synced("b", 3, 51)):
        list(group.feed(each, {}))
    assert group.state == "Stable"


@pytest.mark.parametrize("left_at", [None, 20, 5])
def test_the_end_of_an_incomplete_generation_is_the_cause_of_the_next(left_at):
    """b is the leader and never assigns: a, which waits for it, learns that b has expired, or b leaves.

    b may send its LeaveGroup while its JoinGroup is pending: the coordinator responds to JoinGroup first.
    """
    group = ClassicGroup("default", "g")
    talk = [joined("a", 1, 10), joined("b", 1, 11, "ab")]
    request = {"groupId": "g", "memberId": "a", "generationId": 1, "assignments": ()}
    refused = DecodedExchange(14, 5, request, {"errorCode": 27, "assignment": b""}, 12, 30)
    left = (
        []
        if left_at is None
        else [DecodedExchange(13, 0, {"groupId": "g", "memberId": "b"}, {"errorCode": 0}, left_at, 21)]
    )
    talk += [*left, refused, joined("a", 2, 40, "a"), synced("a", 2, 50)]
    found = [row for each in talk for row in group.feed(each, {})]
    rows = [row for row in found if isinstance(row, Rebalance)]
    causes = [(row.generation, row.cause, row.cause_member) for row in rows]
    assert causes == [(1, "member_joined", "a"), (2, "session_expired" if left_at is None else "member_left", "b")]


@pytest.mark.parametrize("assigned,agrees", [(2, True), (3, True), (1, False)])
def test_an_assignment_may_predate_the_growth_of_a_topic(assigned, agrees):
    topic = b"\0\0\0\1\0\1t"
    parts = b"".join(number.to_bytes(4, "big") for number in (assigned, *range(assigned)))
    sent = [{"memberId": "a", "assignment": b"\0\0" + topic + parts + b"\xff" * 4}]
    group = ClassicGroup("default", "g")
    talk = [joined("a", 1, 10, "a", b"\0\0" + topic + b"\xff" * 4), synced("a", 1, 20, sent)]
    found = [row for each in talk for row in group.feed(each, {"t": 3}, {"t": 2})]
    rows = [row for row in found if isinstance(row, Assignment)]
    assert [(row.partition, row.agrees) for row in rows] == [(number, agrees) for number in range(assigned)]


def test_a_generation_whose_members_all_left_has_no_assignment_time():
    group = ClassicGroup("default", "g")
    left = DecodedExchange(13, 0, {"groupId": "g", "memberId": "a"}, {"errorCode": 0}, 20, 21)
    found = [row for each in (joined("a", 1, 10, "a"), left) for row in group.feed(each, {})]
    found += group.finish()
    (row,) = [row for row in found if isinstance(row, Rebalance)]
    assert row.ended_ns is None and row.started_ns <= row.joined_ns


@pytest.mark.parametrize(
    "number,cause,started,before",
    [
        # the generation in between had no members: the coordinator waited for nobody
        (3, ("member_joined", "b"), 500, 0),
        (2, ("member_left", "a"), 20, 1),  # b had its id already, so the generation of the leave waited for it
    ],
)
def test_an_empty_group_does_not_rebalance_until_a_member_joins(number, cause, started, before):
    group = ClassicGroup("default", "g")
    left = DecodedExchange(13, 0, {"groupId": "g", "memberId": "a"}, {"errorCode": 0}, 20, 21)
    talk = [joined("a", 1, 10, "a"), synced("a", 1, 12), left, joined("b", number, 500, "b"), synced("b", number, 510)]
    found = [row for each in talk for row in group.feed(each, {})]
    row = [row for row in found if isinstance(row, Rebalance)][-1]
    assert (row.generation, row.started_ns, row.ended_ns) == (number, started, 511)
    assert ((row.cause, row.cause_member), row.members_before, row.members_after) == (cause, before, 1)
    assert not [row for row in found if getattr(row, "event", "") == "expired"]


def test_the_reason_given_by_a_member_is_truncated():
    """A frame can contain 32 KiB of it, and each row and /api/groups would repeat them."""
    group = ClassicGroup("default", "g")
    asked = joined("b", 2, 30)
    asked.request["reason"] = "r" * 30_000
    left = {"groupId": "g", "members": [{"memberId": "b", "reason": "x" * 30_000}]}
    begin = [joined("a", 1, 10, "a"), synced("a", 1, 20), asked, joined("a", 2, 31, "ab"), synced("a", 2, 40)]
    talk = [*begin, synced("b", 2, 41), DecodedExchange(13, 5, left, {"errorCode": 0}, 50, 51), joined("a", 3, 60, "a")]
    found = [row for each in talk for row in group.feed(each, {})] + [*group.finish()]
    reasons = {row.reason for row in found if isinstance(row, GroupEvent | Rebalance) and row.reason is not None}
    assert {"r" * (MAX_REASON - 1) + "…", "x" * (MAX_REASON - 1) + "…"} <= reasons
    assert max(map(len, reasons)) == MAX_REASON
    of_rebalances = [row.reason for row in found if isinstance(row, Rebalance)]
    assert [reason[0] for reason in of_rebalances[1:]] == ["r", "x"]


def test_a_capture_that_begins_during_a_rebalance_has_its_members_and_assignments():
    """All joins of a generation are before the beginning of the capture; its SyncGroup responses alone give the same
    rows."""
    whole = {(row.group_id, row.generation): row for row in rows_of(Rebalance) if row.ended_ns is not None}
    owned = {}
    for row in rows_of(Assignment):
        owned.setdefault((row.group_id, row.generation), set()).add((row.member_id, row.topic, row.partition))
    talk = [each for each in decoded_exchanges(CAPTURE, (9092,), APIS) if each.api_key != METADATA]
    cut = 0
    for (name, number), row in whole.items():
        group, found = ClassicGroup("default", name), []
        for each in talk:
            if each.request["groupId"] == name and each.response_start > row.joined_ns and each.api_key != JOIN_GROUP:
                found += group.feed(each, {})
                if [one for one in found if isinstance(one, Rebalance)]:
                    break
        first = next(one for one in found if isinstance(one, Rebalance))
        cut += 1
        assert (first.generation, first.members_after, first.ended_ns) == (number, row.members_after, row.ended_ns)
        assert (first.cause, group.state, len(group.members)) == ("unknown", "Stable", row.members_after)
        given = {(one.member_id, one.topic, one.partition) for one in found if isinstance(one, Assignment)}
        assert given == owned.get((name, number), set())
        assert not [one for one in found if getattr(one, "event", "") == "assignment_differs"]
    assert cut > 12


def test_a_response_from_an_earlier_generation_changes_nothing():
    group = ClassicGroup("default", "g")
    late = joined("b", 1, 11)
    late.response_start = 60
    talk = [joined("a", 1, 10, "ab"), joined("a", 2, 40, "a"), late, synced("a", 2, 70)]
    found = [row for each in talk for row in group.feed(each, {})]
    rows = [(row.generation, row.members_after) for row in found if isinstance(row, Rebalance)]
    assert rows == [(1, 2), (2, 1)]
    assert (group.generation, group.state, group.members.keys()) == (2, "Stable", {"a"})


def test_a_recreated_group_begins_with_the_same_generation():
    group, hour = ClassicGroup("default", "g"), 3600 * 10**9
    talk = [joined("a", 1, 10, "ab"), joined("b", 1, 11), synced("a", 1, 20), synced("b", 1, 21)]
    talk += [joined("c", 1, hour), joined("d", 1, hour + 1, "cd"), synced("c", 1, hour + 2), synced("d", 1, hour + 3)]
    found = [row for each in talk for row in group.feed(each, {})]
    rows = [(row.generation, row.cause, row.cause_member) for row in found if isinstance(row, Rebalance)]
    assert rows == [(1, "member_joined", "a"), (1, "member_joined", "c")]
    assert [row.member_id for row in found if getattr(row, "event", "") == "expired"] == ["a", "b"]
    assert group.members.keys() == {"c", "d"}


def test_assignments_are_not_checked_if_subscriptions_are_unknown():
    """More topics than are followed, or bytes in an unknown format."""
    sent = [{"memberId": "a", "assignment": b"\0\0\0\0\0\1\0\1t\0\0\0\1\0\0\0\0" + b"\xff" * 4}]
    group = ClassicGroup("default", "g")
    talk = [joined("a", 1, 10, "a", b"\0"), synced("a", 1, 20, sent)]
    found = [row for each in talk for row in group.feed(each, {"t": 1})]
    assert "assignment_differs" not in {getattr(row, "event", "") for row in found}
    assert [row.agrees for row in found if isinstance(row, Assignment)] == [None]
