"""Frame headers: plausible requests, other protocols, and frames resized by edits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.protocol.codec import at_once
from kproxy.wire import frames
from tests.wire.playbook import request, sized

LONGEST = (1 << 15) - 1  # bytes of a client id


def header(size: int, client_id: bytes, length: int | None = None, key_version: bytes = b"\0\x0c\0\4") -> bytes:
    length = len(client_id) if length is None else length
    return size.to_bytes(4, signed=True) + key_version + bytes(4) + length.to_bytes(2, signed=True) + client_id


@pytest.mark.parametrize(
    ("frame", "plausible"),
    [
        (header(100, b"c" * 90), True),
        (header(100, b"c" * 91), False),  # longer than the frame
        (header(10, b"", -1), True),
        (header(9, b"", -1), False),
        (header(100, b"", -2), False),
        (header(frames.MAX_REQUEST, b"c"), True),
        (header(frames.MAX_REQUEST + 1, b"c"), False),
        (header(50_000, b"c" * LONGEST), True),
        (header(100, b" ~"), True),
        (header(100, "Zoë".encode()), True),
        (header(100, b"a\x1f"), True),
        (header(100, b"\xff\0"), True),
        (header(100, b"c", key_version=b"\0\x0c\0\x05"), False),  # Heartbeat has no version 5
        (header(100, b"c", key_version=b"\x7f\0\0\0"), False),
        (header(-1, b"c"), False),
    ],
)
def test_a_request_is_plausible_if_size_api_and_client_id_fit(frame: bytes, plausible: bool) -> None:
    for before in (b"", b"?" * 5):
        view = memoryview(before + frame)
        assert frames.plausible_request(view, len(before), len(view)) == plausible
        assert not frames.plausible_request(view[: len(before) + 13], len(before), len(before) + 13)


def test_a_partial_client_id_is_read_as_far_as_it_arrived() -> None:
    frame = header(100, b"client")
    assert [frames.client_id(frame, 0, end) for end in (14, 17, 20, 99)] == [b"", b"cli", b"client", b"client"]
    assert frames.client_id(header(100, b"", -1) + b"more", 0, 18) is None


@pytest.mark.parametrize(
    ("head", "kind", "words"),
    [
        (b"\x16\x03\x01", "tls", "TLS on a plaintext Kafka port"),
        (b"\x17\x03\x03\0", "tls", "TLS on a plaintext Kafka port"),
        (b"\x13\x03\x01\0", "size", "a frame size of 318963968 cannot be"),
        (b"GET /me", "http", "HTTP on a Kafka port"),
        (b"HTTP/1.", "http", "HTTP on a Kafka port"),
        (b"PROXY TC", "proxy_protocol", "accept_proxy_protocol"),
        (b"\r\n\r\n\0\r\nQ", "proxy_protocol", "accept_proxy_protocol"),
        (b"\r\n\r\n\0\r\nR", "size", "raise max_request_bytes"),
        (b"\xff\xff\xff\xff", "size", "a frame size of -1 cannot be"),
        (b"\0\0\0\x09", "size", "raise max_request_bytes"),
    ],
)
def test_bytes_of_other_protocols_are_named(head: bytes, kind: str, words: str) -> None:
    found, text = frames.sniff(head)
    assert (found, words in text) == (kind, True)
    for small in (b"\0\0\0\x08", b"\0\0\0\0", b"\x80\0\0\0"):
        assert "max_request_bytes" not in frames.sniff(small)[1]


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_frame_with_edits_has_their_bytes_and_its_new_size(body: bytes, data: st.DataObject) -> None:
    """Edits may be in any order, insert at the same place, and be shorter or longer than the replaced bytes."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    edits = [
        (4 + start, 4 + end, data.draw(st.binary(max_size=5)))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
        if start < end
    ]
    expected, at = b"", 4
    frame = sized(body)
    for start, end, new in edits:
        expected += frame[at:start] + new
        at = end
    shuffled = data.draw(st.permutations(edits))
    assert frames.patched(memoryview(frame), shuffled) == sized(expected + frame[at:])
    assert at_once(frames.patched_in_slices(memoryview(frame), [*shuffled])) == sized(expected + frame[at:])


@pytest.mark.parametrize("edits, yields", [(1, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2)])
def test_a_frame_with_few_edits_is_made_at_once(edits: int, yields: int) -> None:
    frame = memoryview(sized(bytes(4096)))
    assert sum(1 for _ in frames.patched_in_slices(frame, [(at, at + 1, b"x") for at in range(4, 4 + edits)])) == yields


def test_a_head_is_read_with_what_stands_behind_it() -> None:
    frame = request(12, 4, -7, client="me")
    unpack, size = frames.request_head_and(4)
    assert size == 16
    assert unpack(b"??" + frame, 2) == (len(frame) - 4, 12 << 16 | 4, -7, b"\0\2me")
