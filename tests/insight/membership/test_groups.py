"""Groups of all protocols: members and their partitions equal the official tool's output, errors the brokers' logs."""

import gzip
import json
import re
from collections import Counter
from functools import cache
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.knowledge import Knowledge
from kproxy.insight.membership import groups
from kproxy.insight.membership.groups import APIS, Groups
from kproxy.insight.rows import GroupEvent, Rebalance
from kproxy.insight.topics import APIS as TOPICS
from kproxy.insight.topics import Topics
from kproxy.protocol import codec
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from tests import captures
from tests.insight.membership.test_classic import joined, synced
from tests.insight.test_changes import LINE
from tests.insight.truth import CAPTURE, DATA, decoded_exchanges, departures, log
from tests.protocol.messages import Layout, bodies

BROKERS = range(9091, 9096)


def feed(known, topics, each):
    if each.api_key in TOPICS:
        topics.feed(each)
    return list(known.feed(each, topics)) if each.api_key in APIS else []


@cache
def rows(name=None):
    known, topics = Groups("c"), Topics()
    path = CAPTURE if name is None else captures.capture(name)
    ports = (9092,) if name is None else BROKERS
    return [row for each in decoded_exchanges(path, ports, APIS | TOPICS) for row in feed(known, topics, each)] + [
        *known.finish()
    ]


def events(*names, of=None):
    return [row for row in rows(of) if isinstance(row, GroupEvent) and row.event in names]


# --- against the official tool ----------------------------------------------------------------------------------------


def described():
    """(from, to, {group: output of `--state`}, {group: {member: partitions}} of `--members --verbose`)."""
    for line in gzip.decompress((DATA / "k41_groups_a.describe.jsonl.gz").read_bytes()).splitlines():
        output = json.loads(line)
        states, members = {}, {}
        for row in output["text"].splitlines():
            cells = row.split()
            if output["how"] == "--state" and "(" in row and cells[0].endswith("-g"):
                states[cells[0]] = int(re.search(r"\((\d)\)", row)[1]), cells[-2], int(cells[-1])
            elif output["how"] == "--members" and len(cells) > 4 and cells[0].endswith("-g"):
                current = next((cell for cell in cells[2:] if re.search(r":\d+(,|;|$)", cell)), "")
                members.setdefault(cells[0], {})[cells[1]] = owned(current)
        yield output["from"], output["to"], states, members


def owned(cell):
    """Parse "orders:0,2, clicks:1" into partitions."""
    return {(part.split(":")[0], int(index)) for part in re.findall(r"[^\s:;,]+:[\d,]+", cell)
            for index in part.split(":")[1].strip(",").split(",")}  # fmt: skip


def state(group):
    return group.coordinator_id, group.state, len(group.members)


def members(group):
    return {member.id: set(member.owned or ()) for member in group.members.values()}


def test_states_members_and_partitions_equal_the_tools_output():
    """Each describe took some seconds: at some moment of these the group must match it, including its coordinator."""
    known, topics, exchanges = Groups("c"), Topics(), iter(decoded_exchanges(CAPTURE, (9092,), APIS | TOPICS))
    compared, waiting = Counter(), None
    for begin, end, states, owners in described():
        open_states, open_owners = dict(states), dict(owners)
        while True:
            for group in known:
                if state(group) == open_states.get(group.group_id):
                    del open_states[group.group_id]
                    compared["state"] += 1
                if members(group) == open_owners.get(group.group_id):
                    del open_owners[group.group_id]
                    compared["members"] += 1
            waiting = waiting or next(exchanges, None)
            if waiting is None or waiting.response_start / 1e9 > end:
                break
            feed(known, topics, waiting)
            waiting = None
        assert not open_states and not open_owners, (begin, open_states, open_owners)
    assert compared["state"] >= 15 and compared["members"] >= 15


# --- against the brokers' logs ----------------------------------------------------------------------------------------


