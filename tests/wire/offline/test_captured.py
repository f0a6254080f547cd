"""Playbooks for a session over a capture: gaps, and resynchronising on the next frame."""

from typing import Any

import pytest

from kproxy.protocol.apis import FETCH, METADATA, PRODUCE
from kproxy.wire.events import ANSWERED, BROKER, CLIENT, LOST, OPAQUE, UNANSWERED, Gap, Unanswered
from kproxy.wire.interest import Interest
from kproxy.wire.offline.captured import CapturedSession
from tests.wire.playbook import MS, Dialogue, foreign_request, request, response


def captured(**more: Any) -> Dialogue:
    return Dialogue(Interest(details=True), CapturedSession, **more)


def test_a_gap_in_a_body_of_known_size_affects_only_that_body() -> None:
    ask = request(PRODUCE, 9, 1, {"acks": 1, "topicData": [{"name": "t" * 200, "partitionData": []}]})
    talk = captured().client(ask[:60]).gap(CLIENT, 100).client(ask[160:] + request(12, 4, 2))
    talk.broker(response(PRODUCE, 9, 1) + response(12, 4, 2))
    assert [(e.correlation_id, e.outcome) for e in talk.exchanges] == [(1, ANSWERED), (2, ANSWERED)]


def test_after_a_gap_the_next_plausible_frame_is_found_and_requests_with_lost_responses_are_reported() -> None:
    talk = captured()
    for correlation_id in (1, 2, 3):
        talk.client(request(12, 4, correlation_id))
    answer = response(12, 4, 1)
    talk.gap(BROKER, len(answer) + 3).broker(response(12, 4, 2)[3:]).broker(response(12, 4, 3))
    assert [(e.correlation_id, e.outcome) for e in talk.exchanges] == [(3, ANSWERED)]
    assert [(u.exchange.correlation_id, u.exchange.outcome) for u in talk.unanswered] == [(1, "lost"), (2, "lost")]


@pytest.mark.parametrize("is_midstream", [True, False])
def test_an_answer_in_bytes_that_are_skipped_until_the_next_frame_is_lost(is_midstream: bool) -> None:
    """The last request is one that nobody answered before the connection closed."""
    talk = captured(midstream=is_midstream).client(request(12, 4, 1))
    if not is_midstream:
        talk.gap(BROKER, 7)
    talk.client(request(12, 4, 2)).broker(response(12, 4, 1)[7:]).broker(response(12, 4, 2)[7:])
    talk.client(request(12, 4, 3)).broker(response(12, 4, 3)).client(request(12, 4, 4)).close(BROKER)
    assert [(each.correlation_id, each.outcome) for each in talk.exchanges] == [(3, ANSWERED)]
    outcomes = [(each.exchange.correlation_id, each.exchange.outcome) for each in talk.unanswered]
    assert outcomes == [(1, LOST), (2, LOST), (4, UNANSWERED)]


def test_the_answer_of_a_request_before_an_answered_one_is_lost() -> None:
    """Without a gap that was seen: the older request is pending until its connection closes."""
    talk = captured().client(b"".join(request(12, 4, number) for number in (1, 2, 3))).broker(response(12, 4, 2))
    talk.close(BROKER)
    outcomes = [(each.exchange.correlation_id, each.exchange.outcome) for each in talk.unanswered]
    assert outcomes == [(1, LOST), (3, UNANSWERED)]


def test_a_capture_that_starts_in_the_middle_never_invents_a_pairing() -> None:
    talk = captured(midstream=True)
    talk.broker(response(12, 4, 6)).client(request(METADATA, 9, 5)[20:] + b"\0" * 300)
    talk.client(request(12, 4, 7)).broker(response(12, 4, 7))
    assert [exchange.correlation_id for exchange in talk.exchanges if exchange.outcome == ANSWERED] == [7]


