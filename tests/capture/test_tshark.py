"""Requests and answers by API and version, beside what tshark counts in the same captures.

tshark says itself which versions its tables do not have; the answers of the others are compared. Every difference is a
line of `tshark.csv`, with its reason; a difference that is not there fails, and a line that no longer holds.
"""

import csv
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from kproxy.protocol.schema import api_name
from kproxy.wire.events import ANSWERED, REQUEST_NOT_SEEN
from tests import captures
from tests.capture.test_flows import WHOLE, Seen

PORTS = (9091, 9092, 9093, 9094, 9191, 9192, 9193)
FIELDS = (
    "kafka.request_key",
    "kafka.request.version",
    "kafka.response_key",
    "kafka.response.version",
    "kafka.unsupported_api_version",
)
TABLE = Path(__file__).with_name("tshark.csv")


@cache
def release():
    """Major and minor: the table is of one of them."""
    return subprocess.run(["tshark", "--version"], capture_output=True, text=True, check=True).stdout.split()[2][:3]


def counted_by_tshark(path):
    """(requests, answers, versions that its tables do not have), by API key and version."""
    command = ["tshark", "-n", "-r", str(path), "-Y", "kafka", "-T", "fields", "-E", "occurrence=a"]
    for port in PORTS:
        command += ["-d", f"tcp.port=={port},kafka"]
    for field in FIELDS:
        command += ["-e", field]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    requests, answers, unknown = Counter(), Counter(), set()
    for line in done.stdout.splitlines():
        *columns, unsupported = line.split("\t")
        keys, versions, answered_keys, answered_versions = (
            [int(number) for number in column.split(",") if number] for column in columns
        )
        asked = list(zip(keys, versions, strict=True))
        requests.update(asked)
        answers.update(zip(answered_keys, answered_versions, strict=True))
        if unsupported and len(set(asked)) == 1:
            unknown.update(asked)
    return requests, answers, unknown


def differences(name):
    """(api, version, what) -> (ours, tshark's)"""
    theirs, their_answers, unknown = counted_by_tshark(captures.capture(name))
    exchanges = [exchange for _, exchange in Seen(captures.capture(name)).exchanges]
    asked = [e for e in exchanges if e.outcome is not REQUEST_NOT_SEEN]
    ours = Counter((e.plan.api_key, e.plan.api_version) for e in asked)
    our_answers = Counter((e.plan.api_key, e.plan.api_version) for e in asked if e.outcome is ANSWERED)
    assert ours.keys() - unknown and our_answers
    found = {}
    for what, mine, other in (("request", ours, theirs), ("answer", our_answers, their_answers)):
        for key, version in sorted(mine.keys() | other.keys()):
            if mine[key, version] != other[key, version] and (what == "request" or (key, version) not in unknown):
                found[api_name(key), str(version), what] = str(mine[key, version]), str(other[key, version])
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_tshark_counts_the_same_but_for_what_is_listed(name):
    if release() != "4.0":
        pytest.skip(f"the table of differences is tshark 4.0's, and this is {release()}")
    with TABLE.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["capture"] == name]
    assert all(line["why"] for line in lines)
    listed = {(line["api"], line["version"], line["of"]): (line["kproxy"], line["tshark"]) for line in lines}
    assert differences(name) == listed
