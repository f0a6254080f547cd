from itertools import count
from uuid import UUID

import pytest

from kproxy.wire import bodies
from kproxy.wire.bodies import found
from tests.wire.bodies.walking import LAYOUTS, walk


def test_errors_are_bounded() -> None:
    layout = LAYOUTS[0]
    partitions = [{"errorCode": 3, "records": b""}] * (bodies.MAX_ERRORS + 5)
    frame = layout.encode({"responses": [{"topic": "t", "partitions": partitions}]})
    walker, _ = walk(layout, frame, count(1 << 16))
    assert len(walker.errors) == bodies.MAX_ERRORS
    assert walker.fault is None


def test_a_room_is_taken_for_as_long_as_a_copy_is_held() -> None:
    room = bodies.Room(lambda topic, _: topic == "t", batch_bytes=60, all_bytes=100)
    assert room.copy("other", None, 1) is None and room.left_out == 0
    held = room.copy("t", None, 60)
    assert held is not None and room.free_bytes == 40
    assert room.copy("t", None, 61) is room.copy("t", None, 41) is None  # too large, and no room
    assert (room.left_out, room.left_out_bytes) == (2, 102)
    del held
    assert room.free_bytes == 100


def test_names_brokers_and_what_leaves_a_session_are_noted_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "MAX_NAMES", 2)
    monkeypatch.setattr(found, "MAX_FORGOTTEN", 2)
    one, other = bodies.Found(), bodies.Found()
    for identity, name in ((0, "no id"), (1, None), (1, ""), (1, "a"), (2, "b"), (3, "c")):
        one.note_name(UUID(int=identity), name)
    assert one.names == {UUID(int=1): "a", UUID(int=2): "b"}
    for node in (-1, 7, 0, 9):
        one.note_broker(node, f"host-{node}", 9092)
    assert one.brokers == {("host-7", 9092): 7, ("host-0", 9092): 0}
    one.note_forgotten("t", 0)
    assert one.forgotten is None  # no session that goes on
    one.forgotten = []
    for partition in range(4):
        one.note_forgotten("t", partition)
        one.note_latest("t", partition)
        one.note_deleted("t", partition)
    assert one.forgotten == one.latest == one.deleted == [("t", 0), ("t", 1)]
    assert not other.names and not other.brokers and other.forgotten is None  # each has its own


def test_the_error_of_a_body_without_one_at_the_top_is_the_first_of_all() -> None:
    for own, expected in ((None, 3), (0, 0), (5, 5)):
        one = bodies.Found()
        one.error_code = own
        for code in (3, 6, 3):
            one.note_error(code)
        one.complete()
        assert (one.error_code, one.errors) == (expected, (3, 6, 3))
    assert bodies.Found().errors == ()
