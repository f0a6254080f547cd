"""Requests of the lag monitor: partition leaders, group coordinators, ends of logs, committed offsets.

It uses the versions since Kafka 0.11 (`TooOld`): an older Metadata would create the topics that it names. Each function
uses one connection, and returns the results and, separately, the error codes. One request has at most
PARTITIONS_PER_REQUEST partitions, GROUPS_PER_REQUEST groups or TOPICS_PER_REQUEST topics. Raises UpstreamError, and
ProtocolError for an answer that does not decode. The caller bounds the time. Refuses to know when to ask, and the use
of the answers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Generic, TypeVar

from kproxy.errors import UpstreamError
from kproxy.protocol.apis import FIND_COORDINATOR, LIST_OFFSETS, METADATA, OFFSET_FETCH
from kproxy.protocol.schema import schema
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.conversation import Conversation, newest

APIS = (METADATA, LIST_OFFSETS, OFFSET_FETCH, FIND_COORDINATOR)
PARTITIONS_PER_REQUEST = 1000
GROUPS_PER_REQUEST = TOPICS_PER_REQUEST = 100

# The first versions that can return all offsets of a group, do not create topics, and so on.
_OLDEST = {METADATA: 4, LIST_OFFSETS: 1, OFFSET_FETCH: 2, FIND_COORDINATOR: 0}
_LAST_BY_NAME = 9  # version 10 of OffsetFetch answers topic ids
_FIRST_BATCHED = {OFFSET_FETCH: 8, FIND_COORDINATOR: 4}  # versions that take several groups in one request
_LATEST = -1  # the timestamp with which ListOffsets requests the end of a log

Offers = Mapping[int, tuple[int, int]]  # API key -> (lowest, highest) version
Partition = tuple[str, int]
K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class TooOld(UpstreamError):
    """The broker supports no version of an API that kproxy can use."""


@dataclass
class Answer(Generic[K, V]):
    """Results and error codes by key. `requests`: the number of requests sent."""

    found: dict[K, V] = field(default_factory=dict)
    refused: dict[K, int] = field(default_factory=dict)
    brokers: dict[int, Address] = field(default_factory=dict)  # named by the answers, by node id
    requests: int = 0

    def add(self, key: K, code: int, value: V) -> None:
        if code:
            self.refused[key] = code
        else:
            self.found[key] = value


async def leaders(talk: Conversation, offers: Offers, topics: Iterable[str]) -> Answer[str, dict[int, int]]:
    """Return topic -> partition -> node id of its leader; partitions without a leader are left out."""
    version = _version(offers, METADATA)
    answer: Answer[str, dict[int, int]] = Answer()
    for some in _pieces(topics, TOPICS_PER_REQUEST):
        asked = {"topics": [{"name": topic} for topic in some], "allowAutoTopicCreation": False}
        response = await _ask(talk, answer, METADATA, version, asked)
        for broker in response["brokers"]:
            answer.brokers[broker["nodeId"]] = Address(broker["host"], broker["port"])
        for topic in response["topics"]:
            led = {each["partitionIndex"]: each["leaderId"] for each in topic["partitions"] if each["leaderId"] >= 0}
            answer.add(topic["name"], topic["errorCode"], led)
    return answer


async def coordinators(talk: Conversation, offers: Offers, groups: Iterable[str]) -> Answer[str, int]:
    """Return each group's coordinator as a node id."""
    version = _version(offers, FIND_COORDINATOR)
    answer: Answer[str, int] = Answer()
    for some in _pieces(groups, GROUPS_PER_REQUEST if version >= _FIRST_BATCHED[FIND_COORDINATOR] else 1):
        if version >= _FIRST_BATCHED[FIND_COORDINATOR]:
            response = await _ask(talk, answer, FIND_COORDINATOR, version, {"keyType": 0, "coordinatorKeys": some})
            found: list[dict[str, Any]] = response["coordinators"]
        else:
            asked: dict[str, Any] = {"key": some[0], "keyType": 0} if version else {"key": some[0]}
            found = [{"key": some[0], **await _ask(talk, answer, FIND_COORDINATOR, version, asked)}]
        for each in found:
            answer.add(each["key"], each["errorCode"], each["nodeId"])
            if not each["errorCode"]:
                answer.brokers[each["nodeId"]] = Address(each["host"], each["port"])
    return answer


async def ends(
    talk: Conversation, offers: Offers, partitions: Iterable[Partition]
) -> Answer[Partition, tuple[int, int]]:
    """Return (end, leader epoch or -1) of each log from its leader: the high watermark, as it asks read_uncommitted."""
    version = _version(offers, LIST_OFFSETS)
    answer: Answer[Partition, tuple[int, int]] = Answer()
    for some in _pieces(sorted(partitions), PARTITIONS_PER_REQUEST):
        topics = [
            {
                "name": topic,
                "partitions": [
                    {"partitionIndex": number, "currentLeaderEpoch": -1, "timestamp": _LATEST} for _, number in numbers
                ],
            }
            for topic, numbers in groupby(some, key=itemgetter(0))
        ]
        asked = {"replicaId": -1, "isolationLevel": 0, "topics": topics, "timeoutMs": 0}
        response = await _ask(talk, answer, LIST_OFFSETS, version, asked)
        for topic in response["topics"]:
            for each in topic["partitions"]:
                end = each["offset"], each.get("leaderEpoch", -1)
                answer.add((topic["name"], each["partitionIndex"]), each["errorCode"], end)
    return answer


async def committed(talk: Conversation, offers: Offers, groups: Iterable[str]) -> Answer[str, dict[Partition, int]]:
    """Return all committed offsets of each group from its coordinator.

    Topics that kproxy may not describe are missing, without an error.
    """
    version = min(_version(offers, OFFSET_FETCH), _LAST_BY_NAME)
    answer: Answer[str, dict[Partition, int]] = Answer()
    for some in _pieces(groups, GROUPS_PER_REQUEST if version >= _FIRST_BATCHED[OFFSET_FETCH] else 1):
        if version >= _FIRST_BATCHED[OFFSET_FETCH]:
            wanted = [{"groupId": group, "memberId": None, "memberEpoch": -1, "topics": None} for group in some]
            response = await _ask(talk, answer, OFFSET_FETCH, version, {"groups": wanted, "requireStable": False})
            found: list[dict[str, Any]] = response["groups"]
        else:
            asked = {"groupId": some[0], "topics": None, "requireStable": False}
            found = [{"groupId": some[0], **await _ask(talk, answer, OFFSET_FETCH, version, asked)}]
        for group in found:
            offsets = {
                (topic["name"], each["partitionIndex"]): each["committedOffset"]
                for topic in group["topics"]
                for each in topic["partitions"]
                if not each["errorCode"] and each["committedOffset"] >= 0
            }
            answer.add(group["groupId"], group["errorCode"], offsets)
    return answer


async def _ask(talk: Conversation, answer: Answer[K, V], api_key: int, version: int, asked: dict[str, Any]) -> Any:
    answer.requests += 1
    return await talk.ask_long(api_key, version, asked)


def _version(offers: Offers, api_key: int) -> int:
    """Return the newest version that both sides support. Raises TooOld."""
    if api_key not in offers or newest(offers, api_key) < _OLDEST[api_key]:
        name = schema().apis[api_key].name
        raise TooOld(f"it offers no {name} from version {_OLDEST[api_key]} on, which Kafka has since 0.11")
    return newest(offers, api_key)


def _pieces(items: Iterable[T], most: int) -> Iterator[Sequence[T]]:
    rest = iter(items)
    while piece := list(islice(rest, most)):
        yield piece
