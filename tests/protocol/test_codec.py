import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed, ProtocolError, Unsupported
from kproxy.protocol import codec
from kproxy.protocol.codec import TAG_SIZE, is_noted, paths_of
from kproxy.protocol.primitives import read_uvarint
from kproxy.protocol.schema import address_path, schema
from kproxy.protocol.shown.render import render
from tests.each import each
from tests.protocol.messages import Layout, bodies, layouts, leaves, vectors

FIELDS = ("acks", "timeoutMs", "transactionalId", "groupId", "maxWaitMs", "mechanism", "topicData")
PREFIX = FIELDS[:-1]
NOISE = bytes(range(255, 155, -1))  # bytes after a frame in a shared buffer


@cache
def bodies_of(layout: Layout) -> st.SearchStrategy:
    return bodies(layout)


def scan_of(layout: Layout, body: dict) -> tuple:
    """Return the expected result of a scan, computed from the full decode."""
    fields = layout.message.fields
    names = {field.name for field in fields if layout.version in field.versions}
    errors = tuple(code for code in _codes(fields, body) if code)
    first = body["errorCode"] if "errorCode" in names else errors[0] if errors else None
    carrier = address_path(layout.api_key, layout.version)
    carries = carrier == "" or (carrier is not None and bool(body.get(carrier)))
    return body.get("throttleTimeMs", -1), first, errors, carries


def _codes(fields: tuple, body: dict):
    for field in sorted(fields, key=lambda field: -1 if field.tag is None else field.tag):  # the order of the wire
        value = body.get(field.name)
        if field.type == "int16" and field.name.endswith(("errorCode", "ErrorCode")) and value is not None:
            yield value
        elif field.is_struct and value is not None:
            for item in value if field.is_array else (value,):
                yield from _codes(field.fields, item)


def check_wire_plans(layout: Layout, frame: bytes, body: dict) -> None:
    """Check that partial plans agree with the full decode, in the middle of a larger buffer too."""
    before = b"\x7f\xff\xff"
    buffer = memoryview(before + frame + NOISE)
    start, end = len(before) + layout.start, len(before) + len(frame)
    if layout.side == "response":
        scan = codec.response_scan(layout.api_key, layout.version)
        assert scan(buffer, start, end) == scan_of(layout, body)
        assert scan(frame, layout.start, len(frame)) == scan_of(layout, body)
    elif layout.side == "request":
        client_id = codec.decode_request(frame)[0].get("clientId")
        prefix = codec.request_prefix(layout.api_key, layout.version, PREFIX)
        values, stop = prefix(buffer, start, end)
        assert values == (client_id, *(body.get(name) for name in PREFIX)) and start <= stop <= end
    if layout.side != "data":
        check_locate(layout, buffer, start, end, body)


def check_locate(layout: Layout, buffer: memoryview, start: int, end: int, body: dict) -> None:
    message, version = layout.message, layout.version
    paths = tuple(paths_of(message.fields, version))
    paths += tuple(f"{path}[]" for path in arrays_of(message.fields, version))
    spans = codec.locate(layout.api_key, version, layout.side, paths)(buffer, start, end)
    assert [stop for _, _, stop in spans if stop > end] == []
    for index, path in enumerate(paths):
        found = [(first, stop) for which, first, stop in spans if which == index]
        values = list(leaves(message.fields, body, path))
        assert len(found) == len(values), path
        for (first, stop), value in zip(found, values, strict=True):
            span = bytes(buffer[first:stop])
            if isinstance(value, bool):
                assert span == bytes((value,))
            elif isinstance(value, float):
                assert span == struct.pack(">d", value)
            elif isinstance(value, int):
                assert value in (
                    int.from_bytes(span, "big", signed=True),
                    int.from_bytes(span, "big"),
                )
            elif isinstance(value, UUID):
                assert span == value.bytes
            elif isinstance(value, (str, bytes)):
                content = value.encode() if isinstance(value, str) else value
                assert span.endswith(content)
                assert 1 <= len(span) - len(content) <= 5
            else:
                assert len(span) >= (1 if value is None else len(value))
    for which, first, stop in spans:
        assert start <= first <= stop
        if which == TAG_SIZE:
            size, behind = read_uvarint(buffer, first)
            assert behind == stop and stop + size <= end
    ends = [stop for which, _, stop in spans if which != TAG_SIZE]
    assert ends == sorted(ends)


