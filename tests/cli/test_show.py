"""One exchange shown: of a real capture, its slowest."""

import json
import shutil

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.errors import KproxyError
from tests.captures import capture


def invoke(*arguments):
    done = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_exchange_is_decoded_explained_and_put_in_its_place(tmp_path):
    place = shutil.copy(capture("k41_quota"), tmp_path)
    row = json.loads(invoke("analyze", "slow", place, "--limit", 1, "--format", "json"))
    which = ("--connection", row["connection"], "--number", row["number"])
    said = invoke("show", place, *which).splitlines()
    assert said[0].startswith(f"Produce, request {row['number']} of connection {row['connection']}, ")
    assert f"Why: {row['explanation']}" in said
    assert sum("topicId: " in line for line in said) == 2  # of both frames
    before = said[said.index("Before it on the connection") + 2 :]
    assert [int(line.split()[0]) for line in before] == list(range(row["number"] - 5, row["number"] + 1))
    assert before[-1].endswith("yes") and not before[0].endswith("yes")
    assert len(invoke("show", place, *which, "--before", 0).splitlines()) == len(said) - 5
    with pytest.raises(KproxyError, match="no connection 5 in"):
        invoke("show", place, "--connection", 5, "--number", 1)
    with pytest.raises(KproxyError, match="has no request with the number 99999"):
        invoke("show", place, "--connection", row["connection"], "--number", 99999)
    invoke("convert", place, "--out", tmp_path / "tables")
    with pytest.raises(KproxyError, match="tables do not hold the frames"):
        invoke("show", tmp_path / "tables", *which)
    with pytest.raises(KproxyError, match="there is no such file"):
        invoke("show", tmp_path / "gone.pcap", *which)
