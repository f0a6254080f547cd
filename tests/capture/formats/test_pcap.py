"""Capture files: every format gives the same records, and damage is counted, never raised."""

import gzip
import io
import random
import tracemalloc
from struct import pack

import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture.formats import files, heads, pcap
from kproxy.capture.formats.captures import Capture
from kproxy.capture.formats.records import WINDOW
from kproxy.capture.quality import Quality
from kproxy.errors import CaptureError
from tests import captures
from tests.capture import packet

# TCP frames counted by tshark 4.0.17
FRAMES = {
    "k0102_java_cluster": 18938,
    "k0102_python147": 7683,
    "k0102_sasl_plain": 3189,
    "k0102_zookeeper": 2107,
    "k0822_java_cluster": 5834,
    "k0822_python147": 4984,
    "k111_java_cluster": 13737,
    "k111_kcat_sarama": 3003,
    "k39_zk_cluster": 8918,
    "k39_zookeeper": 1909,
    "k41_java_cluster": 11580,
    "k41_kafkajs": 2831,
    "k41_kip848_share": 8110,
    "k41_librdkafka": 5080,
    "k41_quota": 3427,
    "k41_sasl_plain": 2095,
    "k41_tls13_keys": 1520,
    "k41_tls_nokeys_kcat": 137,
    "k41_BASE": 1734,
    "k41_bigendian": 1734,
    "k41_cut": 603,
    "k41_gaps": 1725,
    "k41_gz": 1734,
    "k41_ipfrag": 1734,
    "k41_ipv6": 1734,
    "k41_midstream": 868,
    "k41_mixedlinks": 1734,
    "k41_ng": 1734,
    "k41_oneway": 1028,
    "k41_portreuse": 1734,
    "k41_rawip": 1734,
    "k41_realSLL": 1734,
    "k41_realSLL2": 1734,
    "k41_realnano": 1734,
    "k41_reordered": 1734,
    "k41_retransmit": 1822,
    "k41_seqwrap": 1734,
    "k41_snap400": 1734,
    "k41_snap96": 1734,
    "k41_tinyseg": 6697,
    "k41_vlan": 1734,
    "tls13_embedded_secrets": 1520,
}

PACKETS = [(1_700_000_000_000_000_000 + n * 1_000_000, packet.ethernet(bytes([n]) * (60 + 7 * n))) for n in range(20)]


def read(*paths):
    """(quality, [(time_ns, link, captured bytes, original length, offset in the file)])"""
    quality = Quality()
    found = []
    for window in Capture(paths, quality).windows():
        for time_ns, link, start, end, original in window.records:
            assert 0 <= start <= end <= len(window.data)
            found.append((time_ns, link, window.data[start:end], original, window.offset + start))
    return quality, found


def written(folder, data, name="capture"):
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", FRAMES)
def test_every_record_of_a_capture_is_read(name):
    quality, records = read(captures.capture(name))
    # only this capture has packets without a TCP segment of their own: fragments of datagrams
    assert len(records) == FRAMES[name] or name == "k41_ipfrag"
    assert not [row.kind for row in quality if row.kind != "cut_file"]


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("nano", (False, True))
def test_classic_pcap_in_both_byte_orders_and_resolutions(tmp_path, order, nano):
    path = written(tmp_path, packet.pcap(PACKETS, order=order, nano=nano))
    _, records = read(path)
    assert [record[:4] for record in records] == [(time, 1, data, len(data)) for time, data in PACKETS]
    whole = path.read_bytes()
    assert all(whole[offset : offset + len(data)] == data for _, _, data, _, offset in records)