def arrays_of(fields: tuple, version: int, above: str = ""):
    for field in fields:
        if version in field.versions:
            path = f"{above}.{field.name}" if above else field.name
            if field.is_array:
                yield path
            yield from arrays_of(field.fields, version, path)


def test_vectors() -> None:
    """Frames of the official library decode to its JSON, encode to the same bytes, and every plan agrees."""
    for layout, frame, expected, said in vectors():
        header, body = layout.decode(frame)
        rendered = json.dumps(render(layout.message, body), sort_keys=True)
        assert rendered == json.dumps(expected, sort_keys=True), (layout, said["index"])
        if layout.side == "data":
            again = codec.encode_data(layout.message.name, layout.version, body)
        elif layout.side == "request":
            again = codec.encode_request(header, body)
            assert (header["correlationId"], header.get("clientId")) == (said["correlation_id"], said["client_id"])
        else:
            again = codec.encode_response(layout.api_key, layout.version, header, body)
            assert header["correlationId"] == said["correlation_id"]
        assert again == frame, (layout, said["index"])
        check_wire_plans(layout, frame, body)


def test_truncated_vectors() -> None:
    """A frame cut anywhere is Malformed for every plan, even if its remaining bytes are in the buffer."""
    for number, (layout, frame, _, said) in enumerate(vectors()):
        for cut in {*range(number % 7, len(frame), max(len(frame) // 16, 1)), len(frame) - 1}:
            with pytest.raises(Malformed):
                layout.decode(frame[:cut])
            if cut < layout.start:
                continue
            if layout.side == "response" and has_its_own_layout(layout, frame[: layout.start + 2]):
                with pytest.raises(Malformed):
                    codec.response_scan(layout.api_key, layout.version)(frame + NOISE, layout.start, cut)
                with pytest.raises(Malformed):
                    codec.locate(layout.api_key, layout.version, "response", ("brokers.host",))(
                        frame + NOISE, layout.start, cut
                    )
            if layout.side == "request":
                prefix = codec.request_prefix(layout.api_key, layout.version, PREFIX)
                whole = prefix(frame, layout.start, len(frame))
                for buffer in (frame[:cut], frame, frame[:cut] + NOISE):
                    assert prefix(buffer, layout.start, cut) in (None, whole)
                nothing = (said["client_id"],) + (None,) * 6
                assert prefix(frame, layout.start, layout.start) is None or whole[0] == nothing


def has_its_own_layout(layout: Layout, head: bytes) -> bool:
    """Return False for an ApiVersions response with error 35, which uses the layout of version 0."""
    return layout.api_key != 18 or head[-2:] != b"\0\x23"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_encoded_bodies_decode_to_the_same_values(data: st.DataObject) -> None:
    """Any body of any layout survives, unknown tags at every level and trailing bytes included."""
    layout = data.draw(st.sampled_from(layouts()))
    body = data.draw(bodies_of(layout))
    trailing = data.draw(st.binary(max_size=3))
    if trailing:
        body[codec.TRAILING] = trailing
    frame = layout.encode(body)
    if layout.api_key == 18 and layout.side == "response" and body["errorCode"] == 35 and layout.version:
        return  # read as version 0: see below
    assert layout.decode(frame)[1] == body
    assert layout.decode(memoryview(frame))[1] == body
    check_wire_plans(layout, frame, body)
    for cut in range(0, len(frame) - len(trailing), 1 + len(frame) // 20):
        with pytest.raises(Malformed):
            layout.decode(frame[:cut])


def test_mutated_vectors() -> None:
    """Mutated bytes raise the documented errors or decode; scan and locate then agree with the decode."""
    dice = random.Random(20)
    for layout, frame, _, _ in vectors():
        for _ in range(4):
            harmed = bytearray(frame)
            for _ in range(dice.choice((1, 1, 3))):
                harmed[dice.randrange(len(harmed))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
            if layout.side == "request":
                harmed[:4] = frame[:4]
            harmed = bytes(harmed)
            try:
                _, body = layout.decode(harmed)
            except ProtocolError:
                body = None
            if layout.side == "response":
                scan = codec.response_scan(layout.api_key, layout.version)
                if body is not None and has_its_own_layout(layout, harmed[:6]):
                    assert scan(harmed, 4, len(harmed)) == scan_of(layout, body)
                with suppress(Malformed):
                    scan(harmed, 4, len(harmed))
            if layout.side == "request":
                prefix = codec.request_prefix(layout.api_key, layout.version, PREFIX)
                with suppress(Malformed):
                    prefix(harmed, 8, len(harmed))
            if layout.side != "data":
                with suppress(Malformed):
                    codec.locate(layout.api_key, layout.version, layout.side, ("topics[]", "brokers.host"))(
                        harmed, layout.start, len(harmed)
                    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(layouts()), st.binary(max_size=200))
def test_any_bytes_decode_or_raise_protocol_errors(layout: Layout, noise: bytes) -> None:
    frame = layout.encode({})[: layout.start] + noise
    with suppress(ProtocolError):
        layout.decode(frame)
    if layout.side == "response":
        with suppress(Malformed):
            codec.response_scan(layout.api_key, layout.version)(frame, layout.start, len(frame))


def test_defaults_encode_and_decode() -> None:
    for layout in layouts():
        _, body = layout.decode(layout.encode({}))
        assert layout.decode(layout.encode(body))[1] == body


ACKS_VERSIONS = (0, 2, 3, 8, 9, 13)


@each("version", ACKS_VERSIONS)
@each("acks", [0, 1, -1, 256])
@each("timeout", [0, 30000, 0x01000000, -1, 0x7FFFFFFF])
@each("transactional_id", [None, "", "t", "é" * 63, "x" * 127, "x" * 200, "x" * 20000])
def test_acks_in_all_three_layouts(version: int, acks: int, timeout: int, transactional_id: str | None) -> None:
    """Values leave no room for luck: compact lengths of several bytes, no zero bytes next to the field."""
    layout = Layout(schema().apis[0].request, version, 0, "request")
    known = transactional_id if version >= 3 else None
    body = {"acks": acks, "timeoutMs": timeout, "topicData": [{"partitionData": [{"records": b"\xff" * 300}]}]}
    if version >= 3:
        body["transactionalId"] = known
    header = {"requestApiKey": 0, "requestApiVersion": version, "correlationId": -1, "clientId": "ÿ" * 90}
    if version >= 9:
        header["_tags"] = {0: b"\x00" * 200, 300: b"\x01"}
    frame = codec.encode_request(header, body)
    prefix = codec.request_prefix(0, version, ("acks", "transactionalId"))
    want = ("ÿ" * 90, acks, known)
    values, stop = prefix(frame, 8, len(frame))
    assert values == want
    assert layout.decode(frame)[1]["acks"] == acks
    needed = next(end for end in range(8, len(frame) + 1) if prefix(frame, 8, end) is not None)
    buffer = memoryview(frame[:needed] + NOISE)
    assert prefix(buffer, 8, needed) == (want, stop) and stop == needed
    head = 8 + 2 + 180 + (1 + 1 + 2 + 200 + 2 + 1 + 1 if version >= 9 else 0)  # client id, tags
    text = len(known.encode()) if known is not None else 0
    compact = 1 if text < 127 else 2 if text < 16383 else 3
    assert needed == head + text + (compact if version >= 9 else 2 if version >= 3 else 0) + 2
    for end in range(8, needed, 1 + needed // 300):
        assert prefix(frame[:end], 8, end) is None
        assert prefix(frame[:end] + NOISE, 8, end) is None


def test_prefix_of_text_that_is_not_utf8() -> None:
    """Brokers serve a client with a Latin-1 id, so the prefix must not raise."""
    frame = codec.encode_request(
        {"requestApiKey": 12, "requestApiVersion": 0, "correlationId": 1, "clientId": "abc"}, {}
    )
    harmed = frame.replace(b"abc", b"a\xe9c")
    assert codec.request_prefix(12, 0, ())(harmed, 8, len(harmed)) == (("a\N{REPLACEMENT CHARACTER}c",), 13)
    with pytest.raises(Malformed, match="UTF-8"):
        codec.decode_request(harmed)


def test_prefix_raises_malformed_as_soon_as_it_is_certain() -> None:
    frame = b"\0\0\0\x09\0\0\0\1" + b"\0\1c" + b"\0" + b"\xff\xff\xff\xff\xff\xff" + b"\0" * 20
    with pytest.raises(Malformed):
        codec.request_prefix(0, 9, ("acks",))(frame, 8, len(frame))


def test_api_versions_is_answered_in_version_0_when_unsupported() -> None:
    """KIP-511: for a request in any version."""
    body = {"errorCode": 35, "apiKeys": [{"apiKey": 18, "minVersion": 0, "maxVersion": 4}]}
    frame = codec.encode_response(18, 0, {"correlationId": 3}, body)
    for version in schema().apis[18].response.versions:
        assert codec.decode_response(frame, 18, version) == ({"correlationId": 3}, body)
        assert codec.response_scan(18, version)(frame, 4, len(frame)) == (-1, 35, (35,), False)
        spans = codec.locate(18, version, "response", ("apiKeys[]", "apiKeys.maxVersion"))(frame, 4, len(frame))
        assert spans == [(1, 14, 16), (0, 10, 16)]


@pytest.mark.parametrize("layout", [0, 3, 5])
def test_an_api_versions_response_with_error_35_is_read_for_an_unknown_version(layout: int) -> None:
    body = {"errorCode": 35, "apiKeys": [{"apiKey": 18, "minVersion": 0, "maxVersion": 4}]}
    frame = codec.encode_response(18, layout, {"correlationId": 3}, body | ({"throttleTimeMs": 7} if layout else {}))
    assert codec.decode_response(frame, 18, 99)[1]["apiKeys"] == body["apiKeys"]
    with pytest.raises(Unsupported, match="version 99 is not known"):
        codec.decode_response(codec.encode_response(18, layout, {"correlationId": 3}, {"errorCode": 0}), 18, 99)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"\0\x23", (-1, 35, (35,), False)),
        (b"\0\x23more", (-1, 35, (35,), False)),
        (b"\0\x23"[:1], (-1, None, (), False)),
        (b"\0\x24", (-1, None, (), False)),
        (b"\1\x23", (-1, None, (), False)),
        (b"", (-1, None, (), False)),
    ],
)
def test_only_error_35_is_read_from_an_api_versions_response_of_an_unknown_version(body: bytes, found: tuple) -> None:
    assert codec.scan_unknown_api_versions(b"????" + body + b"\0\x23", 4, 4 + len(body)) == found


@pytest.mark.parametrize("version", schema().apis[18].response.versions)
@pytest.mark.parametrize("count", [0, 1, 130])
def test_an_api_versions_response_with_error_35_is_read_in_the_requested_version_too(version: int, count: int) -> None:
    """librdkafka's mock broker answers like this; Kafka's client reads both layouts."""
    offers = [{"apiKey": 18, "minVersion": 0, "maxVersion": 4}] * count
    body = {"errorCode": 35, "apiKeys": offers, **({"throttleTimeMs": 1 << 20} if version else {})}
    if version > 2:
        body["apiKeys"] = [offer | {"_tags": {9: b"new"}} for offer in offers]
    for trailing in ({}, {"_trailing": b"\0\0\2\0"} if version else {}):
        frame = codec.encode_response(18, version, {"correlationId": 3}, body | trailing)
        assert codec.decode_response(frame, 18, version) == ({"correlationId": 3}, body | trailing)
        throttle = 1 << 20 if version else -1
        assert codec.response_scan(18, version)(frame, 4, len(frame)) == (throttle, 35, (35,), False)
        assert len(codec.locate(18, version, "response", ("apiKeys[]",))(frame, 4, len(frame))) == count
    for cut in (2, 3):
        with pytest.raises(Malformed):
            codec.decode_response(frame[: 4 + cut], 18, version)


def test_locate_in_a_tagged_field() -> None:
    body = {"nodeEndpoints": [{"nodeId": 7, "host": "h" * 130, "port": 9092}], "_tags": {3: b"abc"}}
    frame = codec.encode_response(1, 18, {"correlationId": 3}, body)
    spans = codec.locate(1, 18, "response", ("nodeEndpoints.host", "nodeEndpoints"))(frame, 4, len(frame))
    (_, first, stop), (host, host_start, host_end), (array, array_start, array_end) = spans
    assert spans[0][0] == TAG_SIZE and (host, array) == (0, 1)
    size, content = read_uvarint(frame, first)
    assert content == stop == array_start and stop + size == array_end
    assert frame[host_start:host_end] == b"\x83\x01" + b"h" * 130
    assert frame[array_end:] == b"\x03\x03abc"


@pytest.mark.parametrize("read", (codec.decode_request, codec.decode_flat_request))
def test_the_api_of_a_request_takes_four_bytes(read: Callable[[bytes], object]) -> None:
    for size in range(4):
        with pytest.raises(Malformed, match=f"a request of {size} bytes: too short for an API key and a version"):
            read(bytes(size))
    with pytest.raises(Unsupported, match="API key 1000"):
        read(b"\x03\xe8\0\0")


@pytest.mark.parametrize("key, version", [(3, 256), (3, -1), (259, 0), (-253, 0), (3, 268), (3, -244)])
def test_api_key_and_version_are_signed_and_have_two_bytes_each(key: int, version: int) -> None:
    """The last byte alone would be a known key or version."""
    frame = key.to_bytes(2, signed=True) + version.to_bytes(2, signed=True) + bytes(40)
    said = f"Metadata version {version} is not known" if key == 3 else f"API key {key} is not known"
    for read in (codec.decode_request, codec.decode_flat_request, partial(sliced, codec.request_in_slices)):
        found = outcome(read, frame)
        assert isinstance(found, tuple) and found[0] is Unsupported and said in str(found[1])


def test_unknown_apis_versions_and_messages_are_refused() -> None:
    with pytest.raises(Unsupported, match="API key 1000"):
        codec.decode_request(b"\x03\xe8\0\0" + b"\0" * 20)
    with pytest.raises(Unsupported, match="Produce version 99 is not known; known are 0 to 13"):
        codec.decode_request(b"\0\0\0\x63" + b"\0" * 20)
    for no_key in ([1], {}, "18", None):
        with pytest.raises(Unsupported, match=r"API key .* is not known"):
            codec.encode_request({"requestApiKey": no_key, "requestApiVersion": 0}, {})
    with pytest.raises(Unsupported):
        codec.response_scan(0, 99)
    with pytest.raises(Unsupported):
        codec.decode_data("NoSuchMessage", b"\0\0")
    with pytest.raises(Unsupported):
        codec.decode_data("GroupMetadataKey", b"\0\1\0\0")
    for read in (codec.decode_data, lambda name, frame: codec.at_once(codec.data_in_slices(name, frame))):
        for version in (b"\0\x63\0\0", b"\0\x63", b"\1\0" + bytes(40)):  # 99 with and without a body, and 256
            with pytest.raises(Unsupported):
                read("GroupMetadataValue", version)
        with pytest.raises(Malformed, match="1 bytes, too short for a version"):
            read("GroupMetadataValue", b"\0")
    for short in (b"", b"\0", b"\0\0\0"):
        with pytest.raises(Malformed):
            codec.decode_request(short)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"acks": 1 << 20}, "acks: 1048576 does not fit int16"),
        ({"topicData": None}, "topicData must not be null"),
        ({"topicdata": []}, "the top level has no topicdata"),
        ({"topicData": [{"naem": "x"}]}, "topicData has no naem"),
        ({"topicData": [{"name": "\ud800"}]}, "surrogates"),
        ({"transactionalId": "x" * 40000}, "32767 are the most"),
    ],
)
def test_values_that_cannot_be_encoded_are_refused(body: dict, says: str) -> None:
    header = {"requestApiKey": 0, "requestApiVersion": 8, "correlationId": 1, "clientId": None}
    with pytest.raises(Malformed, match=says):
        codec.encode_request(header, body)


