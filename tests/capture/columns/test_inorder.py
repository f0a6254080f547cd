"""Segments converted many at a time give the same rows as one by one: in every table and in `quality`."""

import random
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.offline import KINDS as BENCH
from bench.offline import generate
from kproxy.capture.columns import inorder, mapped, pairs
from kproxy.capture.columns.inorder import AT_ONCE_NS
from kproxy.capture.connections import flows
from kproxy.capture.dissection import packets
from kproxy.capture.dissection.packets import ACK, FIN, RST, SAME_PACKET_NS, SYN
from kproxy.capture.formats import pcap, pcapng
from kproxy.capture.quality import Quality
from kproxy.convert.job import OF_FLOWS, Job
from kproxy.convert.rows import Rows
from kproxy.protocol import codec, records
from kproxy.wire import bodies
from tests import captures
from tests.capture import packet
from tests.capture.connections.test_flows import Wire
from tests.capture.dialogues import Share, frames, stretches
from tests.native import reads_by_core

pytestmark = reads_by_core
NEVER = 1 << 40
SHAPES = [
    "BASE",
    "bigendian",
    "gaps",
    "gz",
    "ipfrag",
    "ipv6",
    "midstream",
    "ng",
    "oneway",
    "portreuse",
    "rawip",
    "realSLL",
    "realSLL2",
    "reordered",
    "retransmit",
    "seqwrap",
    "snap400",
    "tinyseg",
    "vlan",
]


