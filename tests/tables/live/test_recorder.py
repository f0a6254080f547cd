"""Live events in files: every event is written or counted, and files are complete or absent, however the process
ends."""

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from kproxy.demo.cluster import Cluster
from kproxy.errors import KproxyError
from kproxy.protocol.records import BatchHeader
from kproxy.tables.columns import ExchangeColumns
from kproxy.tables.dataset import MANIFEST
from kproxy.tables.live import defects, live_files, portions, recorder
from kproxy.tables.live.recorder import Recorder
from kproxy.tables.names import Names
from kproxy.tables.partitions import BatchColumns, PartitionColumns
from kproxy.tables.schema import BY_NAME, EXCHANGES, RECORDS, TABLES
from kproxy.wire import bodies
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import ANSWERED, BROKER, Closed, Desync, Exchange, Unanswered
from kproxy.wire.interest import ApiPlan
from tests.demo.test_cluster import consume, produce, proxied

INFO = ConnectionInfo("east", "live:east", "10.0.0.1", 40000, "10.0.0.2", 9092, 3, 1_700_000_000_000_000_000)
PLAN = ApiPlan(0, 9, "Produce", True)
OF_EXCHANGES = ("exchanges", "partitions", "batches")


class Rows:
    """A sink that keeps the events that it receives as rows."""

    def __init__(self):
        self._exchanges = ExchangeColumns()
        self._partitions = PartitionColumns()
        self._batches = BatchColumns()
        self._names = Names()
        self.closed = 0

    def connected(self, info):
        positions = {}

        def take(events):
            for event in events:
                self.closed += isinstance(event, Closed)
                exchange = event.exchange if isinstance(event, Unanswered) else event
                if isinstance(exchange, Exchange):
                    self._exchanges.append(info, exchange)
                    self._partitions.append(info, exchange, positions)
                    self._batches.append(info, exchange)
                    self._names.learn(exchange.response_body)

        return take

    def tables(self):
        """exchanges, partitions, batches"""
        for columns in (self._exchanges, self._partitions, self._batches):
            yield in_order(self._names.fill(pa.Table.from_batches([columns.batch()])))


WITHOUT_RECORDS = BY_NAME.keys() - {RECORDS.name}


def in_order(table):
    names = ("connection", "number", "direction", "topic", "partition", "base_offset")
    return table.sort_by([(name, "ascending") for name in names if name in table.schema.names])


def exchange(number, client_id="me"):
    one = Exchange(PLAN, number, number, 0, 100, INFO.opened_ns + number * 1000)
    one.request_end = one.response_start = one.response_end = one.request_start
    one.client_id = client_id
    one.outcome = ANSWERED
    return one


def parts(folder, name="exchanges"):
    """The files of a table that have rows."""
    files = sorted((folder / name).glob("*.parquet"))
    return [pq.read_table(path) for path in files if path.name != live_files.EMPTY]


def numbers(folder):
    return sorted(number for part in parts(folder) for number in part["number"].to_pylist())


@pytest.fixture
def recording(tmp_path):
    made = Recorder(tmp_path / "tables", {"detail": "headers"})
    yield made
    made.close()


def test_only_the_user_and_group_may_read_recorded_files(recording, tmp_path):
    recording.start()
    assert (tmp_path / "tables").stat().st_mode & 0o027 == 0


