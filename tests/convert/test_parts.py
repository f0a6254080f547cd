"""The parts of a capture, read independently, give the same rows as the whole, wherever the borders lie."""

import os
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from struct import pack, pack_into, unpack_from

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.offline import KINDS, Connection, generate
from kproxy.capture.connections import flows
from kproxy.capture.dissection.packets import ACK, FIN, RST, SYN
from kproxy.capture.formats import pcapng, splits
from kproxy.capture.formats.pcap import CLASSIC
from kproxy.convert import processes
from kproxy.convert.job import Settings, captures_of
from kproxy.convert.parts import processes as parts
from kproxy.convert.parts import reader
from kproxy.convert.parts.reader import Part, Unsplittable
from kproxy.convert.processes import convert
from kproxy.convert.shares import FED
from kproxy.errors import KproxyError
from kproxy.protocol import codec
from kproxy.tables import schema, writer
from tests.capture.dialogues import frames, stretches
from tests.capture.packet import (
    BROKER,
    CLIENT,
    enhanced,
    ethernet,
    icmp,
    interface,
    ipv4,
    option,
    pcap,
    records,
    section,
    tcp,
)
from tests.captures import capture, folder


def walker_of(data):
    """The reader that finds record boundaries in a file; None: the file cannot be split."""
    if data[:4] in CLASSIC:
        return splits._Records(data)
    front = pcapng.front(data)
    return front and splits._Blocks(data, front)


ALL = [
    path
    for name in ("captures", "shapes")
    for path in sorted(folder(name).iterdir())
    if path.suffix in (".pcap", ".pcapng") and splits.is_plain(str(path)) and walker_of(path.read_bytes()) is not None
]
STEP_NS = 1_000_000  # between packets
ONE = replace(KINDS[0], connections=1)


def results(shares):
    """The results of readers: rows by table, quality, and names."""
    rows = {}
    for name in shares[0].runs:
        table = schema.BY_NAME.get(name) or FED[name]
        runs = [run for share in shares for run in share.runs[name]]
        corrections = {run: correction for share in shares for run, correction in share.corrections.items()}
        parts = list(writer.merged(table, runs, corrections))
        rows[name] = pa.concat_tables(parts) if parts else table.schema.empty_table()
    quality, names = shares[0].quality, shares[0].names
    for share in shares[1:]:
        quality.add(share.quality)
        names.add(share.names.as_json())
    return rows, list(quality), names.as_json()


def parts_of(path, places, overlap_part):
    """The parts of a capture, split at the first record after each place."""
    data = path.read_bytes()
    walker = walker_of(data)
    begin = walker.begin
    found = {walker.boundary(max(begin, place), len(data)) for place in places}
    cuts = [0, *sorted(cut for cut in found if cut and cut > begin), len(data)]
    pieces = [
        splits.Split(str(path), start, end, data[:begin] if start else b"", last=end == len(data))
        for start, end in pairwise(cuts)
    ]
    return [
        Part(number, piece, 0, following, overlap_part)
        for number, (piece, following) in enumerate(zip(pieces, [*pieces[1:], None], strict=True))
    ]


class Here:
    """Calls functions in this process."""

    def each(self, job, function, work):
        return [function(*arguments, lambda size: None) for arguments in work]


class InParts:
    """A capture that is read whole first and then in parts. `seen` counts the outcomes."""

    def __init__(self, path, work):
        (self._job,) = captures_of([path], Settings())
        self._path = path
        self._work = work
        self.whole = results([processes._share(self._job, work, ".whole", tuple(range(16)), True, None, None)])
        self.seen = Counter()
        self.unsplittable = Counter()
        self.conflicting = Counter()

    def check(self, places, overlap_part):
        self.seen["rounds"] += 1
        cut = parts_of(self._path, places, overlap_part)
        every, read = [], parts._read
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parts, "LEAST_CLAIMED", 0)
                patch.setattr(parts, "_read", lambda *given: every.append(read(*given)) or every[-1])
                shares = parts.read(self._job, cut, Here(), self._work, f".{self.seen['rounds']}", 2)
        except Unsplittable as fault:
            self.unsplittable[str(fault)] += 1
            self.seen["unsplittable"] += 1
            return
        self.seen["bytes"] += self._path.stat().st_size
        self.conflicting.update(why for readings in every for each in readings for why in each.conflicting.values())
        last = every[-1]
        self.seen["deferred"] += sum(run.size for each in last for _, run in each.deferred)
        self.seen["borders"] += len(cut) - 1
        self.seen["handed"] += sum(excerpt.handover is not None for each in last for excerpt in each.excerpts)
        rows, quality, names = results(shares)
        for name, table in self.whole[0].items():
            assert rows[name].equals(table), (name, [part.split.start for part in cut])
        assert quality == self.whole[1]
        assert names == self.whole[2]


