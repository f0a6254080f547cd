"""Records as rows: all records of the chosen topics, and no more of each than requested."""

import gzip
import json
import random
from hashlib import blake2b
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError, ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.records import Record, read_batches, write_batch
from kproxy.tables import records
from kproxy.tables.records import Chosen, RecordColumns, chosen
from kproxy.tables.schema import RECORDS
from kproxy.wire import bodies
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.offline.captured import CapturedSession
from tests import captures

INFO = ConnectionInfo("default", "a.pcap", "10.0.0.1", 40000, "10.0.0.2", 9092, None, 1)
FRAGMENTS = Path(__file__).parents[1] / "data" / "records-dev.jsonl.gz"
LOGS = [bytes.fromhex(json.loads(line)["hex"]) for line in gzip.decompress(FRAGMENTS.read_bytes()).splitlines()]
ALL = Chosen(("*",), None)


class RecordRows:
    """The record rows of the exchanges of one session."""

    def __init__(self, which: Chosen = ALL) -> None:
        self.columns = RecordColumns(which)
        interest = Interest(details=True, detail=bodies.RECORDS, room=self.columns.room)
        self.session = CapturedSession(interest)
        self.batches: list[pa.RecordBatch] = []
        self._number = 0

    def exchange(self, key: int, version: int, asked: dict, answered: dict, most: int = 1 << 20) -> None:
        """Feed an exchange in pieces of at most `most` bytes."""
        dice = random.Random(most)
        header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": self._number, "clientId": "me"}
        request = codec.encode_request(header, asked)
        answer = codec.encode_response(key, version, {"correlationId": self._number}, answered)
        for side, frame in ((CLIENT, request), (BROKER, answer)):
            data = len(frame).to_bytes(4) + frame
            while data:
                size = dice.randint(1, most)
                self.session.receive(side, memoryview(bytearray(data[:size])), 1_700_000_000_000_000_000)
                data = data[size:]
        self._number += 1
        for event in self.session.events:
            assert isinstance(event, Exchange)
            self.columns.append(INFO, event, self.hand_on)
        self.session.events.clear()

    def fetched(self, log: bytes, most: int = 1 << 20, topic: str = "orders") -> None:
        partition = {"partitionIndex": 3, "records": log}
        self.exchange(1, 12, {}, {"responses": [{"topic": topic, "partitions": [partition]}]}, most)

    def hand_on(self) -> None:
        self.batches.append(self.columns.batch())

    def rows(self) -> list[dict]:
        self.hand_on()
        table = pa.Table.from_batches(self.batches, RECORDS.schema)
        table.validate(full=True)
        return table.to_pylist()


def readable(log: bytes) -> tuple[list[tuple[int, Record]], int]:
    """Each readable record with the base offset of its batch; and the number of unreadable batches."""
    found, unread = [], 0
    for batch in read_batches(log)[0]:
        try:
            for record in batch.records(records.DECOMPRESSED_BYTES):
                found.append((batch.header.base_offset, record))
        except ProtocolError:
            unread += 1
    return found, unread


def test_a_header_name_is_not_cut_inside_a_character():
    record_rows = RecordRows(Chosen(("*",), 5))
    record_rows.fetched(write_batch([Record(0, 1, None, b"v", (("prénom", b"x"), ("prieé", None)))]))
    (row,) = record_rows.rows()
    assert [each["key"] for each in row["headers"]] == ["prén", "prie"]


