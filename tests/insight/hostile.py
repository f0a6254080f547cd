"""Exchanges whose bodies decode but are nonsense: extreme numbers, colliding names, arbitrary embedded bytes."""

import random
from functools import cache
from typing import Any
from uuid import UUID

from kproxy.insight.knowledge import APIS
from kproxy.protocol.schema import Field
from tests.protocol.messages import Layout, layouts

TEXTS = ("", "a", "b", "orders", "consumer", "range", "roundrobin", "cooperative-sticky", "x" * 300, "\0", "é")
IDS = tuple(UUID(int=number) for number in range(4))
NUMBERS = {
    "int8": (0, 1, 2, -1, 127, -128),
    "int16": (0, 0, 0, 0, 1, 3, 25, 27, 69, 79, -1, 32767, -32768),
    "int32": (0, 0, 1, 1, 2, -1, -2, 2**31 - 1, -(2**31)),
    "int64": (0, 1, -1, 2**63 - 1, -(2**63)),
}


@cache
def pairs() -> dict[int, list[tuple[Layout, Layout]]]:
    """Request and response layouts of each version that insight reads, by API."""
    sides: dict[tuple[int, int], dict[str, Layout]] = {}
    for layout in layouts():
        if layout.api_key in APIS:
            sides.setdefault((layout.api_key, layout.version), {})[layout.side] = layout
    found: dict[int, list[tuple[Layout, Layout]]] = {}
    for (key, _), both in sides.items():
        found.setdefault(key, []).append((both["request"], both["response"]))
    return found


@cache
def embedded() -> list[Layout]:
    return [each for each in layouts() if each.side == "data" and each.message.name.startswith("ConsumerProtocol")]


def frame(layout: Layout, dice: random.Random) -> bytes:
    """A message of that layout, with its 4-byte size."""
    data = layout.encode(body(layout, dice))
    return len(data).to_bytes(4) + data


def body(layout: Layout, dice: random.Random) -> dict[str, Any]:
    return _struct(layout.message.fields, layout.version, dice)


def _struct(fields: tuple[Field, ...], version: int, dice: random.Random) -> dict[str, Any]:
    present = (field for field in fields if version in field.versions)
    return {
        field.name: _value(field, version, dice)
        for field in present
        if version not in field.tagged_versions or dice.random() < 0.2
    }


def _value(field: Field, version: int, dice: random.Random) -> Any:
    if version in field.nullable_versions and dice.random() < 0.25:
        return None
    if field.is_array:
        return [_one(field, version, dice) for _ in range(dice.choice((0, 1, 1, 2, 3)))]
    return _one(field, version, dice)


def _one(field: Field, version: int, dice: random.Random) -> Any:
    kind = field.element_type
    if field.is_struct:
        return _struct(field.fields, version, dice)
    if kind == "string":
        return dice.choice(TEXTS)
    if kind == "uuid":
        return dice.choice(IDS)
    if kind in ("bytes", "records"):
        layout = dice.choice(embedded())
        data = layout.encode(body(layout, dice))
        return data if dice.random() < 0.7 else data[: dice.randrange(len(data))] + dice.randbytes(3)
    if kind == "bool":
        return dice.random() < 0.5
    return 0.5 if kind == "float64" else dice.choice(NUMBERS.get(kind, (0, 1)))
