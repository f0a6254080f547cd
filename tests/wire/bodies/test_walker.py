import random
import tracemalloc
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.records import Record, write_batch, write_message_set
from kproxy.protocol.schema import schema
from kproxy.wire import bodies
from kproxy.wire.bodies import BodyWalker
from tests.protocol.messages import Layout, vectors
from tests.protocol.messages import bodies as bodies_of
from tests.wire.bodies.walking import CARRIERS, DETAILED, LAYOUTS, check_whole, details, looks, random_sizes, walk


def check_hidden(layout: Layout, before: bytes, after: bytes) -> None:
    """Check that only the addresses are hidden, under one unknown tag, and that the size is unchanged."""
    assert len(after) == len(before)
    header, was = layout.decode(before)
    again, now = layout.decode(after)
    assert header == again
    had = was.pop("nodeEndpoints", None)
    assert not now.pop("nodeEndpoints", None)
    if (layout.api_key == 1 and had is not None) or had:
        assert now["_tags"].pop(bodies.UNKNOWN_TAG) is not None
    if not now.get("_tags", True):
        del now["_tags"]
    assert now == was


def test_walking_a_response_gives_the_same_as_scanning_it() -> None:
    for layout, frame, _, said in vectors():
        if layout.side == "response" and (layout.api_key != 18 or frame[4:6] != b"\0\x23"):
            want = codec.response_scan(layout.api_key, layout.version)(frame, 4, len(frame))
            walker, sent = walk(layout, frame, random_sizes(said["index"]))
            assert (walker.fault, sent, looks(walker)) == (None, frame, want[:3])


