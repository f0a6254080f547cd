import json
import subprocess
import sys
from importlib.resources import files

from kproxy.protocol.plans import Walk
from kproxy.protocol.schema import ADDRESS_CARRIERS, Field, address_path, api_name, parse_range, schema, served_versions
from tests.protocol.messages import layouts


def test_every_api_and_every_message_is_there() -> None:
    apis = schema().apis
    assert sorted(apis) == list(range(95))
    assert sum(len(api.request.versions) + len(api.response.versions) for api in apis.values()) == 736
    assert len(schema().data) == 100
    assert all(api.key == key and api.request.versions == api.response.versions for key, api in apis.items())


def line(release: str) -> str:
    return ".".join(release.split(".")[: 3 if release.startswith("0.") else 2])


def test_releases_serve_what_the_layouts_of_the_same_lines_say() -> None:
    """Two tools read these ranges from jars of two patches of a line, by different classes."""
    apis = json.loads(files("kproxy.protocol").joinpath("layouts", "schema.json").read_bytes())["apis"]
    served = {line(release): apis_served for release, apis_served in served_versions().items()}
    releases = {release for api in apis for release in api["releases"]}
    assert {line(release) for release in releases} == {"3.9", "4.1", "4.4"}
    for release in releases:
        stable = {}
        for api in apis:
            versions = parse_range(api["releases"].get(release, "none"))
            if release in api.get("unstable", {}):
                versions = versions[:-1]
            if versions:
                stable[api["key"]] = versions
        assert served[line(release)] == stable, release


def test_every_line_of_releases_is_there_and_the_layouts_read_all_that_it_serves() -> None:
    served = served_versions()
    zeros = ["0.8.0", "0.8.1", "0.8.2", "0.9.0", "0.10.0", "0.10.1", "0.10.2", "0.11.0"]
    minors = {1: 2, 2: 9, 3: 10, 4: 5}
    expected = zeros + [f"{major}.{minor}" for major in minors for minor in range(minors[major])]
    assert [line(release) for release in served] == expected
    before: dict[int, range] = {}
    for release, apis in served.items():
        for key, versions in apis.items():
            layout = schema().apis[key].request.versions
            assert versions and versions[0] in layout and versions[-1] in layout, (release, key)
            assert versions[-1] >= before.get(key, versions)[-1], (release, key)  # no release goes back
        before |= apis
    by_line = {line(release): apis for release, apis in served.items()}
    assert [by_line[of][0] for of in ("0.8.2", "0.10.0", "0.11.0", "3.9", "4.0")] == [
        *(range(1), range(3), range(4), range(12)),
        range(3, 13),  # KIP-896
    ]
    assert 18 not in by_line["0.9.0"] and by_line["0.10.0"][18] == range(1)  # KIP-35
    assert 52 not in by_line["2.7"] and 4 in by_line["3.9"] and 4 not in by_line["4.0"]  # Vote, LeaderAndIsr
    assert 78 not in by_line["4.0"] and by_line["4.1"][78] == range(1, 2)  # ShareFetch 0 was unstable


def test_the_ranges_of_releases_are_not_read_by_the_proxy() -> None:
    code = (
        "from kproxy.cli import main\n"
        "from kproxy.proxy.relay import relay\n"
        "from kproxy.protocol import schema\n"
        "schema.schema()\n"
        "print(schema.served_versions.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


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


def test_a_struct_has_all_versions_of_its_fields() -> None:
    """So code that looks for a field of a version need not check the enclosing structs."""

    def check(fields: tuple[Field, ...], around: range) -> int:
        for field in fields:
            assert {*field.versions} & {*message.versions} <= {*around}, (message.name, field.name)
        return len(fields) + sum(check(field.fields, field.versions) for field in fields)

    checked = 0
    for message in (
        *schema().data.values(),
        *(each for api in schema().apis.values() for each in (api.request, api.response)),
    ):
        checked += check(message.fields, message.versions)
    assert checked > 2000
