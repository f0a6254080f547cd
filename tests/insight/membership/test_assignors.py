"""Assignments of real leaders are recomputed exactly, and a wrong assignment is found."""

from collections import Counter
from functools import cache
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.insight.membership.assignors import Member, computed, owned_twice, unowned
from kproxy.protocol import codec
from kproxy.protocol.apis import JOIN_GROUP, METADATA, SYNC_GROUP
from tests import captures
from tests.insight.truth import CAPTURE, decoded_exchanges

CAPTURED = ("k41_java_cluster", "k41_sasl_plain", "k111_java_cluster", "k111_kcat_sarama", "k0102_java_cluster")
CAPTURED += ("k0102_python147", "k39_zk_cluster")
BROKERS = range(9091, 9095)


@cache
def assignments_in(path):
    """(strategy, members, partition counts, the leader's assignment) of every generation in the capture."""
    partitions, joined, found = {}, {}, []
    for each in decoded_exchanges(path, BROKERS, (METADATA, JOIN_GROUP, SYNC_GROUP)):
        key, asked, answer = each.api_key, each.request, each.response
        if answer is None:
            continue
        if key == METADATA:
            for topic in answer["topics"]:
                partitions[topic["name"]] = len(topic["partitions"])
        elif key == JOIN_GROUP and answer["members"]:
            joined[asked["groupId"], answer["generationId"]] = answer["protocolName"], answer["members"]
        elif key == SYNC_GROUP and asked["assignments"]:
            strategy, members = joined[asked["groupId"], asked["generationId"]]
            found.append((strategy, tuple(map(member_of, members)), dict(partitions), assigned(asked["assignments"])))
    return found


def member_of(joined):
    subscription = codec.decode_data("ConsumerProtocolSubscription", joined["metadata"])[1]
    return Member(joined["memberId"], joined.get("groupInstanceId"), tuple(subscription["topics"]))


def assigned(assignments):
    found = {}
    for each in assignments:
        sent = each["assignment"]  # empty for a member without partitions
        parts = codec.decode_data("ConsumerProtocolAssignment", sent)[1]["assignedPartitions"] if sent else ()
        found[each["memberId"]] = frozenset((part["topic"], index) for part in parts for index in part["partitions"])
    return found


def all_assignments():
    return chain.from_iterable(assignments_in(path) for path in (CAPTURE, *map(captures.capture, CAPTURED)))


def test_range_and_round_robin_equal_every_leaders_assignment():
    compared = Counter()
    for strategy, members, partitions, sent in all_assignments():
        expected = computed(strategy, members, partitions)
        if expected is not None:
            assert sent == expected
            assert not owned_twice(sent)
            assert not unowned(sent, members, partitions)
            compared[strategy] += 1
    assert compared == {"range": 40, "roundrobin": 2}


def test_a_wrong_assignment_is_found():
    strategy, members, partitions, sent = next(
        each for each in assignments_in(CAPTURE) if each[0] == "range" and len(each[1]) > 1
    )
    first, second, *_ = sent
    moved = min(sent[first])
    taken = sent | {first: sent[first] - {moved}}
    assert unowned(taken, members, partitions) == {moved}
    twice = sent | {second: sent[second] | {moved}}
    assert owned_twice(twice) == {moved: sorted((first, second))}
    for wrong in (taken, twice):
        assert wrong != computed(strategy, members, partitions)


TOPICS = st.sampled_from("abc")
MEMBERS = st.lists(
    st.builds(Member, st.text("mno", min_size=1, max_size=3), st.none() | TOPICS, st.lists(TOPICS, unique=True)),
    unique_by=lambda member: member.id,
    max_size=6,
)


@pytest.mark.parametrize("strategy", ["range", "roundrobin"])
@given(members=MEMBERS, counts=st.tuples(*[st.integers(0, 7)] * 3))
def test_each_partition_has_one_owner_that_subscribes_to_it_and_shares_are_even(strategy, members, counts):
    partitions = dict(zip("abc", counts, strict=True))
    owned = computed(strategy, members, partitions)
    assert not owned_twice(owned)
    assert not unowned(owned, members, partitions)
    for member in members:
        assert {topic for topic, _ in owned[member.id]} <= set(member.topics)
    if members and len({tuple(sorted(member.topics)) for member in members}) == 1 and strategy == "roundrobin":
        sizes = [len(each) for each in owned.values()]
        assert max(sizes) - min(sizes) <= 1


def test_unknown_strategies_and_topics_are_not_computed():
    members = [Member("m", None, ("a",))]
    assert computed("sticky", members, {"a": 1}) is None
    assert computed("range", members, {}) is None
    assert computed("range", members, {"a": 0}) == {"m": frozenset()}
