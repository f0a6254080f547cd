"""Programs recognise exactly the responses for which `codec.response_scan` finds nothing to handle."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from uuid import UUID

import pytest

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import HEARTBEAT, OFFSET_COMMIT, PRODUCE
from kproxy.protocol.codec import is_noted
from kproxy.protocol.programs import collecting, plain_response
from kproxy.protocol.schema import Field, address_path, schema
from kproxy.proxy.filters.policy.resources import NAMED, reader
from kproxy.wire.bodies import SUMS, body_reader
from tests.native import needs_core
from tests.protocol.messages import Layout, vectors
from tests.wire.playbook import request, response
from tests.wire.produces import records

pytestmark = needs_core

SKIP, EACH = 1, 5


def is_plain(layout: Layout, frame: bytes) -> bool:
    import kproxy_core

    program = plain_response(layout.api_key, layout.version)
    return program is not None and kproxy_core.is_plain(program, frame[layout.start :])


def scanned(layout: Layout, frame: bytes) -> bool:
    """Return whether the scan finds no throttle, error or address in the response."""
    try:
        scan = codec.response_scan(layout.api_key, layout.version)
        throttle_ms, error, errors, carries = scan(frame, layout.start, len(frame))
    except ProtocolError:
        return False
    return throttle_ms in (-1, 0) and not error and not errors and not carries


def quieted(fields: tuple[Field, ...], body: dict[str, Any], carrier: str | None, above: str = "") -> dict[str, Any]:
    """Remove throttle, errors and addresses from the body and return it."""
    for field in fields:
        if field.name not in body:
            continue
        path = f"{above}.{field.name}" if above else field.name
        value = body[field.name]
        if path == carrier or is_noted(path):
            body[field.name] = [] if field.is_array else 0
            if field.tag is not None:  # if present, it is left to the session
                del body[field.name]
        elif field.is_struct and value is not None:
            for item in value if field.is_array else (value,):
                quieted(field.fields, item, carrier, path)
    return body


def test_programs_and_scan_agree_on_vectors_with_and_without_errors() -> None:
    plain = 0
    for layout, frame, _, _ in vectors():
        if layout.side != "response" or layout.api_key is None or layout.api_key == 18:
            continue
        _, body = layout.decode(frame)
        if body.get("throttleTimeMs", 0) >= 0:  # a negative one is left to the session
            assert is_plain(layout, frame) == scanned(layout, frame), layout
        carrier = address_path(layout.api_key, layout.version)
        quiet = layout.encode(quieted(layout.message.fields, deepcopy(body), carrier))
        assert is_plain(layout, quiet) == scanned(layout, quiet), layout
        plain += is_plain(layout, quiet)
        assert not is_plain(layout, quiet[:-1]), layout
        assert not is_plain(layout, quiet + b"\0"), layout
    assert plain > 300


def test_damaged_responses_are_never_plain_if_the_scan_finds_something() -> None:
    import kproxy_core

    chance = random.Random(11)
    plain = shaped = 0
    for layout, frame, _, _ in vectors():
        if layout.side != "response" or layout.api_key is None:
            continue
        _, body = layout.decode(frame)
        quiet = layout.encode(quieted(layout.message.fields, body, address_path(layout.api_key, layout.version)))
        program = plain_response(layout.api_key, layout.version)
        for _ in range(20):
            damaged = bytearray(quiet)
            for _ in range(chance.randint(1, 3)):
                if len(damaged) > layout.start:
                    damaged[chance.randrange(layout.start, len(damaged))] = chance.choice((0, 1, 127, 128, 255))
            if is_plain(layout, bytes(damaged)):
                plain += 1
                assert scanned(layout, bytes(damaged)), layout
                shaped += kproxy_core.fits(program, quiet[layout.start :], bytes(damaged[layout.start :]))
            else:
                assert program is None or not kproxy_core.fits(
                    program, quiet[layout.start :], bytes(damaged[layout.start :])
                ), layout
    assert plain > 1000
    assert shaped > 1000


NAMES = {
    PRODUCE: frozenset(NAMED["Produce"]),
    HEARTBEAT: frozenset(NAMED["Heartbeat"]),
    OFFSET_COMMIT: frozenset(NAMED["OffsetCommit"]),
}


def topic_in(version: int, raw: bytes) -> UUID | str:
    return UUID(bytes=raw) if version >= 13 else raw.decode("utf-8", "replace")


def damage(chance: random.Random, frame: bytes, start: int) -> bytes:
    damaged = bytearray(frame)
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(start, len(damaged))
        if chance.random() < 0.8:
            damaged[at] = chance.choice((0, 1, 2, 127, 128, 255, damaged[at] ^ 1))
        else:
            damaged[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
    return bytes(damaged)


def collected(
    chance: random.Random, program: tuple[int, ...], frame: bytes, start: int, count: int
) -> Iterator[tuple[bytes, bytes, list[tuple[Any, ...]]]]:
    """Yield (frame, names, topic-partitions) of those of `count` damaged forms of a frame that fit a program."""
    import kproxy_core

    for _ in range(count):
        damaged = damage(chance, frame, start)
        found = kproxy_core.collected(program, damaged[start:])
        if found is not None:
            yield damaged, *found


def test_programs_read_the_same_records_and_offsets_as_the_session() -> None:
    """Covers every intact and damaged Produce that a program does not leave to the session."""
    chance = random.Random(13)
    equal = offsets = 0
    for version in schema().apis[PRODUCE].request.versions:
        for _ in range(60):
            data, answers = [], []
            for topic in range(chance.randint(0, 2)):
                of = {"topicId": UUID(int=topic)} if version >= 13 else {"name": f"topic {topic}"}
                indexes = chance.sample(range(99), chance.choice((1, 2, 9)))
                data.append(of | {"partitionData": [{"index": each, "records": records(chance)} for each in indexes]})
                results = [{"index": each, "baseOffset": chance.choice((-1, 7, 1 << 40))} for each in indexes]
                answers.append(of | {"partitionResponses": results})
            asked = request(PRODUCE, version, 1, {"acks": 1, "topicData": data}, "c")[4:]
            answer = response(PRODUCE, version, 1, {"responses": answers})[4:]
            program = collecting(PRODUCE, version, frozenset(), records=True)
            for damaged, _, partitions in collected(chance, program, asked, 8, 30):
                sums = body_reader(PRODUCE, version, "request", SUMS)(damaged, 8, len(damaged)).sums
                mine = [(*each[2:6], each[1], topic_in(version, each[0])) for each in partitions]
                theirs = [(*each[2:], each.topic_id or each.topic) for each in sums]
                assert mine == theirs
                equal += bool(mine)
            of_answer = plain_response(PRODUCE, version, offsets=True)
            assert of_answer is not None
            for damaged, _, partitions in collected(chance, of_answer, answer, 4, 10):
                theirs_of_answer = body_reader(PRODUCE, version, "response", SUMS)(damaged, 4, len(damaged)).partitions
                mine_offsets = [(each[1], each[6]) for each in partitions]
                assert mine_offsets == [(each.partition, each.offset) for each in theirs_of_answer]
                offsets += bool(mine_offsets)
    assert equal > 3000
    assert offsets > 1000


def test_requests_with_equal_collected_names_mean_the_same_to_a_policy() -> None:
    """The collected bytes alone determine the names that a policy reads, however the rest is damaged."""
    chance = random.Random(12)
    read: dict[tuple[int, int, bytes], object] = {}
    equal = 0
    for layout, frame, _, _ in vectors():
        if layout.side != "request" or layout.api_key not in NAMES:
            continue
        key, version = layout.api_key, layout.version
        program = collecting(key, version, NAMES[key])
        for damaged, found, _ in collected(chance, program, frame, layout.start, 400):
            try:
                names = reader(key, version)(damaged, layout.start, len(damaged))
                outcome = names.topic, names.topic_id, names.group, names.transactional_id, names.all_of
            except ProtocolError:
                outcome = None
            if (key, version, found) in read:
                equal += 1
            assert read.setdefault((key, version, found), outcome) == outcome, (layout, damaged)
    assert equal > 5000
    assert len({api for api, _, _ in read}) == len(NAMES)


@pytest.mark.parametrize(
    "operations",
    [(9,), (14,), (SKIP,), (EACH, 0, 0, 1, 2, SKIP), (EACH, 0, 0, 0, 2, SKIP, 1), (EACH, 0, 0, 1, 1, SKIP), (8, 5, 1)],
)
def test_a_program_that_would_loop_or_run_past_its_end_is_refused(operations: tuple[int, ...]) -> None:
    import kproxy_core

    with pytest.raises(ValueError, match="not a program"):
        kproxy_core.Program(operations)
