from itertools import count

from kproxy.wire import bodies
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
