"""The bench's two ends agree on every byte, directly and through kproxy, and its verdict can go both ways."""

import dataclasses
import json

import pytest

from bench import cases, measure, processes, report
from bench.load import Load, LoadError, SaturatingLoad
from kproxy.protocol import codec, records
from kproxy.protocol.apis import HEARTBEAT, PRODUCE
from kproxy.protocol.schema import api_name

EXCHANGES = [(case, version) for case in cases.CASES for version in case.versions]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with processes.broker(tmp_path_factory.mktemp("broker"), None) as address:
        yield address


@pytest.fixture(scope="module")
def kproxy(broker, tmp_path_factory):
    with processes.kproxy(broker, tmp_path_factory.mktemp("kproxy"), None) as proxy:
        yield proxy


def load(case, version, broker, address):
    answer = cases.answer(case.api_key, version, broker[1])
    return Load(address, cases.request(case, version), answer, case.connections, case.depth)


@pytest.mark.parametrize("case, version", EXCHANGES)
def test_frames_are_valid(case, version):
    request, answer = cases.request(case, version), cases.answer(case.api_key, version, 9092)
    _, asked = codec.decode_request(request[4:])
    _, answered = codec.decode_response(answer[4:], case.api_key, version)
    if case.api_key == HEARTBEAT:
        assert asked["memberId"] and answered["errorCode"] == 0
        return
    if case.api_key == PRODUCE:
        assert asked["acks"] == -1 and abs(len(request) - case.request_bytes) <= 20
        data = asked["topicData"][0]["partitionData"][0]["records"]
    else:
        data = answered["responses"][0]["partitions"][0]["records"]
        assert cases.FETCHED_BYTES - cases.FETCHED_BATCH_BYTES < len(data) <= cases.FETCHED_BYTES
    batches, trailing_bytes = records.read_batches(data)
    assert batches and not trailing_bytes and all(batch.crc_valid for batch in batches)


@pytest.mark.parametrize("case, version", EXCHANGES)
def test_every_answer_arrives_as_it_left(case, version, broker, kproxy):
    requests = 3 * case.connections * case.depth + 1
    with load(case, version, broker, broker) as direct:
        direct.run(requests, compare=True)
        assert direct.sent == requests
    api = api_name(case.api_key)
    before = kproxy.requests_counted(api)
    with load(case, version, broker, kproxy.address) as proxied:
        proxied.run(requests, compare=True)
        proxied.run(requests)
        assert proxied.sent == 2 * requests
    assert kproxy.requests_counted(api) - before == 2 * requests


def test_a_wrong_answer_is_noticed(broker):
    case = cases.CASES[0]
    request, answer = cases.request(case, 9), bytearray(cases.answer(case.api_key, 9, broker[1]))
    answer[-1] ^= 1
    with Load(broker, request, bytes(answer), 1, 1) as wrong_byte, pytest.raises(LoadError, match="not what"):
        wrong_byte.run(1, compare=True)
    with Load(broker, request, bytes(answer) + b"\0", 1, 1) as wrong_size, pytest.raises(LoadError, match="are due"):
        wrong_size.run(1)


def test_a_saturating_load_and_its_broker_say_the_same(tmp_path):
    """Their bytes are checked by the load that compares; what they send themselves, kproxy counts."""
    binary = processes.saturate(tmp_path)
    with (
        processes.saturating_broker(binary, tmp_path, None) as broker,
        processes.kproxy(broker, tmp_path, None) as kproxy,
    ):
        for case, version in EXCHANGES:
            requests = 3 * case.connections * case.depth + 1
            with load(case, version, broker, broker) as direct:
                direct.run(requests, compare=True)
            frame = tmp_path / "request"
            frame.write_bytes(cases.request(case, version))
            before = kproxy.requests_counted(api_name(case.api_key))
            with SaturatingLoad(binary, kproxy.address, frame, case.connections, case.depth) as proxied:
                proxied.run(requests)
                proxied.run(requests)
                assert proxied.sent == 2 * requests
            assert kproxy.requests_counted(api_name(case.api_key)) - before == 2 * requests
        with (
            SaturatingLoad(binary, ("127.0.0.1", 1), frame, 1, 1) as nowhere,
            pytest.raises((LoadError, BrokenPipeError)),
        ):
            nowhere.run(1)


def test_limits_are_those_of_the_load_and_the_detail():
    case = cases.CASES[0]
    for native, limits in ((False, case.python), (True, case.native)):
        found = [
            cases.limited(case, detail, load, native=native).limit
            for load in cases.LOADS
            for detail in ("headers", "topics")
        ]
        assert found == list(limits)


def test_verdict():
    case = cases.limited(cases.CASES[0], "headers", cases.PACED, native=True)
    slow, fast = case.limit * 1.1, case.limit * 0.9
    result = measure.Result(
        case, 9, cases.PACED, 10, 1000, {"haproxy": [1.0, 2.0], "nginx": [1.0, 2.0], "kproxy": [fast, 2 * fast]}
    )
    good = measure.Run([result], {"kproxy": 1}, report.VERSION_LIMIT_S / 2, True)
    assert report.passed(good)
    assert json.loads(json.dumps(report.as_json(good)))["cases"][0]["proxies"]["kproxy"]["ratio"] == pytest.approx(fast)
    over = dataclasses.replace(result, cpu_s={**result.cpu_s, "kproxy": [slow, 2 * slow]})
    assert not report.passed(dataclasses.replace(good, results=[result, over]))
    assert not report.passed(dataclasses.replace(good, version_cpu_s=report.VERSION_LIMIT_S))
