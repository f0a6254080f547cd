"""The packets of one exchange as lines: the first and the last ones of many, and the text of each."""

from dataclasses import replace

import pytest

from kproxy.analysis.questions.parts import CAUSES
from kproxy.convert.packets import Packet
from kproxy.views.packets import lines, parts
from kproxy.wire.events import BROKER, CLIENT

NS = 1_700_000_000_123_456_789


def packet(number, after_ns=0, side=CLIENT, path="/a/b.pcap", **more):
    given = {"payload_bytes": 1460, "flags": "PA", "carries": "", "is_repeated": False, "is_copy": False, **more}
    return Packet(path=path, number=number, time_ns=NS + after_ns, side=side, **given)


def test_none():
    assert list(lines([])) == ["none that the capture holds"]


def test_each_packet_has_its_time_direction_and_content():
    two = [packet(9, carries="request"), packet(1_000, 2_500_000, BROKER, payload_bytes=0, is_repeated=True, flags="A")]
    assert list(lines(two)) == [
        "    9  22:13:20.123456  +0        client -> broker  1.46 kB  PA      request",
        "1,000  22:13:20.125956  +2.50 ms  client <- broker        0  A       sent again",
    ]
    (copy,) = lines([replace(two[1], is_copy=True)])
    assert copy.endswith(" captured twice")
    two[1] = replace(two[1], carries="request", path="/c/d\x1b.pcap")
    assert [line.rpartition("  ")[2] for line in lines(two)] == ["b.pcap", "d\\x1b.pcap"]
    assert "request, sent again  d" in list(lines(two))[1]


@pytest.mark.parametrize(
    ("count", "shown", "first", "more", "last"),
    [
        (4, 4, 4, 0, 0),
        (5, 4, 2, 1, 2),
        (6, 4, 2, 2, 2),
        (6, 5, 2, 2, 2),
        (2_010, 4, 2, 2_006, 2),
        (40, None, 40, 0, 0),
        (41, None, 20, 1, 20),
    ],
)
def test_the_first_and_the_last_of_many_packets_are_shown(count, shown, first, more, last):
    packets = [packet(number) for number in range(1, count + 1)]
    said = list(lines(packets) if shown is None else lines(packets, shown))
    numbers = [int(line.split()[0].replace(",", "")) for line in said if not line.startswith("...")]
    assert numbers == [*range(1, first + 1), *range(count - last + 1, count + 1)]
    assert [line for line in said if line.startswith("...")] == [f"... {more:,} more ..."] * bool(more)


def test_each_part_has_its_share_of_the_total():
    row = {**dict.fromkeys((f"{cause}_ns" for cause in CAUSES), 0), "total_ns": 4_000_000, "broker_ns": 1_000_000}
    assert list(parts({**row, "queue_ns": 1})) == [
        "     1 ns   0.0%  behind earlier requests",
        "  1.00 ms  25.0%  in the broker",
    ]
    for name in (f"{cause}_ns" for cause in CAUSES):
        assert len(list(parts({**row, "broker_ns": 0, name: 9}))) == 1, name
    assert list(parts({**row, "total_ns": 0, "broker_ns": 1})) == ["     1 ns 100.0%  in the broker"]
