"""Where a split may begin: each limit of a record's header, at the limit and one beyond."""

from struct import pack

import pytest

from kproxy.capture.dissection.packets import ETHERNET, RAW
from kproxy.capture.formats import pcapng, splits
from kproxy.capture.formats.records import MAX_RECORD
from kproxy.capture.formats.splits import CHAIN, DAY_S
from tests.capture import packet

SEGMENT = packet.ethernet(packet.ipv4(packet.tcp(b"ten bytes.")))
SNAP = 96
TIME = 1_700_000_000


def record(seconds=TIME, fraction=0, data=SEGMENT, original=None, order="<"):
    return pack(order + "IIII", seconds, fraction, len(data), len(data) if original is None else original) + data


def records(*odd, at=1, count=CHAIN, order="<", nano=False, snap=SNAP):
    """A file of `count` usual records with odd ones among them at index `at`."""
    usual = [record(order=order)] * count
    return packet.pcap([], order=order, nano=nano, snap=snap) + b"".join([*usual[:at], *odd, *usual[at:]])


def is_boundary(data, place=24, *, is_end=False, walker=splits._Records):
    return walker(data, None, is_end).boundary(place, place + 1) == place


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("nano", (False, True))
@pytest.mark.parametrize("at", (1, CHAIN - 1, CHAIN))
@pytest.mark.parametrize(
    "odd, believed",
    (
        ({}, True),
        ({"fraction": -1}, True),  # the last unit of a second
        ({"fraction": 0}, False),  # a whole second
        ({"seconds": TIME + DAY_S}, True),
        ({"seconds": TIME + DAY_S + 1}, False),
        ({"seconds": TIME - DAY_S}, True),
        ({"seconds": TIME - DAY_S - 1}, False),
        ({"data": b""}, False),
        ({"data": b"1"}, True),
        ({"data": bytes(SNAP), "original": SNAP + 1}, True),  # truncated at the snap length
        ({"data": bytes(SNAP), "original": SNAP - 1}, False),
        ({"data": bytes(SNAP - 1), "original": SNAP}, False),
        ({"data": bytes(SNAP + 1), "original": SNAP + 2}, False),
        ({"data": bytes(1 << 18)}, True),
        ({"data": bytes((1 << 18) + 1)}, False),
    ),
    ids=str,
)
def test_a_record_of_classic_pcap_in_a_chain(odd, believed, at, nano, order):
    """The record after the chain is not checked."""
    if "fraction" in odd:
        odd = {"fraction": (1_000_000_000 if nano else 1_000_000) + odd["fraction"]}
    if "seconds" in odd:  # later records are as late
        rest = record(odd["seconds"], order=order) * CHAIN
        data = records(count=at, order=order, nano=nano) + rest
    else:
        data = records(record(**odd, order=order), at=at, order=order, nano=nano)
    assert is_boundary(data) == (believed or at == CHAIN)


def test_a_larger_snap_length_allows_larger_records_up_to_a_bound():
    for snap, most in ((1 << 19, 1 << 19), (0xFFFF_FFFF, MAX_RECORD)):
        for beyond in (0, 1):
            data = records(record(data=bytes(most + beyond)), snap=snap)
            assert is_boundary(data) == (not beyond)


@pytest.mark.parametrize("cut", (0, 1, len(SEGMENT), len(SEGMENT) + 1, len(SEGMENT) + 16, len(SEGMENT) + 17))
@pytest.mark.parametrize("is_end", (False, True))
def test_a_truncated_chain_is_accepted_only_at_the_end_of_the_file(cut, is_end):
    """The last header must be complete if the file may continue."""
    data = records()
    assert is_boundary(data[: len(data) - cut], is_end=is_end) == (is_end or cut <= len(SEGMENT))


@pytest.mark.parametrize("count", (1, CHAIN - 1, CHAIN))
def test_a_header_at_the_very_end_is_checked_too(count):
    """If the chain reaches it."""
    assert is_boundary(records(record(data=b""), at=count, count=count), is_end=True) == (count == CHAIN)
    data = blocks(raw(0xBAE, 12), at=count, count=count)
    assert is_boundary(data, len(FRONT), is_end=True, walker=splits._Blocks) == (count == CHAIN)