def test_expired_members_were_removed_by_the_coordinator_or_killed():
    """The killed broker reported no expiry of its groups' members: they returned with new member ids."""
    found = {row.member_id for row in events("expired")}
    removed = set(re.findall(r"removing member (\S+) on heartbeat expiration", log()))
    assert removed <= found
    assert not found & departures()
    assert {member.split("-")[0] for member in found} == {
        "r0",
        "r2",
        "r3",
        "rr0",
        "rr1",
        "c1",
        "c2",
        "inst",
    }


def test_returning_static_members_replace_themselves():
    found = events("member_replaced")
    assert len(found) == log().count("Static member which joins during Stable stage")
    assert {row.group_instance_id for row in found} == {"inst-0", "inst-1"}


def test_the_coordinator_is_the_broker_that_logged_the_group():
    logged = Counter(re.findall(r"b(\d) .*?Stabilized group (\S+) ", log()))
    for row in rows():
        if isinstance(row, Rebalance) and row.protocol == "classic":
            assert logged[str(row.coordinator_id), row.group_id]
    moved = {(row.group_id, row.reason) for row in events("coordinator_moved")}
    assert moved == {(group, "broker 2 instead of broker 3") for group in ("rr-g", "coop-g")}


# The event of each API for a response with an error.
EVENTS = {
    "FindCoordinator": "coordinator_not_found",
    "JoinGroup": "join_answered",
    "SyncGroup": "sync_answered",
    "Heartbeat": "heartbeat_failed",
    "LeaveGroup": "leave",
    "OffsetCommit": "commit_failed",
    "OffsetFetch": "offset_fetch_failed",
    "TxnOffsetCommit": "commit_failed",
    "ConsumerGroupHeartbeat": "heartbeat_failed",
    "ShareGroupHeartbeat": "heartbeat_failed",
    "DeleteGroups": "deleted",
}


def logged_errors(name):
    """How often each event with its error must occur, from the brokers' own decoding: one for each code of a
    response."""
    found = Counter()
    for line in (captures.folder("brokerlogs") / f"{name}.brokerlog").open():
        entry = json.loads(LINE.match(line)[1])
        api = schema().apis[entry["requestHeader"]["requestApiKey"]].name
        if api == "FindCoordinator" and entry["request"].get("keyType"):
            continue
        if api in EVENTS:
            codes = {int(code) for code in re.findall(r'"errorCode": ?(-?\d+)', json.dumps(entry["response"]))} - {0}
            found += Counter((EVENTS[api], error_name(code)) for code in codes)
    return found


@pytest.mark.parametrize(
    "name",
    ("k39_zk_cluster", "k41_java_cluster", "k41_kafkajs", "k41_librdkafka", "k41_kip848_share", "k41_sasl_plain"),
)
def test_every_error_of_a_group_is_an_event(name):
    found = Counter((row.event, row.error) for row in rows(name) if isinstance(row, GroupEvent) and row.error)
    found = Counter({key: count for key, count in found.items() if key[0] != "described"})
    assert found == logged_errors(name)


def test_assigned_partitions_are_those_that_a_member_did_not_own():
    """A cooperative group: the partitions of a leaving member go to others within one or two generations."""
    owned_by, seen = {}, set()
    for row in events("assigned", "revoked"):
        if row.group_id == "coop-g":
            parts = set(row.reason.split(", "))
            has = owned_by.setdefault(row.member_id, set())
            assert not has & parts if row.event == "assigned" else has >= parts
            owned_by[row.member_id] = has ^ parts
            seen.add((row.event, row.generation))
    # the second member gets the partitions that the first gave up
    assert ("revoked", 2) in seen and ("assigned", 3) in seen


# --- synthetic exchanges ----------------------------------------------------------------------------------------------


def feed_all(*exchanges):
    known, topics = Groups("c"), Topics()
    return [row for each in exchanges for row in known.feed(each, topics)]


def asked(member, at, error=0, generation=1, group="g"):
    request = {"groupId": group, "memberId": "", "sessionTimeoutMs": 6000, "protocolType": "consumer", "protocols": []}
    answer = {"errorCode": error, "memberId": member, "generationId": generation, "leader": member, "members": []}
    return DecodedExchange(11, 5, request, answer, at, at + 1)