def test_any_split_of_the_vectors() -> None:
    for layout, frame, _, _ in vectors():
        if layout not in LAYOUTS:
            continue
        want = codec.response_scan(layout.api_key, layout.version)(frame, 4, len(frame))
        for seed in range(8):
            walker, sent = walk(layout, frame, random_sizes(seed))
            assert (walker.fault, sent, looks(walker)) == (None, frame, want[:3])
            assert not walker.neutralised
        for seed in range(8):
            walker, sent = walk(layout, frame, random_sizes(seed), neutralise=True)
            assert (walker.fault, looks(walker)) == (None, want[:3])
            assert walker.neutralised == want[3]
            check_hidden(layout, frame, sent)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_of_any_body(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    body = data.draw(bodies_of(layout))
    body.get("_tags", {}).pop(bodies.UNKNOWN_TAG, None)
    frame = layout.encode(body) + data.draw(st.binary(max_size=3))
    want = codec.response_scan(layout.api_key, layout.version)(frame, 4, len(frame))
    for neutralise in (False, True):
        walker, sent = walk(layout, frame, random_sizes(data.draw(st.integers(0, 99))), neutralise)
        assert (walker.fault, looks(walker)) == (None, want[:3])
        if neutralise:
            check_hidden(layout, frame, sent)
        else:
            assert sent == frame


@pytest.mark.parametrize("layout", [each for each in CARRIERS if each.api_key == 1], ids=repr)
def test_addresses_under_an_overlong_tag_varint_are_not_forwarded(layout: Layout) -> None:
    """Hiding changes the one byte of the tag number, so a longer varint is a fault at any split."""
    named = layout.encode({"nodeEndpoints": [{"nodeId": 1, "host": "broker", "port": 9092}]})
    plain = layout.encode({})
    assert plain.endswith(b"\0") and named.startswith(plain[:-1] + b"\1\0")  # one tagged field, number 0
    frame = plain[:-1] + b"\1\x80\0" + named[len(plain) + 1 :]
    assert layout.decode(frame)[1]["nodeEndpoints"][0]["host"] == "broker"
    for seed in range(4):
        walker, _ = walk(layout, frame, random_sizes(seed), neutralise=True)
        assert "a varint with a needless byte" in str(walker.fault)  # its owner closes: see BodyWalker
        walker, sent = walk(layout, frame, random_sizes(seed))
        assert (walker.fault, sent) == (None, frame)


@pytest.mark.parametrize("layout", CARRIERS, ids=repr)
@pytest.mark.parametrize(
    "tags", [{}, {200: b"x" * 200}, dict.fromkeys(range(200, 327), b""), dict.fromkeys(range(200, 400), b"z")]
)
def test_hiding_at_every_size(layout: Layout, tags: dict[int, bytes]) -> None:
    """Lengths around those where a varint grows, and where the added tag makes the tag count grow."""
    for size in (*range(5), *range(105, 130), 16300, *range(16360, 16390)):
        body = {"nodeEndpoints": [{"nodeId": 1, "host": "h" * size, "port": 9092}]}
        if tags:
            body["_tags"] = tags
        frame = layout.encode(body)
        for split in (1 << 20, 7):
            walker, sent = walk(layout, frame, iter(lambda split=split: split, None), neutralise=True)
            assert walker.fault is None and walker.neutralised
            check_hidden(layout, frame, sent)
            if layout.api_key == 78:
                assert b"hh" not in sent


@pytest.mark.parametrize("layout", CARRIERS, ids=repr)
def test_hiding_starts_at_the_addresses_beyond_skipped_fields(layout: Layout) -> None:
    """Hiding starts at the addresses, even if they begin some chunks after the skipped field."""
    topics = [{"topicId": UUID(int=7), "_tags": {9: b"x" * 30}}]
    frame = layout.encode({"responses": topics, "nodeEndpoints": [{"host": "h" * 9}], "_tags": {5: b"y" * 30}})
    for size in range(1, len(frame)):
        walker, sent = walk(layout, frame, iter(lambda size=size: size, None), neutralise=True)
        assert walker.fault is None and walker.neutralised
        check_hidden(layout, frame, sent)


@pytest.mark.parametrize("version", schema().apis[3].response.versions)
def test_the_head_of_a_response_is_completed_with_empty_fields(version: int) -> None:
    layout = Layout(schema().apis[3].response, version, 3, "response")
    brokers = [{"nodeId": 7, "host": "h" * 300, "port": 9092}]
    whole = layout.encode({"brokers": brokers, "topics": [{"name": "t", "partitions": [{}]}]})
    walker = BodyWalker(3, version, marks_head=True)
    walker.feed(whole, 4, len(whole))
    assert walker.fault is None and walker.head_end is not None
    headed = whole[: walker.head_end] + bodies.empty_rest(3, version)
    assert layout.decode(headed)[1] == layout.decode(layout.encode({"brokers": brokers}))[1]


def large(layout: Layout, endpoints: int) -> bytes:
    node = {"host": "broker.example", "port": 9092}
    partitions = [{"partitionIndex": index, "errorCode": index % 3, "records": b"\xff" * 50_000} for index in range(20)]
    responses = [{"topicId": UUID(int=7), "partitions": partitions}]
    nodes = [{"nodeId": number, **node} for number in range(endpoints)]
    return layout.encode({"throttleTimeMs": 5, "responses": responses, "nodeEndpoints": nodes})


@pytest.mark.parametrize("layout", CARRIERS, ids=repr)
def test_addresses_of_a_large_response_are_hidden(layout: Layout) -> None:
    frame = large(layout, 3)
    for size in (65536, 1000):
        walker, sent = walk(layout, frame, iter(lambda size=size: size, None), neutralise=True)
        assert walker.fault is None and walker.neutralised
        assert looks(walker) == (5, 0, (1, 2) * 6 + (1,))
        check_hidden(layout, frame, sent)


def test_a_tail_that_is_too_long_is_a_fault_and_is_not_forwarded() -> None:
    layout = CARRIERS[-1]
    frame = large(layout, 5000)
    walker, sent = walk(layout, frame, iter(lambda: 10_000, None), neutralise=True)
    assert walker.fault is not None and "65536" in str(walker.fault)
    assert b"broker.example" not in sent
    walker, sent = walk(layout, frame, iter(lambda: 10_000, None))
    assert (walker.fault, sent) == (None, frame)


def test_a_tail_may_have_exactly_64_kib() -> None:
    layout = CARRIERS[-1]
    frame = large(layout, 5000)
    begin = frame.index(b"broker.example") - 50
    walker = BodyWalker(layout.api_key, layout.version, neutralise=True)
    walker.feed(frame, 4, begin)
    at = begin
    while walker._held is None:
        walker.feed(frame, at, at + 1)
        at += 1
    upto = at + 64 * 1024 - len(walker._held)
    walker.feed(frame, at, upto)
    assert walker.fault is None and len(walker._held) == 64 * 1024
    walker.feed(frame, upto, upto + 1)
    assert walker.fault is not None


def test_memory_does_not_grow_with_the_body() -> None:
    layout = CARRIERS[0]
    records = 1 << 30
    head = layout.encode({"responses": [{"partitions": [{"records": b""}]}]})[4:]
    at = head.rindex(b"\x01\0\0\0")  # the size of the records, then three empty tag sections
    head = head[:at] + b"\x81\x80\x80\x80\x04"  # 2**30 + 1: compact
    chunk = bytes(1 << 18)
    walker = BodyWalker(layout.api_key, layout.version, neutralise=True)
    walker.feed(head, 0, len(head))
    tracemalloc.start()
    try:
        for _ in range(records // len(chunk)):
            assert walker.feed(chunk, 0, len(chunk)) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4096
    walker.feed(b"\0\0\0", 0, 3)
    walker.finish()
    assert walker.fault is None


@pytest.mark.parametrize("neutralise", [False, True])
def test_a_truncated_body_is_a_fault_at_its_end(neutralise: bool) -> None:
    for layout, frame, _, _ in vectors():
        if layout in LAYOUTS:
            for cut in range(4, len(frame), 1 + len(frame) // 40):
                walker, _ = walk(layout, frame[:cut], random_sizes(cut), neutralise)
                assert walker.fault is not None


def test_damaged_bodies_are_read_or_a_fault_at_any_split() -> None:
    """Nothing else is raised, the split makes no difference, and no address is forwarded."""
    dice = random.Random(4)
    known = {layout: schema().apis[layout.api_key].response for layout in LAYOUTS}
    for layout, frame, _, _ in vectors():
        if layout not in known:
            continue
        for _ in range(60):
            harmed = bytearray(frame)
            for _ in range(dice.choice((1, 1, 3))):
                harmed[dice.randrange(4, len(harmed))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
            harmed = bytes(harmed)
            whole, _ = walk(layout, harmed, iter(lambda: 1 << 20, None))
            parts, _ = walk(layout, harmed, random_sizes(dice.randrange(99)))
            assert looks(whole) == looks(parts)
            assert str(whole.fault) == str(parts.fault)
            try:
                want = codec.response_scan(layout.api_key, layout.version)(harmed, 4, len(harmed))
            except ProtocolError:
                pass
            else:
                assert (whole.fault, looks(whole)) == (None, want[:3])
            hidden, sent = walk(layout, harmed, random_sizes(dice.randrange(99)), neutralise=True)
            if hidden.fault is None:
                try:
                    assert not layout.decode(sent)[1].get("nodeEndpoints")
                except ProtocolError:
                    continue  # not UTF-8, a tag twice: no client reads addresses from it


def test_a_checksum_covers_every_byte_of_a_batch() -> None:
    """One flipped bit anywhere invalidates a batch of any magic that spans several chunks."""
    dice = random.Random(2)
    layout = Layout(schema().apis[1].response, 12, 1, "response")
    value = dice.randbytes(1000)
    for magic in (0, 1, 2):
        records = [Record(offset, 5, None, value) for offset in range(3)]
        log = write_batch(records) if magic == 2 else write_message_set(records[:1], magic=magic)
        frame = layout.encode({"responses": [{"topic": "t", "partitions": [{"records": log * 3}]}]})
        start = frame.index(log)
        for _ in range(40):
            number = dice.randrange(3)
            at = dice.randrange(21 if magic == 2 else 18, len(log))
            harmed = bytearray(frame)
            harmed[start + number * len(log) + at] ^= 1 << dice.randrange(8)
            read = bodies.body_reader(1, 12, "response", bodies.CHECKED)
            found = read(memoryview(harmed), layout.start, len(harmed)).batches
            _, _, batches = details(layout, bytes(harmed), random_sizes(at), bodies.CHECKED)
            assert batches == [*found]
            assert [batch.crc_valid for batch in batches if batch.header.magic == magic] != [True] * len(batches)
            if at >= 61:
                assert [batch.crc_valid for batch in batches] == [each != number for each in range(3)]


def test_damaged_details_are_read_or_a_fault_at_any_split() -> None:
    """Damaged bytes give at most a fault, the same at any split."""
    dice = random.Random(8)
    for layout, frame, _, _ in vectors():
        if layout not in DETAILED:
            continue
        for _ in range(8):
            harmed = bytearray(frame)
            for _ in range(dice.choice((1, 1, 3))):
                harmed[dice.randrange(layout.start, len(harmed))] = dice.choice(
                    (0, 0x7F, 0x80, 0xFF, dice.randrange(256))
                )
            results = []
            for sizes in (iter(lambda: 1 << 20, None), random_sizes(dice.randrange(99))):
                walker, partitions, batches = details(layout, bytes(harmed), sizes, bodies.CHECKED)
                results.append((str(walker.fault), partitions, batches))
                check_whole(layout, bytes(harmed), walker, partitions, batches, bodies.CHECKED)
            assert results[0] == results[1]
