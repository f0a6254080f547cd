"""The bench before a real broker: the broker takes the bench's requests, and kproxy carries all that were sent."""

from dataclasses import replace

import pytest

from bench import processes, real
from kproxy.protocol import codec, records


def test_a_real_broker_takes_what_the_bench_sends(tmp_path):
    case = replace(real.CASES[-1], connections=2, depth=8, requests=100)
    with real.broker(tmp_path) as upstream, processes.kproxy(upstream, tmp_path, None) as proxy:
        before = proxy.requests_counted("Produce")
        (result,) = real.run([case], 2, [proxy], upstream, warm_up=50)
        assert proxy.requests_counted("Produce") - before == 2 * case.requests + 50
    assert len(result.us["kproxy"]) == 2 and result.median("kproxy") > 0
    assert result.ratio("kproxy", "kproxy") == 1


def test_a_broker_that_does_not_lead_its_new_topic_yet_is_asked_again(monkeypatch):
    def answer(key, version, body):
        frame = codec.encode_response(key, version, {"correlationId": 0}, body)
        return len(frame).to_bytes(4, "big") + frame

    def produced(code):
        partition = {"index": 0, "errorCode": code, "baseOffset": 0, "logStartOffset": 0}
        return answer(0, real.VERSION, {"responses": [{"name": "bench", "partitionResponses": [partition]}]})

    topic = answer(3, 4, {"brokers": [], "topics": [{"errorCode": 0, "name": "bench", "partitions": []}]})
    answers = [topic, produced(6), produced(0)]
    monkeypatch.setattr(processes, "ask", lambda address, frame: answers.pop(0))
    assert real.first_answer(("127.0.0.1", 1), b"") == produced(0)
    answers = [topic, produced(2)]
    with pytest.raises(processes.BenchError, match="refuses the bench's batch"):
        real.first_answer(("127.0.0.1", 1), b"")


def test_sizes_and_checksums():
    for size in {case.request_bytes for case in real.CASES}:
        frame = real.request(size)
        assert abs(len(frame) - size) <= 20
        _, body = codec.decode_request(frame[4:])
        (batch,), _ = records.read_batches(body["topicData"][0]["partitionData"][0]["records"])
        assert batch.crc_valid
