"""The work of one call is bounded, and the remaining bytes are neither lost nor reordered."""

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from struct import pack
from types import FrameType
from typing import Any
from uuid import UUID

import pytest

from kproxy.protocol.apis import API_VERSIONS, DESCRIBE_CLUSTER, FETCH, METADATA, OFFSET_FETCH, PRODUCE
from kproxy.protocol.primitives import write_uvarint
from kproxy.protocol.records import Record, write_batch
from kproxy.protocol.schema import schema
from kproxy.proxy.cluster.broker_ports import MAX_BROKERS
from kproxy.proxy.filters.rewrite import rewrite_addresses
from kproxy.wire import frames
from kproxy.wire.bodies import BATCHES, ERRORS, SUMS, TOPICS, BodyWalker, body_reader
from kproxy.wire.broker_side import MAX_HEAD
from kproxy.wire.client_side import MAX_PREFIX, MAX_USUAL_PREFIX
from kproxy.wire.decisions.authorizer import MAX_HELD_REQUEST
from kproxy.wire.events import BROKER, CLIENT, Desync, Exchange
from kproxy.wire.interest import HeldBudget, Interest
from kproxy.wire.login import sasl
from kproxy.wire.login.raw_sasl import MAX_TOKENS
from kproxy.wire.pairing import LIMIT
from kproxy.wire.session import Session
from kproxy.wire.state import (
    FRAMES_PER_CALL,
    FRAMES_WHILE_OTHERS_WAIT,
    NAMED_BYTES,
    WALK_SLICE,
    WALKED_PER_CALL,
    WIDEST_CHARACTER,
    body_memory_bytes,
    bytes_read,
    named_count,
)
from tests.wire.decisions.test_authorizer import Scripted
from tests.wire.playbook import Dialogue, foreign_request, request, response, sized

HANDSHAKE = 17
UNKNOWN_API = 20_000
READ = 512 * 1024


def untouched(exchange: Exchange, frame: memoryview) -> None:
    return None


def session(**more: Any) -> Session:
    return Session(Interest(rewrite=True, **more), transform=untouched)


def read(session: Session, side: int, data: bytes) -> list[list[tuple[int, bytes]]]:
    """Return the pieces sent by each call for one read: `receive`, then `resume` to the end or the pending limit."""
    buffer = bytearray(data)
    calls = [[(to, bytes(piece)) for to, piece in session.receive(side, memoryview(buffer), 1)]]
    buffer[:] = bytes(len(buffer))  # the buffer is reused: the session must have copied its backlog
    while session.backlog[side] is not None and (side == BROKER or len(session.pending) < LIMIT):
        calls.append([(to, bytes(piece)) for to, piece in session.resume(side, 1)])
    return calls


def joined(calls: list[list[tuple[int, bytes]]], to: int) -> bytes:
    return b"".join(piece for call in calls for side, piece in call if side == to)


SMALL_FRAMES: dict[str, Callable[[int], bytes]] = {
    "without an answer": lambda number: request(PRODUCE, 9, number, {"acks": 0}),
    "answered here": lambda number: foreign_request(API_VERSIONS, 99, number, b"\0\1c\0"),
    "with few fields": lambda number: request(PRODUCE, 9, number, {"acks": 0, "topicData": [{"name": "t"}]}),
}


@pytest.mark.parametrize("kind", SMALL_FRAMES)
def test_a_read_of_frames_that_are_never_pending_is_split_over_calls(kind: str) -> None:
    talk = session()
    frame = SMALL_FRAMES[kind]
    data = b"".join(map(frame, range(5000)))
    calls = read(talk, CLIENT, data)
    assert talk.completed[CLIENT] == 5000 and len(talk.events) == 5000 and len(calls) >= 5000 / FRAMES_PER_CALL
    assert joined(calls, BROKER) == (b"" if kind == "answered here" else data)
    for call in calls:
        assert len(call) <= 2  # kproxy's own responses leave together
        for to, piece in call:
            assert len(piece) <= FRAMES_PER_CALL * (80 if to == CLIENT else len(data) / 5000 + 1)


@pytest.mark.parametrize("kind", SMALL_FRAMES)
def test_while_other_connections_wait_a_call_handles_few_frames(kind: str) -> None:
    talk = session()
    data = b"".join(map(SMALL_FRAMES[kind], range(200)))
    seen = [0]
    for turn in range(400):
        if turn % 2 == 0:
            talk.limit_next_call()
        if turn:
            talk.resume(CLIENT, turn)
        else:
            talk.receive(CLIENT, memoryview(bytearray(data)), turn)
        seen.append(talk.completed[CLIENT])
        if talk.backlog[CLIENT] is None:
            break
    handled = [now - then for then, now in pairwise(seen)]
    assert sum(handled) == 200 and max(handled[::2]) <= FRAMES_WHILE_OTHERS_WAIT < max(handled[1::2]) <= FRAMES_PER_CALL


def test_a_call_compiles_at_most_one_plan() -> None:
    interest = Interest(rewrite=True, detail=TOPICS)
    talk = Session(interest, transform=untouched)
    kinds = [(key, version) for key in (METADATA, 12, 13, 14) for version in schema().apis[key].request.versions]
    asked = b"".join(request(key, version, 1) for key, version in kinds)
    compiled = []
    talk.receive(CLIENT, memoryview(asked), 1)
    while talk.backlog[CLIENT] is not None:
        compiled.append(len(interest.plans))
        talk.resume(CLIENT, 1)
    assert compiled == list(range(1, len(kinds)))
    assert len(read(Session(interest, transform=untouched), CLIENT, asked)) == 1  # compiled plans are free


def tagged(key: int, version: int, tags: int, payload: int = 0) -> bytes:
    """A request with `tags` empty tagged fields in its header; a Produce has acks 0."""
    ask = request(key, version, 1, {"acks": 0} if key == PRODUCE else {}, client="c")
    tags_at = 4 + 8 + 2 + 1
    assert ask[tags_at] == 0
    return sized(ask[4:tags_at] + write_uvarint(tags) + b"\1\0" * tags + ask[tags_at + 1 :] + bytes(payload))


SMALL_BUT_COSTLY: dict[str, Callable[[], bytes]] = {
    "Produce tags": lambda: tagged(PRODUCE, 9, 31_000),
    "Fetch tags": lambda: tagged(FETCH, 12, 31_000),
    "ApiVersions tags": lambda: tagged(API_VERSIONS, 3, 31_000),
    "empty topics": lambda: request(PRODUCE, 9, 1, {"acks": 0, "topicData": [{"name": "t"}] * 15_000}),
    "tags without end": lambda: tagged(PRODUCE, 9, 60_000),
}


