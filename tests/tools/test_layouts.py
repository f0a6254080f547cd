"""The joining of dumps, on dumps small enough to see through; on the real ones it proves itself as it runs."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("layouts", ROOT / "tools" / "layouts.py")
layouts = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(layouts)


def field(name, type="int32", nullable=False, **more):
    if type.startswith("[]") or type in ("string", "bytes"):
        more.setdefault("compact", False)
    return {"name": name, "type": type, "nullable": nullable, **more}


def struct(*fields, flexible=False):
    return {"flexible": flexible, "fields": list(fields)}


def message(name, versions, **more):
    return {"class": name, "package": "org.apache.kafka.common.message", "versions": versions, **more}


def dump(*data, apis=(), errors=()):
    return {"apis": list(apis), "data": list(data), "errors": list(errors)}


def made(old, new):
    dumps = {"3.0": old, "4.0": new}
    files = layouts.made_of(dumps)
    assert layouts.prove(files, dumps) > 0
    return files


def fields_of(*versions):
    """The joined fields of a message with these versions."""
    files = made(dump(), dump(message("M", {str(n): version for n, version in enumerate(versions)})))
    return files["schema.json"]["data"][0]["fields"]


def test_what_was_dropped_is_told_by_the_older_release():
    old = message("M", {"0": struct(field("a")), "1": struct(field("a", default=3))})
    new = message("M", {"1": struct(field("a")), "2": struct(field("a"), field("b"))})
    (layout,) = made(dump(old), dump(new))["schema.json"]["data"]
    assert layout["validVersions"] == "0-2"
    assert layout["fields"] == [
        {"name": "a", "type": "int32", "versions": "0-2"},
        {"name": "b", "type": "int32", "versions": "2"},
    ]


def test_an_api_joins_versions_releases_and_throttling():
    def api(lowest, highest, throttled):
        numbers = [str(n) for n in range(lowest, highest + 1)]
        side = {n: {"header_version": 2 if int(n) > 1 else 1, **struct(field("a"))} for n in numbers}
        names = {"key": 5, "name": "Stop", "listeners": ["broker"], "lowest": lowest, "highest": highest}
        throttle = {n: int(n) >= throttled for n in numbers}
        return names | {"latest_unstable": False, "request": side, "response": side, "throttled_after_answer": throttle}

    (layout,) = made(dump(apis=[api(0, 2, 9)]), dump(apis=[api(1, 3, 2)]))["schema.json"]["apis"]
    assert layout["releases"] == {"3.0": "0-2", "4.0": "1-3"}
    assert layout["throttledAfterAnswer"] == "2-3"
    assert layout["request"]["headerVersions"] == {"0-1": 1, "2-3": 2}


def test_a_field_in_the_middle_stands_where_it_was():
    a, b, c = field("a"), field("b"), field("c")
    assert [f["name"] for f in fields_of(struct(a, b, c), struct(a, c), struct(a, field("d"), c))] == [
        "a",
        "b",
        "d",
        "c",
    ]


def test_nulls_tags_and_encodings_are_ranges_too():
    plain = struct(field("a", "string"), field("b", "string", nullable=True))
    flexible = struct(field("a", "string", compact=False), field("b", "string", compact=True, tag=3), flexible=True)
    assert fields_of(plain, flexible) == [
        {"name": "a", "type": "string", "versions": "0-1", "flexibleVersions": "none"},
        {"name": "b", "type": "string", "versions": "0-1", "nullableVersions": "0", "tag": 3, "taggedVersions": "1"},
    ]


def test_structs_are_joined_inside():
    def version(*fields):
        return struct(field("s", "[]S", **struct(*fields)))

    assert fields_of(version(field("x")), version(field("x"), field("y")))[0]["fields"] == [
        {"name": "x", "type": "int32", "versions": "0-1"},
        {"name": "y", "type": "int32", "versions": "1"},
    ]


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((struct(field("a"), field("b")), struct(field("b"), field("a"))), "changed places"),
        ((struct(field("a")), struct(), struct(field("a"))), "a gap"),
        ((struct(field("a", default=1)), struct(field("a", default=2))), "two defaults"),
        ((struct(field("a", tag=1), flexible=True), struct(field("a", tag=2), flexible=True)), "two tags"),
        ((struct(field("a"), field("a")),), "twice"),
    ],
)
def test_what_the_form_cannot_say_stops_it(versions, reason):
    with pytest.raises(SystemExit, match=reason):
        fields_of(*versions)


def test_a_wrong_expansion_is_found():
    dumps = {"3.0": dump(), "4.0": dump(message("M", {"0": struct(field("a"))}))}
    files = layouts.made_of(dumps)
    files["schema.json"]["data"][0]["fields"][0]["type"] = "int16"
    with pytest.raises(SystemExit, match="expands to something else"):
        layouts.prove(files, dumps)


def test_the_shipped_files_are_of_the_form_that_the_tool_writes():
    for path in sorted((ROOT / "kproxy" / "protocol" / "layouts").glob("*.json")):
        text = path.read_text(encoding="utf-8")
        assert layouts.as_text(json.loads(text)) == text


def test_releases_list_what_brokers_serve_apart_from_what_only_controllers_do():
    lines = ["52 0 1 controller", "18 0 4 broker,controller", "7 3 3 zk_broker", "10 0 0 broker"]
    served = layouts.served(lines)
    assert list(served["broker"].items()) == [("7", "3"), ("10", "0"), ("18", "0-4")]
    assert served["controller"] == {"52": "0-1"}
    assert layouts.releases_file({"3.9.2": served}, ["a"])["releases"] == {"3.9.2": served}
    with pytest.raises(SystemExit, match="no API is served"):
        layouts.releases_file({"4.0.2": layouts.served([])}, ["a"])


def test_the_shipped_releases_are_those_of_the_tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    make_releases = importlib.import_module("make_releases")
    shipped = json.loads((ROOT / "kproxy/protocol/layouts/releases.json").read_text(encoding="utf-8"))
    assert tuple(shipped["releases"]) == make_releases.RELEASES
    assert shipped["meta"]["derivedFrom"] == [make_releases.artifact_of(release) for release in shipped["releases"]]
