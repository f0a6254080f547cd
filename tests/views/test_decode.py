"""The form for readers: only text reaches the terminal, secrets are masked, and errors and APIs have names."""

import gzip
import json
import re
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.protocol.codec import encode_data, encode_request, encode_response
from kproxy.protocol.records import Record, write_batch, write_message_set
from kproxy.protocol.shown import decode
from kproxy.views import decode as decode_view

with gzip.open(Path(__file__).parents[1] / "data" / "vectors-dev.jsonl.gz", "rt", encoding="utf-8") as lines:
    VECTORS = [json.loads(line) for line in lines]
with gzip.open(Path(__file__).parents[1] / "data" / "embedded.jsonl.gz", "rt", encoding="utf-8") as lines:
    EMBEDDED = [json.loads(line) for line in lines]

NOT_TEXT = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
HEADER = {"correlationId": 7, "clientId": "shop"}


def shown(*arguments, input=None, **options):
    result = CliRunner().invoke(cli, ["decode", *arguments], input=input, catch_exceptions=False, **options)
    assert result.exit_code == 0
    return result.output


def shown_request(key, version, body, *arguments):
    frame = encode_request({"requestApiKey": key, "requestApiVersion": version, **HEADER}, body)
    return shown(*arguments, input=frame)


def shown_response(key, version, body, *arguments):
    frame = encode_response(key, version, {"correlationId": 7}, body)
    return shown("--response", f"{key}:{version}", *arguments, input=frame)


def test_every_vector_is_shown_as_text_and_names_all_its_fields(capsys):
    for vector in VECTORS:
        frame = bytes.fromhex(vector["hex"])
        if vector["dir"] == "request":
            found = decode.request(frame)
        elif vector["dir"] == "response":
            found = decode.response(frame, vector["api_key"], vector["version"])
        else:
            found = decode.data(frame, vector["api"])
        decode_view.show(found, show_secrets=False, records=2)
        output = capsys.readouterr().out
        assert not NOT_TEXT.search(output), vector["api"]
        assert all(name in output for name in vector["json"] if not name.endswith("SizeInBytes"))


def test_a_request_at_a_glance():
    assert shown_request(18, 3, {"clientSoftwareName": "apache-kafka-java", "clientSoftwareVersion": "4.1.0"}) == (
        'ApiVersions request v3  correlation id 7  client "shop"  40 bytes\n'
        '  clientSoftwareName: "apache-kafka-java"\n'
        '  clientSoftwareVersion: "4.1.0"\n'
    )


def test_errors_and_apis_by_name():
    keys = [{"apiKey": 3, "minVersion": 0, "maxVersion": 13}]
    output = shown_response(18, 0, {"errorCode": 35, "apiKeys": keys})
    assert "errorCode: 35 UNSUPPORTED_VERSION\n" in output
    assert "    - apiKey 3 Metadata, minVersion 0, maxVersion 13\n" in output
    assert "14 COORDINATOR_LOAD_IN_PROGRESS (retriable)" in shown_response(12, 0, {"errorCode": 14})


def test_records_decoded_and_as_many_as_asked():
    records = [Record(100 + n, 1700000000000 + n, b"k", b"order %d" % n, (("h", None),)) for n in range(20)]
    topic = {"name": "orders", "partitionData": [{"index": 0, "records": write_batch(records, codec=3)}]}
    output = shown_request(0, 9, {"acks": -1, "topicData": [topic]}, "--records-shown", "2")
    assert re.search(r"batch 100–119  20 records, v2, lz4, \d+ bytes\n", output)
    assert '100  2023-11-14T22:13:20.000Z  key "k"  value "order 0"  "h"=null\n' in output
    assert "order 1" in output and "order 2" not in output and "…" in output