def test_a_member_with_an_id_that_never_joined_is_reported_after_the_join_timeout():
    """Its JoinGroup may wait for the rebalance timeout of others; a generation without the member proves it sooner."""
    second = 10**9
    unanswered = asked("slow", second, error=79)
    unanswered.request["rebalanceTimeoutMs"] = 60_000
    known = Knowledge("c")
    found = list(known.feed(unanswered)) + list(known.due(67 * second))
    assert not [row for row in found if row.event == "never_joined"]
    other = DecodedExchange(10, 0, {"key": "h"}, None, 68 * second, 0)
    (row,) = known.feed(other)  # of another group
    assert (row.event, row.member_id, row.time_ns) == ("never_joined", "slow", 7 * second + 1)
    later = asked("a", 9 * second)
    later.response |= {"members": [{"memberId": "a", "metadata": b""}]}
    synced = {"groupId": "g", "memberId": "a", "generationId": 1, "assignments": []}
    done = DecodedExchange(14, 5, synced, {"errorCode": 0, "assignment": b""}, 10 * second, 10 * second)
    assert "never_joined" in {row.event for row in feed_all(unanswered, later, done) if isinstance(row, GroupEvent)}


def test_a_member_that_joined_in_time_is_not_reported_as_never_joined():
    second = 10**9
    slow, others, late = asked("slow", second, error=79), asked("a", 30 * second), asked("slow", 2 * second)
    late.response_start = 31 * second
    found = feed_all(slow, others, late)
    assert not [row for row in found if row.event == "never_joined"]


def test_a_batch_of_coordinators_and_a_transactional_id():
    coordinators = [
        {"key": "a", "nodeId": 3, "host": "h", "port": 1, "errorCode": 0},
        {"key": "b", "nodeId": -1, "host": "", "port": -1, "errorCode": 15, "errorMessage": "not now"},
    ]
    batch = DecodedExchange(10, 4, {"keyType": 0, "coordinatorKeys": ["a", "b"]}, {"coordinators": coordinators}, 1, 2)
    of_transaction = DecodedExchange(
        10, 4, {"keyType": 1, "coordinatorKeys": ["a"]}, {"coordinators": coordinators[:1]}, 1, 2
    )
    old = DecodedExchange(10, 0, {"key": "c"}, {"errorCode": 0, "nodeId": 1, "host": "h", "port": 1}, 3, 4)
    found = feed_all(batch, of_transaction, old, asked("m", 5, group="a"))
    assert [(row.group_id, row.event, row.coordinator_id, row.reason) for row in found[:3]] == [
        ("a", "coordinator_found", 3, "h:1"),
        ("b", "coordinator_not_found", None, "not now"),
        ("c", "coordinator_found", 1, "h:1"),
    ]
    assert {row.coordinator_id for row in found if row.group_id == "a"} == {3}


def test_an_unseen_group_is_known_once_it_is_described():
    known, topics = Groups("c"), Topics()
    member = {"memberId": "m", "clientId": "c", "clientHost": "/h", "memberMetadata": b"", "memberAssignment": b""}
    described_group = {
        "groupId": "g",
        "errorCode": 0,
        "groupState": "Stable",
        "protocolType": "consumer",
        "protocolData": "range",
    }
    (row,) = known.feed(DecodedExchange(15, 5, {}, {"groups": [described_group | {"members": [member]}]}, 1, 2), topics)
    assert (row.event, row.reason) == ("described", "Stable, 1 member")
    group = known.get("g")
    assert (group.state, group.strategy, set(group.members)) == ("Stable", "range", {"m"})
    rows = list(known.feed(DecodedExchange(42, 2, {}, {"results": [{"groupId": "g", "errorCode": 0}]}, 3, 4), topics))
    assert [row.event for row in rows] == ["deleted"]
    assert known.get("g") is None


