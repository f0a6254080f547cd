import json
from math import inf, nan

from kproxy.protocol.schema import schema
from kproxy.protocol.shown.render import render


def test_floats_that_json_cannot_say() -> None:
    message = schema().apis[48].response  # DescribeClientQuotas
    body = {"entries": [{"values": [{"key": "k", "value": value} for value in (nan, inf, -inf, -0.0)]}]}
    (entry,) = render(message, body)["entries"]
    assert [value["value"] for value in entry["values"]] == ["NaN", "Infinity", "-Infinity", -0.0]
    json.dumps(entry, allow_nan=False)


def test_reserved_keys_only_when_asked_for() -> None:
    message = schema().apis[3].response
    body = {"brokers": [{"nodeId": 1, "_tags": {9: b"\xff"}}], "_tags": {300: b"a"}, "_trailing": b"\0"}
    assert render(message, body) == {"brokers": [{"nodeId": 1}]}
    assert render(message, body, reserved=True) == {
        "brokers": [{"nodeId": 1, "_tags": {"9": "/w=="}}],
        "_tags": {"300": "YQ=="},
        "_trailing": "AA==",
    }


def test_null_records_have_no_size() -> None:
    message = schema().apis[0].request
    partitions = [{"records": None}, {"records": b""}]
    (topic,) = render(message, {"topicData": [{"partitionData": partitions}]})["topicData"]
    assert topic["partitionData"] == [{"records": None}, {"records": "", "recordsSizeInBytes": 0}]