@pytest.mark.parametrize("detail", [ERRORS, TOPICS])
@pytest.mark.parametrize("kind", SMALL_BUT_COSTLY)
def test_small_requests_with_many_fields_are_split_over_calls(kind: str, detail: int) -> None:
    talk = Session(Interest(details=True, detail=detail))
    data = SMALL_BUT_COSTLY[kind]() * 4
    calls = read(talk, CLIENT, data)
    assert joined(calls, BROKER) == data and talk.completed[CLIENT] == 4
    if kind != "empty topics" or detail != ERRORS:  # otherwise its topics are not read
        assert len(calls) >= 4


def test_malformed_first_fields_cost_by_the_bytes_read() -> None:
    """One frame plus one for each 256 bytes: a call handles 13 requests of 1 KiB."""
    whole = request(PRODUCE, 9, 1, {"acks": -1, "topicData": [{"name": "t" * 1024}]})
    ask = sized(whole[4:15] + b"\x80\x80\x80\x80\x10" + whole[16:])  # tagged fields without number
    talk = Dialogue(Interest()).client(ask).client(ask * 130)
    assert {fault.kind for fault in talk.faults} == {"malformed_request"} and talk.sent[BROKER] == ask * 131
    assert talk.calls == 9


@pytest.mark.parametrize("detail", [SUMS, TOPICS, BATCHES])
def test_skipped_records_do_not_count_as_bytes_read(detail: int) -> None:
    """Only the bytes outside the records count as read and kept, for every topic-partition."""
    batch = write_batch([Record(0, 1, None, bytes(50_000))])
    topics = [{"name": name, "partitionData": [{"index": 0, "records": batch}]} for name in ("a", "b")]
    frame = request(PRODUCE, 9, 1, {"acks": 1, "topicData": topics})
    found = body_reader(PRODUCE, 9, "request", detail)(frame, 12, len(frame))
    plan = Interest().plan(PRODUCE << 16 | 9)
    looked = len(frame) - 2 * (len(batch) - 64)
    assert bytes_read(plan, found, len(frame)) == looked
    assert body_memory_bytes(plan, found, len(frame)) == 2 * NAMED_BYTES + WIDEST_CHARACTER * looked


def test_a_large_body_is_walked_in_slices_after_a_request_with_the_same_prefix() -> None:
    topics = [{"name": f"topic-{number:06}", "partitionData": []} for number in range(8000)]
    ask = request(PRODUCE, 9, 1, {"acks": -1, "topicData": topics})
    talk, calls = Dialogue(Interest(detail=TOPICS)), []
    for _ in range(3):
        before = talk.calls
        talk.client(ask)
        calls.append(talk.calls - before)
    assert talk.session.completed[CLIENT] == 3 and talk.sent[BROKER] == ask * 3
    assert len(ask) // WALKED_PER_CALL <= calls[1] == calls[2]


def test_first_fields_are_read_up_to_a_limit_at_any_split() -> None:
    """The limit holds for a complete request too: arrival must not decide whether the fields are read."""
    ask = tagged(PRODUCE, 9, 40_000)
    for cuts in ([], [20], [40_000], [70_000], [len(ask) - 1]):
        talk = Dialogue(Interest()).client(ask, cuts)
        assert [fault.kind for fault in talk.faults] == ["malformed_request"] and talk.sent[BROKER] == ask
        assert f"longer than {MAX_PREFIX} bytes" in talk.faults[0].text
        talk = Dialogue(Interest(rewrite=True), transform=untouched).client(ask, cuts)
        assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("malformed_request", True)]


@pytest.mark.parametrize("payload", [0, 100_000])
def test_first_fields_that_arrive_byte_by_byte_are_parsed_again_only_a_few_times(payload: int) -> None:
    """Each parse starts at the first byte: one per byte would take hours for a few MiB."""
    ask = tagged(PRODUCE, 9, 25_000, payload)
    interest = Interest(rewrite=True)
    plan = interest.plan(int.from_bytes(ask[4:8], "big"))
    read_prefix, looked = plan.prefix, []
    plan.prefix = lambda view, start, end: looked.append(end - start) or read_prefix(view, start, end)
    first, last = 500, 52_000
    talk = Dialogue(interest, transform=untouched).client(ask, range(first, last))
    assert talk.sent[BROKER] == ask and not talk.session.pending and not talk.faults
    assert [exchange.acks for exchange in talk.exchanges] == [0]
    assert sum(size for size in looked if size > MAX_USUAL_PREFIX) < 3 * len(ask) and len(looked) < 2 * MAX_USUAL_PREFIX


@pytest.mark.parametrize("detail", [ERRORS, TOPICS])
def test_a_prefix_longer_than_a_walk_is_read_once_at_any_split(detail: int) -> None:
    ask = tagged(PRODUCE, 9, 25_000, payload=80_000)
    for cuts in ([], [20], [40_000], [45_000], [49_000], [60_000]):
        talk = Dialogue(Interest(rewrite=True, detail=detail), transform=untouched).client(ask, cuts)
        assert talk.sent[BROKER] == ask and not talk.session.pending and not talk.faults
        assert [exchange.acks for exchange in talk.exchanges] == [0]


