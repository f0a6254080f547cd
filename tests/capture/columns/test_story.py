"""A small capture with everything that can happen: all its rows, whatever way they are read.

`story.txt` has the rows, with times in microseconds since the first packet.
"""

from pathlib import Path

import pytest

from kproxy.capture.columns import mapped, pairs
from kproxy.capture.dissection import packets
from kproxy.capture.formats import pcap, pcapng
from tests.capture import packet, story
from tests.capture.columns.test_inorder import NEVER, results
from tests.native import reads_by_core

pytestmark = reads_by_core
EXPECTED = Path(__file__).with_name("story.txt")
USUAL = {None, 0, "answered", "full", "plain"}  # these values are not written
OF_CONNECTION = ("late_answer_since_ns", "closed_ns")
OF_EXCHANGE = ("request_start_ns", "request_end_ns", "response_start_ns", "response_end_ns")
SIZES = ("request_bytes", "response_bytes")
SAME = {  # values that are equal in all rows, or that other values of the row determine
    *("source", "cluster", "time", "connection", "client_address", "client_port", "broker_address", "broker_port"),
    *("client_id", "api", "api_key", "api_version", "error", "number", "latency_ns", "total_ns", "broker_ns"),
}


def since(time_ns):
    """Microseconds since the first packet."""
    return "-" if time_ns is None else str((time_ns - story.BEGIN_NS) // 1000)


def values(row, names=()):
    found = []
    for name, value in row.items():
        if value not in USUAL and name not in SAME and name not in names:
            found.append(f"{name}={since(value) if name in OF_CONNECTION else value}")
    return found


def written(path, fewest):
    """The rows of a capture as lines of text, and how many exchanges were converted by column."""
    rows, quality, taken = results(path, fewest)
    lines = []
    for row in sorted(rows["connections"], key=lambda row: (row["client_port"], row["start_ns"])):
        times = since(row["start_ns"]), since(row["end_ns"])
        lines.append(" ".join(("connection", str(row["client_port"]), *times, *values(row, ("start_ns", "end_ns")))))
    for row in sorted(
        rows["exchanges"], key=lambda row: (row["client_port"], row["request_end_ns"] or row["response_end_ns"])
    ):
        asked = [since(row[name]) for name in OF_EXCHANGE] + [str(row[name]) for name in SIZES]
        lines.append(" ".join(("exchange", str(row["client_port"]), *asked, *values(row, (*OF_EXCHANGE, *SIZES)))))
    for kind, count, size, first_ns, last_ns, _ in quality:
        lines.append(f"quality {kind} {count} {size} {since(first_ns)} {since(last_ns)}")
    assert not rows["partitions"] and not rows["batches"]
    return lines, taken


def blocks(frames):
    """A pcapng file with two interfaces of different kinds that alternate."""
    parts = [packet.section(), packet.interface(), packet.interface(packets.RAW, options=packet.option(9, b"\x09"))]
    for number, (time_ns, data, length) in enumerate(frames):
        ticks = time_ns if number % 2 else time_ns // 1000
        data, length = (data[14:], length - 14) if number % 2 else (data, length)
        parts.append(packet.enhanced(data, ticks, name=number % 2, original=length))
    return b"".join(parts)


def on_wire(link, wrap):
    """Packets with another link layer."""
    return lambda frames: packet.pcap(
        [
            (time_ns, wrap(number, data[14:]), length - 14 + len(wrap(number, b"")))
            for number, (time_ns, data, length) in enumerate(frames)
        ],
        link=link,
    )


WAYS = {
    "pcap": packet.pcap,
    "pcap of another machine": lambda frames: packet.pcap(frames, order=">", nano=True),
    "pcapng": blocks,
    "IP": on_wire(packets.RAW, lambda number, data: data),
    "SLL": on_wire(packets.SLL, lambda number, data: bytes(14) + b"\x08\0" + data),
    "VLAN": on_wire(packets.ETHERNET, lambda number, data: bytes(12) + b"\x81\0\0\7\x08\0" + data),
    "some in a VLAN": on_wire(
        packets.ETHERNET, lambda number, data: bytes(12) + b"\x81\0\0\7" * (number % 3 > 0) + b"\x08\0" + data
    ),
    "some in two": on_wire(
        packets.ETHERNET, lambda number, data: bytes(12) + b"\x81\0\0\7" * (number % 3) + b"\x08\0" + data
    ),
}


@pytest.mark.parametrize("fewest", (1, NEVER), ids=("by column", "one by one"))
@pytest.mark.parametrize("window", (1, 150, 400, 1000, 1 << 20))
@pytest.mark.parametrize("way", WAYS)
def test_the_rows_are_those_of_the_file(tmp_path, monkeypatch, way, window, fewest):
    for module in (pcap, pcapng):
        monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(pairs, "WORTH", 0)
    monkeypatch.setattr(mapped, "FIRST_RECORDS", max(1, window // 100))
    monkeypatch.setattr(mapped, "RECORDS", max(1, window // 50))
    path = tmp_path / "story"
    path.write_bytes(WAYS[way](story.packets_of_story()))
    lines, taken = written(path, fewest)
    assert lines == EXPECTED.read_text().splitlines()
    assert fewest == 1 or not taken
    assert fewest != 1 or window < 1 << 20 or taken > 40 or not way.startswith("pcap") or way == "pcapng"


@pytest.mark.parametrize("fewest", (1, NEVER), ids=("by column", "one by one"))
@pytest.mark.parametrize("number", (0, -1, -2, 1 << 31, (1 << 31) - 1))
def test_times_and_numbers_may_begin_at_zero_and_wrap_anywhere(tmp_path, monkeypatch, number, fewest):
    """The first packet has time 0; sequence numbers begin at 0, or wrap in the handshake."""
    monkeypatch.setattr(pairs, "WORTH", 0)
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 8)
    monkeypatch.setattr(story, "BEGIN_NS", 0)
    path = tmp_path / "story"
    path.write_bytes(packet.pcap(story.packets_of_story(0, (number, -1 - number), (number, number))))
    assert written(path, fewest)[0] == EXPECTED.read_text().splitlines()
