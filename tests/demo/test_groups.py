"""The demo's group coordinator: with real clients through kproxy, and state by state."""

import asyncio

import pytest
from confluent_kafka import Consumer, TopicPartition

from kproxy.demo import groups as demo_groups
from kproxy.demo.client import Client
from kproxy.demo.cluster import Cluster
from kproxy.demo.groups import MAX_GROUPS, Groups, State
from kproxy.demo.member import Member
from kproxy.protocol.apis import (
    GROUP_MAX_SIZE_REACHED,
    ILLEGAL_GENERATION,
    INCONSISTENT_GROUP_PROTOCOL,
    INVALID_GROUP_ID,
    INVALID_SESSION_TIMEOUT,
    JOIN_GROUP,
    LEAVE_GROUP,
    MEMBER_ID_REQUIRED,
    NOT_COORDINATOR,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    OFFSET_METADATA_TOO_LARGE,
    REBALANCE_IN_PROGRESS,
    UNKNOWN_MEMBER_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from tests.demo.test_cluster import produce, proxied, until

SETTINGS = {"log_level": 0, "session.timeout.ms": 60_000, "heartbeat.interval.ms": 200, "auto.offset.reset": "earliest"}


def poll_until(condition, *consumers):
    """Poll all in turn: a member that does not poll holds the rebalance up."""
    found = []
    while not condition(found):  # bounded by the test's timeout
        found += [message for each in consumers if (message := each.poll(0.05)) is not None and not message.error()]
    return found


def test_real_consumers_share_a_topic_and_take_over_from_each_other():
    def work(bootstrap):
        settings = {"bootstrap.servers": bootstrap, "group.id": "g", "enable.auto.commit": False, **SETTINGS}
        produce(bootstrap, "t", [b"%d" % index for index in range(30)])
        first, second = (Consumer(settings | {"client.id": name}) for name in ("first", "second"))
        first.subscribe(["t"])
        read = poll_until(lambda found: len(found) == 30, first)
        assert len(first.assignment()) == 3
        for message in read:
            first.commit(message, asynchronous=False)
        second.subscribe(["t"])
        poll_until(lambda _: {len(first.assignment()), len(second.assignment())} == {1, 2}, first, second)
        parts = {(each.topic, each.partition) for who in (first, second) for each in who.assignment()}
        assert parts == {("t", 0), ("t", 1), ("t", 2)}
        first.close()
        poll_until(lambda _: len(second.assignment()) == 3, second)
        committed = second.committed([TopicPartition("t", index) for index in range(3)], timeout=60)
        assert [each.offset for each in committed] == [10, 10, 10]
        second.close()

    async def main():
        cluster = Cluster(topics={"t": 3})
        async with proxied(cluster, detail="topics") as (bootstrap, server):
            await asyncio.to_thread(work, bootstrap)
            group = cluster.groups.groups["g"]
            assert (group.state, group.generation) == (State.EMPTY, 4)  # one, two, one again, none
            (listed,) = await _listed_groups(server, lambda listed: listed["state"] == "Empty")
            # No response carries the generation without members.
            assert (listed["group"], listed["generation"], listed["strategy"]) == ("g", 3, "range")

    asyncio.run(main())


async def _listed_groups(server, complete):
    """Return kproxy's groups once it has read the last responses."""
    async with asyncio.timeout(20):
        while True:
            listed = [each async for each in _rows(server)]
            if listed and complete(listed[0]):
                return listed
            await asyncio.sleep(0.1)


async def _rows(server):
    async for rows in server._api_groups({}):
        for row in rows:
            yield row


def test_demo_members_share_partitions_and_continue_from_each_others_offsets():
    async def main():
        cluster = Cluster(topics={"t": 4})
        async with proxied(cluster) as (bootstrap, _), asyncio.timeout(60):
            host, _, port = bootstrap.rpartition(":")
            owned = {}

            def member(name, versions):
                async def works(partitions, offsets):
                    owned[name] = partitions, dict(offsets)
                    offsets |= dict.fromkeys(partitions, 7)
                    await asyncio.Event().wait()

                return asyncio.create_task(Member(Client(host, int(port), name, versions), "g", "t", 4).run(works))

            first = member("first", None)
            await until(lambda: owned.get("first") == ([0, 1, 2, 3], {}))
            second = member("second", {JOIN_GROUP: 3, OFFSET_FETCH: 7, OFFSET_COMMIT: 6, LEAVE_GROUP: 1})  # an old one
            await until(lambda: len(owned["first"][0]) == 2 and "second" in owned)
            assert sorted(owned["first"][0] + owned["second"][0]) == [0, 1, 2, 3]
            assert owned["second"][1] == dict.fromkeys(owned["second"][0], 7), "it continues at the first one's offsets"
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await until(lambda: owned["second"][0] == [0, 1, 2, 3])
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            await until(lambda: cluster.groups.groups["g"].state is State.EMPTY)

    asyncio.run(main())


# --- states ----------------------------------------------------------------------------------------------------------


def join_body(member="", group="g", protocols=("range",), **more):
    offered = [{"name": name, "metadata": b"m"} for name in protocols]
    body = {"groupId": group, "memberId": member, "protocolType": "consumer", "protocols": offered}
    return body | {"sessionTimeoutMs": 10_000, "rebalanceTimeoutMs": 10_000, "groupInstanceId": None} | more


def of(member, generation, **more):
    return {"groupId": "g", "memberId": member, "generationId": generation, "groupInstanceId": None} | more


class Play:
    """A coordinator, and the steps of its members."""

    def __init__(self, **more):
        self.groups = Groups(lambda topic, index: (topic, index) == ("t", 0), first_delay_s=0, **more)

    async def enter(self, **more):
        """Add a member; return its id and its pending JoinGroup."""
        given = await self.groups.join(9, join_body(**more), "c")
        assert given["errorCode"] == MEMBER_ID_REQUIRED
        joining = asyncio.create_task(self.groups.join(9, join_body(given["memberId"], **more), "c"))
        await asyncio.sleep(0)  # its request is sent
        return given["memberId"], joining

    async def stable(self):
        """Bring a group of one member, its leader, to Stable; return (member id, generation)."""
        member, joining = await self.enter()
        joined = await joining
        assert joined["leader"] == member and [each["memberId"] for each in joined["members"]] == [member]
        given = [{"memberId": member, "assignment": b"all"}]
        synced = await self.groups.sync(of(member, joined["generationId"], assignments=given))
        assert (synced["errorCode"], synced["assignment"]) == (0, b"all")
        return member, joined["generationId"]


def play(scene):
    async def main():
        it = Play()
        async with asyncio.timeout(20):
            await scene(it)
        it.groups.stop()

    asyncio.run(main())


def test_a_rebalance_recalls_the_members_and_waits_for_the_leaders_assignment():
    async def scene(it):
        first, generation = await it.stable()
        assert it.groups.heartbeat(of(first, generation)) == {"errorCode": 0}
        second, joining = await it.enter()
        await asyncio.sleep(0)
        assert it.groups.heartbeat(of(first, generation)) == {"errorCode": REBALANCE_IN_PROGRESS}
        assert (await it.groups.sync(of(first, generation, assignments=[])))["errorCode"] == REBALANCE_IN_PROGRESS
        assert not joining.done()
        again = await it.groups.join(9, join_body(first), "c")
        assert again["generationId"] == generation + 1 and len(again["members"]) == 2
        assert (await joining)["members"] == []  # only the leader gets the member list
        waiting = asyncio.create_task(it.groups.sync(of(second, generation + 1, assignments=[])))
        await asyncio.sleep(0)
        assert not waiting.done() and it.groups.groups["g"].state is State.COMPLETING
        assignments = [{"memberId": second, "assignment": b"b"}, {"memberId": "stranger", "assignment": b"x"}]
        await it.groups.sync(of(first, generation + 1, assignments=assignments))
        assert (await waiting)["assignment"] == b"b"
        # A follower that joins again unchanged gets the same generation; a leader that does starts a rebalance.
        assert (await it.groups.join(9, join_body(second), "c"))["generationId"] == generation + 1
        assert it.groups.groups["g"].state is State.STABLE
        left = it.groups.leave({"groupId": "g", "members": [{"memberId": second}, {"memberId": "stranger"}]})
        assert [each["errorCode"] for each in left["members"]] == [0, UNKNOWN_MEMBER_ID]
        assert it.groups.heartbeat(of(first, generation + 1)) == {"errorCode": REBALANCE_IN_PROGRESS}

    play(scene)


def test_members_that_are_silent_or_do_not_rejoin_are_removed():
    async def scene(it):
        first, generation = await it.stable()
        slow = {"sessionTimeoutMs": 500, "rebalanceTimeoutMs": 500}
        _, joining = await it.enter(**slow)
        group = it.groups.groups["g"]
        group.members[first].rebalance_s = 0.05
        await it.groups.join(9, join_body(first), "c")
        group.members[first].rebalance_s = 0.05
        assert (await joining)["generationId"] == generation + 1
        await until(lambda: len(group.members) == 1)  # the second one never syncs, and sends no heartbeat
        assert group.state is State.PREPARING
        await until(lambda: not group.members)  # the first one does not rejoin in time
        assert (group.state, group.generation) == (State.EMPTY, generation + 2)
        assert it.groups.heartbeat(of(first, generation + 2)) == {"errorCode": UNKNOWN_MEMBER_ID}

    play(scene)


def test_invalid_requests_get_their_specific_error_codes():
    async def scene(it):
        member, generation = await it.stable()
        for body, error in (
            (join_body("stranger"), UNKNOWN_MEMBER_ID),
            (join_body(group=""), INVALID_GROUP_ID),
            (join_body(sessionTimeoutMs=1), INVALID_SESSION_TIMEOUT),
            (join_body(protocols=("roundrobin",)), INCONSISTENT_GROUP_PROTOCOL),
            (join_body(protocolType="connect"), INCONSISTENT_GROUP_PROTOCOL),
            (join_body(protocols=()), INCONSISTENT_GROUP_PROTOCOL),
        ):
            assert (await it.groups.join(9, body, "c"))["errorCode"] == error
        assert it.groups.heartbeat(of(member, generation - 1)) == {"errorCode": ILLEGAL_GENERATION}
        parts = [
            {"partitionIndex": 0, "committedOffset": 5, "committedMetadata": "x"},
            {"partitionIndex": 0, "committedOffset": 6, "committedMetadata": "x" * 5000},
            {"partitionIndex": 9, "committedOffset": 7, "committedMetadata": None},
        ]

        def commit(who, generation):
            head = {"groupId": "g", "memberId": who, "generationIdOrMemberEpoch": generation}
            answer = it.groups.commit(head | {"topics": [{"name": "t", "partitions": parts}]})
            return [part["errorCode"] for part in answer["topics"][0]["partitions"]]

        assert commit(member, generation) == [0, OFFSET_METADATA_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION]
        assert commit(member, generation + 1) == [ILLEGAL_GENERATION] * 3
        assert commit("", -1) == [UNKNOWN_MEMBER_ID] * 3  # a commit without membership needs an empty group
        asked = it.groups.fetch({"groupId": "g", "topics": None})
        assert [part["committedOffset"] for part in asked["topics"][0]["partitions"]] == [5]

    play(scene)


def test_groups_and_members_are_bounded(monkeypatch):
    monkeypatch.setattr(demo_groups, "MAX_MEMBERS", 3)

    async def scene(it):
        entered = [await it.enter() for _ in range(3)]
        assert (await it.groups.join(9, join_body(), "c"))["errorCode"] == GROUP_MAX_SIZE_REACHED
        for number in range(2 * MAX_GROUPS):  # the oldest empty group is evicted
            it.groups.commit({"groupId": f"g{number}", "topics": [{"name": "t", "partitions": []}]})
        assert len(it.groups.groups) == MAX_GROUPS and "g" in it.groups.groups
        for _, joining in entered:
            joining.cancel()

    play(scene)


@pytest.mark.parametrize("key", [8, 9, 11, 12, 13, 14])
def test_a_broker_that_is_not_the_coordinator_answers_not_coordinator(key):
    async def main():
        cluster = Cluster(topics={"t": 1})
        stranger = next(each for each in cluster.brokers.values() if each is not cluster.coordinator("g"))
        parts = [{"partitionIndex": 0, "committedOffset": 1, "committedMetadata": ""}]
        body = join_body("m") | {"topics": [{"name": "t", "partitions": parts}]}
        answer = await stranger._coordinate({"requestApiKey": key, "requestApiVersion": 3}, body)
        if key == OFFSET_COMMIT:
            (answer,) = answer["topics"][0]["partitions"]
        assert answer["errorCode"] == NOT_COORDINATOR

    asyncio.run(main())
