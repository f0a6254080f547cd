"""A segment counts as a retransmission if its first byte was sent before, wherever segments begin."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy.convert import packets


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15)), max_size=30))
def test_a_segment_is_a_retransmission_if_its_first_byte_was_sent(base, segments):
    sent, seen = packets._Sent(), None
    for start, length in segments:
        again = sent.again((base + start) % 2**32, length)
        if seen is None:  # bytes before the first segment count as sent
            seen = set(range(start))
        assert again == (start in seen)
        seen |= set(range(start, start + length))