def test_tagged_fields_that_would_not_survive_a_round_trip_are_refused() -> None:
    whole = codec.encode_response(1, 18, {"correlationId": 3}, {"nodeEndpoints": []})
    assert whole.endswith(b"\x01\x00\x01\x01")
    for tags, says in (
        (b"\x02\x00\x01\x01\x00\x01\x01", "nodeEndpoints is there twice"),
        (b"\x02\x05\x01\x01\x05\x01\x01", "unknown tagged field is there twice"),
        (b"\x01\x00\x02\x01\x01", "does not end where its size says"),
        (b"\x01\x00\x00\x01", "does not end where its size says"),
    ):
        with pytest.raises(Malformed, match=says):
            codec.decode_response(whole[:-4] + tags, 1, 18)


PUSH = {"requestApiKey": 72, "requestApiVersion": 0, "correlationId": 1, "clientId": "c"}


def test_a_flat_request_decodes_like_any_other() -> None:
    for tags in ({}, {5: b""}, {5: b"x" * 5000, 900: b""}):
        frame = codec.encode_request({**PUSH, "_tags": tags}, {"metrics": b"m" * 500_000, "_tags": tags})
        assert codec.decode_flat_request(frame) == codec.decode_request(frame)
    for short in (b"", b"\0\x48\0", b"\0\x48\0\0"):
        with pytest.raises(Malformed):
            codec.decode_flat_request(short)


