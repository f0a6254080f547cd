"""The layouts of every Kafka message as frozen specifications, read from the JSON data shipped in `layouts/`.

The JSON defines the wire format. This module gives it types and adds the one fact that the layouts lack: the responses
that contain broker addresses. It never restates a layout. Version ranges are Python ranges: `version in field.versions`
reads naturally, and "none" is the empty range. Specifications are compared by identity. Refuses to know bytes.
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files as resources
from typing import Any
from uuid import UUID

NONE = range(0)

PRIMITIVES = frozenset(
    ("bool", "int8", "int16", "uint16", "int32", "uint32", "int64", "float64", "uuid", "string", "bytes", "records")
)

NODE_ENDPOINTS = "nodeEndpoints"  # empty unless a broker is not a partition's leader (KIP-951)

# The responses that contain broker addresses, by the path of the structure with `host` and `port`; "" is the top level
# of the body. Controllers' own traffic, and requests that register listeners, are left out on purpose.
ADDRESS_CARRIERS: dict[int, tuple[str, ...]] = {
    0: (NODE_ENDPOINTS,),  # Produce, KIP-951
    1: (NODE_ENDPOINTS,),  # Fetch, KIP-951
    3: ("brokers",),  # Metadata
    10: ("", "coordinators"),  # FindCoordinator: one coordinator at the top level until KIP-699
    60: ("brokers",),  # DescribeCluster
    78: (NODE_ENDPOINTS,),  # ShareFetch
    79: (NODE_ENDPOINTS,),  # ShareAcknowledge
}


@dataclass(frozen=True, eq=False)
class Field:
    name: str
    type: str  # a primitive, a struct's name, or "[]" followed by one of these
    versions: range
    nullable_versions: range
    tag: int | None
    tagged_versions: range
    default: Any  # for a missing key when encoding; {}: a struct of defaults
    fields: tuple["Field", ...]  # of a struct, or of the structs in an array
    compactable: bool  # False: keeps its classic length prefix in flexible versions too

    @property
    def is_array(self) -> bool:
        return self.type.startswith("[]")

    @property
    def element_type(self) -> str:
        return self.type.removeprefix("[]")

    @property
    def is_struct(self) -> bool:
        """Whether it is a struct, or an array of structs."""
        return self.element_type not in PRIMITIVES


@dataclass(frozen=True, eq=False)
class Message:
    name: str
    versions: range
    flexible_versions: range
    header_versions: tuple[tuple[range, int], ...]
    fields: tuple[Field, ...]
    log: str | None = None  # the log of a coordinator, or the metadata log
    role: str | None = None  # "key" or "value" in that log
    record_type: int | None = None
    version_bytes: int = 2  # of other messages than requests and responses, which begin with their version

    def header_version(self, version: int) -> int:
        for versions, header in self.header_versions:
            if version in versions:
                return header
        raise KeyError(version)

    def fields_of(self, version: int) -> tuple[Field, ...]:
        """Return the top-level fields of this version."""
        return tuple(field for field in self.fields if version in field.versions)


@dataclass(frozen=True, eq=False)
class Api:
    key: int
    name: str
    listeners: tuple[str, ...]
    throttled_after_answer: range  # KIP-219: the answer leaves at once, then the connection is muted
    layouts: tuple[Any, Any]  # request and response as JSON, converted to messages at first use

    @cached_property
    def request(self) -> Message:
        return _message(self.name + "Request", self.layouts[0])

    @cached_property
    def response(self) -> Message:
        return _message(self.name + "Response", self.layouts[1])


@dataclass(frozen=True)
class Schema:
    apis: dict[int, Api]

    @cached_property
    def data(self) -> dict[str, Message]:
        """The messages other than requests and responses: headers, metadata between group members (the consumer
        protocol, Connect's, Streams'), records of the brokers' own logs.
        """
        files = ("schema.json", "schema-internal.json", "embedded.json")
        layouts = [layout for name in files for layout in _load(name)["data"]]
        return {layout["name"]: _message(layout["name"], layout) for layout in layouts}


@cache
def schema() -> Schema:
    return Schema(
        {
            layout["key"]: Api(
                layout["key"],
                layout["name"],
                tuple(layout["listeners"]),
                parse_range(layout["throttledAfterAnswer"]),
                (layout["request"], layout["response"]),
            )
            for layout in _load("schema.json")["apis"]
        }
    )


@cache
def served_versions() -> dict[str, dict[int, range]]:
    """Return Kafka release, oldest first -> API key -> supported versions, without unstable ones.

    One release represents its line, "3.7.2" for 3.7. Included are the versions of brokers with ZooKeeper and with
    KRaft, and those of KRaft controllers. The data is read at the first call: the proxy does not need it.
    """
    return {
        release: {int(key): parse_range(versions) for served in listeners.values() for key, versions in served.items()}
        for release, listeners in _load("releases.json")["releases"].items()
    }


def api_name(key: int) -> str:
    api = schema().apis.get(key)
    return api.name if api else f"unknown_{key}"


def address_path(api_key: int, version: int) -> str | None:
    """Return the path of the structure with broker addresses in this version's response, or None."""
    paths = ADDRESS_CARRIERS.get(api_key)
    if not paths:
        return None
    present = {field.name for field in schema().apis[api_key].response.fields_of(version)}
    for path in paths:
        if (path or "host") in present:
            return path
    return None


def parse_range(text: str) -> range:
    if text == "none":
        return NONE
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@cache
def _load(name: str) -> Any:
    return json.loads(resources("kproxy.protocol").joinpath("layouts", name).read_bytes())


def _message(name: str, layout: dict[str, Any]) -> Message:
    return Message(
        name,
        parse_range(layout["validVersions"]),
        parse_range(layout["flexibleVersions"]),
        tuple((parse_range(versions), header) for versions, header in layout.get("headerVersions", {}).items()),
        tuple(map(_field, layout["fields"])),
        layout.get("log"),
        layout.get("role"),
        layout.get("record_type"),
        layout.get("versionBytes", 2),
    )


def _field(layout: dict[str, Any]) -> Field:
    return Field(
        layout["name"],
        layout["type"],
        parse_range(layout["versions"]),
        parse_range(layout.get("nullableVersions", "none")),
        layout.get("tag"),
        parse_range(layout.get("taggedVersions", "none")),
        layout["default"] if "default" in layout else _implicit_default(layout["type"]),
        tuple(map(_field, layout.get("fields", ()))),
        layout.get("flexibleVersions") != "none",
    )


def _implicit_default(type_: str) -> Any:
    if type_.startswith("[]"):
        return ()
    if type_ not in PRIMITIVES:
        return {}
    special = {"bool": False, "float64": 0.0, "uuid": UUID(int=0), "string": "", "bytes": b"", "records": None}
    return special.get(type_, 0)
