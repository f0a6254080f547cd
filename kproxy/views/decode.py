"""Decoded messages as lines for a reader: names for error codes and APIs, records and the consumer protocol decoded.

Secrets are masked unless the user asks for them. Values of a peer are quoted, or shown as hex, with unprintable
characters escaped, so that no frame can move the terminal's cursor or change its colours. Short flat values take one
line, long ones are truncated with a mark. A part that does not decode shows the reason, and the rest follows.

Memory: one line at a time, and the shown records.
"""

from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from datetime import UTC, datetime, timedelta
from itertools import islice
from types import MappingProxyType
from typing import Any
from uuid import UUID

from rich.console import Console
from rich.text import Text

from kproxy.errors import ProtocolError
from kproxy.protocol.compression import codec_name
from kproxy.protocol.error_codes import ERRORS, error_name
from kproxy.protocol.log_records import LOGS, LogRecord, decode_record
from kproxy.protocol.plans import TAGS, TRAILING
from kproxy.protocol.primitives import Buffer
from kproxy.protocol.records import Batch, Record, control_type, is_zero, iterate_headers
from kproxy.protocol.schema import Field, api_name
from kproxy.protocol.shown.decode import Decoded, count_bytes, data
from kproxy.protocol.shown.secrets import redact

_NAME, _STRING, _QUIET, _BAD, _TITLE = "cyan", "green", "dim", "bold red", "bold"
_LINE_CHARS = 110  # longer values are wrapped
_VALUE_CHARS = 160  # longer values are truncated, with a mark
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_SUBSCRIPTION = {"consumer": "ConsumerProtocolSubscription", "connect": "ConnectWorkerState"}
_ASSIGNMENT = {"consumer": "ConsumerProtocolAssignment", "connect": "ConnectAssignment"}

# Fields of bytes that are messages, by the type of the group. Older versions have no type: then the first that decodes.
_EMBEDDED = {
    "JoinGroupRequest.protocols.metadata": _SUBSCRIPTION,
    "JoinGroupResponse.members.metadata": _SUBSCRIPTION,
    "SyncGroupRequest.assignments.assignment": _ASSIGNMENT,
    "SyncGroupResponse.assignment": _ASSIGNMENT,
    "DescribeGroupsResponse.groups.members.memberMetadata": _SUBSCRIPTION,
    "DescribeGroupsResponse.groups.members.memberAssignment": _ASSIGNMENT,
    "GroupMetadataValue.members.subscription": _SUBSCRIPTION,
    "GroupMetadataValue.members.assignment": _ASSIGNMENT,
    "ConnectWorkerState.allocation": {"connect": "ConnectAssignment"},
    # Members of Streams are consumers.
    "ConsumerProtocolSubscription.userData": {"consumer": "StreamsSubscriptionInfo"},
    "ConsumerProtocolAssignment.userData": {"consumer": "StreamsAssignmentInfo"},
}


class _Masked:
    """Replaces a secret."""

    def __init__(self, value: Any) -> None:
        self.size = len(value) if isinstance(value, bytes | str) else 0


def show(
    decoded: Decoded, *, show_secrets: bool, records: int, topics: Mapping[UUID, str] = MappingProxyType({})
) -> None:
    """Print a message. topics: known names by id; they identify records of coordinators' logs."""
    console = Console()
    header = decoded.header
    title = Text(decoded.title, _TITLE)
    for name, label in (("correlationId", "correlation id"), ("version", "version"), ("recordType", "record type")):
        if name in header:
            title.append(f"  {label} {header[name]}", "not bold")
    if "clientId" in header:
        title.append("  client ", "not bold").append_text(_scalar("clientId", header["clientId"]))
    title.append(f"  {count_bytes(decoded.size_bytes)}", _QUIET)
    _print(console, title)
    body = decoded.body if show_secrets else redact(decoded.message.name, decoded.body, _Masked)
    human = _Human(records, body.get("protocolType"), topics)
    for line in _unknown(header):
        _print(console, line)
    for line in human.struct(decoded.message.fields, body, decoded.message.name):
        _print(console, Text("  ") + line)


