"""Frames become exchanges for insight, or are ignored."""

from kproxy.insight.decoded import decode_exchange
from kproxy.protocol import codec

REQUEST = codec.encode_request(
    {"requestApiKey": 12, "requestApiVersion": 4, "correlationId": 7, "clientId": "c"},
    {"groupId": "g", "generationId": 3, "memberId": "m"},
)
ANSWER = codec.encode_response(12, 4, {"correlationId": 7}, {"errorCode": 27})


def framed(frame):
    return len(frame).to_bytes(4) + frame


def test_an_exchange_is_decoded_with_its_client_and_broker():
    found = decode_exchange(12, 4, framed(REQUEST), framed(ANSWER), 10, 20, client_id="c", broker_id=3)
    assert (found.request["memberId"], found.response["errorCode"]) == ("m", 27)
    assert (found.request_end, found.response_start, found.client_id, found.broker_id) == (10, 20, "c", 3)
    found = decode_exchange(12, 4, framed(REQUEST), None, 10, 0)
    assert found.response is None and found.client_id == "c"


def test_undecodable_frames_are_ignored():
    assert decode_exchange(12, 4, framed(REQUEST[:-3]), framed(ANSWER), 1, 2) is None
    assert decode_exchange(12, 4, framed(REQUEST), framed(ANSWER[:-3]), 1, 2) is None
    assert decode_exchange(12, 99, framed(REQUEST), framed(ANSWER), 1, 2) is None
