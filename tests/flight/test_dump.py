"""A dump is written whatever has passed: bytes that cannot be shown are left out, and their size is given."""

import io
import pickle
import random
import re
from dataclasses import replace
from uuid import UUID

import pyarrow.parquet as pq
import pytest

from kproxy.convert.processes import convert
from kproxy.convert.reading import exchanges
from kproxy.errors import KproxyError
from kproxy.flight import redaction, sending
from kproxy.flight.cutting import Frame, cut
from kproxy.flight.dump import dump, read
from kproxy.flight.frames import Chunk, Frames
from kproxy.flight.headers import Headers
from kproxy.flight.packets import PacketFile
from kproxy.flight.redaction import allowance, written
from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, PRODUCE
from kproxy.protocol.records import Record, write_batch
from kproxy.wire.events import BROKER, CLIENT, ClientNamed
from kproxy.wire.interest import Interest
from kproxy.wire.observing.watched import watch
from kproxy.wire.session import Session
from tests.flight.test_frames import HOUR_NS, INFO, big, dialogue
from tests.wire.playbook import request, response

VALUE = b"what-nobody-may-read"


def produced(number):
    records = write_batch([Record(n, 1_700_000_000_000, VALUE, VALUE * 9) for n in range(5)], codec=number % 5)
    data = {"name": "t", "partitionData": [{"index": 0, "records": records}]}
    return request(PRODUCE, 7, number, {"transactionalId": None, "acks": 1, "timeoutMs": 9, "topicData": [data]})


