"""Exchanges read from many segments at once equal those of sessions that read segment by segment, whatever they
hold."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain, count, cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture.columns import pairs
from kproxy.capture.columns.segments import Part, Segments
from kproxy.protocol.apis import API_VERSIONS, FETCH, HEARTBEAT, PRODUCE
from kproxy.protocol.records import Record, write_batch
from kproxy.wire import bodies
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from kproxy.wire.observing.kept import Kept
from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.pairing import LIMIT
from kproxy.wire.state import Usual
from tests import captures
from tests.capture.dialogues import Share, Stretch, frames, stretches
from tests.native import reads_by_core
from tests.wire.playbook import request, response

pytestmark = reads_by_core
BATCH = write_batch([Record(offset, 1_700_000_000_000, None, bytes(300)) for offset in range(5)])
HANDSHAKE = 17
TOPICS = [
    {"name": name, "partitionData": [{"index": 0, "records": BATCH}, {"index": 1, "records": BATCH * 3}]}
    for name in ("a", "topic")
]
KINDS: list[tuple[int, int, list[dict[str, Any]], dict[str, Any]]] = [
    (PRODUCE, 9, [{"acks": -1}, {"acks": -1, "transactionalId": "t"}], {}),
    (PRODUCE, 9, [{"acks": -1, "topicData": TOPICS}], {"throttleTimeMs": 7}),
    (PRODUCE, 9, [{"acks": 0}], {}),
    (FETCH, 12, [{"maxWaitMs": 500}, {"maxWaitMs": 5}], {"throttleTimeMs": 3}),
    (HEARTBEAT, 4, [{"groupId": "g" * size} for size in (3, 300, 600)], {"errorCode": 27}),
    (API_VERSIONS, 3, [{"clientSoftwareName": name, "clientSoftwareVersion": "1"} for name in "ab"], {}),
    (API_VERSIONS, 4, [{"clientSoftwareName": "b", "clientSoftwareVersion": "1"}], {}),
    (HANDSHAKE, 1, [{"mechanism": "PLAIN"}], {"mechanisms": ["PLAIN"]}),
]


def dialogue(dice: random.Random) -> list[tuple[int, bytes]]:
    """Frames of both sides, with several requests in flight, and now and then bytes of no protocol."""
    sent: list[tuple[int, bytes]] = []
    waiting: list[bytes] = []
    for number in range(dice.randrange(1, 40)):
        key, version, questions, answer = dice.choice(KINDS)
        question = dice.choice(questions)
        sent.append((CLIENT, request(key, version, number, question)))
        if question.get("acks") != 0:
            frame = response(key, version, number, answer)
            if dice.random() < 0.1:  # with a length that no earlier one had, and with too many bytes
                frame = (len(frame) + 70_000).to_bytes(4) + frame[4:] + bytes(70_004)
            waiting.append(frame)
        if dice.random() < 0.02:
            waiting.append(response(HEARTBEAT, 4, -number))
        if dice.random() < 0.01:
            sent.append((dice.randrange(2), dice.randbytes(30)))
        while waiting and dice.random() < 0.6:
            sent.append((BROKER, waiting.pop(0)))
    if dice.random() < 0.2:
        sent.append((CLIENT, request(HANDSHAKE, 0, 99, {"mechanism": "PLAIN"})))
    return sent + [(BROKER, frame) for frame in waiting]


def plain(value: Any) -> Any:
    if type(value).__name__ in ("Found", "BodyWalker"):
        return [*value.partitions], [*value.batches]
    if type(value).__module__ == "kproxy.wire.events":
        slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
        return type(value).__name__, {slot: plain(getattr(value, slot, None)) for slot in slots}
    return value


@dataclass
class Talk:
    """A connection and its events."""

    session: CapturedSession
    flip: int
    openings: dict[int, Usual] = field(default_factory=dict)
    emitted: list[Any] = field(default_factory=list)

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        session = self.session
        session.receive(side ^ self.flip, view, now_ns)
        if session.usual[4].known:
            self.openings[session.usual[2]] = session.usual
        self.emitted += map(plain, session.events)
        session.events.clear()


def cut(dice: random.Random, sent: list[tuple[int, bytes]], whole: bytearray) -> list[tuple[int, int, int, int]]:
    """Segments (side, start, end, time) of the frames, in one buffer with headers between them."""
    segments: list[tuple[int, int, int, int]] = []
    now = 1000
    usual = dice.choice((9, 50, 2000, 70_000))
    for side, data in sent:
        most = usual if dice.random() < 0.9 else 1
        if len(data) > 1000:
            most = max(most, 2000)
        for start in range(0, len(data), most):
            now += dice.choice((0, 5, -3))
            whole += bytes(dice.randrange(3))  # headers, which must not be read
            part = data[start : start + most]
            if segments and segments[-1][0] == side and dice.random() < 0.3 and segments[-1][2] == len(whole):
                segments[-1] = (side, segments[-1][1], len(whole) + len(part), segments[-1][3])
            else:
                segments.append((side, len(whole), len(whole) + len(part), now))
            whole += part
    return segments


def in_order(events: list[Any]) -> tuple[list[Any], list[Any]]:
    """Exchanges in the order of their requests, and all other events in order of arrival."""
    exchanges = [what for kind, what in events if kind == "Exchange"]
    exchanges.sort(key=lambda what: (what["number"], what["response_start"]))
    return exchanges, [(kind, {**what, "offset": 0}) for kind, what in events if kind != "Exchange"]


Cut = list[tuple[int, int, int, int]]  # segments: side, start, end, time


class Comparison:
    """Connections read by column in windows that end anywhere, compared with sessions that read segment by segment."""

    def __init__(self, detail: int, keeps: bool = False) -> None:
        self.detail = detail
        kept = Kept({FETCH, HEARTBEAT}, only_failed={HEARTBEAT}) if keeps else None
        self._interest = Interest(details=True, detail=detail, kept=kept)
        self._whole = bytearray()
        self._flips: list[int] = []
        self._segments: list[Cut] = []
        self.exchanges: list[dict[str, Any]] = []  # the exchanges that these sessions emitted, by attribute

    def connection(self, flip: int, cut: Callable[[bytearray], Cut]) -> None:
        """Add a connection. `cut` appends the bytes of its packets to a buffer; flip: whether side 0 is the broker."""
        self._flips.append(flip)
        self._segments.append([(side ^ flip, *place) for side, *place in cut(self._whole)])

    def check(self, counts: Iterator[int]) -> Share:
        """counts: the number of segments that the next window has of a connection. Returns how many exchanges were
        converted by column."""
        view = memoryview(bytes(self._whole))
        talks, expected = ([Talk(CapturedSession(self._interest), flip) for flip in self._flips] for _ in range(2))
        for one, its in zip(expected, self._segments, strict=True):
            clock = 0
            for side, start, end, time_ns in its:
                clock = max(clock, time_ns)
                one.receive(side, view[start:end], clock)
        self.exchanges = [what for one in expected for kind, what in one.emitted if kind == "Exchange"]
        share = Share(0, len(self.exchanges))

        reader = pairs.PairReader(import_module("kproxy_core"), self.detail)
        left = [list(its) for its in self._segments]
        clocks = [0] * len(left)
        while any(left):
            window, parts = [], []
            for number, its in enumerate(left):
                count = next(counts)
                parts.append(Part(talks[number], len(window), len(window) + len(its[:count]), clocks[number]))
                window += its[:count]
                del its[:count]
            columns = Segments(*np.array(window, np.int64).reshape(-1, 4).T)
            for bulk in reader.read(view, columns, parts):
                for number, exchange in captures.one_by_one(bulk):
                    talks[number].emitted.append(plain(exchange))
                    share.by_column += 1
            clocks = [part.clock_ns for part in parts]

        for talk, one in zip(talks, expected, strict=True):
            assert in_order(talk.emitted) == in_order(one.emitted)
            ours, theirs = talk.session, one.session
            assert [plain(each) for each in ours.pending] == [plain(each) for each in theirs.pending]
            assert (ours.completed, ours.software, ours.number) == (theirs.completed, theirs.software, theirs.number)
            assert (ours.free_at, ours.mutes) == (theirs.free_at, theirs.mutes)
            assert ours._received == theirs._received
        return share


def test_throttled_waits_are_split_by_column_as_by_the_session() -> None:
    """A producer with two requests in flight under a quota; windows end anywhere."""
    dice = random.Random(7)

    def cut(whole: bytearray) -> Cut:
        segments: Cut = []
        now = asked = 0
        for number in range(400):
            sent = []
            while asked < min(400, number + dice.choice((1, 2))):
                sent.append((CLIENT, request(PRODUCE, 9, asked, {"acks": -1}), dice.randrange(3_000_000)))
                asked += 1
            answer = {"throttleTimeMs": dice.choice((0, 0, 0, 2, 9)) if number > 100 else 0}
            sent.append((BROKER, response(PRODUCE, 9, number, answer), dice.randrange(5_000_000)))
            for side, data, after_ns in sent:
                now += after_ns
                segments.append((side, len(whole), len(whole) + len(data), now))
                whole += data
        return segments

    comparison = Comparison(bodies.ERRORS)
    comparison.connection(0, cut)
    share = comparison.check(iter(lambda: dice.randrange(1, 200), None))
    assert share.by_column > 300
    waits = Counter((what["queue_ns"] > 0, what["muted_ns"] > 0) for what in comparison.exchanges)
    assert len(waits) == 4 and min(waits.values()) > 10, waits


def heartbeats(numbers: Iterator[tuple[int, int]], acks: int) -> list[tuple[int, bytes]]:
    """Return as many requests and responses as each pair (requests, responses) in `numbers` states.

    Every `acks`th request is a Produce without a response.
    """
    sent, waiting = [], deque[int]()
    number = 0
    for asked, answered in numbers:
        for _ in range(asked):
            number += 1
            if acks and number % acks == 0:
                sent.append((CLIENT, request(PRODUCE, 9, number, {"acks": 0})))
            else:
                sent.append((CLIENT, request(HEARTBEAT, 4, number, {"groupId": "g"})))
                waiting.append(number)
        sent += [(BROKER, response(HEARTBEAT, 4, waiting.popleft())) for _ in range(min(answered, len(waiting)))]
    return sent


def cut_alike(sent: list[tuple[int, bytes]], whole: bytearray) -> Cut:
    segments: Cut = []
    for side, data in sent:
        segments.append((side, len(whole), len(whole) + len(data), 1000 + len(segments)))
        whole += data
    return segments


def test_a_busy_connection_is_read_by_column_whatever_windows_hold() -> None:
    """More requests per window than may be pending, though few of them are at once."""
    comparison = Comparison(bodies.BATCHES)
    comparison.connection(0, partial(cut_alike, heartbeats(iter([(5, 3), *[(3, 3)] * (LIMIT // 2), (0, 2)]), 0)))
    share = comparison.check(chain((9,), cycle((4 * LIMIT,))))
    assert share.all > 1.4 * LIMIT and share.by_column >= share.all - 8


@pytest.mark.parametrize(("in_flight", "least"), ((1, 0.9), (2, 0.15)))
def test_a_round_ends_after_many_rows(monkeypatch: pytest.MonkeyPatch, in_flight: int, least: float) -> None:
    """This bounds its memory. The next round continues there, or the session does if requests are always in flight."""
    monkeypatch.setattr(pairs, "MANY_ROWS", 50)
    monkeypatch.setattr(pairs, "WORTH", 8)
    sizes: list[int] = []
    bulk = pairs.PairReader._bulk

    def counted(self: pairs.PairReader, group: tuple[Any, ...], prefixes: Any) -> Any:
        made = bulk(self, group, prefixes)
        sizes.append(len(made.connection))
        return made

    monkeypatch.setattr(pairs.PairReader, "_bulk", counted)
    comparison = Comparison(bodies.BATCHES)
    for _ in range(3):
        numbers = iter([(1, 1)] * 20 + [(in_flight, 1)] + [(1, 1)] * 180 + [(0, in_flight)])
        comparison.connection(0, partial(cut_alike, heartbeats(numbers, 0)))
    share = comparison.check(chain((9, 9, 9), cycle((1000,))))
    assert float(share) > least, share
    assert max(sizes) <= 100


@pytest.mark.parametrize(("most", "acks"), ((LIMIT - 1, 0), (LIMIT + 1, 900), (LIMIT + 20, 0)))
def test_beyond_the_limit_the_same_pending_requests_are_dropped(most: int, acks: int) -> None:
    """That many requests are in flight at once, before some usual pairs and after others."""
    comparison = Comparison(bodies.ERRORS)
    burst = [(3, 3)] * 20 + [(most - 40, 0)] + [(7, 3)] * 10 + [(3, 3)] * 200 + [(0, most // 2), (most // 2, 0)]
    comparison.connection(0, partial(cut_alike, heartbeats(iter(burst), acks)))
    share = comparison.check(chain((9,), cycle((100, 4 * LIMIT))))
    assert share.by_column > 30


def test_usual_connections_have_the_events_of_one_by_one() -> None:
    """Most exchanges are usual: the core must read most of them, and all events must be equal."""
    total, waits, frames_kept = Share(), Counter[str](), Counter[str]()
    details = st.sampled_from((bodies.ERRORS, bodies.BATCHES))
    windows = st.lists(st.integers(20, 200), min_size=1, max_size=5)
    rounds = st.sampled_from(((0, 16, 1 << 16), (8, 16, 1 << 16), (0, 64, 100), (256, 16, 1 << 16), (256, 1, 100)))

    connections = st.lists(st.tuples(stretches(100), shapes()), min_size=1, max_size=3)

    @settings(max_examples=30, deadline=None, derandomize=True)  # otherwise the shares below would depend on chance
    @given(connections, details, windows, rounds, st.sampled_from((False, False, False, True)))
    def holds(
        connections: list[tuple[list[Stretch], Shape]],
        detail: int,
        windows: list[int],
        rounds: tuple[int, int, int],
        keeps: bool,
    ) -> None:
        comparison = Comparison(detail, keeps)
        for dialogue, shape in connections:
            comparison.connection(shape.flip, partial(shape.cut, frames(dialogue)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairs, "WORTH", rounds[0])
            patch.setattr(pairs, "ROUNDS", rounds[1])
            patch.setattr(pairs, "MANY_ROWS", rounds[2])
            share = comparison.check(chain((9,), cycle(windows)))  # the first window learns how requests begin
        total.add(share.by_column, share.all)
        frames_kept["any"] += sum(exchange["response_frame"] is not None for exchange in comparison.exchanges)
        for name in ("queue_ns", "muted_ns"):
            waits[name] += sum(exchange[name] > 0 for exchange in comparison.exchanges)

    holds()
    assert float(total) > 0.4, total
    assert frames_kept["any"] > 100
    assert min(waits[name] for name in ("queue_ns", "muted_ns")) > total.all / 100, waits


@dataclass(frozen=True)
class Shape:
    """The distribution of a connection's bytes over packets."""

    flip: int
    segment_bytes: int
    step_ns: int  # between packets; every seventh has an earlier time than the one before it

    def cut(self, sent: list[tuple[int, bytes]], whole: bytearray) -> Cut:
        segments: Cut = []
        now = 1000
        for side, data in sent:
            for start in range(0, len(data), self.segment_bytes):
                now += -3 if len(segments) % 7 == 6 else self.step_ns
                whole += bytes(len(segments) % 3)  # headers, which must not be read
                part = data[start : start + self.segment_bytes]
                segments.append((side, len(whole), len(whole) + len(part), now))
                whole += part
        return segments


