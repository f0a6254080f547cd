"""Which frames behind a SaslHandshake are raw tokens, by mechanism, and when a broker has sent its last reply."""

import pytest

from kproxy.protocol import schema
from kproxy.wire.login.sasl import MAX_API_KEY, RawSasl, is_bare_gssapi
from tests.wire.playbook import foreign_request, request, sized


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


@pytest.mark.parametrize(
    ("mechanism", "tokens", "frame", "is_token"),
    [
        ("PLAIN", 0, request(12, 4, 2), True),  # after its SaslHandshake response the broker reads a token
        ("PLAIN", 1, request(12, 4, 2), False),
        ("PLAIN", 1, sized(b""), False),
        ("SCRAM-SHA-256", 1, request(12, 4, 2), True),
        ("SCRAM-SHA-256", 2, sized(b"c=biws"), False),
        ("OAUTHBEARER", 1, sized(b"\1"), True),
        ("OAUTHBEARER", 1, request(12, 4, 2), False),
        ("OAUTHBEARER", 2, sized(b"\1"), False),
        ("GSSAPI", 0, request(12, 4, 2), True),
        ("GSSAPI", 1, sized(b""), True),
        ("GSSAPI", 1, sized(b"\x60\x82" + bytes(40)), True),
        ("GSSAPI", 2, sized(b"\5\4" + bytes(40)), True),
        ("GSSAPI", 2, sized(b"\5\4" + bytes(40))[:5], True),
        ("GSSAPI", 2, sized(b"\5\4" + bytes(40))[:4], None),
        ("GSSAPI", 3, request(12, 4, 2), False),
        ("GSSAPI", 1, request(0, 3, 2, {"acks": 1}, client="\0\1"), False),  # plausible or not: a broker may read it
        ("X-OTHER", 1, request(92, 0, 2), False),
        ("X-OTHER", 1, foreign_request(MAX_API_KEY, 0, 2), False),
        ("X-OTHER", 1, foreign_request(MAX_API_KEY + 1, 0, 2), True),
        ("X-OTHER", 1, foreign_request(-1, 0, 2), True),
    ],
)
def test_a_frame_is_a_token_only_where_no_broker_reads_a_request(
    mechanism: str, tokens: int, frame: bytes, is_token: bool | None
) -> None:
    raw = RawSasl(mechanism)
    raw.tokens = tokens
    assert raw.is_token(frame, 0, len(frame)) is is_token
    assert max(schema.schema().apis) < MAX_API_KEY < int.from_bytes(b"\5\4")


def test_no_frame_leaves_before_the_reply_to_a_token_but_behind_the_last_one_of_gssapi() -> None:
    for mechanism, request_waits in (("PLAIN", True), ("SCRAM-SHA-256", True), ("GSSAPI", False)):
        raw = RawSasl(mechanism)
        assert not raw.must_wait(True)
        raw.tokens = 1
        assert raw.must_wait(True) and raw.must_wait(False) == request_waits
        raw.tokens = 2
        assert raw.must_wait(True) and raw.must_wait(False)
        raw.replied(5)
        raw.replied(5)
        assert not raw.must_wait(True) and not raw.must_wait(False)


def test_a_first_frame_that_is_a_gssapi_token() -> None:
    assert [is_bare_gssapi(key << 24 | 1) for key in (0x00, 0x5F, 0x60, 0x61)] == [False, False, True, False]