@pytest.fixture(scope="module", autouse=True)
def _small_windows():
    """With small windows they end anywhere, connections are established after a few packets, and continue after odd
    packets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "WORTH", 0)
        patch.setattr(mapped, "FIRST_RECORDS", 8)
        patch.setattr(mapped, "RECORDS", 64)
        patch.setattr(pcap, "WINDOW", 20_000)
        patch.setattr(pcapng, "WINDOW", 20_000)
        yield


def results(path, fewest, detail=bodies.BATCHES, ports=()):
    """Every row of a capture by table, its quality, and how many exchanges were converted by column."""
    rows = {name: [] for name in OF_FLOWS}
    quality = Quality()
    at_once = []
    many = Rows.many

    def counted(self, flows, bulk):
        at_once.append(len(bulk.connection))
        many(self, flows, bulk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inorder, "FEWEST", fewest)
        patch.setattr(Rows, "many", counted)
        reader = Rows(lambda table, batch: rows[table.name].extend(batch.to_pylist()))
        for _ in reader.read(Job("test", (str(path),), "default", ports, None, detail), quality):
            pass
    for found in rows.values():
        found.sort(key=repr)
    return rows, [astuple(row) for row in quality], sum(at_once)


def compare(path, **options):
    """Compares both ways; returns (exchanges converted by column, all exchanges)."""
    *one_by_one, none = results(path, NEVER, **options)
    *at_once, taken = results(path, 1, **options)
    assert at_once == one_by_one
    assert not none
    return taken, len(at_once[0]["exchanges"])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("detail", (bodies.ERRORS, bodies.BATCHES))
@pytest.mark.parametrize("name", SHAPES)
def test_every_form_of_capture_gives_the_same_rows(name, detail):
    taken, _ = compare(captures.capture(f"k41_{name}"), detail=detail)
    assert taken > 20 or name == "oneway"  # its responses are one gap


@pytest.mark.parametrize("name", ("k41_kip848_share", "k0102_sasl_plain"))
def test_captures_give_the_same_rows(name):
    taken, _ = compare(captures.capture(name))
    assert taken > 20


def test_quota_delays_are_equal_by_column():
    path = captures.capture("k41_quota")
    taken, all_ = compare(path)
    assert taken > 0.2 * all_
    rows, _, _ = results(path, 1)
    assert sum(row["muted_ns"] or 0 for row in rows["exchanges"]) > 30_000_000_000


@pytest.mark.parametrize("name", ("k41_tls13_keys", "k39_zookeeper"))
def test_bodies_that_are_not_read_give_the_same_rows(name):
    assert compare(captures.capture(name))[0] == 0


# --- headers, compared with the dissector that reads them one by one --------------------------------------------------

# link type -> the bytes before IP, given an ethertype, and whether they are read by column
BEFORE = {
    packets.ETHERNET: [
        (lambda kind: bytes(12) + kind, True),
        (lambda kind: bytes(12) + b"\x81\0\0\7" + kind, True),
        (lambda kind: bytes(12) + b"\x81\0\0\7" * 2 + kind, False),
        (lambda kind: bytes(12) + b"\x88\xa8\0\7" + kind, False),
    ],
    packets.SLL: [(lambda kind: bytes(14) + kind, True)],
    packets.SLL2: [(lambda kind: kind + bytes(18), True)],
    packets.RAW: [(lambda kind: b"", True)],
    packets.NULL: [(lambda kind: b"\2\0\0\0", False)],
}
PLAIN_V4 = ({}, {"fragment": 0x4000}, {"fragment": 0xC000}, {"identity": 0xFFFF})
ODD_V4 = ({"options": bytes(4)}, {"fragment": 0x2000}, {"fragment": 1}, {"total": 0}, {"total": 39}, {"protocol": 17})
ODD_V6 = ({"length": 0}, {"length": 19}, {"protocol": 17}, {"protocol": 0})


def segment_of(dice, ends):
    """A TCP segment with numbers of all sizes, and whether its header is valid."""
    number = lambda: dice.choice((0, 1, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, dice.randrange(1 << 32)))  # noqa: E731
    made = packet.tcp(
        dice.randbytes(dice.choice((0, 0, 1, 5, 300))),
        source=ends[0],
        target=ends[1],
        seq=number(),
        ack=number(),
        flags=dice.choice((ACK, ACK, ACK | 8, ACK | FIN, SYN, RST, SYN | ACK)),
        window=dice.choice((0, 1, 500, 0xFFFF)),
        options=dice.choice((b"", b"\1\1\x08\x0a", b"\4\2\x08\x0a")) + dice.randbytes(dice.choice((0, 8, 20, 28, 36))),
    )
    words = made[12] >> 4
    if dice.random() < 0.1:
        words = dice.choice((0, 4, 5, 15))
        made = made[:12] + bytes((words << 4 | made[12] & 15,)) + made[13:]
    return made, words >= 5 and words * 4 <= len(made)


def packet_of(dice, link, ends=((packet.CLIENT, packet.BROKER), (packet.CLIENT6, packet.BROKER6))):
    """A packet, and whether its headers are complete and of the common form."""
    made, plain = segment_of(dice, ends[sixth := dice.random() < 0.3][:: dice.choice((1, -1))])
    odd = dice.random() < 0.15
    if sixth:
        how = dice.choice(ODD_V6) if odd else {}
        kind, headers, ip = b"\x86\xdd", 60, packet.ipv6(made, **how)
    else:
        how = dice.choice(ODD_V4 if odd else PLAIN_V4)
        kind, headers, ip = b"\x08\0", 40, packet.ipv4(made, **{"identity": dice.randrange(9), **how})
    before, read = dice.choice(BEFORE[link])
    if link == packets.NULL and sixth:
        before = lambda kind: b"\x1e\0\0\0"  # noqa: E731
    data = before(kind) + ip + bytes(dice.choice((0, 0, 6)))  # padding
    if dice.random() < 0.1:
        data = data[: dice.randrange(len(data))]
    return data, plain and read and not odd and len(data) >= len(before(kind)) + headers


def heads_of(link, datas):
    """The columns of consecutive packets, as in a file."""
    sizes = np.array([len(data) for data in datas], np.int64)
    end = np.cumsum(sizes)
    start = end - sizes
    behind = np.frombuffer(b"".join(datas) + bytes(inorder.HEAD), np.uint8)
    head = behind[start[:, None] + np.arange(inorder.HEAD)]
    return inorder.heads(link, start, end, head), start, end, head


@given(st.integers(0, 1 << 32), st.sampled_from(sorted(BEFORE)))
@settings(max_examples=60, deadline=None)
def test_all_common_headers_are_found_and_read_as_one_by_one(seed, link):
    dice = random.Random(seed)
    made = [packet_of(dice, link) for _ in range(dice.randrange(1, 60))]
    found, start, end, _ = heads_of(link, [data for data, _ in made])
    plain = [number for number, (_, is_plain) in enumerate(made) if is_plain]
    if not plain:
        assert found is None or not len(found.index)
        return
    assert found.index.tolist() == plain
    everything = b"".join(data for data, _ in made)
    for row, number in enumerate(plain):
        begin, stop = int(start[number]), int(end[number])
        one = packets.Dissector(Quality()).segment(link, everything[begin:stop], 0, stop - begin, 0)
        _, key, seq, ack, bits, window, payload, _, length = one
        assert found.keys[found.lane[row]] == key
        read = (found.seq[row], found.ack[row], found.length[row], found.size[row])
        assert read == (seq, ack, length, bits >> 12 << 2)
        assert min(found.start[row] - begin, stop - begin) == payload
        assert found.start[row] - begin == found.tcp[row] + found.size[row]
        whole = found.start[row] + length <= stop
        assert found.calm[row] == (whole and window != 0 and not bits & (SYN | RST | FIN))
        version = everything[begin + found.tcp[row] - (20 if len(key) == 12 else 40)] >> 4
        at = begin + int(found.tcp[row]) - 16
        assert found.identity[row] == (int.from_bytes(everything[at : at + 2]) if version == 4 else 0)


@given(st.integers(0, 1 << 32), st.sampled_from((packets.ETHERNET, packets.SLL2)))
@settings(max_examples=60, deadline=None)
def test_only_equal_headers_soon_after_are_copies(seed, link):
    """Compared with a search over all pairs. Some packets differ in a single byte of a header."""
    dice = random.Random(seed)
    datas = [packet_of(dice, link)[0] for _ in range(dice.randrange(1, 12))]
    for _ in range(dice.randrange(40)):
        data = bytearray(dice.choice(datas))
        if data and dice.random() < 0.6:
            data[dice.randrange(len(data))] ^= dice.choice((1, 0x80))
        datas.insert(dice.randrange(len(datas) + 1), bytes(data))
    found, _, end, _ = heads_of(link, datas)
    if found is None:
        return
    cut = {int(each) for each in found.index[found.start > end[found.index]]}  # inside a header: read one by one
    datas = [data for number, data in enumerate(datas) if number not in cut]
    times = np.cumsum([dice.choice((0, 1000, 400_000, 300_000_000)) for _ in datas])
    found, _, _, head = heads_of(link, datas)
    if found is None:
        return
    known, expected = {}, []
    for row, number in enumerate(found.index.tolist()):
        tcp, size = int(found.tcp[row]), int(found.size[row])
        options = datas[number][tcp + 20 : tcp + size][:12]
        one = (found.keys[found.lane[row]], found.identity[row], found.length[row], size, options)
        one += (datas[number][tcp : tcp + 16],)
        within_ns = SAME_PACKET_NS if inorder.has_timestamp(bytes(16) + options) else AT_ONCE_NS
        expected.append(times[number] - known.get(one, -SAME_PACKET_NS - 1) <= within_ns)
        known[one] = times[number]
    copies = inorder.copies(found, head, times)
    assert (copies.tolist() if copies is not None else [False] * len(expected)) == expected
    if len(found.index) > 1 and times[found.index[0]] < times[found.index[-1]]:
        assert inorder.copies(found, head, -times) is None  # the clock goes back


# --- random captures --------------------------------------------------------------------------------------------------


def frame(body):
    return len(body).to_bytes(4) + body


def messages(dice, count):
    """A dialogue of (side, bytes), at times with several requests in flight, some of them never answered."""
    sent, waiting = [], []
    for number in range(count):
        key, version, body, answer = dice.choice(KINDS)
        header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": number, "clientId": "me"}
        sent.append((0, frame(codec.encode_request(header, body(dice)))))
        if answer is not None:
            waiting.append(frame(codec.encode_response(key, version, {"correlationId": number}, answer(dice))))
        while waiting and dice.random() < 0.7:
            sent.append((1, waiting.pop(0)))
    return sent + [(1, answer) for answer in waiting]


def some_records(dice):
    count = dice.randrange(1, 6)
    value = b"v" * dice.choice((10, 400, 90_000 if dice.random() < 0.1 else 900))
    return records.write_batch([records.Record(offset, 1_700_000_000_000, None, value) for offset in range(count)])


def produce(acks):
    return lambda dice: {
        "acks": acks,
        "topicData": [{"name": "t", "partitionData": [{"index": 0, "records": some_records(dice)}]}],
    }


KINDS = [
    (0, 9, produce(-1), lambda dice: {"responses": [], "throttleTimeMs": dice.choice((0, 0, 2))}),
    (0, 8, produce(0), None),
    (
        1,
        12,
        lambda dice: {"maxWaitMs": 500, "topics": []},
        lambda dice: {
            "errorCode": dice.choice((0, 0, 0, 70)),
            "responses": [{"topic": "t", "partitions": [{"partitionIndex": 0, "records": some_records(dice)}]}],
        },
    ),
    (18, 3, lambda dice: {"clientSoftwareName": "s", "clientSoftwareVersion": str(dice.randrange(2))}, lambda dice: {}),
    (12, 4, lambda dice: {"groupId": f"g{dice.randrange(3)}"}, lambda dice: {"errorCode": dice.choice((0, 27))}),
]


def connection(dice, number, dialogue, sizes=(7, 60, 1448, 1448, 65_000)):
    """The packets of a connection in the order of sending. dialogue: (side, bytes) of each frame."""
    client, broker = (bytes((10, 0, 0, number)), 40_000 + number), packet.BROKER
    ends = (client, broker)
    position = [dice.choice((1, 0xFFFF_F000)), dice.randrange(1 << 32)]
    acked = list(position)
    sent = []

    def send(side, payload=b"", flags=ACK, window=500):
        segment = packet.tcp(
            payload,
            source=ends[side],
            target=ends[1 - side],
            seq=position[side] & 0xFFFFFFFF,
            ack=acked[1 - side] & 0xFFFFFFFF if flags & ACK else 0,
            flags=flags,
            window=window,
        )
        ip = packet.ipv4(segment, source=ends[side], target=ends[1 - side], identity=len(sent))
        sent.append(packet.ethernet(ip))
        position[side] += len(payload) + bool(flags & (SYN | FIN))

    if dice.random() < 0.8:
        send(0, flags=SYN)
        acked[:] = position
        send(1, flags=SYN | ACK)
        acked[:] = position
        send(0)
    most = dice.choice(sizes)
    for side, data in dialogue:
        for start in range(0, len(data), most):
            send(side, data[start : start + most])
            if dice.random() < 0.5:
                acked[:] = position
                send(1 - side, window=0 if dice.random() < 0.01 else 500)
    ending = dice.random()
    if ending < 0.4:
        send(0, flags=FIN | ACK)
        acked[:] = position
        send(1, flags=FIN | ACK)
        acked[:] = position
        send(0)
    elif ending < 0.6:
        send(dice.randrange(2), flags=RST)
    return sent


def disturbed(dice, packets, harm):
    """With lost packets, copies, reordered packets, and some odd ones."""
    packets = list(packets)
    for _ in range(int(len(packets) * harm)):
        at = dice.randrange(len(packets))
        what = dice.randrange(6)
        if what == 0:
            del packets[at]
        elif what == 1:
            data = packets[max(0, at - dice.randrange(20))]
            packets.insert(at, data[:12] + b"\x81\0\0\7" * dice.choice((0, 1, 2)) + data[12:])
        elif what == 2:
            packets.insert(at, packets.pop(dice.randrange(max(0, at - 5), at + 1)))
        elif what == 3:
            data = packets[at]
            packets[at] = data[:12] + b"\x81\0\0\7" * dice.choice((1, 1, 2)) + data[12:]
        elif what == 4:
            packets[at] = packets[at][: dice.randrange(20, len(packets[at]) + 1)]
        elif what == 5:
            data = bytearray(packets[at])
            data[dice.randrange(14, min(len(data), 54))] ^= 1 << dice.randrange(8)
            packets[at] = bytes(data)
    return packets


def write_capture(path, dice, lives, harm):
    """A capture of connections with interleaved packets, some of them disturbed."""
    lives = [list(life) for life in lives]
    mixed = []
    while any(lives):
        life = dice.choice([life for life in lives if life])
        for _ in range(dice.choice((1, 2, 30))):
            if life:
                mixed.append(life.pop(0))
    if dice.random() < 0.3:
        del mixed[: dice.randrange(len(mixed))]
    now, packets = 1_700_000_000_000_000_000, []
    goes_back = harm and dice.random() < 0.5  # in that case copies are not searched by column
    for data in disturbed(dice, mixed, harm):
        now += dice.choice((0, 1000, 1_000_000, -500_000 if goes_back else 1000))
        packets.append((now, data))
    path.write_bytes(packet.pcap(packets, order=dice.choice("<>")))


def compare_in_any_windows(path, dice, most_flows=flows.MAX_FLOWS, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows, "MAX_FLOWS", most_flows)
        patch.setattr(mapped, "LARGE", dice.choice((0, 1 << 14)))
        # also windows that end between packets and their copies
        patch.setattr(mapped, "RECORDS", dice.choice((100, 1 << 14)))
        patch.setattr(mapped, "PIECE_BYTES", dice.choice((3000, 1 << 18)))
        return compare(path, detail=dice.choice((bodies.ERRORS, bodies.BATCHES)), **options)


@pytest.mark.ring2
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.0, 0.01, 0.03, 0.1)), st.sampled_from((0, 1, 9092)))
def test_random_captures_give_the_same_rows(tmp_path_factory, seed, harm, port):
    """Simultaneous connections and consecutive ones on the same ports, complete or joined late, disturbed or not."""
    dice = random.Random(seed)
    lives = [
        connection(dice, dice.randrange(4), messages(dice, dice.randrange(1, 12))) for _ in range(dice.randrange(1, 7))
    ]
    path = tmp_path_factory.mktemp("made") / "up.pcap"
    write_capture(path, dice, lives, harm)
    compare_in_any_windows(path, dice, dice.choice((2, 1024)), ports=(port,) if port > 1 else ())


def test_captures_of_usual_dialogues_give_the_same_rows(tmp_path):
    """Long connections with little disturbance: the test asserts that most exchanges are converted by column."""
    total = Share()
    path = tmp_path / "usual.pcap"

    @settings(max_examples=25)
    @given(
        st.lists(stretches(80), min_size=1, max_size=3),
        st.integers(0, 1 << 32),
        st.sampled_from((0.0, 0.0, 0.001, 0.005)),
    )
    def holds(dialogues, seed, harm):
        dice = random.Random(seed)
        lives = [connection(dice, number, frames(dialogue), (400, 1448)) for number, dialogue in enumerate(dialogues)]
        write_capture(path, dice, lives, harm)
        by_column, all_ = compare_in_any_windows(path, dice)
        total.add(by_column, all_)

    holds()
    assert float(total) > 0.3, total


def with_disorder(packets, dice, harm):
    """Lost, late and duplicated packets, equally often."""
    found = []
    for place, (time_ns, data) in enumerate(packets):
        what = dice.random() / harm
        if what < 1:
            continue
        if what < 2:
            time_ns = packets[min(place + dice.randrange(1, 9), len(packets) - 1)][0] + 1
        elif what < 3:
            found.append((time_ns + dice.choice((0, 1000, 900_000)), data))
        found.append((time_ns, data))
    return sorted(found, key=lambda packet: packet[0])


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The packets of complete captures, by name: long connections, and some of real clients."""
    path = tmp_path_factory.mktemp("clean") / "generated.pcap"
    with path.open("wb") as file:
        generate(BENCH[0], file, 1500)
    paths = [path, captures.capture("k0102_java_cluster"), captures.capture("k41_kip848_share")]
    return {path.stem: [each[:2] for each in packet.records(path.read_bytes())] for path in paths}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("harm", "least"), [(0.001, 0.8), (0.01, 0.5)])
