"""Records of the coordinators' logs as brokers wrote them, and other records."""

import pytest

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.log_records import LOGS, _messages, decode_record
from kproxy.protocol.records import Record
from kproxy.protocol.schema import schema


def record(key, value):
    return Record(0, 0, key, value, [])


def test_every_record_of_every_log_in_every_version():
    seen = 0
    for log in LOGS:
        for key_message, value_message in _messages(log).values():
            key = codec.encode_data(key_message.name, 0, {})
            for version in value_message.versions:
                value = codec.encode_data(value_message.name, version, {})
                found = decode_record(log, record(key, value))
                assert found.key_message is key_message and found.value is not None
                seen += 1
            assert decode_record(log, record(key, None)).value is None
    assert seen > 30
    assert len(_messages("__consumer_offsets")) >= 20


def test_a_commit_of_before_its_key_had_a_type_of_its_own():
    key = codec.encode_data("LegacyOffsetCommitKey", 0, {"group": "g", "topic": "t", "partition": 3})
    value = codec.encode_data("OffsetCommitValue", 1, {"offset": 7})
    found = decode_record("__consumer_offsets", record(key, value))
    assert (found.key["partition"], found.value["offset"]) == (3, 7)
    assert found.value_message is schema().data["OffsetCommitValue"]


@pytest.mark.parametrize("key", [None, b"", b"\0", b"\x7f\xff", b"\0\1", b"\0\2\0"])
def test_other_records_are_refused(key):
    with pytest.raises(ProtocolError):
        decode_record("__consumer_offsets", record(key, b"\0\1\2"))