UNSPLITTABLE = {"secrets", "fragments", "not_kept", "idle", "logs", "late packets", reader.SEVERAL_LENGTHS}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_parts_of_any_capture_change_nothing(path, tmp_path):
    read, dice = InParts(path, tmp_path), random.Random(path.name)
    size = path.stat().st_size
    for count in (1, 5):
        read.check([dice.randrange(24, size) for _ in range(count)], dice.choice((1, 2, 3)))
    assert read.unsplittable.keys() <= UNSPLITTABLE  # only reasons that lie in the capture itself


def test_concatenated_overlapping_captures_are_read_whole(tmp_path):
    """A reader that begins after the place where time goes back would take packets for new ones."""
    (base,) = (path for path in ALL if path.stem == "k41_BASE")
    whole = [*records(base.read_bytes())]
    third = len(whole) // 3
    path = tmp_path / "both.pcap"
    path.write_bytes(pcap([(time_ns, data) for time_ns, data, _ in whole[: 2 * third] + whole[third:]]))
    read = InParts(path, tmp_path)
    for place in range(1, 8):
        read.check([path.stat().st_size * place // 8], 2)
    assert read.unsplittable == {"times that go back": 7}


@pytest.mark.ring2
def test_parts_of_random_dialogues_change_nothing(tmp_path_factory):
    """One or two connections, with segments that are lost, late or duplicated."""
    total = Counter()
    dialogues = st.lists(stretches(200), min_size=1, max_size=2)

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(dialogues, st.integers(0, 1 << 32), st.sampled_from((0, 0.003, 0.02)))
    def holds(dialogues, seed, disorder):
        folder, dice = tmp_path_factory.mktemp("dialogues"), random.Random(seed)
        path = folder / "made-up.pcap"
        path.write_bytes(generated_capture(dialogues, dice, disorder))
        read = InParts(path, folder)
        for count in (1, 3):
            read.check([dice.randrange(24, path.stat().st_size) for _ in range(count)], dice.choice((1, 2)))
        total.update(read.seen)

    holds()
    assert total["handed"] and total["unsplittable"] * 4 < total["rounds"], total


def test_failed_connects_are_reported_once_wherever_a_capture_is_split(tmp_path):
    """Refused, unanswered, unfinished, undelivered, closed at once, answered late: some are pending at every border."""
    frames = []

    def send(source, target, **head):
        segment = tcp(source=source, target=target, **head)
        frames.append(ethernet(ipv4(segment, source=source, target=target, identity=len(frames))))
        return frames[-1][14:42]

    for turn in range(4):
        for number in range(18):
            client, seq = (CLIENT[0], 40000 + number), 1000 * number
            if number >= 15:  # its SYN-ACK never arrives
                source, target = (BROKER, client) if turn else (client, BROKER)
                send(
                    source, target, seq=0 if turn else seq, ack=seq + 1 if turn else 0, flags=SYN | (ACK if turn else 0)
                )
                continue
            if turn < 3 and (turn == 0 or number % 5 < 4):
                begin = send(client, BROKER, seq=seq, ack=0, flags=SYN)
            if turn == 2 and number % 5 == 3:  # RFC 792: the router quotes the beginning of the packet
                frames.append(ethernet(ipv4(icmp(3, 3, 0, begin), protocol=1, source=BROKER, target=client)))
            elif turn and number % 5 == 4:  # one turn later each: SYN-ACK, ACK, FIN of the server
                source, target = (client, BROKER) if turn == 2 else (BROKER, client)
                numbers = {"seq": seq + 1, "ack": 1} if turn == 2 else {"seq": turn > 1, "ack": seq + 1}
                send(source, target, **numbers, flags=ACK | (0, SYN, 0, FIN)[turn])
            elif turn == 3 and number % 5 < 2:
                send(BROKER, client, ack=seq + 1, flags=ACK | (RST, SYN)[number % 5])
    path = tmp_path / "connects.pcap"
    path.write_bytes(pcap([(number * 1_000_000, frame) for number, frame in enumerate(frames)]))
    read = InParts(path, tmp_path)
    expected = dict.fromkeys(("refused", "port_unreachable", "closed_at_once"), 3) | {"unanswered": 6}
    assert Counter(read.whole[0]["connections"]["close"].to_pylist()) == expected
    for place in range(30, path.stat().st_size, 400):
        read.check([place], 2)
    assert read.seen["borders"] > 5 and not read.unsplittable


def generated_capture(dialogues, dice, disorder):
    """A capture of connections that take turns to send the frames of their dialogues."""
    connections = [Connection(number, dice.choice((300, 1448, 9000))) for number in range(len(dialogues))]
    packets = [packet for connection in connections for packet in connection.shake()]
    unsent = [list(frames(dialogue)) for dialogue in dialogues]
    late = []
    while any(unsent):
        number = dice.choice([number for number, waiting in enumerate(unsent) if waiting])
        for _ in range(min(len(unsent[number]), dice.randrange(1, 9))):
            for packet in connections[number].send(*unsent[number].pop(0)):
                fate = dice.random() / disorder if disorder else 9
                if 1 <= fate < 2:
                    late.append(packet)
                elif fate >= 1:
                    packets += [packet, packet] if fate < 3 else [packet]
                    packets += late
                    late.clear()
    times = [1_700_000_000_000_000_000 + number * STEP_NS for number in range(len(packets))]
    return pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262_144, 1) + b"".join(
        pack("<IIII", time_ns // 10**9, time_ns % 10**9, len(packet), len(packet)) + packet
        for time_ns, packet in zip(times, packets, strict=True)
    )


@pytest.mark.parametrize(
    "kind", (ONE, replace(ONE, dirty=True), replace(ONE, connections=3)), ids=("one", "dirty", "3")
)
def test_busy_connections_are_handed_over_at_each_border(kind, tmp_path):
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(kind, file, 2000)
    read = InParts(path, tmp_path)
    size = path.stat().st_size
    read.check([size * number // 4 for number in range(1, 4)], 2)
    assert read.seen["borders"] == 3 and read.seen["handed"] == 3 * kind.connections and not read.seen["deferred"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", (ONE, replace(ONE, dirty=True, connections=3)), ids=("one", "dirty"))
@pytest.mark.parametrize("way_ns", (15_000_000, 2_000_000))
def test_copies_from_both_ends_are_recognised_in_parts_too(kind, way_ns, tmp_path):
    """Copies of packets before a border, or before its warm-up, follow after it."""
    once, path = tmp_path / "once.pcap", tmp_path / "both.pcap"
    with once.open("wb") as file:
        generate(kind, file, 2000)
    whole = [(time_ns, data) for time_ns, data, _ in records(once.read_bytes())]
    later = [(time_ns + way_ns, data) for time_ns, data in whole]
    path.write_bytes(pcap(sorted(whole + later, key=lambda each: each[0])))
    (tmp_path / "once").mkdir()
    alone, read = InParts(once, tmp_path / "once"), InParts(path, tmp_path)
    both, one = (each.whole[0]["exchanges"].drop(["source", "connection"]) for each in (read, alone))
    assert both.equals(one) or kind.dirty
    assert sum(read.whole[0]["connections"]["retransmissions"].to_pylist()) == sum(
        alone.whole[0]["connections"]["retransmissions"].to_pylist()
    )
    size = path.stat().st_size
    for overlap_part in (2, 40):
        read.check([size * number // 4 for number in range(1, 4)], overlap_part)
    assert read.seen["borders"] and not read.unsplittable


def test_captures_with_cut_and_whole_packets_are_read_in_one_piece(tmp_path):
    """A part may end between a cut packet and its copy."""
    once = tmp_path / "once.pcap"
    with once.open("wb") as file:
        generate(ONE, file, 700)
    whole = [(time_ns, data, len(data)) for time_ns, data, _ in records(once.read_bytes())]
    cut = [(time_ns - 500_000, data[:60], size) for time_ns, data, size in whole]
    blocks = [enhanced(data, time_ns, original=size) for time_ns, data, size in sorted(whole + cut)]
    path = tmp_path / "both.pcapng"
    path.write_bytes(section() + interface(options=option(9, b"\x09")) + b"".join(blocks))
    (tmp_path / "once").mkdir()
    alone, read = InParts(once, tmp_path / "once"), InParts(path, tmp_path)
    for column in ("correlation_id", "latency_ns", "decoded"):
        assert read.whole[0]["exchanges"][column].equals(alone.whole[0]["exchanges"][column])
    assert "truncated" not in {row.kind for row in read.whole[1]}
    read.check([path.stat().st_size // 2], 2)
    assert read.unsplittable == {reader.SEVERAL_LENGTHS: 1}


def test_a_full_disk_is_reported_while_packets_are_recorded(tmp_path):
    path = capture("k41_BASE")
    (job,) = captures_of([str(path)], Settings())
    first = parts_of(path, [path.stat().st_size // 2], 4)[0]
    (tmp_path / "places.0").symlink_to("/dev/full")
    with pytest.raises(KproxyError) as raised:
        parts.read_part(job, first, tmp_path, ".0", lambda size: None)
    assert str(raised.value) == f"{tmp_path}: cannot be written to: No space left on device"


def test_readers_read_each_byte_once_and_their_warm_ups_twice(tmp_path, monkeypatch):
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(replace(ONE, connections=3), file, 13_000)  # each warm-up is two milliseconds
    (job,) = captures_of([path], Settings())
    size = path.stat().st_size
    counted = Counter()

    def preadv(handle, rooms, offset):
        count = real(handle, rooms, offset)
        counted["bytes"] += count
        return count

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    read_bytes = 0
    for part in parts_of(path, [size // 2], 20):
        found = reader.read(job, part, lambda table, batch: None)
        read_bytes += found.read_bytes
        assert not found.deferred and not found.unsplittable
    assert size <= counted["bytes"] <= 1.1 * size
    assert read_bytes == pytest.approx(counted["bytes"], rel=0.02)


def test_a_coarse_clock_gives_no_connection_two_beginnings(tmp_path):
    """An id is made of the endpoints and the first packet's time; a reader does not correct an id that is already
    final."""
    path = tmp_path / "coarse.pcap"
    with path.open("wb") as file:
        generate(ONE, file, 1000)
    data = bytearray(path.read_bytes())
    place = 24
    while place < len(data):
        pack_into("<I", data, place + 4, 0 if place < 0.7 * len(data) else 10_000)
        place += 16 + unpack_from("<I", data, place + 8)[0]
    path.write_bytes(data)
    read = InParts(path, tmp_path)
    read.check([len(data) // 2], 2)
    assert read.conflicting == {"one id for two readers": 1} and not read.unsplittable


def test_late_packets_of_a_forgotten_connection_change_nothing(tmp_path, monkeypatch):
    """They look like a new connection, whose packets would be deferred, and those of the first connection with them."""
    monkeypatch.setattr(flows, "MAX_ENDED", 2)
    busy, *others = (Connection(number, 1448) for number in range(100))
    packets = [*busy.shake(), *heartbeats(busy, range(3000))]
    late = []
    for number, one in enumerate(others):
        packets += [*one.shake(), *heartbeats(one, [0])]
        packets += [one._packet(0, b"", 0x11), one._packet(1, b"", 0x11)]
        late = late or [*heartbeats(one, [1])]
        packets += late if number == 80 else []
    path = tmp_path / "late.pcap"
    path.write_bytes(pcap([(1_700_000_000_000_000_000 + at * 10_000, packet) for at, packet in enumerate(packets)]))
    read = InParts(path, tmp_path)
    read.check([path.stat().st_size // 2], 5)
    assert read.unsplittable == {"late packets": 1}


def heartbeats(connection, numbers):
    """The packets of some Heartbeat exchanges."""
    head = {"requestApiKey": 12, "requestApiVersion": 4, "clientId": "c"}
    for number in numbers:
        asked = codec.encode_request(head | {"correlationId": number}, {"groupId": "g", "memberId": "m"})
        answered = codec.encode_response(12, 4, {"correlationId": number}, {"errorCode": 0})
        for side, frame in enumerate((asked, answered)):
            yield from connection.send(side, len(frame).to_bytes(4) + frame)


@pytest.mark.parametrize("seed", range(2))
def test_reused_ports_defer_only_their_own_connections(tmp_path, seed):
    """Connections follow each other on three ports, some without FIN; a busy connection is still split among
    readers."""
    dice = random.Random(seed)
    busy = Connection(0, 1448)
    packets = [*busy.shake()]
    lives = []
    for port in (1, 2, 3):
        for _ in range(6):
            life = Connection(port, 1448)
            life._next = [dice.randrange(1 << 32), dice.randrange(1 << 32)]
            packets_of_life = [*life.shake(), *heartbeats(life, range(dice.randrange(1, 30)))]
            if dice.random() < 0.5:
                packets_of_life += [life._packet(0, b"", 0x11), life._packet(1, b"", 0x11)]
            lives.append(packets_of_life)
    waiting = {port: [packet for life in lives[6 * port : 6 * port + 6] for packet in life] for port in range(3)}
    for number in range(2000):
        packets += heartbeats(busy, [number])
        for remaining in waiting.values():
            packets += remaining[: (some := dice.choice((0, 0, 1)) * dice.randrange(12))]
            del remaining[:some]
    path = tmp_path / "again.pcap"
    path.write_bytes(pcap([(1_700_000_000_000_000_000 + at * 10_000, packet) for at, packet in enumerate(packets)]))
    read = InParts(path, tmp_path)
    size = path.stat().st_size
    for _ in range(2):
        read.check([int(size * (number + dice.random() / 9) / 4) for number in range(1, 4)], 4)
    assert not read.unsplittable and read.conflicting["ports used again"]
    assert read.seen["deferred"] < read.seen["bytes"] / 4 and read.seen["handed"] >= read.seen["borders"] / 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("lives", "why"),
    [
        ("end end+", ""),  # other sequence numbers: another connection
        ("end end", "a connection that is there twice"),
        ("end open", "a connection that is there twice"),
        ("open end", "ports used again"),
        ("open open+", "ports used again"),
        ("open+ open", "ports used again"),
        ("end late+", "late packets"),
    ],
)
def test_connections_on_one_pair_of_ports_in_different_parts(tmp_path, lives, why):
    """Captures that hold packets twice, such as several concatenated ones, and ports that are reused.

    The reader of a part cannot distinguish repetitions, later connections and late packets as the reader of the whole
    does.
    """
    busy = Connection(0, 1448)
    packets = [*busy.shake(), *heartbeats(busy, range(400))]
    for number, life in enumerate(lives.split()):
        again = Connection(1, 1448)
        again._next = [1 << 20, 2 << 20] if not life.endswith("+") else [3 << 20, 4 << 20]
        sent = [*again.shake(), *heartbeats(again, range(5))]
        if "end" in life:
            sent += [again._packet(0, b"", 0x11), again._packet(1, b"", 0x11)]
        if life == "late+":  # the packet after the handshake arrives before it
            again._next = [1 << 20, 2 << 20]
            sent = [sent[3], *sent[:3], *sent[4:]]
        packets += [*sent, *heartbeats(busy, range(1000 * number, 1000 * number + 600))]
    path = tmp_path / "lives.pcap"
    path.write_bytes(pcap([(1_700_000_000_000_000_000 + at * 10_000, packet) for at, packet in enumerate(packets)]))
    read = InParts(path, tmp_path)
    size = path.stat().st_size
    read.check([size * 9 // 20], 5)
    assert {*read.unsplittable, *read.conflicting} == ({why} if why else set())
    for place in range(3, 9):
        read.check([size * place // 9, size * (place + 1) // 10], 5)


def test_a_connection_whose_ports_are_reused_in_the_middle_of_a_part(tmp_path, monkeypatch):
    """A reader claimed the connection without a handover, and has another connection on its ports at the end of the
    part."""
    monkeypatch.setattr(reader, "MAX_POSITIONS", 0)  # so that none is handed over
    first, other, again = Connection(0, 1448), Connection(2, 1448), Connection(0, 1448)
    again._next = [3 << 20, 4 << 20]
    packets = [*first.shake(), *other.shake()]
    for number in range(1600):
        if number == 900:
            packets += again.shake()
        packets += [*heartbeats(first if number < 900 else again, [number]), *heartbeats(other, [number])]
    path = tmp_path / "again.pcap"
    path.write_bytes(pcap([(1_700_000_000_000_000_000 + at * 10_000, packet) for at, packet in enumerate(packets)]))
    read = InParts(path, tmp_path)
    size = path.stat().st_size
    read.check([size * 3 // 10, size * 8 // 10], 5)
    assert not read.unsplittable and set(read.conflicting) == {"ports used again"}


def same_files(ours, theirs):
    files = [file.relative_to(theirs) for file in theirs.rglob("*") if file.is_file()]
    assert len(files) > 10
    for file in files:
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file


def test_processes_share_one_connection_and_nothing_changes(tmp_path, monkeypatch):
    path = tmp_path / "one.pcap"
    with path.open("wb") as file:
        generate(ONE, file, 3000)
    convert([path], tmp_path / "1", processes=1)
    monkeypatch.setattr(parts, "LEAST_BYTES", 1 << 20)
    used = []
    read = parts.read
    monkeypatch.setattr(parts, "read", lambda *given: used.append(given[1]) or read(*given))
    steps = []
    convert([path], tmp_path / "3", processes=3, progress=lambda *given: steps.append(given))
    assert [len(cut) for cut in used] == [3]
    assert steps == sorted(steps) and steps[-1] == (path.name, path.stat().st_size, path.stat().st_size)
    same_files(tmp_path / "3", tmp_path / "1")

    def unsplittable(*given):
        read(*given)
        raise Unsplittable("nothing fits")

    monkeypatch.setattr(parts, "read", unsplittable)
    convert([path], tmp_path / "again", processes=2)
    same_files(tmp_path / "again", tmp_path / "1")


def test_only_large_splittable_captures_are_read_in_parts(tmp_path, monkeypatch):
    path = tmp_path / "one.pcap"
    with path.open("wb") as file:
        generate(ONE, file, 3000)
    (job,) = captures_of([path], Settings())
    assert not parts.plan(job, 2)
    monkeypatch.setattr(parts, "LEAST_BYTES", 1 << 20)
    assert not parts.plan(job, 1)
    found = parts.plan(job, 3)
    assert [part.number for part in found] == [0, 1, 2] and found[-1].split.end == path.stat().st_size
    monkeypatch.setattr(parts, "MOST_BYTES", 2 << 20)
    assert len(parts.plan(job, 2)) == 6  # the same number for each process
    monkeypatch.setattr(parts, "LEAST_BYTES", 1 << 10)
    (packed,) = captures_of([capture("k41_gz")], Settings())
    assert not parts.plan(packed, 2)
    (blocks,) = captures_of([capture("k41_ng")], Settings())
    assert len(parts.plan(blocks, 2)) > 1
    for size in (0, 3, 23, 40):
        (tmp_path / "short.pcap").write_bytes(path.read_bytes()[:size])
        assert not parts.plan(*captures_of([tmp_path / "short.pcap"], Settings()), 2)
    (keyed,) = captures_of([path], Settings(key_log=path))
    assert not parts.plan(keyed, 2)
    two = captures_of([path, capture("k41_BASE")], Settings(rotated=True))
    assert {part.file for part in parts.plan(*two, 2)} == {0, 1}


def test_a_part_that_begins_inside_large_bodies_is_abandoned_early(tmp_path):
    path = tmp_path / "large.pcap"
    with path.open("wb") as file:
        generate(replace(KINDS[1], connections=8), file, 16)  # of 1 MB each
    (job,) = captures_of([path], Settings())
    cut = parts_of(path, [path.stat().st_size // 2], 48)
    seen = []
    with pytest.raises(Unsplittable, match="in the middle"):
        parts.read_part(job, cut[1], tmp_path, ".1", seen.append)
    assert sum(seen) < path.stat().st_size / 4