def show_records(fragment: Buffer, *, records: int) -> None:
    """Print batches and their first records. Raises ProtocolError if the first batch header is invalid."""
    try:
        next(iterate_headers(fragment), None)
    except ProtocolError as fault:
        raise type(fault)(f"as records: {fault}") from None
    console = Console()
    for line in _Human(records).batches(fragment):
        _print(console, line)


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)


@dataclass(frozen=True)
class _Human:
    """Lines of styled text for decoded values."""

    records: int  # number shown of each batch
    group_type: str | None = None  # None if the message has none
    topics: Mapping[UUID, str] = dataclass_field(default_factory=dict)
    topic: str | None = None  # the topic of records

    def struct(self, fields: tuple[Field, ...], body: dict[str, Any], path: str) -> Iterator[Text]:
        by_name = {field.name: field for field in fields}
        for name, value in body.items():
            if name in by_name:
                yield from self.field(by_name[name], value, f"{path}.{name}")
        yield from _unknown(body)

    def field(self, field: Field, value: Any, path: str) -> Iterator[Text]:
        label = Text(field.name, _NAME) + Text(": ")
        if isinstance(value, bytes) and (message := self.embedded(path, value)) is not None:
            yield label + Text(message.title, _QUIET)
            yield from _indented(self.struct(message.message.fields, message.body, message.message.name))
        elif field.type == "records" and value is not None:
            yield label + Text(f"{count_bytes(len(value))}", _QUIET)
            yield from _indented(self.batches(value))
        elif isinstance(value, dict):
            line = self.one_line(field.fields, value, path)
            yield label if line is None else label + line
            if line is None:
                yield from _indented(self.struct(field.fields, value, path))
        elif isinstance(value, list) and field.is_struct and value:
            yield label + Text(f"{len(value)}", _QUIET)
            for item in value:
                yield from _item(self.of_topic(item).element(field.fields, item, path))
        elif isinstance(value, list):
            yield from self.scalars(label, field.name, value)
        else:
            yield label + _scalar(field.name, value)

    def of_topic(self, body: dict[str, Any]) -> "_Human":
        """Return the formatter for the content of an element, with the topic that the element names, if any."""
        named = body.get("topic") or body.get("name") or self.topics.get(body.get("topicId", UUID(int=0)))
        return replace(self, topic=named) if isinstance(named, str) else self

    def element(self, fields: tuple[Field, ...], body: dict[str, Any], path: str) -> Iterator[Text]:
        line = self.one_line(fields, body, path)
        if line is not None:
            yield line
        else:
            yield from self.struct(fields, body, path)

    def one_line(self, fields: tuple[Field, ...], body: dict[str, Any], path: str) -> Text | None:
        """Return the value on one line if it is short and flat; otherwise None."""
        types = {field.name: field.type for field in fields}
        parts, length = [], 0
        for name, value in body.items():
            is_long = isinstance(value, list) and len(value) > _LINE_CHARS // 3
            has_lines = types.get(name) == "records" or f"{path}.{name}" in _EMBEDDED
            if is_long or _nested(value) or (has_lines and value) or name not in types:
                return None
            part = Text(f"{name} ", _NAME) + (_list(name, value) if isinstance(value, list) else _scalar(name, value))
            length += len(part) + 2
            if length > _LINE_CHARS:
                return None
            parts.append(part)
        return Text(", ").join(parts) if parts else None

    def scalars(self, label: Text, name: str, values: list[Any]) -> Iterator[Text]:
        if len(values) <= _LINE_CHARS // 3 and len(line := _list(name, values)) <= _LINE_CHARS:
            yield label + line
            return
        yield label + Text(f"{len(values)}", _QUIET)
        for value in values:
            yield from _item(iter((_scalar(name, value),)))

    def embedded(self, path: str, value: bytes) -> Decoded | None:
        """Return the decoded message in a field of bytes of a group's member; None if it is unknown."""
        for group_type, name in _EMBEDDED.get(path, {}).items() if value else ():
            if self.group_type in (None, group_type):
                with suppress(ProtocolError):
                    found = data(value, name)
                    if TRAILING not in found.body:
                        title = f"{name} v{found.header['version']}"
                        return Decoded(title, found.message, None, {}, found.body, 0)
        return None

    def batches(self, fragment: Buffer) -> Iterator[Text]:
        view, end = memoryview(fragment), 0
        try:
            for pos, header in iterate_headers(view):
                end = pos + header.size_bytes
                yield from self.batch(Batch(header, view[pos:end]))
        except ProtocolError as fault:
            if is_zero(view[end:]):
                yield Text(f"{count_bytes(len(view) - end)} of zeros, as at the end of a preallocated segment", _QUIET)
            else:
                yield Text(f"what follows cannot be read: {fault}", _BAD)
            return
        if end < len(view):
            yield Text(f"{count_bytes(len(view) - end)} of a batch that is cut short", _QUIET)

    def batch(self, batch: Batch) -> Iterator[Text]:
        header = batch.header
        kind = "batch" if header.magic == 2 else "message set"
        codec = f", {codec_name(header.codec)}" if header.codec else ""
        parts = [f"v{header.magic}{codec}, {count_bytes(header.size_bytes)}"]
        if header.record_count >= 0:
            parts.insert(0, f"{header.record_count:,} record{'s' * (header.record_count != 1)}")
        if header.producer_id >= 0:
            parts.append(f"producer {header.producer_id} epoch {header.producer_epoch} sequence {header.base_sequence}")
        if header.leader_epoch >= 0:
            parts.append(f"leader epoch {header.leader_epoch}")
        parts += [
            word
            for word, is_so in (("transactional", header.is_transactional), ("control", header.is_control))
            if is_so
        ]
        if header.timestamp_type == "LogAppendTime":
            parts.append("log append time")
        if header.delete_horizon is not None:
            parts.append(f"delete horizon {_time(header.delete_horizon)}")
        title = Text(f"{kind} ", _TITLE)
        if not batch.crc_valid:
            parts.append("WRONG CRC")
        try:
            offsets = f"{batch.base_offset}" + (
                "" if batch.base_offset == header.last_offset else f"–{header.last_offset}"
            )
        except ProtocolError:
            offsets = f"?–{header.last_offset}"
        yield title + Text(offsets, _TITLE) + Text("  ") + Text(", ".join(parts), _QUIET if batch.crc_valid else _BAD)
        records = batch.records()
        try:
            for record in islice(records, self.records):
                known = None if header.is_control else self.log_record(record)
                if known is None:
                    yield Text("  ") + _record(record, header.is_control)
                else:
                    yield from _indented(known)
            if next(records, None) is not None:
                yield Text("  … (--records-shown)", _QUIET)
        except ProtocolError as fault:
            yield Text(f"  the records cannot be read: {fault}", _BAD)

    def log_record(self, record: Record) -> Iterator[Text] | None:
        """Return the lines of a record of a coordinator's log; None if it is no such record, or does not decode.

        Without a known topic name, a record counts as one if its key and its value decode to the last byte.
        """
        found = None
        for log in LOGS if self.topic is None else (self.topic,) if self.topic in LOGS else ():
            with suppress(ProtocolError):
                read = decode_record(log, record)
                if self.topic is not None or not (TRAILING in read.key or TRAILING in (read.value or ())):
                    found = read
                    break
        if found is None:
            return None
        title = _place(record).append(f"  {found.value_message.name.removesuffix('Value')}", _TITLE)
        if self.topic is None:
            title.append(f" (as in {found.key_message.log})", _QUIET)
        return replace(self, group_type=(found.value or {}).get("protocolType")).log_lines(title, found)

    def log_lines(self, title: Text, found: LogRecord) -> Iterator[Text]:
        key = self.one_line(found.key_message.fields, found.key, found.key_message.name)
        yield title if key is None else title.append("  ") + key
        if key is None:
            yield from _indented(self.struct(found.key_message.fields, found.key, found.key_message.name))
        if found.value is None:
            yield Text("  deleted", _QUIET)
            return
        value = self.one_line(found.value_message.fields, found.value, found.value_message.name)
        if value is not None:
            yield Text("  ") + value
        else:
            yield from _indented(self.struct(found.value_message.fields, found.value, found.value_message.name))


