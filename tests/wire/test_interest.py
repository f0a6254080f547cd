"""The plans of each interest, and the budget of all sessions: exact limits, and eviction."""

from collections.abc import Callable
from typing import Any

import pytest

from kproxy.protocol.apis import API_VERSIONS, FETCH, HEARTBEAT, JOIN_GROUP, METADATA, PRODUCE, SHARE_FETCH
from kproxy.protocol.schema import schema
from kproxy.wire.bodies import BATCHES, ERRORS, SUMS, TOPICS
from kproxy.wire.interest import (
    ANSWER,
    AUTHORIZE,
    FORWARD,
    HOLD,
    MAX_HELD,
    MAX_HELD_LIST,
    REFUSE,
    SCAN,
    STREAM,
    ApiPlan,
    HeldBudget,
    Interest,
)
from kproxy.wire.observing.kept import Kept
from tests.wire.playbook import foreign_request, response

SECOND = 10**9


def test_the_request_held_for_longest_is_evicted_after_a_second() -> None:
    budget, gone = HeldBudget(100), []

    def give_up(session: str) -> None:
        gone.append(session)
        budget.release(60)

    assert not budget.take(101)  # no session can release memory
    budget.give_up = give_up
    budget.begin("first", 0)
    assert budget.take(60, 0, "first") and budget.take(40, 0) and budget.held_bytes == 100
    budget.release(40)
    budget.begin("second", 5)
    assert not budget.take(41, SECOND - 1, "second") and budget.held_bytes == 60
    assert not budget.take(41, SECOND, "first")  # it is not evicted for itself
    assert budget.take(41, SECOND, "second") and (gone, budget.held_bytes) == (["first"], 41)
    budget.begin("third", SECOND)
    budget.end("second")
    assert not budget.take(60, 2 * SECOND - 1) and gone == ["first"]
    assert budget.take(99, 2 * SECOND) and gone == ["first", "third"]


def test_noted_bytes_have_their_own_limit_or_none() -> None:
    budget = HeldBudget(0, 10)
    assert budget.note(4) and budget.note(6) and not budget.note(1) and budget.noted_bytes == 10
    budget.forget(6)
    assert not budget.note(7) and budget.note(6) and budget.noted_bytes == 10
    assert HeldBudget(0).note(1 << 40)


