"""Messages as JSON values, like Kafka's own JSON converters render them.

uuid is url-safe base64 without padding, bytes are base64, and records are their real bytes, with their size as
`<name>SizeInBytes` (Kafka gives only the size). A float without a JSON number is its name. The reserved keys of `codec`
do not exist in Kafka's rendering and are left out unless requested.
"""

from base64 import b64encode, urlsafe_b64encode
from math import isfinite, isnan
from typing import Any
from uuid import UUID

from kproxy.protocol.plans import TAGS, TRAILING
from kproxy.protocol.schema import Field, Message


def render(message: Message, body: dict[str, Any], *, reserved: bool = False) -> dict[str, Any]:
    """Return the body or header of a decoded message as values for `json.dumps`."""
    return _struct(message.fields, body, reserved)


def uuid_text(identity: UUID) -> str:
    """Return an id in Kafka's notation: URL-safe base64 without padding."""
    return urlsafe_b64encode(identity.bytes).decode().rstrip("=")


def _struct(fields: tuple[Field, ...], body: dict[str, Any], reserved: bool) -> dict[str, Any]:
    by_name = {field.name: field for field in fields}
    out: dict[str, Any] = {}
    for name, value in body.items():
        field = by_name.get(name)
        if field is not None:
            out[name] = _value(field, field.type, value, reserved)
            if field.type == "records" and value is not None:
                out[f"{name}SizeInBytes"] = len(value)
        elif reserved:
            out[name] = _reserved(name, value)
    return out


def _value(field: Field, type_: str, value: Any, reserved: bool) -> Any:
    if value is None:
        return None
    if type_.startswith("[]"):
        return [_value(field, field.element_type, item, reserved) for item in value]
    if type_ == "uuid":
        return uuid_text(value)
    if type_ in ("bytes", "records"):
        return b64encode(value).decode()
    if type_ == "float64" and not isfinite(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return _struct(field.fields, value, reserved) if field.is_struct else value


def _reserved(name: str, value: Any) -> Any:
    if name == TRAILING:
        return b64encode(value).decode()
    assert name == TAGS
    return {str(tag): b64encode(content).decode() for tag, content in value.items()}