LARGE = packet.ethernet(packet.ipv4(packet.tcp(bytes(100))))


@pytest.mark.parametrize(
    "link, data, original, believed",
    (
        (ETHERNET, SEGMENT, None, True),
        (RAW, SEGMENT[14:], None, True),
        (ETHERNET, SEGMENT[14:], None, False),
        (ETHERNET, packet.ethernet(packet.ipv4(packet.udp(9, b"x" * 20), protocol=17)), None, False),
        (ETHERNET, LARGE[:SNAP], len(LARGE), True),
        (ETHERNET, LARGE[:SNAP], 101, True),
        (ETHERNET, LARGE[:SNAP], 100, False),  # its payload alone is as long
    ),
    ids=("Ethernet", "IP", "IP as Ethernet", "UDP", "cut", "too short", "shorter still"),
)
def test_the_first_record_is_a_segment_of_tcp(link, data, original, believed):
    front = packet.pcap([], snap=SNAP, link=link)
    assert is_boundary(front + record(data=data, original=original) + record() * CHAIN) == believed


def test_a_boundary_is_at_or_after_the_start_and_before_the_stop():
    data = records()
    size = len(SEGMENT) + 16
    second = 24 + size
    walker = splits._Records(data)
    assert walker.boundary(24, len(data)) == 24
    assert walker.boundary(25, len(data)) == second
    assert walker.boundary(second, second + 1) == second
    assert walker.boundary(25, second) is None
    last = len(data) - size
    assert walker.boundary(last, len(data)) == last
    assert walker.boundary(last + 1, len(data)) is None


# --- pcapng ----------------------------------------------------------------------------------------------------------

FRONT = packet.section() + packet.interface()
ENHANCED = packet.enhanced(SEGMENT, 5)


def blocks(*odd, at=1, count=CHAIN, front=FRONT, usual=ENHANCED):
    return front + usual * at + b"".join(odd) + usual * (count - at)


def raw(kind, size, *, ends=None, body=None):
    """A block whose header says that it has `size` bytes."""
    return pack("<II", kind, size) + (bytes(size - 12) if body is None else body) + pack("<I", ends or size)


@pytest.mark.parametrize("at", (1, CHAIN - 1, CHAIN))
@pytest.mark.parametrize(
    "odd, believed",
    (
        (raw(0xBAD, 12), True),
        (raw(0xBAD, 16), True),
        (raw(0xBAD, 8, body=b""), False),
        (raw(0xBAD, 14, body=bytes(2)), False),
        (raw(0xBAD, 13, body=bytes(1)), False),
        (raw(0xBAE, 12), False),
        (raw(0xBAD, 12, ends=16), False),
        *((raw(kind, 12), True) for kind in (0x0A0D0D0A, 1, 2, 3, 4, 5, 6, 9, 10, 0x40000BAD)),
        *((raw(kind, 12), False) for kind in (0, 7, 8, 11)),
        (raw(0xBAD, MAX_RECORD), True),
        (raw(0xBAD, MAX_RECORD + 4), False),
    ),
    ids=lambda odd: odd.hex() if isinstance(odd, bytes) and len(odd) < 99 else "",
)
def test_a_block_of_pcapng_in_a_chain(odd, believed, at):
    data = blocks(odd, at=at)
    assert is_boundary(data, len(FRONT), walker=splits._Blocks) == (believed or at == CHAIN)


@pytest.mark.parametrize("is_end", (False, True))
@pytest.mark.parametrize("cut", (0, 4, len(ENHANCED) - 12, len(ENHANCED) - 8, len(ENHANCED)))
def test_truncated_blocks_are_accepted_only_at_the_end_of_the_file(cut, is_end):
    data = blocks()
    assert is_boundary(data[: len(data) - cut], len(FRONT), is_end=is_end, walker=splits._Blocks) == (is_end or not cut)


