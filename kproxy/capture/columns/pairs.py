"""Exchanges of many connections, found all at once in segments that are in order.

Duty: most bytes need no decision: complete requests with the same prefix as an earlier one of the connection, and
complete answers to them, in turn. Both are cut, paired and read by column. A connection's bytes before them (rests of
frames, answers to earlier requests) and the first unusual bytes after them go to its session; so the session alone
decides, and the exchanges do not depend on the reader. After an exchange of its own, columns resume; else the session
gets the remaining bytes. A test compares the two.

Memory: some columns of the segments, and JOINED_BYTES of copies of frames that lie in several segments and must be
read across them. Refuses to know TCP, and why the segments are in order.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from kproxy.capture.columns import lockstep
from kproxy.capture.columns.lanes import FAR, HEADS, Frames, Lanes, Part, Place, Segments
from kproxy.protocol.apis import FETCH
from kproxy.wire import frames
from kproxy.wire.bodies import ERRORS, Logs
from kproxy.wire.bulk import NULL, Bodies, Bulk
from kproxy.wire.captured import CapturedSession
from kproxy.wire.events import BROKER, CLIENT, NONE, Exchange
from kproxy.wire.interest import ApiPlan
from kproxy.wire.pairing import LIMIT
from kproxy.wire.state import Usual

FEWEST = 8  # segments of a connection that are worth columns
WORTH = 256  # segments in all that are left, and pairs that came of the round before, to go round again
ROUNDS = 16

_REQUEST = np.dtype([("length", ">i4"), ("key_version", ">u4"), ("correlation_id", ">i4")])
_RESPONSE = np.dtype([("length", ">i4"), ("correlation_id", ">i4")])
_UNKNOWN = Exchange(ApiPlan(NONE, NONE, "unknown", False), 0, NONE, 0, 0, 0)  # a request that someone else has read


def read(
    whole: memoryview, segments: Segments, parts: Sequence[Part], detail: int, logs: Logs | None = None
) -> Iterator[Bulk]:
    """The exchanges in segments of connections, by column. The sessions emit the others, before and after each yield.

    detail, logs: as the sessions' interest has them; bodies.BATCHES at most. Answers with batches of logs are theirs.
    """
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
        reading = _Reading(whole, segments, clock, [parts[number] for number in begun], detail, logs, feed)
        for bulk in reading.bulks():
            bulk.connection = np.array(begun)[bulk.connection]
            yield bulk
        may_go_on = rounds < ROUNDS and (rounds == 1 or reading.taken >= WORTH)
        begun = [begun[number] for number in reading.settle(may_go_on)]


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


class _Reading:
    """The columns of parts whose sessions stand at known places of a frame."""

    def __init__(
        self,
        whole: memoryview,
        segments: Segments,
        clock: np.ndarray,
        parts: Sequence[Part],
        detail: int,
        logs: Logs | None,
        feed: _Feed,
    ) -> None:
        self.detail = detail
        self.logs = logs
        self._feed = feed
        self._clock = clock
        self._segments = segments
        self._parts = parts
        self._lanes = lanes = Lanes(whole, segments, parts)
        found = (array("q"), array("q"))  # where frames begin, and where the last of a part ends
        firsts: tuple[list[int], list[int]] = ([], [])
        counts, waiting, alone = [], [], []
        for number, part in enumerate(parts):
            session = part.talk.session
            for side in (CLIENT, BROKER):
                firsts[side].append(len(found[side]))
                found[side].extend(lanes.frames(number, side, session.missing(side)))
            asked, answered = (max(len(each) - first[-1] - 1, 0) for each, first in zip(found, firsts, strict=True))
            waits = len(session.pending)
            if not self._are_due(session, found[BROKER][firsts[BROKER][-1] : -1]):
                asked = 0
            counts.append(max(min(asked, answered - waits), 0))
            waiting.append(waits)
            alone.append(asked - counts[-1])
        self._counts = np.array(counts)
        self._waiting = np.array(waiting)  # requests that wait already, whose answers come first
        self._alone = np.array(alone)  # requests behind the pairs
        self._first = np.cumsum(self._counts) - self._counts  # where the pairs of each part begin
        self._part = np.repeat(np.arange(len(parts)), self._counts)
        self._requests = self._frames(found[CLIENT], firsts[CLIENT], self._counts, CLIENT)
        self._waiting *= self._counts > 0
        answers = self._frames(found[BROKER], firsts[BROKER], self._waiting + self._counts, BROKER)
        early = np.cumsum(self._waiting)
        self._responses = answers.some(np.arange(len(self._part)) + early[self._part])
        self._answer_heads = answers.head  # those to requests that wait already are among them:
        self._first_answers = self._first + early - self._waiting
        self._taken = np.zeros(len(parts), np.int64)  # pairs of each part
        self._throttle_ms = np.full(len(self._part), NONE, np.int64)

    def bulks(self) -> Iterator[Bulk]:
        if len(self._part):
            yield from self._read()

    @property
    def taken(self) -> int:
        """Pairs of all parts."""
        return int(self._taken.sum())

    def settle(self, may_go_on: bool) -> list[int]:
        """Give the sessions what is behind the pairs taken; returns the parts that have more for columns."""
        going_on = []
        for number, part in enumerate(self._parts):
            taken = int(self._taken[number])
            first = int(self._first[number])
            behind, answered = None, []
            if taken:
                last = first + taken - 1
                asked, told = (
                    int(found.begin[last] + found.size[last] - found.begin[first])
                    for found in (self._requests, self._responses)
                )
                part.talk.session.passed(taken, (asked, told), int(self._free[last]))
                low = int(self._first_answers[number])
                answered = self._answer_heads[low : low + int(self._waiting[number]) + taken].tolist()
                behind = self._ends(number, first + taken - 1)
            if may_go_on and self._is_apart(number, taken):
                until = self._ends(number, first + taken)
                self._feed(part, behind, until, answered)
                self._drop(part, until)
                if part.talk.session.is_framed and not part.talk.session.pending:
                    going_on.append(number)
                else:
                    self._feed(part)
            else:
                self._feed(part, behind, None, answered)
        if sum(self._parts[number].high - self._parts[number].low for number in going_on) >= WORTH:
            return going_on
        for number in going_on:
            self._feed(self._parts[number])
        return []

    def _is_apart(self, number: int, taken: int) -> bool:
        """Whether what was not taken begins with one exchange, answered before the next one is asked."""
        odd = int(self._first[number]) + taken
        return bool(
            taken + 1 < self._counts[number]
            and self._paired[odd]
            and self._responses.head[odd] < self._requests.head[odd + 1]
        )

    def _ends(self, number: int, pair: int) -> tuple[Place, Place]:
        """Where a pair ends, of each side."""
        asked, told = (
            self._lanes.place(number, side, int(found.begin[pair] + found.size[pair]))
            for side, found in ((CLIENT, self._requests), (BROKER, self._responses))
        )
        return asked, told

    def _drop(self, part: Part, until: tuple[Place, Place]) -> None:
        """The bytes before some places were read."""
        segments = self._segments
        mine = slice(part.low, part.high)
        side, index = segments.side[mine] ^ part.talk.flip, np.arange(part.low, part.high)
        for number, (segment, offset) in enumerate(until):
            read = (side == number) & (index < segment)
            segments.start[mine][read] = segments.end[mine][read]
            if offset:
                segments.start[segment] += offset
        part.low = min(part.high, min(until)[0])

    def _are_due(self, session: CapturedSession, answers: Sequence[int]) -> bool:
        """Whether the first answers are those to the requests that wait."""
        for position, exchange in zip(answers, session.pending, strict=False):
            if self._lanes.correlation_id(position) != exchange.correlation_id:
                return False
        return True

    def _frames(self, begins: "array[int]", firsts: Sequence[int], counts: np.ndarray, side: int) -> Frames:
        """The first frames of each part."""
        before = np.cumsum(counts) - counts
        index = np.arange(int(counts.sum())) + np.repeat(np.array(firsts, np.int64) - before, counts)
        places = np.frombuffer(begins, np.int64)
        return self._lanes.columns(places[index], places[index + 1], side)

    def _read(self) -> Iterator[Bulk]:
        requests, responses, part = self._requests, self._responses, self._part
        every = np.arange(len(part))
        pair = every - self._first[part]  # of its part
        heads = self._lanes.gather(requests, every, _REQUEST)
        answers = self._lanes.gather(responses, every, _RESPONSE)
        wrong = (heads["correlation_id"] != answers["correlation_id"]) | (responses.head <= requests.last)
        for side, found in ((CLIENT, requests), (BROKER, responses)):
            wrong |= found.limit - found.at < HEADS[side]
        self._paired = ~wrong
        groups = []
        error_code = np.full(len(part), NULL, np.int64)
        replica_id = np.full(len(part), NONE, np.int64)
        has_rack = np.zeros(len(part), np.int64)
        for key_version in sorted(set(heads["key_version"].tolist())):
            which = np.flatnonzero(heads["key_version"] == key_version)
            group = _Group(self, which, key_version)
            groups.append(group)
            wrong[which] |= group.wrong
            self._throttle_ms[which] = group.throttle_ms
            error_code[which] = group.error_code
            replica_id[which] = group.replica_id
            has_rack[which] = group.has_rack
        some = np.flatnonzero(self._counts > 0)
        answered = np.searchsorted(self._answer_heads, requests.head) - self._first_answers[part]
        in_flight = self._waiting[part] + pair - answered
        most = np.maximum.reduceat(in_flight, self._first[some]) + 1 + self._alone[some]
        wrong[self._first[some][most >= LIMIT]] = True  # the session gives up the oldest of so many
        first_wrong = np.minimum.reduceat(np.where(wrong, every, FAR), self._first[some])
        self._taken[some] = np.minimum(first_wrong - self._first[some], self._counts[some])
        self._lead_up()

        clock = self._clock
        request_end = clock[requests.last]
        response_start, response_end = clock[responses.first], clock[responses.last]
        self._free = response_end
        mute_ns = np.zeros(len(part), np.int64)
        for group in groups:
            if group.plan is not None and group.plan.throttled_after_answer:
                mute_ns[group.which] = np.maximum(self._throttle_ms[group.which], 0) * 1_000_000
        freed = np.concatenate(([0], response_end[:-1]))
        sessions = [each.talk.session for each in self._parts]
        freed[self._first[some]] = np.array([session.free_at for session in sessions], np.int64)[some]
        request_start = clock[requests.first]
        queue_ns = np.maximum(np.minimum(freed, response_start) - request_start, 0)
        muted_ns = np.zeros(len(part), np.int64)
        self._split_waits(mute_ns, freed, (request_start, response_start, response_end), (queue_ns, muted_ns))
        columns = {
            "number": pair + np.array([session.number for session in sessions])[part],
            "request_start": request_start,
            "request_end": request_end,
            "response_start": response_start,
            "response_end": response_end,
            "queue_ns": queue_ns,
            "muted_ns": muted_ns,
            "correlation_id": heads["correlation_id"].astype(np.int64),
            "request_bytes": requests.size,
            "response_bytes": responses.size,
            "error_code": error_code,
            "replica_id": replica_id,
            "has_rack": has_rack,
            "throttle_ms": self._throttle_ms,
            "in_flight": in_flight,
        }
        taken = pair < self._taken[part]
        for group in groups:
            bulk = group.bulk(taken, columns)
            if bulk is not None:
                yield bulk

    def _split_waits(
        self,
        mute_ns: np.ndarray,
        freed: np.ndarray,
        times: tuple[np.ndarray, np.ndarray, np.ndarray],
        waits: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Write queue_ns and muted_ns of connections that were throttled, pair by pair, as their sessions do.

        `mute_ns`: how long each answer mutes its connection. The sessions have the intervals afterwards.
        """
        throttled = set(self._part[mute_ns > 0].tolist())
        for number in np.flatnonzero(self._taken).tolist():
            mutes = self._parts[number].talk.session.mutes
            if not mutes and number not in throttled:
                continue
            first = int(self._first[number])
            for pair in range(first, first + int(self._taken[number])):
                begun, start, end = (int(column[pair]) for column in times)
                if mutes:
                    waits[0][pair], waits[1][pair] = mutes.split(begun, int(freed[pair]), start)
                if mute_ns[pair]:
                    mutes.mute(end, int(mute_ns[pair]))

    def _lead_up(self) -> None:
        """Pass the bytes before the taken pairs to the sessions."""
        for number in np.flatnonzero(self._taken).tolist():
            part, first = self._parts[number], int(self._first[number])
            asked, answered = (
                self._lanes.place(number, side, int(found.begin[first]))
                for side, found in ((CLIENT, self._requests), (BROKER, self._responses))
            )
            self._feed(part, until=(asked, answered))

    # --- for the groups ----------------------------------------------------------------------------------------------

    def openings(self, key_version: int, which: np.ndarray) -> tuple[dict[int, Usual], np.ndarray]:
        """The prefixes of requests of a kind, by number, and the number for each of these requests; -1: none."""
        of_part = np.full(len(self._parts), -1)
        found: dict[int, Usual] = {}
        places: dict[bytes, int] = {}
        for number in np.flatnonzero(np.bincount(self._part[which])).tolist():
            opening = self._parts[number].talk.openings.get(key_version)
            if opening is not None:
                place = places.setdefault(opening[3], len(places))
                found[place] = opening
                of_part[number] = place
        return found, of_part[self._part[which]]

    def begins(self, which: np.ndarray, opening: Usual) -> np.ndarray:
        """Which of some requests begin with this prefix."""
        _, size, _, prefix, _, _ = opening
        lanes, requests = self._lanes, self._requests
        if not prefix:
            return np.asarray(requests.size[which] >= size)
        taken = lanes.gather(requests, which, np.dtype(f"V{len(prefix)}"), frames.REQUEST_HEAD_BYTES)
        alike = (taken.view(np.uint8).reshape(len(which), -1) == np.frombuffer(prefix, np.uint8)).all(axis=1)
        there = requests.limit[which] - requests.at[which] >= size
        return np.asarray(alike & there & (requests.size[which] >= size))

    def bodies(
        self, side: int, which: np.ndarray, plan: ApiPlan, detail: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, Bodies | None] | None:
        """(unread frames, throttle_ms, error_code, replica_id, has_rack, the rest) of the frames of a kind.

        None: they have to be read one by one.
        """
        reader = lockstep.reader(plan.api_key, plan.api_version, ("request", "response")[side], detail)
        if reader is None:
            return None
        found = (self._requests, self._responses)[side]
        lanes = self._lanes
        unread = np.zeros(len(which), bool)
        throttle_ms = np.full(len(which), NONE, np.int64)
        error_code = np.full(len(which), NULL, np.int64)
        replica_id = np.full(len(which), NONE, np.int64)
        has_rack = np.zeros(len(which), np.int64)
        bodies: list[tuple[Bodies, np.ndarray]] = []
        in_place = np.flatnonzero(~found.is_joined[which])
        for place, is_joined in ((in_place, False), (np.flatnonzero(found.is_joined[which]), True)):
            if is_joined:
                place = np.concatenate((place, in_place))
            if not len(place):
                continue
            mine = which[place]
            at, size = found.at[mine], found.size[mine]
            begin = at if is_joined else found.begin[mine]
            limit = found.limit[mine] - at + begin
            result = reader.read(
                np.frombuffer(lanes.joined, np.uint8) if is_joined else lanes.data,
                begin + HEADS[side],
                limit,
                begin + size,
                at - begin,
                None if is_joined else lanes.seat,
            )
            unread[place] = result.left | result.short
            throttle_ms[place], error_code[place] = result.throttle_ms, result.error_code
            replica_id[place], has_rack[place] = result.replica_id, result.has_rack
            if result.bodies is not None:
                bodies.append((result.bodies, place))
            if not is_joined:
                in_place = place[result.short]
                lanes.join_some(found, which[in_place])
                in_place = in_place[found.is_joined[which[in_place]]]
        return unread, throttle_ms, error_code, replica_id, has_rack, Bodies.together(bodies) if bodies else None


