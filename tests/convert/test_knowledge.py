"""`kproxy convert` writes the rows of `Knowledge`, over all captures of a run together."""

from collections import Counter

import pyarrow.parquet as pq
import pytest
import zstandard

from kproxy.convert import processes
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.insight import rows
from kproxy.insight.knowledge import APIS, ONLY_FAILED, Knowledge
from kproxy.insight.membership import groups
from kproxy.tables import schema
from tests import captures
from tests.insight.truth import CAPTURE, decoded_exchanges, generations
from tests.zookeeper.traffic import DATA as ZOOKEEPER

OF_CONNECTIONS = {"source", "time", "cluster", "connection", "number", "client_address", "coordinator_id"}


def table_rows(place, table):
    files = sorted((place / table).glob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def failed(answer):
    """Whether a Heartbeat or OffsetCommit response has an error; those without one are not kept."""
    parts = [part for topic in (answer or {}).get("topics", ()) for part in topic["partitions"]]
    return answer is not None and any(each["errorCode"] for each in (*parts, answer) if "errorCode" in each)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    place = tmp_path_factory.mktemp("converted")
    convert([CAPTURE], place)
    return place


def test_the_tables_have_the_rows_of_knowledge(converted):
    """Once fed by a reader of the tests that ignores connections, once by `convert`."""
    known = Knowledge("default")
    frames = [
        each
        for each in decoded_exchanges(CAPTURE, (9092,), APIS)
        if each.api_key not in ONLY_FAILED or failed(each.response)
    ]
    found = [row for each in frames for row in known.feed(each)] + list(known.finish())
    for kind, table in rows.TABLES.items():
        names = [name for name in kind._fields if name not in OF_CONNECTIONS]
        ours = Counter(tuple(map(str, map(row.get, names))) for row in table_rows(converted, table))
        lists = [
            [list(each) if isinstance(each, tuple) else each for each in row] for row in found if type(row) is kind
        ]
        theirs = Counter(
            tuple(str(value) for name, value in zip(kind._fields, row, strict=True) if name in names) for row in lists
        )
        assert ours == theirs, table


def test_rows_name_their_exchange_and_client(converted):
    exchanges = {(row["connection"], row["number"]): row for row in table_rows(converted, "exchanges")}
    events = [
        row for row in table_rows(converted, "group_events") if row["event"] in ("join_answered", "leave", "sync")
    ]
    assert len(events) > 100
    for row in events:
        exchange = exchanges[row["connection"], row["number"]]
        assert (row["client_id"], row["client_address"]) == (exchange["client_id"], exchange["client_address"])
        assert row["coordinator_id"] == exchange["broker_id"] is not None
        assert row["time_ns"] in (exchange["request_end_ns"], exchange["response_start_ns"])
    times = [row["time"] for row in table_rows(converted, "group_events")]
    assert times == sorted(times)
    moved = {row["group_id"]: row["coordinator_id"] for row in table_rows(converted, "rebalances")}
    assert set(moved.values()) <= {1, 2, 3}


@pytest.mark.ring2
def test_captures_of_one_run_share_their_groups(converted, tmp_path):
    """A generation whose members joined in one file and were assigned in the next is one rebalance."""
    whole = {(row["group_id"], row["generation"]): row for row in table_rows(converted, "rebalances")}
    assert {key for key in whole if key[0] != "new-g"} == generations().keys()
    syncs = {}
    for row in table_rows(converted, "group_events"):
        if row["event"] == "sync":
            syncs.setdefault((row["group_id"], row["generation"]), []).append(row["time_ns"])
    key = next(key for key, row in whole.items() if row["members_after"] > 1 and min(syncs[key]) > row["joined_ns"])
    cut_ns = whole[key]["joined_ns"]
    raw = zstandard.ZstdDecompressor().stream_reader(CAPTURE.read_bytes()).read()
    position = 24
    while (
        int.from_bytes(raw[position : position + 4], "little") * 10**9
        + int.from_bytes(raw[position + 4 : position + 8], "little")
        * (1 if raw[:4] == bytes.fromhex("4d3cb2a1") else 1000)
        <= cut_ns
    ):
        position += 16 + int.from_bytes(raw[position + 8 : position + 12], "little")
    (tmp_path / "a.pcap").write_bytes(raw[:position])
    (tmp_path / "b.pcap").write_bytes(raw[:24] + raw[position:])
    convert([tmp_path / "b.pcap", tmp_path / "a.pcap"], tmp_path / "tables")
    found = table_rows(tmp_path / "tables", "rebalances")
    parted = {(row["group_id"], row["generation"]): row for row in found}
    assert parted.keys() == whole.keys() and len(parted) == len(found)
    assert parted[key] == whole[key] | {"source": "b.pcap"}
    assert {row["source"] for row in found} == {"a.pcap", "b.pcap"}


def test_headers_alone_give_no_rows_about_groups(tmp_path):
    convert([captures.capture("k41_java_cluster")], tmp_path, Settings(detail="headers"))
    assert not [row for table in schema.KNOWLEDGE for row in table_rows(tmp_path, table.name)]


def test_groups_that_coordinate_through_zookeeper_have_rows(tmp_path):
    convert([ZOOKEEPER / "k0102_zkgroup_a.pcap.zst"], tmp_path)
    assert {row["group_id"] for row in table_rows(tmp_path, "rebalances")} == {"legacy"}
    registry = table_rows(tmp_path, "registry")
    assert {row["kind"] for row in registry} >= {"consumer_id", "consumer_owner", "controller", "partition_state"}
    assert [row["time_ns"] for row in registry] == sorted(row["time_ns"] for row in registry)
    assert any(row["api"] == "LeaderAndIsr" for row in table_rows(tmp_path, "leadership"))


def test_brokers_addresses_are_learnt_from_controllers(tmp_path):
    """In a capture without Metadata; of a single port, on which a controller and the other brokers talk."""
    convert([captures.capture("k0102_java_cluster")], tmp_path, Settings(ports=(9092,)))
    assert {row["broker_id"] for row in table_rows(tmp_path, "exchanges")} == {2}


@pytest.mark.ring2
def test_omitted_frames_and_groups_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SMALL_BYTES", 1 << 40)
    monkeypatch.setattr(groups, "MAX_GROUPS", 1)
    monkeypatch.setattr("kproxy.convert.rows.KEPT_FRAME_BYTES", 300)
    convert([CAPTURE], tmp_path)
    quality = {row["kind"]: row["count"] for row in table_rows(tmp_path, "quality")}
    assert quality["not_kept"] > 10
    assert quality["forgotten"] > 10
