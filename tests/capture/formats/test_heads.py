"""Places that may begin a record: the search finds all that a check of each place finds, and none in a gap."""

from struct import Struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.capture.formats import heads

ODD = st.lists(st.sampled_from((b"\0", b"\1", b"\x60", b"\xff", bytes(3000))), max_size=40).map(b"".join)


@given(ODD, st.integers(0, 50), st.integers(0, 50), st.sampled_from((1, 4)), st.sampled_from("<>"))
def test_the_search_finds_the_places_that_a_check_of_each_finds(data, start, short, step, order):
    stop, number = len(data) - 11 - short, Struct(order + "I")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "FIRST_BYTES", 6)
        patch.setattr(heads, "PIECE_BYTES", 1000)
        found = list(heads.places(data, start, stop, step=step, order=order, length_at=8, least=12, most=0x60FF))
    assert found == [at for at in range(start, stop, step) if 12 <= number.unpack_from(data, at + 8)[0] <= 0x60FF]
