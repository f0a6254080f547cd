"""Exchanges of many connections, read at once by the compiled core in segments that are in order.

Duty: most bytes need no decision: complete requests with the same prefix as an earlier one of the connection, and
complete responses to them, in turn. The core (`native/src/capture.rs`) cuts, pairs and reads these. A connection's
bytes before them (rests of frames, responses to earlier requests) and the first other bytes after them go to its
session; so the session alone decides, and the exchanges do not depend on the reader. After an exchange of its own, the
core resumes; else the session gets the remaining bytes. A test compares the two.

Memory: some numbers of each segment, and about MANY_ROWS rows with their texts. Refuses to know TCP, and why the
segments are in order.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from kproxy.capture.columns import programs
from kproxy.capture.columns.segments import Part, Place, Segments
from kproxy.protocol.apis import FETCH
from kproxy.protocol.plans import uuid_of
from kproxy.protocol.records import V2, BatchHeader
from kproxy.wire.bodies import ERRORS, Logs
from kproxy.wire.events import BROKER, CLIENT, NONE, Exchange
from kproxy.wire.interest import ApiPlan
from kproxy.wire.offline.bulk import Bodies, Bulk
from kproxy.wire.pairing import LIMIT
from kproxy.wire.state import Usual

FEWEST = 8  # segments of a connection that are worth a call of the core
WORTH = 64  # segments in all that are left, and exchanges that came of the round before, to go round again
ROUNDS = 64
MANY_ROWS = 1 << 16  # exchanges and topic-partitions, 150 bytes each, after which the core ends a round

FAR = 1 << 62, 0  # a place in later segments
COLUMNS = (
    *("connection", "prefix", "number", "request_start", "request_end", "response_start", "response_end", "queue_ns"),
    *("correlation_id", "request_bytes", "response_bytes", "error_code", "replica_id", "has_rack", "throttle_ms"),
    "in_flight",
)  # columns of an exchange, as in native/src/capture.rs

_HEADER = np.dtype(
    [
        (name, {"b": "i1", "h": ">i2", "i": ">i4", "I": ">u4", "q": ">i8"}[code])
        for name, code in zip(BatchHeader._fields, V2.format[1:], strict=True)
    ]
)
_UNKNOWN = Exchange(ApiPlan(NONE, NONE, "unknown", False), 0, NONE, 0, 0, 0)  # a request that someone else has read


class _Taken(NamedTuple):
    """The result of the core for one part."""

    exchanges: int  # how many
    begin: tuple[Place | None, Place | None]  # of both sides: before the first of them,
    end: tuple[Place | None, Place | None]  # behind the last,
    behind_next: tuple[Place | None, Place | None] | None  # and behind the next one, if it is apart from later ones
    answered: list[int]  # the segments of the headers of its responses, with those to requests that waited
    received: tuple[int, int]  # bytes of both sides
    free_at: int  # when the last response ended
    opening: int  # the place of the last request's prefix


class PairReader:
    """Reads the exchanges in segments of connections. detail: as the sessions' interest has it, `BATCHES` at most.

    logs: responses with batches of coordinators' logs are left to the sessions.
    """

    def __init__(self, core: ModuleType, detail: int, logs: Logs | None = None) -> None:
        self._core = core.Reader(LIMIT, MANY_ROWS)
        self._detail = detail
        self._logs = logs
        self._plans: dict[int, ApiPlan] = {}  # plans with frames that the core can read, by key and version

    def read(self, whole: memoryview, segments: Segments, parts: Sequence[Part]) -> Iterator[Bulk]:
        """Read the exchanges in segments of connections. The sessions emit the others, before and after each yield."""
        clock = _clock(segments.time_ns, parts)
        feed = _Feed(whole, segments, clock)
        begun = []
        for number, part in enumerate(parts):
            low = part.low
            while part.high - part.low >= FEWEST and not part.talk.session.is_framed:
                feed(part, until=((part.low + 1, 0), (part.low + 1, 0)))
                part.low += 1
            if part.high - part.low >= FEWEST:
                begun.append(number)
            else:
                feed(part)
            if low < part.high:
                part.clock_ns = int(clock[part.high - 1])
        rounds = 0
        while begun:
            rounds += 1
            some = [parts[number] for number in begun]
            openings = self._openings(some)
            given = [_Given(part, of_part) for part, of_part in zip(some, openings.of_parts, strict=True)]
            found, groups, is_full = self._core.read(
                whole,
                [np.ascontiguousarray(each, np.int64) for each in (segments.side, segments.start, segments.end, clock)],
                given,
                self._is_log,
            )
            taken = [_Taken(*each) for each in found]
            some, left = some[: len(taken)], begun[len(taken) :]  # left: to the next round, because of MANY_ROWS
            for part, of_part in zip(some, taken, strict=True):
                if of_part.exchanges:
                    feed(part, until=_places(of_part.begin))  # what comes before
            prefixes = [usual[5] for usual in openings.usual]
            bulks = [self._bulk(group, prefixes) for group in groups]
            _wait(bulks, some, given)
            yield from _of_parts(bulks, begun)
            del groups, bulks  # the next round needs their memory
            for part, of_part in zip(some, taken, strict=True):
                if of_part.exchanges:
                    usual = part.talk.openings[openings.usual[of_part.opening][2]]
                    part.talk.session.passed(of_part.exchanges, of_part.received, of_part.free_at, usual)
            is_worth_it = rounds == 1 or is_full or sum(each.exchanges for each in taken) >= WORTH
            going_on = _settle(some, taken, feed, segments, rounds < ROUNDS and is_worth_it)
            begun = [*(begun[place] for place in going_on), *left]

    def _openings(self, parts: Sequence[Part]) -> "_Openings":
        """The prefixes of the parts' requests, of kinds that the core can read."""
        found = _Openings([], [])
        places: dict[tuple[int, bytes], int] = {}
        for part in parts:
            of_part = []
            for key_version, usual in part.talk.openings.items():
                _, size, _, prefix, plan, _ = usual
                if key_version not in self._plans:
                    self._learn(key_version, plan)
                place = places.setdefault((key_version, prefix), len(places))
                if place == len(found.usual):
                    found.usual.append(usual)
                of_part.append((key_version, size, prefix, place))
            found.of_parts.append(of_part)
        return found

    def _learn(self, key_version: int, plan: ApiPlan) -> None:
        """Let the core read frames of an API and version, if it can read them and nobody keeps whole ones."""
        self._plans[key_version] = plan
        if plan.kept is not None and plan.api_key not in plan.kept.only_failed:
            return
        found = []
        is_read = plan.request_reader is not None, plan.scan is not None
        for side, is_needed, detail in zip(("request", "response"), is_read, self._details(plan), strict=True):
            program = programs.reading(plan.api_key, plan.api_version, side, detail) if is_needed else None
            if is_needed and program is None:
                return
            found.append(program)
        may_have_logs = plan.api_key == FETCH and self._logs is not None and found[1] is not None
        self._core.learn(key_version, *found, plan.kept is not None, may_have_logs)

    def _details(self, plan: ApiPlan) -> tuple[int, int]:
        """Return the levels of detail of request and response."""
        return self._detail, self._detail if plan.response_reader is not None else ERRORS

    def _is_log(self, name: bytes | None, identity: bytes | None) -> bool:
        return self._logs is not None and self._logs.may_be(*_topic(name, identity))

    def _bulk(self, group: tuple[Any, ...], prefixes: Sequence[tuple[Any, ...]]) -> Bulk:
        key_version, columns, *bodies = group
        plan = self._plans[key_version]
        values = {name: _int64s(column) for name, column in zip(COLUMNS, columns, strict=True)}
        values["muted_ns"] = np.zeros(len(values["number"]), np.int64)
        asked, answered = (
            bodies_of(each) if each and detail else None
            for each, detail in zip(bodies, self._details(plan), strict=True)
        )
        return Bulk(plan, values.pop("connection"), values.pop("prefix"), prefixes, values, asked, answered)


