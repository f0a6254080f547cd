"""The bench before a real broker: the broker takes the bench's requests, and kproxy carries all that were sent."""

from dataclasses import replace

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


def test_sizes_and_checksums():
    for size in {case.request_bytes for case in real.CASES}:
        frame = real.request(size)
        assert abs(len(frame) - size) <= 20
        _, body = codec.decode_request(frame[4:])
        (batch,), _ = records.read_batches(body["topicData"][0]["partitionData"][0]["records"])
        assert batch.crc_valid
