"""What ZooKeeper's connections said, by `kproxy decode --zookeeper`: of a capture and of a frame."""

import json

from click.testing import CliRunner

from kproxy.cli import cli
from tests import captures
from tests.zookeeper.traffic import DATA, log


def run(*arguments):
    result = CliRunner().invoke(cli, ["decode", "--zookeeper", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_change_that_zookeeper_logged_is_shown():
    capture = DATA / "k0102_zkgroup_a.pcap.zst"
    told = [json.loads(line) for line in run(capture, "--json").splitlines()]
    ops = ("create", "delete", "setData")
    changed = {each["zxid"] for each in told if each["op"] in ops and each["error"] == "OK"}
    assert changed == {line.zxid for line in log() if line.op in ops}
    assert {each["type"] for each in told if each["op"] == "notification"} >= {"NodeChildrenChanged", "NodeDeleted"}
    text = run(capture)
    assert "notification  NodeChildrenChanged /consumers/legacy/ids" in text
    assert "passwd" not in text


def test_transactions_and_frames_alone():
    assert '"op": "check"' in run(captures.capture("k39_zookeeper"))
    assert "getData  xid 1\n    request path: /\n" in run("0000000100000004000000012f01")
    assert "answer to getData  NONODE" in run("--response", "getData", "000000010000000000000007ffffff9b")


def test_options_that_do_not_go_with_it_are_refused():
    result = CliRunner().invoke(cli, ["decode", "--zookeeper", "--records", "00"])
    assert result.exit_code == 2
    assert "--zookeeper goes with" in result.output


def test_what_is_no_capture_of_zookeeper_is_said():
    done = CliRunner().invoke(cli, ["decode", "--zookeeper", str(captures.capture("k41_quota"))])
    assert "no ZooKeeper was found" in str(done.exception) and not done.output
    done = CliRunner().invoke(cli, ["decode", "--zookeeper", "nowhere.pcap"])
    assert "there is no file 'nowhere.pcap' either" in str(done.exception)