class _Openings(NamedTuple):
    """Prefixes of requests; `of_parts` has (key and version, size, prefix, place in `usual`)."""

    of_parts: list[list[tuple[int, int, bytes, int]]]
    usual: list[Usual]


class _Given:
    """A part as the core takes it."""

    def __init__(self, part: Part, openings: list[tuple[int, int, bytes, int]]) -> None:
        session = part.talk.session
        self.low, self.high, self.flip = part.low, part.high, part.talk.flip
        self.number, self.free_at = session.number, session.free_at
        self.missing = session.missing(CLIENT), session.missing(BROKER)
        self.pending = [exchange.correlation_id for exchange in session.pending]
        self.openings = openings


class _Feed:
    """Hands bytes of parts to their sessions, in the order of the segments."""

    def __init__(self, whole: memoryview, segments: Segments, clock: np.ndarray) -> None:
        self._whole = whole
        self._segments = Segments(segments.side, segments.start, segments.end, clock)

    def __call__(
        self,
        part: Part,
        behind: tuple[Place, Place] | None = None,
        until: tuple[Place, Place] | None = None,
        answered: Sequence[int] = (),
    ) -> None:
        """The bytes of both sides from some places on, of the part's beginning otherwise, or until they are reached.

        answered: the segments at which those requests were answered that the session does not know. Until then they
        wait with those that it knows.
        """
        talk = part.talk
        receive, flip, pending = talk.receive, talk.flip, talk.session.pending
        whole = self._whole
        first = part.low if behind is None else min(min(behind)[0], part.high)
        last = part.high if until is None else min(max(until)[0] + 1, part.high)
        waiting = len(answered)
        if waiting:
            pending[:0] = [_UNKNOWN] * waiting
        for index, (side, start, end, time_ns) in enumerate(self._segments.rows(first, last), first):
            if waiting:
                passed = bisect_right(answered, index, lo=len(answered) - waiting) - len(answered) + waiting
                del pending[:passed]
                waiting -= passed
            if behind is not None and index <= behind[side ^ flip][0]:
                segment, offset = behind[side ^ flip]
                start = start + offset if index == segment else end
            if until is not None and index >= until[side ^ flip][0]:
                segment, offset = until[side ^ flip]
                end = start + offset if index == segment else start
            if start < end:
                receive(side, whole[start:end], time_ns)
        del pending[:waiting]


