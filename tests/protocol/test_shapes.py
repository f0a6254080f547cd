"""A remembered shape gives the same result as its plan, for any frame."""

import gzip
import json
import random
from pathlib import Path

from kproxy.errors import Malformed
from kproxy.protocol import codec, shapes

VECTORS = Path(__file__).parents[1] / "data" / "vectors-dev.jsonl.gz"


def outcome(plan, frame):
    try:
        return plan(frame, 4, len(frame))
    except Malformed as fault:
        return str(fault)


def answers():
    with gzip.open(VECTORS) as lines:
        for line in lines:
            vector = json.loads(line)
            if vector["dir"] == "response":
                yield vector["api_key"], vector["version"], bytearray.fromhex(vector["hex"])


def test_every_change_of_a_remembered_response_is_noticed():
    """A change of a byte that the plan reads triggers a new read; other bytes may change freely."""
    dice = random.Random(8)
    remembered = noticed = skipped = 0
    for api_key, version, frame in answers():
        plan = codec.response_scan(api_key, version)
        alike = shapes.remembered(plan)
        for _ in range(shapes.LEARN_EVERY):
            assert outcome(alike, frame) == outcome(plan, frame)
        for pos in dice.sample(range(4, len(frame)), min(40, len(frame) - 4)):
            changed = bytearray(frame)
            changed[pos] ^= dice.choice((1, 0x80, 0xFF))
            expected = outcome(plan, changed)
            assert outcome(alike, changed) == expected
            noticed += expected != outcome(plan, frame)
            skipped += expected == outcome(plan, frame)
        remembered += 1
    assert remembered > 1000
    assert noticed > 1000
    assert skipped > 1000


def test_a_response_with_the_same_shape_is_not_read_again():
    reads = 0
    scan = codec.response_scan(0, 13)

    def plan(buffer, start, end, *unpackers):
        nonlocal reads
        reads += 1
        return scan(buffer, start, end, *unpackers)

    plan.__defaults__ = scan.__defaults__
    alike = shapes.remembered(plan)
    partition = {"index": 0, "baseOffset": 7}
    for number in range(1000):
        partition["baseOffset"] += 1
        frame = codec.encode_response(
            0, 13, {"correlationId": number}, {"responses": [{"partitionResponses": [partition]}]}
        )
        assert alike(frame, 4, len(frame)) == (0, None, (), False)
    assert reads <= 2 * shapes.LEARN_EVERY


def test_memory_is_bounded():
    plan = codec.response_scan(3, 12)
    alike = shapes.remembered(plan)
    (cells,) = [cell.cell_contents for cell in alike.__closure__ if isinstance(cell.cell_contents, dict)]
    for number in range(shapes.LEARN_EVERY * (2 * shapes.LENGTHS + 1)):
        body = {"brokers": [{"nodeId": 1, "host": "h" * (number % 1000), "port": 1}]}
        frame = codec.encode_response(3, 12, {"correlationId": 1}, body)
        assert alike(frame, 4, len(frame)) == plan(frame, 4, len(frame))
        assert len(cells) <= shapes.LENGTHS
    many = codec.encode_response(3, 12, {"correlationId": 1}, {"topics": [{"name": "t"}] * 1000})
    for _ in range(3 * shapes.LEARN_EVERY):
        assert alike(many, 4, len(many)) == plan(many, 4, len(many))
    assert len(many) - 4 not in cells  # too many fields


def reads(ranges, times, end=200):
    """Return how often a plan that reads these positions runs in `times` calls with the same frame."""
    ran = 0

    def plan(buffer, start, end):
        nonlocal ran
        ran += 1
        return [buffer[pos] for pos in ranges]

    alike = shapes.remembered(plan)
    frame = bytes(range(201))
    for _ in range(times):
        assert alike(frame, 0, end) == [frame[pos] for pos in ranges]
    return ran


def test_a_shape_has_a_limited_number_of_ranges_within_its_frame():
    """The frame of the 64th miss is read twice, and not again."""
    times = 3 * shapes.LEARN_EVERY
    learnt, never = shapes.LEARN_EVERY + 1, times
    assert reads([2 * number for number in range(shapes.FIELDS)], times) == learnt
    assert reads([*range(5)] * 40, times) == learnt  # the same ones again
    assert reads([2 * number for number in range(shapes.FIELDS + 1)], times) > never
    assert reads([0, 199], times) == learnt and reads([0, 200], times) > never
    assert reads([0], shapes.LEARN_EVERY - 1) == shapes.LEARN_EVERY - 1


def test_an_unwanted_result_raises_and_is_never_remembered():
    """The caller wants small responses without an error; it reads any other with a full plan."""
    scan = codec.response_scan(12, 4)
    alike = shapes.remembered(scan, lambda found: not found[2])
    frames = {code: codec.encode_response(12, 4, {"correlationId": 1}, {"errorCode": code}) for code in (0, 27)}
    for _ in range(3 * shapes.LEARN_EVERY):
        assert alike(frames[0], 4, len(frames[0])) == (0, 0, (), False)
        assert outcome(alike, frames[27]) == "not what the caller wants"