def _place(record: Record) -> Text:
    """Return the offset and the time of a record."""
    line = Text(f"{record.offset}", _NAME)
    if record.timestamp >= 0:
        line.append(f"  {_time(record.timestamp)}", _QUIET)
    return line


def _record(record: Record, is_control: bool) -> Text:
    line = _place(record)
    if is_control:
        return line.append(f"  {control_type(record)}")
    if record.key is not None:
        line.append("  key ", _QUIET).append_text(_scalar("key", record.key))
    line.append("  value ", _QUIET).append_text(_scalar("value", record.value))
    for name, value in record.headers:
        line.append("  ").append_text(_scalar("", name)).append("=").append_text(_scalar("", value))
    return line


def _unknown(body: dict[str, Any]) -> Iterator[Text]:
    for tag, content in body.get(TAGS, {}).items():
        yield Text(f"unknown tagged field {tag}: ", _QUIET) + _scalar("", content)
    if TRAILING in body:
        yield Text(f"{count_bytes(len(body[TRAILING]))} after the message: ", _QUIET) + _scalar("", body[TRAILING])


def _nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _indented(lines: Iterator[Text]) -> Iterator[Text]:
    return (Text("  ") + line for line in lines)


def _item(lines: Iterator[Text]) -> Iterator[Text]:
    for number, line in enumerate(lines):
        yield Text("    " if number else "  - ") + line