# --- plans -----------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[ApiPlan], bool]] = {
    "prefix": lambda plan: plan.prefix is not None,
    "request body": lambda plan: plan.request_reader is not None,
    "answer body": lambda plan: plan.response_reader is not None,
    "hold": lambda plan: plan.response == HOLD,
    "splits": lambda plan: plan.splits,
    "always": lambda plan: plan.transforms_always,
    "small": lambda plan: plan.keeps_small,
    "kept": lambda plan: plan.kept is not None,
}
FIRST_FIELDS = "Produce, Fetch, SaslHandshake, ApiVersions"
OF_GROUPS = (
    "Produce, Fetch, OffsetFetch, Heartbeat, SaslHandshake, ApiVersions, InitProducerId, EndTxn, TxnOffsetCommit, "
    "OffsetDelete, ConsumerGroupHeartbeat, StreamsGroupHeartbeat"
)
COUNTED = "Produce, Fetch, ListOffsets, OffsetCommit, InitProducerId, EndTxn, TxnOffsetCommit"
ADDRESSES = "Metadata, FindCoordinator, DescribeCluster"
NAMES = (
    "ConsumerGroupDescribe, DescribeTopicPartitions, ShareGroupDescribe, {}DescribeShareGroupOffsets, "
    "AlterShareGroupOffsets, DeleteShareGroupOffsets"
)
ANSWERED = (
    "Produce, Fetch, ListOffsets, Metadata{}, OffsetCommit, OffsetFetch, {}CreateTopics 7, DeleteTopics, "
    "TxnOffsetCommit, DeleteGroups, OffsetDelete, {}" + NAMES.format("ShareFetch, ")
)
KEPT = frozenset((FETCH, METADATA, JOIN_GROUP, HEARTBEAT))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"prefix": FIRST_FIELDS}),
        (
            {"detail": SUMS},
            {"prefix": OF_GROUPS, "request body": COUNTED, "answer body": ANSWERED.format(" 10-13", "", "")},
        ),
        (
            {"detail": BATCHES, "details": True},
            {
                "prefix": "all",
                "request body": "Produce, Fetch, ListOffsets, OffsetCommit, OffsetFetch, InitProducerId, EndTxn, "
                "TxnOffsetCommit, ShareFetch",
                "answer body": ANSWERED.format("", "FindCoordinator, ", "DescribeCluster, "),
            },
        ),
        ({"details": True}, {"prefix": "all", "answer body": ADDRESSES}),
        (
            {"rewrite": True},
            {
                "prefix": FIRST_FIELDS,
                "hold": "Produce 10-13, Metadata, FindCoordinator, ApiVersions, DescribeCluster, ShareAcknowledge",
                "splits": "Metadata",
                "always": "ApiVersions",
            },
        ),
        ({"brokers": True}, {"prefix": FIRST_FIELDS, "answer body": ADDRESSES}),
        (
            {"names": True},
            {
                "prefix": FIRST_FIELDS,
                "answer body": "Metadata 10-13, CreateTopics 7, DeleteTopics 6, " + NAMES.format(""),
            },
        ),
        (
            {"kept": Kept(KEPT, only_failed=(HEARTBEAT,), small=(HEARTBEAT,))},
            {"prefix": FIRST_FIELDS, "kept": "Fetch, Metadata, JoinGroup, Heartbeat", "small": "Heartbeat"},
        ),
    ],
)
def test_what_an_interest_reads_and_holds_of_each_api(settings: dict[str, Any], expected: dict[str, str]) -> None:
    interest = Interest(**settings)
    found: dict[str, list[str]] = {}
    for api in schema().apis.values():
        plans = [interest.plan(api.key << 16 | version) for version in api.request.versions]
        for what, check in CHECKS.items():
            versions = [plan.api_version for plan in plans if check(plan)]
            if versions:
                of = "" if len(versions) == len(plans) else f" {versions[0]}-{versions[-1]}"
                found.setdefault(what, []).append(api.name + (of if len(versions) > 1 or not of else f" {versions[0]}"))
        for plan in plans:
            assert (plan.api_key, plan.title, plan.known) == (api.key, f"{api.name} v{plan.api_version}", True)
            assert plan.response == (STREAM if plan.api_key in (FETCH, SHARE_FETCH) else plan.response) != 0
            assert plan.request == FORWARD and plan.max_held_bytes == MAX_HELD and not plan.is_edited
            assert plan.throttled_after_answer == (plan.api_version in api.throttled_after_answer)
            assert plan.reads_request == (plan.request_reader is not None or plan.kept is not None)
            # A complete answer needs no more than its scan, unless it is read, edited, or kept.
            more = plan.response_reader is not None or (plan.kept is not None and not plan.keeps_small)
            more = more or (plan.response == HOLD and plan.api_key not in (0, 79))
            assert (plan.quick_scan is None) == more, plan
            if plan.response_reader is not None and plan.api_key not in (3, 10, 60):
                assert plan.response_detail == (interest.detail or SUMS)
    every = ", ".join(api.name for api in schema().apis.values())
    assert {what: ", ".join(names).replace(every, "all") for what, names in found.items()} == expected


def test_the_level_of_detail_is_sums_for_metrics_alone() -> None:
    for given, details, level in (
        (BATCHES, False, SUMS),
        (BATCHES, True, BATCHES),
        (TOPICS, False, SUMS),
        (0, True, 0),
    ):
        assert Interest(detail=given, details=details).detail == level
    for detail in (ERRORS, SUMS, TOPICS):  # a level that includes brokers, which sums leave out
        plan = Interest(brokers=True, detail=detail, details=detail == TOPICS).plan(METADATA << 16 | 13)
        one = {"nodeId": 7, "host": "h", "port": 9092}
        frame = response(METADATA, 13, 1, {"brokers": [one]})
        assert plan.response_reader is not None
        assert plan.response_reader(frame, 8, len(frame)).brokers == {("h", 9092): 7}