def body(kind, name=0, captured=64, original=64, data=SEGMENT):
    data += bytes(-len(data) % 4)
    if kind == 2:
        return packet.block(2, pack("<HHIIII", name, 0, 0, 5, captured, original) + data)
    return packet.block(6, pack("<IIIII", name, 0, 5, captured, original) + data)


@pytest.mark.parametrize("kind", (2, 6))
@pytest.mark.parametrize(
    "odd, believed",
    (
        ({}, True),
        ({"name": 1}, False),  # Ethernet is not raw IP
        ({"name": 2}, False),  # there are two interfaces
        ({"captured": 0}, False),
        ({"captured": 0, "original": 0}, False),
        ({"captured": 65}, False),  # more than there was
        ({"captured": 67, "original": 67, "data": SEGMENT + b"pad"}, True),
        ({"captured": 68, "original": 68, "data": SEGMENT + b"pad"}, True),  # with its padding
        ({"captured": 69, "original": 69, "data": SEGMENT + b"pad"}, False),  # more than the block
        ({"captured": 54, "original": 64}, True),
        ({"captured": 54, "original": 54, "data": SEGMENT[:54]}, True),
        ({"captured": SNAP, "original": 101, "data": LARGE[:SNAP]}, True),
        ({"captured": SNAP, "original": 100, "data": LARGE[:SNAP]}, False),  # its payload alone is as long
        ({"data": SEGMENT[14:], "captured": 50, "original": 50}, False),  # not Ethernet
        ({"data": SEGMENT[14:], "captured": 50, "original": 50, "name": 1}, True),
    ),
    ids=str,
)
def test_the_first_block_is_a_segment_of_tcp(odd, believed, kind):
    front = packet.section() + packet.interface() + packet.interface(RAW)
    data = front + body(kind, **odd) + ENHANCED * CHAIN
    assert is_boundary(data, len(front), walker=splits._Blocks) == believed


def test_a_block_begins_at_a_multiple_of_four_before_the_stop():
    data = blocks()
    first, size = len(FRONT), len(ENHANCED)
    walker = splits._Blocks(data)
    assert walker.begin == first
    assert [walker.boundary(first + by, len(data)) - first for by in (-3, 0, 1, 4)] == [0, 0, size, size]
    assert walker.boundary(first + 1, first + size) is None
    assert walker.boundary(first + 1, first + size + 1) == first + size
    last = len(data) - size
    assert walker.boundary(last, len(data)) == last
    assert walker.boundary(last + 1, len(data)) is None


@pytest.mark.parametrize(
    "front, links, has_secrets",
    (
        (FRONT, [1], False),
        (packet.section(">") + packet.interface(7, order=">"), [7], False),
        (FRONT + packet.interface(RAW), [1, RAW], False),
        (FRONT + raw(0xBAD, 12), [1], False),
        (FRONT + packet.block(10, b"KSLT\4\0\0\0abcd"), [1], True),
        (FRONT + packet.block(4, b""), [1], False),
        (FRONT + packet.section(), None, False),
        (FRONT + packet.block(3, pack("<I", 4) + b"abcd"), None, False),
        (FRONT + raw(0xBAE, 12), None, False),
        (FRONT + raw(0xBAD, 14, body=bytes(2)), None, False),
        (FRONT + raw(0xBAD, 8, body=b""), None, False),
        (FRONT + raw(0xBAD, 0, body=b""), None, False),
        (FRONT + raw(1, 16), None, False),  # without its snap length
        (FRONT + raw(1, 20), [1, 0], False),
    ),
)
def test_the_front_of_a_file_ends_at_its_first_packet(front, links, has_secrets):
    order = ">" if links == [7] else "<"
    data = front + packet.enhanced(SEGMENT, 5, order=order)
    found = pcapng.front(data)
    assert found == (None if links is None else (front, order, links, has_secrets))
    if links is not None:
        assert pcapng.front(data[: len(front) + 12]) == found
        assert pcapng.front(data[: len(front) + 11]) is None
