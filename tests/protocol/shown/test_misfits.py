"""Values that cannot be written: the fault names the field, and no other exception comes out."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.protocol.codec import decode_request, encode_request, encode_response
from kproxy.protocol.schema import Field, schema
from kproxy.protocol.shown.misfits import misfit

METADATA = {"requestApiKey": 3, "requestApiVersion": 12, "correlationId": 7, "clientId": "mine"}
WRONG = (None, "x", 5, -1, 1 << 70, 1.5, b"x", [], {}, [None], ["x"], [5], {"a": 1}, True, uuid.UUID(int=1), "\ud800")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "the message: None is no dict of fields"),
        ({"topics": 5}, "topics: 5 is no list"),
        ({"topics": "orders"}, "topics: 'orders' is no list"),
        ({"topics": {"name": "a"}}, "topics: {'name': 'a'} is no list"),
        ({"topics": [{"name": "a"}, "b"]}, "topics[1]: 'b' is no dict of fields"),
        ({"topics": [{"name": 5}]}, "topics[0].name: 5 is no text"),
        ({"topics": [{"name": "\ud800"}]}, r"topics[0].name: '\ud800' cannot be UTF-8"),
        ({"topics": [{"topicId": "a"}]}, "topics[0].topicId: 'a' is no uuid.UUID"),
        ({"topics": [], "_tags": {5: "x"}}, "_tags: {5: 'x'} is no dict of bytes by tag"),
        ({"topics": [], "_trailing": "x"}, "str"),
    ],
)
def test_a_field_that_does_not_fit_is_named(body, said):
    with pytest.raises(Malformed) as fault:
        encode_request(METADATA, body)
    assert str(fault.value).startswith("MetadataRequest v12: ") and said in str(fault.value)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({}, "requestApiKey and requestApiVersion"),
        (None, "requestApiKey and requestApiVersion"),
        ({**METADATA, "clientId": b"mine"}, "RequestHeader v2: clientId: b'mine' is no text"),
        ({**METADATA, "correlationId": "7"}, "RequestHeader v2: correlationId: '7' is no whole number"),
        (
            {**METADATA, "correlationId": 1 << 31},
            "correlationId: 2147483648 does not fit int32, which is from -2147483648 to 2147483647",
        ),
    ],
)
def test_a_header_that_does_not_fit_is_named(header, said):
    with pytest.raises(Malformed) as fault:
        encode_request(header, {})
    assert said in str(fault.value)


def test_of_a_long_text_before_flexible_versions_the_most_is_named():
    for size in (32_768, 40_000):  # and not the one before it, which fits
        with pytest.raises(Malformed, match=rf"topics\[1\]\.name: a text of {size} bytes, where 32767 are the most"):
            names = [{"name": "x" * 32_767}, {"name": "x" * size}]
            encode_request({**METADATA, "requestApiVersion": 8}, {"topics": names})


@pytest.mark.parametrize("names", ("orders", b"orders", {"orders": 1}))
def test_a_text_in_place_of_a_list_is_not_taken_for_its_letters(names):
    """DeleteTopics would have six topics of one letter."""
    with pytest.raises(Malformed, match=r"topicNames: .* is no list"):
        encode_request({"requestApiKey": 20, "requestApiVersion": 3}, {"topicNames": names})


@given(st.data())
def test_whatever_a_program_gives_is_written_or_malformed(data):
    api = data.draw(st.sampled_from(sorted(schema().apis.values(), key=lambda api: api.key)))
    side = data.draw(st.sampled_from(("request", "response")))
    message = getattr(api, side)
    version = data.draw(st.sampled_from(message.versions))

    def fields(of):
        return {
            field.name: data.draw(st.sampled_from(WRONG))
            if not field.is_struct or data.draw(st.integers(0, 3)) == 0
            else [fields(field.fields)]
            for field in of
            if version in field.versions and data.draw(st.booleans())
        }

    body = fields(message.fields)
    try:
        if side == "request":
            encode_request({"requestApiKey": api.key, "requestApiVersion": version}, body)
        else:
            encode_response(api.key, version, {}, body)
    except Malformed as fault:  # as most are; nothing else may be raised
        assert message.name in str(fault)


def test_a_frame_with_its_size_before_it_is_recognised():
    frame = encode_request(METADATA, {"topics": []})
    with pytest.raises(Malformed, match="begins with its own size: leave these 4 bytes out"):
        decode_request(len(frame).to_bytes(4, "big") + frame)
    with pytest.raises(Malformed) as fault:
        decode_request(frame[:-1])
    assert "size" not in str(fault.value)


def fields_of_type(kind):
    """A request with a field of that type at the top level: (key, version, its name)."""
    return next(
        (api.key, version, field.name)
        for api in schema().apis.values()
        for version in api.request.versions
        for field in api.request.fields_of(version)
        if field.type == kind
    )


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        ("int8", -(1 << 7), (1 << 7) - 1),
        ("int16", -(1 << 15), (1 << 15) - 1),
        ("int32", -(1 << 31), (1 << 31) - 1),
        ("int64", -(1 << 63), (1 << 63) - 1),
    ],
)
def test_a_number_fits_from_its_least_to_its_most(kind, least, most):
    key, version, name = fields_of_type(kind)
    header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": 1}
    for value in (least, most):
        assert decode_request(encode_request(header, {name: value}))[1][name] == value
    for value in (least - 1, most + 1):
        with pytest.raises(Malformed) as fault:
            encode_request(header, {name: value})
        assert f"{name}: {value} does not fit {kind}, which is from {least} to {most}" in str(fault.value)


def test_of_a_value_40_characters_are_shown():
    for size, shown in ((38, repr("x" * 38)), (39, "'" + "x" * 39 + "...")):
        with pytest.raises(Malformed) as fault:
            encode_request(METADATA, {"topics": "x" * size})
        assert f"topics: {shown} is no list" in str(fault.value)


@pytest.mark.parametrize(("kind", "most"), [("uint16", (1 << 16) - 1), ("uint32", (1 << 32) - 1)])
def test_a_number_without_a_sign_begins_at_0(kind, most):
    field = Field("port", kind, range(1), range(0), None, range(0), 0, (), True)
    for value in (0, 1, most):
        assert misfit((field,), 0, {"port": value}) is None
    for value in (-1, most + 1):
        assert misfit((field,), 0, {"port": value}) == f"port: {value} does not fit {kind}, which is from 0 to {most}"
    assert misfit((field,), 1, {"port": -1}) is None  # a version without the field
