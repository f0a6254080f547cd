"""Explains why values cannot be encoded as a message: the field, the value, and the expected type.

Duty: the text of `Malformed` when encoding fails. Writing plans check nothing beforehand; after a fault the encoder
asks here, so that the text names the faulty field. Refuses to write anything.
"""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from kproxy.protocol.plans import FIXED, TAGS, join, size_of
from kproxy.protocol.schema import Field

_SHOWN = 40  # characters of a value
_MOST_TEXT = (1 << 15) - 1  # bytes of a text, limited by its int16 length


def misfit(fields: tuple[Field, ...], version: int, values: Any, path: str = "") -> str | None:
    """Return the first field whose value does not fit its type, as a sentence; None if all fit."""
    if not isinstance(values, Mapping):
        return f"{path or 'the message'}: {_shown(values)} is no dict of fields"
    for field in fields:
        if version in field.versions and field.name in values:
            found = _of_field(field, version, values[field.name], join(path, field.name))
            if found is not None:
                return found
    tags = values.get(TAGS, {})
    if not isinstance(tags, Mapping) or not all(isinstance(tag, int) and _is_bytes(tags[tag]) for tag in tags):
        return f"{join(path, TAGS)}: {_shown(tags)} is no dict of bytes by tag, like {{5: b'...'}}"
    return None


def _of_field(field: Field, version: int, value: Any, path: str) -> str | None:
    if value is None:
        return None if version in field.nullable_versions else f"{path} must not be null"
    if not field.is_array:
        return _of_element(field, version, value, path)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return f"{path}: {_shown(value)} is no list"
    for place, element in enumerate(value):
        found = _of_element(field, version, element, f"{path}[{place}]")
        if found is not None:
            return found
    return None


def _of_element(field: Field, version: int, value: Any, path: str) -> str | None:
    kind = field.element_type
    if field.is_struct:
        return misfit(field.fields, version, value, path)
    if kind == "uuid":
        return None if isinstance(value, UUID) else f"{path}: {_shown(value)} is no uuid.UUID"
    if kind == "string":
        return _of_text(value, path)
    if kind not in FIXED:
        return None if _is_bytes(value) else f"{path}: {_shown(value)} is not bytes"
    if kind == "bool":
        return None
    if kind == "float64":
        return None if isinstance(value, (int, float)) else f"{path}: {_shown(value)} is no number"
    if not isinstance(value, int):
        return f"{path}: {_shown(value)} is no whole number"
    bits = 8 * size_of(FIXED[kind])
    least = 0 if kind.startswith("u") else -(1 << bits - 1)
    if least <= value < least + (1 << bits):
        return None
    return f"{path}: {value} does not fit {kind}, which is from {least} to {least + (1 << bits) - 1}"


def _of_text(value: Any, path: str) -> str | None:
    if not isinstance(value, str):
        return f"{path}: {_shown(value)} is no text"
    try:
        size = len(value.encode())
    except UnicodeEncodeError as fault:
        return f"{path}: {_shown(value)} cannot be UTF-8: {fault.reason}"
    return None if size <= _MOST_TEXT else f"{path}: a text of {size} bytes, where {_MOST_TEXT} are the most"


def _is_bytes(value: Any) -> bool:
    return isinstance(value, (bytes, bytearray, memoryview))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
