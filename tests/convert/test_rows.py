"""Rows that are converted by column equal those converted exchange by exchange, whatever producers and brokers
write."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from kproxy.capture.connections import flows as capture_flows
from kproxy.capture.dissection.packets import ACK, SYN
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from kproxy.convert.job import Settings, captures_of
from kproxy.convert.reading import exchanges
from kproxy.convert.rows import DURATIONS, Rows
from kproxy.protocol.records import Record, write_batch
from kproxy.tables.columns import ExchangeColumns
from kproxy.tables.partitions import MAX_TIMESTAMP_MS, BatchColumns, PartitionColumns
from kproxy.tables.records import chosen
from kproxy.wire.bodies import BATCHES
from kproxy.wire.events import ANSWERED, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.session import Session
from tests.capture import packet
from tests.captures import capture, expected, one_by_one
from tests.wire.playbook import request, response

NOW_NS = 1_763_769_600_000_000_000
NOW_MS = NOW_NS // 10**6


def fetches(path, batches):
    """A capture of a connection that fetches two partitions, each batch in turn."""
    talk = []
    for number, batch in enumerate(batches):
        topic = {"topic": "t", "partitions": [{"partition": index, "fetchOffset": 5} for index in (0, 1)]}
        parts = [
            {"partitionIndex": index, "highWatermark": 9, "records": records}
            for index, records in ((0, b""), (1, batch))
        ]
        asked, answered = {"topics": [topic]}, {"responses": [{"topic": "t", "partitions": parts}]}
        talk.append((request(1, 12, number, asked), response(1, 12, number, answered)))
    return save(path, talk)


def save(path, talk):
    """Write a capture of a connection from (request, response) pairs, one millisecond apart."""
    packets = []
    sent = [0, 0]

    def send(side, at_ns, payload=b"", flags=ACK):
        source, target = (packet.CLIENT, packet.BROKER) if side == 0 else (packet.BROKER, packet.CLIENT)
        ends = {"source": source, "target": target}
        segment = packet.tcp(payload, **ends, seq=sent[side], ack=sent[1 - side], flags=flags)
        packets.append((at_ns, packet.ethernet(packet.ipv4(segment, **ends, identity=len(packets)))))
        sent[side] += len(payload) + bool(flags & SYN)

    for side, flags in ((0, SYN), (1, SYN | ACK), (0, ACK)):
        send(side, NOW_NS - 10**6, flags=flags)
    for number, frames in enumerate(talk):
        for side, frame in enumerate(frames):
            send(side, NOW_NS + (2 * number + side) * 10**6, frame)
    path.write_bytes(packet.pcap(packets))
    return path


def read(rows, path):
    """Read a whole capture in windows: the first packets of a connection are never converted by column."""
    (job,) = captures_of([path], Settings())
    flows = rows.flows(job, Quality())
    for window in Capture([path], Quality()).windows():
        packets = list(window.records)
        for some in (packets[:50], packets[50:]):
            flows.window(window._replace(records=some))
    flows.finish()
    rows.flush(1)


class Both(Rows):
    """Compares exchanges converted by column with the same exchanges one by one."""

    def __init__(self, add):
        super().__init__(add)
        self.by_column = 0

    def many(self, flows, bulk):
        infos = [flow.info for flow in flows]
        before = [dict(self._tallies[flow].positions) for flow in flows]
        columns, rows = [(PartitionColumns(), BatchColumns()) for _ in range(2)]
        columns[0].extend(infos, bulk, [dict(positions) for positions in before])
        columns[1].extend(infos, bulk)
        for connection, exchange in one_by_one(bulk):
            rows[0].append(infos[connection], exchange, before[connection])
            rows[1].append(infos[connection], exchange)
        exchanges = ExchangeColumns(), ExchangeColumns()
        exchanges[0].extend(infos, bulk, np.zeros(len(bulk.connection), np.int64))
        for connection, exchange in one_by_one(bulk):
            exchanges[1].append(infos[connection], exchange, 0)
        for by_column, by_row in zip((*columns, exchanges[0]), (*rows, exchanges[1]), strict=True):
            assert by_column.batch().to_pylist() == by_row.batch().to_pylist()
        self.by_column += len(bulk.connection)
        super().many(flows, bulk)


@pytest.mark.parametrize("turns", [3, 400])  # by row; by column
def test_values_beyond_int64_are_null(tmp_path, turns):
    """Producers write µs and ns into CreateTime, and brokers accept it: such records have no age."""
    kinds = (
        (write_batch([Record(5, NOW_MS - 50, None, b"v")]), 50, 3),
        (write_batch([Record(5, NOW_NS // 1000, None, b"v")]), None, 3),
        (write_batch([Record(5, NOW_NS, None, b"v")]), None, 3),
        (write_batch([Record(5, MAX_TIMESTAMP_MS, None, b"v")]), NOW_MS - MAX_TIMESTAMP_MS, 3),
        (write_batch([Record(5, MAX_TIMESTAMP_MS + 1, None, b"v")]), None, 3),
        (write_batch([Record((1 << 63) - 1, NOW_MS, None, b"v")]), 0, None),
    )
    path = fetches(tmp_path / "far.pcap", [kinds[turn % len(kinds)][0] for turn in range(turns)])
    batches = {"partitions": [], "batches": []}
    rows = Both(lambda table, batch: batches[table.name].append(batch) if table.name in batches else None)
    read(rows, path)
    assert (rows.by_column > turns / 2) == (turns > 3)
    answered = [
        row
        for row in pa.Table.from_batches(batches["partitions"]).to_pylist()
        if row["direction"] == "response" and row["partition"] == 1
    ]
    assert len(answered) == turns
    for row in answered:
        _, age_ms, lag = kinds[row["number"] % len(kinds)]
        late_ms = 2 * row["number"] + 1
        assert row["lag_ns"] == (None if age_ms is None else (age_ms + late_ms) * 10**6)
        assert row["lag_records"] == lag
    ends = {row["last_offset"] for row in pa.Table.from_batches(batches["batches"]).to_pylist()}
    assert ends == {5, (1 << 63) - 1} if turns > 3 else {5}


def test_a_batch_whose_last_offset_exceeds_int64_has_none(tmp_path):
    far = bytearray(write_batch([Record(5, NOW_MS, None, b"v"), Record(6, NOW_MS, None, b"v")]))
    far[0:8] = ((1 << 63) - 1).to_bytes(8)  # the checksum does not cover the base offset
    taken = []
    rows = Rows(lambda table, batch: taken.append(batch) if table.name == "batches" else None)
    read(rows, fetches(tmp_path / "end.pcap", [bytes(far)]))
    (row,) = pa.Table.from_batches(taken).to_pylist()
    assert (row["base_offset"], row["last_offset"]) == ((1 << 63) - 1, None)


def test_the_broker_that_fetches_is_recorded(tmp_path):
    """From Fetch v15 on in a tagged field; clients have no replica id, whichever number encodes that."""
    kinds = (
        (1, 12, {"replicaId": 3}, 3),
        (1, 12, {"replicaId": -1}, None),
        (1, 17, {"replicaState": {"replicaId": 2, "replicaEpoch": 7}}, 2),
        (1, 17, {}, None),
        (2, 7, {"replicaId": 5}, 5),
        (2, 7, {"replicaId": -1}, None),
    )
    turns = 600
    talk = []
    for number in range(turns):
        key, version, body, _ = kinds[number // 100]
        talk.append((request(key, version, number, body), response(key, version, number, {})))
    taken = []
    rows = Both(lambda table, batch: taken.append(batch) if table.name == "exchanges" else None)
    read(rows, save(tmp_path / "replicas.pcap", talk))
    assert rows.by_column > 150  # all but requests with tagged fields and ListOffsets
    exchanges = pa.Table.from_batches(taken).to_pylist()
    assert [row["replica_id"] for row in exchanges] == [kinds[row["number"] // 100][3] for row in exchanges]
    assert len(exchanges) == turns


def test_responses_of_the_leader_give_the_end_of_a_log(tmp_path):
    """Fetch responses to a client with a rack may come from a follower; Produce responses give the end by their
    records, in any order of partitions."""
    batch = write_batch([Record(n, NOW_MS, None, b"v") for n in range(3)])
    talk, wanted = [], []
    for number in range(600):
        if number < 400:
            rack = "b" if number % 3 == 1 else ""
            asked = {"replicaId": -1, "rackId": rack, "topics": [{"topic": "t", "partitions": [{"partition": 0}]}]}
            part_of_response = {"partitionIndex": 0, "highWatermark": number, "records": None}
            answer = {"responses": [{"topic": "t", "partitions": [part_of_response]}]}
            talk.append((request(1, 11, number, asked), response(1, 11, number, answer)))
            wanted.append([None if rack else number])
        else:
            numbers = (0, 1) if number % 2 else (1, 0)
            sent = [{"index": n, "records": batch * (n + 1)} for n in (0, 1)]
            asked = {"acks": -1, "topicData": [{"name": "t", "partitionData": sent}]}
            part_of_response = [{"index": n, "errorCode": 0, "baseOffset": number} for n in numbers]
            answer = {"responses": [{"name": "t", "partitionResponses": part_of_response}]}
            talk.append((request(0, 8, number, asked), response(0, 8, number, answer)))
            wanted.append([number + 3, number + 6])
    taken = []
    rows = Both(lambda table, batch: taken.append(batch) if table.name == "partitions" else None)
    read(rows, save(tmp_path / "ends.pcap", talk))
    assert rows.by_column > 400
    found = [[] for _ in wanted]
    for row in pa.Table.from_batches(taken).to_pylist():
        if row["direction"] == "response":
            found[row["number"]].append((row["partition"], row["end_offset"]))
        else:
            assert row["end_offset"] is None
    assert [[end for _, end in sorted(each)] for each in found] == wanted


def test_partitions_have_their_cluster_also_those_in_transactions(tmp_path):
    path = capture("k41_java_cluster")
    tables = {"partitions": [], "batches": []}
    rows = Both(lambda table, batch: tables[table.name].append(batch) if table.name in tables else None)
    for _ in rows.read(captures_of([path], Settings(cluster="east"))[0], Quality()):
        pass
    partitions, batches = (pa.Table.from_batches(parts).to_pylist() for parts in tables.values())
    assert {row["cluster"] for row in (*partitions, *batches)} == {"east"}
    committed = [row for row in partitions if row["api"] == "TxnOffsetCommit"]
    asked = [row for row in committed if row["direction"] == "request"]
    assert len({(row["connection"], row["number"]) for row in asked}) == sum(
        entry["key"] == 28 for entry in expected("k41_java_cluster")
    )
    assert all(row["topic"] and row["offset"] > 0 and row["error_code"] is None for row in asked)
    assert len(committed) == 2 * len(asked) and {row["error_code"] for row in committed} >= {None, 0}


def test_live_and_captured_sessions_split_latency_alike(monkeypatch):
    """A capture with quotas, compared with what a relay's session would record of the same bytes at the same times."""
    live = {}

    class Twice(CapturedSession):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.live = Session(Interest(details=True, detail=BATCHES))
            live[id(self)] = self

        def receive(self, side, view, now):
            self.live.receive(side, memoryview(bytes(view)), now)
            return super().receive(side, view, now)

    monkeypatch.setattr(capture_flows, "CapturedSession", Twice)
    taken = []
    # so that sessions get every byte and nothing is converted by column
    settings = Settings(records=chosen("none", "all"))
    rows = Rows(lambda table, batch: taken.append(batch) if table.name == "exchanges" else None, settings.records)
    for _ in rows.read(captures_of([capture("k41_quota")], settings)[0], Quality()):
        pass
    offline = [row for row in pa.Table.from_batches(taken).to_pylist() if row["outcome"] == "answered"]
    events = [e for session in live.values() for e in session.live.events if isinstance(e, Exchange)]
    events = [e for e in events if e.outcome == ANSWERED]

    names = ("request_start_ns", "queue_ns", "muted_ns")
    assert Counter((e.request_start, e.queue_ns, e.muted_ns) for e in events) == Counter(
        tuple(row[name] for name in names) for row in offline
    )
    assert sum(row["muted_ns"] > 10**9 for row in offline) > 10


@pytest.mark.parametrize("stamp_ns, packets", ((0, None), (1_700_000_000_000_000_000, None), (0, 300)))
def test_without_packet_times_durations_are_null(tmp_path, stamp_ns, packets):
    """Some programs write one time, or none, into all packets."""
    whole = [data for _, data, _ in packet.records(capture("k41_BASE").read_bytes())][:packets]
    path = tmp_path / "timeless.pcap"
    path.write_bytes(packet.pcap([(stamp_ns, data) for data in whole]))
    rows = list(exchanges(path))
    assert len(rows) > 20
    assert not [name for name in DURATIONS if any(row.get(name) is not None for row in rows)]
    path.write_bytes(packet.pcap([(stamp_ns + number * 1000, data) for number, data in enumerate(whole)]))
    assert any(row["latency_ns"] for row in exchanges(path))
