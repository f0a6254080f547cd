"""pcapng: each block at its limits, in windows of any size, among damaged blocks."""

import subprocess
from dataclasses import astuple
from struct import pack

import pytest

from kproxy.capture.formats import pcapng
from kproxy.capture.formats.captures import Capture
from kproxy.capture.formats.records import MAX_RECORD
from kproxy.capture.quality import Quality
from tests.capture import packet

WINDOWS = pytest.mark.parametrize("window", (1, 3, 40, 97, 1 << 19))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(window, *blocks) -> (time in ns, link type, bytes, length on the wire) of records, flaws, secrets"""

    def read_blocks(window, *blocks):
        monkeypatch.setattr(pcapng, "WINDOW", window)
        path = tmp_path / "file.pcapng"
        path.write_bytes(b"".join(blocks))
        quality = Quality()
        capture = Capture([path], quality)
        found = [
            (time_ns, link, bytes(each.data[start:end]), original)
            for each in capture.windows()
            for time_ns, link, start, end, original in each.records
        ]
        return found, [astuple(row)[:5] for row in quality], capture.secrets

    return read_blocks


def simple(original, data, order="<"):
    return packet.block(3, pack(order + "I", original) + data, order)


def statistics(name, *options, order="<"):
    return packet.block(5, pack(order + "III", name, 0, 0) + b"".join(options), order)


def secrets(kind, size, data):
    return packet.block(10, pack("<II", kind, size) + data)


def raw(kind, size, body=b"", ends=None):
    return pack("<II", kind, size) + body + pack("<I", size if ends is None else ends)


FRONT = packet.section() + packet.interface()


@WINDOWS
@pytest.mark.parametrize("order", "<>")
def test_a_simple_packet_ends_at_the_snap_length_or_its_block(read, window, order):
    data = b"abcdefgh"
    cases = {  # snap length, length on the wire -> captured bytes
        (0, 8): data,
        (0, 7): data[:7],
        (0, 9): data,
        (8, 9): data,
        (7, 9): data[:7],
        (9, 9): data,
        (1, 1): data[:1],
    }
    for (snap, original), captured in cases.items():
        front = packet.section(order) + packet.interface(113, snap, order=order)
        found, flaws, _ = read(window, front, simple(original, data, order), packet.enhanced(data, 7, order=order))
        assert found == [(0, 113, captured, original), (7000, 113, data, 8)] and not flaws


@WINDOWS
@pytest.mark.parametrize("order", "<>")
def test_dropped_packets_are_the_last_count_of_each_interface(read, window, order):
    number = lambda code, count: packet.option(code, pack(order + "Q", count), order)  # noqa: E731
    front = packet.section(order) + packet.interface(order=order) * 2
    counts = [
        statistics(0, number(5, 3), number(7, 9), order=order),  # by the interface, by the system
        statistics(1, number(7, 4), order=order),
        statistics(0, number(5, 10), number(4, 99), number(8, 99), order=order),
        statistics(1, order=order),
    ]
    for upto, dropped in enumerate((0, 9, 13, 14, 10)):
        blocks = [front, packet.enhanced(b"abcd", 5, order=order), *counts[:upto]]
        assert read(window, *blocks)[1] == ([("kernel_drops", dropped, 0, 5000, 5000)] if dropped else [])
        more = [front, packet.enhanced(b"abcd", 6, order=order), *counts[:1]]
        flaws = read(window, *blocks, *more)[1]
        assert flaws == [("kernel_drops", dropped + 9, 0, 5000 if dropped else 6000, 6000)]


@WINDOWS
def test_secrets_must_fit_their_block(read, window):
    tls = 0x544C534B
    blocks = [secrets(tls, size, b"12345678") for size in (0, 1, 5, 8, 9, 4000)]
    found, flaws, keys = read(window, FRONT, *blocks, secrets(tls + 1, 8, b"12345678"), packet.enhanced(b"abcd", 5))
    assert keys == [b"", b"1", b"12345", b"12345678", b"12345678", b"12345678"]
    assert len(found) == 1 and not flaws


@WINDOWS
@pytest.mark.parametrize(
    "odd, size",
    (
        (raw(0xBAD, 12), 0),
        (raw(0x1234, 16, bytes(4)), 0),  # an unknown block type
        (raw(0xBAD, 8), 12),
        (raw(0xBAD, 14, bytes(4)), 16),
        (raw(0xBAD, 16, bytes(4), ends=20), 16),
        (raw(6, 12), 12),  # without its mandatory fields
        (raw(6, 28, bytes(16)), 28),
        (raw(6, 32, bytes(20)), 0),  # a packet without bytes
        (raw(2, 28, bytes(16)), 28),
        (raw(2, 32, bytes(20)), 0),
        (raw(3, 12), 12),
        (raw(3, 16, bytes(4)), 0),
        (raw(1, 12), 12),
        (raw(1, 16, bytes(4)), 16),
        (raw(1, 20, bytes(8)), 0),
        (raw(5, 12), 12),
        (raw(5, 20, bytes(8)), 20),
        (raw(5, 24, bytes(12)), 0),
        (raw(10, 12), 12),
        (raw(10, 16, bytes(4)), 16),
        (raw(10, 20, bytes(8)), 0),
        (packet.enhanced(b"abcd", 5, name=1), 36),  # of an interface that does not exist
        (raw(0xBAD, MAX_RECORD + 4, bytes(4)), 16),
    ),
    ids=lambda value: value[:20].hex() if isinstance(value, bytes) else "",
)
def test_a_damaged_block_loses_only_itself(read, window, odd, size):
    before, after = packet.enhanced(b"before", 3), packet.enhanced(b"after", 5) * 2
    found, flaws, _ = read(window, FRONT, before, odd, after)
    assert [each for each in found if each[2]] == [(3000, 1, b"before", 6), *[(5000, 1, b"after", 5)] * 2]
    assert flaws == ([("damaged", 1, size, 3000, 3000)] if size else [])


@WINDOWS
@pytest.mark.parametrize("more", (0, 4))
def test_a_block_far_beyond_the_bytes_read_is_accepted_up_to_a_limit(read, window, more):
    """After damage any number may look like a length: at most 256 KiB more of the file is read for it."""
    large = packet.block(4, bytes((1 << 18) - 12 + more))
    usual = packet.enhanced(b"after", 5)
    window = max(window, 100_000)
    found, flaws, _ = read(window, FRONT, raw(0xBAD, 8), large, usual)
    is_whole = not more or window > 1 << 18
    assert found == [(5000, 1, b"after", 5)]
    assert flaws == [("damaged", 1, 12 if is_whole else 12 + len(large), -1, -1)]


@WINDOWS
@pytest.mark.parametrize("left", (1, 4, 11, 12, 13, 35))
def test_a_file_that_ends_inside_a_block_reports_the_remaining_bytes(read, window, left):
    usual = packet.enhanced(b"abcd", 5)
    found, flaws, _ = read(window, FRONT, usual, usual[:left])
    assert len(found) == 1 and flaws == [("cut_file", 1, left, 5000, 5000)]
    _, flaws, _ = read(window, FRONT, usual, raw(0xBAD, 8), usual[:left])
    assert flaws == [("damaged", 1, 12 + left, 5000, 5000)]


@pytest.mark.parametrize("ahead, noted", ((True, set()), (False, {"sections", "interfaces", "statistics"})))
def test_changes_are_recorded_after_the_first_packet(tmp_path, ahead, noted):
    path = tmp_path / "file.pcapng"
    usual = packet.enhanced(b"abcd", 0)
    changes = statistics(0) + packet.interface() + FRONT
    path.write_bytes(FRONT + (changes + usual if ahead else usual + changes))
    with path.open("rb") as file:

        class Source:
            name, cut, read = "file", "", file.read

        sections = pcapng.Sections(Source(), Quality(), file.read(4), [])
        assert sum(len(window.records) for window in sections.windows()) == 1
    assert sections.changes == noted


@pytest.mark.parametrize("kind", (2, 6))
@pytest.mark.parametrize(
    "seconds, ticks, time_ns",
    ((0, 0, 0), (-1, 999_999_999, None), (-1, 1_000_000_000, 0), (0, (1 << 63) - 1, (1 << 63) - 1), (0, 1 << 63, None)),
)
def test_only_times_that_tables_can_hold_are_accepted(read, kind, seconds, ticks, time_ns):
    """seconds: the interface's offset. From 1970 to 2262."""
    options = packet.option(9, b"\x09") + packet.option(14, pack("<q", seconds))
    head = ("<HHIIII", 0, 0) if kind == 2 else ("<IIIII", 0)
    odd = packet.block(kind, pack(*head, ticks >> 32, ticks & 0xFFFFFFFF, 4, 4) + b"abcd")
    found, flaws, _ = read(1 << 19, packet.section(), packet.interface(options=options), odd)
    assert [each[0] for each in found] == ([] if time_ns is None else [time_ns])
    assert flaws == ([("damaged", 1, 36, -1, -1)] if time_ns is None else [])


