"""Which bytes count as a frame after a gap: one case for each rule."""

import pytest

from kproxy.wire.offline import resync
from tests.wire.playbook import request, sized

JUNK = b"\xee" * 50
WAITING = {7, 8}
NEAR = resync.CANDIDATES


def answer(correlation_id: int, size: int = 20) -> bytes:
    return size.to_bytes(4, signed=True) + correlation_id.to_bytes(4, signed=True) + bytes(size - 4)


@pytest.mark.parametrize(
    ("data", "segment", "place"),
    [
        (JUNK + answer(7), 0, len(JUNK)),  # it ends where the bytes end
        (JUNK + answer(7) + answer(8), 0, len(JUNK)),  # another one follows
        (JUNK + answer(7) + answer(9), 0, -1),  # what follows is not due
        (JUNK + answer(8) + answer(7) + answer(8), 0, len(JUNK)),  # the first of several
        (answer(7) + answer(8), 0, 0),  # the first of several, whichever is looked for first
        (answer(8) + answer(7), 0, 0),
        (JUNK + answer(7)[:12], len(JUNK), len(JUNK)),  # it opens a segment
        (JUNK + answer(7)[:12], 0, -1),
        (answer(7)[:12], 5, 0),  # so does the first byte
        (JUNK + answer(7) + bytes((0, 0, 0, 9, 7)), 0, -1),  # too little follows to be sure
        (JUNK + answer(7) + answer(8)[:7], 0, -1),
        (JUNK + answer(7) + answer(8)[:8], 0, len(JUNK)),
        (JUNK + answer(7, 4), 0, len(JUNK)),  # the shortest
        (JUNK + (3).to_bytes(4) + (7).to_bytes(4), 0, -1),  # no answer is so short
    ],
)
def test_a_response_needs_a_second_sign_to_be_accepted(data: bytes, segment: int, place: int) -> None:
    assert resync.find_answer(data, segment, WAITING) == place


@pytest.mark.parametrize(
    ("data", "pos", "is_one"),
    [
        (answer(7), 0, True),
        (answer(7) + answer(8), 0, True),
        (answer(7) + answer(9), 0, True),  # not due yet: its request comes later in the capture
        (answer(7) + answer(7 + NEAR), 0, True),
        (answer(7) + answer(7 + NEAR + 1), 0, False),
        (answer(9) + answer(5), 0, False),
        (answer(7) + answer(1 << 24 | 8), 0, False),
        (answer(9) + answer(9), 0, False),
        (answer(7) + answer(8)[:7], 0, False),
        (answer(7) + answer(8)[:8], 0, True),
        (answer(7, 4) + answer(8), 0, True),
        (answer(7)[:15], 0, True),
        (b"\0" + answer(7)[:15], 1, False),
        (answer(9)[:15], 0, False),  # not whole, and not due
        (answer(8 + NEAR), 0, True),
        (answer(9 + NEAR), 0, False),  # far from all that wait
        (answer(7 - NEAR), 0, True),
        (answer(6 - NEAR), 0, False),
        ((3).to_bytes(4) + answer(7)[4:7], 0, False),
        ((-1).to_bytes(4, signed=True) + answer(7)[4:], 0, False),
    ],
)
def test_what_may_stand_where_an_answer_is_out_of_turn(data: bytes, pos: int, is_one: bool) -> None:
    if len(data) - pos >= 8:
        assert resync.follows(memoryview(data), pos, len(data), WAITING) is is_one


def test_nothing_waits_and_any_correlation_id_is_near() -> None:
    assert resync.follows(memoryview(answer(1 << 20)), 0, 24, set())


HEARTBEAT = request(12, 4, 1, {"groupId": "group"}, client="me")


@pytest.mark.parametrize(
    ("data", "segment", "before", "place"),
    [
        (JUNK + HEARTBEAT, 0, ..., len(JUNK)),
        (JUNK + HEARTBEAT, 0, b"me", len(JUNK)),
        (JUNK + HEARTBEAT, 0, b"you", len(JUNK)),  # whole, and it decodes: a witness against the name
        (JUNK + HEARTBEAT + HEARTBEAT, 0, ..., len(JUNK)),
        (JUNK + HEARTBEAT + JUNK, 0, ..., -1),  # what follows is none
        (JUNK + HEARTBEAT[:-1], len(JUNK), ..., len(JUNK)),  # it opens a segment
        (JUNK + HEARTBEAT[:-1], len(JUNK), b"you", -1),
        (JUNK + HEARTBEAT[:-1], 0, ..., -1),
        (JUNK + HEARTBEAT[:-4] + b"\xff" * 4, 0, ..., -1),  # its body does not decode
        (JUNK + (0).to_bytes(4) + HEARTBEAT[4:], 0, ..., -1),
    ],
)
def test_a_request_needs_a_second_sign_to_be_accepted(
    data: bytes, segment: int, before: resync.ClientId, place: int
) -> None:
    assert resync.find_request(data, segment, before) == place


