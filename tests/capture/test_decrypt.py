"""TLS connections that tshark decrypts have the requests of the broker's own log."""

from collections import Counter

import pyarrow.parquet as pq
import pytest

from kproxy.capture import decrypt
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from tests import captures

# The broker's request log of k41_tls13_keys, from the captures' notes.
REQUESTS = {
    ("Produce", 7): 7,
    ("Fetch", 11): 52,
    ("ListOffsets", 3): 3,
    ("Metadata", 5): 20,
    ("OffsetCommit", 3): 32,
    ("OffsetFetch", 3): 18,
    ("FindCoordinator", 1): 6,
    ("JoinGroup", 5): 11,
    ("Heartbeat", 1): 29,
    ("LeaveGroup", 1): 3,
    ("SyncGroup", 3): 8,
    ("DescribeGroups", 3): 1,
    ("ListGroups", 1): 1,
    ("ApiVersions", 0): 24,
    ("CreateTopics", 3): 1,
    ("InitProducerId", 0): 3,
    ("AddPartitionsToTxn", 0): 3,
    ("EndTxn", 0): 2,
}


def rows(out, table, name):
    return pq.read_table(out / table / f"{name}.parquet").to_pylist()


@pytest.mark.parametrize("how", ("key log", "embedded", "rotated, two processes"))
def test_tls_with_its_keys_gives_the_exchanges_of_the_brokers_log(tmp_path, how):
    key_log = captures.capture("k41_tls13_keys.keys")
    path, name, options = captures.capture("k41_tls13_keys"), "k41_tls13_keys.pcap", {"key_log": key_log}
    if how == "embedded":
        path, name, options = captures.capture("tls13_embedded_secrets"), "tls13_embedded_secrets.pcapng", {}
    paths, processes = [path], 0
    if how.startswith("rotated"):
        data, position = path.read_bytes(), 24
        while position < len(data) // 2:
            position += 16 + int.from_bytes(data[position + 8 : position + 12], "little")
        paths = [tmp_path / name, tmp_path / "second"]
        paths[0].write_bytes(data[:position])
        paths[1].write_bytes(data[:24] + data[position:])
        options |= {"rotated": True}
        processes = 2
    summary = convert(paths, tmp_path / "out", Settings(**options), processes=processes)
    exchanges = rows(tmp_path / "out", "exchanges", name)
    assert Counter((row["api"], row["api_version"]) for row in exchanges) == REQUESTS
    assert Counter(row["outcome"] for row in exchanges) == {"answered": 223, "no_answer_expected": 1}
    assert all(row["total_ns"] is None or row["total_ns"] >= 0 for row in exchanges)
    connections = rows(tmp_path / "out", "connections", name)
    assert Counter(row["tls"] for row in connections) == {"tls_decrypted": 24}
    assert sum(row["requests"] for row in connections) == 224
    assert summary.quality[name].count("tls_decrypted") == 24
    assert not summary.quality[name].count("tls")


def test_keys_of_other_connections_leave_them_encrypted_and_counted(tmp_path):
    summary = convert(
        [captures.capture("k41_tls_nokeys_kcat")], tmp_path, Settings(key_log=captures.capture("k41_tls13_keys.keys"))
    )
    assert summary.quality["k41_tls_nokeys_kcat.pcap"].count("tls") == 4
    connections = rows(tmp_path, "connections", "k41_tls_nokeys_kcat.pcap")
    assert Counter(row["tls"] for row in connections) == {"tls": 4, "plain": 1}


def test_without_tshark_the_error_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Settings(key_log=captures.capture("k41_tls13_keys.keys"))
    summary = convert([captures.capture("k41_tls13_keys")], tmp_path / "out", settings)
    assert "install Wireshark's tshark" in str(summary.failed[0])


@pytest.mark.parametrize(
    ("line", "want"),
    [
        (
            b"12.5\t10.0.0.1\t\t9\t10.0.0.2\t\t8\t00ff,01\n",
            (12_500_000_000, ("10.0.0.1", 9, "10.0.0.2", 8), b"\0\xff\1"),
        ),
        (b"1.000000001\t1.1.1.1,::1\t\t7,9\t2.2.2.2,::2\t\t7,8\taa\n", (1_000_000_001, ("::1", 9, "::2", 8), b"\xaa")),
        (b"\t\t\t\t\t\t\t\n", None),
        (b"what is this\n", None),
        (b"1.0\t1.1.1.1\t\tx\t2.2.2.2\t\t8\tzz\n", None),
    ],
)
def test_lines_of_tshark_are_parsed(line, want):
    assert decrypt._line(line) == want