@pytest.mark.parametrize("order", "<>")
def test_pcapng_with_sections_interfaces_resolutions_and_all_packet_blocks(tmp_path, order):
    data = packet.ethernet(bytes(60))
    parts = [
        packet.section("<" if order == ">" else ">"),
        packet.interface(order="<" if order == ">" else ">"),
        packet.section(order),  # a new section resets the interfaces
        packet.interface(101, options=packet.option(9, b"\x09", order) + packet.option(0, b"", order), order=order),
        packet.interface(1, snap=40, options=packet.option(9, b"\x8a", order), order=order),  # 1/1024 s
        packet.interface(276, options=packet.option(14, pack(order + "q", -100), order), order=order),
        packet.enhanced(data, 5_000_000_000, name=0, order=order),
        packet.enhanced(data, 3 * 1024 + 512, name=1, original=99, order=order),
        packet.enhanced(data, 200_000_001, name=2, order=order),
        packet.block(2, pack(order + "HHIIII", 0, 0, 0, 7, len(data), len(data)) + data, order),
        packet.block(3, pack(order + "I", len(data)) + data, order),
        packet.block(0x99, b"somebody's own", order),
        packet.block(5, pack(order + "III", 1, 0, 0) + packet.option(5, pack(order + "Q", 17), order), order),
        packet.block(10, pack(order + "II", 0x544C534B, 5) + b"a key", order),
    ]
    quality = Quality()
    capture = Capture([written(tmp_path, b"".join(parts))], quality)
    records = [record for window in capture.windows() for record in window.records]
    assert [(time, link, end - start, original) for time, link, start, end, original in records] == [
        (5_000_000_000, 101, 74, 74),
        (3_500_000_000, 1, 74, 99),
        (100_000_001_000, 276, 74, 74),
        (7, 101, 74, 74),
        (7, 101, 74, 74),  # a simple packet block has no time of its own
    ]
    assert quality.count("kernel_drops") == 17
    assert capture.secrets == [b"a key"]


