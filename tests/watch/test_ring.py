"""The kernel's ring: every packet once and complete; packets that do not fit are counted and reading continues."""

import select
import socket
import time

import pytest

from kproxy.capture.dissection.packets import RAW, Dissector
from kproxy.capture.quality import Quality
from kproxy.watch.filters import program
from kproxy.watch.ring import BLOCK_BYTES, Ring
from tests.watch.live import why_not

BLOCKS = 16

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def pair():
    """Both ends of a connection over loopback, its port, and a ring that sees it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ring = Ring(program([port], loopbacks=[socket.if_nametoindex("lo")]), BLOCKS)
        ring.bind(socket.if_nametoindex("lo"))
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = listener.accept()
            with server:
                yield client, server, port, ring
        ring.close()


def send(client, server, data):
    """All of it, received at the other end."""
    client.settimeout(10)
    server.settimeout(10)
    left = len(data)
    view = memoryview(data)
    while left:
        view = view[client.send(view[: 1 << 16]) :] if len(view) else view
        left -= len(server.recv(1 << 16))


def segments(ring, wait_s=0.3):
    """(source port, sequence number, payload) of all packets until none came for a while."""
    found = []
    dissector = Dissector(Quality())
    poll = select.poll()
    poll.register(ring.fileno(), select.POLLIN)
    while poll.poll(wait_s * 1000) or ring.has_more:
        window = ring.window()
        if window is None:
            continue
        assert len(ring.interface) == len(window.records)
        for time_ns, link, start, end, original in window.records:
            assert link == RAW and abs(time_ns - time.time_ns()) < 60e9 and original == end - start
            segment = dissector.segment(link, window.data, start, end, time_ns)
            assert segment is not None
            held, key, seq, _, _, _, first, stop, length = segment
            assert stop - first == length
            found.append((int.from_bytes(key[-4:-2]), seq, bytes(held[first:stop])))
        ring.release()
    return found


def test_every_packet_once(pair):
    client, server, port, ring = pair
    sent = b"".join(number.to_bytes(4) for number in range(300_000))
    for start in range(0, len(sent), 40_000):
        send(client, server, sent[start : start + 40_000])
    found = segments(ring)
    stream = [(seq, data) for source, seq, data in found if source != port and data]
    assert b"".join(data for _, data in sorted(stream)) == sent
    assert len(set(stream)) == len(stream)
    ring.count()
    assert (ring.packets, ring.dropped) == (len(found), 0)


def test_packets_that_do_not_fit_are_counted_and_reading_continues(pair):
    client, server, port, ring = pair
    for _ in range(2 * BLOCKS):
        send(client, server, bytes(BLOCK_BYTES))
    ring.count()
    assert ring.dropped > 0
    first = segments(ring)
    send(client, server, b"the end")
    assert [data for source, _, data in segments(ring) if data] == [b"the end"]
    dropped = ring.dropped
    ring.count()
    assert ring.dropped == dropped
    assert ring.packets - ring.dropped >= len(first) + 1
    assert not [None for source, _, data in first if source == port and data]


def test_the_filter_can_change(pair):
    client, server, _, ring = pair
    segments(ring)
    ring.attach(program([1]))
    send(client, server, b"unseen")
    assert segments(ring, 0.1) == []
    assert ring.fault() == 0
