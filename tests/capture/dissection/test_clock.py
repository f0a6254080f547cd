"""A capture during which the clock was set has the same exchanges and durations as without that."""

from itertools import pairwise
from math import ceil
from struct import pack_into, unpack_from

import pyarrow.parquet as pq
import pytest

from kproxy.capture.dissection.clock import Clock
from kproxy.capture.dissection.packets import ETHERNET, SYN
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import Quality
from kproxy.convert.processes import convert
from tests.capture.packet import BROKER, CLIENT, ethernet, ipv4, tcp
from tests.captures import capture

SECOND = 1_000_000_000
HOUR = 3600


def stepped(path, place, steps):
    """The capture with its clock set at some packets, given as (share of the packets, seconds); and the times of these
    steps in ns."""
    data = bytearray(path.read_bytes())
    assert data[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1")
    unit_ns = 1000 if data[0] == 0xD4 else 1
    places, at = [], 24
    while at < len(data):
        places.append(at)
        at += 16 + unpack_from("<I", data, at + 8)[0]
    heads = [unpack_from("<II", data, places[ceil(share * len(places))]) for share, _ in steps]
    for number, at in enumerate(places):
        shift = sum(seconds for share, seconds in steps if number >= share * len(places))
        pack_into("<I", data, at, unpack_from("<I", data, at)[0] + shift)
    place.write_bytes(data)
    return place, [second * SECOND + fraction * unit_ns for second, fraction in heads]


def tables(path, place):
    convert([path], place, processes=1)
    rows = pq.read_table(place / "exchanges").to_pylist()
    quality = {row["kind"]: row for row in pq.read_table(place / "quality").to_pylist()}
    return rows, quality


TOLD = ("number", "api", "correlation_id", "outcome", "latency_ns", "total_ns", "queue_ns", "muted_ns", "broker_ns")


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([(0.5, -HOUR)], 1),
        ([(0.5, -5)], 1),
        ([(0.5, HOUR)], 1),
        ([(0.4, -5), (0.4005, 5)], 2),  # only for some packets
        ([(0.2, HOUR), (0.6, -2 * HOUR), (0.9, -5)], 3),
    ],
)
def test_durations_are_not_affected_by_clock_steps(tmp_path, steps, count):
    path = capture("k41_java_cluster")
    rows, before = tables(path, tmp_path / "tables")
    changed, step_ns = stepped(path, tmp_path / path.name, steps)
    set_rows, quality = tables(changed, tmp_path / "set")
    assert len(rows) > 1000 and "clock_step" not in before
    assert [tuple(row[name] for name in TOLD) for row in set_rows] == [
        tuple(row[name] for name in TOLD) for row in rows
    ]
    assert [row["request_start_ns"] for row in set_rows] == [row["request_start_ns"] for row in rows]
    assert quality["clock_step"]["count"] == count and "clock_back" not in quality.keys() - before.keys()
    assert (quality["clock_step"]["first_ns"], quality["clock_step"]["last_ns"]) == (step_ns[0], step_ns[-1])


# --- detection of steps, packet by packet -----------------------------------------------------------------------------


def timestamp(ticks):
    return b"" if ticks is None else b"\1\1\x08\x0a" + ticks.to_bytes(4) + bytes(4)


def sent(time_ns, seq, ticks=None, **more):
    """A packet of a client."""
    return time_ns, ethernet(ipv4(tcp(seq=seq, options=more.pop("options", timestamp(ticks)), **more)))


def read(packets, *cuts):
    """(times without steps, steps) of packets in windows that end at these places."""
    quality = Quality()
    clock, times = Clock(quality), []
    edges = [0, *cuts, len(packets)]
    for begin, end in pairwise(edges):
        data, records = b"", []
        for time_ns, frame in packets[begin:end]:
            records.append((time_ns, ETHERNET, len(data), len(data) + len(frame), len(frame)))
            data += frame
        times += [record[0] for record in clock.take(Window(data, 0, records)).records]
    assert quality.count("clock_step") == clock.steps
    return times, clock.steps


MS = 1_000_000
T = 1_700_000_000 * SECOND
NEAR = 64 << 20


def back(jump_ns, seq_ahead=0, **more):
    return [sent(T, 1000), sent(T + jump_ns, 1000 + seq_ahead & 0xFFFF_FFFF, **more)]


