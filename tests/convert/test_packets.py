"""Which segments were sent before: those whose first byte was, wherever the segments begin."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy.convert import packets


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15)), max_size=30))
def test_a_segment_was_sent_before_if_its_first_byte_was(base, segments):
    sent, seen = packets._Sent(), None
    for start, length in segments:
        again = sent.again((base + start) % 2**32, length)
        if seen is None:  # what lies before the first segment counts as sent
            seen = set(range(start))
        assert again == (start in seen)
        seen |= set(range(start, start + length))
