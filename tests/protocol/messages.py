"""Shared by protocol tests: golden vectors, every layout, and strategies for bodies derived from the schema."""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from kproxy.protocol import codec
from kproxy.protocol.plans import TAGS
from kproxy.protocol.schema import Field, Message, schema

VECTORS = Path(__file__).parent.parent / "data" / "vectors-dev.jsonl.gz"


class Layout(NamedTuple):
    message: Message
    version: int
    api_key: int | None
    side: str  # request, response, data

    def __repr__(self) -> str:
        return f"{self.message.name} v{self.version}"

    @property
    def start(self) -> int:
        """Where the plans for the wire begin: behind the correlation id."""
        return {"request": 8, "response": 4, "data": 2}[self.side]

    def encode(self, body: dict[str, Any], client_id: str | None = "a client") -> bytes:
        if self.side == "data":
            return codec.encode_data(self.message.name, self.version, body)
        if self.side == "response":
            return codec.encode_response(self.api_key, self.version, {"correlationId": 7}, body)
        header = {"requestApiKey": self.api_key, "requestApiVersion": self.version, "correlationId": 7}
        if self.message.header_version(self.version) > 0:
            header["clientId"] = client_id
        return codec.encode_request(header, body)

    def decode(self, frame: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.side == "data":
            return codec.decode_data(self.message.name, frame)
        if self.side == "response":
            return codec.decode_response(frame, self.api_key, self.version)
        return codec.decode_request(frame)


class Vector(NamedTuple):
    layout: Layout
    frame: bytes
    json: dict[str, Any]
    said: dict[str, Any]  # the whole line


@cache
def layouts() -> tuple[Layout, ...]:
    every = [
        Layout(message, version, api.key, side)
        for api in schema().apis.values()
        for side, message in (("request", api.request), ("response", api.response))
        for version in message.versions
    ]
    every += [
        Layout(message, version, None, "data") for message in schema().data.values() for version in message.versions
    ]
    return tuple(every)


@cache
def vectors() -> tuple[Vector, ...]:
    apis, data = schema().apis, schema().data
    found = []
    with gzip.open(VECTORS, "rt") as lines:
        for said in map(json.loads, lines):
            side, key = said["dir"], said["api_key"]
            message = data[said["api"]] if side == "data" else getattr(apis[key], side)
            layout = Layout(message, said["version"], key, side)
            found.append(Vector(layout, bytes.fromhex(said["hex"]), said["json"], said))
    return tuple(found)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.just("x" * 130)
_BYTES = st.binary(max_size=6) | st.just(b"y" * 130)
_PRIMITIVES = {
    "bool": st.booleans(),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False),
    "uuid": st.uuids(),
    "string": _TEXT,
    "bytes": _BYTES,
    "records": _BYTES,
}


def bodies(layout: Layout) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies as decoding gives them, unknown tagged fields included."""
    message, version = layout.message, layout.version
    return _struct(message.fields, version, version in message.flexible_versions)


def _struct(fields: tuple[Field, ...], version: int, flexible: bool) -> st.SearchStrategy[dict[str, Any]]:
    present = [field for field in fields if version in field.versions]
    plain = {field.name: _value(field, version, flexible) for field in present if field.tag is None}
    tagged = {field.name: _value(field, version, flexible) for field in present if field.tag is not None}
    if not flexible:
        return st.fixed_dictionaries(plain)
    known = {field.tag for field in present}
    tags = st.integers(0, 2**32 - 1).filter(lambda tag: tag not in known)
    unknown = st.dictionaries(tags, _BYTES, min_size=1, max_size=2)
    return st.fixed_dictionaries(plain, optional=tagged | {TAGS: unknown})


def _value(field: Field, version: int, flexible: bool) -> st.SearchStrategy[Any]:
    element = _struct(field.fields, version, flexible) if field.is_struct else _PRIMITIVES[field.element_type]
    value = st.lists(element, max_size=2) if field.is_array else element
    return st.none() | value if version in field.nullable_versions else value


def leaves(fields: tuple[Field, ...], body: dict[str, Any], path: str) -> Iterator[Any]:
    """Every value at the path in a decoded body, in wire order: plain fields first, then tagged ones by tag."""
    name, _, rest = path.partition(".")
    field = next((field for field in fields if field.name == name.removesuffix("[]")), None)
    if field is None or field.name not in body:
        return
    value = body[field.name]
    if not rest:
        yield from value or () if name.endswith("[]") else (value,)
    elif value is not None:
        for item in value if field.is_array else (value,):
            yield from leaves(field.fields, item, rest)
