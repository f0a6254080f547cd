"""Every API and version of the schema: the answer to a refused request decodes and carries the error."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kproxy.protocol import codec
from kproxy.protocol.schema import schema
from kproxy.proxy.filters.policy.refusals import _INNOCENT, CODES, ITEMS, freed_in_slices, refusal
from kproxy.proxy.filters.policy.resources import CLUSTER, KINDS, reader
from tests.protocol.messages import layouts
from tests.proxy.filters.policy.policies import random_body

REQUESTS = [layout for layout in layouts() if layout.side == "request"]
BY_API = {api.name: [layout for layout in REQUESTS if layout.api_key == key] for key, api in schema().apis.items()}

# The versions whose answer has no place for an error if the request names nothing, and those where it has none either
# if it names something without partitions: then the connection is closed.
ALWAYS_TELLS = {
    *("ControlledShutdown", "ListGroups", "Heartbeat", "JoinGroup", "SyncGroup", "LeaveGroup", "InitProducerId"),
    *("AddOffsetsToTxn", "EndTxn", "DescribeAcls", "CreateDelegationToken", "DescribeCluster", "DescribeLogDirs"),
    *("ListTransactions", "ConsumerGroupHeartbeat", "ShareGroupHeartbeat", "ShareFetch", "ShareAcknowledge"),
    *("StreamsGroupHeartbeat", "UnregisterBroker", "DescribeClientQuotas", "AlterPartitionReassignments"),
    *("ListPartitionReassignments", "OffsetDelete", "DescribeQuorum", "UpdateFeatures", "ListConfigResources"),
}


# Fields of answers that say nothing beside an error. Clients take 0 for an offset, a broker or a generation that is.
SAY_NOTHING = {
    *("baseOffset", "logAppendTimeMs", "logStartOffset", "highWatermark", "lastStableOffset", "preferredReadReplica"),
    *("offset", "endOffset", "startOffset", "committedOffset", "committedLeaderEpoch", "lowWatermark"),
    *("controllerId", "leaderId", "nodeId", "generationId"),
}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in an answer, with the name of its field."""
    if isinstance(value, dict):
        for each, below in value.items():
            yield from leaves(below, each)
    elif isinstance(value, list):
        for below in value:
            yield from leaves(below, name)
    else:
        yield name, value


def denied_in(layout: Any, body: dict[str, Any], some: random.Random | None = None) -> dict[Any, int]:
    """All that a request names, or some of it, as denied."""
    frame = layout.encode(body)
    view = memoryview(len(frame).to_bytes(4, "big") + frame)
    names = reader(layout.api_key, layout.version)(view, 12, len(view))
    denied: dict[Any, int] = {(kind, name): CODES[kind] for kind in KINDS for name in getattr(names, kind)}
    denied |= {("topic", topic_id): CODES["topic"] for topic_id in names.topic_id}
    if some is not None and denied:
        denied = dict(some.sample(sorted(denied.items(), key=repr), some.randint(1, len(denied))))
    if names.cluster or not denied:
        denied[CLUSTER, ""] = CODES[CLUSTER]
    return denied


@pytest.mark.parametrize("api", BY_API)
def test_a_refusal_decodes_and_carries_the_error(api):
    rng = random.Random(api)
    for layout in BY_API[api] * 4:
        body = random_body(layout, rng)
        request = codec.decode_request(layout.encode(body))[1]
        denied = denied_in(layout, body, rng)
        made = codec.at_once(refusal(layout.api_key, layout.version, 7, request, denied, "no"))
        if made is None:
            assert api not in ALWAYS_TELLS
            continue
        frame, errors = made
        header, answer = codec.decode_response(frame[4:], layout.api_key, layout.version)
        assert header["correlationId"] == 7 and "_trailing" not in answer
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        assert {each for name, each in leaves(answer) if name in SAY_NOTHING} <= {-1}
        found = codec.response_scan(layout.api_key, layout.version)(memoryview(frame), 8, len(frame))[2]
        assert sorted(found) == sorted(errors)
        assert set(denied.values()) & set(found)
        innocent = _INNOCENT.get(api, 55)
        assert set(found) <= set(denied.values()) | ({innocent} if innocent is not None else set())


@pytest.mark.parametrize("layout", [layout for layout in REQUESTS if layout.message.name == "ProduceRequest"], ids=repr)
def test_every_item_of_the_request_is_in_the_answer(layout):
    topics = [("a", 2), ("b", 1)]
    if layout.version >= 13:
        return
    data = [
        {"name": name, "partitionData": [{"index": index, "records": b""} for index in range(count)]}
        for name, count in topics
    ]
    made = refusal(0, layout.version, 1, {"acks": 1, "topicData": data}, {("topic", "b"): 29}, "no")
    frame, _ = codec.at_once(made) or (b"", ())
    body = codec.decode_response(frame[4:], 0, layout.version)[1]
    found = [
        (topic["name"], [(one["index"], one["errorCode"]) for one in topic["partitionResponses"]])
        for topic in body["responses"]
    ]
    assert found == [("a", [(0, 6), (1, 6)]), ("b", [(0, 29)])]


def test_every_error_in_an_array_has_its_place_in_the_table():
    """An array of an answer whose elements have error codes is filled from the request, or gets one element."""
    missing = []
    for api in schema().apis.values():
        has_top = {version for version in api.response.versions if _has_code(api.response.fields, version)}
        for version in set(api.response.versions) - has_top:
            arrays = [field.name for field in api.response.fields if field.is_array and version in field.versions]
            if arrays and not set(arrays) & set(ITEMS.get(api.name, {})) and api.name != "DescribeLogDirs":
                missing.append((api.name, version))
    assert not missing


def _has_code(fields: Any, version: int) -> bool:
    return any(field.name == "errorCode" and version in field.versions for field in fields)


def test_a_short_refusal_is_made_at_once_and_a_long_one_in_slices():
    for count, slices in ((2, 0), (62, 0), (63, 1), (126, 1), (127, 2)):
        names = [f"g-{number}" for number in range(count)]
        made = refusal(42, 2, 1, {"groupsNames": names}, {("group", name): 30 for name in names}, "no")
        assert sum(1 for _ in made) == slices  # the answer itself is a struct too


def test_so_many_values_are_freed_in_a_slice():
    for count, slices in ((1, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2)):
        values = [0] * count
        assert sum(1 for _ in freed_in_slices(values)) == slices and not values


def test_messages_say_why():
    body = {"topics": [{"name": "t", "numPartitions": 1, "replicationFactor": 1}]}
    frame, _ = codec.at_once(refusal(19, 7, 1, body, {("topic", "t"): 29}, "rule 3 denies it")) or (b"", ())
    assert "rule 3 denies it" in json.dumps(codec.decode_response(frame[4:], 19, 7)[1], default=str)
