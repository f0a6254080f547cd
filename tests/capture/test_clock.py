"""A capture whose clock was set while it was made: the same exchanges, and durations as if it had not been."""

from math import ceil
from struct import pack_into, unpack_from

import pyarrow.parquet as pq
import pytest

from kproxy.convert.processes import convert
from tests.captures import capture

SECOND = 1_000_000_000
HOUR = 3600


def stepped(path, place, steps):
    """The capture with its clock set at some of its packets: (share of the packets, seconds); and when, in ns."""
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
        ([(0.4, -5), (0.4005, 5)], 2),  # for some packets only
        ([(0.2, HOUR), (0.6, -2 * HOUR), (0.9, -5)], 3),
    ],
)
def test_durations_are_those_of_a_clock_that_was_not_set(tmp_path, steps, count):
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