def test_after_a_damaged_size_no_request_of_an_unknown_api_is_invented() -> None:
    """The bytes at the position given by the size look like a request of a future API with another client id."""
    inside = foreign_request(120, 3, 77, b"\0\2xy")
    ask = bytearray(request(PRODUCE, 9, 1, {"acks": 1, "topicData": [{"name": "t" * 90, "partitionData": []}]}))
    at = ask.index(b"t" * 90)
    ask[at : at + len(inside)] = inside
    ask[:4] = (at - 4).to_bytes(4)  # instead of len(ask) - 4
    talk = captured().client(request(12, 4, 0)).client(bytes(ask)).client(request(12, 4, 2))
    talk.broker(response(12, 4, 0) + response(PRODUCE, 9, 1) + response(12, 4, 2))
    assert [exchange.correlation_id for exchange in talk.exchanges] == [0, 1, 2]
    assert [fault.side for fault in talk.faults] == [CLIENT]
    assert not talk.faults[0].fatal


@pytest.mark.parametrize(
    ("api_key", "version"), [(120, 3), (10_007, 0), (-2, 40), (FETCH, 30), (FETCH, 32), (12, 3000)]
)
@pytest.mark.parametrize("client", [b"c", b"d\n", b"\xff\xfe", b"n" * 32_767, None])
@pytest.mark.parametrize("more", [b"more", b""])
def test_an_unknown_api_or_version_is_an_opaque_exchange_of_its_client(
    api_key: int, version: int, client: bytes, more: bytes
) -> None:
    name = b"\xff\xff" if client is None else len(client).to_bytes(2) + client
    foreign = foreign_request(api_key, version, 2, name + more)
    known = None if client is None else client.decode("utf-8", "replace")
    for requests in ((foreign, request(12, 4, 3)), (request(12, 4, 1), foreign, request(12, 4, 3))):
        for talk in (captured(), Dialogue()):
            for ask in requests:
                talk.client(ask)
            ids = [exchange.correlation_id for exchange in talk.session.pending]
            assert ids == [1, 2, 3][-len(requests) :]
            for number in ids:
                talk.broker(response(12, 4, number))
            found = talk.exchanges[-2]
            assert (found.correlation_id, found.outcome, found.decoded, found.client_id) == (2, ANSWERED, OPAQUE, known)
            assert found.response_end > found.request_end > 0
            assert not talk.faults


@pytest.mark.parametrize("turn", [(2, 1, 3), (3, 2, 1), (2, 3, 1), (3, 1, 2)])
def test_responses_out_of_order_are_paired_by_correlation_id(turn: tuple[int, ...]) -> None:
    talk = captured().client(b"".join(request(12, 4, number) for number in (1, 2, 3)))
    for number in turn:
        talk.broker(response(12, 4, number))
    assert [each.correlation_id for each in talk.exchanges] == list(turn)
    assert {each.outcome for each in talk.exchanges} == {ANSWERED} and not talk.session.pending
    early = sum(any(older in turn[place:] for older in range(1, number)) for place, number in enumerate(turn))
    assert [fault.kind for fault in talk.faults] == ["out_of_order"] * early


def test_a_response_out_of_order_with_an_ambiguous_correlation_id_is_not_paired() -> None:
    talk = captured().client(b"".join(request(12, 4, number) for number in (1, 2, 2)))
    talk.broker(response(12, 4, 2)).broker(response(12, 4, 1))
    assert [fault.kind for fault in talk.faults][:1] == ["unexpected_answer"]


def test_without_gaps_an_unexpected_response_is_not_taken_for_a_response() -> None:
    talk = captured().client(request(12, 4, 1) + request(12, 4, 2))
    damaged = bytearray(response(12, 4, 1))
    damaged[3] += 7
    talk.broker(bytes(damaged) + response(12, 4, 2)).broker(response(12, 4, 2))
    assert {exchange.outcome for exchange in talk.exchanges} == {ANSWERED}
    assert [exchange.correlation_id for exchange in talk.exchanges] == [1, 2]