def test_faults_in_records_are_named_and_the_other_records_are_shown():
    good = write_batch([Record(0, 0, None, b"fine")], codec=1)
    wrong_crc, cut_inside = bytearray(good), bytearray(good)
    wrong_crc[17] ^= 1
    cut_inside[70:80] = bytes(10)
    output = shown("--records", input=bytes(cut_inside + wrong_crc + good[:30]))
    assert "the records cannot be read: the gzip data does not decompress" in output
    assert "WRONG CRC" in output and '"fine"' in output
    assert "30 bytes of a batch that is cut short" in output
    old = write_message_set([Record(4, 0, None, b"a"), Record(5, 0, None, b"b")], magic=1, codec=2)
    assert "message set 4–5  v1, snappy" in shown("--records", input=old)
    output = shown("--records", input=good + good[:16] + b"\x09" + good[17:])
    assert '"fine"' in output and "what follows cannot be read: records of magic 9" in output


def test_a_log_segment_file_is_read(tmp_path):
    segment = tmp_path / "00000000000000000000.log"
    segment.write_bytes(b"".join(write_batch([Record(n, 0, None, b"%d" % n)]) for n in range(300)))
    assert shown("--records", "--file", str(segment)).count("batch ") == 300
    segment.write_bytes(b"")
    assert shown("--records", "--file", str(segment)) == ""


def test_control_records_are_shown_by_their_type():
    marker = write_batch([Record(3, 0, b"\0\0\0\1", b"\0\0\0\0\0\5")], is_control=True, producer_id=9, producer_epoch=1)
    assert re.search(r"batch 3  .*producer 9 epoch 1 .*control\n  3  .*  COMMIT\n", shown("--records", input=marker))


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        (36, 2, {"authBytes": b"hunter2"}),
        (51, 0, {"upsertions": [{"name": "alice", "salt": b"hunter2", "saltedPassword": b"hunter2"}]}),
        (39, 2, {"hmac": b"hunter2"}),
        (44, 1, {"resources": [{"configs": [{"name": "ssl.key.password", "value": "hunter2"}]}]}),
        (33, 0, {"resources": [{"configs": [{"name": "sasl.jaas.config", "value": "hunter2"}]}]}),
        (58, 0, {"requestData": b"hunter2", "clientHostAddress": b"\x7f\0\0\1"}),
    ],
)
def test_secrets_are_masked_until_asked_for(key, version, body):
    masked, plain = shown_request(key, version, body), shown_request(key, version, body, "--show-secrets")
    assert "hunter2" not in masked and "masked, 7 bytes" in masked
    assert "hunter2" in plain and "masked" not in plain


def test_the_embedded_messages_of_connect_workers_and_streams_members_are_decoded():
    """As the official classes wrote it; in versions that do not say of what type the group is, too."""
    given = {(each["name"], each["version"]): bytes.fromhex(each["hex"]) for each in EMBEDDED}
    protocols = [{"name": "sessioned", "metadata": given["ConnectWorkerState", 2]}]
    output = shown_request(11, 5, {"protocolType": "connect", "protocols": protocols})
    assert "metadata: ConnectWorkerState v2\n" in output and 'url: "http://two:8083/"' in output
    assert "allocation: ConnectAssignment v2\n" in output and 'connector "orders-sink", tasks [-1, 0, 1]' in output
    output = shown_response(14, 3, {"assignment": given["ConnectAssignment", 1]})
    assert "assignment: ConnectAssignment v1\n" in output and 'leaderUrl: "http://one:8083/"' in output
    for field, name in (("topics", "SubscriptionInfo"), ("assignedPartitions", "AssignmentInfo")):
        kind = "Subscription" if field == "topics" else "Assignment"
        embedded = encode_data(f"ConsumerProtocol{kind}", 1, {field: [], "userData": given[f"Streams{name}", 11]})
        if kind == "Subscription":
            output = shown_request(
                11, 5, {"protocolType": "consumer", "protocols": [{"name": "stream", "metadata": embedded}]}
            )
        else:
            output = shown_response(14, 3, {"assignment": embedded})
        assert f"userData: Streams{name} v11\n" in output
        assert "processId: " in output or ("standbyPartitionsByHost: 3" in output and "topicGroupId 1001" in output)