def sent(tmp_path, said, *, records=False, whole=True):
    """The input of a dump that a process would send for that dialogue."""
    frames, headers = Frames(1 << 30, HOUR_NS), Headers(1 << 30, HOUR_NS)
    session = Session(Interest(details=True))
    take = headers.connected(INFO)
    watch(session, frames.watched(INFO))
    now = INFO.opened_ns
    for side, data in said:
        now += 1_000_000
        for pos in range(0, len(data), 60_000):
            session.receive(side, memoryview(data[pos : pos + 60_000]), now)
            while session.backlog[side] is not None:
                session.resume(side, now)
        take(session.events)
        session.events.clear()
    kept, tallies = headers.taken()
    file = io.BytesIO()
    pickle.dump((tmp_path, {}, records, "asked: a test", None), file)
    for each in kept:
        pickle.dump(each.batches(), file)
    pickle.dump([tally.row_so_far(now) for tally in tallies], file)
    pickle.dump(list(frames.chunks) if whole else list(frames.chunks)[len(frames.chunks) // 2 :], file)
    pickle.dump(None, file)
    file.seek(0)
    return read(file), frames


def test_records_are_zeros_unless_they_are_asked_for(tmp_path):
    said = []
    for number in range(10):
        said += [(CLIENT, produced(number)), (BROKER, response(PRODUCE, 7, number))]
    for records in (False, True):
        folder = tmp_path / str(records)
        folder.mkdir()
        result = dump(sent(folder, said, records=records)[0])
        assert result["exchanges"] == 10 and result["frames"] == 20 and not result["left_out"]
        data = (folder / "frames.pcapng").read_bytes()
        assert (VALUE in data) == records
        assert b"answered after 1.000 ms" in data and (b"records are zeros" in data) != records
        assert [row["api"] for row in exchanges(folder / "frames.pcapng")] == ["Produce"] * 10
        assert pq.read_table(folder / "connections").to_pylist()[0]["end_seen"] is False


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_come_back_with_their_times_though_frames_are_cut(tmp_path, seed):
    said = dialogue(random.Random(seed), 40)
    result = dump(sent(tmp_path, said)[0])
    rows = pq.read_table(tmp_path / "exchanges").to_pylist()
    same = ("number", "correlation_id", "api", "latency_ns", "request_bytes", "response_bytes")
    back = {tuple(row[name] for name in same) for row in exchanges(tmp_path / "frames.pcapng")}
    small = {tuple(row[name] for name in same) for row in rows if row["request_bytes"] < 60_000}
    assert result["exchanges"] == 40 and len(small & back) >= len(small) - result["left_out"]


@pytest.mark.parametrize("seed", range(30))
def test_damage_and_lost_beginnings_are_left_out(tmp_path, seed):
    chance = random.Random(seed)
    said = [*dialogue(chance, 20, sizes=(10, 900)), (CLIENT, big(99, 10))]
    damaged = []
    for side, data in said:
        data = bytearray(data)
        if chance.random() < 0.3:
            data[chance.randrange(8, len(data))] = chance.randrange(256)
        damaged.append((side, bytes(data)))
    what, frames = sent(tmp_path, damaged, whole=bool(seed % 2))
    result = dump(what)
    assert result["frames"] >= 1
    for frame in cut(frames.chunks):
        data, note = written(frame, allowance(), records=False)
        assert data == frame.data or note


def test_records_that_would_take_a_dump_all_its_time_cost_it_their_own_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(redaction, "MAX_RECORDS", 12)
    said = []
    for number in range(4):
        said += [(CLIENT, produced(number)), (BROKER, response(PRODUCE, 7, number))]
    said += [(CLIENT, request(HEARTBEAT, 4, 9)), (BROKER, response(HEARTBEAT, 4, 9))]
    result = dump(sent(tmp_path, said)[0])
    assert (result["exchanges"], result["frames"], result["left_out"]) == (5, 10, 2)
    data = (tmp_path / "frames.pcapng").read_bytes()
    assert VALUE not in data and data.count(b"holds more than kproxy unpacks for a dump") == 2


def test_a_frame_belongs_to_its_own_exchange_though_all_have_one_correlation_id(tmp_path):
    said = []
    for number in range(3):
        said += [(CLIENT, request(HEARTBEAT, 4, 7)), (BROKER, response(HEARTBEAT, 4, 7, {"errorCode": 25 + number}))]
    unanswered = {"transactionalId": None, "acks": 0, "timeoutMs": 9, "topicData": []}
    said[4:4] = [(CLIENT, request(PRODUCE, 7, 7, unanswered))]
    said += [(CLIENT, request(API_VERSIONS, 0, 7))]
    dump(sent(tmp_path, said)[0])
    comments = re.findall(rb"kproxy: connection \d+[^\0]*", (tmp_path / "frames.pcapng").read_bytes())
    numbers = [re.search(rb"exchange (\d+)", comment) for comment in comments]
    first = int(numbers[0][1])
    assert [found and int(found[1]) - first for found in numbers] == [0, 0, 1, 1, 2, 3, 3, 3]
    errors = (b"UNKNOWN_MEMBER_ID", b"INVALID_SESSION_TIMEOUT", b"REBALANCE_IN_PROGRESS")
    assert [
        next(error for error in errors if error in comment) for comment in (comments[1], comments[3], comments[6])
    ] == list(errors)


def test_files_that_a_process_cannot_write_are_reported(tmp_path):
    (tmp_path / "frames.pcapng").touch()
    with pytest.raises(Exception, match="File exists"):
        sending.send(tmp_path, {}, records=False, why="a test", worker=None, rows=[], connections=[], chunks=[])


def test_the_software_of_a_client_is_known_while_its_connection_is_open():
    headers = Headers(1 << 30, HOUR_NS)
    headers.connected(INFO)([ClientNamed("orders", "librdkafka", "2.6.1", INFO.opened_ns + 1)])
    (row,) = [tally.row_so_far(INFO.opened_ns + 2) for tally in headers.taken()[1]]
    assert (row["software_name"], row["software_version"], row["tls"]) == ("librdkafka", "2.6.1", "plain")


def test_headers_are_bounded():
    headers = Headers(200_000, HOUR_NS)
    session = Session(Interest(details=True))
    take = headers.connected(INFO)
    for number in range(20_000):
        session.receive(CLIENT, memoryview(request(HEARTBEAT, 4, number)), number)
        session.receive(BROKER, memoryview(response(HEARTBEAT, 4, number)), number)
        take(session.events)
        session.events.clear()
    kept, _ = headers.taken()
    assert headers.held_bytes <= 200_000 + 4096 * 400
    rows = [row for each in kept for _, batch in each.batches().batches for row in batch.column("correlation_id")]
    assert rows[-1].as_py() == 19_999 and len(rows) < 20_000


@pytest.mark.parametrize("shown", [False, True])
def test_records_of_the_controllers_own_topic_are_never_shown(shown):
    records = write_batch([Record(0, 1_700_000_000_000, None, VALUE)])
    by_id = {"responses": [{"topicId": UUID(int=1), "partitions": [{"partitionIndex": 0, "records": records}]}]}
    by_name = {
        "responses": [{"topic": "__cluster_metadata", "partitions": [{"partitionIndex": 0, "records": records}]}]
    }
    other = {"responses": [{"topic": "orders", "partitions": [{"partitionIndex": 0, "records": records}]}]}
    snapshot = {"index": 0, "position": 7, "unalignedRecords": VALUE * 9}  # from anywhere in it to anywhere
    parts = {"topics": [{"name": "__cluster_metadata", "partitions": [snapshot]}]}
    for key, version, body, is_shown in (
        (1, 16, by_id, False),
        (1, 12, by_name, False),
        (1, 12, other, shown),
        (59, 0, parts, False),
    ):
        data = response(key, version, 5, body)
        frame, _ = written(Frame(INFO, BROKER, 1, 1, len(data), data, (key, version), 5), allowance(), records=shown)
        assert len(frame) == len(data) and (VALUE in frame) == is_shown


def test_a_process_that_stands_still_ends_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sending, "DUMP_S", 0.3)
    monkeypatch.setattr(sending, "command", lambda: ["sleep", "1000"])
    much = [Chunk(INFO, CLIENT, 1, 0, 1 << 20, bytes(1 << 20), 0)] * 9  # more than a pipe takes
    with pytest.raises(KproxyError, match="takes longer than"):
        sending.send(tmp_path, {}, records=False, why="a test", worker=None, rows=[], connections=[], chunks=much)


def test_an_event_that_no_row_can_hold_is_left_out_and_logged(caplog):
    headers = Headers(1 << 30, HOUR_NS)
    session = Session(Interest(details=True))
    for number in range(3):
        session.receive(CLIENT, memoryview(request(HEARTBEAT, 1, number)), INFO.opened_ns)
        session.receive(BROKER, memoryview(response(HEARTBEAT, 1, number)), INFO.opened_ns + 1)
    session.events[1].correlation_id = 1 << 70
    headers.connected(INFO)(session.events)
    (kept,), _ = headers.taken()
    assert [row for _, batch in kept.batches().batches for row in batch["correlation_id"].to_pylist()] == [0, 2]
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["a defect of kproxy's recorder"]


def test_connections_that_begin_alike_are_not_taken_for_one_that_was_captured_twice(tmp_path):
    """Made-up packets have first sequence numbers of each connection's own."""
    with (tmp_path / "frames.pcapng").open("wb") as file:
        packets = PacketFile(file)
        for port in range(40000, 40004):
            stream = packets.stream(replace(INFO, client_port=port))
            stream.begin(INFO.opened_ns)
            for number in range(4):
                for side, data in (
                    (CLIENT, request(API_VERSIONS, 3, number)),
                    (BROKER, response(API_VERSIONS, 3, number)),
                ):
                    stream.frame(side, INFO.opened_ns, INFO.opened_ns, data, len(data), "")
        packets.close()
    convert([tmp_path / "frames.pcapng"], tmp_path / "tables")
    quality = pq.read_table(tmp_path / "tables/quality").to_pylist()
    assert {row["kind"]: row["count"] for row in quality}.get("kafka") == 4
    assert "same_stream" not in {row["kind"] for row in quality}