def test_a_commit_does_not_create_a_group():
    """Consumers without a subscription, and any other client, may commit."""
    known = Groups("c")
    parts = [{"partitions": [{"errorCode": 25}, {"errorCode": 0}, {"errorCode": 25}]}]
    (row,) = known.feed(DecodedExchange(8, 2, {"groupId": "g", "memberId": "m"}, {"topics": parts}, 1, 2), Topics())
    assert (row.event, row.error, len(known)) == ("commit_failed", "UNKNOWN_MEMBER_ID", 0)


def test_offsets_of_a_transaction_count_when_it_ends():
    """An application in the capture commits what it consumed; synthetic transactions abort, or cannot end."""
    ended = events("offsets_committed", "offsets_aborted", of="k41_java_cluster")
    logged = (captures.folder("brokerlogs") / "k41_java_cluster.brokerlog").read_text()
    requests = [json.loads(LINE.match(line)[1]) for line in logged.splitlines() if '"TXN_OFFSET_COMMIT"' in line]
    assert {row.group_id for row in ended} == {each["request"]["groupId"] for each in requests}
    taken = [each for each in requests if '"errorCode": 0' in json.dumps(each["response"])]  # the others were too early
    counts = [len(topic["partitions"]) for each in taken for topic in each["request"]["topics"]]
    assert sum(int(row.reason.split()[0]) for row in ended) == sum(counts) > 5

    parts = {"topics": [{"partitions": [{"errorCode": 0}, {"errorCode": 0}]}]}
    request = {"groupId": "g", "transactionalId": "t", "memberId": "", "generationId": -1}
    commit = DecodedExchange(28, 3, request, parts, 1, 2)
    fenced = DecodedExchange(26, 2, {"transactionalId": "t", "committed": True}, {"errorCode": 47}, 3, 4)
    aborted = DecodedExchange(26, 2, {"transactionalId": "t", "committed": False}, {"errorCode": 0}, 5, 6)
    found = feed_all(commit, commit, fenced, aborted, aborted)
    assert [(row.event, row.error, row.reason) for row in found] == [
        ("commit_failed", "INVALID_PRODUCER_EPOCH", "transaction t did not end"),
        ("offsets_aborted", None, "4 offsets in transaction t"),
    ]


def test_tasks_of_streams_groups_are_assigned_and_revoked():
    topology = {"subtopologies": [{"sourceTopics": ["in"]}]}

    def beat(epoch, next_epoch, at, tasks, topology=None):
        request = {"groupId": "s", "memberId": "m", "memberEpoch": epoch, "topology": topology, "instanceId": None}
        answer = {"errorCode": 0, "memberId": "m", "memberEpoch": next_epoch, "heartbeatIntervalMs": 5000}
        active = None if tasks is None else [{"subtopologyId": "0", "partitions": tasks}]
        return DecodedExchange(88, 0, request, answer | {"activeTasks": active}, at, at + 1)

    found = feed_all(beat(0, 1, 1, [0, 1], topology), beat(1, 1, 3, None), beat(1, 2, 2 * 10**9, [1]))
    tasks = [
        (row.event, row.reason) for row in found if isinstance(row, GroupEvent) and row.event in ("assigned", "revoked")
    ]
    assert tasks == [("assigned", "0-0, 0-1"), ("revoked", "0-0")]
    assert [row.protocol for row in found if isinstance(row, Rebalance)] == ["streams"]


def test_coordinators_and_groups_are_bounded(monkeypatch):
    monkeypatch.setattr(groups, "MAX_GROUPS", 3)
    known = Groups("c")
    answer = {"errorCode": 0, "nodeId": 1, "host": "h", "port": 1}
    for number in range(9):
        list(known.feed(DecodedExchange(10, 0, {"key": f"g{number}"}, answer, 1, 2), Topics()))
        list(known.feed(asked(f"m{number}", number, group=f"g{number}"), Topics()))
    assert len(known) == len(known._coordinators) == 3
    assert known.left_out == {"groups": 6}