def test_resynchronising_does_not_reject_an_accepted_frame_for_ever() -> None:
    """Each looks like a frame while resynchronising, but not where a next frame is expected."""
    ask = b"\x00\x00\x00\x18\x00\x07\x00\x00\x00\x00\x00\x07\xff\xff" + bytes(14)
    talk = captured().gap(CLIENT, 5).client(ask).client(request(12, 4, 2))
    answer = b"\x70\x00\x00\x00" + (2).to_bytes(4) + b"x" * 30
    talk.client(request(12, 4, 3)).gap(BROKER, 5).broker(answer).broker(response(12, 4, 3))
    assert [exchange.correlation_id for exchange in talk.exchanges if exchange.outcome == ANSWERED] == [3]


def test_a_gap_inside_a_body_completes_neither_the_request_nor_the_response() -> None:
    """The body continues after the gap: its exchange is complete with its last byte, not earlier."""
    ask = request(PRODUCE, 9, 1, {"acks": 1, "topicData": [{"name": "t" * 200, "partitionData": []}]})
    reply = response(METADATA, 9, 2, {"clusterId": "c" * 200})
    talk = captured().client(ask[:60]).gap(CLIENT, 100)
    assert talk.session.completed == [0, 0]
    talk.client(ask[160:]).broker(response(PRODUCE, 9, 1)).client(request(METADATA, 9, 2))
    talk.broker(reply[:60]).gap(BROKER, 100)
    assert talk.session.completed == [2, 1]
    assert [exchange.correlation_id for exchange in talk.exchanges] == [1]
    end = talk.now
    talk.broker(reply[160:])
    assert talk.session.completed == [2, 2]
    assert [exchange.correlation_id for exchange in talk.exchanges] == [1, 2]
    assert talk.exchanges[-1].response_end >= end


def test_a_gap_over_the_end_of_a_body_completes_its_request_or_response_there() -> None:
    ask = request(PRODUCE, 9, 1, {"acks": 1, "topicData": [{"name": "t" * 200, "partitionData": []}]})
    reply = response(METADATA, 9, 2, {"clusterId": "c" * 200})
    talk = captured().client(ask[:60]).gap(CLIENT, len(ask) - 60)
    ended = talk.now
    talk.client(request(METADATA, 9, 2)).broker(response(PRODUCE, 9, 1)).broker(reply[:60])
    talk.gap(BROKER, len(reply) - 60)
    assert talk.session.completed == [2, 2] and not talk.session.pending
    assert [exchange.correlation_id for exchange in talk.exchanges] == [1, 2]
    assert 0 < talk.exchanges[0].request_end <= ended
    assert talk.exchanges[1].response_end > talk.exchanges[1].request_end > ended


