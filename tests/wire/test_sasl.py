"""When frames begin again behind raw tokens, by the rounds of a mechanism."""

import pytest

from kproxy.wire.sasl import RawSasl, is_bare_gssapi
from tests.wire.playbook import request


@pytest.mark.parametrize(
    ("mechanism", "replies", "ends"),
    [
        ("PLAIN", [0], [True]),
        ("PLAIN", [9], [True]),
        ("SCRAM-SHA-256", [80, 40], [False, True]),
        ("SCRAM-SHA-512", [80, 0], [False, True]),
        ("OAUTHBEARER", [0], [True]),
        ("OAUTHBEARER", [30, 0], [False, True]),
        ("OAUTHBEARER", [30, 30], [False, True]),  # one more round, not another one behind it
        ("GSSAPI", [200, 0, 40], [False, False, False]),
        ("X-OTHER", [1], [False]),
    ],
)
def test_the_broker_token_after_which_frames_follow(mechanism: str, replies: list[int], ends: list[bool]) -> None:
    raw = RawSasl(mechanism)
    assert [raw.replied(size) for size in replies] == ends
    assert raw.replies == len(replies)
    assert raw.open_ended == (mechanism in ("GSSAPI", "X-OTHER"))


def test_a_request_ends_the_tokens_of_a_mechanism_without_a_known_end_only() -> None:
    frame = request(12, 4, 2)
    for mechanism, tokens, ends in (
        ("GSSAPI", 1, True),
        ("GSSAPI", 3, True),
        ("GSSAPI", 0, False),
        ("PLAIN", 1, False),
    ):
        raw = RawSasl(mechanism)
        raw.tokens = tokens
        assert raw.ends_with(frame, 0, len(frame)) == ends
        assert not raw.ends_with(b"\0\0\0\x0a" + b"token" * 4, 0, 24)


def test_a_first_frame_that_is_a_gssapi_token() -> None:
    assert [is_bare_gssapi(key << 24 | 1) for key in (0x00, 0x5F, 0x60, 0x61)] == [False, False, True, False]
