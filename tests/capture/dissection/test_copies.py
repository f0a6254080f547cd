"""A packet is a copy if a plain search finds the same packet within the last second, whatever the windows."""

import random
from collections import Counter
from struct import pack_into, unpack_from

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kproxy.capture.columns import inorder, mapped
from kproxy.capture.columns.inorder import AT_ONCE_NS
from kproxy.capture.dissection import copies
from kproxy.capture.dissection.copies import Recent
from kproxy.capture.dissection.packets import ETHERNET, SAME_PACKET_NS, SYN, Dissector
from kproxy.capture.formats import pcap
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from tests.capture import packet
from tests.capture.columns.test_inorder import packet_of
from tests.capture.connections.test_flows import Seen, Wire, answer, identity, request
from tests.captures import capture


def compared_fields(data):
    """Addresses and ports, IPv4's identification and length, and TCP's header without checksum and urgent pointer."""
    segment = Dissector(Quality()).segment(ETHERNET, data, 0, len(data), 0)
    _, key, _, _, bits, _, start, _, length = segment
    tcp = start - (bits >> 12 << 2)
    identity = data[tcp - 16 : tcp - 14] if len(key) == 12 else b""
    return key, identity, length, data[tcp : tcp + 16], bits >> 12, data[tcp + 20 : start][:12]


def is_copy(packets, index):
    """Whether the packet equals an earlier one."""
    time_ns, one = packets[index]
    before = [each for each in packets[:index] if each[0] >= time_ns - SAME_PACKET_NS]
    latest = max((stamp_ns for stamp_ns, each in before if each == one), default=-SAME_PACKET_NS)
    if latest < time_ns - SAME_PACKET_NS or latest < 0:
        return False
    others = {each[1] for _, each in before if each[0] == one[0] and each[3][4:8] != one[3][4:8]}
    is_syn = one[3][13] & SYN and any(one[1])
    has_own = bool(others or is_syn) and one[1] not in others
    return time_ns - latest <= AT_ONCE_NS or inorder.has_timestamp(bytes(16) + one[5]) or has_own


def is_whole(data):
    """Whether the packet has a segment with its complete TCP header."""
    segment = Dissector(Quality()).segment(ETHERNET, data, 0, len(data), 0)
    if segment is None:
        return False
    _, key, _, _, bits, _, start, _, _ = segment
    tcp = start - (bits >> 12 << 2)
    return data[tcp : tcp + 4] == key[-4:]


@settings(max_examples=60, deadline=None)
@example(5914, 1)  # the same packet 18 windows before
@given(st.integers(0, 1 << 32), st.sampled_from((1, 3, 70, 1 << 10)))
def test_a_copy_equals_a_packet_shortly_before(tmp_path_factory, seed, window_records):
    """Among packets that differ in one bit of a header, as retransmissions do."""
    dice = random.Random(seed)
    datas = [data for data, plain in (packet_of(dice, ETHERNET) for _ in range(15)) if plain]
    for data in [dice.choice(datas) for _ in range(80)] if datas else ():
        changed = bytearray(data)
        if dice.random() < 0.5:
            changed[dice.randrange(14, len(data))] ^= 1
        datas.insert(dice.randrange(len(datas) + 1), bytes(changed))
    datas = [data for data in datas if is_whole(data)]
    times = np.cumsum([dice.choice((0, 1000, 400_000, AT_ONCE_NS, 99_000_000)) for _ in datas]).tolist()
    packets = [(time_ns, compared_fields(data)) for time_ns, data in zip(times, datas, strict=True)]
    expected = [is_copy(packets, index) for index in range(len(packets))]
    path = tmp_path_factory.mktemp("copies") / "some.pcap"
    path.write_bytes(packet.pcap(zip(times, datas, strict=True)))
    found, dissector = [], Dissector(Quality())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "FIRST_RECORDS", window_records)
        patch.setattr(mapped, "RECORDS", window_records)
        patch.setattr(pcap, "WINDOW", 200 * window_records)
        patch.setattr(copies, "MIN_PRUNED", 3)
        recent = Recent()
        for window in Capture([path], Quality()).windows():
            recent.add(window)
            for index, (time_ns, link, start, end, _) in enumerate(window.records):
                segment = dissector.segment(link, window.data, start, end, time_ns)
                if not recent.plain[index]:
                    recent.note(index, segment)
                found.append(recent.has(index, segment))
            recent.let_go()
    assert found == expected