def test_the_consumer_protocol_inside_group_messages():
    subscription = encode_data("ConsumerProtocolSubscription", 1, {"topics": ["orders", "payments"]})
    protocols = [{"name": "range", "metadata": subscription}]
    output = shown_request(11, 5, {"groupId": "g", "protocolType": "consumer", "protocols": protocols})
    assert "metadata: ConsumerProtocolSubscription v1\n" in output and 'topics: ["orders", "payments"]' in output
    output = shown_request(11, 5, {"groupId": "g", "protocolType": "connect", "protocols": protocols})
    assert "ConsumerProtocolSubscription" not in output
    broken = [{"name": "range", "metadata": subscription[:-1]}]
    assert "metadata: 0x0001" in shown_request(11, 5, {"protocolType": "consumer", "protocols": broken})


def test_text_of_a_peer_cannot_move_the_cursor():
    evil = '\x1b[2J\x9b31m\r\n\u202e"\\'
    output = shown_request(18, 3, {"clientSoftwareName": evil, "clientSoftwareVersion": "x" * 5000})
    assert r'"\x1b[2J\x9b31m\r\n\u202e\"\\"' in output
    assert "… (5,000 bytes)" in output and len(output) < 400
    records = write_batch([Record(0, 0, b"\x1b]0;title\x07", b"\xff\xfe", ((evil, b"a\tb"),))])
    output = shown("--records", input=records)
    assert not NOT_TEXT.search(output)
    assert "0x1b5d303b7469746c6507" in output and "0xfffe" in output and r'"a\tb"' in output


def test_long_text_is_cut_between_characters():
    output = shown("--records", input=write_batch([Record(0, 0, None, "日".encode() * 1000)]))
    assert "日" * 160 + '"… (3,000 bytes)' in output


def test_unknown_tags_and_trailing_bytes_are_shown():
    output = shown_request(18, 3, {"_tags": {9: b"\xff"}, "_trailing": b"\1\2"})
    assert "unknown tagged field 9: 0xff" in output and "2 bytes after the message: 0x0102" in output


def test_colours_only_where_they_are_asked_for(monkeypatch):
    assert "\x1b[" not in shown("00120000000000070003666f6f")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in shown("00120000000000070003666f6f")


def test_records_of_coordinators_logs_are_decoded():
    """By their topic's name; where that is not known, if they read as such to the last byte."""
    subscription = encode_data("ConsumerProtocolSubscription", 1, {"topics": ["orders"]})
    member = {"memberId": "m", "clientId": "c", "clientHost": "/10.0.0.1", "subscription": subscription}
    key = encode_data("GroupMetadataKey", 0, {"group": "billing"})
    value = encode_data("GroupMetadataValue", 3, {"protocolType": "consumer", "generation": 7, "members": [member]})
    gone = Record(1, 0, encode_data("OffsetCommitKey", 0, {"group": "g", "topic": "t", "partition": 3}), None, [])
    batch = write_batch([Record(0, 0, key, value, []), gone, Record(2, 0, b"\0\2", b"x", [])])

    def fetched(version, **topic):
        partitions = [{"partitionIndex": 0, "records": batch}]
        return shown_response(1, version, {"responses": [{**topic, "partitions": partitions}]})

    named = fetched(12, topic="__consumer_offsets")
    assert 'GroupMetadata  group "billing"' in named
    assert "generation: 7" in named and "ConsumerProtocolSubscription v1" in named and 'topics: ["orders"]' in named
    assert 'OffsetCommit  group "g", topic "t", partition 3' in named and "deleted" in named
    assert "key 0x0002  value" in named
    assert 'GroupMetadata (as in __consumer_offsets)  group "billing"' in fetched(13, topicId=UUID(int=5))
    assert "GroupMetadata" not in fetched(12, topic="orders")
