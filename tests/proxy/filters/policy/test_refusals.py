"""For every API and version of the schema, the response to a refused request can be decoded and contains the error."""

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

# APIs whose response has a field for the error even if the request names nothing. For others, a request without names
# (or, for some, without partitions) closes the connection.
ALWAYS_HAS_ERROR = {
    *("ControlledShutdown", "ListGroups", "Heartbeat", "JoinGroup", "SyncGroup", "LeaveGroup", "InitProducerId"),
    *("AddOffsetsToTxn", "EndTxn", "DescribeAcls", "CreateDelegationToken", "DescribeCluster", "DescribeLogDirs"),
    *("ListTransactions", "ConsumerGroupHeartbeat", "ShareGroupHeartbeat", "ShareFetch", "ShareAcknowledge"),
    *("StreamsGroupHeartbeat", "UnregisterBroker", "DescribeClientQuotas", "AlterPartitionReassignments"),
    *("ListPartitionReassignments", "OffsetDelete", "DescribeQuorum", "UpdateFeatures", "ListConfigResources"),
}


# Fields that must not be 0 in an error response: clients would read 0 as a valid offset, broker or generation.
MINUS_ONE_IN_ERRORS = {
    *("baseOffset", "logAppendTimeMs", "logStartOffset", "highWatermark", "lastStableOffset", "preferredReadReplica"),
    *("offset", "endOffset", "startOffset", "committedOffset", "committedLeaderEpoch", "lowWatermark"),
    *("controllerId", "leaderId", "nodeId", "generationId"),
}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in a response, with the name of its field."""
    if isinstance(value, dict):
        for each, below in value.items():
            yield from leaves(below, each)
    elif isinstance(value, list):
        for below in value:
            yield from leaves(below, name)
    else:
        yield name, value


def denied_in(layout: Any, body: dict[str, Any], some: random.Random | None = None) -> dict[Any, int]:
    """All names of a request, or some of them, as denied."""
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
def test_a_refusal_can_be_decoded_and_contains_the_error(api):
    rng = random.Random(api)
    for layout in BY_API[api] * 4:
        body = random_body(layout, rng)
        request = codec.decode_request(layout.encode(body))[1]
        denied = denied_in(layout, body, rng)
        made = codec.at_once(refusal(layout.api_key, layout.version, 7, request, denied, "no"))
        if made is None:
            assert api not in ALWAYS_HAS_ERROR
            continue
        frame, errors = made
        header, answer = codec.decode_response(frame[4:], layout.api_key, layout.version)
        assert header["correlationId"] == 7 and "_trailing" not in answer
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        assert {each for name, each in leaves(answer) if name in MINUS_ONE_IN_ERRORS} <= {-1}
        found = codec.response_scan(layout.api_key, layout.version)(memoryview(frame), 8, len(frame))[2]
        assert sorted(found) == sorted(errors)
        assert set(denied.values()) & set(found)
        innocent = _INNOCENT.get(api, 55)
        assert set(found) <= set(denied.values()) | ({innocent} if innocent is not None else set())


@pytest.mark.parametrize("layout", [layout for layout in REQUESTS if layout.message.name == "ProduceRequest"], ids=repr)
def test_a_refusal_contains_every_item_of_the_request(layout):
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


def test_the_table_of_items_covers_every_array_with_error_codes():
    """An array whose elements have error codes is filled from the request, or gets one element."""
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


def test_a_short_refusal_is_made_in_one_slice_and_a_long_one_in_several():
    for count, slices in ((2, 0), (62, 0), (63, 1), (126, 1), (127, 2)):
        names = [f"g-{number}" for number in range(count)]
        made = refusal(42, 2, 1, {"groupsNames": names}, {("group", name): 30 for name in names}, "no")
        assert sum(1 for _ in made) == slices  # the response itself is a struct too


def test_a_slice_frees_1024_values():
    for count, slices in ((1, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2)):
        values = [0] * count
        assert sum(1 for _ in freed_in_slices(values)) == slices and not values


def test_the_error_message_contains_the_reason():
    body = {"topics": [{"name": "t", "numPartitions": 1, "replicationFactor": 1}]}
    frame, _ = codec.at_once(refusal(19, 7, 1, body, {("topic", "t"): 29}, "rule 3 denies it")) or (b"", ())
    assert "rule 3 denies it" in json.dumps(codec.decode_response(frame[4:], 19, 7)[1], default=str)
