"""Exchanges go to another process whole and in order, or are dropped and counted; a relay never waits."""

import random
import socket
import time

from hypothesis import given
from hypothesis import strategies as st

from kproxy.proxy.filters import feed
from kproxy.proxy.filters.feed import Feed, KeptExchange, Unpacker, Whose, packed
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.interest import Interest
from kproxy.wire.observing.kept import Kept
from tests.wire.playbook import Dialogue, request, response

JOIN = 11
INFO = ConnectionInfo("default", "live:default", "10.0.0.1", 1, "b", 9092, 3, 10**18)
WHOSE = Whose("default", "10.0.0.1", 3, INFO.id, "live:default", "User:a", (INFO.broker_address, INFO.broker_port))


@given(st.lists(st.tuples(st.binary(max_size=300), st.none() | st.binary(max_size=300))), st.integers(0, 1 << 32))
def test_any_split_of_the_stream_gives_the_same_exchanges(frames, seed):
    dice = random.Random(seed)
    sent = [KeptExchange(WHOSE, JOIN, 5, number, 7, 8, *pair) for number, pair in enumerate(frames)]
    stream = b"".join(part for each in sent for part in packed(each))
    unpacker, got = Unpacker(), []
    while stream:
        size = dice.randrange(1, 200)
        got += unpacker.feed(stream[:size])
        stream = stream[size:]
    assert got == sent


def exchanges(count, payload=50):
    kept = Kept({JOIN})
    talk = Dialogue(Interest(kept=kept))
    ask = {"groupId": "g", "protocols": [{"name": "range", "metadata": bytes(payload)}]}
    for number in range(count):
        talk.client(request(JOIN, 5, number, ask)).broker(response(JOIN, 5, number))
    return talk.events


def received(sock, count):
    unpacker, got = Unpacker(), []
    sock.settimeout(20)
    while len(got) < count:
        got += unpacker.feed(sock.recv(1 << 16))
    return got


def test_the_exchanges_that_sessions_keep_arrive_whole_and_in_order():
    ours, theirs = socket.socketpair()
    sender = Feed()
    left_out = {}
    take = sender.connected(INFO, "User:a", left_out)
    take(exchanges(3))  # before a reader is connected
    sender.use(ours)
    take(exchanges(2, 300_000))
    got = received(theirs, 5)
    assert [(each.whose, each.number) for each in got] == [(WHOSE, number) for number in (0, 1, 2, 0, 1)]
    assert got[0].request == exchanges(1)[0].request_frame and len(got[3].request) > 300_000
    end = time.monotonic() + 60
    while sender.waiting_bytes:
        assert time.monotonic() < end
        time.sleep(0.01)
    sender.close()
    assert not left_out


def test_without_a_reader_exchanges_beyond_the_queue_are_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(feed, "QUEUE_BYTES", 100_000)
    sender = Feed()
    left_out = {}
    take = sender.connected(INFO, None, left_out)
    take(exchanges(100, 10_000))
    assert left_out["queue_full"] > 80 and sender.waiting_bytes <= 100_000
    ours, theirs = socket.socketpair()
    sender.use(ours)
    received(theirs, 100 - left_out["queue_full"])
    theirs.close()
    before = left_out["queue_full"]
    end = time.monotonic() + 60
    while left_out["queue_full"] == before:  # the reader has gone: the queue for the next one has the same bound
        assert time.monotonic() < end
        take(exchanges(10, 10_000))
        time.sleep(0.02)
    sender.close()


def test_exchanges_lost_with_their_reader_no_longer_count_as_queued():
    """Otherwise each exit of that process would make the queue smaller for good."""
    sender = Feed()
    left_out = {}
    take = sender.connected(INFO, None, left_out)
    ours, theirs = socket.socketpair()
    theirs.close()
    take(exchanges(5))
    sender.use(ours)
    end = time.monotonic() + 60
    while sender.waiting_bytes or left_out != {"queue_full": 5}:
        assert time.monotonic() < end, (sender.waiting_bytes, left_out)
        time.sleep(0.01)
    sender.close()
