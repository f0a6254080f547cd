"""Topic-partitions and batches as rows, and a consumer's lag."""

from uuid import UUID

from kproxy.protocol import codec
from kproxy.tables.partitions import MAX_NAME, BatchColumns, PartitionColumns, topic_id
from kproxy.tables.schema import BATCHES, PARTITIONS
from kproxy.wire.bodies import CHECKED as DETAIL
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.offline.captured import CapturedSession

INFO = ConnectionInfo("default", "a.pcap", "10.0.0.1", 40000, "10.0.0.2", 9092, None, 1)
START = 1_700_000_000_000_000_000
TOPIC = UUID("0123456789abcdef0123456789abcdef")


def batch(base, count, timestamp):
    """The header of a record batch v2, with a payload of 20 bytes."""
    import struct

    rest = struct.pack(">hiqqqhii", 0, count - 1, timestamp, timestamp, -1, -1, -1, count) + bytes(20)
    return struct.pack(">qiibI", base, len(rest) + 9, 0, 2, 0) + rest


def exchanges_of(*talk):
    """The exchanges of (request, response) pairs of Fetch v13, one millisecond apart."""
    session = CapturedSession(Interest(details=True, detail=DETAIL))
    now = START
    for number, (asked, answered) in enumerate(talk):
        header = {"requestApiKey": 1, "requestApiVersion": 13, "correlationId": number, "clientId": "me"}
        for side, frame in (
            (CLIENT, codec.encode_request(header, asked)),
            (BROKER, codec.encode_response(1, 13, {"correlationId": number}, answered)),
        ):
            session.receive(side, memoryview(len(frame).to_bytes(4) + frame), now)
            now += 1_000_000
    return [event for event in session.events if isinstance(event, Exchange)]


def asks(*partitions):
    return {"topics": [{"topicId": TOPIC, "partitions": [{"partition": p, "fetchOffset": at} for p, at in partitions]}]}


def answers(*partitions):
    return {
        "responses": [
            {
                "topicId": TOPIC,
                "partitions": [
                    {"partitionIndex": p, "highWatermark": end, "records": records} for p, end, records in partitions
                ],
            }
        ]
    }


def rows(columns):
    return [{name: value for name, value in row.items() if value is not None} for row in columns.batch().to_pylist()]


def test_the_lag_is_what_a_consumer_has_not_fetched_yet():
    """The second request omits unchanged partitions, as a fetch session does (KIP-227)."""
    stamp = START // 1_000_000 - 50
    exchanges = exchanges_of(
        (asks((0, 100), (1, 7)), answers((0, 130, batch(100, 10, stamp)), (1, 7, None))),
        (asks((0, 110)), answers((0, 130, b""), (1, 9, None))),
    )
    columns, positions = PartitionColumns(), {}
    for exchange in exchanges:
        columns.append(INFO, exchange, positions)
    assert columns.rows == 7
    batch_ = columns.batch()
    assert batch_.schema.equals(PARTITIONS.schema)
    got = batch_.to_pylist()
    answered = [row for row in got if row["direction"] == "response"]
    assert [(row["partition"], row["lag_records"]) for row in answered] == [(0, 20), (1, 0), (0, 20), (1, 2)]
    assert [row["lag_ns"] for row in answered] == [51_000_000, None, None, None]
    assert {row["topic_id"] for row in got} == {topic_id(TOPIC)} == {"ASNFZ4mrze8BI0VniavN7w"}
    first = answered[0]
    assert (first["bytes"], first["batches"], first["records"], first["codec"], first["magic"]) == (
        81,
        1,
        10,
        "none",
        2,
    )
    asked = got[0]
    assert (asked["offset"], asked["bytes"], asked["records"], asked["error_code"]) == (100, None, None, None)
    assert [row["time"].microsecond for row in got] == [0, 0, 1000, 1000, 2000, 3000, 3000]


def test_every_batch_is_a_row():
    (exchange,) = exchanges_of(
        (asks((0, 5)), answers((0, 30, batch(5, 3, 77) + batch(8, 1, 78) + batch(9, 9, 79)[:61])))
    )
    columns = BatchColumns()
    columns.append(INFO, exchange)
    taken = columns.batch()
    assert taken.schema.equals(BATCHES.schema)
    got = taken.to_pylist()
    assert [(row["base_offset"], row["last_offset"], row["records"], row["partial"]) for row in got] == [
        (5, 7, 3, False),
        (8, 8, 1, False),
        (9, 17, 9, True),
    ]
    assert [(row["producer_id"], row["transactional"]) for row in got] == [(None, False)] * 3
    assert [row["crc_valid"] for row in got] == [False, False, None]
    assert [row["max_timestamp"] for row in got] == [77, 78, 79]


def test_a_long_name_does_not_multiply_into_gigabytes_of_rows():
    """A body of 200 KB gives 5000 rows, each of which has a name of 32 KB."""
    session = CapturedSession(Interest(details=True, detail=DETAIL))
    partitions = [{"partitionIndex": number, "committedOffset": 1, "committedMetadata": ""} for number in range(5000)]
    asked = {"groupId": "g" * 32_000, "topics": [{"name": "t" * 32_000, "partitions": partitions}]}
    header = {"requestApiKey": 8, "requestApiVersion": 7, "correlationId": 1, "clientId": "me"}
    frame = codec.encode_request(header, asked)
    session.receive(CLIENT, memoryview(len(frame).to_bytes(4) + frame), START)
    answer = codec.encode_response(8, 7, {"correlationId": 1}, {"throttleTimeMs": 0, "topics": []})
    session.receive(BROKER, memoryview(len(answer).to_bytes(4) + answer), START + 1)
    (exchange,) = (event for event in session.events if isinstance(event, Exchange))
    columns = PartitionColumns()
    columns.append(INFO, exchange, {})
    rows_of_batch = columns.batch()
    assert rows_of_batch.num_rows == 5000 and rows_of_batch.nbytes < 10_000_000
    assert (
        rows_of_batch["topic"][0].as_py() == "t" * MAX_NAME and rows_of_batch["group_id"][0].as_py() == "g" * MAX_NAME
    )


def test_apis_of_other_tables_give_no_rows():
    columns = PartitionColumns()
    exchange = exchanges_of((asks((0, 5)), answers((0, 5, None))))[0]
    exchange.plan = Interest(detail=DETAIL).plan(3 << 16 | 12)
    columns.append(INFO, exchange, {})
    assert columns.rows == 0 and columns.batch().num_rows == 0