@pytest.mark.parametrize(("fields", "is_read"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_flat_request_ends_with_its_third_slice(fields: int, is_read: bool) -> None:
    """The first slice ends at a token or text, the second at a tagged field of a later release."""
    frame = codec.encode_request(PUSH, {"metrics": b"m" * 5000, "_tags": {5 + n: b"x" * 5000 for n in range(fields)}})
    found = outcome(codec.decode_flat_request, frame)
    assert (found == codec.decode_request(frame)) == is_read


@pytest.mark.parametrize("where", ["header", "body"])
def test_a_flat_request_with_many_tagged_fields_is_refused_early(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a million tagged fields would take a second."""
    tags = {"_tags": dict.fromkeys(range(50_000), b"")}
    frame = codec.encode_request(PUSH | (tags if where == "header" else {}), tags if where == "body" else {})
    assert len(codec.decode_request(frame)[where == "body"]["_tags"]) == 50_000
    slices = []
    in_slices = codec._request_in_slices
    monkeypatch.setattr(codec, "_request_in_slices", lambda frame: _counted(in_slices(frame), slices))
    with pytest.raises(Malformed, match="more tagged fields than its API has"):
        codec.decode_flat_request(frame)
    assert len(slices) < 5


def _counted(slices: codec.Slices, counted: list[int]) -> codec.Slices:
    for _ in slices:
        counted.append(1)
        yield


def test_a_length_larger_than_the_frame_allocates_nothing() -> None:
    """Small frames with counts and sizes of two billion, for every layout and every plan."""
    tracemalloc.start()
    try:
        for layout, frame, _, _ in vectors():
            for claim in (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\x0f"):
                hostile = frame[: layout.start] + claim * 20
                if layout.side == "response":
                    _exercise(layout, hostile)
                with suppress(ProtocolError):
                    layout.decode(hostile)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024 * 1024  # the plans of all layouts


def _exercise(layout: Layout, hostile: bytes) -> None:
    with suppress(Malformed):
        codec.response_scan(layout.api_key, layout.version)(hostile, 4, len(hostile))
    with suppress(Malformed):
        codec.locate(layout.api_key, layout.version, "response", ("brokers.host",))(hostile, 4, len(hostile))


def test_is_noted() -> None:
    """Scans collect every int16 of a response that is named as an error code."""
    for layout in layouts():
        if layout.side == "response":
            for path in paths_of(layout.message.fields, layout.version):
                name = path.rpartition(".")[2]
                assert is_noted(path) == (path == "throttleTimeMs" or ("rror" in name and name.endswith("Code")))


# --- the same in slices ----------------------------------------------------------------------------------------------


def outcome(read: Callable[..., object], *arguments: object) -> object:
    """Return the result of a reader or writer, or the type and text of its error."""
    try:
        return read(*arguments)
    except ProtocolError as fault:
        return type(fault), str(fault).partition(";")[0]  # without the hint for people who decode by hand


def sliced(make: Callable[..., codec.Slices], *arguments: object) -> object:
    return outcome(lambda: codec.at_once(make(*arguments)))


def check_slices(layout: Layout, frame: bytes) -> None:
    """Reading in slices gives the same result or the same error as reading at once."""
    if layout.side == "data":
        name = layout.message.name
        if layout.message.role != "key":
            whole = outcome(lambda: codec.decode_data(name, frame)[1])
            assert sliced(codec.data_in_slices, name, frame) == whole
        return
    if layout.side == "request":
        whole = outcome(lambda: codec.decode_request(frame)[1])
        assert sliced(codec.request_in_slices, frame) == whole
    elif layout.api_key != 18:
        whole = outcome(codec.decode_response, frame, layout.api_key, layout.version)
        assert sliced(codec.decoded_in_slices, frame, layout.api_key, layout.version) == whole
    if layout.api_key != 18:
        paths = tuple(paths_of(layout.message.fields, layout.version))
        located = codec.locate(layout.api_key, layout.version, layout.side, paths)
        in_slices = codec.locate_in_slices(layout.api_key, layout.version, layout.side, paths)
        span = frame, layout.start, len(frame)
        assert sliced(in_slices, *span) == outcome(located, *span)


def test_slices_read_and_write_the_same_as_one_call() -> None:
    """Every vector: complete, truncated, or with bytes after its body."""
    for number, (layout, frame, _, _) in enumerate(vectors()):
        check_slices(layout, (frame, frame + b"behind", frame[: number % len(frame)])[number % 3])
        header, body = layout.decode(frame)
        if layout.side == "data" and layout.message.role != "key":
            assert sliced(codec.encoded_in_slices, layout.message.name, layout.version, body) == frame
        elif layout.side == "response":
            assert sliced(codec.response_in_slices, layout.api_key, layout.version, header, body) == frame
    with pytest.raises(Unsupported, match="not read in slices"):
        codec.locate_in_slices(18, 0, "response", ())


def test_writing_in_slices_raises_the_same_errors() -> None:
    for body in ({"acks": 1}, {"topics": [{"name": 5}]}, {"brokers": None}, {"brokers": "abc"}, {"controllerId": "x"}):
        arguments = 3, 8, {"correlationId": 1}, body
        assert sliced(codec.response_in_slices, *arguments) == outcome(codec.encode_response, *arguments)
        assert isinstance(outcome(codec.encode_response, *arguments), tuple)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 5000])
@pytest.mark.parametrize("element", [{"partitionIndex": 1}, {"partitionIndex": 1, "_tags": {9: b"x" * 30, 10: b""}}])
def test_the_amount_of_work_in_one_slice(count: int, element: dict) -> None:
    """Reading: up to the first element or tagged field that ends beyond 2 KiB. Writing: 256 elements."""
    body = {"topics": [{"name": "t", "partitions": [element] * count}]}
    frame = codec.encode_response(8, 8, {"correlationId": 1}, body)
    one = len(codec.encode_response(8, 8, {"correlationId": 1}, {"topics": [{"partitions": [element]}]}))
    one -= len(codec.encode_response(8, 8, {"correlationId": 1}, {"topics": [{"partitions": []}]}))
    steps = [*codec.decoded_in_slices(frame, 8, 8)]
    elements = 2048 // one + 1  # the fewest per slice; the body begins some bytes before the first element
    assert count // (elements + 1) <= len(steps) <= -(-(len(frame) - 5) // 2049)
    assert len(steps) == len([*codec.locate_in_slices(8, 8, "response", ("topics.partitions",))(frame, 4, len(frame))])
    assert len([*codec.response_in_slices(8, 8, {"correlationId": 1}, body)]) == (count + 1) // 256  # with the topic


# --- bounds ----------------------------------------------------------------------------------------------------------


def arrays(fields: tuple, version: int, inside: Callable[[object], dict] = lambda value: value):
    """Yield (function that builds a body with the given elements, smallest element) for each array of a message."""
    for field in fields:
        if version in field.versions:
            put = lambda value, name=field.name: inside({name: value})  # noqa: E731
            if field.is_array:
                yield put, smallest(field, version) if field.is_struct else _NOTHING.get(field.element_type, 0)
            if field.is_struct:
                yield from arrays(field.fields, version, _within(field, version, put))


def _within(field, version: int, put: Callable[[object], dict]) -> Callable[[dict], dict]:
    least = smallest(field, version)
    return lambda value: put([least | value] if field.is_array else least | value)


_NOTHING = {"string": "", "bytes": b"", "records": b"", "uuid": UUID(int=0), "bool": False, "float64": 0.0}


def smallest(field, version: int) -> dict:
    present = [inner for inner in field.fields if version in inner.versions and version not in inner.tagged_versions]
    nulls = {inner.name: None for inner in present if version in inner.nullable_versions}
    return {inner.name: b"" for inner in present if inner.type == "records"} | nulls


def test_a_count_is_accepted_if_that_many_smallest_elements_fit() -> None:
    """Fill each array of each layout with 300 smallest elements; higher counts than bytes that remain are refused."""
    tried = 0
    for layout in layouts():
        for put, element in arrays(layout.message.fields, layout.version):
            frame = layout.encode(put([element] * 300))
            assert layout.encode(layout.decode(frame)[1]) == frame
            tried += 1
            if layout.side == "response" and (layout.api_key, layout.version) != (18, 0):
                codec.response_scan(layout.api_key, layout.version)(frame, layout.start, len(frame))
    assert tried > 1500


def test_the_error_hints_at_a_leading_size_only_if_the_frame_begins_with_it() -> None:
    """A correlation id may be any number, including the count of the bytes after it."""
    for size, hinted in ((-1, False), (0, True), (1, False)):
        frame = (12 + size).to_bytes(4) + bytes((0, 3, 0, 12)) + bytes(8)
        fault = outcome(lambda frame=frame: codec.decode_request(frame))
        assert isinstance(fault, tuple)
        with pytest.raises(ProtocolError) as raised:
            codec.decode_request(frame)
        assert ("begins with its own size" in str(raised.value)) == hinted
    for empty in (lambda: codec.decode_request(bytes(4)), lambda: codec.decode_response(bytes(4), 3, 0)):
        with pytest.raises(Malformed) as raised:  # a size of 0 and no more bytes
            empty()
        assert "own size" not in str(raised.value)