class _Group:
    """The pairs of one API and version."""

    def __init__(self, reading: _Reading, which: np.ndarray, key_version: int) -> None:
        self.which = which
        self._part = reading._part[which]
        self._openings, self._opening = reading.openings(key_version, which)
        self.wrong = self._opening < 0
        self.throttle_ms: np.ndarray | int = NONE
        self.error_code: np.ndarray | int = NULL
        self.replica_id: np.ndarray | int = NONE
        self.has_rack: np.ndarray | int = 0
        self.plan: ApiPlan | None = None
        self._bodies: list[Bodies | None] = [None, None]
        for place, opening in self._openings.items():
            mine = np.flatnonzero(self._opening == place)
            self.wrong[mine] |= ~reading.begins(which[mine], opening)
            self.plan = opening[4]
        if self.plan is None:
            return
        plan = self.plan
        if plan.kept is not None and plan.api_key not in plan.kept.only_failed:
            self.wrong[:] = True  # columns hold no frames
            return
        for side, is_read, detail in (
            (CLIENT, plan.request_reader is not None, reading.detail),
            (BROKER, plan.scan is not None, reading.detail if plan.response_reader is not None else ERRORS),
        ):
            if not is_read:
                continue
            found = reading.bodies(side, which, plan, detail)
            if found is None:
                self.wrong[:] = True
                return
            unread, throttle_ms, error_code, replica_id, has_rack, self._bodies[side] = found
            self.wrong |= unread
            if side == BROKER:
                self.throttle_ms, self.error_code = throttle_ms, error_code
                if plan.kept is not None:
                    self.wrong |= (error_code != NULL) & (error_code != 0)
                answers = self._bodies[BROKER]
                if plan.api_key == FETCH and reading.logs is not None and answers is not None:
                    self.wrong[_with_logs(reading.logs, answers)] = True  # columns hold no batches
            else:
                self.replica_id, self.has_rack = replica_id, has_rack

    def bulk(self, taken: np.ndarray, columns: dict[str, np.ndarray]) -> Bulk | None:
        """Of the pairs that are taken."""
        mine = taken[self.which]
        if self.plan is None or not mine.any():
            return None
        which = self.which[mine]
        asked, answered = (None if each is None else each.some(mine) for each in self._bodies)
        return Bulk(
            self.plan,
            self._part[mine],
            self._opening[mine],
            [opening[5] for opening in self._openings.values()],
            {name: column[which] for name, column in columns.items()},
            asked,
            answered,
        )


def _with_logs(logs: Logs, bodies: Bodies) -> np.ndarray:
    """The exchanges whose answers have batches of coordinators' logs, as far as is known."""
    is_log = np.array([logs.may_be(*topic) for topic in bodies.topics], bool)
    return bodies.of[np.take(is_log, bodies.topic) & (bodies.numbers["bytes"] > 0)]