def test_captures_with_disorder_give_the_same_rows_by_column(tmp_path, monkeypatch, clean, harm, least):
    """Lost, late and duplicated packets, in windows of the usual size. A gap loses only the exchanges around it."""
    monkeypatch.setattr(mapped, "RECORDS", 1 << 15)
    total = Share()

    @settings(max_examples=3)
    @given(st.sampled_from(sorted(clean)), st.integers(0, 1 << 32))
    def holds(name, seed):
        path = tmp_path / "dirty.pcap"
        path.write_bytes(packet.pcap(with_disorder(clean[name], random.Random(seed), harm)))
        by_column, all_ = compare(path)
        if name == "generated":
            total.add(by_column, all_)

    holds()
    path = tmp_path / "once.pcap"
    path.write_bytes(packet.pcap(with_disorder(clean["generated"], random.Random(1), harm)))
    total.add(*compare(path))
    assert float(total) > least, total


def heartbeats(wire, count):
    for number in range(count):
        header = {"requestApiKey": 12, "requestApiVersion": 4, "correlationId": number, "clientId": "me"}
        wire.send(0, frame(codec.encode_request(header, {"groupId": "g"})))
        wire.send(1, frame(codec.encode_response(12, 4, {"correlationId": number}, {})))
    return wire


def test_an_odd_exchange_is_read_alone_and_the_rest_by_column(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "RECORDS", 4096)
    wire = heartbeats(Wire().shake(), 60)
    for number in range(9):
        header = {"requestApiKey": 3, "requestApiVersion": 9, "correlationId": number, "clientId": "me"}
        wire.send(0, frame(codec.encode_request(header, {"topics": []})))
        wire.send(1, frame(codec.encode_response(3, 9, {"correlationId": number}, {"clusterId": "c"})))
        heartbeats(wire, 60)
    path = tmp_path / "odd.pcap"
    path.write_bytes(packet.pcap([(number * 1000, data) for number, data in enumerate(wire.packets)]))
    taken, _ = compare(path)
    assert taken > 9 * 60
    monkeypatch.setattr(pairs, "ROUNDS", 1)
    assert compare(path)[0] < taken - 60