# Compression, and what may separate two members: zeros, as on a tape, or a frame without data, as by pzstd.
FRAME = b"\x50\x2a\x4d\x18\x04\0\0\0none"
PACKED = {gzip.compress: bytes(40_000), zstandard.compress: FRAME, lz4.frame.compress: b""}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("ticks", (1 << 32, 1_700_000_000_000_000, (1 << 63) // 1000 + 1))
def test_times_of_pcapng_packets_have_64_bits_and_an_upper_limit(tmp_path, order, ticks):
    """Tables hold nanoseconds in 63 bits. A block with a larger time is damaged."""
    data = packet.ethernet(bytes(60))
    old = pack(order + "HHIIII", 0, 0, ticks >> 32, ticks & 0xFFFFFFFF, len(data), len(data)) + data
    parts = [packet.section(order), packet.interface(order=order), packet.block(2, old, order)]
    parts += [packet.enhanced(data, ticks, order=order), packet.enhanced(data, 9, order=order)]
    quality, records = read(written(tmp_path, b"".join(parts)))
    times = [record[0] for record in records]
    if ticks * 1000 < 1 << 63:
        assert times == [ticks * 1000, ticks * 1000, 9000]
        assert not quality.count("damaged")
    else:
        assert times == [9000]
        assert quality.count("damaged")


@pytest.mark.parametrize("more", (1, 4, 400))
@pytest.mark.parametrize("kind", (2, 6))
def test_a_pcapng_packet_longer_than_its_block_is_damage(tmp_path, kind, more):
    data = packet.ethernet(bytes(62))
    size = len(data) + more
    head = pack("<HHIIII", 0, 0, 0, 7, size, size) if kind == 2 else pack("<IIIII", 0, 0, 7, size, size)
    parts = [packet.section(), packet.interface(), packet.block(kind, head + data), packet.enhanced(data, 9)]
    quality, records = read(written(tmp_path, b"".join(parts)))
    assert [record[0] for record in records] == [9000]
    assert quality.count("damaged") == 1


def test_pcapng_options_end_at_their_end_mark_or_with_the_block(tmp_path):
    data = packet.ethernet(bytes(60))
    nanoseconds, seconds = packet.option(9, b"\x09"), packet.option(9, b"\x00")
    cases = {
        nanoseconds: 5,  # no end mark
        packet.option(0, b"") + nanoseconds: 5000,  # no options after the end mark
        packet.option(2, b"eth0\0") + nanoseconds: 5,  # a value is padded to four bytes
        nanoseconds + pack("<HH", 9, 400): 5,  # longer than the block
        nanoseconds + pack("<HH", 9, 4): 5,
        nanoseconds + seconds: 5_000_000_000,
    }
    for options, time_ns in cases.items():
        path = written(tmp_path, packet.section() + packet.interface(options=options) + packet.enhanced(data, 5))
        quality, records = read(path)
        assert [record[0] for record in records] == [time_ns]
        assert not quality.count("damaged")


@pytest.mark.parametrize("pack_up", PACKED)
def test_compressed_captures_with_several_members_or_trailing_bytes(tmp_path, pack_up):
    plain = captures.capture("k41_quota").read_bytes()
    _, want = read(written(tmp_path, plain))
    packed = pack_up(plain[:700_000]) + PACKED[pack_up] + pack_up(plain[700_000:])
    if PACKED[pack_up] == FRAME:
        packed = FRAME + packed
    for behind, cut in ((b"", 0), (b"something", 1)):
        quality, records = read(written(tmp_path, packed + behind))
        assert records == want
        assert quality.count("cut_file") == cut


@pytest.mark.parametrize("pack_up", PACKED)
def test_a_truncated_compressed_capture_is_read_to_its_end(tmp_path, pack_up):
    noise = random.Random(1).randbytes(1_600_000)
    plain = packet.pcap([(n * 1_000_000, noise[n * 1500 : n * 1500 + 1500]) for n in range(1000)])
    packed = pack_up(plain)
    assert len(packed) > len(plain) * 0.99
    for upto in range(300_000, len(packed), 250_000):
        quality, records = read(written(tmp_path, packed[:upto]))
        assert len(records) * 1516 > upto - 270_000  # a block of lz4 has 256 KiB here, one of zstd 128
        assert quality.count("cut_file") == 1


def test_a_decompression_bomb_is_read_in_pieces(tmp_path):
    zeros = 1 << 28
    unpacker = zstandard.ZstdCompressor().compressobj()
    path = written(tmp_path, b"".join([unpacker.compress(packet.pcap(PACKETS) + bytes(zeros)), unpacker.flush()]))
    source = files.Bytes(path)
    tracemalloc.start()
    try:
        while source.read(1 << 19):
            pass
        assert tracemalloc.get_traced_memory()[1] < zeros // 4
    finally:
        tracemalloc.stop()
        source.close()


def test_rotated_files_are_one_capture_and_standard_input_is_a_file(tmp_path, monkeypatch):
    first, second = (written(tmp_path, packet.pcap(part), f"{n}") for n, part in enumerate((PACKETS[:9], PACKETS[9:])))
    assert [record[:3] for record in read(first, second)[1]] == [(time, 1, data) for time, data in PACKETS]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(packet.pcap(PACKETS)))))
    assert len(read("-")[1]) == len(PACKETS)


def test_a_file_that_grows_is_followed(tmp_path):
    data = packet.pcap(PACKETS)
    path = written(tmp_path, data[:700])
    turns = iter((700, 701, 900, len(data)))

    def wait():
        upto = next(turns, None)
        if upto is None:
            return False
        path.write_bytes(data[:upto])
        return True

    quality = Quality()
    windows = Capture([path], quality, follow=wait).windows()
    assert sum(len(window.records) for window in windows) == len(PACKETS)
    assert not list(quality)


@pytest.mark.parametrize("begun", (0, 23))
def test_a_file_that_is_rotated_while_it_is_followed_is_one_capture_with_its_successor(tmp_path, begun):
    """Also what is still written to it after its name is gone, and once the new file has a header."""
    old, new = packet.pcap(PACKETS[:5]), packet.pcap(PACKETS[5:])
    path = written(tmp_path, old[:-30])

    def turns():
        path.rename(tmp_path / "old")
        yield
        path.write_bytes(new[:begun])
        yield
        (tmp_path / "old").write_bytes(old)
        path.write_bytes(new[:-10])
        yield from range(3)
        path.write_bytes(new)
        yield from range(3)

    turn = turns()
    quality = Quality()
    windows = Capture([path], quality, follow=lambda: next(turn, turn) is not turn).windows()
    times = [record[0] for window in windows for record in window.records]
    assert times == [time_ns for time_ns, _ in PACKETS]
    assert not list(quality)