@pytest.mark.parametrize(
    ("settings", "key", "version", "handling"),
    [
        ({}, API_VERSIONS, 99, FORWARD),
        ({"rewrite": True}, API_VERSIONS, 99, ANSWER),
        ({"rewrite": True}, METADATA, 99, REFUSE),
        ({"rewrite": True}, METADATA, -1, REFUSE),
        ({"rewrite": True}, HEARTBEAT, 99, FORWARD),
        ({"rewrite": True}, -7, -9, FORWARD),
        ({"authorizes": lambda key, version: (key, version) == (-7, -9)}, -7, -9, AUTHORIZE),
        ({"authorizes": lambda key, version: (key, version) == (-7, -9)}, -7, -8, FORWARD),
        ({"authorizes": lambda key, version: True, "rewrite": True}, METADATA, 99, REFUSE),
        ({"authorizes": lambda key, version: (key, version) == (METADATA, 3)}, METADATA, 3, AUTHORIZE),
        ({"authorizes": lambda key, version: (key, version) == (METADATA, 3)}, METADATA, 4, FORWARD),
    ],
)
def test_what_becomes_of_a_request(settings: dict[str, Any], key: int, version: int, handling: int) -> None:
    interest = Interest(**settings)
    plan = interest.plan((key & 0xFFFF) << 16 | version & 0xFFFF)
    assert (plan.request, plan.api_key, plan.api_version) == (handling, key, version)
    known = key in schema().apis and version in schema().apis[key].request.versions
    assert plan.known == known
    if not known:
        assert plan.transforms_always == interest.rewrite and plan.response == 0
        assert (plan.scan is not None) == (
            key == API_VERSIONS and not interest.rewrite
        ) and plan.scan is plan.quick_scan
        assert plan.prefix is not None
        for client in (b"\xff\xff", b"\0\0", b"\0\3abc", b"\0\3a\xffc"):
            frame = foreign_request(key, version, 1, client + b"more")
            name = None if client[0] else client[2:].decode("utf-8", "replace")
            end = 12 + len(client)
            assert plan.prefix(frame, 12, len(frame)) == plan.prefix(frame, 12, end) == ((name, *(None,) * 7), end)
            assert plan.prefix(frame, 12, end - 1) is None


def test_plans_of_unknown_apis_are_few_however_many_a_peer_invents() -> None:
    interest = Interest()
    known = interest.plan(METADATA << 16)
    plans = [interest.plan(200 << 16 | version) for version in range(100)]
    assert [plan.api_version for plan in plans] == [*range(100)] and not any(plan.known for plan in plans)
    assert [interest.plan(200 << 16 | version) is plan for version, plan in enumerate(plans)] == [True] * 64 + [
        False
    ] * 36
    assert len(interest.plans) == 65 and interest.plan(METADATA << 16) is known


@pytest.mark.parametrize("key", [METADATA, PRODUCE, HEARTBEAT])
def test_an_edited_answer_is_held_whole_and_then_read_as_any_other(key: int) -> None:
    kept = Kept((METADATA, HEARTBEAT))
    interest = Interest(rewrite=True, kept=kept, authorizes=lambda key, version: True)
    plan = interest.plan(key << 16 | 4)
    held = interest.held_plan(plan)
    assert held is interest.held_plan(plan) is not plan
    assert (held.response, held.quick_scan, held.splits, held.is_edited) == (HOLD, None, False, True)
    assert (held.max_held_bytes, held.kept, held.request) == (MAX_HELD_LIST, plan.kept, AUTHORIZE)
    read_on = interest.read_on_plan(held)
    assert read_on is interest.read_on_plan(held) is not plan
    assert (read_on.kept, read_on.is_edited, read_on.held) == (None, False, held)
    assert (read_on.response, read_on.splits, read_on.max_held_bytes) == (plan.response, plan.splits, MAX_HELD)
    assert plan.splits == (key == METADATA) and plan.response == (HOLD if key == METADATA else SCAN)
