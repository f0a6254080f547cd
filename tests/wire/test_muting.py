"""The wait of each exchange, split into queue, mute and the broker's own time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.protocol.apis import METADATA
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.muting import Mutes, broker_ns
from tests.wire.playbook import MS, Dialogue, request, response


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_schedule_is_split_like_a_count_of_every_nanosecond(data: st.DataObject) -> None:
    """Requests come and answers go in order; each answer may mute the connection. The intervals are the model."""
    count = data.draw(st.integers(1, 12))
    steps = data.draw(st.lists(st.integers(0, 6), min_size=2 * count, max_size=2 * count))
    answer_next = data.draw(st.lists(st.booleans(), min_size=4 * count, max_size=4 * count))
    throttles = data.draw(st.lists(st.sampled_from((0, 0, 1, 5, 40)), min_size=count, max_size=count))
    mutes, muted_at, waiting = Mutes(), set[int](), list[tuple[int, int]]()
    now = free = asked = answered = 0
    while answered < count:
        now += steps[asked + answered]
        if waiting and (asked == count or answer_next.pop()):
            begun, ready = waiting.pop(0)
            behind = set(range(begun, max(begun, free)))
            whole = set(range(begun, now))
            assert mutes.split(begun, free, now) == (len(behind - muted_at), len(whole & muted_at))
            waited = (behind | muted_at) & whole
            assert waited == set(range(begun, begun + len(waited)))  # one span, as broker_ns assumes
            own = set(range(ready, now)) - waited
            assert broker_ns(begun, ready, now, len(waited)) == len(own)
            assert not waiting or len(mutes) <= len(waiting) + answered
            muted_at |= set(range(now, now + throttles[answered]))
            if throttles[answered]:
                mutes.mute(now, throttles[answered])
            free = now
            answered += 1
        else:
            begun, now = now, now + data.draw(st.integers(0, 20))  # its bytes may take a while
            waiting.append((begun, now))
            asked += 1


def test_a_pipelined_request_waits_through_every_earlier_mute() -> None:
    """Three requests in one read; the broker mutes 20 ms and 30 ms after the first two, and is 1 ms late each time."""
    talk = Dialogue().client(request(METADATA, 9, 1) + request(METADATA, 9, 2) + request(METADATA, 9, 3))
    for number, throttle_ms, pause_ms in ((1, 20, 0), (2, 30, 20), (3, 0, 30)):
        talk.now += pause_ms * MS
        talk.broker(response(METADATA, 9, number, {"throttleTimeMs": throttle_ms}))
    waits = [(e.queue_ns // MS, e.muted_ns // MS, (e.response_start - e.request_end) // MS) for e in talk.exchanges]
    assert waits == [(0, 0, 1), (1, 20, 22), (2, 50, 53)]


def test_the_shortest_throttle_mutes() -> None:
    talk = Dialogue().client(request(METADATA, 9, 1) + request(METADATA, 9, 2))
    talk.broker(response(METADATA, 9, 1, {"throttleTimeMs": 1}))
    talk.now += 9 * MS
    talk.broker(response(METADATA, 9, 2))
    assert [(e.queue_ns, e.muted_ns) for e in talk.exchanges] == [(0, 0), (1 * MS, 1 * MS)]


def test_a_throttle_that_held_back_its_own_answer_mutes_nothing() -> None:
    """Before KIP-219 brokers waited first and answered then."""
    talk = Dialogue().client(request(METADATA, 5, 1) + request(METADATA, 5, 2))
    talk.broker(response(METADATA, 5, 1, {"throttleTimeMs": 2}))
    talk.now += 9 * MS
    talk.broker(response(METADATA, 5, 2))
    assert [(e.throttle_ms, e.queue_ns, e.muted_ns) for e in talk.exchanges] == [(2, 0, 0), (0, 1 * MS, 0)]


def test_an_answer_that_a_capture_shows_before_the_end_of_its_request_waited_for_nothing() -> None:
    mutes = Mutes()
    mutes.mute(100, 50)
    assert mutes.split(120, 100, 110) == mutes.split(120, 130, 110) == (0, 0)
    assert mutes.split(120, 100, 120) == (0, 0)
    assert mutes.split(120, 100, 121) == (0, 1)


def test_an_unanswered_request_was_never_muted() -> None:
    talk = Dialogue().client(request(METADATA, 9, 1) + request(METADATA, 9, 2) + request(0, 9, 3, {"acks": 0}))
    talk.broker(response(METADATA, 9, 1, {"throttleTimeMs": 900})).close(BROKER).close(CLIENT)
    assert [lost.exchange.muted_ns for lost in talk.unanswered] == [-1]
    assert [e.muted_ns for e in talk.exchanges] == [-1, 0]  # acks=0, and the answered one


def test_a_request_whose_bytes_wait_while_the_connection_is_muted_was_muted_not_sent_slowly() -> None:
    """The broker's receive buffer is full: the last byte leaves when it reads again, and the answer comes at once."""
    talk = Dialogue().client(request(METADATA, 9, 1))
    talk.broker(response(METADATA, 9, 1, {"throttleTimeMs": 50}))
    frame = request(METADATA, 9, 2)
    talk.client(frame[:20])
    talk.now += 48 * MS
    talk.client(frame[20:]).broker(response(METADATA, 9, 2))
    last = talk.exchanges[-1]
    sending = last.request_end - last.request_start
    assert (last.queue_ns, last.muted_ns, sending) == (0, 49 * MS, 49 * MS)
    assert broker_ns(last.request_start, last.request_end, last.response_start, last.muted_ns) == 1 * MS
