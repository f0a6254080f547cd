"""Thousands of damaged captures: flipped bits, cuts and splices, in packets and in the file around them.

No crash, no hang, bounded memory. The request and the response of each reported exchange exist: their headers are those
of the undamaged capture, where an independent decoder found them, or result from flipped bits. A cut can also split a
header itself; that is rare, and counted.
"""

import random
import resource
import signal
from collections import defaultdict
from functools import cache
from struct import unpack

import pytest

from kproxy.capture.columns import mapped, pairs
from kproxy.capture.dissection.packets import SYN
from kproxy.core import native
from kproxy.wire.bodies import BATCHES
from kproxy.wire.events import FAILED, NONE, REQUEST_NOT_SEEN
from tests import captures
from tests.capture import packet
from tests.capture.connections.test_flows import Seen

RUNS = 3000
PARTS = 4  # of the runs, each of which is a test
BROKER_PORT = 9092
PORTS = range(34, 38)  # the offset of the ports in a packet: Ethernet, IPv4 without options


@cache
def records():
    return list(packet.records(captures.capture("k41_BASE").read_bytes()))


@cache
def headers():
    """The bytes of each frame's header: the packet's ports, then the header; as (record, offset in it)."""
    streams = defaultdict(dict)  # position -> (record, offset, bytes) of a segment
    firsts = {}
    for number, (_, data, _) in enumerate(records()):
        total = unpack(">H", data[16:18])[0]
        source, target, seq = unpack(">HHI", data[34:42])
        payload = 34 + (data[46] >> 4) * 4
        first = firsts.setdefault((source, target), seq + (data[47] & SYN) // SYN)
        if payload < 14 + total:
            streams[source, target].setdefault(seq - first & 0xFFFFFFFF, (number, payload, data[payload : 14 + total]))
    found = []
    for (_, target), segments in streams.items():
        whole = b"".join(data for _, (_, _, data) in sorted(segments.items()))
        at = 0
        while at < len(whole):
            size = 14 + max(0, int.from_bytes(whole[at + 12 : at + 14], signed=True)) if target == BROKER_PORT else 8
            places = []
            for position, (number, payload, data) in segments.items():
                shared = range(max(at, position), min(at + size, position + len(data)))
                places += [(place, number, payload + place - position) for place in shared]
            places = [(number, offset) for _, number, offset in sorted(places)]
            found.append([*((places[0][0], offset) for offset in PORTS), *places])
            at += 4 + int.from_bytes(whole[at : at + 4])
        assert at == len(whole)
    return found


@cache
def header_at():
    """(record, offset) -> the header that contains this byte."""
    return {place: header for header in headers() for place in header}


def reported_headers(header):
    """The values that an exchange reports from ports and header: for a request, without the client id and with it."""
    source, target = unpack(">HH", header[:4])
    if len(header) == 12:
        size, identity = unpack(">Ii", header[4:])
        return {(target, source, size + 4, identity)}
    size, key, version, identity, _ = unpack(">Ihhih", header[4:18])
    request = source, target, size + 4, key, version, identity
    return {request, (*request, header[18:].decode(errors="replace"))}


@cache
def unharmed():
    whole = [data for _, data, _ in records()]
    return set().union(
        *(reported_headers(bytes(whole[number][offset] for number, offset in header)) for header in headers())
    )


def damaged(dice):
    """(the file, whether it was cut or spliced, headers that result from flipped bits)"""
    count = dice.randrange(100, 800)
    first = dice.randrange(len(records()) - count)
    data = bytearray(packet.pcap(records()[first : first + count]))
    starts, at = [], 24
    for _, frame, _ in records()[first : first + count]:
        starts.append(at + 16)
        at += 16 + len(frame)
    places = [dice.randrange(24, len(data)) for _ in range(dice.choice((0, 1, 3, 10, 60)))]
    # and in critical places: in the packet's headers and the first frame's
    places += [min(start + dice.randrange(100), len(data) - 1) for start in dice.sample(starts, dice.choice((0, 1, 5)))]
    for place in places:
        data[place] ^= 1 << dice.randrange(8)
    flipped = set()
    for place in places:
        number = sum(start <= place for start in starts) - 1
        header = header_at().get((first + number, place - starts[number]), ())
        if header and all(first <= number < first + count for number, _ in header):
            flipped |= reported_headers(bytes(data[starts[number - first] + offset] for number, offset in header))
    torn = dice.choice((0, 0, 1, 3))
    for _ in range(torn):
        at, size = dice.randrange(24, len(data)), dice.randrange(4000)
        piece = data[at : at + size]
        if dice.random() < 0.5:
            del data[at : at + size]
        else:
            at = dice.randrange(24, len(data))
            data[at:at] = piece
    return bytes(data), bool(torn), flipped


def unknown_frames(seen, known):
    """Requests and responses of exchanges whose headers are unknown."""
    for info, exchange in seen.exchanges:
        ports = info.client_port, info.broker_port
        if exchange.outcome is not REQUEST_NOT_SEEN:
            plan = exchange.plan
            request = *ports, exchange.request_bytes, plan.api_key, plan.api_version, exchange.correlation_id
            if exchange.client_id is not None:
                request = *request, exchange.client_id
            if request not in known:
                yield request
        if exchange.response_start != NONE and exchange.decoded is not FAILED:
            answer = *ports, exchange.response_bytes, exchange.correlation_id
            if answer not in known:
                yield answer


@pytest.mark.ring2
@pytest.mark.timeout(900)  # each capture has a limit of CPU time; on a busy machine that takes longer
@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_captures_raise_nothing_and_invent_nothing(tmp_path, part, monkeypatch):
    # so that some exchanges are converted by column, as in long captures
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 128)
    monkeypatch.setattr(pairs, "WORTH", 16)
    path = tmp_path / "damaged.pcap"
    signal.signal(signal.SIGVTALRM, lambda *_: pytest.fail("a damaged capture keeps it busy for 10 CPU seconds"))
    assert len(unharmed()) > 1000
    exchanges = at_once = torn_apart = 0
    grown = []
    for seed in range(part, RUNS, PARTS):
        data, torn, flipped = damaged(random.Random(seed))
        path.write_bytes(data)
        signal.setitimer(signal.ITIMER_VIRTUAL, 10)
        seen = Seen(path, detail=BATCHES)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        found = list(unknown_frames(seen, unharmed() | flipped))
        assert torn or not found, seed
        torn_apart += len(found)
        exchanges += len(seen.exchanges)
        at_once += seen.at_once
        grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert exchanges > 100 * RUNS // PARTS
    assert at_once > exchanges / 10 or native() is None
    assert torn_apart < exchanges / 10_000
    assert grown[-1] - grown[len(grown) // 4] < 32 * 1024  # KiB, of files of up to 280