def test_the_pending_limit_holds_for_a_read_of_any_number_of_requests() -> None:
    talk = session()
    frames = [foreign_request(9999, 0, number) for number in range(READ // 12)]
    calls = read(talk, CLIENT, b"".join(frames))
    assert len(talk.pending) == LIMIT and joined(calls, BROKER) == b"".join(frames[:LIMIT])
    for first in range(0, len(frames), 100):
        read(
            talk, BROKER, b"".join(sized(number.to_bytes(4)) for number in range(first, min(first + 100, len(frames))))
        )
        while talk.backlog[CLIENT] is not None and len(talk.pending) < LIMIT:
            calls.append([(to, bytes(piece)) for to, piece in talk.resume(CLIENT, 2)])
            assert len(talk.pending) <= LIMIT
    assert joined(calls, BROKER) == b"".join(frames)
    assert [event.correlation_id for event in talk.events if isinstance(event, Exchange)] == list(range(len(frames)))
    assert not talk.faults and talk.at_boundary(CLIENT)


def test_small_responses_are_split_over_calls_too() -> None:
    talk = session()
    for number in range(LIMIT):
        talk.receive(CLIENT, memoryview(request(12, 4, number)), 1)
    answers = b"".join(response(12, 4, number) for number in range(LIMIT))
    calls = read(talk, BROKER, answers)
    assert len(calls) >= LIMIT / FRAMES_PER_CALL and joined(calls, CLIENT) == answers and not talk.pending


def test_responses_that_are_read_whole_cost_by_length() -> None:
    """One frame plus one for each 256 bytes: a call handles two responses of 8 KiB, or all small ones."""
    calls_of = {}
    for groups in (10, 120):
        talk = session()
        body = {"groups": [{"groupId": "g" * 60, "protocolType": "consumer"}] * groups}
        for number in range(32):
            talk.receive(CLIENT, memoryview(request(16, 0, number)), 1)
        answers = b"".join(response(16, 0, number, body) for number in range(32))
        calls = read(talk, BROKER, answers)
        assert joined(calls, CLIENT) == answers and not talk.pending
        calls_of[groups] = len(calls)
    assert calls_of == {10: 1, 120: 16}


def fetched_by(client: str) -> Callable[[int], bytes]:
    return lambda number: request(FETCH, 4, number, {}, client=client + str(number))


def produced_to(partitions: int, size: int = 1) -> Callable[[int], bytes]:
    data = [{"index": number, "records": bytes(size)} for number in range(partitions)]
    return lambda number: request(PRODUCE, 8, number, {"acks": 1, "topicData": [{"name": "t", "partitionData": data}]})


def of_size(size: int) -> Callable[[int], bytes]:
    """A Produce of `size` bytes after its size field; all are read, as its body is malformed."""
    head = request(PRODUCE, 8, 0, {"acks": 1})[4:-4]
    return lambda number: sized(head[:4] + pack(">i", number) + head[8:] + b"\x7f" * (size - len(head)))


@pytest.mark.parametrize(
    ("frame", "work"),
    [
        (lambda number: request(PRODUCE, 8, number, {"acks": 1}), 1),
        (fetched_by("c" * 200), 1),  # a new client id each time: the first fields are parsed
        (fetched_by("c" * 300), 2),  # one per 256 bytes
        (fetched_by("c" * 1000), 4),
        (lambda number: request(FETCH, 4, number, {}, client="c" * 489), 1),
        (lambda number: request(FETCH, 4, number, {}, client="c" * 490), 2),  # 512 bytes: too long to be remembered
        (produced_to(16), 1),
        (produced_to(17), 18),  # counted topic-partitions
        (produced_to(20, 200), 21),
        (produced_to(4, 9000), 1),  # records are not read
        (of_size(251), 1 + 1),
        (of_size(252), 1 + 1 + 1),  # one per 256 bytes
        (of_size(1600), 1 + 1 + 6),
    ],
)
def test_a_request_costs_by_the_bytes_read(frame: Callable[[int], bytes], work: int) -> None:
    """A call ends with the request that uses up its budget of 64 short requests."""
    talk = session(detail=TOPICS)
    read(talk, CLIENT, frame(0))
    read(talk, BROKER, response(*divmod(int.from_bytes(frame(0)[4:8]), 1 << 16), 0))
    talk.receive(CLIENT, memoryview(b"".join(map(frame, range(1, 80)))), 1)
    assert talk.completed[CLIENT] - 1 == -(-FRAMES_PER_CALL // work)
    assert len(talk.pending) == talk.completed[CLIENT] - 1


@pytest.mark.parametrize(("token_bytes", "work"), [(14, 8 + 8 + 1), (26, 8 + 8 + 1), (28, 8 + 8 + 2), (60, 8 + 8 + 4)])
def test_a_change_of_state_costs_eight_frames_plus_the_bytes_read(token_bytes: int, work: int) -> None:
    """A bare GSSAPI token is one change and the first request after it another; each 16 bytes count as a frame."""
    talk = session()
    talk._interest.plan(12 << 16 | 4)
    token = sized(b"\x60\x82" + bytes(token_bytes - 2))
    talk.receive(CLIENT, memoryview(token + b"".join(request(12, 4, number) for number in range(80))), 1)
    assert talk.sasl_tokens == 1 and talk.completed[CLIENT] == FRAMES_PER_CALL - work


@pytest.mark.parametrize(("token_bytes", "is_read"), [(748, True), (764, False)])
def test_bytes_beyond_the_budget_of_a_call_are_left_for_the_next(token_bytes: int, is_read: bool) -> None:
    """Two changes cost 16 frames, the bytes read 47 or 48: the start of the next header is read or left."""
    talk = session()
    head = request(12, 4, 1)[:8]
    talk.receive(CLIENT, memoryview(sized(b"\x60\x82" + bytes(token_bytes - 2)) + head), 1)
    assert talk.states[CLIENT] == ("framed, header" if is_read else "framed")
    assert (talk.backlog[CLIENT] is None) == is_read
    talk.resume(CLIENT, 1)
    assert talk.states[CLIENT] == "framed, header" and talk.missing(CLIENT) == 4


def replaced(exchange: Exchange, frame: memoryview) -> bytes:
    return bytes(frame)


@pytest.mark.parametrize(
    ("key", "size", "work"),
    [
        (12, 0, 1),
        (12, 4100, 1),
        (12, 4101, 1 + 16),  # one per 256 bytes, beyond 4 KiB
        (METADATA, 67, 1 + 8),  # its brokers are replaced: one per 64 bytes
        (METADATA, 68, 1 + 8 + 1),
        (METADATA, 400, 1 + 8 + 6),
    ],
)
def test_a_response_costs_by_length_if_it_is_long_or_rewritten(key: int, size: int, work: int) -> None:
    talk = Session(Interest(rewrite=True), transform=replaced)
    read(talk, CLIENT, b"".join(request(key, 4, number) for number in range(80)))
    body: dict[str, Any] = {"brokers": [{"nodeId": 1, "host": "h", "port": 9092}]} if key == METADATA else {}
    plain = response(key, 4, 0, body)
    answers = [response(key, 4, number, body) for number in range(80)]
    answers = [sized(each[4:] + bytes(max(0, size - len(plain)))) for each in answers]
    talk.receive(BROKER, memoryview(b"".join(answers)), 1)
    assert talk.completed[BROKER] == -(-FRAMES_PER_CALL // work)


def test_an_endless_login_is_refused() -> None:
    """A bare GSSAPI token, then empty tokens; the broker answers each."""
    head = sized(b"\x60\x01" + bytes(6))
    talk, blind = Dialogue(Interest(rewrite=True), transform=untouched), Dialogue(Interest())
    for dialogue in (talk, blind):
        dialogue.client(head)
        for _ in range(MAX_TOKENS):
            dialogue.broker(sized(b"")).client(sized(b""))
        dialogue.broker(sized(b"")).client(b"more")
    assert [(fault.kind, fault.fatal, fault.offset) for fault in talk.faults] == [
        ("sasl_token", True, len(head) + 4 * (MAX_TOKENS - 1))
    ]
    assert talk.sent[BROKER] == head + bytes(4 * (MAX_TOKENS - 1))
    assert [fault.fatal for fault in blind.faults] == [False] and blind.sent[BROKER].endswith(b"more")


def test_tokens_from_a_broker_are_split_over_calls() -> None:
    talk = session()
    talk.receive(CLIENT, memoryview(sized(b"\x60\x01" + bytes(60))), 1)
    calls = read(talk, BROKER, bytes(4 * 10_000))
    assert len(calls) >= 10_000 / FRAMES_PER_CALL and joined(calls, CLIENT) == bytes(40_000)


def test_a_call_passes_few_large_unread_responses() -> None:
    talk = session()
    read(talk, CLIENT, b"".join(foreign_request(UNKNOWN_API, 0, number, b"\0\1c") for number in range(8)))
    size = 4 * FRAMES_PER_CALL << 8  # four times the budget of a call
    answers = b"".join(pack(">ii", 4 + size, number) + bytes(size) for number in range(8))
    calls = read(talk, BROKER, answers)
    assert len(calls) == 8 and joined(calls, CLIENT) == answers and not talk.pending


def test_requests_that_waited_for_a_handshake_are_split_over_calls() -> None:
    """The client sent requests before SaslHandshake v0 was refused; they are read in a call for the broker's side."""
    ask = request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"})
    sent = b"".join(request(PRODUCE, 9, number, {"acks": 0}) for number in range(5000))
    sent = sent[: sasl.MAX_TOKEN]
    talk = session()
    read(talk, CLIENT, ask + sent)
    first = [
        (to, bytes(piece))
        for to, piece in talk.receive(BROKER, memoryview(response(HANDSHAKE, 0, 1, {"errorCode": 33})), 1)
    ]
    assert talk.backlog[CLIENT] is not None and talk.completed[CLIENT] <= 1 + FRAMES_PER_CALL
    calls = [first]
    while talk.backlog[CLIENT] is not None:
        calls.append([(to, bytes(piece)) for to, piece in talk.resume(CLIENT, 1)])
    assert joined(calls, BROKER) == sent and not talk.faults
    read(talk, CLIENT, bytes(16))  # no frame: its offset includes the bytes that waited
    (fault,) = [each for each in talk.events if isinstance(each, Desync)]
    assert fault.offset == len(ask) + len(sent)


# --- bodies ----------------------------------------------------------------------------------------------------------


def dense(partitions: int, version: int = 8) -> dict[str, Any]:
    return {"topics": [{"name": "t", "partitions": [{"partitionIndex": n, "errorCode": 3} for n in range(partitions)]}]}


def test_a_large_response_with_many_fields_is_walked_over_several_calls() -> None:
    talk = session()
    talk.receive(CLIENT, memoryview(request(OFFSET_FETCH, 7, 1)), 1)
    answer = response(OFFSET_FETCH, 7, 1, dense(20_000))
    assert len(answer) > 4 * WALKED_PER_CALL and len(answer) < READ
    calls = read(talk, BROKER, answer)
    assert joined(calls, CLIENT) == answer
    sizes = [sum(len(piece) for _, piece in call) for call in calls]
    full = len(answer) // WALKED_PER_CALL
    assert sizes == [8 + WALKED_PER_CALL, *[WALKED_PER_CALL] * (full - 1), len(answer) - 8 - full * WALKED_PER_CALL]
    (exchange,) = talk.events
    assert isinstance(exchange, Exchange) and exchange.errors == (3,) * 20_000 and exchange.decoded == "full"


@pytest.mark.parametrize("detail", [ERRORS, SUMS, TOPICS, BATCHES])
def test_payloads_cost_no_work(detail: int) -> None:
    """Only the headers of large batches are read: a whole read passes in one call, both ways."""
    batch = write_batch([Record(0, 1, None, b"v" * 100_000)])
    talk = session(details=True, detail=detail)
    produced = {"acks": -1, "topicData": [{"name": "t", "partitionData": [{"index": 0, "records": batch * 4}]}]}
    fetched = {"responses": [{"topic": "t", "partitions": [{"partitionIndex": 0, "records": batch * 4}]}]}
    for data in (request(PRODUCE, 9, 1, produced), request(FETCH, 12, 2)):
        assert len(read(talk, CLIENT, data)) == 1
    for data in (response(PRODUCE, 9, 1), response(FETCH, 12, 2, fetched)):
        assert len(read(talk, BROKER, data)) == 1
    assert len(talk.events) == 2 and not talk.faults


def fetched(records: bytes) -> bytes:
    return response(FETCH, 12, 1, {"responses": [{"topic": "t", "partitions": [{"records": records}]}]})


TINY = write_batch([Record(0, 1, None, b"")])


def batch(size: int) -> bytes:
    return write_batch([Record(0, 1, None, bytes(size - len(TINY) - 2))])


@pytest.mark.parametrize("size", [4 * 1024, 16 * 1024])
@pytest.mark.parametrize("detail", [SUMS, TOPICS, BATCHES])
def test_a_read_of_batches_of_usual_size_is_one_call(detail: int, size: int) -> None:
    talk = session(details=True, detail=detail)
    read(talk, CLIENT, request(FETCH, 12, 1))
    answer = fetched(batch(size) * (2 * READ // size))
    calls = [read(talk, BROKER, answer[start : start + READ]) for start in range(0, len(answer), READ)]
    assert [len(one) for one in calls] == [1] * len(calls) and len(calls) > 2
    assert len(talk.events) == 1 and not talk.faults


@pytest.mark.parametrize(("size", "batches"), [(600, 64), (2048, 16), (2200, 16), (4096, 353)])
@pytest.mark.parametrize("detail", [SUMS, TOPICS, BATCHES])
def test_batches_read_per_call_by_batch_size(detail: int, size: int, batches: int) -> None:
    """Small adjacent batches cost their bytes; for large ones a slice costs 512 bytes and a header 64."""
    talk = session(details=True, detail=detail)
    read(talk, CLIENT, request(FETCH, 12, 1))
    answer = fetched(batch(size) * 1000)
    pieces = talk.receive(BROKER, memoryview(answer), 1)
    if size < 4096:  # the first call reads the fields before the batches too
        pieces = talk.resume(BROKER, 1)
    assert sum(len(piece) for _, piece in pieces) // size == batches


@pytest.mark.parametrize("few", [0, 9, 40, 400], ids=lambda few: f"{few} tiny ones between")
def test_a_call_reads_few_headers_for_any_sequence_of_batch_sizes(few: int) -> None:
    """Large batches, which the walk skips from header to header, may have any number of tiny ones in between."""
    talk = session(details=True, detail=BATCHES)
    read(talk, CLIENT, request(FETCH, 12, 1))
    unit = batch(4096) + TINY * few
    answer = fetched(unit * (READ // len(unit)) + TINY * 2000)
    talk.receive(BROKER, memoryview(answer), 1)
    looked = seen = 0
    while talk._broker_walker is not None:
        looks, seen = len(talk._broker_walker.batches) - seen, len(talk._broker_walker.batches)
        looked = max(looked, looks)
        talk.resume(BROKER, 1)
    (exchange,) = talk.events
    assert isinstance(exchange, Exchange) and exchange.response_body is not None
    assert len(exchange.response_body.batches) == READ // len(unit) * (1 + few) + 2000
    assert 100 < looked <= WALKED_PER_CALL / len(TINY) + 64


def test_a_large_request_with_many_fields_is_walked_over_several_calls() -> None:
    topics = [{"name": "t", "partitions": [{"partitionIndex": n, "committedOffset": n} for n in range(20_000)]}]
    ask = request(8, 8, 1, {"groupId": "g", "topics": topics})
    talk = session(details=True, detail=TOPICS)
    calls = read(talk, CLIENT, ask + request(12, 4, 2))
    assert len(calls) > 3 and joined(calls, BROKER) == ask + request(12, 4, 2)
    first, second = talk.pending
    assert first.request_body is not None and len(first.request_body.partitions) == 20_000
    assert first.request_end == second.request_end == 1 and second.correlation_id == 2


def test_the_count_of_named_partitions_always_equals_that_of_pending_requests() -> None:
    for seed in range(8):
        dice = random.Random(seed)
        talk = session(details=True, detail=TOPICS)
        asked = answered = 0
        for _ in range(60):
            if dice.random() < 0.6 or asked == answered:
                partitions = [{"index": n} for n in range(dice.choice((1, 16, 17, 400, 12_000)))]
                acks = dice.choice((0, -1, -1))
                body = {"acks": acks, "topicData": [{"name": "t", "partitionData": partitions}]}
                read(talk, CLIENT, request(PRODUCE, 9, asked, body))
                asked += acks != 0
            else:
                skipped = dice.random() < 0.1 and asked - answered > 1
                number = talk.pending[int(skipped)].correlation_id
                read(talk, BROKER, response(PRODUCE, 9, number))
                answered += 1 + skipped
            assert talk._named == sum(named_count(each.request_body) for each in talk.pending) <= 1 << 16


def test_the_cost_of_a_request_does_not_depend_on_the_number_pending() -> None:
    """Counts function calls, including C functions: nothing iterates over the pending requests."""

    def cost(pending: int) -> int:
        talk = session(details=True, detail=TOPICS)
        bodies = [{"partitionData": [{"index": n} for n in range(20)]}]
        frames = [request(PRODUCE, 9, n, {"acks": -1, "topicData": bodies}) for n in range(pending + 1)]
        for start in range(0, pending, 100):
            read(talk, CLIENT, b"".join(frames[start : min(pending, start + 100)]))
        assert len(talk.pending) == pending and talk._named
        called = 0

        def note(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal called
            called += event in ("call", "c_call")

        data = memoryview(bytearray(frames[-1]))
        sys.setprofile(note)
        try:
            talk.receive(CLIENT, data, 1)
        finally:
            sys.setprofile(None)
        assert len(talk.pending) == pending + 1
        return called

    assert abs(cost(1000) - cost(10)) < 10


# --- bounds ----------------------------------------------------------------------------------------------------------


def begun(frame: bytes, size: int) -> bytes:
    """The first 13 bytes of a frame of that size."""
    return pack(">i", size) + frame[4:].ljust(9, b"\0")


@pytest.mark.parametrize(
    ("settings", "key", "version", "small", "large"),
    [
        ({}, 12, 4, "kept", "walking"),
        ({"rewrite": True}, 12, 4, "kept", "walking"),
        ({"rewrite": True}, METADATA, 9, "held", "walking"),
        ({"rewrite": True}, DESCRIBE_CLUSTER, 0, "held", "held"),
        ({"rewrite": True}, FETCH, 16, "held", "walking"),
        ({"rewrite": True}, FETCH, 15, "kept", "walking"),  # without addresses
        ({"rewrite": True}, UNKNOWN_API, 0, "held", "passing"),
        ({"rewrite": True}, API_VERSIONS, 3, "held", "held"),
        ({}, UNKNOWN_API, 0, "passing", "passing"),
        ({}, API_VERSIONS, 99, "kept", "passing"),
        ({"details": True, "detail": TOPICS}, FETCH, 12, "kept", "walking"),
    ],
)
def test_a_response_in_parts_is_small_up_to_64_kib(
    settings: dict[str, Any], key: int, version: int, small: str, large: str
) -> None:
    for size, state in ((65_535, small), (65_536, small), (65_537, large)):
        talk = Dialogue(Interest(**settings), transform=untouched if settings.get("rewrite") else None)
        talk.client(foreign_request(key, version, 7, b"\0\1c" + bytes(40)))
        talk.broker(begun(bytes(4) + pack(">i", 7), size))
        assert talk.session.states[BROKER] == f"framed, {state}"
        assert talk.session.missing(BROKER) == size - 9 and not talk.exchanges


def test_a_request_in_parts_is_small_up_to_64_kib() -> None:
    for size, state in ((65_535, "kept"), (65_536, "kept"), (65_537, "walking")):
        talk = Dialogue(Interest(detail=TOPICS)).client(begun(request(PRODUCE, 8, 1, {"acks": 1}), size))
        assert talk.session.states[CLIENT] == f"framed, {state}"
    for size in (65_536, 65_537):  # complete, after a request with the same prefix
        talk = Dialogue(Interest(detail=TOPICS)).client(request(PRODUCE, 8, 1, {"acks": 1}))
        body = {"acks": 1, "topicData": [{"name": "t", "partitionData": [{"records": b""}]}]}
        least = len(request(PRODUCE, 8, 2, body)) - 4
        body["topicData"][0]["partitionData"][0]["records"] = bytes(size - least)
        talk.client(request(PRODUCE, 8, 2, body))
        (_, second) = talk.session.pending
        assert second.request_body is not None and isinstance(second.request_body, BodyWalker) == (size > 65_536)
        assert [one.bytes for one in second.request_body.sums] == [size - least]


@pytest.mark.parametrize(
    ("settings", "key", "version", "bound"),
    [
        ({"rewrite": True}, DESCRIBE_CLUSTER, 0, 4 << 20),
        ({"rewrite": True}, API_VERSIONS, 3, 4 << 20),
    ],
)
def test_a_held_response_has_a_limit(settings: dict[str, Any], key: int, version: int, bound: int) -> None:
    for size, faults in ((bound, []), (bound + 1, ["held_too_large"])):
        talk = Dialogue(Interest(**settings), transform=untouched).client(request(key, version, 7))
        talk.broker(begun(bytes(4) + pack(">i", 7), size))
        assert [fault.kind for fault in talk.faults] == faults
    low = Dialogue(Interest(rewrite=True), transform=untouched).client(request(METADATA, 9, 7))
    endless = pack(">ii", 1 << 20, 7) + b"\0" * 5 + b"\x80\x80\x40" + (pack(">i", 1) + b"\2h" + bytes(6)) * 50_000
    low.broker(endless[:MAX_HEAD])
    assert not low.faults and low.session.states[BROKER] == "framed, walking"
    low.broker(endless[MAX_HEAD : MAX_HEAD + 1])
    assert [fault.kind for fault in low.faults] == ["held_too_large"]


@pytest.mark.parametrize("largest", [100, frames.MAX_REQUEST])
def test_a_request_may_be_as_large_as_a_broker_accepts(largest: int) -> None:
    for size, faults in ((largest, []), (largest + 1, ["size"])):
        talk = Dialogue(Interest(), max_request_bytes=largest).client(begun(request(12, 4, 1), size)[:50])
        assert [fault.kind for fault in talk.faults] == faults
    for size, faults in ((8, ["malformed_request"]), (7, ["size"])):  # a Produce without a body
        talk = Dialogue(Interest()).client(pack(">i", size) + bytes(8))
        assert [fault.kind for fault in talk.faults] == faults
    for size, faults in ((4, ["malformed_answer"]), (3, ["size"])):
        talk = Dialogue(Interest()).client(request(12, 4, 1)).broker(pack(">ii", size, 1))
        assert [fault.kind for fault in talk.faults] == faults


def test_a_request_held_for_the_authorizer_has_a_limit() -> None:
    for size, faults in ((MAX_HELD_REQUEST, []), (MAX_HELD_REQUEST + 1, ["held_too_large"])):
        authorizer = Scripted()
        talk = Dialogue(Interest(rewrite=True, authorizes=lambda key, version: True), authorizer=authorizer)
        talk.client(begun(request(12, 4, 1), size - 4))
        assert [fault.kind for fault in talk.faults] == faults and authorizer.too_large_ids == [1] * len(faults)
        assert talk.sent[BROKER] == b""


def test_bytes_waiting_for_a_handshake_and_tokens_have_a_limit() -> None:
    shake = request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"})
    for waiting, faults in ((sasl.MAX_TOKEN, []), (sasl.MAX_TOKEN + 1, ["sasl_token"])):
        talk = Dialogue(Interest(rewrite=True), transform=untouched).client(shake).client(bytes(waiting))
        assert [fault.kind for fault in talk.faults] == faults
    for size, faults in ((sasl.MAX_TOKEN, []), (sasl.MAX_TOKEN + 1, ["size"])):
        for side in (CLIENT, BROKER):
            talk = Dialogue(Interest(rewrite=True), transform=untouched).client(shake)
            talk.broker(response(HANDSHAKE, 0, 1, {"mechanisms": ["PLAIN"]})).client(sized(b"t") if side else b"")
            talk.says(side, pack(">i", size) + b"t")
            assert [fault.kind for fault in talk.faults] == faults


# --- held answers ----------------------------------------------------------------------------------------------------


def brokers(count: int) -> dict[str, Any]:
    return {"brokers": [{"brokerId": n, "host": f"broker-{n}", "port": 9092, "rack": None} for n in range(count)]}


def test_bytes_held_by_all_sessions_together_are_bounded() -> None:
    answer = response(DESCRIBE_CLUSTER, 0, 1, brokers(3000))
    interest = Interest(rewrite=True, held=HeldBudget(2 * len(answer)))
    talks = [Dialogue(interest, transform=untouched).client(request(DESCRIBE_CLUSTER, 0, 1)) for _ in range(3)]
    for talk in talks:
        talk.broker(answer[:-100])
    assert [[fault.kind for fault in talk.faults] for talk in talks] == [[], [], ["held_too_many"]]
    assert talks[2].faults[0].fatal and "let fewer clients ask at once" in talks[2].faults[0].text
    talks[0].broker(answer[-100:])
    talks[1].close(BROKER)
    assert talks[0].sent[CLIENT] == answer and talks[1].sent[CLIENT] == b""
    again = Dialogue(interest, transform=untouched).client(request(DESCRIBE_CLUSTER, 0, 1) * 2)
    assert again.broker(answer * 2, [9, len(answer), len(answer) + 50]).sent[CLIENT] == answer * 2  # all is released
    assert interest.held.take(2 * len(answer))


def test_without_budget_for_a_copy_the_response_passes_unread() -> None:
    interest = Interest(rewrite=True, held=HeldBudget(0))
    answer = response(12, 4, 1, {"errorCode": 27})
    talk = Dialogue(interest, transform=untouched).client(request(12, 4, 1)).broker(answer, [9])
    assert talk.sent[CLIENT] == answer and not talk.faults and talk.exchanges[0].decoded == "header"


@pytest.mark.parametrize(("key", "acks"), [(FETCH, 1), (PRODUCE, 1), (PRODUCE, 0)])
def test_names_read_from_incomplete_bodies_are_bounded(key: int, acks: int) -> None:
    """One limit for all sessions, at any split; the broker gets every byte, and all budget is released at the end."""
    limit = 2_200_000
    interest = Interest(rewrite=True, detail=TOPICS, held=HeldBudget(noted_limit_bytes=limit))

    def asks(count: int) -> bytes:
        if key == FETCH:
            one = {"partitions": [{"partition": 0, "fetchOffset": 5}]}
            return request(FETCH, 4, 1, {"topics": [{"topic": f"{at:060}", **one} for at in range(count)]})
        one = {"partitionData": [{"index": 0, "records": TINY}]}
        return request(
            PRODUCE, 3, 1, {"acks": acks, "topicData": [{"name": f"{at:060}", **one} for at in range(count)]}
        )

    def kept(talk: Session) -> int:
        walker = talk._client_walker
        return 0 if walker is None else 300 * (len(walker.sums) + len(walker.partitions))

    dialogues = [Dialogue(interest, transform=untouched) for _ in range(6)]
    whole = asks(2000)
    for dialogue in dialogues:
        dialogue.client(whole[:-1], range(1000, len(whole) - 1, 1000))
    assert sum(kept(each.session) for each in dialogues) <= 1.5 * limit
    refused = [each for each in dialogues if each.faults]
    assert 3 <= len(refused) < 6 and {fault.kind for each in refused for fault in each.faults} == {"too_much_named"}
    for dialogue in dialogues[::2]:
        dialogue.client(whole[-1:])
        assert dialogue.sent[BROKER] == whole
    for dialogue in dialogues:
        if acks:
            dialogue.broker(response(key, 4 if key == FETCH else 3, 1))
        dialogue.close(CLIENT).close(BROKER)
    assert interest.held.note(limit)


@pytest.mark.parametrize("acks", [1, 0])
@pytest.mark.parametrize("authorized", [False, True])
def test_copies_of_incomplete_requests_are_bounded(acks: int, authorized: bool) -> None:
    """Small bodies and first fields are copied until complete, within one limit for all sessions."""
    limit = 200_000
    authorizer = Scripted() if authorized else None
    transactional_id = "t" * 30_000
    body = {"acks": acks, "topicData": [{"name": "n" * 30_000, "partitionData": [{"index": 0, "records": TINY}]}]}
    whole = request(PRODUCE, 3, 1, {"transactionalId": transactional_id, **body})
    for first in (20_000, len(whole) - 1):  # within the first fields; after them
        interest = Interest(rewrite=True, detail=TOPICS, held=HeldBudget(noted_limit_bytes=limit))
        talks = [Dialogue(interest, transform=untouched, authorizer=authorizer) for _ in range(12)]
        for talk in talks:
            talk.client(whole[:first], range(1000, first, 1000))
        refused = [talk for talk in talks if talk.faults]
        assert len(refused) > 2 and interest.held._noted_bytes <= limit
        kinds = {fault.kind for talk in refused for fault in talk.faults}
        assert kinds <= {"too_much_named", "held_too_many"} and ("held_too_many" in kinds) <= authorized
        held = sum(len(each._client_prefix or b"") + len(each._client_body or b"") for each in map(session_of, talks))
        assert held <= limit + len(talks) * 512
        for talk in talks:
            if talk.session.states[CLIENT] != "closed":
                talk.client(whole[first:])
                assert talk.sent[BROKER] == whole
                if acks:
                    talk.broker(response(PRODUCE, 3, 1))
        assert interest.held._noted_bytes == 0  # released with the response or, without one, with the request


def test_a_request_with_many_partitions_counts_with_their_memory() -> None:
    interest = Interest(rewrite=True, detail=TOPICS, held=HeldBudget(noted_limit_bytes=1 << 30))
    partitions = [{"partition": number, "fetchOffset": 5} for number in range(200)]
    talk = Dialogue(interest, transform=untouched)
    talk.client(request(FETCH, 4, 1, {"topics": [{"topic": "t", "partitions": partitions}]}))
    body = talk.session.pending[0].request_body
    assert body is not None and len(body.partitions) == 200
    assert sum(map(sys.getsizeof, body.partitions)) <= interest.held._noted_bytes <= 200 * 500


def session_of(talk: Dialogue) -> Session:
    return talk.session


def test_client_names_kept_for_a_connection_are_truncated() -> None:
    """One character beyond UCS-2 makes all of a string take four bytes each: 32 KiB become 128 KiB per connection."""
    long = "\N{GRINNING FACE}" + "c" * 15_000
    talk = Dialogue(Interest(rewrite=True, details=True), transform=untouched)
    named = {"clientSoftwareName": long, "clientSoftwareVersion": long}
    talk.client(request(API_VERSIONS, 3, 1, named, client=long))
    assert talk.session.pending[0].client_id == long  # while it is pending
    assert talk.session.client_id == long[:256] and talk.session.software == (long[:256], long[:256])


def test_ids_and_names_kept_for_pending_requests_of_all_sessions_are_bounded() -> None:
    """Client ids and topic names may have 32 KiB each and differ in each request."""
    interest = Interest(rewrite=True, details=True, detail=TOPICS, held=HeldBudget(noted_limit_bytes=40_000))

    def asks(number: int, client: str, topic: str = "t") -> bytes:
        partition = {"partition": 0, "fetchOffset": 5}
        return request(FETCH, 4, number, {"topics": [{"topic": topic, "partitions": [partition]}]}, client=client)

    one, two = (Dialogue(interest, transform=untouched) for _ in range(2))
    one.client(asks(1, "a" * 4000))
    two.client(asks(1, "b" * 4000) + asks(2, "c" * 4000) + asks(3, "d", "t" * 4000) + asks(4, "e"))
    assert [fault.kind for fault in two.faults] == ["too_much_named"] * 3 and not one.faults
    first, cut, nameless, short = two.session.pending
    assert (first.client_id, cut.client_id) == ("b" * 4000, "c" * 256)
    assert [each.request_body is None for each in (first, cut, nameless, short)] == [False, True, True, False]
    one.broker(response(FETCH, 4, 1))
    two.close(BROKER)
    three = Dialogue(interest, transform=untouched).client(asks(1, "f" * 4000) + asks(2, "g", "t" * 2000), [9, 2000])
    assert not three.faults and [exchange.client_id for exchange in three.session.pending] == ["f" * 4000, "g"]
    three.broker(response(FETCH, 4, 1) + response(FETCH, 4, 2))
    assert interest.held.note(40_000)  # all is released


# --- states ----------------------------------------------------------------------------------------------------------


def test_every_state_of_the_table_is_reached() -> None:
    met: set[tuple[int, str]] = set()

    class Watched(Dialogue):
        def _take(self) -> None:
            met.update(enumerate(self.session.states))
            super()._take()

    def talk(**more: Any) -> Watched:
        return Watched(Interest(rewrite=True, **more), transform=untouched)

    named = {"acks": -1, "topicData": [{"name": "t", "partitionData": [{"index": n} for n in range(20)]}]}
    many = {"acks": -1, "topicData": [{"name": "t", "partitionData": [{"index": n} for n in range(20_000)]}]}
    ask = request(PRODUCE, 9, 1, named)
    talk().client(ask, [5, 14, 60]).broker(response(PRODUCE, 9, 1), [5, 9])
    talk(detail=TOPICS).client(ask, [60]).client(request(PRODUCE, 9, 2, many), [100_000])
    talk().client(foreign_request(API_VERSIONS, 99, 1, b"\0\1c\0"), [13])
    talk().client(foreign_request(9999, 0, 1)).broker(sized((1).to_bytes(4) + b"opaque"), [9])
    talk().client(foreign_request(9999, 0, 1)).broker(sized((1).to_bytes(4) + bytes(70_000)), [9])
    talk().client(request(METADATA, 12, 1)).broker(response(METADATA, 12, 1), [9])
    talk().client(request(OFFSET_FETCH, 7, 1)).broker(response(OFFSET_FETCH, 7, 1, dense(9000)), [99])
    talk().client(request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"})).broker(response(HANDSHAKE, 0, 1)).client(
        b"\xff" * 4
    )
    Watched(Interest()).client(b"\xff" * 16)
    substates = ("", ", header", ", passing", ", kept", ", walking")
    expected = {(side, f"framed{substate}") for side in (CLIENT, BROKER) for substate in substates}
    expected |= {(side, state) for side in (CLIENT, BROKER) for state in ("raw", "blind", "closed")}
    expected |= {(CLIENT, "framed, prefix"), (CLIENT, "framed, swallowed"), (CLIENT, "await_handshake")}
    expected |= {(BROKER, "framed, held")}
    assert met == expected


# --- the head of a large Metadata response ---------------------------------------------------------------------------


def metadata(version: int, topics: int, hosts: int = 12) -> dict[str, Any]:
    nodes = [{"nodeId": n, "host": f"broker-{n}.internal", "port": 9092, "rack": "r" * (n % 300)} for n in range(hosts)]
    partitions = [
        {"partitionIndex": n, "errorCode": 5, "leaderId": 1, "replicaNodes": [1, 2, 3], "isrNodes": [1, 2]}
        for n in range(10)
    ]
    return {
        "brokers": nodes,
        "clusterId": "c",
        "topics": [{"name": f"topic-{n}", "topicId": UUID(int=n + 1), "partitions": partitions} for n in range(topics)],
    }


def renamed(exchange: Exchange, frame: memoryview) -> bytes | None:
    return rewrite_addresses(exchange.plan.api_key, exchange.plan.api_version, frame, lambda n, host, port: ("me", n))


@pytest.mark.parametrize("version", [0, 1, 4, 8, 9, 12, 13])
@pytest.mark.parametrize("most", [1, 700, 100_000, READ])
def test_only_the_brokers_of_a_large_metadata_response_are_held(version: int, most: int) -> None:
    answer = response(METADATA, version, 7, metadata(version, 300))
    cuts = [*range(most, len(answer) if most > 1 else 2000, most)]  # byte by byte through the brokers and beyond
    interest = Interest(rewrite=True, details=True, detail=TOPICS, held=HeldBudget(4096))
    talk = Dialogue(interest, transform=renamed).client(request(METADATA, version, 7))
    talk.broker(answer + answer[:9], [*cuts, len(answer)] if cuts else [])
    expected = rewrite_addresses(METADATA, version, memoryview(answer), lambda n, host, port: ("me", n))
    assert expected is not None and talk.sent[CLIENT] == expected
    (exchange,) = talk.exchanges
    assert exchange.errors == (5,) * 3000 and exchange.response_bytes == len(answer) and exchange.decoded == "full"
    assert exchange.response_body is not None and len(exchange.response_body.names) == (300 if version >= 10 else 0)
    assert interest.held.take(4096)  # all is released


def test_metadata_of_50000_partitions_is_walked_over_many_calls() -> None:
    answer = response(METADATA, 12, 1, metadata(12, 5000))
    talk = Session(Interest(rewrite=True), transform=renamed)
    talk.receive(CLIENT, memoryview(request(METADATA, 12, 1)), 1)
    sent = b""
    for start in range(0, len(answer), READ):
        for call in read(talk, BROKER, answer[start : start + READ]):
            piece = b"".join(piece for _, piece in call)
            assert len(piece) <= WALKED_PER_CALL + WALK_SLICE
            sent += piece
    assert sent == renamed_frame(answer) and len(talk.events) == 1 and not talk.faults


def renamed_frame(answer: bytes) -> bytes | None:
    return rewrite_addresses(METADATA, 12, memoryview(answer), lambda n, host, port: ("me", n))


def test_one_call_rewrites_as_many_brokers_as_a_listener_serves() -> None:
    for count, is_refused in ((MAX_BROKERS, False), (4 * MAX_BROKERS, True)):
        named = [{"nodeId": n, "host": f"broker-{n}.kafka.example.internal", "port": 9092} for n in range(count)]
        answer = response(METADATA, 9, 1, {"brokers": named})
        talk = Dialogue(Interest(rewrite=True), transform=untouched).client(request(METADATA, 9, 1)).broker(answer)
        assert [fault.kind for fault in talk.faults] == ["held_too_large"] * is_refused
        assert talk.sent[CLIENT] == (b"" if is_refused else answer)


def test_an_endless_list_of_brokers_is_refused() -> None:
    answer = response(METADATA, 12, 1, metadata(12, 1, hosts=7000))
    assert len(answer) > MAX_HEAD
    talk = Dialogue(Interest(rewrite=True), transform=renamed).client(request(METADATA, 12, 1))
    talk.broker(answer, range(100_000, len(answer), 100_000))
    assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("held_too_large", True)]
    assert talk.sent[CLIENT] == b"" and "do not end within" in talk.faults[0].text


def test_a_fault_after_the_brokers_ends_the_reading_and_not_the_connection() -> None:
    answer = response(METADATA, 12, 1, metadata(12, 300))
    broken = answer[:-2000] + b"\xff" * 2000
    talk = Dialogue(Interest(rewrite=True), transform=renamed).client(request(METADATA, 12, 1)).broker(broken)
    assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("malformed_answer", False)]
    assert talk.sent[CLIENT].endswith(b"\xff" * 2000) and b"internal" not in talk.sent[CLIENT]
    early = answer[:20] + b"\xff" * (len(answer) - 20)
    talk = Dialogue(Interest(rewrite=True), transform=renamed).client(request(METADATA, 12, 1)).broker(early)
    assert [fault.fatal for fault in talk.faults] == [True] and talk.sent[CLIENT] == b""