def forth(jump_ns, ticks, seq_ahead=1, before=5000):
    return [
        sent(T, 1000, before),
        sent(T + jump_ns, 1000 + seq_ahead, ticks & 0xFFFF_FFFF if ticks is not None else None),
    ]


@pytest.mark.parametrize(
    ("packets", "after_ns"),
    [
        (back(-250 * MS), 0),  # a step of unknown size: both packets get the same time
        (back(-250 * MS + 1), None),
        (back(-5 * SECOND + 10 * MS - 1), 10 * MS - 1),  # five seconds, and the packets are that far apart
        (back(-5 * SECOND + 10 * MS), 0),
        (back(-5 * SECOND, NEAR - 1), 0),
        (back(-5 * SECOND, NEAR), None),  # no connection sends as much in between
        (back(-5 * SECOND, -1), None),  # a packet was overtaken, or captures were joined
        (back(-5 * SECOND, source=BROKER, target=CLIENT), None),  # the other direction
        (back(-5 * SECOND, flags=SYN), None),
        (forth(4 * SECOND, 5019), 0),  # less than half of the time by a clock of ten ticks a second
        (forth(4 * SECOND, 5020), None),
        (forth(4 * SECOND, 5000), 0),
        (forth(4 * SECOND, 5000, seq_ahead=0), None),  # the same packet at another place
        (forth(4 * SECOND, 4999), None),
        (forth(4 * SECOND, 3, before=0xFFFF_FFFE), 0),
        (forth(4 * SECOND, None), None),
        (forth(4 * SECOND + 9 * MS, 5001), 9 * MS),
        (forth(250 * MS, 5001), 0),
        (forth(250 * MS - 1, 5001), None),
    ],
)
@pytest.mark.parametrize("cuts", ((), (1,)))
def test_a_connection_reveals_a_clock_step(packets, after_ns, cuts):
    """after_ns: expected time from the first packet to the second; None: no step."""
    (first, last), steps = read(packets, *cuts)
    assert (first, steps) == (T, int(after_ns is not None))
    assert last == (packets[1][0] if after_ns is None else T + after_ns)


@pytest.mark.parametrize(
    ("off_ns", "steps"), ((0, 2), (250 * MS - 1, 2), (-250 * MS + 1, 2), (250 * MS, 1), (-250 * MS, 1))
)
def test_a_step_back_to_the_former_clock_is_detected(off_ns, steps):
    """No connection has to reveal that."""
    unrelated = sent(T + off_ns, 7, source=BROKER, target=CLIENT)
    for cuts in ((), (1,), (2,), (1, 2)):
        times, found = read([sent(T, 1000), sent(T - 5 * SECOND, 1001), unrelated], *cuts)
        assert found == steps and times[:2] == [T, T]
        assert times[2] == (
            T + max(0, off_ns % SECOND if off_ns % SECOND < 10 * MS else 0) if steps == 2 else unrelated[0] + 5 * SECOND
        )


@pytest.mark.parametrize("where", ("before", "behind"))
@pytest.mark.parametrize(("count", "steps"), ((255, 1), (256, 0)))
def test_a_step_is_revealed_within_256_packets_around_the_jump(where, count, steps):
    others = [sent(T, 1, source=(b"\x0a\1\1" + bytes((n % 250,)), 1000 + n)) for n in range(count)]
    if where == "before":
        packets = [sent(T, 1000), *others, sent(T - 5 * SECOND, 1001)]
    else:
        packets = [
            sent(T, 1000),
            *((time_ns - 5 * SECOND, frame) for time_ns, frame in others),
            sent(T - 5 * SECOND, 1001),
        ]
    for cuts in ((), (1,), *(((100,), (len(packets) - 1,)) if where == "before" else ())):
        assert read(packets, *cuts)[1] == steps


def unrelated(time_ns, number):
    """A packet of a connection with no other packets."""
    return sent(time_ns, 1, source=(b"\x0a\1\1" + bytes((number % 250,)), 1000 + number))