def _clock(time_ns: np.ndarray, parts: Sequence[Part]) -> np.ndarray:
    """The latest time so far on each connection."""
    clock = time_ns.copy()
    for part in parts:
        mine = clock[part.low : part.high]
        if len(mine):
            mine[0] = max(int(mine[0]), part.clock_ns)
            np.maximum.accumulate(mine, out=mine)
    return clock


def _of_parts(bulks: Sequence[Bulk], begun: Sequence[int]) -> Iterator[Bulk]:
    """Yield bulks with the numbers of all parts, instead of those in a round, for their connections."""
    for bulk in bulks:
        bulk.connection = np.array(begun)[bulk.connection]
        yield bulk


def _wait(bulks: Sequence[Bulk], parts: Sequence[Part], given: Sequence["_Given"]) -> None:
    """Correct the waits of exchanges that the core cannot know.

    Those are of the first exchange of a part whose session has read responses before it, and all of connections that
    were throttled, pair by pair, as their sessions do. The sessions have the intervals afterwards.
    """
    if not bulks:
        return
    numbers = np.array([each.number for each in given])
    is_muted = np.array([bool(part.talk.session.mutes) for part in parts])
    for bulk in bulks:
        if bulk.plan.throttled_after_answer:
            is_muted[bulk.connection[bulk.columns["throttle_ms"] > 0]] = True
    rows: list[tuple[int, int, int, int]] = []  # (part, number, bulk, row)
    for index, bulk in enumerate(bulks):
        number = bulk.columns["number"]
        which = np.flatnonzero(is_muted[bulk.connection] | (number == numbers[bulk.connection]))
        rows += [
            (place, at, index, row)
            for place, at, row in zip(
                bulk.connection[which].tolist(), number[which].tolist(), which.tolist(), strict=True
            )
        ]
    free_at = last = NONE
    for place, _, index, row in sorted(rows):
        session, columns = parts[place].talk.session, bulks[index].columns
        if place != last:
            last, free_at = place, session.free_at
        begun, start, end = (int(columns[name][row]) for name in ("request_start", "response_start", "response_end"))
        columns["queue_ns"][row], columns["muted_ns"][row] = session.mutes.split(begun, free_at, start)
        throttle_ms = int(columns["throttle_ms"][row])
        if throttle_ms > 0 and bulks[index].plan.throttled_after_answer:
            session.mutes.mute(end, throttle_ms * 1_000_000)
        free_at = end