@given(st.integers(24, len(packet.pcap(PACKETS))))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_gives_the_records_before_the_cut(tmp_path_factory, upto):
    data = packet.pcap(PACKETS)
    quality, records = read(written(tmp_path_factory.getbasetemp(), data[:upto]))
    whole = [24]
    for _, packet_data in PACKETS:
        whole.append(whole[-1] + 16 + len(packet_data))
    assert len(records) == sum(end <= upto for end in whole[1:])
    assert bool(quality.count("cut_file")) == (upto not in whole)


def test_a_last_packet_without_captured_bytes_is_a_record(tmp_path):
    data = packet.pcap(PACKETS) + pack("<IIII", 1_700_000_100, 0, 0, 60)
    quality, records = read(written(tmp_path, data))
    assert [record[2:4] for record in records[19:]] == [(PACKETS[-1][1], len(PACKETS[-1][1])), (b"", 60)]
    assert not list(quality)


def test_a_damaged_record_header_loses_only_its_record(tmp_path):
    data = bytearray(packet.pcap(PACKETS))
    at = 24 + sum(16 + len(packet_data) for _, packet_data in PACKETS[:7])
    data[at + 8 : at + 12] = b"\xff\xff\xff\x7f"
    quality, records = read(written(tmp_path, bytes(data)))
    assert [record[2] for record in records] == [packet_data for n, (_, packet_data) in enumerate(PACKETS) if n != 7]
    assert (quality.count("damaged"), quality.size("damaged")) == (1, 16 + len(PACKETS[7][1]))


@pytest.mark.parametrize("behind", (1, 2, 3))
def test_records_after_a_damaged_one_at_the_end_of_a_file_are_read(tmp_path, behind):
    """Fewer than the four records that, in the middle of a file, prove where records begin."""
    data = bytearray(packet.pcap(PACKETS))
    at = len(data) - sum(16 + len(packet_data) for _, packet_data in PACKETS[-1 - behind :])
    data[at + 8 : at + 12] = b"\xff\xff\xff\x7f"
    _, records = read(written(tmp_path, bytes(data)))
    lost = len(PACKETS) - 1 - behind
    assert [record[2] for record in records] == [each for number, (_, each) in enumerate(PACKETS) if number != lost]


@pytest.mark.parametrize("cut", (False, True))
@pytest.mark.parametrize("behind", (1, 2, 3))
@pytest.mark.parametrize("length", (1000, 60_000, 262_143))
def test_records_after_one_whose_length_exceeds_the_file_are_read(tmp_path, behind, length, cut):
    """Such a record looks like the last one of a capture that was not ended properly."""
    data = bytearray(packet.pcap(PACKETS))
    at = len(data) - sum(16 + len(packet_data) for _, packet_data in PACKETS[-1 - behind :])
    data[at + 8 : at + 12] = length.to_bytes(4, "little")
    quality, records = read(written(tmp_path, bytes(data[:-1] if cut else data)))
    lost = len(PACKETS) - 1 - behind
    found = [each for number, (_, each) in enumerate(PACKETS[:-1] if cut else PACKETS) if number != lost]
    if cut and behind == 1:  # no complete record follows, so the file ends there
        found = [each for _, each in PACKETS[:lost]]
    assert [record[2] for record in records] == found
    kinds = {"cut_file"} if cut and behind == 1 else {"damaged", "cut_file"} if cut else {"damaged"}
    assert {row.kind for row in quality} == kinds