def test_late_and_duplicated_segments_do_not_prevent_columns(tmp_path, monkeypatch):
    """Within one window, segments are read in TCP's order."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 4096)
    wire = heartbeats(Wire().shake(), 400)
    packets = [(number * 1000, data) for number, data in enumerate(wire.packets)]
    for place in range(100, 700, 100):
        packets[place], packets[place + 1] = (
            (packets[place][0], packets[place + 1][1]),
            (
                packets[place + 1][0],
                packets[place][1],
            ),
        )
        packets.insert(place + 50, (packets[place + 50][0], packets[place + 50][1]))
    path = tmp_path / "late.pcap"
    path.write_bytes(packet.pcap(packets))
    taken, all_ = compare(path)
    assert all_ == 400 and taken >= 390


def test_an_ordered_connection_is_one_stretch_of_each_window(tmp_path, monkeypatch):
    """Even if its acknowledgements refer to bytes that the other side sent in the same window."""
    found = []
    stretches = inorder.Order.stretches

    def counted(self, positions):
        found.append([each.places.stop - each.places.start for each in stretches(self, positions)])
        return stretches(self, positions)

    monkeypatch.setattr(mapped, "FIRST_RECORDS", 200)
    monkeypatch.setattr(mapped, "RECORDS", 200)
    monkeypatch.setattr(inorder.Order, "stretches", counted)
    path = tmp_path / "stretches.pcap"
    packets = heartbeats(Wire().shake(), 400).packets
    path.write_bytes(packet.pcap([(number * 1000, data) for number, data in enumerate(packets)]))
    results(path, 1)
    assert [lengths for lengths in found if lengths] == [[200]] * 3 + [[2]]


def test_an_acknowledgement_is_no_copy_of_the_following_data(tmp_path, monkeypatch):
    """Without IPv4's identification and TCP's timestamps, their headers differ in the length alone."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 4096)
    bare = []
    for data in heartbeats(Wire().shake(), 400).packets:
        header = bytearray(data[: 34 + (data[46] >> 4 << 2)])
        header[16:20] = (len(header) - 14).to_bytes(2) + bytes(2)
        bare += [bytes(header)] * (len(data) > len(header)) + [data[:18] + bytes(2) + data[20:]]
    middle = len(bare) // 2
    bare[middle : middle + 6] = reversed(bare[middle : middle + 6])  # so that copies are searched
    path = tmp_path / "bare.pcap"
    path.write_bytes(packet.pcap([(number * 1000, data) for number, data in enumerate(bare)]))
    taken, all_ = compare(path)
    assert all_ == 400 and taken >= 380


