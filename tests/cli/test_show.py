"""`kproxy analyze show` of the slowest exchange of a real capture."""

import json
import shutil
import subprocess
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.errors import KproxyError
from kproxy.views import units
from tests.captures import capture


def invoke(*arguments):
    done = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_exchange_is_decoded_and_explained_in_its_context(tmp_path):
    place = shutil.copy(capture("k41_quota"), tmp_path)
    row = json.loads(invoke("analyze", "slow", place, "--limit", 1, "--format", "json"))
    which = ("--connection", row["connection"], "--number", row["number"])
    lines = invoke("show", place, *which).splitlines()
    assert lines[0].startswith(f"Produce, request {row['number']} of connection {row['connection']}, ")
    assert f"Why: {row['explanation']}" in lines
    assert sum("topicId: " in line for line in lines) == 2  # in both frames
    before = lines[lines.index("Before it on the connection") + 2 :]
    assert [int(line.split()[0]) for line in before] == list(range(row["number"] - 5, row["number"] + 1))
    assert before[-1].endswith("yes") and not before[0].endswith("yes")
    assert len(invoke("show", place, *which, "--before", 0).splitlines()) == len(lines) - 5
    start = lines.index(f"Where its {units.duration(row['total_ns'])} went")
    parts = lines[start + 1 : lines.index(f"Why: {row['explanation']}")]
    assert parts and sum(float(line.split("%")[0].split()[-1]) for line in parts) == pytest.approx(100, abs=0.3)
    packets = [line for line in lines if " client -> broker " in line or " client <- broker " in line]
    assert packets[0].endswith("request") and packets[-1].endswith("response")
    fields = ("frame.number", "frame.time_epoch", "tcp.len", "tcp.dstport")
    wanted = [word for field in fields for word in ("-e", field)]
    first, last = (int(packets[place].split()[0].replace(",", "")) for place in (0, -1))
    port = lines[0].split(":")[1].split()[0]
    chosen = f"frame.number >= {first} && frame.number <= {last} && tcp.port == {port}"
    command = ["tshark", "-r", place, "-Y", chosen, "-T", "fields", *wanted]
    theirs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    mine = [line.replace(",", "").split() for line in packets]
    assert [(line[0], line[1][-9:], "->" in line) for line in mine] == [
        (number, f"{datetime.fromtimestamp(float(time), UTC):%S}.{time.partition('.')[2][:6]}", to == "9092")
        for number, time, _, to in (line.split("\t") for line in theirs)
    ]
    with pytest.raises(KproxyError, match="no connection 5 in"):
        invoke("show", place, "--connection", 5, "--number", 1)
    rounded = int(float(row["connection"])) + 1  # rounded, as by JSON readers that keep numbers as floats
    with pytest.raises(KproxyError, match=f"no connection {rounded}: did you mean {row['connection']}"):
        invoke("show", place, "--connection", rounded, "--number", row["number"])
    with pytest.raises(KproxyError, match="has no request with the number 99999"):
        invoke("show", place, "--connection", row["connection"], "--number", 99999)
    invoke("convert", place, "-o", tmp_path / "tables")
    with pytest.raises(KproxyError, match="tables do not hold the frames"):
        invoke("show", tmp_path / "tables", *which)
    with pytest.raises(KproxyError, match="there is no such file"):
        invoke("show", tmp_path / "gone.pcap", *which)


@pytest.mark.parametrize(("given", "lacks"), [([], "--connection"), (["--connection", "7"], "--number")])
def test_the_error_about_a_missing_option_names_the_command_that_has_its_value(given, lacks):
    done = CliRunner().invoke(cli, ["show", "a b.pcap", *given])
    assert done.exit_code == 2
    assert f"Missing option '{lacks}': `kproxy analyze slow 'a b.pcap'` prints the whole command" in done.stderr


def test_retransmissions_equal_wiresharks_and_its_dissection_is_shown(tmp_path):
    place = shutil.copy(capture("k41_retransmit"), tmp_path)
    query = "select connection, number from exchanges where retransmissions > 0 and outcome = 'answered' limit 1"
    row = json.loads(invoke("analyze", "sql", query, place, "--format", "json"))
    shown = invoke("show", place, "--connection", row["connection"], "--number", row["number"], "--wireshark")
    again = [line.split()[0].replace(",", "") for line in shown.splitlines() if line.endswith("sent again")]
    by_time = "tcp.analysis.retransmission or tcp.analysis.out_of_order"  # Wireshark distinguishes them by milliseconds
    command = ["tshark", "-r", place, "-Y", by_time, "-T", "fields", "-e", "frame.number"]
    theirs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert again and set(again) <= set(theirs)
    assert "Wireshark's packet" in shown and "Layer KAFKA" in shown and "\x1b" not in shown