def shapes() -> st.SearchStrategy[Shape]:
    sizes, steps = st.sampled_from((200, 1448, 1448, 70_000)), st.sampled_from((0, 5, 400_000))
    return st.builds(Shape, st.integers(0, 1), sizes, steps)


def test_random_connections_have_the_events_of_one_by_one() -> None:
    """Hardly any exchange is usual, and segments have any size, so sessions read nearly all exchanges."""
    total = Share()

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, 1 << 32), st.sampled_from((bodies.ERRORS, bodies.BATCHES)), st.booleans())
    def holds(seed: int, detail: int, keeps: bool) -> None:
        dice = random.Random(seed)
        comparison = Comparison(detail, keeps)
        for _ in range(dice.randrange(1, 4)):
            comparison.connection(dice.randrange(2), partial(cut, dice, dialogue(dice)))
        counts = (dice.choice((dice.randrange(9), dice.randrange(60), 500)) for _ in count())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairs, "WORTH", dice.choice((0, 0, 8, 256)))
            patch.setattr(pairs, "ROUNDS", dice.choice((1, 2, 16)))
            patch.setattr(pairs, "MANY_ROWS", dice.choice((1, 30, 1 << 16)))
            share = comparison.check(counts)
        total.add(share.by_column, share.all)

    holds()
    assert float(total) > 0.002, total