def _list(name: str, values: list[Any]) -> Text:
    return Text("[") + Text(", ").join(_scalar(name, value) for value in values) + Text("]")


def _scalar(name: str, value: Any) -> Text:
    if value is None:
        return Text("null", _QUIET)
    if isinstance(value, _Masked):
        return Text(f"(masked, {count_bytes(value.size)}; --show-secrets)", _QUIET)
    if isinstance(value, bool):
        return Text("true" if value else "false")
    if isinstance(value, int):
        return _integer(name, value)
    if isinstance(value, str):
        return Text(_quoted(value), _STRING)
    if isinstance(value, bytes):
        return _bytes(value)
    return Text(urlsafe_b64encode(value.bytes).decode().rstrip("=") if isinstance(value, UUID) else str(value))


def _integer(name: str, value: int) -> Text:
    line = Text(str(value))
    if name.endswith("rrorCode") and value:
        retriable = value in ERRORS and ERRORS[value].retriable
        return Text(f"{value} {error_name(value)}{' (retriable)' if retriable else ''}", _BAD)
    if name == "apiKey":
        return line.append(f" {api_name(value)}", _QUIET)
    if name.endswith(("TimestampMs", "Timestamp")) and value > 0:
        return line.append(f" {_time(value)}", _QUIET)
    return line


def _bytes(value: bytes) -> Text:
    text = _text(value)
    if text is not None:
        return Text(_quoted(text, len(value)), _STRING)
    more = "" if len(value) <= _VALUE_CHARS // 2 else f"… ({count_bytes(len(value))})"
    return Text(f"0x{value[: _VALUE_CHARS // 2].hex()}{more}")


def _text(value: bytes) -> str | None:
    """Return the beginning of a value that is UTF-8 text; None if it is not."""
    head = value[: 4 * _VALUE_CHARS + 4]
    try:
        text = head.decode()
    except UnicodeDecodeError as fault:
        if fault.start + 4 <= len(head) or len(head) == len(value):
            return None
        text = head[: fault.start].decode()  # truncated inside a character
    return text if all(char.isprintable() or char in "\t\n\r" for char in text) else None


def _quoted(text: str, size: int | None = None) -> str:
    """Return a text in quotes, with unprintable characters escaped: a frame may hold terminal controls."""
    cut = text[:_VALUE_CHARS]
    shown = "".join(
        char
        if char.isprintable() and char not in '"\\'
        else _ESCAPES.get(char) or char.encode("unicode_escape").decode()
        for char in cut
    )
    whole = len(cut) == len(text)
    return f'"{shown}"' if whole else f'"{shown}"… ({count_bytes(len(text.encode()) if size is None else size)})'


_ESCAPES = {'"': '\\"', "\\": "\\\\"}


def _time(milliseconds: int) -> str:
    try:
        time = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return f"{milliseconds} ms"
    return time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{milliseconds % 1000:03d}Z"
