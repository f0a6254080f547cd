"""What is sent of the bytes of a call."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.reading import Reading

PARTS = st.lists(st.tuples(st.binary(min_size=1, max_size=5), st.one_of(st.none(), st.binary(max_size=5))))


@given(PARTS, st.sampled_from([CLIENT, BROKER]), st.booleans())
def test_each_byte_is_sent_once_in_order_or_replaced(parts, side, sends_each):
    """Parts of a view are read one after the other, and each is sent as it is or replaced."""
    view = memoryview(b"".join(part for part, _ in parts))
    reading = Reading(side, view, 5)
    for part, instead in parts:
        end = reading.pos + len(part)
        if instead is not None:
            reading.replace(end, instead)
        reading.pos = end
        if sends_each:
            reading.send(end)
    reading.send(reading.pos)
    reading.send(reading.pos)
    assert {to for to, _ in reading.pieces} <= {1 - side}
    assert b"".join(piece for _, piece in reading.pieces) == b"".join(
        part if instead is None else instead for part, instead in parts
    )
    assert all(len(piece) for _, piece in reading.pieces)


def test_a_view_that_passes_whole_is_sent_itself():
    view = memoryview(b"abc")
    reading = Reading(CLIENT, view, 5)
    reading.send(3)
    assert [piece for _, piece in reading.pieces] == [view] and reading.pieces[0][1] is view


def test_a_view_that_begins_earlier_keeps_the_time_of_its_first_byte():
    reading = Reading(BROKER, memoryview(b"c"), 5)
    reading.begin_with(memoryview(b"abc"), 3)
    assert (reading.size, reading.start, reading.now) == (3, 3, 5)
    reading.send(2)
    assert reading.pieces == [(CLIENT, b"ab")]