def test_the_tables_have_the_exchanges_of_real_clients(tmp_path):
    async def main():
        rows = Rows()
        cluster = Cluster(topics={"orders": 3})
        async with proxied(cluster, rows, detail="batches", record=tmp_path) as (bootstrap, server):
            values = [b"%d" % number for number in range(500)]
            delivered = await asyncio.to_thread(produce, bootstrap, "orders", values, **{"batch.num.messages": 5})
            assert await asyncio.to_thread(consume, bootstrap, "orders", len(values)) == delivered
            assert server.metrics.recorder_dropped == {"live:default": 0}
        return rows

    rows = asyncio.run(main())
    expected, partitions, batches = rows.tables()
    (recorded,), (of_partitions,), (of_batches,) = (parts(tmp_path, name) for name in TABLES if name in OF_EXCHANGES)
    assert in_order(recorded).equals(expected)
    assert in_order(of_partitions).equals(partitions)
    assert in_order(of_batches).equals(batches)
    assert set(expected["api"].to_pylist()) >= {"Produce", "Fetch", "Metadata", "ApiVersions"}
    assert None not in expected["client_id"].to_pylist()
    produced = batches.filter(pc.equal(batches["direction"], "request"))
    assert pc.sum(produced["records"]).as_py() == 500 and set(produced["topic"].to_pylist()) == {"orders"}
    assert recorded["time"].to_pylist() == sorted(recorded["time"].to_pylist())
    connections = pa.concat_tables(parts(tmp_path, "connections")).to_pylist()
    assert len(connections) == rows.closed > 3
    for connection in connections:
        own = [row for row in expected.to_pylist() if row["connection"] == connection["connection"]]
        assert connection["requests"] == len(own)
        assert connection["answers"] == sum(row["response_end_ns"] is not None for row in own)
        assert connection["client_bytes"] >= sum(row["request_bytes"] for row in own)
        assert connection["broker_bytes"] >= sum(row["response_bytes"] or 0 for row in own)
        assert connection["software_name"] in ("confluent-kafka-python", "librdkafka")
        assert connection["start_ns"] <= min(row["request_start_ns"] for row in own)
        assert connection["end_ns"] >= max(row["response_end_ns"] or 0 for row in own)
        by_a_side = {"fin": ("client", "broker"), "reset": ("client", "broker")}
        assert connection["close"] in (*by_a_side, "drained", "drain_timeout")
        assert connection["closed_by"] in by_a_side.get(connection["close"], ("neither",))
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["sources"] == {"live:default": []}
    assert manifest["settings"] == {"detail": {"default": "batches"}}


def test_events_that_the_full_queue_rejects_are_counted(recording, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "QUEUE_BYTES", 100_000)
    monkeypatch.setattr(portions, "PORTION_BYTES", 10_000)
    take = recording.connected(INFO)
    events = []
    for number in range(1000):
        events.append(exchange(number))
        take(events)
        events.clear()  # as a relay does
    kept = 1000 - recording.dropped["live:east"]
    assert 100 < kept < 600
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    recording.start()
    recording.close()
    assert numbers(recording.folder) == list(range(kept))  # the oldest, without a gap
    (quality,) = parts(recording.folder, "quality")
    (row,) = quality.to_pylist()
    assert (row["source"], row["kind"], row["count"]) == ("live:east", "recorder_dropped", 1000 - kept)
    assert row["first_ns"] <= row["last_ns"] <= time.time_ns()


def test_each_burst_of_losses_logs_one_line(recording, monkeypatch, caplog):
    """Neither accepted portions nor further rejected events log another line."""
    monkeypatch.setattr(recorder, "QUEUE_BYTES", 8000)
    monkeypatch.setattr(portions, "PORTION_BYTES", 1000)
    monkeypatch.setattr(recorder, "_IDLE_S", 1.0)
    recording.start()
    take = recording.connected(INFO)
    for burst in (1, 2):
        before = recording.dropped["live:east"]
        for number in range(6):  # strings count: each event is a portion, and the third one fills the queue
            take([exchange(number, client_id="a" * 2000)])
        assert recording.dropped["live:east"] == before + 3
        assert sum(entry.levelname == "WARNING" for entry in caplog.records) == burst
        deadline = time.monotonic() + 30
        while recording._open is None and time.monotonic() < deadline:
            time.sleep(0.01)
    recording.close()
    assert numbers(recording.folder) == [0, 0, 1, 1, 2, 2]


def test_files_are_rolled_and_a_restart_adds_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr(live_files, "ROLL_ROWS", 300)
    monkeypatch.setattr(portions, "PORTION_ROWS", 100)
    dice = random.Random(4)
    order = dice.sample(range(2000), 2000)
    for half in (order[:1000], order[1000:]):
        recording = Recorder(tmp_path, {"detail": "headers"})
        recording.start()
        take = recording.connected(INFO)
        for number in half:
            take([exchange(number)])
        recording.close()
    files = parts(tmp_path)
    assert 4 <= len(files) <= 8
    assert numbers(tmp_path) == list(range(2000))
    for file in files:
        assert file["time"].to_pylist() == sorted(file["time"].to_pylist())
        assert file.schema.equals(EXCHANGES.schema)
    assert {path.name for path in tmp_path.iterdir()} == {*WITHOUT_RECORDS, MANIFEST}
    for name in WITHOUT_RECORDS:
        empty = pq.read_table(tmp_path / name / live_files.EMPTY)
        assert (empty.num_rows, empty.schema) == (0, BY_NAME[name].schema)


