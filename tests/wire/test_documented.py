"""The bounds of what a session keeps are those that the docs state."""

from kproxy.wire import authorizer, interest, kept, own_answers, sasl, state
from tests.documented import missing, size


def test_the_bounds_of_a_session_are_those_of_the_docs():
    assert not missing(
        "limits.md",
        f"| {state.NOTED_LEAST} bytes of each request, {size(state.NOTE_STEP)} of one whose end is not here;",
        f"| {size(interest.MAX_NOTED_TOGETHER)} | ids are cut to {state.MAX_CUT_ID} characters",
        f"| {size(authorizer.MAX_HELD_REQUEST)} of a request, {size(interest.MAX_HELD)} of an answer,"
        f" {size(interest.MAX_HELD_LIST)} of a list, {size(sasl.MAX_TOKEN)} behind a token |",
        f"| `max_held_bytes`, {size(interest.MAX_HELD_TOGETHER)} |",
        f"| {size(own_answers.MAX_OWN_BYTES)} and one more answer |",
        f"| {size(kept.MAX_FRAME)} of a frame | {size(kept.MAX_TOGETHER)} of a cluster,",
        "the request that has been incomplete for longest, and for a second, is given up",
    )
    assert interest.HELD_PATIENCE_NS == 10**9