def test_a_packet_of_an_uncommon_form_ends_a_stretch(tmp_path):
    """A reset under two VLAN tags: later packets are another connection, even if their numbers would continue it."""
    wire = heartbeats(Wire().shake(), 60).send(1, flags=RST)
    wire.packets[-1] = wire.packets[-1][:12] + b"\x81\0\0\7" * 2 + wire.packets[-1][12:]
    heartbeats(wire, 60)
    path = tmp_path / "reset.pcap"
    path.write_bytes(packet.pcap([(number * 1000, data) for number, data in enumerate(wire.packets)]))
    rows, _, taken = results(path, 1)
    assert len({row["connection"] for row in rows["exchanges"]}) == 2
    assert taken > 20
    compare(path)


def test_a_connection_with_the_brokers_bytes_first_is_converted_by_column(tmp_path, monkeypatch):
    """Its side 0 is the broker's; an exchange that is read alone is between those read by column."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 4096)
    wire = heartbeats(Wire().send(1, frame(codec.encode_response(12, 4, {"correlationId": 7}, {}))), 100)
    header = {"requestApiKey": 3, "requestApiVersion": 9, "correlationId": 8, "clientId": "me"}
    wire.send(0, frame(codec.encode_request(header, {"topics": []})))
    heartbeats(wire.send(1, frame(codec.encode_response(3, 9, {"correlationId": 8}, {"clusterId": "c"}))), 100)
    path = tmp_path / "late.pcap"
    path.write_bytes(packet.pcap([(number * 1000, data) for number, data in enumerate(wire.packets)]))
    rows, _, taken = results(path, 1)
    assert taken > 150
    assert {row["client_port"] for row in rows["exchanges"]} == {40000}
    compare(path)


@pytest.mark.parametrize("off_by", (-1, 1))
@pytest.mark.parametrize("before", (58, 70))
def test_an_answer_to_another_request_is_not_paired_by_column(tmp_path, before, off_by):
    """58: the request is the last packet of a window, and the response the first packet of the next."""
    wire = heartbeats(Wire().shake(), before)
    header = {"requestApiKey": 12, "requestApiVersion": 4, "correlationId": 500, "clientId": "me"}
    wire.send(0, frame(codec.encode_request(header, {"groupId": "g"})))
    wire.send(1, frame(codec.encode_response(12, 4, {"correlationId": 500 + off_by}, {})))
    heartbeats(wire, 100)
    path = tmp_path / "other.pcap"
    path.write_bytes(packet.pcap([(number * 1000, data) for number, data in enumerate(wire.packets)]))
    rows, quality, taken = results(path, 1)
    assert taken > 100
    assert [row["outcome"] for row in rows["exchanges"] if row["correlation_id"] == 500] != ["answered"]
    assert "fault" in {kind for kind, *_ in quality}
    compare(path)


@pytest.mark.parametrize("hole", (1100 << 20, 3000 << 20))
def test_columns_continue_after_a_gap_of_more_than_1_gib(tmp_path, hole):
    wire = heartbeats(Wire().shake(), 60)
    wire.next[1] += hole
    heartbeats(wire, 200)
    path = tmp_path / "hole.pcap"
    path.write_bytes(packet.pcap([(number * 1000, data) for number, data in enumerate(wire.packets)]))
    rows, quality, taken = results(path, 1)
    counts = {kind: (count, size) for kind, count, size, *_ in quality}
    assert counts["gap"] == (1, hole) and counts["long_gap"][0] == 1 and "strays" not in counts
    assert sum(row["outcome"] == "answered" for row in rows["exchanges"]) >= 258
    assert taken > 200
    compare(path)


@pytest.mark.parametrize("bits", [1, 18])
def test_numbers_in_the_same_bucket_are_distinguished(bits, monkeypatch):
    monkeypatch.setattr(inorder, "_BUCKET_BITS", bits)
    dice = np.random.default_rng(3)
    known = dice.integers(0, 1 << 64, 40, np.uint64)
    for numbers in (known[dice.integers(0, 40, 500)], known[:1], known[:0]):
        where, lane = inorder._numbered(numbers)
        assert (numbers[where][lane] == numbers).all()
        assert len(where) == len(set(numbers.tolist()))
