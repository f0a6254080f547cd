from kproxy.protocol.plans import Walk
from kproxy.protocol.schema import ADDRESS_CARRIERS, address_path, api_name, parse_range, schema
from tests.protocol.messages import layouts


def test_every_api_and_every_message_is_there() -> None:
    apis = schema().apis
    assert sorted(apis) == list(range(95))
    assert sum(len(api.request.versions) + len(api.response.versions) for api in apis.values()) == 736
    assert len(schema().data) == 96
    assert all(api.key == key and api.request.versions == api.response.versions for key, api in apis.items())


def test_ranges() -> None:
    assert parse_range("3-13") == range(3, 14)
    assert parse_range("3") == range(3, 4)
    assert 0 not in parse_range("none")


def test_names_of_unknown_keys() -> None:
    assert api_name(0) == "Produce"
    assert api_name(-5) == "unknown_-5"


def test_header_versions_that_are_exceptions() -> None:
    apis = schema().apis
    assert [apis[7].request.header_version(version) for version in (0, 1, 3)] == [0, 1, 2]  # ControlledShutdown
    assert [apis[18].request.header_version(version) for version in (0, 3, 5)] == [1, 2, 2]
    assert [apis[18].response.header_version(version) for version in (0, 3, 5)] == [0, 0, 0]  # KIP-511


def test_throttle_timing() -> None:
    assert schema().apis[0].throttled_after_answer == range(6, 14)
    assert 7 not in schema().apis[1].throttled_after_answer


def test_address_carriers() -> None:
    carried = {
        key: [v for v in schema().apis[key].response.versions if address_path(key, v) is not None] for key in range(95)
    }
    assert {key: (versions[0], versions[-1]) for key, versions in carried.items() if versions} == {
        0: (10, 13),
        1: (16, 18),
        3: (0, 13),
        10: (0, 6),
        60: (0, 2),
        78: (0, 2),
        79: (0, 2),
    }
    assert set(ADDRESS_CARRIERS) == {key for key, versions in carried.items() if versions}
    assert [address_path(10, version) for version in (0, 3, 4, 6)] == ["", "", "coordinators", "coordinators"]


def test_no_element_of_an_array_is_empty() -> None:
    """Else a count alone, with no bytes behind it, could make work: the plans bound a count by the bytes left."""

    def check(fields: object, walk: Walk) -> None:
        for field in fields:
            if walk.version in field.versions:
                assert not field.is_array or walk.least_size(field, field.element_type) > 0
                check(field.fields, walk)

    for layout in layouts():
        flexible = layout.version in layout.message.flexible_versions
        check(layout.message.fields, Walk(repr(layout), layout.version, flexible))


def test_tagged_fields_are_tagged_in_all_their_versions() -> None:
    """The plans take a field as tagged or not by its version; a mixture would be a surprise worth knowing."""

    def check(fields: object) -> None:
        for field in fields:
            assert field.tag is None or field.tagged_versions == field.versions
            check(field.fields)

    for layout in layouts():
        check(layout.message.fields)
