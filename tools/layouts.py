"""Dumps of Kafka releases, version by version -> the layouts that kproxy ships, in ranges of versions.

A version is told by the newest release that has it; an older release tells only what the newer ones dropped. A field is
one entry over all versions in which it has the same name and type, even if it is tagged in some of them only. Entries
stand in the order of the wire, which exists because no field ever changed places with another: where that ceases to be
true, or where anything else does not fit the form, the tool stops. What was made is expanded again, by other code than
made it, and compared with the dumps.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

Json = dict[str, Any]
Versions = dict[int, Json]  # a struct, as dumped, by the version of its message

SECTIONS = {
    "org.apache.kafka.common.message": "common",
    "org.apache.kafka.coordinator.group.generated": "group-coordinator",
    "org.apache.kafka.coordinator.transaction.generated": "transaction-coordinator",
    "org.apache.kafka.coordinator.share.generated": "share-coordinator",
    "org.apache.kafka.common.metadata": "metadata",
    "org.apache.kafka.raft.generated": "raft",
    "org.apache.kafka.server.log.remote.metadata.storage.generated": "remote-log",
}
OTHER_SECTION = "storage"
CLIENT_SECTIONS = {"common", "group-coordinator", "transaction-coordinator"}  # the rest goes to schema-internal.json
RENAMED = {"RequestHeaderData": "RequestHeader", "ResponseHeaderData": "ResponseHeader"}


def made_of(dumps: dict[str, Json]) -> dict[str, Json]:
    """The files to ship, by name; `dumps` by release, oldest first, of which the first and the last have layouts."""
    oldest, *_, newest = dumps
    apis = [_api(key, dumps, newest, oldest) for key in _keys(dumps)]
    data = _data(dumps[newest], dumps[oldest])
    jars = [
        f"org.apache.kafka:kafka-clients:{r} (and the server-side jars of the same release)" for r in (newest, oldest)
    ]
    meta = {
        "what": "Apache Kafka message layouts, version-range form",
        "derivedFrom": jars,
        "rule": f"versions present in {newest} follow {newest}; versions it dropped follow {oldest}",
        "ranges": '"a" or "a-b", closed, or "none"; nested ranges are message versions',
        "implicitDefault": '0, false, "", empty bytes/array, zero uuid, struct of defaults; null for records; '
        '"default" is given only where it differs',
    }
    errors = {
        "meta": {
            "what": "Apache Kafka error codes: code, name, retriable, message",
            "derivedFrom": [f"org.apache.kafka:kafka-clients:{newest}"],
        },
        "errors": dumps[newest]["errors"],
    }
    clients = [layout for layout in data if layout["section"] in CLIENT_SECTIONS]
    internal = [layout for layout in data if layout["section"] not in CLIENT_SECTIONS]
    return {
        "schema.json": {"meta": meta, "apis": apis, "data": clients},
        "schema-internal.json": {"meta": meta, "apis": [], "data": internal},
        "errors.json": errors,
    }


def as_text(content: Json) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


# -------------------------------------------------------------------------------------------------- what releases serve


def served(lines: Iterable[str]) -> Json:
    """What one release serves: by API the range of its stable versions, apart those that only controllers serve."""
    out: Json = {"broker": {}, "controller": {}}
    for key, lowest, highest, listeners in sorted((line.split() for line in lines), key=lambda line: int(line[0])):
        side = "controller" if listeners == "controller" else "broker"
        out[side][key] = _range(range(int(lowest), int(highest) + 1))
    return out


def releases_file(releases: dict[str, Json], artifacts: list[str]) -> Json:
    """The file of releases to ship; `releases` oldest first, each as `served` makes it."""
    for release, sides in releases.items():
        if not sides["broker"]:
            raise SystemExit(f"{release}: no API is served")
    meta = {
        "what": "the stable API versions that each release of Apache Kafka serves, by API key",
        "derivedFrom": artifacts,
        "broker": "served on brokers' listeners, with ZooKeeper or without; before 2.8 all APIs",
        "controller": "served on the listeners of KRaft controllers only",
    }
    return {"meta": meta, "releases": releases}


# ------------------------------------------------------------------------------------------------------- which versions


def _keys(dumps: dict[str, Json]) -> list[int]:
    return sorted({api["key"] for dump in dumps.values() for api in dump["apis"]})


def _api_in(dump: Json, key: int) -> Json | None:
    """The API, if the release has classes for it: 4.x names some that it no longer serves."""
    return next((api for api in dump["apis"] if api["key"] == key and "request" in api), None)


def _by_version(dumped: Json) -> dict[int, Any]:
    return {int(version): value for version, value in dumped.items()}


def _api(key: int, dumps: dict[str, Json], newest: str, oldest: str) -> Json:
    new, old = _api_in(dumps[newest], key), _api_in(dumps[oldest], key)
    api = new or old
    assert api is not None
    serving = {release: served for release, dump in dumps.items() if (served := _api_in(dump, key))}
    out = {
        "key": key,
        "name": api["name"],
        "listeners": api["listeners"],
        "releases": {release: _range(range(a["lowest"], a["highest"] + 1)) for release, a in serving.items()},
    }
    unstable = {release: a["highest"] for release, a in serving.items() if a["latest_unstable"]}
    if unstable:
        out["unstable"] = unstable
    throttled = _merged(new, old, "throttled_after_answer")
    out["throttledAfterAnswer"] = _range(version for version, after in throttled.items() if after)
    for side in ("request", "response"):
        out[side] = joined(_merged(new, old, side), f"{api['name']} {side}")
    return out


def _merged(new: Json | None, old: Json | None, what: str) -> dict[int, Any]:
    merged = {**_by_version((old or {}).get(what, {})), **_by_version((new or {}).get(what, {}))}
    return dict(sorted(merged.items()))


def _data(new: Json, old: Json) -> list[Json]:
    olds = {(_section(message), message["class"]): message for message in old["data"]}
    out = []
    for message in sorted(new["data"], key=_place):
        older = olds.get((_section(message), message["class"]))
        if message.get("role") == "key":
            older = None  # in 3.x the version of a key's class was the record type
        layout = {"name": RENAMED.get(message["class"], message["class"]), "section": _section(message)}
        layout |= {name: message[name] for name in ("log", "role", "record_type") if name in message}
        out.append(layout | joined(_merged(message, older, "versions"), layout["name"]))
    return out


def _section(message: Json) -> str:
    return SECTIONS.get(message["package"], OTHER_SECTION)


def _place(message: Json) -> tuple[int, int, str]:
    order = [*SECTIONS.values(), OTHER_SECTION]
    return order.index(_section(message)), message.get("record_type", -1), message["class"]


# ------------------------------------------------------------------------------------------- from versions to ranges

Key = tuple[str, str]  # name and type: what makes a field the same field in two versions


def joined(versions: Versions, where: str) -> Json:
    """A message from the struct of each of its versions."""
    out: Json = {
        "validVersions": _range(versions),
        "flexibleVersions": _range(version for version, struct in versions.items() if struct["flexible"]),
    }
    headers = {version: struct["header_version"] for version, struct in versions.items() if "header_version" in struct}
    if headers:
        out["headerVersions"] = dict(_runs(headers))
    flexible = {version for version, struct in versions.items() if struct["flexible"]}
    out["fields"] = _fields(versions, flexible, where)
    return out


def _fields(versions: Versions, flexible: set[int], where: str) -> list[Json]:
    entries: dict[Key, Versions] = {}
    for version, struct in versions.items():
        for field in struct["fields"]:
            same = entries.setdefault((field["name"], field["type"]), {})
            need(version not in same, f"{where}: {field['name']} twice in version {version}")
            same[version] = field
    return [_field(entries[key], flexible, f"{where}.{key[0]}") for key in _in_order(versions, where)]


def _field(versions: Versions, flexible: set[int], where: str) -> Json:
    first = next(iter(versions.values()))
    out = {"name": first["name"], "type": first["type"], "versions": _range(versions)}
    nullable = [version for version, field in versions.items() if field["nullable"]]
    if nullable:
        out["nullableVersions"] = _range(nullable)
    tags = {version: field["tag"] for version, field in versions.items() if "tag" in field}
    if tags:
        need(len(set(tags.values())) == 1, f"{where}: two tags")
        out["tag"] = tags[max(tags)]
        out["taggedVersions"] = _range(tags)
    need(
        len({json.dumps(field.get("default", ...), default=repr) for field in versions.values()}) == 1,
        f"{where}: two defaults",
    )
    if "default" in first:
        out["default"] = first["default"]
    if "compact" in first:
        expected = {version for version in versions if version in flexible}
        compact = {version for version, field in versions.items() if field["compact"]}
        if compact != expected:
            need(not compact, f"{where}: compact in some flexible versions only")
            out["flexibleVersions"] = "none"
    if "fields" in first:
        out["fields"] = _fields(versions, flexible, where)
    return out


def _in_order(versions: Versions, where: str) -> list[Key]:
    """An order of the fields that is right in every version: plain ones as on the wire, then those always tagged.

    Of the fields that could come next it takes one that follows the last in some version, then the one that came up
    first: in the oldest version, and there first.
    """
    after: dict[Key, set[Key]] = {}
    came_up: dict[Key, tuple[bool, int, int]] = {}
    for version, struct in versions.items():
        keys = [(field["name"], field["type"]) for field in struct["fields"]]
        plain = [key for key, field in zip(keys, struct["fields"], strict=True) if "tag" not in field]
        for key in keys:
            after.setdefault(key, set())
            came_up.setdefault(key, (key not in plain, version, keys.index(key)))
        for key, following in pairwise(plain):
            after[key].add(following)
    order: list[Key] = []
    left = set(after)
    while left:
        ready = left - {key for other in left for key in after[other]}
        need(bool(ready), f"{where}: fields that changed places")
        follows = after[order[-1]] if order else set()
        order.append(min(ready, key=lambda key: (came_up[key][0], key not in follows, *came_up[key][1:])))
        left.remove(order[-1])
    return order


def _range(versions: Iterable[int]) -> str:
    ordered = sorted(versions)
    if not ordered:
        return "none"
    need(ordered == list(range(ordered[0], ordered[-1] + 1)), f"a gap in versions {ordered}")
    return f"{ordered[0]}" if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"


def _runs(values: dict[int, int]) -> Iterator[tuple[str, int]]:
    """Ranges of versions with one value."""
    versions = sorted(values)
    while versions:
        value = values[versions[0]]
        run = [version for n, version in enumerate(versions) if all(values[v] == value for v in versions[: n + 1])]
        yield _range(run), value
        versions = versions[len(run) :]


def need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SystemExit(f"layouts: {otherwise}: this form cannot say that; look at what the release changed")


# --------------------------------------------------------------------------------------------------------- the proof


def prove(made: dict[str, Json], dumps: dict[str, Json]) -> int:
    """Expands every message and version and compares with the dumps; the number of comparisons."""
    oldest, *_, newest = dumps
    compared = 0
    for layout in made["schema.json"]["apis"]:
        for side in ("request", "response"):
            apis = (_api_in(dumps[newest], layout["key"]), _api_in(dumps[oldest], layout["key"]))
            compared += _compare(layout[side], [api[side] for api in apis if api], f"{layout['name']} {side}")
    data = made["schema.json"]["data"] + made["schema-internal.json"]["data"]
    for layout in data:
        dumped = [
            message["versions"]
            for release in (newest, oldest)
            for message in dumps[release]["data"]
            if RENAMED.get(message["class"], message["class"]) == layout["name"]
            and _section(message) == layout["section"]
        ]
        compared += _compare(layout, dumped[:1] if layout.get("role") == "key" else dumped, layout["name"])
    need(len(data) == len(dumps[newest]["data"]), "a message is missing")
    return compared


def _compare(layout: Json, dumped: list[Json], where: str) -> int:
    wanted: dict[int, Json] = {}
    for versions in dumped:  # the newest first
        for number, struct in versions.items():
            wanted.setdefault(int(number), struct)
    need(_versions(layout["validVersions"]) == set(wanted), f"{where}: other versions")
    headers = {v: header for versions, header in layout.get("headerVersions", {}).items() for v in _versions(versions)}
    for version, struct in wanted.items():
        flexible = version in _versions(layout["flexibleVersions"])
        found = {"flexible": flexible, "fields": _expanded(layout["fields"], version, flexible)}
        if headers:
            found["header_version"] = headers[version]
        need(found == struct, f"{where} version {version} expands to something else")
    return len(wanted)


def _expanded(fields: list[Json], version: int, flexible: bool) -> list[Json]:
    plain, tagged = [], []
    for field in fields:
        if version not in _versions(field["versions"]):
            continue
        nullable = version in _versions(field.get("nullableVersions", "none"))
        out = {"name": field["name"], "type": field["type"], "nullable": nullable}
        if field["type"].startswith("[]") or field["type"] in ("string", "bytes", "records"):
            out["compact"] = flexible and "flexibleVersions" not in field
        if "default" in field:
            out["default"] = field["default"]
        if "fields" in field:
            out |= {"flexible": flexible, "fields": _expanded(field["fields"], version, flexible)}
        if version in _versions(field.get("taggedVersions", "none")):
            tagged.append(out | {"tag": field["tag"]})
        else:
            plain.append(out)
    return plain + sorted(tagged, key=lambda field: field["tag"])


def _versions(text: str) -> set[int]:
    first, _, last = text.partition("-")
    return set() if text == "none" else set(range(int(first), int(last or first) + 1))