@pytest.mark.parametrize(("between", "steps"), ((1, 1), (3, 1), (254, 1), (255, 1), (256, 0)))
@pytest.mark.parametrize("forth", (False, True))
def test_a_later_window_may_reveal_a_step(between, steps, forth):
    """Packets before it keep their times, since they were passed on; all later packets get times without the step."""
    step = 5 * SECOND if forth else -5 * SECOND
    packets = [sent(T, 1000, 7), *(unrelated(T + step + n, n) for n in range(between))]
    packets += [sent(T + step + between, 1001, 7), unrelated(T + step + between + 1, 300)]
    for cuts in ((between + 1,), (2, between + 1), tuple(range(1, between + 2))):
        times, found = read(packets, *dict.fromkeys(cuts))
        assert found == steps
        shift = step if steps else 0
        assert times[: between + 1] == [time_ns for time_ns, _ in packets[: between + 1]]
        assert times[between + 1 :] == [T + step - shift + between, T + step - shift + between + 1]


def test_a_step_revealed_late_counts_for_the_next_one():
    """The packets between them are earlier than their timestamps."""
    b = {"source": (b"\x0a\1\1\1", 1000)}
    packets = [sent(T, 1000), sent(T - HOUR * SECOND, 1, **b), sent(T - HOUR * SECOND + 1, 1001)]
    packets.append(sent(T - (HOUR + 60) * SECOND + 2, 2, **b))
    assert read(packets, 2) == ([T, T - HOUR * SECOND, T + 1, T + 2], 2)


@pytest.mark.parametrize("cuts", ((), (1,), (2,), (3,), (1, 2, 3)))
def test_a_pause_confirmed_by_one_connection_is_no_step_by_another(cuts):
    """The first connection with TCP timestamps before and after decides."""
    b = {"source": (b"\x0a\1\1\1", 1000)}
    packets = [sent(T, 1000, 7), sent(T, 1, 7, **b), sent(T + 4 * SECOND, 2, 4007, **b), sent(T + 4 * SECOND, 1001, 7)]
    assert read(packets, *cuts) == ([time_ns for time_ns, _ in packets], 0)


def test_another_capture_reveals_no_step_of_the_previous_one():
    clock = Clock(Quality())
    for time_ns, frame in (sent(T, 1000), unrelated(T - 5 * SECOND, 1)):
        clock.take(Window(frame, 0, [(time_ns, ETHERNET, 0, len(frame), len(frame))]))
    clock.clear()
    time_ns, frame = sent(T - 5 * SECOND, 1001)
    taken = clock.take(Window(frame, 0, [(time_ns, ETHERNET, 0, len(frame), len(frame))]))
    assert (taken.records[0][0], clock.steps) == (time_ns, 0)


@pytest.mark.parametrize(
    ("options", "is_read"),
    [
        (b"\x08\x0a" + bytes(3) + b"\7" + bytes(4) + b"\1\1", True),
        (b"\2\4\5\xb4" + b"\x08\x0a" + bytes(3) + b"\7" + bytes(4) + b"\1\1", True),  # after a maximum segment size
        (b"\1\1\1\1" + b"\x08\x0a" + bytes(3) + b"\7" + bytes(4) + b"\1\1", True),
        (b"\0\1" + b"\x08\x0a" + bytes(3) + b"\7" + bytes(4), False),  # after the end of options
        (b"\5\1" + b"\x08\x0a" + bytes(3) + b"\7" + bytes(4), False),  # an option shorter than its own header
        (b"\x08\x0b" + bytes(3) + b"\7" + bytes(6), False),
        (b"\1\1\1\1\1\1\x08\x0a", False),  # truncated
        (b"\1\1\1\1\1\1\1\x08", False),
    ],
)
def test_timestamps_are_read_anywhere_among_the_options(options, is_read):
    packets = [sent(T, 1000, options=options), sent(T + 4 * SECOND, 1001, options=options)]
    assert read(packets)[1] == is_read


def test_a_forward_step_inside_a_pause_keeps_the_length_of_the_pause(tmp_path):
    """TCP timestamps of connections, which count milliseconds, distinguish the two."""
    path = capture("k41_java_cluster")
    rows, _ = tables(path, tmp_path / "tables")
    changed, _ = stepped(path, tmp_path / path.name, [(746.5 / 11_580, 30)])  # the packet after 443 ms of silence
    set_rows, quality = tables(changed, tmp_path / "set")
    assert quality["clock_step"]["count"] == 1
    apart_ns = [abs(a["request_start_ns"] - b["request_start_ns"]) for a, b in zip(rows, set_rows, strict=True)]
    assert max(apart_ns) < 3_000_000 < 443_000_000 // 100
