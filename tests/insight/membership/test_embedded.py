"""The bytes that group members embed: every version that the official classes of Connect and Streams write is read."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.insight.membership import embedded
from kproxy.insight.membership.embedded import CONNECT, CONNECTOR, STREAMS
from kproxy.protocol import codec
from kproxy.protocol.schema import schema

DATA = Path(__file__).parents[2] / "data"
VECTORS = [json.loads(line) for line in gzip.decompress((DATA / "embedded.jsonl.gz").read_bytes()).splitlines()]
NAMES = ("ConnectWorkerState", "ConnectAssignment", "StreamsSubscriptionInfo", "StreamsAssignmentInfo")


def vectors(name):
    return [(each["version"], bytes.fromhex(each["hex"]), each) for each in VECTORS if each["name"] == name]


def owned(names):
    """Names such as ["a", "a-0"] as connectors and tasks."""
    return {(name.rpartition("-")[0], int(name[-1])) if name[-1].isdigit() else (name, CONNECTOR) for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_each_version_is_read_completely_and_written_back(name):
    found = vectors(name)
    assert [version for version, _, _ in found] == list(schema().data[name].versions)
    for version, data, _ in found:
        header, body = codec.decode_data(name, data)
        assert header == {"version": version}
        assert codec.encode_data(name, version, body) == data


def test_a_workers_metadata_has_its_url_and_its_tasks():
    of_allocation = {version: owned(each["owned"]) for version, _, each in vectors("ConnectAssignment")}
    for version, data, each in vectors("ConnectWorkerState"):
        said = embedded.subscription_of(CONNECT, data)
        assert said.words == f"worker {each['url']}, config offset {each['offset']}"
        assert said.owned == (of_allocation[version] if version else None)


def test_a_workers_assignment_has_new_and_revoked_tasks():
    for version, data, each in vectors("ConnectAssignment"):
        told = embedded.given(CONNECT, data)
        before = frozenset({("old-sink", 2), ("old-sink", 3)})
        kept = {("old-sink", 3)} if version else set()  # workers of the eager protocol get all their tasks
        assert told.after(before) == owned(each["owned"]) | kept
        assert (told.words or "") == ("what is left waits for 300 s" if version else "")
    assert embedded.listed(told.owned) == "clicks-source, orders-sink, orders-sink-0, orders-sink-1"


def consumer(name, field, user_data):
    fields = {"topics": ["in"]} if field == "topics" else {"assignedPartitions": []}
    return codec.encode_data(name, 0, fields | {"userData": user_data})


def test_members_of_streams_are_consumers_with_tasks():
    for version, data, each in vectors("StreamsSubscriptionInfo"):
        said = embedded.subscription_of(STREAMS, consumer("ConsumerProtocolSubscription", "topics", data))
        assert said.topics == ("in",)
        assert said.words.startswith(f"process {each['processId']}")
        assert ("endpoint host-1:7070" in said.words) == (version > 1)
        assert ("state of 0_1" if version > 6 else "had 0_1") in said.words
    for version, data, _ in vectors("StreamsAssignmentInfo"):
        told = embedded.given(STREAMS, consumer("ConsumerProtocolAssignment", "assignedPartitions", data))
        tasks = "active 1001_2001, 1002_2002, 1003_2003; standby 4001_5001, 4002_5002, 4003_5003"
        assert told.words == tasks + ("; error 9001 of Streams" if version > 3 else "")


@pytest.mark.parametrize("version", range(6))
def test_a_subscription_may_end_after_any_field_except_its_topics(version):
    """kafka-go and sarama end version 1 before ownedPartitions; bytes that end inside a field are not read."""
    fields = {"topics": ["a", "b"], "userData": b"\xff\xff\0\0", "generationId": 0x10002, "rackId": "r"}
    fields["ownedPartitions"] = [{"topic": "a", "partitions": [1, 2]}, {"topic": "b", "partitions": [0]}]
    known = min(version, 3)
    whole = codec.encode_data("ConsumerProtocolSubscription", known, fields)
    owned = frozenset({("a", 1), ("a", 2), ("b", 0)})
    ends = {12: (None, None, None), 20: (b"\xff\xff\0\0", None, None)}  # the ends of topics and of user data
    if known >= 1:
        ends |= {50: (b"\xff\xff\0\0", owned, None)}
    if known >= 2:
        ends |= {54: (b"\xff\xff\0\0", owned, None)}
    if known >= 3:
        ends |= {57: (b"\xff\xff\0\0", owned, "r")}
    assert len(whole) == max(ends)
    for end in range(len(whole) + 1):
        said = embedded.subscription_of("consumer", version.to_bytes(2, "big") + whole[2:end])
        assert (said and (said.user_data, said.owned, said.rack)) == ends.get(end)
        assert said is None or said.topics == ("a", "b")


@pytest.mark.parametrize("version", range(6))
def test_an_assignment_may_end_before_its_user_data(version):
    assigned = [{"topic": "a", "partitions": [1, -1]}]
    whole = codec.encode_data("ConsumerProtocolAssignment", 0, {"assignedPartitions": assigned, "userData": b"xyz"})
    for kind in ("consumer", STREAMS):
        for end in range(2, len(whole) + 1):
            told = embedded.given(kind, version.to_bytes(2, "big") + whole[2:end])
            assert (told and told.owned) == ({("a", 1), ("a", -1)} if end in (21, len(whole)) else None)


def test_the_bytes_of_other_types_of_members_are_not_read():
    assert embedded.group_type("sr", "v0") == "sr"
    assert embedded.subscription_of("sr", b"{}") is None and embedded.given("sr", b"{}") is None
    assert embedded.given("sr", b"").owned == frozenset()
    assert len(embedded.group_type("x" * 30_000, None)) == embedded.MAX_TYPE


@given(st.sampled_from([(each["name"], bytes.fromhex(each["hex"])) for each in VECTORS]), st.data())
def test_damaged_bytes_are_read_or_ignored(vector, data):
    _, good = vector
    at = data.draw(st.integers(0, len(good)))
    bad = good[:at] + data.draw(st.binary(max_size=8)) + good[at + data.draw(st.integers(0, 8)) :]
    wrapped = consumer("ConsumerProtocolSubscription", "topics", bad)
    for kind, read in ((CONNECT, bad), (STREAMS, wrapped), (STREAMS, bad)):
        embedded.subscription_of(kind, read)
        embedded.given(kind, read)
    embedded.given(STREAMS, consumer("ConsumerProtocolAssignment", "assignedPartitions", bad))