def test_a_file_appears_in_time_without_more_traffic(recording, monkeypatch):
    monkeypatch.setattr(live_files, "ROLL_S", 0.2)
    recording.start()
    recording.connected(INFO)([exchange(1)])
    deadline = time.monotonic() + 30
    while not parts(recording.folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers(recording.folder) == [1]


def test_faults_and_ends_of_connections_are_recorded(recording):
    recording.start()
    take = recording.connected(INFO)
    unanswered = Exchange(PLAN, 9, 0, 0, 100, INFO.opened_ns + 5)
    take([Unanswered(unanswered, "desync"), Desync(BROKER, "size", "too large", 4, -1, -1, True, INFO.opened_ns + 7)])
    take([Closed(BROKER, INFO.opened_ns + 8, "fault", (100, 50), ("librdkafka", "2.6.1"), "PLAIN", 2)])
    recording.close()
    ((exchanged,), (connection,), (quality,)) = (
        parts(recording.folder, name)[0].to_pylist() for name in ("exchanges", "connections", "quality")
    )
    assert exchanged["outcome"] == "unanswered"
    names = ("requests", "answers", "client_bytes", "broker_bytes", "close", "faults", "sasl_mechanism", "sasl_tokens")
    assert [connection[name] for name in names] == [1, 0, 100, 50, "fault", 1, "PLAIN", 2]
    assert (connection["software_name"], connection["software_version"]) == ("librdkafka", "2.6.1")
    assert connection["retransmissions"] is None  # the kernel handles TCP here
    assert (quality["kind"], quality["count"], quality["first_ns"]) == ("fault", 1, INFO.opened_ns + 7)


def test_a_folder_has_one_writer_and_must_be_one(recording, tmp_path):
    (recording.folder / ".unfinished-record-beside-2").mkdir(parents=True)  # left by a killed process
    recording.start()
    with pytest.raises(KproxyError, match="another kproxy records into it"):
        Recorder(recording.folder, {}).start()
    following = Recorder(recording.folder, {}, beside=True)
    following.start()
    for number, each in enumerate((recording, following)):
        each.connected(INFO)([exchange(number)])
    recording.close()
    with pytest.raises(KproxyError, match="another kproxy records into it"):
        Recorder(recording.folder, {}).start()
    following.close()
    assert sum(part.num_rows for part in parts(recording.folder, "exchanges")) == 2
    assert not list(recording.folder.glob(".unfinished*"))
    (tmp_path / "file").touch()
    with pytest.raises(KproxyError, match="cannot be written to"):
        Recorder(tmp_path / "file", {}).start()


def test_a_failing_disk_loses_rows_and_nothing_else(recording, monkeypatch, caplog):
    monkeypatch.setattr(live_files, "ROLL_S", 0.05)
    recording.start()
    obstacle = recording.folder / "exchanges"
    obstacle.rename(recording.folder / "away")
    obstacle.touch()  # a file in place of the folder
    take = recording.connected(INFO)
    take([exchange(1), exchange(2)])
    deadline = time.monotonic() + 30
    while "2 events are lost" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recording.dropped == {"live:east": 2}
    obstacle.unlink()
    take([exchange(3)])
    recording.close()
    assert numbers(recording.folder) == [3]
    kinds = [row for part in parts(recording.folder, "quality") for row in part.to_pylist()]
    assert [(row["kind"], row["count"]) for row in kinds] == [("recorder_dropped", 2)]


def test_repeated_disk_failures_log_the_first_loss_and_the_total(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(portions, "PORTION_ROWS", 1)  # each event is a portion, and finds no folder
    recording = Recorder(tmp_path / "tables", {})
    recording.start()
    shutil.rmtree(recording.folder)
    recording.folder.touch()
    take = recording.connected(INFO)
    for number in range(9):
        take([exchange(number)])
    deadline = time.monotonic() + 30
    while recording.dropped["live:east"] < 9 and time.monotonic() < deadline:
        time.sleep(0.01)
    recording.close()
    lines = [entry.getMessage().partition(": ")[0] for entry in caplog.records if entry.levelname == "ERROR"]
    assert lines == ["1 events are lost", "8 events are lost"]


def test_a_defect_loses_the_event_and_keeps_the_connection(recording, caplog):
    recording.start()
    take = recording.connected(INFO)
    broken = exchange(1)
    broken.correlation_id = 1 << 70
    for event in (exchange(0), broken, broken, exchange(2)):
        take([event])
    recording.close()
    assert numbers(recording.folder) == [0, 2]
    assert recording.dropped == {"live:east": 2}
    errors = [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"]
    assert len(errors) == 2  # the first, and the total at the end
    assert "2 events in all" in errors[1]


def test_an_event_is_recorded_completely_or_not_at_all(recording, monkeypatch, caplog):
    """A partition that no row can hold loses its own event in every table; the other events of the read are kept."""
    monkeypatch.setattr(defects, "_REPORT_S", 0.0)
    recording.start()
    take = recording.connected(INFO)
    fetches = [exchange(number) for number in range(5)]
    header = BatchHeader(*(0 for _ in BatchHeader._fields))
    for number, one in enumerate(fetches):
        one.plan = ApiPlan(1, 12, "Fetch", True)
        offset = 1 << 63 if number == 1 else 7
        parts_ = [bodies.BLANK._replace(topic="t", partition=index, offset=(3, offset)[index]) for index in (0, 1)]
        one.response_body = bodies.Found()
        one.response_body.partitions = parts_
        base = 1 << 63 if number == 3 else 7
        one.response_body.batches = [
            bodies.Batch("t", None, 0, header._replace(base_offset=offset), False, None, None) for offset in (7, base)
        ]
    take(fetches)
    take(fetches[1:2])
    recording.close()
    assert numbers(recording.folder) == [0, 2, 4]
    for table in ("partitions", "batches"):
        (rows,) = parts(recording.folder, table)
        assert sorted(rows["number"].to_pylist()) == [0, 0, 2, 2, 4, 4]
    assert recording.dropped == {"live:east": 3}
    ((quality,),) = (part.to_pylist() for part in parts(recording.folder, "quality"))
    assert (quality["kind"], quality["count"]) == ("recorder_failed", 3)
    error_lines = [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"]
    # one line per kind, and the totals at the end
    assert len(error_lines) == 3 and len({line.partition(":")[0] for line in error_lines}) == 2
    assert "2 events so far" in error_lines[2]


RECORD_FOR_EVER = """
import sys, time
from pathlib import Path
from kproxy.tables.live import live_files, portions, recorder
from tests.tables.live.test_recorder import INFO, exchange
live_files.ROLL_S = 0
made = recorder.Recorder(Path(sys.argv[1]), {})
made.start()
take = made.connected(INFO)
print("recording", flush=True)
for number in range(1 << 40):
    take([exchange(number)])
    time.sleep(0.0001)
"""


def test_a_killed_process_leaves_complete_files_and_the_next_one_continues(tmp_path):
    folder = tmp_path / "tables"
    before = 0
    for delay_s in (0.5, 0.53, 0.57):  # while some file is being written
        process = subprocess.Popen(
            [sys.executable, "-c", RECORD_FOR_EVER, str(folder)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        try:
            assert process.stdout.readline() == b"recording\n"
            deadline = time.monotonic() + 30
            while len(parts(folder)) <= before and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(delay_s)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        files = [path for name in TABLES for path in (folder / name).rglob("*") if path.name != live_files.EMPTY]
        assert all(path.suffix == ".parquet" and pq.read_table(path).num_rows for path in files)
        assert len(files) > before
        before = len(files)
    after = Recorder(folder, {})
    after.start()
    after.close()
    assert {path.name for path in folder.iterdir()} == {*WITHOUT_RECORDS, MANIFEST}
