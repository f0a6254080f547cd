import gzip
import json
import random
import tracemalloc
from itertools import count
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol import codec, shapes
from kproxy.protocol.records import Batch, Record, iterate_headers, write_batch, write_message_set
from kproxy.protocol.schema import address_path, schema
from kproxy.wire import bodies
from kproxy.wire.bodies import BodyWalker
from tests.protocol.messages import VECTORS, Layout, layouts, vectors
from tests.protocol.messages import bodies as bodies_of

LOGS = [
    (said["name"], bytes.fromhex(said["hex"]))
    for said in map(json.loads, gzip.decompress(VECTORS.with_name("records-dev.jsonl.gz").read_bytes()).splitlines())
]
STREAMED = (1, 78)
LAYOUTS = [layout for layout in layouts() if layout.side == "response" and layout.api_key in STREAMED]
CARRIERS = [layout for layout in LAYOUTS if layout.api_key == 78 or layout.version >= 16]


def walk(layout: Layout, frame: bytes, sizes, neutralise: bool = False) -> tuple[BodyWalker, bytes]:
    """Feed a frame's body in chunks of these sizes, each in the middle of a buffer; also what would be sent on."""
    walker = BodyWalker(layout.api_key, layout.version, neutralise=neutralise)
    sent = bytearray(frame[:4])
    pos = 4
    while pos < len(frame):
        part = frame[pos : pos + next(sizes)]
        chunk = memoryview(b"\xff\x01" + part + b"\x00\xff\x7f")
        begin = 2
        for start, end, replacement in walker.feed(chunk, 2, 2 + len(part)) or ():
            assert begin <= start <= end <= 2 + len(part)
            sent += chunk[begin:start]
            sent += replacement
            begin = end
        sent += chunk[begin : 2 + len(part)]
        pos += len(part)
    walker.finish()
    return walker, bytes(sent)


def random_sizes(seed: int):
    dice = random.Random(seed)
    largest = dice.choice((1, 2, 5, 40, 3000))
    while True:
        yield dice.randint(1, largest)


def looks(walker: bodies.Found) -> tuple:
    return walker.throttle_ms, walker.error_code, walker.errors


def check_hidden(layout: Layout, before: bytes, after: bytes) -> None:
    """Only the addresses are gone, at the same size, under one unknown tag."""
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


def test_every_answer_is_walked_as_it_is_scanned() -> None:
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


@pytest.mark.parametrize("layout", CARRIERS, ids=repr)
@pytest.mark.parametrize(
    "tags", [{}, {200: b"x" * 200}, dict.fromkeys(range(200, 327), b""), dict.fromkeys(range(200, 400), b"z")]
)
def test_hiding_at_every_size(layout: Layout, tags: dict[int, bytes]) -> None:
    """Lengths around those where a varint grows, and a tag count that grows by ours."""
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
def test_what_is_stepped_over_before_the_tail(layout: Layout) -> None:
    """The hiding begins where the addresses do, even if that lies some chunks ahead of what the walk has seen."""
    topics = [{"topicId": UUID(int=7), "_tags": {9: b"x" * 30}}]
    frame = layout.encode({"responses": topics, "nodeEndpoints": [{"host": "h" * 9}], "_tags": {5: b"y" * 30}})
    for size in range(1, len(frame)):
        walker, sent = walk(layout, frame, iter(lambda size=size: size, None), neutralise=True)
        assert walker.fault is None and walker.neutralised
        check_hidden(layout, frame, sent)


def large(layout: Layout, endpoints: int) -> bytes:
    node = {"host": "broker.example", "port": 9092}
    partitions = [{"partitionIndex": index, "errorCode": index % 3, "records": b"\xff" * 50_000} for index in range(20)]
    responses = [{"topicId": UUID(int=7), "partitions": partitions}]
    nodes = [{"nodeId": number, **node} for number in range(endpoints)]
    return layout.encode({"throttleTimeMs": 5, "responses": responses, "nodeEndpoints": nodes})


@pytest.mark.parametrize("layout", CARRIERS, ids=repr)
def test_a_large_answer(layout: Layout) -> None:
    frame = large(layout, 3)
    for size in (65536, 1000):
        walker, sent = walk(layout, frame, iter(lambda size=size: size, None), neutralise=True)
        assert walker.fault is None and walker.neutralised
        assert looks(walker) == (5, 0, (1, 2) * 6 + (1,))
        check_hidden(layout, frame, sent)


