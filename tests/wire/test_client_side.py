"""Memory that pending requests take from the budget of all sessions: counted above a limit, released at the end.

`docs/limits.md` has the limits: 512 bytes of each request are not counted, nor is a short Produce of two partitions.
"""

from typing import Any

import pytest

from kproxy.protocol.apis import FETCH, PRODUCE
from kproxy.wire import client_side
from kproxy.wire.bodies import TOPICS
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import HeldBudget, Interest
from kproxy.wire.state import MIN_NOTED_BYTES, MIN_READ_BYTES, NAMED_BYTES, WIDEST_CHARACTER
from tests.wire.playbook import Dialogue, request, response
from tests.wire.test_state import TINY

NAMELESS = {"partition": 0, "fetchOffset": 5}
BATCH = 64  # bytes read of a batch


def fetch(count: int, name: str = "t", number: int = 1, client: str = "c") -> bytes:
    """A Fetch of `count` partitions of a topic."""
    partitions = [{**NAMELESS, "partition": each} for each in range(count)]
    return request(FETCH, 4, number, {"topics": [{"topic": name, "partitions": partitions}]}, client=client)


def produce(sizes: list[int], number: int = 1) -> bytes:
    """A Produce to one partition for each size, with `size` bytes after its batch."""
    data = [{"index": index, "records": TINY + bytes(size)} for index, size in enumerate(sizes)]
    return request(PRODUCE, 3, number, {"acks": 1, "topicData": [{"name": "t", "partitionData": data}]})


def dialogue(**settings: Any) -> Dialogue:
    return Dialogue(Interest(detail=TOPICS, held=HeldBudget(noted_limit_bytes=1 << 30)), **settings)


def noted(frame: bytes, cuts: Any = ()) -> int:
    """Return the bytes that a request takes while pending; checks that its response releases them."""
    talk = dialogue()
    held = talk.session._interest.held
    talk.client(frame, cuts)
    found: int = held.noted_bytes
    key, version = frame[5], frame[7]
    talk.broker(response(key, version, 1))
    assert held.noted_bytes == 0 and talk.sent[BROKER] == frame
    return found


def from_first(frames: list[bytes]) -> tuple[bytes, list[int]]:
    """Return the first of growing requests that is counted, and the bytes taken by it and each later one."""
    taken = [noted(frame) for frame in frames]
    first = next(place for place, value in enumerate(taken) if value)
    assert not any(taken[:first]) and first
    return frames[first], taken[first:]


def test_a_short_request_is_counted_from_512_bytes_on() -> None:
    frame, taken = from_first([fetch(1, "t" * length) for length in range(440, 480)])
    assert len(frame) == MIN_NOTED_BYTES
    first = NAMED_BYTES + WIDEST_CHARACTER * MIN_NOTED_BYTES
    assert taken == [*range(first, first + WIDEST_CHARACTER * len(taken), WIDEST_CHARACTER)]


def test_ids_are_counted_from_512_bytes_on() -> None:
    def heartbeat(length: int) -> bytes:
        return request(12, 0, 1, {"groupId": "g" * length, "generationId": 1, "memberId": ""})

    _, taken = from_first([heartbeat(length) for length in range(460, 520)])
    first = WIDEST_CHARACTER * MIN_NOTED_BYTES
    assert taken == [*range(first, first + WIDEST_CHARACTER * len(taken), WIDEST_CHARACTER)]


def test_a_produce_is_counted_from_2_kib_on_and_its_records_are_not() -> None:
    frame, taken = from_first([produce([size]) for size in range(1850, 2000)])
    assert len(frame) == MIN_READ_BYTES
    fields = len(produce([0])) - len(TINY)
    assert set(taken) == {NAMED_BYTES + WIDEST_CHARACTER * (fields + BATCH)}
    two = produce([2000, 3000])
    fields = len(produce([0, 0])) - 2 * len(TINY)
    assert noted(two) == 2 * NAMED_BYTES + WIDEST_CHARACTER * (fields + 2 * BATCH)


@pytest.mark.parametrize("make", [fetch, lambda count: produce([0] * count)], ids=["fetch", "produce"])
def test_more_than_two_partitions_are_counted_however_short_the_request(make: Any) -> None:
    for count in range(7):
        frame = make(count)
        expected = count * NAMED_BYTES + WIDEST_CHARACTER * len(frame)
        assert noted(frame) == (expected if count > 2 else 0)


@pytest.mark.parametrize("count", [4090, 4091, 4092, 4093, 4094, 4095, 6000])
def test_a_large_request_counts_the_same_in_parts_and_whole(count: int) -> None:
    frame = fetch(count)
    expected = count * NAMED_BYTES + WIDEST_CHARACTER * len(frame)
    assert {noted(frame, cuts) for cuts in ([], [30], [5000], range(1000, 60_000, 1000))} == {expected}


def test_a_copy_of_a_partial_request_is_counted_from_512_bytes_on() -> None:
    frame = fetch(1, "t" * 1000)
    for arrived in range(MIN_NOTED_BYTES - 3, MIN_NOTED_BYTES + 3):
        held = (talk := dialogue().client(frame[:arrived])).session._interest.held
        assert held.noted_bytes == (arrived if arrived >= MIN_NOTED_BYTES else 0)
        talk.close(CLIENT).close(BROKER)
        assert held.noted_bytes == 0


@pytest.mark.parametrize("make", [fetch, lambda count, **more: produce([0] * count, **more)], ids=["fetch", "produce"])
@pytest.mark.parametrize("limit", [33, 34])
def test_pending_requests_of_a_connection_share_a_limit_of_named_partitions(
    limit: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen or fewer partitions of a request do not count; answered requests no longer count."""
    monkeypatch.setattr(client_side, "MAX_NAMED", limit)
    talk = dialogue()

    def asks(number: int, count: int) -> bool:
        """Send a request; return whether its partitions are kept."""
        talk.client(make(count, number=number))
        return talk.session.pending[-1].request_body is not None

    assert [asks(number, count) for number, count in enumerate((17, 17, 16, 17, 15), 1)] == [
        *(True, limit == 34, True, False, True),
    ]
    talk.broker(response(FETCH, 4, 1) if make is fetch else response(PRODUCE, 3, 1))
    assert asks(6, 17) and not asks(7, 17)
    assert {fault.kind for fault in talk.faults} == {"too_much_named"}
    talk.close(CLIENT).close(BROKER)
    assert talk.session._interest.held.noted_bytes == 0
