"""The limits of a session match the docs."""

from kproxy.wire import broker_side, client_side, frames, interest, pairing, state
from kproxy.wire.decisions import authorizer, own_answers, own_requests
from kproxy.wire.login import raw_sasl, sasl
from kproxy.wire.observing import kept
from tests.documented import missing, size


def test_the_limits_of_a_session_match_the_docs():
    assert not missing(
        "limits.md",
        f"| {state.MIN_NOTED_BYTES} bytes of each request, {size(state.NOTE_STEP)} of an incomplete one;",
        f"| {size(interest.MAX_NOTED_TOGETHER)} | ids are cut to {state.MAX_CUT_ID} characters",
        f"| {size(authorizer.MAX_HELD_REQUEST)} of a request, {size(interest.MAX_HELD)} of an answer,"
        f" {size(interest.MAX_HELD_LIST)} of a list, {size(sasl.MAX_TOKEN)} after a token |",
        f"| `max_held_bytes`, {size(interest.MAX_HELD_TOGETHER)} |",
        f"| {size(own_answers.MAX_OWN_BYTES)} and one more answer |",
        f"| {size(kept.MAX_FRAME)} of a frame | {size(kept.MAX_TOGETHER)} of a cluster,",
        "kproxy drops the request that has been incomplete for longest, at least for a second",
    )
    assert interest.HELD_PATIENCE_NS == 10**9
    assert not missing(
        "inside/bounds.md",
        f"64, and up to {pairing.LIMIT} from a shared pool of the process",
        f"| one request | {size(frames.MAX_REQUEST)}, like a broker's",
        f"| the first fields of a request that arrives in several reads | {size(client_side.MAX_PREFIX)} |",
        f"and of a small request whose body is decoded | {size(state.SMALL_BODY)} each |",
        f"| {state.MAX_NAMED}, and {state.MAX_UNCOUNTED} of each request; omissions are logged and counted",
        f"| {state.FRAMES_PER_CALL} frames, {size(state.WALKED_PER_CALL)} of decoded bodies",
        f"| {size(broker_side.MAX_HEAD)}; kproxy streams the rest |",
        f"| raw tokens of one login | {raw_sasl.MAX_TOKENS} of the client |",
        f"| kproxy's login at a broker | 8 tokens, answers of {size(own_requests.MAX_OWN_ANSWER)},",
    )
