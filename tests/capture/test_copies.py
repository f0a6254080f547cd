"""A packet is a copy where a plain search among those shortly before it finds the same one, whatever the windows."""

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kproxy.capture import copies, pcap
from kproxy.capture.captures import Capture
from kproxy.capture.columns import mapped
from kproxy.capture.copies import SAME_PACKET_NS, Recent
from kproxy.capture.packets import ETHERNET, Dissector
from kproxy.capture.quality import Quality
from tests.capture import packet
from tests.capture.columns.test_inorder import packet_of


def what_is_compared(data):
    """Addresses and ports, IPv4's identity and length, and TCP's header without checksum and urgent pointer."""
    segment = Dissector(Quality()).segment(ETHERNET, data, 0, len(data), 0)
    _, key, _, _, bits, _, start, _, length = segment
    tcp = start - (bits >> 12 << 2)
    identity = data[tcp - 16 : tcp - 14] if len(key) == 12 else b""
    return key, identity, length, data[tcp : tcp + 16], data[tcp + 20 : start]


def is_whole(data):
    """Whether there is a segment in it, and all of TCP's header."""
    segment = Dissector(Quality()).segment(ETHERNET, data, 0, len(data), 0)
    if segment is None:
        return False
    _, key, _, _, bits, _, start, _, _ = segment
    tcp = start - (bits >> 12 << 2)
    return data[tcp : tcp + 4] == key[-4:]


@settings(max_examples=60, deadline=None)
@example(5914, 1)  # the same packet 18 windows before
@given(st.integers(0, 1 << 32), st.sampled_from((1, 3, 1 << 10)))
def test_a_copy_is_the_same_packet_at_most_a_millisecond_before(tmp_path_factory, seed, window_records):
    """Nearly the same are those that differ in one bit of a header, as segments sent again do."""
    dice = random.Random(seed)
    datas = [data for data, plain in (packet_of(dice, ETHERNET) for _ in range(15)) if plain]
    for data in [dice.choice(datas) for _ in range(40)] if datas else ():
        changed = bytearray(data)
        if dice.random() < 0.5:
            changed[dice.randrange(14, len(data))] ^= 1
        datas.insert(dice.randrange(len(datas) + 1), bytes(changed))
    datas = [data for data in datas if is_whole(data)]
    times = np.cumsum([dice.choice((0, 1000, 400_000, SAME_PACKET_NS)) for _ in datas]).tolist()
    expected = []
    for index, data in enumerate(datas):
        since_ns = times[index] - SAME_PACKET_NS
        among = [before for time_ns, before in zip(times[:index], datas, strict=False) if time_ns >= since_ns]
        expected.append(what_is_compared(data) in [what_is_compared(each) for each in among])
    path = tmp_path_factory.mktemp("copies") / "some.pcap"
    path.write_bytes(packet.pcap(zip(times, datas, strict=True)))
    found, dissector = [], Dissector(Quality())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "RECENT", len(datas))  # windows this small are more than it keeps of usual ones
        patch.setattr(mapped, "FIRST_RECORDS", window_records)
        patch.setattr(mapped, "RECORDS", window_records)
        patch.setattr(pcap, "WINDOW", 200 * window_records)
        recent = Recent()
        for window in Capture([path], Quality()).windows():
            recent.add(window)
            for index, (time_ns, link, start, end, _) in enumerate(window.records):
                segment = dissector.segment(link, window.data, start, end, time_ns)
                found.append(recent.has(index, segment))
            recent.let_go()
    assert found == expected