@pytest.mark.parametrize(
    "interfaces",
    [
        [("<", 9, 1_700_000_000, 0)],
        [("<", 9, -3600, 1_700_003_600_000_000_000)],
        [("<", 12, 1_700_000_000, 0)],  # picoseconds
        [("<", 0x80 | 20, 1_700_000_000, 0)],  # 2**-20 seconds
        [("<", 9, 1, 1_700_000_000_000_000_000), (">", 6, -5, 1_700_000_000_000_000)],
        [(">", 0x80 | 32, 0, 1_700_000_000 << 32), ("<", 9, 0, 1_700_000_000_000_000_000), (">", 0, 7, 1_700_000_000)],
    ],
)
def test_times_of_sections_of_any_byte_order_are_those_of_tshark(tmp_path, interfaces):
    """Each section has an interface of its own: its byte order, resolution, offset in seconds, and first ticks."""
    path = tmp_path / "sections.pcapng"
    frame = packet.ethernet(packet.ipv4(packet.tcp(b"payload")))
    with path.open("wb") as file:
        for order, resolution, offset_s, ticks in interfaces:
            options = packet.option(9, bytes((resolution,)), order) + packet.option(
                14, pack(order + "q", offset_s), order
            )
            file.write(packet.section(order) + packet.interface(options=options, order=order))
            for number in range(3):
                file.write(packet.enhanced(frame, ticks + number * 1_234_567, order=order))
    command = ["tshark", "-r", str(path), "-T", "fields", "-e", "frame.time_epoch"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    expected = [int(line.replace(".", "")) for line in lines]
    quality = Quality()
    assert [record[0] for window in Capture([path], quality).windows() for record in window.records] == expected
    assert len(expected) == 3 * len(interfaces) and not list(quality)
