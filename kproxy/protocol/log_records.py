"""Records of the logs of coordinators: __consumer_offsets, __transaction_state, __share_group_state.

Duty: find the message of a record's key by its leading int16, and the message of its value. Layouts are the schema's
(`Message.log`, `role`, `record_type`); key types 0 and 1 are both offset commits, and a value of either may have any
version of OffsetCommitValue. Refuses to know batches, and the meaning of a record.
"""

from functools import cache
from typing import NamedTuple

from kproxy.errors import Malformed, Unsupported
from kproxy.protocol import codec
from kproxy.protocol.codec import Body
from kproxy.protocol.records import Record
from kproxy.protocol.schema import Message, schema

LOGS = ("__consumer_offsets", "__transaction_state", "__share_group_state")


class LogRecord(NamedTuple):
    """A decoded record."""

    key_message: Message
    key: Body
    value_message: Message
    value: Body | None  # None: a tombstone, which deletes the key's entry


def decode_record(log: str, record: Record) -> LogRecord:
    """Decode a record of one of `LOGS`. Raises Malformed, or Unsupported for an unknown type or version."""
    if record.key is None or len(record.key) < 2:
        raise Malformed(f"{log}: a record without a key, or with one too short for its type")
    kind = int.from_bytes(record.key[:2], "big", signed=True)
    messages = _messages(log).get(kind)
    if messages is None:
        raise Unsupported(f"{log}: record type {kind}")
    key_message, value_message = messages
    _, key = codec.decode_data(key_message.name, record.key)
    if record.value is None:
        return LogRecord(key_message, key, value_message, None)
    if value_message.name == "LegacyOffsetCommitValue":
        value_message = schema().data["OffsetCommitValue"]  # it has all versions written with either key type
    _, value = codec.decode_data(value_message.name, record.value)
    return LogRecord(key_message, key, value_message, value)


@cache
def _messages(log: str) -> dict[int, tuple[Message, Message]]:
    """Return record type -> (key message, value message)."""
    found: dict[int, dict[str, Message]] = {}
    for message in schema().data.values():
        if message.log == log and message.role is not None and message.record_type is not None:
            found.setdefault(message.record_type, {})[message.role] = message
    return {kind: (roles["key"], roles["value"]) for kind, roles in found.items() if len(roles) == 2}