def _settle(
    parts: Sequence[Part], taken: Sequence[_Taken], feed: _Feed, segments: Segments, may_go_on: bool
) -> list[int]:
    """Give the sessions what is behind the exchanges taken; returns the places of parts that have more for the core."""
    going_on = []
    for place, (part, of_part) in enumerate(zip(parts, taken, strict=True)):
        behind, answered = (_places(of_part.end), of_part.answered) if of_part.exchanges else (None, ())
        if may_go_on and of_part.behind_next is not None:
            until = _places(of_part.behind_next)
            feed(part, behind, until, answered)
            _drop(part, segments, until)
            if part.talk.session.is_framed and not part.talk.session.pending:
                going_on.append(place)
            else:
                feed(part)
        else:
            feed(part, behind, None, answered)
    if sum(parts[place].high - parts[place].low for place in going_on) >= WORTH:
        return going_on
    for place in going_on:
        feed(parts[place])
    return []


def _drop(part: Part, segments: Segments, until: tuple[Place, Place]) -> None:
    """The bytes before some places were read."""
    mine = slice(part.low, part.high)
    side, index = segments.side[mine] ^ part.talk.flip, np.arange(part.low, part.high)
    for number, (segment, offset) in enumerate(until):
        read = (side == number) & (index < segment)
        segments.start[mine][read] = segments.end[mine][read]
        if offset:
            segments.start[segment] += offset
    part.low = min(part.high, min(until)[0])


def _places(found: tuple[Place | None, Place | None]) -> tuple[Place, Place]:
    asked, answered = found
    return asked or FAR, answered or FAR


def bodies_of(rows: dict[str, Any]) -> Bodies:
    """Return the rows of bodies as the core has read them."""
    words = [None if word is None else str(word, "utf-8", "replace") for word in rows["words"]]
    texts: dict[str, Sequence[str | None]] = {}
    for name in ("group_id", "metadata"):
        column = _int64s(rows[name])
        if (column >= 0).any():
            texts[name] = [words[place] if place >= 0 else None for place in column.tolist()]
    return Bodies(
        _int64s(rows["of"]),
        [_topic(*topic) for topic in rows["topics"]],
        _int64s(rows["topic"]),
        {name: _int64s(column) for name, column in zip(programs.COLUMNS, rows["numbers"], strict=True)},
        texts,
        _int64s(rows["batch_of"]),
        np.frombuffer(rows["batches"], _HEADER),
    )


def _topic(name: bytes | None, identity: bytes | None) -> tuple[str | None, UUID | None]:
    """A topic as the sessions have it."""
    topic = None if name is None else str(name, "utf-8", "replace")
    return topic, None if identity is None else uuid_of(identity)


def _int64s(column: bytearray) -> np.ndarray:
    return np.frombuffer(column, np.int64)