def test_a_request_with_another_client_id_is_accepted_if_it_is_complete() -> None:
    whole = memoryview(HEARTBEAT)
    assert resync.believable(whole, 0, len(whole), b"me")
    assert resync.believable(whole, 0, len(whole), b"you")
    assert resync.believable(whole[:-1], 0, len(whole) - 1, b"you")  # or its id is a text
    other = memoryview(heartbeat(b"\0\1"))
    assert resync.believable(other, 0, len(other), b"you")
    assert not resync.believable(other[:-1], 0, len(other) - 1, b"you")
    assert resync.believable(whole[:13], 0, 13, b"you")  # too little of it to tell
    named = memoryview(request(12, 4, 1, {"groupId": "group"}, client="a client"))
    assert resync.believable(named[:17], 0, 17, b"a client")  # "a c": the rest of the name is not there yet
    assert resync.believable(named[:17], 0, 17, b"another")  # a text too


def heartbeat(client: bytes, key_version: bytes = b"\0\x0c\0\4") -> bytes:
    """A request of any client id, API and version."""
    rest = HEARTBEAT[12 + 2 + len("me") :]
    return sized(key_version + HEARTBEAT[8:12] + len(client).to_bytes(2) + client + rest)


CLIENT_IDS = (b"", b"x\n", b"\x00\x01", b"\xff\xfe", "Zoë".encode(), "Zoë".encode()[:3], b"\xf0" * 700, b"long" * 8000)


@pytest.mark.parametrize("client", CLIENT_IDS)
@pytest.mark.parametrize(
    "key_version", ["000c0004", "000c0063", "00c80003", "27130000", "2717001f", "7fff7fff", "fffffffe"]
)
def test_any_client_id_and_any_api_key_are_accepted(client: bytes, key_version: str) -> None:
    frame = heartbeat(client, bytes.fromhex(key_version))
    before = client.decode("utf-8", "replace").encode()
    for data in (frame, frame + frame, frame + HEARTBEAT):
        for known in (before, b"me", None, ...):
            assert resync.believable(memoryview(data), 0, len(data), known)
        for end in range(14, min(len(frame), 4000), 7):  # as it comes
            assert resync.believable(memoryview(data), 0, end, before)
    assert not resync.believable(memoryview(heartbeat(client) + JUNK), 0, len(frame) + len(JUNK), b"me")
    foreign = heartbeat(client, b"\x27\x17\0\0") + JUNK
    assert not resync.believable(memoryview(foreign), 0, len(foreign), b"me")


@pytest.mark.parametrize("client", CLIENT_IDS)
def test_a_request_of_any_client_id_is_found(client: bytes) -> None:
    frame = heartbeat(client)
    for before in (client.decode("utf-8", "replace").encode(), b"me", ...):
        assert resync.find_request(JUNK + frame, 0, before) == len(JUNK)
        assert resync.find_request(JUNK + frame + HEARTBEAT, 0, before) == len(JUNK)
        assert resync.find_request(JUNK + frame + heartbeat(client, b"\x27\x17\0\0"), 0, before) == len(JUNK)
        assert resync.find_request(JUNK + frame + JUNK, 0, before) == -1


@pytest.mark.parametrize(("behind", "is_found"), [(0, True), (1, False), (13, False), (14, True), (30, True)])
def test_a_request_is_found_by_the_header_of_the_next_one(behind: int, is_found: bool) -> None:
    data = JUNK + HEARTBEAT + HEARTBEAT[:behind]
    assert resync.find_request(data, 0, ...) == (len(JUNK) if is_found else -1)
    foreign = (
        heartbeat(b"you", b"\x27\x17\0\0") + HEARTBEAT[:behind]
    )  # an API of nobody's: it ends where another begins
    assert resync.believable(memoryview(foreign), 0, len(foreign), b"me") == is_found


@pytest.mark.parametrize("at", [0, 30, 49])
def test_a_request_is_found_at_its_first_byte(at: int) -> None:
    assert resync.find_request(JUNK[:at] + HEARTBEAT, at, b"me") == at


@pytest.mark.parametrize(("key", "version", "could"), [
    (255, 0, True), (256, 0, False), (0, 31, True), (0, 32, False), (255, 31, True), (-1, 0, False), (0, -1, False),
])  # fmt: skip
def test_which_apis_and_versions_a_later_release_could_have(key, version, could):
    assert resync._could_be((key & 0xFFFF) << 16 | version & 0xFFFF) is could
