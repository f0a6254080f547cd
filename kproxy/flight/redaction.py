"""Redacts frames for a dump: secrets always, the content of records unless it is requested.

Duty: replace fields of `protocol.shown.secrets` by asterisks or zeros of the same length; keys, values and header
values of records by zeros (`protocol.blanking`), also tagged fields unknown to the schema and bytes after a body, whose
content is unknown. Records of KRaft's own topic, which have credentials, are always blanked, and parts of snapshots,
which begin and end anywhere, completely. A frame without such content is returned unchanged. Only the head is left of a
frame that is incomplete, of an unknown API, or does not decode, as its content is unknown; and of all frames once an
`Allowance` is used up, so that many small records cannot prevent a dump. Refuses to know packets.
"""

from functools import cache
from typing import Any

from kproxy.errors import ProtocolError, TooLarge
from kproxy.flight.cutting import Frame
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS
from kproxy.protocol.blanking import Allowance, blank
from kproxy.protocol.schema import Field
from kproxy.protocol.shown.secrets import CONTENT, SECRET_TOPICS, redact
from kproxy.wire import frames
from kproxy.wire.events import CLIENT

LEFT_OUT = "left out"
MAX_RECORDS = 10_000_000  # per dump: about 20 s of a core
MAX_UNPACKED_BYTES = 2 << 30  # per dump: about 20 s of a core
_TOPIC_NAMES = ("topic", "topicId", "name")
_OF_SNAPSHOT = "unalignedRecords"  # field of FetchSnapshot


def allowance() -> Allowance:
    """Return the allowance for the frames of one dump."""
    return Allowance(MAX_RECORDS, MAX_UNPACKED_BYTES)


def written(frame: Frame, left: Allowance, *, records: bool) -> tuple[bytes, str]:
    """Return the redacted frame including its size, and a note on the changes; "": none.

    If there are fewer bytes than the size indicates, the rest is left out. left: the remaining allowance. records:
    keep the content of records.
    """
    head = frame.data[: frames.REQUEST_HEAD_BYTES if frame.side == CLIENT else frames.RESPONSE_HEAD_BYTES]
    if frame.api is None:
        return head, f"{LEFT_OUT}: its request was not kept"
    if not frame.is_whole:
        return head, f"{LEFT_OUT}: it is larger than what is kept of a frame"
    try:
        return _redacted(frame, left, records)
    except TooLarge:
        return head, f"{LEFT_OUT}: it holds more than kproxy unpacks for a dump"
    except (ProtocolError, ValueError, KeyError, RecursionError) as fault:
        return head, f"{LEFT_OUT}: it does not decode ({type(fault).__name__})"


def _redacted(frame: Frame, left: Allowance, records: bool) -> tuple[bytes, str]:
    assert frame.api is not None
    key, version = frame.api
    data = frame.data[4:]
    if frame.side == CLIENT:
        header, body = codec.decode_request(data)
    else:
        version = _answered_version(data, key, version)
        header, body = codec.decode_response(data, key, version)
    kind = "request" if frame.side == CLIENT else "response"
    message = codec.api_message(key, version, kind)
    hidden = redact(message.name, body, _masked)
    done = ["without secrets"] if hidden != body else []
    blank_header, known = _blank_unknown(header), _blank_unknown(hidden)
    if known != hidden or blank_header != header:
        done.append("unknown fields are zeros")
    header, hidden = blank_header, known
    if _blank_records(_fields_with_records(message.fields), hidden, left, records):
        done.append("records are zeros")
    if not records and hidden.get(pushed := CONTENT.get(message.name, "")):
        hidden[pushed] = bytes(len(hidden[pushed]))
        done.append(f"{pushed} are zeros")
    if not done:
        return frame.data, ""
    if frame.side == CLIENT:
        encoded = codec.encode_request(header, hidden)
    else:
        encoded = codec.encode_response(key, version, header, hidden)
    return len(encoded).to_bytes(4, "big") + encoded, ", ".join(done)


def _answered_version(data: bytes, key: int, version: int) -> int:
    """Return the response's version: an unsupported ApiVersions version is answered in v0 (KIP-511)."""
    if key == API_VERSIONS:
        try:
            codec.decode_response(data, key, version)
        except ProtocolError:
            return 0
    return version


def _masked(value: Any) -> Any:
    return "*" * len(value) if isinstance(value, str) else bytes(len(value))


def _blank_unknown(value: Any) -> Any:
    """Return a copy of a struct with zeros in fields unknown to the schema."""
    if isinstance(value, list):
        return [_blank_unknown(item) for item in value] if value and isinstance(value[0], dict) else value
    if not isinstance(value, dict):
        return value
    out = {name: _blank_unknown(item) for name, item in value.items()}
    if "_tags" in value:
        out["_tags"] = {tag: bytes(len(data)) for tag, data in value["_tags"].items()}
    if "_trailing" in value:
        out["_trailing"] = bytes(len(value["_trailing"]))
    return out


@cache
def _fields_with_records(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the fields that are records, or structs that contain some."""
    return tuple(field for field in fields if field.type == "records" or _fields_with_records(field.fields))


def _blank_records(fields: tuple[Field, ...], body: dict[str, Any], left: Allowance, shown: bool) -> bool:
    """Replace the content of a body's records by zeros; returns whether there was any.

    shown: keep records, except of topics with secrets.
    """
    found = False
    if any(body.get(name) in SECRET_TOPICS for name in _TOPIC_NAMES):
        shown = False
    for field in fields:
        value = body.get(field.name)
        if not value:
            continue
        if field.name == _OF_SNAPSHOT:
            body[field.name] = bytes(len(value))
            found = True
        elif field.type == "records":
            if not shown:
                body[field.name] = blank(value, left)
                found = True
        else:
            for item in value if isinstance(value, list) else [value]:
                found |= _blank_records(_fields_with_records(field.fields), item, left, shown)
    return found
