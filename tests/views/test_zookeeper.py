"""ZooKeeper's operations, shown by `kproxy decode --zookeeper` for a capture and for a frame."""

import json

from click.testing import CliRunner

from kproxy.cli import cli
from tests import captures
from tests.capture import packet
from tests.zookeeper.traffic import DATA, log


def run(*arguments):
    result = CliRunner().invoke(cli, ["decode", "--zookeeper", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_change_that_zookeeper_logged_is_shown():
    capture = DATA / "k0102_zkgroup_a.pcap.zst"
    operations = [json.loads(line) for line in run(capture, "--json").splitlines()]
    ops = ("create", "delete", "setData")
    changed = {each["zxid"] for each in operations if each["op"] in ops and each["error"] == "OK"}
    assert changed == {line.zxid for line in log() if line.op in ops}
    assert {each["type"] for each in operations if each["op"] == "notification"} >= {
        "NodeChildrenChanged",
        "NodeDeleted",
    }
    text = run(capture)
    assert "notification  NodeChildrenChanged /consumers/legacy/ids" in text
    assert "passwd" not in text


def test_transactions_and_frames_alone():
    assert '"op": "check"' in run(captures.capture("k39_zookeeper"))
    assert "getData  xid 1\n    request path: /\n" in run("0000000100000004000000012f01")
    assert "answer to getData  NONODE" in run("--response", "getData", "000000010000000000000007ffffff9b")


def test_an_auth_packet_alone_is_zookeepers(tmp_path):
    """Its connection began before the capture, on no known port: only the content identifies ZooKeeper."""
    server = (b"\x0a\0\0\2", 12181)
    asked = (
        bytes.fromhex("00000021 fffffffc 00000064 00000000 00000006")
        + b"digest"
        + bytes.fromhex("00000007")
        + b"app:app"
    )
    said = bytes.fromhex("00000010 fffffffc 0000000000000000 0000004d")[:20]
    frames = (
        packet.tcp(asked, target=server, seq=5, ack=6),
        packet.tcp(said, source=server, target=packet.CLIENT, seq=6, ack=42),
    )
    ends = ({"target": server}, {"source": server, "target": packet.CLIENT})
    packets = [
        (place * 10**9, packet.ethernet(packet.ipv4(frame, **of)))
        for place, (frame, of) in enumerate(zip(frames, ends, strict=True))
    ]
    capture = tmp_path / "auth.pcap"
    capture.write_bytes(packet.pcap(packets))
    done = CliRunner().invoke(cli, ["convert", "--out", str(tmp_path / "tables"), str(capture)])
    assert done.exit_code == 0
    assert "No Kafka in it, but ZooKeeper, whose operations are in the table registry" in done.output
    assert "--port" not in done.output
    assert "auth  xid -4" in run(capture) and "app:app" not in run(capture)


def test_options_that_conflict_with_zookeeper_are_refused():
    result = CliRunner().invoke(cli, ["decode", "--zookeeper", "--records", "00"])
    assert result.exit_code == 2
    assert "--zookeeper goes with" in result.output


def test_a_capture_without_zookeeper_gets_a_message():
    done = CliRunner().invoke(cli, ["decode", "--zookeeper", str(captures.capture("k41_quota"))])
    assert "no ZooKeeper was found" in str(done.exception) and not done.output
    done = CliRunner().invoke(cli, ["decode", "--zookeeper", "nowhere.pcap"])
    assert "there is no file 'nowhere.pcap' either" in str(done.exception)