def test_every_kind_of_records_becomes_rows():
    """The official library's records: each magic and codec, truncated, control and damaged batches; split anywhere."""
    record_rows, expected, unread = RecordRows(), [], 0
    for number, log in enumerate(LOGS):
        record_rows.fetched(log, (1 << 20, 700, 40)[number % 3])
        records_, failed = readable(log)
        expected += records_
        unread += failed
    # the same in a body too large to be held
    large = [log for log in LOGS if len(log) < 3000] * 2
    record_rows.fetched(b"".join(log for log in large if not read_batches(log)[1]), 5000)
    for log in large:
        if not read_batches(log)[1]:
            records_, failed = readable(log)
            expected += records_
            unread += failed
    got = record_rows.rows()
    assert len(got) == len(expected) > 1000
    for row, (base_offset, record) in zip(got, expected, strict=True):
        headers = [(each["key"], each["value"]) for each in row["headers"]]
        assert (row["offset"], row["key"], row["value"]) == (record.offset, record.key, record.value)
        assert (row["timestamp"] if row["timestamp"] is not None else -1, tuple(headers)) == (
            record.timestamp,
            record.headers,
        )
        assert (row["topic"], row["partition"], row["base_offset"]) == ("orders", 3, base_offset)
        assert row["key_bytes"] == (None if record.key is None else len(record.key))
        assert row["value_bytes"] == (None if record.value is None else len(record.value))
    assert {kind: count for kind, count, _ in record_rows.columns.missing()}.get("records_unread", 0) == unread
    assert record_rows.columns.room.free_bytes == records.ROOM_BYTES  # no copy outlives its exchange


def one(topic: dict, which: Chosen, version: int = 13) -> list[dict]:
    record_rows = RecordRows(which)
    headers = (("trace-of-this", b"0123456789"), ("none", None))
    log = write_batch([Record(7, 5, b"key-of-it", b"value-of-it", headers), Record(8, 6, None, None)])
    data = {**topic, "partitionData": [{"index": 0, "records": log}]}
    record_rows.exchange(0, version, {"acks": 1, "topicData": [data]}, {})
    return record_rows.rows()


def test_the_chosen_parts_of_a_record_are_shown():
    topic = {"topicId": UUID(int=77)}
    cut, tombstone = one(topic, Chosen(("*",), 3))
    assert (cut["key"], cut["value"], cut["key_bytes"], cut["value_bytes"]) == (b"key", b"val", 9, 11)
    assert cut["headers"] == [{"key": "tra", "value": b"012"}, {"key": "non", "value": None}]
    assert cut["bytes"] == 9 + 11 + 13 + 10 + 4
    assert (tombstone["key"], tombstone["value"], tombstone["value_bytes"]) == (None, None, None)
    hidden, _ = one(topic, Chosen(("*",), None, hashed=True))
    assert hidden["value"] == blake2b(b"value-of-it", digest_size=16).digest()
    assert hidden["headers"][0] == {"key": "trace-of-this", "value": blake2b(b"0123456789", digest_size=16).digest()}
    whole, _ = one(topic, ALL)
    assert (whole["key"], whole["value"]) == (b"key-of-it", b"value-of-it")


@pytest.mark.parametrize("topic, version", [({"topicId": UUID(int=1)}, 13), ({"name": "__cluster_metadata"}, 9)])
def test_values_with_credentials_are_never_written(topic, version):
    """KRaft's own topic contains SCRAM salts and keys."""
    for which in (ALL, Chosen(("*",))):
        row, _ = one(topic, which, version)
        assert row["key"] == b"key-of-it"
        assert row["value"] == blake2b(b"value-of-it", digest_size=16).digest()
        assert b"0123456789" not in str(row["headers"]).encode()


def test_topics_are_chosen_by_name_those_known_by_id_only_when_written():
    which = chosen("orders, billing.*,AAAAAAAAAAAAAAAAAAAATQ", "8")
    assert which == Chosen(("orders", "billing.*", "AAAAAAAAAAAAAAAAAAAATQ"), 8, False)
    assert [len(one({"name": name}, which, 9)) for name in ("orders", "order", "billing.eu", "Orders")] == [2, 0, 2, 0]
    unnamed = [*one({"topicId": UUID(int=77)}, which), *one({"topicId": UUID(int=78)}, which)]
    assert len(unnamed) == 4
    record_rows = which.of(pa.Table.from_pylist(unnamed, RECORDS.schema))
    assert {row["topic_id"] for row in record_rows.to_pylist()} == {"AAAAAAAAAAAAAAAAAAAATQ"}
    named = pa.Table.from_pylist([row | {"topic": "billing.us"} for row in unnamed], RECORDS.schema)
    assert which.of(named).num_rows == 4
    assert chosen("a", "hash").hashed and chosen("a", "all").shown_bytes is None
    for topics, values in ((" ,", "64"), ("a", "-1"), ("a", "some")):
        with pytest.raises(KproxyError):
            chosen(topics, values)


