"""Which requests a late answer has overtaken."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy.wire.events import Exchange
from kproxy.wire.interest import ApiPlan
from kproxy.wire.pairing import overtaken_by

PLAN = ApiPlan(3, 9, "Metadata", True)


@given(st.lists(st.integers(-3, 300), max_size=8), st.integers(-3, 300))
def test_those_before_the_first_request_with_the_id_are_taken_away(ids: list[int], wanted: int) -> None:
    """Ids may be negative, in any order, and repeat."""
    for correlation_id in {wanted, *ids}:
        pending = [Exchange(PLAN, each, number, 0, 100, 0) for number, each in enumerate(ids)]
        before = list(pending)
        at = ids.index(correlation_id) if correlation_id in ids else None
        assert overtaken_by(pending, correlation_id) == (None if at is None else before[:at])
        assert pending == before[at or 0 :]
