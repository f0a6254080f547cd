"""ZooKeeper connections of captures have the events of their sessions: from the beginning, from the middle, with
gaps."""

import random
from collections import Counter
from functools import cache

import pytest

from kproxy.capture.connections import content
from kproxy.capture.connections.flow import Handlers
from kproxy.capture.connections.flows import Flows
from kproxy.capture.dissection.keys import SHARDS
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from kproxy.zookeeper.session import CLIENT, SERVER, Notification, Operation, Session
from tests.capture import packet
from tests.zookeeper.traffic import DATA, PORT, packets, talks

CHANGES = ("create", "delete", "setData")


class Read:
    """The events of the ZooKeeper connections of a capture."""

    def __init__(self, path, *, shards=range(SHARDS), listens=True, **options):
        self.events, self.infos, self.quality = [], [], Quality()
        handlers = Handlers(
            lambda flow: lambda events: None, lambda *_: None, lambda flow: None, self.connected if listens else None
        )
        flows = Flows("test", self.quality, handlers, shards=shards, **options)
        for window in Capture([path], self.quality).windows():
            flows.window(window)
        flows.finish()

    def connected(self, info):
        self.infos.append(info)
        return self.events.extend

    def changes(self, after_ns=0):
        """The completed changes of the tree, each once; without the session id, which a connection joined midstream
        does not have."""
        return {
            (event.xid, event.zxid)
            for event in self.events
            if isinstance(event, Operation) and event.op in CHANGES and event.zxid and event.request_start > after_ns
        }


@cache
def whole():
    return Read(DATA / "k0102_zkgroup_a.pcap.zst")


def comparable(events):
    return Counter(
        (event.op, event.session, event.xid, event.zxid, event.error)
        if isinstance(event, Operation)
        else (event.type, event.session, event.path)
        for event in events
    )


def written(tmp_path, kept):
    path = tmp_path / "some.pcap"
    path.write_bytes(packet.pcap(kept))
    return path


def test_a_capture_gives_the_events_of_its_sessions():
    direct = []
    for talk in talks():
        session = Session()
        for side, data, now in talk.parts:
            session.receive(side, data, now)
        session.close()
        direct += session.events
    assert comparable(whole().events) == comparable(direct)
    assert len(whole().infos) == len(talks()) == whole().quality.count("zookeeper")
    assert {info.broker_port for info in whole().infos} == {PORT}
    for flaw in ("zookeeper_fault", "zookeeper_unread", "resync", "not_kafka"):
        assert not whole().quality.count(flaw), flaw
    parts = [Read(DATA / "k0102_zkgroup_a.pcap.zst", shards=range(start, SHARDS, 3)) for start in range(3)]
    assert comparable(event for part in parts for event in part.events) == comparable(direct)


@pytest.mark.parametrize("options", [{}, {"zookeeper_ports": [PORT]}, {"ports": [9092], "zookeeper_ports": [PORT]}])
def test_connections_joined_midstream_are_recognised_by_their_frames(tmp_path, options):
    kept = packets()[len(packets()) // 2 :]
    begin_ns = kept[0][0]
    late = Read(written(tmp_path, kept), **options)
    assert late.quality.count("midstream") >= 10
    settled_ns = begin_ns + 3_000_000_000  # a client pings every two seconds
    assert late.changes(settled_ns) == whole().changes(settled_ns)
    assert len(late.changes(settled_ns)) > 100
    assert {info.broker_port for info in late.infos} == {PORT}


def test_gaps_lose_only_the_frames_in_them(tmp_path):
    chance = random.Random(3)
    lossy = Read(written(tmp_path, [each for each in packets() if chance.random() > 0.01]))
    assert lossy.quality.count("gap") > 20
    assert lossy.changes() <= whole().changes()
    assert len(lossy.changes()) > 0.9 * len(whole().changes())
    fired = [sum(isinstance(event, Notification) for event in read.events) for read in (lossy, whole())]
    assert fired[0] > 0.9 * fired[1]


def test_other_ports_are_ignored():
    asked = Read(DATA / "k0102_zkgroup_a.pcap.zst", ports=[9092])
    assert not asked.events
    assert asked.quality.count("other_ports") > 1000
    counted = Read(DATA / "k0102_zkgroup_a.pcap.zst", listens=False)
    assert counted.quality.count("zookeeper") == len(talks())


def test_zookeeper_frames_are_recognised_midstream():
    sides = Counter()
    for talk in talks():
        for side, data, _ in talk.parts[2:]:  # after the connect
            found = content.zookeeper_side(memoryview(data))
            assert found in (None, side)
            sides[found] += 1
    assert sides[CLIENT] > 1500
    assert sides[SERVER] > 300