def test_records_beyond_the_limits_are_counted_and_omitted(monkeypatch):
    monkeypatch.setattr(records, "BATCH_BYTES", 3000)
    monkeypatch.setattr(records, "DECOMPRESSED_BYTES", 100_000)
    monkeypatch.setattr(records, "BODY_BYTES", 5000)
    fine = write_batch([Record(0, 1, None, b"v" * 100)])
    bomb = write_batch([Record(1, 1, None, bytes(90_000)), Record(2, 1, None, bytes(90_000))], codec=4)
    large = write_batch([Record(3, 1, None, b"v" * 3000)])
    damaged = bytearray(write_batch([Record(4, 1, None, b"v"), Record(5, 1, None, b"v")]))
    damaged[61] ^= 0x40  # the first record's size
    assert len(bomb) < 3000
    record_rows = RecordRows()
    for log in (fine + bomb + large + bytes(damaged) + fine, fine * 60):
        record_rows.fetched(log)
    got = record_rows.rows()
    kinds = {kind: (count, size) for kind, count, size in record_rows.columns.missing()}
    # a row counts as 120 bytes plus what it shows
    assert kinds["records_left_out"] == (1 + 60 - 23, len(large) + (60 - 23) * len(fine))
    assert kinds["records_unread"] == (2, len(bomb) + len(damaged))
    assert [row["offset"] for row in got].count(0) == 2 + 23
    assert record_rows.columns.room.free_bytes == records.ROOM_BYTES


def test_many_records_are_passed_on_in_batches(monkeypatch):
    monkeypatch.setattr(records, "ROWS", 10)
    log = write_batch([Record(offset, 1, None, b"%d" % offset) for offset in range(95)])
    record_rows = RecordRows()
    record_rows.fetched(log)
    assert len(record_rows.batches) == 9
    assert [(row["offset"], row["value"], row["topic"]) for row in record_rows.rows()] == [
        (offset, b"%d" % offset, "orders") for offset in range(95)
    ]


def test_fetched_records_equal_produced_ones(tmp_path):
    """Real clients: a record fetched at the offset that a captured Produce was given equals the produced one."""
    for name in ("k0822_python147", "k111_kcat_sarama", "k41_librdkafka"):
        convert([captures.capture(name)], tmp_path / name, Settings(records=ALL))
        read = {table: pq.read_table(tmp_path / name / table) for table in ("records", "partitions", "batches")}
        given = {
            (row["connection"], row["number"], row["topic"] or row["topic_id"], row["partition"]): row["offset"]
            for row in read["partitions"].filter(pa.compute.field("api") == "Produce").to_pylist()
            if row["direction"] == "response" and row["error_code"] == 0
        }
        sent, got = {}, 0
        order: dict[tuple, int] = {}  # old clients leave offsets to the broker, which counts
        counted: dict[tuple, int] = {}
        rows = read["records"].to_pylist()
        for row in rows:
            key = tuple(row[column] for column in ("connection", "number", "direction", "topic", "partition"))
            counted[(*key, row["base_offset"])] = counted.get((*key, row["base_offset"]), 0) + 1
            if row["api"] == "Produce":
                place = row["connection"], row["number"], row["topic"] or row["topic_id"], row["partition"]
                order[place] = order.get(place, -1) + 1
                if place in given:
                    sent[row["topic"], row["partition"], given[place] + order[place]] = row
        for row in rows:
            if row["api"] == "Fetch" and (row["topic"], row["partition"], row["offset"]) in sent:
                before = sent[row["topic"], row["partition"], row["offset"]]
                assert (row["key"], row["value"], row["headers"]) == (before["key"], before["value"], before["headers"])
                got += 1
        assert got > 100
        for batch in read["batches"].to_pylist():  # offsets in message sets may be wrong, in v2 batches not
            key = tuple(batch[column] for column in ("connection", "number", "direction", "topic", "partition"))
            if batch["magic"] == 2 and not batch["partial"]:
                assert batch["crc_valid"]
                assert counted[(*key, batch["base_offset"])] % batch["records"] == 0
