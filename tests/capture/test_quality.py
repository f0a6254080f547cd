"""Flaws of a capture are summed over all readers, and streams captured twice are reported."""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.capture import quality
from kproxy.capture.quality import FEW_PACKETS, KINDS, NONE, SAME_STREAM_NS, Quality, Row, Stream, Twice

KIND = st.sampled_from(("gap", "packets", "fault"))
TIMES = st.one_of(st.just(NONE), st.integers(0, 9))


@given(st.lists(st.tuples(KIND, TIMES, st.integers(1, 3), st.integers(0, 5), TIMES, st.booleans())))
def test_sums_have_the_counts_and_times_of_all_notes(notes):
    parts = Quality(), Quality()
    expected = {}
    for kind, time_ns, count, size, last_ns, which in notes:
        parts[which].note(kind, time_ns, count=count, size=size, last_ns=last_ns)
        expected.setdefault(kind, []).append((count, size, time_ns, time_ns if last_ns == NONE else last_ns))
    whole = Quality()
    for part in parts:
        whole.add(part)
    assert [astuple(row) for row in whole if row.kind != "no_times"] == [
        (
            kind,
            sum(count for count, *_ in expected[kind]),
            sum(size for _, size, *_ in expected[kind]),
            min((first for _, _, first, _ in expected[kind] if first != NONE), default=NONE),
            max(last for *_, last in expected[kind]),
            sentence,
        )
        for kind, sentence in KINDS.items()
        if kind in expected
    ]
    kinds = KINDS.keys() - {"no_times"}
    assert all(whole.count(kind) == sum(each[0] for each in expected.get(kind, ())) for kind in kinds)
    assert all(whole.size(kind) == sum(each[1] for each in expected.get(kind, ())) for kind in KINDS)
    whole.forget()
    assert not list(whole)


def test_packets_that_all_have_one_timestamp_have_no_times():
    for count, last_ns, expected in ((9, 7, 9), (9, 8, 0), (FEW_PACKETS, 7, FEW_PACKETS), (FEW_PACKETS - 1, 7, 0)):
        flaws = Quality()
        flaws.note("packets", 7, count=count, last_ns=last_ns)
        assert flaws.count("no_times") == expected == sum(row.count for row in flaws if row.kind == "no_times")
    flaws.note("packets", NONE, count=9)
    assert not Quality().count("no_times")


def streams(*found):
    made = Quality()
    for numbers, name, time_ns, size in found:
        made.stream(numbers, name, time_ns, time_ns, size)
    return made


def test_connections_with_equal_numbers_and_times_are_copies_of_the_first():
    first = 5 * SAME_STREAM_NS
    made = streams(
        ((1, 2), "b to x", first + 20, 200),
        ((1, 2), "a to x", first, 100),
        ((1, 2), "c to x", first + SAME_STREAM_NS, 300),
        ((1, 2), "d to x", first + SAME_STREAM_NS + 1, 400),  # the same numbers in another stream
        ((1, 3), "e to x", first, 500),
        ((2, 2), "f to x", first, 600),
        ((7, 8), "h to x", 2, 20),
        ((7, 8), "g to x", 1, 10),
    )
    (row,) = made
    sentence = f"{KINDS['same_stream']} (h to x is g to x; b to x is a to x; c to x is b to x)"
    assert row == Row("same_stream", 3, 20 + 200 + 300, 2, first + SAME_STREAM_NS, sentence)
    assert made.count("same_stream") == 3
    made.stream((7, 8), "i to x", 3, 3, 1)
    (row,) = made
    assert row.sentence == f"{KINDS['same_stream']} (h to x is g to x; i to x is h to x; b to x is a to x and 1 more)"
    assert not list(streams(((1, 2), "a to x", 0, 1), ((1, 2), "b to x", SAME_STREAM_NS + 1, 1)))


def test_a_bounded_number_of_streams_is_compared(monkeypatch):
    monkeypatch.setattr(quality, "MAX_STREAMS", 2)
    made = streams(((1, 2), "a", 0, 1), ((1, 2), "a", 0, 1), ((1, 2), "b", 0, 1), ((1, 2), "c", 0, 1))
    assert made.count("same_stream") == 1
    made.forget()
    for name in "abc":
        made.stream((1, 2), name, 0, 0, 1)
    assert made.count("same_stream") == 1


@pytest.mark.parametrize("kind", ("gap", "same_stream"))
def test_events_without_a_time_count_nothing(kind):
    assert (Quality().count(kind), Quality().size(kind)) == (0, 0)


def connection(numbers=(0, 0), first_ns=50, last_ns=60, size=0, name="a to x"):
    made = Quality()
    made.stream(numbers, name, first_ns, last_ns, size)
    (stream,) = made.streams()
    assert (stream.name, stream.first_ns, stream.last_ns, stream.size) == (name, first_ns, last_ns, size)
    return stream


@pytest.mark.parametrize(
    ("later", "is_part"),
    [
        (connection((100, 200)), True),
        (connection((103, 204)), True),  # the other one has 7 bytes
        (connection((103, 205)), False),
        (connection((99, 200)), False),  # it begins earlier
        (connection((100, 199)), False),
        (connection((100, 200), first_ns=99), True),
        (connection((100, 200), first_ns=100), False),  # the other one has ended
        (connection((100, 200), last_ns=10), True),
        (connection((100, 200), first_ns=5, last_ns=9), False),  # the other one has not begun
    ],
)
def test_a_connection_may_be_part_of_an_earlier_capture_of_it(later, is_part):
    earlier = connection((100, 200), 10, 100, 7)
    assert later.is_part_of(earlier) == is_part


def test_sequence_numbers_wrap_after_4_gib():
    assert connection((1, 0xFFFF_FFFF)).is_part_of(connection((0xFFFF_FFFF, 0xFFFF_FFFD), 10, 100, 4))


def test_connections_of_a_capture_are_compared_with_those_of_the_captures_before():
    twice = Twice()
    a, b = connection((100, 200), 10, 100, 50), connection((1, 2), 10, 100, 50, name="b to x")
    assert not list(twice.add([a, a, b]))  # not with one another
    parts = [connection((110, 210)), connection((110, 210), name="b to x"), connection((50, 170), 5, 80, 90)]
    assert list(twice.add(parts)) == [parts[0], parts[2]]  # whichever of the two captures began first
    # exactly the same endpoints
    assert list(twice.add([Stream(b.key, 1000, 1001, 0)])) == [Stream(b.key, 1000, 1001, 0)]


def test_a_connection_is_compared_with_the_last_64_of_the_same_endpoints():
    twice = Twice()
    list(twice.add([connection((1000 * number, 0), 10, 100, 5) for number in range(65)]))
    forgotten, kept = connection((1, 0)), connection((1001, 0))
    assert list(twice.add([forgotten, kept])) == [kept]
