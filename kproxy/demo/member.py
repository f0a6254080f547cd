"""A member of a consumer group: it joins, assigns if it is the leader, sends heartbeats, commits, and leaves.

Duty: the classic protocol of one member, like Kafka's consumers, over a connection of its own to the coordinator; a
callable processes the assigned partitions. Strategy "range". Refuses to know records.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kproxy.demo.client import Body, Client, Connection
from kproxy.errors import UpstreamError
from kproxy.insight.membership import assignors
from kproxy.insight.membership.embedded import assigned, subscription
from kproxy.protocol import codec
from kproxy.protocol.apis import (
    FIND_COORDINATOR,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    MEMBER_ID_REQUIRED,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    SYNC_GROUP,
    UNKNOWN_MEMBER_ID,
)
from kproxy.protocol.error_codes import error_name

SESSION_MS, REBALANCE_MS = 6_000, 10_000
_HEARTBEAT_S = 1.0
_COMMIT_S = 2.0
_LEAVES_S = 1.0
_STRATEGY = "range"
_VERSION = 1  # of the consumer protocol

Offsets = dict[int, int]  # partition -> next offset to read
Works = Callable[[list[int], Offsets], Awaitable[None]]  # (assigned partitions, their committed offsets)


class Member:
    """A member of a group that consumes one topic with `partitions` partitions."""

    def __init__(self, client: Client, group: str, topic: str, partitions: int) -> None:
        self._client = client
        self._group = group
        self._topic = topic
        self._partitions = partitions
        self._id = ""
        self._generation = -1
        self._coordinator: Connection | None = None

    async def run(self, works: Works) -> None:
        """Be a member until cancelled. Leaves the group in any case. Raises UpstreamError if a broker has closed."""
        try:
            while True:
                owned = await self._join()
                offsets = await self._committed(owned)
                tasks = [
                    asyncio.ensure_future(each)
                    for each in (works(owned, offsets), self._lives(), self._commits(offsets))
                ]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
                    found = await asyncio.gather(*tasks, return_exceptions=True)
                for fault in found:
                    if isinstance(fault, Exception):
                        raise fault
                with suppress(UpstreamError):
                    await self._commit(offsets)
        finally:
            await self._leave()

    async def _join(self) -> list[int]:
        """Take part in a rebalance until its end; returns the partitions assigned to this member."""
        while True:
            topics = {"topics": [self._topic], "userData": None, "ownedPartitions": []}
            metadata = codec.encode_data("ConsumerProtocolSubscription", _VERSION, topics)
            joined = await self._ask(
                JOIN_GROUP,
                {
                    "groupId": self._group,
                    "memberId": self._id,
                    "sessionTimeoutMs": SESSION_MS,
                    "rebalanceTimeoutMs": REBALANCE_MS,
                    "protocolType": "consumer",
                    "protocols": [{"name": _STRATEGY, "metadata": metadata}],
                },
            )
            error = joined["errorCode"]
            if error not in (0, MEMBER_ID_REQUIRED, UNKNOWN_MEMBER_ID):
                raise UpstreamError(f"group {self._group} does not let this member in: {error_name(error)}")
            self._id = "" if error == UNKNOWN_MEMBER_ID else joined["memberId"]
            if error:
                continue
            self._generation = joined["generationId"]
            assignments = self._assign(joined["members"]) if joined["leader"] == self._id else []
            named = {"protocolType": "consumer", "protocolName": _STRATEGY, "assignments": assignments}
            synced = await self._ask(SYNC_GROUP, self._who() | named)
            if not synced["errorCode"]:
                return sorted(index for _, index in assigned(synced["assignment"]) or ())
            self._forget_if_unknown(synced["errorCode"])

    def _assign(self, members: list[Body]) -> list[Body]:
        """As the leader, return each member's assignment."""
        subscriptions = {member["memberId"]: subscription(bytes(member["metadata"])) for member in members}
        wants = [
            assignors.Member(who, None, wanted.topics) for who, wanted in subscriptions.items() if wanted is not None
        ]
        owned = assignors.computed(_STRATEGY, wants, {self._topic: self._partitions}) or {}
        return [
            {
                "memberId": who,
                "assignment": codec.encode_data(
                    "ConsumerProtocolAssignment",
                    _VERSION,
                    {
                        "assignedPartitions": [{"topic": self._topic, "partitions": sorted(i for _, i in places)}],
                        "userData": None,
                    },
                ),
            }
            for who, places in owned.items()
        ]

    async def _committed(self, owned: list[int]) -> Offsets:
        wanted = {"groupId": self._group, "topics": [{"name": self._topic, "partitionIndexes": owned}]}
        answer = await self._ask(OFFSET_FETCH, wanted | {"groups": [wanted]})
        topics = (answer["groups"][0] if "groups" in answer else answer)["topics"]
        found = {part["partitionIndex"]: part["committedOffset"] for topic in topics for part in topic["partitions"]}
        return {index: offset for index, offset in found.items() if offset >= 0}

    async def _lives(self) -> None:
        """Send heartbeats until the coordinator reports a rebalance."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            error = (await self._ask(HEARTBEAT, self._who()))["errorCode"]
            if error:
                self._forget_if_unknown(error)
                return

    async def _commits(self, offsets: Offsets) -> None:
        while True:
            await asyncio.sleep(_COMMIT_S)
            await self._commit(offsets)

    async def _commit(self, offsets: Offsets) -> None:
        parts = [
            {"partitionIndex": index, "committedOffset": offset, "committedMetadata": ""}
            for index, offset in offsets.items()
        ]
        if parts:
            topics = [{"name": self._topic, "partitions": parts}]
            who = {"groupId": self._group, "memberId": self._id, "generationIdOrMemberEpoch": self._generation}
            await self._ask(OFFSET_COMMIT, who | {"topics": topics})

    async def _leave(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is None:
            return
        if self._id and not coordinator.closed:
            body = {"groupId": self._group, "memberId": self._id, "members": [{"memberId": self._id}]}
            with suppress(UpstreamError, TimeoutError):
                async with asyncio.timeout(_LEAVES_S):
                    await coordinator.request(LEAVE_GROUP, body)
        await coordinator.close()

    def _forget_if_unknown(self, error_code: int) -> None:
        if error_code == UNKNOWN_MEMBER_ID:
            self._id = ""

    async def _ask(self, api_key: int, body: Body) -> Body:
        if self._coordinator is None:
            await self._client.refresh(self._topic)
            where = {"key": self._group, "keyType": 0, "coordinatorKeys": [self._group]}
            found = await self._client.ask_any(FIND_COORDINATOR, where)
            found = found["coordinators"][0] if "coordinators" in found else found
            if found["errorCode"]:
                raise UpstreamError(f"group {self._group} has no coordinator")
            self._coordinator = await self._client.another_connection(found["host"], found["port"])
        return await self._coordinator.request(api_key, body)

    def _who(self) -> Body:
        return {"groupId": self._group, "memberId": self._id, "generationId": self._generation}