def test_a_tail_that_is_too_long_is_a_fault_and_does_not_leave() -> None:
    layout = CARRIERS[-1]
    frame = large(layout, 5000)
    walker, sent = walk(layout, frame, iter(lambda: 10_000, None), neutralise=True)
    assert walker.fault is not None and "65536" in str(walker.fault)
    assert b"broker.example" not in sent
    walker, sent = walk(layout, frame, iter(lambda: 10_000, None))
    assert (walker.fault, sent) == (None, frame)


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
def test_a_body_that_is_cut_is_a_fault_at_its_end(neutralise: bool) -> None:
    for layout, frame, _, _ in vectors():
        if layout in LAYOUTS:
            for cut in range(4, len(frame), 1 + len(frame) // 40):
                walker, _ = walk(layout, frame[:cut], random_sizes(cut), neutralise)
                assert walker.fault is not None


def test_harmed_bodies() -> None:
    """A harmed body is a fault or is read; nothing else is raised, no split changes it, and no address gets out."""
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


DETAILED = [layout for layout in layouts() if layout.api_key in (0, 1, 2, 8, 9, 78)]


def details(layout: Layout, frame: bytes, sizes, detail: int) -> tuple[BodyWalker, list, list]:
    walker = BodyWalker(layout.api_key, layout.version, layout.side, detail=detail)
    partitions, batches = [], []
    pos = layout.start
    while pos < len(frame):
        size = next(sizes)
        part = frame[pos : pos + size]  # nothing of what came before is still there
        walker.feed(memoryview(b"\xff\x01" + part + b"\x00\xff"), 2, 2 + len(part))
        partitions += walker.partitions
        batches += walker.batches
        walker.partitions.clear()
        walker.batches.clear()
        pos += size
    walker.finish()
    return walker, partitions, batches


def expected_details(layout: Layout, body: dict) -> tuple[list[dict], list]:
    """By the whole decode; the names of the fields are spelled out here once more, on purpose."""
    partitions, batches = [], []
    for group in body.get("groups") or [body]:
        for topic in group.get("topics") or group.get("topicData") or group.get("responses") or []:
            about = {
                "topic": topic.get("name", topic.get("topic")),
                "topic_id": topic.get("topicId"),
                "group_id": group.get("groupId"),
            }
            for key in ("partitions", "partitionData", "partitionResponses"):
                for one in topic.get(key, ()):
                    said = expected_partition(layout, one)
                    partitions.append(about | said[0])
                    batches += said[1]
    return partitions, batches


def expected_forgotten(layout: Layout, body: dict) -> list[tuple] | None:
    if (layout.api_key, layout.side) != (1, "request") or body.get("sessionEpoch", 0) <= 0:
        return None
    left = body["forgottenTopicsData"]
    return [(one.get("topic") or one.get("topicId"), partition) for one in left for partition in one["partitions"]]


def expected_partition(layout: Layout, one: dict) -> tuple[dict, list]:
    def first(*names: str, default=-1):
        return next((one[name] for name in names if name in one), default)

    records = first("records", default=None) or b""
    found = []
    try:
        for pos, header in iterate_headers(records):
            found.append((header, Batch(header, memoryview(records)[pos : pos + header.size_bytes]).crc_valid))
    except ProtocolError:
        pass
    headers = [header for header, _ in found]
    counts = [header.record_count for header in headers if not header.is_control]
    said = {
        "partition": first("index", "partition", "partitionIndex"),
        "error_code": first("errorCode", default=None),
        "offset": first("fetchOffset", "baseOffset", "committedOffset", "offset"),
        "high_watermark": first("highWatermark"),
        "last_stable_offset": first("lastStableOffset"),
        "log_start_offset": first("logStartOffset"),
        "leader_epoch": first("currentLeaderEpoch", "committedLeaderEpoch", "leaderEpoch"),
        "metadata": first("committedMetadata", "metadata", default=None),
        "bytes": len(records),
        "batches": len(found),
        "records": -1 if -1 in counts else sum(counts),
        "codecs": sum({1 << header.codec for header in headers}),
        "magic": headers[-1].magic if headers else -1,
        "first_offset": headers[0].base_offset if headers else -1,
        "last_offset": headers[-1].last_offset if headers else -1,
        "max_timestamp": max([-1, *(header.max_timestamp for header in headers)]),
    }
    return said, found


def check_details(layout: Layout, frame: bytes, body: dict, seeds) -> int:
    partitions, batches = expected_details(layout, body)
    for seed in seeds:
        for detail in (bodies.TOPICS, bodies.BATCHES, bodies.CHECKED):
            walker, got, got_batches = details(layout, frame, random_sizes(seed), detail)
            assert walker.fault is None
            assert [one._asdict() for one in got] == partitions
            whole = [(batch.header, batch.crc_valid) for batch in got_batches if not batch.partial]
            told = {
                bodies.TOPICS: [],
                bodies.BATCHES: [(header, None) for header, _ in batches],
                bodies.CHECKED: batches,
            }
            assert whole == told[detail]
            assert walker.forgotten == expected_forgotten(layout, body)
            check_whole(layout, frame, walker, got, got_batches, detail)
        check_sums(layout, frame, got, random_sizes(seed))
    return len(partitions)


def check_sums(layout: Layout, frame: bytes, partitions: list, sizes) -> None:
    if layout.api_key in (1, 8):  # Fetch and OffsetCommit tell where consumers are: of those everything
        walker, got, _ = details(layout, frame, sizes, bodies.SUMS)
        assert (walker.fault, walker.sums, got) == (None, [], partitions)
        return
    names = bodies.Sums._fields
    expected = [tuple(getattr(one, name) for name in names) for one in partitions if one.bytes]
    walker = details(layout, frame, sizes, bodies.SUMS)[0]
    assert (walker.fault, walker.sums) == (None, expected)
    read = bodies.body_reader(layout.api_key, layout.version, layout.side, bodies.SUMS)
    assert [*read(memoryview(frame), layout.start, len(frame)).sums] == expected


def check_whole(layout: Layout, frame: bytes, walker: BodyWalker, partitions: list, batches: list, detail: int) -> None:
    """A body that is wholly there gives what its pieces give."""
    read = bodies.body_reader(layout.api_key, layout.version, layout.side, detail)
    try:
        found = read(memoryview(b"\xff" + frame + b"\xff\x00"), 1 + layout.start, 1 + len(frame))
    except Malformed:
        assert walker.fault is not None
        return
    assert walker.fault is None
    assert looks(found) == looks(walker)
    assert [*found.partitions] == partitions
    assert [*found.batches] == batches


def test_details_of_the_vectors() -> None:
    partitions = 0
    for layout, frame, _, _ in vectors():
        if layout in DETAILED:
            partitions += check_details(layout, frame, layout.decode(frame)[1], range(4))
    assert partitions > 400


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_details_of_any_body(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(DETAILED))
    body = data.draw(bodies_of(layout))
    fragments = [log for _, log in LOGS]
    for topic in body.get("topicData") or body.get("responses") or []:
        for one in topic.get("partitionData") or topic.get("partitions") or []:
            if "records" in one:
                one["records"] = b"".join(data.draw(st.lists(st.sampled_from(fragments), max_size=3)))
    check_details(layout, layout.encode(body), body, [data.draw(st.integers(0, 99))])


def test_details_of_every_kind_of_records() -> None:
    """Each log fragment of the official library, whole and cut, in each API that carries records."""
    carriers = [Layout(schema().apis[0].request, 9, 0, "request"), Layout(schema().apis[1].response, 12, 1, "response")]
    for name, log in LOGS:
        for records in (log, log[:-1], log[: len(log) // 2], log[:70], log[:61], log[:30], log[:17], log[:16]):
            one = {"records": records}
            for layout in carriers:
                key, inner = ("topicData", "partitionData") if layout.side == "request" else ("responses", "partitions")
                frame = layout.encode({key: [{inner: [one, {"records": None}, one]}]})
                assert check_details(layout, frame, layout.decode(frame)[1], [len(name)]) == 3


def test_every_change_of_a_remembered_body_is_noticed() -> None:
    """Requests of one size and one shape are read once; what is counted is never that of another."""
    dice = random.Random(3)
    noticed = same = 0
    for version in schema().apis[0].request.versions:
        records = (
            write_batch([Record(0, 1, None, b"v")])
            if version > 2
            else write_message_set([Record(0, 1, None, b"v" * 80)], magic=1)
        )
        topic = {"name": "orders", "topicId": UUID(int=7), "partitionData": [{"index": 1, "records": records * 2}]}
        header = {"requestApiKey": 0, "requestApiVersion": version, "correlationId": 1, "clientId": "c"}
        frame = codec.encode_request(header, {"acks": 1, "timeoutMs": 9, "topicData": [topic]})
        alike = bodies.body_reader(0, version, "request", bodies.SUMS)
        plan = bodies._Whole(0, version, "request", bodies.SUMS).plan()

        def said(read, data: bytearray):
            try:
                return [*read(memoryview(data), 8, len(data)).sums]
            except Malformed as fault:
                return str(fault)

        for _ in range(2 * shapes.LEARN_EVERY):
            assert said(alike, frame) == said(plan, frame)
        for pos in range(8, len(frame)):
            changed = bytearray(frame)
            changed[pos] ^= dice.choice((1, 2, 0x80, 0xFF))
            expected = said(plan, changed)
            assert said(alike, changed) == expected
            noticed += expected != said(plan, frame)
            same += expected == said(plan, frame)
    assert noticed > 500 and same > 500


def test_a_checksum_is_that_of_every_byte_that_passed() -> None:
    """Of batches of each magic, larger than any chunk: one bit is enough, wherever it is."""
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


def test_a_cut_batch_is_told_as_partial() -> None:
    _, log = next(entry for entry in LOGS if entry[0].startswith("m2-none"))
    layout = Layout(schema().apis[1].response, 12, 1, "response")
    frame = layout.encode({"responses": [{"topic": "t", "partitions": [{"records": log + log[:-1]}]}]})
    _, partitions, batches = details(layout, frame, random_sizes(1), bodies.CHECKED)
    assert [batch.partial for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert [batch.crc_valid for batch in batches] == [True] * (len(batches) - 1) + [None]
    assert {(batch.topic, batch.partition) for batch in batches} == {(partitions[0].topic, partitions[0].partition)}


def test_harmed_details() -> None:
    """Nothing but a fault comes of harmed bytes, and the split does not matter."""
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
            told = []
            for sizes in (iter(lambda: 1 << 20, None), random_sizes(dice.randrange(99))):
                walker, partitions, batches = details(layout, bytes(harmed), sizes, bodies.CHECKED)
                told.append((str(walker.fault), partitions, batches))
                check_whole(layout, bytes(harmed), walker, partitions, batches, bodies.CHECKED)
            assert told[0] == told[1]


def test_who_tells_the_names_of_topics_beside_their_ids() -> None:
    """Bodies that know topics by id alone are read with what these said before, or say later."""
    apis = schema().apis
    telling = {
        api.name: [version for version in api.response.versions if bodies.tells_names(api.key, version)]
        for api in apis.values()
    }
    assert telling["Metadata"] == [10, 11, 12, 13] and telling["CreateTopics"] == [7]
    assert telling["DescribeTopicPartitions"] == [0] and not telling["Fetch"]
    identity = UUID(int=3)
    for key, version, array in ((3, 10, "topics"), (3, 13, "topics"), (19, 7, "topics"), (75, 0, "topics")):
        frame = codec.encode_response(key, version, {"correlationId": 1}, {array: [{"name": "t", "topicId": identity}]})
        found = bodies.body_reader(key, version, "response", bodies.SUMS)(frame, 4, len(frame))
        assert found.names == {identity: "t"}


@pytest.mark.parametrize("key", (3, 10, 60))
def test_who_is_where_is_told_by_the_answers_that_are_about_it(key: int) -> None:
    for version in schema().apis[key].response.versions:
        assert bodies.tells_brokers(key, version)
        path = address_path(key, version)
        node = "brokerId" if key == 60 else "nodeId"
        one = {node: 7, "host": "10.0.0.1", "port": 9092}
        nobody = {node: -1, "host": "", "port": -1}  # as where there is no coordinator
        frame = codec.encode_response(key, version, {"correlationId": 1}, {path: [nobody, one]} if path else one)
        found = bodies.body_reader(key, version, "response", bodies.BATCHES)(frame, 4, len(frame))
        walker = bodies.BodyWalker(key, version, detail=bodies.ERRORS)
        for at in range(4, len(frame)):
            walker.feed(frame, at, at + 1)
        walker.finish()
        assert walker.fault is None
        assert found.brokers == walker.brokers == {("10.0.0.1", 9092): 7}


def test_errors_are_bounded() -> None:
    layout = LAYOUTS[0]
    partitions = [{"errorCode": 3, "records": b""}] * (bodies.MAX_ERRORS + 5)
    frame = layout.encode({"responses": [{"topic": "t", "partitions": partitions}]})
    walker, _ = walk(layout, frame, count(1 << 16))
    assert len(walker.errors) == bodies.MAX_ERRORS
    assert walker.fault is None