@pytest.mark.parametrize("behind", (1, 2, 3))
def test_bytes_that_look_like_a_record_beyond_the_end_lose_nothing(tmp_path, behind):
    data = bytearray(packet.pcap(PACKETS))
    at = len(data) - sum(16 + len(packet_data) for _, packet_data in PACKETS[-1 - behind :])
    data[at : at + 16] = b"\xff" * 16
    data[at + 20 : at + 36] = pack("<IIII", 1_700_000_000, 5, 65_000, 65_000)
    quality, records = read(written(tmp_path, bytes(data)))
    lost = len(PACKETS) - 1 - behind
    assert [record[2] for record in records] == [each for number, (_, each) in enumerate(PACKETS) if number != lost]
    assert (quality.count("damaged"), quality.size("damaged")) == (1, 16 + len(PACKETS[lost][1]))


@pytest.mark.parametrize("pack_up", (bytes, gzip.compress))
@pytest.mark.parametrize("places", (range(30), range(1015, 1035), range(3380, 3425)))
def test_one_flipped_bit_of_a_length_loses_only_its_record(tmp_path, places, pack_up):
    """1,023 records are in the first window of a file."""
    plain = captures.capture("k41_quota").read_bytes()
    _, want = read(written(tmp_path, plain))
    for place in places:
        data = bytearray(plain)
        at = want[place][4] - 8
        bit = place % 18
        data[at + bit // 8] ^= 1 << bit % 8
        quality, records = read(written(tmp_path, pack_up(bytes(data))))
        assert records == want[:place] + want[place + 1 :], (place, bit)
        assert (quality.count("damaged"), quality.size("damaged")) == (1, 16 + len(want[place][2])), (place, bit)


@pytest.mark.parametrize("pack_up", (bytes, gzip.compress))
def test_a_lost_block_loses_only_the_records_that_it_touches(tmp_path, pack_up):
    plain = captures.capture("k41_quota").read_bytes()
    _, want = read(written(tmp_path, plain))
    for begin in range(8192, len(plain) - 8192, 61_440 if pack_up is bytes else 409_600):
        data = plain[:begin] + plain[begin + 4096 :]
        quality, records = read(written(tmp_path, pack_up(data)))
        before = [record[:4] for record in want if record[4] + len(record[2]) <= begin]
        after = [record[:4] for record in want if record[4] - 16 >= begin + 4096]
        found = [record[:4] for record in records]
        assert found[: len(before)] == before and found[-len(after) :] == after, begin
        assert len(found) - len(before) - len(after) in (0, 1), begin
        assert quality.count("damaged") == 1, begin


@pytest.mark.parametrize("length", (59, 61))
def test_odd_lengths_and_a_clock_set_by_days_are_no_damage(tmp_path, length):
    """Some programs write an original length that is smaller than the captured one, such as without a checksum."""
    packets = [(n // 10 * 100 * 86_400_000_000_000 + n, bytes(60), length) for n in range(30)]
    quality, records = read(written(tmp_path, packet.pcap(packets, nano=True)))
    assert [(time_ns, data, size) for time_ns, _, data, size, _ in records] == packets
    assert not list(quality)


@pytest.mark.parametrize("shift", range(16))
def test_a_gap_of_zeros_loses_only_the_records_that_it_touches(tmp_path, shift):
    """As left by a full disk or a power failure: whole blocks, so that it ends inside a record."""
    data = bytearray(packet.pcap(PACKETS))
    ends = [24]
    for _, packet_data in PACKETS:
        ends.append(ends[-1] + 16 + len(packet_data))
    begin, end = ends[5] + shift, ends[9] + 40
    data[begin:end] = bytes(end - begin)
    quality, records = read(written(tmp_path, bytes(data)))
    lost = range(5, 10)
    assert [record[2] for record in records if any(record[2])] == [
        packet_data for n, (_, packet_data) in enumerate(PACKETS) if n not in lost
    ]
    assert quality.count("damaged") == 1 and quality.size("damaged") >= ends[10] - ends[6]


@pytest.mark.parametrize("zeros", (16, 508, 512, 4096, 3 * WINDOW + 5))
@pytest.mark.parametrize("place", ("end", "middle"))
@pytest.mark.parametrize("kind", ("pcap", "gzip", "pcapng"))
def test_zeros_between_or_behind_records_are_named_with_their_size(tmp_path, kind, place, zeros):
    """Behind the records, as in a file that was preallocated, they are no damage."""
    blocks = [packet.pcap([each])[24:] for each in PACKETS]
    front = packet.pcap([])
    if kind == "pcapng":
        zeros = zeros // 4 * 4
        blocks = [packet.enhanced(data, time // 1000) for time, data in PACKETS]
        front = packet.section() + packet.interface()
    at = 10 if place == "middle" else len(blocks)
    whole = front + b"".join(blocks[:at]) + bytes(zeros) + b"".join(blocks[at:])
    quality, records = read(written(tmp_path, gzip.compress(whole) if kind == "gzip" else whole))
    assert [record[2] for record in records] == [data for _, data in PACKETS]
    found = {(row.kind, row.count, row.bytes, row.first_ns) for row in quality}
    kinds = ("zeros",) if place == "end" else ("zeros", "damaged") if zeros >= 512 else ("damaged",)
    assert found == {(each, 1, zeros, PACKETS[at - 1][0]) for each in kinds}


@pytest.mark.parametrize("before", (1, 15, 16, 17, 40))
@pytest.mark.parametrize("pack", (bytes, gzip.compress))
def test_a_record_after_a_gap_is_found_wherever_windows_end(tmp_path, before, pack):
    """Its header of 16 bytes may be in two windows."""
    front, records = packet.pcap(PACKETS), packet.pcap(PACKETS)[24:]
    hole = 24 + WINDOW - before - len(front)
    quality, found = read(written(tmp_path, pack(front + bytes(hole) + records)))
    assert [record[2] for record in found] == [packet_data for _, packet_data in PACKETS * 2]
    assert (quality.count("damaged"), quality.size("damaged")) == (1, hole)


@pytest.mark.parametrize("kind", ("pcap", "pcapng"))
def test_a_large_gap_is_skipped_at_once(tmp_path, kind, monkeypatch):
    """It may be most of a file: checking each byte would take minutes per GB."""
    if kind == "pcap":
        front, blocks = packet.pcap(PACKETS), [packet.pcap(PACKETS)[24:]]
    else:
        blocks = [packet.enhanced(data, time // 1000) for time, data in PACKETS]
        front = b"".join((packet.section(), packet.interface(), *blocks))
    looked = []
    real = heads.places

    def places(*given, **how):
        for place in real(*given, **how):
            looked.append(place)
            yield place

    monkeypatch.setattr(heads, "places", places)
    hole = 5_000_000
    quality, records = read(written(tmp_path, front + bytes(hole) + b"".join(blocks)))
    assert [record[2] for record in records] == [packet_data for _, packet_data in PACKETS * 2]
    assert quality.size("damaged") == hole and len(looked) < 100


def test_a_damaged_pcapng_block_loses_only_itself(tmp_path):
    blocks = [packet.section(), packet.interface()] + [packet.enhanced(data, time // 1000) for time, data in PACKETS]
    blocks[9] = blocks[9][:4] + b"\xff" * 4 + blocks[9][8:]
    quality, records = read(written(tmp_path, b"".join(blocks)))
    assert [record[2] for record in records] == [packet_data for n, (_, packet_data) in enumerate(PACKETS) if n != 7]
    assert quality.size("damaged") == len(blocks[9])


def test_bytes_that_look_like_a_block_beyond_the_end_lose_nothing(tmp_path):
    """An Ethernet address may look like a block of a known type, after a damaged block."""
    block_head = (2).to_bytes(4, "little") + (131_328).to_bytes(4, "little")
    packets = [(time, block_head + data[8:]) for time, data in PACKETS]
    blocks = [packet.section(), packet.interface()] + [packet.enhanced(data, time // 1000) for time, data in packets]
    blocks[9] = blocks[9][:8] + (5).to_bytes(4, "little") + blocks[9][12:]  # an undescribed interface
    quality, records = read(written(tmp_path, b"".join(blocks)))
    assert [record[2] for record in records] == [data for number, (_, data) in enumerate(packets) if number != 7]
    assert quality.size("damaged") == len(blocks[9])


@pytest.mark.parametrize("name", ("k41_midstream", "k41_ng", "k41_mixedlinks", "k41_gz"))
def test_flipped_cut_or_spliced_bytes_raise_nothing(tmp_path, name):
    dice = random.Random(name)
    whole = captures.capture(name).read_bytes()[:120_000]
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 40)):
            data[dice.randrange(4, len(data))] = dice.randrange(256)
        if dice.random() < 0.5:
            at, size = dice.randrange(24, len(data)), dice.randrange(5000)
            data[at : at + size] = b"" if dice.random() < 0.5 else data[:size]
        try:
            read(written(tmp_path, bytes(data[: dice.randrange(24, len(data) + 1)])))
        except CaptureError as fault:
            assert str(tmp_path) in str(fault)


def test_zstd_windows_have_at_most_128_mib(tmp_path):
    """As `zstd --long` writes by default. With more, a small file could use as much memory."""
    plain = packet.pcap(PACKETS)
    block = (len(plain) << 3 | 1).to_bytes(3, "little") + plain  # the last block, not compressed
    for exponent in (27, 28):
        path = written(tmp_path, b"\x28\xb5\x2f\xfd" + bytes((0, (exponent - 10) << 3)) + block)
        if exponent == 27:
            quality, records = read(path)
            assert len(records) == len(PACKETS) and not list(quality)
        else:
            with pytest.raises(CaptureError, match=r"can be read: .* too much memory .*: unpack it first"):
                read(path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "empty"),
        (b"\xa1\xb2\xc3\xd4\0", "inside its header"),
        (b"PK\3\4 and so on", "zip"),
        (b"hello, I am a text", "no capture file"),
        (b"\x34\xcd\xb2\xa1" + bytes(20), "Kuznetzov"),
        (b"\n\r\r\n\0\0\0\0\1\1\1\1" + bytes(20), "first block"),
    ],
)
def test_a_file_that_is_no_capture_is_reported(tmp_path, data, text):
    with pytest.raises(CaptureError, match=text):
        read(written(tmp_path, data))


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(CaptureError, match="cannot be opened"):
        read(tmp_path / "nowhere.pcap")


SOUND = (1_700_000_000, 999_999, 60, 60)  # seconds, fraction, captured, original


@pytest.mark.parametrize(
    ("heads", "believed"),
    [
        ([SOUND] * 4, True),
        ([SOUND] * 3, True),  # the data ends there
        ([SOUND] * 3 + [(1_700_000_000, 1_000_000, 60, 60)], False),  # a fraction of a second or more
        ([(1_700_000_000, 0, 13, 13)] + [SOUND] * 3, False),  # shorter than a link layer
        ([(1_700_000_000, 0, 14, 14)] + [SOUND] * 3, True),
        ([(1_700_000_000, 0, 59, 60)] + [SOUND] * 3, False),  # truncated, but not at the snap length
        ([(1_700_000_000, 0, 96, 1500)] + [SOUND] * 3, True),
        ([SOUND, (1_700_000_000 + 86_400, 0, 60, 60), *[(1_700_000_000 + 86_400, 0, 60, 60)] * 2], True),
        ([SOUND, (1_700_000_000 + 86_401, 0, 60, 60), *[(1_700_000_000 + 86_401, 0, 60, 60)] * 2], False),
        ([SOUND, (1_700_000_000 - 86_401, 0, 60, 60), *[(1_700_000_000 - 86_401, 0, 60, 60)] * 2], False),
    ],
)
def test_where_records_of_classic_pcap_may_begin(tmp_path, heads, believed):
    source = files.Bytes(written(tmp_path, b""))
    reader = pcap.Classic(source, Quality(), "<", 1000, 1, 96)
    data = b"".join(pack("<IIII", *head) + bytes(head[2]) for head in heads)
    for before in (0, 5):
        chain = reader.chain(b"\xff" * before + data, before, 1_700_000_000 * 1_000_000_000)
        assert chain == ((len(heads), before + len(data)) if believed else None)
    source.close()
