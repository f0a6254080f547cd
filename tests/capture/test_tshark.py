"""Exchanges of captures compared with what Wireshark shows of the same captures.

pyshark shows every message of some captures, which is compared with an exchange. tshark counts requests and responses
of all captures by API and version. It reports the versions that its tables lack; the responses of all other versions
are compared. Every difference is a line of `tshark.csv` with its reason, for a release of tshark; an unlisted
difference fails, and so does a line that no longer holds.
"""

import asyncio
import csv
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pyshark
import pytest

from kproxy.protocol.schema import api_name
from kproxy.wire.events import ANSWERED, REQUEST_NOT_SEEN
from tests import captures
from tests.capture.connections.test_flows import WHOLE, Seen

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
    """Major and minor version, as in the table."""
    version = subprocess.run(["tshark", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    return ".".join(version.split(".")[:2])


def counted_by_tshark(path):
    """(requests, responses, versions that its tables lack), by API key and version."""
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
    """(api, version, what) -> (kproxy's count, tshark's)"""
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


def check(name, found, release):
    """The differences must be those listed for this release of tshark.

    Another release may know more versions, or differ less: it must have no new difference.
    """
    with TABLE.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["capture"] == name]
    assert all(line["why"] for line in lines)
    listed = {
        (line["api"], line["version"], line["of"]): (line["kproxy"], line["tshark"])
        for line in lines
        if line["release"] == release
    }
    if release in releases():
        assert found == listed
    else:
        assert found.keys() <= {(line["api"], line["version"], line["of"]) for line in lines}


@cache
def releases():
    with TABLE.open(newline="") as file:
        return {line["release"] for line in csv.DictReader(file)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WHOLE)
def test_tshark_counts_the_same_except_for_listed_differences(name):
    check(name, differences(name), release())


def test_a_release_without_a_list_has_no_new_differences():
    name = "k41_java_cluster"
    key = ("ListPartitionReassignments", "0", "answer")
    check(name, {}, "99.0")
    check(name, {key: ("2", "1")}, "99.0")
    with pytest.raises(AssertionError):
        check(name, {("Fetch", "12", "answer"): ("2", "1")}, "99.0")
    with pytest.raises(AssertionError):
        check(name, {}, "4.0")


# --- exchange by exchange --------------------------------------------------------------------------------------------

# About 5,000 messages: pyshark reads some 300 per second.
BY_PACKET = ("k111_kcat_sarama", "k0822_python147", "k0102_python147", "k41_kafkajs")


class Packets:
    """A capture's Kafka messages as pyshark shows them, each at the time of the packet with its last byte."""

    def __init__(self, path):
        self.requests, self.answers, self.pairs, self.unknown = Counter(), Counter(), Counter(), set()
        decode = {f"tcp.port=={port}": "kafka" for port in PORTS}
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # pyshark uses it; after a test with a loop of its own there is none
        packets = pyshark.FileCapture(str(path), display_filter="kafka", decode_as=decode, keep_packets=False)
        try:
            for found in packets:
                seconds, _, fraction = found.sniff_timestamp.partition(".")
                time_ns = int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0"))
                source, target = int(found.tcp.srcport), int(found.tcp.dstport)
                for layer in found.get_multiple_layers("kafka"):
                    self._message(layer, source, target, time_ns)
        finally:
            packets.close()
            asyncio.set_event_loop(None)
            loop.close()

    def _message(self, layer, source, target, time_ns):
        def field(name):
            value = layer.get_field(name)
            return None if value is None else str(value)

        size, correlation_id = 4 + int(field("len")), int(field("correlation_id"))
        if field("request_key") is not None:
            plan = int(field("request_key")), int(field("request_version"))
            self.requests[source, target, correlation_id, *plan, field("client_id"), size, time_ns] += 1
            if field("unsupported_api_version") is not None:
                self.unknown.add(plan)
            return
        self.answers[target, source, correlation_id, size, time_ns] += 1
        if field("response_key") is not None:
            plan = int(field("response_key")), int(field("response_version"))
            self.pairs[target, source, correlation_id, *plan, time_ns] += 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BY_PACKET)
def test_every_exchange_equals_wiresharks(name):
    """Ports, correlation id, API, version, client id, size and times; and the pairing of requests and responses."""
    theirs = Packets(captures.capture(name))
    seen = Seen(captures.capture(name))
    requests, answers, pairs = Counter(), Counter(), Counter()
    for info, exchange in seen.exchanges:
        assert exchange.outcome is not REQUEST_NOT_SEEN
        place, plan = (info.client_port, info.broker_port, exchange.correlation_id), exchange.plan
        requests[
            *place, plan.api_key, plan.api_version, exchange.client_id, exchange.request_bytes, exchange.request_end
        ] += 1
        if exchange.outcome is ANSWERED:
            answers[*place, exchange.response_bytes, exchange.response_end] += 1
            pairs[*place, plan.api_key, plan.api_version, exchange.response_end] += 1
    assert requests == theirs.requests

    # The first response of a connection that was open before, whose request was not captured: its bytes are skipped.
    assert not answers - theirs.answers
    more = theirs.answers - answers
    asked = {key[:3] for key in requests}
    assert not asked & {key[:3] for key in more}
    assert sum(more.values()) <= seen.quality.count("midstream")
    assert sum(size for *_, size, _ in more) <= seen.quality.size("resync") + seen.quality.size("undecided")

    found = {}
    for key, version in {key[3:5] for key in pairs | theirs.pairs} - theirs.unknown:
        ours, other = (sum(n for at, n in each.items() if at[3:5] == (key, version)) for each in (pairs, theirs.pairs))
        if ours != other:
            found[api_name(key), str(version), "answer"] = str(ours), str(other)
    check(name, found, release())
    listed = {(api, version) for api, version, _ in found}
    wrong = {(api_name(key), str(version)) for *_, key, version, _ in theirs.pairs - pairs}
    assert wrong <= listed  # pairs that Wireshark matches differently are listed with a reason
    assert (pairs & theirs.pairs).total() > 0.6 * pairs.total()