def test_packets_before_a_step_back_in_time_are_forgotten(tmp_path, monkeypatch):
    """Otherwise, in concatenated captures, each packet would be compared with the whole previous capture."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 300)
    monkeypatch.setattr(mapped, "RECORDS", 300)
    whole = capture("k41_java_cluster").read_bytes()
    path = tmp_path / "some.pcap"
    most = []
    for copies_ in (1, 3):
        path.write_bytes(whole[:24] + copies_ * whole[24:])
        recent = Recent()
        held = [0]
        for window in Capture([path], Quality()).windows():
            recent.add(window)
            recent.let_go()
            held.append(len(recent._windows))
        most.append(max(held))
    assert 1 < most[0] < len(held) // 9 and most[1] <= most[0] + 1, (most, len(held))


# --- a connection captured at both of its ends ------------------------------------------------------------------------


def at_both_ends(whole, way_ns, change=lambda data: data):
    """A capture at the client, merged with what would have been captured at the broker at the same time, where `change`
    has been applied to each packet."""
    packets = []
    for time_ns, data, length in packet.records(whole):
        source = unpack_from(">H", data, 34)[0]
        packets.append((time_ns, data, length))
        there_ns = time_ns + (-way_ns if source == packet.BROKER[1] else way_ns)
        changed = change(data)
        packets.append((there_ns, changed, length + len(changed) - len(data)))
    return packet.pcap(sorted(packets, key=lambda each: each[0]))


def tagged(data):
    return data[:12] + b"\x81\0\0\x07" + data[12:]


def with_other_checksum(data):
    """With another checksum: the sender captures the packet before its network card computes it."""
    data = bytearray(data)
    data[50] ^= 0x55
    return bytes(data)


def dialogue(*, stamps, identities, count=80, again=()):
    """Requests and responses, each 20 ms after the one before; those in `again` are retransmitted after 250 ms, with a
    new identification or timestamp."""
    sent, packets, time_ns, identity = [1, 1], [], 1_700_000_000_000_000_000, 100
    ends = packet.CLIENT, packet.BROKER

    def add(side, payload, seq, ack, flags=packet.ACK):
        nonlocal identity
        identity += 1
        stamp = time_ns // 1_000_000 & 0xFFFF_FFFF
        options = b"\1\1\x08\x0a" + stamp.to_bytes(4) + bytes(4) if stamps else b""
        tcp = packet.tcp(
            payload, source=ends[side], target=ends[1 - side], seq=seq, ack=ack, flags=flags, options=options
        )
        ip = packet.ipv4(tcp, source=ends[side], target=ends[1 - side], identity=identity if identities else 0)
        packets.append((time_ns, packet.ethernet(ip)))

    add(0, b"", 0, 0, 2)
    time_ns += 20_000_000
    add(1, b"", 0, 1, 18)
    time_ns += 1_000_000
    add(0, b"", 1, 1)
    for number in range(count):
        for side, payload in enumerate((request(number), answer(number))):
            add(side, payload, sent[side], sent[1 - side])
            if side == 1 and number in again:
                time_ns += 250_000_000
                add(side, payload, sent[side], sent[1 - side])
            sent[side] += len(payload)
            time_ns += 20_000_000
    return packet.pcap(packets)


def seen_by(path, whole):
    path.write_bytes(whole)
    return Seen(path)


@pytest.mark.parametrize("change", (lambda data: data, tagged, with_other_checksum), ids=("same", "tagged", "checksum"))
@pytest.mark.parametrize("way_ns", (2_000_000, 8_000_000))
@pytest.mark.parametrize("stamps, identities", ((True, True), (True, False), (False, True)))
def test_a_packet_captured_at_both_ends_counts_once(tmp_path, change, way_ns, stamps, identities):
    """Retransmissions are counted as at one end alone, and latencies are those at the broker."""
    whole = dialogue(stamps=stamps, identities=identities, again={3, 40})
    one, both = (
        seen_by(tmp_path / "one.pcap", whole),
        seen_by(tmp_path / "both.pcap", at_both_ends(whole, way_ns, change)),
    )
    (flow,), (twice,) = one.flows, both.flows
    assert flow.total("retransmissions") == twice.total("retransmissions") == 2
    assert twice.total("duplicates") == 2 * 80 + 2 + 2  # with payload, and the SYNs
    assert twice.payload_bytes == flow.payload_bytes
    times = [(each.request_start, each.response_start - way_ns) for _, each in one.exchanges]
    assert [(each.request_start, each.response_start) for _, each in both.exchanges] == times
    assert not any(twice.stalled(each) for _, each in both.exchanges)


def recut(time_ns, data, sizes, mss):
    """A segment of Ethernet and IPv4 as offload splits it, into segments of at most these sizes, 1 us apart;
    identifications count segments of `mss` bytes, or are those of the whole segment if that is None."""
    before = 34 + (data[46] >> 4) * 4  # bytes of headers
    payload, identity = data[before:], unpack_from(">H", data, 18)[0]
    start = number = 0
    while start < len(payload):
        part = payload[start : start + sizes[number % len(sizes)]]
        head = bytearray(data[:before])
        step = start // mss if mss else 0
        pack_into(">HH", head, 16, before - 14 + len(part), (identity + step) & 0xFFFF)
        pack_into(">I", head, 38, (unpack_from(">I", data, 38)[0] + start) & 0xFFFFFFFF)
        yield time_ns + 1000 * number, bytes(head) + part
        start, number = start + len(part), number + 1


MSS = 1448
SIZES = (20 * MSS, 3 * MSS + 17, 22 * MSS, 900, 12 * MSS)
LARGE = [request(number, client_id="x" * (size - 14)) for number, size in enumerate(SIZES)]


@pytest.mark.parametrize(("stamps", "identities"), ((True, True), (True, False), (False, True)))
@pytest.mark.parametrize("joined_there", (False, True), ids=("cut on its way", "joined on its way"))
@pytest.mark.parametrize("sizes", ((MSS,), (17 * MSS, MSS, 5 * MSS)), ids=("MSS", "several"))
@pytest.mark.parametrize("window", (1, 1 << 10))
def test_segments_split_or_merged_by_offload_match_those_of_the_other_end(
    tmp_path, monkeypatch, stamps, identities, joined_there, sizes, window
):
    """Retransmissions are still counted: a second later, and in the same millisecond with the next identifications."""
    for name in ("FIRST_RECORDS", "RECORDS"):
        monkeypatch.setattr(mapped, name, window)
    monkeypatch.setattr(pcap, "WINDOW", 70_000 * window)
    here, there, time_ns, seq, identity = [], [], 1_700_000_000_000_000_000, 1, 65_500

    def large(payload, seq, stamp_ms, identity):
        options = b"\1\1\x08\x0a" + stamp_ms.to_bytes(4) + bytes(4) if stamps else b""
        ip = packet.ipv4(packet.tcp(payload, seq=seq, options=options), identity=identity if identities else 0)
        return packet.ethernet(ip)

    for number, payload in enumerate(LARGE):
        stamp = time_ns // 1_000_000 & 0xFFFF_FFFF
        whole = large(payload, seq, stamp, identity)
        here += [(time_ns, whole)]
        there += recut(time_ns + 2_000_000, whole, sizes, MSS if identities else None)
        # its tenth segment is retransmitted at once, if identifications reveal that, and the last one a second later
        if number == 2:
            following = identity + -(-len(payload) // MSS)
            if identities:
                again = large(payload[10 * MSS : 11 * MSS], seq + 10 * MSS, stamp, following)
                here += [(time_ns + 300_000, again)]
                there += [(time_ns + 2_300_000, again)]
            again = large(payload[-MSS:], seq + len(payload) - MSS, stamp + 1000, following + 1)
            here += [(time_ns + 1_000_000_000, again)]
            there += [(time_ns + 1_002_000_000, again)]
            time_ns, identity = time_ns + 1_010_000_000, identity + 2
        identity += -(-len(payload) // MSS)
        seq, time_ns = seq + len(payload), time_ns + 20_000_000
    if joined_there:
        here, there = [(time_ns + 4_000_000, data) for time_ns, data in here], there
    ends = [(1_700_000_000_000_000_000 - 3000, packet.ethernet(packet.ipv4(packet.tcp(seq=0, flags=SYN))))]
    (flow,) = seen_by(tmp_path / "both.pcap", packet.pcap(sorted(ends + here + there, key=lambda each: each[0]))).flows
    assert flow.total("retransmissions") == 1 + identities
    assert sum(flow.payload_bytes) == sum(map(len, LARGE)) + MSS * (1 + identities)
    assert not flow.total("gaps")


@pytest.mark.parametrize("identity", ("counts", "zero", "fixed", "fixed without timestamps"))
@pytest.mark.parametrize("mss", (400, 536, MSS))
def test_offload_with_small_segments_or_one_identification_for_all(tmp_path, mss, identity):
    """As with a clamped MSS, and with a network card that copies the identification to each segment."""
    stamps, counts = "without" not in identity, identity == "counts"
    here, there, time_ns, seq, number = [], [], 1_700_000_000_000_000_000, 1, 0x1234
    syn = packet.ethernet(packet.ipv4(packet.tcp(seq=0, flags=SYN), identity=number - 1))
    for payload in LARGE:
        for again in (False, True):
            part = payload[-mss:] if again else payload
            stamp = b"\1\1\x08\x0a" + (time_ns // 1_000_000 & 0xFFFF_FFFF).to_bytes(4) + bytes(4) if stamps else b""
            tcp = packet.tcp(part, seq=seq + len(payload) - len(part), options=stamp)
            whole = packet.ethernet(packet.ipv4(tcp, identity=0 if identity == "zero" else number))
            here.append((time_ns, whole))
            there += recut(time_ns + 2_000_000, whole, (mss,), mss if counts else None)
            number += -(-len(part) // mss) if counts else 0
            time_ns += 250_000_000
        seq += len(payload)
    found = {}
    for name, packets in (("here", here), ("there", there), ("both", here + there)):
        whole = packet.pcap(sorted([(here[0][0] - 3000, syn), *packets], key=lambda each: each[0]))
        (flow,) = seen_by(tmp_path / f"{name}.pcap", whole).flows
        found[name] = flow.total("retransmissions"), sum(flow.payload_bytes), flow.total("gaps")
    sent = sum(len(payload) + len(payload[-mss:]) for payload in LARGE)
    assert found["here"] == found["there"] == (len(LARGE), sent, 0)
    assert (found["both"] == found["here"]) == stamps  # without timestamps they look like retransmissions


def test_indistinguishable_packets_count_as_retransmissions(tmp_path):
    """Without timestamps, and with one identification for all packets: at another time it may be a retransmission."""
    whole = dialogue(stamps=False, identities=False, again={3, 40})
    (flow,) = seen_by(tmp_path / "both.pcap", at_both_ends(whole, 8_000_000)).flows
    assert flow.total("retransmissions") > 100 and not flow.total("duplicates")


@pytest.mark.parametrize("name", ("k41_java_cluster", "k41_quota", "k0102_python147", "k41_ipv6"))
@pytest.mark.parametrize("way_ns", (2_000_000, 300_000_000))
def test_a_real_capture_with_a_delayed_copy_of_each_packet(tmp_path, name, way_ns):
    path = capture(name)
    records = [(time_ns, data) for time_ns, data, _ in packet.records(path.read_bytes())]
    later = [(time_ns + way_ns, data) for time_ns, data in records]
    one = Seen(path)
    both = seen_by(tmp_path / "both.pcap", packet.pcap(sorted(records + later, key=lambda each: each[0])))
    assert Counter(identity(each) for _, each in both.exchanges) == Counter(identity(each) for _, each in one.exchanges)
    for kind in ("retransmissions", "zero_windows"):
        assert both.kinds().get(kind) == one.kinds().get(kind)
    assert both.quality.size("kafka") == one.quality.size("kafka")


def test_a_closed_window_is_counted_once(tmp_path):
    """Its announcement arrives at the other end when the window is open again there."""
    wire = Wire().shake().ask(1).send(0, window=0).send(0).ask(2)
    closed, opened = wire.packets[5:7]
    wire.packets[7:7] = [closed, opened]
    seen = wire.seen(tmp_path)
    assert seen.flows[0].total("zero_windows") == 1
    assert not seen.flows[0].total("retransmissions")


def test_a_long_way_to_the_other_end_is_no_clock_step(tmp_path):
    """The packets of the other end have timestamps of 300 ms before."""
    whole = dialogue(stamps=True, identities=True)
    assert "clock_step" not in seen_by(tmp_path / "both.pcap", at_both_ends(whole, 300_000_000)).kinds()


def fragments(data, order):
    """An IPv4 packet fragmented by a router for an MTU of 1420."""
    payload, parts = data[34:], []
    for start in range(0, len(payload), 1400):
        head, part = bytearray(data[:34]), payload[start : start + 1400]
        more = 0x2000 if start + 1400 < len(payload) else 0
        pack_into(">H", head, 16, 20 + len(part))
        pack_into(">H", head, 20, more | start // 8)
        parts.append(bytes(head) + part)
    return parts[::order]


@pytest.mark.parametrize("order", (1, -1))
@pytest.mark.parametrize("stamps", (True, False))
def test_a_packet_fragmented_at_one_end_only_counts_once(tmp_path, stamps, order):
    """Retransmissions are still counted, whole or fragmented."""
    packets, time_ns, seq = [], 1_700_000_000_000_000_000, 1
    packets.append((time_ns - 3000, packet.ethernet(packet.ipv4(packet.tcp(seq=0, flags=SYN), identity=99))))
    for number in range(12):
        payload = request(number, client_id="x" * 8000)
        for again in range(1 + (number == 5)):
            at_ns = time_ns + 250_000_000 * again
            stamp = b"\1\1\x08\x0a" + (at_ns // 1_000_000 & 0xFFFF_FFFF).to_bytes(4) + bytes(4) if stamps else b""
            tcp = packet.tcp(payload, seq=seq, options=stamp)
            whole = packet.ethernet(packet.ipv4(tcp, identity=100 + 2 * number + again))
            packets.append((at_ns, whole))
            packets += [(at_ns + 2_000_000 + n, part) for n, part in enumerate(fragments(whole, order))]
        seq, time_ns = seq + len(payload), at_ns + 20_000_000
    (flow,) = seen_by(tmp_path / "both.pcap", packet.pcap(packets)).flows
    assert flow.total("retransmissions") == 1 and not flow.total("gaps")
    assert sum(flow.payload_bytes) == seq - 1 + len(payload)


def test_retransmissions_are_compared_only_with_segments_of_the_same_bytes(tmp_path, monkeypatch):
    """From a bulk sender whose segments all have the same acknowledgement and window."""
    compared = 0
    span = copies._span

    def counting(*args):
        nonlocal compared
        compared += 1
        return span(*args)

    monkeypatch.setattr(copies, "_span", counting)
    wire = Wire().shake()
    stream = b"".join(request(number, client_id="x" * 30_000) for number in range(20))
    segments = [wire.send(0, stream[at : at + 1000]).packets[-1] for at in range(0, len(stream), 1000)]
    wire.packets += segments[100:200] * 2
    seen = wire.seen(tmp_path)
    assert seen.flows[0].total("retransmissions") + seen.flows[0].total("duplicates") >= 200
    assert compared < 2000