def test_subscriptions_count_towards_the_memory_limit(monkeypatch):
    """A client may name very many topics; the approximate bytes kept for all groups are bounded."""
    monkeypatch.setattr(groups, "MAX_WEIGHT", 1000)
    topics = [f"a-topic-of-a-long-name-{number}" for number in range(1000)]
    metadata = codec.encode_data("ConsumerProtocolSubscription", 0, {"topics": topics, "userData": None})
    known = Groups("c")
    for number in range(60):
        exchange = asked(f"m{number}", number, group=f"g{number}")
        exchange.request["protocols"] = [{"name": "range", "metadata": metadata}]
        exchange.response["protocolName"] = "range"
        list(known.feed(exchange, Topics()))
        list(known.feed(beat(f"n{number}", topics, number), Topics()))
    assert len(known) * len(metadata) < 2 * 512 * 1000
    assert known.left_out["groups"] > 80


@pytest.mark.parametrize("protocol", ("classic", "consumer"))
def test_repeated_requests_of_members_add_no_weight(protocol):
    """As after new metadata or a reconnect; otherwise one member would make kproxy forget all other groups."""
    known, topics = Groups("c"), Topics()
    parts = [{"topicId": UUID(int=1), "partitions": [*range(100)]}]
    parts_given = b"\0\0" + bytes(4) + (20_000).to_bytes(4, "big") + bytes(20_000)
    weights = []
    for number in range(20):
        if protocol == "classic":
            metadata = b"\0\0" + bytes(4) + (20_000).to_bytes(4, "big") + bytes(20_000)
            leader, follower = joined("a", 1, 10, "ab", metadata), joined("b", 1, 11, metadata=metadata)
            asks = synced("b", 1, 30 + number)
            asks.response["assignment"] = parts_given
            # Both members lead and follow: in the forming generation and, from the second time on, in the stable one.
            exchanges = [leader, leader, follower, follower] if number == 0 else [follower]
            exchanges += [synced("a", 1, 20), asks]
        else:
            exchanges = [beat("a", ["t" * 200] * 10 + [f"{each}" * 100 for each in range(100)], number)]
            exchanges[0].response["memberEpoch"] = 1
            exchanges[0].response["assignment"] = {"topicPartitions": parts}
        for each in exchanges:
            list(known.feed(each, topics))
        weights.append(known._weight)
    assert weights[0] > 20 and set(weights[1:]) == {weights[-1]}
    assert weights[-1] <= weights[0]


def beat(member, topics, at):
    request = {"groupId": member, "memberId": member, "memberEpoch": 0, "subscribedTopicNames": topics}
    answer = {"errorCode": 0, "memberId": member, "memberEpoch": 1, "heartbeatIntervalMs": 5000, "assignment": None}
    return DecodedExchange(68, 1, request, answer, at, at + 1)


LAYOUTS = [(key, version) for key in sorted(APIS) for version in schema().apis[key].request.versions]
IDS = st.sampled_from(["", "a", "b"])
NUMBERS = st.sampled_from([-2, -1, 0, 1, 2, 79, 2**31 - 1])


def with_few_values(draw, body):
    """Few ids, generations and errors, so that messages meet in one group."""
    for key, value in list(body.items()):
        if key in ("groupId", "memberId", "groupInstanceId", "leader", "key", "name") and value is not None:
            body[key] = draw(IDS)
        elif key in ("generationId", "memberEpoch", "errorCode", "nodeId"):
            body[key] = draw(NUMBERS if key != "errorCode" else st.sampled_from([0, 0, 0, 25, 79]))
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, dict):
                    with_few_values(draw, each)
    return body


@settings(deadline=None)
@given(data=st.data(), pairs=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=6))
def test_any_exchange_gives_rows_and_never_an_error(data, pairs):
    known, topics = Groups("c"), Topics()
    for key, version in pairs:
        api = schema().apis[key]
        request = with_few_values(data.draw, data.draw(bodies(Layout(api.request, version, key, "request"))))
        response = data.draw(st.none() | bodies(Layout(api.response, version, key, "response")))
        at, took = data.draw(st.integers(0, 2**62)), data.draw(st.integers(-5, 10**10))
        answer = None if response is None else with_few_values(data.draw, response)
        list(known.feed(DecodedExchange(key, version, request, answer, at, at + took), topics))
    list(known.finish())
