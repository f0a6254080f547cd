"""Records of the logs that coordinators keep: __consumer_offsets, __transaction_state, __share_group_state.

Duty: which message a record's key is, by the int16 that opens it, and the value that belongs to it. Layouts are the
schema's (`Message.log`, `role`, `record_type`); key types 0 and 1 are both of offset commits, and a value of either may
be of any version of OffsetCommitValue. Refuses to know batches, and what a record means.
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
    """A record, decoded."""

    key_message: Message
    key: Body
    value_message: Message
    value: Body | None  # None: a tombstone, which deletes what the key names


def decode_record(log: str, record: Record) -> LogRecord:
    """Decode a record of one of `LOGS`; raises Malformed, or Unsupported for a type or version that is not known."""
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
        value_message = schema().data["OffsetCommitValue"]  # which has all versions that were written with either key
    _, value = codec.decode_data(value_message.name, record.value)
    return LogRecord(key_message, key, value_message, value)


@cache
def _messages(log: str) -> dict[int, tuple[Message, Message]]:
    """Key and value by record type."""
    found: dict[int, dict[str, Message]] = {}
    for message in schema().data.values():
        if message.log == log and message.role is not None and message.record_type is not None:
            found.setdefault(message.record_type, {})[message.role] = message
    return {kind: (roles["key"], roles["value"]) for kind, roles in found.items() if len(roles) == 2}
