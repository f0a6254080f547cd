from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.schema import address_path, schema
from kproxy.wire import bodies
from kproxy.wire.bodies import Wanted


def test_responses_with_both_topic_names_and_ids_resolve_ids() -> None:
    """They resolve ids for earlier and later bodies that identify topics by id alone."""
    apis = schema().apis
    naming = {
        api.name: [version for version in api.response.versions if bodies.names_topics(api.key, version)]
        for api in apis.values()
    }
    assert naming["Metadata"] == [10, 11, 12, 13] and naming["CreateTopics"] == [7]
    assert naming["DescribeTopicPartitions"] == [0] and not naming["Fetch"]
    identity = UUID(int=3)
    for key, version, array in ((3, 10, "topics"), (3, 13, "topics"), (19, 7, "topics"), (75, 0, "topics")):
        frame = codec.encode_response(key, version, {"correlationId": 1}, {array: [{"name": "t", "topicId": identity}]})
        found = bodies.body_reader(key, version, "response", bodies.SUMS)(frame, 4, len(frame))
        assert found.names == {identity: "t"}


@pytest.mark.parametrize("key", (3, 10, 60))
def test_brokers_are_read_from_responses_that_list_them(key: int) -> None:
    for version in schema().apis[key].response.versions:
        assert bodies.names_brokers(key, version)
        path = address_path(key, version)
        node = "brokerId" if key == 60 else "nodeId"
        one = {node: 7, "host": "10.0.0.1", "port": 9092}
        nobody = {node: -1, "host": "", "port": -1}  # as in a response without a coordinator
        frame = codec.encode_response(key, version, {"correlationId": 1}, {path: [nobody, one]} if path else one)
        found = bodies.body_reader(key, version, "response", bodies.BATCHES)(frame, 4, len(frame))
        walker = bodies.BodyWalker(key, version, detail=bodies.ERRORS)
        for at in range(4, len(frame)):
            walker.feed(frame, at, at + 1)
        walker.finish()
        assert walker.fault is None
        assert found.brokers == walker.brokers == {("10.0.0.1", 9092): 7}
        if not bodies.names_topics(key, version):  # the detail SUMS reads no addresses
            assert not bodies.body_reader(key, version, "response", bodies.SUMS)(frame, 4, len(frame)).brokers


def test_only_metadata_responses_have_topics_after_their_brokers() -> None:
    """In version 0 directly, in later versions after other fields."""
    answers = [(api, version) for api in schema().apis.values() if api.response for version in api.response.versions]
    assert {(api.name, bodies.head_array(api.key, version)) for api, version in answers} == {
        ("Metadata", "brokers"),
        *((api.name, None) for api in schema().apis.values() if api.response and api.name != "Metadata"),
    }


def test_deletions_are_read_from_responses_without_an_error() -> None:
    """Each response also has an entry that failed."""
    ids = [UUID(int=4), UUID(int=5)]
    partitions = [{"partitionIndex": 3}, {"partitionIndex": 4, "errorCode": 86}]
    for key, body, deleted in (
        (20, {"responses": [{"name": "t"}, {"name": "u", "errorCode": 41}]}, [("t", -1)]),
        (42, {"results": [{"groupId": "g"}, {"groupId": "h", "errorCode": 68}]}, [("g", -1)]),
        (47, {"topics": [{"name": "t", "partitions": partitions}]}, [("t", 3)]),
        (20, {"responses": [{"name": None, "topicId": each} for each in ids]}, [(each, -1) for each in ids]),
    ):
        by_id = body.get("responses", [{}])[0].get("topicId")
        for version in schema().apis[key].response.versions:
            if by_id and version < 6:
                continue
            frame = codec.encode_response(key, version, {"correlationId": 1}, body)
            assert bodies.body_reader(key, version, "response", bodies.SUMS)(frame, 4, len(frame)).deleted == deleted


def test_request_fields_that_change_the_meaning_of_the_response_are_read() -> None:
    latest = {"partitionIndex": 3, "timestamp": -1}, {"partitionIndex": 4, "timestamp": -2}
    for key, body, expected in (
        (1, {"rackId": "r1"}, {"has_rack": True}),
        (1, {"rackId": ""}, {"has_rack": False}),
        (2, {"isolationLevel": 1, "topics": [{"name": "t", "partitions": latest}]}, {"latest": [("t", 3)]}),
        (2, {"isolationLevel": 1}, {"isolation_level": 1}),
        (26, {"transactionalId": "x", "committed": True}, {"is_commit": True}),
        (26, {"transactionalId": "x", "committed": False}, {"is_commit": False}),
    ):
        version = schema().apis[key].request.versions[-1]
        header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": 1, "clientId": "c"}
        frame = codec.encode_request(header, body)
        found = bodies.body_reader(key, version, "request", bodies.SUMS)(frame, 8, len(frame))
        assert {name: getattr(found, name) for name in expected} == expected


def test_the_detail_sums_reads_offsets_because_lag_needs_them() -> None:
    apis = ("Fetch", "ListOffsets", "OffsetCommit", "OffsetFetch", "TxnOffsetCommit")
    assert {
        (api.name, side)
        for api in schema().apis.values()
        for side in ("request", "response")
        if (message := getattr(api, side)) is not None
        and Wanted(api.key, message.versions[-1], side, bodies.SUMS).detail == bodies.TOPICS
    } == {*((name, side) for name in apis for side in ("request", "response")), ("Produce", "response")}