@pytest.mark.parametrize("piece", (100, 3000))
def test_every_skipped_byte_is_counted_once(piece: int) -> None:
    talk = captured(midstream=True)
    junk = 9000
    for _ in range(junk // piece):
        talk.client(b"\xee" * piece)
    talk.client(request(12, 4, 7)).broker(response(12, 4, 7))
    skipped = [event for event in talk.events if isinstance(event, Gap) and event.resync]
    assert sum(event.count for event in skipped) == junk
    offset = 0
    for event in skipped:  # contiguous
        assert event.offset == offset
        offset += event.count


@pytest.mark.parametrize("side", (CLIENT, BROKER))
@pytest.mark.parametrize("cut", (7, 3000, 5999))
def test_offsets_after_skipped_bytes_are_stream_offsets(side: int, cut: int) -> None:
    talk = captured(midstream=True)
    sizes = request(12, 4, 1) * 2
    if side == BROKER:
        talk.client(sizes)
        sizes = response(12, 4, 1) * 2
    talk.says(side, b"\xee" * 6000 + sizes + b"\xff" * 16, [cut])
    assert [(fault.kind, fault.side, fault.offset) for fault in talk.faults] == [("size", side, 6000 + len(sizes))]


def test_a_session_is_framed_once_a_frame_was_found_on_both_sides() -> None:
    talk = captured()
    assert talk.session.is_framed
    assert not talk.client(request(17, 0, 1, {"mechanism": "GSSAPI"})).session.is_framed  # raw tokens may follow
    talk = captured(midstream=True)
    for side, data in ((CLIENT, request), (BROKER, response)):
        assert not talk.session.is_framed
        talk.says(side, data(12, 4, 1) + data(12, 4, 2))
    assert talk.session.is_framed


def test_count_anew_resets_all_counters() -> None:
    talk = captured().gap(CLIENT, 5).client(request(12, 4, 2)).broker(b"\xff" * 16)
    assert talk.session.has_seen_gap and talk.session.faults
    talk.session.count_anew()
    assert not (talk.session.has_seen_gap or talk.session.is_surprised or talk.session.faults)


def test_surprises_are_distinguished_from_responses_to_requests_lost_in_a_gap() -> None:
    """After joining with the previous part, an unexpected response after a gap is no surprise."""
    for loses, expected in ((False, True), (True, False)):
        talk = captured().client(request(12, 4, 1))
        if loses:
            talk.gap(CLIENT, len(request(12, 4, 2)))
        talk.broker(response(12, 4, 2))
        assert talk.session.is_surprised == expected and talk.session.has_seen_gap
        talk.session.count_anew()
        assert (talk.session.is_surprised, talk.session.has_seen_gap) == (False, False)
    assert not captured().client(request(12, 4, 1)).broker(response(12, 4, 1)).session.is_surprised


def test_mutes_that_ended_before_the_pending_request_do_not_change_the_snapshot() -> None:
    """Only the part of a mute after the start of the pending request counts."""

    def talk(*throttles_ms: int) -> Dialogue:
        made = captured()
        for number, throttle_ms in enumerate(throttles_ms):
            made.client(request(METADATA, 9, number))
            made.broker(response(METADATA, 9, number, {"throttleTimeMs": throttle_ms}))
        made.now = 1_000 * MS
        return made.client(request(METADATA, 9, 9))

    def muted(made: Dialogue) -> Any:
        return made.session.snapshot[-1]

    assert muted(talk(0, 0)) == muted(talk(5, 0)) == muted(talk(999)) == []  # over before the request began
    begun = 1_001 * MS
    assert muted(talk(1_000)) == [(begun, 1_002 * MS)]
    (late,) = muted(talk(0, 5_000))
    assert late[0] == begun and late[1] == (4 + 5_000) * MS
    assert muted(talk(5_000, 0)) == [(begun, (2 + 5_000) * MS)]


def test_exchanges_read_by_another_reader_are_counted() -> None:
    """The session goes on as if it had read them: it expects requests that begin like the last one."""
    asking = captured().session
    asking.receive(CLIENT, memoryview(request(METADATA, 9, 1)), 1)
    session = captured().session
    session.passed(5, (100, 200), 77, asking.usual)
    session.passed(2, (10, 20), 99, asking.usual)
    assert session.usual == asking.usual and session._client_id == asking._client_id is not None
    assert (session.number, session.completed, session.received_bytes) == (7, [7, 7], (110, 220))
    assert session.free_at == session.waits_since_ns == 99 and session.oldest_number == 7


def test_the_oldest_waiting_exchange_is_known_in_every_state() -> None:
    """Covers pending requests, a partial request, and a partial response whose request is no longer pending."""
    talk = captured()
    session, ask, reply = talk.session, request(METADATA, 9, 1), response(METADATA, 9, 1, {"clusterId": "c" * 90})

    def oldest() -> tuple[int, int]:
        return session.oldest_number, session.waits_since_ns // MS

    assert oldest() == (0, 0)
    talk.client(ask[:30])
    assert oldest() == (0, 1)
    talk.client(ask[30:] + request(METADATA, 9, 2))
    assert oldest() == (0, 1)
    talk.broker(reply[:60])
    assert oldest() == (0, 1) and len(session.pending) == 1
    talk.broker(reply[60:])
    assert oldest() == (1, 2)
    talk.broker(response(METADATA, 9, 2))
    assert oldest() == (2, 5) and session.free_at == 5 * MS


def test_the_snapshot_of_a_session_identifies_its_position() -> None:
    """Equal for equal positions after any history; different after each byte."""
    ask, reply = request(METADATA, 9, 1), response(METADATA, 9, 1, {"clusterId": "c" * 90})

    def snapshots(before: int) -> list[Any]:
        talk = captured()
        for _ in range(before):
            talk.client(request(METADATA, 9, 1)).broker(response(METADATA, 9, 1))
        talk.now = 1_000 * MS
        talk.client(request(METADATA, 9, 1)).broker(response(METADATA, 9, 1))
        found = [talk.session.snapshot]
        for side, data in ((CLIENT, ask), (BROKER, reply)):
            for at in range(len(data)):
                talk.says(side, data[at : at + 1])
                found.append(talk.session.snapshot)
        return found

    first, again = snapshots(0), snapshots(9)
    assert first == again and len(first) == 1 + len(ask) + len(reply)
    assert all(one is not None for one in first)
    assert all(one != other for place, one in enumerate(first) for other in first[:place])
    talk = captured().client(ask)
    whole = talk.session.snapshot
    assert whole is not None and talk.gap(BROKER, 5).session.snapshot is None  # it is resynchronising
    assert captured().client(request(17, 0, 1, {"mechanism": "PLAIN"})).session.snapshot is None
    assert captured().close(CLIENT).session.snapshot is None


def test_an_impossible_request_is_not_taken_for_one() -> None:
    """A live session leaves it to the broker; in a capture an earlier byte may be damaged."""
    odd = (
        b"\0\0\0\x20\0\x0c\0\x04" + (2).to_bytes(4) + (200).to_bytes(2) + bytes(22)
    )  # its client id is longer than the frame
    for talk, believed in ((captured(), 1), (Dialogue(), 2)):
        talk.client(request(12, 4, 1)).client(odd)
        assert len(talk.session.pending) == believed
    foreign = foreign_request(120, 3, 2, b"\0\5other")  # an unknown API with another client id
    for behind, believed in ((b"", 2), (b"\xee" * 20, 1)):
        talk = captured().client(request(12, 4, 1)).client(foreign + behind)
        assert len(talk.session.pending) == believed


def test_a_request_above_the_brokers_limit_is_one_if_its_client_is_known() -> None:
    """A broker ends its connection, by socket.request.max.bytes, before all of it has arrived."""
    size = (200 * 2**20).to_bytes(4)
    for before in (request(METADATA, 12, 1, {"topics": None}), b""):
        talk = captured()
        if before:
            talk.client(before)
            talk.broker(response(METADATA, 12, 1))
        talk.client(size + request(PRODUCE, 8, 2, {"acks": -1, "topicData": []})[4:] + bytes(3000))
        talk.close(BROKER)
        talk.close(CLIENT)
        unanswered = [event.exchange for event in talk.events if isinstance(event, Unanswered)]
        assert [(each.plan.api, each.request_bytes) for each in unanswered] == (
            [("Produce", 200 * 2**20 + 4)] if before else []
        )


def test_tokens_of_a_capture_do_not_wait_for_their_replies() -> None:
    """They are already sent, and replies may be missing or appear later in the capture."""
    token = b"\0\0\0\5token"
    for talk, read, state in ((captured(), 2, "raw"), (Dialogue(), 1, "raw, waiting")):
        talk.client(request(17, 0, 1, {"mechanism": "SCRAM-SHA-256"}))
        talk.broker(response(17, 0, 1, {"mechanisms": ["SCRAM-SHA-256"]})).client(token * 2)
        assert (talk.session.sasl_tokens, talk.session.states[CLIENT]) == (read, state)
